"""Rows on disk: however a run ends, its finished rows are kept, and rows of another run are never reused."""

import json
import random
from pathlib import Path

import pytest
from disks import files_of_at_most

from camkit.errors import InputError, OutputError
from camkit.kit.store import Store, rows_of

ROWS = [
    {"kind": "heat", "name": "cat/a.jpg", "cells": [0.1, 1e-30, 3.0], "layer": "layer4"},
    {"kind": "heat", "name": "cat/\u00fc\u2028 \udcff.jpg", "error": 'it says "no"\r\nand more'},
    {"kind": "edits", "name": "cat/a.jpg", "answers": {"same.0": {"answer": 3, "share": 0.25}}},
    {"kind": "heat", "name": "dog/b.jpg", "cropped": True},
]


def opened(path: Path | None, weights: str = "k", *, resume: bool) -> Store:
    return Store(path, {"weights": weights, "data": "d"}, resume=resume, instead="choose another name")


def write(path: Path, rows: list[dict], weights: str = "k") -> bytes:
    with opened(path, weights, resume=False) as store:
        for row in rows:
            store.append([row])
    return path.read_bytes()


def resumed(path: Path, weights: str = "k") -> list[dict]:
    with opened(path, weights, resume=True) as store:
        return list(store.rows())


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "j.jsonl"
    text = write(path, ROWS)
    assert resumed(path) == ROWS
    assert [json.loads(line) for line in text.decode().split("\n")[1:-1]] == ROWS
    assert resumed(path) == ROWS, "resuming loses nothing"


def test_complete_lines_are_kept_wherever_the_file_is_cut_and_another_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    whole = write(path, ROWS)
    head, last = whole.index(b"\n") + 1, whole[:-1].rindex(b"\n") + 1
    rng = random.Random(1)
    for end in {head, *range(last, len(whole) + 1), *(rng.randrange(head, last) for _ in range(40))}:
        path.write_bytes(whole[:end])
        kept = whole[head:end].count(b"\n")
        with opened(path, resume=True) as store:
            assert list(store.rows()) == ROWS[:kept]
            store.append(ROWS[kept:])
        assert path.read_bytes() == whole
    others = (b"[]\n", b'{"journal": 1}\n', b"\xff\n")
    for other in (*(whole[:end] for end in range(head)), *(other + whole[head:] for other in (b"", *others))):
        path.write_bytes(other)
        with pytest.raises(InputError, match=r"j\.jsonl cannot be continued: its first line"):
            resumed(path)
        assert path.read_bytes() == other


def test_a_malformed_line_is_dropped_and_the_rows_around_it_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    lines = write(path, ROWS).splitlines(keepends=True)
    for malformed in (b"\n", b"5\n", b"[]\n", b"\xff\xfe\n", b"\0\0\0\n", b"[" * 9999 + b"\n"):
        path.write_bytes(b"".join([*lines[:3], malformed, *lines[3:]]))
        assert resumed(path) == ROWS


def test_other_settings_are_refused_by_name_and_earlier_rows_are_kept_or_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    whole = write(path, ROWS)
    with pytest.raises(InputError, match=r"made with different settings \(weights\); choose another name"):
        resumed(path, "other")
    assert resumed(path) == ROWS
    write(path, [], "other")
    assert path.with_suffix(".before").read_bytes() == whole
    assert resumed(path, "other") == []


def test_rows_may_stay_in_memory_and_a_file_may_begin_with_some(tmp_path: Path) -> None:
    with opened(None, resume=True) as store:
        store.append(ROWS)
        store.append([])
        assert list(store.rows()) == ROWS
    path = tmp_path / "j.jsonl"
    with Store(path, {}, resume=True, start=ROWS[:2], folder="f", instead="") as store:
        store.append(ROWS[2:])
        assert list(rows_of(path)) == list(store.rows()) == ROWS
    with Store(path, {}, resume=True, start=ROWS, folder="g", instead="") as store:
        assert (list(store.rows()), store.folder) == (ROWS, "f"), "the rows of the file count"


def test_two_runs_cannot_write_one_file(tmp_path: Path) -> None:
    with opened(tmp_path / "j.jsonl", resume=False), pytest.raises(OutputError, match="another run is writing"):
        opened(tmp_path / "j.jsonl", resume=True)


@pytest.mark.parametrize("space", [0, 30])
def test_a_full_disk_is_reported_and_earlier_rows_are_kept(tmp_path: Path, space: int) -> None:
    path = tmp_path / "j.jsonl"
    with files_of_at_most(5), pytest.raises(OutputError, match=r"cannot write .*j\.jsonl"):
        opened(path, resume=False)
    with opened(path, resume=False) as store:
        store.append(ROWS[:2])
        before = path.read_bytes()
        with (
            files_of_at_most(len(before) + space),
            pytest.raises(OutputError, match=r"cannot write .*j\.jsonl: .*finished rows are kept"),
        ):
            store.append(ROWS[2:])
        assert path.read_bytes() == before, "half a line would make the next one unreadable"
        assert list(store.rows()) == ROWS[:2], "a row that is not on disk is not finished"
        store.append(ROWS[3:])
    assert resumed(path) == [*ROWS[:2], ROWS[3]]


def test_a_path_where_no_file_can_be_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    for resume in (False, True):
        with pytest.raises(OutputError, match=r"cannot write .*j\.jsonl"):
            opened(tmp_path / "file" / "j.jsonl", resume=resume)
    assert (tmp_path / "file").read_text() == "kept"
    (tmp_path / "folder").mkdir()
    with pytest.raises(OutputError, match=r"cannot write .*folder: Is a directory"):
        opened(tmp_path / "folder", resume=True)
