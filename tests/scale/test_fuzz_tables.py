"""Altered tables are read right, or refused in one sentence that names the file, without taking much memory."""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import shutil
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from folders import run_folder
from PIL import Image
from tiers import represented_by
from torch import nn

import camkit
from camkit.errors import CamkitError, InputError
from camkit.models.loaded import LoadedModel
from camkit.scale import table as scale_table
from camkit.scale.schema import COLUMNS

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

SIDE = 16
every = pytest.mark.parametrize("step", represented_by(12, among=(1, 12)))
"""Every twelfth alteration; the extended tier tries all."""


def prepare(picture: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.asarray(picture.resize((SIDE, SIDE))).copy()).permute(2, 0, 1) / 255


def tabulate(folder: Path, table: Path, *, resume: bool = False) -> None:
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.ReLU())
    module = nn.Sequential(trunk, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4))
    model = LoadedModel(module.eval(), "tiny", prepare, ("a", "b", "c", "d"))
    options: dict[str, Any] = {"layers": ["0"], "batch_size": 2, "targets": [0, 2]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scale_table, "_ROWS", 4)
        list(run_folder(model, [folder], None, table=table, resume=resume, **options))


def write_tables(folder: Path) -> None:
    """Write four pictures, one of them damaged, and both kinds of table of them."""
    (folder / "in").mkdir()
    generator = np.random.default_rng(0)
    for number in range(4):
        Image.fromarray(generator.integers(0, 256, (24, 28, 3), np.uint8)).save(folder / "in" / f"{number}.png")
    (folder / "in" / "1.png").write_bytes(b"damaged")
    for name in ("t.parquet", "t.csv"):
        tabulate(folder / "in", folder / name)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    write_tables(folder)
    return folder


@pytest.fixture
def copied(written: Path, tmp_path: Path) -> Callable[[], Path]:
    """Return a function that puts unaltered tables into a folder, and returns the folder."""

    def copy() -> Path:
        shutil.rmtree(tmp_path / "t.parquet", ignore_errors=True)
        shutil.copytree(written / "t.parquet", tmp_path / "t.parquet")
        for name in ("t.csv", ".t.csv.json"):
            shutil.copy(written / name, tmp_path / name)
        return tmp_path

    return copy


def said_of(table: Path, *, resume: Path | None = None) -> list[str]:
    """Read a table and use what was read, then continue it with a folder; return the errors' sentences."""
    said: list[str] = []
    rows: Any = []
    try:
        rows = camkit.scale.read(table)
    except CamkitError as error:
        said.append(str(error))
    for row in rows[:1]:
        assert np.isfinite(row.heatmap).all()
        with contextlib.suppress(CamkitError):  # the path of another picture, or of none
            row.caption()
            json.dumps(row.to_dict(), allow_nan=False)
            row.overlay()
    if resume is not None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*is damaged, so its pictures are explained again")
            try:
                tabulate(resume, table, resume=True)
            except CamkitError as error:
                said.append(str(error))
    for sentence in said:
        assert table.name in sentence, sentence
        assert len(sentence) < 600, sentence
        assert "\n" not in sentence, sentence
    return said


def first_part(table: Path) -> Path:
    return min(table.glob("part-*"))


# --- columns and cells

NUMBERS: list[Any] = [[], *([value] * 4 for value in (None, "x", 0, -1, np.nan, np.inf, -np.inf, 1e300, 1e9, 0.5, [1]))]
NUMBERS += [
    None,
    3,
    {"x": 1},
    [2**31 - 1] * 2,
    [1, 2, 3, 4],
    [4, 3, 2, 1],
    [0, 1e-9, 0, 1],
    [-1e9, 0, 0, 1],
    [64],
    [1, 64],
]
NUMBERS += [[100_000] * 2, [0.5] * 64, [1] * 65, [16] * 4, [8, 8, 1]]

VALUES: dict[str, list[Any]] = {
    "text": [None, 3, "x", ["x"], {"x": 1}, b"\xff", "a\0b", "\n" * 3000],
    "whole": [None, -(2**63), "x", 0.5, [1], True],
    "real": [None, "x", np.nan, np.inf, -1e308, 0.0, [0.5]],
    "reals": NUMBERS,
    "wholes": NUMBERS,
    "halves": NUMBERS,
}


def with_column(name: str, value: Any) -> Callable[[Any], Any]:
    def change(table: Any) -> Any:
        column = pa.array([value] * len(table))
        return table.set_column(table.schema.get_field_index(name), name, column)

    return change


def changes() -> Iterator[Callable[[Any], Any]]:
    for name, kind in COLUMNS.items():
        yield lambda table, name=name: table.drop_columns([name])
        yield lambda table, name=name: table.append_column(name, table.column(name))
        for value in VALUES[kind]:
            yield with_column(name, value)
    yield lambda table: table.slice(0, 0)
    yield lambda table: table.select([])
    yield lambda table: table.select(table.column_names[::-1])


def rewrite(part: Path, change: Callable[[Any], Any]) -> None:
    """Write a part anew; its dictionary pages and values are those of pyarrow."""
    table = change(pq.read_table(part))
    pq.write_table(table, part, compression="zstd", use_dictionary=["label"])


@every
def test_parts_with_other_columns_are_read_right_or_refused(copied, step):
    for number, change in enumerate(itertools.islice(changes(), 0, None, step)):
        table = copied() / "t.parquet"
        rewrite(first_part(table), change)
        said_of(table, resume=table.parent / "in" if number % 10 == 0 else None)


def set_cell(table: Path, column: str, text: str) -> None:
    """Change a cell of the first row of a CSV."""
    rows = list(csv.reader(StringIO(table.read_bytes().decode(), newline="")))
    rows[1][rows[0].index(column)] = text
    lines = StringIO(newline="")
    csv.writer(lines, lineterminator="\n").writerows(rows)
    table.write_bytes(lines.getvalue().encode())


TEXTS = [
    "",
    "x",
    "nan",
    "-inf",
    "1e300",
    "-1",
    "0",
    "8 8",
    "9" * 5000,
    "1 2 3 4",
    "4 3 2 1",
    "inf inf inf inf",
    "0 1e-9 0 1",
]


@every
def test_csvs_with_other_cells_are_read_right_or_refused(copied, step):
    for column, text in itertools.islice(itertools.product(COLUMNS, TEXTS), 0, None, step):
        table = copied() / "t.csv"
        set_cell(table, column, text)
        said_of(table)


@pytest.mark.parametrize(
    ("column", "value", "sentence"),
    [
        ("path", None, "the column 'path' has empty cells"),
        ("label", {"x": 1}, r"the column 'label' holds struct<x: int64>, not string"),
        ("target", "x", "the column 'target' holds string, not int64"),
        ("status", "x", r"in the row of .*0.png, status is x"),
        ("smooth", "x", "smooth is x"),
        ("layer", None, "layer is missing"),
        ("shape", [8, 7], r"an input of size \[16 16\] has no map of shape \[8 7\] with 64 cells"),
        ("input", [16], r"an input of size \[16\] has no map of shape"),
        ("input", [1e5, 1e5], r"does not fit an input of size \[100000 100000\]"),
        ("extent", [2.0, 3.0, 0.0, 1.0], r"a map with the extent \[2\. 3\. 0\. 1\.\] does not fit"),
        ("positions", [1.0, 2.0], r"positions is \[1\. 2\.\]"),
        ("positions", [np.nan] * 16, "positions is"),
        ("frames", [1, 2, 3], r"frames is \[1\. 2\. 3\.\]"),
        ("times", [0.5], r"times is \[0\.5\]"),
        ("raw", [2.0] * 64, "raw holds what is not between -1 and 1"),
        ("raw", [np.nan] * 64, "raw holds what is not between -1 and 1"),
        ("raw_scale", np.inf, "raw_scale is inf"),
        ("box", [3.0, 0.0, 1.0, 1.0], r"box is \[3\. 0\. 1\. 1\.\]"),
    ],
)
def test_a_wrong_cell_is_named(copied, column, value, sentence):
    table = copied() / "t.parquet"
    rewrite(first_part(table), lambda rows: with_column(column, value)(rows.slice(0, 1)))
    with pytest.raises(InputError, match=rf"t\.parquet(/part-000000\.parquet)? cannot be read: .*{sentence}"):
        camkit.scale.read(table)


def test_a_missing_or_doubled_column_is_named(copied):
    table = copied() / "t.parquet"
    rewrite(first_part(table), lambda rows: rows.drop_columns(["method"]))
    with pytest.raises(InputError, match=r"part-000000\.parquet cannot be read: it has 0 columns 'method', not 1"):
        camkit.scale.read(table)
    file = copied() / "t.csv"
    file.write_bytes(file.read_bytes().replace(b"path,", b"path,path,", 1))
    file.with_name(".t.csv.json").unlink()
    with pytest.raises(InputError, match=r"t\.csv cannot be read: its columns are not those of a camkit table"):
        camkit.scale.read(file)


@pytest.mark.parametrize("content", [b"", b"\0" * 1000, b"a,b\n", b"path\n"])
def test_a_csv_without_rows_needs_its_columns(copied, content):
    """A file that a full disk emptied is no table without rows."""
    file = copied() / "t.csv"
    header = file.read_bytes().splitlines(keepends=True)[0]
    file.write_bytes(content)
    with pytest.raises(InputError, match=r"t\.csv cannot be read: its columns are not those of a camkit table"):
        camkit.scale.read(file)
    file.write_bytes(header)
    assert list(camkit.scale.read(file)) == []


def test_tables_that_pandas_wrote_again_are_read_alike(copied):
    pytest.importorskip("pandas")
    table = copied() / "t.parquet"
    before = camkit.scale.read(table)
    part = first_part(table)
    pq.read_table(part).to_pandas().to_parquet(part)
    after = camkit.scale.read(table)
    assert [row.to_dict() for row in after] == [row.to_dict() for row in before]
    assert all((one.raw == other.raw).all() for one, other in zip(after, before, strict=True))


# --- bytes


def flipped(data: bytes, generator: np.random.Generator, start: int = 0) -> bytes:
    changed = bytearray(data)
    for _ in range(generator.integers(1, 4)):
        changed[start + generator.integers(len(data) - start)] ^= 1 << generator.integers(8)
    return bytes(changed)


@pytest.mark.parametrize("name", ["part", "footer", "t.csv", ".t.csv.json", "t.parquet/_camkit.json"])
@pytest.mark.parametrize("seeds", represented_by(8, among=(8, 100)))
def test_flipped_and_cut_bytes_are_read_right_or_refused(copied, name, seeds):
    for seed in range(seeds):
        generator, folder = np.random.default_rng(seed), copied()
        file = first_part(folder / "t.parquet") if name in ("part", "footer") else folder / name
        data = file.read_bytes()
        start = start_of_footer(data) if name == "footer" else 0
        file.write_bytes(data[: generator.integers(len(data))] if seed % 4 == 0 else flipped(data, generator, start))
        said_of(folder / ("t.csv" if "csv" in name else "t.parquet"), resume=folder / "in" if seed % 4 == 1 else None)


def start_of_footer(data: bytes) -> int:
    return len(data) - 8 - int.from_bytes(data[-8:-4], "little")


def test_a_footer_for_which_pyarrow_ends_the_process_is_refused(copied):
    """Counts of one kind of level carry the number of the other; that a call of pyarrow aborts cannot be caught."""
    table = copied() / "t.parquet"
    data = first_part(table).read_bytes()
    start = start_of_footer(data)
    assert b"\x29\x26" in data[start:]
    first_part(table).write_bytes(data[:start] + data[start:].replace(b"\x29\x26", b"\x19\x26", 1))
    assert "cannot be read" in said_of(table)[0]


ABOUTS = ["", "3", "[]", "[" * 100_000, '[["folder", "x"]]', '{"folder": 3, "fingerprint": {}, "bytes": 3}']
ABOUTS += ['{"folder": "/x", "fingerprint": [], "bytes": -5}', '{"folder": "\\ud800", "fingerprint": {}, "bytes": 900}']
ABOUTS += [
    f'{{"folder": "/x\\u0000", "fingerprint": {{"a": 3}}, "bytes": {size}}}' for size in ("-5", "1e400", "99999")
]


@pytest.mark.parametrize("name", ["t.csv", "t.parquet"])
def test_damaged_settings_are_ignored_or_refused(copied, written, name):
    for text in ABOUTS:
        folder = copied()
        (folder / (".t.csv.json" if name == "t.csv" else "t.parquet/_camkit.json")).write_text(text)
        said_of(folder / name, resume=written / "in")


# --- memory

HARMFUL: dict[str, Callable[[Any, int], Any]] = {
    "a huge map": lambda rows, part: with_list(rows, "raw", np.zeros(70_000_000 // part, np.float16)),
    "a huge text": lambda rows, part: with_column("error", "x" * (300_000_000 // part))(rows.slice(0, 1)),
    "a text in all rows": lambda rows, part: with_column("label", "x" * (1_000_000 // part))(rows.take([0] * 240)),
    "many rows": lambda rows, part: rows.take(pa.array(np.zeros(80_000 // part, np.int32))),
}


def with_list(rows: Any, name: str, values: np.ndarray) -> Any:
    column = pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), pa.array(values))
    rows = rows.slice(0, 1)
    return rows.set_column(rows.schema.get_field_index(name), name, column)


@pytest.mark.parametrize("name", HARMFUL)
@pytest.mark.parametrize("part", represented_by(16, among=(1, 16)))
def test_a_small_part_does_not_unpack_to_much(copied, monkeypatch, name, part):
    monkeypatch.setattr(scale_table, "_UNPACKED", scale_table._UNPACKED // part)
    table = copied() / "t.parquet"
    rewrite(first_part(table), lambda rows: HARMFUL[name](rows, part))
    assert first_part(table).stat().st_size < 400_000
    usual = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(usual)
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        said = said_of(table)
        assert pool.max_memory() + tracemalloc.get_traced_memory()[1] < 50e6 / part
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(usual)
    assert ["bytes would unpack to" in line for line in said] == [True] * (name != "a text in all rows")
