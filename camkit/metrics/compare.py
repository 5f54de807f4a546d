"""Compare methods on the same pictures: one sheet with methods across, pictures and layers down."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from camkit.drawing import figure
from camkit.drawing.encode import as_html, encode
from camkit.drawing.text import AMBER, GREY, Canvas, wrapped
from camkit.errors import ImageError, InputError, LayerError, MethodError, OutputError, TargetError
from camkit.explaining.explainer import Explainer
from camkit.explaining.explanation import Explanation, finite_or_none
from camkit.images.files import check_folder, write_picture
from camkit.images.read import open_picture
from camkit.kit.wording import counted
from camkit.layers.names import Layers, find_layers, named_layers
from camkit.methods.registry import REFERENCE_TITLES, Method, MethodLike, find_method, known_method
from camkit.metrics.evaluator import Evaluator, Metric, OfModel, UndefinedError, Value, find_metric
from camkit.models import black_box_in
from camkit.models.loaded import Loadable
from camkit.tables import Rows, markdown_table
from camkit.targets import TargetLike, as_targets
from camkit.targets.scores import label_of
from camkit.types import ImageLike, Opacity, Pixels, Progress

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

QUICK = "top-loss"
"""The usual metric. It reads nothing but the map, so equal maps have equal values."""


_SIDE, _LETTERS, _ACROSS, _MOST_LINES = 256, 21, 7, 9
"""The side of a map, the height of letters and the most lines of a text on a sheet, and the most maps in a row: the
sheet is then no wider than a slide of 1920 pixels, on which the letters have 11 points."""


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

    @property
    def words(self) -> str:
        """The metric's value as a few words, or why there is none."""
        if self.explanation is None or self.value is None:
            return self.reason
        if not math.isfinite(self.explanation.score):
            return f"the model's score is {'NaN' if math.isnan(self.explanation.score) else 'infinite'}"
        if self.explanation.status != "ok":
            return "NaN or infinity in the map" if self.explanation.status == "non_finite" else "empty map"
        return value_words(self.value)

    def to_dict(self) -> dict[str, Any]:
        """Return the map's value as plain JSON values, without the map."""
        return {
            "method": self.method,
            "value": None if self.value is None else self.value.number,
            "layer": None if self.explanation is None else self.explanation.layer,
            "status": "error" if self.explanation is None else self.explanation.status,
            "same_as": self.same_as,
            "reason": self.reason or ("" if self.value is None else self.value.reason),
        }


@dataclass(frozen=True, eq=False)
class ComparedPicture:
    """All methods on one picture, for one layer.

    Attributes:
        source: the picture's file, or its number in the call.
        layer: the layer that the caller named; empty if each method chooses its own.
        maps: one map for each method.
        by_chance: the metric's values for maps that know nothing about the model: "random", a random map; "centre", a
            blob in the middle; and "colour", how near each place is to the best single colour. The last is there only
            if the caller named the methods, since finding the colour takes 16 passes of the model.
        answer: the model's own best class and its probability (None if it has none). The answer is None if this
            class is the one that is explained.
    """

    source: str
    layer: str
    maps: tuple[ComparedMap, ...]
    by_chance: Mapping[str, Value]
    answer: tuple[str, float | None] | None = None

    @property
    def first(self) -> Explanation:
        """The first explanation; all are of one class."""
        return next(compared.explanation for compared in self.maps if compared.explanation is not None)

    @property
    def label(self) -> str:
        """The class that is explained."""
        return self.first.name

    @property
    def probability(self) -> float | None:
        """The model's probability of it; None if it has none."""
        return self.first.probability

    @property
    def answers(self) -> str:
        """The model's own answer as a few words; empty if it is the class that is explained."""
        return "" if self.answer is None else _with_percent(*self.answer)

    def to_dict(self) -> dict[str, Any]:
        """Return the picture's values as plain JSON values."""
        label, probability = self.answer or (self.label, self.probability)
        return {
            "source": self.source,
            "label": self.label,
            "probability": finite_or_none(self.probability),
            "answer": label,
            "answer_probability": finite_or_none(probability),
            "layer": self.layer,
            "references": {name: value.number for name, value in self.by_chance.items()},
            "maps": [compared.to_dict() for compared in self.maps],
        }

    @property
    def about(self) -> str:
        """What the model says of the picture, and the numbers of the reference maps, as a sentence."""
        parts = [
            f"{Path(self.source).name}: {_with_percent(self.label, self.probability)}",
            *([f"model's answer: {self.answers}"] if self.answer is not None else []),
            *([f"layer {self.layer}"] if self.layer else []),
            *(
                f"{REFERENCE_TITLES[name]}: {value_words(value).removeprefix(f'{value.metric} ')}"
                for name, value in self.by_chance.items()
                if value.number is not None
            ),
        ]
        return f"{'; '.join(parts)}."

    def tiles(self, colormap: str, alpha: float, opacity: Opacity) -> list[figure.Tile]:
        """Return the picture and its maps as a sheet shows them."""
        tiles = [figure.Tile(self.first.overlay(style="overlay", alpha=0.0, scale="each"), "the picture")]
        for compared in self.maps:
            if compared.explanation is not None and not compared.same_as:
                pixels = compared.explanation.overlay(colormap=colormap, alpha=alpha, opacity=opacity, scale="each")
                tiles.append(figure.Tile(pixels, compared.title, compared.words, GREY))
                continue
            canvas, words = Canvas(_SIDE, _SIDE), compared.reason or f"the same as {compared.same_as}"
            for number, line in enumerate(wrapped(words, _SIDE, _LETTERS, _MOST_LINES), start=1):
                canvas.text(0, number * 1.3 * _LETTERS, line, size=_LETTERS, colour=AMBER)
            tiles.append(figure.Tile(canvas.pixels(), compared.title))
        return tiles


@dataclass(frozen=True, eq=False)
class Comparison(OfModel[ComparedPicture]):
    """Several methods on the same pictures, with a row for each picture and layer.

    Attributes:
        metric: the metric that the maps are judged by.
    """

    metric: Metric

    def table(self) -> Rows:
        """Return a row for each picture, layer and method, and for each reference map, whose method is empty."""
        rows = []
        for row in self.to_dict()["rows"]:
            picture = {"picture": row["source"], "label": row["label"], "probability": row["probability"]}
            rows += [picture | of_map for of_map in row["maps"]]
            for name, value in row["references"].items():
                nothing = {"method": "", "layer": None, "status": "ok", "same_as": ""}
                rows.append({**picture, **nothing, "reason": REFERENCE_TITLES[name], "value": value})
        return rows

    def to_markdown(self) -> str:
        """Return a table in Markdown: the metric's value of each map, for each picture and layer."""
        first = self.rows[0]
        headings = ["picture", "layer", *(compared.method for compared in first.maps)]
        headings += [f"({REFERENCE_TITLES[name]})" for name in first.by_chance]
        rows = []
        for row in self.rows:
            words = (*(compared.words for compared in row.maps), *map(value_words, row.by_chance.values()))
            cells = (f"{Path(row.source).name}: {row.label}", row.layer, *words)
            rows.append([cell.replace("|", "\\|") for cell in cells])
        return markdown_table(headings, rows)

    def sheet(self, *, colormap: str = "turbo", alpha: float = 0.5, opacity: Opacity = "evidence") -> Pixels:
        """Draw all maps on one sheet, each on its own scale, since the methods' units differ.

        Args:
            colormap, alpha, opacity: as for ``Explanation.overlay``.

        Returns:
            The sheet, height x width x 3 uint8 RGB.
        """
        blocks: list[Pixels] = []
        for row in self.rows:
            tiles = row.tiles(colormap, alpha, opacity)
            columns = math.ceil(len(tiles) / math.ceil(len(tiles) / _ACROSS))
            said = [row.about] if blocks else [f"{self.model}. {self.legend}", row.about]
            lines = [part for words in said for part in wrapped(words, columns * _SIDE, _LETTERS + 1, _MOST_LINES)]
            blocks.append(figure.contact_sheet(tiles, columns, "\n".join(lines), side=_SIDE, size=_LETTERS))
        return figure.sheet(blocks, columns=1)

    @property
    def legend(self) -> str:
        """What the values of the maps mean, as a sentence."""
        metric = self.metric
        if metric.name != QUICK:
            return f"{metric.name}: {metric.summary}; {metric.better} is better"
        of = "the score" if self.rows[0].probability is None else "the class's probability"
        return f'"Loses 80%": {of} falls by 80% if the hottest fifth of the picture is blurred; more is better'

    def save(
        self, path: str | Path, *, colormap: str = "turbo", alpha: float = 0.5, opacity: Opacity = "evidence"
    ) -> Path:
        """Write the sheet to a file, completely or not at all; the suffix decides the type, and folders are created.

        Raises:
            OutputError: the file cannot be written, its type is unknown, or this type cannot be as high as the sheet.
        """
        check_sheet_file(path)
        return write_picture(path, self.sheet(colormap=colormap, alpha=alpha, opacity=opacity))

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as plain JSON values, without the maps themselves."""
        return {
            "model": self.model,
            "metric": self.metric.name,
            "fill": self.metric.fill,
            "better": self.metric.better,
            "unreadable": self.unreadable,
            "rows": [row.to_dict() for row in self.rows],
        }

    def __repr__(self) -> str:
        """Return a line with the number of methods, pictures and layers."""
        pictures, layers = len({row.source for row in self.rows}), len({row.layer for row in self.rows})
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
        methods: names or functions; None for the usual ones that fit the model.
        target_layer: one layer or a list; each picture gets a row for each of them. None lets camkit choose the layer,
            unless ``model`` is an ``Explainer`` with a layer of its own.
        target: None for each picture's best class, or one target for all.
        metric: a name from ``camkit.metrics.METRICS``, of a metric that needs no region.
        progress: ``progress(done, of)`` is called after each picture.
        **options: ``preprocess``, ``labels``, ``device``, ``precision`` and ``references`` as for ``Explainer``.

    Raises:
        InputError: an argument or the model is wrong, or no picture can be read.

    Examples:
        >>> import camkit
        >>> camkit.compare("demo-fair", camkit.scenes.scene_paths()["plane-sky"], ["gradcam", "hirescam"])
        <Comparison of 2 methods on 1 picture>
    """
    explainer, chosen = prepared(model, methods, DEFAULTS, options)
    as_targets(target, explainer.labels)  # refuses an unknown label before pictures are read
    judged_by = find_metric(metric)
    if judged_by.needs_region:
        raise InputError(
            f"metric {metric!r} needs the region of an object, and a comparison has none; choose another metric, or "
            "judge single maps in Python with camkit.metrics.Evaluator(model, picture, region=...)"
        )
    layers = chosen_layers(explainer, target_layer)
    rows: list[ComparedPicture] = []

    def add(source: str, picture: Any) -> None:
        evaluator = Evaluator(explainer, picture, target)
        heats = evaluator.references(colour=methods is not None)
        by_chance = {name: evaluator(heat, metric)[metric] for name, heat in heats.items()}
        for layer in layers:
            maps = _maps(explainer, evaluator, picture, chosen, layer, metric)
            first = next((one.explanation for one in maps if one.explanation is not None), None)
            if first is None:
                raise MethodError(f"no method works on this picture: {maps[0].reason}")
            # the model's own best class and its probability, if it is not the class that is explained
            best, answer = evaluator.scores.best, None
            if best is not None and best[0] != first.target and math.isfinite(first.score):
                answer = label_of(best[0], explainer.labels) or f"class {best[0]}", best[1]
            named = "" if layer is None else str(layer)
            rows.append(ComparedPicture(source, named, tuple(maps), by_chance, answer))

    pictures = enumerate(images if isinstance(images, (list, tuple)) else [images], start=1)
    unreadable = for_each_picture([*pictures], add, progress)
    if methods is None:
        works = {one.method for row in rows for one in row.maps if one.explanation is not None}
        rows = [replace(row, maps=tuple(one for one in row.maps if one.method in works)) for row in rows]
    return Comparison(explainer.name, tuple(rows), unreadable, judged_by)


def for_each_picture(
    pictures: Sequence[tuple[int, Any]], measure: Callable[[str, Any], None], progress: Progress | None
) -> dict[str, str]:
    """Measure each picture, and return those that cannot be used, with the reason.

    Args:
        pictures: the pictures or their files, each with its number in the user's call.
        measure: ``measure(source, picture)`` raises an error if there is no target or no finite score.
        progress: ``progress(done, of)`` is called after each picture.

    Raises:
        InputError: there is no picture, or none can be used; the error of the first.
    """
    used, unreadable = 0, dict[str, str]()
    refused: Exception = ImageError("the list of pictures is empty")
    for done, (number, picture) in enumerate(pictures, start=1):
        # A file's name may stand for several pictures in memory that were made of it
        source = str(picture) if isinstance(picture, (str, Path)) else f"picture {number}"
        try:
            measure(source, open_picture(picture) if isinstance(picture, (str, Path)) else picture)
            used += 1
        except (
            ImageError,
            TargetError,
            UndefinedError,
        ) as error:  # without a box, there is no target
            refused = refused if unreadable else error
            unreadable[source] = str(error)
        if progress is not None:
            progress(done, len(pictures))
    if not used:
        raise InputError(str(refused)) if isinstance(refused, UndefinedError) else refused
    return unreadable


def prepared(
    model: Explainer | Loadable,
    methods: MethodLike | Iterable[MethodLike] | None,
    usual: Sequence[str],
    options: Mapping[str, Any],
) -> tuple[Explainer, list[Method]]:
    """Return the Explainer to use and its methods, each of them once; the usual ones that fit the model for None.

    Raises:
        InputError: the list is empty; the model is an Explainer, which has options of its own; or an option is wrong.
        MethodError: a method is unknown, or two different ones have the same name, such as two variants of "rise".
    """
    several: Any = filter(known_method, usual) if methods is None else methods
    if isinstance(several, (str, Method)) or not isinstance(several, Iterable):
        several = [several]
    chosen: list[Method] = []
    for method in map(find_method, several):
        if method not in chosen:
            if method.name in {*REFERENCE_TITLES, *(other.name for other in chosen)}:
                raise MethodError(
                    f"a method cannot be called {method.name!r}, because judge has a row of that name; give it another "
                    "name with camkit.register_method"
                )
            chosen.append(method)
    if not chosen:
        raise InputError("the list of methods is empty; pass None for the usual ones")
    if isinstance(model, Explainer):
        if options:
            raise InputError(f"the Explainer has its {', '.join(options)} already; pass the model instead")
        explainer = model
    else:
        # Reference pictures are refused with a method that uses none, so one of those that use them takes them.
        uses = next((method for method in chosen if method.compares), None)
        explainer = Explainer(model, method=None if options.get("references") is None else uses, **options)
    if methods is None and black_box_in(explainer.model):
        # The methods that need neither layers nor gradients
        chosen = list(map(find_method, ("occlusion", "rise")))
    return explainer, chosen


def chosen_layers(explainer: Explainer, layers: Layers | Sequence[Layers | None] | None) -> list[Layers | None]:
    """Return the layers to explain; each None among them keeps the layer of the Explainer, if it has one.

    Raises:
        LayerError: the model has no such layer.
    """
    chosen: list[Any] = list(layers) if isinstance(layers, (list, tuple)) else [layers]
    for layer in chosen:
        if layer is not None:
            find_layers(explainer.model, layer)
    return [None if layer is None else named_layers(explainer.model, layer) for layer in chosen] or [None]


def check_sheet_file(path: str | Path) -> None:
    """Refuse a file that cannot take a sheet, before anything is computed.

    Raises:
        OutputError: it is a folder or has no suffix of a picture, or its folder cannot be written to.
    """
    file = Path(path)
    if str(path).endswith(("/", "\\")) or file.is_dir() or not file.suffix:
        raise OutputError(f"the sheet needs a file such as {str(file / 'compare.png')!r}, not {str(path)!r}")
    encode(np.zeros((1, 1, 3), np.uint8), file.suffix)
    check_folder(file.parent)


def _maps(
    explainer: Explainer,
    evaluator: Evaluator,
    picture: Any,
    methods: Sequence[Method],
    layer: Layers | None,
    metric: str,
) -> list[ComparedMap]:
    """Explain one picture with all methods, in one pass where they can share it, and judge the maps.

    Equal maps are found, and judged once if the metric only reads the map. On a network that ends in a mean and one
    linear layer, Grad-CAM, HiResCAM and ShapleyCAM are the same.
    """
    shared: dict[str, Explanation] = {}
    sharing = [method for method in methods if method.shares_pass]
    with suppress(MethodError, LayerError, TargetError):
        if sharing:
            together = explainer.using(sharing[0], layer).by_methods(picture, sharing, evaluator.target)
            shared = {each.method: each for each in together}
    maps: list[ComparedMap] = []
    known: list[tuple[torch.Tensor, ComparedMap]] = []
    for method in methods:
        try:
            using = explainer.using(method, layer if method.layer else None)
            found = shared.get(method.name) or using(picture, evaluator.target)
        except (MethodError, LayerError, TargetError) as error:
            maps.append(ComparedMap(method.name, None, reason=str(error)))
            continue
        heat = evaluator.heat(found)
        # Two maps with heat from 0 to 1 count as equal if they differ by less, since float32 rounds
        equal = (other for values, other in known if torch.allclose(values, heat.values, rtol=0, atol=1e-5))
        same = next(equal, None)
        value = same.value if same is not None and metric == QUICK else evaluator(heat, metric)[metric]
        maps.append(ComparedMap(method.name, found, value, same_as="" if same is None else same.title))
        if same is None and found.status == "ok":
            known.append((heat.values, maps[-1]))
    return maps


def value_words(value: Value) -> str:
    """Return a metric's value as a few words."""
    if value.number is None or value.metric != QUICK:
        return str(value) if value.number is None else f"{value.metric} {value}"
    rounded = round(value.number, 2)
    return f"gains {-rounded:,.0%}" if rounded < 0 else f"loses {abs(rounded):.0%}"


def _with_percent(label: str, probability: float | None) -> str:
    return label if probability is None else f"{label}: {figure.percent(probability)}"
