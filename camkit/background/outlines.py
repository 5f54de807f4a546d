"""Masks from boxes, for people who have only boxes: ``regions`` outlines the object in each box.

boxes of annotations or of a detector -> a row for each picture, with its outlines -> a COCO file, and a page on which a
person judges each outline. The check reads the COCO file, and the one that the page saves.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import shlex
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import cv2
import numpy as np
import torch
from jaxtyping import Bool
from PIL import Image
from pydantic import TypeAdapter

from camkit.background.data import Item
from camkit.background.regions import (
    ObjectAnnotation,
    RegionIndex,
    clip_box,
    find_regions,
    in_pixels,
    object_region,
    pictures_of,
    read_regions,
    unmatched,
)
from camkit.background.report import filled
from camkit.drawing.encode import as_address, pixels_of, shrink
from camkit.drawing.figure import scaled_box
from camkit.drawing.overlay import stretch
from camkit.engine.passes import quiet_pass
from camkit.engine.streams import Task, in_order
from camkit.errors import ImageError, InputError, advice, refusing_exit
from camkit.explaining.explanation import box_on_picture
from camkit.images.files import set_aside, write_file
from camkit.images.listing import find_pictures
from camkit.images.prepare import Prepared, located, prepare
from camkit.images.read import open_picture
from camkit.images.regions import CropBoxes, extent
from camkit.kit.pages import allowed_script
from camkit.kit.store import Journal, PictureRow, RowKind, describe, digest, digest_of_weights
from camkit.kit.wording import VERSION
from camkit.models import as_model, device_of, dtype_of
from camkit.models.loaded import Loadable, LoadedModel
from camkit.targets.places import best_masks, boxes_in
from camkit.targets.scores import label_of, number_from_0
from camkit.types import Box, Pixels

COCO_FILE, PAGE = "instances.json", "regions.html"
"""What ``regions`` writes: the masks, and the page to look at them."""

GRABCUT = "grabcut"
"""What outlines objects without a model."""

Region: TypeAlias = Bool[np.ndarray, "h w"]
Cut: TypeAlias = Callable[[Box], Region]
"""Returns the object in a box of one picture, over the whole picture."""


@dataclass(frozen=True, eq=False)
class OutlinedRow(PictureRow):
    """The size of a picture and its objects, as COCO annotations with their category's name; or why it has none."""

    size: tuple[int, int] = (0, 0)
    objects: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""


_ROWS = RowKind("regions", TypeAdapter(OutlinedRow))


@refusing_exit()
def regions(
    data: str | Path,
    *,
    regions: str | Path | None = None,
    boxes_of: Loadable | None = None,
    threshold: float = 0.5,
    by: Loadable = GRABCUT,
    out: str | Path = "camkit-regions",
    resume: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Outline the object in each box, for a check of pictures that have only boxes. Outlines that exist are kept.

    Args:
        data: a folder of pictures, a table in such a folder, or the data.yaml of a YOLO data set.
        regions: the file or folder with the boxes. None searches beside the pictures, as the check does.
        boxes_of: a detector, as ``camkit.explain`` takes it, whose boxes are outlined instead.
        threshold: the score above which a box of the detector counts.
        by: "grabcut" (Rother et al. 2004), which needs no model, or a network that takes boxes, such as SAM.
        out: the folder for ``instances.json`` (COCO), and for ``regions.html``, on which a person judges each outline
            and saves a new ``instances.json``. Earlier files are renamed to begin with ``before-``.
        resume: continue an interrupted run.
        progress: called with the number of finished pictures and the number of all.

    Returns:
        The path of ``instances.json``, which ``camkit.check(..., regions=...)`` takes. A warning names each picture
        that cannot be used.

    Raises:
        InputError: there are no boxes.
        ModelError: a model cannot be loaded.
        OutputError: a file cannot be written.
        TargetError: the threshold is not from 0 to 1.

    Examples:
        >>> import camkit  # doctest: +SKIP
        >>> masks = camkit.regions("photos/", regions="boxes.csv")  # doctest: +SKIP
        >>> camkit.check("resnet50", "photos/", regions=masks)  # doctest: +SKIP
    """
    threshold = number_from_0(threshold, "the threshold is the score above which a box counts, from 0 to 1", 1)
    data, out = Path(data), Path(out)
    for given in (data, regions):
        if given is not None and not Path(given).exists():
            raise InputError(f"{given} does not exist; name the pictures, and the file or folder with their boxes")
    table = data if data.suffix in (".yaml", ".yml") else None
    root = pictures_of(table) if table else data.parent if data.is_file() else data
    files = {file.relative_to(root).as_posix(): file for file in find_pictures([root], out)}
    detector = None if boxes_of is None else as_model(boxes_of)
    promptable = None if by == GRABCUT else as_model(by)
    sources = []
    if detector is None:
        sources = find_regions(root, table=table) if regions is None else read_regions(Path(regions), table)
    indexes = [RegionIndex(source, files) for source in sources]
    for index in indexes:
        if len(index.objects) < len(index.source.objects):
            warnings.warn(index.coverage(root), stacklevel=3)
    items = [
        Item(name, file, "", name, tuple(each for index in indexes for each in index.objects.get(name, ())))
        for name, file in files.items()
    ]
    items = [item for item in items if item.objects or detector is not None]
    if not items:
        boxes = advice("regions=... or boxes_of=...", "--regions PATH or --boxes-of MODEL")
        none = f"camkit found none in or beside {data}; name them with {boxes}"
        raise InputError(f"no picture has a box: {unmatched((), [*files], indexes) if files and sources else none}")
    stats = {item.name: files[item.name].stat() for item in items}
    contents = [(item.name, stats[item.name].st_size, stats[item.name].st_mtime_ns, item.objects) for item in items]
    made_with = {
        "version of camkit": VERSION,
        "pictures and boxes": digest(describe(contents)),
        "detector": "" if detector is None else f"{digest_of_weights(detector.module)} {threshold}",
        "outlines": GRABCUT if promptable is None else digest_of_weights(promptable.module),
    }
    outlined = functools.partial(
        _outlined, detector=detector, threshold=threshold, promptable=promptable, places=CropBoxes()
    )
    without_model, workers = detector is None and promptable is None, os.cpu_count() or 1

    def rows_of(todo: Sequence[Item]) -> Iterator[OutlinedRow]:
        tasks = (Task(functools.partial(outlined, item), without_model) for item in todo)
        return in_order(tasks, workers=workers, ahead=2 * workers)

    instead = advice("start again without resume=True", "start again without --resume")
    with Journal(out / "unfinished.jsonl", made_with, resume=resume, instead=instead) as journal:
        rows = journal.complete(_ROWS, items, rows_of, progress or (lambda *_: None)).values()
        errors = [row.error for row in rows if row.error]
        for error in errors:
            warnings.warn(error, stacklevel=3)
        content = _coco([row for row in rows if row.objects])
        if not content["annotations"]:
            raise InputError(f"no picture has a box that can be used: {[*errors, 'none was found'][0]}")
        set_aside(out, [COCO_FILE, PAGE])
        write_file(out / COCO_FILE, json.dumps(content).encode())  # first, so that a page that fails loses no mask
        write_file(out / PAGE, _page(content, root).encode())
        journal.delete()
    return out / COCO_FILE


def _outlined(
    item: Item, detector: LoadedModel | None, threshold: float, promptable: LoadedModel | None, places: CropBoxes
) -> OutlinedRow:
    try:
        picture = item.open()
        objects = list(in_pixels(item.objects, picture.size))
        if detector is not None:
            objects = _detected(detector, threshold, *_answered(detector, picture, item.name, places))
        cut: Cut = functools.partial(grabcut, pixels_of(picture))
        if promptable is not None:
            cut = functools.partial(_prompted, promptable, *_answered(promptable, picture, item.name, places))
        return OutlinedRow(item.name, picture.size, list(_annotations(objects, picture.size, cut)))
    except ImageError as error:
        return OutlinedRow(item.name, error=item.named_in(error))


def _answered(model: LoadedModel, picture: Image.Image, name: str, places: CropBoxes) -> tuple[Prepared, Any]:
    """Return a picture as the model's input, and what the model returns for it."""
    prepared = located(prepare(picture, model.preprocess, name), model.preprocess, places)
    device = device_of(model.module)
    with quiet_pass(model.module, device, "fp32"):
        return prepared, model.module(prepared.tensor[None].to(device, dtype_of(model.module)))


def _detected(model: LoadedModel, threshold: float, prepared: Prepared, output: Any) -> list[ObjectAnnotation]:
    if prepared.picture is None:  # its crop box is unknown
        why = "because the model's preprocessing does more than resize, crop, pad and change colours"
        instead = advice("regions=...", "--regions PATH")
        raise ImageError(f"camkit cannot follow the detector's boxes to the picture, {why}; give boxes with {instead}")
    (found,) = boxes_in(output, 1)
    objects = []
    for number in torch.nonzero(found["scores"] > threshold).flatten().tolist():
        label = int(found["labels"][number]) if "labels" in found else None
        name = "" if label is None else label_of(label, model.labels) or str(label)
        corners, size = tuple(found["boxes"][number].tolist()), tuple(prepared.tensor.shape[1:])
        objects.append(ObjectAnnotation(name, box_on_picture(corners, prepared, size)))
    return objects


def _prompted(model: LoadedModel, prepared: Prepared, output: Any, box: Box) -> Region:
    """Return the mask of what lies in a box, from what a network such as SAM returned for the picture."""
    corners = torch.tensor([[prepared.to_input(*box[:2]), prepared.to_input(*box[2:])]])
    with quiet_pass(model.module, device_of(model.module), "fp32"):
        logits = best_masks(output, corners)[0].float().cpu().numpy()
    assert prepared.box is not None and prepared.picture is not None  # without them, to_input raises
    return stretch(logits, prepared.box, prepared.picture.size[::-1]) > 0


def grabcut(pixels: Pixels, box: Box, *, iterations: int = 3, side: int = 256, margin: float = 0.25) -> Region:
    """Return the object in a box by GrabCut (Rother et al. 2004), which takes what is outside the box as background.

    Args:
        pixels: the picture (H, W, 3).
        box: the box, in its pixels.
        iterations: how often GrabCut learns the colours of the object and of the background.
        side: the longer side in pixels of what it sees; a larger part of the picture is made smaller.
        margin: how far it sees beyond the box, as a share of the box's sides.

    Returns:
        The object's pixels (H, W), without holes; none if there is no background or GrabCut finds no object.
    """
    across, down = margin * (box.right - box.left), margin * (box.bottom - box.top)
    left, top = max(0, math.floor(box.left - across)), max(0, math.floor(box.top - down))
    part = pixels[top : math.ceil(box.bottom + down), left : math.ceil(box.right + across)]
    small = shrink(part, min(side, max(part.shape[:2])))
    in_part = Box(box.left - left, box.top - top, box.right - left, box.bottom - top)
    on_small = scaled_box(in_part, part.shape[:2], small.shape[:2])
    inside = object_region([ObjectAnnotation("", on_small)], (small.shape[1], small.shape[0]))
    region = np.zeros(pixels.shape[:2], bool)
    if inside.all():
        return region
    states = np.where(inside, cv2.GC_PR_FGD, cv2.GC_BGD).astype(np.uint8)
    cv2.setRNGSeed(0)  # of this thread, so that a picture gets the same outline in every run
    cv2.grabCut(small, states, None, np.zeros((1, 65)), np.zeros((1, 65)), iterations, cv2.GC_INIT_WITH_MASK)
    found = (states == cv2.GC_PR_FGD).astype(np.uint8)
    outlines, _ = cv2.findContours(found, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_NONE)
    filled = cv2.drawContours(found, outlines, -1, 1, cv2.FILLED).astype(np.float32)
    region[top : top + part.shape[0], left : left + part.shape[1]] = cv2.resize(filled, part.shape[1::-1]) > 0.5
    return region


_LEAST_SHARE = 0.05
"""A mask that covers less of its box did not find the object: of 120 outlined animals, none covers less than 0.1."""


def _annotations(objects: Sequence[ObjectAnnotation], size: tuple[int, int], cut: Cut) -> Iterator[dict[str, Any]]:
    """Yield objects as COCO annotations. Outlines and crowds stay, and what lies beside the picture is left out.

    ``from_box`` says what outlined the object: "cut", or "ellipse" if that found nothing. ``fit`` is the share of the
    box that the mask's own box covers, times the share of the box's sides along which the mask does not run.
    """
    for each in objects:
        region, of_box = object_region([each], size), {}
        if not region.any():
            continue
        box = (each.box and clip_box(each.box, size)) or Box(*extent(torch.from_numpy(region)))
        if each.outline is None and not each.crowd:
            inside, region = region, cut(box)
            if (region & inside).sum() < _LEAST_SHARE * inside.sum():
                region, of_box = object_region([each], size, round_boxes=True), {"from_box": "ellipse", "fit": 0.0}
            else:
                of_box = {"from_box": "cut", "fit": _fit(region, inside)}
        pixels = region.T.ravel()
        ends = [0, *(np.flatnonzero(np.diff(pixels)) + 1).tolist(), pixels.size]
        runs = np.diff(ends).tolist()
        yield {
            "category": each.category,
            "bbox": [box.left, box.top, box.right - box.left, box.bottom - box.top],
            "area": int(region.sum()),
            "iscrowd": int(each.crowd),
            # The first run is outside the object
            "segmentation": {"size": [*region.shape], "counts": [0, *runs] if pixels[0] else runs},
            **of_box,
        }


def _fit(region: Region, inside: Region) -> float:
    left, top, right, bottom = extent(torch.from_numpy(inside))
    part = region[top:bottom, left:right]
    reached = [int(np.ptp(np.flatnonzero(part.any(axis)))) + 1 for axis in (0, 1)]
    beside = 1 - np.mean([side.mean() for side in (part[0], part[-1], part[:, 0], part[:, -1])])
    return round(float(reached[0] * reached[1] / part.size * beside), 4)


def _coco(rows: Sequence[OutlinedRow]) -> dict[str, Any]:
    names = sorted({made["category"] for row in rows for made in row.objects})
    images = [
        {"id": number, "file_name": row.name, "width": row.size[0], "height": row.size[1]}
        for number, row in enumerate(rows, start=1)
    ]
    made = [(number, made) for number, row in enumerate(rows, start=1) for made in row.objects]
    annotations = [
        {"id": of, "image_id": number, "category_id": names.index(made["category"]) + 1, **made}
        for of, (number, made) in enumerate(made, start=1)
    ]
    categories = [{"id": number, "name": name} for number, name in enumerate(names, start=1)]
    return {"images": images, "annotations": annotations, "categories": categories}


def _page(content: dict[str, Any], root: Path) -> str:
    """Return the page with all outlines of boxes on their pictures, the worst fit first."""
    names = {image["id"]: image["file_name"] for image in content["images"]}
    cards = []
    for image, made in itertools.groupby(content["annotations"], key=lambda made: made["image_id"]):
        cut = [each for each in made if "from_box" in each]
        pixels = pixels_of(open_picture(root / names[image])) if cut else None
        cards += [_card(names[image], pixels, each) for each in cut if pixels is not None]
    cards.sort(key=lambda card: card["fit"])
    return filled(
        "regions.html",
        cards=cards,
        content=content,
        data=root.name,
        quoted=shlex.quote(root.name or "."),
        made=digest(json.dumps(content))[:12],
        **allowed_script(filled("regions.js")),
    )


_SIDE = 360
"""The longer side of a picture on the page, in pixels."""


def _card(name: str, pixels: Pixels, made: dict[str, Any]) -> dict[str, Any]:
    """Return an outline as the page shows it: the part of the picture around its box, and paths on this part."""
    left, top, width, height = made["bbox"]
    around = 0.3 * max(width, height)
    rows = slice(max(0, math.floor(top - around)), math.ceil(top + height + around))
    columns = slice(max(0, math.floor(left - around)), math.ceil(left + width + around))
    part = pixels[rows, columns]
    shown = shrink(part, _SIDE)
    outline = ObjectAnnotation("", outline=made["segmentation"])
    region = object_region([outline], (pixels.shape[1], pixels.shape[0]))[rows, columns].astype(np.uint8)
    on_page = cv2.resize(region, shown.shape[1::-1], interpolation=cv2.INTER_AREA)
    outlines, _ = cv2.findContours(on_page, cv2.RETR_CCOMP, cv2.CHAIN_APPROX_SIMPLE)
    left, top = left - columns.start, top - rows.start
    corners = scaled_box(Box(left, top, left + width, top + height), part.shape[:2], shown.shape[:2])
    return {
        "id": made["id"],
        "name": name,
        "category": made["category"],
        "picture": as_address(shown, kind="jpeg"),
        "size": shown.shape[:2],
        "outline": " ".join("M" + " ".join(map(str, points.ravel())) + "Z" for points in outlines),
        "box": corners,
        "share": made["area"] / (width * height),
        "ellipse": made["from_box"] == "ellipse",
        "fit": made["fit"],
    }
