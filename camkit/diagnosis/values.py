"""What a diagnosis is made of: statistics of tensors and layers, and findings."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from camkit.layers.names import WHOLE_MODEL

Kind: TypeAlias = Literal["nan", "infinity", "exploding", "vanishing", "no gradient", "dead", "saturated", "frozen"]
"""What a finding is about."""


def finite(number: float | None) -> float | None:
    """Return a number that strict JSON can hold, None instead of NaN and infinity."""
    return None if number is None or not math.isfinite(number) else number


def counted(number: int, what: str) -> str:
    """Return ``"1 picture"`` or ``"8 pictures"``."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


@dataclass(frozen=True)
class Histogram:
    """How many values lie in each of equally wide bins from ``low`` to ``high``; the last bin holds ``high`` too."""

    low: float
    high: float
    counts: tuple[int, ...]

    @property
    def edges(self) -> tuple[float, ...]:
        """The ends of the bins, one more than there are bins."""
        step = (self.high - self.low) / len(self.counts)
        return (*(self.low + number * step for number in range(len(self.counts))), self.high)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {"low": self.low, "high": self.high, "counts": list(self.counts)}


@dataclass(frozen=True)
class TensorStatistics:
    """What is said of a tensor's numbers. All but ``count``, ``nan`` and ``inf`` is of the finite ones, NaN if none is.

    Attributes:
        count: how many numbers there are.
        nan, inf: how many of them are NaN, and infinite.
        mean, std: the mean and the standard deviation of the numbers themselves (divided by their count, not one less).
        low, high: the least and the largest.
        zeros: the share that is exactly zero, 0..1.
        norm: the root of the sum of the squares.
        histogram: how they are distributed from ``low`` to ``high``.
        magnitudes: how the decimal logarithms of the absolute values that aren't zero are distributed; of gradients
            only. The first and the last bin hold what lies beyond them.
    """

    count: int
    nan: int
    inf: int
    mean: float
    std: float
    low: float
    high: float
    zeros: float
    norm: float
    histogram: Histogram
    magnitudes: Histogram | None = None

    @property
    def norm_of_all(self) -> float:
        """The norm with what is not finite: NaN if there is any, else infinity."""
        return math.nan if self.nan else math.inf if self.inf else self.norm

    def scaled(self, factor: float) -> TensorStatistics:
        """Return the statistics of the numbers times a positive factor; of their logarithms nothing is kept."""
        if factor == 1:
            return self
        drawn = Histogram(self.histogram.low * factor, self.histogram.high * factor, self.histogram.counts)
        numbers = {name: factor * getattr(self, name) for name in ("mean", "std", "low", "high", "norm")}
        return replace(self, histogram=drawn, magnitudes=None, **numbers)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; null where there is no finite number."""
        numbers = {name: finite(getattr(self, name)) for name in ("mean", "std", "low", "high", "zeros", "norm")}
        drawn = {"histogram": self.histogram.to_dict()}
        if self.magnitudes is not None:
            drawn["magnitudes"] = self.magnitudes.to_dict()
        return {"count": self.count, "nan": self.nan, "inf": self.inf, **numbers, **drawn}


@dataclass(frozen=True)
class LayerStatistics:
    """One run of one layer.

    Attributes:
        layer: its name, with the number of the run where it ran several times (``"relu#2"``); "" is the model itself.
        kind: its type's name.
        shape: of its output, the pictures counted.
        parameters, trained: how many numbers its own parameters hold, and how many of those require gradients. The
            parameters of the layers within it are counted there.
        activations: of its output.
        gradients: of the loss's gradient with respect to its output; None where there is none.
        parameter_gradient: the norm of the loss's gradient with respect to its own parameters; None where there is
            none.
        channels: how many the output has; 0 where it has no such axis.
        dead: after a ReLU or a function like it, the channels that are zero in every place of every picture; None
            elsewhere.
        off: those of them that are far from ever being anything else.
        saturated: after a sigmoid or tanh, the share of values where its slope is below 1 % of its largest; None
            elsewhere.
        sound: whether its own parameters hold neither NaN nor infinity.
    """

    layer: str
    kind: str
    shape: tuple[int, ...]
    parameters: int
    trained: int
    activations: TensorStatistics
    gradients: TensorStatistics | None = None
    parameter_gradient: float | None = None
    channels: int = 0
    dead: tuple[int, ...] | None = None
    off: tuple[int, ...] = ()
    saturated: float | None = None
    sound: bool = True

    @property
    def name(self) -> str:
        """The layer's name as it is shown."""
        return self.layer or WHOLE_MODEL

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "layer": self.layer,
            "kind": self.kind,
            "shape": list(self.shape),
            "parameters": self.parameters,
            "trained": self.trained,
            "activations": self.activations.to_dict(),
            "gradients": None if self.gradients is None else self.gradients.to_dict(),
            "parameter_gradient": finite(self.parameter_gradient),
            "channels": self.channels,
            "dead": None if self.dead is None else list(self.dead),
            "off": list(self.off),
            "saturated": self.saturated,
            "sound": self.sound,
        }


@dataclass(frozen=True)
class Setting:
    """What is known besides the rows.

    Attributes:
        pictures: how many there were.
        to_train: whether it is looked at as in a training step, and nothing was frozen for camkit's sake.
        nan_given, inf_given: the layers that were given NaN, or infinity, by name; "" is the model itself.
        zero_weights: the layers whose weights are all zero, so that no gradient passes them.
        unnormalised: whether a batch normalisation that has seen few batches let everything through almost as it was.
        backwards: the layers whose gradients hold NaN or infinity, in the order of the backward pass.
    """

    pictures: int = 1
    to_train: bool = False
    nan_given: frozenset[str] = frozenset()
    inf_given: frozenset[str] = frozenset()
    zero_weights: tuple[str, ...] = ()
    backwards: tuple[str, ...] = ()
    unnormalised: bool = False


@dataclass(frozen=True)
class Finding:
    """Something that is wrong with a model, in words.

    Attributes:
        kind: what it is about.
        layers: where, the first being where it begins.
        text: one sentence, with the numbers behind it.
    """

    kind: Kind
    layers: tuple[str, ...]
    text: str

    @property
    def layer(self) -> str:
        """Where it begins."""
        return self.layers[0] if self.layers else ""

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {"kind": self.kind, "layer": self.layer, "layers": list(self.layers), "text": self.text}


@dataclass(frozen=True)
class Diagnosis:
    """How the layers of a model fare with a batch of pictures.

    Attributes:
        model: its name.
        pictures: how many there were.
        training: whether the model was looked at as in a training step.
        loss: what was differentiated, as a number; None where nothing could be.
        rows: a ``LayerStatistics`` for each run of each layer, in the order in which they ended.
        findings: what is wrong; none for a healthy model.
        remarks: what should be known of the numbers.
        parameters, trained: of the whole model.
    """

    model: str
    pictures: int
    training: bool
    loss: float | None
    rows: tuple[LayerStatistics, ...]
    findings: tuple[Finding, ...]
    remarks: tuple[str, ...] = ()
    parameters: int = 0
    trained: int = 0

    def __getitem__(self, layer: str) -> LayerStatistics:
        """Return the row of a layer.

        Raises:
            KeyError: there is none of that name.
        """
        found = next((row for row in self.rows if row.layer == layer), None)
        if found is None:
            raise KeyError(layer)
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain JSON values; null where a number is not finite."""
        return {
            "model": self.model,
            "pictures": self.pictures,
            "training": self.training,
            "loss": finite(self.loss),
            "parameters": self.parameters,
            "trained": self.trained,
            "findings": [finding.to_dict() for finding in self.findings],
            "remarks": list(self.remarks),
            "layers": [row.to_dict() for row in self.rows],
        }

    def __repr__(self) -> str:
        """Return one line that says what was found."""
        found = ", ".join(f"{one.kind} at {one.layer!r}" for one in self.findings) or "nothing wrong"
        seen = f"{counted(self.pictures, 'picture')}, {counted(len(self.rows), 'layer')}"
        return f"<Diagnosis of {self.model} with {seen}: {found}>"
