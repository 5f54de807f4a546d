"""Diagnose a model on picture files and write the reports; the command line calls this."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from camkit.diagnosis.diagnosis import Diagnosis, diagnose
from camkit.drawing.encode import encode
from camkit.errors import InputError
from camkit.images.files import check_folder, set_aside, write_file
from camkit.models.loaded import LoadedModel
from camkit.types import Precision

REPORTS = ("diagnose.json", "diagnose.png")
"""The files that a diagnosis writes."""

VERSION = 1
"""The version of the JSON format, raised when a field is removed or changes its meaning."""


def as_json(result: Diagnosis) -> str:
    """Return a diagnosis as strict JSON in ASCII, which every terminal and pipe can handle."""
    return json.dumps({"version": VERSION, **result.to_dict()}, allow_nan=False)


def diagnose_files(
    model: LoadedModel,
    pictures: Sequence[Path],
    out: Path,
    *,
    training: bool = False,
    precision: Precision = "fp32",
    limit: int = 32,
) -> Diagnosis:
    """Diagnose a model on picture files as one batch, and write the reports into a folder.

    The reports of an earlier run are kept as ``before-diagnose.json`` and ``before-diagnose.png``.

    Args:
        model: a model from ``camkit.load_model``, with ``trainable=True`` to see which parameters are frozen.
        pictures: picture files.
        out: the folder for the reports; it is created if it does not exist.
        training, precision: as for ``camkit.diagnose``.
        limit: use at most this many pictures, spread evenly over the files.

    Raises:
        InputError: a picture cannot be read, the model cannot be used, or the folder cannot be written to.
    """
    if limit < 1:
        raise InputError(f"limit must be at least 1 picture, not {limit}")
    check_folder(out)
    if len(pictures) > limit:
        pictures = [pictures[number * len(pictures) // limit] for number in range(limit)]
    result = diagnose(model, list(pictures), training=training, precision=precision)
    set_aside(out, REPORTS)
    write_file(out / "diagnose.json", f"{as_json(result)}\n".encode())
    write_file(out / "diagnose.png", encode(result.sheet()))
    return result
