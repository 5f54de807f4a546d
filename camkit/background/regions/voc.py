"""Read Pascal VOC XML: one file of boxes per picture, named after it (Everingham et al. 2010)."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

from torchvision.datasets import VOCDetection

from camkit.background.regions.annotations import AnnotationCollector, Annotations
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
    for file in filter(_may_be_voc, files_in(source, [".xml"])) if source.is_dir() else [source]:
        # Pictures in two folders may share a name. Their annotations then lie in folders with the same names.
        subfolder = file.relative_to(source).parent if source.is_dir() else Path()
        try:
            annotation = VOCDetection.parse_voc_xml(parse_xml(file))["annotation"]
            picture = (subfolder / str(annotation.get("filename") or file.stem)).as_posix()
            width, height = (int(annotation.get("size", {}).get(side, 0)) for side in ("width", "height"))
            if width > 0 and height > 0:
                collector.sizes[picture] = (width, height)
            objects = annotation.get("object", [])
            for row in objects if isinstance(objects, list) else [objects]:
                box = Box(*(float(row["bndbox"][side]) for side in ("xmin", "ymin", "xmax", "ymax")))
                collector.add(picture, str(row["name"]), box)
        except (OSError, ElementTree.ParseError, LookupError, AttributeError, TypeError, ValueError) as error:
            cause = f"no {error}" if isinstance(error, KeyError) else brief(error)
            raise InputError(f"{file} is not a Pascal VOC annotation with a box for each object: {cause}") from error
    return collector.finish("Pascal VOC", source, first=1)  # VOC counts pixels from 1
