"""Comparisons of methods: in Python, in a shell, and as a picture."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from networks import Flat, Net, classifier, means, planted_picture
from PIL import Image
from torch import nn

import camkit
from camkit.cli import main
from camkit.drawing.text import Canvas
from camkit.errors import ImageError, InputError, MethodError
from camkit.methods import METHODS, variant
from camkit.metrics import Value
from camkit.metrics.compare import DEFAULTS, value_words
from camkit.models import LoadedModel

PLANE = camkit.scenes.scene_paths()["plane-sky"]
FEW = ["gradcam", "hirescam", "eigencam"]


def command(folder: Path, *options: str, pictures: Path = PLANE) -> list[str]:
    return ["compare", str(pictures), "--model", "demo-fair", "--out", str(folder / "sheet.png"), *options]


def test_methods_stand_beside_each_other_with_what_the_model_says() -> None:
    assert {*DEFAULTS} - {*METHODS} == {"auto"}
    sharing = [name for name in DEFAULTS if name in METHODS and METHODS[name].shares_pass]
    assert len(sharing) >= 7
    found = camkit.compare("demo-fair", [PLANE, camkit.scenes.scene_paths()["bird-wood"]], sharing)
    assert {found} == {found}  # it can be a key
    assert [row.label for row in found.rows] == ["plane", "bird"]
    for row in found.rows:
        assert [compared.method for compared in row.maps] == sharing
        for compared in row.maps:
            alone = camkit.explain("demo-fair", row.source, method=compared.method)
            assert (compared.explanation.method, compared.explanation.together) == (compared.method, ())
            np.testing.assert_allclose(compared.explanation.raw, alone.raw, atol=1e-5 * np.abs(alone.raw).max())


def test_a_comparison_runs_each_map_once_and_shares_what_it_can() -> None:
    loaded, passes = camkit.load_model("demo-fair"), []
    loaded.module.register_forward_hook(lambda *_: passes.append(1))
    explainer = camkit.Explainer(loaded)
    methods = ["gradcam", "hirescam", "eigencam", "layercam"]
    camkit.compare(explainer, PLANE, methods)
    passes.clear()
    camkit.compare(explainer, PLANE, methods)
    # The passes: the picture's scores with all pixels and without any, the maps, the metric (Grad-CAM and HiResCAM have
    # the same map), the metric of the reference maps, and the halves of 8 colours, 4 in a pass.
    assert len(passes) == 2 + 1 + (len(methods) - 1) + 3 + 16 // 4


@pytest.mark.parametrize("methods", [None, FEW[:2]])
def test_a_metric_that_makes_maps_anew_also_makes_the_reference_maps(methods: list[str] | None) -> None:
    row = camkit.compare("demo-fair", PLANE, methods, metric="coherency").rows[0]
    assert [value.status for value in row.by_chance.values()] == ["ok"] * len(row.by_chance)
    assert row.by_chance["centre"].number == pytest.approx(1)  # it is the same for every picture


def answering(*logits: float) -> Net:
    """Return a network that answers with these logits, plus a small part that depends on the picture."""

    def run(net: Net, images: torch.Tensor) -> torch.Tensor:
        return net.small(images) * 0.01 + torch.tensor(logits)

    torch.manual_seed(0)
    return Net(run, small=classifier(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), classes=len(logits)))


def test_what_the_model_answers_stands_beside_another_target(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = answering(0.0, 3.0)
    row = camkit.compare(model, planted_picture(), "gradcam", labels=["bird", "car"], target="bird").rows[0]
    with torch.no_grad():
        car = model(planted_picture()).softmax(1)[0, 1].item()
    assert row.answer == ("car", pytest.approx(car, abs=1e-5))
    own = camkit.compare(model, planted_picture(), "gradcam", labels=["bird", "car"]).rows[0]
    assert (own.label, own.answer, own.answers) == ("car", None, "")
    call = command(tmp_path, "--method", "gradcam", "--target", "bird", "--overwrite")
    assert main(call) == 0
    assert "bird <0.1% (the model's answer: plane: >99.9%)" in capsys.readouterr().out
    assert main([*call, "--json"]) == 0
    row_json = json.loads(capsys.readouterr().out)["rows"][0]
    assert (row_json["label"], row_json["answer"]) == ("bird", "plane")
    assert row_json["answer_probability"] > 0.99


def test_the_model_s_answer_beside_any_target_has_the_probability_of_the_model() -> None:
    model, answers = answering(0.0, 3.0), []
    for target in (0, camkit.targets.contrast(0, 1), lambda output: output[:, 0]):
        for activation in ("sigmoid", "none"):
            loaded = LoadedModel(model, "answering", activation=activation)
            answers.append(camkit.compare(loaded, planted_picture(), "gradcam", target=target).rows[0].answer)
    by_sigmoid = torch.tensor(3.0).sigmoid().item()
    assert answers == [("class 1", pytest.approx(by_sigmoid, abs=1e-2)), ("class 1", None)] * 3


@pytest.mark.parametrize("methods", [None, ["gradcam", "fem"]])
def test_a_score_of_nan_is_named(methods: list[str] | None) -> None:
    found = camkit.compare(answering(0.0, float("nan")), planted_picture(), methods, target=1)
    cells = found.to_markdown().splitlines()[-1].split(" | ")
    maps = len(found.rows[0].maps)
    assert cells[2 : 2 + maps] == ["the model's score is NaN"] * maps
    assert "not finite" in cells[-1]
    row = json.loads(json.dumps(found.to_dict(), allow_nan=False))["rows"][0]
    assert row["probability"] is None
    assert all(entry["reason"] for entry in row["maps"])
    assert found.sheet().ndim == 3


@pytest.mark.parametrize(
    ("number", "said"), [(0.8, "loses 80%"), (-0.004, "loses 0%"), (-0.2, "gains 20%"), (-426.24, "gains 42,624%")]
)
def test_the_loss_in_words(number: float, said: str) -> None:
    assert value_words(Value("top-loss", number)) == said


def test_methods_that_need_a_pass_of_their_own_cannot_share_one() -> None:
    explainer = camkit.Explainer("demo-fair")
    for name in ("fullgrad", "auto"):
        with pytest.raises(MethodError, match=rf"'{name}' needs a pass of its own; use explainer\.using"):
            explainer.by_methods(PLANE, ["gradcam", name])
    with pytest.raises(MethodError, match="list of methods is empty"):
        explainer.by_methods(PLANE, [])


def test_a_method_without_gradients_works_beside_one_that_finds_none() -> None:
    through_a_comparison = Net(lambda net, images: means((net.layer(images) > 0).float()), layer=nn.Conv2d(3, 4, 3))
    found = camkit.compare(through_a_comparison, planted_picture(), ["gradcam", "eigencam"], target_layer=["layer"])
    gradcam, eigencam = found.rows[0].maps
    assert "does not depend on layer 'layer'" in gradcam.reason
    assert eigencam.explanation is not None


def test_every_layer_has_a_row_and_every_target_is_fixed() -> None:
    found = camkit.compare("demo-fair", PLANE, FEW, target_layer=["features.0", "features"], target="bird")
    assert [row.layer for row in found.rows] == ["features.0", "features"]
    assert {row.label for row in found.rows} == {"bird"}
    for row in found.rows:
        assert {compared.explanation.layer for compared in row.maps if compared.explanation} == {row.layer}


def test_a_method_that_does_not_work_says_why_in_its_place() -> None:
    found = camkit.compare(Flat().eval(), planted_picture(), ["gradcam", "cam"], target_layer=["layer"])
    fits, misfit = found.rows[0].maps
    assert fits.reason == ""
    assert misfit.explanation is None
    assert "use 'gradcam' or 'hirescam'" in misfit.reason
    assert misfit.reason in found.to_markdown()
    assert found.to_dict()["rows"][0]["maps"][1]["status"] == "error"
    kept = dict(METHODS)
    del METHODS["fem"]
    try:
        usual = camkit.compare(Flat().eval(), planted_picture(), target_layer=["layer"])
    finally:
        METHODS.clear()
        METHODS.update(kept)  # in their order, which tables have
    assert not {"legrad", "fem"} & {compared.method for compared in usual.rows[0].maps}
    with pytest.raises(MethodError, match="no method works on this picture"):
        camkit.compare(Flat().eval(), planted_picture(), ["cam"], target_layer=["layer"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"images": []}, "the list of pictures is empty"),
        ({"methods": []}, "the list of methods is empty"),
        ({"methods": ["gradcm"]}, "did you mean 'gradcam'"),
        ({"metric": "sgr"}, "unknown metric 'sgr'; did you mean 'srg'"),
        ({"metric": "pointing"}, "^metric 'pointing' needs the region of an object, and a comparison has none; choose"),
        ({"model": camkit.Explainer("demo-fair"), "precision": "fp32"}, "has its precision already"),
        ({"target": "plain", "images": "nowhere.png"}, "did you mean 'plane'"),
        ({"target_layer": ["featurs"]}, "^the model has no layer 'featurs'"),
        ({"methods": [variant("rise", masks=5), "rise"]}, "a method cannot be called 'rise', because judge has a row"),
    ],
)
def test_a_wrong_call_is_one_sentence(arguments: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        camkit.compare(**{"model": "demo-fair", "images": PLANE, **arguments})


@pytest.mark.parametrize("methods", ["gradcam", ["gradcam", "gradcam"]])
def test_one_method_and_one_layer_need_no_list_and_repeats_count_once(methods: Any) -> None:
    (row,) = camkit.compare("demo-fair", PLANE, methods, target_layer="features.3").rows
    assert (row.layer, [compared.method for compared in row.maps]) == ("features.3", ["gradcam"])


@pytest.mark.parametrize(
    ("labels", "typed", "index"),
    [
        (["1", "2", "3", "4"], "3", 2),  # digits, but not from 0
        (["plane", "ship", "car", "bird"], "3", 3),
        (None, "3", 3),
    ],
)
def test_a_number_means_the_same_class_in_every_command(
    tmp_path: Path, capsys: Any, labels: list[str] | None, typed: str, index: int
) -> None:
    (tmp_path / "labels.json").write_text(json.dumps(labels))
    named = ["--labels", str(tmp_path / "labels.json")] if labels else []
    common = [str(PLANE), "--model", "demo-fair", *named, "-t", typed, "--json"]
    label = (labels or ["plane", "ship", "car", "bird"])[index]
    assert main([*common, "--out", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["target"] == index
    assert main(command(tmp_path, *common[3:], "--method", "gradcam")) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["label"] == label
    model = camkit.load_model("demo-fair", labels=labels)
    assert camkit.explain(model, PLANE, target=typed).target == index
    explained = camkit.explain(model, PLANE, target=camkit.targets.contrast(typed, (index + 1) % 4))
    assert explained.label.startswith(label)


def test_a_table_keeps_its_columns_whatever_a_label_says() -> None:
    heading, _, row = camkit.compare("demo-fair", PLANE, "gradcam", labels=["a|b"] * 4).to_markdown().splitlines()
    assert "a\\|b" in row
    assert row.replace("\\|", "").count("|") == heading.count("|")
    assert re.search("loses|gains", row.rsplit("|", 2)[1])


def test_a_map_of_nan_is_not_called_empty() -> None:
    def broken(activations: torch.Tensor, gradients: torch.Tensor) -> torch.Tensor:
        return gradients * float("nan") * activations.amax()

    assert "NaN or infinity in the map" in camkit.compare("demo-fair", PLANE, [broken]).to_markdown()


def test_a_damaged_picture_is_left_out_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.png").write_bytes(b"no picture")
    shutil.copy(PLANE, folder / "b.png")
    found = camkit.compare("demo-fair", [folder / "a.png", folder / "b.png"], "gradcam")
    assert [Path(row.source).name for row in found.rows] == ["b.png"]
    assert [Path(name).name for name in found.unreadable] == ["a.png"]
    assert main(command(tmp_path, "--method", "gradcam", pictures=folder)) == InputError.exit_code
    printed = capsys.readouterr()
    assert (tmp_path / "sheet.png").exists()
    assert "b.png" in printed.out and "a.png" in printed.err and "a.png" not in printed.out
    with pytest.raises(ImageError, match=r"a\.png"):
        camkit.compare("demo-fair", [folder / "a.png"], "gradcam")
    in_memory = [Image.open(folder / "b.png"), Image.open(folder / "b.png")]
    assert [row.source for row in camkit.compare("demo-fair", in_memory, "gradcam").rows] == ["picture 1", "picture 2"]


def test_results_show_themselves_are_saved_whole_and_say_what_their_values_are(tmp_path: Path) -> None:
    found = camkit.compare("demo-fair", PLANE, FEW)
    assert repr(found) == "<Comparison of 3 methods on 1 picture>"
    assert found._repr_html_().startswith("<img")
    saved = found.save(tmp_path / "new" / "sheet.jpg")
    assert cv2.imread(str(saved)).shape == found.sheet().shape
    lines = found.to_markdown().splitlines()
    names = "gradcam | hirescam | eigencam | (random map) | (centred blob) | (best colour)"
    assert (lines[0], len(lines)) == (f"| picture | layer | {names} |", 3)
    values = found.to_dict()
    assert {"model": "demo-fair", "metric": "top-loss", "fill": "blur", "better": "higher"}.items() <= values.items()
    assert list(values["rows"][0]["references"]) == ["random", "centre", "colour"]
    assert "if the hottest fifth of the picture is blurred" in found.legend
    two = camkit.compare("demo-fair", PLANE, "gradcam", target_layer=["features.0", "features"], metric="deletion")
    assert repr(two) == "<Comparison of 1 method on 1 picture at 2 layers>"
    assert two.legend.endswith("lower is better")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("bad.pdf", "cannot write this picture as '.pdf'"),
        ("folder", "the sheet needs a file such as"),
        ("sheet", "the sheet needs a file such as"),
        ("file.txt/sheet.png", r"cannot write into the folder .*file\.txt"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, said: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file.txt").touch()
    monkeypatch.setattr("camkit.compare", lambda *_, **__: pytest.fail("the work was done"))
    assert main(["compare", str(PLANE), "--model", "demo-fair", "--overwrite", "--out", str(tmp_path / name)]) == 2
    assert re.search(said, " ".join(capsys.readouterr().err.split()))


@pytest.mark.parametrize("shape", [(40, 1400), (3, 2)])
@pytest.mark.parametrize(
    "methods", [["gradcam"], ["gradcam", "layercam", "legrad", "fem", "eigencam", "hirescam", "eigengradcam"]]
)
def test_a_sheet_of_pictures_of_any_form_fits_on_a_slide(shape: tuple[int, int], methods: list[str]) -> None:
    picture = np.random.default_rng(0).integers(0, 255, (*shape, 3), dtype=np.uint8)
    found = camkit.compare("demo-fair", [picture, picture], methods)
    assert found.sheet().shape[1] <= 1920
    assert len(found.sheet()) < 2000


def test_the_command_writes_a_sheet_and_prints_the_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = command(tmp_path, "--method", "gradcam", "--method", "eigencam")
    assert main(call) == 0
    printed = capsys.readouterr().out
    assert ": plane >99.9%" in printed
    assert "  gradcam               loses" in printed
    for name in ("(random map)  ", "(centred blob)", "(best colour) "):
        assert re.search(f"^  {re.escape(name)}        (loses|gains) ", printed, re.MULTILINE)
    assert cv2.imread(call[5]) is not None
    assert main(call) == 2
    assert "exists already; name another file with --out, or pass --overwrite" in capsys.readouterr().err
    assert main([*call, "--overwrite", "--json", "--metric", "average-drop", "--target", "1"]) == 0
    row = json.loads(capsys.readouterr().out)["rows"][0]
    assert row["label"] == "ship"
    assert [entry["method"] for entry in row["maps"]] == ["gradcam", "eigencam"]
    assert main(["compare", "--model", "demo-fair"]) == 2
    assert "name at least one picture" in capsys.readouterr().err


def test_reference_pictures_go_to_the_method_that_uses_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    others = tmp_path / "others"
    others.mkdir()
    for name in ("ship-sea", "bird-wood"):
        shutil.copy(camkit.scenes.scene_paths()[name], others)
    found = camkit.compare("demo-fair", PLANE, ["gradcam", "expected"], references=others)
    alone = camkit.explain("demo-fair", PLANE, method="expected", references=others)
    gradcam, expected = (compared.explanation for compared in found.rows[0].maps)
    assert gradcam is not None and gradcam.references is None
    assert expected is not None and expected.references == alone.references
    np.testing.assert_allclose(expected.raw, alone.raw, rtol=1e-4, atol=1e-6)
    call = command(tmp_path, "--references", str(others), "--overwrite", "--method")
    assert main([*call, "expected", "--json"]) == 0
    assert main([*call, "gradcam"]) == 2
    assert "uses no reference pictures" in capsys.readouterr().err


def test_the_default_method_is_compared_and_names_what_it_takes() -> None:
    model = classifier(nn.Conv2d(3, 8, 4, 4), nn.ReLU(), nn.Conv2d(8, 8, 4, 4))
    found = camkit.compare(camkit.Explainer(model), torch.rand(3, 64, 64))
    assert found.rows[0].maps[0].title == "auto: Grad-CAM, sharpened"


@pytest.mark.parametrize("methods", [["gradcam", "legrad"], FEW])
def test_the_sheet_says_it_in_full(monkeypatch: pytest.MonkeyPatch, methods: list[str]) -> None:
    written: list[str] = []
    text = Canvas.text

    def noted(canvas: Canvas, x: float, y: float, words: str, **how: Any) -> None:
        written.append(words)
        text(canvas, x, y, words, **how)

    monkeypatch.setattr(Canvas, "text", noted)
    found = camkit.compare("demo-fair", PLANE, methods)
    found.sheet()
    said = " ".join(written)
    for words in (found.legend, found.rows[0].about, *(one.reason for one in found.rows[0].maps)):
        assert words.strip() in said


def test_equal_maps_are_named_and_drawn_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """On a network that ends in a mean and one linear layer, Grad-CAM and HiResCAM are the same."""
    found = camkit.compare("demo-fair", PLANE, ["gradcam", "hirescam", "layercam"], target_layer="features")
    assert [row["same_as"] for row in found.table()[:3]] == ["", "Grad-CAM", ""]
    alone = camkit.compare("demo-fair", PLANE, ["gradcam", "layercam"], target_layer="features")
    both, one = ((np.ptp(each.sheet().astype(int), axis=2) > 60).sum() for each in (found, alone))
    assert both == pytest.approx(one, rel=0.02)
    assert main(command(tmp_path, "--method", "gradcam", "--method", "hirescam", "--layer", "features")) == 0
    assert "(the same as Grad-CAM)" in capsys.readouterr().out
