"""Tables of explanations. While a run lasts, its rows are in a store beside the table; the table is written at its end.

A Parquet table is a folder of files, one for each part, as pandas, Spark and Ray Data read and write it. A CSV table is
one file. This file knows how tables lie on the disk; ``schema.py`` knows their rows.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from camkit.errors import InputError, OutputError, advice, as_cell, as_error, brief, from_cell, refuse_pipe
from camkit.explanation import Explanations, sharing_scale
from camkit.images.files import csv_line, why_unwritable, write_file
from camkit.kit.fingerprint import Fingerprint, differences, digest
from camkit.kit.store import Row, Store, packed, rows_of, started_with, unpacked
from camkit.scale.bundle import MANIFEST, read_bundle
from camkit.scale.schema import COLUMNS, ERROR, Kind, explanation_of, text_of

_ROWS = 4096
"""Rows of a part. A million pictures make 250 files, which is few enough for every reader of tables."""
_BYTES = 16 * 2**20
"""The most bytes of maps in a part; large maps make a part shorter."""

_TOGETHER = ("path", "layer", "method", "smooth")
"""If rows of a picture agree in these columns, they were drawn on one scale."""


def read(path: str | Path) -> Explanations:
    """Read a table that ``camkit --table`` wrote, or is writing, or a folder that ``camkit --bundle`` wrote.

    The maps of a table have the precision of 16 bits; those of a bundle are exact. Pictures are read from their files
    when they are first drawn; relative paths start at the folder in which the run was started. Rows of pictures that
    could not be explained are left out.

    Returns:
        The Explanations, in the order of the table.

    Raises:
        InputError: there is no such table, or it is damaged or was changed, or it needs pyarrow.
    """
    path = Path(path)
    refuse_pipe(path)
    if (path / MANIFEST).is_file():
        return read_bundle(path)
    store = _store_of(path)
    if store.is_file():
        folder = started_with(store).get("folder", "")
        rows: Iterator[Row] = map(_from_store, rows_of(store))
    else:
        form = _Parquet(path) if path.is_dir() else _form_of(path)
        if not form.exists():
            raise InputError(f"there is no table {path}")
        folder, rows = form.about().get("folder", ""), form.rows()
    explanations = Explanations()
    explained = (row for row in rows if row["status"] != ERROR)
    with as_error(InputError, lambda error: f"{path} cannot be read: {brief(error)}"):
        for _, group in itertools.groupby(explained, key=lambda row: [row[name] for name in _TOGETHER]):
            explanations.extend(sharing_scale([explanation_of(row, Path(folder)) for row in group]))
    return explanations


def _store_of(table: Path) -> Path:
    """Return the file that keeps the rows of a table until it is written."""
    return table.with_name(f".{table.name}.unfinished")


def _for_store(row: Row) -> Row:
    """Return a row as JSON values."""
    raw = None if row["raw"] is None else packed(np.asarray(row["raw"]), _HALVES)
    plain = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in row.items()}
    return {**plain, "raw": raw}


def _from_store(row: Row) -> Row:
    return {**row, "raw": None if row["raw"] is None else unpacked(row["raw"], _HALVES)}


_HALVES = "<f2"
"""The numbers of a map, of 16 bits each."""


class Table:
    """A table that is being made. Its rows are on the disk after each pass, and the table is written at the end.

    Args:
        path: a name ending in .parquet or .csv.
        made_with: what decides the rows; a table is continued only if it was made with the same.
        resume: continue the table if there is one.
        overwrite: replace the table if there is one.

    Attributes:
        finished: the pictures that the table already has.
        failed: the finished pictures that have only errors.

    Raises:
        InputError: the name has another ending, pyarrow is missing, or the table belongs to another run.
        OutputError: the table exists, another run is writing it, or it cannot be written.
    """

    def __init__(self, path: Path, made_with: Fingerprint, *, resume: bool = False, overwrite: bool = False) -> None:
        self.path = path
        self._made_with = made_with
        self._form = _form_of(path)
        self._number = -1
        self._pass: list[Row] = []
        try:
            self._form.prepare()
        except OSError as error:
            raise OutputError(f"cannot write {path}: {why_unwritable(path, error)}") from error
        file = _store_of(path)
        if not (resume or overwrite) and (self._form.exists() or file.exists()):
            raise OutputError(
                f"{path} exists already; pass {advice('resume=True', '--resume')} to continue it, or "
                f"{advice('overwrite=True', '--overwrite')} to replace it"
            )
        instead = "choose another " + advice(
            "table, or replace this one with overwrite=True and without resume=True",
            "--table, or replace this one with --overwrite and without --resume",
        )
        start, folder = self._earlier(instead) if resume and not file.exists() else (iter(()), str(Path.cwd()))
        self._store = Store(file, made_with, resume=resume, start=start, folder=folder, instead=instead)
        self._folder = self._store.folder
        failed: list[str] = []
        self.finished = Finished(self._pictures(failed))
        self.failed = Finished(failed)

    def _earlier(self, instead: str) -> tuple[Iterator[Row], str]:
        """Return the rows of the table that is continued, and the folder in which its relative names start.

        Raises:
            InputError: it was made with other settings, or does not say how it was made.
        """
        if not self._form.exists():
            return iter(()), str(Path.cwd())
        about = self._form.about()
        if not about:
            raise InputError(
                f"{self.path} cannot be continued: {self._form.beside}, which says how it was made, is missing; "
                "choose another name"
            )
        if different := differences(about.get("fingerprint", {}), self._made_with):
            raise InputError(
                f"{self.path} cannot be continued: it was made with different settings ({different}); {instead}"
            )
        return map(_for_store, self._form.rows()), about.get("folder", "")

    def _pictures(self, failed: list[str]) -> Iterator[str]:
        """Yield the absolute path of each picture that has rows, and add those with only errors to a list.

        The rows of a picture follow each other.
        """
        folder = text_of(self._folder)
        for path, rows in itertools.groupby(self._store.rows(), key=lambda row: row["path"]):
            name = os.path.normpath(os.path.join(folder, path))  # noqa: PTH118 - for millions of names
            if all(row["status"] == ERROR for row in rows):
                failed.append(name)
            yield name

    def has(self, picture: Path) -> bool:
        """Tell whether the table has the rows of a picture."""
        return _has(self.finished, picture)

    def has_failed(self, picture: Path) -> bool:
        """Tell whether the table has only errors of a picture."""
        return _has(self.failed, picture)

    def add(self, row: Row, number: int) -> None:
        """Add a row.

        Args:
            row: the row.
            number: the number of the pass that it comes from. The rows of a pass are written together. So no picture is
                divided, and a resumed run begins with a whole pass, whose digits are those of an uninterrupted run.

        Raises:
            OutputError: the rows of the pass before it cannot be written; earlier ones are kept.
        """
        if number != self._number:
            self._end_pass()
            self._number = number
        self._pass.append(row)

    def _end_pass(self) -> None:
        if Path.cwd() != Path(self._folder):
            for row, name in itertools.product(self._pass, ("path", "drawing")):
                row[name] = None if row[name] is None else text_of(os.path.abspath(row[name]))  # noqa: PTH100
        self._store.append(map(_for_store, self._pass))
        self._pass = []

    def __enter__(self) -> Table:
        """Return the table itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write the table, and remove the store; a pass that lacks some of its rows is left out.

        Raises:
            OutputError: it cannot be written. If another error ends the run, that one is raised.
        """
        try:
            if kind is None:
                self._end_pass()
            if not isinstance(error, OutputError):
                self._write()
        except OutputError:
            if kind is None:
                raise
        finally:
            self._store.close()

    def _write(self) -> None:
        about = {"format": 1, "folder": self._folder, "fingerprint": self._made_with}
        try:
            self._form.write(about, _parts(map(_from_store, self._store.rows())))
        except (OSError, OutputError) as error:
            cause = error.__cause__ if isinstance(error, OutputError) else error
            raise OutputError(
                f"cannot write {self.path}: {getattr(cause, 'strerror', None) or error}; its finished rows are kept, "
                f"and {advice('resume=True', '--resume')} continues from there"
            ) from error
        self._store.delete()


def _parts(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Divide rows into parts; the rows of a picture stay together."""
    part: list[Row] = []
    held = 0
    for _, of_picture in itertools.groupby(rows, key=lambda row: row["path"]):
        several = list(of_picture)
        part += several
        held += sum(row["raw"].nbytes for row in several if row["raw"] is not None)
        if len(part) >= _ROWS or held > _BYTES:
            yield part
            part, held = [], 0
    if part:
        yield part


def _has(names: Finished, picture: Path) -> bool:
    return len(names) > 0 and text_of(os.path.abspath(picture)) in names  # noqa: PTH100 - for millions of names


class Finished:
    """The names of finished pictures as 128-bit checksums: 16 bytes for each, however long the names are."""

    def __init__(self, names: Iterable[str]) -> None:
        self._checksums = np.sort(np.frombuffer(b"".join(map(_checksum, names)), _CHECKSUM))

    def __len__(self) -> int:
        return len(self._checksums)

    def __contains__(self, name: str) -> bool:
        """Tell whether a name is among them."""
        checksum = np.frombuffer(_checksum(name), _CHECKSUM)
        place = np.searchsorted(self._checksums, checksum)[0]
        return bool(place < len(self) and self._checksums[place] == checksum[0])


_CHECKSUM = "S16"


def _checksum(name: str) -> bytes:
    return bytes.fromhex(digest(name))[:16]


def _about_in(file: Path) -> dict[str, Any]:
    """Return how a table was made, as the file beside it says."""
    with as_error(InputError, lambda error: f"{file} cannot be read: {brief(error)}; delete it"):
        return dict(json.loads(file.read_bytes()))


def _form_of(path: Path) -> _Parquet | _Csv:
    if path.suffix.lower() == ".csv":
        return _Csv(path)
    if path.suffix.lower() == ".parquet":
        return _Parquet(path)
    raise InputError(f"{str(path)!r} is not the name of a table; choose a name ending in .parquet or .csv")


def arrow_schema() -> Any:
    """Return the columns of a table as pyarrow's schema."""
    import pyarrow as pa  # noqa: PLC0415 - an extra, which only tables need

    kinds: dict[Kind, Any] = {
        "text": pa.string(),
        "whole": pa.int64(),
        "real": pa.float64(),
        "reals": pa.list_(pa.float64()),
        "wholes": pa.list_(pa.int32()),
        "halves": pa.list_(pa.float16()),
    }
    return pa.schema([(name, kinds[kind]) for name, kind in COLUMNS.items()])


def arrow_table(rows: Sequence[Row], schema: Any) -> Any:
    """Return rows as pyarrow's table."""
    import pyarrow as pa  # noqa: PLC0415 - an extra, which only tables need

    columns = [pa.array([row[field.name] for row in rows], field.type) for field in schema]
    return pa.Table.from_arrays(columns, schema=schema)


class _Parquet:
    """A folder of Parquet files; each says in its metadata how it was made."""

    _METADATA = b"camkit"
    _NEW = ".camkit-"
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
        self.beside = path / "_camkit.json"

    def exists(self) -> bool:
        """Tell whether there is a table."""
        if self._path.is_dir():
            return self.beside.is_file() or bool(self._parts())
        return os.path.lexists(self._path)

    def prepare(self) -> None:
        """Create the folders that the table needs."""
        if self._path.is_file():
            raise OutputError(
                f"{self._path} is a file, and camkit writes a table as a folder of parts; choose another name"
            )
        self._path.mkdir(parents=True, exist_ok=True)

    def about(self) -> dict[str, Any]:
        """Return what was given to ``write``, from its own file or from the metadata of a part; empty if it is lost."""
        if self.beside.is_file():
            return _about_in(self.beside)
        for part in self._parts():
            metadata = self._pq.read_metadata(part).metadata or {}
            if self._METADATA in metadata:
                return dict(json.loads(metadata[self._METADATA]))
        return {}

    def rows(self) -> Iterator[Row]:
        """Yield the rows.

        Raises:
            InputError: the table is damaged.
        """
        for part in self._parts():
            for values in zip(*self._read(part), strict=True):
                yield dict(zip(COLUMNS, values, strict=True))

    def write(self, about: dict[str, Any], parts: Iterable[Sequence[Row]]) -> None:
        """Write the table in place of an earlier one: all parts get their names when all are complete."""
        for unfinished in self._path.glob(f"{self._NEW}*"):
            unfinished.unlink()
        schema, written = arrow_schema().with_metadata({self._METADATA: json.dumps(about)}), []
        for number, part in enumerate(parts):
            data = io.BytesIO()
            self._pq.write_table(arrow_table(part, schema), data, compression="zstd")
            written.append(self._path / f"{self._NEW}part-{number:06d}.parquet")
            write_file(written[-1], data.getvalue())
        for earlier in self._parts():
            earlier.unlink()
        write_file(self.beside, json.dumps(about).encode())
        for file in written:
            file.replace(file.with_name(file.name.removeprefix(self._NEW)))

    def _parts(self) -> Sequence[Path]:
        if self._path.is_file():
            return [self._path]
        return sorted(self._path.glob("part-*.parquet"))

    def _read(self, part: Path) -> list[Iterable[Any]]:
        """Return the values of the columns: texts, numbers, or arrays of numbers."""
        with as_error(InputError, lambda error: f"{part} cannot be read: {brief(error)}"):
            with self._pq.ParquetFile(part) as file:
                table = file.read(list(COLUMNS)).select(list(COLUMNS)).cast(arrow_schema())
            return [
                _arrays_of(column) if "list" in str(column.type) else column.to_pylist() for column in table.columns
            ]


def _arrays_of(column: Any) -> Iterator[np.ndarray | None]:
    return (None if cell.values is None else cell.values.to_numpy(zero_copy_only=False) for cell in column)


def _next_row(reader: csv.DictReader[str]) -> dict[str, str] | None:
    """Return the next row. Its cells may be long; the limit belongs to the process, so it is set for this row only."""
    before = csv.field_size_limit(_LONGEST_CELL)
    try:
        return next(reader, None)
    finally:
        csv.field_size_limit(before)


class _Csv:
    """A CSV file, with a hidden file beside it that says how it was made."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.beside = path.with_name(f".{path.name}.json")

    def exists(self) -> bool:
        return os.path.lexists(self._path)

    def prepare(self) -> None:
        if self._path.is_dir():
            raise OutputError(f"{self._path} is a folder; choose another name for the table")
        self._path.parent.mkdir(parents=True, exist_ok=True)

    def about(self) -> dict[str, Any]:
        return _about_in(self.beside) if self.beside.is_file() else {}

    def rows(self) -> Iterator[Row]:
        try:
            with self._path.open("r", encoding="utf-8", newline="") as file:
                reader = csv.DictReader(file, strict=True)
                if sorted(reader.fieldnames or ()) != sorted(COLUMNS):
                    raise InputError(f"{self._path} cannot be read: {_OTHER_COLUMNS}")
                while (cells := _next_row(reader)) is not None:
                    if None in cells or None in cells.values() or not cells["path"]:
                        raise InputError(f"{self._path} cannot be read: {_OTHER_COLUMNS}, or a row has no path")
                    yield {name: _parsed(kind, from_cell(cells[name])) for name, kind in COLUMNS.items()}
        except (csv.Error, OSError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{self._path} cannot be read: {brief(error)}") from error

    def write(self, about: dict[str, Any], parts: Iterable[Sequence[Row]]) -> None:
        lines = (csv_line(_cell(row[name]) for name in COLUMNS) for part in parts for row in part)
        write_file(self.beside, json.dumps(about).encode())
        write_file(self._path, itertools.chain([csv_line(COLUMNS)], lines))


_OTHER_COLUMNS = "its columns are not those of a camkit table"

_LONGEST_CELL = 2**31 - 1
"""Python's own limit of 131,072 characters is shorter than a map with a value for each pixel."""


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
