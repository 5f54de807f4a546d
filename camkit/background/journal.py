"""Keep finished rows on disk, so that a killed run can resume.

The file has one line of JSON per row, in the order the rows were finished, each with a checksum. The first line holds
the key of the run, and every checksum includes it, so a run with another key never reuses a row. Damaged lines are left
out, and so is an incomplete last line, which a kill can leave.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from jaxtyping import Float

from camkit.errors import InputError, OutputError, advice, refuse_pipe

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

Row = dict[str, Any]

HEAT, EDITS = "heat", "edits"
"""The kinds of rows: the result of the heat pass for a picture, and the model's answers to a picture's edits."""

_FORMAT = 2
"""The version of the file's format, in its header."""


class Journal:
    """The rows of a run, by kind and name. ``append`` writes them to disk before it returns.

    Args:
        path: the file; None keeps the rows in memory only.
        key: identifies the data, the weights and the settings of the run.
        resume: keep the rows that are in the file. Without it, an existing file is renamed to end in ``.before``.

    Attributes:
        damaged: the number of damaged lines in the file; their rows are missing.

    Raises:
        InputError: ``resume`` is set, but the file belongs to a run with another key.
        OutputError: the file cannot be written, or another run is writing it.
    """

    def __init__(self, path: Path | None, key: str, *, resume: bool) -> None:
        self.damaged = 0
        self._path = path
        self._key = key
        self._rows: dict[str, dict[str, Row]] = {}
        self._file: FileIO | None = None
        self._lock: BinaryIO | None = None
        if path is None:
            return
        try:
            for row in self._open(path, resume=resume):
                self._keep(row)
        except BaseException:
            self._close()
            raise

    def _open(self, path: Path, *, resume: bool) -> list[Row]:
        """Lock and open the file; return the rows that are kept."""
        lock = path.with_name(f".{path.stem}.lock")
        for file in (path, lock):
            refuse_pipe(file, OutputError)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = _acquire_lock(lock)
            kept = self._read(path) if resume and path.exists() else []
            if not resume and path.exists():
                path.replace(path.with_suffix(".before"))
            fresh = path.with_suffix(".new")
            header = {"journal": _FORMAT, "key": self._key}
            fresh.write_text("".join(_line(row, self._key) for row in [header, *kept]))
            fresh.replace(path)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise OutputError(f"cannot write {path}: {error.strerror or error}") from error
        return kept

    def _read(self, path: Path) -> list[Row]:
        """Return the rows that this run may keep, and count the damaged lines.

        If the header is damaged too, the checksums of the rows still show that they belong to this run.
        """
        lines = _complete_lines(path)
        rows = [row for row in (_row(line, self._key) for line in lines) if row is not None]
        if not rows:
            raise InputError(
                f"{path} cannot be resumed: it belongs to a run with other weights, data or settings, or with other "
                "code of the model or its preprocessing; "
                + advice(
                    "start again without resume=True, or choose another out folder",
                    "start again without --resume, or choose another --out",
                )
            )
        self.damaged = len(lines) - len(rows)
        return [row for row in rows if "journal" not in row]

    def _keep(self, row: Row) -> None:
        self._rows.setdefault(row["kind"], {})[row["name"]] = row

    def rows(self, kind: str) -> Mapping[str, Row]:
        """Return the finished rows of one kind, by name."""
        return self._rows.get(kind, {})

    def append(self, rows: Iterable[Row]) -> None:
        """Add rows and write them to disk; each row has a "kind" and a "name".

        Raises:
            OutputError: the file cannot be written, for example because the disk is full; earlier rows are kept.
        """
        rows = list(rows)
        if self._file is not None and rows:
            lines = "".join(_line(row, self._key) for row in rows).encode()
            before = os.fstat(self._file.fileno()).st_size
            try:
                written = 0
                while written < len(lines):
                    written += self._file.write(lines[written:]) or 0
                os.fsync(self._file.fileno())
            except OSError as error:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._file.fileno(), before)  # half a line would make later lines unreadable
                raise OutputError(
                    f"cannot write {self._path}: {error.strerror or error}; finished rows are kept, "
                    f"and {advice('resume=True', '--resume')} continues from there"
                ) from error
        for row in rows:
            self._keep(row)

    def __enter__(self) -> Journal:
        """Return the journal itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file and keep its rows."""
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._lock is not None:
            with contextlib.suppress(OSError):
                Path(self._lock.name).unlink()  # before another run can lock it
            self._lock.close()


def _line(row: Row, key: str) -> str:
    """Return a row as a line with its checksum."""
    return json.dumps({"crc32": _checksum(row, key), "row": row}, allow_nan=False) + "\n"


def _row(line: bytes, key: str) -> Row | None:
    """Return the row of a line; None if the line is damaged or belongs to a run with another key."""
    try:
        content = json.loads(line)
        row = content["row"]
        is_whole = content["crc32"] == _checksum(row, key) and ("journal" in row or {"kind", "name"} <= row.keys())
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return None
    return row if is_whole else None


def _checksum(row: Row, key: str) -> str:
    """Return a checksum of a row and its run's key; a damaged row matches by chance once in four billion times."""
    return f"{zlib.crc32(json.dumps([key, row]).encode()):08x}"


def _complete_lines(path: Path) -> list[bytes]:
    return [line for line in path.read_bytes().split(b"\n")[:-1] if line]


def count_finished(path: Path) -> dict[str, int]:
    """Return how many rows of each kind an earlier run left; an empty dict if there is no such file.

    The rows may be damaged or belong to another run, so the counts are only good for an estimate.
    """
    kinds: Counter[str] = Counter()
    if not path.is_file():
        return {}
    try:
        lines = _complete_lines(path)
    except OSError:
        return {}
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError, TypeError, KeyError, AttributeError):
            kinds[str(json.loads(line)["row"].get("kind"))] += 1
    return dict(kinds)


def _acquire_lock(path: Path) -> BinaryIO:
    """Create and lock a file; the system releases the lock when this process ends, however it ends.

    Raises:
        OutputError: another run holds the lock.
    """
    while True:
        lock = path.open("wb")
        if fcntl is None:
            return lock
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.close()
            raise OutputError(
                f"another check is writing into {path.parent}; wait until it ends, or choose another "
                + advice("out folder", "--out")
            ) from error
        except OSError:  # the file system does not support locks
            return lock
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(lock.fileno()), path.stat()):
                return lock
        lock.close()  # the run that held the lock has just removed this file: create a new one


def packed(array: np.ndarray) -> str:
    """Return an array as base64 text of its float32 values, a tenth of their size as decimals."""
    return base64.b64encode(array.astype("<f4").tobytes()).decode()


def unpacked(text: str) -> Float[np.ndarray, " n"]:
    """Return the values of a packed array, flattened."""
    return np.frombuffer(base64.b64decode(text), "<f4").astype(float)
