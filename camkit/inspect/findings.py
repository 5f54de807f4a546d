"""The rules that find faults in the statistics of a model's layers: a pure function for each fault, with its limits.

Healthy networks stay within the limits: torchvision's, freshly initialised and trained, in both modes. Networks with
the fault lie orders of magnitude beyond them. ``docs/diagnose.md`` has the figures.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from camkit.inspect.layer_statistics import FLAWS, Flaw, LayerStatistics, Measured
from camkit.kit.wording import counted, first_of
from camkit.layers.names import THE_MODEL

VANISHING = 1e-4
"""If the gradient of the first layers is smaller by this factor, they learn ten thousand times slower than the last."""

EXPLODING = 1e4
"""If it is larger by this factor, a step that suits the last layers is ten thousand times too long for the first.

Neither limit is applied in evaluation mode if a batch normalisation has seen few batches. It then changes its input
very little, and sizes differ from those in training: the gradients of healthy fresh networks shrink by up to nine
orders of magnitude and grow by up to thirteen.
"""


_QUARTERS = 4
"""The first and the last quarter of the layers are compared, by the largest gradient in each, so that layers on side
branches don't count."""


@dataclass(frozen=True)
class Finding:
    """Something that is wrong with a model.

    Attributes:
        kind: the kind of fault.
        layers: the affected layers, starting with the one where it begins.
        text: one sentence, with the numbers behind it.
    """

    kind: Literal["nan", "infinity", "exploding", "vanishing", "no gradient", "dead", "saturated", "frozen"]
    layers: tuple[str, ...]
    text: str

    @property
    def layer(self) -> str:
        """The layer where it begins."""
        return self.layers[0] if self.layers else ""

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {"kind": self.kind, "layer": self.layer, "layers": list(self.layers), "text": self.text}


def findings(measured: Measured, pictures: int, *, to_train: bool) -> list[Finding]:
    """Return what is wrong, the most serious first.

    Args:
        measured: what a pass measured.
        pictures: the number of pictures.
        to_train: whether the model ran as in a training step, with the caller's own choice of frozen parameters.
    """
    # Sigmoids and tanhs on their flat ends, where most of the gradient is lost; the model's last layer may be sure
    saturated = [
        Finding(
            "saturated",
            (row.layer,),
            f"{row.saturated:.0%} of the output of {row.name!r} ({row.kind}) lies where the function is flat and lets "
            "less than 1 % of the gradient through; its input is too large",
        )
        for row in measured.rows[:-1]
        if row.saturated is not None and row.saturated > 0.5
    ]
    return [
        *_not_finite(measured),
        *_dead(measured.rows, pictures),
        *saturated,
        *_gradient_sizes(measured),
        *_no_gradient(measured),
        *_frozen(measured.rows, to_train=to_train),
    ]


def _not_finite(measured: Measured) -> Iterator[Finding]:
    for kind, field in FLAWS.items():
        what = "NaN" if kind == "nan" else kind
        given, reached = measured.given[kind], [row for row in measured.rows if getattr(row.activations, field)]
        if "" in given:
            yield Finding(kind, ("",), f"the pictures themselves hold {what}, before the first layer")
        elif reached:
            share = getattr(reached[0].activations, field) / max(reached[0].activations.count, 1)
            yield _origin(kind, what, share, reached, given)
        elif kind == "nan" and measured.backwards:
            first = measured.backwards[0] or THE_MODEL
            text = f"on its way back from the loss, the gradient holds NaN or infinity from {first!r} on; no activation"
            yield Finding("nan", measured.backwards, f"{text} does")


def _origin(
    kind: Flaw,
    what: str,
    share: float,
    reached: Sequence[LayerStatistics],
    given: frozenset[str],
) -> Finding:
    """Name the first layer that returns NaN or infinity, or the module around it if its input already had them."""
    first = reached[0]
    names = tuple(row.layer for row in reached)
    amount = f"{share:.2%} of its output" if share < 0.9999 else "all of its output"
    if first.layer in given:
        around = first.layer
        while around and around in given:
            around = around.rpartition(".")[0]
        text = f"{what} begins in the code of {around or THE_MODEL!r}, which passes it to {first.layer!r}"
        names = (around, *names)
    elif not first.sound:
        text = f"{what} begins in {first.name!r} ({first.kind}), whose parameters hold NaN or infinity: {amount}"
    else:
        text = f"{what} begins in {first.name!r} ({first.kind}): {amount}; its input has none"
    if more := len(reached) - 1:
        text += f"; {counted(more, 'later layer')} {'has' if more == 1 else 'have'} it too"
    return Finding(kind, names, text)


def _gradient_sizes(measured: Measured) -> list[Finding]:
    """Compare the gradients' norms in the first and the last layers.

    Norms of whole outputs are compared, not the sizes of their numbers: a pooling divides one gradient among many
    cells, which makes each smaller and changes the norm little. Layers after the last one with parameters, such as a
    sigmoid that is sure of its answers, count as part of the score.
    """
    rows = measured.rows
    end = max((number for number, row in enumerate(rows, start=1) if row.parameters), default=len(rows))
    sizes = [(row, row.gradients.norm) for row in rows[:end] if row.gradients is not None]
    sizes = [(row, norm) for row, norm in sizes if norm > 0 and math.isfinite(norm)]
    if len(sizes) < _QUARTERS or measured.backwards or measured.unnormalised:
        return []
    quarter = len(sizes) // _QUARTERS
    _, first_norm = max(sizes[:quarter], key=lambda size: size[1])
    last_row, last_norm = max(sizes[-quarter:], key=lambda size: size[1])
    ratio = first_norm / last_norm
    span = f"from {last_norm:.2g} at {last_row.name!r} to {sizes[0][1]:.2g} at {sizes[0][0].name!r}"
    if ratio < VANISHING:
        affected = tuple(row.layer for row, norm in sizes if norm < VANISHING * last_norm)
        advice = "the first layers hardly learn; normalisation, skip connections or ReLU help"
        return [Finding("vanishing", affected, f"the gradient's norm falls {span}: {advice}")]
    if ratio > EXPLODING:
        affected = tuple(row.layer for row, norm in sizes if norm > EXPLODING * last_norm)
        advice = "a step that suits the last layers is far too long for the first; smaller weights or normalisation"
        return [Finding("exploding", affected, f"the gradient's norm grows {span}: {advice} help")]
    return []


def _no_gradient(measured: Measured) -> list[Finding]:
    """Name the layers with parameters whose gradient is exactly zero, if the first layer is one of them.

    A branch without a gradient further on is silenced by something else. Weights of zero are no fault either.
    """
    rows = measured.rows
    with_gradient = [row for row in rows if row.gradients is not None and row.parameters]
    zero = [row for row in with_gradient if row.gradients is not None and row.gradients.norm == 0]
    if not zero or zero[0] is not with_gradient[0] or measured.zero_weights or measured.backwards:
        return []
    names = tuple(row.layer for row in zero)
    last = zero[-1]
    dead = [row.name for row in rows if row.dead is not None and row.channels and len(row.dead) == row.channels]
    why = f"; {dead[-1]!r} lets none through" if dead else ""
    others = f" and {counted(len(names) - 1, 'more layer')}" if len(names) > 1 else ""
    return [Finding("no gradient", names, f"no gradient reaches {last.name!r}{others}: it is exactly zero{why}")]


def _dead(rows: Sequence[LayerStatistics], pictures: int) -> list[Finding]:
    """Report dead channels once, in the first layer that has them and not again in the layer around it."""
    dead_layers: list[Finding] = []
    reported: tuple[int, ...] = ()  # channels, until a layer with parameters mixes them
    for row in rows:
        reported = () if row.parameters else reported
        is_around = any(finding.layer.startswith(f"{row.layer}.") or not row.layer for finding in dead_layers)
        text = "" if is_around or row.dead in (None, (), reported) else _dead_text(row, pictures)
        if text:
            dead_layers.append(Finding("dead", (row.layer,), text))
            reported = row.dead or ()
    return dead_layers


def _dead_text(row: LayerStatistics, pictures: int) -> str:
    """Return the sentence about channels that are zero throughout; empty if a healthy layer may have as many."""
    dead = len(row.dead or ())
    cells = row.activations.count // max(row.channels * row.shape[0], 1)  # for each picture and channel
    # With eight pictures, a silent channel says something about the channel; with fewer, about the pictures. Channels
    # in the last layers of trained networks respond to about one picture in five.
    few = pictures < 8
    batch = "this picture" if pictures == 1 else f"these {pictures} pictures"
    what = f"in {row.name!r} ({row.kind}) {dead} of {row.channels} channels are"
    # All of this many channels are silent by chance in one of 65,000 layers; fewer, with one number each, more often
    if dead == row.channels and (row.off or row.channels >= 16 or cells > 1):
        meaning = "so the next layer learns nothing about them" if few else "so the layer is dead"
        return f"{what} silent on {batch}: zero in every cell, {meaning}"
    if row.off:
        count = "all" if len(row.off) == dead else str(len(row.off))
        far = f"{count} of them stay far below zero, as after a large negative bias"
        # Channels that a sentence lists
        return f"{what} {'silent' if few else 'dead'} on {batch}, and {far}: channel {first_of(row.off, 6)}"
    # If all pictures look alike to a layer, as in the deep layers of a fresh network, each channel has the same sign
    # for all of them. Chance then silences half of the channels, as one coin toss for each channel would: the limit
    # lies three standard deviations above half.
    if not few and dead / row.channels > 0.5 + 3.0 * 0.5 / math.sqrt(row.channels):
        return f"{what} dead on {batch}: zero in every cell of each, so they get no gradient"
    return ""


def _frozen(rows: Sequence[LayerStatistics], *, to_train: bool) -> list[Finding]:
    """Name layers whose parameters are frozen while others' are trained; for a model in training, also if all are."""
    with_parameters = list({row.layer.partition("#")[0]: row for row in rows if row.parameters}.values())
    frozen = [row for row in with_parameters if not row.trained]
    if not frozen or (len(frozen) == len(with_parameters) and not to_train):
        return []
    numbers = sum(row.parameters for row in frozen)
    all_numbers = sum(row.parameters for row in with_parameters)
    names = tuple(row.layer.partition("#")[0] for row in frozen)
    listed = ", ".join(repr(name or THE_MODEL) for name in names[:3]) + (", ..." if len(names) > 3 else "")
    text = f"{numbers:,} of {all_numbers:,} parameters do not require gradients and will not change: {listed}"
    return [Finding("frozen", names, text)]
