"""The blocks of a transformer: a chain of modules that take and return all tokens, each with one attention inside."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from camkit.engine.attach import forward_hooks, starts
from camkit.engine.attention import AttentionRecorder
from camkit.engine.head import answering
from camkit.engine.nested import feature_tensor, with_tensor


@dataclass(frozen=True, eq=False)
class Block:
    """One call of one block.

    Attributes:
        module: the block.
        arguments: the tensors that it took.
        output: what it returned.
        path: the keys that lead to the tokens in its output.
        tokens: these tokens, with their graph: (N, L, C) or (L, N, C).
    """

    module: nn.Module
    arguments: list[Tensor]
    output: Any
    path: tuple[Any, ...]
    tokens: Tensor


@contextmanager
def noting_blocks(model: nn.Module, attention: AttentionRecorder) -> Iterator[dict[int, Block]]:
    """Note the block around each attention map of a pass, by the number of the map.

    It is the outermost item of a list of modules that contains this attention and no other and returns tokens; or the
    outermost module, if the model keeps its blocks in no list.
    """
    blocks: dict[int, Block] = {}
    running: list[tuple[nn.Module, int]] = []
    listed = {
        child for parent in model.modules() if isinstance(parent, (nn.ModuleList, nn.Sequential)) for child in parent
    }

    def note(module: nn.Module, arguments: list[Tensor], output: Any) -> None:
        before = len(attention.maps)
        while running:
            started, before = running.pop()
            if started is module:
                break
        found = feature_tensor(output)
        if len(attention.maps) != before + 1 or found is None or found[1].dim() != 3:
            return
        if before not in blocks or module in listed or blocks[before].module not in listed:
            blocks[before] = Block(module, arguments, output, *found)

    modules = list(model.modules())
    with (
        starts(modules, lambda module: running.append((module, len(attention.maps)))),
        forward_hooks(dict.fromkeys(modules, note)),
    ):
        yield blocks


def are_chained(blocks: list[Block]) -> bool:
    """Tell whether each block takes exactly the tokens that the one before it returned."""
    pairs = itertools.pairwise(blocks)
    return all(any(argument is before.tokens for argument in block.arguments) for before, block in pairs)


def after_blocks(model: nn.Module, images: Tensor, blocks: list[Block]) -> Callable[[Tensor], Any]:
    """Return what comes after the blocks as a function from their last tokens to the model's output.

    The blocks do not run again. What comes before them does; it is cheap in a transformer.
    """

    def run(tokens: Tensor) -> Any:
        answers: defaultdict[nn.Module, list[Any]] = defaultdict(list)
        for block in blocks:
            replaced = tokens if block is blocks[-1] else block.tokens.detach()
            answers[block.module].append(with_tensor(block.output, block.path, replaced.clone()))
        with answering(answers):
            return model(images.clone())

    return run
