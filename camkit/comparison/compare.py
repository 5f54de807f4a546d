"""Compare methods on the same pictures: one sheet with methods across, pictures and layers down."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from camkit.comparison.choices import chosen_explainer, chosen_layers, chosen_methods, fitting_methods
from camkit.comparison.sheet import MapPanel, SheetRow, draw_sheet, least_height
from camkit.drawing.encode import as_html, encode
from camkit.drawing.figure import percent
from camkit.errors import ImageError, InputError, LayerError, MethodError, OutputError, TargetError
from camkit.explainer import Explainer
from camkit.explanation import Explanation, finite_or_none
from camkit.images.files import check_folder, write_file
from camkit.images.read import open_picture
from camkit.kit.wording import counted
from camkit.layers.names import Layers
from camkit.methods import Method, known_method
from camkit.methods.registry import MethodLike
from camkit.metrics import METRICS, Evaluator, Metric, Value
from camkit.metrics.registry import find_metric
from camkit.tables import Rows, Tabular
from camkit.targets.names import label_of
from camkit.types import ImageLike, Pixels, Progress

if TYPE_CHECKING:
    from camkit.models.loaded import Loadable
    from camkit.targets import TargetLike

DEFAULTS = (
    "auto",
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
)
"""The default methods of a comparison. Methods that do not work on a model are left out, such as LeGrad without
attention. Together with the metric's values, they take fewer than 30 plain passes on MobileNetV2, because most methods
share one. Ablation-CAM, FullGrad and KPCA-CAM are not among them, since they are too slow."""

REFERENCE_TITLES = {"random": "random map", "centre": "centred blob", "colour": "best colour"}
"""The names of the reference maps as people read them."""

QUICK = "top-loss"
"""The usual metric. It reads nothing but the map, so equal maps have equal values."""

_EQUAL = 1e-5
"""Two maps with heat from 0 to 1 count as equal if they differ by less, since float32 rounds."""

_APART = 0.02
"""With demo-fair on 14 drawn scenes, blurring a tenth more or less than the hottest fifth changes the lost share by 1.6
points (median), so methods that lie closer together are not told apart."""

_MOST_GAINED = 10.0
"""A probability that grows by more than ten times was next to nothing before, and the exact number says no more."""


@dataclass(frozen=True, eq=False)
class ComparedMap:
    """The map of one method.

    Attributes:
        method: the method's name.
        explanation: the explanation; None if the method does not work here.
        value: the metric's value for the map; None if there is no map.
        reason: why there is no map; empty if there is one.
        same_as: the title of an earlier method whose map is equal; empty if there is none.
    """

    method: str
    explanation: Explanation | None
    value: Value | None = None
    reason: str = ""
    same_as: str = ""

    @property
    def title(self) -> str:
        """The method's name as people write it, with the method that "auto" took."""
        taken = self.method if self.explanation is None else self.explanation.method
        known = known_method(taken)
        title = taken if known is None else known.title
        return title if taken == self.method else f"{self.method}: {title}"


@dataclass(frozen=True, eq=False)
class ComparedPicture:
    """All methods on one picture, for one layer.

    Attributes:
        source: the picture's file, or its number in the call.
        label: the class that is explained.
        probability: the model's probability of it; None if it has none.
        layer: the layer that the caller named; empty if each method chooses its own.
        maps: one map for each method.
        by_chance: the metric's values for maps that know nothing about the model: "random", a random map; "centre", a
            blob in the middle; and "colour", how near each place is to the best single colour. The last is there only
            if the caller named the methods, since finding the colour takes 16 passes of the model.
        answer: the model's own best class and its probability (None if it has none). The answer is None if this
            class is the one that is explained.
    """

    source: str
    label: str
    probability: float | None
    layer: str
    maps: tuple[ComparedMap, ...]
    by_chance: Mapping[str, Value]
    answer: tuple[str, float | None] | None = None

    @property
    def says(self) -> str:
        """The class that is explained, with its probability, as a few words."""
        return _with_percent(self.label, self.probability)

    @property
    def answers(self) -> str:
        """The model's own answer as a few words; empty if it is the class that is explained."""
        return "" if self.answer is None else _with_percent(*self.answer)


def caveat(row: ComparedPicture, metric: Metric) -> str:
    """Return why the number says little about the methods on a picture, as a sentence; empty if it may say something.

    A method must do better than maps that know nothing about the model. If the methods differ by less than the number
    changes with a slightly different share of the picture, their order is chance.
    """
    sign = 1 if metric.better == "higher" else -1
    values = [compared.value.number for compared in row.maps if compared.value is not None]
    numbers = [sign * number for number in values if number is not None]
    chance = {name: sign * value.number for name, value in row.by_chance.items() if value.number is not None}
    if not numbers:
        return ""
    name = max(chance, key=lambda name: chance[name], default="")
    if name and chance[name] >= max(numbers):
        what = f"a {REFERENCE_TITLES[name]} does as well as the best method"
        return f"On this picture, the number says nothing about the methods: {what}."
    different = len(numbers) - sum(bool(compared.same_as) for compared in row.maps)
    if metric.name == QUICK and different > 1 and max(numbers) - min(numbers) < _APART:
        return (
            "On this picture, the number does not separate the methods: they are within "
            f"{max(numbers) - min(numbers):.1%} of each other."
        )
    return ""


@dataclass(frozen=True, eq=False)
class Comparison(Tabular):
    """Several methods on the same pictures.

    Attributes:
        rows: one for each picture and layer.
        metric: the metric that the maps are judged by.
        model: the model's name.
        unreadable: pictures that could not be read, with the reason.
    """

    rows: tuple[ComparedPicture, ...]
    metric: Metric
    model: str
    unreadable: dict[str, str] = field(default_factory=dict)

    def table(self) -> Rows:
        """Return a row for each picture, layer and method, and for each reference map, whose method is empty."""
        return [
            {"picture": row["source"], "label": row["label"], "probability": row["probability"], **of_map}
            for row in self.to_dict()["rows"]
            for of_map in [*row["maps"], *_rows_of_references(row)]
        ]

    def to_markdown(self) -> str:
        """Return a table in Markdown: the metric's value of each map, for each picture and layer."""
        columns = [compared.method for compared in self.rows[0].maps]
        references = list(self.rows[0].by_chance)
        columns += [f"({REFERENCE_TITLES[name]})" for name in references]
        lines = ["| picture | layer | " + " | ".join(columns) + " |", "|---|---|" + "---|" * len(columns)]
        for row in self.rows:
            shares = [words_of(self.metric, compared) for compared in row.maps]
            cells = [
                f"{Path(row.source).name}: {row.label}",
                row.layer,
                *shares,
                *(value_words(self.metric, row.by_chance[name]) for name in references),
            ]
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        caveats = [f"{Path(row.source).name}: {said}" for row in self.rows if (said := caveat(row, self.metric))]
        return "\n".join([*lines, *([""] if caveats else []), *caveats])

    def sheet(self, *, colormap: str = "turbo", alpha: float = 0.5) -> Pixels:
        """Draw all maps on one sheet, each on its own scale, since the methods' units differ.

        Args:
            colormap, alpha: as for ``Explanation.overlay``.

        Returns:
            The sheet, height x width x 3 uint8 RGB.
        """
        rows = [_row(row, self.metric, colormap, alpha) for row in self.rows]
        return draw_sheet(rows, f"{self.model}. {self.legend}")

    @property
    def legend(self) -> str:
        """What the values of the maps mean, as a sentence."""
        metric = self.metric
        if metric.name != QUICK:
            return f"{metric.name}: {metric.summary}; {metric.better} is better"
        of = "the score" if self.rows[0].probability is None else "the class's probability"
        return f'"Loses 80%": {of} falls by 80% if the hottest fifth of the picture is blurred; more is better'

    def save(self, path: str | Path, *, colormap: str = "turbo", alpha: float = 0.5) -> Path:
        """Write the sheet to a file, completely or not at all; the suffix decides the type, and folders are created.

        Raises:
            OutputError: the file cannot be written, its type is unknown, or this type cannot be as high as the sheet.
        """
        check_sheet_file(path, len(self.rows))
        path = Path(path)
        sheet = self.sheet(colormap=colormap, alpha=alpha)
        _check_height(len(sheet), path.suffix)
        write_file(path, encode(sheet, path.suffix))
        return path

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as plain JSON values, without the maps themselves."""
        return {
            "model": self.model,
            "metric": self.metric.name,
            "fill": self.metric.fill,
            "better": self.metric.better,
            "unreadable": self.unreadable,
            "rows": [
                {
                    "source": row.source,
                    "label": row.label,
                    "probability": finite_or_none(row.probability),
                    "answer": row.label if row.answer is None else row.answer[0],
                    "answer_probability": finite_or_none(row.probability if row.answer is None else row.answer[1]),
                    "layer": row.layer,
                    "caveat": caveat(row, self.metric),
                    "references": {name: value.number for name, value in row.by_chance.items()},
                    "maps": [
                        {
                            "method": compared.method,
                            "value": None if compared.value is None else compared.value.number,
                            "layer": None if compared.explanation is None else compared.explanation.layer,
                            "status": "error" if compared.explanation is None else compared.explanation.status,
                            "same_as": compared.same_as,
                            "reason": compared.reason or ("" if compared.value is None else compared.value.reason),
                        }
                        for compared in row.maps
                    ],
                }
                for row in self.rows
            ],
        }

    def __repr__(self) -> str:
        """Return a line with the number of methods, pictures and layers."""
        pictures = len({row.source for row in self.rows})
        layers = len({row.layer for row in self.rows})
        at = f" at {layers} layers" if layers > 1 else ""
        return f"<Comparison of {counted(len(self.rows[0].maps), 'method')} on {counted(pictures, 'picture')}{at}>"

    def _repr_html_(self) -> str:
        """Show the sheet in a notebook."""
        return as_html(self.sheet(), repr(self))


def compare(
    model: Explainer | Loadable,
    images: ImageLike | Sequence[ImageLike],
    methods: MethodLike | Iterable[MethodLike] | None = None,
    *,
    target_layer: Layers | Sequence[Layers | None] | None = None,
    target: TargetLike | None = None,
    metric: str = QUICK,
    progress: Progress | None = None,
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
        target_layer: one layer or a list; each picture gets a row for each of them. None lets camkit choose the layer,
            unless ``model`` is an ``Explainer`` with a layer of its own.
        target: None for each picture's best class, or one target for all.
        metric: a name from ``camkit.metrics.METRICS``, of a metric that needs no region.
        progress: ``progress(done, of)`` is called after each picture that can be read.
        **options: ``preprocess``, ``labels``, ``device``, ``precision`` and ``references`` as for ``Explainer``.

    Raises:
        InputError: an argument or the model is wrong, or no picture can be read.

    Examples:
        >>> import camkit
        >>> camkit.compare("demo-fair", camkit.scenes.scene_paths()["plane-sky"], ["gradcam", "hirescam"])
        <Comparison of 2 methods on 1 picture>
    """
    chosen = chosen_methods(methods, DEFAULTS)
    explainer = chosen_explainer(model, chosen, options)
    chosen = fitting_methods(chosen, explainer, named=methods is not None)
    pictures: list[Any] = list(images) if isinstance(images, (list, tuple)) else [images]
    if not pictures:
        raise InputError("the list of pictures is empty")
    metric = find_metric(metric).name
    if METRICS[metric].needs_region:
        raise InputError(
            f"metric {metric!r} needs the region of an object, and a comparison has none; choose another metric, or "
            "judge single maps in Python with camkit.metrics.Evaluator(model, picture, region=...)"
        )
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
        by_chance = _by_chance(evaluator, metric, colour=methods is not None)
        for layer in layers:
            rows.append(_compared(explainer, evaluator, opened, source, chosen, layer, metric, by_chance))
        if progress is not None:
            progress(number, len(pictures))
    if not rows:
        raise ImageError(next(iter(unreadable.values())))
    if methods is None:
        rows = _without_misfits(rows)
    return Comparison(tuple(rows), METRICS[metric], explainer.name, unreadable)


def _by_chance(evaluator: Evaluator, metric: str, *, colour: bool) -> dict[str, Value]:
    """Return the metric's values for the reference maps."""
    heats = evaluator.references(colour=colour)
    return {name: evaluator(heat, [metric])[metric] for name, heat in heats.items()}


def check_sheet_file(path: str | Path, rows: int) -> None:
    """Refuse a file that cannot take a sheet with this many rows, before anything is computed.

    Raises:
        OutputError: it is a folder or has no suffix of a picture, its folder cannot be written to, or no file of this
            type can be as high as the sheet.
    """
    file = Path(path)
    if str(path).endswith(("/", "\\")) or file.is_dir() or not file.name:
        raise OutputError(f"{str(path)!r} is a folder; the sheet needs a file, such as {str(file / 'compare.png')!r}")
    if not file.suffix:
        raise OutputError(f"{str(path)!r} has no suffix that says its type; name a file such as {f'{file}.png'!r}")
    encode(np.zeros((1, 1, 3), np.uint8), file.suffix)
    _check_height(least_height(rows), file.suffix)
    check_folder(file.parent)


def _check_height(height: int, suffix: str) -> None:
    """Refuse a height that no file of this type can have; camkit is known to write this type."""
    try:
        encode(np.zeros((height, 1, 3), np.uint8), suffix)
    except OutputError:
        raise OutputError(
            f"the sheet is {height:,} pixels high or more, and no {suffix} file can be; write it as .png, or compare "
            "fewer pictures"
        ) from None


def _compared(
    explainer: Explainer,
    evaluator: Evaluator,
    picture: Any,
    source: str,
    methods: Sequence[Method],
    layer: Layers | None,
    metric: str,
    by_chance: Mapping[str, Value],
) -> ComparedPicture:
    """Explain one picture with all methods, and judge each map."""
    shared = _in_one_pass(explainer, evaluator, picture, methods, layer)
    maps = [shared.get(method.name) or _mapped(explainer, evaluator, picture, method, layer) for method in methods]
    maps = list(map(_Judge(evaluator, metric), maps))
    found = [compared.explanation for compared in maps if compared.explanation is not None]
    if not found:
        raise MethodError(f"no method works on this picture: {maps[0].reason}")
    return ComparedPicture(
        source,
        found[0].name,
        found[0].probability,
        "" if layer is None else str(layer),
        tuple(maps),
        by_chance,
        _other_answer(evaluator, found[0], explainer.labels),
    )


def _other_answer(
    evaluator: Evaluator, explained: Explanation, labels: tuple[str, ...] | None
) -> tuple[str, float | None] | None:
    """Return the model's own best class and its probability, if it is not the class that is explained."""
    best = evaluator.scores.best
    if best is None or best[0] == explained.target or not math.isfinite(explained.score):
        return None
    return label_of(best[0], labels) or f"class {best[0]}", best[1]


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


class _Judge:
    """Judges the maps of one picture, and finds equal maps. If the metric only reads the map, these are judged once.

    On a network that ends in a mean and one linear layer, Grad-CAM, HiResCAM and ShapleyCAM are the same.
    """

    def __init__(self, evaluator: Evaluator, metric: str) -> None:
        self._evaluator, self._metric = evaluator, metric
        self._known: list[tuple[Tensor, ComparedMap]] = []

    def __call__(self, compared: ComparedMap) -> ComparedMap:
        """Add the metric's value, if there is a map."""
        if compared.explanation is None:
            return compared
        heat = self._evaluator.heat(compared.explanation)
        equal = (known for values, known in self._known if torch.allclose(values, heat.values, rtol=0, atol=_EQUAL))
        same = next(equal, None)
        if same is not None and self._metric == QUICK:
            return replace(compared, value=same.value, same_as=same.title)
        judged = replace(compared, value=self._evaluator(heat, [self._metric])[self._metric])
        if same is not None:
            return replace(judged, same_as=same.title)
        if compared.explanation.status == "ok":
            self._known.append((heat.values, judged))
        return judged


def _without_misfits(rows: Sequence[ComparedPicture]) -> list[ComparedPicture]:
    """Leave out the methods that work on none of the pictures."""
    works = [any(row.maps[place].explanation is not None for row in rows) for place in range(len(rows[0].maps))]
    return [
        replace(row, maps=tuple(compared for compared, fits in zip(row.maps, works, strict=True) if fits))
        for row in rows
    ]


def _rows_of_references(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    same = {"method": "", "layer": None, "status": "ok", "same_as": "", "reason": ""}
    return [{**same, "value": value, "reason": REFERENCE_TITLES[name]} for name, value in row["references"].items()]


def words_of(metric: Metric, compared: ComparedMap) -> str:
    """Return the value of a map as a few words, or why it has none."""
    if compared.explanation is None:
        return compared.reason
    if not math.isfinite(compared.explanation.score):
        return f"the model's score is {'NaN' if math.isnan(compared.explanation.score) else 'infinite'}"
    if compared.explanation.status != "ok":
        return "NaN or infinity in the map" if compared.explanation.status == "non_finite" else "empty map"
    assert compared.value is not None
    return value_words(metric, compared.value)


def value_words(metric: Metric, value: Value) -> str:
    """Return a metric's value as a few words."""
    if value.number is None:
        return str(value)
    if metric.name != QUICK:
        return f"{metric.name} {value}"
    if -value.number > _MOST_GAINED:
        return f"gains over {_MOST_GAINED:,.0%}"
    rounded = round(value.number, 2)
    return f"gains {-rounded:.0%}" if rounded < 0 else f"loses {abs(rounded):.0%}"


def _row(row: ComparedPicture, metric: Metric, colormap: str, alpha: float) -> SheetRow:
    """Return what the sheet shows of a picture."""
    panels = [
        MapPanel(
            compared.title,
            f"the same as {compared.same_as}" if compared.same_as else words_of(metric, compared),
            None
            if compared.explanation is None or compared.same_as
            else compared.explanation.overlay(colormap=colormap, alpha=alpha, scale="each"),
        )
        for compared in row.maps
    ]
    first = next(compared.explanation for compared in row.maps if compared.explanation is not None)
    lines = [row.says]
    if row.answer is not None:
        lines.append(f"model's answer: {row.answers}")
    if row.layer:
        lines.append(f"layer {row.layer}")
    lines += [
        f"{REFERENCE_TITLES[name]}: {value_words(metric, value) if metric.name == QUICK else value}"
        for name, value in row.by_chance.items()
        if value.number is not None
    ]
    lines += [said] if (said := caveat(row, metric)) else []
    original = first.overlay(style="overlay", alpha=0.0, scale="each")
    return SheetRow(original, Path(row.source).name, tuple(lines), tuple(panels))


def _with_percent(label: str, probability: float | None) -> str:
    return label if probability is None else f"{label}: {percent(probability)}"
