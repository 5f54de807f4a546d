"""Write a commented ``camkit.toml`` to start from."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path
from typing import Any

from camkit.background.data import Dataset
from camkit.config.settings import Settings
from camkit.errors import printable
from camkit.options import given_in

_MOST_CLASSES = 8
"""The most classes that the comment at the top lists."""

_COMMENT_COLUMN = 30
"""The column where comments after settings start, so that most of them line up."""


def starter_config(data: Dataset, settings: Settings) -> str:
    """Return the text of a config for these pictures.

    The lines of ``settings`` that are set are active; the others are commented and show the defaults. The paths are
    relative to the folder of the config.
    """
    model_lines, data_lines = _Lines(settings.model), _Lines(settings.data)
    check, limits, run = map(_Lines, (settings.check, settings.limits, settings.run))
    facts = "\n".join(f"# {printable(fact)}" for fact in data.facts)
    names = printable(", ".join(data.classes[:_MOST_CLASSES])) + (", ..." * (len(data.classes) > _MOST_CLASSES))
    example = _toml(data.classes[0])
    return f"""# camkit check: does the model need the object, or is the background enough for it?
# Found:
{facts}
# classes: {names}

[model]
# as for camkit --model: a name in torchvision, timm:NAME, hf:NAME or, with camkit --config FILE, file.py:factory
{model_lines("name", "resnet50")}
{model_lines("weights", "model.pth")}
{model_lines("labels", "labels.txt", "the names of the outputs, one per line")}
{model_lines("size", 224)}
{model_lines("device", "cuda")}
{model_lines.rest()}
[data]
{data_lines("path", "")}
{data_lines("regions", "instances.json", "found beside the pictures if not given")}
{data_lines("class_map", "classes.json", "from each class to outputs of the model")}
{data_lines("group", "patient", "the CSV column that says which pictures belong together")}

[check]
{check("per_class", None, "pictures of each class in the experiment")}
{check("pastes", None, "backgrounds of each kind for each of them")}
{check("seed")}
{check("layer", "layer4", "camkit chooses one if not given")}
{check("ring_is_background", None, "true: without regions, the ring swap can fail a model and not only warn")}
{check.rest()}
[limits]
{limits("gap", None, "accuracy on own backgrounds minus accuracy on others")}
{limits("sufficiency", None, "accuracy without the object, above chance")}
{limits("attraction", None, "how often a background draws its class's name to other objects")}
{limits("skill", None, "heat on the objects, 0 chance to 1 perfect; below it is a warning")}
{limits("least_pictures")}
{limits("strict", None, "true: PASS only if effects on each class are excluded too")}
{limits.rest()}
{"[run]" if run.any_set else "# [run]"}
{run("out", "camkit-check", "the folder for the reports")}
{run("inconclusive", None, "pass: INCONCLUSIVE ends with exit code 0 and not 3")}
{run.rest()}
{_classes(settings) or _CLASS_EXAMPLE.format(example)}
{_waivers(settings) or _WAIVER_EXAMPLE.format(example)}"""


_CLASS_EXAMPLE = """# [classes.{}]
# expect = "any"              # this class may be recognised by anything; ["rider"]: also by riders
"""

_WAIVER_EXAMPLE = """# [[waivers]]
# class = {}
# reason = "known; retraining is planned"
# expires = 2030-01-31
"""


class _Lines:
    """The lines of one table of the config."""

    def __init__(self, section: Any) -> None:
        self._values = dict(sorted(given_in(section).items()))
        self._section = section
        self._shown: set[str] = set()

    @property
    def any_set(self) -> bool:
        """Whether the table has any active line."""
        return bool(self._values)

    def __call__(self, key: str, example: Any = None, comment: str = "") -> str:
        """Return the line of a setting: its value or, as a comment, an example; None stands for the default."""
        self._shown.add(key)
        usual = getattr(self._section, key) if example is None else example
        line = f"{key} = {_toml(self._values[key])}" if key in self._values else f"# {key} = {_toml(usual)}"
        return f"{line:<{_COMMENT_COLUMN - 1}} # {comment}" if comment else line

    def rest(self) -> str:
        """Return the lines of all other settings that are set, each followed by a line feed."""
        return "".join(f"{key} = {_toml(value)}\n" for key, value in self._values.items() if key not in self._shown)


def _classes(settings: Settings) -> str:
    return "".join(
        f"[classes.{_toml(name)}]\nexpect = {_toml(section.expect)}\n" for name, section in settings.classes.items()
    )


def _waivers(settings: Settings) -> str:
    return "".join(
        f"[[waivers]]\nclass = {_toml(waiver.name)}\nreason = {_toml(waiver.reason)}\nexpires = {waiver.expires}\n"
        for waiver in settings.waivers
    )


def _toml(value: Any) -> str:
    """Return a value as TOML writes it."""
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float, dt.date)):
        return str(value)
    return _quoted(value.as_posix() if isinstance(value, Path) else str(value))


def _quoted(value: str) -> str:
    """Return a TOML string.

    A JSON string is a TOML string too, except that TOML escapes DEL and cannot hold bytes of a file name that are not
    characters.
    """
    characters = value.encode(errors="backslashreplace").decode()
    return json.dumps(characters, ensure_ascii=False).replace("\x7f", "\\u007f")
