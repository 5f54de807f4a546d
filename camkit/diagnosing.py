"""From picture files to a diagnosis and its reports; what the command line calls."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from camkit import overlay
from camkit.diagnosis import Diagnosis, diagnose
from camkit.errors import InputError
from camkit.report import diagnosis_json, diagnosis_picture
from camkit.values import LoadedModel, Precision

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
    overlay.check_folder(out)
    taken = (
        [pictures[number * len(pictures) // limit] for number in range(limit)] if len(pictures) > limit else pictures
    )
    found = diagnose(model, list(taken), training=training, precision=precision)
    overlay.write(out / REPORTS[0], f"{diagnosis_json.render(found)}\n".encode())
    overlay.write(out / REPORTS[1], overlay.encode(diagnosis_picture.draw(found)))
    return found
