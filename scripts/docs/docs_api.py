"""Writes the lists of names in docs/api/*.md from the signatures and docstrings.

    .venv/bin/python -m scripts.docs.docs_api

Each list stands above the directives of mkdocstrings for the same names. These are in a comment, which the hook of the
site (docs_site.py) removes. A test fails if a page and the code differ.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import griffe

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "api").glob("*.md"))

_LIST = re.compile(r"<!-- names -->\n.*?<!-- end -->\n(?=<!-- site\n(.*?)\n-->)", re.DOTALL)

_DIRECTIVE = re.compile(r"^::: camkit\.(\S+)\n?((?:    .*\n?)*)", re.MULTILINE)


@cache
def _package() -> griffe.Object | griffe.Alias:
    return griffe.load("camkit", search_paths=[ROOT], resolve_aliases=True)


def _line(name: str, *, called: bool) -> str:
    item = _package()[name]
    first = item.docstring.value.partition("\n")[0].replace("``", "`") if item.docstring else ""
    text = re.split("[:;] ", first.rstrip("."))[0]
    call = ""
    if called and (item.is_function or item.is_class):
        own = [each for each in item.parameters if each.name != "self"]
        words = [each.name for each in own if each.kind is griffe.ParameterKind.positional_or_keyword]
        call = f"({', '.join([*words, '...'] if len(words) < len(own) else words)})"
    methods = [f"`{key}`" for key, each in item.members.items() if each.is_function and not key.startswith("_")]
    more = f". Methods: {', '.join(methods)}" if item.is_class and methods else ""
    return f"- `{name}{call}`: {text}{more}\n"


def names_of(directives: str) -> str:
    """Return a line for each name in some directives; for a module, those of its ``members``, or its functions."""
    lines = []
    for name, options in _DIRECTIVE.findall(directives):
        item = _package()[name]
        called = "merge_init_into_class: false" not in options
        if not item.is_module:
            lines.append(_line(name, called=called))
            continue
        listed = re.findall(r"^        - (\w+)$", options, re.MULTILINE)
        names = listed or [str(each) for each in item.exports or () if item[str(each)].is_function]
        lines += [_line(f"{name}.{each}", called=not listed) for each in names]
    return "".join(lines)


def page(path: Path) -> str:
    """Return a page with its lists as they should be."""
    return _LIST.sub(lambda match: f"<!-- names -->\n{names_of(match[1])}<!-- end -->\n", path.read_text("utf-8"))


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(page(path), "utf-8")
