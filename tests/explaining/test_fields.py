"""Every outlet has every field of an explanation: JSON, tables, bundles, TensorBoard, FiftyOne and the shell."""

from __future__ import annotations

import csv
import json
import sys
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiers import Extra

import camkit
from camkit.cli import main
from camkit.explaining.explanation import FIELDS

accumulator = Extra("tensorboard.backend.event_processing.event_accumulator")

NAMES = {field.name for field in FIELDS}
IN_TABLES = NAMES - {"source"} | {"path"}
"""A table calls the source of an explanation its path."""


def printed(capsys: pytest.CaptureFixture[str], *options: object) -> str:
    assert main([str(camkit.scenes.scene_paths()["plane-sky"]), "--model", "demo-fair", *map(str, options)]) == 0
    return capsys.readouterr().out


@pytest.mark.extended
def test_python_json_and_pandas_have_every_field() -> None:
    pandas = pytest.importorskip("pandas")
    found = camkit.explain("demo-fair", [camkit.scenes.scene_paths()["plane-sky"]], target=["plane"])
    values = found[0].to_dict()
    assert values.keys() >= NAMES
    assert json.loads(json.dumps(values)) == values
    frame = found.to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    parts = {field.name: [f"{field.name}_{part}" for part in field.parts] or [field.name] for field in FIELDS}
    assert list(frame.columns) == [column for columns in parts.values() for column in columns]


def test_the_shell_prints_every_field(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    values = json.loads(printed(capsys, "--json", "-o", tmp_path))
    assert values.keys() >= NAMES
    (row,) = csv.DictReader(StringIO(printed(capsys, "--csv", "-o", tmp_path)))
    assert row.keys() >= NAMES
    assert row["label"] == values["label"] == "plane"
    assert row["peak"] == " ".join(map(str, values["peak"]))


def test_tables_and_bundles_have_every_field(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    found = camkit.explain("demo-fair", camkit.scenes.scene_paths()["plane-sky"])
    for option, name in (("--table", "t.csv"), ("--table", "t.parquet"), ("--bundle", "evidence")):
        outlet = tmp_path / name
        printed(capsys, option, outlet, "--no-pictures")
        if name == "evidence":
            (columns,) = json.loads((outlet / "manifest.json").read_text())["explanations"]
        elif name == "t.parquet":
            columns = parquet.read_table(outlet).column_names
        else:
            columns = next(csv.reader(StringIO(outlet.read_text())))
            assert columns[0] == "path"
        assert set(columns) >= IN_TABLES
        (again,) = camkit.scale.read(outlet)
        assert again.values() == {**found.values(), "score": again.score, "probability": again.probability}


@pytest.mark.extended
def test_events_and_samples_have_every_field(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed(capsys, "--tensorboard", tmp_path / "events", "-o", tmp_path / "out")
    events = accumulator.EventAccumulator(str(tmp_path / "events"), {"tensors": 0}).Reload()
    (tag,) = events.Tags()["tensors"]
    text = events.Tensors(tag)[0].tensor_proto.string_val[0].decode()
    assert all(f"| {name} | " in text for name in NAMES)

    kinds = dict.fromkeys(("Heatmap", "Classification", "Detection"), SimpleNamespace)
    monkeypatch.setitem(sys.modules, "fiftyone", SimpleNamespace(**kinds))
    sample = _Sample()
    samples = SimpleNamespace(
        media_type="image",
        values=lambda _: (["1"], [str(camkit.scenes.scene_paths()["plane-sky"])]),
        select=lambda *_, **__: sample,
    )
    assert camkit.scale.explain_samples(samples, camkit.Explainer("demo-fair")) == 1
    assert vars(sample["camkit_heat"]).keys() >= NAMES


class _Sample(dict[str, object]):
    """A dataset of one sample, whose items are its fields: the package needs a database."""

    has_field = dict.__contains__

    def iter_samples(self, *, autosave: bool) -> list[_Sample]:
        assert autosave
        return [self]


def test_a_table_of_a_version_with_fewer_fields_is_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    printed(capsys, "--table", table, "--no-pictures")
    rows = list(csv.DictReader(StringIO(table.read_text())))
    kept = [name for name in rows[0] if name not in ("unit", "without_picture")]
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, kept, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    (found,) = camkit.scale.read(table)
    assert (found.label, found.unit, found.without_picture) == ("plane", None, None)
