"""Finds the Python files that decide what a model and the user's own functions do."""

from __future__ import annotations

import functools
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from camkit.models.loaded import LoadedModel
from camkit.models.modules import black_box_in


def code_files(model: LoadedModel, *more: Any) -> list[Path]:
    """Return the files that define a model's modules, its preprocessing and more objects, and the files they import.

    Code without a file, such as a notebook's, is left out, and so is what installed packages import.

    Args:
        model: the model.
        *more: functions and objects, such as a method or a target.
    """
    objects = [model.preprocess, *getattr(model.preprocess, "transforms", ()), *more]  # the steps of a Compose
    box = black_box_in(model.module)
    objects += [] if box is None else [box.function]
    objects += [part for item in objects for part in (getattr(item, "lambd", None), *_parts(item))]
    definitions = [*objects, *map(type, (*model.module.modules(), *objects))]
    modules: set[ModuleType] = set()
    _add_imported(modules, definitions)
    return sorted({Path(file) for file in map(_file_of, modules) if file is not None})


def _parts(item: Any) -> tuple[Any, ...]:
    """Return the function of a partial, and the object of a bound method."""
    return (item.func,) if isinstance(item, functools.partial) else (getattr(item, "__self__", None),)


def _add_imported(modules: set[ModuleType], definitions: Iterable[Any]) -> None:
    """Add the modules of classes, functions and objects, and those that the user's own ones among them import."""
    for definition in definitions:
        is_module = isinstance(definition, ModuleType)
        module = definition if is_module else sys.modules.get(str(getattr(definition, "__module__", None)))
        if module is not None and module not in modules:
            modules.add(module)
            if not _is_installed(module):
                _add_imported(modules, list(vars(module).values()))


def _is_installed(module: ModuleType) -> bool:
    """Return whether a module belongs to Python or to an installed package, which do not change during a run."""
    file = _file_of(module)
    if file is None or not _PACKAGE_FOLDERS.isdisjoint(Path(file).parts):
        return True
    return any(Path(file).is_relative_to(folder) for folder in (sysconfig.get_path("stdlib"), _CAMKIT))


_PACKAGE_FOLDERS = {"site-packages", "dist-packages"}
"""Folders with these names hold installed packages, in any environment."""

_CAMKIT = str(Path(__file__).parents[1])


def _file_of(module: ModuleType) -> str | None:
    """Return the file that holds a module's Python code, if there is one."""
    file: str | None = getattr(module, "__file__", None)
    return file if file is not None and file.endswith(".py") else None
