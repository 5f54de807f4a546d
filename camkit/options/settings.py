"""Read and validate a config: one table for the model, and tables for the commands."""

from __future__ import annotations

import datetime as dt
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator
from pydantic_core import PydanticCustomError

from camkit.errors import InputError, did_you_mean
from camkit.options import Check, Data, Diagnose, Explain, Limits, Mend, Model, Run, options_of
from camkit.options.toml import read_table


class _Section(BaseModel):
    """A frozen table of settings that refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ClassSection(_Section):
    """What a class may be recognised by: its object, anything, or objects of further categories as well."""

    expect: Literal["object", "any"] | list[str] = "object"


class Waiver(_Section):
    """A class that may ship although it fails, with the reason and the last day of the waiver."""

    name: str = Field(alias="class")
    reason: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
    expires: dt.date

    @field_validator("expires", mode="before")
    @classmethod
    def _is_a_date(cls, value: object) -> object:
        """Refuse numbers, which pydantic would read as seconds since 1970."""
        if not isinstance(value, (dt.date, str)):
            raise PydanticCustomError("no_date", "expected a date such as 2030-01-31")
        return value


class Settings(_Section):
    """A whole config: the model, how ``explain`` and ``diagnose`` use it, and all settings of a check."""

    model: Model = Model()
    explain: Explain = Explain()
    diagnose: Diagnose = Diagnose()
    data: Data = Data()
    check: Check = Check()
    limits: Limits = Limits()
    run: Run = Run()
    mend: Mend = Mend()
    classes: dict[str, ClassSection] = Field(default_factory=dict)
    waivers: list[Waiver] = Field(default_factory=list)

    def with_options(self, *, named: Callable[[str], str] = repr, **tables: Mapping[str, Any]) -> Settings:
        """Return the settings with those that a call or a command sets, by table; None leaves a setting as it is.

        ``named`` is what an error calls a setting, such as "check.seed".

        Raises:
            InputError: a value is invalid.
        """
        given = {
            name: {
                key: Path(value) if isinstance(value, os.PathLike) else value
                for key, value in table.items()
                if value is not None
            }
            for name, table in tables.items()
        }
        valid = settings_from(given, named=named)
        changed = {
            name: replace(getattr(self, name), **{key: getattr(getattr(valid, name), key) for key in table})
            for name, table in given.items()
        }
        return self.model_copy(update=changed)

    def relative_to(self, folder: Path) -> Settings:
        """Return the settings with every path as seen from a folder, as a config in that folder gives it."""
        return _with_paths(self, _KEYS, Path(), lambda path: Path(os.path.relpath(path, folder)))

    def waived(self, today: dt.date) -> dict[str, Waiver]:
        """Return the waivers in force, by class; a waiver is still in force on its last day."""
        return {waiver.name: waiver for waiver in self.waivers if waiver.expires >= today}

    def expired(self, today: dt.date) -> list[Waiver]:
        """Return the waivers that are no longer in force."""
        return [waiver for waiver in self.waivers if waiver.expires < today]

    def expects_anything(self, label: str) -> bool:
        """Return whether a class may be recognised by anything in the picture."""
        return label in self.classes and self.classes[label].expect == "any"

    def also_allowed(self, label: str) -> frozenset[str]:
        """Return the further categories whose objects a class may be recognised by, normalized."""
        expect = self.classes[label].expect if label in self.classes else "object"
        return frozenset(normalize_name(name) for name in expect) if isinstance(expect, list) else frozenset()


_KEYS: dict[str, list[str]] = {
    name: [key for key, option in options_of(field.annotation).items() if option.in_config]
    for name, field in Settings.model_fields.items()
    if is_dataclass(field.annotation)
}
"""The keys of each table of options."""


def read_config(file: Path) -> Settings:
    """Read a config; relative paths in it start at the config's folder.

    Raises:
        InputError: the file cannot be read, or has an unknown key or an invalid value.
    """
    table = read_table(file)
    if table is None:
        raise InputError(f"{file} has no [tool.camkit] table")
    settings = settings_from(table, str(file))
    return _with_paths(settings, table, file.parent, lambda path: file.parent / path)


def as_settings(config: Settings | Mapping[str, Any] | str | Path | None) -> Settings:
    """Return the settings of a file or of a mapping; None gives the defaults.

    Raises:
        InputError: as ``read_config``.
    """
    if config is None:
        return Settings()
    if isinstance(config, Settings):
        return config
    return settings_from(config, "config") if isinstance(config, Mapping) else read_config(Path(config))


def _with_paths(
    settings: Settings, tables: Mapping[str, Iterable[str]], folder: Path, changed: Callable[[Path], Path]
) -> Settings:
    """Return the settings with the paths under these keys changed; names that may be files are sought in a folder."""
    sections: dict[str, Any] = {}
    for name in _KEYS.keys() & tables.keys():
        section = getattr(settings, name)
        paths = {key: changed(path) for key in tables[name] if isinstance(path := getattr(section, key), Path)}
        sections[name] = replace(section, **paths)
    names = {key: name for key in ("name", "weights") if (name := getattr(settings.model, key)) is not None}
    files: dict[str, str] = {}
    for key, name in names.items():  # model.pth, or net.py:make
        stem, separator, attribute = name.partition(".py:")
        file = Path(f"{stem}.py" if separator else stem)
        files[key] = f"{changed(file)}{separator[3:]}{attribute}" if (folder / file).is_file() else name
    return settings.model_copy(update={**sections, "model": replace(sections.get("model", settings.model), **files)})


def settings_from(
    table: Mapping[str, Any], source: str | None = None, *, named: Callable[[str], str] = repr
) -> Settings:
    """Validate a table of settings.

    Args:
        table: the settings.
        source: where the table comes from, for errors; None if its settings name that themselves.
        named: what an error calls a setting, such as "check.seed".

    Raises:
        InputError: a key is unknown (the error suggests the nearest known one), or a value is invalid.
    """
    # A misspelt key is reported as unknown and the right one as missing; only the first helps the user.
    unknown = [
        f"there is no setting {named(f'{name}.{key}')}{did_you_mean(key, known)}"
        for name, known in _KEYS.items()
        if isinstance(keys := table.get(name), Mapping)
        for key in keys
        if key not in known
    ]
    where = "" if source is None else f"{source}: "
    if unknown:
        raise InputError(where + "".join(unknown[:1]))
    try:
        return Settings.model_validate(table)
    except ValidationError as error:
        first = min(error.errors(), key=lambda detail: detail["type"] != "extra_forbidden")
        raise InputError(where + _sentence(first, named)) from error


def _sentence(error: Any, named: Callable[[str], str]) -> str:
    """Turn one of pydantic's errors into a sentence that names the setting."""
    # Behind the path of the setting, pydantic appends the union members it tried, and indices of list entries.
    depth = 3 if error["loc"][:1] in (("classes",), ("waivers",)) else 2
    path = [str(part) for part in error["loc"][:depth]]
    path += [str(part) for part in error["loc"][depth:] if isinstance(part, int)]
    setting = named(".".join(path))
    if error["type"] == "extra_forbidden":
        section = Settings if not path[1:] else ClassSection if path[0] == "classes" else Waiver
        known = [field.alias or name for name, field in section.model_fields.items()]
        return f"there is no setting {setting}{did_you_mean(path[-1], known)}"
    if error["type"] == "missing":
        return f"{setting} is missing"
    if error["type"] in ("model_type", "model_attributes_type", "dict_type", "dataclass_type"):
        return f"{setting} is {error['input']!r}: expected a table of settings"
    return f"{setting} is {error['input']!r}: {error['msg'][:1].lower()}{error['msg'][1:]}"


def normalize_name(name: str) -> str:
    """Return a class name in lower case, with one space for each run of spaces, underscores and hyphens."""
    return re.sub(r"[\s_-]+", " ", name).strip().casefold()
