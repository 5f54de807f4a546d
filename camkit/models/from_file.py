"""What exported files of all kinds have in common: how they are found, and how pictures are prepared for them."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import math
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from camkit.errors import InputError, ModelError, advice, refuse_pipe
from camkit.models.loaded import LoadedModel, Request, as_labels, is_file

KINDS = {
    ".pt2": "from_export",
    ".onnx": "from_onnx",
    ".pt": "from_torchscript",
    ".ts": "from_torchscript",
    ".torchscript": "from_torchscript",
}
"""The module of this package that loads files with this suffix."""

Shape = Sequence[int | None]
"""The shape (N, C, H, W) of the input that a file takes; None for a length that may vary."""

COLOURS = 3
"""The channels of the pictures that size, mean and std are for."""

_LONGEST_TEXT = 1 << 20
"""The most bytes of a text beside a model that camkit reads for metadata; the names of 1,000 classes take 20,000."""

_NAMES = ("labels", "names", "classes")
"""The keys under which metadata holds the names of the classes."""

_LISTS = (list, tuple, dict)


def file_to_read(request: Request) -> Path:
    """Return the file that is named.

    Raises:
        ModelError: it does not exist, is a pipe, or weights were named too.
    """
    path = Path(request.name)
    if request.weights is not None:
        raise ModelError(f"{path} holds its own weights; leave out weights")
    if not is_file(path):
        raise ModelError(f"there is no file {path}")
    refuse_pipe(path, ModelError)
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


def extra_texts(archive: zipfile.ZipFile) -> dict[str, Any]:
    """Return the texts beside the model in an archive of PyTorch, which the exporter was given as ``extra_files``.

    A JSON object, such as the ``config.txt`` of ultralytics' exports, gives the texts that it holds.
    """
    found: dict[str, Any] = {}
    for entry in archive.infolist():
        folder, _, name = entry.filename.rpartition("/")
        if folder.rpartition("/")[2] != "extra" or not 0 < entry.file_size <= _LONGEST_TEXT:
            continue
        text = archive.read(entry).decode(errors="replace")
        try:
            held = json.loads(text)
        except (ValueError, RecursionError):
            held = text
        found |= held if isinstance(held, dict) and not name.startswith(_NAMES) else {Path(name).stem: held}
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
    if request.changes and not is_coloured:
        raise ModelError(f"{request.name} takes {shape[1]} channels; size, mean and std are for pictures in colour")
    preprocess = request.prepared(**known) if is_coloured else None
    checksum = hashlib.sha256()
    with Path(request.name).open("rb") as stream:
        while part := stream.read(1 << 24):
            checksum.update(part)
    for data in beside:
        checksum.update(data)
    module.register_buffer("checksum_of_file", torch.tensor(list(checksum.digest()), dtype=torch.uint8))
    named = {**(request.changes if preprocess is not None else known), "labels": request.labels}
    used = [name for name in ("mean", "std", "labels") if name in known and not named.get(name)]
    said = f"; {' and '.join(used)} as the file's metadata says" if used else ""
    note = f"{kind}, SHA-256 {checksum.hexdigest()[:12]}{said}"
    return LoadedModel(module, request.name, preprocess, known.get("labels"), note)


def _facts(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the size, mean, std and labels that metadata names; exports of ultralytics' classifiers have them all."""
    facts: dict[str, Any] = {}
    values = {str(key).lower(): _value(value) for key, value in metadata.items()}
    texts = {key: value.split("\n") for key, value in values.items() if isinstance(value, str) and "\n" in value}
    named = next((found for key in _NAMES if isinstance(found := texts.get(key, values.get(key)), _LISTS)), None)
    if named is not None:
        with contextlib.suppress(InputError):  # they are no names of classes then
            facts["labels"] = as_labels(named)
    for name, least in (("mean", -math.inf), ("std", 0)):
        numbers: Any = values.get(name)
        # Above 1, they are for values of 0 to 255, or for something else.
        are_shares = isinstance(numbers, list) and all(
            type(each) in (int, float) and least < each <= 1 for each in numbers
        )
        if are_shares and len(numbers) in (1, 3):
            facts[name] = tuple(map(float, numbers))
    size = values.get("imgsz")
    if isinstance(size, list) and len(size) == 2 and all(isinstance(side, int) and side > 0 for side in size):
        facts["size"] = tuple(size)
    if metadata.get("author") == "Ultralytics" and metadata.get("task") == "classify":
        facts |= {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
    return facts


def _value(text: Any) -> Any:
    """Return the list, dictionary or number that a text spells out; the value itself if it spells none."""
    if not isinstance(text, str):
        return text
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
