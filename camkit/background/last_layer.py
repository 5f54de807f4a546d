"""The last linear layer: the pictures that mend it, its inputs, and its training, pulled towards its old weights."""

from __future__ import annotations

import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from camkit.background.data import Item
from camkit.background.experiment import Experiment, batches_of_one_shape
from camkit.background.plan import Plan
from camkit.background.showcase import in_levels
from camkit.engine.attach import forward_hooks
from camkit.engine.interrupts import interruptible
from camkit.engine.passes import quiet_pass
from camkit.errors import InputError, as_cell, text_of
from camkit.images.files import csv_line, write_file
from camkit.images.prepare import prepare
from camkit.images.regions import Shades
from camkit.models import device_of, dtype_of
from camkit.targets import logits_of

_STRENGTHS = tuple(10.0**power for power in (1, 0, -1, -2, -3, -4, -5))
"""The strengths of the pull that are tried, the strongest first."""

_FOLDS = 4
"""Parts of the groups; each is predicted by a layer that was trained on the others."""

_SHARE_OF_ORIGINALS = 0.25
"""The weight of the unedited pictures together. Weighed like the pasted ones, they have about 0.02 together, and two
networks lost up to 4 points more of their accuracy on them, and gained no more on other backgrounds."""

_LEAST_IN_PAIR = 5
"""Pictures that a pair of class and background needs, to count as the worst."""

_ABOUT_EQUAL = 0.02
"""Of strengths whose worst pairs differ by less, the strongest is taken."""

MOST_LOST = 0.01
"""The accuracy on unedited pictures that mending may lose."""

_STEPS = 200
"""Steps of L-BFGS at most."""

_SAME = 1e-4
"""How far a layer's output may differ from the model's, as a share of the largest."""


ORIGINAL = "original"
"""Stands in place of a fill's name for a picture that is not edited."""

_MOST_BACKGROUNDS = 6
"""The most backgrounds of other classes on which an object is pasted, and the most of its own class."""


@dataclass(frozen=True, eq=False)
class Composite:
    """A picture for mending.

    Attributes:
        tensor: the model's input (C, H, W).
        shades: what the preprocessing makes of black and white.
        item: the object's picture.
        background: the class of the picture behind the object.
        fill: how the background's own object was filled in; ORIGINAL for an unedited picture.
    """

    tensor: Float[Tensor, "c h w"]
    shades: Shades
    item: Item
    background: str
    fill: str


def composites(plan: Plan, progress: Callable[[int, int], None]) -> Iterator[Composite]:
    """Yield each picture of a plan's sample, and its object on backgrounds of its own class and of other classes."""
    others = max(1, len(plan.data.classes) - 1)
    wanted = min(_MOST_BACKGROUNDS, max(others, plan.settings.check.pastes))
    check = replace(plan.settings.check, pastes=wanted)
    experiment = Experiment(replace(plan, settings=plan.settings.model_copy(update={"check": check})))
    labels = {item.name: item.label for item in plan.data.items}
    for number, item in enumerate(plan.sample):
        progress(number, len(plan.sample))
        picture = experiment.load(item)
        if picture is None:
            continue
        yield Composite(picture.tensor, picture.shades, item, item.label, ORIGINAL)
        for edit, make in experiment.edits(item, wanted).items():
            if edit.arm in ("same", "other"):
                yield Composite(make(), picture.shades, item, labels[edit.lender], edit.fill)


def export(plan: Plan, folder: Path, progress: Callable[[int, int], None]) -> int:
    """Write the composites of a plan as PNG files, with a table of their classes; return how many there are.

    ``labels.csv`` has the columns path, label, group, background and fill.

    Raises:
        OutputError: a file cannot be written.
    """
    lines = [csv_line(("path", "label", "group", "background", "fill"))]
    for number, made in enumerate(composites(plan, progress), start=1):
        path = Path(made.item.label) / f"{number:06d}.png"
        pixels = in_levels(made.shades, made.tensor)
        # Without the mark of a drawing, by which camkit would leave these pictures out of a folder.
        write_file(folder / path, cv2.imencode(".png", pixels[..., ::-1])[1].tobytes())
        cells = path, made.item.label, made.item.group, made.background, made.fill
        lines.append(csv_line(as_cell(text_of(cell)) for cell in cells))
    write_file(folder / "labels.csv", lines)
    return len(lines) - 1


def find_last_linear(plan: Plan) -> str:
    """Run the model on one picture, and return the name of the linear layer whose output is the model's.

    Raises:
        InputError: there is none.
    """
    module, device = plan.model.module, device_of(plan.model.module)
    first = plan.data.items[0]
    picture = prepare(first.path, plan.preprocess, first.name).tensor[None].to(device, dtype_of(module))
    names: dict[nn.Module, str] = {
        layer: name for name, layer in module.named_modules() if isinstance(layer, nn.Linear)
    }
    calls: defaultdict[str, list[Tensor]] = defaultdict(list)

    def note(layer: nn.Module, _: Any, output: Any) -> None:
        calls[names[layer]].append(output.detach())

    with quiet_pass(module, device, "fp32"), interruptible(), forward_hooks(dict.fromkeys(names, note)):
        logits = logits_of(module(picture), 1)
    for name, outputs in calls.items():
        alike = len(outputs) == 1 and outputs[0].shape == logits.shape
        if alike and bool((outputs[0] - logits).abs().max() <= _SAME * logits.abs().max()):
            return name
    raise InputError(
        "the output of this model is not that of a linear layer, so it cannot be mended; write the pasted pictures "
        "with --export, and train the model on them"
    )


def trained_rows(plan: Plan) -> list[int]:
    """Return the outputs that the data has classes for. Their weights are trained; the others stay."""
    return sorted({output for indices in plan.matched.indices.values() for output in indices})


@dataclass(frozen=True, eq=False)
class Examples:
    """What the layer is trained on.

    Attributes:
        features: the inputs of the layer.
        own: which of the trained outputs are those of the example's class.
        rest: the logsumexp of the other outputs' logits, which stay as they are; -inf if there are none.
        highest: the largest of them.
        weights: of each example in the loss; they sum to 1.
        pairs: the example's class and the class of its background.
        original: whether the picture is unedited.
        folds: the part of the groups that the example belongs to.
        before: the trained rows of the layer's weights and biases.
    """

    features: Float[Tensor, "n d"]
    own: Bool[Tensor, "n k"]
    rest: Float[Tensor, " n"]
    highest: Float[Tensor, " n"]
    weights: Float[Tensor, " n"]
    pairs: Sequence[tuple[str, str]]
    original: Bool[Tensor, " n"]
    folds: Int[Tensor, " n"]
    before: tuple[Float[Tensor, "k d"], Float[Tensor, " k"]]

    def right(self, tensors: tuple[Tensor, Tensor]) -> Bool[Tensor, " n"]:
        """Return which examples a layer with these trained rows classifies rightly."""
        logits = self.features @ tensors[0].T + tensors[1]
        best = logits.masked_fill(~self.own, float("-inf")).amax(1)
        others = logits.masked_fill(self.own, float("-inf")).amax(1)
        return best > torch.maximum(others, self.highest)


def inputs_of(plan: Plan, name: str, pasted: Iterable[Composite]) -> Examples:
    """Run the model once on each picture, and return the inputs of its last linear layer, which has this name."""
    module, device = plan.model.module, device_of(plan.model.module)
    layer, found = module.get_submodule(name), list[Tensor]()
    assert isinstance(layer, nn.Linear)
    shown: list[tuple[tuple[str, str], str, bool]] = []

    def note(_: nn.Module, inputs: Any, __: Any) -> None:
        found.append(inputs[0].detach())

    with forward_hooks({layer: note}):
        for batch in batches_of_one_shape(((made, made.tensor) for made in pasted), plan.batch_size):
            shown += [((made.item.label, made.background), made.item.group, made.fill == ORIGINAL) for made, _ in batch]
            inputs = torch.stack([tensor for _, tensor in batch])
            with quiet_pass(module, device, "fp32"), interruptible():
                module(inputs.to(device, dtype_of(module)))
    pairs, groups, original = zip(*shown, strict=True)
    features, rows = torch.cat(found).double().cpu(), trained_rows(plan)
    weight = layer.weight.detach().double().cpu()
    bias = torch.zeros(len(weight)).double() if layer.bias is None else layer.bias.detach().double().cpu()
    fixed = [row for row in range(len(weight)) if row not in rows]
    others = features @ weight[fixed].T + bias[fixed]
    nothing = torch.full((len(features),), float("-inf"), dtype=torch.float64)
    indices = plan.matched.indices
    own = torch.tensor([[row in indices[label] for row in rows] for label, _ in pairs])
    seed = plan.settings.check.seed
    folds = [zlib.crc32(f"{seed} {group}".encode(errors="surrogateescape")) % _FOLDS for group in groups]
    return Examples(
        features,
        own,
        others.logsumexp(1) if fixed else nothing,
        others.amax(1) if fixed else nothing,
        _weights(pairs, original),
        pairs,
        torch.tensor(original),
        torch.tensor(folds),
        (weight[rows], bias[rows]),
    )


def _weights(pairs: Sequence[tuple[str, str]], original: Sequence[bool]) -> Float[Tensor, " n"]:
    """Return the weights of pictures (n,), which sum to 1; the unedited ones have a fixed share together."""
    weights, kept = torch.zeros(len(pairs), dtype=torch.float64), torch.tensor(original)
    for chosen, share in ((kept, _SHARE_OF_ORIGINALS), (~kept, 1 - _SHARE_OF_ORIGINALS)):
        some = [pairs[row] for row in chosen.nonzero()[:, 0].tolist()]
        count = Counter(some)  # each class has the same weight, and in it each background
        backgrounds = Counter(label for label, _ in count)
        balanced = torch.tensor([1 / (count[pair] * backgrounds[pair[0]]) for pair in some], dtype=torch.float64)
        weights[chosen] = share * (balanced / balanced.sum())
    return weights / weights.sum()


def fit(
    examples: Examples,
    strength: float,
    start: tuple[Tensor, Tensor] | None = None,
    used: Bool[Tensor, " n"] | slice = slice(None),
) -> tuple[Tensor, Tensor]:
    """Train the rows of a layer anew by cross-entropy on the ``used`` examples; return their weights and biases.

    The loss is the weighted mean of -log p(own class), plus ``strength`` times the mean squared change of the logits
    that the change of each weight alone makes, summed over the weights of an output. The loss has one minimum;
    a ``start`` (weights and biases) that is near it saves steps.
    """
    old_weight, old_bias = examples.before
    weight, bias = start or examples.before
    features, own, rest = examples.features[used], examples.own[used], examples.rest[used]
    weights = examples.weights[used] / examples.weights[used].sum()
    scale = features.square().mean(0).sqrt()
    change, shift = ((weight - old_weight) * scale).requires_grad_(), (bias - old_bias).requires_grad_()
    # In units of the features' own scale, the pull is the same for all weights, and L-BFGS needs fewer steps.
    scaled = features / scale.clamp_min(1e-12) * (scale > 0)
    before = features @ old_weight.T + old_bias
    optimiser = torch.optim.LBFGS([change, shift], max_iter=_STEPS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimiser.zero_grad()
        logits = before + scaled @ change.T + shift
        of_class = logits.masked_fill(~own, float("-inf")).logsumexp(1)
        everything = torch.logaddexp(logits.logsumexp(1), rest)
        pull = strength * (change.square().sum() + shift.square().sum()) / len(change)
        value: Tensor = ((everything - of_class) * weights).sum() + pull
        value.backward()
        return value

    with torch.enable_grad():
        optimiser.step(loss)
    new = old_weight + change.detach() / scale.clamp_min(1e-12) * (scale > 0)
    return new, old_bias + shift.detach()


def choose_strength(examples: Examples) -> float:
    """Return the strength whose worst pair of class and background is best for groups that training did not see.

    Strengths with which the unedited pictures lose too much count only if all do.
    """
    unchanged = examples.right(examples.before)
    predicted = {strength: torch.zeros(len(examples.pairs), dtype=torch.bool) for strength in _STRENGTHS}
    for fold in examples.folds.unique().tolist():
        held_out, layer = examples.folds == fold, None
        for strength, right in predicted.items():
            layer = fit(examples, strength, layer, used=~held_out)
            right[held_out] = examples.right(layer)[held_out]
    found: list[tuple[bool, float, float]] = []
    for strength, right in predicted.items():
        kept, before = (answers[examples.original].double().mean() for answers in (right, unchanged))
        keeps = not bool(kept < before - MOST_LOST)  # also if there are no unedited pictures
        worst = worst_pair(examples.pairs, right.tolist())
        found.append((keeps, 0.0 if worst is None else worst.accuracy, strength))
    keeping = [entry for entry in found if entry[0]] or found
    best = max(worst for _, worst, _ in keeping)
    return max(strength for _, worst, strength in keeping if worst >= best - _ABOUT_EQUAL)


class Pair(NamedTuple):
    """Objects of one class on backgrounds of another, how many, and the share of them that the model recognises."""

    label: str
    background: str
    accuracy: float
    pictures: int


def worst_pair(pairs: Iterable[tuple[str, str]], right: Iterable[bool]) -> Pair | None:
    """Return the class and background with the least accuracy; None if none has enough pictures.

    Each entry of ``pairs`` is a picture's class and the class of its background.
    """
    by_pair: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for pair, is_right in zip(pairs, right, strict=True):
        by_pair[pair].append(is_right)
    found = [Pair(*pair, float(np.mean(of)), len(of)) for pair, of in by_pair.items() if len(of) >= _LEAST_IN_PAIR]
    return min(found, key=lambda pair: pair.accuracy, default=None)
