"""Find and read the regions of objects: COCO, Pascal VOC, YOLO, mask pictures or a CSV of boxes.

Each format is a module with two functions: ``find`` lists its files or folders for a folder of pictures, and ``read``
reads one of these.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Collection
from pathlib import Path

from camkit.background.regions import boxes, coco, masks, voc, yolo
from camkit.background.regions.annotations import Annotations
from camkit.errors import InputError, refuse_pipe
from camkit.images.files import files_in

__all__ = ["READ", "boxes", "coco", "find_regions", "masks", "read_regions", "voc", "yolo"]

READ = "COCO JSON, Pascal VOC XML, YOLO text, CSV files with the columns path, xmin, ymin, xmax and ymax, and masks"
"""The annotations that camkit reads, in words."""

_READERS = {".csv": boxes.read, ".json": coco.read, ".xml": voc.read}
"""The readers of files that the user names, by their suffix."""


def find_regions(
    folder: Path, classes: Collection[str] = (), table: Path | None = None, *, inside: bool = False
) -> list[Annotations]:
    """Read all regions that are in a folder of pictures or beside it.

    Args:
        folder: the folder.
        classes: folders that hold pictures of a class, even if their names are usual for regions.
        table: the data.yaml that the user named.
        inside: read only what is in the folder.
    """
    found = [(known.read, file) for known in (boxes, coco, masks, voc) for file in known.find(folder)]
    found += [(functools.partial(yolo.read, table=table), file) for file in yolo.find(folder)]
    root = os.path.realpath(folder)
    return [
        read(file)
        for read, file in found
        if file.parent != folder or file.name not in classes
        if not inside or Path(os.path.realpath(file)).is_relative_to(root)
    ]


def read_regions(source: Path, table: Path | None = None) -> list[Annotations]:
    """Read the regions that the user named: a file, or a folder of files.

    Raises:
        InputError: there are no regions in a known format.
    """
    refuse_pipe(source)
    if source.suffix.lower() in _READERS and not source.is_dir():
        return [_READERS[source.suffix.lower()](source)]
    regions = find_regions(source, table=table, inside=True) if source.is_dir() else []
    if not regions and files_in(source, [".png"]):
        regions = [masks.read(source)]
    if not regions and source.is_dir():
        yolo.refuse_empty(source)
    if not regions:
        raise InputError(f"no regions found in {source}; camkit reads {READ}")
    return regions
