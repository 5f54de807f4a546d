"""Compare methods on the same pictures: one sheet with methods across, pictures and layers down."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from camkit.comparison.choices import chosen_explainer, chosen_layers, chosen_methods
from camkit.comparison.sheet import Panel, Row, draw_sheet
from camkit.drawing.encode import as_html, encode
from camkit.drawing.figure import percent
from camkit.errors import ImageError, InputError, LayerError, MethodError, OutputError, TargetError
from camkit.explainer import Explainer
from camkit.explanation import Explanation
from camkit.images.files import write_file
from camkit.images.read import open_picture
from camkit.layers.names import Layers
from camkit.methods import METHODS, Method
from camkit.metrics import METRICS, Evaluator, Heat, Metric, Value
from camkit.metrics.reference_maps import random_map
from camkit.metrics.registry import find_metric
from camkit.types import ImageLike, Pixels

if TYPE_CHECKING:
    from camkit.explainer import MethodLike
    from camkit.models.loaded import LoadedModel
    from camkit.targets import TargetLike

DEFAULTS = (
    "gradcam",
    "gradcam++",
    "hirescam",
    "layercam",
    "finercam",
    "shapleycam",
    "refinecam",
    "reciprocam",
    "legrad",
    "chefer",
    "eigencam",
    "eigengradcam",
    "fem",
    "kpcacam",
)
"""The default methods of a comparison. Methods that do not work on a model are left out, such as LeGrad without
attention. With the metric's values, all of them together take 21 plain passes on MobileNetV2 once its layers are known:
most share one pass. FullGrad and Ablation-CAM are not among them: each alone takes 4 to 9."""


@dataclass(frozen=True, eq=False)
class ComparedMap:
    """The map of one method.

    Attributes:
        method: the method's name.
        explanation: the explanation; None if the method does not work here.
        value: the metric's value for the map; None if there is no map.
        reason: why there is no map; empty if there is one.
    """

    method: str
    explanation: Explanation | None
    value: Value | None = None
    reason: str = ""

    @property
    def title(self) -> str:
        """The method's name as people write it."""
        return METHODS[self.method].title if self.method in METHODS else self.method


@dataclass(frozen=True, eq=False)
class ComparedPicture:
    """All methods on one picture, for one layer.

    Attributes:
        source: the picture's file, or its number in the call.
        label: the class that is explained.
        probability: the model's probability of it; None if it has none.
        layer: the layer that the caller named; empty if each method chooses its own.
        maps: one map for each method.
        by_chance: the metric's value for a random map.
    """

    source: str
    label: str
    probability: float | None
    layer: str
    maps: tuple[ComparedMap, ...]
    by_chance: Value


@dataclass(frozen=True, eq=False)
class Comparison:
    """Several methods on the same pictures.

    Attributes:
        rows: one for each picture and layer.
        metric: the metric that the maps are judged by.
        unreadable: pictures that could not be read, with the reason.
    """

    rows: tuple[ComparedPicture, ...]
    metric: Metric
    unreadable: dict[str, str] = field(default_factory=dict)

    def table(self) -> str:
        """Return a table in Markdown: the metric's value of each map, for each picture and layer."""
        methods = [compared.method for compared in self.rows[0].maps]
        lines = [
            "| picture | layer | " + " | ".join(methods) + " | random map |",
            "|---|---|" + "---|" * len(methods) + "---|",
        ]
        for row in self.rows:
            shares = [words_of(self.metric, compared) for compared in row.maps]
            cells = [
                f"{Path(row.source).name}: {row.label}",
                row.layer,
                *shares,
                value_words(self.metric, row.by_chance),
            ]
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        return "\n".join(lines)

    def sheet(self, *, colormap: str = "turbo", alpha: float = 0.5) -> Pixels:
        """Draw all maps on one sheet, each on its own scale, since the methods' units differ.

        Args:
            colormap, alpha: as for ``Explanation.overlay``.

        Returns:
            The sheet, height x width x 3 uint8 RGB.
        """
        return draw_sheet([_row(row, self.metric, colormap, alpha) for row in self.rows])

    def save(self, path: str | Path, *, colormap: str = "turbo", alpha: float = 0.5) -> Path:
        """Write the sheet to a file, completely or not at all; the suffix decides the type, and folders are created.

        Raises:
            OutputError: the file cannot be written, or its type is unknown.
        """
        path = Path(path)
        if not path.name:
            raise OutputError(f"{str(path)!r} is not a file name; pass a path such as 'compare.png'")
        write_file(path, encode(self.sheet(colormap=colormap, alpha=alpha), path.suffix or ".png"))
        return path

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as plain JSON values, without the maps themselves."""
        return {
            "metric": self.metric.name,
            "unreadable": self.unreadable,
            "rows": [
                {
                    "source": row.source,
                    "label": row.label,
                    "probability": row.probability,
                    "layer": row.layer,
                    "random_map": row.by_chance.number,
                    "maps": [
                        {
                            "method": compared.method,
                            "value": None if compared.value is None else compared.value.number,
                            "layer": None if compared.explanation is None else compared.explanation.layer,
                            "status": "error" if compared.explanation is None else compared.explanation.status,
                            "reason": compared.reason,
                        }
                        for compared in row.maps
                    ],
                }
                for row in self.rows
            ],
        }

    def __repr__(self) -> str:
        """Return a line with the number of pictures and methods."""
        pictures, methods = len(self.rows), len(self.rows[0].maps)
        return f"<Comparison of {methods} method{'s' * (methods > 1)} on {pictures} picture{'s' * (pictures > 1)}>"

    def _repr_html_(self) -> str:
        """Show the sheet in a notebook."""
        return as_html(self.sheet(), repr(self))


def compare(
    model: Explainer | nn.Module | str | LoadedModel,
    images: ImageLike | Sequence[ImageLike],
    methods: MethodLike | Iterable[MethodLike] | None = None,
    *,
    target_layer: Layers | Sequence[Layers | None] | None = None,
    target: TargetLike | None = None,
    metric: str = "top-loss",
    **options: Any,
) -> Comparison:
    """Explain the same pictures with several methods.

    Each map comes with the value of one metric. The usual one is quick: the share of the class's probability that is
    lost if the hottest fifth of the picture is blurred. One picture says little about a method; ``camkit.judge``
    measures over many.

    Args:
        model: an ``Explainer``, or what it takes as a model.
        images: one picture or a list of them, as ``camkit.explain`` takes them.
        methods: names or functions; None for those of ``camkit.comparison.compare.DEFAULTS`` that fit the model.
        target_layer: one layer or a list; each picture gets a row for each of them. None lets camkit choose the layer.
        target: None for each picture's best class, or one target for all.
        metric: a name from ``camkit.metrics.METRICS``, of a metric that needs no region.
        **options: ``preprocess``, ``labels``, ``device`` and ``precision`` as for ``Explainer``.

    Raises:
        InputError: an argument or the model is wrong, or no picture can be read.

    Examples:
        >>> import camkit
        >>> camkit.compare("demo-fair", camkit.scenes.scene_paths()["plane-sky"], ["gradcam", "hirescam"])
        <Comparison of 2 methods on 1 picture>
    """
    explainer = chosen_explainer(model, options)
    pictures: list[Any] = list(images) if isinstance(images, (list, tuple)) else [images]
    if not pictures:
        raise InputError("the list of pictures is empty")
    metric = find_metric(metric).name
    if METRICS[metric].needs_region:
        raise InputError(
            f"metric {metric!r} needs the region of an object, and a comparison has none; choose another metric, or "
            "judge single maps in Python with camkit.metrics.Evaluator(model, picture, region=...)"
        )
    chosen = chosen_methods(methods, DEFAULTS)
    layers = chosen_layers(explainer, target_layer)
    rows: list[ComparedPicture] = []
    unreadable: dict[str, str] = {}
    for number, picture in enumerate(pictures, start=1):
        source = str(picture) if isinstance(picture, (str, Path)) else f"picture {number}"
        try:
            opened = open_picture(picture) if isinstance(picture, (str, Path)) else picture
            evaluator = Evaluator(explainer, opened, target)
        except ImageError as error:
            unreadable[source] = str(error)
            continue
        for layer in layers:
            rows.append(_compared(explainer, evaluator, opened, source, chosen, layer, metric))
    if not rows:
        raise ImageError(next(iter(unreadable.values())))
    if methods is None:
        rows = _without_misfits(rows)
    return Comparison(tuple(rows), METRICS[metric], unreadable)


def _compared(
    explainer: Explainer,
    evaluator: Evaluator,
    picture: Any,
    source: str,
    methods: Sequence[Method],
    layer: Layers | None,
    metric: str,
) -> ComparedPicture:
    """Explain one picture with all methods, and judge each map."""
    shared = _in_one_pass(explainer, evaluator, picture, methods, layer)
    maps = [shared.get(method.name) or _mapped(explainer, evaluator, picture, method, layer) for method in methods]
    maps = [
        _judged(explainer, evaluator, compared, method, metric) for compared, method in zip(maps, methods, strict=True)
    ]
    found = [compared.explanation for compared in maps if compared.explanation is not None]
    if not found:
        raise MethodError(f"no method works on this picture: {maps[0].reason}")
    random = evaluator(Heat(random_map(evaluator.size), "random"), [metric])[metric]
    layers = "" if layer is None else str(layer)
    return ComparedPicture(source, found[0].name, found[0].probability, layers, tuple(maps), random)


def _in_one_pass(
    explainer: Explainer, evaluator: Evaluator, picture: Any, methods: Sequence[Method], layer: Layers | None
) -> dict[str, ComparedMap]:
    """Explain a picture with all methods that can share a pass; return no maps if that fails for any of them."""
    sharing = [method for method in methods if method.shares_pass]
    if not sharing:
        return {}
    try:
        found = explainer.using(sharing[0], layer).by_methods(picture, sharing, evaluator.target)
    except (MethodError, LayerError, TargetError):
        return {}
    return {method.name: ComparedMap(method.name, each) for method, each in zip(sharing, found, strict=True)}


def _mapped(
    explainer: Explainer, evaluator: Evaluator, picture: Any, method: Method, layer: Layers | None
) -> ComparedMap:
    """Explain a picture with one method; a method that does not work here gives the reason."""
    try:
        found = explainer.using(method, layer if method.layer else None)(picture, evaluator.target)
    except (MethodError, LayerError, TargetError) as error:
        return ComparedMap(method.name, None, reason=str(error))
    return ComparedMap(method.name, found)


def _judged(
    explainer: Explainer, evaluator: Evaluator, compared: ComparedMap, method: Method, metric: str
) -> ComparedMap:
    """Add the metric's value, if there is a map."""
    if compared.explanation is None:
        return compared
    heat = evaluator.heat(compared.explanation, explainer.using(method))
    return replace(compared, value=evaluator(heat, [metric])[metric])


def _without_misfits(rows: Sequence[ComparedPicture]) -> list[ComparedPicture]:
    """Leave out the methods that work on none of the pictures."""
    works = [any(row.maps[place].explanation is not None for row in rows) for place in range(len(rows[0].maps))]
    return [
        replace(row, maps=tuple(compared for compared, fits in zip(row.maps, works, strict=True) if fits))
        for row in rows
    ]


def words_of(metric: Metric, compared: ComparedMap) -> str:
    """Return the value of a map as a few words, or why it has none."""
    if compared.explanation is None:
        return compared.reason
    if compared.explanation.status != "ok":
        return "NaN or infinity in the map" if compared.explanation.status == "non_finite" else "empty map"
    assert compared.value is not None
    return value_words(metric, compared.value)


def value_words(metric: Metric, value: Value) -> str:
    """Return a metric's value as a few words."""
    if value.number is None:
        return str(value)
    if metric.name != "top-loss":
        return f"{metric.name} {value}"
    return f"loses {value.number:.0%}" if value.number >= 0 else f"gains {-value.number:.0%}"


def _row(row: ComparedPicture, metric: Metric, colormap: str, alpha: float) -> Row:
    """Return what the sheet shows of a picture."""
    panels = [
        Panel(
            compared.title,
            words_of(metric, compared),
            None
            if compared.explanation is None
            else compared.explanation.overlay(colormap=colormap, alpha=alpha, scale="each"),
        )
        for compared in row.maps
    ]
    first = next(compared.explanation for compared in row.maps if compared.explanation is not None)
    lines = [row.label if row.probability is None else f"{row.label}: {percent(row.probability)}"]
    if row.layer:
        lines.append(f"layer {row.layer}")
    if row.by_chance.number is not None:
        lines.append(f"a random map: {value_words(metric, row.by_chance)}")
    original = first.overlay(style="overlay", alpha=0.0, scale="each")
    return Row(original, Path(row.source).name, tuple(lines), tuple(panels))
