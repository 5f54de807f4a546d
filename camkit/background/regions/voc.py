"""Read Pascal VOC XML: one file of boxes per picture, named after it (Everingham et al. 2010)."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from torchvision.datasets import VOCDetection

from camkit.background.regions.annotations import AnnotationCollector, Annotations, are_shares
from camkit.errors import InputError, brief
from camkit.images.files import files_in
from camkit.types import Box


def find(folder: Path) -> list[Path]:
    """Return the folder that holds the XML files: the pictures' own, or ``Annotations`` in or beside it."""
    places = (folder, folder / "Annotations", folder / "annotations", folder.parent / "Annotations")
    return [place for place in places if any(map(_may_be_voc, files_in(place, [".xml"])))][:1]


def _may_be_voc(file: Path) -> bool:
    """Return whether a file is VOC or broken; other XML, such as a test report, is neither."""
    try:
        return bool(parse_xml(file).tag == "annotation")
    except (OSError, ElementTree.ParseError, ValueError, LookupError):
        return True


_ENCODING = re.compile(rb"""\A<\?xml[^>]*\sencoding\s*=\s*["']([\w.-]+)["']""")


def parse_xml(file: Path) -> ElementTree.Element:
    """Return the root of an XML file. Python's parser alone refuses encodings such as GB2312 and Shift JIS.

    Raises:
        OSError, ElementTree.ParseError, ValueError, LookupError: the file cannot be read.
    """
    content = file.read_bytes()
    encoding = _ENCODING.match(content)
    if encoding is None:
        return ElementTree.fromstring(content)
    name = encoding[1].decode().lower()
    # Files that call themselves GB2312 often hold characters of its supersets.
    return ElementTree.fromstring(content.decode("gb18030" if name in ("gb2312", "gbk") else name))


def read(source: Path) -> Annotations:
    """Read one XML file, or all XML files of annotations in a folder.

    Either all boxes are in pixels, or all are in shares of the picture.

    Raises:
        InputError: a file is not a valid VOC annotation.
    """
    collector = AnnotationCollector()
    rows: list[tuple[str, str, Box]] = []
    for file in filter(_may_be_voc, files_in(source, [".xml"])) if source.is_dir() else [source]:
        try:
            annotation = VOCDetection.parse_voc_xml(parse_xml(file))["annotation"]
            picture = annotation.get("filename") or file.stem
        except (OSError, ElementTree.ParseError, KeyError, AttributeError, ValueError, LookupError) as error:
            raise InputError(f"{file} is not a Pascal VOC annotation: {brief(error)}") from error
        # Pictures in two folders may share a name. Their annotations then lie in folders with the same names.
        subfolder = file.relative_to(source).parent if source.is_dir() else Path()
        try:
            rows += _parse_objects(collector, (subfolder / str(picture)).as_posix(), annotation)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(f"{file} has an invalid size, or an object without a valid box: {brief(error)}") from error
    shares = are_shares(box for _, _, box in rows)
    for picture, name, box in rows:
        # VOC counts pixels from 1, and the right and bottom pixels belong to the box.
        collector.add(picture, name, box if shares else Box(box.left - 1, box.top - 1, *box[2:]), shares=shares)
    return collector.finish("Pascal VOC", source)


def _parse_objects(
    collector: AnnotationCollector, picture: str, annotation: dict[str, Any]
) -> list[tuple[str, str, Box]]:
    size = annotation.get("size", {})
    if int(size.get("width", 0)) > 0 and int(size.get("height", 0)) > 0:
        collector.sizes[picture] = (int(size["width"]), int(size["height"]))
    objects = annotation.get("object", [])
    rows = []
    for row in objects if isinstance(objects, list) else [objects]:
        box = Box(*(float(row["bndbox"][side]) for side in ("xmin", "ymin", "xmax", "ymax")))
        if not all(map(math.isfinite, box)):
            raise ValueError(f"the sides of a box must be finite, not {tuple(box)}")
        rows.append((picture, str(row["name"]), box))
    return rows
