"""Pictures with their labels and regions, classes and the model's outputs, and the sample."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from refusals import refused

from camkit.background.data import Dataset, Item, match_classes, question_order, read_class_map, read_data
from camkit.background.plan import stratified
from camkit.errors import InputError

SIZE = (40, 30)
BOX = [1.0, 1.0, 5.0, 5.0]


def pictures(folder: Path, *names: str) -> Path:
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", SIZE, (number, len(name), 7)).save(folder / name)
    return folder


def mask(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    drawn = Image.new("L", SIZE)
    drawn.paste(255, (2, 2, 9, 9))
    drawn.save(file)


def coco(file: Path, boxes: dict[str, list[tuple[str, list[float]]]]) -> Path:
    """Write a COCO file. ``boxes`` has the category and the box of each object, by picture."""
    categories = sorted({category for rows in boxes.values() for category, _ in rows})
    table = {
        "images": [{"id": number, "file_name": name} for number, name in enumerate(boxes)],
        "categories": [{"id": number, "name": name} for number, name in enumerate(categories)],
        "annotations": [
            {"id": 0, "image_id": number, "category_id": categories.index(category), "bbox": box}
            for number, rows in enumerate(boxes.values())
            for category, box in rows
        ],
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(table))
    return file


def labels(data: Dataset) -> dict[str, str]:
    return {item.name: item.label for item in data.items}


def categories(data: Dataset) -> dict[str, list[str]]:
    return {item.name: [annotation.category for annotation in item.objects] for item in data.items}


# Pictures


def test_a_folder_per_class_ignores_empty_and_hidden_folders_and_reports(tmp_path: Path) -> None:
    pictures(tmp_path, "cat/a.jpg", "cat/deep/b.PNG", "dog/a.jpg", ".cache/c.jpg", "out/page/d.png")
    for name in ("fish", "labels"):
        (tmp_path / name).mkdir()
    (tmp_path / "cat" / "notes.txt").write_text("not a picture")
    dataset = read_data(tmp_path, skip=tmp_path / "out")
    assert labels(dataset) == {"cat/a.jpg": "cat", "cat/deep/b.PNG": "cat", "dog/a.jpg": "dog"}
    assert dataset.classes == ("cat", "dog")
    assert dataset.left_out["classes without pictures"] == ("fish",)
    assert dataset.left_out["folders that hold regions, judging by their names"] == ("labels",)
    assert dataset.facts[0] == "3 pictures of 2 classes (a folder per class)"
    assert dataset.facts[1].startswith("no regions (camkit reads")


def test_a_table_of_path_label_and_group(tmp_path: Path) -> None:
    pictures(tmp_path, "a.jpg", "b.jpg", "c.jpg", "d.jpg")
    rows = ["a.jpg, cat ,p1", "b.jpg,dog,", "gone.jpg,cat,p1", "c.jpg,cat,p2", "d.jpg,  ,p2", "..,dog,p3", ",cat,p4"]
    rows += [f"{'long' * 100}.jpg,cat,p5", "nul\0.jpg,cat,p6"]
    (tmp_path / "t.csv").write_text("\ufeffPath,Label,Patient\r\n" + "\r\n".join(rows), encoding="utf-8")
    for data in (tmp_path / "t.csv", tmp_path):
        dataset = read_data(data, group="patient")
        assert [(item.name, item.label, item.group) for item in dataset.items] == [
            ("a.jpg", "cat", "p1"),
            ("b.jpg", "dog", "b.jpg"),
            ("c.jpg", "cat", "p2"),
        ]
        assert len(dataset.left_out["files that do not exist"]) == 5
        assert dataset.left_out["pictures without a label"] == ("d.jpg",)


def test_a_table_may_have_columns_without_a_name_several_objects_and_several_classes(tmp_path: Path) -> None:
    pictures(tmp_path, "a.jpg", "b.jpg", "c.jpg")
    rows = ["a.jpg,cat", "a.jpg,dog", "a.jpg,cow", "b.jpg,dog", "b.jpg,dog", "c.jpg,cat"]
    (tmp_path / "t.csv").write_text("\n".join([",path,label", *(f"0,{row}" for row in rows)]))
    dataset = read_data(tmp_path / "t.csv")
    found = [(item.name, item.label, item.group, item.place) for item in dataset.items]
    assert found == [("b.jpg", "dog", "b.jpg", ""), ("c.jpg", "cat", "c.jpg", "")]
    assert dataset.left_out == {"pictures that the table lists with several classes": ("a.jpg",)}
    (tmp_path / "t.csv").write_text("path,label\na.jpg,cat\na.jpg,dog\n")
    with pytest.raises(InputError, match="lists every picture with several classes; give each picture one class"):
        read_data(tmp_path / "t.csv")
    lines = ["path,label,xmin,ymin,xmax,ymax", "a.jpg,cat,1,1,5,5", "a.jpg,cat,9,9,15,15", "b.jpg,dog,1,1,5,5"]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    assert categories(read_data(tmp_path / "t.csv")) == {"a.jpg": ["cat", "cat"], "b.jpg": ["dog"]}


def test_a_table_beside_class_folders_says_the_groups_and_places(tmp_path: Path) -> None:
    pictures(tmp_path, "cat/a.jpg", "dog/b.jpg")
    (tmp_path / "t.csv").write_text("label, path, patient, place\ncat, cat/a.jpg, p1, barn\ndog, dog/b.jpg, p2, lawn\n")
    for group, groups in (("patient", ["p1", "p2"]), (None, ["cat/a.jpg", "dog/b.jpg"])):
        dataset = read_data(tmp_path, group=group)
        assert [item.group for item in dataset.items] == groups
        assert [item.place for item in dataset.items] == ["barn", "lawn"]
    (tmp_path / "a.csv").write_text("path,label,x,y,width,height\ncat/a.jpg,tail,0,0,9,9\ncat/a.jpg,ear,0,0,9,9\n")
    assert [item.group for item in read_data(tmp_path, group="patient").items] == ["p1", "p2"], "a.csv has no groups"
    (tmp_path / "t.csv").write_text("path,label,group\nb.jpg,dog,p1\n")
    (tmp_path / "a.csv").unlink()
    dataset = read_data(tmp_path)
    assert labels(dataset) == {"cat/a.jpg": "cat", "dog/b.jpg": "dog"}, "folders name the classes"
    assert [item.group for item in dataset.items] == ["cat/a.jpg", "dog/b.jpg"]


LISTED = b"path,label\ncat/a.jpg,cat\n"
NO_DATA = [
    ("t.csv", b"", None, "must have the columns path and label; it has none"),
    ("t.csv", b"path,label\nm\xfcll.jpg,cat\n", None, "cannot be read"),
    ("t.csv", b"path,label\n", None, "holds no labelled pictures"),
    ("t.csv", b"x" * 90 + b",b" * 50, None, "it has x{40}, b, b, b, b, b, b, b and 43 more$"),
    ("t.csv", LISTED, "patient", "must have the columns path, label and patient; it has path, label$"),
    (".", LISTED, "patient", "must have the columns path, label and patient; it has path, label$"),
    (".", None, "patient", "the group 'patient' must be a column of a CSV"),
    ("gone", None, None, "gone does not exist; pass a folder"),
    ("empty", None, None, "holds no labelled pictures"),
    ("text", None, None, "holds no labelled pictures"),
    ("cat.jpg", None, None, r"cat\.jpg is a single picture, but the check needs many; pass a folder"),
]


@pytest.mark.parametrize(("where", "table", "group", "message"), NO_DATA)
def test_what_holds_no_labelled_pictures_is_refused(
    tmp_path: Path, where: str, table: bytes | None, group: str | None, message: str
) -> None:
    pictures(tmp_path, "cat/a.jpg", "cat.jpg")
    for name in ("empty", "text"):
        (tmp_path / name).mkdir()
    (tmp_path / "text" / "a.txt").write_text("words")
    if table is not None:
        (tmp_path / "t.csv").write_bytes(table)
    with refused(message, InputError):
        read_data(tmp_path / where, group=group)


# Labels from regions


def test_a_flat_folder_takes_the_class_of_the_largest_object(tmp_path: Path) -> None:
    pictures(tmp_path / "data", "a.jpg", "b.jpg", "c.jpg", "d.jpg", "out/a.jpg")
    boxes = {
        "a.jpg": [("cat", [0, 0, 9, 9]), ("dog", [0, 0, 10, 8]), ("cat", [20, 0, 9, 8])],
        "b.jpg": [("cat", [0, 0, 9, 9]), ("dog", [0, 0, 9, 10])],
        "c.jpg": [("tree", [0, 0, 30, 30]), ("dog", [0, 0, 5, 5])],
    }
    coco(tmp_path / "data" / "annotations" / "i.json", boxes)
    dataset = read_data(tmp_path / "data", class_map={"cat": [0], "dog": [1]}, skip=tmp_path / "data" / "out")
    assert labels(dataset) == {"a.jpg": "cat", "b.jpg": "dog", "c.jpg": "dog"}
    assert categories(dataset) == {"a.jpg": ["cat", "cat"], "b.jpg": ["dog"], "c.jpg": ["dog"]}
    assert [one.category for one in dataset.items[1].others] == ["cat"]
    assert dataset.left_out["pictures without an annotated class"] == ("d.jpg",)


def test_the_root_of_a_dataset_may_hold_pictures_beside_their_annotations(tmp_path: Path) -> None:
    pictures(tmp_path / "train2017", "a.jpg", "b.jpg")
    boxes = {"a.jpg": [("dog", [0, 0, 9, 9]), ("cat", BOX)], "b.jpg": [("cat", BOX)]}
    coco(tmp_path / "annotations" / "instances.json", boxes)
    dataset = read_data(tmp_path)
    assert labels(dataset) == {"train2017/a.jpg": "dog", "train2017/b.jpg": "cat"}
    assert categories(dataset) == {"train2017/a.jpg": ["dog"], "train2017/b.jpg": ["cat"]}


def test_outlines_without_boxes_count_by_the_area_they_cover(tmp_path: Path) -> None:
    pictures(tmp_path, "a.jpg")
    file = coco(tmp_path / "i.json", {"a.jpg": [("ant", [0, 0, 5, 5]), ("cat", [0, 0, 5, 5])]})
    table = json.loads(file.read_text())
    for row, side in zip(table["annotations"], (4, 20), strict=True):
        del row["bbox"]
        row["segmentation"] = [[0, 0, side, 0, side, side, 0, side]]
    file.write_text(json.dumps(table))
    assert labels(read_data(tmp_path)) == {"a.jpg": "cat"}


# Which region belongs to which picture


@pytest.mark.parametrize(
    "name",
    ["cat/a.jpg", "a.jpg", "JPEGImages/a.jpg", "cat\\a.jpg", "a", "cat/a", "a.png", "./cat/a.jpg"],
)
def test_a_picture_is_found_by_path_or_name_with_and_without_extension(tmp_path: Path, name: str) -> None:
    data = pictures(tmp_path / "data", "cat/a.jpg", "dog/b.jpg")
    file = coco(tmp_path / "i.json", {name: [("cat", BOX)]})
    dataset = read_data(data, regions=file)
    assert categories(dataset) == {"cat/a.jpg": ["cat"], "dog/b.jpg": []}
    assert dataset.left_out["pictures without a region of their class"] == ("dog/b.jpg",)


def test_an_object_belongs_to_one_picture(tmp_path: Path) -> None:
    data = pictures(tmp_path / "data", "cat/1.jpg", "dog/1.jpg", "cat/2.jpg", "dog/2.jpg", "dog/3.jpg")
    boxes = {
        "dog/1.jpg": [("object", BOX)],  # not of cat/1.jpg
        "2.jpg": [("object", BOX)],  # of cat/2.jpg or of dog/2.jpg
        **{f"{label}/3.jpg": [("object", BOX)] for label in ("cat", "bird")},
    }
    dataset = read_data(data, regions=coco(tmp_path / "i.json", boxes))
    assert {name for name, objects in categories(dataset).items() if objects} == {"dog/1.jpg"}


def test_the_folder_of_the_pictures_need_not_be_in_the_names_of_their_masks(tmp_path: Path) -> None:
    pictures(tmp_path, "images/cat/1.jpg", "images/dog/1.jpg", "images/dog/2.jpg")
    for name in ("cat/1", "dog/1"):
        mask(tmp_path / "masks" / f"{name}.png")
    table = tmp_path / "pictures.csv"
    table.write_text("path,label\nimages/cat/1.jpg,cat\nimages/dog/1.jpg,dog\nimages/dog/2.jpg,dog\n")
    assert [len(item.objects) for item in read_data(table).items] == [1, 1, 0]


def test_a_dot_in_a_name_does_not_begin_an_extension(tmp_path: Path) -> None:
    data = pictures(tmp_path / "data", "cat/frame.jpg", "cat/shot.v2.jpg", "dog/b.jpg")
    place = tmp_path / "boxes" / "labels"
    place.mkdir(parents=True)
    for name in ("frame.0001", "shot.v2", "b"):
        (place / f"{name}.txt").write_text("0 .5 .5 .5 .5")
    dataset = read_data(data, regions=place)
    assert categories(dataset) == {"cat/frame.jpg": [], "cat/shot.v2.jpg": ["0"], "dog/b.jpg": ["0"]}


def every(table: str, name: str, value: Any) -> Any:
    """Return what changes a value in each row of a table of COCO."""
    return lambda coco: [row.update({name: value(row)}) for row in coco[table]]


@pytest.mark.parametrize("folders", [("cat/", "dog/"), ("images/", "images/")], ids=["folder per class", "flat"])
@pytest.mark.parametrize(
    ("spoil", "cause"),
    [
        (every("annotations", "image_id", lambda row: str(row["image_id"])), "an id must be a number"),
        (lambda table: table.update(categories=[]), r"2 annotations of a category that is not listed"),
        (every("annotations", "bbox", lambda row: None), "2 annotations with neither box nor outline"),
        (lambda table: table.update(annotations=[]), "no objects"),
        (
            every("images", "file_name", lambda row: f"x{row['id']}.jpg"),
            r"2 pictures have names such as '.*a.jpg'.* names such as 'x0.jpg'",
        ),
        (None, r"the regions of YOLO in .* have no objects .*; 2 boxes in pixels"),
    ],
)
def test_why_no_region_can_be_used(tmp_path: Path, folders: tuple[str, str], spoil: Any, cause: str) -> None:
    pictures(tmp_path, *(f"{folder}{name}.jpg" for folder, name in zip(folders, "ab", strict=True)))
    if spoil is None:
        (tmp_path / "labels").mkdir()
        for name in "ab":
            (tmp_path / "labels" / f"{name}.txt").write_text("0 20 15 4 4\n")
    else:
        file = coco(tmp_path / "annotations" / "i.json", {"a.jpg": [("cat", BOX)], "b.jpg": [("dog", BOX)]})
        table = json.loads(file.read_text())
        spoil(table)
        file.write_text(json.dumps(table))
    with pytest.raises(InputError, match=cause):
        read_data(tmp_path)


def test_regions_of_other_classes_are_the_cause(tmp_path: Path) -> None:
    data = pictures(tmp_path / "data", "cat/a.jpg", "dog/b.jpg")
    file = coco(tmp_path / "i.json", {"a.jpg": [("dog", BOX), ("tree", BOX)], "b.jpg": [("cat", BOX)]})
    with pytest.raises(InputError, match=r"the classes 'cat', 'dog'; .* the categories 'cat', 'dog', 'tree'"):
        read_data(data, regions=file)
    assert len(read_data(data, regions=file, also={"cat": frozenset({"dog"}), "dog": frozenset({"cat"})}).items) == 2


def test_ambiguous_names_are_the_cause(tmp_path: Path) -> None:
    pictures(tmp_path, "cat/a.jpg", "dog/a.jpg")
    file = coco(tmp_path / "annotations" / "i.json", {"a.jpg": [("cat", BOX)]})
    with pytest.raises(InputError, match="the names of 2 pictures are ambiguous"):
        read_data(tmp_path)
    pictures(tmp_path, "cat/b.jpg")
    coco(file, {"a.jpg": [("cat", BOX)], "b.jpg": [("cat", BOX)]})
    left_out = read_data(tmp_path).left_out
    assert left_out["pictures whose region has an ambiguous name"] == ("cat/a.jpg", "dog/a.jpg")
    assert "pictures without a region of their class" not in left_out


def test_regions_that_name_no_classes_cannot_label_pictures(tmp_path: Path) -> None:
    pictures(tmp_path, "a.jpg", "b.jpg")
    (tmp_path / "boxes.csv").write_text("picture,xmin,ymin,xmax,ymax\na.jpg,1,1,5,5\nb.jpg,1,1,5,5\n")
    with pytest.raises(InputError, match=r"no picture gets a class from its regions: .* and no categories"):
        read_data(tmp_path)
    coco(tmp_path / "i.json", {"a.jpg": [("cat", BOX)]})
    with pytest.raises(InputError, match=r"the classes 'dog'; .* the categories 'cat'"):
        read_data(tmp_path, class_map={"dog": [0]})


def photograph(file: Path, seed: int, side: int = 60) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file)
    return file


@pytest.mark.parametrize(("ending", "side"), [("jpg", 60), ("png", 60), ("webp", 60), ("png", 28)])
@pytest.mark.parametrize("name", ["mask", "Mask", "masks", "labels"])
def test_a_folder_of_photographs_is_a_class_whatever_its_name(
    tmp_path: Path, name: str, ending: str, side: int
) -> None:
    for number, label in enumerate([name, "no_mask"] * 2):
        photograph(tmp_path / label / f"{number}.{ending}", number, side)
    Image.new("L", (side, side), 9).save(tmp_path / name / f"0a.{ending}")
    dataset = read_data(tmp_path)
    assert dataset.classes == tuple(sorted([name, "no_mask"]))
    assert dataset.facts[-1].startswith("no regions")


def with_masks(folder: Path, name: str) -> Path:
    """Write photographs of two classes and their masks; ``name`` is the pattern of a mask's path in the data folder."""
    for number, label in enumerate(["bird", "cat"] * 2):
        photograph(folder / label / f"{number}.jpg", number)
        mask(folder / name.format(label=label, stem=number))
    return folder


SUFFIXES = ("-GT", "_mask_1", "_segmentation", "_label", "_alpha", "_trimap", " (mask)")
FOLDERS = ("gt", "Ground_Truth", "groundtruth", "labels", "annotations", "SegmentationClass", "mask_images", "mattes")


@pytest.mark.parametrize(
    "name",
    [
        *(f"{{label}}/{{stem}}{suffix}.png" for suffix in SUFFIXES),
        *(f"{folder}/{{label}}/{{stem}}.png" for folder in FOLDERS),
        *("gt/{stem}.png", "gt/{label}/{stem}_gt.png", "{label}/gt/{stem}.png", "../gt/{label}/{stem}.png"),
    ],
)
def test_masks_with_usual_names_are_read_and_are_no_pictures(tmp_path: Path, name: str) -> None:
    data = read_data(with_masks(tmp_path / "data", name))
    assert labels(data) == {"bird/0.jpg": "bird", "bird/2.jpg": "bird", "cat/1.jpg": "cat", "cat/3.jpg": "cat"}
    assert all(len(item.objects) == 1 for item in data.items)


@pytest.mark.parametrize(
    "name", ["{label}/{stem}_manual1.png", "{label}/mask_{stem}.png", "other/{stem}.png", "{label}/other/{stem}.png"]
)
def test_masks_with_other_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="has only a few colours, like a mask, but is in the folder of a class; name"):
        read_data(with_masks(tmp_path, name))


def test_a_named_folder_of_masks_among_the_classes_is_no_class(tmp_path: Path) -> None:
    data = read_data(with_masks(tmp_path, "other/{stem}.png"), regions=tmp_path / "other")
    assert data.classes == ("bird", "cat")


def test_classes_of_drawings_are_pictures(tmp_path: Path) -> None:
    with_masks(tmp_path, "{label}/{stem}.png")
    for file in tmp_path.rglob("*.jpg"):
        file.unlink()
    assert len(read_data(tmp_path).items) == 4


def test_the_class_map_says_that_a_folder_is_a_class(tmp_path: Path) -> None:
    pictures(tmp_path, "mask/a.png", "none/b.png")  # pictures of a single colour might be masks
    assert read_data(tmp_path, class_map={"mask": [0], "none": [1]}).classes == ("mask", "none")
    assert read_data(tmp_path, regions=coco(tmp_path / "i.json", {"b.png": [("none", BOX)]})).classes == ("none",)


def test_objects_of_other_classes_and_of_allowed_categories(tmp_path: Path) -> None:
    data = pictures(tmp_path / "data", "Cat/a.jpg", "dog/b.jpg")
    boxes = [("cat", BOX), ("DOG", BOX), ("rider", BOX), ("tree", BOX)]
    file = coco(tmp_path / "i.json", {"a.jpg": boxes, "b.jpg": boxes})
    dataset = read_data(data, regions=file, also={"dog": frozenset({"rider"})})
    assert categories(dataset) == {"Cat/a.jpg": ["cat"], "dog/b.jpg": ["DOG", "rider"]}
    assert [[one.category for one in item.others] for item in dataset.items] == [["DOG"], ["cat"]]


def test_an_allowed_category_that_no_object_has_is_refused_with_the_nearest(tmp_path: Path) -> None:
    data = pictures(tmp_path / "data", "cat/a.jpg", "dog/b.jpg")
    file = coco(tmp_path / "i.json", {"a.jpg": [("cat", BOX)], "b.jpg": [("rider", BOX)]})
    with pytest.raises(InputError, match=r"'dog' to be recognised by 'ridr'.*did you mean 'rider'"):
        read_data(data, regions=file, also={"dog": frozenset({"ridr"})})


def test_crowds_are_removed_with_the_objects_but_are_not_objects(tmp_path: Path) -> None:
    pictures(tmp_path, "dog/a.png", "cat/b.png")
    boxes = {"dog/a.png": [("dog", [0, 0, 9, 9]), ("dog", [20, 0, 9, 9])], "cat/b.png": [("cat", BOX)]}
    file = coco(tmp_path / "instances.json", boxes)
    table = json.loads(file.read_text())
    table["annotations"][1]["iscrowd"] = 1
    file.write_text(json.dumps(table))
    dog = {item.name: item for item in read_data(tmp_path).items}["dog/a.png"]
    assert [tuple(one.box or ()) for one in dog.objects] == [(0, 0, 9, 9)]
    assert [tuple(one.box or ()) for one in dog.others] == [(20, 0, 29, 9)]


def test_every_format_is_found_without_being_named(tmp_path: Path) -> None:
    places = {
        "COCO": ("annotations/i.json", None),
        "Pascal VOC": ("Annotations/a.xml", "<annotation><object><name>cat</name><bndbox><xmin>2</xmin><ymin>2</ymin>"
        "<xmax>5</xmax><ymax>5</ymax></bndbox></object></annotation>"),
        "YOLO": ("labels/cat/a.txt", "0 .5 .5 .2 .2"),
        "CSV boxes": ("boxes.csv", "image,x1,y1,x2,y2\na.jpg,1,1,5,5\n"),
        "mask pictures": ("cat/a_mask.png", None),
    }  # fmt: skip
    for name, (place, content) in places.items():
        data = pictures(tmp_path / name, "cat/a.jpg", "dog/b.jpg")
        file = data / place
        file.parent.mkdir(parents=True, exist_ok=True)
        if content is not None:
            file.write_text(content)
        elif name == "COCO":
            coco(file, {"a.jpg": [("cat", BOX)]})
        else:
            mask(file)
        dataset = read_data(data)
        assert {item.name: len(item.objects) for item in dataset.items} == {"cat/a.jpg": 1, "dog/b.jpg": 0}
        assert any(fact.startswith(f"{name} in ") for fact in dataset.facts)


# Classes and outputs


IMAGENET = ["tench, Tinca tinca", "goldfish", "tabby, tabby cat", "crane", "traffic light, stoplight"]


def test_classes_are_matched_by_label_or_synonym_whatever_their_case_and_separators() -> None:
    names = ["Goldfish", "TRAFFIC_LIGHT", "tabby-cat", "Tinca tinca", "crane"]
    matched, _ = match_classes(names, IMAGENET, 5, None)
    assert dict(matched) == dict(zip(names, [(1,), (4,), (2,), (0,), (3,)], strict=True))
    assert dict(match_classes(["tabby, tabby cat"], IMAGENET, 5, None)[0]) == {"tabby, tabby cat": (2,)}


def test_a_complete_label_precedes_a_synonym_and_equal_labels_both_count() -> None:
    matched, how = match_classes(["crane", "maillot"], ["crane", "maillot, tank suit", "maillot", "crane"], 4, None)
    assert dict(matched) == {"crane": (0, 3), "maillot": (2,)}
    assert how == "by label; 'crane' has the outputs 0 and 3"


def test_classes_by_number_by_order_and_by_class_map() -> None:
    assert dict(match_classes(["0", "03", "2"], None, 4, None)[0]) == {"0": (0,), "03": (3,), "2": (2,)}
    folders = ["n02", "n01", "n10"]
    assert dict(match_classes(folders, None, 3, None)[0]) == {"n01": (0,), "n02": (1,), "n10": (2,)}
    ids = ["n01440764", "n01443537"]
    assert dict(match_classes(ids, ["tench", "goldfish"], 2, None)[0]) == {ids[0]: (0,), ids[1]: (1,)}
    table = {"fish": ["goldfish", 0, "Tench"], "cat": ["tabby"], "unused": [3]}
    matched, _ = match_classes(["cat", "fish"], IMAGENET, 5, table)
    assert dict(matched) == {"cat": (2,), "fish": (1, 0)}


@pytest.mark.parametrize(("name", "nearest"), [("GOLDFISCH", "goldfish"), ("stop light", "traffic light, stoplight")])
def test_an_unknown_class_is_refused_with_the_nearest_label(name: str, nearest: str) -> None:
    with pytest.raises(InputError, match=f"no label {name!r}; rename .*; did you mean {nearest!r}"):
        match_classes(["crane", name], IMAGENET, 5, None)
    with pytest.raises(InputError, match=f"class map: {name!r} for 'x' is not .*; did you mean {nearest!r}"):
        match_classes(["x"], IMAGENET, 5, {"x": [name]})


@pytest.mark.parametrize(
    ("classes", "labels_of", "outputs", "table", "message"),
    [
        (["a", "b"], None, 3, None, "the model has 3 unnamed outputs and the data has 2 classes"),
        (["a"], ["x", "y"], 2, {"a": [2]}, "2 for 'a' is not one of the model's 2 outputs"),
        (["a", "b"], None, 3, {"a": [0, 1], "b": [1]}, "output 1 of the model belongs to both 'a' and 'b'"),
        (["a", "b"], None, 3, {"a": [0]}, r"no entry for 'b' \(62 pictures\); map it to null to leave it out$"),
    ],
)
def test_classes_that_do_not_fit_are_refused_in_one_sentence(
    classes: list[str], labels_of: list[str] | None, outputs: int, table: Any, message: str
) -> None:
    with refused(message, InputError):
        match_classes(classes, labels_of, outputs, table, {"b": 62})


def test_a_class_map_is_a_mapping_or_a_file_without_its_comments(tmp_path: Path) -> None:
    assert read_class_map({"cat": np.int64(1), "dog": ("pug", 3), "_from": None}) == {"cat": [1], "dog": ["pug", 3]}
    file = tmp_path / "c.json"
    file.write_text('\ufeff{"_from": {"any": 1}, "cat": [1, "tabby"], "dog": "pug", "bird": 3}', encoding="utf-8")
    assert read_class_map(file) == {"cat": [1, "tabby"], "dog": ["pug"], "bird": [3]}
    for wrong in ([], True, [1.5], {"b": 1}):
        file.write_text(json.dumps({"a": wrong}))
        for source, named in (({"a": wrong}, "class_map"), (file, r"c\.json")):
            with pytest.raises(InputError, match=f"{named}: 'a' must have indices or labels"):
                read_class_map(source)
    for text in (b"", b"[]", b"3", b"{", b'{"\xff": 1}'):
        file.write_bytes(text)
        with pytest.raises(InputError, match=r"c\.json cannot be read"):
            read_class_map(file)


def test_null_in_a_class_map_leaves_the_pictures_of_a_class_out(tmp_path: Path) -> None:
    assert read_class_map({"cat": 1, "emu": None}) == {"cat": [1], "emu": None}
    pictures(tmp_path, *(f"{label}/{number}.png" for label in ("cat", "dog", "emu") for number in (1, 2)))
    found = read_data(tmp_path, class_map={"cat": [0], "dog": [1], "emu": None})
    assert found.classes == ("cat", "dog")
    assert found.facts[0].startswith("4 pictures of 2 classes")
    assert found.left_out == {"pictures of 'emu', which the class map leaves out (null)": ("emu/1.png", "emu/2.png")}
    with pytest.raises(InputError, match="the class map must keep at least one class"):
        read_data(tmp_path, class_map=dict.fromkeys(("cat", "dog", "emu")))


def question(table: list[list[int]]) -> str | None:
    """Ask about the order of classes a, b, ..., of which each row says how many pictures get each output."""
    classes = "abcdefgh"[: len(table)]
    answers = [
        (name, output)
        for name, row in zip(classes, table, strict=True)
        for output, n in enumerate(row)
        for _ in range(n)
    ]
    names = [f"label {number}" for number in range(len(table[0]))]
    return question_order(answers, {name: (number,) for number, name in enumerate(classes)}, names)


@settings(max_examples=50, deadline=None)
@given(st.permutations(range(5)), st.integers(0, 10**6), st.floats(0, 0.3))
def test_the_order_of_classes_is_asked_about_if_another_one_fits(order: list[int], seed: int, errors: float) -> None:
    table = (np.eye(5)[order] * 40 + np.random.default_rng(seed).poisson(errors * 10, (5, 5))).astype(int)
    moved = [f"class {output} (label {output}) for '{name}'" for name, output in zip("abcde", order, strict=True)
             if "abcde"[output] != name]  # fmt: skip
    asked = f"the model mostly answers {', '.join(moved)}: are the labels in the model's order?"
    assert question(table.tolist()) == (asked if moved else None)


@pytest.mark.parametrize(
    "table",
    [
        [[40, 0], [0, 40]],
        [[0, 40], [0, 40]],  # always the same answer
        [[15, 25], [20, 20]],  # not clearly more than half
        [[0, 1], [1, 0]],  # two pictures
        [[20, 20, 0], [0, 40, 0], [0, 30, 10]],
    ],
)
def test_wrong_answers_alone_raise_no_question(table: list[list[int]]) -> None:
    assert question(table) is None


# The sample


def items_of(counts: dict[str, int]) -> list[Item]:
    return [
        Item(f"{label}/{number}.jpg", Path(), label, f"{label}/{number}")
        for label, count in counts.items()
        for number in range(count)
    ]


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 30), min_size=1), st.integers(0, 9), st.randoms())
def test_the_sample_depends_on_the_pictures_and_the_seed_alone(counts: dict[str, int], seed: int, rng: object) -> None:
    items = items_of(counts)
    drawn = [one.name for one in stratified(items, 10, 1000, seed)]
    assert Counter(name[0] for name in drawn) == {label: min(10, count) for label, count in counts.items()}
    shuffled = list(items)
    rng.shuffle(shuffled)
    more = [*shuffled, *items_of({"zebra": 40, "yak": 3})]
    again = [one.name for one in stratified(more, 10, 1000, seed)]
    assert [name for name in again if name[0] not in "yz"] == drawn
    assert len(again) == len(drawn) + 13


def test_one_more_picture_replaces_at_most_one_and_another_seed_many() -> None:
    def names(counts: dict[str, int], most: int = 1000, seed: int = 0) -> set[str]:
        return {one.name for one in stratified(items_of(counts), 50, most, seed)}

    drawn = names({"a": 200})
    assert len(drawn - names({"a": 201})) <= 1
    assert len(drawn - names({"a": 200}, seed=1)) > 20
    fewer = names({"a": 200, "b": 200}, most=60)
    assert {name for name in fewer if name[0] == "a"} <= drawn
    assert len(fewer) == 60
    assert len(stratified(items_of({"a": 3, "b": 3, "c": 3}), 50, 2, 0)) == 3, "at least one of each class"
    assert stratified([], 5, 5, 0) == []


def test_every_picture_is_equally_likely_to_be_drawn() -> None:
    items = items_of({"a": 100})
    times = np.zeros(100)
    for seed in range(400):
        for one in stratified(items, 20, 100, seed):
            times[int(one.name[2:-4])] += 1
    # 80 +- 8 each if the draws are independent; five standard deviations are enough for 100 pictures.
    assert abs(times - 80).max() < 5 * 8
