"""Loads programs of ``torch.export`` (``.pt2``) as modules whose layers have the names of the exported model."""

from __future__ import annotations

import contextlib
import logging
import zipfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import torch
from torch import nn
from torch.export import ExportedProgram

from camkit.errors import ModelError, as_error
from camkit.models.from_file import described, extra_texts, file_to_read, refuse_code
from camkit.models.loaded import LoadedModel
from camkit.models.request import Request
from camkit.models.weights import first_line


def load(request: Request) -> LoadedModel:
    """Load a program of ``torch.export``."""
    path = file_to_read(request)
    refuse_code(request, path, "a program of torch.export")
    program = _read(path)
    shape = _picture_shape(program, str(path))
    with zipfile.ZipFile(path) as archive:
        metadata = extra_texts(archive)
    kind = f"a program of torch.export, run with gradients by torch {version('torch')}"
    return described(as_module(program, str(path)), request, shape, kind, metadata)


def as_module(program: ExportedProgram, name: str) -> nn.Module:
    """Return a module with the names, the weights and the layers of the model that was exported.

    Raises:
        ModelError: the program does not take one picture, or was exported without the names of its modules.
    """
    _picture_shape(program, name)
    if any(map(_trains, program.graph.nodes)):
        raise ModelError(f"{name} was exported in training mode; call model.eval() and export it again")
    with as_error(ModelError, lambda error: f"the layers of {name} cannot be found ({first_line(error)})"):
        module: nn.Module = torch.export.unflatten(program)  # fails for programs that were changed after the export
    return module


def _trains(node: torch.fx.Node) -> bool:
    """Tell whether a node is a dropout or a batch norm in training mode."""
    operation = str(node.target)
    place = 2 if "aten.dropout" in operation else 5 if "aten.batch_norm" in operation else None
    return place is not None and len(node.args) > place and node.args[place] is True


def _picture_shape(program: ExportedProgram, name: str) -> tuple[int | None, ...]:
    """Return the shape (N, C, H, W) of the program's one input; None for a length that may vary."""
    inputs = set(program.graph_signature.user_inputs)
    values = [node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder" and node.name in inputs]
    if len(values) != 1 or not isinstance(values[0], torch.Tensor):
        raise ModelError(f"{name} takes {len(values)} inputs; camkit explains programs whose only input is the picture")
    shape = tuple(length if isinstance(length, int) else None for length in values[0].shape)
    if shape[:1] not in ((1,), (None,)):
        raise ModelError(
            f"{name} takes exactly {shape[0]} pictures; export it for one, or with dynamic_shapes for any number"
        )
    return shape


def _read(path: Path) -> ExportedProgram:
    kept: list[BaseException] = []

    def said(error: Exception) -> str:
        return f"{path} cannot be read as a program of torch.export ({first_line(kept[0] if kept else error)})"

    with as_error(ModelError, said), _keeping_error(kept):
        return torch.export.load(path)


@contextlib.contextmanager
def _keeping_error(kept: list[BaseException]) -> Iterator[None]:
    """Keep the error that PyTorch would write to its log, with a traceback, before it raises one without the cause."""

    def keep(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        while error is not None and error.__cause__ is not None:
            error = error.__cause__
        kept.extend([error] if error is not None else [])
        return False

    log = logging.getLogger("torch.export")
    log.addFilter(keep)
    try:
        yield
    finally:
        log.removeFilter(keep)
