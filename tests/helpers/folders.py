"""Explains folders as the command does."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from camkit.images.listing import Pictures
from camkit.models.loaded import LoadedModel
from camkit.scale.folder import Run, explain_files
from camkit.scale.job import Drawing, Job


def run_folder(
    model: LoadedModel, pictures: Iterable[Path], out: Path | None, drawing: Drawing | None = None, **options: Any
) -> Run:
    """Explain pictures; each option belongs to ``Job`` or to ``camkit.explain_many``."""
    names = {field.name for field in dataclasses.fields(Job)}
    how = {name: options.pop(name) for name in options.keys() - names}
    files = Pictures(pictures, skip=out)
    return explain_files(model, Job(files, out, how, drawing or Drawing(), **options))
