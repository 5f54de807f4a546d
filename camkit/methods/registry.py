"""The table of methods, and the decorator that adds to it.

This module and the families import PyTorch only while they compute, so that ``camkit methods`` answers at once.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from dataclasses import replace as changed
from importlib import import_module
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, TypeAlias

from camkit.errors import InputError, MethodError, did_you_mean

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from camkit.engine.passes import Capture, Pass
    from camkit.types import Fusion, GuidedGradients, PartsOfScore, ScoresOfMaps, ScoresOfPictures, TargetLayer
else:

    class _Torch:
        """PyTorch, which is imported when something in it is needed first."""

        def __getattr__(self, name: str) -> Any:
            value = getattr(import_module("torch"), name)
            setattr(self, name, value)
            return value

    torch, Tensor = _Torch(), Any  # the shapes are checked all the same
    GuidedGradients = PartsOfScore = ScoresOfMaps = ScoresOfPictures = Any

__all__ = [
    "GuidedGradients",
    "PartsOfScore",
    "ScoresOfMaps",
    "ScoresOfPictures",
    "Tensor",
    "torch",
]

WeightFunction: TypeAlias = Callable[..., Tensor]
NEEDS: Mapping[str, str] = {
    "gradients": "the score's gradients",
    "curvature": "the score's second derivatives",
    "head": "pooling and one linear layer after it",
    "activations": "nothing else; reads no score",
    "scores": "the part of the model after it, run alone",
    "references": "the part of the model after it, run alone, with gradients; reference pictures",
    "pictures": "the whole model, run on changed pictures",
    "parts": "gradients through the whole model",
    "guided": "gradients through the whole model, and ReLUs",
    "attention": "attention over all tokens; reads no score",
    "attention-gradients": "attention over all tokens, and its gradients",
    "attention-by-layer": "attention over all tokens, and each block's own score",
}
"""What methods get besides the feature maps of a layer, as lists of methods say it; ``methods.runs`` has the passes."""

WEIGHTED = "Weighted feature maps"
"""What a map is whose method does not say more."""


@dataclass(frozen=True)
class Whole:
    """The whole numbers from ``least`` up, as the values that a parameter of a method may have."""

    least: int

    def __contains__(self, value: object) -> bool:
        return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= self.least

    def __str__(self) -> str:
        return f"a whole number from {self.least}"


@dataclass(frozen=True)
class Between:
    """The numbers between two bounds, bounds excluded, as the values that a parameter of a method may have."""

    low: float
    high: float = math.inf

    def __contains__(self, value: object) -> bool:
        return isinstance(value, Real) and not isinstance(value, bool) and self.low < float(value) < self.high

    def __str__(self) -> str:
        if math.isfinite(self.high):
            return f"a number between {self.low:g} and {self.high:g}"
        return f"a number above {self.low:g}"


@dataclass(frozen=True)
class Method:
    """One way to make a map.

    ``weights(activations, gradients)`` takes two tensors (N, C, *grid) and returns one that broadcasts against them:
    one weight per channel (N, C, 1, 1), or one per cell; or the signed map (N, *grid) itself. ``needs`` tells what it
    gets besides the activations: the "gradients"; these, and the product of the score's second derivatives with the
    activations ("curvature"); the class weights (N, C) of a linear "head" in their place; nothing
    ("activations"); for one picture at a time, a function from changed feature maps to "scores", the feature maps of M
    "references" and the gradients between these and the picture's, or a function from changed "pictures"
    (``camkit.types.ScoresOfPictures``, whose T targets give T rows of weights); the "parts" of the score
    (``PartsOfScore``); or "guided" gradients (``GuidedGradients``). Methods that need "attention" take the attention
    maps of all layers instead; see ``register_method``. ``cost`` is the time it takes, in plain passes of the model.
    ``unit`` says what the values of the raw map are, as the first words of a caption.
    ``layer`` is False if it reads the whole model and not one layer: the activations are the input then.
    With ``stages``, the maps of the last layer of each size of grid are multiplied. With ``finer``, a class is compared
    with its nearest ones. ``values`` says which values the keyword arguments of ``weights`` may have.
    """

    name: str
    title: str
    summary: str
    paper: str
    needs: str
    weights: WeightFunction
    cost: str = "1, and back through the head"
    layer: bool = True
    stages: bool = False
    finer: bool = False
    unit: str = WEIGHTED
    values: Mapping[str, Whole | Between] = field(default_factory=dict, compare=False)

    @functools.cached_property
    def users(self) -> bool:
        """True if the function is not camkit's own."""
        function = getattr(self.weights, "func", self.weights)  # of ``variant``
        return not str(getattr(function, "__module__", "")).startswith("camkit.")

    @functools.cached_property
    def fuse(self) -> Fusion:
        """How several layers become one map, unless the caller says how."""
        return "product" if self.stages else "mean"

    @functools.cached_property
    def reads_gradients(self) -> bool:
        """True if its pass leaves the score's gradients at the layers."""
        return self.needs == "gradients"

    @functools.cached_property
    def reads_attention(self) -> bool:
        """True if it reads the attention maps of a transformer."""
        return self.needs.startswith("attention")

    @functools.cached_property
    def shares_pass(self) -> bool:
        """True if it weights what a plain pass leaves at the layer, so that several such methods can share one pass."""
        alone = self.stages or self.finer or self in (AUTO, SHARPENED, ODAM, CENTRED)
        return self.needs in ("gradients", "activations") and self.layer and not alone

    @functools.cached_property
    def one_by_one(self) -> bool:
        """True if it takes one picture at a time."""
        return self.needs in ("scores", "references", "pictures")

    @functools.cached_property
    def compares(self) -> bool:
        """True if it compares the picture with reference pictures."""
        return self.needs == "references"

    @functools.cached_property
    def for_black_boxes(self) -> bool:
        """True if it needs neither layers nor gradients."""
        return self.needs in ("pictures", "file") and not self.layer

    @property
    def for_threads(self) -> bool:
        """True if its passes may run in several threads: it takes batches, and is camkit's own or registered."""
        return self is known_method(self.name) and not self.one_by_one

    def at(self, decision: Any, attends: bool = False) -> Way:
        """Return the method that this one is for a decision on a model's layers, and the layers that it reads.

        Args:
            decision: a ``camkit.layers.decision.Decision``.
            attends: False if attention is known not to run between all tokens.

        Raises:
            LayerError: there is no such layer.
        """
        if self.reads_attention:
            return self, (decision.of_tokens(),)
        if self.stages:
            return self, decision.stages()
        if self == AUTO and attends and (layout := decision.chosen().layout) is not None and layout.has_tokens:
            return METHODS["chefer"], (decision.chosen(),)
        if self in (AUTO, ODAM, CENTRED) and decision.levels:
            of_boxes = CENTRED if decision.at_head else ODAM
            return (of_boxes if self == AUTO else self), decision.levels
        chosen = decision.chosen()
        if self in (AUTO, SHARPENED) and decision.finer is not None:
            return sharpening((decision.finer, chosen))
        return METHODS["gradcam"] if self in (AUTO, SHARPENED) else self, (chosen,)

    def run(self, options: Pass) -> Capture:
        """Run the model, and return feature maps with gradients or weights, and scores.

        Raises:
            LayerError, TargetError: as for ``camkit.engine.passes.capture``.
            MethodError: the model does not have what the method needs.
        """
        # Modules that compute import PyTorch and the methods, so they come in at the first pass.
        captured: Capture = import_module("camkit.methods.runs").RUNS[self.needs](options, self)
        return captured

    def joined(self, captured: Capture, size: tuple[int, ...]) -> Capture:
        """Return what a pass left as features of one layer with finished weights, if it makes one map of several."""
        join: Callable[..., Capture] | None = import_module("camkit.methods.runs").JOINS.get(self.name)
        return captured if join is None else join(captured, size)

    def weigh(self, *given: Any) -> Tensor:
        """Return its weights. A function of the user's gets copies, since it may work in place.

        Raises:
            MethodError: it takes other arguments, or returns no dense floating-point tensor. Each pass checks the
                shape.
        """
        weights: Tensor = (
            import_module("camkit.methods.runs").users_weights(self, *given) if self.users else self.weights(*given)
        )
        return weights


Way: TypeAlias = "tuple[Method, tuple[TargetLayer, ...]]"
"""A method, and the layers that it reads."""

MethodLike: TypeAlias = str | WeightFunction | Method
"""What ``method=`` takes: a name, a function, or an entry of ``METHODS``."""

METHODS: dict[str, Method] = {}
"""Every method by its name, the user's own included."""


REFERENCE_TITLES = {"random": "random map", "centre": "centred blob", "colour": "best colour"}
"""The maps that ``judge`` and ``compare`` show beside those of the methods, as people read their names. No method can
have one of these names."""

FINE = 8
"""A grid with at least so many cells along each axis is fine enough for a map; 7 x 7 cells, the last grid of most
networks, are not."""


def _finished(_: Tensor, weights: Tensor) -> Tensor:
    """Return the weights as they are: ``Method.joined`` has computed them."""
    return weights


AUTO = Method(
    "auto",
    title="the method that is right for the network",
    summary="attention relevance if attention runs between all tokens; else gradients at a fine layer",
    paper="",
    needs="gradients",
    weights=_finished,
    unit="",
)
"""What ``method="auto"`` means; it is no entry of ``METHODS``, since ``at`` replaces it with one before a pass."""


SHARPENED = Method(
    "gradcam-sharpened",
    title="Grad-CAM, sharpened",
    summary="Grad-CAM at the deepest grid times gradcam-elementwise at a finer one",
    paper="",
    needs="gradients",
    weights=_finished,
    unit="Evidence in units of the score",
)
"""What "auto" takes for most convolutional networks; it is no entry of ``METHODS``, since it reads two layers."""


ODAM = Method(
    "odam",
    title="ODAM",
    summary="gradients times activations, cell by cell, summed over the grids that a detector's box comes from",
    paper="Zhao & Chan 2023, ODAM, arXiv:2304.06354",
    needs="gradients",
    weights=_finished,
    unit="Evidence in units of the score",
)
"""What "auto" takes for a detector's boxes; it is no entry of ``METHODS``, since it reads several layers."""


CENTRED = Method(
    "layercam-centred",
    title="LayerCAM, centred",
    summary="positive gradients times what a cell has above its channel's mean, summed over the grids of a detector",
    paper="after Jiang et al. 2021, LayerCAM, IEEE Transactions on Image Processing 30",
    needs="gradients",
    weights=_finished,
    unit="Evidence in units of the score",
)
"""What "auto" takes for boxes that the cells of the grids have; it is no entry of ``METHODS`` either."""


FROM_FILE = Method(
    "from-file",
    title="the heat that the file returns",
    summary="the heat that a file of camkit export returns",
    paper="",
    needs="file",
    weights=_finished,
    layer=False,
    unit="Evidence in units of the score",
)
"""The method that "auto" takes for a file that returns its heat. ``METHODS`` leaves it out: no other model has it."""


def sharpening(layers: tuple[TargetLayer, ...]) -> Way:
    """Return the method that sharpens the second of two layers by the first, and the layers with that reason."""
    finer, deepest = layers
    reason = f"{deepest.reason}; sharpened by {finer}: {finer.reason}"
    return SHARPENED, (finer, changed(deepest, reason=reason))


def known_method(name: str) -> Method | None:
    """Return a method by its name; None if nothing here has it, as if it was a function of the user's."""
    return {method.name: method for method in (AUTO, SHARPENED, ODAM, CENTRED, FROM_FILE)}.get(name) or METHODS.get(
        name
    )


def check_name(
    name: object,
    what: str,
    kind: type[InputError],
    *,
    taken: bool,
) -> None:
    """Check the name of a method or metric, which is typed in a shell and becomes part of a file's name.

    Raises:
        InputError: (this kind of it) it has other characters, or is taken.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[\w+-][\w+.-]*", name):
        raise kind(f"the name of a {what} consists of letters, digits, '+', '-', '_' and '.', not {name!r}")
    if taken:
        raise kind(f"there is already a {what} {name!r}; choose another name, or pass replace=True for one of yours")


def register_method(
    name: str,
    *,
    title: str | None = None,
    summary: str = "",
    paper: str = "",
    needs: str = "gradients",
    cost: str = "1, and back through the head",
    layer: bool = True,
    stages: bool = False,
    finer: bool = False,
    unit: str = WEIGHTED,
    values: Mapping[str, Whole | Between] | None = None,
    replace: bool = False,
) -> Callable[[WeightFunction], WeightFunction]:
    """Add a weight function to ``camkit.METHODS`` under a name, as a decorator.

    The function gets the activations and their gradients, both (N, C, *grid), and returns weights that broadcast
    against them. camkit multiplies weights and activations and sums over the channels.

    Args:
        name: what ``method=`` and ``--method`` take: letters, digits, ``+``, ``-``, ``_`` and ``.``.
        title: the name as people write it; the name itself if not given.
        summary: one line for ``camkit methods``.
        paper: where the formula comes from.
        needs: "gradients"; "curvature", and the function gets the product of the score's second derivatives with the
            activations as a third tensor; "head", and it gets the class weights (N, C) of a linear head in place of the
            gradients; "activations", and it gets these alone; "scores", and it gets the activations (1, C, *grid) of
            one picture and a function from changed activations (M, C, *grid) to their scores (M,); "references",
            and it gets the activations (1, C, *grid) of one picture, those of M reference pictures (M, C, *grid), and
            the gradients (M, C, *grid) at a point between the two for each of them; or "pictures", "parts" or
            "guided", which ``camkit.methods.Method`` explains. Three more are for transformers, with
            layer=False; the function returns a value for each token (N, tokens) then. "attention": it gets a list of
            the layers' attention maps (N, heads, queries, keys), and the weights (N, queries) of the queries that the
            score is computed from; "attention-gradients": the maps, their gradients, and the weights;
            "attention-by-layer": the gradients of each layer's own score, as LeGrad defines it.
        cost: the time it takes, in plain passes of the model; words for ``camkit methods``.
        layer: False if it reads the whole model, and no target layer.
        stages: True to multiply the maps of the last layer of each size of grid, unless the caller names layers.
        finer: True to compare a class with its nearest ones, as ``camkit.targets.finer`` does.
        unit: what the values of the raw map are, as the first words of a caption: "Evidence in units of the score" for
            gradient times activation.
        values: which values the function's keyword arguments may have in ``camkit.methods.variant``: ``Whole(1)`` are
            the whole numbers from 1, ``Between(0.0, 1.0)`` the numbers between 0 and 1.
        replace: allow a name that is taken, for example when a notebook cell runs again.

    Raises:
        MethodError: the name is taken, perhaps by a reference map, or has other characters; or ``needs`` is unknown.

    Examples:
        >>> import camkit
        >>> @camkit.register_method("gradient-size", summary="how much each channel matters, whatever the sign")
        ... def gradient_size(activations, gradients):
        ...     return gradients.abs().mean((2, 3), keepdim=True)
        >>> plane = camkit.scenes.scene_paths()["plane-sky"]
        >>> camkit.explain("demo-fair", plane, method="gradient-size").method
        'gradient-size'
        >>> del camkit.METHODS["gradient-size"]  # forgets it again
    """
    is_ours = name not in METHODS and known_method(name) is not None
    check_name(name, "method", MethodError, taken=is_ours or (name in METHODS and not replace))
    if name in REFERENCE_TITLES:
        raise MethodError(f"{name!r} is the name of a reference map, as in camkit judge; choose another name")
    if needs not in NEEDS:
        raise MethodError(f"method {name!r}: needs must be one of {', '.join(NEEDS)}, not {needs!r}")

    def add(function: WeightFunction) -> WeightFunction:
        METHODS[name] = Method(
            name, title or name, summary, paper, needs, function, cost, layer, stages, finer, unit, dict(values or {})
        )
        return function

    return add


def find_method(method: MethodLike) -> Method:
    """Return a method from its name, or make one of a function ``(activations, gradients) -> weights``.

    A function that was registered gives its registered method; any other is named after itself.

    Raises:
        MethodError: no method has this name (the message suggests the nearest), a function has the name of another
            method, or it is neither a name nor a function.
    """
    if isinstance(method, Method):
        return method
    known = known_method(method) if isinstance(method, str) else None
    if known is not None:
        return known
    if not callable(method):
        near = did_you_mean(method, METHODS) if isinstance(method, str) else ""
        instead = near or f"; choose from {', '.join(METHODS)}, or pass a function (activations, gradients) -> weights"
        raise MethodError(f"unknown method {method!r}{instead}")
    for registered in METHODS.values():
        if registered.weights is method:
            return registered
    name = getattr(method, "__name__", type(method).__name__)
    if known_method(name) is not None:  # a table keeps the name alone
        raise MethodError(f"camkit already has another method {name!r}; rename your function")
    return Method(name, title=name, summary="", paper="", needs="gradients", weights=method)


def variant(method: MethodLike, **options: Any) -> Method:
    """Return a method with other parameters, for ``method=``.

    Args:
        method: a method whose function takes keyword arguments, such as "rise".
        **options: the arguments, such as ``masks=1000``.

    Raises:
        MethodError: the method has no such parameter, or the parameter cannot have this value.

    Examples:
        >>> from camkit.methods import variant
        >>> variant("rise", masks=1000).name
        'rise'
    """
    found = find_method(method)
    known = [
        name
        for name, parameter in inspect.signature(found.weights).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    ]
    unknown = [name for name in options if name not in known]
    if unknown:
        choice = f"it has {', '.join(known)}" if known else "it has none"
        raise MethodError(f"method {found.name!r} has no parameter {unknown[0]!r}; {choice}")
    for name, value in options.items():
        if name in found.values and value not in found.values[name]:
            raise MethodError(f"method {found.name!r}: {name} must be {found.values[name]}, not {value!r}")
    return changed(found, weights=functools.partial(found.weights, **options))
