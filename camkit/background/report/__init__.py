"""The reports of a check, one module for each format."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from camkit.background.baseline import BASELINE_FILE
from camkit.background.report import html, json, junit, markdown, picture, words
from camkit.background.result import CheckResult
from camkit.background.showcase import Showcase

_DRAWN: Mapping[str, Callable[..., str | bytes]] = MappingProxyType(
    {words.PAGE: html.render, words.PICTURE: picture.render, "summary.md": markdown.render}
)
"""The reports with pictures: they also take the ``Showcase``, which asks the model once for all of them."""

REPORTS: Mapping[str, Callable[..., str | bytes]] = MappingProxyType(
    {**_DRAWN, BASELINE_FILE: json.render, "junit.xml": junit.render}
)
"""The function that renders each report, by file name."""


def rendered(result: CheckResult) -> dict[str, bytes]:
    """Return the contents of every report, by file name."""
    showcase = Showcase(result)
    contents: dict[str, Any] = {
        name: render(result, showcase) if name in _DRAWN else render(result) for name, render in REPORTS.items()
    }
    return {
        name: content.encode(errors="backslashreplace") if isinstance(content, str) else content
        for name, content in contents.items()
    }
