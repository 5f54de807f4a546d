"""What tests on real photos share: two networks with real weights, and the photos."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from photos import WEIGHTS

import camkit
from camkit.models import LoadedModel


@pytest.fixture(scope="module")
def models(test_data: Path) -> dict[str, LoadedModel]:
    return {
        name: camkit.load_model(name, test_data / "weights" / f"{stem}.pth", "cpu") for name, stem in WEIGHTS.items()
    }


@pytest.fixture(scope="module")
def expected(test_data: Path) -> dict[str, dict[str, list[list[float]]]]:
    return json.loads((test_data / "expected_top5.json").read_text())


@pytest.fixture(params=WEIGHTS)
def model(request: pytest.FixtureRequest, models: dict[str, LoadedModel]) -> LoadedModel:
    return models[request.param]


@pytest.fixture
def folder(test_data: Path) -> Path:
    return test_data / "open_photos"
