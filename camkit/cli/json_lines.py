"""Rows as JSON lines: one object per picture and target."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from camkit.scale.folder import Written
    from camkit.scale.video import WrittenVideo
    from camkit.types import Failure


def render(row: Written | WrittenVideo | Failure) -> str:
    """Return one row as one line of strict JSON, in ASCII so that any terminal and pipe can carry it."""
    return json.dumps(row.to_dict(), allow_nan=False)
