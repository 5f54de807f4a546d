"""From picture files to a diagnosis and its reports; what the command line calls."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from camkit.diagnosis import Diagnosis, diagnose
from camkit.diagnosis.report import json, picture
from camkit.drawing.encode import encode
from camkit.errors import InputError
from camkit.images.files import check_folder, write_file
from camkit.models.loaded import LoadedModel
from camkit.types import Precision

REPORTS = ("diagnose.json", "diagnose.png")


def diagnose_files(
    model: LoadedModel,
    pictures: Sequence[Path],
    out: Path,
    *,
    training: bool = False,
    precision: Precision = "fp32",
    limit: int = 32,
) -> Diagnosis:
    """Diagnose a model with picture files as one batch, and write the reports into a folder.

    Args:
        model: as ``camkit.load_model`` gives it, with ``trainable=True`` to see which parameters are frozen.
        pictures: files; of more than ``limit``, so many are taken, spread evenly.
        out: the folder; it is made.
        training, precision: as for ``camkit.diagnose``.
        limit: pictures in the batch.

    Raises:
        InputError: a picture cannot be read, the model cannot be used, or the folder cannot be written to.
    """
    if limit < 1:
        raise InputError(f"the limit is a number of pictures from 1, not {limit}")
    check_folder(out)
    taken = (
        [pictures[number * len(pictures) // limit] for number in range(limit)] if len(pictures) > limit else pictures
    )
    found = diagnose(model, list(taken), training=training, precision=precision)
    write_file(out / REPORTS[0], f"{json.render(found)}\n".encode())
    write_file(out / REPORTS[1], encode(picture.draw(found)))
    return found
