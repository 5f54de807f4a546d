"""The finished rows of a check, which are kept on disk so that an interrupted check can be resumed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from camkit.background.data import Item
from camkit.errors import advice
from camkit.kit.fingerprint import Fingerprint
from camkit.kit.store import Row, Store, rows_of

RowsOf: TypeAlias = Callable[[Sequence[Item]], Iterator[Row]]
"""Computes the rows of some pictures, and yields each when it is finished."""

HEAT, EDITS = "heat", "edits"
"""The kinds of rows: the result of the heat pass for a picture, and the model's answers to a picture's edits."""


def how_to_start_again() -> str:
    """Return what a user can do who does not want to resume a check, or cannot."""
    return advice(
        "start again without resume=True, or choose another out folder",
        "start again without --resume, or choose another --out",
    )


class Journal:
    """The rows of a check, by kind and name: each has a "kind" and a "name".

    Args:
        path: the file; None keeps the rows in memory only.
        made_with: what decides the rows: the data, the weights, the settings and the code.
        resume: keep the rows that are in the file.

    Raises:
        InputError, OutputError: as ``Store``.
    """

    def __init__(self, path: Path | None, made_with: Fingerprint, *, resume: bool) -> None:
        self._store = Store(path, made_with, resume=resume, instead=how_to_start_again())
        self._rows: dict[str, dict[str, Row]] = {}
        self._keep(self._store.rows())

    @property
    def damaged(self) -> int:
        """The number of damaged lines in the file; their rows are missing."""
        return self._store.damaged

    def _keep(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self._rows.setdefault(row["kind"], {})[row["name"]] = row

    def rows(self, kind: str, items: Sequence[Item]) -> dict[str, Row]:
        """Return the finished rows of one kind, by name, in the order of their pictures."""
        rows = self._rows.get(kind, {})
        return {item.name: rows[item.name] for item in items if item.name in rows}

    def append(self, rows: Sequence[Row]) -> None:
        """Add rows, and write them to disk.

        Raises:
            OutputError: the file cannot be written, for example because the disk is full; earlier rows are kept.
        """
        self._store.append(rows)
        self._keep(rows)

    def complete(
        self, kind: str, items: Sequence[Item], rows_of: RowsOf, progress: Callable[[int, int], None]
    ) -> Mapping[str, Row]:
        """Compute the rows that are missing, keep each when it is finished, and return all.

        Raises:
            OutputError: as ``append``.
        """
        finished = self.rows(kind, items)
        todo = [item for item in items if item.name not in finished]
        progress(len(finished), len(items))
        if todo:
            for count, row in enumerate(rows_of(todo), start=len(finished) + 1):
                self.append([row])
                progress(count, len(items))
        return self.rows(kind, items)

    def __enter__(self) -> Journal:
        """Return the journal itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file and keep its rows."""
        self._store.close()


def count_finished(path: Path) -> dict[str, int]:
    """Return how many rows of each kind an earlier run left; an empty dict if there is no such file.

    The rows may belong to another run, so the counts are only good for an estimate.
    """
    return dict(Counter(str(row.get("kind")) for row in rows_of(path))) if path.is_file() else {}
