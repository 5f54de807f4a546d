"""Gives the options that are not typed the values of the config, so that a command sees no difference."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from cyclopts import App
from cyclopts.argument import ArgumentCollection, update_argument_collection

from camkit.cli.terminal import say
from camkit.errors import InputError

if TYPE_CHECKING:
    from pydantic import BaseModel

_TABLES: dict[tuple[str, ...], str] = {(): "explain", ("explain",): "explain", ("diagnose",): "diagnose"}
"""The config's table whose keys are options of a command; the table ``model`` holds for all commands.

A check reads its own tables, since the config has more of them than the command has options.
"""


def fill_in(_: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Add the config's values to the options that were not typed, and print its name.

    cyclopts calls this before it converts the options.

    Raises:
        InputError: the config cannot be read, has an unknown key or an invalid value, or was found and names code.
    """
    options = {name: argument for argument in arguments for name in argument.names}
    if "--config" not in options:
        return

    def typed(option: str) -> list[str]:
        return [token.value for token in options[option].tokens] if option in options else []

    from camkit.config.files import find_config

    # A config that lies in the folder already says nothing about the one that ``camkit check init`` is to write.
    named = [Path(name) for name in typed("--config")]
    file = named[-1] if named else find_config(Path()) if commands != ("check", "init") else None
    if file is None:
        return
    from camkit.config.settings import read_config

    settings, models = read_config(file), typed("--model")
    if not named and not models:
        _refuse_code(settings.model.name, file)
    if not options["--quiet"].tokens:
        here = "" if named else " in this folder; to use another, pass --config FILE"
        say(f"using the config {file}{here}")
    values: dict[str, Any] = {"config": str(file)}
    if not models or settings.model.describes(models[-1]):
        values |= {"model" if name == "name" else name: value for name, value in _values(settings.model).items()}
    if commands in _TABLES:
        values |= _values(getattr(settings, _TABLES[commands]))
    if {"references", "layer"} & values.keys():
        _leave_out_unused(values, typed("--method"))
    given = {name.replace("_", "-"): value for name, value in values.items() if value is not None}
    known = {name: value for name, value in given.items() if f"--{name}" in options}
    # cyclopts' own class for this leaves out options that are called like a command, such as scale.
    update_argument_collection(known, str(file), arguments, root_keys=(), allow_unknown=False)


def _leave_out_unused(values: dict[str, Any], typed: list[str]) -> None:
    """Leave out references that no method uses, and a layer that no typed method reads."""
    from camkit.methods import METHODS

    methods = [METHODS[name] for name in typed or [str(values.get("method"))] if name in METHODS]
    if not any(method.compares for method in methods):
        values.pop("references", None)
    if typed and methods and not any(method.layer for method in methods):
        values.pop("layer", None)


def _refuse_code(model: str | None, file: Path) -> None:
    """Refuse a config that nobody named if its model is Python code: the folder may be a stranger's."""
    if model is None:
        return
    from camkit.models import runs_code

    if runs_code(model):
        raise InputError(
            f"the model in {file} is Python code ({model}), and camkit does not run code from a config that you did "
            f"not name; if you trust this code, pass --config {file}"
        )


def _values(table: BaseModel) -> dict[str, Any]:
    """Return the values that a table of the config sets, as they would be typed."""
    return {name: _typed(name, getattr(table, name)) for name in table.model_fields_set}


def _typed(name: str, value: Any) -> Any:
    if name in ("mean", "std") and value is not None:
        return ",".join(map(str, value))
    if name == "size" and isinstance(value, list):
        return "x".join(map(str, value))
    return value if value is None or isinstance(value, (bool, int, float, list)) else str(value)
