"""Finished rows on disk: a run that was killed goes on where it stopped.

One line of JSON per row, in the order they were finished. The first line says what the rows are of; rows of anything
else are never taken up. A line that a kill cut in two is dropped.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from jaxtyping import Float

from camkit.errors import InputError, OutputError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

Row = dict[str, Any]


class Journal:
    """The rows of a run, by kind and name; ``append`` puts them on disk before it returns.

    Args:
        path: of the file; None keeps the rows in memory alone.
        key: what the rows are of; another key means other data, weights or settings.
        resume: whether to take up the rows that are there.

    Raises:
        InputError: ``resume``, and the file is of another run.
        OutputError: the file cannot be written.
    """

    def __init__(self, path: Path | None, key: str, *, resume: bool) -> None:
        self._path = path
        self._rows: dict[str, dict[str, Row]] = {}
        self._file: FileIO | None = None
        self._lock: BinaryIO | None = None
        if path is None:
            return
        try:
            for row in self._open(path, key, resume=resume):
                self._keep(row)
        except BaseException:
            self._close()
            raise

    def _open(self, path: Path, key: str, *, resume: bool) -> list[Row]:
        """Open the file, alone; return the rows that are taken up."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(path.with_name(f".{path.stem}.lock"))
            kept = self._read(path, key) if resume and path.exists() else []
            if not resume and path.exists():
                path.replace(path.with_suffix(".before"))
            fresh = path.with_suffix(".new")
            fresh.write_text("".join(f"{json.dumps(row)}\n" for row in [{"journal": 1, "key": key}, *kept]))
            fresh.replace(path)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise OutputError(f"cannot write {path}: {error.strerror or error}") from error
        return kept

    @staticmethod
    def _read(path: Path, key: str) -> list[Row]:
        rows = _parsed(path)
        if not rows or rows[0].get("key") != key:
            raise InputError(
                f"{path} is of a run with other weights, data or settings, which cannot be resumed; "
                "start anew without --resume, or name another --out"
            )
        return rows[1:]

    def _keep(self, row: Row) -> None:
        self._rows.setdefault(row["kind"], {})[row["name"]] = row

    def rows(self, kind: str) -> Mapping[str, Row]:
        """Return the finished rows of a kind, by name."""
        return self._rows.get(kind, {})

    def append(self, rows: Iterable[Row]) -> None:
        """Keep rows, each with its "kind" and "name", and put them on disk.

        Raises:
            OutputError: the disk is full or gone; what was appended before stays.
        """
        rows = list(rows)
        if self._file is not None and rows:
            lines = b"".join(json.dumps(row, allow_nan=False).encode() + b"\n" for row in rows)
            before = os.fstat(self._file.fileno()).st_size
            try:
                written = 0
                while written < len(lines):
                    written += self._file.write(lines[written:]) or 0
                os.fsync(self._file.fileno())
            except OSError as error:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._file.fileno(), before)  # a line cut in two would spoil those after it
                raise OutputError(
                    f"cannot write {self._path}: {error.strerror or error}; what was finished before is kept, "
                    "and --resume goes on from there"
                ) from error
        for row in rows:
            self._keep(row)

    def __enter__(self) -> Journal:
        """Return the journal itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file; its rows stay."""
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._lock is not None:
            with contextlib.suppress(OSError):
                Path(self._lock.name).unlink()  # while it is held
            self._lock.close()


def _parsed(path: Path) -> list[Row]:
    """Return the rows of a file, the first of which says what they are of, up to the first that is none."""
    rows: list[Row] = []
    for line in path.read_bytes().splitlines(keepends=True):
        if not line.endswith(b"\n"):
            break
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not isinstance(row, dict) or (rows and not {"kind", "name"} <= row.keys()):
            break
        rows.append(row)
    return rows


def finished(path: Path) -> dict[str, int]:
    """Return how many rows of each kind an earlier run left; none where there is no such file."""
    try:
        return dict(Counter(str(row["kind"]) for row in _parsed(path)[1:]))
    except OSError:
        return {}


def _locked(path: Path) -> BinaryIO:
    """Hold a file that says that a run writes here; the system lets go of it when the run ends, however it ends.

    Raises:
        OutputError: another run holds it.
    """
    while True:
        held = path.open("wb")
        if fcntl is None:
            return held
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            held.close()
            raise OutputError(
                f"another check is writing into {path.parent}; wait for it, or name another --out"
            ) from error
        except OSError:  # a file system without locks
            return held
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(held.fileno()), path.stat()):
                return held
        held.close()  # it was removed by the run that held it before


def packed(array: np.ndarray) -> str:
    """Return an array's numbers as text, in float32: a tenth of what they take as decimals."""
    return base64.b64encode(array.astype("<f4").tobytes()).decode()


def unpacked(text: str) -> Float[np.ndarray, " n"]:
    """Return the numbers that were packed."""
    return np.frombuffer(base64.b64decode(text), "<f4").astype(float)
