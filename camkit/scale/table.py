"""Tables and bundles of explanations, and reading them.

While a run lasts, its rows are in a store beside the table; the table is written at its end. A Parquet table is a
folder of files, one for each part, as pandas, Spark and Ray Data read and write it. A CSV table is one file. There is a
row for each picture and target, the same in every kind of table.

A bundle is a folder with the overlay, the figure and the raw map of each explanation, and one manifest. It can be read
without the model: it says with which versions and weights it was made, and has the checksums of its files.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import MISSING, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from camkit.errors import (
    InputError,
    OutputError,
    advice,
    as_cell,
    as_error,
    brief,
    from_cell,
    optional,
    refuse_pipe,
    text_of,
)
from camkit.explaining.explanation import FIELDS, Explanation, Explanations, Kind, explanation_of, sharing_scale
from camkit.images.files import check_folder, csv_line, why_unwritable, write_file
from camkit.kit.store import Fingerprint, Row, Store, differences, digest, packed, rows_of, started_with, unpacked
from camkit.scale.job import slug
from camkit.types import Failure

_ROWS = 4096
"""Rows of a part. A million pictures make 250 files, which is few enough for every reader of tables."""

MANIFEST = "manifest.json"
"""The file of a bundle that names all others."""

COLUMNS: dict[str, Kind] = {
    "path": "text",
    **{each.name: each.kind for each in FIELDS if each.name != "source"},
    "raw": "halves",
    "raw_scale": "real",
    "drawing": "text",
    "error": "text",
}
"""The columns: the fields of an Explanation, with ``path`` for its source, and its map. ``status`` is that of the
Explanation, or "error". A row with "error" has only ``path`` and ``error``.

``raw`` is the map on the layer's grid, row by row, divided by ``raw_scale``, its largest absolute value: 16 bits have
no room for very small and large numbers. ``drawing`` is the file with the drawing.
"""

ADDED = {each.name for each in fields(Explanation) if each.default is not MISSING}
"""Columns that a table of an earlier version may lack."""


def row_of(explanation: Explanation, drawing: Path | None = None) -> Row:
    """Return the row of an explanation."""
    values = explanation.values()
    finite = np.abs(explanation.raw[np.isfinite(explanation.raw)])
    scale = float(finite.max(initial=0)) or 1.0
    raw = (explanation.raw / np.float32(scale)).astype(np.float16).reshape(-1)
    path, drawn = text_of(values.pop("source")), None if drawing is None else text_of(drawing)
    return {"path": path, **values, "raw": raw, "raw_scale": scale, "drawing": drawn, "error": None}


def row_of_failure(failure: Failure) -> Row:
    """Return the row of a picture that could not be explained."""
    empty: Row = dict.fromkeys(COLUMNS)
    return {**empty, "path": text_of(failure.source), "status": "error", "error": text_of(str(failure.error))}


def read_table(path: Path) -> Iterator[Explanation]:
    """Yield the Explanations of a table that is finished or being written.

    Raises:
        InputError: there is no such table, or it needs pyarrow.
        Exception: it is damaged.
    """
    store = _store_of(path)
    if store.is_file():
        folder = started_with(store).get("folder", "")
        rows: Iterator[Row] = map(_from_store, rows_of(store))
    else:
        form = _Parquet(path) if path.is_dir() else _form_of(path)
        if not form.files():
            raise InputError(f"there is no table {path}")
        folder, rows = form.about().get("folder", ""), form.rows()
    for row in rows:
        if row["status"] != "error":
            shares_of_scale = np.asarray(row["raw"], np.float16).reshape(row["shape"])
            raw = shares_of_scale.astype(np.float32) * np.float32(row["raw_scale"])
            yield explanation_of({**row, "source": row["path"]}, raw, Path(folder))


def _store_of(table: Path) -> Path:
    """Return the file that keeps the rows of a table until it is written."""
    return table.with_name(f".{table.name}.unfinished")


def _for_store(row: Row) -> Row:
    """Return a row as JSON values; the numbers of a map have 16 bits each."""
    return {**row, "raw": None if row["raw"] is None else packed(np.asarray(row["raw"]), "<f2")}


def _from_store(row: Row) -> Row:
    return {**row, "raw": None if row["raw"] is None else unpacked(row["raw"], "<f2")}


class Table(AbstractContextManager["Table"]):
    """A table that is being made. Its rows are on the disk after each pass, and the table is written at the end.

    Args:
        path: a name ending in .parquet or .csv.
        made_with: what decides the rows; a table is continued only if it was made with the same.
        resume: continue the table if there is one.
        overwrite: replace the table if there is one.

    Raises:
        InputError: the name has another ending, pyarrow is missing, or the table belongs to another run.
        OutputError: the table exists, another run is writing it, or it cannot be written.
    """

    def __init__(self, path: Path, made_with: Fingerprint, *, resume: bool = False, overwrite: bool = False) -> None:
        self.path, self._made_with, self._form = path, made_with, _form_of(path)
        is_folder, file = self._form.is_folder, _store_of(path)
        if os.path.lexists(path) and path.is_dir() != is_folder:
            raise OutputError(f"{path} is a {'file' if is_folder else 'folder'}; choose another name")
        with as_error(OutputError, lambda error: f"cannot write {path}: {why_unwritable(path, error)}"):
            (path if is_folder else path.parent).mkdir(parents=True, exist_ok=True)
        if not (resume or overwrite) and (self._form.files() or file.exists()):
            raise OutputError(
                f"{path} exists already; pass {advice('resume=True', '--resume')} to continue it, or "
                f"{advice('overwrite=True', '--overwrite')} to replace it"
            )
        instead = "choose another " + advice(
            "table, or replace this one with overwrite=True and without resume=True",
            "--table, or replace this one with --overwrite and without --resume",
        )
        start: Iterable[Row] = ()
        folder = str(Path.cwd())
        if resume and not file.exists() and self._form.files():
            about = self._form.about()
            different = differences(about.get("fingerprint", {}), made_with)
            if different:
                raise InputError(
                    f"{path} cannot be continued: it was made with different settings ({different}); {instead}"
                )
            start, folder = map(_for_store, self._form.rows()), about.get("folder", "")
        self._store = Store(file, made_with, resume=resume, start=start, folder=folder, instead=instead)
        self._finished: dict[bytes, bool] = {}
        home = text_of(self._store.folder)
        for name, rows in itertools.groupby(self._store.rows(), key=lambda row: row["path"]):
            picture = os.path.normpath(os.path.join(home, name))  # noqa: PTH118 - for millions of names
            self._finished[_checksum(picture)] = all(row["status"] == "error" for row in rows)

    def failed(self, picture: Path) -> bool | None:
        """Tell whether the table has only errors of a picture; None if it does not have the picture."""
        return self._finished.get(_checksum(text_of(os.path.abspath(picture))))  # noqa: PTH100 - for millions of names

    def append(self, rows: Sequence[Row]) -> None:
        """Add the rows of a pass.

        They are written together. So no picture is divided, and a resumed run begins with a whole pass, whose digits
        are those of an uninterrupted run.

        Raises:
            OutputError: they cannot be written; earlier ones are kept.
        """
        if Path.cwd() != Path(self._store.folder):
            for row, name in itertools.product(rows, ("path", "drawing")):
                row[name] = None if row[name] is None else text_of(os.path.abspath(row[name]))  # noqa: PTH100
        self._store.append(map(_for_store, rows))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """Write the table, and remove the store.

        Raises:
            OutputError: it cannot be written. If another error ends the run, that one is raised.
        """
        try:
            if not isinstance(error, OutputError):
                about = {"format": 1, "folder": self._store.folder, "fingerprint": self._made_with}
                self._form.write(about, _parts(map(_from_store, self._store.rows())))
                self._store.delete()
        except (OSError, OutputError) as failed:
            if kind is None:
                further = f"{advice('resume=True', '--resume')} continues from there"
                raise OutputError(f"{failed}; the finished rows are kept, and {further}") from failed
        finally:
            self._store.close()


def _parts(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Divide rows into parts; the rows of a picture stay together."""
    part: list[Row] = []
    held = 0
    for _, of_picture in itertools.groupby(rows, key=lambda row: row["path"]):
        several = list(of_picture)
        part += several
        held += sum(row["raw"].nbytes for row in several if row["raw"] is not None)
        # The most bytes of maps in a part; large maps make a part shorter
        if len(part) >= _ROWS or held > 16 * 2**20:
            yield part
            part, held = [], 0
    yield part  # even an empty table has a part, which says how it was made


def _checksum(name: str) -> bytes:
    """Return a short checksum: it takes less memory than a long name."""
    return bytes.fromhex(digest(name))[:16]


def _form_of(path: Path) -> _Parquet | _Csv:
    suffix = path.suffix.lower()
    if suffix not in (".parquet", ".csv"):
        raise InputError(f"{str(path)!r} is not the name of a table; choose a name ending in .parquet or .csv")
    return _Csv(path) if suffix == ".csv" else _Parquet(path)


def arrow_schema(names: Iterable[str] = COLUMNS) -> Any:
    """Return columns of a table as pyarrow's schema."""
    import pyarrow as pa  # noqa: PLC0415 - an extra, which only tables need

    kinds: dict[Kind, Any] = {
        "text": pa.string(),
        "whole": pa.int64(),
        "real": pa.float64(),
        "reals": pa.list_(pa.float64()),
        "wholes": pa.list_(pa.int32()),
        "halves": pa.list_(pa.float16()),
    }
    return pa.schema([(name, kinds[COLUMNS[name]]) for name in names])


def arrow_table(rows: Sequence[Row], schema: Any = None) -> Any:
    """Return rows as pyarrow's table."""
    import pyarrow as pa  # noqa: PLC0415 - an extra, which only tables need

    return pa.Table.from_pylist(list(rows), schema)


class _Parquet:
    """A folder of Parquet files; each says in its metadata how it was made."""

    is_folder = True
    _METADATA = b"camkit"
    _NEW = ".camkit-"
    """Readers of Parquet ignore files that begin with an underscore or a dot."""

    def __init__(self, path: Path) -> None:
        needs = "a Parquet table needs pyarrow: pip install 'camkit[table]', or name a table that ends in .csv"
        self._pq = optional("pyarrow.parquet", needs)
        self._path = path

    def files(self) -> Sequence[Path]:
        """List the parts; a part alone is a table too."""
        return [self._path] if self._path.is_file() else sorted(self._path.glob("part-*.parquet"))

    def about(self) -> dict[str, Any]:
        """Return what was given to ``write``; empty if it is lost."""
        metadata = self._pq.read_metadata(self.files()[0]).metadata or {}
        return dict(json.loads(metadata.get(self._METADATA, b"{}")))

    def rows(self) -> Iterator[Row]:
        """Yield the rows.

        Raises:
            InputError: the table is damaged.
        """
        return itertools.chain.from_iterable(map(self._rows_of, self.files()))

    def _rows_of(self, part: Path) -> Iterator[Row]:
        reading = as_error(InputError, lambda error: f"{part} cannot be read: {brief(error)}")
        with reading, self._pq.ParquetFile(part) as file:
            names = [name for name in COLUMNS if name not in ADDED or name in file.schema_arrow.names]
            table = file.read(names).select(names).cast(arrow_schema(names))
            for values in zip(*(_cells_of(table[name], COLUMNS[name]) for name in names), strict=True):
                yield dict(zip(names, values, strict=True))

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
        for earlier in self.files():
            earlier.unlink()
        for file in written:
            file.replace(file.with_name(file.name.removeprefix(self._NEW)))


def _cells_of(column: Any, kind: Kind) -> Iterable[Any]:
    if kind != "halves":
        return column.to_pylist()  # type: ignore[no-any-return]
    return (None if cell.values is None else cell.values.to_numpy(zero_copy_only=False) for cell in column)


class _Csv:
    """A CSV file, with a hidden file beside it that says how it was made."""

    is_folder = False

    def __init__(self, path: Path) -> None:
        self._path = path
        self._beside = path.with_name(f".{path.name}.json")

    def files(self) -> Sequence[Path]:
        return [self._path] if os.path.lexists(self._path) else []

    def about(self) -> dict[str, Any]:
        with as_error(InputError, lambda error: f"{self._beside} cannot be read: {brief(error)}; delete it"):
            return dict(json.loads(self._beside.read_bytes())) if self._beside.is_file() else {}

    def rows(self) -> Iterator[Row]:
        reading = as_error(InputError, lambda error: f"{self._path} cannot be read: {brief(error)}")
        with reading, self._path.open("r", encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            names = [name for name in COLUMNS if name not in ADDED or name in (reader.fieldnames or ())]
            csv.field_size_limit(2**31 - 1)  # Python's own is shorter than a map with a value for each pixel
            for cells in reader:
                texts = {name: from_cell(cells[name]) for name in names}
                yield {
                    name: _PARSERS[COLUMNS[name]](text) if text or COLUMNS[name] == "halves" else None
                    for name, text in texts.items()
                }

    def write(self, about: dict[str, Any], parts: Iterable[Sequence[Row]]) -> None:
        lines = (csv_line(_cell(row[name]) for name in COLUMNS) for part in parts for row in part)
        write_file(self._beside, json.dumps(about).encode())
        write_file(self._path, itertools.chain([csv_line(COLUMNS)], lines))


def _cell(value: Any) -> Any:
    """Return a value as a CSV holds it; numbers of a list are separated by spaces. ``from_cell`` reads text again."""
    if isinstance(value, np.ndarray):  # with four digits, some different 16-bit numbers would look the same
        return " ".join(f"{number:.5g}" for number in value.tolist())
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


class Bundle:
    """A folder of evidence that is being made; ``close`` writes its manifest.

    Args:
        folder: the folder.
        made_with: what decides the maps: the model, its weights and the settings.
        overwrite: replace the files of an earlier bundle.

    Raises:
        OutputError: the folder is not empty, or it cannot be written.
    """

    def __init__(self, folder: Path, made_with: Fingerprint, *, overwrite: bool = False) -> None:
        check_folder(folder)
        if not overwrite and folder.is_dir() and any(folder.iterdir()):
            instead = advice("overwrite=True", "--overwrite")
            raise OutputError(f"{folder} is not empty; name another folder, or pass {instead}")
        self._folder, self._made_with = folder, made_with
        self._rows: list[dict[str, Any]] = []
        self._failures: list[dict[str, str]] = []

    def add(self, explanation: Explanation, drawing: Mapping[str, Any]) -> None:
        """Write the files of an explanation.

        Args:
            explanation: the explanation.
            drawing: the arguments of ``Explanation.overlay``, whose style does not count.

        Raises:
            OutputError: a file cannot be written.
        """
        name = f"{len(self._rows) + 1:04d}-{slug(Path(explanation.source).stem)}.{slug(explanation.name)}"
        files = {}
        for style in ("overlay", "figure"):
            explanation.save(self._folder / f"{name}.{style}.png", **{**drawing, "style": style})
            files[style] = self._named(f"{name}.{style}.png")
        cells = io.BytesIO()
        np.save(cells, explanation.raw, allow_pickle=False)
        write_file(self._folder / f"{name}.npy", cells.getvalue())
        files["raw"] = self._named(f"{name}.npy")
        picture = Path(explanation.source)
        checksum = digest(picture.read_bytes()) if picture.is_file() else None
        values = {"path": text_of(picture), **explanation.values(), "picture_sha256": checksum, "files": files}
        self._rows.append({name: values[name] for name in values if name != "source"})

    def fail(self, failure: Failure) -> None:
        """Record a picture that could not be explained."""
        self._failures.append({"path": failure.source, "error": str(failure.error)})

    def close(self) -> None:
        """Write the manifest.

        Raises:
            OutputError: it cannot be written.
        """
        versions = {"python": platform.python_version()}
        # The packages that can change a map
        packages = "camkit torch torchvision timm transformers onnxruntime numpy opencv-python-headless"
        for package in packages.split():
            with suppress(PackageNotFoundError):
                versions[package] = version(package)
        about = {
            "format": 3,  # raised when a field is removed or changes its meaning
            "folder": str(Path.cwd()),
            "versions": versions,
            "made_with": self._made_with,
            "explanations": self._rows,
            "failures": self._failures,
        }
        write_file(self._folder / MANIFEST, json.dumps(about, indent=1, allow_nan=False).encode())

    def _named(self, file: str) -> dict[str, str]:
        return {"name": file, "sha256": digest((self._folder / file).read_bytes())}


def read(path: str | Path) -> Explanations:
    """Read a table that ``camkit --table`` wrote, or is writing, or a folder that ``camkit --bundle`` wrote.

    The maps of a table have the precision of 16 bits; those of a bundle are exact. Pictures are read from their files
    when they are first drawn; relative paths start at the folder in which the run was started. Rows of pictures that
    could not be explained are left out.

    Returns:
        The Explanations, in the order of the table.

    Raises:
        InputError: there is no such table, or it is damaged, or it needs pyarrow.
    """
    path, explanations = Path(path), Explanations()
    refuse_pipe(path)
    manifest = path / MANIFEST
    is_bundle = manifest.is_file()
    with as_error(InputError, lambda error: f"{manifest if is_bundle else path} cannot be read: {brief(error)}"):
        found = _read_bundle(manifest) if is_bundle else read_table(path)
        for _, of_picture in itertools.groupby(found, key=lambda each: each.source):
            explanations.extend(sharing_scale(list(of_picture)))
    return explanations


def _read_bundle(manifest: Path) -> Iterator[Explanation]:
    folder, about = manifest.parent, json.loads(manifest.read_bytes())
    for row in about["explanations"]:
        map_file = folder / Path(row["files"]["raw"]["name"]).name  # never a file elsewhere
        raw = np.load(map_file, allow_pickle=False)
        yield explanation_of({**row, "source": row["path"]}, raw, Path(about["folder"]))
