"""A folder of evidence: for each explanation its overlay, its figure and its raw map, and one manifest for all.

Somebody else can read it without the model, see what was computed with which versions and weights, and compare the
checksums of the files.
"""

from __future__ import annotations

import itertools
import json
import platform
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from camkit.errors import InputError, OutputError, advice, as_error, brief, refuse_pipe, text_of
from camkit.explanation import Explanation, Explanations, explanation_of, sharing_scale
from camkit.images.files import check_folder, write_file
from camkit.kit.fingerprint import Fingerprint, digest
from camkit.scale.job import slug
from camkit.scale.table import read_table
from camkit.types import Failure

MANIFEST = "manifest.json"

_PACKAGES = ("camkit", "torch", "torchvision", "timm", "transformers", "onnxruntime", "numpy", "opencv-python-headless")
"""The packages whose versions can change a map."""

_FORMAT = 3
"""The version of the manifest, raised when a field is removed or changes its meaning."""


class Bundle:
    """A folder of evidence that is being made; ``close`` writes its manifest.

    Args:
        folder: the folder.
        made_with: what decides the maps: the model, its weights and the settings.
        overwrite: replace the files of an earlier bundle.

    Raises:
        OutputError: the folder is not empty, or it cannot be written.
    """

    def __init__(self, folder: Path, made_with: Fingerprint, *, overwrite: bool = False) -> None:
        check_folder(folder)
        if not overwrite and folder.is_dir() and any(folder.iterdir()):
            instead = advice("overwrite=True", "--overwrite")
            raise OutputError(f"{folder} is not empty; name another folder, or pass {instead}")
        self._folder, self._made_with = folder, made_with
        self._rows: list[dict[str, Any]] = []
        self._failures: list[dict[str, str]] = []

    def add(self, explanation: Explanation, drawing: Mapping[str, Any]) -> None:
        """Write the files of an explanation.

        Args:
            explanation: the explanation.
            drawing: the arguments of ``Explanation.overlay``, without the style.

        Raises:
            OutputError: a file cannot be written.
        """
        name = f"{len(self._rows) + 1:04d}-{slug(Path(explanation.source).stem)}.{slug(explanation.name)}"
        files = {}
        for style in ("overlay", "figure"):
            explanation.save(self._folder / f"{name}.{style}.png", style=style, **drawing)
            files[style] = self._named(f"{name}.{style}.png")
        cells = BytesIO()
        np.save(cells, explanation.raw, allow_pickle=False)
        write_file(self._folder / f"{name}.npy", cells.getvalue())
        files["raw"] = self._named(f"{name}.npy")
        picture = Path(explanation.source)
        checksum = digest(picture.read_bytes()) if picture.is_file() else None
        values = {"path": text_of(picture), **explanation.values(), "picture_sha256": checksum, "files": files}
        self._rows.append({name: values[name] for name in values if name != "source"})

    def fail(self, failure: Failure) -> None:
        """Record a picture that could not be explained."""
        self._failures.append({"path": failure.source, "error": str(failure.error)})

    def close(self) -> Path:
        """Write the manifest, and return its file.

        Raises:
            OutputError: it cannot be written.
        """
        about = {
            "format": _FORMAT,
            "folder": str(Path.cwd()),
            "versions": {"python": platform.python_version(), **_versions()},
            "made_with": self._made_with,
            "explanations": self._rows,
            "failures": self._failures,
        }
        write_file(self._folder / MANIFEST, json.dumps(about, indent=1, allow_nan=False).encode())
        return self._folder / MANIFEST

    def _named(self, file: str) -> dict[str, str]:
        return {"name": file, "sha256": digest((self._folder / file).read_bytes())}


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def read(path: str | Path) -> Explanations:
    """Read a table that ``camkit --table`` wrote, or is writing, or a folder that ``camkit --bundle`` wrote.

    The maps of a table have the precision of 16 bits; those of a bundle are exact. Pictures are read from their files
    when they are first drawn; relative paths start at the folder in which the run was started. Rows of pictures that
    could not be explained are left out.

    Returns:
        The Explanations, in the order of the table.

    Raises:
        InputError: there is no such table, or it is damaged, or it needs pyarrow.
    """
    path, explanations = Path(path), Explanations()
    refuse_pipe(path)
    file = path / MANIFEST
    is_bundle = file.is_file()
    with as_error(InputError, lambda error: f"{file if is_bundle else path} cannot be read: {brief(error)}"):
        found = _read_bundle(path) if is_bundle else read_table(path)
        for _, of_picture in itertools.groupby(found, key=lambda each: each.source):
            explanations.extend(sharing_scale(list(of_picture)))
    return explanations


def _read_bundle(folder: Path) -> Iterator[Explanation]:
    about = json.loads((folder / MANIFEST).read_bytes())
    for row in about["explanations"]:
        map_file = folder / Path(row["files"]["raw"]["name"]).name  # never a file elsewhere
        raw = np.load(map_file, allow_pickle=False)
        yield explanation_of({**row, "source": row["path"]}, raw, Path(about["folder"]))
