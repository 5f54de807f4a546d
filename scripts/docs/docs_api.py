"""Writes signatures and the first words of docstrings into the lists of names in docs/api/*.md.

    .venv/bin/python -m scripts.docs.docs_api

To add a function or a class, write the line "- `name()`" into a list, or "- `name`" for a class that users do not make
themselves, and run the script. In the site, docs_site.py puts the whole docstrings below each list. A test fails if a
page and the code differ.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import griffe

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "api").glob("*.md"))

_LINE = re.compile(r"(?m)^- `([\w.]+)(\(.*?\))?`.*$")


@cache
def _package() -> griffe.Object | griffe.Alias:
    return griffe.load("camkit", search_paths=[ROOT], resolve_aliases=True)


def line(name: str, *, called: bool) -> str:
    """Return the line of a name: with its positional arguments if it is called, and with a class's methods."""
    item = _package()[name]
    first = item.docstring.value.partition("\n")[0].replace("``", "`") if item.docstring else ""
    text = re.split("[:;] ", first.rstrip("."))[0]
    call = ""
    if called:
        own = [each for each in item.parameters if each.name != "self"]
        words = [each.name for each in own if each.kind is griffe.ParameterKind.positional_or_keyword]
        call = f"({', '.join([*words, '...'] if len(words) < len(own) else words)})"
    members = item.members.items() if item.is_class else ()
    methods = [f"`{key}`" for key, each in members if each.is_function and not key.startswith("_")]
    more = f". Methods: {', '.join(methods)}" if methods else ""
    return f"- `{name}{call}`: {text}{more}"


def page(path: Path) -> str:
    """Return a page with its lists as they should be."""
    return _LINE.sub(lambda match: line(match[1], called=bool(match[2])), path.read_text("utf-8"))


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(page(path), "utf-8")
