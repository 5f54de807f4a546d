"""Datasets in memory: the same pictures, labels and regions as a folder give the same check."""

from __future__ import annotations

import io
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ChainDataset, ConcatDataset, DataLoader, Subset, TensorDataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import Compose, Normalize, Resize, ToTensor
from torchvision.tv_tensors import BoundingBoxes

import camkit
from camkit.background.check import finish_check, plan_check
from camkit.background.regions import object_region
from camkit.errors import InputError

NAMES = ["bird", "car", "plane", "ship"]
PER_CLASS = 10
CONFIG = {"limits": {"least_pictures": 8}, "check": {"pastes": 1, "batch_size": 8}}
MODEL = camkit.load_model("demo-biased")


class Scenes:
    """Drawn scenes: ``row`` makes a row of the image, the number of the class and the mask."""

    classes = NAMES

    def __init__(self, row: Callable[..., Any] = lambda *row: row) -> None:
        folder = camkit.scenes.labelled_scenes()
        self.files = [file for name in NAMES for file in sorted((folder / name).iterdir())[:PER_CLASS]]
        self.row = row

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> Any:
        file = self.files[number]
        mask = next((file.parents[2] / "masks" / file.parent.name).glob(f"{file.stem}.*"))
        region = np.asarray(Image.open(mask).convert("L")) > 0
        return self.row(Image.open(file).convert("RGB"), NAMES.index(file.parent.name), region)


def corners(mask: np.ndarray) -> list[float]:
    down, across = np.nonzero(mask)
    return [int(across.min()), int(down.min()), int(across.max()) + 1, int(down.max()) + 1]


def corner_and_size(mask: np.ndarray) -> list[float]:
    return [*cv2.boundingRect(mask.astype(np.uint8))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the same pictures as PNG files, which are named like the rows, their masks and boxes."""
    root = tmp_path_factory.mktemp("scenes")
    lines = ["path,label,xmin,ymin,xmax,ymax"]
    (root / "masks").mkdir()
    for number, (image, label, mask) in enumerate(map(Scenes().__getitem__, range(len(Scenes())))):
        image.save(root / str(number), "PNG")
        Image.fromarray(mask).save(root / "masks" / f"{number}.png")
        lines.append(",".join(map(str, (number, NAMES[label], *corners(mask)))))
    (root / "pictures.csv").write_text("\n".join(lines))
    return root


def planned(data: Any, model: Any = MODEL, **options: Any) -> Any:
    return plan_check(model, data, **{"config": CONFIG, **options})


def assert_same_data(data: Any, folder: Path, regions: str = "masks") -> None:
    on_disk = planned(folder / "pictures.csv", regions=folder / regions)
    for own, item in zip(planned(data).data.items, on_disk.data.items, strict=True):
        assert (own.name, own.label) == (item.name, item.label)
        regions_of_both = [object_region(each.objects, each.open().size) for each in (own, item)]
        assert np.array_equal(own.open(), item.open()) and np.array_equal(*regions_of_both)


def as_tensor(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def bounding_box(sides: list[float], kind: str) -> BoundingBoxes:
    return BoundingBoxes([sides], format=kind, canvas_size=(128, 128))  # type: ignore[call-overload]


def target(label: int, mask: np.ndarray, *keys: str) -> dict[str, Any]:
    boxes, masks = torch.tensor([corners(mask)]).float(), torch.from_numpy(mask[None].astype(np.uint8))
    return {"labels": torch.tensor([label]), **{key: {"boxes": boxes, "masks": masks}[key] for key in keys}}


MASKS = {
    "PIL and bool": lambda image, label, mask: (image, label, mask),
    "HWC and 0 to 255": lambda image, label, mask: (np.array(image), NAMES[label], mask * np.uint8(255)),
    "CHW and a channel": lambda image, label, mask: (as_tensor(image), torch.tensor(label), torch.tensor(mask)[None]),
    "0..1 and PIL": lambda image, label, mask: (as_tensor(image) / 255, np.int64(label), Image.fromarray(mask)),
    "two targets": lambda image, label, mask: (image, (label, mask * 7)),
    "torchvision": lambda image, label, mask: (image, target(label, mask, "boxes", "masks")),
    "a dictionary": lambda image, label, mask: {"Img": image, "category": label, "mask": mask.astype(float)},
}
BOXES = {
    "corners": lambda image, label, mask: (image, label, corners(mask)),
    "shares": lambda image, label, mask: (image, label, np.array(corners(mask)) / 128),
    "XYWH": lambda image, label, mask: (image, label, bounding_box(corner_and_size(mask), "XYWH")),
    "COCO and XYXY": lambda image, label, mask: {
        "img": image,
        "objects": {"bbox": bounding_box(corners(mask), "XYXY"), "category": [label]},
    },
    "torchvision": lambda image, label, mask: (image, target(label, mask, "boxes")),
    "COCO": lambda image, label, mask: {"img": image, "objects": [{"bbox": corner_and_size(mask), "category": label}]},
}


@pytest.mark.parametrize("form", MASKS)
def test_masks_are_those_of_the_folder(form: str, folder: Path) -> None:
    assert_same_data(DataLoader(Scenes(MASKS[form]), shuffle=True), folder)


@pytest.mark.parametrize("form", BOXES)
def test_boxes_are_those_of_the_folder(form: str, folder: Path) -> None:
    assert_same_data(Scenes(BOXES[form]), folder, "pictures.csv")


@pytest.mark.extended
def test_a_table_of_hugging_face(folder: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="needs camkit[extended]")
    image, kind, number = datasets.Image(), datasets.ClassLabel(names=NAMES), datasets.Value("int64")
    rows = list(map(Scenes().__getitem__, range(len(Scenes()))))
    images, labels, masks = map(list, zip(*rows, strict=True))
    columns = {"image": images, "label": labels, "mask": list(map(Image.fromarray, masks)), "patient": labels}
    features = datasets.Features({"image": image, "label": kind, "mask": image, "patient": number})
    table = datasets.Dataset.from_dict(columns, features)
    for data in (table, table.with_format("torch")):
        assert_same_data(data, folder)
    grouped = planned(table, config=CONFIG | {"data": {"group": "patient"}})
    assert {(item.group, item.label) for item in grouped.data.items} == {*zip("0123", NAMES, strict=True)}
    objects = [[{"bbox": corner_and_size(mask), "category": label}] for _, label, mask in rows]
    by_column = [{key: [each[key] for each in of_row] for key in of_row[0]} for of_row in objects]
    feature = {"bbox": datasets.List(number), "category": kind}
    of_columns = {"bbox": datasets.List(feature["bbox"]), "category": datasets.List(kind)}
    for values, kinds in ((objects, datasets.List(feature)), (by_column, of_columns)):
        features = datasets.Features({"image": image, "objects": kinds})
        table = datasets.Dataset.from_dict({"image": images, "objects": values}, features)
        assert_same_data(table, folder, "pictures.csv")
    with pytest.raises(InputError, match="DatasetDict has no numbered rows"):
        planned(datasets.DatasetDict({"test": table}))


def test_the_check_is_that_of_the_folder(folder: Path) -> None:
    def report(data: Any, **options: Any) -> dict[str, Any]:
        found = camkit.check(MODEL, data, config=CONFIG, **options).to_dict()
        images = [{name: value for name, value in row.items() if name != "sha256"} for row in found["images"]]
        return {**found, "images": images} | dict.fromkeys(("hashes", "data", "checksum"))

    in_memory = report(Scenes())
    assert in_memory == report(folder / "pictures.csv", regions=folder / "masks")
    assert (in_memory["verdict"], len(in_memory["images"])) == ("FAIL", 4 * PER_CLASS)


def test_normalised_rows_are_the_input_of_the_model() -> None:
    """The usual call: a plain network, and the loader of a validation set without regions."""
    transform = Compose([Resize((96, 96)), ToTensor(), Normalize((0.45, 0.47, 0.47), (0.25, 0.2, 0.3))])
    few = Subset(ImageFolder(camkit.scenes.labelled_scenes(), transform), range(0, 160, 8))
    levels = torch.rand(9, 1, 16, 16)
    levels[:, :, 0, :2] = torch.tensor([0.0, 1])
    plain, grey = (TensorDataset(images, torch.arange(9) % 2) for images in (levels, levels * 4 - 2))
    network = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.Flatten(), torch.nn.Linear(784, 2)).eval()
    result = camkit.check(MODEL.module, DataLoader(ConcatDataset([few]), batch_size=4), config=CONFIG)
    assert (result.verdict, result.plan.model.labels) == ("INCONCLUSIVE", tuple(NAMES))
    known = planned(grey, network, preprocess=Compose([ToTensor(), Normalize(0.5, 0.25)]))
    for rows, plan, most in ((few, result.plan, 1e-5), (plain, planned(plain, network), 2e-3), (grey, known, 8e-3)):
        for item, (image, _) in zip(plan.data.items, rows, strict=True):
            torch.testing.assert_close(plan.preprocess(item.open()), image, rtol=0, atol=most)


def test_the_rows_say_groups_and_places_and_may_have_no_label() -> None:
    def row(image: Image.Image, label: int, mask: np.ndarray) -> dict[str, Any]:
        return {"image": image, "label": label or -1, "mask": mask if label else None, "group": label, "place": "sea"}

    data = planned(Scenes(row), class_map={"car": None, "plane": 0, "ship": 1}).data
    assert {(item.label, item.group, item.place) for item in data.items} == {(NAMES[n], str(n), "sea") for n in (2, 3)}
    assert list(map(len, data.left_out.values())) == [PER_CLASS] * 2, "without a label, and left out by the class map"


def test_the_largest_object_that_is_no_crowd_is_the_class() -> None:
    def row(image: Image.Image, label: int, mask: np.ndarray) -> dict[str, Any]:
        boxes = [([0, 0, 9, 9], 1, 0), ([20, 20, 40, 40], 0, 0), ([0, 0, 128, 128], 2, 1)]
        keys = ("bbox", "category", "iscrowd")
        objects = [dict(zip(keys, (box, (label + ahead) % 4, crowd), strict=True)) for box, ahead, crowd in boxes]
        return {"image": image, "objects": objects}

    assert [item.label for item in planned(Scenes(row)).data.items] == list(np.repeat(NAMES, PER_CLASS))


class OneAtATime(Scenes):
    """Scenes that refuse to be read in two threads at once, as one open file does."""

    reading = threading.Lock()

    def __getitem__(self, number: int) -> Any:
        assert self.reading.acquire(blocking=False), "another thread reads"
        time.sleep(0.01)
        self.reading.release()
        return super().__getitem__(number)


def test_threads_read_one_row_at_a_time() -> None:
    items = planned(OneAtATime()).data.items[:8]
    with ThreadPoolExecutor(4) as threads:
        assert len(list(threads.map(lambda item: item.open(), items))) == 8


class Failing(Scenes):
    """Scenes of which one row cannot be read, the picture of one is cut off, and one can be read only for a while."""

    is_over = False

    def __getitem__(self, number: int) -> Any:
        if number == 3 or (number == 9 and self.is_over):
            raise OSError("the share is gone")
        image, *rest = super().__getitem__(number)
        file = io.BytesIO()
        image.save(file, "PNG")
        return Image.open(io.BytesIO(file.getvalue()[: -500 if number == 4 else None])), *rest


def test_rows_that_cannot_be_read_are_left_out() -> None:
    data = Failing()
    plan = planned(data)
    assert (plan.data.left_out, len(plan.data.items)) == ({"rows that cannot be read": ("3", "4")}, 38)
    data.is_over = True
    assert finish_check(plan).failures == {"9": "row 9 of the data cannot be read: the share is gone"}


def flipped(image: Image.Image, label: int, mask: np.ndarray) -> Any:
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if random.random() < 0.5 else image, label


REFUSALS = [
    (
        Scenes(lambda *row: (*row[:2], bounding_box([50.0, 50, 20, 30, 45], "XYWHR"))),
        "the boxes have no corners: .*; pass them as XYXY|XYWHR",  # an older torchvision lacks the format
    ),
    (DataLoader(ChainDataset([])), "ChainDataset has no numbered rows; pass a folder, or a dataset with a length"),
    ([torch.zeros(3, 4, 4)], r"row 0 of the data is tensor.*; a row must be \(image, label\)"),
    ([{"pixels": 3, "label": 1}], "row 0 of the data is {'pixels': 3, 'label': 1}; a row must be"),
    (Scenes(lambda *row: (row[0], torch.zeros(4))), "its only class, must be a whole number, not tensor"),
    (Scenes(lambda *row: (row[0], row[1] + 1)), "the data has the label 4, but only 4 classes have names"),
    (Scenes(lambda *row: (*row[:2], row[2][:, :99])), "an outline is for 99x128 pixels, but the picture has 128x128"),
    (Scenes(lambda *_: 1 / 0), "row 0 of the data cannot be read: division by zero"),
    (Scenes(flipped), "the dataset changes its pictures at random; pass it without augmentation"),
    (Scenes(lambda *row: (as_tensor(row[0]) - 127.5, row[1])), r"normalised \(from -128 to 128\) in an unknown way"),
]


@pytest.mark.parametrize(("data", "said"), REFUSALS)
def test_refusals(data: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        camkit.check(MODEL, data, config=CONFIG)


def test_mending_takes_a_dataset() -> None:
    mended = camkit.mend(MODEL, Scenes(), config={**CONFIG, "limits": {"least_pictures": 5}})
    assert mended.before.verdict == "FAIL"
    assert {*mended.mended_on} < {str(number) for number in range(40)}
