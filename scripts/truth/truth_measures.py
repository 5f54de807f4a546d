"""What the planted-truth lab measures of a network's maps: do they find the truth, and are they faithful?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

import camkit
from camkit.layers.choose import decide
from camkit.targets.classes import each
from scripts.truth.truth_networks import logits
from scripts.truth.truth_scenes import draw, has_pairs, normalised

AT_LAYERS = ("gradcam", "gradcam++", "hirescam", "xgradcam", "layercam", "gradcam-elementwise", "eigencam")
"""Methods that weight the same feature maps and gradients, at every layer."""

EXPECTED = "expected"
"""A method that runs the head for each reference picture and takes pictures one by one: at two layers, on few."""

AUTO = "auto"
"""The method that chooses method and layer together."""

WHOLE = ("chefer", "gradrollout", "rollout", "legrad", "fullgrad")
SLOW = "scorecam"
"""A method that runs the model for every channel: at the default layer, on few pictures."""

SHARES = (0.05, 0.1, 0.2, 0.4)
"""The shares of the hottest pixels that are removed, or kept alone."""

_FEW = 16
_REFERENCES = 8
_AT_ONCE = {"cuda": 128, "cpu": 32}
_WORDS = 100
"""Characters of a refusal that are kept."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Subject:
    """A network, and the pictures that its maps are judged on.

    Attributes:
        network: in evaluation mode.
        inputs: (N, 3, 64, 64) whose class the network names.
        labels: (N,).
        truths: (N, 64, 64), the pixels that make the class.
        pairs: inputs that show two classes, both of which the network puts first; None if there are too few.
        pair_labels: (M, 2).
        pair_truths: (M, 2, 64, 64).
        references: inputs of the same kind, for methods that compare with other pictures.
    """

    network: nn.Module
    inputs: Tensor
    labels: Tensor
    truths: Tensor
    pairs: Tensor | None
    pair_labels: Tensor
    pair_truths: Tensor
    references: Tensor


def subject(network: nn.Module, cause: str, count: int, random: torch.Generator) -> Subject:
    """Draw pictures of a cause and keep at most ``count`` that the network has right."""
    scenes = draw(cause, 2 * count + 32, random)
    scenes = scenes.rows(logits(network, scenes.images).argmax(1) == scenes.labels[:, 0])
    references = normalised(draw(cause, _REFERENCES, random).images)
    scenes = scenes.rows(torch.arange(min(count, len(scenes)), device=random.device))
    pairs = draw(cause, 3 * count if has_pairs(cause) else 1, random, pair=has_pairs(cause))
    best = logits(network, pairs.images).topk(2).indices
    found = (best.sort(1).values == pairs.labels.sort(1).values).all(1)
    pairs = pairs.rows(found.nonzero()[: count // 2, 0])
    enough = has_pairs(cause) and len(pairs) >= max(1, count // 8)
    return Subject(
        network,
        normalised(scenes.images),
        scenes.labels[:, 0],
        scenes.truths[:, 0],
        normalised(pairs.images) if enough else None,
        pairs.labels,
        pairs.truths,
        references,
    )


def spatial_layers(network: nn.Module, image: Tensor, most: int) -> tuple[list[str], str]:
    """Return the layers that can be explained, in the order in which they run, and the one that camkit chooses.

    If there are more than ``most``, they are spread evenly; the chosen one is always among them.
    """
    decision = decide(network, image, every=True)
    chosen = "" if decision.layer is None else str(decision.layer.ref)
    rows = [row for row in decision.rows if row.layout is not None and row.ref.name and not row.verdict]
    names = list(dict.fromkeys(str(row.ref) for row in rows))
    even = {names[round(place)] for place in np.linspace(0, len(names) - 1, most)}
    return [name for name in names if name in even or name == chosen], chosen


def measured_rows(judged: Subject, layers: int) -> list[Row]:
    """Measure all methods on a network: at most ``layers`` of its layers, on the whole model, and ``auto``."""
    found, chosen = spatial_layers(judged.network, judged.inputs[:1], layers)
    few = _first(judged, _FEW)
    explainer = camkit.Explainer(judged.network, method=EXPECTED, references=judged.references)
    random = torch.rand(judged.truths.shape, generator=torch.Generator().manual_seed(0)).to(judged.inputs.device)
    rows = [{"layer": "", "method": "random", **_figures(judged, random)}]
    for layer in found:
        place = {"layer": layer, "default": layer == chosen}
        rows += [_row(judged, place, method, explainer, layer) for method in AT_LAYERS]
    for layer in dict.fromkeys((found[len(found) // 2], chosen)):
        rows.append(_row(few, {"layer": layer, "default": layer == chosen}, EXPECTED, explainer, layer))
    rows += [_row(judged, {"layer": ""}, method, explainer) for method in (*WHOLE, AUTO)]
    rows.append(_row(few, {"layer": chosen}, SLOW, explainer))
    return rows


def _first(judged: Subject, count: int) -> Subject:
    """Return the subject with its first pictures only."""
    return replace(
        judged,
        inputs=judged.inputs[:count],
        labels=judged.labels[:count],
        truths=judged.truths[:count],
        pairs=None if judged.pairs is None else judged.pairs[:count],
        pair_labels=judged.pair_labels[:count],
        pair_truths=judged.pair_truths[:count],
    )


def _row(judged: Subject, place: Row, method: str, explainer: camkit.Explainer, layer: str | None = None) -> Row:
    """Return the row of a method; if camkit refuses to draw, the row says why."""
    try:
        explainer = explainer.using(method, layer)
        (heat,) = _maps(explainer, judged.inputs, [judged.labels])
    except camkit.CamkitError as error:
        return {**place, "method": method, "refusal": f"{type(error).__name__}: {error}"[:_WORDS]}
    pairs = []
    if judged.pairs is not None:
        pairs = list(_maps(explainer, judged.pairs, list(judged.pair_labels.unbind(1))))
    return {**place, "method": method, **_figures(judged, heat, pairs)}


def _maps(explainer: camkit.Explainer, inputs: Tensor, labels: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the heatmaps (N, 64, 64) of inputs (N, 3, 64, 64) for each of several lists (N,) of classes."""
    targets = [each(classes.tolist()) for classes in labels]
    explained = explainer.batch([inputs], targets, batch_size=_AT_ONCE[inputs.device.type])
    heat = torch.stack([torch.from_numpy(explanation.heatmap) for explanation in explained]).to(inputs.device)
    yield from heat.unflatten(0, (len(inputs), len(labels))).unbind(1)


def _figures(judged: Subject, heat: Tensor, pairs: Sequence[Tensor] = ()) -> Row:
    deletion, insertion = removed_and_kept(judged.network, judged.inputs, judged.labels, heat)
    return {
        "auroc": _mean(auroc(heat, judged.truths)),
        "hit": _mean(share_of_maxima(heat, judged.truths)),
        "pair": _mean(right_of_two(pairs, judged.pair_truths)) if pairs else None,
        "deletion": _mean(deletion),
        "insertion": _mean(insertion),
    }


def _mean(values: Tensor) -> float | None:
    """Return the mean of the values that are numbers; None if there are none."""
    known = values[torch.isfinite(values)]
    return round(float(known.double().mean()), 4) if len(known) else None


def auroc(heat: Float[Tensor, "n h w"], truths: Bool[Tensor, "n h w"]) -> Float[Tensor, " n"]:
    """Return the probability that a pixel of the truth is hotter than another pixel; equal heat counts half.

    NaN if all pixels belong to the truth, or none.
    """
    values, mask = heat.float().flatten(1), truths.flatten(1)
    others = values.masked_fill(mask, torch.inf).sort(1).values
    below = torch.searchsorted(others, values.contiguous())
    up_to = torch.searchsorted(others, values.contiguous(), right=True)
    colder = ((below + up_to).double() / 2 * mask).sum(1)
    inside, outside = mask.sum(1), (~mask).sum(1)
    return colder / (inside * outside).double().where(inside * outside > 0, torch.nan)


def share_of_maxima(heat: Float[Tensor, "n h w"], truths: Bool[Tensor, "n h w"]) -> Float[Tensor, " n"]:
    """Return which share of the hottest pixels belongs to the truth; usually there is one such pixel."""
    values = heat.flatten(1)
    hottest = values == values.amax(1, keepdim=True)
    return (hottest & truths.flatten(1)).sum(1).double() / hottest.sum(1)


def right_of_two(heats: Sequence[Float[Tensor, "n h w"]], truths: Bool[Tensor, "n 2 h w"]) -> Float[Tensor, " twice_n"]:
    """Return for the map of each of two classes whether its mean is higher on its own pixels than on the other's.

    1 if it is, 0 if not, 0.5 if the means are equal.
    """
    right = []
    for number, heat in enumerate(heats):
        sums = (heat[:, None] * truths).sum((2, 3)).double() / truths.sum((2, 3)).clamp(min=1)
        own, other = sums[:, number], sums[:, 1 - number]
        right.append((own > other).double() + 0.5 * (own == other))
    return torch.cat(right)


@torch.inference_mode()
def removed_and_kept(
    network: nn.Module, inputs: Float[Tensor, "n c h w"], labels: Int[Tensor, " n"], heat: Float[Tensor, "n h w"]
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """Return the class's mean probability with the hottest ``SHARES`` removed, and with only these kept.

    What is removed becomes the mean colour of all pictures. Pixels of equal heat come in random order.
    """
    jitter = torch.rand(heat.shape, generator=torch.Generator().manual_seed(0)).to(heat.device)
    order = heat.double().flatten(1) + 1e-9 * jitter.flatten(1)
    ranks = order.argsort(1, descending=True).argsort(1).reshape(heat.shape)
    hot = torch.stack([ranks < share * heat[0].numel() for share in SHARES])[:, :, None]
    versions = torch.cat([torch.where(hot, 0, inputs), torch.where(hot, inputs, 0)]).flatten(0, 1)
    answers = torch.cat([network(part) for part in versions.split(1024)]).softmax(1)
    confidence = answers.gather(1, labels.repeat(2 * len(SHARES))[:, None]).reshape(2, len(SHARES), -1)
    deletion, insertion = confidence.mean(1).double()
    return deletion, insertion
