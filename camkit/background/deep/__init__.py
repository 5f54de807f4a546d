"""Optional analyses: each is a file with a function that takes ``Material`` and returns a ``DeepFinding``, or None."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from camkit.background.experiment import Answers
from camkit.background.heat import HeatRow
from camkit.background.plan import Plan
from camkit.background.reasons import Reason
from camkit.background.sanity import MirrorTest


@dataclass(frozen=True)
class Material:
    """What a check has measured when an optional analysis begins.

    Attributes:
        plan: the check.
        heat: what the heat says of each usable picture, by name.
        answers: the answers to each picture's edits, by name.
        mirrored: whether the maps follow mirrored pictures; None if that is not known.
    """

    plan: Plan
    heat: Mapping[str, HeatRow]
    answers: Mapping[str, Answers]
    mirrored: MirrorTest | None = None


class DeepFinding:
    """What an optional analysis found."""

    @property
    def warnings(self) -> Mapping[str, Sequence[Reason]]:
        """By class, and by OVERALL for all classes together, what it warns of."""
        return {}

    @property
    def sentences(self) -> Sequence[str]:
        """What it found, in words, as far as the reasons of the verdict do not say it."""
        return ()

    def as_json(self) -> Any:
        """Return plain values for the report."""
        raise NotImplementedError
