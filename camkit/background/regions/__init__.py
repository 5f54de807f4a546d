"""Find and read the regions of objects: COCO, Pascal VOC, YOLO, mask pictures or a CSV of boxes."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from camkit.background.regions import boxes, coco, masks, voc, yolo
from camkit.background.regions.annotations import Annotations
from camkit.background.regions.masks import holds_photographs
from camkit.errors import InputError, refuse_pipe
from camkit.images.files import files_in

__all__ = [
    "FORMATS",
    "READ",
    "RegionFormat",
    "boxes",
    "coco",
    "find_regions",
    "holds_photographs",
    "masks",
    "read_regions",
    "voc",
    "yolo",
]


READ = "COCO JSON, Pascal VOC XML, YOLO text, CSV files with the columns path, xmin, ymin, xmax and ymax, and masks"
"""The annotations that camkit reads, in words."""


@dataclass(frozen=True)
class RegionFormat:
    """A format.

    Attributes:
        find: lists its files or folders for a folder of pictures.
        read: reads one of these.
        extension: the extension of a file that has this format if the user names it; "" if the format is a folder.
    """

    find: Callable[[Path], list[Path]]
    read: Callable[[Path], Annotations]
    extension: str = ""


FORMATS = {
    "boxes": RegionFormat(boxes.find, boxes.read, ".csv"),
    "coco": RegionFormat(coco.find, coco.read, ".json"),
    "masks": RegionFormat(masks.find, masks.read),
    "voc": RegionFormat(voc.find, voc.read, ".xml"),
    "yolo": RegionFormat(yolo.find, yolo.read),
}
"""The formats that camkit reads, by name."""


def find_regions(folder: Path, classes: Collection[str] = (), table: Path | None = None) -> list[Annotations]:
    """Read all regions that are in a folder of pictures or beside it.

    ``classes`` are folders that hold pictures of a class, even if their names are usual for regions. ``table`` is the
    data.yaml that the user named.
    """
    files = [(known, file) for known in FORMATS.values() for file in known.find(folder)]
    return [_read(known, file, table) for known, file in files if file.parent != folder or file.name not in classes]


def read_regions(source: Path, table: Path | None = None) -> list[Annotations]:
    """Read the regions that the user named: a file, or a folder of files.

    Raises:
        InputError: there are no regions in a known format.
    """
    refuse_pipe(source)
    regions: list[Annotations] = []
    if source.is_dir():
        files = [(known, file) for known in FORMATS.values() for file in known.find(source)]
        inside = os.path.realpath(source)  # a format also looks beside the folder, but only this one was named
        own = [(known, file) for known, file in files if Path(os.path.realpath(file)).is_relative_to(inside)]
        regions = [_read(known, file, table) for known, file in own]
        if not regions and files_in(source, [".png"]):
            regions = [masks.read(source)]
    else:
        regions = [
            known.read(source) for known in FORMATS.values() if known.extension == (source.suffix.lower() or None)
        ]
    if not regions:
        raise InputError(f"no regions found in {source}; camkit reads {READ}")
    return regions


def _read(known: RegionFormat, file: Path, table: Path | None) -> Annotations:
    return yolo.read(file, table) if known.read is yolo.read else known.read(file)
