"""What decides the results of a run, in a form that can be compared: runs with the same fingerprint can be joined."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from camkit.models.loaded import LoadedModel
from camkit.types import Preprocess

Fingerprint = dict[str, str]

_SAMPLE_SIZE = (331, 257)
"""The size of the picture that shows what a preprocessing does: not square, and larger than most inputs."""


def fingerprint(model: LoadedModel, **options: Any) -> Fingerprint:
    """Return what decides the results of a run: a line of text for each of its parts.

    The device and the size of the batches do not count, since they change only the last digits.

    Args:
        model: the model, whose structure, weights and preprocessing count.
        **options: the method, the layers, the targets and whatever else decides the results.
    """
    return {
        "version of camkit": version("camkit"),
        "model": model.name,
        "network": digest(str(model.module)),
        "weights": _digest_of_weights(model.module),
        "preprocessing": _digest_of_preprocessing(model.preprocess),
        "labels": digest(describe(model.labels)),
        **{name: describe(value) for name, value in options.items()},
    }


def differences(earlier: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return the names of the parts in which two fingerprints differ, as a phrase; "" if they are the same."""
    names = [name for name in {**now, **earlier} if earlier.get(name) != now.get(name)]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def digest(*contents: str | bytes) -> str:
    """Return a short checksum; two contents share one by chance once in 10^19."""
    state = hashlib.blake2b(digest_size=8)
    for content in contents:
        state.update(content.encode(errors="surrogatepass") if isinstance(content, str) else content)
    return state.hexdigest()


def describe(value: Any) -> str:
    """Return text that is the same for the same value in every process, without addresses in memory.

    >>> describe(["cat", 3]), describe(None)
    ("['cat', 3]", 'None')
    """
    if isinstance(value, (Tensor, np.ndarray)):
        text = f"{tuple(value.shape)} {digest(_bytes_of(torch.as_tensor(value)))}"
    elif isinstance(value, (list, tuple)):
        text = f"[{', '.join(map(describe, value))}]"
    elif isinstance(value, Mapping):
        text = ", ".join(f"{key}: {describe(item)}" for key, item in value.items())
    elif isinstance(value, FunctionType):
        held = [*(cell.cell_contents for cell in value.__closure__ or ()), *(value.__defaults__ or ())]
        held += (value.__kwdefaults__ or {}).values()
        text = f"{value.__module__}.{value.__qualname__} {digest(*_code_of(value.__code__))} {describe(held)}"
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        text = f"{type(value).__name__}({describe(fields)})"
    else:
        text = re.sub(r" at 0x[0-9a-f]+", "", repr(value))
        if text != repr(value):  # the text names only its type
            plain = {name: held for name, held in getattr(value, "__dict__", {}).items() if isinstance(held, _PLAIN)}
            text = f"{text} {describe(plain)}" if plain else text
    return text


_PLAIN = (bool, int, float, str, bytes, Tensor, np.ndarray)
"""Attributes that decide what an object does; their contents cannot refer back to the object."""


def _code_of(code: CodeType) -> Iterable[bytes | str]:
    """Yield the parts of a function's code that decide its result, without its file and line numbers."""
    yield code.co_code
    yield from code.co_names
    for constant in code.co_consts:
        yield from _code_of(constant) if isinstance(constant, CodeType) else [repr(constant)]


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _digest_of_weights(module: nn.Module) -> str:
    state = hashlib.blake2b(digest_size=8)
    for name, value in module.state_dict().items():
        is_tensor = isinstance(value, Tensor) and value.layout is torch.strided
        state.update(f"{name} {tuple(value.shape)} {value.dtype}".encode() if is_tensor else name.encode())
        state.update(_bytes_of(value) if is_tensor else describe(value).encode())
    return state.hexdigest()


def _digest_of_preprocessing(preprocess: Preprocess | None) -> str:
    """Return a checksum of what a preprocessing makes of a picture: its settings may be anywhere in its code."""
    if preprocess is None:
        return "none"
    noise = np.random.default_rng(0).integers(0, 256, (_SAMPLE_SIZE[1], _SAMPLE_SIZE[0], 3), np.uint8)
    results = [_tried(preprocess, Image.fromarray(noise)) for _ in range(2)]
    return results[0] if results[0] == results[1] else describe(type(preprocess))


def _tried(preprocess: Callable[[Image.Image], Tensor], picture: Image.Image) -> str:
    try:
        return describe(preprocess(picture))
    except Exception as error:  # it may refuse such a picture, and then each picture says so
        return describe(type(error))
