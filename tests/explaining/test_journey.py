"""How many calls a reader follows from a picture to its heatmap; the ceilings come down as the journeys get shorter."""

import subprocess
import sys
from pathlib import Path

import pytest

from scripts import journey

MOST = {"file": (172, 22), "tensor": (160, 18), "check": (65_000, 88)}
"""The most calls and files of each journey."""


@pytest.mark.parametrize("names", [("file",), pytest.param(("tensor", "check"), marks=pytest.mark.extended)])
def test_a_journey_stays_short(names: tuple[str, ...]) -> None:
    # In another process, since the checks of types that run with the tests add functions to each model.
    call = [sys.executable, "-W", "ignore", Path(journey.__file__), *names]
    done = subprocess.run(call, capture_output=True, text=True, check=True)
    rows = [[cell.strip() for cell in line.split("|")] for line in done.stdout.splitlines()[2:]]
    assert len(rows) == len(names)
    for name, (_, _, calls, _, files, *_) in zip(names, rows, strict=True):
        assert 0 < int(calls) <= MOST[name][0]
        assert 0 < int(files) <= MOST[name][1]
