"""Comparisons of methods: in Python, in a shell, and as a picture."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from test_methods_on_maps import planted_picture
from torch import nn

import camkit
from camkit.cli import main
from camkit.comparison.compare import DEFAULTS
from camkit.comparison.sheet import Panel, Row, draw_sheet
from camkit.demo.scenes import scene_paths
from camkit.errors import InputError, MethodError
from camkit.methods import METHODS, variant

PLANE = scene_paths()["plane-sky"]
FEW = ["gradcam", "hirescam", "eigencam"]


def test_the_usual_methods_are_methods_and_cheap() -> None:
    registered = [name for name in DEFAULTS if name in METHODS]
    assert len(registered) >= 11
    assert all(METHODS[name].cost.startswith("1") for name in registered)


def test_methods_stand_beside_each_other_with_what_the_model_says() -> None:
    found = camkit.compare("demo-fair", [PLANE, scene_paths()["bird-wood"]], FEW)
    assert [row.label for row in found.rows] == ["plane", "bird"]
    for row in found.rows:
        assert [compared.method for compared in row.maps] == FEW
        for compared in row.maps:
            alone = camkit.explain("demo-fair", row.source, method=compared.method)
            assert isinstance(alone, camkit.Explanation)
            assert compared.explanation is not None
            np.testing.assert_allclose(compared.explanation.heatmap, alone.heatmap, atol=1e-5)


def passes_of(model: nn.Module) -> list[int]:
    """Return a list that grows with each pass of the model."""
    passes: list[int] = []
    model.register_forward_hook(lambda *_: passes.append(1))
    return passes


def test_methods_that_weight_the_same_feature_maps_share_a_pass() -> None:
    sharing = [name for name in DEFAULTS if METHODS[name].shares_pass]
    assert len(sharing) >= 7
    loaded = camkit.load_model("demo-fair")
    explainer = camkit.Explainer(loaded, method="eigencam")
    explainer(PLANE)  # chooses the layer
    passes = passes_of(loaded.module)
    explainer(PLANE)  # the hook is new, so the layer is chosen again
    passes.clear()
    together = explainer.by_methods(PLANE, sharing)
    assert len(passes) == 1
    for name, explained in zip(sharing, together, strict=True):
        alone = explainer.using(name)(PLANE)
        assert (explained.method, explained.target, explained.together) == (name, alone.target, ())
        np.testing.assert_allclose(explained.raw, alone.raw, atol=1e-5 * float(np.abs(alone.raw).max()))


def test_a_comparison_runs_each_map_once_and_shares_what_it_can() -> None:
    loaded = camkit.load_model("demo-fair")
    passes = passes_of(loaded.module)
    explainer = camkit.Explainer(loaded)
    methods = ["gradcam", "hirescam", "eigencam", "layercam"]
    camkit.compare(explainer, PLANE, methods)
    passes.clear()
    camkit.compare(explainer, PLANE, methods)
    assert len(passes) == 1 + 1 + len(methods) + 1  # the picture's scores; the maps; the metric; and the random map's


def test_a_model_without_attention_is_run_once_to_find_that_out() -> None:
    loaded = camkit.load_model("demo-fair")
    passes = passes_of(loaded.module)
    explainer = camkit.Explainer(loaded)
    counts = []
    for method in ("legrad", "legrad", "chefer"):
        passes.clear()
        with pytest.raises(MethodError, match=f"'{method}' reads attention maps, and camkit saw none"):
            explainer.using(method)(PLANE)
        counts.append(len(passes))
    assert counts[0] > 0
    assert counts[1:] == [0, 0]


def test_a_comparison_does_not_wait_for_scipy() -> None:
    """SciPy takes longer to import than a comparison takes, and only some metrics need it."""
    scene = str(PLANE)
    code = f"import sys, camkit; camkit.compare('demo-fair', {scene!r}, ['gradcam']); print('scipy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"False\n"


def test_methods_that_need_a_pass_of_their_own_cannot_share_one() -> None:
    explainer = camkit.Explainer("demo-fair")
    with pytest.raises(MethodError, match=r"'fullgrad' needs a pass of its own; use explainer\.using"):
        explainer.by_methods(PLANE, ["gradcam", "fullgrad"])
    with pytest.raises(MethodError, match="list of methods is empty"):
        explainer.by_methods(PLANE, [])


class NoGradientAtTheLayer(nn.Module):
    """Reads its layer's output through a comparison, which has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Conv2d(3, 4, 3, padding=1)
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head((self.layer(x) > 0).float().mean((2, 3)))


def test_a_method_without_gradients_works_beside_one_that_finds_none() -> None:
    found = camkit.compare(
        NoGradientAtTheLayer().eval(), planted_picture(), ["gradcam", "eigencam"], target_layer=["layer"]
    )
    gradcam, eigencam = found.rows[0].maps
    assert "does not depend on layer 'layer'" in gradcam.reason
    assert eigencam.explanation is not None


def test_the_loss_is_that_of_the_picture_without_its_hottest_fifth() -> None:
    loaded = camkit.load_model("demo-fair")
    found = camkit.compare(loaded, PLANE, ["hirescam"])
    compared = found.rows[0].maps[0]
    assert compared.explanation is not None
    assert compared.value is not None
    evaluator = camkit.metrics.Evaluator(loaded, PLANE)
    heat = compared.explanation.heatmap
    hottest = heat >= np.sort(heat.ravel())[-round(0.2 * heat.size)]
    left = evaluator.without(torch.from_numpy(hottest)[None], "blur")[0]
    assert compared.value.number == pytest.approx(1 - left / evaluator.confidence, abs=1e-3)


def test_every_layer_has_a_row_and_every_target_is_fixed() -> None:
    found = camkit.compare("demo-fair", PLANE, FEW, target_layer=["features.0", "features"], target="bird")
    assert [row.layer for row in found.rows] == ["features.0", "features"]
    assert {row.label for row in found.rows} == {"bird"}
    for row in found.rows:
        assert {compared.explanation.layer for compared in row.maps if compared.explanation} == {row.layer}


class Flat(nn.Module):
    """Has no head of pooling and one linear layer, so CAM does not work on it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Conv2d(3, 4, 3, padding=1)
        self.head = nn.Linear(4 * 64, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x).relu().flatten(1))


def test_a_method_that_does_not_work_says_why_in_its_place() -> None:
    found = camkit.compare(Flat().eval(), planted_picture(), ["gradcam", "cam"], target_layer=["layer"])
    fits, misfit = found.rows[0].maps
    assert fits.reason == ""
    assert misfit.explanation is None
    assert "use 'gradcam' or 'hirescam'" in misfit.reason
    assert misfit.reason in found.table()
    assert found.to_dict()["rows"][0]["maps"][1]["status"] == "error"
    usual = camkit.compare(Flat().eval(), planted_picture(), target_layer=["layer"])
    assert "legrad" not in [compared.method for compared in usual.rows[0].maps]
    with pytest.raises(MethodError, match="no method works on this picture"):
        camkit.compare(Flat().eval(), planted_picture(), ["cam"], target_layer=["layer"])


def test_a_map_of_the_true_place_loses_more_than_a_random_one() -> None:
    found = camkit.compare(
        "demo-fair", [scene_paths()[name] for name in ("plane-sky", "car-road", "bird-wood")], FEW[:2]
    )
    for number in range(2):
        losses = [row.maps[number].value for row in found.rows]
        true = [value.number for value in losses if value is not None and value.number is not None]
        random = [row.by_chance.number for row in found.rows if row.by_chance.number is not None]
        assert np.mean(true) > np.mean(random) + 0.2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"images": []}, "the list of pictures is empty"),
        ({"methods": []}, "the list of methods is empty"),
        ({"methods": ["gradcm"]}, "did you mean 'gradcam'"),
        ({"metric": "sgr"}, "unknown metric 'sgr'; did you mean 'srg'"),
        (
            {"metric": "pointing"},
            "^metric 'pointing' needs the region of an object, and a comparison has none; choose ",
        ),
        ({"metric": "energy"}, "^metric 'energy' needs the region of an object"),
        ({"target": "plain"}, "did you mean 'plane'"),
        ({"target_layer": ["featurs"]}, "^the model has no layer 'featurs'"),
        ({"methods": [variant("rise", masks=5), "rise"]}, "two different methods are named 'rise'"),
    ],
)
def test_a_wrong_call_is_one_sentence(arguments: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        camkit.compare("demo-fair", **{"images": PLANE, **arguments})


def test_one_method_and_one_layer_need_no_list_and_repeats_count_once() -> None:
    found = camkit.compare("demo-fair", PLANE, "gradcam", target_layer="features.3")
    assert [(row.layer, [compared.method for compared in row.maps]) for row in found.rows] == [
        ("features.3", ["gradcam"])
    ]
    found = camkit.compare("demo-fair", PLANE, ["gradcam", "hirescam", "gradcam"])
    assert [compared.method for compared in found.rows[0].maps] == ["gradcam", "hirescam"]


def test_a_metric_that_makes_maps_anew_makes_those_of_the_method_itself() -> None:
    asked: list[int] = []

    def gradient_size(activations: torch.Tensor, gradients: torch.Tensor) -> torch.Tensor:
        asked.append(len(activations))
        return gradients.abs().mean((2, 3), keepdim=True)

    found = camkit.compare("demo-fair", PLANE, gradient_size, metric="coherency")
    value = found.rows[0].maps[0].value
    assert value is not None
    assert value.number is not None
    assert len(asked) >= 2  # the map of the picture, and that of the picture times its map


def test_a_table_keeps_its_columns_whatever_a_label_says() -> None:
    labels = ["a|b"] * 4
    table = camkit.compare("demo-fair", PLANE, "gradcam", labels=labels).table()
    assert "a\\|b" in table
    assert table.splitlines()[-1].replace("\\|", "").count("|") == table.splitlines()[0].count("|")
    assert "loses" in table.splitlines()[-1].rsplit("|", 2)[1] or "gains" in table.splitlines()[-1].rsplit("|", 2)[1]


def test_a_map_of_nan_is_not_called_empty() -> None:
    def broken(activations: torch.Tensor, gradients: torch.Tensor) -> torch.Tensor:
        return gradients * float("nan") * activations.amax()

    assert "NaN or infinity in the map" in camkit.compare("demo-fair", PLANE, [broken]).table()


def test_a_damaged_picture_is_left_out_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.png").write_bytes(b"no picture")
    (tmp_path / "in" / "b.png").write_bytes(Path(PLANE).read_bytes())
    found = camkit.compare("demo-fair", [tmp_path / "in" / "a.png", tmp_path / "in" / "b.png"], "gradcam")
    assert [Path(row.source).name for row in found.rows] == ["b.png"]
    assert [Path(name).name for name in found.unreadable] == ["a.png"]
    sheet = tmp_path / "sheet.png"
    call = ["compare", str(tmp_path / "in"), "--model", "demo-fair", "--method", "gradcam", "--out", str(sheet)]
    assert main(call) == InputError.exit_code
    printed = capsys.readouterr()
    assert sheet.exists() and "b.png" in printed.out and "a.png" in printed.err and "a.png" not in printed.out
    with pytest.raises(InputError, match=r"a\.png"):
        camkit.compare("demo-fair", [tmp_path / "in" / "a.png"], "gradcam")


def test_an_explainer_has_its_options_already() -> None:
    with pytest.raises(InputError, match="has its precision already"):
        camkit.compare(camkit.Explainer("demo-fair"), PLANE, precision="fp32")


def test_results_show_themselves_and_are_saved_whole(tmp_path: Path) -> None:
    found = camkit.compare("demo-fair", PLANE, FEW)
    assert repr(found) == "<Comparison of 3 methods on 1 picture>"
    assert found._repr_html_().startswith("<img")
    saved = found.save(tmp_path / "new" / "sheet.jpg")
    assert cv2.imread(str(saved)).shape == found.sheet().shape
    lines = found.table().splitlines()
    assert lines[0] == "| picture | layer | gradcam | hirescam | eigencam | random map |"
    assert len(lines) == 3


@pytest.mark.parametrize("shape", [(300, 200, 3), (40, 900, 3), (900, 40, 3)])
def test_a_sheet_has_room_for_pictures_of_any_form(shape: tuple[int, int, int]) -> None:
    picture = np.full(shape, 128, np.uint8)
    panels = tuple(Panel(f"method {number}", "loses 12%", picture if number else None) for number in range(8))
    sheet = draw_sheet([Row(picture, "a name", ("a class: 12%", "more " * 40), panels)] * 2)
    assert sheet.shape[1] <= 1920
    assert sheet.dtype == np.uint8


def test_the_command_writes_a_sheet_and_prints_the_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sheet.png"
    call = [
        "compare",
        str(PLANE),
        "--model",
        "demo-fair",
        "--method",
        "gradcam",
        "--method",
        "eigencam",
        "--out",
        str(out),
    ]
    assert main(call) == 0
    printed = capsys.readouterr().out
    assert ": plane >99.9%" in printed
    assert "  gradcam               loses" in printed
    assert "  (random map)          loses" in printed
    assert cv2.imread(str(out)) is not None
    assert main(call) == 2
    assert "exists already; name another file with --out, or pass --overwrite" in capsys.readouterr().err
    assert main([*call, "--overwrite", "--json", "--metric", "average-drop", "--target", "1"]) == 0
    row = json.loads(capsys.readouterr().out)["rows"][0]
    assert row["label"] == "ship"
    assert [entry["method"] for entry in row["maps"]] == ["gradcam", "eigencam"]
    assert main(["compare", "--model", "demo-fair"]) == 2
    assert "name at least one picture" in capsys.readouterr().err
