"""Two models on the same pictures: in Python, in a shell, and as a picture."""

from __future__ import annotations

import copy
import csv
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from networks import Net
from PIL import Image
from torchvision.transforms.functional import to_tensor

import camkit
from camkit.cli import main
from camkit.errors import ImageError, TargetError
from camkit.models import LoadedModel

SCENES = [str(path) for path in camkit.scenes.scene_paths().values()]
PLANE = str(camkit.scenes.scene_paths()["plane-wood"])
FACTORY = """
from camkit.demo.scenes import load_scene_net, preprocess
def build(): return load_scene_net('demo-fair'), preprocess
"""


@pytest.fixture
def fair() -> LoadedModel:
    return camkit.load_model("demo-fair")


def in_grey(picture: np.ndarray) -> np.ndarray:
    return np.asarray(Image.fromarray(picture).convert("L"), int)[..., None].repeat(3, axis=2)


def test_two_copies_of_a_model_differ_nowhere(fair: LoadedModel) -> None:
    found = camkit.compare_models(fair, replace(fair, module=copy.deepcopy(fair.module)), SCENES, most=2)
    assert [row["heat_in_common"] for row in found.table()] == [1.0] * len(SCENES)
    assert not any(row["answers_differ"] for row in found.rows)
    assert len(found.heats) == 2  # memory holds the maps of two pictures
    (heat,) = found.heats[found.rows[0]["picture"]]
    np.testing.assert_allclose(heat.difference(), in_grey(heat.maps[0].picture), atol=1)
    assert repr(found).endswith("0 of 6 pictures with different answers")


def test_heat_in_common_is_that_of_a_slow_reference_and_its_colours_say_whose_it_is() -> None:
    picture = np.asarray(Image.open(PLANE).resize((400, 300)))
    found = camkit.compare_models("demo-fair", "demo-biased", picture)
    fair, biased = (
        camkit.explain(name, picture, target="plane").heatmap_on_picture() for name in ("demo-fair", "demo-biased")
    )
    smaller = larger = 0.0
    for one, other in zip(fair.ravel().tolist(), biased.ravel().tolist(), strict=True):
        smaller, larger = smaller + min(one, other), larger + max(one, other)
    assert found.rows[0]["picture"] == "picture 1"
    assert found.rows[0]["heat_in_common"] == pytest.approx(smaller / larger, abs=1e-6)
    # The second answer has the most heat of the second model: red there, and blue where the plane's heat is
    of_plane, of_bird = found.heats["picture 1"]
    changed = [(heat.difference() - in_grey(picture)).reshape(-1, 3) for heat in (of_plane, of_bird)]
    assert changed[0][fair.argmax()] @ [-1, 0, 1] > 50
    wanted = camkit.explain("demo-biased", picture, target="bird").heatmap_on_picture()
    more = wanted - camkit.explain("demo-fair", picture, target="bird").heatmap_on_picture()
    assert changed[1][more.argmax()] @ [1, 0, -1] > 50
    assert np.abs(changed[1][np.abs(more).ravel() < 1 / 1000]).max() <= 1


def test_another_last_layer_changes_the_answer_and_both_answers_are_shown(fair: LoadedModel) -> None:
    changed = copy.deepcopy(fair.module)
    linear = next(part for part in changed.modules() if isinstance(part, torch.nn.Linear))
    with torch.no_grad():
        linear.bias[fair.labels.index("ship")] += 1000
    found = camkit.compare_models(fair, replace(fair, module=changed), SCENES, names=("old", "new"), most=12)
    differs = [row["answers_differ"] for row in found.rows]
    assert differs == sorted(differs, reverse=True)
    assert [row["answer"] == "ship" for row in found.rows if not row["answers_differ"]] == [True]
    assert {row["against_answer"] for row in found.rows} == {"ship"}
    # The bias has no place, so the heat is the same for both classes.
    assert [heat.label for heat in found.heats[PLANE]] == ["plane", "ship"]
    assert [heat.in_common for heat in found.heats[PLANE]] == pytest.approx([1, 1], abs=1e-4)
    assert [found.heats[PLANE][0].maps[0].target, found.heats[PLANE][1].maps[1].target] == [0, 1]


def test_classes_are_matched_by_label_and_one_that_a_model_lacks_is_said(fair: LoadedModel) -> None:
    class Turned(type(fair.module)):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return 3 * super().forward(images).flip(1)

    changed = copy.deepcopy(fair.module)
    changed.__class__ = Turned  # the same layers, in another network
    turned = replace(fair, module=changed, labels=("bird", "car", "ship", "Plane, a flying one"))
    found = camkit.compare_models(fair, turned, PLANE)
    assert found.rows[0]["heat_in_common"] == pytest.approx(1, abs=1e-5)
    assert not found.rows[0]["answers_differ"]
    assert not found.alike
    np.testing.assert_array_equal(found.sheet(scale="shared"), found.sheet())  # different networks share no scale
    assert camkit.compare_models(fair, replace(turned, labels=None), PLANE).rows[0]["answers_differ"]  # by index
    other = replace(turned, labels=("bird", "car", "ship", "glider"))
    found = camkit.compare_models(fair, other, PLANE)
    assert [[each is None for each in heat.maps] for heat in found.heats[PLANE]] == [[False, True], [True, False]]
    assert found.rows[0]["heat_in_common"] is None
    assert found.sheet().shape[0] > 1000
    with pytest.raises(TargetError, match="second has no class 'plane'; name a class that both models have"):
        camkit.compare_models(fair, other, PLANE, target="plane", names=("first", "second"))
    row = camkit.compare_models(fair, other, PLANE, target="car").rows[0]
    assert (row["target"], row["answer"], row["against_answer"]) == ("car", "plane", "glider")
    with pytest.raises(TargetError, match="target 9 is out of range: the model has classes 0 to 3"):
        camkit.compare_models(fair, other, PLANE, target=9)
    with pytest.raises(ImageError, match="the list of pictures is empty"):
        camkit.compare_models(fair, other, [])


def test_a_picture_without_a_box_is_named_and_the_others_are_compared() -> None:
    def boxes(net: Net, images: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        light = net.body(images).mean((1, 2, 3)).sigmoid()
        corners, labels = torch.tensor([[5.0, 5, 40, 40]]), torch.tensor([1])
        found = ({"boxes": corners, "scores": score[None], "labels": labels} for score in light)
        return [
            each if image.mean() > 0.1 else {name: value[:0] for name, value in each.items()}
            for each, image in zip(found, images, strict=True)
        ]

    pictures = [np.full((64, 64, 3), value, np.uint8) for value in (200, 0, 100)]
    detector = Net(boxes, body=torch.nn.Conv2d(3, 4, 8, 8))
    found = camkit.compare_models(detector, copy.deepcopy(detector), pictures, preprocess=to_tensor)
    assert {row["picture"] for row in found.rows} == {"picture 1", "picture 3"}
    assert list(found.unreadable) == ["picture 2"]


def test_maps_on_inputs_whose_place_is_unknown_are_compared_only_if_both_are() -> None:
    network = Net(lambda net, images: net.body(images).mean((2, 3)), body=torch.nn.Conv2d(3, 3, 8, 8))
    placed, turned = (
        camkit.Explainer(
            network, preprocess=lambda picture, turn=turn: to_tensor(picture.rotate(turn).resize((64, 64)))
        )
        for turn in (0, 90)
    )
    picture = np.asarray(Image.open(PLANE).resize((300, 200)))
    for pair, common in (((placed, turned), None), ((turned, turned), 1)):
        found = camkit.compare_models(*pair, picture)
        assert found.rows[0]["heat_in_common"] == common
        assert found.sheet().shape[0] > 300


def test_one_scale_makes_the_weaker_map_paler() -> None:
    found = camkit.compare_models("demo-fair", "demo-biased", str(camkit.scenes.scene_paths()["plane-sky"]))
    assert found.alike
    (heat,) = found.heats[found.rows[0]["picture"]]
    fair, biased = heat.maps
    assert biased.maps.maxima < fair.maps.maxima
    own, shared = (found.sheet(scale=scale, alpha=1.0).astype(int) for scale in ("each", "shared"))
    third = own.shape[1] // 3
    assert (own[:, :third] == shared[:, :third])[150:400].all()  # the stronger map is drawn alike
    assert (own[:, third : 2 * third] != shared[:, third : 2 * third])[150:400].any()


def test_the_command_compares_a_folder_and_writes_a_sheet_and_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for number, scene in enumerate(SCENES):
        Path("photos").mkdir(exist_ok=True)
        Path(f"photos/{number}.jpg").write_bytes(Path(scene).read_bytes())
    Path("photos/broken.jpg").write_text("no picture")
    Path("mine.py").write_text(FACTORY)
    torch.save(camkit.load_model("demo-biased").module.state_dict(), "new.pth")
    labels = ["plane", "ship", "car", "bird"]
    Path("labels.txt").write_text("\n".join(labels))
    call = ["photos", "--model", "mine.py:build", "--labels", "labels.txt", "--against-weights", "new.pth"]
    assert main([*call, "--table", "all.csv"]) == 2  # one picture cannot be read
    printed = capsys.readouterr()
    assert "broken.jpg" in printed.err
    assert printed.out.splitlines()[-1] == "mine.py:build and new.pth: 2 of 6 pictures with different answers"
    with Path("all.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6
    assert [row["answers_differ"] for row in rows] == ["True"] * 2 + ["False"] * 4
    assert [Path(row["picture"]).name for row in rows] == [line.split()[-1] for line in printed.out.splitlines()[1:-1]]
    assert cv2.imread("camkit-out/against.new.pth.png") is not None
    assert main([*call, "--table", "all.csv"]) == 2
    assert "all.csv exists already; pass --overwrite to replace it" in capsys.readouterr().err
    for wrong in (["--table", "x.parquet"], ["-t", "car", "-t", "ship"], ["--style", "slide"], ["--top-k", "2"]):
        assert main([*call, *wrong]) == 2
        assert "--against" in capsys.readouterr().err
    one = ["photos/0.jpg", "--model", "demo-fair", "--against", "demo-biased", "--target", "ship", "--quiet"]
    assert main([*one, "--scale", "shared", "--out", "heat.png"]) == 0
    assert capsys.readouterr() == ("", "")
    assert cv2.imread("heat.png").shape[1] > 1000
