"""``camkit.toml``, or ``[tool.camkit]`` of ``pyproject.toml``: every key is checked, an unknown one named."""

from __future__ import annotations

import datetime as dt
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from camkit.errors import InputError, did_you_mean

FILE = "camkit.toml"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelPart(_Part):
    """Which model, as the command line's options say it."""

    name: str | None = None
    weights: str | None = None
    device: str | None = None
    size: int | list[int] | None = None
    mean: list[float] | None = None
    std: list[float] | None = None
    labels: Path | None = None
    text: list[str] | None = None


class DataPart(_Part):
    """Which pictures, which regions, and which class is which output."""

    path: Path | None = None
    regions: Path | None = None
    group: str | None = None
    class_map: Path | None = None


class CheckPart(_Part):
    """How the check is made."""

    per_class: int = Field(default=100, ge=2)
    most: int = Field(default=2000, ge=4)
    pastes: int = Field(default=2, ge=1)
    seed: int = Field(default=0, ge=0)
    batch_size: int = Field(default=32, ge=1)
    layer: str | None = None
    method: str = "gradcam"
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    ring: float = Field(default=0.15, gt=0, lt=0.5)
    ring_is_background: bool = False


class LimitsPart(_Part):
    """What is too much, or too little."""

    gap: float = Field(default=0.10, ge=0, le=1)
    sufficiency: float = Field(default=0.10, ge=0, le=1)
    skill: float = Field(default=0.15, ge=-1, le=1)
    alpha: float = Field(default=0.05, gt=0, lt=1)
    least_pictures: int = Field(default=30, ge=2)
    most_empty: float = Field(default=0.20, ge=0, le=1)
    least_room: float = Field(default=0.10, ge=0, le=1)


class ClassPart(_Part):
    """What a class may be recognised by: its object, anything, or also the objects of other categories."""

    expect: Literal["object", "any"] | list[str] = "object"


class Waiver(_Part):
    """A class that may ship although it fails, why, and until when."""

    name: str = Field(alias="class")
    reason: str = Field(min_length=1)
    expires: dt.date


class Settings(_Part):
    """All of it."""

    model: ModelPart = Field(default_factory=ModelPart)
    data: DataPart = Field(default_factory=DataPart)
    check: CheckPart = Field(default_factory=CheckPart)
    limits: LimitsPart = Field(default_factory=LimitsPart)
    classes: dict[str, ClassPart] = Field(default_factory=dict)
    waivers: list[Waiver] = Field(default_factory=list)

    def waived(self, today: dt.date) -> dict[str, Waiver]:
        """Return the waivers that still hold, by class."""
        return {one.name: one for one in self.waivers if one.expires >= today}

    def expired(self, today: dt.date) -> list[Waiver]:
        """Return the waivers that no longer hold."""
        return [one for one in self.waivers if one.expires < today]

    def expects_anything(self, label: str) -> bool:
        """Whether a class may be recognised by anything in the picture."""
        return label in self.classes and self.classes[label].expect == "any"

    def also_allowed(self, label: str) -> frozenset[str]:
        """Return the categories whose objects a class may be recognised by, beside its own."""
        expect = self.classes[label].expect if label in self.classes else "object"
        return frozenset(name.casefold() for name in expect) if isinstance(expect, list) else frozenset()


def find_config(folder: Path) -> Path | None:
    """Return ``camkit.toml`` of a folder, or its ``pyproject.toml`` where that has a ``[tool.camkit]``."""
    if (folder / FILE).is_file():
        return folder / FILE
    project = folder / "pyproject.toml"
    return project if project.is_file() and _table(project) is not None else None


def _table(file: Path) -> dict[str, Any] | None:
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the config {file} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"the config {file} is not TOML: {error}") from error
    if file.name != "pyproject.toml":
        return found
    table: dict[str, Any] | None = found.get("tool", {}).get("camkit")
    return table


def read_config(file: Path) -> Settings:
    """Read a config; its paths count from where it lies.

    Raises:
        InputError: it cannot be read, has an unknown key, or a value that is none.
    """
    settings = settings_from(_table(file) or {}, str(file))
    here = file.parent
    moved = {
        name: here / path
        for name in ("path", "regions", "class_map")
        if (path := getattr(settings.data, name)) is not None
    }
    labels = settings.model.labels
    model = settings.model.model_copy(update={"labels": None if labels is None else here / labels})
    return settings.model_copy(update={"data": settings.data.model_copy(update=moved), "model": model})


def settings_from(table: Mapping[str, Any], source: str) -> Settings:
    """Check a table of settings.

    Raises:
        InputError: an unknown key, with the nearest known one, or a value that is none.
    """
    try:
        return Settings.model_validate(table)
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(f"{source}: {_sentence(first)}") from error


def _sentence(error: Any) -> str:
    place = [str(part) for part in error["loc"] if part not in ("literal['object','any']", "list[str]")]
    where = ".".join(place)
    if error["type"] == "extra_forbidden":
        return f"there is no setting {where!r}{did_you_mean(place[-1], _keys(place[:-1]))}"
    if error["type"] == "missing":
        return f"{where!r} is missing"
    return f"{where!r} is {error['input']!r}: {error['msg'][:1].lower()}{error['msg'][1:]}"


def _keys(place: list[str]) -> list[str]:
    part: Any = Settings
    kinds = {"classes": ClassPart, "waivers": Waiver}
    if place:
        part = kinds.get(place[0]) or Settings.model_fields[place[0]].annotation
    return [field.alias or name for name, field in part.model_fields.items()]
