"""Reads state dicts without running code from the file, and loads them into models."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from camkit.errors import ModelError, as_error, brief, refuse_pipe

_PLAIN_KEYS = ("state_dict", "model_state_dict", "model")
_EMA_KEYS = ("model_ema", "state_dict_ema", "ema_state_dict", "model_ema_state_dict", "ema")
"""Keys under which checkpoints usually hold the state dict, and its moving average over the training (EMA)."""
_AVERAGED = "n_averaged"
"""The counter that ``torch.optim.swa_utils.AveragedModel`` adds to the weights that it averages."""
_LONGEST_HEADER = 100_000_000
"""safetensors refuses headers with more bytes."""


@dataclass(frozen=True)
class Weights:
    """A state dict that was read from a file.

    Attributes:
        state: the tensors by name.
        path: the file.
        note: which weights were taken, if the file holds several; else None.
    """

    state: Mapping[str, Tensor]
    path: Path
    note: str | None = None

    def build(self, make: Callable[[int | None], nn.Module], name: str) -> tuple[nn.Module, int | None]:
        """Return a network with these weights, and its number of classes if that is not the usual one.

        It is the length of the last tensor whose shape differs in the first dimension only.

        Args:
            make: makes the network with this number of classes; None for the usual one.
            name: the network's name, for the error.
        """
        try:
            with torch.device("meta"):
                usual = make(None).state_dict()
        except NotImplementedError:  # RegNet computes its widths from tensors, which have no values on the meta device
            usual = make(None).state_dict()
        state = _without_prefix(self.state, usual)
        differ = [key for key, value in usual.items() if key in state and state[key].shape != value.shape]
        heads = (
            state[key] for key in reversed(differ) if state[key].dim() and state[key].shape[1:] == usual[key].shape[1:]
        )
        head = next(heads, torch.empty(0))
        # A damaged file may claim a shape larger than its contents, for which no memory would be large enough.
        classes = len(head) if 0 < head.nbytes <= head.untyped_storage().nbytes() else None
        module = make(classes)
        self.fill(module, name)
        return module, classes

    def fill(self, module: nn.Module, name: str) -> None:
        """Load the weights into a module.

        Raises:
            ModelError: the weights do not fit, or are not floating-point numbers where the model has such.
        """
        own = module.state_dict()
        state = _without_prefix(self.state, own)
        for key in filter(state.__contains__, own):
            floats = isinstance(own[key], Tensor) and own[key].is_floating_point()  # not a module's extra state
            if floats and not (state[key].is_floating_point() and state[key].itemsize > 1):
                raise ModelError(
                    f"{self.path} holds {state[key].dtype} for {key!r}, where {name} has {own[key].dtype}; pass the "
                    "floating-point weights of the model (quantised values mean nothing without their scales)"
                )
        with as_error(ModelError, lambda error: f"{self.path} does not fit {name} ({brief(error)})"):
            module.load_state_dict(dict(state))


def read_weights(path: str | Path) -> Weights:
    """Read weights without running any code from the file (``weights_only=True``, or safetensors).

    The content decides the format, not the file's suffix. ``*.index.json`` names the files of a state dict in
    several parts (shards). A checkpoint may hold the state dict under a usual key.

    Raises:
        ModelError: the file is missing, is not a state dict, or would have to run code.
    """
    path, note = Path(path), None
    state = _shards(path) if path.name.endswith(".index.json") else _content(path)
    outer: list[Any] = []  # a damaged file may hold a dictionary that contains itself
    while isinstance(state, dict) and not any(state is container for container in outer):
        outer.append(state)
        held = [key for key in _PLAIN_KEYS + _EMA_KEYS if isinstance(state.get(key), dict) and state[key]]
        if not held:
            break
        if len(held) > 1 or held[0] in _EMA_KEYS:
            ema = ", a moving average (EMA)" if held[0] in _EMA_KEYS else ""
            others = f", not those under {' and '.join(map(repr, held[1:]))}" if held[1:] else ""
            note = note or f"{path}: using the weights under {held[0]!r}{ema}{others}"
        state = state[held[0]]
    entries = state.items() if isinstance(state, dict) else ()
    if not entries or not all(isinstance(name, str) and isinstance(value, Tensor) for name, value in entries):
        raise ModelError(f"{path} is not a state dict; save one with torch.save(model.state_dict(), ...)")
    return Weights(state, path, note)


def _content(path: Path) -> Any:
    """Return what a file holds; its first bytes tell the format."""

    def said(error: Exception) -> str:
        if isinstance(error, FileNotFoundError):
            return f"there is no weights file {path}"
        # PyTorch's words advise to run the code.
        reason = brief(error) if isinstance(error, OSError) else "it holds Python objects or is damaged"
        return (
            f"{path} cannot be read as weights ({reason}); save a state dict with torch.save(model.state_dict(), ...)"
        )

    refuse_pipe(path, ModelError)
    with as_error(ModelError, said), path.open("rb") as file:
        start = file.read(9)
        if start[8:] == b"{" and int.from_bytes(start[:8], "little") <= _LONGEST_HEADER:
            return load_file(path)
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                    raise ModelError(  # a small file may unpack to more than the memory holds
                        f"{path} is a compressed archive, as TorchScript is; save the weights with "
                        "torch.save(model.state_dict(), ...)"
                    )
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True)


def _shards(path: Path) -> dict[str, Tensor]:
    """Return the tensors of all the files that an index names."""
    refuse_pipe(path, ModelError)
    with as_error(ModelError, lambda error: f"{path} cannot be read as an index of weights ({brief(error)})"):
        names = sorted(set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()))
        if any(Path(name).name != name for name in names):
            raise ModelError(f"{path} names weights in other folders; its shards must lie beside it")
        return {key: value for name in names for key, value in dict(_content(path.parent / name)).items()}


def _without_prefix(state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Remove the name of a module that held the model from all tensors' names, such as Lightning's ``model.``.

    It is removed only if all names begin with it and none fits the model already.
    """
    while own.keys().isdisjoint(state):
        state = {key: value for key, value in state.items() if key != _AVERAGED}
        if len({key.partition(".")[0] for key in state}) > 1 or not all(key.partition(".")[2] for key in state):
            break
        state = {key.partition(".")[2]: value for key, value in state.items()}
    return state
