"""The reports of a check, one module for each format."""

from collections.abc import Callable, Iterator, Mapping
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


def events(result: CheckResult) -> Iterator[tuple[str, Any]]:
    """Yield what TensorBoard shows, by tag: the summary, the figures of each class, the strips and their sentences."""
    showcase = Showcase(result)
    yield "check", markdown.render(result, showcase)
    for name, measures in [("all classes", result.overall), *result.classes.items()]:
        yield f"check/accuracy/{name}", measures.accuracy.value
        for effect in ("gap", "attraction", "sufficiency"):
            if effect in measures.effects and measures.effects[effect].mean is not None:
                yield f"check/{effect}/{name}", measures.effects[effect].value
        if measures.skill is not None:
            yield f"check/skill/{name}", measures.skill.value
    for strip in showcase.strips:
        yield f"worst/{strip.row.name}", strip
        yield f"worst/{strip.row.name}", strip.sentence
