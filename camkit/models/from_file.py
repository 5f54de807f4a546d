"""Loads programs of ``torch.export`` (``.pt2``) and TorchScript files (``.pt``, ``.ts``).

And what exported files of all kinds have in common: how they are found, and how pictures are prepared for them.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import json
import logging
import math
import re
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from camkit.errors import InputError, ModelError, advice, as_error, brief
from camkit.models.boxes import DETECTORS, prepared
from camkit.models.loaded import LoadedModel, Request, are_shares, as_labels, is_file
from camkit.models.modules import FileBox, HeatFile, dtype_of

KINDS = {
    ".pt2": "from_file",
    ".onnx": "from_onnx",
    ".pt": "from_file",
    ".ts": "from_file",
    ".torchscript": "from_file",
}
"""The module of this package that loads files with this suffix."""

Shape = Sequence[int | None]
"""The shape (N, C, H, W) of the input that a file takes; None for a length that may vary."""

COLOURS = 3
"""The channels of the pictures that size, mean and std are for."""

_NAMES = ("labels", "names", "classes")
"""The keys under which metadata holds the names of the classes."""


def load(request: Request) -> LoadedModel:
    """Load a program of ``torch.export``, or a TorchScript file."""
    path = file_to_read(request)
    return _program(request, path) if path.suffix.lower() == ".pt2" else _script(request, path)


def _program(request: Request, path: Path) -> LoadedModel:
    """Load a program of ``torch.export``, as a module whose layers have the names of the exported model."""
    refuse_code(request, path, "a program of torch.export")
    log = logging.getLogger("torch.export")  # it would print a traceback before the error
    said = f"{path} cannot be read as a program of torch.export"
    with as_error(ModelError, lambda error: f"{said} ({brief(error)})"), mock.patch.object(log, "disabled", True):
        program = torch.export.load(path)
    metadata, runtime = _extra_texts(path), f"torch {version('torch')}"
    if "camkit" in metadata:
        module, (shape, *others) = program.module(), _input_shapes(program)
        runs = lambda pictures, classes: module(pictures, *[classes for _ in others])  # noqa: E731
        return with_heat(runs, request, shape, metadata, runtime, explains_any=bool(others))
    shape = _picture_shape(program, str(path))
    kind = f"a program of torch.export, run with gradients by {runtime}"
    return described(as_module(program, str(path)), request, shape, kind, metadata)


def as_module(program: torch.export.ExportedProgram, name: str) -> nn.Module:
    """Return a module with the names, the weights and the layers of the model that was exported.

    Raises:
        ModelError: the program does not take one picture, or was exported without the names of its modules.
    """
    _picture_shape(program, name)
    with as_error(ModelError, lambda error: f"the layers of {name} cannot be found ({brief(error)})"):
        module: nn.Module = torch.export.unflatten(program)  # fails for programs that were changed after the export
    return module


def _picture_shape(program: torch.export.ExportedProgram, name: str) -> tuple[int | None, ...]:
    """Return the shape (N, C, H, W) of the program's one input; None for a length that may vary."""
    shapes = _input_shapes(program)
    if len(shapes) != 1:
        raise ModelError(f"{name} takes {len(shapes)} inputs; camkit explains programs whose only input is the picture")
    (shape,) = shapes
    if shape[:1] not in ((1,), (None,)):
        raise ModelError(
            f"{name} takes exactly {shape[0]} pictures; export it for one, or with dynamic_shapes for any number"
        )
    return shape


def _input_shapes(program: torch.export.ExportedProgram) -> list[tuple[int | None, ...]]:
    """Return the shapes of the inputs, with None for lengths that may vary; () for inputs that are not tensors."""
    inputs = set(program.graph_signature.user_inputs)
    values = [node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder" and node.name in inputs]
    return [
        tuple(length if isinstance(length, int) else None for length in getattr(value, "shape", ())) for value in values
    ]


def with_heat(
    function: Callable[[Tensor, Tensor], Any],
    request: Request,
    shape: Shape,
    metadata: Mapping[str, Any],
    runtime: str,
    *,
    explains_any: bool,
) -> LoadedModel:
    """Return the model in a file that ``camkit.export`` wrote: its outputs are scores and heat."""
    with as_error(ModelError, lambda _: f"{request.name} does not say where its cells look; export it again"):
        places = tuple(tuple(map(float, axis)) for axis in _value(metadata["places"]))
    box = HeatFile(
        function,
        places,
        explains_any=explains_any,
        batch=1 if metadata.get("batch") == "1" else None,
        reason="camkit runs this file without layers and gradients",
        way_out=""
        if explains_any
        else "for the heat of any class, export the model with " + advice("target='input'", "--target input"),
    )
    made = f"{metadata.get('method')} at {metadata.get('layer')}, written by camkit {metadata['camkit']}"
    kind = f"run by {runtime}; the file computes its heat itself ({made})"
    shape = [length if isinstance(length, int) else None for length in shape]
    return described(box.eval(), request, shape, kind, metadata)


def _script(request: Request, path: Path) -> LoadedModel:
    """Load a TorchScript file as a black box: scripted modules have no hooks."""
    way_out = "if it holds a state dict, name the network and pass the file as its weights"
    said = f"{path} is not a TorchScript file"
    with as_error(ModelError, lambda error: f"{said} ({brief(error)}); {way_out}"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        metadata = _extra_texts(path, needed="constants.pkl")
        refuse_code(request, path, "TorchScript")
        script = torch.jit.load(path, map_location="cpu").eval()
    kind = f"a TorchScript file, run without gradients by torch {version('torch')}"
    box = FileBox(
        lambda pictures: script(pictures.to(dtype_of(script))),
        sigmoid=_ends_in_sigmoid(script),
        reason="camkit cannot read the layers and gradients of a TorchScript file",
        way_out="export the model with torch.export and pass the .pt2 file",
    )
    return described(box, request, (None, COLOURS, None, None), kind, metadata)


def _ends_in_sigmoid(script: torch.jit.ScriptModule) -> bool:
    graph = script.inlined_graph  # the nodes live as long as it does
    node = next(graph.outputs()).node()
    # These operations leave the results of a sigmoid as they are.
    while re.fullmatch("aten::(to|clamp|clip|contiguous|clone|detach|float)", node.kind()):
        node = next(node.inputs()).node()
    return str(node.kind()) in ("aten::sigmoid", "aten::sigmoid_")


def file_to_read(request: Request) -> Path:
    """Return the file that is named.

    Raises:
        ModelError: it does not exist, or weights were named too.
    """
    path = Path(request.name)
    request.refuse("weights", "holds its own weights")
    if not is_file(path):
        raise ModelError(f"there is no file {path}")
    return path


def refuse_code(request: Request, path: Path, kind: str) -> None:
    """Refuse a kind of file from which PyTorch runs code, unless the user trusts it.

    Raises:
        ModelError: the user does not trust it.
    """
    if not request.trust_remote_code:
        raise ModelError(
            f"{path} is {kind}, which may hold code; if you trust this file, pass "
            f"{advice('trust_remote_code=True to load_model', '--trust-remote-code')}; otherwise ask for an ONNX file"
        )


def _extra_texts(path: Path, needed: str = "") -> dict[str, Any]:
    """Return the texts beside the model in an archive of PyTorch, which the exporter was given as ``extra_files``.

    A JSON object, such as the ``config.txt`` of ultralytics' exports, gives the texts that it holds.

    Raises:
        ValueError: the archive has no file whose name ends so.
    """
    found: dict[str, Any] = {}
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        if not any(name.endswith(needed) for name in names):
            raise ValueError(f"it has no {needed}")
        for name in names:
            if "/extra/" in name:
                key, held = Path(name).stem, _value(archive.read(name).decode(errors="replace"))
                found |= held if isinstance(held, dict) and key not in _NAMES else {key: held}
    return found


def described(
    module: nn.Module,
    request: Request,
    shape: Shape,
    kind: str,
    metadata: Mapping[str, Any] | None = None,
    beside: Sequence[bytes] = (),
) -> LoadedModel:
    """Return a module from a file with the preprocessing that the call or the file's metadata names.

    Args:
        module: the module.
        request: what the caller asked for.
        shape: the shape of its input.
        kind: what the file is, such as "torch.export".
        metadata: texts or values by name that the file holds.
        beside: checksums of the weights in files beside it. The checksum of the file and of these is a buffer of the
            module, so that the results of another file are never taken for those of this one.

    Raises:
        ModelError: the model takes something other than a picture, or another size than the caller asked for.
    """
    known = _facts(metadata or {})
    if len(shape) != 4:
        raise ModelError(f"{request.name} takes an input of {len(shape)} axes, not a picture (N, C, H, W)")
    height, width = shape[2:]
    if isinstance(height, int) and isinstance(width, int):
        known["size"] = (height, width)
        if request.size not in (None, (height, width)):
            raise ModelError(f"{request.name} takes pictures of height {height} and width {width} only; leave out size")
    is_coloured = shape[1] in (None, COLOURS)
    if not is_coloured:
        request.refuse("size, mean and std", f"takes {shape[1]} channels, and not pictures in colour")
    preprocess = request.prepared(**known) if is_coloured and request.boxes is None else None
    if request.boxes in DETECTORS:
        stated = {name: known[name] for name in ("size", "mean", "std") if name in known}
        preprocess = functools.partial(prepared, **(DETECTORS[request.boxes][2] | stated | request.changes))
    with Path(request.name).open("rb") as stream:
        checksum = hashlib.file_digest(stream, "sha256")
    for data in beside:
        checksum.update(data)
    module.register_buffer("checksum_of_file", torch.tensor(list(checksum.digest()), dtype=torch.uint8))
    named = {**(request.changes if preprocess is not None else known), "labels": request.labels}
    used = [name for name in ("mean", "std", "labels") if known.get(name) and not named.get(name)]
    said = f"; {' and '.join(used)} as the file's metadata says" if used else ""
    note = f"{kind}, SHA-256 {checksum.hexdigest()[:12]}{said}"
    return LoadedModel(module, request.name, preprocess, known.get("labels"), note)


def _facts(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the size, mean, std and labels that metadata names; exports of ultralytics' classifiers have them all."""
    facts: dict[str, Any] = {}
    values = {str(key).lower(): _value(value) for key, value in metadata.items()}
    named = next((values[key] for key in _NAMES if isinstance(values.get(key), (list, tuple, dict))), None)
    with contextlib.suppress(InputError):  # they are no names of classes then
        facts["labels"] = as_labels(named)
    for name, least in (("mean", -math.inf), ("std", 0)):
        if are_shares(values.get(name), least):  # others are for values of 0 to 255, or for something else
            facts[name] = tuple(map(float, values[name]))
    for name, key, lengths in (("size", "imgsz", (2,)), ("resize", "resize", (1, 2))):
        sides = values.get(key)
        if (
            isinstance(sides, list)
            and len(sides) in lengths
            and all(isinstance(each, int) and each > 0 for each in sides)
        ):
            facts[name] = tuple(sides)
    if metadata.get("author") == "Ultralytics" and metadata.get("task") == "classify":
        facts |= {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
    return facts


def _value(text: Any) -> Any:
    """Return what a text spells out: a list, a dictionary, a number, or its lines; other values as they are."""
    if not isinstance(text, str):
        return text
    for parse in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            return parse(text)
    return text.split("\n") if "\n" in text else text
