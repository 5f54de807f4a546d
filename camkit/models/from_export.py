"""Loads programs of ``torch.export`` (``.pt2``) as modules whose layers have the names of the exported model."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import threading
import zipfile
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.export import ExportedProgram

from camkit.errors import ModelError, as_error, brief
from camkit.models.from_file import described, extra_texts, file_to_read
from camkit.models.loaded import LoadedModel
from camkit.models.request import Request
from camkit.models.weights import first_line

_LOAD = threading.Lock()
"""One thread at a time loads a program, because the variable that forbids pickles belongs to the process."""

_MOST_UNPACKED = 256 << 20
"""The most bytes that the compressed parts of an archive may unpack to."""

_NAME = re.compile(r"[\w.-]*")
"""A name in a program: PyTorch writes names into the code that it generates."""

_CONTAINERS = {None, "builtins.tuple", "builtins.list", "builtins.dict", "collections.OrderedDict"}
"""The containers that a program may take or return; for others, PyTorch imports modules that the file names."""

_OPERATION = re.compile(
    r"torch\.ops\.aten\.(?!__|save\b|from_file\b|warn\b|_print\b)\w+\.[A-Za-z]\w*"
    r"|torch\.ops\.(torchvision|quantized_decomposed)\.[a-z]\w*\.[A-Za-z]\w*"
    r"|torch\.ops\.higher_order\.(cond|wrap_with_autocast|wrap_with_set_grad_enabled)"
    r"|_operator\.(add|sub|mul|floordiv|truediv|mod|pow|neg|pos|eq|ne|lt|le|gt|ge|and_|or_|getitem)"
    r"|torch\._?sym_\w+|math\.\w+"
)
"""What a program may call: other operations of PyTorch write files, print texts or call functions by name."""

_SYMBOL = re.compile(r"Symbol\('[a-z]+\d*'(?:, \w+=(?:True|False))*\)")
_FORMULA = re.compile(r"(?:\b(?:Add|FloorDiv|Integer|Max|Min|Mod|Mul)\b|\*(?!\*)|[-+/(), ]|\b\d{1,9}\b)*")
"""A length that depends on the input, as the program stores it: PyTorch reads it with a function that runs code."""


def load(request: Request) -> LoadedModel:
    """Load a program of ``torch.export`` without running code from its file."""
    path = file_to_read(request)
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

    # Where PyTorch would read a pickle, it reads only tensors.
    only_tensors = mock.patch.dict(os.environ, {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1"})
    with as_error(ModelError, said):
        checked = _checked(path)
        with _LOAD, only_tensors, _keeping_error(kept):
            return torch.export.load(checked)


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


def _checked(path: Path) -> io.BytesIO:
    """Return a copy of a program, and refuse one that would run code: pickled objects, compiled parts, formulas.

    PyTorch reads the copy, because its own reader may find other parts in a crafted archive than Python's.
    """
    texts, copy = [], io.BytesIO()
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(copy, "w") as checked:
        if sum(entry.compress_size for entry in archive.infolist()) > path.stat().st_size:
            raise ModelError(f"{path} is an archive whose parts overlap; export it again")
        parts = (entry.file_size for entry in archive.infolist() if entry.compress_type != zipfile.ZIP_STORED)
        if sum(parts) > _MOST_UNPACKED:  # PyTorch compresses nothing but code
            raise ModelError(
                f"{path} is compressed and unpacks to more than {_MOST_UNPACKED >> 20} MiB; export it again"
            )
        names = [name.lower() for name in archive.namelist()]  # PyTorch finds parts by names in any case
        if len(set(names)) != len(names):
            raise ModelError(f"{path} holds two parts of one name")
        if any("/data/aotinductor/" in name for name in names):
            raise ModelError(f"{path} is compiled and has no layers; pass the program that it was compiled from")
        for name in archive.namelist():
            data = archive.read(name)
            checked.writestr(name, data)
            texts += [data.decode()] if name.lower().endswith(".json") else []
    for text in texts:
        for value in _values(json.loads(text)):
            if value.get("use_pickle") or str(value.get("path_name", "")).startswith(("custom_obj", "opaque_obj")):
                raise ModelError(f"{path} holds Python objects beside its weights, which camkit does not read")
            if not all(_NAME.fullmatch(name) for name in _names_in(value)):
                raise ModelError(f"{path} holds a name that camkit does not read")
            if not all(kind in _CONTAINERS for kind in _containers_in(value)):
                raise ModelError(f"{path} takes or returns containers of a type that camkit does not read")
            formula = value.get("expr_str")
            if formula is not None and not _FORMULA.fullmatch(_SYMBOL.sub("", formula)):
                raise ModelError(f"{path} holds a formula that camkit does not read: {first_line(ValueError(formula))}")
            if "target" in value and not _OPERATION.fullmatch(str(value["target"])):
                raise ModelError(
                    f"{path} calls {brief(value['target'])}, which camkit does not run from a file; if you trust it, "
                    "load it with torch.export.load and pass the program"
                )
    copy.seek(0)
    return copy


def _names_in(value: Mapping[str, Any]) -> list[str]:
    """Return the names of tensors, modules and parameters in one dictionary of a program."""
    named = [text for key, text in value.items() if key in ("fqn", "name") or key.endswith("_name")]
    named += value.get("forward_arg_names") or []
    named += value["config"] if isinstance(value.get("config"), dict) else []
    stack = (value.get("metadata") or {}).get("nn_module_stack") or "" if "target" in value else ""
    named += [part for entry in stack.split(";") for part in entry.split(",")[1:2]]
    return [str(name) for name in named if name is not None]


def _containers_in(value: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the types of the containers that a program takes and returns."""
    for key in ("in_spec", "out_spec"):
        if isinstance(value.get(key), str):
            yield from (part["type"] for part in _values(json.loads(value[key])) if "type" in part)


def _values(value: Any) -> list[dict[str, Any]]:
    """Return all dictionaries inside what a JSON file holds."""
    found, todo = [], [value]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            found.append(value)
        todo += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return found
