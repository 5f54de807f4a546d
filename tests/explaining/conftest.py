"""What tests on real photos share: two networks with real weights, and the photos."""

from __future__ import annotations

from pathlib import Path

import pytest

from camkit.models import LoadedModel
from scripts.weights import OF_TORCHVISION, load_network


@pytest.fixture(scope="module")
def models(test_data: Path) -> dict[str, LoadedModel]:
    return {name: load_network(test_data, name) for name in OF_TORCHVISION}


@pytest.fixture(params=OF_TORCHVISION)
def model(request: pytest.FixtureRequest, models: dict[str, LoadedModel]) -> LoadedModel:
    return models[request.param]


@pytest.fixture
def folder(test_data: Path) -> Path:
    return test_data / "open_photos"
