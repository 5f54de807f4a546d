"""Find the config of a folder. This module imports no validation, so that a call without a config is quick."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

from camkit.errors import InputError, as_error, refuse_pipe

FILE, PROJECT_FILE = "camkit.toml", "pyproject.toml"
"""The files that can hold a config; in the second, the config is one table among others."""


def find_config(folder: Path) -> Path | None:
    """Return the ``camkit.toml`` of a folder, or its ``pyproject.toml`` if that has a ``[tool.camkit]`` table.

    A ``camkit.toml`` that cannot be read, such as a broken link, is returned too: a check without it has other limits.
    """
    if os.path.lexists(folder / FILE):
        return folder / FILE
    project = folder / PROJECT_FILE
    return project if project.is_file() and read_table(project) is not None else None


def read_table(file: Path) -> dict[str, Any] | None:
    """Return camkit's table of a TOML file; None for a ``pyproject.toml`` without one.

    Raises:
        InputError: the file cannot be read, is not TOML, or its ``[tool.camkit]`` is not a table.
    """
    refuse_pipe(file)
    with as_error(InputError, lambda error: f"the config {file} cannot be read: {error}"):
        content = tomllib.loads(file.read_text(encoding="utf-8-sig"))
    if file.name != PROJECT_FILE:
        return content
    tools = content.get("tool", {})
    table = tools.get("camkit") if isinstance(tools, dict) else None
    if table is not None and not isinstance(table, dict):
        raise InputError(f"[tool.camkit] in {file} must be a table of settings, not {table!r}")
    return table
