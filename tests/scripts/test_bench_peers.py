"""The benchmark runs from end to end on a small network."""

import json
import os
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
PEERS = {"grad-cam": "pytorch_grad_cam", "torchcam": "torchcam", "captum": "captum"}
pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return import_module("scripts.bench.bench_peers")


@pytest.fixture(scope="module")
def report(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the benchmark counts memory with /proc, which only Linux has")
    file = tmp_path_factory.mktemp("bench") / "bench.json"
    command = ["bench_peers", "--quick", "--models", "resnet18", "--size", "64", "--batch", "2", "--threads", "1"]
    command += ["--bf16", "--json", str(file)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with mock.patch.dict(os.environ, {"PYTHONPATH": path}), mock.patch.object(sys, "argv", command):
        script.main()
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def rows(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    (model,) = report["models"]
    found: dict[str, dict[str, Any]] = model["contenders"]
    return found


def test_every_contender_that_can_run_here_is_timed(report: dict[str, Any]) -> None:
    missing = {peer for peer, module in PEERS.items() if find_spec(module) is None}
    own = {"plain", "plain-last", "camkit", "auto", "first", "top5", "plusplus", "plain-bf16", "bf16"}
    assert set(rows(report)) == own | (set(PEERS) - missing)
    assert set(report["left_out"]) == missing
    assert all(len(row["seconds"]) == report["rounds"] and min(row["seconds"]) > 0 for row in rows(report).values())
    assert all(0 < row["low"] <= row["time"] <= row["high"] for row in rows(report).values())
    assert rows(report)["plain"]["time"] == 1


def test_memory_is_measured_in_processes_of_their_own(report: dict[str, Any]) -> None:
    measured = {name: row["memory"] for name, row in rows(report).items() if "memory" in row}
    assert set(measured) == {"plain", "camkit"}
    assert measured["plain"] == 1
    assert rows(report)["plain"]["bytes"] > 2**20
    assert 0 < measured["camkit"] < 3


def test_explaining_again_and_again_keeps_no_tensor(report: dict[str, Any]) -> None:
    first, last = report["growth"]
    assert (first["call"], last["call"]) == (4, 40)
    assert last["tensors"] == first["tensors"] > 0


@pytest.mark.parametrize("peer", PEERS)
def test_maps_agree_with_the_peers(report: dict[str, Any], peer: str) -> None:
    if find_spec(PEERS[peer]) is None:
        pytest.skip(f"{peer} is not installed")
    assert rows(report)[peer]["least"] > 0.999
    assert rows(report)[peer]["empty"] == rows(report)["camkit"]["empty"]


def test_a_flat_map_is_never_taken_for_agreement(script: ModuleType) -> None:
    slope, flat = np.arange(12.0).reshape(1, 3, 4), np.zeros((1, 3, 4))
    assert script.agreement(slope, 2 * slope + 1) == {"correlation": 1.0, "least": 1.0, "empty": 0}
    assert script.agreement(slope, flat) == {"correlation": 0.0, "least": 0.0, "empty": 1}
    assert script.agreement(flat, flat) == {"empty": 1}
