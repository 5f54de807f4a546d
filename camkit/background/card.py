"""The results of a check in a model card of Hugging Face: in its metadata, and as a section of its text."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from camkit.background import report
from camkit.background.effects import OVERALL, Effect
from camkit.errors import InputError, as_error, brief
from camkit.images.files import write_file
from camkit.kit.wording import number

if TYPE_CHECKING:
    from camkit.background.result import CheckResult

_TASK = "background check by camkit"
"""The name of the task in the metadata, by which the results of an earlier check are found."""

_BEGIN, _END = "<!-- camkit check -->", "<!-- end of camkit check -->"

_METADATA = re.compile(r"\ufeff?\s*---\r?\n(.*?)^---[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE)


def write_card(result: CheckResult, path: Path) -> None:
    """Write the results into a model card, in place of those of an earlier check; all else stays as it is.

    Raises:
        InputError: the card's metadata cannot be read.
        OutputError: the file cannot be written.
    """
    name, data = result.plan.model.name, result.plan.data.root.name
    effects = [*result.judged[OVERALL].effects.values()]
    found = {
        "task": {"type": "object-detection" if result.plan.detects else "image-classification", "name": _TASK},
        "dataset": {"type": data, "name": data},
        "metrics": [
            {"type": "verdict", "name": "verdict", "value": result.verdict},
            {"type": "accuracy", "name": "accuracy", "value": round(result.overall.accuracy.value, 6)},
            *(_metric(effect) for effect in effects if effect.mean),
        ],
    }
    for judged in result.judged.values():
        effects += [each for each in judged.effects.values() if each.label and each.level in ("fail", "warn")]
    section = report.filled(
        "card.md",
        result=result,
        effects=[(title(effect), effect) for effect in effects if effect.mean],
        words=report,
        number=number,
    )
    card = read_card(path) or f"# {name}\n"
    write_file(path, updated(card, name, found, f"{_BEGIN}\n{section.strip()}\n{_END}").encode())


def title(effect: Effect) -> str:
    """Return what people call an effect."""
    known = {"gap": "background gap", "sufficiency": "sufficiency of the background", "attraction": "attraction"}
    return known.get(effect.name, f"{effect.name} gap") + (f", {effect.label}" if effect.label else "")


def _metric(effect: Effect) -> dict[str, Any]:
    name, figures = title(effect), {"low": effect.low, "high": effect.high, "limit": effect.limit}
    finite = {end: round(value, 6) for end, value in figures.items() if math.isfinite(value)}
    return {"type": name.replace(" ", "_"), "name": name, "value": round(effect.value, 6), "args": finite}


def read_card(path: Path) -> str:
    """Return the text of a card, with its ends of lines; "" if there is no such file.

    Raises:
        InputError: it cannot be read, or its metadata is not a table of YAML.
    """
    with as_error(InputError, lambda error: f"the model card {path} cannot be read: {brief(error)}"):
        card = path.read_bytes().decode() if path.exists() else ""
        updated(card, "", {}, "")
    return card


def updated(card: str, model: str, found: dict[str, Any], section: str) -> str:
    """Return a card with the result of a check in its metadata, and with a section about it.

    The metadata changes in the lines of ``model-index`` only, of which results of others keep their values.
    """
    metadata = _METADATA.match(card)
    start, end = metadata.span(1) if metadata else (0, 0)
    node = yaml.compose(card[start:end], yaml.SafeLoader)
    if node is not None and not isinstance(node, yaml.MappingNode):
        raise ValueError("its metadata has no keys")
    keys = {key.value: (key.start_mark.index, value.end_mark.index) for key, value in node.value} if node else {}
    models = (yaml.safe_load(card[start:end]) or {}).get("model-index") or [{"name": model, "results": []}]
    for each in models:
        each["results"] = [one for one in each["results"] if one["task"].get("name") != _TASK]
    models[0]["results"].append(found)
    text = yaml.safe_dump({"model-index": models}, sort_keys=False, allow_unicode=True, width=math.inf)
    if "model-index" in keys:
        first, last = (start + place for place in keys["model-index"])
        # Blank lines and comments before the next key stay with that key
        last = first + len(re.sub(r"(\r?\n[ \t]*(#.*)?)+\Z", "", card[first:last]))
        text = text.rstrip("\n")
    else:
        first = last = end
        text = text if metadata else f"---\n{text}---\n\n"
    newline = "\r\n" if "\r\n" in card else "\n"
    card, body = card[:first] + text.replace("\n", newline) + card[last:], section.replace("\n", newline)
    own = re.search(f"{_BEGIN}.*?{_END}", card, re.DOTALL)
    if own:
        return card[: own.start()] + body + card[own.end() :]
    return card + newline * (2 - card.endswith(newline) - card.endswith(newline * 2)) + body + newline
