"""The cut: one pass that saves the feature maps of some layers and differentiates only the head.

This is why an explanation costs about one inference pass. The model runs without a graph. At the first target layer, a
forward hook saves the output as a new leaf, lets the model continue with a copy of it, and switches gradients on. The
trunk keeps no activations, only the head is differentiated, and an in-place operation after the layer changes the copy
and not the saved maps. Tensor hooks save the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from camkit.engine.attach import (
    Changed,
    aliased_tensor,
    changes_of,
    feature_tensor,
    hook_gradient,
    hooked,
    nodes_of_graph,
    own_output,
    shares_memory,
    tensors_in,
    with_tensor,
)
from camkit.errors import LayerError, listing_layers
from camkit.targets.scores import Scores, passing_through
from camkit.types import LayerRef


class EntangledError(Exception):
    """A layer returned several tensors, and one may have been computed from another."""


class RepeatedError(LayerError):
    """A layer ran more than once in a pass, and no call was chosen."""


def not_reached(layers: Sequence[LayerRef]) -> LayerError:
    """Return the error for layers that no score has a gradient at."""
    names = " and ".join(repr(str(ref)) for ref in layers)
    return LayerError(
        f"the score does not depend on layer {names} in a differentiable way; choose another layer, or remove "
        "inference_mode, detach(), argmax, quantised activations, functions that return no gradient or reentrant "
        "checkpointing from the model's forward pass after this layer; 'occlusion' and 'rise' need no gradients"
    )


_LIFT, _STEP = 1024.0, 32.0
"""The first factor by which an fp16 score is multiplied before its backward pass, and the step by which the factor is
raised or lowered: 1024 times 32 is 2^15, and 2^16 would be infinite in fp16."""


@dataclass(eq=False)
class Saved:
    """One layer's feature maps, as the layer returned them, and one gradient for each backward pass so far.

    ``end`` is the tensor or edge with respect to which a backward pass differentiates: the output itself if the graph
    starts there, otherwise its edge in the graph, which in-place operations after the layer do not move. ``images`` is
    the axis of the images. ``reached`` is True as soon as a score depends on the layer. If the saved tensor is an
    alias, ``original`` tells whether the tensor behind it changes in place, and is its edge in the graph.
    """

    output: Tensor
    end: Tensor | GradientEdge | None = None
    gradients: list[Tensor] = field(default_factory=list)
    images: int = 0
    reached: bool = False
    original: tuple[Changed, GradientEdge] | None = None

    @classmethod
    def in_graph(cls, own: Tensor, output: Tensor) -> Saved:
        """Save the output of a layer whose gradient is that of ``own``, a tensor in the graph."""
        saved, original = cls(output, get_gradient_edge(own)), aliased_tensor(own)
        if original is not None:
            saved.original = changes_of(original), get_gradient_edge(original)
        hook_gradient(own, saved.keeper())
        return saved

    def keeper(self) -> Callable[[Tensor | None], None]:
        """Return a hook that keeps gradients; a user's own function may give None.

        The hook does not refer to the output, which refers to it; otherwise only Python's collector would free both.
        """
        kept = self.gradients

        def keep(gradient: Tensor | None) -> None:
            kept.extend([] if gradient is None else [gradient])

        return keep

    def settle(self) -> None:
        """If the model changed the saved alias in place, differentiate the original as it was before the change."""
        if self.original is not None and self.original[0]():
            self.end = self.original[1]


@dataclass(eq=False)
class Tape:
    """The maps that the hooks of one pass saved, by layer, in execution order."""

    layers: dict[LayerRef, Saved] = field(default_factory=dict)
    recording: bool = True
    whole: bool = False
    afresh: bool = False

    def differentiate(self, scored: Scores, *, keep_graph: bool, fp16: bool) -> None:
        """Differentiate a target's scores down to the first layer; tensor hooks save each layer's gradient.

        A softmax or sigmoid that gave the scores passes gradients on unchanged. Parameters receive no ``.grad``. A
        layer that the scores do not depend on gets a gradient of zero. ``fp16`` is True if the pass ran in fp16, which
        cannot represent very small and very large numbers: each image's score is multiplied by a power of two, and its
        gradients are divided by the same number in float32. If they were infinite or tiny, the pass is repeated with
        another factor. This requires that each score depends on one image only, as in evaluation mode.
        """
        values, saved = scored.values.float(), list(dict.fromkeys(self.layers.values()))
        if not values.requires_grad:  # the target exists in no image
            for layer in saved:
                layer.gradients.append(torch.zeros_like(layer.output, requires_grad=False))
            return
        self.recording = False  # activation checkpointing runs modules again during the backward pass
        with passing_through(scored.activation):
            if fp16 or scored.values.dtype == torch.float16:
                self._differentiate_lifted(saved, values)
            else:
                self._differentiate(saved, values.sum(), keep_graph=keep_graph)

    def _differentiate_lifted(self, saved: list[Saved], values: Tensor) -> None:
        lifts = torch.full_like(values, _LIFT, requires_grad=False)
        was_high = torch.zeros_like(lifts, dtype=torch.bool)
        for tries_left in (3, 2, 1, 0):  # four factors, each 32 times smaller than the last, end at 2^-5
            self._differentiate(saved, (values * lifts).sum(), keep_graph=True)
            batched = [layer for layer in saved if layer.output.shape[layer.images] == values.shape[0]]
            peaks = [
                layer.gradients[-1].detach().movedim(layer.images, 0).flatten(1).float().abs().amax(1).to(lifts.device)
                for layer in batched
            ]
            largest = torch.stack([*peaks, torch.zeros_like(lifts)]).amax(0)
            too_high = ~torch.isfinite(largest)
            was_high |= too_high
            too_low = (largest < 1) & (lifts == _LIFT) & ~was_high
            if not tries_left or not bool((too_high | too_low).any()):
                break
            lifts = torch.where(too_high, lifts / _STEP, torch.where(too_low, lifts * _STEP, lifts))
            for layer in saved:
                del layer.gradients[-1]
        for layer in batched:
            gradient = layer.gradients[-1].float().movedim(layer.images, -1)
            layer.gradients[-1] = (gradient / lifts.to(gradient.device)).movedim(-1, layer.images)

    @staticmethod
    def _differentiate(saved: list[Saved], score: Tensor, *, keep_graph: bool) -> None:
        count = len(saved[0].gradients)
        for layer in saved:
            if layer.original is not None:
                layer.settle()
        # Every layer is an input here: one on a parallel branch, such as a skip connection, is on no path to another.
        ends = [layer.end for layer in saved if layer.end is not None]
        torch.autograd.grad(score, cast("list[Tensor]", ends), retain_graph=keep_graph, allow_unused=True)
        for layer in saved:
            if len(layer.gradients) > count:
                layer.reached = True
            else:
                layer.gradients.append(torch.zeros_like(layer.output, requires_grad=False))


_Start: TypeAlias = tuple[int, list[tuple[Tensor, Changed]]]
"""What was known when a call of a layer began: the size of the graph, and what tells whether each argument changes."""


def _save(tape: Tape, ref: LayerRef, start: _Start, arguments: list[Tensor], output: Any, *, gradients: bool) -> Any:
    """Save a layer's feature maps; return the output that replaces the layer's own, or None to keep it."""
    maps = feature_tensor(output)
    if maps is None:
        returned = f"a {type(output).__name__}"
        if isinstance(output, Tensor):
            kind = "" if output.is_floating_point() else f" of {output.dtype}"
            returned = f"shape {tuple(output.shape)}{kind}"
        raise LayerError(
            f"layer {str(ref)!r} returned {returned}, which has no spatial extent to draw a map on; "
            f"choose an earlier layer ({listing_layers()})"
        )
    (path, tensor), (nodes, at_start) = maps, start
    if not gradients:
        tape.layers[ref] = Saved(tensor.detach().clone())
        return None
    if tape.afresh or not tensor.requires_grad or not (tape.layers or tape.whole):
        several = tensors_in(output) if not (tape.whole or isinstance(output, Tensor)) else []
        if sum(other.is_floating_point() for other in several) > 1:
            raise EntangledError
        # Lists and dictionaries among the arguments may have lost tensors, or got some.
        given = {id(each): each for each in (*arguments, *(argument for argument, _ in at_start))}
        shared = any(shares_memory(argument, tensor) for argument in given.values())
        # Whether the layer changed an argument in place that shares memory with its output.
        wrote = shared and any(changed() and shares_memory(argument, tensor) for argument, changed in at_start)
        return _begin(tape, ref, output, path, tensor, shared=shared, wrote=wrote)
    own = own_output(tensor, nodes)
    tape.layers[ref] = Saved.in_graph(own, tensor.detach().clone())
    return None if own is tensor else with_tensor(output, path, own)


def _begin(
    tape: Tape, ref: LayerRef, output: Any, path: tuple[Any, ...], tensor: Tensor, *, shared: bool, wrote: bool
) -> Any:
    """Start the graph at a layer's output: save it as a leaf, and let the model continue with a copy.

    If the output shares memory with an argument, so does the copy, because the model may change one in place and read
    the other.
    """
    leaf = (tensor.detach().clone() if shared else tensor.detach()).requires_grad_()
    tape.layers[ref] = saved = Saved(leaf, leaf)
    torch.set_grad_enabled(True)
    in_place_works = not (tensor.is_leaf and tensor.requires_grad) and 0 not in tensor.stride()
    if not shared or not in_place_works or tensor._is_view():
        leaf.register_hook(saved.keeper())
        copy = tensor.detach().copy_(leaf) if shared and in_place_works else leaf.clone()
        return with_tensor(output, path, copy)
    # Other modules hold the tensor that the layer returned or wrote into, so the graph must pass through it.
    tensor.copy_(leaf)
    if wrote:
        leaf.register_hook(saved.keeper())
        return None
    own = tensor[...]
    tape.layers[ref] = Saved.in_graph(own, leaf.detach())
    return with_tensor(output, path, own)


@contextmanager
def cut(
    layers: Mapping[LayerRef, nn.Module], *, gradients: bool = True, whole: bool = False, afresh: bool = False
) -> Iterator[Tape]:
    """Save the outputs, and with ``gradients`` the gradients, of some layers during one forward pass.

    Use it inside ``torch.no_grad()``: the first layer to run switches gradients on for the rest of the pass, and
    leaving the outer context restores the mode. With ``whole`` the graph before the layers is kept if there is one,
    which costs memory. A layer needs that if it returns several tensors and may have computed one from another. With
    ``afresh``, the graph starts anew at each layer, so the gradient at one has no part that passes through another.

    Raises:
        LayerError: a layer ran more than once and no call was chosen, or it returned no spatial output.
        EntangledError: the first of the layers to run returned several tensors, and ``whole`` is False.

    """
    tape = Tape(whole=whole, afresh=afresh)
    refs: dict[nn.Module, list[LayerRef]] = {}
    for ref, module in layers.items():
        refs.setdefault(module, []).append(ref)
    calls = dict.fromkeys(refs, 0)
    starts: dict[nn.Module, _Start] = {}

    def begin(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if tape.recording:
            given = tensors_in((arguments, keywords) if keywords else arguments)
            starts[module] = nodes_of_graph(), [(tensor, changes_of(tensor)) for tensor in given]

    def end(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> Any:
        if not tape.recording:
            return None
        calls[module] += 1
        if calls[module] > 1 and LayerRef(refs[module][0].name) in refs[module]:
            name = refs[module][0].name
            raise RepeatedError(
                f"layer {name!r} runs more than once in a pass; choose one of its calls, "
                f"for example {name + '#1'!r} or {name + '#2'!r}"
            )
        wanted = [ref for ref in refs[module] if ref.call in (None, calls[module])]
        if not wanted:
            return None
        start = starts.pop(module, (0, []))
        given = tensors_in((arguments, keywords) if keywords else arguments)
        replaced = _save(tape, wanted[0], start, given, output, gradients=gradients)
        tape.layers.update(dict.fromkeys(wanted, tape.layers[wanted[0]]))
        return replaced

    begins = [(module, begin) for module in refs] if gradients else []
    with hooked(begins, [(module, end) for module in refs]):
        yield tape
