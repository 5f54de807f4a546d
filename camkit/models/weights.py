"""Reads state dicts without running code from the file, and loads them into models."""

from __future__ import annotations

import json
import pickle
import re
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from camkit.errors import ModelError, as_error, refuse_pipe

_PLAIN_KEYS = ("state_dict", "model_state_dict", "model")
_EMA_KEYS = ("model_ema", "state_dict_ema", "ema_state_dict", "model_ema_state_dict", "ema")
"""Keys under which checkpoints usually hold the state dict, and its moving average over the training (EMA)."""
_AVERAGED = "n_averaged"
"""The counter that ``torch.optim.swa_utils.AveragedModel`` adds to the weights that it averages."""
_WRAPPERS = ("module.", "_orig_mod.")
"""What DataParallel and torch.compile put before the name of every tensor."""
_SHARD = re.compile(r"-\d{5}-of-(\d{5})\.")
"""The part of a file's name that marks it as a shard: one of several files with a model's tensors."""
_LONGEST_HEADER = 100_000_000
"""safetensors refuses headers with more bytes."""
_LEAST_BITS = 16
"""Floating-point types with fewer bits hold values that must be multiplied by scales stored elsewhere."""


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

    def class_count(self, usual: Mapping[str, Tensor]) -> int | None:
        """Return the number of classes of the weights if it differs from the usual model's; else None.

        It is the length of the last tensor whose shape differs in the first dimension only.
        """
        state = _without_prefix(self.state, usual)
        for key in reversed(list(usual)):
            value, other = usual[key], state.get(key)
            if other is None or other.dim() == 0 or other.shape == value.shape or other.shape[1:] != value.shape[1:]:
                continue
            # A damaged file may claim a shape larger than its contents, for which no memory would be large enough.
            return len(other) if 0 < other.nbytes <= other.untyped_storage().nbytes() else None
        return None

    def fill(self, module: nn.Module, name: str) -> None:
        """Load the weights into a module.

        Raises:
            ModelError: the weights do not fit; the message counts what differs and gives an example.
        """
        own = module.state_dict()
        state = _without_prefix(self.state, own)
        missing, extra = own.keys() - state.keys(), state.keys() - own.keys()
        both = [key for key in own if key in state and isinstance(own[key], Tensor)]
        wrong = [key for key in both if own[key].shape != state[key].shape]
        if missing or extra or wrong:
            shard = _SHARD.search(self.path.name)
            hint = f"; it is one of {int(shard[1])} shards, so pass their index, *.index.json" if shard else ""
            raise ModelError(
                f"{self.path} does not fit {name}: {len(missing)} tensors are missing, {len(extra)} unknown and "
                f"{len(wrong)} of another shape, for example {sorted(missing or extra or wrong)[0]!r}{hint}"
            )
        unusable = next((key for key in both if not _converts(state[key], own[key].dtype)), None)
        if unusable is not None:
            raise ModelError(
                f"{self.path} holds {state[unusable].dtype} for {unusable!r}, where {name} has {own[unusable].dtype}; "
                "pass the floating-point weights of the model (quantised values mean nothing without their scales)"
            )
        with as_error(ModelError, lambda error: f"{self.path} does not fit {name} ({first_line(error)})"):
            module.load_state_dict(dict(state))


def read_weights(path: str | Path) -> Weights:
    """Read weights without running any code from the file (``weights_only=True``, or safetensors).

    The content decides the format, not the file's suffix. ``*.index.json`` names the files of a state dict in
    several parts (shards). A checkpoint may hold the state dict under a usual key, and its names may have the prefix
    ``module.`` or ``_orig_mod.``.

    Raises:
        ModelError: the file is missing, is not a state dict, or would have to run code.
    """
    path = Path(path)
    state, note = _innermost(_shards(path) if path.name.endswith(".index.json") else _content(path), path)
    entries = state.items() if isinstance(state, dict) else ()
    if not entries or not all(isinstance(name, str) and isinstance(value, Tensor) for name, value in entries):
        raise ModelError(f"{path} is not a state dict; save one with torch.save(model.state_dict(), ...)")
    return Weights(_unwrapped(state), path, note)


def _content(path: Path) -> Any:
    """Return what a file holds; its first bytes tell the format."""

    def said(error: Exception) -> str:
        if isinstance(error, FileNotFoundError):
            return f"there is no weights file {path}"
        is_pickle, cause = isinstance(error, pickle.UnpicklingError), f"{type(error).__name__}: {first_line(error)}"
        return (
            f"{path} cannot be read as weights ({'it holds Python objects or is damaged' if is_pickle else cause}); "
            "save a state dict with torch.save(model.state_dict(), ...)"
        )

    refuse_pipe(path, ModelError)
    with as_error(ModelError, said), path.open("rb") as file:
        start = file.read(9)
        if start[8:] == b"{" and int.from_bytes(start[:8], "little") <= _LONGEST_HEADER:
            return load_file(path)
        if not start.startswith((b"PK", b"\x80")):
            raise ModelError(f"{path} is neither a PyTorch file nor a safetensors file; pass a state dict")
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
    try:
        names = sorted(set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()))
        are_beside = all(Path(name).name == name for name in names)
    except FileNotFoundError as error:
        raise ModelError(f"there is no weights file {path}") from error
    except Exception as error:  # a damaged file can hold anything
        raise ModelError(
            f"{path} cannot be read as an index of weights ({type(error).__name__}: {first_line(error)})"
        ) from error
    if not are_beside:
        raise ModelError(f"{path} names weights in other folders; its shards must lie beside it")
    state: dict[str, Tensor] = {}
    for name in names:
        part = _content(path.parent / name)
        state |= part if isinstance(part, dict) else {}
    return state


def _innermost(checkpoint: Any, path: Path) -> tuple[Any, str | None]:
    """Return the state dict inside a checkpoint's dictionaries, and a note if there are several to choose from."""
    note = None
    outer: list[Any] = []  # a damaged file may hold a dictionary that contains itself
    while isinstance(checkpoint, dict) and not any(checkpoint is container for container in outer):
        outer.append(checkpoint)
        plain, averaged = (
            [key for key in keys if isinstance(checkpoint.get(key), dict) and checkpoint[key]]
            for keys in (_PLAIN_KEYS, _EMA_KEYS)
        )
        keys = plain + averaged
        if not keys:
            return checkpoint, note
        if averaged or len(keys) > 1:
            ema = "" if plain else ", a moving average (EMA)"
            others = f", not those under {' and '.join(map(repr, keys[1:]))}" if keys[1:] else ""
            note = note or f"{path}: using the weights under {keys[0]!r}{ema}{others}"
        checkpoint = checkpoint[keys[0]]
    return None, note


def _unwrapped(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Remove what wrappers add to a state dict."""
    while True:
        names = [key for key in state if key != _AVERAGED]
        wrapper = next((start for start in _WRAPPERS if names and all(key.startswith(start) for key in names)), None)
        if wrapper is None:
            return state
        state = {key.removeprefix(wrapper): state[key] for key in names}


def _without_prefix(state: Mapping[str, Tensor], own_names: Iterable[str]) -> Mapping[str, Tensor]:
    """Remove the name of a module that held the model, such as Lightning's ``model.``, from all tensors' names.

    It is removed only if all names begin with it and none fits the model already.
    """
    own = set(own_names)
    while own.isdisjoint(state):
        starts = {key.partition(".")[0] for key in state}
        if len(starts) > 1 or not all(key.partition(".")[2] for key in state):
            break
        state = {key.partition(".")[2]: value for key, value in state.items()}
    return state


def _converts(value: Tensor, dtype: torch.dtype) -> bool:
    """Tell whether values keep their meaning in another type.

    Floating-point numbers may be rounded, but integers among the weights were quantised. Counters and masks may be
    stored in any type that holds their values.
    """
    if value.is_quantized or value.dtype.is_complex != dtype.is_complex:
        return False
    if dtype.is_floating_point:
        return value.is_floating_point() and torch.finfo(value.dtype).bits >= _LEAST_BITS
    return dtype.is_complex or torch.equal(value.to(dtype).double(), value.double())


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, shortened to fit into a sentence."""
    lines = str(error).strip().splitlines()
    return lines[0][:120] if lines else type(error).__name__
