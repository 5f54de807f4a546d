"""The head: the part of a model after one layer, as a function of this layer's feature maps.

One plain pass records what each module before the layer returned. Later passes return these outputs instead of
computing them again, and replace the layer's output with changed feature maps, a whole batch of them for one picture.
So the head alone is computed. If another branch passes the layer, its recorded outputs are repeated for the batch.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks

from camkit.engine.attach import feature_tensor, forward_hooks, precise, with_tensor, with_tensors
from camkit.engine.cut import cut, not_reached
from camkit.engine.guard import interruptible
from camkit.engine.passes import SAME, Pass, are_alike, from_grid, to_grid, versions
from camkit.errors import MethodError
from camkit.models.modules import usual_batch_size
from camkit.targets.scores import Target
from camkit.types import LayerRef, Layout

ScoreOutput: TypeAlias = Callable[[Any, int], Tensor]
"""``score(output, batch)`` returns the score (N,) of each picture of a batch, or several scores (N, K)."""

Trunk: TypeAlias = Literal["kept", "repeated", "computed"]
"""How the trunk takes part in a pass of the head: its recorded outputs are returned for one picture; the same, repeated
for each picture of the batch; or everything is computed anew for a batch of equal pictures."""

_MOST_BYTES = 2**25
"""Changed feature maps that one pass of the head takes at most, in bytes. With 32 MiB, Ablation-CAM of a ResNet-18 and
of a MobileNetV2 takes two thirds of the time that it takes with 256 MiB, and less than with 8 or 16 MiB."""


@dataclass(eq=False)
class HeadRecording:
    """What one plain pass returned: the layer's output, and the output of each call of the modules before it."""

    output: Any = None
    before: defaultdict[nn.Module, list[Any]] = field(default_factory=lambda: defaultdict(list))


@contextmanager
def recording(model: nn.Module, ref: LayerRef) -> Iterator[HeadRecording]:
    """Record a pass up to the end of a layer's call, for a ``Head``."""
    record = HeadRecording()
    layer = model.get_submodule(ref.name)
    calls = 0

    def note(module: nn.Module, _: list[Tensor], output: Any) -> None:
        nonlocal calls
        if record.output is not None:
            return
        if module is layer:
            calls += 1
            if calls == (ref.call or 1):
                record.output = _copy(output)
                return
        record.before[module].append(_copy(output))

    with forward_hooks(dict.fromkeys(modules_beside(model, ref.name), note)):
        yield record


@contextmanager
def returning(
    model: nn.Module, ref: LayerRef, recorded: HeadRecording, output: Tensor, repeats: int = 1
) -> Iterator[None]:
    """Let the model compute only what comes after a layer, which returns another tensor of feature maps.

    Args:
        model: the model.
        ref: the layer.
        recorded: what a pass returned up to the end of the layer's call; a call whose output is None runs as usual.
        output: the tensor that replaces the recorded one.
        repeats: for how many pictures the other outputs are repeated.
    """
    layer, maps = model.get_submodule(ref.name), feature_tensor(recorded.output)
    assert maps is not None
    answers = {module: [_copy(call, repeats) for call in calls] for module, calls in recorded.before.items()}
    earlier = answers.get(layer, [None] * ((ref.call or 1) - 1))
    answers[layer] = [*earlier, with_tensor(_copy(recorded.output, repeats), maps[0], output)]
    # PyTorch's fused transformer layers do not call their submodules, unless one of these has a hook.
    with answering(answers), forward_hooks({layer: lambda *_: None}):
        yield


def modules_beside(model: nn.Module, name: str) -> list[nn.Module]:
    """Return a layer, and the modules beside it and beside each module that contains it."""
    path = [model.get_submodule(".".join(name.split(".")[:depth])) for depth in range(name.count(".") + 2)]
    waiting = [child for parent in path[:-1] for child in parent.children()]
    found: dict[nn.Module, None] = {path[-1]: None}
    while waiting:
        module = waiting.pop()
        if type(module).forward is nn.Module.forward:  # a container that never runs itself, such as a ModuleList
            waiting += module.children()
        elif module not in path:
            found[module] = None
    return list(found)


class Head:
    """Returns the scores of changed feature maps of one picture.

    Args:
        options: the pass of one picture; each later pass finds the model as this one did.
        ref: the layer.
        layout: the layout of the layer's output.
        recorded: the recording of a plain pass of this picture.
        score: the score to compute; if it has several values, the head returns all of them.
        expected: the model's own score of the picture, or its K scores.

    Raises:
        MethodError: the head cannot be run on changed maps.
    """

    def __init__(
        self,
        options: Pass,
        ref: LayerRef,
        layout: Layout,
        recorded: HeadRecording,
        score: ScoreOutput,
        expected: float | Float[Tensor, " k"],
    ) -> None:
        self._options, self._ref, self._layout = options, ref, layout
        self._recorded, self._score = recorded, score
        maps = feature_tensor(recorded.output)
        assert maps is not None
        self.output = maps[1]
        self.images = int(layout.kind == "sequence_first")
        """The axis of the pictures in the layer's output."""
        self.activations: Float[Tensor, "1 c *grid"] = to_grid(self.output, layout)
        bytes_of_one = self.activations.numel() * self.activations.element_size()
        self.at_once = max(1, _MOST_BYTES // bytes_of_one) if options.apart else 1
        """How many changed maps one pass takes."""
        self._trunk = self._usable_trunk(expected)

    def __call__(self, maps: Float[Tensor, "m c *grid"]) -> Float[Tensor, "m *_"]:
        """Return the score that the picture would have if the layer returned these feature maps, for each of them.

        The model may overwrite the maps.
        """
        return torch.cat([self._run(part, self._trunk) for part in maps.split(self.at_once)])

    def _usable_trunk(self, expected: float | Float[Tensor, " k"]) -> Trunk:
        """Return the cheapest way to run the trunk with which the unchanged maps have the model's own score.

        In a pass of several maps, each must have the score that it has alone, whatever its place. A head that mixes the
        pictures of a batch gets one map at a time.
        """
        failure: Exception | None = None
        trunks: Sequence[Trunk] = ("kept", "repeated", "computed")
        tries: list[tuple[int, Trunk]] = [(at_once, trunk) for at_once in (self.at_once, 1) for trunk in trunks]
        for at_once, trunk in tries:
            try:
                scores = self._run(self.activations.clone(), trunk)
                if not are_alike(torch.as_tensor(expected).expand_as(scores), scores, SAME):
                    continue
                if at_once == 1 or self._keeps_apart(trunk):
                    self.at_once = at_once
                    return trunk
            except Exception as error:  # a branch that passes the layer has another number of pictures
                failure = error
        raise MethodError(
            f"the part of the model after layer {str(self._ref)!r} cannot be run alone on changed feature maps; use a "
            "gradient method such as 'gradcam'"
        ) from failure

    def _keeps_apart(self, trunk: Trunk) -> bool:
        """Tell whether different maps in one pass have the scores that they have alone."""
        several = versions(self.activations)[: self.at_once]
        alone = [self._run(maps.clone(), trunk) for maps in several]
        return are_alike(torch.cat(alone), self._run(torch.cat(several), trunk), SAME)

    def _run(self, maps: Float[Tensor, "m c *grid"], trunk: Trunk) -> Float[Tensor, "m *_"]:
        count = len(maps)
        with self._returning(maps, trunk) as run, interruptible():
            scores = precise(self._score(run(), count).detach())
        if scores.shape[:1] != (count,):
            raise MethodError(f"the head returned scores of shape {tuple(scores.shape)} for {count} changed maps")
        return scores

    @contextmanager
    def _returning(self, maps: Tensor, trunk: Trunk, *, whole: bool = False) -> Iterator[Callable[[], Any]]:
        """Prepare one pass in which the layer returns other maps; yield the function that runs it.

        With ``whole``, these are outputs of the layer for several pictures, with what is no cell.
        """
        count = maps.shape[self.images] if whole else len(maps)
        recorded = HeadRecording(self._recorded.output) if trunk == "computed" else self._recorded
        repeats = count if trunk == "repeated" else 1
        model, image = self._options.model, self._options.inputs
        image = image if trunk == "kept" else image.expand(count, *image.shape[1:])
        # Before the copies: the model cannot write to tensors of the caller's inference mode.
        with self._options.quiet():
            changed = maps.clone() if maps.is_inference() else maps
            changed = changed if whole else from_grid(changed, self.output, self._layout)
            with returning(model, self._ref, recorded, changed, repeats):
                yield lambda: model(image.clone())

    def gradients(self, outputs: Tensor, targets: Sequence[Target]) -> list[Tensor]:
        """Return the gradients of each target's scores with respect to whole outputs of the layer for M pictures.

        Outputs are those of the layer, with all that is no cell, such as a class token. Each gradient has their shape.

        Raises:
            LayerError: a score does not depend on the layer in a differentiable way.
        """
        axis = self.images
        modules = {self._ref: self._options.model.get_submodule(self._ref.name)}
        gradients: list[list[Tensor]] = []
        for part in outputs.split(min(self.at_once, usual_batch_size(outputs.device)), axis):
            with (
                self._returning(part, self._trunk, whole=True) as run,
                cut(modules, whole=True) as tape,
                interruptible(),
            ):
                output, saved = run(), tape.layers[self._ref]
                saved.images = axis
                for number, target in enumerate(targets, start=1):
                    scored = target(output, part.shape[axis])
                    fp16 = outputs.dtype == torch.float16
                    tape.differentiate(scored, keep_graph=number < len(targets), fp16=fp16)
                if not saved.reached:
                    raise not_reached([self._ref])
                gradients.append([gradient.detach() for gradient in saved.gradients])
        return [torch.cat(of_target, axis) for of_target in zip(*gradients, strict=True)]


def _copy(output: Any, repeats: int = 1) -> Any:
    """Copy a module's output for one picture, since the model may change it in place; repeat it for a batch."""

    def copied(value: Tensor) -> Tensor:
        several = repeats > 1 and value.dim() > 0 and len(value) == 1
        return (value.expand(repeats, *value.shape[1:]) if several else value).detach().clone()

    return with_tensors(output, copied)


_lock = threading.RLock()
"""Only one thread at a time replaces modules' ``forward``: two would put back each other's replacement."""


@contextmanager
def answering(answers: Mapping[nn.Module, Sequence[Any]]) -> Iterator[None]:
    """Let modules return given outputs instead of running: the first at the first call, and so on.

    A module runs as usual where its answer is None, after its last answer, and in other threads. The user's hooks run
    too, and see the answer. What they return is ignored, since the answer is already the output after all hooks.
    """
    owner = threading.get_ident()
    unchanged: dict[nn.Module, Any] = {}
    hooked = [module for module in answers if module._forward_hooks or _global_forward_hooks]

    def replacement(module: nn.Module) -> Callable[..., Any]:
        run, remaining = module.forward, iter(answers[module])

        def forward(*arguments: Any, **named: Any) -> Any:
            answer = next(remaining, None) if threading.get_ident() == owner else None
            if answer is None:
                return run(*arguments, **named)
            if module in hooked:
                # With its graph: LeGrad differentiates what comes after the answer.
                unchanged[module] = with_tensors(answer, Tensor.clone)
            return answer

        return forward

    def put_back(module: nn.Module, _: list[Tensor], __: Any) -> Any:
        return unchanged.pop(module, None)

    with _lock, forward_hooks(dict.fromkeys(hooked, put_back)):
        before = {module: vars(module).get("forward") for module in answers}
        try:
            for module in answers:
                vars(module)["forward"] = replacement(module)
            yield
        finally:
            for module, forward in before.items():
                if forward is None:
                    vars(module).pop("forward", None)
                else:
                    vars(module)["forward"] = forward
