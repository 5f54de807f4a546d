"""Results as tables: rows of plain values, which pandas, ``csv`` and ``json`` take as they are."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from camkit.errors import optional, printable

if TYPE_CHECKING:
    import pandas as pd

Rows: TypeAlias = list[dict[str, Any]]
"""A row for each thing that was measured; the values are text, numbers, True, False or None."""

_MOST_ROWS = 60
"""The rows that a notebook shows: a screen or two."""


class Tabular:
    """A result that is a table. A class has ``table()``, and gets ``to_pandas()`` and a view for notebooks."""

    def table(self) -> Rows:
        """Return a list of rows, each a dictionary of plain values with the same names."""
        raise NotImplementedError

    def to_pandas(self) -> pd.DataFrame:
        """Return the table as a ``pandas.DataFrame``.

        Raises:
            InputError: pandas is not installed.
        """
        pandas = optional("pandas", "to_pandas() needs pandas: pip install pandas; table() works without it")
        return pandas.DataFrame(self.table())

    def _repr_html_(self) -> str | None:
        """Show the first rows of the table in a notebook."""
        rows = self.table()
        names = list(rows[0]) if rows else []
        head = "".join(f"<th>{_escaped(name)}</th>" for name in names)
        body = "".join(
            f"<tr>{''.join(f'<td>{_cell(row[name])}</td>' for name in names)}</tr>" for row in rows[:_MOST_ROWS]
        )
        rest = len(rows) - _MOST_ROWS
        more = f"<p>and {rest} more rows; table() has all</p>" if rest > 0 else ""
        return f"<p>{_escaped(repr(self))}</p><table><tr>{head}</tr>{body}</table>{more}"


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return one row of plain values: ``{"a": {"b": 1}}`` becomes ``{"a_b": 1}``, and a list becomes JSON text.

    NaN and infinity become None, as in JSON.

    >>> flat({"gap": {"blur": 0.5, "tile": float("nan")}, "grid": (7, 7)})
    {'gap_blur': 0.5, 'gap_tile': None, 'grid': '[7, 7]'}
    """
    return dict(_flat(values))


def _flat(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{name}_")
        else:
            yield f"{above}{name}", _plain(value)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    return json.dumps(value)


def _cell(value: Any) -> str:
    return _escaped("" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value))


def _escaped(text: str) -> str:
    return html.escape(printable(text))


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: bool = False) -> str:
    """Return a table in Markdown; with ``numbers``, all columns but the first are aligned to the right.

    >>> print(markdown_table(["map", "srg"], [["a", "0.1"]]))
    | map | srg |
    |---|---|
    | a | 0.1 |
    """
    rule = "|---|" + ("---:|" if numbers else "---|") * (len(headings) - 1)
    first, *lines = (f"| {' | '.join(cells)} |" for cells in [headings, *rows])
    return "\n".join([first, rule, *lines])
