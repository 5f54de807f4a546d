"""Attention maps of one pass, whatever computes them: fused kernels, ``nn.MultiheadAttention`` or the model's own code.

The model is not changed, and neither are its settings. While the mode is on, PyTorch hands over each call of one of its
functions in the current thread. A fused attention is computed step by step instead, so that its map softmax(QK') is a
tensor of the graph; and a softmax over the last axis may be the map of an attention that the model computes itself.
Each attention lies in a block: a module of a chain whose modules take and return all tokens.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from camkit.engine.attach import forward_hooks, starts
from camkit.engine.cut import Saved
from camkit.engine.head import answering
from camkit.engine.nested import feature_tensor, with_tensor

_OPENED = (functional.multi_head_attention_forward, torch.autograd.grad)
"""Functions of PyTorch that compute attention: the second if activation checkpointing repeats a part of the pass."""

_SOFTMAX = (functional.softmax, torch.softmax, Tensor.softmax, torch.special.softmax)


class AttentionRecorder(TorchFunctionMode):
    """Keeps the attention maps of one pass, as tensors (N, heads, queries, keys) that can be differentiated.

    Args:
        pictures: the number N of pictures in the batch.

    Attributes:
        maps: the maps, in the order in which they are computed.
        others: the shapes of those that do not belong to one picture each, such as maps of windows.
        recording: switch this off when the pass is over; activation checkpointing computes parts of it again.
    """

    def __init__(self, pictures: int) -> None:
        super().__init__()
        self.maps: list[Saved] = []
        self.others: list[tuple[int, ...]] = []
        self.recording = True
        self._pictures = pictures
        self._open = {function: _open(function) for function in _OPENED}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one of PyTorch's functions, or what takes its place."""
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if func in _OPENED:
            with self:
                return self._open[func](*args, **kwargs)
        result = func(*args, **kwargs)
        if func in _SOFTMAX and _axis(args, kwargs) in (-1, result.dim() - 1):
            return self._kept(result)
        return result

    def _attend(
        self,
        query: Float[Tensor, "*n queries c"],
        key: Float[Tensor, "*m keys c"],
        value: Float[Tensor, "*m keys d"],
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Compute what ``scaled_dot_product_attention`` computes, by the formula in its documentation."""
        if enable_gqa:
            key, value = (part.repeat_interleave(query.shape[-3] // part.shape[-3], -3) for part in (key, value))
        logits = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.mT
        if is_causal:
            attn_mask = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            logits = logits.masked_fill(~attn_mask, -math.inf)
        elif attn_mask is not None:
            logits = logits + attn_mask
        maps = self._kept(logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32)))
        return functional.dropout(maps, dropout_p).to(value.dtype) @ value

    def _kept(self, result: Tensor) -> Tensor:
        """Keep a softmax if it can be a map of attention, and return it as a part of the graph."""
        if result.dim() < 3:
            return result
        # With three axes, the heads of one picture after another are on the first. More than four are windows.
        whole = result.dim() == 4 and len(result) == self._pictures
        if not whole and (result.dim() != 3 or len(result) % self._pictures):
            if self.recording:
                self.others.append(tuple(result.shape))
            return result
        torch.set_grad_enabled(True)  # also inside a no_grad block of the model
        maps = result.reshape(self._pictures, -1, *result.shape[-2:])
        if not maps.requires_grad:
            maps = maps.detach().requires_grad_()
        if self.recording:
            self.maps.append(saved := Saved(maps, maps))
            maps.register_hook(saved.keeper())
        return maps.reshape(result.shape)


def _axis(args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Return the axis that a call of softmax names; None if it names none: the default is not a map's last."""
    given = [named[name] for name in ("dim", "axis") if name in named] or args[1 - ("input" in named) :]
    return given[0] if given else None


def _open(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of one of PyTorch's functions that runs while a mode is on, so that the mode sees what it calls.

    The original begins by asking whether a mode is on, and would be handed over for ever.
    """
    assert isinstance(function, FunctionType)
    names = function.__globals__ | {"has_torch_function": lambda _: False}
    return FunctionType(function.__code__, names, function.__name__, function.__defaults__)


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
