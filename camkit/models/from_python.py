"""Loads the user's own networks: ``package.module:factory`` or ``file.py:factory``."""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import operator
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from camkit.errors import ModelError, as_error, did_you_mean, refusing_exit
from camkit.models.from_file import as_module
from camkit.models.loaded import LoadedModel, Request, is_file


@refusing_exit()
def load(request: Request) -> LoadedModel:
    """Call the factory, which returns a module, a module and its preprocessing, or a ``LoadedModel``."""
    source, _, attribute = request.name.rpartition(":")
    if not source.strip("./") or not attribute:
        raise ModelError(f"{request.name!r} names no function that returns a model; name it as file.py:factory")
    module = _module(source)
    with as_error(ModelError, lambda error: f"{request.name}: {error}{did_you_mean(attribute, dir(module))}"):
        factory = operator.attrgetter(attribute)(module)
    if callable(factory) and not isinstance(factory, nn.Module):
        factory = factory()
    loaded = _as_loaded(factory, request)
    note = "; ".join(filter(None, (loaded.note, request.fill(loaded.module)))) or None
    return replace(loaded, name=request.name, note=note)


def _as_loaded(result: Any, request: Request) -> LoadedModel:
    """Check what the factory returned, and find its preprocessing."""
    name = request.name
    if isinstance(result, LoadedModel):
        return replace(result, preprocess=request.prepared(result.preprocess))
    is_pair = isinstance(result, tuple) and len(result) == 2 and callable(result[1])
    module, preprocess = result if is_pair else (result, None)
    if isinstance(module, torch.export.ExportedProgram):
        module = as_module(module, name)
    if not isinstance(module, nn.Module):
        raise ModelError(
            f"{name} returned {type(module).__name__}; a factory must return a torch.nn.Module, or a module and the "
            "function that prepares a PIL picture for it"
        )
    described = None if is_pair else _described(module, request)
    return described or LoadedModel(module, name, request.prepared(preprocess))


def _described(module: nn.Module, request: Request) -> LoadedModel | None:
    """Return a module with the preprocessing and labels of the library it comes from; None if that knows none."""
    libraries = {kind.__module__.partition(".")[0] for kind in type(module).__mro__}
    for library, source, named in (
        ("timm", "from_timm", "timm's configuration" * hasattr(module, "pretrained_cfg")),
        ("transformers", "from_huggingface", getattr(module, "name_or_path", "")),
    ):
        if library in libraries and named:
            loader = importlib.import_module(f"camkit.models.{source}")  # the library is installed
            with contextlib.suppress(OSError, ValueError):  # it was saved without its preprocessing, or with code
                described: LoadedModel = loader.described(module, request)
                return replace(described, note=f"pictures are prepared as {named} says")
    return None


def _module(source: str) -> ModuleType:
    if not source.endswith(".py"):
        return _import(source)
    path = Path(source)
    if not is_file(path):
        raise ModelError(f"there is no file {path}")
    # The file may import modules beside it, as it may if Python runs it.
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec: Any = importlib.util.spec_from_file_location(f"camkit_model_{path.stem}", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent.resolve()))
    return module


def _import(name: str) -> ModuleType:
    folder = os.getcwd()  # noqa: PTH109 - sys.path holds strings
    # If the package is installed, the folder may be a stranger's. Its files must not replace what the package imports.
    added = [folder] if importlib.machinery.PathFinder.find_spec(name.partition(".")[0], [folder]) else []
    sys.path[:0] = added
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise ModelError(
            f"there is no Python module {name!r} in this folder or among the installed packages"
        ) from error
    finally:
        for path in added:
            sys.path.remove(path)
