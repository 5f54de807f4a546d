"""The finished rows of a check, which are kept on disk so that an interrupted check can be resumed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from jaxtyping import Float

from camkit.errors import advice
from camkit.kit import store
from camkit.kit.fingerprint import Fingerprint
from camkit.kit.store import Store, rows_of

Row = store.Row
packed = store.packed

HEAT, EDITS = "heat", "edits"
"""The kinds of rows: the result of the heat pass for a picture, and the model's answers to a picture's edits."""


class Journal:
    """The rows of a check, by kind and name: each has a "kind" and a "name". ``append`` writes them to disk.

    Args:
        path: the file; None keeps the rows in memory only.
        made_with: what decides the rows: the data, the weights, the settings and the code.
        resume: keep the rows that are in the file.

    Raises:
        InputError, OutputError: as ``Store``.
    """

    def __init__(self, path: Path | None, made_with: Fingerprint, *, resume: bool) -> None:
        instead = advice(
            "start again without resume=True, or choose another out folder",
            "start again without --resume, or choose another --out",
        )
        self._store = Store(path, made_with, resume=resume, instead=instead)
        self._rows: dict[str, dict[str, Row]] = {}
        self._keep(self._store.rows())

    @property
    def damaged(self) -> int:
        """The number of damaged lines in the file; their rows are missing."""
        return self._store.damaged

    def _keep(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self._rows.setdefault(row["kind"], {})[row["name"]] = row

    def rows(self, kind: str) -> Mapping[str, Row]:
        """Return the finished rows of one kind, by name."""
        return self._rows.get(kind, {})

    def append(self, rows: Iterable[Row]) -> None:
        """Add rows.

        Raises:
            OutputError: the file cannot be written, for example because the disk is full; earlier rows are kept.
        """
        rows = list(rows)
        self._store.append(rows)
        self._keep(rows)

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


def unpacked(text: str) -> Float[np.ndarray, " n"]:
    """Return the values of a packed array, flattened."""
    return store.unpacked(text).astype(float)
