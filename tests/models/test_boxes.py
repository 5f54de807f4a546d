"""Raw outputs of detectors, read as their own code reads them; and objects that a detector misses."""

from __future__ import annotations

import importlib
import json
import lzma
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from networks import Net
from PIL import Image
from refusals import refused
from torch import nn

import camkit
from camkit import targets
from camkit.cli import main
from camkit.errors import InputError
from camkit.models import load_model
from camkit.models.boxes import nanodet, read, yolo
from camkit.targets.classes import fixed_target

PLANE = camkit.scenes.scene_paths()["plane-sky"]
exported = pytest.mark.filterwarnings("ignore")  # what exporters and converters deprecate


@exported
@pytest.mark.extended
def test_nanodet_finds_what_its_reference_decoder_finds(test_data, tmp_path, monkeypatch):
    folder, file = test_data / "detectors", tmp_path / "nanodet.onnx"
    file.write_bytes(lzma.decompress((folder / "nanodet.onnx.xz").read_bytes()))
    monkeypatch.syspath_prepend(str(folder))
    reference = importlib.import_module("decode")
    loaded = load_model(str(file), boxes="nanodet", labels=reference.NAMES, device="cpu")
    detector = reference.Detector(str(file))

    for photo in sorted((test_data / "coco").glob("*.jpg"))[:8]:
        picture = Image.open(photo).convert("RGB")
        prepared, *_ = reference.nanodet_input(picture)
        with torch.no_grad():
            (found,) = loaded.module(torch.from_numpy(prepared))
        raw = dict(zip(detector.names, detector.s.run(None, {"images": prepared}), strict=True))
        corners, scores = reference.nanodet_decode({name: values[0] for name, values in raw.items()})
        # The reference's middles are half a pixel further to the left and the top than those of NanoDet's code.
        assert np.abs(found["all_boxes"].numpy() - 0.5 - corners).max() < 1e-2
        assert np.abs(found["all_scores"].numpy() - scores).max() < 1e-4
        sure = scores.max(1) > 0.3
        kept = reference.nms(corners[sure], scores.max(1)[sure], scores.argmax(1)[sure], 0.6)
        own = found["boxes"][found["scores"] > 0.3].numpy() - 0.5
        assert np.abs(own - corners[sure][kept]).max(initial=0) < 1e-2
        assert found["labels"][: len(kept)].tolist() == scores.argmax(1)[sure][kept].tolist()
        assert float((loaded.preprocess(picture) - prepared[0]).abs().mean()) < 0.15  # cv2 resizes unlike Pillow

    row = camkit.explain(str(file), photo, target=targets.box(0), boxes="nanodet", labels=reference.NAMES, device="cpu")
    assert row.method == "layercam-centred"
    assert row.layer == "model.Add_add_262+model.Add_add_273+model.Add_add_288"


@pytest.mark.parametrize(("strides", "shift"), [((8, 16, 32), 0.5), ((8, 16, 32, 64), 0)])
def test_nanodets_distances_are_counted_in_strides_from_the_middle_or_the_corner_of_a_cell(strides, shift):
    starts = [(s, x * s, y * s) for s in strides for y in range(-(-96 // s)) for x in range(-(-130 // s))]
    rows = torch.zeros(1, len(starts), 3 + 4 * 8)
    for side in range(4):
        rows[..., 3 + 8 * side + side + 1] = 50  # the whole distribution is at 1, 2, 3, 4 strides

    found = nanodet([rows], (96, 130), 3)

    cells = [(s, x + shift * s, y + shift * s) for s, x, y in starts]
    right = [[x - s, y - 2 * s, x + 3 * s, y + 4 * s] for s, x, y in cells]
    assert np.abs(found["all_boxes"][0].numpy() - right).max() < 1e-3


class Anchorless(nn.Module):
    """A random network with YOLOX's head: for each cell of three grids, offsets, sizes, objectness and classes."""

    def __init__(self, decoded: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stages = nn.ModuleList([nn.Conv2d(3, 8, 3, 8, 1), nn.Conv2d(8, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 2, 1)])
        self.heads = nn.ModuleList(nn.Conv2d(8, 5 + 3, 1) for _ in range(3))
        self.decoded = decoded

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        level, rows = images / 40, []
        for stage, head, stride in zip(self.stages, self.heads, (8, 16, 32), strict=True):
            level = stage(level).tanh()
            found = head(level)
            places = torch.stack(torch.meshgrid(*map(torch.arange, found.shape[:1:-1]), indexing="xy"))
            moved, sides = found[:, :2], found[:, 2:4]
            if self.decoded:
                moved, sides = (moved + places) * stride, sides.exp() * stride
            rows.append(torch.cat([moved, sides, (3 * found[:, 4:]).sigmoid()], 1).flatten(2))
        return torch.cat(rows, 2).permute(0, 2, 1)


@exported
@pytest.mark.extended
@pytest.mark.parametrize("decoded", [False, True])
def test_a_yolox_file_has_the_boxes_of_the_formula(tmp_path, monkeypatch, capsys, decoded):
    monkeypatch.chdir(tmp_path)
    file, net = tmp_path / "yolox.onnx", Anchorless(decoded).eval()
    torch.onnx.export(net, (torch.rand(1, 3, 96, 128),), file, dynamo=False, opset_version=17)
    labels = ["cat", "dog", "cow"]

    row, *_ = camkit.explain(str(file), PLANE, target=targets.boxes(0), boxes="yolox", labels=labels, device="cpu")
    part = camkit.explain(load_model(str(file), boxes="yolox"), PLANE, target=targets.box(0, part="objectness"))

    picture = Image.open(PLANE).convert("RGB")
    prepared = load_model(str(file), boxes="yolox").preprocess(picture)
    scale = min(96 / picture.height, 128 / picture.width)
    assert prepared[:, -1, -1].tolist() == pytest.approx([114] * 3)
    assert prepared[::2, 0, 0].tolist() == pytest.approx(picture.getpixel((0, 0))[::-2], abs=9)  # blue comes first
    rows = Anchorless(True).eval()(prepared[None])[0].detach()
    scores = rows[:, 4:5] * rows[:, 5:]
    best, (x, y, across, down) = int(scores.amax(1).argmax()), rows[scores.amax(1).argmax(), :4].tolist()
    right = np.array([x - across / 2, y - down / 2, x + across / 2, y + down / 2]) / scale
    assert np.abs(np.array(row.detection) - right).max() < 3  # a pixel of the input is that large
    assert row.label == labels[int(scores[best].argmax())]
    assert row.probability == pytest.approx(float(scores.amax()), abs=1e-4)
    assert part.score == pytest.approx(float(rows[best, 4]), abs=1e-4)
    Path("labels.txt").write_text("\n".join(labels))
    typed = [str(PLANE), "--model", str(file), "--boxes", "yolox", "--labels", "labels.txt", "--device", "cpu"]
    typed += ["--box-at", "190,190", "--target", "dog", "--threshold", "0.99"]
    assert main([*typed, "-o", "text"]) == 0
    printed = capsys.readouterr().out
    assert main([*typed, "--json", "-o", "json"]) == 0
    missed = json.loads(capsys.readouterr().out)["missed"]
    assert re.match(r"not found: dog scores 0\.\d{3} here, below the threshold of 0\.99", missed)
    assert missed in printed
    with refused("cannot read outputs of shapes"):
        camkit.explain(str(file), PLANE, boxes="nanodet", device="cpu")
    with refused("boxes must be one of nanodet, yolo, yolox", InputError):
        camkit.explain(str(file), PLANE, boxes="ssd", device="cpu")


@exported
@pytest.mark.extended
def test_a_yolo_file_has_the_boxes_that_the_package_finds(tmp_path, monkeypatch):
    ultralytics = pytest.importorskip("ultralytics")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    made = ultralytics.YOLO("yolov8n.yaml")
    for parameter in made.model.parameters():
        if parameter.dim() > 1 and parameter.requires_grad:
            nn.init.kaiming_normal_(parameter, 0.3)
    for head in made.model.model[-1].cv3:  # so that rounding does not change the best class
        head[-1].bias.data.zero_()
    file = made.export(format="onnx", imgsz=160, opset=17, verbose=False)
    picture = Image.open(PLANE).convert("RGB").resize((301, 170))

    loaded = load_model(file, boxes="yolo", device="cpu")
    with torch.no_grad():
        (own,) = loaded.module(loaded.preprocess(picture)[None])
    (theirs,) = ultralytics.YOLO(file, task="detect").predict(picture, imgsz=160, conf=1e-4, iou=0.7, verbose=False)

    count, scale, above = min(30, len(theirs.boxes)), 160 / 301, (160 - round(170 * 160 / 301)) // 2
    corners = ((own["boxes"][:count].numpy() - [0, above] * 2) / scale).clip(0, [301, 170] * 2)
    assert count > 5
    assert own["labels"][:count].tolist() == theirs.boxes.cls[:count].int().tolist()
    assert np.abs(own["scores"][:count].numpy() - theirs.boxes.conf[:count].numpy()).max() < 1e-4
    assert np.abs(corners - theirs.boxes.xyxy[:count].numpy()).max() < 1


def test_rows_of_yolo_with_objectness_and_without_suppression_are_read():
    older = torch.tensor([[[50.0, 40, 20, 10, 0.5, 0.9, 0.2]] * 8])
    ends = torch.tensor([[[1.0, 2, 3, 4, 0.7, 2], [5, 6, 7, 8, 0.4, 0]]])

    five, ten = yolo([older], (96, 96), 2), yolo([ends], (96, 96), 3)

    assert five["all_boxes"][0, 0].tolist() == [40, 35, 60, 45]
    assert five["all_scores"][0, 0].tolist() == pytest.approx([0.45, 0.1])
    assert ten["all_boxes"][0].tolist() == ends[0, :, :4].tolist()
    assert ten["all_scores"][0].tolist() == [pytest.approx([0, 0, 0.7]), pytest.approx([0.4, 0, 0])]
    with_masks = nn.functional.pad(older.repeat(1, 8, 1), (0, 32), value=-0.5)
    assert yolo([with_masks], (96, 96), 2)["all_scores"].shape == (1, 64, 2)
    for rows in (older, older[..., [0, 1, 2, 3, 5, 6]].mT):
        with refused("the network has 2 classes, but the number of labels is 1; pass a label for each class"):
            yolo([rows], (96, 96), 1)


def test_boxes_that_a_network_chose_and_boxes_of_two_classes_all_remain():
    ends = torch.tensor([[[1.0, 2, 30, 40, 0.7, 2], [1, 2, 30, 39, 0.4, 2]]])
    rows = torch.tensor([[-20.0, -20, 20, 20, 0.9, 0.1], [-20, -20, 20, 20, 0.1, 0.8], [-21, -20, 20, 20, 0.1, 0.7]])
    raw = torch.cat([rows, rows.new_zeros(5, 6)]).mT[None]

    chosen, suppressed = (
        read(Net(lambda net, images, found=found: found), torch.zeros(1, 3, 96, 96), kind="yolo", classes=classes)[0]
        for found, classes in ((ends, 3), (raw, 2))
    )

    assert chosen["scores"].tolist() == pytest.approx([0.7, 0.4])
    assert suppressed["scores"].tolist()[:2] == pytest.approx([0.9, 0.8])
    assert suppressed["labels"].tolist()[:2] == [0, 1]
    assert not (suppressed["scores"] == 0.7).any()


def watching(scores: list[list[float]], objectness: list[float] | None = None) -> nn.Module:
    """Return a detector of YOLOv5's layout whose boxes lie side by side, and overlap; scores depend on the picture."""
    sides = torch.tensor([[20.0, 20, 24, 24], [22, 20, 24, 24], [60, 50, 30, 30]])
    probabilities, shares = torch.tensor(scores).logit() - 0.1, torch.tensor(objectness or [0.999] * 3)

    def rows(net: Any, images: torch.Tensor) -> torch.Tensor:
        light = net.body(images).mean((1, 2, 3))[:, None, None]
        fixed = torch.cat([sides, shares[:, None]], 1).expand(len(images), 3, 5)
        found = torch.cat([fixed, (probabilities + 0.01 * light).sigmoid()], 2)
        return torch.cat([found, found.new_zeros(len(images), 9, 7)], 1)

    body = nn.Conv2d(3, 1, 3, 2, 1, bias=False)
    nn.init.ones_(body.weight)
    return Net(rows, body=body).eval()


MISSED = {
    "its score": ([[0.1, 0.1], [0.1, 0.1], [0.1, 0.18]], None, (60, 50), "dog", "dog scores 0.185 here, below"),
    "another class": ([[0.1, 0.1], [0.1, 0.1], [0.71, 0.3]], None, (60, 50), "dog", "0.5; cat wins with 0.7"),
    "a better box of it": ([[0.9, 0.1], [0.6, 0.3], [0.1, 0.1]], None, (33, 20), "dog", "0.5; cat wins with 0.9"),
    "another box": (
        [[0.1, 0.9], [0.1, 0.8], [0.1, 0.1]],
        None,
        (33, 20),
        None,
        "the threshold of 0.5: a dog box with 0.9",
    ),
    "objectness": ([[0.1, 0.1], [0.1, 0.1], [0.1, 0.9]], [0.9, 0.9, 0.2], (60, 50), None, "objectness only 0.200"),
}


@pytest.mark.parametrize(("scores", "objectness", "point", "label", "reason"), MISSED.values(), ids=MISSED)
def test_a_missed_object_is_explained_with_what_keeps_it_from_being_found(scores, objectness, point, label, reason):
    net, picture = watching(scores, objectness), torch.zeros(3, 96, 96)
    picture[:, :, :48] = 1
    options = {"boxes": "yolo", "labels": ["cat", "dog"]}

    missed = camkit.explain(net, picture, target=targets.box_at(*point, label=label), **options)
    covered = camkit.explain(net, picture, target=targets.box_at(*point, label=label), method="occlusion", **options)

    assert missed.label == covered.label == "dog"
    assert re.match(r"not found(: dog scores 0.*below|, although dog scores 0.*above) the threshold", missed.missed)
    assert reason in missed.missed
    assert reason in " ".join(missed.caption().warnings)
    assert missed.status == covered.status == "ok"
    with refused("found none around the point 1,90", InputError):
        camkit.explain(net, picture, target=targets.box_at(1, 90), **options)


def test_the_score_and_the_heat_of_a_box_do_not_depend_on_the_threshold():
    net, options = watching([[0.1, 0.4], [0.1, 0.3], [0.1, 0.1]]), {"boxes": "yolo", "labels": ["cat", "dog"]}
    picture = torch.rand(3, 96, 96, generator=torch.Generator().manual_seed(0))

    at = [targets.box_at(20, 20, label="dog", threshold=threshold) for threshold in (0.9, 0.2)]
    missed, found = (camkit.explain(net, picture, target=target, **options) for target in at)

    assert missed.missed is not None
    assert found.missed is None
    assert missed.score == found.score
    assert missed.quantity == found.quantity == "mean logit of this box and those around it"
    assert np.array_equal(missed.raw, found.raw)


def test_all_candidates_match_only_a_box_that_is_not_found():
    found = {"boxes": torch.tensor([[0.0, 0, 10, 10]]), "scores": torch.tensor([0.6]), "labels": torch.tensor([0])}
    others = torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 8]])
    output = [
        found | {"all_boxes": others, "all_scores": torch.tensor([[0.6], [0.9]]), "all_logits": torch.zeros(2, 1)}
    ]
    scored = targets.box(0)(output, 1)

    assert fixed_target(targets.box(0), scored)(output, 1).values.tolist() == pytest.approx([0.6])
    missed = fixed_target(targets.box_at(5, 5), replace(scored, missed=("not found",)))
    assert missed(output, 1).values.tolist() == pytest.approx([0.9 * 0.8])


@exported
@pytest.mark.extended
@pytest.mark.parametrize("library", ["rfdetr", "libreyolo"])
def test_the_example_for_a_library_runs(library, monkeypatch):
    pytest.importorskip(library)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    module, prepare = importlib.import_module(f"detector_{library}").build(None)
    options = {"output": "predictions", "boxes": "yolo"} if library == "libreyolo" else {}

    row = camkit.explain(module.eval(), PLANE, target=targets.box_at(190, 190), preprocess=prepare, **options)

    assert row.missed.startswith("not found: class ")
    assert row.status == "ok"
