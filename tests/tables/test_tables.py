"""Results as tables: one protocol for all of them."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from results import assert_is_a_result

import camkit
from camkit.errors import InputError
from camkit.metrics import Evaluator
from camkit.tables import Rows, Tabular

PLANE = camkit.scenes.scene_paths()["plane-sky"]


def test_explanations_have_a_row_for_each_target(tmp_path: Path) -> None:
    found = camkit.explain("demo-fair", PLANE, target=["plane", "bird"])
    rows = assert_is_a_result(found, tmp_path / "sheet.png")
    assert [row["label"] for row in rows] == ["plane", "bird"]
    assert rows[0]["probability"] == found[0].probability
    assert (rows[0]["box_left"], rows[0]["box_right"]) == (found[0].box.left, found[0].box.right)
    assert rows[0]["peak_x"] == found[0].to_dict()["peak"][0]
    assert found.to_dict()["explanations"][1] == found[1].to_dict()
    assert found[:1].table() == rows[:1]


def test_a_comparison_has_a_row_for_each_map_and_reference(tmp_path: Path) -> None:
    found = camkit.compare("demo-fair", [PLANE, camkit.scenes.scene_paths()["car-sea"]], ["gradcam", "hirescam"])
    rows = assert_is_a_result(found, tmp_path / "sheet.png")
    assert [row["method"] for row in rows] == ["gradcam", "hirescam", "", "", ""] * 2
    assert rows[5]["value"] == found.rows[1].maps[0].value.number
    assert rows[7]["value"] == found.rows[1].by_chance["random"].number
    assert rows[7]["reason"] == "random map"


def test_a_table_of_values_has_a_row_for_each_map(tmp_path: Path) -> None:
    evaluator = Evaluator("demo-fair", PLANE, target="plane")
    maps = {"mine": camkit.explain("demo-fair", PLANE, target="plane"), "empty": np.zeros((4, 4), np.float32)}
    found = evaluator.table(maps, ["top-loss", "complexity"])
    rows = assert_is_a_result(found, tmp_path / "values.json")
    assert [row["map"] for row in rows] == ["mine", "empty", "random", "centre", "colour"]
    assert [row["reference"] for row in rows] == [False, False, True, True, True]
    assert rows[0]["top-loss"] == found.rows["mine"]["top-loss"].number
    assert rows[1]["top-loss"] is None
    assert found.save(tmp_path / "values.md").read_text() == str(found)
    with pytest.raises(camkit.errors.OutputError, match=r"use \.json or \.md"):
        found.save(tmp_path / "values.xls")


def test_a_diagnosis_has_a_row_for_each_layer(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 2))
    torch.nn.init.constant_(net[0].bias, -100)
    found = camkit.diagnose(net, torch.rand(8, 3, 8, 8))
    rows = assert_is_a_result(found, tmp_path / "layers.json")
    relu = next(row for row in rows if row["layer"] == "1")
    assert (relu["dead"], relu["channels"], relu["shape"]) == (4, 4, "[8, 4, 6, 6]")
    assert relu["activations_mean"] == 0
    assert found.save(tmp_path / "layers.png").read_bytes().startswith(b"\x89PNG")


class Numbers(Tabular):
    def table(self) -> Rows:
        return [{"a": "<b>", "n": 1.23456}, *({"a": None, "n": number} for number in range(100))]


def test_a_notebook_shows_a_table_and_escapes_it() -> None:
    view = Numbers()._repr_html_()
    assert "<td>&lt;b&gt;</td><td>1.235</td>" in view
    assert view.count("<tr>") == 61
    assert "and 41 more rows" in view


def test_without_pandas_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(InputError, match="pip install pandas"):
        Numbers().to_pandas()
