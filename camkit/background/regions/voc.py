"""Read Pascal VOC XML: one file of boxes per picture, named after it (Everingham et al. 2010)."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from torchvision.datasets import VOCDetection

from camkit.background.regions.table import AnnotationCollector, register
from camkit.background.values import Annotations
from camkit.errors import InputError, brief
from camkit.images.files import files_in
from camkit.types import Box


def find(folder: Path) -> list[Path]:
    """Return the folder that holds the XML files: the pictures' own, or ``Annotations`` in or beside it."""
    for place in (folder, folder / "Annotations", folder / "annotations", folder.parent / "Annotations"):
        if any(_may_be_voc(file) for file in files_in(place, [".xml"])):
            return [place]
    return []


def _may_be_voc(file: Path) -> bool:
    """Return whether a file is VOC or broken; other XML, such as a test report, is neither."""
    try:
        return bool(ElementTree.parse(file).getroot().tag == "annotation")
    except (OSError, ElementTree.ParseError, ValueError, LookupError):
        return True


@register("voc", find)
def read(source: Path) -> Annotations:
    """Read one XML file, or all XML files of annotations in a folder.

    Raises:
        InputError: a file is not a valid VOC annotation.
    """
    collector = AnnotationCollector()
    for file in filter(_may_be_voc, files_in(source, [".xml"])) if source.is_dir() else [source]:
        try:
            annotation = VOCDetection.parse_voc_xml(ElementTree.parse(file).getroot())["annotation"]
            picture = annotation.get("filename") or file.stem
        except (OSError, ElementTree.ParseError, KeyError, AttributeError, ValueError, LookupError) as error:
            raise InputError(f"{file} is not a Pascal VOC annotation: {brief(error)}") from error
        except RecursionError as error:
            raise InputError(f"{file} is not a Pascal VOC annotation: its elements are nested too deeply") from error
        # Pictures in two folders may share a name. Their annotations then lie in folders with the same names.
        subfolder = file.relative_to(source).parent if source.is_dir() else Path()
        try:
            _add_objects(collector, (subfolder / str(picture)).as_posix(), annotation)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(f"{file} has an invalid size, or an object without a valid box: {brief(error)}") from error
    return collector.finish("Pascal VOC", source)


def _add_objects(collector: AnnotationCollector, picture: str, annotation: dict[str, Any]) -> None:
    size = annotation.get("size", {})
    if int(size.get("width", 0)) > 0 and int(size.get("height", 0)) > 0:
        collector.sizes[picture] = (int(size["width"]), int(size["height"]))
    objects = annotation.get("object", [])
    for row in objects if isinstance(objects, list) else [objects]:
        left, top, right, bottom = (float(row["bndbox"][side]) for side in ("xmin", "ymin", "xmax", "ymax"))
        # VOC counts pixels from 1, and the right and bottom pixels belong to the box.
        collector.add(picture, str(row["name"]), Box(left - 1, top - 1, right, bottom))
