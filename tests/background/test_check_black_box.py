"""The check of models without layers and gradients: an exported file and a function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import camkit

PER_CLASS = 10
CONFIG = {"check": {"pastes": 1, "batch_size": 8}, "limits": {"least_pictures": PER_CLASS}}


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return camkit.scenes.write_scenes(tmp_path_factory.mktemp("scenes"), PER_CLASS)


@pytest.fixture(scope="module")
def of_the_model(scenes: Path) -> camkit.CheckResult:
    return camkit.check("demo-biased", scenes, config=CONFIG)


def as_black_box(name: str) -> Any:
    """Return a demo network as a function, with its preprocessing and labels."""
    loaded = camkit.load_model(name)

    def scores(pictures: torch.Tensor) -> np.ndarray:
        with torch.no_grad():
            return loaded.module(pictures).numpy()

    return camkit.black_box(scores, labels=loaded.labels, preprocess=loaded.preprocess, name=name)


def assert_same_figures(found: camkit.CheckResult, expected: camkit.CheckResult) -> None:
    assert (found.verdict, found.exit_code()) == (expected.verdict, expected.exit_code())
    assert {row.name: row.answer for row in found.images} == {row.name: row.answer for row in expected.images}
    for name, measures in expected.classes.items():
        assert found.classes[name].gap.by_fill == measures.gap.by_fill


@pytest.mark.extended
def test_a_function_gets_the_verdict_and_the_figures_of_the_model_that_it_calls(
    scenes: Path, of_the_model: camkit.CheckResult, tmp_path: Path
) -> None:
    found = camkit.check(as_black_box("demo-biased"), scenes, config=CONFIG, out=tmp_path)
    assert found.verdict == "FAIL"
    assert_same_figures(found, of_the_model)
    assert found.layer_reason == "no heat: the model is a black box"
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "no heat: the model is a black box" in page
    assert np.isnan(found.overall.skill.value) if found.overall.skill is not None else True


@pytest.mark.extended
def test_heat_is_drawn_if_the_config_names_a_method_that_a_black_box_has(scenes: Path) -> None:
    config = {"check": {"pastes": 1, "per_class": 2, "method": "rise"}}
    found = camkit.check(as_black_box("demo-biased"), scenes, config=config)
    assert {row.status for row in found.images} <= {"ok", "no_influence"}
