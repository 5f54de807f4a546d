"""Shows examples in docstrings as code: between paragraphs, Markdown would take ``>>>`` for a quotation."""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"(?m)^>>> (?:.+\n?)+")
"""An example that is not indented, up to the next empty line."""


class Examples(griffe.Extension):
    """Fences the examples of every docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of an object after it was read."""
        if obj.docstring:
            obj.docstring.value = _EXAMPLE.sub(
                lambda example: f"```pycon\n{example[0].rstrip()}\n```\n", obj.docstring.value
            )
