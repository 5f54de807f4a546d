"""Tells which layout an output has, if its shape and its operations do not show it.

Random blocks of the picture are replaced by noise, and then all others. If cells lie where a layout says, those change
more the first time whose part of the picture was replaced: this correlates with the replaced share of each cell. Other
random blocks, which were not replaced, show how large the correlation gets by chance.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from camkit.engine.attach import feature_tensor, forward_hooks
from camkit.engine.guard import interruptible, undisturbed
from camkit.engine.heatmap import cell_means
from camkit.engine.passes import ignoring_errors, on_grid
from camkit.layers.names import modules_by_name
from camkit.layers.trace import Key, Trace, TracedCall
from camkit.types import Extent, Layout, LayoutKind

_BY_CHANCE = 100
"""How many other patterns of blocks show what happens by chance."""

_CERTAIN = 4.0
"""How many standard deviations above chance a correlation counts: by chance, 1 in 30,000 layers reaches it."""

_FEWEST_CELLS = 16
"""With fewer cells than this, camkit does not conclude that they depend on no place."""

_LEAST_SIDE, _MOST_BLOCKS = 3, 24
"""The least cells along each axis of a grid that gives the blocks their size, and the most blocks along an axis; finer
cells are looked at together."""

_SEED = 5821934

Verdict: TypeAlias = Literal["sure", "unsure", "elsewhere", "nowhere"]


@dataclass(frozen=True)
class LayoutReading:
    """How one call's output is laid out, and whether its cells lie there.

    A verdict is "sure", "unsure" if most cells show no place, "elsewhere" if they are mirrored, turned or moved, or
    "nowhere" if they depend on no part of the picture in particular, such as learned vectors that attend to all tokens.
    Without a layout, the output has no grid, or its cells lie elsewhere.
    """

    layout: Layout | None = None
    verdict: Verdict = "sure"

    @property
    def grid(self) -> tuple[int, ...]:
        """The sides of the grid; empty if there is none."""
        return () if self.layout is None else self.layout.grid

    @property
    def unsure(self) -> bool:
        """True if the position of the cells is not certain."""
        return self.verdict in ("unsure", "nowhere")


Changes: TypeAlias = Mapping[tuple[Key, LayoutKind], Tensor]
"""How much more each cell or token of a call's output changed the first time, for each way to find its channels."""


def find_orders(trace: Trace, options: Mapping[TracedCall, Sequence[Layout]]) -> dict[TracedCall, LayoutReading]:
    """Choose a layout for each output, and tell whether its cells lie there.

    Outputs of one shape usually have one layout. If an output does not show its own, that of the one counts that shows
    it best: attention mixes the cells of later layers.

    Args:
        trace: the pass that returned the outputs.
        options: the layouts that each output may have, the likely ones first. If the model runs no more, these count.

    Returns:
        What was found; nothing for an output that does not depend on the picture.
    """
    if not options:
        return {}
    last = list(options)[-1]
    changed: list[tuple[Tensor, Changes]] = []
    patterns = functools.cache(_patterns)
    for change in _changed(trace, options):
        changed.append(change)
        if sum(replaced[0].numel() for replaced, _ in changed) < 64:
            continue  # fewer blocks do not tell a grid from one that begins a token later
        deepest = _orders({last: options[last]}, changed, patterns).get(last)
        if deepest is not None and deepest.verdict in ("sure", "elsewhere"):
            break
    if not changed:
        return {call: LayoutReading(layouts[0], "unsure") for call, layouts in options.items()}
    return _orders(options, changed, patterns)


def _orders(
    options: Mapping[TracedCall, Sequence[Layout]],
    changed: Sequence[tuple[Tensor, Changes]],
    patterns: Callable[[Tensor, tuple[int, ...], Extent], Tensor],
) -> dict[TracedCall, LayoutReading]:
    """Return what the changed pictures show of each output; ``patterns`` is ``_patterns``, which keeps its results."""

    def correlations(calls: Sequence[TracedCall], layout: Layout) -> Float[Tensor, "calls reaches patterns"]:
        """Return the mean correlation of the cells of some outputs with each pattern."""
        cells = torch.stack([changes[call.key, layout.kind] for call in calls for _, changes in changed])
        grids = on_grid(cells, layout) if layout.has_tokens else cells
        coarse = tuple(min(side, _MOST_BLOCKS) for side in layout.grid)
        ranks = _standard(cell_means(grids, coarse).flatten(1).argsort().argsort().float())
        expected = torch.stack([patterns(replaced, coarse, layout.extent) for replaced, _ in changed])
        return torch.einsum("irpc,nic->nrp", expected, ranks.unflatten(0, (len(calls), -1))) / len(changed)

    alike: defaultdict[tuple[Layout, ...], list[TracedCall]] = defaultdict(list)
    for call, layouts in options.items():
        if any(changes[call.key, layouts[0].kind].any() for _, changes in changed):
            alike[tuple(layouts)].append(call)
    shown: dict[TracedCall, tuple[Layout, Tensor]] = {}
    clearest: defaultdict[Layout, float] = defaultdict(float)
    for layouts, calls in alike.items():
        measured = [correlations(calls, layout) for layout in layouts]
        clear = torch.stack([_deviations(each)[:, :, 0].amax(1) for each in measured], 1)  # (calls, layouts)
        most = clear[clear.amax(1).argmax()]
        for number, call in enumerate(calls):
            decided = next((row for row in (clear[number], most) if _is_decided(row)), None)
            best = 0 if decided is None else int(decided.argmax())
            shown[call] = layouts[best], measured[best][number]
            clearest[layouts[best]] = max(clearest[layouts[best]], float(clear[number, best]))
    found: dict[TracedCall, LayoutReading] = {}
    for call, (layout, own) in shown.items():
        verdict = _verdict(own, clearest[layout], layout)
        found[call] = LayoutReading(None if verdict == "elsewhere" else layout, verdict)
    return found


def _is_decided(clear: Float[Tensor, "layouts"]) -> bool:
    """Tell whether a layout fits clearly, and the likely one does or fits by half a deviation less."""
    return float(clear.amax()) > _CERTAIN and (int(clear.argmax()) == 0 or float(clear.amax() - clear[0]) > 0.5)


def _deviations(correlations: Float[Tensor, "*calls reaches patterns"]) -> Float[Tensor, "*calls reaches patterns"]:
    """Return how far correlations lie above chance, in standard deviations."""
    chance = correlations[..., 1 : 1 + _BY_CHANCE]
    return (correlations - chance.mean(-1, keepdim=True)) / chance.std(-1, keepdim=True).clamp(min=1e-9)


def _verdict(correlations: Float[Tensor, "reaches patterns"], clearest: float, layout: Layout) -> Verdict:
    """Return the verdict on an output; ``clearest`` is the largest deviation among all outputs of its layout."""
    deviations = _deviations(correlations)
    own = deviations[:, 0]
    clear, size = float(own.max()), float(correlations[own.argmax(), 0])
    if float(deviations[:, 1 + _BY_CHANCE :].max()) > max(_CERTAIN, clear + _CERTAIN):
        return "elsewhere"
    # Tokens may be learned vectors. Among hundreds of outputs, such as those of Perceiver, some correlate by chance.
    shows_none = clear < _CERTAIN / 2 or clearest < _CERTAIN
    if shows_none and layout.has_tokens and math.prod(layout.grid) >= _FEWEST_CELLS:
        return "nowhere"
    # If a quarter of the cells lie where the layout says, as after a cut into windows, the correlation is a quarter.
    return "sure" if clear > _CERTAIN and size > 0.4 else "unsure"


def _standard(values: Float[Tensor, "*rows cells"]) -> Float[Tensor, "*rows cells"]:
    """Return values whose products are correlations."""
    values = values - values.mean(-1, keepdim=True)
    return functional.normalize(values, dim=-1)


def _patterns(
    replaced: Float[Tensor, "patterns *blocks"], grid: tuple[int, ...], extent: Extent
) -> Float[Tensor, "reaches patterns cells"]:
    """Return how much of what each cell of a grid looks at is replaced, for each reach of a cell.

    The patterns are those of the picture, of chance, and the picture's as moved cells would show it.
    """
    found = []
    for reach in (0, 1, 2):  # how many cells around itself a cell may look at
        shares = replaced
        for axis, cells in enumerate(grid):
            start, end = extent[axis] if extent else (0.0, 1.0)
            count = replaced.shape[1 + axis]
            edges = torch.stack([torch.arange(cells) - reach, torch.arange(cells) + 1 + reach])[..., None]
            low, high = (edges / cells - start) / (end - start) * count
            blocks = torch.arange(count)
            overlap = (torch.minimum(high, blocks + 1) - torch.maximum(low, blocks)).clamp(min=0)
            overlap /= overlap.sum(1, keepdim=True).clamp(min=1e-9)
            shares = torch.tensordot(shares, overlap, ([1 + axis], [1])).movedim(-1, 1 + axis)
        found.append(torch.cat([shares, torch.stack(list(_moved(shares[0])))]).flatten(1))
    return _standard(torch.stack(found))


def _moved(shares: Float[Tensor, "*grid"]) -> Iterator[Tensor]:
    """Yield a grid mirrored and rolled along each axis, and turned."""
    axes = range(shares.dim())
    for axis in axes:
        yield shares.flip(axis)
        for places in range(1, shares.shape[axis]):
            yield shares.roll(places, axis)
    yield shares.flip(*axes)
    if len(set(shares.shape[-2:])) == 1 and shares.dim() > 1:
        turned = shares.rot90(1, (-2, -1))
        yield from (shares.mT, turned, turned.flip(-2, -1), turned.flip(-2))


def _changed(
    trace: Trace, options: Mapping[TracedCall, Sequence[Layout]]
) -> Iterator[tuple[Float[Tensor, "patterns *blocks"], Changes]]:
    """Run the model on the picture, and on pairs of pictures of which random blocks, or all others, are replaced.

    Yield the blocks that were replaced and those of ``_BY_CHANCE`` other patterns, as 0 and 1, and what changed; stop
    if the model does not run.
    """
    kinds = {call.key: tuple({layout.kind for layout in layouts}) for call, layouts in options.items()}
    grids = {layout.grid for layouts in options.values() for layout in layouts}
    large = [grid for grid in grids if min(grid) >= _LEAST_SIDE] or grids
    blocks = tuple(min(side, _MOST_BLOCKS) for side in min(large, key=math.prod))
    picture = trace.leaf.detach()
    noise = _noise(picture)
    pool = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)[len(blocks) - 1]
    # Cells that look around themselves show it better if neighbours are replaced together.
    width = 3 if min(blocks) >= 8 else 1
    generator = torch.Generator().manual_seed(_SEED)
    with ignoring_errors():  # a model may count its passes
        before = _features(trace, picture, kinds)
        for _ in range(4):  # one is enough for most networks
            drawn = torch.randn((1 + _BY_CHANCE, 1, *blocks), generator=generator)
            patterns = (pool(drawn, width, 1, width // 2, count_include_pad=False)[:, 0] > 0).float()
            replaced = patterns[0]
            for axis, (side, count) in enumerate(zip(trace.size, blocks, strict=True)):
                replaced = replaced.index_select(axis, torch.arange(side) * count // side)
            chosen = replaced.to(picture) > 0
            one = _features(trace, noise.where(chosen, picture), kinds)
            rest = _features(trace, picture.where(chosen, noise), kinds)
            yield patterns, {key: _contrast(features, one[key], rest[key]) for key, features in before.items()}


def _contrast(
    features: Float[Tensor, "*cells directions"],
    one: Float[Tensor, "*cells directions"],
    rest: Float[Tensor, "*cells directions"],
) -> Float[Tensor, "*cells"]:
    """Return from -1 to 1 how much more cells change with some blocks than with the rest, whatever their scale is."""
    by_one, by_rest = ((other - features).square().sum(-1) for other in (one, rest))
    return (by_one - by_rest) / (by_one + by_rest).clamp(min=torch.finfo(torch.float32).tiny)


def _features(
    trace: Trace, picture: Tensor, kinds: Mapping[Key, tuple[LayoutKind, ...]]
) -> dict[tuple[Key, LayoutKind], Float[Tensor, "*cells directions"]]:
    """Run the model, and return the projected features of each cell or token of some outputs."""
    modules = modules_by_name(trace.model)
    names = {modules[name]: name for name, _ in kinds}
    counts = dict.fromkeys(names, 0)
    found: dict[tuple[Key, LayoutKind], Tensor] = {}

    def end(module: Any, _: list[Tensor], output: Any) -> None:
        counts[module] += 1
        key = names[module], counts[module]
        maps = feature_tensor(output)
        if maps is None:
            return
        for kind in kinds.get(key, ()):
            features = maps[1].movedim(0, 1) if kind == "sequence_first" else maps[1]
            features = features.movedim(1, -1) if kind in ("channels_first", "tokens_last") else features
            # On a few random directions, distances are kept.
            directions = torch.randn(features.shape[-1], 8, generator=torch.Generator().manual_seed(_SEED))
            found[key, kind] = (features[0].float() @ directions.to(features.device)).cpu()

    for part in trace.model.modules():  # an earlier pass may have switched parts of the model to training
        part.training = False
    with torch.no_grad(), undisturbed(), forward_hooks(dict.fromkeys(names, end)), interruptible():
        trace.model(picture.clone())
    return found


def _noise(image: Tensor) -> Tensor:
    """Return uniform noise within two standard deviations of the image's mean, and within its range."""
    values = image.float()
    mean, deviation = values.mean(), values.std(correction=0)
    low, high = torch.maximum(values.min(), mean - 2 * deviation), torch.minimum(values.max(), mean + 2 * deviation)
    if not high > low:  # all pixels are equal
        low, high = (low.clamp(max=0), high.clamp(min=0)) if low != 0 else (low, low + 1)
    drawn = torch.rand(image.shape, generator=torch.Generator().manual_seed(_SEED)).to(image.device)
    return (low + drawn * (high - low)).to(image)
