"""Reads state dicts without running code from the file, and loads them into models."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from camkit.errors import ModelError

_STATE_KEYS = ("state_dict", "model_state_dict", "model", "model_ema")
"""Keys under which checkpoints usually hold the state dict."""
_PREFIXES = ("module.", "_orig_mod.")
"""What DataParallel and torch.compile put before the name of every tensor."""


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """Read a state dict without running any code from the file (``weights_only=True``, or safetensors).

    A checkpoint may hold the state dict under a usual key, and its names may have the prefix ``module.`` or
    ``_orig_mod.``.

    Raises:
        ModelError: the file is missing, is not a state dict, or would have to run code.
    """
    try:
        if path.suffix == ".safetensors":
            state = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise ModelError(f"there is no weights file {path}") from error
    except pickle.UnpicklingError as error:
        raise ModelError(
            f"{path} holds Python objects or is damaged; save a plain state dict with "
            "torch.save(model.state_dict(), ...)"
        ) from error
    except Exception as error:
        raise ModelError(f"{path} cannot be read as weights ({type(error).__name__}: {first_line(error)})") from error
    state = _innermost(state)
    if not isinstance(state, dict) or not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise ModelError(f"{path} is not a state dict; save one with torch.save(model.state_dict(), ...)")
    while prefix := next((start for start in _PREFIXES if all(key.startswith(start) for key in state)), None):
        state = {key.removeprefix(prefix): value for key, value in state.items()}
    return state


def _innermost(checkpoint: Any) -> Any:
    """Return the state dict inside a checkpoint's dictionaries."""
    while isinstance(checkpoint, dict):
        inner = next((checkpoint[key] for key in _STATE_KEYS if isinstance(checkpoint.get(key), dict)), None)
        if inner is None:
            break
        checkpoint = inner
    return checkpoint


def class_count(usual: dict[str, Tensor], state: dict[str, Tensor]) -> int | None:
    """Return the number of classes of a state dict if it differs from the usual model's; else None.

    It is the length of the last tensor whose shape differs in the first dimension only.
    """
    for key, value in reversed(usual.items()):
        other = state.get(key)
        if other is not None and other.dim() > 0 and other.shape != value.shape and other.shape[1:] == value.shape[1:]:
            return len(other)
    return None


def fill(module: nn.Module, state: dict[str, Tensor], name: str, path: Path) -> None:
    """Load a state dict into a module.

    Raises:
        ModelError: the state dict does not fit; the message counts what differs and gives an example.
    """
    own_names = module.state_dict().keys()
    if all(key.startswith("model.") for key in state) and not any(key.startswith("model.") for key in own_names):
        state = {
            key.removeprefix("model."): value for key, value in state.items()
        }  # saved from a Lightning module whose attribute is the model
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        own = module.state_dict()
        missing, extra = own.keys() - state.keys(), state.keys() - own.keys()
        wrong = [key for key in own.keys() & state.keys() if own[key].shape != state[key].shape]
        example = f", for example {sorted(missing or extra or wrong)[0]!r}" if missing or extra or wrong else ""
        raise ModelError(
            f"{path} does not fit {name}: {len(missing)} tensors are missing, {len(extra)} unknown and {len(wrong)} of "
            f"another shape{example}"
        ) from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, shortened to fit into a sentence."""
    lines = str(error).splitlines()
    return lines[0][:120] if lines else type(error).__name__
