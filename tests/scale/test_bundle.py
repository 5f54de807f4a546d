"""A folder of evidence: what is in it, that it reads back exactly, and that changes are noticed."""

import hashlib
import json
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest

import camkit
from camkit.cli import main
from camkit.errors import InputError


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    for name in ("plane-sky", "car-sea"):
        shutil.copy(camkit.scenes.scene_paths()[name], folder)
    (folder / "broken.jpg").write_text("no picture")
    return folder


@pytest.fixture(scope="module")
def bundle(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evidence") / "new"
    call = [str(photos), "--model", "demo-fair", "-t", "plane", "-t", "bird", "--bundle", str(folder), "--no-pictures"]
    assert main(call) == 2  # one picture cannot be read
    return folder


def test_the_manifest_says_what_was_computed_with_what(bundle: Path, photos: Path) -> None:
    about = json.loads((bundle / "manifest.json").read_text())
    assert about["versions"]["camkit"] == camkit.__version__
    assert {"python", "torch", "numpy"} <= about["versions"].keys()
    assert {"model", "weights", "preprocessing", "method", "layers", "targets"} <= about["made_with"].keys()
    assert [Path(row["path"]).name for row in about["explanations"]] == ["car-sea.jpg"] * 2 + ["plane-sky.jpg"] * 2
    assert [row["label"] for row in about["explanations"]] == ["plane", "bird"] * 2
    assert [Path(failure["path"]).name for failure in about["failures"]] == ["broken.jpg"]
    row = about["explanations"][3]
    alone = camkit.explain("demo-fair", photos / "plane-sky.jpg", target="bird")
    assert (row["layer"], row["method"], row["status"]) == (alone.layer, alone.method, alone.status)
    assert row["score"] == pytest.approx(alone.score, abs=1e-4)
    assert row["picture_sha256"] == hashlib.sha256((photos / "plane-sky.jpg").read_bytes()).hexdigest()


def test_every_file_has_its_checksum_and_is_read_back_exactly(bundle: Path) -> None:
    rows = json.loads((bundle / "manifest.json").read_text())["explanations"]
    files = [file for row in rows for file in row["files"].values()]
    assert [*sorted(file["name"] for file in files), "manifest.json"] == sorted(path.name for path in bundle.iterdir())
    assert all(file["sha256"] == hashlib.sha256((bundle / file["name"]).read_bytes()).hexdigest() for file in files)
    assert rows[2]["files"]["overlay"]["name"] == "0003-plane-sky.plane.overlay.png"
    found = camkit.scale.read(bundle)
    for explanation, row in zip(found, rows, strict=True):
        assert np.array_equal(explanation.raw, np.load(bundle / row["files"]["raw"]["name"]))
        assert (explanation.label, explanation.score, explanation.layer) == (row["label"], row["score"], row["layer"])
    drawn = cv2.imread(str(bundle / rows[2]["files"]["overlay"]["name"]))[..., ::-1]
    assert np.abs(found[2].overlay().astype(int) - drawn).max() <= 1
    assert cv2.imread(str(bundle / rows[2]["files"]["figure"]["name"])) is not None


def test_a_missing_map_and_a_damaged_manifest_are_refused(bundle: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(bundle, folder)
    next(folder.glob("0001*.npy")).unlink()
    with pytest.raises(InputError, match=r"manifest\.json cannot be read: .*0001"):
        camkit.scale.read(folder)
    (folder / "manifest.json").write_text("{}")
    with pytest.raises(InputError, match=r"manifest\.json cannot be read"):
        camkit.scale.read(folder)


def test_a_folder_that_holds_something_is_kept(
    bundle: Path, photos: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    before = {file.name: file.stat().st_mtime_ns for file in bundle.iterdir()}
    call = [str(photos / "car-sea.jpg"), "-m", "demo-fair", "--bundle", str(bundle), "-o", str(tmp_path)]
    assert main(call) == 2
    assert "is not empty; name another folder, or pass --overwrite" in capsys.readouterr().err
    assert {file.name: file.stat().st_mtime_ns for file in bundle.iterdir()} == before
    assert list(tmp_path.iterdir()) == []
