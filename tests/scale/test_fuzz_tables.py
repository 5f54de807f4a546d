"""Tables that another program changed are read right, or refused in one sentence that names the file."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from folders import run_folder
from PIL import Image
from torch import nn

import camkit
from camkit.errors import InputError
from camkit.models import LoadedModel
from camkit.scale import table as scale_table

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

SIDE = 16


def prepare(picture: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.asarray(picture.resize((SIDE, SIDE))).copy()).permute(2, 0, 1) / 255


def tabulate(folder: Path, table: Path, *, resume: bool = False) -> None:
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.ReLU())
    module = nn.Sequential(trunk, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4))
    model = LoadedModel(module.eval(), "tiny", prepare, ("a", "b", "c", "d"))
    options: dict[str, Any] = {"layer": ["0"], "batch_size": 2, "target": [0, 2]}
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


def first_part(table: Path) -> Path:
    return min(table.glob("part-*"))


def with_column(name: str, value: Any) -> Callable[[Any], Any]:
    def change(table: Any) -> Any:
        column = pa.array([value] * len(table))
        return table.set_column(table.schema.get_field_index(name), name, column)

    return change


def rewrite(part: Path, change: Callable[[Any], Any]) -> None:
    """Write a part anew; its dictionary pages and values are those of pyarrow."""
    table = change(pq.read_table(part))
    pq.write_table(table, part, compression="zstd", use_dictionary=["label"])


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("label", {"x": 1}),
        ("target", "x"),
        ("raw", "x"),
        ("shape", [8, 7]),
        ("input", ["x"]),
        ("extent", [0.0, 1.0, 0.0]),
    ],
)
def test_a_table_with_a_column_of_another_kind_is_refused_in_one_sentence(copied, column, value):
    table = copied() / "t.parquet"
    rewrite(first_part(table), with_column(column, value))
    with pytest.raises(InputError, match=r"t\.parquet(/part-000000\.parquet)? cannot be read: [^\n]{5,300}$"):
        camkit.scale.read(table)


def test_a_missing_or_doubled_column_is_one_sentence(copied):
    table = copied() / "t.parquet"
    rewrite(first_part(table), lambda rows: rows.drop_columns(["method"]))
    with pytest.raises(InputError, match=r"part-000000\.parquet cannot be read: .*method"):
        camkit.scale.read(table)
    file = copied() / "t.csv"
    file.write_bytes(file.read_bytes().replace(b"path,", b"path,path,", 1))
    file.with_name(".t.csv.json").unlink()
    with pytest.raises(InputError, match=r"t\.csv cannot be read"):
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


@pytest.mark.extended
def test_tables_that_pandas_wrote_again_are_read_alike(copied):
    pytest.importorskip("pandas")
    table = copied() / "t.parquet"
    before = camkit.scale.read(table)
    part = first_part(table)
    pq.read_table(part).to_pandas().to_parquet(part)
    after = camkit.scale.read(table)
    assert [row.to_dict() for row in after] == [row.to_dict() for row in before]
    assert all((one.raw == other.raw).all() for one, other in zip(after, before, strict=True))
