"""Judge methods over a sample of pictures: which are faithful on this model, and which one to use.

The table and its reports come first, then the rule, whose functions are pure. Rows are compared in pairs, on the
pictures in which both have a value, by the bootstrap over pictures. P-values are corrected for the number of methods
(Holm). Gains are values of which the higher are the better.
"""

from __future__ import annotations

import datetime
import json
import math
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Float

from camkit.errors import (
    InputError,
    LayerError,
    MethodError,
    TargetError,
    as_markdown,
    printable,
    whole_number,
)
from camkit.explaining.explainer import Explainer
from camkit.explaining.explanation import finite_or_none
from camkit.images.files import write_file
from camkit.images.listing import find_pictures
from camkit.images.read import open_picture
from camkit.kit.pages import templates
from camkit.kit.statistics import Estimate, bootstrap_sums, holm, interval, p_above
from camkit.kit.wording import VERSION, counted, first_of, listed, number
from camkit.layers.names import Layers, find_layers
from camkit.methods import Method, MethodLike
from camkit.metrics.compare import DEFAULTS, chosen_layers, for_each_picture, prepared
from camkit.metrics.evaluator import METRICS, Better, Evaluator, OfModel
from camkit.models.loaded import Loadable
from camkit.tables import Rows, flat, markdown_table
from camkit.targets import TargetLike, as_targets
from camkit.types import ImageLike, Progress

USUAL = (*DEFAULTS, "kpcacam", "ablationcam", "fullgrad")
"""The default methods of a judgement: the defaults of a comparison, and three methods that are too slow for one."""

DECIDING = ("srg", "adcc", "feature-srg")
"""The metrics that decide: pixels in order of their heat, the picture times its map, and cells of the layer."""

_MEASURED = (*DECIDING, "insertion", "deletion", "average-drop", "complexity")
"""The columns: the metrics that decide, and their parts."""

_FILL = "blur"
"""The fill for removed pixels in all metrics. With one fill, SRG is exactly insertion minus deletion, and the three
share their passes."""

_STEPS = 10
"""Steps of a curve: half of the default, because the mean over the pictures matters and not the single value."""

_FEWEST = 5
"""The least number of pictures for the bootstrap. With 30 pictures, it tells methods apart that differ by about a
tenth. Many methods take more; see ``_refuse_few``."""

SIGNIFICANCE = 0.05
"""The chance, over all methods of a metric together, of calling any of them better or worse by luck."""

PRACTICALLY_LEVEL = 0.1
"""A method is level with the best method if it is not significantly behind by more than this share of the best method's
advantage over the random map. Maps of one picture are so alike that the bootstrap finds differences of a hundredth,
which matter to nobody and change with the sample."""

UNMOVED = 0.7
"""A map whose rank correlation with the maps of shuffled weights is above this shows the picture rather than what the
network learned. scripts/results/judged.md has the values of the methods on three networks."""

REFERENCES = {"random": "a random map", "centre": "a centred blob", "colour": "the best single colour"}
"""The reference rows, with their names in sentences."""


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
class MethodJudgement(OfModel[JudgedRow]):
    """How faithful each method is to a model, over a sample of pictures. ``rows`` has the reference maps last.

    Attributes:
        recommendation: which one to use, and why.
        pictures: the pictures of the sample.
        layer: the layer whose cells "feature-srg" removes, for all rows alike; empty if it never had a value.
        seed: the seed of the sample and of all draws.
        seconds: how long it took.
        metrics: the metrics in the order of the columns.
    """

    recommendation: Recommendation
    pictures: tuple[str, ...]
    layer: str
    seed: int
    seconds: float = field(compare=False)
    metrics = _MEASURED

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
        parts = [
            f"# Which method to trust on {as_markdown(self.model)}",
            as_markdown(self.recommendation.sentence),
            as_markdown(self.measured),
            self.to_markdown(),
            "\n".join(f"- {as_markdown(note)}" for note in (*self.notes, *HOW_TO_READ[1:])),
            f"Made by camkit {VERSION}.",
        ]
        as_json = json.dumps(self.to_dict(), indent=1, allow_nan=False)
        texts = (self._rendered("judge.html"), as_json, "\n\n".join(parts) + "\n")
        for name, text in zip(REPORTS, texts, strict=True):
            write_file(Path(folder) / name, text.encode())
        return Path(folder) / "judge.html"

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
        return f"<MethodJudgement of {counted(methods, 'method')} on {len(self.pictures)} pictures: {chosen}>"

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
        if self.unreadable:
            # A report names at most this many of the pictures that were left out; judge.json names all
            left_out = first_of(self.left_out, 5)
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
        >>> camkit.judge("demo-fair", scenes, ["gradcam"], pictures=5)
        <MethodJudgement of 1 method on 5 pictures: gradcam>
    """
    begin = time.perf_counter()
    pictures, seed = whole_number(pictures, "pictures", _FEWEST), whole_number(seed, "seed", 0)
    if not isinstance(images, (str, Path, Iterable)):
        raise InputError(f"judge takes a folder or a list of pictures, not {type(images).__name__}; pass [img] for one")
    explainer, chosen = prepared(model, methods, USUAL, options)
    as_targets(target, explainer.labels)  # refuses an unknown label before pictures are read
    sample = _sampled(images, pictures, seed)
    layers = chosen_layers(explainer, target_layer)
    tried = {
        f"{method.name} at {layer}" if len(layers) > 1 and method.layer else method.name: (method, layer)
        for method in chosen
        for layer in (layers if method.layer else [None])
    }
    maps: dict[str, list[_Map]] = {name: [] for name in (*tried, *REFERENCES)}
    used: list[str] = []
    plain: list[float] = []
    # Maps of several layers are compared on the cells of one layer, and then camkit chooses it.
    named = find_layers(explainer.model, layers[0]) if len(layers) == 1 and layers[0] is not None else ()
    chosen_cells, cells_of = str(named[0]) if len(named) == 1 else None, list[str]()

    def add(source: str, picture: Any) -> None:
        draws = seed + len(used)
        evaluator = Evaluator(explainer, picture, target, fill=_FILL, steps=_STEPS, layer=chosen_cells, seed=draws)
        start = time.perf_counter()
        evaluator.scored(evaluator.picture[None])
        plain.append(time.perf_counter() - start)
        for name, (method, layer) in tried.items():
            maps[name].append(_measured(evaluator, picture, method, layer, maps[name]))
        for name, heat in evaluator.references().items():
            maps[name].append(_Map(evaluator(heat, _MEASURED).numbers()))
        cells_of.append(evaluator.cells_of)
        used.append(source)

    _refuse_few(len(sample), len(tried), {})
    if progress is not None:
        progress(0, len(sample))
    unreadable = for_each_picture(sample, add, progress)
    _refuse_few(len(used), len(tried), unreadable)
    works = [name for name in tried if not all(each.failure for each in maps[name])]
    if not works:
        raise MethodError(f"no method works on these pictures: {maps[next(iter(tried))][0].failure}")
    names = [*(works if methods is None else tried), *REFERENCES]
    rows = _rows({name: maps[name] for name in names}, tried, float(np.median(plain)), seed)
    recommended, seconds = recommend(rows, seed), time.perf_counter() - begin
    layer_of_cells = next(filter(None, cells_of), "")
    return MethodJudgement(explainer.name, rows, unreadable, recommended, tuple(used), layer_of_cells, seed, seconds)


def _sampled(images: str | Path | Iterable[ImageLike], most: int, seed: int) -> list[tuple[int, Any]]:
    """Return a random sample of the pictures of a folder or a list, each with its number there, from 1."""
    found: list[Any] = find_pictures([Path(images)]) if isinstance(images, (str, Path)) else list(images)
    if isinstance(images, (str, Path)) and found == [Path(images)]:
        open_picture(found[0])  # says what is wrong if there is no such file, or no picture in the folder
    return random.Random(seed).sample(list(enumerate(found, start=1)), min(most, len(found)))


def _refuse_few(usable: int, rows: int, unreadable: Mapping[str, str]) -> None:
    """Refuse so few pictures that no row could be found to beat the random map.

    A row that is better on each of n pictures is so by luck with a chance of 0.5 to the power of n, and the correction
    for several rows multiplies it by their number.
    """
    fewest = max(_FEWEST, math.floor(math.log2(rows / SIGNIFICANCE)) + 1)
    if usable < fewest:
        few = f"{counted(usable, 'picture')} can be used, but judging {counted(rows, 'map')} of each takes {fewest}"
        raise InputError("; ".join([f"{few} or more", *list(unreadable.values())[:1]]))


class _Map(NamedTuple):
    """What is measured of one map of one picture; ``failure`` says why there is none."""

    values: Mapping[str, float | None]
    layer: str = ""
    seconds: float = 0.0
    is_empty: bool = False
    failure: str = ""


def _measured(evaluator: Evaluator, picture: Any, method: Method, layer: Layers | None, earlier: list[_Map]) -> _Map:
    """Explain a picture, and measure the map; on the first pictures, with shuffled weights too."""
    start = time.perf_counter()
    try:
        found = evaluator.explainer.using(method, layer)(picture, evaluator.target)
    except (MethodError, LayerError, TargetError) as error:
        return _Map({}, failure=str(error))
    seconds = time.perf_counter() - start
    # The number of pictures on which the weights are shuffled. Each needs 8 maps of each method, and the values vary
    # little.
    shuffled = sum(each.values.get("mprt") is not None for each in earlier) < 4
    values = evaluator(found, [*_MEASURED, "mprt"] if shuffled else _MEASURED).numbers()
    return _Map(values, found.layer, seconds, found.status != "ok")


def _rows(
    maps: Mapping[str, Sequence[_Map]], tried: Mapping[str, tuple[Method, Layers | None]], plain: float, seed: int
) -> tuple[JudgedRow, ...]:
    """Return a row for each method and reference map.

    Args:
        maps: what was measured on each picture, by the name of the row.
        tried: the methods by the names of their rows; the other rows are reference maps.
        plain: the time of a plain pass in seconds.
        seed: the seed of the draws.
    """
    figures: dict[str, dict[str, Figure]] = {}
    for metric in _MEASURED:
        values = {name: np.array([each.values.get(metric) for each in of_row], float) for name, of_row in maps.items()}
        figures[metric] = figures_of(values, METRICS[metric].better, seed)
    rows: list[JudgedRow] = []
    for name, of_row in maps.items():
        made = [each for each in of_row if not each.failure]
        failures = [each.failure for each in of_row if each.failure]
        shuffled = [value for each in made if (value := each.values.get("mprt")) is not None]
        rows.append(
            JudgedRow(
                name=name,
                method=tried[name][0].name if name in tried else "",
                layer=made[-1].layer if made else "",
                metrics={metric: figures[metric][name] for metric in _MEASURED},
                cost=float(np.median([each.seconds for each in made])) / plain if made else float("nan"),
                unmoved=float(np.mean(shuffled)) if shuffled else None,
                empty=sum(each.is_empty for each in made),
                failed=(len(failures), failures[0] if failures else ""),
            )
        )
    return tuple(rows)


OfRows: TypeAlias = Mapping[str, Float[np.ndarray, " n"]]
"""For each row, one value per picture; NaN where it has none."""


@dataclass(frozen=True)
class Figure(Estimate):
    """What one metric says about one row.

    Attributes:
        value: the mean over these pictures.
        low, high: its 95 % interval; NaN for few pictures.
        groups: the number of pictures that count, including those in ``counted_like_random``.
        beats_random: whether it is significantly better than the random map on the same pictures.
        loses_to_random: whether it is significantly worse than the random map.
        level_with_best: whether it is not significantly worse than the metric's best method by more than
            ``PRACTICALLY_LEVEL`` of the best method's advantage over the random map.
        counted_like_random: on how many pictures it has no value although the random map has one. On these pictures it
            counts like the random map: a map that says nothing is as good as chance.
        values: the value on each picture; NaN where it has none.
        mark: "*" for a method that is level with the best and beats the random map, "?" for one that does not beat it,
            "!" for one that loses to it; empty for others and for reference maps.
    """

    beats_random: bool
    loses_to_random: bool
    level_with_best: bool
    counted_like_random: int = 0
    values: tuple[float, ...] = field(default=(), repr=False)
    mark: str = ""

    def __str__(self) -> str:
        """Return the mean with two digits; a dash if there is none."""
        return number(self.value)

    @property
    def span(self) -> str:
        """The interval; empty if there is none."""
        return f"[{self.low:z.2f}, {self.high:z.2f}]" if math.isfinite(self.low) else ""

    def to_dict(self) -> dict[str, Any]:
        """Return the figure as plain JSON values."""
        return {
            "mean": finite_or_none(self.value),
            "low": finite_or_none(self.low),
            "high": finite_or_none(self.high),
            "pictures": self.groups,
            "beats_random": self.beats_random,
            "loses_to_random": self.loses_to_random,
            "level_with_best": self.level_with_best,
            "counted_like_random": self.counted_like_random,
            "values": [finite_or_none(value) for value in self.values],
        }


def gains_of(measured: OfRows, better: Better) -> dict[str, Float[np.ndarray, " n"]]:
    """Return the gains of one metric, in which a method that has no value for a picture has that of the random map.

    A metric that has no value for any of a method's maps does not apply to it.
    """
    gains = {}
    for row, values in measured.items():
        counts = row not in REFERENCES and np.isfinite(values).any()
        filled = np.where(np.isnan(values), measured["random"], values) if counts else values
        gains[row] = filled if better == "higher" else -filled
    return gains


def figures_of(measured: OfRows, better: Better, seed: int) -> dict[str, Figure]:
    """Judge all rows of one metric.

    Args:
        measured: the rows; those of ``REFERENCES`` are reference maps, and "random" must be among them.
        better: whether higher or lower values are better.
        seed: the seed of the draws.
    """
    gains = gains_of(measured, better)
    methods = [name for name in gains if name not in REFERENCES]
    ahead = {name: of_row - gains["random"] for name, of_row in gains.items() if name != "random"}
    together = [methods, *([name] for name in ahead if name in REFERENCES)]  # the correction is for the methods alone
    beats = {name for names in together for name in clearly_above({each: ahead[each] for each in names}, seed)}
    loses = clearly_above({name: -ahead[name] for name in methods}, seed)
    level = as_good_as_the_best({name: ahead[name][None] for name in methods}, seed + 1)
    figures = {}
    for name, of_row in gains.items():
        values = of_row if better == "higher" else -of_row
        known = int(np.isfinite(values).sum())
        estimate = interval(_draws(values, seed), mean(values), known)
        beating, losing, best = name in beats, name in loses, name in level
        mark = "*" if best and beating else "" if beating else "!" if losing else "?"
        figures[name] = Figure(
            **vars(estimate),
            beats_random=beating,
            loses_to_random=losing,
            level_with_best=best,
            counted_like_random=known - int(np.isfinite(measured[name]).sum()),
            values=tuple(measured[name].tolist()),
            mark=mark if known and name in methods else "",
        )
    return figures


def as_good_as_the_best(advantage: Mapping[str, Float[np.ndarray, "m n"]], seed: int) -> list[str]:
    """Return the rows that are not clearly behind the best: significantly, and by more than ``PRACTICALLY_LEVEL``.

    Args:
        advantage: by how much each row is ahead of the random map, in each metric and on each picture.
        seed: the seed of the draws.
    """
    overall = {name: mean(_overall(ahead)) for name, ahead in advantage.items() if np.isfinite(ahead).any()}
    if not overall:
        return []
    best = max(overall, key=lambda name: overall[name])
    behind = {name: _overall(advantage[best] - advantage[name]) for name in overall if name != best}
    clearly = clearly_above(behind, seed, PRACTICALLY_LEVEL * max(0.0, overall[best]))
    return [name for name in overall if name not in clearly]


def mean(values: Float[np.ndarray, " n"]) -> float:
    """Return the mean of the values that are known; NaN if there are none."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else float("nan")


def clearly_above(differences: OfRows, seed: int, limit: float = 0.0) -> set[str]:
    """Return the rows whose mean difference is significantly above a limit, corrected for their number (Holm)."""
    p_values = [
        p_above(_draws(values, seed), limit, int(np.isfinite(values).sum())) if np.isfinite(values).any() else 1.0
        for values in differences.values()
    ]
    return {name for name, p in zip(differences, holm(p_values), strict=True) if p < SIGNIFICANCE}


def _draws(values: Float[np.ndarray, " n"], seed: int) -> Float[np.ndarray, " b"]:
    """Return bootstrap draws of the mean of the values that are known."""
    known = values[np.isfinite(values)]
    if not len(known):
        return np.zeros(0)
    # Bootstrap resamples; the normal tail serves for smaller p-values
    sums = bootstrap_sums(known[:, None], np.arange(len(known)), (seed,), 4000)
    return np.asarray(sums[:, 0] / len(known))


# --- the rule


@dataclass(frozen=True)
class Recommendation:
    """What to use.

    Attributes:
        row: the name of the row; None if there is nothing to recommend.
        sentence: the recommendation with its reason.
        against: for each method that cannot be recommended, why.
    """

    row: str | None
    sentence: str
    against: Mapping[str, str] = field(default_factory=dict)


def recommend(rows: Sequence[JudgedRow], seed: int = 0) -> Recommendation:
    """Return which method to use, by the metrics that decide together.

    A method is fit if nothing speaks against it (``_against``). The rule keeps the fit methods that are not clearly
    behind the best in their mean advantage over the random map. Of these, it keeps the methods that cost about as
    little as the cheapest, and returns the first. The rule does not ask for an advantage in every metric, and does not
    count the metrics in which a method is as good as the best. Otherwise the sample of pictures would decide between
    methods that are alike.

    Args:
        rows: the methods, the simplest first, and the reference maps, of which "random" must be one.
        seed: the seed of the draws.
    """
    methods = {row.name: row for row in rows if row.method and math.isfinite(row.cost)}
    others = [row.name for row in rows if not row.method and row.name != "random"]
    advantage = _advantages(rows, list(methods), others)
    reasons = {name: _against(row, advantage, others) for name, row in methods.items()}
    against = {name: reason for name, reason in reasons.items() if reason}
    fit = {name: advantage[name] for name in methods if name not in against}
    if not fit:
        pictures = max(row.metrics[metric].groups for row in rows for metric in DECIDING)
        sentence = f"On these {pictures} pictures no method can be recommended; judge more before you trust any map."
        return Recommendation(None, sentence, against)
    as_good = as_good_as_the_best(fit, seed)
    # Costs up to this many times the cheapest cost count as equal: on a busy machine, the time of a map on a small
    # network varies by as much
    cheap = 1.6 * max(1.0, min(methods[name].cost for name in as_good))
    chosen = methods[next(name for name in as_good if methods[name].cost <= cheap)]
    beaten = [METRICS[metric].title for metric in DECIDING if chosen.metrics[metric].beats_random]
    sentence = (
        f"Use {chosen.name}: it beats a random map in {listed(beaten)}, no method that can be recommended is clearly "
        f"better over all metrics, and none that is as good is much cheaper ({chosen.cost:.1f} plain passes)."
    )
    return Recommendation(chosen.name, sentence, against)


def _advantages(
    rows: Sequence[JudgedRow], methods: Sequence[str], others: Sequence[str]
) -> dict[str, Float[np.ndarray, "m n"]]:
    """Return by how much each row is ahead of the random map, in each metric that decides and on each picture.

    In each metric, the mean advantage of the best method counts as 1, so that all metrics weigh the same. A metric that
    tells no method from the random map would only add noise, and is left out.
    """
    shares: dict[str, list[Float[np.ndarray, " n"]]] = {name: [] for name in (*methods, *others)}
    for metric in DECIDING:
        figures = {row.name: row.metrics[metric] for row in rows}
        if any(figures[name].beats_random for name in methods):
            values = {name: np.array(figure.values) for name, figure in figures.items()}
            gains = gains_of(values, METRICS[metric].better)
            most = np.nanmax([mean(gains[name] - gains["random"]) for name in methods])
            for name, of_row in shares.items():
                of_row.append((gains[name] - gains["random"]) / most)
    return {name: np.stack(of_row) for name, of_row in shares.items() if of_row}


def _overall(advantage: Float[np.ndarray, "m n"]) -> Float[np.ndarray, " n"]:
    """Return the mean over the metrics that are known, for each picture.

    Of a difference of two rows, these are the metrics in which both have values.
    """
    known = np.isfinite(advantage)
    sums = np.where(known, advantage, 0.0).sum(0)
    return np.asarray(np.where(known.any(0), sums / np.maximum(known.sum(0), 1), np.nan))


def _against(row: JudgedRow, advantage: Mapping[str, Float[np.ndarray, "m n"]], others: Sequence[str]) -> str:
    """Return what speaks against a method; empty for a fit one.

    A fit method beats the random map in most of the metrics in which it has values, and loses to it in none. Over all
    metrics its mean is better than those of the other reference maps, and its map changes with the weights.
    """
    measured = [metric for metric in DECIDING if row.metrics[metric].groups]
    lost = [METRICS[metric].title for metric in measured if row.metrics[metric].loses_to_random]
    if row.hardly_changes:
        return "almost the same map if the weights are shuffled"
    if lost:
        return f"worse than a random map in {listed(lost)}"
    if 2 * sum(row.metrics[metric].beats_random for metric in measured) <= len(measured):
        return "not significantly better than a random map in most of the metrics that decide"
    behind = [other for other in others if mean(_overall(advantage[row.name] - advantage[other])) <= 0]
    return f"over all metrics no better than {listed([REFERENCES[other] for other in behind], 'or')}" if behind else ""
