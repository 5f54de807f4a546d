"""The parts of a diagnosis: statistics of tensors and layers, and findings."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from camkit.drawing.encode import as_html
from camkit.layers.names import WHOLE_MODEL

Kind: TypeAlias = Literal["nan", "infinity", "exploding", "vanishing", "no gradient", "dead", "saturated", "frozen"]
"""The kind of a finding."""


def finite(number: float | None) -> float | None:
    """Return the number, or None if it is NaN or infinite, which strict JSON cannot hold."""
    return None if number is None or not math.isfinite(number) else number


def counted(number: int, what: str) -> str:
    """Return ``"1 picture"`` or ``"8 pictures"``."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


@dataclass(frozen=True)
class Histogram:
    """The number of values in each of several equally wide bins from ``low`` to ``high``; both ends are included."""

    low: float
    high: float
    counts: tuple[int, ...]

    @property
    def edges(self) -> tuple[float, ...]:
        """The edges of the bins, one more than there are bins."""
        step = (self.high - self.low) / len(self.counts)
        return (*(self.low + number * step for number in range(len(self.counts))), self.high)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {"low": self.low, "high": self.high, "counts": list(self.counts)}


@dataclass(frozen=True)
class TensorStatistics:
    """Statistics of a tensor's numbers; all but the counts are of the finite numbers, and NaN if there are none.

    Attributes:
        count: how many numbers there are.
        nan, inf: how many are NaN, and how many infinite.
        mean, std: the mean and the standard deviation (divided by the count, not the count minus one).
        low, high: the smallest and the largest number.
        zeros: the share that is exactly zero, 0..1.
        norm: the square root of the sum of squares.
        histogram: the distribution from ``low`` to ``high``.
        magnitudes: the distribution of the decimal logarithms of the absolute values that are not zero; only for
            gradients. The first and the last bin also hold what lies beyond them.
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
        """The norm of all numbers: NaN if one is NaN, infinity if one is infinite."""
        return math.nan if self.nan else math.inf if self.inf else self.norm

    def scaled(self, factor: float) -> TensorStatistics:
        """Return the statistics of the numbers times a positive factor, without ``magnitudes``."""
        if factor == 1:
            return self
        histogram = Histogram(self.histogram.low * factor, self.histogram.high * factor, self.histogram.counts)
        numbers = {name: factor * getattr(self, name) for name in ("mean", "std", "low", "high", "norm")}
        return replace(self, histogram=histogram, magnitudes=None, **numbers)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; null if there is no finite number."""
        numbers = {name: finite(getattr(self, name)) for name in ("mean", "std", "low", "high", "zeros", "norm")}
        histograms = {"histogram": self.histogram.to_dict()}
        if self.magnitudes is not None:
            histograms["magnitudes"] = self.magnitudes.to_dict()
        return {"count": self.count, "nan": self.nan, "inf": self.inf, **numbers, **histograms}


@dataclass(frozen=True)
class LayerStatistics:
    """One call of one layer.

    Attributes:
        layer: its name, with the number of the call if it ran several times (``"relu#2"``); "" is the model itself.
        kind: the name of its type.
        shape: the shape of its output, including the axis of pictures.
        parameters, trained: how many numbers its own parameters hold, and how many of these require gradients. The
            parameters of inner layers are counted in their own rows.
        activations: statistics of its output.
        gradients: statistics of the loss's gradient with respect to its output; None if there is no gradient.
        parameter_gradient: the norm of the loss's gradient with respect to its own parameters; None if there is none.
        channels: the number of channels of the output; 0 if it has no channel axis.
        dead: after a ReLU or a similar function, the channels that are zero in every cell of every picture; None for
            other layers.
        off: the dead channels that are so far below zero that they are unlikely ever to become active.
        saturated: after a sigmoid or tanh, the share of values at which its slope is below 1 % of its largest; None
            for other layers.
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
        """The layer's name as printed."""
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
    """What the rules for findings need to know apart from the rows.

    Attributes:
        pictures: the number of pictures.
        to_train: whether the model runs as in a training step, with the caller's own choice of frozen parameters.
        nan_given, inf_given: the names of the layers whose input holds NaN, or infinity; "" is the model itself.
        zero_weights: the layers whose weights are all zero, so that no gradient passes them.
        backwards: the layers whose gradients hold NaN or infinity, in the order of the backward pass.
        unnormalised: whether a batch normalisation has seen so few batches that it changes its input very little.
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
    """Something that is wrong with a model.

    Attributes:
        kind: the kind of fault.
        layers: the affected layers, starting with the one where it begins.
        text: one sentence, with the numbers behind it.
    """

    kind: Kind
    layers: tuple[str, ...]
    text: str

    @property
    def layer(self) -> str:
        """The layer where it begins."""
        return self.layers[0] if self.layers else ""

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {"kind": self.kind, "layer": self.layer, "layers": list(self.layers), "text": self.text}


@dataclass(frozen=True)
class Diagnosis:
    """What happens in each layer of a model on a batch of pictures.

    Attributes:
        model: the model's name.
        pictures: the number of pictures.
        training: whether the model ran as in a training step.
        loss: the number that was differentiated; None if it could not be.
        rows: a ``LayerStatistics`` for each call of each layer, in the order in which they ended.
        findings: what is wrong; empty for a healthy model.
        remarks: what to know when reading the numbers.
        parameters, trained: how many numbers the model's parameters hold, and how many of these require gradients.
        loss_name: what ``loss`` is: "cross entropy", "binary cross entropy", "own loss" or "mean score of the best
            class".
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
    loss_name: str = ""

    def __getitem__(self, layer: str) -> LayerStatistics:
        """Return the row of a layer.

        Raises:
            KeyError: no row has that name.
        """
        row = next((row for row in self.rows if row.layer == layer), None)
        if row is None:
            raise KeyError(layer)
        return row

    @property
    def loss_text(self) -> str:
        """The loss and its name, as reports append them to a line; empty if there is no loss."""
        name = f" ({self.loss_name})" if self.loss_name else ""
        return "" if self.loss is None else f", loss {self.loss:.3g}{name}"

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain JSON values; null for numbers that are not finite."""
        return {
            "model": self.model,
            "pictures": self.pictures,
            "training": self.training,
            "loss": finite(self.loss),
            "loss_name": self.loss_name,
            "parameters": self.parameters,
            "trained": self.trained,
            "findings": [finding.to_dict() for finding in self.findings],
            "remarks": list(self.remarks),
            "layers": [row.to_dict() for row in self.rows],
        }

    def __repr__(self) -> str:
        """Return one line that lists the findings."""
        findings = ", ".join(f"{finding.kind} at {finding.layer!r}" for finding in self.findings) or "nothing wrong"
        size = f"{counted(self.pictures, 'picture')}, {counted(len(self.rows), 'layer')}"
        return f"<Diagnosis of {self.model} with {size}: {findings}>"

    def _repr_html_(self) -> str:
        """Show the picture of the layers and the findings in a notebook."""
        from camkit.diagnosis.report.picture import draw  # noqa: PLC0415 - the report imports this module

        return as_html(draw(self), repr(self))
