"""A folder of evidence: for each explanation its overlay, its figure and its raw map, and one manifest for all.

Somebody else can read it without the model, see what was computed with which versions and weights, and tell whether a
file has changed since.
"""

from __future__ import annotations

import itertools
import json
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from camkit.errors import InputError, OutputError, advice, as_error, brief
from camkit.explanation import Explanation, Explanations, finite_or_none, sharing_scale
from camkit.images.files import check_folder, write_file
from camkit.kit.fingerprint import Fingerprint, digest
from camkit.scale.naming import slug
from camkit.scale.schema import explanation_of, row_of
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
        row = row_of(explanation)
        picture = Path(explanation.source)
        self._rows.append(
            {
                **{key: value for key, value in row.items() if key not in ("raw", "raw_scale", "drawing", "error")},
                "score": finite_or_none(explanation.score),
                "picture_sha256": digest(picture.read_bytes()) if picture.is_file() else None,
                "files": files,
            }
        )

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


def read_bundle(folder: Path) -> Explanations:
    """Read the explanations of a bundle; their raw maps are exactly those of the run.

    Raises:
        InputError: the manifest is damaged, or a map or a drawing is missing or is not as it was written.
    """
    file = folder / MANIFEST
    with as_error(InputError, lambda error: f"{file} cannot be read: {brief(error)}"):
        about = json.loads(file.read_bytes())
        home, rows = Path(about["folder"]), list(about["explanations"])
        found = [_explanation(folder, home, row) for row in rows]
    explanations = Explanations()
    for _, group in itertools.groupby(found, key=lambda each: each.source):
        explanations.extend(sharing_scale(list(group)))
    return explanations


def _explanation(folder: Path, home: Path, row: dict[str, Any]) -> Explanation:
    contents = {kind: _as_written(folder, about) for kind, about in row["files"].items()}
    raw = np.load(BytesIO(contents["raw"]), allow_pickle=False)
    return explanation_of({**row, "raw": np.zeros(raw.size, np.float16), "raw_scale": 1.0}, home, exact=raw)


def _as_written(folder: Path, about: dict[str, str]) -> bytes:
    """Return what a file of the manifest holds, if it is as it was written."""
    file = folder / Path(about["name"]).name  # never a file elsewhere
    if not file.is_file():
        raise InputError(f"{folder / MANIFEST} names {file.name}, but there is no such file")
    contents = file.read_bytes()
    if digest(contents) != about["sha256"]:
        raise InputError(f"{file} is not as it was written: its checksum differs from that in {MANIFEST}")
    return contents
