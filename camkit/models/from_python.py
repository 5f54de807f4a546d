"""The caller's own networks: ``package.module:factory`` or ``file.py:factory``."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from camkit.errors import ModelError, did_you_mean
from camkit.models.request import Request, preset
from camkit.models.weights import fill, read_state_dict
from camkit.values import LoadedModel, Preprocess


def load(request: Request) -> LoadedModel:
    """Call the factory; it returns a module, a module and its preprocessing, or a ``LoadedModel``."""
    request.refuse_text()
    place, _, attribute = request.name.rpartition(":")
    factory = _find(_module(place), attribute, request.name)
    made: Any = factory() if callable(factory) and not isinstance(factory, nn.Module) else factory
    preprocess: Preprocess | None = None
    labels: tuple[str, ...] | None = None
    if isinstance(made, LoadedModel):
        made, preprocess, labels = made.module, made.preprocess, made.labels
    elif isinstance(made, tuple) and len(made) == 2 and callable(made[1]):
        made, preprocess = made
    if not isinstance(made, nn.Module):
        raise ModelError(
            f"{request.name} gave a {type(made).__name__}; a factory returns a torch.nn.Module, or a module and the "
            "function that prepares a PIL picture for it"
        )
    if request.weights is not None:
        path = Path(request.weights)
        fill(made, read_state_dict(path), request.name, path)
    return LoadedModel(made, request.name, _prepared(request) or preprocess, labels)


def _module(place: str) -> ModuleType:
    if not place.endswith(".py"):
        return _import(place)
    path = Path(place)
    if not path.is_file():
        raise ModelError(f"there is no file {path}")
    # Beside the file lie the modules it imports, as when Python runs it.
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec = importlib.util.spec_from_file_location(f"camkit_model_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent.resolve()))
    return module


def _import(name: str) -> ModuleType:
    here = os.getcwd()  # noqa: PTH109 - sys.path holds text
    sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise ModelError(f"there is no Python module {name!r} here or among the installed packages") from error
    finally:
        sys.path.remove(here)


def _find(module: ModuleType, attribute: str, name: str) -> Any:
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ModelError(f"{name}: there is no {part!r}{did_you_mean(part, dir(found))}")
        found = getattr(found, part)
    return found


def _prepared(request: Request) -> Preprocess | None:
    if not request.changes:
        return None
    if request.size is None or request.mean is None or request.std is None:
        raise ModelError(
            f"how pictures are prepared for {request.name} is not known: give size, mean and std, all three "
            "(--size 224 --mean 0.485,0.456,0.406 --std 0.229,0.224,0.225 if it was trained as ImageNet models are)"
        )
    made: Preprocess = preset(request.size, request.mean, request.std)
    return made
