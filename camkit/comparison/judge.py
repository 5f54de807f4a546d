"""Judge methods over a sample of pictures: which are faithful on this model, and which one to use."""

from __future__ import annotations

import math
import random
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from camkit.comparison.choices import chosen_explainer, chosen_layers, chosen_methods, fitting_methods
from camkit.comparison.compare import DEFAULTS
from camkit.comparison.judgement import DECIDING, FILL, RANDOMISED, SHOWN, STEPS, JudgedRow, MethodJudgement
from camkit.comparison.recommendation import REFERENCES, Recommendation, recommend
from camkit.comparison.standings import SIGNIFICANCE, OfRows, Standing, as_gains, standings
from camkit.errors import ImageError, InputError, LayerError, MethodError, TargetError, advice
from camkit.explainer import Explainer
from camkit.images.listing import find_pictures
from camkit.images.read import open_picture
from camkit.kit.wording import counted
from camkit.layers.names import Layers, find_layers
from camkit.methods import Method
from camkit.methods.registry import MethodLike
from camkit.metrics import METRICS, Evaluator
from camkit.metrics.evaluator import check_seed
from camkit.metrics.metric_values import UndefinedError

if TYPE_CHECKING:
    from camkit.models.loaded import Loadable
    from camkit.targets import TargetLike
    from camkit.types import ImageLike, Progress

USUAL = (*DEFAULTS, "kpcacam", "ablationcam", "fullgrad")
"""The default methods of a judgement: the defaults of a comparison, and three methods that are too slow for one."""

_MEASURED = (*DECIDING, *SHOWN)
"""The columns."""

_RANDOMISED_PICTURES = 4
"""The number of pictures on which the weights are shuffled. Each needs 8 maps of each method, and the values vary
little."""

_FEWEST = 5
"""The least number of pictures for the bootstrap. With 30 pictures, it tells methods apart that differ by about a
tenth. Many methods take more; see ``_fewest``."""


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
    chosen = chosen_methods(methods, USUAL)
    explainer = chosen_explainer(model, chosen, options)
    chosen = fitting_methods(chosen, explainer, named=methods is not None)
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
    return (
        f"{counted(usable, 'picture')} can be used, but judging {counted(rows, 'map')} of each takes {_fewest(rows)} "
        f"or more; {more}{fewer}{first}"
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

    def cost(self, plain: float) -> float:
        """Return the time of one map in plain passes; 0 for a reference map."""
        if self.method is None:
            return 0.0
        return float(np.median(self.seconds)) / plain if self.seconds else float("nan")

    @property
    def unmoved(self) -> float | None:
        """The mean correlation with the maps of shuffled weights; None if it was not measured."""
        known = [value for value in self.values[RANDOMISED] if np.isfinite(value)]
        return float(np.mean(known)) if known else None


class _Study:
    """Collects the values of all rows, picture by picture."""

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
        self._methods = {
            f"{method.name} at {layer}" if several and method.layer else method.name: _Tried(method, layer)
            for method in methods
            for layer in (layers if method.layer else [None])
        }
        self._references = {name: _Tried() for name in REFERENCES}
        self._cells_of = _one_layer(explainer, layers)
        self._layer = ""
        self._plain: list[float] = []

    @property
    def rows(self) -> int:
        """The number of methods, at each layer."""
        return len(self._methods)

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
        for row in self._methods.values():
            self._explain(row, evaluator, opened)
        for reference, heat in evaluator.references().items():
            _note(self._references[reference], _MEASURED, evaluator(heat, _MEASURED).numbers())
        self._layer = self._layer or evaluator.cells_of
        self.names.append(source)

    def _warm_up(self, evaluator: Evaluator, picture: Any) -> None:
        """Explain a picture once, so that what a first call prepares does not count as the first method's time."""
        first = next(iter(self._methods.values()))
        with suppress(MethodError, LayerError, TargetError):
            self._explainer.using(first.method, first.layer)(picture, evaluator.target)

    def _explain(self, row: _Tried, evaluator: Evaluator, picture: Any) -> None:
        start = time.perf_counter()
        try:
            found = self._explainer.using(row.method, row.layer)(picture, evaluator.target)
        except (MethodError, LayerError, TargetError) as error:
            row.failures.append(str(error))
            _note(row, _MEASURED, {})
            return
        row.seconds.append(time.perf_counter() - start)
        row.used = found.layer
        row.empty += found.status != "ok"
        shuffled = np.isfinite(row.values[RANDOMISED]).sum() < _RANDOMISED_PICTURES
        names = [*_MEASURED, RANDOMISED] if shuffled else _MEASURED
        _note(row, names, evaluator(found, names).numbers())

    def judgement(self, begin: float, *, drop_misfits: bool) -> MethodJudgement:
        """Return what the values say."""
        works = [name for name, row in self._methods.items() if len(row.failures) < len(self.names)]
        if not works:
            first = next(iter(self._methods.values()))
            raise MethodError(f"no method works on these pictures: {first.failures[0]}")
        listed = {name: row for name, row in self._methods.items() if name in works or not drop_misfits}
        tried = listed | self._references
        measured = {metric: {name: np.array(row.values[metric]) for name, row in tried.items()} for metric in _MEASURED}
        values = {metric: at_least_chance(of_rows, works) for metric, of_rows in measured.items()}
        by_metric = {
            metric: standings(of_rows, list(REFERENCES), METRICS[metric].better, self._seed)
            for metric, of_rows in values.items()
        }
        plain = float(np.median(self._plain))
        rows = tuple(
            JudgedRow(
                name,
                "" if row.method is None else row.method.name,
                row.used,
                {metric: of_rows[name] for metric, of_rows in by_metric.items()},
                row.cost(plain),
                row.unmoved,
                row.empty,
                (len(row.failures), row.failures[0] if row.failures else ""),
                {
                    metric: int((np.isnan(of_rows[name]) & np.isfinite(values[metric][name])).sum())
                    for metric, of_rows in measured.items()
                },
                {metric: tuple(row.values[metric]) for metric in _MEASURED},
            )
            for name, row in tried.items()
        )
        costs = {row.name: row.cost for row in rows}
        unmoved = [row.name for row in rows if row.hardly_changes]
        return MethodJudgement(
            self._explainer.name,
            rows,
            recommended(values, by_metric, works, costs, unmoved, self._seed),
            tuple(self.names),
            self.unreadable,
            _MEASURED,
            self._layer,
            self._seed,
            time.perf_counter() - begin,
        )


def _note(row: _Tried, names: Iterable[str], numbers: Mapping[str, float | None]) -> None:
    """Add a picture's values; NaN where there is none."""
    for name in names:
        number = numbers.get(name)
        row.values[name].append(np.nan if number is None else number)


def _one_layer(explainer: Explainer, layers: Sequence[Layers | None]) -> str | None:
    """Return the layer that all rows share, if the caller named it; None if camkit chooses it, or if there are several.

    Maps of several layers are compared on the cells of one layer, and then camkit chooses it.
    """
    named = find_layers(explainer.model, layers[0]) if len(layers) == 1 and layers[0] is not None else ()
    return str(named[0]) if len(named) == 1 else None


def recommended(
    values: Mapping[str, OfRows],
    by_metric: Mapping[str, Mapping[str, Standing]],
    works: Sequence[str],
    costs: Mapping[str, float],
    unmoved: Sequence[str],
    seed: int,
) -> Recommendation:
    """Return what ``recommend`` says of the metrics that decide; values and standings are by the metrics' names."""
    return recommend(
        {METRICS[name].title: as_gains(values[name], METRICS[name].better) for name in DECIDING},
        {METRICS[name].title: by_metric[name] for name in DECIDING},
        works,
        costs,
        unmoved,
        seed,
    )


def at_least_chance(of_metric: OfRows, works: Sequence[str]) -> dict[str, Float[np.ndarray, " n"]]:
    """Return a metric's values, in which a method that has none for a picture has that of the random map.

    A metric that has no value for any of a method's maps does not apply to it.
    """
    return {
        row: np.where(np.isnan(values), of_metric["random"], values)
        if row in works and np.isfinite(values).any()
        else values
        for row, values in of_metric.items()
    }
