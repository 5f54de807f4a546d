"""Judge methods over a sample of pictures: which are faithful on this model, and which one to use."""

from __future__ import annotations

import datetime
import json
import math
import random
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from camkit.errors import (
    ImageError,
    InputError,
    LayerError,
    MethodError,
    OutputError,
    TargetError,
    as_markdown,
    printable,
)
from camkit.explainer import Explainer
from camkit.explanation import finite_or_none
from camkit.images.files import write_file
from camkit.images.listing import find_pictures
from camkit.images.read import open_picture
from camkit.kit.pages import templates
from camkit.kit.wording import VERSION, counted, first_of
from camkit.layers.names import Layers, find_layers
from camkit.methods import Method
from camkit.methods.registry import MethodLike
from camkit.metrics.compare import DEFAULTS, chosen_layers, prepared
from camkit.metrics.evaluator import Evaluator, check_seed
from camkit.metrics.registry import METRICS, UndefinedError
from camkit.metrics.rule import (
    PRACTICALLY_LEVEL,
    REFERENCES,
    SIGNIFICANCE,
    UNMOVED,
    Figure,
    Recommendation,
    figures_of,
    recommend,
)
from camkit.tables import Rows, Tabular, flat, markdown_table

if TYPE_CHECKING:
    from camkit.models.loaded import Loadable
    from camkit.targets import TargetLike
    from camkit.types import ImageLike, Progress

USUAL = (*DEFAULTS, "kpcacam", "ablationcam", "fullgrad")
"""The default methods of a judgement: the defaults of a comparison, and three methods that are too slow for one."""

DECIDING = ("srg", "adcc", "feature-srg")
"""The metrics that decide: pixels in order of their heat, the picture times its map, and cells of the layer."""

_MEASURED = (*DECIDING, "insertion", "deletion", "average-drop", "complexity")
"""The columns: the metrics that decide, and their parts."""

_RANDOMISED = "mprt"
"""The metric that tells whether a map changes with the weights."""

_RANDOMISED_PICTURES = 4
"""The number of pictures on which the weights are shuffled. Each needs 8 maps of each method, and the values vary
little."""

_FILL = "blur"
"""The fill for removed pixels in all metrics. With one fill, SRG is exactly insertion minus deletion, and the three
share their passes."""

_STEPS = 10
"""Steps of a curve: half of the default, because the mean over the pictures matters and not the single value."""

_FEWEST = 5
"""The least number of pictures for the bootstrap. With 30 pictures, it tells methods apart that differ by about a
tenth. Many methods take more; see ``_refuse_few``."""

REPORTS = ("judge.html", "judge.json", "judge.md")
"""The files that a judgement writes."""

HOW_TO_READ = (
    "Each number is the mean over the pictures with its 95% interval. Bold: no method is clearly better in this "
    f"column, that is, significantly and by more than {PRACTICALLY_LEVEL:.0%} of its advantage over the random map. "
    "?: not significantly better than the random map on the same pictures. !: significantly worse than the random map.",
    "Three metrics decide together, because they contradict each other: SRG removes pixels in the order of the heat, "
    "ADCC multiplies the picture by its map, and SRG of feature cells removes cells of the layer, not pixels. The "
    "other columns show the parts of these metrics.",
    f'The column "shuffled weights" is the rank correlation of a map with the maps of the same network with shuffled '
    f"weights. Above {UNMOVED:g}, the map shows the picture, and not what the network has learned.",
    "The last rows know nothing about the network: random cells, a blob in the middle, and the nearness to the best "
    "single colour. A method that is no better than these rows shows nothing about the network.",
)
"""What the numbers and marks of a table mean."""

_FIRST_PICTURES = 5
"""A report names at most this many of the pictures that were left out; judge.json names all."""


@dataclass(frozen=True)
class JudgedRow:
    """One method at one layer, or a reference map, over all pictures.

    Attributes:
        name: the method, and the layer if several are judged; or the name of the reference map.
        method: the method's name; empty for a reference map.
        layer: the layer that was used; empty for a reference map.
        metrics: what each metric says, by the metric's name.
        cost: the time of one map in plain passes of the model, the median over the pictures.
        unmoved: the mean rank correlation with the maps of shuffled weights; None if it was not measured.
        empty: how many of the maps are empty or not finite.
        failed: how many pictures could not be explained with it, and the first reason.
    """

    name: str
    method: str
    layer: str
    metrics: Mapping[str, Figure]
    cost: float
    unmoved: float | None
    empty: int
    failed: tuple[int, str]

    @property
    def title(self) -> str:
        """The name as tables show it; that of a reference map in brackets."""
        return self.name if self.method else f"({self.name})"

    @property
    def hardly_changes(self) -> bool:
        """True if the map hardly changes when the weights are shuffled."""
        return self.unmoved is not None and self.unmoved > UNMOVED

    @property
    def last_cells(self) -> tuple[str, str]:
        """The correlation with the maps of shuffled weights and the time in plain passes, as tables show them."""
        cost = f"{self.cost:.1f}" if math.isfinite(self.cost) and self.method else ""
        return "" if self.unmoved is None else f"{self.unmoved:.2f}", cost

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain JSON values."""
        return {
            "name": self.name,
            "method": self.method,
            "layer": self.layer,
            "reference": not self.method,
            "plain_passes": finite_or_none(self.cost),
            "correlation_with_shuffled_weights": self.unmoved,
            "hardly_changes": self.hardly_changes,
            "empty_maps": self.empty,
            "failed": self.failed[0],
            "reason": self.failed[1],
            "metrics": {name: figure.to_dict() for name, figure in self.metrics.items()},
        }


@dataclass(frozen=True)
class MethodJudgement(Tabular):
    """Which methods are faithful on a model, over a sample of pictures.

    Attributes:
        model: the model's name.
        rows: the methods, and the reference maps last.
        recommendation: which one to use, and why.
        pictures: the pictures of the sample.
        unreadable: pictures that could not be used, with the reason.
        layer: the layer whose cells "feature-srg" removes, for all rows alike; empty if it never had a value.
        seed: the seed of the sample and of all draws.
        seconds: how long it took.
        metrics: the metrics in the order of the columns.
    """

    model: str
    rows: tuple[JudgedRow, ...]
    recommendation: Recommendation
    pictures: tuple[str, ...]
    unreadable: dict[str, str]
    layer: str
    seed: int
    seconds: float = field(compare=False)
    metrics: tuple[str, ...] = _MEASURED

    def table(self) -> Rows:
        """Return a row for each method and each reference map, with the mean and interval of each metric."""
        rows = []
        for row in map(JudgedRow.to_dict, self.rows):
            metrics = row.pop("metrics")
            for figure in metrics.values():
                del figure["values"]
            rows.append(flat(row | metrics))
        return rows

    def to_markdown(self) -> str:
        """Return the table in Markdown."""
        rows = []
        for row in self.rows:
            name = f"`{printable(row.name)}`".replace("|", r"\|") if row.method else row.title
            figures = [row.metrics[metric] for metric in self.metrics]
            cells = [f"**{one}** {one.span}" if one.mark == "*" else f"{one}{one.mark} {one.span}" for one in figures]
            rows.append([name, *map(str.strip, cells), *row.last_cells])
        headings = ["method", *map(column_title, self.metrics), "shuffled weights ↓", "plain passes"]
        return f"{markdown_table(headings, rows, numbers=True)}\n\n{HOW_TO_READ[0]}"

    def to_dict(self) -> dict[str, Any]:
        """Return the judgement as plain JSON values; None where there is no number."""
        found = self.recommendation
        return {
            "camkit": VERSION,
            "model": self.model,
            "recommendation": {
                "row": found.row,
                "sentence": found.sentence,
                "metrics_agree": found.agreed,
                "against": dict(found.against),
            },
            "deciding_metrics": list(DECIDING),
            "metrics": {
                name: {"title": METRICS[name].title, "better": METRICS[name].better, "changes": METRICS[name].space}
                for name in self.metrics
            },
            "fill": _FILL,
            "steps": _STEPS,
            "layer_of_feature_cells": self.layer,
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
            "pictures": list(self.pictures),
            "unreadable": self.unreadable,
            "rows": [row.to_dict() for row in self.rows],
        }

    def save(self, folder: str | Path) -> Path:
        """Write ``judge.html``, ``judge.json`` and ``judge.md`` into a folder, and return the page.

        Raises:
            OutputError: a file cannot be written.
        """
        folder = Path(folder)
        if folder.exists() and not folder.is_dir():
            raise OutputError(f"{folder} is a file; the reports need a folder")
        parts = [
            f"# Which method to trust on {as_markdown(self.model)}",
            as_markdown(self.recommendation.sentence),
            as_markdown(self.measured),
            self.to_markdown(),
            "\n".join(f"- {as_markdown(note)}" for note in (*self.notes, *HOW_TO_READ[1:])),
            f"Made by camkit {VERSION}.",
        ]
        write_file(folder / "judge.json", json.dumps(self.to_dict(), indent=1, allow_nan=False).encode())
        write_file(folder / "judge.md", ("\n\n".join(parts) + "\n").encode())
        write_file(folder / "judge.html", self._rendered("judge.html").encode())
        return folder / "judge.html"

    def _rendered(self, template: str) -> str:
        return (
            templates("camkit.metrics")
            .get_template(template)
            .render(
                found=self,
                metrics=[(METRICS[name], column_title(name), name in DECIDING) for name in self.metrics],
                how_to_read=HOW_TO_READ,
                version=VERSION,
                date=datetime.datetime.now(datetime.UTC).date().isoformat(),
            )
        )

    def __repr__(self) -> str:
        """Return a line with the recommendation."""
        methods = sum(bool(row.method) for row in self.rows)
        chosen = self.recommendation.row or "none"
        return f"<MethodJudgement of {methods} methods on {len(self.pictures)} pictures: {chosen}>"

    def _repr_html_(self) -> str:
        """Show the table in a notebook."""
        return self._rendered("judge_table.html")

    @property
    def measured(self) -> str:
        """How the metrics were computed: the fill, the steps, and the layer of the feature cells."""
        removes = f"{METRICS['feature-srg'].title} removes cells of layer {self.layer!r}, for all rows alike"
        return (
            f"{len(self.pictures)} pictures, seed {self.seed}. The fill of removed pixels is {_FILL}, and a curve has "
            f"{_STEPS} steps.{f' {removes}.' if self.layer else ''}"
        )

    @property
    def left_out(self) -> list[str]:
        """A sentence for each picture that could not be used: its name and the reason."""
        return [reason if name in reason else f"{name}: {reason}" for name, reason in self.unreadable.items()]

    @property
    def notes(self) -> list[str]:
        """What else the reader should know: failures, empty maps, and why a method is not recommended."""
        of = len(self.pictures)
        failing, empty = [row for row in self.rows if row.failed[0]], [row for row in self.rows if row.empty]
        said = [f"{row.name} fails on {row.failed[0]} of {of} pictures: {row.failed[1]}." for row in failing]
        said += [f"{row.name}: {row.empty} of {of} maps are empty, and count like the random map." for row in empty]
        said += [f"{name} is not recommended: {reason}." for name, reason in self.recommendation.against.items()]
        if not self.recommendation.agreed:
            said.append("The metrics prefer different methods: look at more than one map.")
        if self.unreadable:
            left_out = first_of(self.left_out, _FIRST_PICTURES)
            said.append(f"{counted(len(self.unreadable), 'picture')} could not be used: {left_out}.")
        return said


def column_title(metric: str) -> str:
    """Return the heading of a metric's column: its title and which direction is better."""
    return f"{METRICS[metric].title} {'↑' if METRICS[metric].better == 'higher' else '↓'}"


def judge(
    model: Explainer | Loadable,
    images: str | Path | Sequence[ImageLike],
    methods: MethodLike | Iterable[MethodLike] | None = None,
    *,
    target_layer: Layers | Sequence[Layers | None] | None = None,
    target: TargetLike | None = None,
    pictures: int = 50,
    seed: int = 0,
    progress: Progress | None = None,
    **options: Any,
) -> MethodJudgement:
    """Measure which methods and layers are faithful on a model, over a sample of pictures.

    Metrics contradict each other (LATEC, Klein et al. 2024; SaCo, Wu et al. 2024), so no single one ranks the methods.
    Three metrics that change different things decide together: SRG removes pixels in the order of the heat, ADCC
    multiplies the picture by its map, and feature-srg removes cells of the layer. A random map, a centred blob and the
    best single colour are judged for comparison.

    Args:
        model: an ``Explainer``, or what it takes as a model.
        images: a folder, or a list of pictures as ``camkit.explain`` takes them.
        methods: names or functions; None for the usual ones that fit the model.
        target_layer: one layer or a list; each method is judged at each of them. None lets camkit choose the layer,
            unless ``model`` is an ``Explainer`` with a layer of its own.
        target: None for each picture's best class, or one target for all.
        pictures: the most pictures to use; if there are more, camkit draws a random sample. 14 methods take at least 9.
        seed: the seed of the sample and of all draws, from 0.
        progress: ``progress(done, of)`` is called before the first picture and after each.
        **options: ``preprocess``, ``labels``, ``device``, ``precision`` and ``references`` as for ``Explainer``.

    Raises:
        InputError: an argument or the model is wrong, camkit does not know how to prepare pictures for it, or fewer
            than 5 pictures can be used.

    Examples:
        >>> import camkit
        >>> scenes = list(camkit.scenes.scene_paths().values())
        >>> camkit.judge("demo-fair", scenes, ["gradcam", "layercam"])
        <MethodJudgement of 2 methods on 6 pictures: gradcam>
    """
    begin = time.perf_counter()
    if isinstance(pictures, bool) or not isinstance(pictures, int) or pictures < _FEWEST:
        raise InputError(f"pictures must be a whole number from {_FEWEST}, not {pictures!r}")
    check_seed(seed)
    explainer, chosen = prepared(model, methods, USUAL, options)
    sample = _sample(images, pictures, seed)
    layers = chosen_layers(explainer, target_layer)
    tried = {
        f"{method.name} at {layer}" if len(layers) > 1 and method.layer else method.name: _Tried(method, layer)
        for method in chosen
        for layer in (layers if method.layer else [None])
    }
    references = {name: _Tried() for name in REFERENCES}
    used: list[str] = []
    unreadable: dict[str, str] = {}
    plain: list[float] = []
    # Maps of several layers are compared on the cells of one layer, and then camkit chooses it.
    named = find_layers(explainer.model, layers[0]) if len(layers) == 1 and layers[0] is not None else ()
    cells_of, layer_of_cells = str(named[0]) if len(named) == 1 else None, ""
    _refuse_few(len(sample), len(tried), {})
    for done, (number, picture) in enumerate(sample):
        if progress is not None:
            progress(done, len(sample))
        source = str(picture) if isinstance(picture, (str, Path)) else f"picture {number}"
        try:
            opened = open_picture(picture) if isinstance(picture, (str, Path)) else picture
            draws = seed + len(used)
            evaluator = Evaluator(explainer, opened, target, fill=_FILL, steps=_STEPS, layer=cells_of, seed=draws)
            start = time.perf_counter()
            evaluator.scored(evaluator.picture[None])
        except (ImageError, TargetError, UndefinedError) as error:
            unreadable[source] = str(error)
            continue
        plain.append(time.perf_counter() - start)
        for row in tried.values():
            row.judge(evaluator, opened)
        for reference, heat in evaluator.references().items():
            references[reference].note(_MEASURED, evaluator(heat, _MEASURED).numbers())
        layer_of_cells = layer_of_cells or evaluator.cells_of
        used.append(source)
    if progress is not None:
        progress(len(sample), len(sample))
    _refuse_few(len(used), len(tried), unreadable)
    works = {name: row for name, row in tried.items() if len(row.failures) < len(used)}
    if not works:
        raise MethodError(f"no method works on these pictures: {next(iter(tried.values())).failures[0]}")
    tried = (works if methods is None else tried) | references
    values = {metric: {name: np.array(row.values[metric]) for name, row in tried.items()} for metric in _MEASURED}
    figures = {metric: figures_of(rows, METRICS[metric].better, seed) for metric, rows in values.items()}
    pass_time = float(np.median(plain))
    rows = tuple(
        row.row(name, {metric: of_rows[name] for metric, of_rows in figures.items()}, pass_time)
        for name, row in tried.items()
    )
    costs = {row.name: row.cost for row in rows if row.name in works}
    unmoved = [row.name for row in rows if row.hardly_changes]
    found = recommend({metric: values[metric] for metric in DECIDING}, figures, costs, unmoved, seed)
    seconds = time.perf_counter() - begin
    return MethodJudgement(explainer.name, rows, found, tuple(used), unreadable, layer_of_cells, seed, seconds)


def _sample(images: str | Path | Sequence[ImageLike], most: int, seed: int) -> list[tuple[int, ImageLike]]:
    """Return the pictures to use with their numbers, in a random order that the seed fixes."""
    if not isinstance(images, (str, Path, Iterable)):
        raise InputError(
            f"images must be a folder or a list of pictures, not {type(images).__name__}; pass [img] for one"
        )
    found: list[Any] = find_pictures([Path(images)]) if isinstance(images, (str, Path)) else list(images)
    if isinstance(images, (str, Path)) and found == [Path(images)]:
        open_picture(found[0])  # says what is wrong if there is no such file, or no picture in the folder
    return random.Random(seed).sample(list(enumerate(found, start=1)), min(most, len(found)))


def _refuse_few(usable: int, rows: int, unreadable: Mapping[str, str]) -> None:
    """Refuse so few pictures that no row could be found to beat the random map.

    A row that is better on each of n pictures is so by luck with a chance of 0.5 to the power of n, and the correction
    for several rows multiplies it by their number. If all pictures fail for one reason, it is the model's.
    """
    fewest = max(_FEWEST, math.floor(math.log2(rows / SIGNIFICANCE)) + 1)
    if usable >= fewest:
        return
    reasons = list(dict.fromkeys(unreadable.values()))
    if not usable and len(reasons) == 1:
        raise InputError(reasons[0])
    raise InputError(
        f"{counted(usable, 'picture')} can be used, but judging {counted(rows, 'map')} of each takes {fewest} or more"
        f"{'; ' if reasons else ''}{''.join(reasons[:1])}"
    )


@dataclass(eq=False)
class _Tried:
    """What is measured of one row: a method at one layer, or a reference map if there is no method."""

    method: Method | None = None
    layer: Layers | None = None
    used: str = ""
    values: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    seconds: list[float] = field(default_factory=list)
    empty: int = 0
    failures: list[str] = field(default_factory=list)

    def note(self, names: Iterable[str], numbers: Mapping[str, float | None]) -> None:
        """Add a picture's values; NaN where there is none."""
        for name in names:
            number = numbers.get(name)
            self.values[name].append(np.nan if number is None else number)

    def judge(self, evaluator: Evaluator, picture: Any) -> None:
        """Explain a picture, and add what the metrics say of the map."""
        start = time.perf_counter()
        try:
            found = evaluator.explainer.using(self.method, self.layer)(picture, evaluator.target)
        except (MethodError, LayerError, TargetError) as error:
            self.failures.append(str(error))
            self.note(_MEASURED, {})
            return
        self.seconds.append(time.perf_counter() - start)
        self.used = found.layer
        self.empty += found.status != "ok"
        shuffled = np.isfinite(self.values[_RANDOMISED]).sum() < _RANDOMISED_PICTURES
        names = [*_MEASURED, _RANDOMISED] if shuffled else _MEASURED
        self.note(names, evaluator(found, names).numbers())

    def row(self, name: str, metrics: Mapping[str, Figure], plain: float) -> JudgedRow:
        """Return the row; ``plain`` is the time of a plain pass."""
        shuffled = [value for value in self.values[_RANDOMISED] if np.isfinite(value)]
        cost = float(np.median(self.seconds)) / plain if self.seconds else float("nan") if self.method else 0.0
        return JudgedRow(
            name,
            "" if self.method is None else self.method.name,
            self.used,
            metrics,
            cost,
            float(np.mean(shuffled)) if shuffled else None,
            self.empty,
            (len(self.failures), self.failures[0] if self.failures else ""),
        )
