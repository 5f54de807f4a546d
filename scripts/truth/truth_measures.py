"""What the planted-truth lab measures of a network's maps: truth, faithfulness, stability, and shuffled weights."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

import camkit
from camkit.engine.heatmap import to_heatmap
from camkit.engine.interrupts import interruptible
from camkit.engine.passes import autocasting
from camkit.errors import MethodError
from camkit.layers.choose import decide
from camkit.layers.memory import ModelMemory
from camkit.layers.passes import LayerPasses
from camkit.layers.trace import traced
from camkit.methods import METHODS
from camkit.methods.runs import signed_maps
from camkit.models.modules import shuffle_weights
from camkit.targets.classes import each
from camkit.types import Spread
from scripts.truth.truth_networks import logits
from scripts.truth.truth_scenes import SIDE, draw, has_pairs, normalised

AT_LAYERS = ("gradcam", "gradcam++", "hirescam", "xgradcam", "layercam", "gradcam-elementwise", "eigencam")
"""Methods that weight the same feature maps and gradients, at every layer."""

EXPECTED = "expected"
"""A method that runs the head for each reference picture and takes pictures one by one: at two layers, on few."""

AUTO = "auto"
"""The method that chooses method and layer together, if camkit has it."""

WHOLE = ("chefer", "gradrollout", "rollout", "legrad", "fullgrad")
SLOW = "scorecam"
"""A method that runs the model for every channel: at the default layer, on few pictures."""

SHARES = (0.05, 0.1, 0.2, 0.4)
"""The shares of the hottest pixels that are removed, or kept alone."""

NOISE = 0.001
"""The noise of the test of stability, in standard deviations of each picture."""

_FEW = 16
_REFERENCES = 8
_AT_ONCE = {"cuda": 128, "cpu": 32}
_WORDS = 100
"""Characters of a refusal that are kept."""

Row = dict[str, Any]
Maps = dict[str, list[Tensor]]
"""For each method, heatmaps (N, 64, 64) for each target."""

Drawing = Callable[[nn.Module, Tensor, Sequence[Tensor]], Maps]
"""Draws maps of inputs (N, 3, 64, 64) with a network, for each of several lists (N,) of classes."""


@dataclass(frozen=True)
class Subject:
    """A network, and the pictures that its maps are judged on.

    Attributes:
        network: in evaluation mode.
        shuffled: the same network with shuffled weights.
        inputs: (N, 3, 64, 64) whose class the network names.
        noisy: the same with a little noise.
        labels: (N,).
        truths: (N, 64, 64), the pixels that make the class.
        pairs: inputs that show two classes, both of which the network puts first; None if there are too few.
        pair_labels: (M, 2).
        pair_truths: (M, 2, 64, 64).
        references: inputs of the same kind, for methods that compare with other pictures.
    """

    network: nn.Module
    shuffled: nn.Module
    inputs: Tensor
    noisy: Tensor
    labels: Tensor
    truths: Tensor
    pairs: Tensor | None
    pair_labels: Tensor
    pair_truths: Tensor
    references: Tensor


@dataclass(frozen=True)
class SpatialLayer:
    """A layer with a grid: its name, its grid, and how far into the network it lies, from 0 to 1."""

    name: str
    grid: tuple[int, ...]
    depth: float


def subject(network: nn.Module, cause: str, count: int, random: torch.Generator) -> Subject:
    """Draw pictures of a cause and keep at most ``count`` that the network has right."""
    scenes = draw(cause, 2 * count + 32, random)
    scenes = scenes.rows(logits(network, scenes.images).argmax(1) == scenes.labels[:, 0])
    references = normalised(draw(cause, _REFERENCES, random).images)
    scenes = scenes.rows(torch.arange(min(count, len(scenes)), device=random.device))
    inputs = normalised(scenes.images)
    noise = torch.randn(inputs.shape, generator=random, device=random.device)
    noisy = inputs + NOISE * inputs.std((1, 2, 3), keepdim=True) * noise
    shuffled = copy.deepcopy(network)
    shuffle_weights(shuffled.modules(), torch.Generator().manual_seed(1))
    pairs = draw(cause, 3 * count if has_pairs(cause) else 1, random, pair=has_pairs(cause))
    best = logits(network, pairs.images).topk(2).indices
    found = (best.sort(1).values == pairs.labels.sort(1).values).all(1)
    pairs = pairs.rows(found.nonzero()[: count // 2, 0])
    enough = has_pairs(cause) and len(pairs) >= count // 8
    return Subject(
        network,
        shuffled,
        inputs,
        noisy,
        scenes.labels[:, 0],
        scenes.truths[:, 0],
        normalised(pairs.images) if enough else None,
        pairs.labels,
        pairs.truths,
        references,
    )


def spatial_layers(network: nn.Module, image: Tensor, most: int) -> tuple[list[SpatialLayer], str]:
    """Return layers that can be explained, in the order in which they run, and the one that camkit chooses.

    Each output counts once, under its outermost name. If there are more than ``most``, those with the shortest names
    are kept, spread evenly; the first, the last and the chosen one are always among them.
    """
    decision = decide(network, image, every=True)
    with traced(network, image) as live:
        outputs = [call.output for call in live.trace.calls]
    chosen = "" if decision.layer is None else str(decision.layer.ref)
    names: dict[int | None, tuple[str, tuple[int, ...], int]] = {}
    for number, (row, output) in enumerate(zip(decision.rows, outputs, strict=True)):
        if row.verdict or row.layout is None or not row.ref.name:
            continue
        name = str(row.ref)
        known = names.get(output)
        if known is None or (known[0] != chosen and (name == chosen or name.count(".") < known[0].count("."))):
            names[output] = (name, row.layout.grid, number if known is None else known[2])
    layers = [
        SpatialLayer(name, tuple(grid), number / max(1, len(outputs) - 1))
        for name, grid, number in sorted(names.values(), key=lambda entry: entry[2])
    ]
    kept = {0, len(layers) - 1} | {number for number, layer in enumerate(layers) if layer.name == chosen}
    for _, level in itertools.groupby(
        sorted(range(len(layers)), key=lambda number: (layers[number].name.count("."), number)),
        key=lambda number: layers[number].name.count("."),
    ):
        more = [number for number in level if number not in kept]
        free = most - len(kept)
        kept |= set(more if len(more) <= free else _evenly(more, free))
    return [layer for number, layer in enumerate(layers) if number in kept], chosen


def _evenly(numbers: Sequence[int], count: int) -> list[int]:
    """Return ``count`` of the numbers, evenly spread over the list."""
    return [numbers[int((place + 0.5) * len(numbers) / count)] for place in range(count)]


def measured_rows(judged: Subject, layers: int, check_time: Callable[[], None], spread: Spread = "even") -> list[Row]:
    """Measure all methods on a network: at its layers, on the whole model, and what camkit chooses by itself.

    Args:
        judged: the network and its pictures.
        layers: at most this many.
        check_time: called between layers; it may raise to give up.
        spread: how the cells are spread over the picture.
    """
    found, chosen = spatial_layers(judged.network, judged.inputs[:1], layers)
    few = _first(judged, _FEW)
    memories: dict[int, ModelMemory] = {}
    explainers: dict[int, camkit.Explainer] = {}
    rows = [{"layer": "", "method": "random", **_judged(judged, _random_maps)["random"]}]

    def passes(layer: str | None, methods: Sequence[str]) -> Drawing:
        def drawing(network: nn.Module, inputs: Tensor, labels: Sequence[Tensor]) -> Maps:
            memory = memories.setdefault(id(network), ModelMemory(network))
            return _of_passes(network, memory, layer, methods, spread, inputs, labels)

        return drawing

    def public(method: str, layer: str | None) -> Drawing:
        """Draw by the public way, which knows methods that are not a matter of one pass."""

        def drawing(network: nn.Module, inputs: Tensor, labels: Sequence[Tensor]) -> Maps:
            if id(network) not in explainers:
                explainers[id(network)] = camkit.Explainer(network, method=EXPECTED, references=judged.references)
            explainer = explainers[id(network)].using(method, layer)
            targets = [each(classes.tolist()) for classes in labels]
            explained = explainer.batch([inputs], targets, batch_size=_AT_ONCE[inputs.device.type])
            heat = torch.stack([torch.from_numpy(explanation.heatmap) for explanation in explained]).to(inputs.device)
            return {method: list(heat.unflatten(0, (len(inputs), len(labels))).unbind(1))}

        return drawing

    compared = {chosen, found[len(found) // 2].name}
    for layer in found:
        check_time()
        place: Row = {"layer": layer.name, "grid": layer.grid, "depth": round(layer.depth, 3)}
        place["default"] = layer.name == chosen
        rows += _rows(judged, place, AT_LAYERS, passes(layer.name, AT_LAYERS))
        if layer.name in compared:
            rows += _rows(few, {**place, "pictures": len(few.inputs)}, (EXPECTED,), public(EXPECTED, layer.name))
    for method in WHOLE:
        check_time()
        rows += _rows(judged, {"layer": ""}, (method,), passes(None, (method,)))
    check_time()
    rows += _rows(few, {"layer": chosen, "pictures": len(few.inputs)}, (SLOW,), passes(None, (SLOW,)))
    if takes_auto(judged.network):
        rows += _rows(judged, {"layer": ""}, (AUTO,), public(AUTO, None))
        rows[-1] |= _choice_of_auto(judged)
    return rows


def takes_auto(network: nn.Module) -> bool:
    """Tell whether camkit has the method that chooses method and layer together."""
    try:
        camkit.Explainer(network, method=AUTO)
    except MethodError:
        return False
    return True


def _choice_of_auto(judged: Subject) -> Row:
    """Return the layer, the method and the reason of the first picture's map."""
    explanation = camkit.Explainer(judged.network, method=AUTO)(judged.inputs[0], target=int(judged.labels[0]))
    return {"layer": explanation.layer, "took": explanation.method, "reason": explanation.layer_reason}


def _first(judged: Subject, count: int) -> Subject:
    """Return the subject with its first pictures only."""
    return replace(
        judged,
        inputs=judged.inputs[:count],
        noisy=judged.noisy[:count],
        labels=judged.labels[:count],
        truths=judged.truths[:count],
        pairs=None if judged.pairs is None else judged.pairs[:count],
        pair_labels=judged.pair_labels[:count],
        pair_truths=judged.pair_truths[:count],
    )


def _rows(judged: Subject, place: Row, methods: Sequence[str], drawing: Drawing) -> list[Row]:
    """Return a row for each method; if camkit refuses to draw, the row says why."""
    try:
        values = _judged(judged, drawing)
    except Exception as error:  # noqa: BLE001 - a refusal is a result
        return [{**place, "method": method, "refusal": _in_words(error)} for method in methods]
    return [{**place, "method": method, **values[method]} for method in methods]


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:_WORDS]


def _judged(judged: Subject, drawing: Drawing) -> dict[str, Row]:
    """Draw the maps of all pictures, and measure them for each method.

    Raises:
        Exception: whatever camkit raises for the pictures themselves. If it refuses the pairs, the noisy pictures or
            the shuffled network, their figures are None.
    """
    maps = drawing(judged.network, judged.inputs, [judged.labels])
    noisy = _or_nothing(drawing, judged.network, judged.noisy, [judged.labels])
    shuffled = _or_nothing(drawing, judged.shuffled, judged.inputs, [judged.labels])
    pairs: Maps = {}
    if judged.pairs is not None:
        pairs = _or_nothing(drawing, judged.network, judged.pairs, list(judged.pair_labels.unbind(1)))
    rows: dict[str, Row] = {}
    for method, (heat,) in maps.items():
        deletion, insertion = removed_and_kept(judged.network, judged.inputs, judged.labels, heat)
        rows[method] = {
            "auroc": _mean(auroc(heat, judged.truths)),
            "hit": _mean(share_of_maxima(heat, judged.truths)),
            "empty": _mean((heat.flatten(1).amax(1) <= 0).double()),
            "pair": _mean(right_of_two(pairs[method], judged.pair_truths)) if method in pairs else None,
            "deletion": _mean(deletion),
            "insertion": _mean(insertion),
            "stable": _mean(correlation(heat, noisy[method][0])) if method in noisy else None,
            "shuffled_auroc": _mean(auroc(shuffled[method][0], judged.truths)) if method in shuffled else None,
            "shuffled_like": _mean(correlation(heat, shuffled[method][0])) if method in shuffled else None,
        }
    return rows


def _or_nothing(drawing: Drawing, network: nn.Module, inputs: Tensor, labels: Sequence[Tensor]) -> Maps:
    try:
        return drawing(network, inputs, labels)
    except Exception:  # noqa: BLE001 - the figure is None then
        return {}


def _mean(values: Tensor) -> float | None:
    """Return the mean of the values that are numbers; None if there are none."""
    known = values[torch.isfinite(values)]
    return round(float(known.double().mean()), 4) if len(known) else None


def _of_passes(
    network: nn.Module,
    memory: ModelMemory,
    layer: str | None,
    methods: Sequence[str],
    spread: Spread,
    inputs: Tensor,
    labels: Sequence[Tensor],
) -> Maps:
    """Draw maps as an Explainer does, for several methods in one pass, and leave them on the device."""
    run_for = METHODS[methods[0]]
    passes = LayerPasses(network, memory, layer, run_for, "fp32", spread, None)
    at_once = 1 if run_for.need.one_by_one else _AT_ONCE[inputs.device.type]
    maps: Maps = {method: [] for method in methods}
    for rows in torch.arange(len(inputs)).split(at_once):
        here = rows.to(inputs.device)
        targets = tuple(
            each(classes[here].tolist()).bind(None, None).of_pictures(range(1, 1 + len(rows))) for classes in labels
        )
        with autocasting(inputs.device), interruptible():
            captured = passes.captured(targets, inputs[here]).captured
        for method in methods:
            for signed in signed_maps(captured, METHODS[method]):
                maps[method].append(to_heatmap(signed.raws[0], (SIDE, SIDE), captured.features[0].placement))
    several = len(labels)
    return {method: [torch.cat(parts[number::several]) for number in range(several)] for method, parts in maps.items()}


def _random_maps(network: nn.Module, inputs: Tensor, labels: Sequence[Tensor]) -> Maps:  # noqa: ARG001 - a Drawing
    cells = torch.rand(len(labels), len(inputs), 8, 8, generator=torch.Generator().manual_seed(0)).to(inputs.device)
    return {"random": [to_heatmap(part, (SIDE, SIDE)) for part in cells]}


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


def correlation(first: Float[Tensor, "n h w"], second: Float[Tensor, "n h w"]) -> Float[Tensor, " n"]:
    """Return Pearson's correlation of two maps of each picture; NaN if a map is constant."""
    one, two = first.double().flatten(1), second.double().flatten(1)
    vary = (one.amax(1) > one.amin(1)) & (two.amax(1) > two.amin(1))
    one, two = one - one.mean(1, keepdim=True), two - two.mean(1, keepdim=True)
    lengths: Tensor = torch.linalg.vector_norm(one, dim=1) * torch.linalg.vector_norm(two, dim=1)
    return (one * two).sum(1) / lengths.where(vary, torch.nan)


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
