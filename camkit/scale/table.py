"""Tables of explanations, written in parts, so that a run that is killed loses at most one part and can be continued.

A Parquet table is a folder of files, one for each part, as pandas, Spark and Ray Data read and write it. A CSV table is
one file, to which each part is appended. This file knows how tables lie on the disk; ``schema.py`` knows their rows.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import itertools
import json
import math
import os
import re
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from camkit.errors import InputError, OutputError, advice, as_cell, brief, from_cell, refuse_pipe
from camkit.explanation import Explanations, sharing_scale
from camkit.images.files import why_unwritable, write_file
from camkit.scale.fingerprint import Fingerprint, differences
from camkit.scale.schema import COLUMNS, ERROR, Kind, Row, explanation_of, fault_of, text_of

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_ROWS = 4096
"""Rows of a part. A million pictures make 250 files, which is few enough for every reader of tables."""
_BYTES = 16 * 2**20
"""The most bytes of maps in a part; large maps make a part shorter."""
_SECONDS = 60.0
"""A part is written after this time, however few rows it has: a killed run loses no more."""


WRITTEN_WITH: Mapping[str, Any] = {"compression": "zstd", "write_page_checksum": True}
"""How parts are written; the checksums tell a damaged part."""


_TOGETHER = ("path", "layer", "method", "smooth")
"""If rows of a picture agree in these columns, they were drawn on one scale."""


def read(path: str | Path) -> Explanations:
    """Read a table that ``camkit --table`` or ``camkit scale`` wrote.

    The maps have the precision of 16 bits. Pictures are read from their files when they are first drawn; relative paths
    start at the folder in which the run was started. Rows of pictures that could not be explained are left out.

    Returns:
        The Explanations, in the order of the table.

    Raises:
        InputError: there is no such table, or it is damaged, or it needs pyarrow.
    """
    refuse_pipe(Path(path))
    form = _Parquet(Path(path)) if Path(path).is_dir() else _form_of(Path(path))
    if not form.exists():
        raise InputError(f"there is no table {path}")
    folder = Path(form.about().get("folder", ""))
    rows = Explanations()
    for part in form.parts():
        explained = _without_faults(part, form.rows(part))
        for _, group in itertools.groupby(explained, key=lambda row: [row[name] for name in _TOGETHER]):
            rows.extend(sharing_scale([explanation_of(row, folder) for row in group]))
    return rows


def _without_faults(part: Path, rows: Iterable[Row]) -> Iterator[Row]:
    """Yield the rows of explanations.

    Raises:
        InputError: a row holds something that is not an explanation's.
    """
    for row in rows:
        if row["status"] != ERROR:
            if fault := fault_of(row):
                raise InputError(f"{part} cannot be read: in the row of {brief(row['path'])}, {fault}")
            yield row


class Table:
    """A table that is being written.

    Args:
        path: a name ending in .parquet or .csv.
        fingerprint: what decides the rows; a table is continued only if its own fingerprint is the same.
        resume: continue the table if there is one.
        overwrite: replace the table if there is one.
        rows: the most rows of a part.

    Attributes:
        finished: the pictures that the table already has.
        failed: the finished pictures that have only errors.

    Raises:
        InputError: the name has another ending, pyarrow is missing, or the table belongs to another run.
        OutputError: the table exists, another run is writing it, or it cannot be written.
    """

    _option = "--table"
    """The option that names the table in the shell."""

    def __init__(
        self,
        path: Path,
        fingerprint: Fingerprint,
        *,
        resume: bool = False,
        overwrite: bool = False,
        rows: int = _ROWS,
    ) -> None:
        self.path = path
        self._form = self._form_of(path)
        self._most = rows
        self._number = -1
        self._group: list[Row] = []
        self._part: list[Row] = []
        self._written = self._held = 0
        self._started = time.monotonic()
        self._lock: BinaryIO | None = None
        self.finished = self.failed = Finished([])
        self._folder = str(Path.cwd())
        about = {"format": 1, "folder": self._folder, "fingerprint": fingerprint}
        try:
            self._form.prepare()
            if not (resume or overwrite):
                self._refuse_existing()
            self._lock = _locked(self._form.lock, path)
            if self._form.exists() and resume:
                self._continue(fingerprint)
            else:
                self._form.start(about)
        except OSError as error:
            self._unlock()
            raise OutputError(f"cannot write {path}: {why_unwritable(path, error)}") from error
        except BaseException:
            self._unlock()
            raise

    @staticmethod
    def _form_of(path: Path) -> _Form:
        return _form_of(path)

    def _refuse_existing(self) -> None:
        if self._form.exists():
            raise OutputError(
                f"{self.path} exists already; pass {advice('resume=True', '--resume')} to continue it, or "
                f"{advice('overwrite=True', '--overwrite')} to replace it"
            )

    def _continue(self, fingerprint: Fingerprint) -> None:
        about = self._form.about()
        if not about:
            raise InputError(
                f"{self.path} cannot be continued: the file that says how it was made, {self._form.beside}, is missing "
                "or damaged; choose another name"
            )
        different = differences(about.get("fingerprint", {}), fingerprint)
        if different:
            raise InputError(
                f"{self.path} cannot be continued: it was made with different settings ({different}); choose another "
                + advice(
                    "table, or replace this one with overwrite=True and without resume=True",
                    f"{self._option}, or replace this one with --overwrite and without --resume",
                )
            )
        self._folder = about["folder"]
        self._form.repair()
        failed: list[str] = []
        self.finished = Finished(self._pictures(failed))
        self.failed = Finished(failed)

    def _pictures(self, failed: list[str]) -> Iterator[str]:
        """Yield what tells the picture of each row from others, and add the pictures that have only errors to a list.

        The rows of a picture follow each other.
        """
        for part in self._form.parts():
            for name, rows in itertools.groupby(self._statuses(part), key=lambda row: row[0]):
                statuses = [status for _, status in rows]
                if all(status == ERROR for status in statuses):
                    failed.append(name)
                yield from itertools.repeat(name, len(statuses))

    def _statuses(self, part: Path) -> Iterator[tuple[str, str]]:
        """Yield for each row of a part what tells its picture from others, its absolute path, and its status."""
        folder = text_of(self._folder)
        for name, status in self._form.values(part, "path", "status"):
            yield os.path.normpath(os.path.join(folder, name)), status  # noqa: PTH118 - for millions of names

    def has(self, picture: Path) -> bool:
        """Tell whether the table has the rows of a picture."""
        return _has(self.finished, picture)

    def has_failed(self, picture: Path) -> bool:
        """Tell whether the table has only errors of a picture."""
        return _has(self.failed, picture)

    def add(self, row: Row, group: int) -> None:
        """Add a row.

        Args:
            row: the row.
            group: the number of the pass that it comes from. The rows of a pass are written together. So no picture is
                divided, and a resumed run begins with a whole pass, whose digits are those of an uninterrupted run.

        Raises:
            OutputError: the part that is full now cannot be written; earlier parts are kept.
        """
        if group != self._number:
            self._end_group()
            self._number = group
        self._group.append(row)

    def _end_group(self) -> None:
        """Add the rows of a finished pass to the part, and write the part if it is full."""
        if Path.cwd() != Path(self._folder):
            for row, name in itertools.product(self._group, ("path", "drawing")):
                row[name] = None if row[name] is None else text_of(os.path.abspath(row[name]))  # noqa: PTH100
        self._part += self._group
        self._held += sum(row["raw"].nbytes for row in self._group if row["raw"] is not None)
        self._group = []
        is_late = time.monotonic() - self._started > _SECONDS
        if len(self._part) >= self._most or self._held > _BYTES or is_late:
            self._flush()

    def _flush(self) -> None:
        if self._part:
            try:
                self._form.append(self._part)
            except (OSError, OutputError) as error:
                cause = error.__cause__ if isinstance(error, OutputError) else error
                rows = len(self.finished) + self._written
                raise OutputError(
                    f"cannot write {self.path}: {getattr(cause, 'strerror', None) or error}; its {rows:,} finished "
                    f"rows are kept, and {advice('resume=True', '--resume')} continues from there"
                ) from error
        self._written += len(self._part)
        self._part, self._held, self._started = [], 0, time.monotonic()

    def __enter__(self) -> Table:
        """Return the table itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write what is finished, and close the table; a pass that lacks some of its rows is left out.

        Raises:
            OutputError: it cannot be written. If another error ends the run, that one is raised.
        """
        try:
            if kind is None:
                self._end_group()
            if not isinstance(error, OutputError):
                self._flush()
        except OutputError:
            if kind is None:
                raise
        finally:
            self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _has(names: Finished, picture: Path) -> bool:
    return len(names) > 0 and text_of(os.path.abspath(picture)) in names  # noqa: PTH100 - for millions of names


CONTENT = "content"
"""A column of tables that a cluster writes: a checksum of the picture's bytes."""


class ClusterTable(Table):
    """A folder of Parquet parts that Ray writes, with the column ``content``.

    ``finished`` has the keys of its pictures.

    Raises:
        InputError, OutputError: as ``Table``.
    """

    _option = "--out"
    _form: _Parquet

    @staticmethod
    def _form_of(path: Path) -> _Parquet:
        return _Parquet(path)

    def _statuses(self, part: Path) -> Iterator[tuple[str, str]]:
        for name, content, status in self._form.values(part, "path", CONTENT, "status"):
            yield key_of(name, content), status

    def parts(self) -> Sequence[Path]:
        """Return the parts that are there now, including unfinished ones."""
        return self._form.parts()

    def values(self, part: Path, *columns: str) -> Iterable[tuple[Any, ...]]:
        """Return the values of some columns of a part, row by row.

        Raises:
            InputError: the part is damaged or not finished.
        """
        return self._form.values(part, *columns)

    def schema(self) -> Any:
        """Return the schema of a part, with what the table was started with."""
        return self._form.described(cluster_schema())


def key_of(path: str, content: str | None) -> str:
    """Return what tells a picture from others: its path and the checksum of its bytes, if there is one."""
    return f"{path}\0{content or ''}"


class Finished:
    """The names of finished pictures as 128-bit checksums: 16 bytes for each, however long the names are."""

    def __init__(self, names: Iterable[str]) -> None:
        checksums = np.frombuffer(b"".join(map(_checksum, names)), np.uint64).reshape(-1, 2)
        self._checksums = checksums[np.argsort(checksums[:, 0], kind="stable")]

    def __len__(self) -> int:
        return len(self._checksums)

    def __contains__(self, name: str) -> bool:
        """Tell whether a name is among them."""
        first, second = np.frombuffer(_checksum(name), np.uint64)
        place = int(np.searchsorted(self._checksums[:, 0], first))
        while place < len(self._checksums) and self._checksums[place, 0] == first:
            if self._checksums[place, 1] == second:
                return True
            place += 1
        return False


def _checksum(name: str) -> bytes:
    return hashlib.blake2b(name.encode(errors="surrogateescape"), digest_size=16).digest()


class _Form(ABC):
    """How a table lies on the disk."""

    lock: Path
    beside: Path
    """The file that says how the table was made."""

    @abstractmethod
    def exists(self) -> bool:
        """Tell whether there is a table."""

    @abstractmethod
    def prepare(self) -> None:
        """Create the folders that it needs."""

    @abstractmethod
    def start(self, about: Mapping[str, Any]) -> None:
        """Start an empty table, in the place of another if there is one."""

    @abstractmethod
    def about(self) -> dict[str, Any]:
        """Return what was given to ``start``."""

    @abstractmethod
    def repair(self) -> None:
        """Set aside what an interrupted run or a damaged disk left."""

    @abstractmethod
    def parts(self) -> Sequence[Path]:
        """Return the parts."""

    @abstractmethod
    def values(self, part: Path, *columns: str) -> Iterable[tuple[Any, ...]]:
        """Return the values of some columns of a part, row by row.

        Raises:
            InputError: the part is damaged or not finished.
        """

    @abstractmethod
    def rows(self, part: Path) -> Iterator[Row]:
        """Return the rows of a part."""

    @abstractmethod
    def append(self, rows: Sequence[Row]) -> None:
        """Add a part, completely or not at all."""


_DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
"""The errors of reading what a table was started with, if it is damaged."""


def _about_of(data: bytes) -> dict[str, Any]:
    about = json.loads(data)
    text_of(os.fspath(about["folder"]))
    "".join(about["fingerprint"].values())
    return dict(about)


def _form_of(path: Path) -> _Form:
    if path.suffix.lower() == ".csv":
        return _Csv(path)
    if path.suffix.lower() == ".parquet":
        return _Parquet(path)
    raise InputError(f"{str(path)!r} is not the name of a table; choose a name ending in .parquet or .csv")


def arrow_schema(*texts: str) -> Any:
    """Return the columns of a table as pyarrow's schema, followed by columns of text with the given names."""
    import pyarrow as pa  # noqa: PLC0415 - an extra, which only tables need

    kinds: dict[Kind, Any] = {
        "text": pa.string(),
        "whole": pa.int64(),
        "real": pa.float64(),
        "reals": pa.list_(pa.float64()),
        "wholes": pa.list_(pa.int32()),
        "halves": pa.list_(pa.float16()),
    }
    return pa.schema(
        [*((name, kinds[kind]) for name, kind in COLUMNS.items()), *((name, pa.string()) for name in texts)]
    )


def cluster_schema() -> Any:
    """Return the columns of a table that a cluster writes."""
    return arrow_schema(CONTENT)


def arrow_table(rows: Sequence[Row], schema: Any) -> Any:
    """Return rows as pyarrow's table."""
    import pyarrow as pa  # noqa: PLC0415 - an extra, which only tables need

    columns = [pa.array([row[field.name] for row in rows], field.type) for field in schema]
    return pa.Table.from_arrays(columns, schema=schema)


_IN_EVERY_ROW = ("path", "status")


def _values_of(name: str, column: Any) -> Iterable[Any]:
    """Return the values of a column of Parquet: texts, numbers, or arrays of numbers.

    Raises:
        ValueError: it holds something else.
    """
    import pyarrow as pa  # noqa: PLC0415 - an extra, which only tables need

    expected, texts = cluster_schema().field(name).type, []
    if expected == "string":
        for chunk in column.dictionary_encode().chunks:
            words = chunk.dictionary.cast(expected).to_pylist()
            texts += [None if index is None else words[index] for index in chunk.indices.to_pylist()]
        if name in _IN_EVERY_ROW and not all(texts):
            raise ValueError(f"the column {name!r} has empty cells")
        return texts
    try:
        column = column.cast(expected)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise ValueError(f"the column {name!r} holds {column.type}, not {expected}") from error
    if pa.types.is_list(expected):
        return (None if cell.values is None else cell.values.to_numpy(zero_copy_only=False) for cell in column)
    return (cell.as_py() for cell in column)


_UNPACKED = 256
"""The most bytes that a byte of a part unpacks to; so small a file as 1 MiB counts as that. Maps without evidence, of
zeros alone, are all that is packed as well."""

_ROW = 4096
"""The bytes of an Explanation, besides its map."""


def _check_part(file: Any, size: int, columns: Sequence[str]) -> None:
    """Refuse a part that lacks columns, has texts in others than those of texts, or unpacks to far more than its size.

    Raises:
        ValueError: it is such a part.
    """
    schema, expected, footer = file.schema_arrow, cluster_schema(), file.metadata
    for name in columns:
        if schema.names.count(name) != 1:
            raise ValueError(f"it has {schema.names.count(name)} columns {name!r}, not 1")
    leaves = [leaf for leaf in range(footer.num_columns) if footer.schema.column(leaf).path.split(".")[0] in columns]
    for leaf in map(footer.schema.column, leaves):
        name, *within = leaf.path.split(".")
        held, wanted, has_text = schema.field(name).type, expected.field(name).type, leaf.physical_type == "BYTE_ARRAY"
        if held != "null" and (has_text != (wanted == "string") or (has_text and within)):
            raise ValueError(f"the column {name!r} holds {held}, not {wanted}")
    groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
    _check_unpacked(sum(group.total_byte_size for group in groups), size)
    file.scan_contents(list(columns))  # raises an error for damaged chunks, where column() ends the process
    unpacked = 0
    for group in groups:
        chunks = map(group.column, leaves)
        unpacked += sum(max(chunk.total_uncompressed_size, 4 * chunk.num_values) for chunk in chunks)
        unpacked += _ROW * group.num_rows
    _check_unpacked(unpacked, size)


def _check_unpacked(unpacked: int, size: int) -> None:
    if unpacked > _UNPACKED * max(size, 2**20):
        raise ValueError(f"its {size:,} bytes would unpack to {unpacked:,}, more than a table of camkit does")


class _Parquet(_Form):
    """A folder of Parquet files; each has the fingerprint in its metadata."""

    _METADATA = b"camkit"
    _ABOUT = "_camkit.json"
    """Readers of Parquet ignore files that begin with an underscore or a dot."""

    def __init__(self, path: Path) -> None:
        try:
            import pyarrow.parquet as pq  # noqa: PLC0415 - an extra, which only tables need
        except ImportError as error:
            raise InputError(
                "a Parquet table needs pyarrow: pip install 'camkit[table]', or name a table that ends in .csv"
            ) from error
        self._pq = pq
        self._path = path
        self.lock, self.beside = path / ".lock", path / self._ABOUT
        self._about: Mapping[str, Any] = {}
        self._next = 0

    def exists(self) -> bool:
        if self._path.is_dir():
            return (self._path / self._ABOUT).is_file() or bool(self.parts())
        return os.path.lexists(self._path)

    def prepare(self) -> None:
        if self._path.is_file():
            raise OutputError(
                f"{self._path} is a file, and camkit writes a table as a folder of parts; choose another name"
            )
        self._path.mkdir(parents=True, exist_ok=True)

    def start(self, about: Mapping[str, Any]) -> None:
        for part in self.parts():
            part.unlink()
        write_file(self._path / self._ABOUT, json.dumps(about).encode())
        self._about, self._next = about, 0

    def about(self) -> dict[str, Any]:
        """Return what the table was started with, from its own file or from the metadata of a part."""
        with contextlib.suppress(*_DAMAGED):
            return _about_of((self._path / self._ABOUT).read_bytes())
        for part in self.parts():
            with contextlib.suppress(*_DAMAGED):
                return _about_of(self._pq.read_metadata(part).metadata[self._METADATA])
        return {}

    def repair(self) -> None:
        for unfinished in self._path.glob(".camkit-*"):
            unfinished.unlink()
        for part in self.parts():
            try:
                self._read(part, tuple(COLUMNS))
            except InputError:
                aside = part.with_name(f"_damaged-{part.name}")
                part.replace(aside)
                warnings.warn(
                    f"{part} is damaged, so its pictures are explained again; it is kept as {aside.name}", stacklevel=2
                )
        self._about = self.about()
        numbers = [re.findall(r"part-(\d+)$", file.stem) for file in self._path.glob("*part-*.parquet")]
        self._next = max((int(number) for found in numbers for number in found), default=-1) + 1

    def parts(self) -> Sequence[Path]:
        if self._path.is_file():
            return [self._path]
        return sorted(self._path.glob("part-*.parquet"))

    def values(self, part: Path, *columns: str) -> Iterable[tuple[Any, ...]]:
        return zip(*self._read(part, columns), strict=True)

    def rows(self, part: Path) -> Iterator[Row]:
        for values in self.values(part, *COLUMNS):
            yield dict(zip(COLUMNS, values, strict=True))

    def _read(self, part: Path, columns: Sequence[str]) -> list[Iterable[Any]]:
        """Return the values of some columns. A text of several rows is in memory once."""
        texts = [name for name in columns if cluster_schema().field(name).type == "string"]
        try:
            with self._pq.ParquetFile(part) as file:
                _check_part(file, part.stat().st_size, columns)
            with self._pq.ParquetFile(part, read_dictionary=texts, page_checksum_verification=True) as file:
                table = file.read(list(columns))
            return [_values_of(name, table.column(name)) for name in columns]
        except Exception as error:  # pyarrow has errors of several kinds for damaged files
            raise InputError(f"{part} cannot be read: {brief(error)}") from error

    def described(self, schema: Any) -> Any:
        """Return a schema with what the table was started with."""
        return schema.with_metadata({self._METADATA: json.dumps(self._about)})

    def append(self, rows: Sequence[Row]) -> None:
        data = io.BytesIO()
        self._pq.write_table(arrow_table(rows, self.described(arrow_schema())), data, **WRITTEN_WITH)
        write_file(self._path / f"part-{self._next:06d}.parquet", data.getvalue())
        self._next += 1


def _next_row(reader: csv.DictReader[str]) -> dict[str, str] | None:
    """Return the next row. Its cells may be long; the limit belongs to the process, so it is set for this row only."""
    before = csv.field_size_limit(_LONGEST_CELL)
    try:
        return next(reader, None)
    finally:
        csv.field_size_limit(before)


class _Csv(_Form):
    """A CSV file, with a hidden file beside it that says how much of it is complete."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.beside = path.with_name(f".{path.name}.json")
        self.lock = path.with_name(f".{path.name}.lock")
        self._about: dict[str, Any] = {}

    def exists(self) -> bool:
        return os.path.lexists(self._path)

    def prepare(self) -> None:
        if self._path.is_dir():
            raise OutputError(f"{self._path} is a folder; choose another name for the table")
        self._path.parent.mkdir(parents=True, exist_ok=True)

    def start(self, about: Mapping[str, Any]) -> None:
        head = _csv_line(COLUMNS)
        write_file(self._path, head)
        self._remember({**about, "bytes": len(head)})

    def _remember(self, about: Mapping[str, Any]) -> None:
        write_file(self.beside, json.dumps(about).encode())
        self._about = dict(about)

    def about(self) -> dict[str, Any]:
        with contextlib.suppress(*_DAMAGED):
            about = _about_of(self.beside.read_bytes())
            return about if int(about["bytes"]) > 0 else {}
        return {}

    def repair(self) -> None:
        """Cut off what an interrupted run wrote after the last complete part."""
        self._about = self.about()
        complete, size = self._about["bytes"], self._path.stat().st_size
        if size < complete:
            raise InputError(
                f"{self._path} is damaged: it has {size:,} bytes, and {complete:,} were written; start again with "
                f"another {advice('table', '--table')}"
            )
        for _ in self._cells(self._path):  # refuses a file that another program changed, before anything is cut off
            pass
        os.truncate(self._path, complete)

    def parts(self) -> Sequence[Path]:
        return [self._path]

    def values(self, part: Path, *columns: str) -> Iterator[tuple[Any, ...]]:
        for row in self._cells(part):
            yield tuple(row[name] for name in columns)

    def rows(self, part: Path) -> Iterator[Row]:
        for row in self._cells(part):
            try:
                yield {name: _parsed(kind, row[name]) for name, kind in COLUMNS.items()}
            except ValueError as error:
                raise InputError(f"{part} cannot be read: {brief(error)}") from error

    def _cells(self, part: Path) -> Iterator[dict[str, str]]:
        """Yield the rows of the complete parts: a run that is writing, or that was killed, may have left half a row."""
        try:
            with part.open("rb") as file:
                reader = csv.DictReader(_lines_of(file, self.about().get("bytes", math.inf)), strict=True)
                while (row := _next_row(reader)) is not None:
                    is_other = row.keys() != COLUMNS.keys() or len(reader.fieldnames or ()) != len(COLUMNS)
                    if is_other or None in row.values() or not row["path"]:
                        raise InputError(
                            f"{part} cannot be read: it has other columns than a table of camkit, or no path"
                        )
                    yield {name: from_cell(text) for name, text in row.items()}
        except (csv.Error, OSError, UnicodeError) as error:
            raise InputError(f"{part} cannot be read: {brief(error)}") from error

    def append(self, rows: Sequence[Row]) -> None:
        """Append a part, and say that it is complete; if the disk is full, cut off what was written of it."""
        lines = b"".join(_csv_line(_cell(row[name]) for name in COLUMNS) for row in rows)
        complete = self._about["bytes"]
        try:
            with self._path.open("ab") as file:
                file.write(lines)
            self._remember({**self._about, "bytes": complete + len(lines)})
        except (OSError, OutputError):
            with contextlib.suppress(OSError):
                os.truncate(self._path, complete)
            raise


_LONGEST_CELL = 2**31 - 1
"""Python's own limit of 131,072 characters is shorter than a map with a value for each pixel."""


def _lines_of(file: BinaryIO, most: float | int) -> Iterator[str]:
    """Yield the lines of the first ``most`` bytes of a file.

    Raises:
        csv.Error: these bytes end within a line, or the file ends before them, so another program changed the file.
    """
    for line in file:
        if most <= 0:
            return
        most -= len(line)
        if most < 0:
            raise csv.Error("another program changed its lines")
        yield line.decode()
    if 0 < most < math.inf:
        raise csv.Error("its end is missing")


def _csv_line(cells: Iterable[Any]) -> bytes:
    """Return cells as a line of a CSV file.

    A writer quotes only those control characters that may end its lines. This one ends them in a carriage return and a
    line feed, so that both are quoted in names; the line itself then ends in a line feed alone.
    """
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\r\n").writerow(cells)
    return text.getvalue().removesuffix("\r\n").encode() + b"\n"


_DIGITS = 5
"""Significant digits of a number of a map: with four digits, some different 16-bit numbers would look the same."""


def _cell(value: Any) -> Any:
    """Return a value as a CSV holds it; numbers of a list are separated by spaces. ``from_cell`` reads text again."""
    if isinstance(value, np.ndarray):
        return " ".join(f"{number:.{_DIGITS}g}" for number in value.tolist())
    if isinstance(value, list):
        return " ".join(map(str, value))
    return as_cell(value) if isinstance(value, str) else value


_PARSERS: dict[Kind, Callable[[str], Any]] = {
    "text": str,
    "whole": int,
    "real": float,
    "reals": lambda text: [float(number) for number in text.split()],
    "wholes": lambda text: [int(number) for number in text.split()],
    "halves": lambda text: [float(number) for number in text.split()],
}


def _parsed(kind: Kind, text: str) -> Any:
    return None if not text and kind != "halves" else _PARSERS[kind](text)


def _locked(lock: Path, path: Path) -> BinaryIO:
    """Create and lock a file; the system releases the lock when this process ends, however it ends.

    Raises:
        OutputError: another run holds the lock.
    """
    file = lock.open("wb")
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            raise OutputError(f"another run is writing {path}; wait until it ends, or choose another name") from error
        except OSError:  # the file system does not support locks
            pass
    return file
