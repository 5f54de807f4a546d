"""The two tiers: the default one needs few packages and little time; the rest carries the marker ``extended``."""

import importlib
from collections.abc import Callable, Iterable
from typing import Any

import pytest

import camkit

PASSES = (
    "gradcam", "refinecam", "shapleycam", "cam", "eigencam", "reciprocam", "expected", "scorecam", "rise", "fullgrad",
    "guidedbackprop", "guidedgradcam",
)  # fmt: skip
"""One method for each way to run a model that needs no attention: what a pass does to a model depends on no more."""
assert {(camkit.METHODS[name].needs, camkit.METHODS[name].layer) for name in PASSES} == {
    (method.needs, method.layer) for method in camkit.METHODS.values() if not method.reads_attention
}, "a way to run a model is not in the list"


class Extra:
    """A module that only ``.[extended]`` installs; it is imported when a test of that tier uses it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("_", "pytest")):  # pytest asks every object that it finds
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)


def represented_by(*chosen: Any, among: Iterable[Any]) -> list[Any]:
    """Return one parameter for each case; those not in ``chosen`` run in the extended tier only."""
    cases = list(among)
    assert all(case in cases for case in chosen), "a representative is not in its list"
    return [case if case in chosen else pytest.param(case, marks=pytest.mark.extended) for case in cases]


def rows_represented(is_chosen: Callable[..., bool], rows: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Do the same for cases of several arguments; ``is_chosen`` receives the arguments of one case."""
    cases = list(rows)
    assert any(is_chosen(*row) for row in cases), "no case is left for the default tier"
    return [row if is_chosen(*row) else pytest.param(*row, marks=pytest.mark.extended) for row in cases]
