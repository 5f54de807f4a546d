"""Gives the options that are not typed the values of the config, so that a command sees no difference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cyclopts import App
from cyclopts.argument import ArgumentCollection, update_argument_collection

from camkit.cli.terminal import say
from camkit.errors import InputError
from camkit.options import given_in, options_of

_CHECK = ("data", "check", "limits", "run")
_TABLES: dict[tuple[str, ...], tuple[str, ...]] = {
    **dict.fromkeys([(), ("explain",)], ("explain",)),
    ("diagnose",): ("diagnose",),
    **dict.fromkeys([("check",), ("check", "init")], _CHECK),
    ("mend",): ("data", "check"),
}
"""The config's tables whose keys are options of a command; the table ``model`` holds for all commands."""


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
        values |= _values(settings.model)
    for table in _TABLES.get(commands, ()):
        values |= _values(getattr(settings, table))
    if {"references", "layer"} & values.keys() and "check" not in _TABLES.get(commands, ()):
        _leave_out_unused(values, typed("--method"))
    given = {name.replace("_", "-"): value for name, value in values.items()}
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


def _values(table: Any) -> dict[str, Any]:
    """Return the values that a table of the config sets, by option, as they would be typed."""
    names = {name: option.name or name for name, option in options_of(type(table)).items()}
    return {names[name]: _typed(name, value) for name, value in given_in(table).items()}


def _typed(name: str, value: Any) -> Any:
    if name in ("mean", "std"):
        return ",".join(map(str, value))
    if name == "size" and isinstance(value, list):
        return "x".join(map(str, value))
    return value if isinstance(value, (bool, int, float, list)) else str(value)
