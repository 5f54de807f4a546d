"""A diagnosis as JSON."""

from __future__ import annotations

import json

from camkit.diagnosis import Diagnosis


def render(result: Diagnosis) -> str:
    """Return a diagnosis as strict JSON, in ASCII, which every terminal and pipe can carry."""
    return json.dumps({"version": VERSION, **result.to_dict()}, allow_nan=False)


VERSION = 1
"""Of the JSON's form: raised when a field is taken away or changes its meaning."""
