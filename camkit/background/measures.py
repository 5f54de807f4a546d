"""What the check measures: one row per picture, and the measures of a class or of all classes together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from camkit.background.decision import CUE_NAMES, WHOLE_PICTURE, Effect, EffectName, MeasuredEffect
from camkit.config.settings import LimitsSection
from camkit.kit.statistics import Estimate

OVERALL = ""
"""The key of the measures of all classes together."""


@dataclass(frozen=True)
class ImageRow:
    """What was measured on one picture. docs/check.md explains the measures.

    Attributes:
        name, label, group: the picture's name, class and group.
        right, answer, probability: whether the answer to the unedited picture is right, the class it names, and the
            probability of the picture's own class.
        status: whether the map has evidence.
        energy, shuffled, ceiling: E, S and C of the map.
        room: the headroom: how much more energy perfect maps have in their own region than in other pictures' regions.
        hit, centre_hit, rank, area: as in ``evidence.HeatMeasures``.
        grid: rows and columns of the map.
        same, other: by fill, the share of right answers on backgrounds of its own class, and of other classes.
        pasted: by fill, for each background that the object was shown on: the background's class and group, and the
            class that the model named.
        removed, named: by fill, whether the answer was right with the object removed, and the class named then.
        same_cue, other_cue: by statistic of the whole picture, whether the answer was right with the value of a picture
            of its own class, and of another class.
        background_change, object_change: how far the margin falls if that part is smoothed.
        right_with_noise_on_object, right_with_noise_on_background: whether the answer was right with noise there.
    """

    name: str
    label: str
    group: str
    right: bool
    answer: str
    probability: float
    status: str
    energy: float | None = None
    shuffled: float | None = None
    ceiling: float | None = None
    room: float | None = None
    hit: float | None = None
    centre_hit: bool | None = None
    rank: float | None = None
    area: float | None = None
    grid: tuple[int, ...] | None = None
    same: Mapping[str, float] = field(default_factory=dict)
    other: Mapping[str, float] = field(default_factory=dict)
    pasted: Mapping[str, Sequence[tuple[str, str, str]]] = field(default_factory=dict)
    removed: Mapping[str, bool] = field(default_factory=dict)
    named: Mapping[str, str] = field(default_factory=dict)
    same_cue: Mapping[str, bool] = field(default_factory=dict)
    other_cue: Mapping[str, bool] = field(default_factory=dict)
    background_change: float | None = None
    object_change: float | None = None
    right_with_noise_on_object: bool | None = None
    right_with_noise_on_background: bool | None = None

    @property
    def skilled(self) -> bool:
        """Whether the map could be compared with its region and with other maps."""
        return self.energy is not None and self.shuffled is not None and self.ceiling is not None


@dataclass(frozen=True)
class Measures:
    """The measures of one class, or of all classes together.

    Attributes:
        name: the class; OVERALL for all classes together.
        pictures: pictures that the model answered, whether or not their map has evidence.
        tested: pictures in the experiment.
        accuracy: on the unedited pictures, with Wilson's interval.
        empty: share of the maps without any evidence.
        energy, shuffled, ceiling: means of E, S and C; None without regions.
        room: mean headroom: how much more energy perfect maps have in their own region than in other pictures' regions.
        skill: mean(E - S) / mean(C - S).
        hits, centre_hits, rank, area: means.
        effects: the effects by name. The gap is the accuracy on backgrounds of the object's own class minus that on
            backgrounds of other classes. The sufficiency says how far the accuracy without the object is above
            chance. The attraction says how often objects of other classes get this class's name on its backgrounds,
            minus how often they get it on other backgrounds; it is not measured for all classes together, where the gap
            measures the same. The effect of a statistic of the whole picture is the accuracy with the values of the
            object's own class minus the accuracy with the values of other classes.
        foreground_sensitivity: Moayeri et al. 2022; None if either accuracy is undefined.
        background_change, object_change: how far the margin falls if an equal area of that part is smoothed; means.
    """

    name: str
    pictures: int
    tested: int
    accuracy: Estimate
    empty: float
    energy: float | None = None
    shuffled: float | None = None
    ceiling: float | None = None
    room: float | None = None
    skill: Estimate | None = None
    hits: float | None = None
    centre_hits: float | None = None
    rank: float | None = None
    area: float | None = None
    effects: Mapping[EffectName, Effect] = field(default_factory=dict)
    foreground_sensitivity: float | None = None
    background_change: float | None = None
    object_change: float | None = None

    @property
    def gap(self) -> Effect:
        """The background gap."""
        return self.effects["gap"]

    @property
    def sufficiency(self) -> Effect:
        """The sufficiency of the background."""
        return self.effects["sufficiency"]

    @property
    def attraction(self) -> Effect:
        """The attraction of the class's backgrounds."""
        return self.effects["attraction"]

    @property
    def cues(self) -> dict[EffectName, MeasuredEffect]:
        """The effects of the statistics of the whole picture that were measured."""
        return {name: self.effects[name].by_fill[WHOLE_PICTURE] for name in sorted(CUE_NAMES) if name in self.effects}

    @property
    def counting(self) -> list[Effect]:
        """The effects that count for the verdict.

        The sufficiency counts for all classes together only: for one class it also rises if a model that sees no object
        names the class that the bare background resembles.
        """
        of_all: tuple[EffectName, ...] = ("gap", "sufficiency", *CUE_NAMES)
        names = of_all if self.name == OVERALL else ("gap", "attraction")
        return [self.effects[name] for name in names if name in self.effects]


def limit_of(name: EffectName, limits: LimitsSection) -> float:
    """Return the limit of an effect. The limit of the gap also holds for the statistics of the whole picture."""
    return limits.attraction if name == "attraction" else limits.sufficiency if name == "sufficiency" else limits.gap
