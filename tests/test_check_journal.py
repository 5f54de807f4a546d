"""Rows on disk: however a run ends, its finished rows are kept, and rows of another run are never reused."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from camkit.background.journal import Journal
from camkit.errors import InputError, OutputError

ROWS = [
    {"kind": "heat", "name": "cat/a.jpg", "cells": [0.1, 1e-30, 3.0], "layer": "layer4"},
    {"kind": "heat", "name": "cat/\u00fc\u2028 \udcff.jpg", "error": 'it says "no"\r\nand more'},
    {"kind": "edits", "name": "cat/a.jpg", "answers": {"same.0": {"answer": 3, "share": 0.25}}},
    {"kind": "heat", "name": "dog/b.jpg", "cropped": True},
]


def write(path: Path, rows: list[dict], key: str = "k") -> bytes:
    with Journal(path, key, resume=False) as journal:
        for row in rows:
            journal.append([row])
    return path.read_bytes()


def resumed(path: Path, key: str = "k") -> list[dict]:
    with Journal(path, key, resume=True) as journal:
        return [row for kind in ("heat", "edits") for row in journal.rows(kind).values()]


def expected(rows: list[dict]) -> list[dict]:
    return [row for kind in ("heat", "edits") for row in rows if row["kind"] == kind]


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "j.jsonl"
    text = write(path, ROWS)
    assert resumed(path) == expected(ROWS)
    assert [json.loads(line)["row"] for line in text.decode().split("\n")[1:-1]] == ROWS
    assert resumed(path) == expected(ROWS), "resuming loses nothing"


def test_a_last_line_cut_at_any_byte_is_dropped_and_the_run_continues(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    whole = write(path, ROWS)
    last = whole[:-1].rindex(b"\n") + 1
    for end in range(last, len(whole)):
        path.write_bytes(whole[:end])
        with Journal(path, "k", resume=True) as journal:
            assert dict(journal.rows("heat")) == {row["name"]: row for row in ROWS[:2]}
            assert list(journal.rows("edits")) == ["cat/a.jpg"]
            journal.append([ROWS[3]])
        assert path.read_bytes() == whole


def test_complete_lines_are_kept_wherever_the_file_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    whole = write(path, ROWS)
    head = whole.index(b"\n") + 1
    rng = random.Random(1)
    for end in {head, len(whole), *(rng.randrange(head, len(whole)) for _ in range(60))}:
        path.write_bytes(whole[:end])
        assert resumed(path) == expected(ROWS[: whole[head:end].count(b"\n")])
    for end in range(head):
        path.write_bytes(whole[:end])
        with pytest.raises(InputError, match="cannot be resumed"):
            resumed(path)


def test_a_malformed_line_is_dropped_and_the_rows_around_it_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    lines = write(path, ROWS).splitlines(keepends=True)
    for malformed in (
        b"\n",
        b"5\n",
        b"[]\n",
        b"{}\n",
        b'{"kind": "heat"}\n',
        b"\xff\xfe\n",
        b"\0\0\0\n",
        b"[" * 9999 + b"\n",
    ):
        path.write_bytes(b"".join([*lines[:3], malformed, *lines[3:]]))
        assert resumed(path) == expected(ROWS)


def test_a_flipped_bit_loses_its_line_and_changes_no_other(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    whole = write(path, ROWS)
    rng = random.Random(2)
    for _ in range(400):
        place = rng.randrange(len(whole))
        damaged = bytearray(whole)
        damaged[place] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        with Journal(path, "k", resume=True) as journal:
            kept = [row for kind in ("heat", "edits") for row in journal.rows(kind).values()]
            missing = [row for row in expected(ROWS) if row not in kept]
            assert journal.damaged or not missing or place == len(whole) - 1
        line = whole[:place].count(b"\n")  # 0 is the header
        hit = (line, line + 1) if whole[place] == ord("\n") else (line,)
        assert all(row in ROWS for row in kept)
        assert all(ROWS.index(row) + 1 in hit for row in missing)


@pytest.mark.parametrize(
    "head", [b"", b"\n", b"5\n", b"[]\n", b"null\n", b'{"journal": 1}\n', b'{"key": 3}\n', b"\xff\n", b"words\n"]
)
def test_another_file_is_neither_resumed_nor_changed(tmp_path: Path, head: bytes) -> None:
    path = tmp_path / "j.jsonl"
    path.write_bytes(head + b'{"kind": "heat", "name": "a"}\n')
    before = path.read_bytes()
    refusal = r"j\.jsonl cannot be resumed: it belongs to a run with other weights, data or settings"
    with pytest.raises(InputError, match=refusal):
        Journal(path, "k", resume=True)
    assert path.read_bytes() == before


def test_another_key_is_refused_and_the_rows_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    write(path, ROWS, "weights settings data")
    with pytest.raises(InputError, match="start again without resume=True, or choose another out folder"):
        resumed(path, "weights settings other")
    assert resumed(path, "weights settings data") == expected(ROWS)


def test_without_resume_earlier_rows_are_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    whole = write(path, ROWS)
    write(path, [], "other")
    assert path.with_suffix(".before").read_bytes() == whole
    assert resumed(path, "other") == []


def test_the_last_row_with_a_name_counts_and_rows_may_stay_in_memory(tmp_path: Path) -> None:
    twice = [ROWS[0], {**ROWS[0], "layer": "layer3"}]
    write(tmp_path / "j.jsonl", twice)
    assert resumed(tmp_path / "j.jsonl") == twice[1:]
    with Journal(None, "k", resume=True) as journal:
        journal.append(twice)
        journal.append([])
        assert list(journal.rows("heat").values()) == twice[1:]
        assert journal.rows("none") == {}


@contextmanager
def no_file_longer_than(length: int) -> Iterator[None]:
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (length, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("space", [0, 1, 30, 60])
def test_a_full_disk_is_reported_and_earlier_rows_are_kept(tmp_path: Path, space: int) -> None:
    path = tmp_path / "j.jsonl"
    with Journal(path, "k", resume=False) as journal:
        journal.append(ROWS[:2])
        before = path.read_bytes()
        with (
            no_file_longer_than(len(before) + space),
            pytest.raises(OutputError, match=r"cannot write .*j\.jsonl: .*finished rows are kept"),
        ):
            journal.append(ROWS[2:])
        assert path.read_bytes() == before, "half a line would make the next one unreadable"
        assert not journal.rows("edits"), "a row that is not on disk is not finished"
        journal.append(ROWS[3:])
    assert resumed(path) == [*ROWS[:2], ROWS[3]]


def test_a_disk_that_is_full_from_the_start_is_reported(tmp_path: Path) -> None:
    with no_file_longer_than(5), pytest.raises(OutputError, match=r"cannot write .*j\.jsonl"):
        Journal(tmp_path / "j.jsonl", "k", resume=False)
    whole = write(tmp_path / "j.jsonl", ROWS)
    with no_file_longer_than(5), pytest.raises(OutputError, match=r"cannot write .*j\.jsonl"):
        Journal(tmp_path / "j.jsonl", "k", resume=True)
    assert (tmp_path / "j.jsonl").read_bytes() == whole
    assert resumed(tmp_path / "j.jsonl") == expected(ROWS)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_device_that_is_always_full_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    with Journal(path, "k", resume=False) as journal:
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, journal._file.fileno())
        os.close(full)
        with pytest.raises(OutputError, match="No space left on device; finished rows are kept"):
            journal.append(ROWS)
    assert resumed(path) == []


@pytest.mark.parametrize("resume", [False, True])
def test_a_path_where_no_file_can_be_is_reported(tmp_path: Path, resume: bool) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(OutputError, match=r"cannot write .*j\.jsonl"):
        Journal(tmp_path / "file" / "j.jsonl", "k", resume=resume)
    assert (tmp_path / "file").read_text() == "kept"
    (tmp_path / "folder").mkdir()
    if resume:
        with pytest.raises(OutputError, match=r"cannot write .*folder: Is a directory"):
            Journal(tmp_path / "folder", "k", resume=True)


def test_nan_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    with Journal(path, "k", resume=False) as journal:
        journal.append(ROWS[:1])
        with pytest.raises(ValueError, match="JSON"):
            journal.append([ROWS[1], {"kind": "heat", "name": "x", "cells": [float("nan")]}])
    assert resumed(path) == ROWS[:1]
