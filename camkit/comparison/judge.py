"""Judge methods over a sample of pictures: which are faithful on this model, and which one to use."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from jaxtyping import Float
from torch import nn

from camkit.comparison.choices import chosen_explainer, chosen_layers, chosen_methods
from camkit.comparison.compare import DEFAULTS
from camkit.comparison.ranking import REFERENCES, SIGNIFICANCE, UNMOVED, Recommendation, Standing, recommend, standings
from camkit.errors import ImageError, InputError, LayerError, MethodError, OutputError, TargetError, advice
from camkit.explainer import Explainer
from camkit.images.files import write_file
from camkit.images.listing import find_pictures
from camkit.images.read import open_picture
from camkit.layers.names import Layers, find_layers
from camkit.methods import Method
from camkit.metrics import METRICS, Evaluator
from camkit.metrics.evaluator import check_seed
from camkit.metrics.values import UndefinedError

if TYPE_CHECKING:
    from camkit.explainer import MethodLike
    from camkit.models.loaded import LoadedModel
    from camkit.targets import TargetLike
    from camkit.types import ImageLike

USUAL = (*DEFAULTS, "ablationcam", "fullgrad")
"""The default methods of a judgement: the defaults of a comparison, and two methods that are too slow for one."""

DECIDING = ("srg", "adcc", "feature-srg")
"""The metrics that decide: pixels in order of their heat, the picture times its map, and cells of the layer."""

SHOWN = ("insertion", "deletion", "average-drop", "complexity")
"""The metrics that are shown beside them: the parts of the metrics that decide."""

RANDOMISED = "mprt"
"""The metric that tells whether a map changes with the weights."""

FILL = "blur"
"""The fill for removed pixels in all metrics. With one fill, SRG is exactly insertion minus deletion, and the three
share their passes."""

STEPS = 10
"""Steps of a curve: half of the default, because the mean over the pictures matters and not the single value."""

_RANDOMISED_PICTURES = 4
"""The number of pictures on which the weights are shuffled. Each needs 8 maps of each method, and the values vary
little."""

_FEWEST = 5
"""The least number of pictures for the bootstrap. With 30 pictures, it tells methods apart that differ by about a
tenth. Many methods take more; see ``_fewest``."""

Progress: TypeAlias = Callable[[int, int], None]
"""``progress(done, of)`` is called before the first picture and after each."""


@dataclass(frozen=True)
class JudgedRow:
    """One method at one layer, or a reference map, over all pictures.

    Attributes:
        name: the method, and the layer if several are judged; or the name of the reference map.
        method: the method's name; empty for a reference map.
        layer: the layer that was used; empty for a reference map.
        standings: what each metric says, by the metric's name.
        cost: the time of one map in plain passes of the model, the median over the pictures.
        unmoved: the mean rank correlation with the maps of shuffled weights; None if it was not measured.
        empty: how many of the maps are empty or not finite.
        failed: how many pictures could not be explained with it, and the first reason.
        missing: for each metric, on how many pictures it has no value although the random map has one. On these
            pictures it counts like the random map: a map that says nothing is as good as chance.
        values: each metric's value on each picture, in the order of the judgement's pictures; NaN where it has none.
    """

    name: str
    method: str
    layer: str
    standings: dict[str, Standing]
    cost: float
    unmoved: float | None
    empty: int
    failed: tuple[int, str]
    missing: dict[str, int] = field(default_factory=dict)
    values: dict[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def is_reference(self) -> bool:
        """True for a map that knows nothing of the model."""
        return not self.method

    @property
    def hardly_changes(self) -> bool:
        """True if the map hardly changes when the weights are shuffled."""
        return self.unmoved is not None and self.unmoved > UNMOVED


@dataclass(frozen=True)
class MethodJudgement:
    """Which methods are faithful on a model, over a sample of pictures.

    Attributes:
        model: the model's name.
        rows: the methods, and the reference maps last.
        recommendation: which one to use, and why.
        pictures: the pictures of the sample.
        unreadable: pictures that could not be used, with the reason.
        metrics: the metrics in the order of the columns.
        layer: the layer whose cells "feature-srg" removes, for all rows alike; empty if it never had a value.
        seed: the seed of the sample and of all draws.
        seconds: how long it took.
    """

    model: str
    rows: tuple[JudgedRow, ...]
    recommendation: Recommendation
    pictures: tuple[str, ...]
    unreadable: dict[str, str]
    metrics: tuple[str, ...]
    layer: str
    seed: int
    seconds: float = field(compare=False)

    def table(self) -> str:
        """Return the table in Markdown."""
        from camkit.comparison.report import markdown  # noqa: PLC0415 - only reports need it

        return markdown.table(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the judgement as plain JSON values."""
        from camkit.comparison.report import as_json  # noqa: PLC0415

        return as_json.values(self)

    def save(self, folder: str | Path) -> Path:
        """Write ``judge.html``, ``judge.json`` and ``judge.md`` into a folder, and return the page.

        Raises:
            OutputError: a file cannot be written.
        """
        from camkit.comparison.report import as_json, html, markdown  # noqa: PLC0415

        folder = Path(folder)
        if folder.exists() and not folder.is_dir():
            raise OutputError(f"{folder} is a file; the reports need a folder")
        write_file(folder / "judge.json", as_json.render(self).encode())
        write_file(folder / "judge.md", markdown.render(self).encode())
        write_file(folder / "judge.html", html.render(self).encode())
        return folder / "judge.html"

    def __repr__(self) -> str:
        """Return a line with the recommendation."""
        chosen = self.recommendation.row or "none"
        methods = sum(not row.is_reference for row in self.rows)
        return f"<MethodJudgement of {methods} methods on {len(self.pictures)} pictures: {chosen}>"

    def _repr_html_(self) -> str:
        """Show the table in a notebook."""
        from camkit.comparison.report import html  # noqa: PLC0415

        return html.fragment(self)


def judge(
    model: Explainer | nn.Module | str | LoadedModel,
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
        target_layer: one layer or a list; each method is judged at each of them. None lets camkit choose the layer.
        target: None for each picture's best class, or one target for all.
        pictures: the most pictures to use; if there are more, camkit draws a random sample. 14 methods take at least 9.
        seed: the seed of the sample and of all draws, from 0.
        progress: called before the first picture and after each.
        **options: ``preprocess``, ``labels``, ``device`` and ``precision`` as for ``Explainer``.

    Raises:
        InputError: an argument or the model is wrong, camkit does not know how to prepare pictures for it, or fewer
            than 5 pictures can be used.

    Examples:
        >>> import camkit
        >>> scenes = list(camkit.scenes.scene_paths().values())
        >>> camkit.judge("demo-fair", scenes, ["gradcam", "eigencam"])
        <MethodJudgement of 2 methods on 6 pictures: gradcam>
    """
    begin = time.perf_counter()
    if isinstance(pictures, bool) or not isinstance(pictures, int) or pictures < _FEWEST:
        raise InputError(f"pictures must be a whole number from {_FEWEST}, not {pictures!r}")
    check_seed(seed)
    chosen = chosen_methods(methods, USUAL)
    explainer = chosen_explainer(model, options)
    sample = _sample(images, pictures, seed)
    study = _Study(explainer, chosen, chosen_layers(explainer, target_layer), target, seed)
    if len(sample) < _fewest(study.rows):
        raise InputError(_too_few(len(sample), {}, study.rows, pictures))
    if progress is not None:
        progress(0, len(sample))
    for done, (number, picture) in enumerate(sample, start=1):
        study.add(picture, f"picture {number}")
        if progress is not None:
            progress(done, len(sample))
    if len(study.names) < _fewest(study.rows):
        raise InputError(_too_few(len(study.names), study.unreadable, study.rows, pictures))
    return study.judgement(begin, drop_misfits=methods is None)


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


def _fewest(rows: int) -> int:
    """Return how many pictures it takes to find that any of so many rows beats the random map.

    A row that is better on each of n pictures is so by luck with a chance of 0.5 to the power of n, and the correction
    for several rows multiplies it by their number.
    """
    return max(_FEWEST, math.floor(math.log2(rows / SIGNIFICANCE)) + 1)


def _too_few(usable: int, unreadable: dict[str, str], rows: int, most: int) -> str:
    """Return why too few pictures can be used. If all share a reason, it is the model's and not a picture's."""
    reasons = set(unreadable.values())
    if not usable and len(unreadable) >= _FEWEST and len(reasons) == 1:
        return reasons.pop()
    first = "".join(f"; {why}" for why in list(unreadable.values())[:1])
    more = advice("raise pictures", "raise --pictures") if most < _fewest(rows) else "pass more pictures"
    fewer = " or fewer methods" if _fewest(rows) > _FEWEST else ""
    maps = f"{rows} map{'s' * (rows > 1)}"
    return (
        f"{usable} picture{'s' * (usable != 1)} can be used, but judging {maps} of each takes {_fewest(rows)} or more; "
        f"{more}{fewer}{first}"
    )


class _Study:
    """Collects the values of all methods, picture by picture."""

    def __init__(
        self,
        explainer: Explainer,
        methods: Sequence[Method],
        layers: Sequence[Layers | None],
        target: TargetLike | None,
        seed: int,
    ) -> None:
        self.names: list[str] = []
        self.unreadable: dict[str, str] = {}
        self._explainer, self._target, self._seed = explainer, target, seed
        several = len(layers) > 1
        self._jobs = {
            f"{method.name} at {layer}" if several and method.layer else method.name: (method, layer)
            for method in methods
            for layer in (layers if method.layer else [None])
        }
        self._cells_of = _one_layer(explainer, layers)
        self._layer = ""
        self._metrics = (*DECIDING, *SHOWN)
        self._values: dict[str, dict[str, list[float]]] = {name: {} for name in (*self._metrics, RANDOMISED)}
        self._times: dict[str, list[float]] = {name: [] for name in self._jobs}
        self._plain: list[float] = []
        self._used: dict[str, str] = {}
        self._empty = dict.fromkeys(self._jobs, 0)
        self._failed: dict[str, list[str]] = {name: [] for name in self._jobs}

    @property
    def rows(self) -> int:
        """The number of methods, at each layer."""
        return len(self._jobs)

    def add(self, picture: ImageLike, name: str) -> None:
        """Judge all methods on one picture."""
        source = str(picture) if isinstance(picture, (str, Path)) else name
        try:
            opened = open_picture(picture) if isinstance(picture, (str, Path)) else picture
            seed = self._seed + len(self.names)
            evaluator = Evaluator(
                self._explainer, opened, self._target, fill=FILL, steps=STEPS, layer=self._cells_of, seed=seed
            )
            start = time.perf_counter()
            evaluator.scored(evaluator.picture[None])
        except (ImageError, TargetError, UndefinedError) as error:
            self.unreadable[source] = str(error)
            return
        self._plain.append(time.perf_counter() - start)
        self._warm_up(evaluator, opened)
        for row in self._jobs:
            self._explain(row, evaluator, opened)
        for row, heat in evaluator.references().items():
            self._note(row, evaluator, heat)
        self._layer = self._layer or evaluator.cells_of
        self.names.append(source)

    def _warm_up(self, evaluator: Evaluator, picture: Any) -> None:
        """Explain a picture once, so that what a first call prepares does not count as the first method's time."""
        method, layer = next(iter(self._jobs.values()))
        with suppress(MethodError, LayerError, TargetError):
            self._explainer.using(method, layer)(picture, evaluator.target)

    def _explain(self, row: str, evaluator: Evaluator, picture: Any) -> None:
        method, layer = self._jobs[row]
        start = time.perf_counter()
        try:
            explainer = self._explainer.using(method, layer)
            found = explainer(picture, evaluator.target)
        except (MethodError, LayerError, TargetError) as error:
            self._failed[row].append(str(error))
            self._note(row, None, None)
            return
        self._times[row].append(time.perf_counter() - start)
        self._used[row] = found.layer
        self._empty[row] += found.status != "ok"
        self._note(row, evaluator, evaluator.heat(found, explainer))

    def _note(self, row: str, evaluator: Evaluator | None, given: Any) -> None:
        """Add a picture's values of one row; NaN where there is none."""
        measured = np.isfinite(self._values[RANDOMISED].get(row, [])).sum()
        shuffled = row in self._jobs and evaluator is not None and measured < _RANDOMISED_PICTURES
        names = [*self._metrics, RANDOMISED] if shuffled else self._metrics
        found = {} if evaluator is None else evaluator(given, names).numbers()
        for name in names:
            number = found.get(name)
            self._values[name].setdefault(row, []).append(np.nan if number is None else number)

    def judgement(self, begin: float, *, drop_misfits: bool) -> MethodJudgement:
        """Return what the values say."""
        pictures = len(self.names)
        works = [row for row in self._jobs if len(self._failed[row]) < pictures]
        if not works:
            first = next(iter(self._failed.values()))
            raise MethodError(f"no method works on these pictures: {first[0]}")
        listed = works if drop_misfits else list(self._jobs)
        references = list(REFERENCES)
        measured = {
            name: {row: np.array(self._values[name][row]) for row in (*listed, *references)} for name in self._metrics
        }
        values = {name: at_least_chance(of_metric, works) for name, of_metric in measured.items()}
        better = {name: METRICS[name].better for name in self._metrics}
        by_metric = {
            name: standings(of_metric, references, better[name], self._seed) for name, of_metric in values.items()
        }
        plain = float(np.median(self._plain))
        costs = {
            row: float(np.median(self._times[row])) / plain if self._times[row] else float("nan") for row in listed
        }
        unmoved = {row: _mean_of(self._values[RANDOMISED].get(row, [])) for row in listed}
        rows = [
            JudgedRow(
                row,
                self._jobs[row][0].name if row in self._jobs else "",
                self._used.get(row, ""),
                {name: by_metric[name][row] for name in self._metrics},
                costs.get(row, 0.0),
                unmoved.get(row),
                self._empty.get(row, 0),
                (len(self._failed.get(row, [])), (self._failed.get(row) or [""])[0]),
                {
                    name: int((np.isnan(measured[name][row]) & np.isfinite(values[name][row])).sum())
                    for name in measured
                },
                {name: tuple(self._values[name][row]) for name in self._metrics},
            )
            for row in (*listed, *references)
        ]
        return MethodJudgement(
            self._explainer.name,
            tuple(rows),
            recommended(values, by_metric, works, costs, [row.name for row in rows if row.hardly_changes], self._seed),
            tuple(self.names),
            self.unreadable,
            self._metrics,
            self._layer,
            self._seed,
            time.perf_counter() - begin,
        )


def _one_layer(explainer: Explainer, layers: Sequence[Layers | None]) -> str | None:
    """Return the layer that all rows share, if the caller named it; None if camkit chooses it, or if there are several.

    Maps of several layers are compared on the cells of one layer, and then camkit chooses it.
    """
    named = find_layers(explainer.model, layers[0]) if len(layers) == 1 and layers[0] is not None else ()
    return str(named[0]) if len(named) == 1 else None


def recommended(
    values: Mapping[str, Mapping[str, Float[np.ndarray, " n"]]],
    by_metric: Mapping[str, Mapping[str, Standing]],
    works: Sequence[str],
    costs: Mapping[str, float],
    unmoved: Sequence[str],
    seed: int,
) -> Recommendation:
    """Return what ``recommend`` says of the metrics that decide; values and standings are by the metrics' names."""
    return recommend(
        {METRICS[name].title: values[name] for name in DECIDING},
        {METRICS[name].title: by_metric[name] for name in DECIDING},
        {METRICS[name].title: METRICS[name].better for name in DECIDING},
        works,
        costs,
        unmoved,
        seed,
    )


def at_least_chance(
    of_metric: Mapping[str, Float[np.ndarray, " n"]], works: Sequence[str]
) -> dict[str, Float[np.ndarray, " n"]]:
    """Return a metric's values, in which a method that has none for a picture has that of the random map.

    A metric that has no value for any of a method's maps does not apply to it.
    """
    return {
        row: np.where(np.isnan(values), of_metric["random"], values)
        if row in works and np.isfinite(values).any()
        else values
        for row, values in of_metric.items()
    }


def _mean_of(values: Sequence[float]) -> float | None:
    known = [value for value in values if np.isfinite(value)]
    return float(np.mean(known)) if known else None
