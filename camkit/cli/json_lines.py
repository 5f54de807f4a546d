"""Rows as JSON lines: one object per picture and target."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from camkit.scale.folder import Written
    from camkit.scale.video import WrittenVideo
    from camkit.types import Failure


def render(row: Written | WrittenVideo | Failure, *, with_raw: bool = False) -> str:
    """Return one row as one line of strict JSON, in ASCII so that any terminal and pipe can carry it.

    ``with_raw`` includes the raw map, most of whose numbers nobody reads on a terminal.
    """
    values = {name: value for name, value in row.to_dict().items() if with_raw or name != "raw"}
    return json.dumps(values, allow_nan=False)
