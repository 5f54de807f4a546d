"""The demonstration of the check: run the background check on both demo networks, with the labelled scenes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from camkit.background.check import CheckProgress, check
from camkit.background.result import CheckResult
from camkit.demo.scenes import labelled_scenes
from camkit.models import DEMO_MODELS

_CONFIG = {"check": {"pastes": 1}}
"""One background of either kind per picture instead of two, to save time."""


def run(out: Path, progress: Callable[[str], CheckProgress]) -> dict[str, CheckResult]:
    """Check both networks on the same scenes, and write a report for each.

    Args:
        out: the folder for the reports; each network gets a folder of its own in it.
        progress: returns the progress callback for a network's check, given the network's name.
    """
    pictures = labelled_scenes()
    return {
        name: check(name, pictures, out=out / name, config=_CONFIG, progress=progress(name)) for name in DEMO_MODELS
    }
