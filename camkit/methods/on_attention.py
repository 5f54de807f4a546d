"""Run a transformer once, and differentiate its attention maps for the methods that read them.

Attention may be computed by fused kernels, ``nn.MultiheadAttention`` or the model's own code. The model is not changed,
and neither are its settings. While the mode is on, PyTorch hands over each call of one of its functions in the current
thread. A fused attention is computed step by step instead, so that its map softmax(QK') is a tensor of the graph; and a
softmax over the last axis may be the map of an attention that the model computes itself. Each attention lies in a
block: a module of a chain whose modules take and return all tokens.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from camkit.engine.attach import (
    contiguous_gradients,
    feature_tensor,
    forward_hooks,
    hooked,
    starts,
    tensors_in,
    with_tensor,
)
from camkit.engine.cut import Saved, Tape
from camkit.engine.guard import ModelRecord, interruptible
from camkit.engine.head import answering
from camkit.engine.passes import SAME, Capture, Forward, Pass, are_alike, is_absent, on_grid, quiet_pass, unlike
from camkit.errors import MethodError
from camkit.methods.registry import Method
from camkit.targets.classes import fixed_target
from camkit.targets.scores import Scores, maps_of
from camkit.types import LayerRef, Layout

_OPENED = (functional.multi_head_attention_forward, torch.autograd.grad)
"""Functions of PyTorch that compute attention: the second if activation checkpointing repeats a part of the pass."""


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
        if func is functional.linear:  # without gradients of the weights, the graph keeps no inputs
            args = tuple(each.detach() if isinstance(each, nn.Parameter) else each for each in args)
        result = func(*args, **kwargs)
        if func not in (functional.softmax, torch.softmax, Tensor.softmax, torch.special.softmax):
            return result
        given = [kwargs[name] for name in ("dim", "axis") if name in kwargs] or args[1 - ("input" in kwargs) :]
        # Without an axis, the default is not a map's last.
        return self._kept(result) if given and given[0] in (-1, result.dim() - 1) else result

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
        whole = result.dim() == 4 and result.shape[0] == self._pictures
        if not whole and (result.dim() != 3 or result.shape[0] % self._pictures):
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


_OTHERS = "use 'gradcam' or 'hirescam'"


class _Run:
    """A pass of a transformer whose graph is kept.

    Attributes:
        options: how it is run.
        name: that of the method that it is run for.
        forward: what it left.
        attention: the attention maps of all layers; the last may be that of an attention pool. The mode is on.
        layout: the layout of the model's tokens.
        tokens: how many tokens there are, prefix and all others included.
    """

    def __init__(self, options: Pass, method: Method, forward: Forward, attention: AttentionRecorder) -> None:
        self.options, self.name, self.forward, self.attention = options, method.name, forward, attention
        ((ref, self.layout),) = forward.layouts.items()
        axis = _AXES.get(self.layout.kind)
        output = forward.tape.layers[ref].output
        self.tokens = math.prod(self.layout.grid) if axis is None else output.shape[axis]

    def gradients(self, scored: Scores, maps: Sequence[Saved]) -> list[Tensor]:
        """Return the gradients of a score with respect to some maps, in float32; sets ``reached`` of each."""
        for saved in maps:
            saved.reached = False
        if self.options.inputs.shape[0] == 1 and self.options.inputs.device.type == "cpu":
            contiguous_gradients(scored.values)
        tape = Tape({LayerRef("attention", number): saved for number, saved in enumerate(maps, start=1)})
        tape.differentiate(scored, keep_graph=True, fp16=self.options.precision == "fp16")
        return [saved.gradients.pop().float() for saved in maps]


def of_attention(options: Pass, method: Method) -> Capture:
    """Run the model once with one layer whose output has all tokens, and weigh what the method needs of its attention.

    Raises:
        MethodError: camkit sees no attention maps over all tokens, the score does not depend on them in a
            differentiable way, or the method cannot work on this model.
    """
    attention, by_layer = AttentionRecorder(options.inputs.shape[0]), method.needs == "attention-by-layer"
    during = noting_blocks(options.model, attention) if by_layer else None
    # Gradients are on from the start: the end of a no_grad block of the model restores this mode.
    with options.forward(attention, during=during, gradients=False, leaf=True) as forward, interruptible():
        attention.recording = False
        run, scores = _Run(options, method, forward, attention), forward.scores()
        _check_maps(attention, run.tokens, method.name)
        nothing = torch.zeros(options.inputs.shape[0], run.tokens, device=options.inputs.device)
        given = _by_layer(run, scores) if by_layer else _by_score(run, differentiates=method.needs != "attention")
        relevances = [nothing if each is None else method.weigh(*each) for each in given]
        (features,) = forward.features()
        by_target = tuple(on_grid(relevance, run.layout) for relevance in relevances)
        return forward.captured([replace(features, by_target=by_target)], scores)


_AXES: Mapping[str, int] = {"tokens": 1, "tokens_last": 2, "sequence_first": 0}
"""The axis of the tokens in each layout of tokens."""


def check_cells(
    model: nn.Module, image: Float[Tensor, "1 c *size"], layout: Layout, method: str, record: ModelRecord
) -> None:
    """Check that all tokens of a grid depend on the picture before the first attention mixes them.

    Otherwise a class token or padding is among them. This runs two passes.

    Raises:
        MethodError: a token does not depend on it.
    """
    before, after = (_tokens_before_attention(model, each, layout, record) for each in (image, unlike(image)))
    if before is None or after is None or before.shape != after.shape:
        return
    axis = _AXES[layout.kind]
    changes = (after - before).abs().movedim(axis, 0).flatten(1).amax(1)
    cells = changes[layout.prefix :][: math.prod(layout.grid)]
    # A token that changes by less than this share of the largest change does not depend on the picture
    if bool((cells <= 1e-4 * changes.amax()).any()):
        raise MethodError(
            f"{method!r} needs the picture's tokens, but in this model camkit cannot tell them from a class token "
            f"or padding; {_OTHERS} at the layer that makes the patches"
        )


def _tokens_before_attention(
    model: nn.Module, image: Tensor, layout: Layout, record: ModelRecord
) -> Float[Tensor, "_ _ _"] | None:
    """Return the last input of a module before the first attention that has all tokens; None if there is none."""
    given: list[Tensor] = []
    owner = threading.get_ident()

    def note(_: nn.Module, *arguments: Any) -> None:
        given.extend(tensor.detach() for tensor in tensors_in(arguments) if tensor.dim() == 3)

    def acts() -> bool:
        return not attention.maps and threading.get_ident() == owner

    with (
        quiet_pass(model, image.device, "fp32", record),
        AttentionRecorder(1) as attention,
        hooked([(module, note) for module in model.modules()], acts=acts),
        interruptible(),
    ):
        model(image.clone())
    if layout.kind not in _AXES or not attention.maps:
        return None
    tokens = attention.maps[0].output.shape[3]
    fitting = [tensor for tensor in given if tensor.shape[_AXES[layout.kind]] == tokens]
    return fitting[-1].float() if fitting else None


def _check_maps(attention: AttentionRecorder, tokens: int, method: str) -> None:
    """Refuse maps that are not over all tokens; an attention pool may be at the end.

    Raises:
        MethodError: there are none, or some are not over all tokens.
    """
    if not attention.maps and not attention.others:
        raise MethodError(
            f"{method!r} reads attention maps, and camkit saw none: the model has no attention, or computes it in "
            f"a kernel that does not show them (flash-attn, flex attention); {_OTHERS}"
        )
    shapes = [tuple(saved.output.shape[2:]) for saved in attention.maps]
    partial = [*attention.others, *(shape for shape in shapes[:-1] if shape != (tokens, tokens))]
    if shapes and shapes[-1][1] != tokens:  # any number of queries may pool the tokens at the end
        partial.append(shapes[-1])
    if partial:
        # Windows may have as many tokens as the last layer, and then the size of their maps says nothing.
        sizes = ["x".join(map(str, shape[-2:])) for shape in partial if shape[-2:] != (tokens, tokens)]
        example = f" (a map of {sizes[0]})" if sizes else ""
        raise MethodError(
            f"{method!r} needs every attention to run between all {tokens} tokens, and in this model some runs in "
            f"windows, over pooled tokens, in several stages or in a decoder{example}; {_OTHERS}"
        )


def _by_score(run: _Run, *, differentiates: bool) -> Iterator[tuple[Any, ...] | None]:
    """Yield for each target the attention maps, their gradients if the method needs them, and which queries are read.

    None stands for a target that no picture has.
    """
    for target in run.forward.targets:
        scored = run.forward.score(target)
        if is_absent(scored):
            yield None
            continue
        maps, gradients, rows = _read(run, scored, differentiates=differentiates)
        values = [saved.output.detach().float() for saved in maps]
        yield (values, gradients, rows) if differentiates else (values, rows)


def _read(
    run: _Run, scored: Scores, *, differentiates: bool = False
) -> tuple[list[Saved], list[Tensor], Float[Tensor, "n queries"]]:
    """Return the maps that a score depends on, their gradients, and as weights the queries that it is computed from.

    One backward pass gives all gradients. If none are needed, only the last map is differentiated.

    The queries are those of the last map: the class token, or all prefix tokens that the score depends on; or the other
    tokens, if the model averages them. They count equally. The gradient with respect to a map is zero in the row of a
    token that does not count. A model may also leave out what its last layers return.

    Raises:
        MethodError: the score depends on no map.
    """
    maps = list(run.attention.maps)
    gradients = run.gradients(scored, maps) if differentiates else []
    while maps:
        (last,) = gradients[-1:] or run.gradients(scored, maps[-1:])
        if maps[-1].reached:
            read = last.ne(0).any(3).any(1)
            prefix = run.layout.prefix if read.shape[1] == run.tokens else 0
            in_prefix = torch.arange(read.shape[1], device=read.device) < prefix
            read = (read & (in_prefix | ~(read & in_prefix).any(1, keepdim=True))).float()
            return maps, gradients, read / read.sum(1, keepdim=True).clamp(min=1)
        maps, gradients = maps[:-1], gradients[:-1]
    raise _no_gradient(run)


def _no_gradient(run: _Run) -> MethodError:
    return MethodError(
        f"{run.name!r} needs a score that depends on the attention maps in a differentiable way, and this one "
        "does not; remove inference_mode, detach(), argmax or reentrant checkpointing from the model's forward pass"
    )


def _by_layer(run: _Run, scores: Sequence[Scores]) -> Iterator[tuple[list[Tensor]] | None]:
    """Yield for each target the gradients of the score that each block's tokens have; None as for ``_by_score``.

    Each target scores the same classes in all blocks, whichever are best for a block's tokens.

    Raises:
        MethodError: the blocks are no chain with a head after it, or a target is a box or a class on a map.
    """
    on_maps = maps_of(run.forward.output, len(run.options.inputs)) is not None
    if on_maps or any(scored.boxes is not None for scored in scores):
        raise MethodError(f"{run.name!r} explains scores of whole pictures, not boxes or maps; use 'chefer'")
    layers: list[tuple[Any, Saved]] = []
    for given, scored in zip(run.forward.targets, scores, strict=True):
        if is_absent(scored):
            yield None
            continue
        target = fixed_target(given, scored)
        layers = layers or list(_layers(run, scores, _read(run, run.forward.score(target))[0]))
        gradients = [run.gradients(target(output, len(run.options.inputs)), [saved])[0] for output, saved in layers]
        if not all(saved.reached for _, saved in layers):
            raise _no_gradient(run)
        yield (gradients,)


def _layers(run: _Run, scores: Sequence[Scores], maps: Sequence[Saved]) -> Iterator[tuple[Any, Saved]]:
    """Yield what the model would return for each block's own tokens, and the map to differentiate it by.

    The tokens are replaced with their mean, so that the score is that of the mean whichever token the head reads. An
    attention pool reads the tokens themselves.

    Raises:
        MethodError: the blocks are no chain, or what comes after them, run alone, gives other scores than the model.
    """
    refusal = MethodError(
        f"{run.name!r} needs a chain of blocks that each take and return all tokens, and a head after them that "
        "can run alone; camkit does not find them in this model; use 'chefer' or 'gradcam'"
    )
    whole = [saved for saved in maps if saved.output.shape[2] == run.tokens]
    pools = len(whole) < len(maps)
    noted: dict[int, Block] = run.forward.during
    blocks = [noted[number] for number in range(len(whole)) if number in noted]
    axis = 0 if run.layout.kind == "sequence_first" else 1
    complete = 0 < len(blocks) == len(whole) and all(block.tokens.shape[axis] == run.tokens for block in blocks)
    pairs = itertools.pairwise(blocks)
    if not complete or not all(any(each is before.tokens for each in block.arguments) for before, block in pairs):
        raise refusal
    after = after_blocks(run.options.model, run.options.inputs, blocks)
    alone = after(blocks[-1].tokens.detach())
    for target, scored in zip(run.forward.targets, scores, strict=True):
        if not are_alike(scored.values, target(alone, len(run.options.inputs)).values.detach(), SAME):
            raise refusal
    run.attention.recording = True
    for block, saved in zip(blocks, whole, strict=True):
        seen = run.attention.maps = []
        output = after(block.tokens if pools else block.tokens.mean(axis, keepdim=True).expand_as(block.tokens))
        if any(again.output.shape[2] == run.tokens for again in seen) or len(seen) < pools:
            raise refusal
        yield output, seen[0] if pools else saved
    run.attention.recording = False
