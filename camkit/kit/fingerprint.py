"""What decides the results of a run, in a form that can be compared: runs with the same fingerprint can be joined."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from camkit.kit.wording import listed
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
        "network": digest(_without_addresses(str(model.module))),
        "weights": digest_of_weights(model.module),
        "preprocessing": digest_of_preprocessing(model.preprocess),
        "labels": digest(describe(model.labels)),
        **({} if model.activation is None else {"activation": model.activation}),
        **{name: describe(value) for name, value in options.items()},
    }


def differences(earlier: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return the names of the parts in which two fingerprints differ, as a phrase; "" if they are the same."""
    names = [name for name in {**now, **earlier} if earlier.get(name) != now.get(name)]
    return listed(names) if names else ""


def digest(contents: str | bytes | Iterable[str | bytes]) -> str:
    """Return the SHA-256 of a content, or of several one after another, as hexadecimal digits.

    >>> digest("cat") == digest(["c", b"at"])
    True
    """
    state = hashlib.sha256()
    for content in [contents] if isinstance(contents, (str, bytes)) else contents:
        state.update(content.encode(errors="surrogatepass") if isinstance(content, str) else content)
    return state.hexdigest()


def describe(value: Any) -> str:
    """Return text that is the same for the same value in every process, without addresses in memory.

    A function is described by its name: neither its code nor what it holds counts.

    >>> describe(["cat", 3]), describe(None)
    ("['cat', 3]", 'None')
    """
    if isinstance(value, (Tensor, np.ndarray)):
        return f"{tuple(value.shape)} {digest(value.tobytes() if isinstance(value, np.ndarray) else _bytes_of(value))}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(describe, value))}]"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {describe(item)}" for key, item in value.items())
    if isinstance(value, Path) and value.is_file():
        return digest(value.read_bytes())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return f"{type(value).__name__}({describe(fields)})"
    return _without_addresses(repr(value))


def _without_addresses(text: str) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def digest_of_weights(module: nn.Module) -> str:
    """Return a checksum of a module's parameters and buffers."""

    def contents() -> Iterator[str | bytes]:
        for name, value in module.state_dict().items():
            is_tensor = isinstance(value, Tensor) and value.layout is torch.strided
            yield f"{name} {tuple(value.shape)} {value.dtype}" if is_tensor else name
            yield _bytes_of(value) if is_tensor else describe(value)

    return digest(contents())


def digest_of_preprocessing(preprocess: Preprocess | None) -> str:
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
