"""The finished rows of a check, which are kept on disk so that an interrupted check can be resumed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

from pydantic import TypeAdapter

from camkit.background.data import Item
from camkit.errors import advice
from camkit.kit.fingerprint import Fingerprint
from camkit.kit.store import Row, Store, rows_of


@dataclass(frozen=True, eq=False)
class PictureRow:
    """What one part of a check found out about a picture, by the picture's name."""

    name: str


R = TypeVar("R", bound=PictureRow)

RowsOf: TypeAlias = Callable[[Sequence[Item]], Iterator[R]]
"""Computes the rows of some pictures, and yields each when it is finished."""


@dataclass(frozen=True)
class RowKind(Generic[R]):
    """A kind of rows: its name, and how its records become JSON and back."""

    name: str
    records: TypeAdapter[R]


def how_to_start_again() -> str:
    """Return what a user can do who does not want to resume a check, or cannot."""
    return advice(
        "start again without resume=True, or choose another out folder",
        "start again without --resume, or choose another --out",
    )


class Journal:
    """The rows of a check, by kind and name.

    Args:
        path: the file; None keeps the rows in memory only.
        made_with: what decides the rows: the data, the weights and the settings.
        resume: keep the rows that are in the file.

    Raises:
        InputError, OutputError: as ``Store``.
    """

    def __init__(self, path: Path | None, made_with: Fingerprint, *, resume: bool) -> None:
        self._store = Store(path, made_with, resume=resume, instead=how_to_start_again())
        self._finished: dict[tuple[str, str], Row] = {(row["kind"], row["name"]): row for row in self._store.rows()}

    @property
    def damaged(self) -> int:
        """The number of damaged lines in the file; their rows are missing."""
        return self._store.damaged

    def append(self, kind: RowKind[R], row: R) -> None:
        """Write a row to disk.

        Raises:
            OutputError: the file cannot be written, for example because the disk is full; earlier rows are kept.
        """
        self._store.append([{"kind": kind.name, **kind.records.dump_python(row, mode="json")}])

    def complete(
        self, kind: RowKind[R], items: Sequence[Item], rows_of: RowsOf[R], progress: Callable[[int, int], None]
    ) -> dict[str, R]:
        """Compute the rows that are missing, keep each when it is finished, and return all.

        Raises:
            OutputError: as ``append``.
        """
        found = {item.name: self._finished.get((kind.name, item.name)) for item in items}
        rows = {name: kind.records.validate_python(row) for name, row in found.items() if row is not None}
        todo = [item for item in items if item.name not in rows]
        progress(len(rows), len(items))
        if todo:
            for row in rows_of(todo):
                self.append(kind, row)
                rows[row.name] = row
                progress(len(rows), len(items))
        return {item.name: rows[item.name] for item in items if item.name in rows}

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
