"""Loads programs of ``torch.export`` (``.pt2``) as modules whose layers have the names of the exported model."""

from __future__ import annotations

import json
import os
import re
import zipfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.export import ExportedProgram

from camkit.errors import ModelError
from camkit.models.from_file import described, file_to_read, refuse_bomb
from camkit.models.loaded import LoadedModel
from camkit.models.request import Request
from camkit.models.weights import first_line

_SYMBOL = re.compile(r"Symbol\('[a-z]+\d*'(?:, \w+=(?:True|False))*\)")
_FORMULA = re.compile(r"(?:\b(?:Add|FloorDiv|Integer|Max|Min|Mod|Mul|Pow)\b|[-+*/(), \d])*")
"""A length that depends on the input, as the program stores it: PyTorch reads it with a function that runs code."""


def load(request: Request) -> LoadedModel:
    """Load a program of ``torch.export`` without running code from its file."""
    path = file_to_read(request)
    program = _read(path)
    shape = _picture_shape(program, f"{path}")
    return described(as_module(program, f"{path}"), request, shape, "a program of torch.export")


def as_module(program: ExportedProgram, name: str) -> nn.Module:
    """Return a module with the names, the weights and the layers of the model that was exported.

    Raises:
        ModelError: the program does not take one picture, or was exported without the names of its modules.
    """
    _picture_shape(program, name)
    try:
        module: nn.Module = torch.export.unflatten(program)
    except Exception as error:  # of programs that were changed after the export
        raise ModelError(f"the layers of {name} cannot be found ({first_line(error)})") from error
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


def _read(path: Path) -> ExportedProgram:
    try:
        _refuse_code(path)
        # Where PyTorch would read a pickle, it reads only tensors.
        with mock.patch.dict(os.environ, {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1"}):
            return torch.export.load(path)
    except ModelError:
        raise
    except Exception as error:  # a damaged file can make PyTorch raise anything
        raise ModelError(f"{path} cannot be read as a program of torch.export ({first_line(error)})") from error


def _refuse_code(path: Path) -> None:
    """Refuse a program that would run code while it is read: pickled objects, compiled parts, formulas.

    Raises:
        ModelError: it would.
    """
    with zipfile.ZipFile(path) as archive:
        refuse_bomb(archive, path)
        names = archive.namelist()
        if any("/data/aotinductor/" in name for name in names):
            raise ModelError(f"{path} is compiled and has no layers; pass the program that it was compiled from")
        texts = [archive.read(name).decode() for name in names if name.endswith(".json")]
    for text in texts:
        for value in _values(json.loads(text)):
            if value.get("use_pickle") or str(value.get("path_name", "")).startswith(("custom_obj", "opaque_obj")):
                raise ModelError(f"{path} holds Python objects beside its weights, which camkit does not read")
            formula = value.get("expr_str")
            if formula is not None and not _FORMULA.fullmatch(_SYMBOL.sub("", formula)):
                raise ModelError(f"{path} holds a formula that camkit does not read: {first_line(ValueError(formula))}")


def _values(value: Any) -> list[dict[str, Any]]:
    """Return all dictionaries inside what a JSON file holds."""
    found, todo = [], [value]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            found.append(value)
        todo += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return found
