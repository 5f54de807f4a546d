"""Loads programs of ``torch.export`` (``.pt2``) as modules whose layers have the names of the exported model."""

from __future__ import annotations

import logging
import zipfile
from importlib.metadata import version
from unittest import mock

import torch
from torch import nn
from torch.export import ExportedProgram

from camkit.errors import ModelError, as_error, brief
from camkit.models.from_file import described, extra_texts, file_to_read, refuse_code
from camkit.models.loaded import LoadedModel, Request


def load(request: Request) -> LoadedModel:
    """Load a program of ``torch.export``."""
    path = file_to_read(request)
    refuse_code(request, path, "a program of torch.export")
    log = logging.getLogger("torch.export")  # it would print a traceback before the error
    said = f"{path} cannot be read as a program of torch.export"
    with as_error(ModelError, lambda error: f"{said} ({brief(error)})"), mock.patch.object(log, "disabled", True):
        program = torch.export.load(path)
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
    with as_error(ModelError, lambda error: f"the layers of {name} cannot be found ({brief(error)})"):
        module: nn.Module = torch.export.unflatten(program)  # fails for programs that were changed after the export
    return module


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
