"""Pascal VOC XML: one file of boxes per picture, named as the picture is (Everingham et al. 2010)."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from torchvision.datasets import VOCDetection

from camkit.background.regions.table import Collected, register
from camkit.background.values import Annotations
from camkit.errors import InputError
from camkit.types import Box


def find(folder: Path) -> list[Path]:
    """Return the folder that holds the files: that of the pictures, or ``Annotations``."""
    for place in (folder, folder / "Annotations", folder / "annotations", folder.parent / "Annotations"):
        if any(_may_be_one(file) for file in place.rglob("*.xml")):
            return [place]
    return []


def _may_be_one(file: Path) -> bool:
    """Whether a file is not plainly something else, such as a report of tests; a broken one may be meant for one."""
    try:
        return bool(ElementTree.parse(file).getroot().tag == "annotation")
    except (OSError, ElementTree.ParseError, ValueError, LookupError):
        return True


@register("voc", find)
def read(place: Path) -> Annotations:
    """Read every XML file of annotations below a folder, or one.

    Raises:
        InputError: a file is not VOC's.
    """
    collected = Collected()
    for file in sorted(filter(_may_be_one, place.rglob("*.xml"))) if place.is_dir() else [place]:
        try:
            tree = VOCDetection.parse_voc_xml(ElementTree.parse(file).getroot())["annotation"]
            named = tree.get("filename") or file.stem
        except (OSError, ElementTree.ParseError, KeyError, AttributeError, ValueError, LookupError) as error:
            raise InputError(f"{file} is not an annotation of Pascal VOC: {error}") from error
        # Pictures of two folders may have one name; the annotation lies in a folder of the same name as its picture.
        beside = file.relative_to(place).parent if place.is_dir() else Path()
        name = (beside / str(named)).as_posix()
        try:
            size = tree.get("size", {})
            if int(size.get("width", 0)) > 0 and int(size.get("height", 0)) > 0:
                collected.sizes[name] = (int(size["width"]), int(size["height"]))
            objects = tree.get("object", [])
            for row in objects if isinstance(objects, list) else [objects]:
                corners = (float(row["bndbox"][side]) for side in ("xmin", "ymin", "xmax", "ymax"))
                left, top, right, bottom = corners
                # VOC counts pixels from 1, and its corners are inside.
                collected.add(name, str(row["name"]), Box(left - 1, top - 1, right, bottom))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(f"{file} has a size or an object without a proper box: {error}") from error
    return collected.done("Pascal VOC", place)
