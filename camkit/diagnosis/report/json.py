"""A diagnosis as JSON."""

from __future__ import annotations

import json

from camkit.diagnosis import Diagnosis

VERSION = 1
"""The version of the JSON format, raised when a field is removed or changes its meaning."""


def render(result: Diagnosis) -> str:
    """Return a diagnosis as strict JSON in ASCII, which every terminal and pipe can handle."""
    return json.dumps({"version": VERSION, **result.to_dict()}, allow_nan=False)


def content(result: Diagnosis) -> bytes:
    """Return the content of the JSON file."""
    return f"{render(result)}\n".encode()
