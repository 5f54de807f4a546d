"""What is wrong with a model, said of its layers' statistics: pure functions, each for one fault, with its limits.

A limit stands where healthy networks don't reach: those of torchvision as they are initialised and as they are
trained, in both modes, and networks with the fault lie orders of magnitude apart. ``docs/diagnose.md`` has the figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from camkit.diagnosis.values import Finding, LayerStatistics, Setting, counted
from camkit.layers.names import WHOLE_MODEL

VANISHING = 1e-4
"""First layers whose gradient is so much smaller than the last ones' learn ten thousand times slower than those."""

EXPLODING = 1e4
"""Likewise larger: a step that suits the last layers throws the first ones ten thousand times too far.

In evaluation mode, batch normalisations that have seen few batches let everything through almost as it is, and sizes
are not what they will be: gradients of healthy fresh networks fall by up to nine orders of magnitude there, and grow by
thirteen. So neither is judged then.
"""

SATURATED = 0.5
"""The share of values on the flat ends of a sigmoid or tanh from which most of the gradient is lost there."""

ENOUGH_PICTURES = 8
"""From so many on, a channel without an answer tells of the channel; on fewer, of the pictures. The last layers of
trained networks answer to one picture in five or so."""

OFF = 8.0
"""How many times the other channels' usual size a channel stays below zero, to be called switched off. Values spread
as a normal distribution does lie beyond it in one channel of 30 million."""

_MANY = 16
"""So many channels are all silent by chance in one of 65,000 layers; of fewer, with one number each, chance does it."""

_SPREAD = 3.0
_END = 4
"""The first and the last quarter of the layers are compared: in each, what lies on a branch beside doesn't count."""


def findings(rows: Sequence[LayerStatistics], setting: Setting | None = None) -> list[Finding]:
    """Return what is wrong, the gravest first.

    Args:
        rows: of all layers, in the order in which they ended.
        setting: what is known besides.
    """
    known = setting or Setting()
    rules: tuple[Callable[[Sequence[LayerStatistics], Setting], list[Finding]], ...] = (
        _nan,
        _infinity,
        _dead,
        _saturated,
        _gradient_sizes,
        _no_gradient,
        _frozen,
    )
    return [finding for rule in rules for finding in rule(rows, known)]


def _nan(rows: Sequence[LayerStatistics], setting: Setting) -> list[Finding]:
    if "" in setting.nan_given:
        return [Finding("nan", ("",), "the pictures themselves hold NaN, before the first layer")]
    reached = [row for row in rows if row.activations.nan]
    if not reached:
        back = setting.backwards[:1]
        text = "the gradient holds NaN or infinity from {!r} on, on its way back from the loss; the activations don't"
        return [Finding("nan", tuple(setting.backwards), text.format(back[0] or "the model"))] if back else []
    return [_born("nan", "NaN", reached, setting.nan_given)]


def _infinity(rows: Sequence[LayerStatistics], setting: Setting) -> list[Finding]:
    if "" in setting.inf_given:
        return [Finding("infinity", ("",), "the pictures themselves hold infinity, before the first layer")]
    reached = [row for row in rows if row.activations.inf]
    return [_born("infinity", "infinity", reached, setting.inf_given)] if reached else []


def _born(kind: str, what: str, reached: Sequence[LayerStatistics], given: frozenset[str]) -> Finding:
    """Name the layer in which something began: the first that returns it, or what is around it if it was given it."""
    first = reached[0]
    numbers = first.activations
    names = tuple(row.layer for row in reached)
    share = (numbers.nan if kind == "nan" else numbers.inf) / max(numbers.count, 1)
    amount = f"{share:.2%} of its output" if share < 0.9999 else "all of its output"
    if first.layer in given:
        around = first.layer
        while around and around in given:
            around = around.rpartition(".")[0]
        text = f"{what} begins in the code of {around or 'the model'!r}, which hands it to {first.layer!r}"
        names = (around, *names)
    elif not first.sound:
        text = f"{what} begins in {first.name!r} ({first.kind}), whose parameters hold NaN or infinity: {amount}"
    else:
        text = f"{what} begins in {first.name!r} ({first.kind}): {amount}, of an input that has none"
    more = len(reached) - 1
    return Finding(
        "nan" if kind == "nan" else "infinity",
        names,
        text + (f"; {counted(more, 'later layer')} have it too" if more else ""),
    )


def _gradient_sizes(rows: Sequence[LayerStatistics], setting: Setting) -> list[Finding]:
    """Compare the gradients' norms in the first and the last layers.

    The norm of the whole output is compared and not the size of its numbers: a pooling shares one gradient out among
    the places, which makes each smaller and changes the norm little. What comes after the last layer with parameters,
    such as a sigmoid that is sure of its answers, belongs to the score.
    """
    until = max((number for number, row in enumerate(rows, start=1) if row.parameters), default=len(rows))
    sizes = [(row, row.gradients.norm) for row in rows[:until] if row.gradients is not None]
    sizes = [(row, norm) for row, norm in sizes if norm > 0 and math.isfinite(norm)]
    if len(sizes) < _END or setting.backwards or setting.unnormalised:
        return []
    end = len(sizes) // _END
    first = max(sizes[:end], key=lambda one: one[1])
    last = max(sizes[-end:], key=lambda one: one[1])
    ratio = first[1] / last[1]
    if VANISHING <= ratio <= EXPLODING:
        return []
    text = (
        f"the gradient's norm {'falls' if ratio < 1 else 'grows'} from {last[1]:.2g} at {last[0].name!r} to "
        f"{sizes[0][1]:.2g} at {sizes[0][0].name!r}: "
    )
    if ratio < 1:
        small = [row.layer for row, norm in sizes if norm < VANISHING * last[1]]
        advice = "the first layers hardly learn; normalisation, skip connections or ReLU keep it up"
        return [Finding("vanishing", tuple(small), text + advice)]
    large = [row.layer for row, norm in sizes if norm > EXPLODING * last[1]]
    advice = "a step that suits the last layers is far too long for the first; smaller weights or normalisation help"
    return [Finding("exploding", tuple(large), text + advice)]


def _no_gradient(rows: Sequence[LayerStatistics], setting: Setting) -> list[Finding]:
    """Name the layers with parameters whose gradient is exactly zero, if it is from the first on.

    A branch without a gradient lies behind something that is silent. Weights of zero let none through either.
    """
    known = [row for row in rows if row.gradients is not None and row.parameters]
    zero = [row for row in known if row.gradients is not None and row.gradients.norm == 0]
    if not zero or zero[0] is not known[0] or setting.zero_weights or setting.backwards:
        return []
    names = tuple(row.layer for row in zero)
    last = zero[-1]
    after = [row.name for row in rows if row.dead is not None and row.channels and len(row.dead) == row.channels]
    why = f"; {after[-1]!r} lets none through" if after else ""
    others = f" and {counted(len(names) - 1, 'more layer')}" if len(names) > 1 else ""
    return [Finding("no gradient", names, f"no gradient reaches {last.name!r}{others}: it is exactly zero{why}")]


def _dead(rows: Sequence[LayerStatistics], setting: Setting) -> list[Finding]:
    found: list[Finding] = []
    before: tuple[int, ...] = ()
    for row in rows:
        before = () if row.parameters else before
        inside = any(one.layer.startswith(f"{row.layer}.") or not row.layer for one in found)
        if not row.dead or row.dead == before or inside:
            continue
        text = _dead_text(row, setting.pictures)
        if text:
            found.append(Finding("dead", (row.layer,), text))
            before = row.dead
    return found


def _dead_text(row: LayerStatistics, pictures: int) -> str:
    """Return what to say of channels that are zero throughout; nothing where a healthy layer has as many."""
    dead = len(row.dead or ())
    few = pictures < ENOUGH_PICTURES
    shown = "this picture" if pictures == 1 else f"these {pictures} pictures"
    what = f"in {row.name!r} ({row.kind}) {dead} of {row.channels} channels are"
    if dead == row.channels and (row.off or row.channels >= _MANY or _places(row) > 1):
        meaning = "so it tells the next layer nothing about them" if few else "so the layer is dead"
        return f"{what} silent on {shown}: zero in every place, {meaning}"
    if row.off:
        these = "all" if len(row.off) == dead else str(len(row.off))
        far = f"{these} of them stay far below zero, as after a large negative bias"
        return f"{what} {'silent' if few else 'dead'} on {shown}, and {far}: channel {_listed(row.off)}"
    if not few and dead / row.channels > chance_silent(row.channels):
        return f"{what} dead on {shown}: zero in every place of each, and so without a gradient"
    return ""


def _places(row: LayerStatistics) -> int:
    """Return how many cells the output has for each picture and channel."""
    return row.activations.count // max(row.channels * row.shape[0], 1)


def chance_silent(channels: int) -> float:
    """Return the share of channels up to which chance alone may silence a layer.

    Where pictures look alike to a layer, as they do behind the deep layers of a fresh network, each channel has one
    sign for all of them: half are silent, with the spread of as many throws of a coin. Three of its deviations are
    allowed for.

    >>> chance_silent(64), chance_silent(4)
    (0.6875, 1.0)
    """
    return min(1.0, 0.5 + _SPREAD * 0.5 / math.sqrt(channels))


def _listed(numbers: Sequence[int], most: int = 6) -> str:
    return ", ".join(map(str, numbers[:most])) + (f" and {len(numbers) - most} more" if len(numbers) > most else "")


def _saturated(rows: Sequence[LayerStatistics], setting: Setting) -> list[Finding]:  # noqa: ARG001 - as every rule
    """Name sigmoids and tanhs on their flat ends; not the model's own last one, whose answers may well be sure."""
    return [
        Finding(
            "saturated",
            (row.layer,),
            f"{row.saturated:.0%} of the output of {row.name!r} ({row.kind}) lies where the function is flat and lets "
            "less than 1 % of the gradient through; what it is given is too large",
        )
        for row in rows[:-1]
        if row.saturated is not None and row.saturated > SATURATED
    ]


def _frozen(rows: Sequence[LayerStatistics], setting: Setting) -> list[Finding]:
    """Name layers whose parameters are not trained while others' are; of a model to be trained, also if none is."""
    having = list({row.layer.partition("#")[0]: row for row in rows if row.parameters}.values())
    frozen = [row for row in having if not row.trained]
    if not frozen or (len(frozen) == len(having) and not setting.to_train):
        return []
    numbers = sum(row.parameters for row in frozen)
    all_numbers = sum(row.parameters for row in having)
    names = tuple(row.layer.partition("#")[0] for row in frozen)
    listed = ", ".join(repr(name or WHOLE_MODEL) for name in names[:3]) + (", ..." if len(names) > 3 else "")
    text = f"{numbers:,} of {all_numbers:,} parameters don't require gradients and stay as they are: {listed}"
    return [Finding("frozen", names, text)]
