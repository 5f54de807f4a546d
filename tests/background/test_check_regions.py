"""Regions: every format against an independent reader, and every way in which a file can be broken."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from folders import write_masked
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageOps
from pycocotools import mask as rle
from refusals import refused
from torchvision.transforms import functional as tv
from torchvision.transforms._presets import ImageClassification

import camkit
from camkit.background import regions as formats
from camkit.background.data import read_data
from camkit.background.regions import Annotations, ObjectAnnotation, object_region, widened_boxes
from camkit.errors import ImageError, InputError
from camkit.images.regions import measure_shades, preprocess_region
from camkit.types import Box
from scripts.demo.drawn_scenes import draw

SIZE = (40, 30)  # width, height
SQUARE = [5, 4, 25, 4, 25, 20, 5, 20]
FULL = [SIZE[1], SIZE[0]]
VOC_COLOURS = [0, 0, 0, 128, 0, 0, 0, 128, 0] + [9, 9, 9] * 252 + [224, 224, 192]


def coco_text(annotations: object = (), **more: object) -> str:
    """Return a COCO file with one picture, a.jpg, and one category, cat, both with the id 1."""
    table = {
        "images": [{"id": 1, "file_name": "a.jpg", "width": SIZE[0], "height": SIZE[1]}],
        "annotations": annotations,
        "categories": [{"id": 1, "name": "cat"}],
        **more,
    }
    return json.dumps(table)


def coco_file(folder: Path, annotations: object = (), **more: object) -> Path:
    file = folder / "instances.json"
    file.write_text(coco_text(annotations, **more))
    return file


def row(**more: object) -> dict[str, object]:
    return {"id": 7, "image_id": 1, "category_id": 1, **more}


def drawn(annotations: Annotations, name: str = "a.jpg", size: tuple[int, int] = SIZE) -> np.ndarray:
    """Return the region of the objects in a picture."""
    return object_region(annotations.objects[name], size)


def rectangle(left: int, top: int, right: int, bottom: int) -> np.ndarray:
    region = np.zeros(SIZE[::-1], bool)
    region[top:bottom, left:right] = True
    return region


def differs_off_the_edge(region: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Return where two regions differ more than one pixel away from the edge of the reference."""
    tensor = torch.from_numpy(reference).float()[None, None]
    grown = torch.nn.functional.max_pool2d(tensor, 3, 1, 1)[0, 0] > 0
    shrunk = -torch.nn.functional.max_pool2d(-tensor, 3, 1, 1)[0, 0] > 0
    return (region & ~grown.numpy()) | (shrunk.numpy() & ~region)


# COCO


def test_coco_boxes_polygons_and_both_encodings_agree_with_other_libraries(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    shape = rng.random(SIZE[::-1]) < 0.3
    packed = rle.encode(np.asfortranarray(shape.astype(np.uint8)))
    columns = shape.T.ravel().astype(int)
    changes = np.flatnonzero(np.diff(np.concatenate([[0], columns, [1 - columns[-1]]])))
    counts = np.diff(np.concatenate([[0], changes])).tolist()
    polygon = Image.new("1", SIZE)
    ImageDraw.Draw(polygon).polygon([3, 3, 35, 8, 20, 27], fill=1)
    for segmentation, expected in (
        ({"size": FULL, "counts": packed["counts"].decode()}, shape),
        ({"size": FULL, "counts": counts}, shape),
        ([SQUARE], rectangle(5, 4, 25, 20)),
        ([SQUARE, [30, 2, 38, 2, 38, 9, 30, 9]], rectangle(5, 4, 25, 20) | rectangle(30, 2, 38, 9)),
    ):
        region = drawn(formats.read_coco(coco_file(tmp_path, [row(segmentation=segmentation, bbox=[0, 0, 40, 30])])))
        assert (region == expected).all()
    annotations = formats.read_coco(coco_file(tmp_path, [row(segmentation=[[3, 3, 35, 8, 20, 27]])]))
    assert [one.size for one in annotations.objects["a.jpg"]] == [SIZE]
    assert not differs_off_the_edge(drawn(annotations), np.array(polygon)).any()
    region = drawn(formats.read_coco(coco_file(tmp_path, [row(bbox=[2, 3, 10, 5]), row(bbox=[20, 20, 4, 4])])))
    assert (region == (rectangle(2, 3, 12, 8) | rectangle(20, 20, 24, 24))).all()


def test_crowds_and_dangling_ids_and_bad_boxes_are_counted_and_left_out(tmp_path: Path) -> None:
    annotations = formats.read_coco(
        coco_file(
            tmp_path,
            [
                row(bbox=[1, 1, 4, 4]),
                row(bbox=[0, 0, 40, 30], iscrowd=1),
                row(bbox=[1, 1, 4, 4], image_id=99),
                row(bbox=[1, 1, 4, 4], category_id=99),
                row(bbox=[9, 9, -4, 4]),
                row(bbox=[9, 9, 4, 0]),
                row(bbox=[100, 100, 5, 5]),
                row(bbox=[-50, 0, 20, 5]),
                row(bbox=[30, 20, 50, 50]),
                row(),
            ],
        )
    )
    assert [tuple(one.box) for one in annotations.objects["a.jpg"] if not one.crowd] == [(1, 1, 5, 5), (30, 20, 40, 30)]
    assert [tuple(one.box) for one in annotations.objects["a.jpg"] if one.crowd] == [(0, 0, 40, 30)]
    assert {what: len(names) for what, names in annotations.problems.items()} == {
        "crowds, removed but not explained": 1,
        "annotations of a picture that is not listed (an id must be a number everywhere, or text everywhere)": 1,
        "annotations of a category that is not listed (an id must be a number everywhere, or text everywhere)": 1,
        "boxes without an area": 2,
        "boxes outside their picture": 2,
        "boxes clipped to their picture": 1,
        "annotations with neither box nor outline": 1,
    }


SHARES = [side / SIZE[number % 2] for number, side in enumerate(SQUARE)]
EMPTY = {"size": FULL, "counts": [SIZE[0] * SIZE[1]]}
NO_SIZE = [{"id": 1, "file_name": "a.jpg", "width": -1, "height": -1}]


@pytest.mark.parametrize(
    ("annotation", "more"),
    [
        ({"bbox": [0.125, 4 / 30, 0.5, 16 / 30]}, {}),
        ({"bbox": [0.125, 4 / 30, 0.5, 16 / 30], "segmentation": [SHARES]}, {}),
        ({"segmentation": [SHARES]}, {}),
        *(({"segmentation": empty, "bbox": [5, 4, 20, 16]}, {}) for empty in ([[0] * 6], [[-1] * 6], EMPTY, [])),
        ({"segmentation": [SQUARE]}, {"images": NO_SIZE}),
    ],
)
def test_coco_in_shares_with_empty_outlines_and_without_a_size(tmp_path: Path, annotation: Any, more: Any) -> None:
    region = drawn(formats.read_coco(coco_file(tmp_path, [row(**annotation)], **more)))
    assert (region == rectangle(5, 4, 25, 20)).all()


def test_an_outline_without_a_box_gets_the_box_around_it(tmp_path: Path) -> None:
    packed = rle.encode(np.asfortranarray(rectangle(5, 4, 25, 20).astype(np.uint8)))
    for one in ({"size": FULL, "counts": packed["counts"].decode()}, [SQUARE]):
        for bbox in ([], None, [0, 0, 0, 0], [3, 3, -1, 5], [-1, -1, -1, -1], [0, 0, 1, 1], [None] * 4):
            annotations = formats.read_coco(coco_file(tmp_path, [row(segmentation=one, bbox=bbox)]))
            assert annotations.objects["a.jpg"][0].box == Box(5, 4, 25, 20)
            assert (drawn(annotations) == rectangle(5, 4, 25, 20)).all()
            assert not annotations.problems


@pytest.mark.parametrize("name", ["instances_val.json", "_annotations.coco.json", "annotations/x.json"])
def test_a_broken_file_with_a_name_for_regions_is_not_skipped(tmp_path: Path, name: str) -> None:
    text = coco_text([row(bbox=[1, 1, 4, 4])])
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text[: len(text) // 2])
    (tmp_path / "notes.json").write_text("{")
    with pytest.raises(InputError, match=r"json is not a COCO file of instances"):
        formats.find_regions(tmp_path)
    (tmp_path / name).write_text(text)
    assert len(formats.find_regions(tmp_path)) == 1


# Pascal VOC


VOC = """<annotation><folder>x</folder><filename>a.jpg</filename>{size}
{objects}</annotation>"""
OBJECT = """<object><name>{name}</name><part><name>head</name><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>2</xmax>
<ymax>2</ymax></bndbox></part><bndbox><xmin>{0}</xmin><ymin>{1}</ymin><xmax>{2}</xmax><ymax>{3}</ymax></bndbox>
</object>"""
VOC_SIZE = "<size><width>40</width><height>30</height><depth>3</depth></size>"


def voc_object(*sides: object, name: str = "cat") -> str:
    return OBJECT.format(*sides, name=name)


def voc_file(folder: Path, *objects: str, name: str = "a", size: str = VOC_SIZE) -> Path:
    file = folder / f"{name}.xml"
    file.parent.mkdir(exist_ok=True)
    file.write_text(VOC.format(size=size, objects="".join(objects)))
    return file


@pytest.mark.parametrize("size", [VOC_SIZE, "", "<size><width>0</width><height>0</height></size>"])
def test_voc_counts_pixels_from_one_and_includes_the_last(tmp_path: Path, size: str) -> None:
    objects = voc_object(1, 1, 40, 30), voc_object(3, 4, 3, 9, name="dog")
    annotations = formats.read_voc(voc_file(tmp_path, *objects, size=size))
    cat, dog = annotations.objects["a.jpg"]
    assert [cat.category, cat.box, dog.category, dog.box] == ["cat", Box(0, 0, 40, 30), "dog", Box(2, 3, 3, 9)]
    assert cat.size == dog.size == (SIZE if size == VOC_SIZE else None)
    assert drawn(annotations).all()
    assert (object_region([dog], SIZE) == rectangle(2, 3, 3, 9)).all()
    assert not annotations.problems


def test_voc_pictures_with_one_name_in_two_folders_keep_their_own_objects(tmp_path: Path) -> None:
    for label in ("cat", "dog"):
        voc_file(tmp_path, voc_object(1, 1, 5, 5, name=label), name=f"{label}/a")
    found = formats.read_voc(tmp_path).objects
    assert {name: [one.category for one in of] for name, of in found.items()} == {
        "cat/a.jpg": ["cat"],
        "dog/a.jpg": ["dog"],
    }


def test_other_xml_among_annotations_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "junit.xml").write_text("<testsuites/>")
    assert formats.find_regions(tmp_path) == []
    voc_file(tmp_path, voc_object(1, 1, 5, 5))
    (annotations,) = formats.find_regions(tmp_path)
    assert list(annotations.objects) == ["a.jpg"]
    (tmp_path / "b.xml").write_text("<annotation>")
    with pytest.raises(InputError, match=r"b\.xml is not a Pascal VOC annotation"):
        formats.find_regions(tmp_path)


def test_voc_boxes_in_shares_are_recognised_from_all_files_together(tmp_path: Path) -> None:
    voc_file(tmp_path, voc_object(0.25, 0.2, 0.75, 1.0))
    assert (drawn(formats.read_voc(tmp_path)) == rectangle(10, 6, 30, 30)).all()
    other = voc_file(tmp_path, voc_object(3, 4, 12, 20), name="b")
    other.write_text(other.read_text().replace("a.jpg", "b.jpg"))
    both = formats.read_voc(tmp_path)
    assert (drawn(both, "b.jpg") == rectangle(2, 3, 12, 20)).all()
    assert both.problems == {"boxes inside the corner pixel, probably given as shares instead of pixels": ["a.jpg"]}


# YOLO
# YOLO


def yolo_folder(folder: Path, lines: str, names: tuple[str, str] | None = None) -> Path:
    place = folder / "labels"
    place.mkdir()
    (place / "a.txt").write_text(lines)
    if names:
        (folder / names[0]).write_text(names[1])
    return place


@pytest.mark.parametrize(
    "names",
    [
        ("classes.txt", "cat\n\ndog\n"),
        ("data.yaml", "names: [cat, fish, dog]"),
        ("data.yaml", "names:\n  0: cat\n  2: dog"),
    ],
    ids=["blank line", "list", "numbers"],
)
def test_yolo_boxes_and_polygons_in_shares_and_names_by_number(tmp_path: Path, names: tuple[str, str]) -> None:
    annotations = formats.read_yolo(
        yolo_folder(tmp_path, "0 0.5 0.5 0.5 0.2\n\n2 0.1 0.1 0.9 0.1 0.9 0.6 0.1 0.6\n", names)
    )
    first, second = annotations.objects["a"]
    assert (first.category, second.category) == ("cat", "dog")
    assert (object_region([first], SIZE) == rectangle(10, 12, 30, 18)).all()
    assert (object_region([second], SIZE) == rectangle(4, 3, 36, 18)).all()


@pytest.mark.parametrize(
    ("table", "place"),
    [
        ("path: .\nval: images/val", "images/val"),
        ("train: ../train/images\nval: ../valid/images", "valid/images"),  # as an annotation tool exports it
        ("train: images/train\ntest: images/test", "images/test"),
    ],
)
def test_a_data_yaml_stands_for_the_folder_of_its_pictures(tmp_path: Path, table: str, place: str) -> None:
    for folder, name in ((place, "a"), ("images/train", "b")):
        labels = tmp_path / folder.replace("images", "labels")
        for made in (tmp_path / folder, labels):
            made.mkdir(parents=True)
        Image.new("RGB", SIZE).save(tmp_path / folder / f"{name}.png")
        (labels / f"{name}.txt").write_text("1 0.5 0.5 0.5 0.2\n")
    (tmp_path / "data.yaml").write_text(f"{table}\nnames: [dog, cat]\n")
    data = read_data(tmp_path / "data.yaml")
    assert [(item.source.resolve(), item.label) for item in data.items] == [(tmp_path / place / "a.png", "cat")]


@pytest.mark.parametrize("regions", [None, "set/labels"])
def test_the_named_table_of_a_yolo_data_set_may_have_any_name_and_place(tmp_path: Path, regions: str | None) -> None:
    """The tables of Ultralytics, such as coco8-pose.yaml, lie apart from their data."""
    for folder in ("images", "labels"):
        (tmp_path / "set" / folder).mkdir(parents=True)
    Image.new("RGB", SIZE).save(tmp_path / "set/images/a.png")
    (tmp_path / "set/labels/a.txt").write_text("1 0.5 0.5 0.5 0.2 0.3 0.45 0.5 0.5 0.7 0.55\n")
    (tmp_path / "set/classes.txt").write_text("other\nnames\n")
    (tmp_path / "pose.yaml").write_text("path: set\nval: images\nnames: [dog, cat]\nkpt_shape: [3, 2]\n")
    (item,) = read_data(tmp_path / "pose.yaml", regions=None if regions is None else tmp_path / regions).items
    assert (item.label, [one.kind for one in item.objects]) == ("cat", ["box"])


@pytest.mark.parametrize("more", ["", "0.93", "7", "0.93 1", "0.93 7"])
def test_without_names_a_class_is_its_number_and_a_confidence_and_a_track_are_left_out(
    tmp_path: Path, more: str
) -> None:
    labels = yolo_folder(tmp_path, f"\ufeff12 0.5 0.5 0.5 0.2 {more}\n12 0.5 0.5 0.5 0.2 0.4")
    annotations = formats.read_yolo(labels)
    assert {one.category for one in annotations.objects["a"]} == {"12"}
    assert not annotations.problems
    assert (drawn(annotations, "a") == rectangle(10, 12, 30, 18)).all()


POSES = [
    ("kpt_shape: [4, 3]", "0.3 0.45 2 0.5 0.5 1 0 0 0 0.7 0.55 2"),
    ("kpt_shape: [4, 2]", "0.3 0.45 0.5 0.5 0 0 0.7 0.55"),
    ("kpt_shape: [3, 3]", "0.3 0.45 2 0.5 0.5 1 0 0 0 0.9"),  # and a confidence
    ("", "0.3 0.45 2 0.5 0.5 1 0 0 0 0.7 0.55 2\n0 0.5 0.5 0.5 0.2 0.3 0.45 0 0.5 0.5 1 0 0 0 0.7 0.55 2"),
]


@pytest.mark.parametrize(("table", "keypoints"), POSES)
@pytest.mark.parametrize("names_in_table", [True, False])
def test_of_a_pose_the_box_is_read(tmp_path: Path, table: str, keypoints: str, names_in_table: bool) -> None:
    labels = yolo_folder(tmp_path, f"0 0.5 0.5 0.5 0.2 {keypoints}", ("data.yaml", f"{table}\n"))
    if names_in_table:
        (tmp_path / "data.yaml").write_text(f"names: [cat]\n{table}\n")
    else:
        (labels / "classes.txt").write_text("cat\n")
    for found in formats.read_yolo(labels).objects["a"]:
        assert (found.kind, found.category) == ("box", "cat")
        assert (object_region([found], SIZE) == rectangle(10, 12, 30, 18)).all()


def test_polygons_beside_kpt_shape_stay_polygons(tmp_path: Path) -> None:
    polygon = "0 0.1 0.1 0.9 0.1 0.9 0.6 0.1 0.6"
    labels = yolo_folder(tmp_path, f"{polygon}\n0 0.5 0.5 0.5 0.2 0.3 0.45 2", ("data.yaml", "kpt_shape: [1, 3]"))
    assert [one.kind for one in formats.read_yolo(labels).objects["a"]] == ["mask", "box"]
    (labels / "data.yaml").write_text("kpt_shape:")
    assert [one.kind for one in formats.read_yolo(labels).objects["a"]] == ["mask", "box"]
    for broken in ("3", "[a, b]", "[null]"):
        (labels / "data.yaml").write_text(f"kpt_shape: {broken}")
        with pytest.raises(InputError, match=r"data\.yaml cannot be read"):
            formats.read_yolo(labels)


def test_real_polygons_are_not_taken_for_poses(test_data: Path, tmp_path: Path) -> None:
    lines = []
    table = json.loads((test_data / "coco" / "instances.json").read_text())
    sizes = {image["id"]: (image["width"], image["height"]) for image in table["images"]}
    for annotation in table["annotations"]:
        if isinstance(annotation["segmentation"], list):
            outline = annotation["segmentation"][0]
            shares = [side / sizes[annotation["image_id"]][number % 2] for number, side in enumerate(outline)]
            lines.append(" ".join(["0", *(f"{share:.4f}" for share in shares)]))
    lines.append("0 0 0 1 0 1 1 0 1 0 0")  # the whole picture
    annotations = formats.read_yolo(yolo_folder(tmp_path, "\n".join(lines)))
    assert {one.kind for one in annotations.objects["a"]} == {"mask"}


@pytest.mark.parametrize("names", ["data/obj/a.jpg\ndata/obj/b c.png\n", "C:\\data\\a.JPG\r\nC:\\data\\b.jpg\r\n", ""])
def test_lists_of_pictures_beside_yolo_are_no_annotations(tmp_path: Path, names: str) -> None:
    (tmp_path / "data").mkdir()
    Image.new("RGB", SIZE).save(tmp_path / "data" / "a.jpg")
    (tmp_path / "data" / "a.txt").write_text("1 0.5 0.5 0.5 0.2\n")
    (tmp_path / "data" / "b.txt").write_text("")
    (tmp_path / "obj.names").write_text("cat\ndog\n")
    for name in ("train.txt", "images.txt", "README.dataset.txt"):
        (tmp_path / name).write_text(names if name != "README.dataset.txt" else "Exported from a tool.\n")
    (annotations,) = formats.find_regions(tmp_path)
    assert [(name, one.category) for name, of in annotations.objects.items() for one in of] == [("data/a", "dog")]


def test_yolo_counts_unknown_classes_and_invalid_boxes(tmp_path: Path) -> None:
    lines = "0 .5 .5 .1 .1\n5 .5 .5 .1 .1\n0 .5 .5 -.1 .1\n0 20 30 4 4\n0 1.2 .5 .1 .1\n0 .95 .5 .3 .1"
    annotations = formats.read_yolo(yolo_folder(tmp_path, lines, ("classes.txt", "cat\ndog")))
    assert {what: len(names) for what, names in annotations.problems.items()} == {
        "objects of a class that the file of class names does not list": 1,
        "boxes without an area": 1,
        "boxes in pixels, but YOLO needs shares of the picture (0 to 1)": 1,
        "boxes outside their picture": 1,
        "boxes clipped to their picture": 1,
    }
    assert len(annotations.objects["a"]) == 2


def test_yolo_is_found_even_if_the_first_picture_has_no_object(tmp_path: Path) -> None:
    place = yolo_folder(tmp_path, "")
    assert not formats.find_yolo(tmp_path), "an empty text file may be anything"
    (place / "b.txt").write_text("0 0.5 0.5 0.5 0.5")
    assert formats.find_yolo(tmp_path) == [place]


def test_yolo_is_found_beside_the_innermost_images_folder(tmp_path: Path) -> None:
    pictures, labels = (tmp_path / "images" / "set" / name / "train" for name in ("images", "labels"))
    for place in (pictures, labels):
        place.mkdir(parents=True)
    (labels / "a.txt").write_text("0 0.5 0.5 0.5 0.5")
    assert formats.find_yolo(pictures) == [labels]


# A CSV of boxes


@pytest.mark.parametrize(
    "text",
    [
        "path,label,xmin,ymin,xmax,ymax\na.jpg,cat,2,3,12,8\n",
        "\ufeffImage , Class ,X1,Y1,X2,Y2\r\n a.jpg , cat ,2,3,12,8\r\n",
        "filename,category,x,y,w,h\na.jpg,cat,2,3,10,5\n",
        "filename,category,left,top,width,height,remark\na.jpg,cat,2,3,10,5\n",
        "ImageID,LabelName,XMin,XMax,YMin,YMax\na.jpg,cat,.05,.3,.1,.2666667\n",
        "ImageID,LabelName,XMin,XMax,YMin,YMax\na.jpg,cat,.05,.3,.1,.2666667\nb.jpg,cat,.5,1.0001,0,1\n",
    ],
    ids=["corners", "spaces", "xywh", "short row", "shares", "rounded shares"],
)
def test_boxes_in_any_usual_columns(tmp_path: Path, text: str) -> None:
    file = tmp_path / "b.csv"
    file.write_text(text, encoding="utf-8", newline="")
    assert formats.find_boxes(tmp_path) == [file]
    annotations = formats.read_boxes(file)
    assert [one.category for one in annotations.objects["a.jpg"]] == ["cat"]
    assert (drawn(annotations) == rectangle(2, 3, 12, 8)).all()


# Mask pictures


def test_a_colour_mask_of_16_bits_is_refused_and_not_read_as_black(tmp_path: Path) -> None:
    cv2.imwrite(str(tmp_path / "a.png"), np.repeat(BOTH[..., None], 3, 2).astype(np.uint16))
    with pytest.raises(InputError, match="hold 0 everywhere"):
        formats.read_masks(tmp_path)


def test_a_mask_of_another_size_or_a_broken_one_is_an_image_error(tmp_path: Path) -> None:
    objects, file = masks_of(tmp_path, levels(BOTH * 255)).objects["a"], tmp_path / "a.png"
    with pytest.raises(ImageError, match=r"the mask .*a\.png has 40x30 pixels, but its picture has 30x40"):
        object_region(objects, (30, 40))
    file.write_bytes(file.read_bytes()[:60])
    for _ in range(2):  # broken, then gone
        with pytest.raises(ImageError, match=r"the mask .*a\.png cannot be read"):
            object_region(objects, SIZE)
        file.unlink(missing_ok=True)


def two_objects(first: int, second: int, around: int | None = None) -> np.ndarray:
    """Return two rectangles with different values, perhaps with a border around each."""
    values = np.zeros(SIZE[::-1], int)
    if around is not None:
        values[2:18, 2:16] = values[8:26, 20:36] = around
    values[4:16, 4:14] = first
    values[10:24, 22:34] = second
    return values


BOTH = two_objects(1, 1) > 0
ALPHA = np.dstack([np.arange(1200).reshape(30, 40, 1) // (1, 7, 50) % 256, BOTH * 255])


def masks_of(folder: Path, *pictures: Image.Image, suffix: str = ".png", **options: Any) -> Annotations:
    """Save masks as a.png, b.png and so on, and read the folder."""
    for name, picture in zip("abcdefgh", pictures, strict=False):
        picture.save(folder / f"{name}{suffix}", **options)
    return formats.read_masks(folder)


def levels(values: np.ndarray, dtype: Any = np.uint8) -> Image.Image:
    return Image.fromarray(np.asarray(values).astype(dtype))


def palette(values: np.ndarray, colours: list[int]) -> Image.Image:
    picture = levels(values)
    picture.putpalette(colours)
    return picture


def with_alpha(colours: np.ndarray, alpha: np.ndarray) -> Image.Image:
    picture = levels(colours)
    picture.putalpha(levels(alpha))
    return picture


TWO_COLOURS = palette(two_objects(1, 2), [0, 0, 0, 200, 0, 0, 0, 200, 0])
MEANINGS = {
    "85 and 255": (levels(two_objects(85, 255)), "every value but 0 is an object (85, 255)"),
    "instances": (levels(two_objects(1, 2)), "every value but 0 is an object (1, 2)"),
    "ids that end at 255": (levels(two_objects(254, 255)), "every value but 0 is an object (254, 255)"),
    "two colours": (TWO_COLOURS.convert("RGB"), "every value but 0 is an object (#00c800, #c80000)"),
    "two opaque colours": (TWO_COLOURS.convert("RGBA"), "every value but 0 is an object (#00c800, #c80000)"),
    "instances of 16 bits": (levels(two_objects(300, 40000), np.uint16), "every value but 0 is an object (300, 40000)"),
    "0 and 1": (levels(BOTH), "value 1 is the object, 0 the background"),
    "a trimap": (levels(two_objects(1, 1, 3) + 2 * (two_objects(1, 1, 3) == 0)), "1 is the object, 2 the background"),
    "VOC in grey": (levels(two_objects(3, 15, 255)), "(3, 15); 255 is a border"),
    "VOC's palette": (palette(two_objects(1, 2, 255), VOC_COLOURS), "(1, 2); 255 is a border"),
    "VOC in colour": (
        palette(two_objects(1, 2, 255), VOC_COLOURS).convert("RGB"), "(#008000, #800000); #e0e0c0 is a border"
    ),
    "a palette with a transparent index": (palette(BOTH, [0, 9, 0, 0, 9, 0]), "value 255 is the object"),
    "alpha": (levels(ALPHA), "value 255 is the object"),
    "opaque": (with_alpha(two_objects(1, 2), BOTH * 0 + 255), "every value but 0 is an object (1, 2)"),
    "0 and 255": (levels(BOTH * 255), "value 255 is the object"),
    "0 and 65535": (levels(BOTH * 65535, np.uint16), "value 65535 is the object"),
    "one bit": (levels(BOTH * 255).convert("1"), "value 1 is the object"),
    "white in colour": (levels(BOTH * 255).convert("RGB"), "value 255 is the object"),
    "blue": (levels(np.where(BOTH[..., None], (0, 0, 255), 0)), "value #0000ff is the object"),
    "a palette that begins with white": (palette(1 - BOTH, [255, 255, 255, 0, 0, 0]), "value 255 is the object"),
    "a palette that is all black": (palette(BOTH, [0, 0, 0] * 2), "value 1 is the object"),
    "shares from 0 to 1": (levels(BOTH, np.float32), "value 255 is the object"),
}  # fmt: skip


@pytest.mark.parametrize("case", MEANINGS)
def test_masks_of_every_convention_are_read_and_what_was_understood_is_said(tmp_path: Path, case: str) -> None:
    picture, words = MEANINGS[case]
    transparency = {"transparency": 0} if case == "a palette with a transparent index" else {}
    suffix = ".tif" if picture.mode in ("I", "F") else ".png"
    annotations = masks_of(tmp_path, picture, suffix=suffix, **transparency)

    assert (drawn(annotations, "a") == BOTH).all()
    (fact,) = annotations.facts
    assert words in fact


def test_a_soft_edge_is_cut_at_half_brightness(tmp_path: Path) -> None:
    smooth = np.clip(np.linspace(-100, 355, SIZE[0]), 0, 255)[None].repeat(SIZE[1], 0)
    assert (drawn(masks_of(tmp_path, levels(smooth)), "a") == (smooth.astype(np.uint8) > 127)).all()


def test_what_one_mask_leaves_open_the_others_of_its_folder_show(tmp_path: Path) -> None:
    """A picture whose only object has the value 255 in a folder of instances, and one without any border."""
    annotations = masks_of(
        tmp_path, levels(two_objects(3, 15, 255)), levels(two_objects(7, 0)), levels(two_objects(2, 9, 255))
    )
    assert (drawn(annotations, "b") == (two_objects(1, 0) > 0)).all()
    assert (drawn(annotations, "c") == BOTH).all()


def test_a_border_touches_what_it_encloses(tmp_path: Path) -> None:
    """Two conventions in one folder: an object of 255 that no other value touches is an object, not a border."""
    small = np.zeros_like(BOTH)
    small[2:5, 2:5] = True
    annotations = masks_of(tmp_path, levels(BOTH), levels(255 * small))
    assert (drawn(annotations, "a") == BOTH).all()
    assert (drawn(annotations, "b") == small).all()


REFUSED = {
    "no background": ([levels(two_objects(1, 1) + 1)], "hold 1, 2, and it is not clear what is the object"),
    "empty": ([levels(BOTH * 0)], "hold 0 everywhere"),
    "white": ([levels(BOTH * 0 + 255)] * 2, "hold 255 everywhere"),
    "no black": (
        [palette(two_objects(1, 2), [200, 200, 9, 200, 0, 0, 0, 200, 0]).convert("RGB")],
        "hold #00c800, #c80000, #c8c809, and it is not clear",
    ),
    "not a number": ([levels(np.where(BOTH, np.nan, 0), np.float32)], "holds numbers below 0 or NaN"),
    "a photograph in colour": ([levels(np.random.default_rng(0).integers(0, 256, (80, 80, 3)))], "and it is not clear"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_masks_that_could_mean_two_things_are_refused_in_one_sentence(tmp_path: Path, case: str) -> None:
    pictures, message = REFUSED[case]
    suffix = ".tif" if pictures[0].mode in ("I", "F") else ".png"
    with refused(message, InputError):
        masks_of(tmp_path, *pictures, suffix=suffix)


def test_one_mask_that_is_refused_costs_only_its_own_picture(tmp_path: Path) -> None:
    (tmp_path / "b.png").write_bytes(b"no picture")
    annotations = masks_of(tmp_path, levels(two_objects(1, 2)))
    assert (drawn(annotations, "a") == BOTH).all()
    with pytest.raises(ImageError, match=r"the mask .*b\.png cannot be read"):
        drawn(annotations, "b")


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_mask_is_turned_upright_by_its_own_exif_orientation(tmp_path: Path, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = levels(BOTH * 255)
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # the transpositions of Pillow that EXIF's undo
    if orientation in undo:
        stored = stored.transpose(Image.Transpose(undo[orientation]))
    annotations = masks_of(tmp_path, stored, exif=exif)
    assert (drawn(annotations, "a") == BOTH).all()


def test_hidden_files_beside_masks_are_left_out_and_trimaps_are_found(tmp_path: Path) -> None:
    """The archive of Oxford-IIIT Pets holds annotations/trimaps with a hidden file for each mask."""
    folder = tmp_path / "annotations" / "trimaps"
    folder.mkdir(parents=True)
    levels(two_objects(1, 1, 3) + 2 * (two_objects(1, 1, 3) == 0)).save(folder / "a.png")
    (folder / "._a.png").write_bytes(b"Mac OS X")
    (annotations,) = formats.find_regions(tmp_path)
    assert list(annotations.objects) == ["a"]
    assert (drawn(annotations, "a") == BOTH).all()


@pytest.mark.parametrize("name", ["a-mask.png", "a_mask.png", "a.mask.png", "a_segmentation_mask.png", "a_seg.png"])
def test_masks_among_the_pictures_belong_to_the_picture_they_are_named_after(tmp_path: Path, name: str) -> None:
    levels(BOTH * 255).save(tmp_path / name)
    for picture in ("a.JPG", "b.png", "c-with-mask.png"):
        Image.new("RGB", SIZE).save(tmp_path / picture)
    (annotations,) = formats.find_regions(tmp_path)
    assert list(annotations.objects) == ["a"]


def test_only_the_named_folder_is_read(tmp_path: Path) -> None:
    for place in ("my_regions", "masks"):
        (tmp_path / place).mkdir()
        levels(BOTH * 255).save(tmp_path / place / f"{place}.png")
    (tmp_path / "Annotations").mkdir()
    (tmp_path / "Annotations" / "a.xml").write_text("<annotation><filename>a.png</filename></annotation>")
    for place in ("my_regions", "masks"):
        (annotations,) = formats.read_regions(tmp_path / place)
        assert (annotations.format, list(annotations.objects)) == ("mask pictures", [place])
    (annotations,) = formats.read_regions(tmp_path / "Annotations")
    assert annotations.format == "Pascal VOC"


@pytest.mark.parametrize(
    ("size", "message"), [((30, 40), "shown rotated, as its EXIF"), ((80, 60), "80x60 pixels, but the picture has")]
)
def test_an_object_drawn_on_another_size_is_refused(size: tuple[int, int], message: str) -> None:
    annotation = ObjectAnnotation("cat", Box(1, 1, 9, 9), size=size)
    assert object_region([annotation], size).any()
    with pytest.raises(ImageError, match=message):
        object_region([annotation], (40, 30))


def test_a_mask_folder_without_masks_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "masks").mkdir()
    (tmp_path / "masks" / "readme.md").write_text("masks will follow")
    assert formats.find_regions(tmp_path) == []
    levels(BOTH * 255).save(tmp_path / "masks" / "a.png")
    (annotations,) = formats.find_regions(tmp_path)
    assert list(annotations.objects) == ["a"]


# Drawing


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(-60, 90), min_size=4, max_size=4))
def test_a_box_covers_exactly_its_pixels(sides: list[int]) -> None:
    left, right = sorted(sides[:2])
    top, bottom = sorted(sides[2:])
    down, across = np.mgrid[: SIZE[1], : SIZE[0]]
    expected = (across >= left) & (across < right) & (down >= top) & (down < bottom)
    assert (object_region([ObjectAnnotation("", Box(left, top, right, bottom))], SIZE) == expected).all()


@pytest.mark.parametrize("box", [(39.7, 29.8, 40, 30), (0, 0, 0.2, 0.2), (20.4, 10, 20.45, 20)])
def test_a_thin_box_in_the_picture_is_at_least_a_pixel_wide(box: tuple[float, ...]) -> None:
    assert object_region([ObjectAnnotation("", Box(*box))], SIZE).any()


def test_removed_boxes_cover_each_part_of_a_mask_with_a_margin(tmp_path: Path) -> None:
    objects = masks_of(tmp_path, levels((rectangle(3, 3, 9, 9) | rectangle(30, 20, 38, 28)) * 255)).objects["a"]
    assert (widened_boxes(objects, SIZE) == (rectangle(1, 1, 11, 11) | rectangle(28, 18, 40, 30))).all()
    wide = widened_boxes([ObjectAnnotation("", Box(100, 100, 300, 200))], (400, 400))
    assert wide[92:208, 84:316].all() and wide.sum() == 116 * 232
    larger_than_its_box = ObjectAnnotation("", Box(10, 10, 20, 20), [[10, 10, 50, 10, 50, 50, 10, 50]])
    assert widened_boxes([larger_than_its_box], (64, 64))[12:48, 12:48].all()


@pytest.mark.parametrize(
    ("encoding", "message"),
    [
        ({"size": [40, 30], "counts": [0, 1200]}, "an outline is for 30x40 pixels, but the picture has 40x30"),
        *(({"size": FULL, "counts": counts}, "an outline cannot be read") for counts in ([10, 5], "PP8", "PP")),
    ],
)
def test_an_encoding_that_does_not_fill_the_picture_is_an_image_error(encoding: dict[str, Any], message: str) -> None:
    with pytest.raises(ImageError, match=message):
        object_region([ObjectAnnotation("", None, encoding)], SIZE)


# Through the preprocessing


def blob(size: tuple[int, int]) -> np.ndarray:
    picture = Image.new("1", size)
    ImageDraw.Draw(picture).ellipse([size[0] * 0.2, size[1] * 0.1, size[0] * 0.7, size[1] * 0.6], fill=1)
    return np.array(picture)


@pytest.mark.parametrize("size", [(300, 200), (200, 330), (64, 64), (31, 90)])
@pytest.mark.parametrize("resize", [64, 80])
def test_a_region_is_resized_and_cropped_like_its_picture(size: tuple[int, int], resize: int) -> None:
    region = blob(size)
    preset = ImageClassification(crop_size=56, resize_size=resize)
    expected = tv.center_crop(tv.resize(torch.from_numpy(region)[None].float(), [resize], antialias=True), [56, 56])[0]
    result = preprocess_region(region, preset)
    assert result.shape == (56, 56)
    assert float((result - expected).abs().max()) < 0.02
    assert float(result.max()) == 1
    assert bool(measure_shades(preset, size).view.all())


def letterbox(picture: Image.Image) -> torch.Tensor:
    return tv.normalize(tv.to_tensor(ImageOps.pad(picture, (56, 56), color=(114, 114, 114))), [0.5] * 3, [0.2] * 3)


def test_padding_is_outside_the_view_and_outside_every_region() -> None:
    region = np.ones((100, 200), bool)
    view = measure_shades(letterbox, (200, 100)).view
    expected = torch.zeros(56, 56, dtype=torch.bool)
    expected[14:42] = True
    assert bool((view == expected).all())
    assert bool((preprocess_region(region, letterbox) == expected.float()).all())


def inverted(picture: Image.Image) -> torch.Tensor:
    return 1 - tv.to_tensor(picture.resize((32, 32)))


def red_only(picture: Image.Image) -> torch.Tensor:
    return tv.to_tensor(picture.resize((32, 32))) * torch.tensor([1.0, 0, 0]).reshape(3, 1, 1)


def grey(picture: Image.Image) -> torch.Tensor:
    return tv.to_tensor(picture.resize((32, 32)).convert("L"))[None] - 0.5


@pytest.mark.parametrize("preprocess", [inverted, red_only, grey])
def test_colours_may_change_in_any_way(preprocess: Callable[[Image.Image], torch.Tensor]) -> None:
    region = blob((64, 64))
    plain = tv.to_tensor(Image.fromarray(region).convert("RGB").resize((32, 32)))[0]
    assert float((preprocess_region(region, preprocess) - plain).abs().max()) < 1e-5


def standardised(picture: Image.Image) -> torch.Tensor:
    tensor = tv.to_tensor(picture.resize((32, 32)))
    return (tensor - tensor.mean()) / tensor.std()


def size_depends_on_content(picture: Image.Image) -> torch.Tensor:
    side = 32 if np.asarray(picture).std() == 0 else 40
    return tv.to_tensor(picture.resize((side, side)))


def flipped_at_random(picture: Image.Image) -> torch.Tensor:
    picture = picture.resize((32, 32))
    return tv.to_tensor(ImageOps.mirror(picture) if torch.rand(()) < 0.5 else picture)


@pytest.mark.parametrize("preprocess", [standardised, size_depends_on_content, flipped_at_random])
@pytest.mark.parametrize("region", [blob((64, 64)), np.zeros((64, 64), bool), np.ones((64, 64), bool)])
def test_a_preprocessing_that_cannot_be_followed_is_refused(
    preprocess: Callable[[Image.Image], torch.Tensor], region: np.ndarray
) -> None:
    with refused("regions cannot be followed through this preprocessing", InputError):
        preprocess_region(region, preprocess)
        measure_shades(preprocess, (64, 64))
        preprocess_region(blob((64, 64)), preprocess)


def test_a_check_whose_preprocessing_crops_by_content_says_so(tmp_path):
    loaded = camkit.load_model("demo-fair", device="cpu")

    def trimmed(picture):
        inside = np.asarray(picture).max(2) > 0
        rows, columns = np.flatnonzero(inside.any(1)), np.flatnonzero(inside.any(0))
        part = picture.crop((columns[0], rows[0], columns[-1] + 1, rows[-1] + 1)) if len(rows) else picture
        return loaded.preprocess(part)

    for thing, background in (("plane", "sky"), ("ship", "sea")):
        for seed in range(2):
            scene = draw(np.random.default_rng(seed), thing, background, 128)
            pixels, inside = np.pad(scene.image, ((24, 24), (24, 24), (0, 0))), np.pad(scene.mask > 0, 24)
            data = write_masked(tmp_path, f"{thing}/{seed}.png", pixels, inside)

    with pytest.raises(InputError, match="depends on the picture's content"):
        camkit.check(loaded.module, data, preprocess=trimmed, labels=loaded.labels)


# Formats that camkit does not read


def test_annotations_of_another_format_are_refused_with_those_that_camkit_reads(tmp_path: Path) -> None:
    labelme = {"version": "5", "shapes": [{"label": "cat", "points": [[1, 1], [9, 9]]}], "imagePath": "a.jpg"}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.json").write_text(json.dumps(labelme))
    with pytest.raises(InputError, match=r"no regions found in .*other; camkit reads COCO JSON, Pascal VOC XML"):
        formats.read_regions(tmp_path / "other")
    Image.new("RGB", SIZE).save(tmp_path / "a.jpg")
    (tmp_path / "t.csv").write_text("path,label\na.jpg,cat\n")
    assert "no regions (camkit reads COCO JSON, Pascal VOC XML" in read_data(tmp_path / "t.csv").facts[-1]
    coco_file(tmp_path, [row(bbox=[1, 1, 5, 5])])
    (tmp_path / "a.json").write_text(json.dumps(labelme))
    assert [one.format for one in formats.find_regions(tmp_path)] == ["COCO"]


# Broken files

COCO = r"instances\.json is not a COCO file of instances: ."
LINE = r"b\.csv, line 3: expected a picture and four numbers for its box"
NO_NAME = '"annotations": [{"image_id": 1, "category_id": 1, "bbox": [1, 1, 2, 2]}]'
BROKEN: list[tuple[str, str | bytes, str]] = [
    *(
        ("instances.json", coco_text([row(**broken)]), COCO)
        for broken in (
            {"bbox": [1, 2, 3]},
            {"bbox": [1, 2, 3, float("nan")]},
            {"bbox": [1, 2, 3, 4], "segmentation": [[1, 2, 9, float("nan"), 9, 9]]},
            {"segmentation": {"size": FULL}},
        )
    ),
    *(("instances.json", text, COCO) for text in ("[]", b"\xff\xfe\x00\x81")),
    (
        "instances.json",
        f'{{"images": [{{"id": 1, "file_name": ""}}], "categories": [{{"id": 1, "name": "c"}}], {NO_NAME}}}',
        COCO,
    ),
    *(
        ("a.xml", text, r"a\.xml is not a Pascal VOC annotation")
        for text in ("", "<html/>", VOC.format(size=VOC_SIZE, objects=voc_object(1, 1, "five", 5)))
    ),
    *(
        ("labels/a.txt", line, r"a\.txt")
        for line in ("a cat in the garden", "0 .5 .5 .5", "-1 .5 .5 .5 .5", "0 .1 .1 .2 .2 .3 .3 .4", b"\x81 1 2 3 4")
    ),
    ("classes.txt", b"\xff\xfe\x81", r"classes\.txt cannot be read"),
    *(("data.yaml", f"names: {names}", r"data\.yaml cannot be read") for names in ("[a", "cat", "{cat: dog}")),
    *(
        ("b.csv", f"xmin,ymin,xmax,ymax,path\n1,1,3,3,a.jpg\n{line}\n", LINE)
        for line in ("1,2,three,4,a.jpg", "1,2,nan,4,a.jpg", "1,2,3,4", "1,2,3,4,/", "1,2,3,4,a.jpg,5")
    ),
    *(("b.csv", text, r"b\.csv") for text in ("", "path,xmin\n1,2\n", b"path,xmin,ymin,xmax,ymax\n\xff,1,2,3,4\n")),
]


@pytest.mark.parametrize(("name", "content", "message"), BROKEN, ids=range(len(BROKEN)))
def test_a_broken_file_is_refused_in_one_sentence(
    tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    is_yolo = name.endswith(("txt", "yaml"))
    if is_yolo:
        (yolo_folder(tmp_path, "0 0.5 0.5 0.5 0.5") / "b.txt").write_text("0 0.5 0.5 0.5 0.5")
    (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with refused(message, InputError, quotes=True):
        formats.read_regions(tmp_path if is_yolo else tmp_path / name)


@pytest.mark.parametrize("text", ["", "{", "[]", "x" * 200_000, '"unclosed', "a,b\n1,2\n"])
def test_other_files_among_the_pictures_are_no_regions(tmp_path: Path, text: str) -> None:
    for name in ("x.json", "b.csv", "notes.txt"):
        (tmp_path / name).write_text(text)
    assert formats.find_regions(tmp_path) == []


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("- a", r"data\.yaml cannot be read"),
        ("names: [a]", "must name one folder that exists as val, valid, test or train, not none;"),
        ("val: [a, b]\ntrain: train", r"must name one folder that exists as val.*, not \['a', 'b'\], train;"),
        ("val: gone", "must name one folder that exists as val.*, not gone;"),
        ("val: [", "cannot be read"),
    ],
)
def test_a_data_yaml_without_pictures_is_one_sentence(tmp_path: Path, table: str, words: str) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "data.yaml").write_text(table)
    with pytest.raises(InputError, match=words):
        read_data(tmp_path / "data.yaml")
