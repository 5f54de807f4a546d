"""The results of a check in a model card of Hugging Face: in its metadata, and as a section of its text."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from camkit.background import report
from camkit.background.effects import OVERALL, Effect
from camkit.errors import InputError, as_error, as_markdown, brief
from camkit.images.files import write_file
from camkit.kit.wording import number

if TYPE_CHECKING:
    from camkit.background.result import CheckResult

_TASK = "background check by camkit"
"""The name of the task in the metadata, by which camkit finds the results of an earlier check."""

_BEGIN, _END = "<!-- camkit check -->", "<!-- end of camkit check -->"

_METADATA = re.compile(r"\ufeff?\s*---\r?\n(.*?)^---[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE)

_INDEX = re.compile(r"^([\"']?)model-index\1[ \t]*:.*\n(?:(?:\s|#.*\n)*^[ \t-].*\n)*", re.MULTILINE)
"""The lines of the results: blank lines and comments after them belong to the next key."""


def write_card(result: CheckResult, path: Path) -> Path:
    """Write the results into a model card, where they replace those of an earlier check; all else stays as it is.

    Raises:
        InputError: the card cannot be read.
        OutputError: the file cannot be written.
    """
    name, data = result.plan.model.name, result.plan.data.root.resolve().name  # . has no name
    effects = {
        _title(effect): effect
        for own in result.judged.values()
        for effect in own.effects.values()
        if effect.mean and (effect.label == OVERALL or effect.level in ("fail", "warn"))
    }
    found = {
        "task": {"type": "object-detection" if result.plan.detects else "image-classification", "name": _TASK},
        "dataset": {"type": data, "name": data},
        "metrics": [
            {"type": "verdict", "name": "verdict", "value": result.verdict},
            {"type": "accuracy", "name": "accuracy", "value": round(result.overall.accuracy.value, 6)},
            *({"type": each.name, "name": title, **_figures(each)} for title, each in effects.items()),
        ],
    }
    section = report.filled("card.md", result=result, effects=effects, words=report, number=number)
    card = read_card(path) or f"# {as_markdown(name)}\n"
    write_file(path, updated(card, name, found, f"{_BEGIN}\n{section.strip()}\n{_END}").encode())
    return path


def _title(effect: Effect) -> str:
    background = {"gap": "background gap", "sufficiency": "sufficiency of the background", "attraction": "attraction"}
    return background.get(effect.name, f"{effect.name} gap") + (f", {effect.label}" if effect.label else "")


def _figures(effect: Effect) -> dict[str, Any]:
    ends = {"low": effect.low, "high": effect.high, "limit": effect.limit}
    finite = {name: round(end, 6) for name, end in ends.items() if math.isfinite(end)}
    return {"value": round(effect.value, 6), "args": finite}


def read_card(path: Path) -> str:
    """Return the text of a card, with its ends of lines; "" if there is no such file.

    Raises:
        InputError: it cannot be read, or its metadata is not a table of YAML.
    """
    if not path.absolute().parent.is_dir():
        raise InputError(f"the folder of the model card {path} does not exist")
    with as_error(InputError, lambda error: f"the model card {path}, or its metadata, cannot be read: {brief(error)}"):
        card = path.read_bytes().decode() if path.exists() else ""
        updated(card, "", {}, "")
    return card


def updated(card: str, model: str, found: dict[str, Any], section: str) -> str:
    """Return a card with the result of a check in its metadata, and with a section about it.

    Only the lines of ``model-index`` change in the metadata, and the results of others keep their values.
    """
    metadata = _METADATA.match(card)
    start, end = metadata.span(1) if metadata else (0, 0)
    models = (yaml.safe_load(card[start:end]) or {}).get("model-index") or [{"name": model, "results": []}]
    for each in models:
        each["results"] = [one for one in each["results"] if one["task"].get("name") != _TASK]
    models[0]["results"].append(found)
    text = yaml.safe_dump({"model-index": models}, sort_keys=False, allow_unicode=True, width=math.inf)
    old, newline = _INDEX.search(card, start, end), "\r\n" if "\r\n" in card else "\n"
    start, end = old.span() if old else (end, end)
    text, section = (part.replace("\n", newline) for part in (text if metadata else f"---\n{text}---\n\n", section))
    card = card[:start] + text + card[end:]
    own = re.search(f"{_BEGIN}.*?{_END}", card, re.DOTALL)
    if own:
        return card[: own.start()] + section + card[own.end() :]
    return card + newline * (2 - card.endswith(newline) - card.endswith(newline * 2)) + section + newline
