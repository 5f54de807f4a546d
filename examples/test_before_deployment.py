"""Tests that stop a release if the model reads the background. Copy them beside your own tests.

    pytest examples/test_before_deployment.py                   # the demo network and drawn pictures
    CHECKED_MODEL=mine.py:build CHECKED_PICTURES=validation/ pytest examples/test_before_deployment.py

``CHECKED_MODEL`` is the model, as ``camkit.check`` takes it, ``CHECKED_PICTURES`` a labelled folder with regions, and
``CHECKED_REPORT`` the folder for the report.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import camkit

MODEL = os.environ.get("CHECKED_MODEL", "demo-fair")
PICTURES = os.environ.get("CHECKED_PICTURES")
REPORT = os.environ.get("CHECKED_REPORT")

CRITICAL_CLASSES: tuple[str, ...] = ()
"""Classes whose mistakes cost most: a warning for one of them stops the release too."""

MOST_UNUSABLE = 0.05
"""The share of pictures that may be unusable before the check says too little about the folder."""


@pytest.fixture(scope="session")
def result(tmp_path_factory: pytest.TempPathFactory) -> camkit.CheckResult:
    """Check the model once, for all tests."""
    pictures = Path(PICTURES) if PICTURES else camkit.scenes.labelled_scenes()
    report = Path(REPORT) if REPORT else tmp_path_factory.mktemp("report")
    return camkit.check(MODEL, pictures, out=report)


def test_the_model_does_not_read_the_background(result: camkit.CheckResult) -> None:
    """FAIL and INCONCLUSIVE stop the release; the message names the worst class, its numbers and the report."""
    result.assert_ok()


def test_the_critical_classes_have_no_warning(result: camkit.CheckResult) -> None:
    """An effect that is only probable is a warning, which does not stop the release for the other classes."""
    verdicts = {name: result.judged[name].verdict for name in CRITICAL_CLASSES}

    assert set(verdicts.values()) <= {"PASS"}, verdicts


def test_nearly_all_pictures_could_be_used(result: camkit.CheckResult) -> None:
    """Pictures that cannot be read, and objects that the model does not see, test nothing."""
    unusable = len(result.failures)

    assert unusable <= MOST_UNUSABLE * (unusable + len(result.images)), result.failures
