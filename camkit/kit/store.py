"""Keeps the finished rows of a run on disk while it runs, so that a run that is killed can continue.

The file has one line of JSON for each row. The first line says what decides the rows, so a run with other settings
never gets them. Lines that do not parse are left out, and so is an incomplete last line, which a kill can leave.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from importlib.metadata import version
from io import FileIO
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Generic, NamedTuple, Self, TypeAlias, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from camkit.errors import OutputError, advice, refuse, refuse_pipe
from camkit.kit.wording import listed
from camkit.models.loaded import LoadedModel
from camkit.types import Preprocess

Fingerprint = dict[str, str]


def fingerprint(model: LoadedModel, **options: Any) -> Fingerprint:
    """Return what decides the results of a run: a line of text for each of its parts.

    The device and the size of the batches do not count, since they change only the last digits.

    Args:
        model: the model, whose structure, weights and preprocessing count.
        **options: the method, the layers, the targets and whatever else decides the results.
    """
    return {
        "version of camkit": version("camkit"),
        "model": model.name,
        "network": digest(_without_addresses(str(model.module))),
        "weights": digest_of_weights(model.module),
        "preprocessing": digest_of_preprocessing(model.preprocess),
        "labels": digest(describe(model.labels)),
        **({} if model.activation is None else {"activation": model.activation}),
        **{name: describe(value) for name, value in options.items()},
    }


def differences(earlier: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return the names of the parts in which two fingerprints differ, as a phrase; "" if they are the same."""
    names = [name for name in {**now, **earlier} if earlier.get(name) != now.get(name)]
    return listed(names) if names else ""


def digest(contents: str | bytes | Iterable[str | bytes]) -> str:
    """Return the SHA-256 of a content, or of several one after another, as hexadecimal digits.

    >>> digest("cat") == digest(["c", b"at"])
    True
    """
    state = hashlib.sha256()
    for content in [contents] if isinstance(contents, (str, bytes)) else contents:
        state.update(content.encode(errors="surrogatepass") if isinstance(content, str) else content)
    return state.hexdigest()


def describe(value: Any) -> str:
    """Return text that is the same for the same value in every process, without addresses in memory.

    A function is described by its name: neither its code nor what it holds counts.

    >>> describe(["cat", 3]), describe(None), describe(object())
    ("['cat', 3]", 'None', '<object object>')
    """
    if isinstance(value, (Tensor, np.ndarray)):
        return f"{tuple(value.shape)} {digest(value.tobytes() if isinstance(value, np.ndarray) else _bytes_of(value))}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(describe, value))}]"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {describe(item)}" for key, item in value.items())
    if isinstance(value, Path) and value.is_file():
        return digest(value.read_bytes())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return f"{type(value).__name__}({describe(fields)})"
    return _without_addresses(repr(value))


def _without_addresses(text: str) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def digest_of_weights(module: nn.Module) -> str:
    """Return a checksum of a module's parameters and buffers."""

    def contents() -> Iterator[str | bytes]:
        for name, value in module.state_dict().items():
            is_tensor = isinstance(value, Tensor) and value.layout is torch.strided
            yield f"{name} {tuple(value.shape)} {value.dtype}" if is_tensor else name
            yield _bytes_of(value) if is_tensor else describe(value)

    return digest(contents())


def digest_of_preprocessing(preprocess: Preprocess | None) -> str:
    """Return a checksum of what a preprocessing makes of a picture: its settings may be anywhere in its code."""
    if preprocess is None:
        return "none"
    # Not square, and larger than most inputs
    noise = np.random.default_rng(0).integers(0, 256, (257, 331, 3), np.uint8)
    results = [_tried(preprocess, Image.fromarray(noise)) for _ in range(2)]
    return results[0] if results[0] == results[1] else describe(type(preprocess))


def _tried(preprocess: Callable[[Image.Image], Tensor], picture: Image.Image) -> str:
    try:
        return describe(preprocess(picture))
    except Exception as error:  # it may refuse such a picture, and then each picture says so
        return describe(type(error))


if TYPE_CHECKING:
    from pydantic import TypeAdapter

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

Row = dict[str, Any]

_STARTED = "store"
"""The key of the first row, which says how the rows are made; its value is the version of the format."""
_FORMAT = 7


class Store:
    """The finished rows of a run. ``append`` writes them to the file before it returns.

    Args:
        path: the file; None keeps the rows in memory only.
        made_with: what decides the rows.
        resume: keep the rows that are in the file, if there is one. Without it, an existing file is renamed to end in
            ``.before``.
        start: the rows that a new file begins with.
        folder: the folder in which relative names of a new file's rows start.
        instead: what a user can do who does not want to continue the run, as advice.

    Attributes:
        damaged: the number of lines in the file that do not parse; their rows are missing.
        folder: the folder in which relative names start.

    Raises:
        InputError: ``resume`` is set, but the file belongs to a run with other settings.
        OutputError: the file cannot be written, or another run is writing it.
    """

    def __init__(
        self,
        path: Path | None,
        made_with: Fingerprint,
        *,
        resume: bool,
        start: Iterable[Row] = (),
        folder: str = "",
        instead: str,
    ) -> None:
        self.damaged = 0
        self.folder = folder
        self._path = path
        self._in_memory: list[Row] = []
        self._file: FileIO | None = None
        self._lock: BinaryIO | None = None
        self._synced = time.monotonic()
        if path is None:
            self._in_memory.extend(start)
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            refuse_pipe(path, OutputError)
            self._lock = _locked(path, instead)
            if resume and path.exists():
                self._continue(path, made_with, instead)
            else:
                _begin(path, {_STARTED: _FORMAT, "made_with": made_with, "folder": folder}, start)
            self._file = path.open("ab", buffering=0)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError) and not isinstance(error, OutputError):
                raise OutputError(f"cannot write {path}: {error.strerror or error}") from error
            raise

    def _continue(self, path: Path, made_with: Fingerprint, instead: str) -> None:
        """Compare what decides the rows, count the damaged ones, and cut off an incomplete last line."""
        begun = started_with(path)
        different = differences(begun["made_with"], made_with) if begun else ""
        refuse(
            (
                not begun,
                f"{path} cannot be continued: its first line, which says how its rows were made, is damaged; {instead}",
            ),
            (different, f"{path} cannot be continued: it was made with different settings ({different}); {instead}"),
        )
        self.folder = begun["folder"]
        complete = 0
        for line in _complete_lines(path):
            complete += len(line)
            self.damaged += _row(line) is None
        os.truncate(path, complete)

    def rows(self) -> Iterator[Row]:
        """Yield the finished rows, in the order in which they were added."""
        yield from self._in_memory if self._path is None else rows_of(self._path)

    def append(self, rows: Iterable[Row]) -> None:
        """Add rows, and write them to the file.

        Raises:
            OutputError: the file cannot be written, for example because the disk is full; earlier rows are kept.
        """
        if self._file is None:
            self._in_memory.extend(rows)
            return
        lines = b"".join(map(_line, rows))
        before = os.fstat(self._file.fileno()).st_size
        try:
            written = 0
            while written < len(lines):
                written += self._file.write(lines[written:]) or 0
            if time.monotonic() - self._synced > 1.0:  # a kill loses nothing in between, but a power cut may
                self._sync(self._file)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file.fileno(), before)  # half a line would make later lines unreadable
            raise OutputError(
                f"cannot write {self._path}: {error.strerror or error}; finished rows are kept, "
                f"and {advice('resume=True', '--resume')} continues from there"
            ) from error

    def _sync(self, file: FileIO) -> None:
        os.fsync(file.fileno())
        self._synced = time.monotonic()

    def delete(self) -> None:
        """Remove the file: its rows are no longer needed."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        """Return the store itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file and keep its rows."""
        self.close()

    def close(self) -> None:
        """Close the file and keep its rows."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # nothing more can be done for the disk
                self._sync(self._file)
            self._file.close()
        if self._lock is not None:
            with contextlib.suppress(OSError):
                Path(self._lock.name).unlink()  # before another run can lock it
            self._lock.close()
        self._file = self._lock = None


@dataclasses.dataclass(frozen=True, eq=False)
class PictureRow:
    """What one part of a check found out about a picture, by the picture's name."""

    name: str


R = TypeVar("R", bound=PictureRow)

RowsOf: TypeAlias = Callable[[Sequence[Any]], Iterator[R]]
"""Computes the rows of some pictures, and yields each when it is finished."""


class RowKind(NamedTuple, Generic[R]):
    """A kind of rows: its name, and how its records become JSON and back."""

    name: str
    records: TypeAdapter[R]


class Journal(Store):
    """The rows of a check, by kind and name."""

    @cached_property
    def _finished(self) -> dict[tuple[str, str], Row]:
        return {(row["kind"], row["name"]): row for row in self.rows()}

    def complete(
        self, kind: RowKind[R], items: Sequence[Any], rows_of: RowsOf[R], progress: Callable[[int, int], None]
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
                self.append([{"kind": kind.name, **kind.records.dump_python(row, mode="json")}])
                rows[row.name] = row
                progress(len(rows), len(items))
        return {item.name: rows[item.name] for item in items if item.name in rows}


def _begin(path: Path, head: Row, start: Iterable[Row]) -> None:
    """Set an earlier file aside, and write a new one completely or not at all."""
    unfinished = path.with_suffix(".new")
    with unfinished.open("wb") as file:
        file.writelines(map(_line, chain([head], start)))
    if path.exists():
        path.replace(path.with_suffix(".before"))
    unfinished.replace(path)


def started_with(path: Path) -> Row:
    """Return what the file of a store says about its rows: ``made_with`` and ``folder``; empty if it is damaged."""
    begun = next((_row(line) for line in _complete_lines(path)), None)
    return begun if begun is not None and begun.get(_STARTED) == _FORMAT else {}


def rows_of(path: Path) -> Iterator[Row]:
    """Yield the rows in the file of a store, which may be written meanwhile."""
    rows = (_row(line) for line in _complete_lines(path))
    return (row for row in rows if row is not None and _STARTED not in row)


def _complete_lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):
                yield line


def _line(row: Row) -> bytes:
    return json.dumps(row).encode() + b"\n"


def _row(line: bytes) -> Row | None:
    """Return the row of a line; None if the line does not parse."""
    with contextlib.suppress(ValueError, RecursionError):
        row = json.loads(line)
        return row if isinstance(row, dict) else None
    return None


def _locked(path: Path, instead: str) -> BinaryIO:
    """Create and lock a file beside another; the system releases the lock when this process ends, however it ends.

    Raises:
        OutputError: another run holds the lock.
    """
    lock = path.with_name(f".{path.stem.lstrip('.')}.lock")
    while True:
        file = lock.open("wb")
        if fcntl is None:
            return file
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            raise OutputError(f"another run is writing {path}; wait until it ends, or {instead}") from error
        except OSError:  # the file system does not support locks
            return file
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(file.fileno()), lock.stat()):
                return file
        file.close()  # the run that held the lock has just removed this file: create a new one


def packed(array: np.ndarray, kind: str = "<f4") -> str:
    """Return the values of an array as base64 text, a tenth of their size as decimals."""
    return base64.b64encode(array.astype(kind).tobytes()).decode()


def unpacked(text: str, kind: str = "<f4") -> np.ndarray:
    """Return the values of a packed array, flattened."""
    return np.frombuffer(base64.b64decode(text), kind)
