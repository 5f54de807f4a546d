"""The caller's own networks: ``package.module:factory`` or ``file.py:factory``."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from camkit.errors import ModelError, did_you_mean
from camkit.models.loaded import LoadedModel
from camkit.models.modules import refuse_exported
from camkit.models.request import Request, preset
from camkit.models.weights import fill, read_state_dict
from camkit.types import Preprocess


def load(request: Request) -> LoadedModel:
    """Call the factory; it returns a module, a module and its preprocessing, or a ``LoadedModel``."""
    request.refuse_text()
    place, _, attribute = request.name.rpartition(":")
    if not place.strip("./") or not attribute:
        raise ModelError(f"unknown model {request.name!r}; a network of your own is file.py:factory")
    try:
        made = _made(_find(_module(place), attribute, request.name), request.name)
    except SystemExit as error:
        raise ModelError(
            f"{request.name} ended the program, as a script does; name a function that returns a model"
        ) from error
    known = made if isinstance(made, LoadedModel) else None
    if known is not None:
        made = known.module
    elif isinstance(made, tuple) and len(made) == 2 and callable(made[1]):
        known = LoadedModel(made[0], request.name, made[1])
        made = made[0]
    refuse_exported(made)
    if not isinstance(made, nn.Module):
        raise ModelError(
            f"{request.name} gave a {type(made).__name__}; a factory returns a torch.nn.Module, or a module and the "
            "function that prepares a PIL picture for it"
        )
    if request.weights is not None:
        path = Path(request.weights)
        fill(made, read_state_dict(path), request.name, path)
    preprocess = _prepared(request, known)
    if known is None:
        return LoadedModel(made, request.name, preprocess)
    return replace(known, module=made, name=request.name, preprocess=preprocess)


def _made(factory: Any, name: str) -> Any:
    if not callable(factory) or isinstance(factory, nn.Module):
        return factory
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise ModelError(f"{name} needs arguments ({error}); name a function that takes none") from error
    except ValueError:  # it doesn't tell what it takes
        pass
    return factory()


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


def _prepared(request: Request, known: LoadedModel | None) -> Preprocess | None:
    usual = None if known is None else known.preprocess
    if not request.changes:
        return usual
    if request.size is None or request.mean is None or request.std is None:
        unknown = "is its own function" if usual is not None else "is not known"
        raise ModelError(
            f"how pictures are prepared for {request.name} {unknown}: give size, mean and std, all three "
            "(--size 224 --mean 0.485,0.456,0.406 --std 0.229,0.224,0.225 if it was trained as ImageNet models are)"
        )
    made: Preprocess = preset(request.size, request.mean, request.std)
    return made
