"""The reports of a check, one module for each format."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from camkit.background.baseline import BASELINE_FILE
from camkit.background.report import html, json, junit, markdown, words
from camkit.background.result import CheckResult

REPORTS: Mapping[str, Callable[[CheckResult], str]] = MappingProxyType(
    {
        words.PAGE: html.render,
        BASELINE_FILE: json.render,
        "junit.xml": junit.render,
        "summary.md": markdown.render,
    }
)
"""The function that renders each report, by file name."""
