"""Files of ultralytics: read without running code, prepared and decoded as the package does.

The package is not a dependency. CI installs it for these tests. Elsewhere, only those of the refusals run, and those of
turned boxes and masks against slow references.
"""

from __future__ import annotations

import copy
import importlib
import math
import sys
import zipfile
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from PIL import Image
from tiers import represented_by
from torch import Tensor, nn
from torchvision.ops import box_convert, box_iou

import camkit
from camkit import targets
from camkit.cli import main
from camkit.errors import ModelError
from camkit.models import load_model
from camkit.models.from_ultralytics import mask_logits, overlaps, upright, without_duplicates

PLANE = camkit.scenes.scene_paths()["plane-sky"]
BOXES = [
    "yolov8n", "yolov8n-seg", "yolov8n-pose", "yolov9t", "yolov9c-seg", "yolov10n", "yolo11n", "yolo11n-seg",
    "yolo11n-pose", "yolo12n", "yolo12n-seg", "yolo12n-pose", "yolo26n", "yolo26n-seg", "yolo26n-pose",
]  # fmt: skip
IN_SHORT = ["yolo11n", "yolo11n-seg", "yolo11n-pose", "yolo26n", "yolov8n", "yolov10n"]
VERSIONS = ["yolov8n", "yolo11n", "yolo12n", "yolo26n"]
"""Those with networks for turned boxes and classes."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the file of a random network; each is saved once."""
    ultralytics, folder = pytest.importorskip("ultralytics"), tmp_path_factory.mktemp("files")

    def file_of(name: str) -> Path:
        file = folder / f"{name}.pt"
        if not file.exists():
            torch.manual_seed(0)
            made = ultralytics.YOLO(f"{name}.yaml")
            slope = 0.6 if name.startswith("yolo12") else 0.3  # its blocks add up: with 0.3, all scores are 0 or 1
            for parameter in made.model.parameters():
                if parameter.dim() > 1 and parameter.requires_grad:  # not the fixed steps of a box's sides
                    nn.init.kaiming_normal_(parameter, slope)
            made.save(file)
        return file

    return file_of


def test_an_object_of_the_package_says_to_pass_its_file():
    ultralytics = pytest.importorskip("ultralytics")
    for target in (None, targets.box(0)):
        with pytest.raises(ModelError, match=r"a YOLO object of ultralytics .* pass its file"):
            camkit.explain(ultralytics.YOLO("yolo11n.yaml"), PLANE, target=target)


@pytest.mark.parametrize("name", represented_by(*IN_SHORT, among=BOXES))
def test_boxes_are_those_that_the_package_finds(saved, name):
    augment = importlib.import_module("ultralytics.data.augment")
    package = importlib.import_module("ultralytics.utils.nms")
    picture = Image.open(PLANE).convert("RGB").resize((301, 170))
    loaded = load_model(str(saved(name)), size=160, device="cpu")

    row = camkit.explain(loaded, picture, "model.model.4", target=targets.box(0), method="hirescam")

    blue_first = cv2.cvtColor(np.asarray(picture), cv2.COLOR_RGB2BGR)
    boxed = augment.LetterBox((160, 160), auto=True, stride=32)(image=blue_first)[..., ::-1]
    prepared = torch.from_numpy(boxed.transpose(2, 0, 1).copy()).float()[None] / 255
    assert torch.equal(loaded.preprocess(picture), prepared[0])
    model: Any = loaded.module.model
    with torch.no_grad():
        found = model(prepared)[0]
        found = found[0] if isinstance(found, tuple) else found
        (expected,) = package.non_max_suppression(found, conf_thres=1e-4, iou_thres=0.7, nc=len(loaded.labels))
        (own,) = loaded.module(prepared)
    count = min(len(expected), len(own["scores"]))
    assert count > 1
    assert torch.allclose(own["boxes"][:count], expected[:count, :4], atol=1e-3)
    assert torch.allclose(own["scores"][:count], expected[:count, 4], atol=1e-6)
    assert own["labels"][:count].tolist() == expected[:count, 5].int().tolist()
    corners = expected[0, :4] - torch.tensor([0, 3, 0, 3])  # 90 rows of the picture in 96
    assert np.abs(np.array(row.detection) - (corners * 301 / 160).numpy()).max() < 3

    kept: list[Tensor] = []
    exact = copy.deepcopy(model).double()  # in float32, PyTorch's own gradients of YOLOv9 differ by 1.7 % (torch 2.14)
    exact.model[4].register_forward_hook(lambda *args: kept.append(args[2]) or args[2].clone())
    exact.requires_grad_(requires_grad=True)
    # Two pictures: with one, PyTorch's CPU gradients of batch norms before tokens are wrong (torch 2.14).
    decoded, raw = exact(prepared.double().expand(2, -1, -1, -1))[:2]
    decoded = decoded[0] if isinstance(decoded, tuple) else decoded
    logits = raw.get("one2many", raw)["scores"][0]
    label, best = divmod(int(logits.argmax()), logits.shape[1])
    cells = box_convert(decoded[0, :4].T.detach(), "cxcywh", "xyxy")
    alike = logits[label].detach().sigmoid() * (box_iou(cells[best : best + 1], cells)[0] >= 0.5)
    explained = (logits[label] * alike).sum() / alike.sum()
    (gradient,) = torch.autograd.grad(explained, kept[0])
    reference = (kept[0] * gradient).sum(1)[0].detach().numpy()
    assert row.score == pytest.approx(float(explained.detach()), abs=1e-4)
    assert np.allclose(row.raw, reference, atol=1e-4 * np.abs(reference).max())


@pytest.mark.extended
@pytest.mark.parametrize("name", [*BOXES, *(f"{version}-obb" for version in VERSIONS)])
def test_a_shell_loads_a_file_of_each_version_and_task(saved, tmp_path, name):
    options = ["--device", "cpu", "--size", "160", "--box", "0", "-o", str(tmp_path / "a.png")]

    assert main([str(PLANE), "--model", str(saved(name)), *options]) == 0

    assert (tmp_path / "a.png").is_file()


@pytest.mark.parametrize("size", [(160, 160), (256, 96)])
def test_the_inputs_of_the_head_are_found(saved, size):
    loaded = load_model(str(saved("yolo11n")), size=max(size), device="cpu")

    row = camkit.explain(loaded, Image.open(PLANE).convert("RGB").resize(size), target=targets.box(0))

    assert row.method == "layercam-centred"
    assert row.layer == "model.model.16+model.model.19+model.model.22"


def test_the_branch_that_passes_gradients_is_explained(saved, tmp_path):
    held = torch.load(saved("yolo26n"), weights_only=False)
    held["model"].model[-1].end2end = True
    torch.save(held, tmp_path / "last.pt")

    loaded = load_model(str(tmp_path / "last.pt"), size=160, device="cpu")

    assert "passes no gradients back" in str(loaded.note)
    assert camkit.explain(loaded, PLANE, target=targets.box(0)).status == "ok"


def test_rt_detr_is_refused_with_what_to_pass_instead(saved, tmp_path):
    held = torch.load(saved("yolo11n"), weights_only=False)
    held["model"].model[-1] = importlib.import_module("ultralytics.nn.modules.head").RTDETRDecoder(hd=32, ndl=1)
    torch.save(held, tmp_path / "rtdetr.pt")

    with pytest.raises(ModelError, match=r"holds ultralytics' RT-DETR, .* such as hf:"):
        load_model(str(tmp_path / "rtdetr.pt"))


@pytest.mark.parametrize("version", represented_by("yolo11n", among=VERSIONS))
def test_a_classifier_is_prepared_as_the_package_does_in_a_shell(saved, tmp_path, version):
    augment = importlib.import_module("ultralytics.data.augment")
    picture = Image.open(PLANE).convert("RGB").resize((301, 170))
    loaded = load_model(str(saved(f"{version}-cls")), size=224, device="cpu")

    assert torch.equal(loaded.preprocess(picture), augment.classify_transforms(224)(picture))
    logits = loaded.module.model(loaded.preprocess(picture)[None])[1][0]
    row = camkit.explain(loaded, picture)
    assert row.target == int(logits.argmax())
    assert row.probability == pytest.approx(float(logits.softmax(0).max().detach()), rel=1e-4)
    assert main([str(PLANE), "--model", str(saved(f"{version}-cls")), "--device", "cpu", "--out", str(tmp_path)]) == 0


@pytest.mark.parametrize("version", represented_by("yolo11n", among=VERSIONS))
def test_turned_boxes_are_those_that_the_package_finds(saved, version):
    package = importlib.import_module("ultralytics.utils.nms")
    corners_of = importlib.import_module("ultralytics.utils.ops").xywhr2xyxyxyxy
    loaded = load_model(str(saved(f"{version}-obb")), size=160, device="cpu")
    prepared = loaded.preprocess(Image.open(PLANE))[None]

    with torch.no_grad():
        (own,) = loaded.module(prepared)
        found = loaded.module.model(prepared)[0]
        (turned,) = package.non_max_suppression(found, conf_thres=1e-4, iou_thres=0.7, nc=80, rotated=True)
    row = camkit.explain(loaded, PLANE, target=targets.box(0))

    corners = corners_of(turned[:, [0, 1, 2, 3, 6]])
    expected = torch.cat([corners.amin(1), corners.amax(1)], 1)
    count = min(len(expected), len(own["scores"]))
    assert count > 1
    assert torch.allclose(own["boxes"][:count], expected[:count], atol=1e-3)
    assert torch.allclose(own["scores"][:count], turned[:count, 4], atol=1e-6)
    assert own["labels"][:count].tolist() == turned[:count, 5].int().tolist()
    assert "upright ones around" in str(loaded.note)
    assert row.status == "ok"


def test_the_logit_of_a_mask_is_its_mean_where_the_package_draws_the_mask(saved):
    ops = importlib.import_module("ultralytics.utils.ops")
    loaded = load_model(str(saved("yolo11n-seg")), size=160, device="cpu")
    prepared = loaded.preprocess(Image.open(PLANE))[None]

    with torch.no_grad():
        (own,) = loaded.module(prepared)
        (found, prototypes), _ = loaded.module.model(prepared)
    middles, sides = found[0, :4].T.split(2, 1)
    corners = torch.cat([middles - sides / 2, middles + sides / 2], 1)
    anchors = (corners - own["boxes"][:, None]).abs().amax(2).argmin(1)
    weights = found[0, 84:, anchors].T
    drawn = ops.process_mask(prototypes[0], weights, corners[anchors], prepared.shape[2:]).bool()
    logits = torch.einsum("km,mhw->khw", weights, prototypes[0])
    numbers = torch.nonzero(drawn.any(-1).any(-1)).flatten()[:2].tolist()
    assert len(numbers) == 2

    for number in numbers:
        mask = targets.box(number, part="mask")
        row = camkit.explain(loaded, PLANE, "model.model.4", target=mask, method="hirescam")
        assert row.score == pytest.approx(float(logits[number][drawn[number]].mean()), abs=1e-4)
        assert row.status == "ok"


TEXT = b"X\x01\x00\x00\x00x"
SILU = b"ctorch.nn.modules.activation\nSiLU\n)\x81"


def key(text: str) -> bytes:
    """Return the pickled text."""
    return b"X" + len(text).to_bytes(4, "little") + text.encode()


def pickled(file: Path, network: bytes) -> None:
    """Write a file of a network, pickled by hand."""
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("yolo/data.pkl", b"\x80\x02}" + key("model") + network + b"s" + key("ultralytics") + b"Ns.")
        archive.writestr("yolo/version", b"3\n")
        archive.writestr("yolo/byteorder", b"little")


@pytest.mark.parametrize(
    "name",
    [
        *("posix.system", "builtins.eval", "torch.load", "torch.fx.graph_module.reduce_graph_module"),
        *(
            "torch.nn.modules.module.warnings",
            "ultralytics.nn.autobackend.AutoBackend",
            "ultralytics.nn.text_model.CLIP",
        ),
    ],
)
def test_a_file_that_needs_other_code_is_not_read(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    code = "touch ran" if name.endswith("system") else "__import__('os').system('touch ran')"
    module, _, kind = name.rpartition(".")
    pickled(tmp_path / "bad.pt", f"c{module}\n{kind}\n".encode() + key(code) + b"\x85R")

    with pytest.raises(ModelError, match=rf"holds {name}, which is not a module.*pass trust_remote_code=True"):
        load_model(str(tmp_path / "bad.pt"))

    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("network", "said"),
    [
        (SILU[:-2] + b")R", r"holds a call of torch\.nn\.modules\.activation\.SiLU"),
        (SILU + TEXT + b"\x85R", "holds a call of .*SiLU object"),
        (b"cpathlib\nPosixPath\nN}" + TEXT + TEXT + b"s\x86b", "does not hold an ultralytics network"),
        (SILU + b"N}" + TEXT + TEXT + b"s\x86b", "cannot be read"),
        (SILU + b"}" + key("forward") + SILU + b"sb", "SiLU with its own forward"),
        (SILU + b"q\x00" + SILU + b"}" + key("forward") + b"h\x00sb\x86", "SiLU with its own forward"),
        (SILU + b"}" + key("_forward_hooks") + b"}q\x00K\x00" + SILU + b"ssb", "SiLU with its own _forward_hooks"),
        (SILU + b"}" + key("_forward_hooks") + b"}q\x00sbh\x00K\x00" + SILU + b"s\x86", "SiLU with its own _for"),
        (b"ctorch.nn.modules.container\nModuleDict\n)\x81" + TEXT + SILU + b"s", "cannot be read"),
        (b"ctorch.nn.modules.container\nModuleList\n)\x81" + SILU + b"a", "cannot be read"),
        (b"ctorch.nn.modules.container\nParameterDict\n)\x81", "holds .*ParameterDict, which is not"),
    ],
    ids=["class", "call", "slots", "state", "forward", "earlier", "hook", "later-hook", "item", "append", "attributes"],
)
def test_nothing_in_a_file_is_called_and_no_method_is_replaced(tmp_path, network, said):
    pickled(tmp_path / "bad.pt", network)

    with pytest.raises(ModelError, match=said):
        load_model(str(tmp_path / "bad.pt"))

    assert not hasattr(PurePosixPath, "x")


def test_numbers_of_numpy_and_dates_are_read(saved, tmp_path):
    held = torch.load(saved("yolo11n"), weights_only=False)
    held |= {"train_metrics": {"fitness": np.float64(0.5), "epoch": np.int64(3)}, "date": datetime(2026, 1, 1)}
    torch.save(held, tmp_path / "last.pt")

    loaded = load_model(str(tmp_path / "last.pt"), size=160, device="cpu")

    expected = held["model"].float().state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.module.model.state_dict().items())


def test_a_missing_package_is_one_sentence(tmp_path, monkeypatch):
    pickled(tmp_path / "yolo.pt", b"cultralytics.nn.tasks\nDetectionModel\n)\x81")
    for name in ["ultralytics", *(name for name in sys.modules if name.startswith("ultralytics."))]:
        monkeypatch.setitem(sys.modules, name, None)

    with pytest.raises(ModelError, match=r"which is not installed: pip install ultralytics"):
        load_model(str(tmp_path / "yolo.pt"))


# --- turned boxes and masks, without the package

Row = tuple[float, float, float, float, float]
TURNED: list[Row] = [
    (50, 40, 30, 10, 0.3),
    (52, 41, 10, 30, 0.3 + math.pi / 2),
    (50, 40, 28, 11, 0.4),
    (90, 20, 12, 12, 1),
]


def corners(box: Row) -> np.ndarray:
    x, y, width, height, angle = box
    turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    sides = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]]) * (width / 2, height / 2)
    return sides @ turn.T + (x, y)


def covariance(box: Row) -> np.ndarray:
    """That of points spread evenly over the box."""
    points = corners(box)
    sides = (points[1] - points[0], points[3] - points[0])
    return sum(np.outer(side, side) for side in sides) / 12


def alike(first: Row, second: Row) -> float:
    one, two = covariance(first), covariance(second)
    middle, apart = (one + two) / 2, np.subtract(first[:2], second[:2])
    affinity = (np.linalg.det(one) * np.linalg.det(two)) ** 0.25 / math.sqrt(np.linalg.det(middle))
    affinity *= math.exp(-apart @ np.linalg.solve(middle, apart) / 8)
    return 1 - math.sqrt(max(1 - affinity, 0))


def test_upright_boxes_hold_the_corners_of_turned_ones() -> None:
    expected = [[*corners(box).min(0), *corners(box).max(0)] for box in TURNED]
    assert torch.allclose(upright(torch.tensor(TURNED)), torch.tensor(expected, dtype=torch.float32), atol=1e-4)


def test_overlaps_are_those_of_gaussians() -> None:
    found = overlaps(torch.tensor(TURNED))
    expected = [[alike(first, second) for second in TURNED] for first in TURNED]
    assert torch.allclose(found, torch.tensor(expected, dtype=torch.float32), atol=1e-3)
    assert 0.7 < float(found[0, 1]) < 0.95


def test_of_boxes_that_overlap_the_best_of_each_class_stays() -> None:
    scores, turned = torch.tensor([0.2, 0.9, 0.5, 0.1]), torch.tensor(TURNED)
    assert without_duplicates(turned, scores, torch.tensor([0, 0, 0, 0]), 0.6).tolist() == [1, 3]
    assert without_duplicates(turned, scores, torch.tensor([0, 1, 0, 0]), 0.6).tolist() == [1, 2, 3]
    assert without_duplicates(turned, scores, torch.tensor([0, 0, 0, 0]), 0.99).tolist() == [1, 2, 0, 3]


def test_the_logit_of_a_mask_is_the_mean_over_its_own_cells() -> None:
    weights, prototypes = torch.randn(3, 4, requires_grad=True), torch.randn(4, 6, 9)
    boxes = torch.tensor([[1.5, 0.0, 7.2, 5.0], [3.0, 2.0, 3.2, 2.2], [0.0, 0.0, 9.0, 6.0]])
    found = mask_logits(weights, prototypes, boxes)
    for number, (left, top, right, bottom) in enumerate(boxes.tolist()):
        cells = [
            float(weights[number].detach() @ prototypes[:, row, column])
            for row in range(6)
            for column in range(9)
            if top <= row < bottom and left <= column < right
        ]
        own = [cell for cell in cells if cell > 0]
        assert math.isclose(float(found[number].detach()), sum(own) / max(len(own), 1), abs_tol=1e-5)
    assert found.requires_grad
