"""``camkit.toml``, or ``[tool.camkit]`` of ``pyproject.toml``: every key is checked, an unknown one named."""

from __future__ import annotations

import datetime as dt
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator
from pydantic_core import PydanticCustomError

from camkit.background.classes import plain
from camkit.errors import InputError, did_you_mean

FILE = "camkit.toml"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


Side: TypeAlias = Annotated[int, Field(ge=1)]


class ModelPart(_Part):
    """Which model, as the command line's options say it."""

    name: str | None = None
    weights: str | None = None
    device: str | None = None
    size: Annotated[int, Field(ge=1)] | Annotated[list[Side], Field(min_length=2, max_length=2)] | None = None
    mean: list[Annotated[float, Field(allow_inf_nan=False)]] | None = None
    std: list[Annotated[float, Field(gt=0, allow_inf_nan=False)]] | None = None
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
    seed: int = Field(default=0, ge=0, lt=1 << 63)
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
    attraction: float = Field(default=0.10, ge=0, le=1)
    skill: float = Field(default=0.0, ge=-1, le=1)
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
    reason: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
    expires: dt.date

    @field_validator("expires", mode="before")
    @classmethod
    def _is_a_date(cls, value: object) -> object:
        """Refuse what would be taken for seconds since 1970."""
        if not isinstance(value, (dt.date, str)):
            raise PydanticCustomError("no_date", "a date is expected, as in 2030-01-31")
        return value


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
        return frozenset(plain(name) for name in expect) if isinstance(expect, list) else frozenset()


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
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(f"the config {file} is not TOML: {error}") from error
    if file.name != "pyproject.toml":
        return found
    tools = found.get("tool", {})
    table = tools.get("camkit") if isinstance(tools, dict) else None
    if table is not None and not isinstance(table, dict):
        raise InputError(f"[tool.camkit] of {file} must be a table of settings, not {table!r}")
    return table


def read_config(file: Path) -> Settings:
    """Read a config; its paths count from where it lies.

    Raises:
        InputError: it cannot be read, has an unknown key, or a value that is none.
    """
    table = _table(file)
    if table is None:
        raise InputError(f"{file} has no [tool.camkit]")
    settings = settings_from(table, str(file))
    here = file.parent
    moved = {
        name: here / path
        for name in ("path", "regions", "class_map")
        if (path := getattr(settings.data, name)) is not None
    }
    part = settings.model
    model = part.model_copy(
        update={
            "name": _beside(part.name, here),
            "weights": _beside(part.weights, here),
            "labels": None if part.labels is None else here / part.labels,
        }
    )
    return settings.model_copy(update={"data": settings.data.model_copy(update=moved), "model": model})


def _beside(name: str | None, here: Path) -> str | None:
    """Return a name with the folder before it where it is that of a file there, as ``model.pth`` or ``net.py:make``."""
    if name is None:
        return None
    file, sign = name.partition(".py:")[:2]
    return str(here / name) if (here / f"{file}{sign[:3]}").is_file() else name


def settings_from(table: Mapping[str, Any], source: str) -> Settings:
    """Check a table of settings.

    Raises:
        InputError: an unknown key, with the nearest known one, or a value that is none.
    """
    try:
        return Settings.model_validate(table)
    except ValidationError as error:
        # A key that is misspelt is missing too: the spelling is what helps.
        told = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
        raise InputError(f"{source}: {_sentence(told)}") from error


def _sentence(error: Any) -> str:
    # Behind a setting's own place stand the kinds it may be of, and numbers in a list.
    depth = 3 if error["loc"][:1] in (("classes",), ("waivers",)) else 2
    place = [str(part) for part in error["loc"][:depth]]
    place += [str(part) for part in error["loc"][depth:] if isinstance(part, int)]
    where = ".".join(place)
    if error["type"] == "extra_forbidden":
        return f"there is no setting {where!r}{did_you_mean(place[-1], _keys(place[:-1]))}"
    if error["type"] == "missing":
        return f"{where!r} is missing"
    if error["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return f"{where!r} is {error['input']!r}: a table of settings is expected"
    return f"{where!r} is {error['input']!r}: {error['msg'][:1].lower()}{error['msg'][1:]}"


def _keys(place: list[str]) -> list[str]:
    part: Any = Settings
    kinds = {"classes": ClassPart, "waivers": Waiver}
    if place:
        part = kinds.get(place[0]) or Settings.model_fields[place[0]].annotation
    return [field.alias or name for name, field in part.model_fields.items()]
