"""Read and validate a config: one table for the model, and tables for the commands."""

from __future__ import annotations

import datetime as dt
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    InstanceOf,
    StringConstraints,
    ValidationError,
    field_serializer,
    field_validator,
)
from pydantic_core import PydanticCustomError

from camkit.config.files import read_table
from camkit.errors import InputError, did_you_mean
from camkit.methods import Method, find_method
from camkit.types import Activation, Fusion, Precision, Scale, Smoothing


class _Section(BaseModel):
    """A frozen table of settings that refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


SideLength: TypeAlias = Annotated[int, Field(ge=1)]


class ModelSection(_Section):
    """The model of every command; the keys mean what the command-line options of the same name mean."""

    name: str | None = None
    weights: str | None = None
    device: str | None = None
    size: Annotated[int, Field(ge=1)] | Annotated[list[SideLength], Field(min_length=2, max_length=2)] | None = None
    mean: list[Annotated[float, Field(allow_inf_nan=False)]] | None = None
    std: list[Annotated[float, Field(gt=0, allow_inf_nan=False)]] | None = None
    labels: Path | None = None
    text: list[str] | None = None
    output: str | int | None = None
    activation: Activation | None = None

    def describes(self, name: str) -> bool:
        """Return whether these settings apply to the model with this name: they name this model, or none."""
        return self.name is None or _absolute(self.name) == _absolute(name)


class ExplainSection(_Section):
    """How pictures are explained; the keys mean what the command-line options of the same name mean.

    ``out``, ``style``, ``colormap``, ``alpha``, ``scale``, ``max_side`` and ``format`` say how the command draws, and
    ``draft`` says how it reads files, so they change nothing in Python. ``references`` hold for the methods that use
    reference pictures; other methods ignore them here.
    """

    method: str | None = None
    layer: str | list[str] | None = None
    fuse: Fusion | None = None
    smooth: Smoothing | None = None
    references: Path | None = None
    precision: Precision | None = None
    batch_size: Annotated[int, Field(ge=1)] | None = None
    out: Path | None = None
    style: str | None = None
    colormap: str | None = None
    alpha: Annotated[float, Field(ge=0, le=1)] | None = None
    max_side: Annotated[int, Field(ge=0)] | None = None
    format: Literal["jpg", "png"] | None = None
    draft: bool | None = None
    scale: Scale | None = None


class DiagnoseSection(_Section):
    """How a model is diagnosed; the keys mean what the command-line options of the same name mean.

    ``limit`` and ``out`` belong to the command, so they change nothing in Python.
    """

    train: bool | None = None
    precision: Precision | None = None
    limit: Annotated[int, Field(ge=1)] | None = None
    out: Path | None = None


class DataSection(_Section):
    """The pictures, their regions and their groups, and the class map."""

    path: Path | None = None
    regions: Path | None = None
    group: str | None = None
    class_map: Path | None = None


class CheckSection(_Section):
    """How the check is run.

    Attributes:
        per_class: pictures of each class in the experiment, at most.
        most: pictures in the experiment, at most. A class still gets enough for ``least_pictures``.
        pastes: backgrounds of each kind for each picture.
        seed: seeds the sample, the partners and the bootstrap.
        batch_size: pictures in one forward pass; None means 32 on a GPU and 4 on a CPU. It does not change the result.
        layer: the layer whose heat is measured; None lets camkit choose.
        method: the method that computes the heat: a name or, if the settings are a mapping, a function
            ``(activations, gradients) -> weights`` or an entry of ``METHODS``. Reports and the hash of the settings
            identify a function by its name. "auto" chooses it with the layer, as ``camkit.explain`` does.
        precision: the floating-point precision of the model.
        ring: width of the outer ring, as a share of the picture's sides.
        ring_is_background: without regions, whether exchanging the ring can fail a model instead of only warn.
        threshold: the score above which a detector's box counts.
        shortcuts: classes, at most, whose shortcut is sought if the model does not pass. Each takes up to 1,000 passes
            of one picture; 0 saves them.
    """

    per_class: int = Field(default=100, ge=2)
    most: int = Field(default=2000, ge=4)
    pastes: int = Field(default=2, ge=1, le=1000)
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    batch_size: Annotated[int, Field(ge=1)] | None = None
    layer: str | None = None
    method: str | InstanceOf[Method] | Callable[..., Any] = "auto"
    precision: Precision = "fp32"
    ring: float = Field(default=0.15, gt=0, lt=0.5)
    ring_is_background: bool = False
    threshold: float = Field(default=0.5, ge=0, lt=1)
    shortcuts: int = Field(default=3, ge=0)

    @property
    def method_name(self) -> str:
        """The name of the method."""
        return self.method if isinstance(self.method, str) else find_method(self.method).name

    @field_serializer("method")
    def _dump_method(self, method: object) -> str:  # noqa: ARG002 - pydantic passes the value
        return self.method_name


class LimitsSection(_Section):
    """The limits of the verdict.

    The limits of gap and sufficiency were set before networks with known shortcuts were measured with them. For
    comparison, the gap of a ResNet-50 on ImageNet-9 is 0.07, and 0.002 if it was trained on mixed backgrounds (Xiao et
    al. 2020).

    Attributes:
        gap, sufficiency, attraction: the largest effect that may ship.
        skill: a skill below this is a warning. At 0 a map is no better than the map of another picture.
        alpha: the significance level: the largest probability that effects below their limits fail the model.
        least_pictures: testable pictures that a class needs for a verdict.
        most_empty: the largest share of empty maps with which heat still says something about the model.
        least_room: the headroom below which the objects lie in such similar places that no map can show which one it
            used.
        worse: how much worse than a baseline the accuracy, the gap, the skill, or the accuracy of a class on one kind
            of background may be.
        strict: whether a PASS needs the effects of each class to be excluded, and not only those of all classes
            together.
    """

    gap: float = Field(default=0.10, ge=0, le=1)
    sufficiency: float = Field(default=0.10, ge=0, le=1)
    attraction: float = Field(default=0.10, ge=0, le=1)
    skill: float = Field(default=0.0, ge=-1, le=1)
    alpha: float = Field(default=0.05, gt=0, lt=1)
    least_pictures: int = Field(default=30, ge=2)
    most_empty: float = Field(default=0.20, ge=0, le=1)
    least_room: float = Field(default=0.10, ge=0, le=1)
    worse: float = Field(default=0.02, ge=0, le=1)
    strict: bool = False


class RunSection(_Section):
    """Where a check writes, and what it starts from.

    Attributes:
        out: the folder for the reports.
        baseline: an earlier ``report.json`` to compare with.
        fail_on_worse: whether a model that is worse than the baseline fails.
        quick: use a smaller sample.
        resume: continue an interrupted check.
        inconclusive: whether INCONCLUSIVE counts as a "pass" or as a failure ("fail").
        tensorboard: the command's folder for TensorBoard event files; it changes nothing in Python.
    """

    out: Path | None = None
    baseline: Path | None = None
    fail_on_worse: bool = False
    quick: bool = False
    resume: bool = False
    inconclusive: Literal["pass", "fail"] = "fail"
    tensorboard: Path | None = None


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

    model: ModelSection = Field(default_factory=ModelSection)
    explain: ExplainSection = Field(default_factory=ExplainSection)
    diagnose: DiagnoseSection = Field(default_factory=DiagnoseSection)
    data: DataSection = Field(default_factory=DataSection)
    check: CheckSection = Field(default_factory=CheckSection)
    limits: LimitsSection = Field(default_factory=LimitsSection)
    run: RunSection = Field(default_factory=RunSection)
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
            name: getattr(self, name).model_copy(update={key: getattr(getattr(valid, name), key) for key in table})
            for name, table in given.items()
        }
        return self.model_copy(update=changed)

    def relative_to(self, folder: Path) -> Settings:
        """Return the settings with every path as seen from a folder, as a config in that folder gives it."""
        return _with_paths(self, Path(), lambda path: _seen_from(folder, path))

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


def read_config(file: Path) -> Settings:
    """Read a config; relative paths in it start at the config's folder.

    Raises:
        InputError: the file cannot be read, or has an unknown key or an invalid value.
    """
    table = read_table(file)
    if table is None:
        raise InputError(f"{file} has no [tool.camkit] table")
    settings = settings_from(table, str(file))
    return _with_paths(settings, file.parent, lambda path: file.parent / path)


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


_MODEL_FILES = ("name", "weights")
"""Settings that are names or files; they are taken as files if there is such a file."""


def _with_paths(settings: Settings, folder: Path, changed: Callable[[Path], Path]) -> Settings:
    """Return the settings with every path changed; names that may be files are looked for in a folder."""
    sections: dict[str, _Section] = {}
    for key in Settings.model_fields:
        section = getattr(settings, key)
        if isinstance(section, _Section):
            paths = {name: changed(path) for name, path in section if isinstance(path, Path)}
            sections[key] = section.model_copy(update=paths)
    names = {key: name for key in _MODEL_FILES if (name := getattr(settings.model, key)) is not None}
    files = {key: _changed_file(name, folder, changed) for key, name in names.items()}
    sections["model"] = sections["model"].model_copy(update=files)
    return settings.model_copy(update=sections)


def _changed_file(name: str, folder: Path, changed: Callable[[Path], Path]) -> str:
    """Return ``model.pth`` or ``net.py:make`` with its path changed if the folder has that file; else the name."""
    stem, separator, attribute = name.partition(".py:")
    file = Path(f"{stem}.py" if separator else stem)
    return f"{changed(file)}{separator[3:]}{attribute}" if (folder / file).is_file() else name


def _seen_from(folder: Path, path: Path) -> Path:
    try:
        return Path(os.path.relpath(path, folder))
    except ValueError:  # on another drive
        return path.resolve()


def _absolute(name: str) -> str:
    """Return the name of a model with its file's absolute path, so that ``./net.py:make`` equals ``net.py:make``."""
    file, separator, attribute = name.rpartition(":")
    absolute = os.path.abspath(file if separator else name)  # noqa: PTH100 - it may be no file at all
    return f"{absolute}{separator}{attribute}" if separator else absolute


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
    try:
        return Settings.model_validate(table)
    except ValidationError as error:
        # A misspelt key is reported as unknown and the right one as missing; only the first helps the user.
        first = min(error.errors(), key=lambda detail: detail["type"] != "extra_forbidden")
        raise InputError(": ".join(filter(None, (source, _sentence(first, named))))) from error


def _sentence(error: Any, named: Callable[[str], str]) -> str:
    """Turn one of pydantic's errors into a sentence that names the setting."""
    # Behind the path of the setting, pydantic appends the union members it tried, and indices of list entries.
    depth = 3 if error["loc"][:1] in (("classes",), ("waivers",)) else 2
    path = [str(part) for part in error["loc"][:depth]]
    path += [str(part) for part in error["loc"][depth:] if isinstance(part, int)]
    setting = named(".".join(path))
    if error["type"] == "extra_forbidden":
        return f"there is no setting {setting}{did_you_mean(path[-1], _keys(path[:-1]))}"
    if error["type"] == "missing":
        return f"{setting} is missing"
    if error["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return f"{setting} is {error['input']!r}: expected a table of settings"
    return f"{setting} is {error['input']!r}: {error['msg'][:1].lower()}{error['msg'][1:]}"


def normalize_name(name: str) -> str:
    """Return a class name in lower case, with one space for each run of spaces, underscores and hyphens."""
    return re.sub(r"[\s_-]+", " ", name).strip().casefold()


def _keys(path: list[str]) -> list[str]:
    """Return the keys that the table at a path may have."""
    section: Any = Settings
    if path:
        by_name = {"classes": ClassSection, "waivers": Waiver}
        section = by_name.get(path[0]) or Settings.model_fields[path[0]].annotation
    return [field.alias or name for name, field in section.model_fields.items()]
