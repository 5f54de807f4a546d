"""Large folders: the table and its parts, resuming, listing without listing everything first, sizes and types."""

import copy
import csv
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from disks import files_of_at_most
from folders import run_folder, write_pictures
from hypothesis import given
from hypothesis import strategies as st
from networks import classifier
from PIL import Image
from torch import Tensor, nn
from torchvision import transforms
from torchvision.transforms._presets import ImageClassification

import camkit
from camkit.cli import main
from camkit.engine.streams import Task, in_order
from camkit.errors import InputError, OutputError, as_cell, from_cell
from camkit.images import listing
from camkit.images.listing import Pictures, find_pictures
from camkit.methods import register_method
from camkit.models import LoadedModel
from camkit.scale import read
from camkit.scale.job import Written
from camkit.scale.table import Bundle, Table, row_of

pq = pytest.importorskip("pyarrow.parquet")

TABLES = ["results.parquet", "results.csv"]
SIDE = 16


@pytest.fixture
def tiny() -> LoadedModel:
    trunk = nn.Sequential(nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.ReLU())
    preprocess = transforms.Compose([transforms.Resize((SIDE, SIDE)), transforms.ToTensor()])
    return LoadedModel(classifier(trunk, classes=4), "tiny", preprocess, ("a", "b", "c", "d"))


def tabulate(model: LoadedModel, folder: Path, table: Path, **options: Any) -> list[Any]:
    settings: dict[str, Any] = {"layer": ["0"], "batch_size": 4, **options}
    return list(run_folder(model, [folder], None, table=table, **settings))


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("camkit.scale.table._ROWS", 8)


def content(table: Path) -> list[tuple[Any, ...]]:
    """Return every row of a table as values that can be compared, in the order of the pictures."""
    if table.suffix == ".csv":
        with table.open(newline="") as lines:
            rows = [tuple(row) for row in csv.reader(lines)][1:]
        return sorted(rows)
    return sorted(tuple(map(repr, row.values())) for row in pq.read_table(table).to_pylist())


def parts(table: Path) -> list[Path]:
    return sorted(table.glob("part-*.parquet"))


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_read_back_as_the_explanations_that_were_written(tmp_path, tiny, name):
    files = write_pictures(tmp_path / "in", 20)
    files[3].write_bytes(b"damaged")
    rows = tabulate(tiny, tmp_path / "in", tmp_path / name, target=["a", "c"])
    found = read(tmp_path / name)
    written = [row.explanation for row in rows if isinstance(row, Written)]
    assert isinstance(found, type(camkit.explain(tiny, [files[0]])))
    assert len(found) == len(written) == 38
    for one, other in zip(found, written, strict=True):
        same = ("source", "target", "label", "layer", "layer_reason", "method", "status", "box", "quantity", "extent")
        assert [getattr(one, part) for part in same] == [getattr(other, part) for part in same]
        assert (one.score, one.probability) == pytest.approx((other.score, other.probability))
        assert np.abs(one.raw - other.raw).max() <= 0.001 * np.abs(other.raw).max()
        assert np.abs(one.heatmap - other.heatmap).max() < 0.01
        assert one.overlay().shape == other.overlay().shape
    assert len(content(tmp_path / name)) == 39
    assert [row for row in content(tmp_path / name) if "error" in "".join(map(str, row))]


@pytest.mark.parametrize("name", [*TABLES, "bundle"])
def test_a_table_keeps_where_the_cells_are_drawn_and_what_its_numbers_are(tmp_path, tiny, name):
    """On 17 pixels, cells in the middle of their strides are not spread evenly."""
    (file,) = write_pictures(tmp_path / "in", 1)
    model = replace(tiny, preprocess=transforms.Compose([transforms.Resize((17, 17)), transforms.ToTensor()]))
    own = register_method("squares", unit="Sums of squares")
    own(lambda _, gradients: gradients.mean((2, 3), keepdim=True))
    try:
        written = replace(camkit.explain(model, file, "0", method="squares"), without_picture=-0.25)
        even = camkit.explain(model, file, "0", method="squares", spread="even")
    finally:
        del camkit.METHODS["squares"]
    assert written.placement.positions
    assert np.abs(even.heatmap - written.heatmap).max() > 0.05
    if name == "bundle":
        bundle = Bundle(tmp_path / name, {})
        bundle.add(written, {})
        bundle.close()
    else:
        with Table(tmp_path / name, {}) as table:
            table.append([row_of(written)])
    (found,) = read(tmp_path / name)
    assert found.placement == written.placement
    assert np.abs(found.heatmap - written.heatmap).max() < 2e-3
    assert (found.without_picture, found.beside_picture) == (-0.25, written.beside_picture)
    assert found.caption() == written.caption()
    assert found.unit == "Sums of squares"


@pytest.mark.parametrize("name", TABLES)
def test_maps_of_any_scale_and_without_numbers_survive(tmp_path, tiny, name):
    write_pictures(tmp_path / "in", 2)
    with torch.no_grad():
        tiny.module[3].weight *= 1e-7
    tabulate(tiny, tmp_path / "in", tmp_path / name)
    small = read(tmp_path / name)[0]
    assert 0 < np.abs(small.raw).max() < 1e-6
    assert len(np.unique(small.raw)) > 10
    with torch.no_grad():
        tiny.module[3].weight[0] = float("nan")
    tabulate(tiny, tmp_path / "in", tmp_path / name, target=[0], overwrite=True)
    broken = read(tmp_path / name)[0]
    assert broken.status == "non_finite"
    assert np.isnan(broken.raw).any()


@pytest.mark.extended
def test_a_parquet_table_is_one_that_pandas_reads(tmp_path, tiny):
    pandas = pytest.importorskip("pandas")
    write_pictures(tmp_path / "in", 10)
    tabulate(tiny, tmp_path / "in", tmp_path / "t.parquet")
    frame = pandas.read_parquet(tmp_path / "t.parquet")
    assert len(frame) == 10
    columns = "path label score probability layer method status box peak raw shape"
    assert set(columns.split()) < {*frame.columns}
    assert frame.raw[0].dtype == np.float16
    assert frame.raw[0].reshape(frame["shape"][0]).shape == (SIDE // 2, SIDE // 2)


def test_a_table_without_pyarrow_is_one_sentence_and_csv_needs_none(tmp_path, tiny, monkeypatch):
    write_pictures(tmp_path / "in", 2)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(InputError, match=r"pip install 'camkit\[table\]', or name a table that ends in .csv"):
        tabulate(tiny, tmp_path / "in", tmp_path / "t.parquet")
    assert len(tabulate(tiny, tmp_path / "in", tmp_path / "t.csv")) == 2


def test_a_map_of_all_pixels_fits_into_a_csv(tmp_path, tiny):
    write_pictures(tmp_path / "in", 2)
    enlarge = transforms.Compose([transforms.Resize((200, 200)), transforms.ToTensor()])
    model = LoadedModel(tiny.module, "tiny", enlarge, None)
    tabulate(model, tmp_path / "in", tmp_path / "t.csv", layer=None, method="fullgrad")
    assert max(map(len, (tmp_path / "t.csv").read_text().splitlines())) > 131_072  # Python's limit for a cell
    assert [row.raw.shape for row in read(tmp_path / "t.csv")] == [(200, 200)] * 2
    assert tabulate(model, tmp_path / "in", tmp_path / "t.csv", layer=None, method="fullgrad", resume=True) == []


@pytest.mark.parametrize("name", TABLES)
def test_names_with_line_ends_or_that_are_no_text_stay_different(tmp_path, tiny, name):
    (original,) = write_pictures(tmp_path / "in", 1)
    names = [b"a\xff.png", b"a\xfe.png", 'ä\n".png'.encode(), b"a\nb.png", b"a\rb.png", b"a\r\nb.png", b'a,"b.png']
    for other in map(os.fsdecode, names):
        original.with_name(other).write_bytes(original.read_bytes())
    assert len(tabulate(tiny, tmp_path / "in", tmp_path / name)) == 8
    found = {Path(row.source).name for row in read(tmp_path / name)}
    assert len(found) == 8
    assert {os.fsdecode(each) for each in names[2:]} < found
    assert tabulate(tiny, tmp_path / "in", tmp_path / name, resume=True) == []


def test_a_damaged_table_is_one_sentence_when_it_is_read(tmp_path, tiny):
    write_pictures(tmp_path / "in", 20)
    tabulate(tiny, tmp_path / "in", tmp_path / "t.parquet")
    damaged = parts(tmp_path / "t.parquet")[1]
    damaged.write_bytes(damaged.read_bytes()[:-100])
    with pytest.raises(InputError, match=f"{damaged.name} cannot be read"):
        read(tmp_path / "t.parquet")
    with pytest.raises(InputError, match="there is no table"):
        read(tmp_path / "none.parquet")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(InputError):
        read(tmp_path / "other.csv")
    table = tmp_path / "t.csv"
    tabulate(tiny, tmp_path / "in", table)
    cut = b",".join(table.read_bytes().split(b",")[:-5])
    table.write_bytes(cut)
    with pytest.raises(InputError, match=r"t\.csv cannot be read"):
        tabulate(tiny, tmp_path / "in", table, resume=True)
    assert table.read_bytes() == cut


@pytest.mark.parametrize("name", TABLES)
def test_a_resumed_run_explains_what_is_missing_and_nothing_twice(tmp_path, tiny, name):
    files = write_pictures(tmp_path / "in", 30)
    whole = tmp_path / f"whole-{name}"
    tabulate(tiny, tmp_path / "in", whole, batch_size=1)  # the last digits depend on the other pictures of a batch
    for file in files[10:15]:
        file.rename(file.with_suffix(".away"))
    tabulate(tiny, tmp_path / "in", tmp_path / name, batch_size=1)
    for file in files[10:15]:
        file.with_suffix(".away").rename(file)
    rows = tabulate(tiny, tmp_path / "in", tmp_path / name, batch_size=1, resume=True)
    assert [Path(row.explanation.source) for row in rows] == files[10:15]
    assert content(tmp_path / name) == content(whole)
    assert tabulate(tiny, tmp_path / "in", tmp_path / name, resume=True) == []


@pytest.mark.parametrize("name", TABLES)
def test_a_run_that_ends_early_keeps_whole_pictures_and_its_table_is_read_meanwhile(tmp_path, tiny, name):
    files = write_pictures(tmp_path / "in", 30)
    with run_folder(
        tiny, [tmp_path / "in"], None, table=tmp_path / name, layer=["0"], target=[0, 2], batch_size=4
    ) as run:
        for _ in range(21):  # the first target of the eleventh picture, which belongs to the third pass
            next(run)
        assert [row.source for row in read(tmp_path / name)][::2] == list(map(str, files[:8])), "of two whole passes"
        assert not parts(tmp_path / name)
    assert len(content(tmp_path / name)) == 16
    assert not (tmp_path / f".{name}.unfinished").exists()
    tabulate(tiny, tmp_path / "in", tmp_path / name, target=[0, 2], resume=True)
    tabulate(tiny, tmp_path / "in", tmp_path / f"whole-{name}", target=[0, 2])
    assert content(tmp_path / name) == content(tmp_path / f"whole-{name}")


def test_a_resumed_run_may_start_in_another_folder(tmp_path, tiny, monkeypatch):
    write_pictures(tmp_path / "in", 10)
    monkeypatch.chdir(tmp_path)
    for name in TABLES:
        tabulate(tiny, Path("in"), Path(name))
        (tmp_path / "deeper").mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / "deeper")
        assert tabulate(tiny, Path("../in"), Path("..", name), resume=True) == []
        assert read(Path("..", name))[0].picture is not None
        monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("change", ["weights", "method", "layers", "targets", "preprocessing", "labels", "smooth"])
def test_a_run_with_other_settings_does_not_continue_a_table(tmp_path, tiny, change):
    write_pictures(tmp_path / "in", 10)
    tabulate(tiny, tmp_path / "in", tmp_path / "results.csv")
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    prepare, weights = tiny.preprocess, copy.deepcopy(tiny.module)
    weights[3].bias.data[0] += 1e-6
    model = {
        "labels": replace(tiny, labels=("a", "b", "c", "x")),
        "preprocessing": replace(tiny, preprocess=lambda picture: prepare(picture) * 0.99),
        "weights": replace(tiny, module=weights),
    }.get(change, tiny)
    settings = {
        "method": {"method": "layercam"},
        "layers": {"layer": ["0.1"]},
        "targets": {"target": [1]},
        "smooth": {"smooth": "eigen"},
    }
    options = settings.get(change, {})
    with pytest.raises(InputError, match=f"cannot be continued: it was made with different settings .{change}.;"):
        tabulate(model, tmp_path / "in", tmp_path / "results.csv", resume=True, **options)
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


@pytest.mark.parametrize("name", TABLES)
def test_an_unwritable_table_is_one_sentence_before_anything_is_computed(tmp_path, tiny, name, capsys):
    write_pictures(tmp_path / "in", 2)
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"cannot write .*: .*/file is a file, not a folder$"):
        tabulate(tiny, tmp_path / "in", tmp_path / "file" / name)
    taken = tmp_path / name
    taken.write_text("") if name.endswith("parquet") else taken.mkdir()
    with pytest.raises(OutputError, match="choose another name"):
        tabulate(tiny, tmp_path / "in", taken, overwrite=True)


@pytest.mark.extended
@pytest.mark.parametrize(("name", "limit"), [("results.parquet", 4000), ("results.csv", 9000)])
def test_a_full_disk_is_one_sentence_and_nothing_is_lost(tmp_path, tiny, name, limit):
    write_pictures(tmp_path / "in", 60)
    said = "File too large.*finished rows are kept, and resume=True continues from there"
    with files_of_at_most(limit), pytest.raises(OutputError, match=said) as caught:
        tabulate(tiny, tmp_path / "in", tmp_path / name, target=[0, 2])
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("camkit")], caught
    tabulate(tiny, tmp_path / "in", tmp_path / name, target=[0, 2], resume=True)
    tabulate(tiny, tmp_path / "in", tmp_path / f"whole-{name}", target=[0, 2])
    assert content(tmp_path / name) == content(tmp_path / f"whole-{name}")


@pytest.mark.extended
@pytest.mark.parametrize(("name", "sent"), [("results.parquet", signal.SIGKILL), ("results.csv", signal.SIGINT)])
def test_a_run_that_is_killed_again_and_again_gives_the_table_of_one_that_is_not(tmp_path, tiny, name, sent):
    write_pictures(tmp_path / "in", 200)
    command = "import sys; from camkit.cli import main; from camkit.scale import table; table._ROWS = 8; "
    call = [sys.executable, "-c", f"{command}sys.exit(main(sys.argv[1:]))", "in", "--model", "demo-fair", "--target"]
    call += ["0", "--target", "2", "--batch-size", "4", "--no-pictures", "--resume", "--json", "--table"]
    chance = np.random.default_rng(0)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    for _ in range(3):
        with subprocess.Popen([*call, name], cwd=tmp_path, **pipes) as process:
            assert process.stdout is not None
            for _ in range(int(chance.integers(1, 90))):
                process.stdout.readline()
            process.send_signal(sent)
            process.stdout.read()
    for table in (name, f"whole-{name}"):
        subprocess.run([*call, table], cwd=tmp_path, check=True, capture_output=True, timeout=300)
    assert len(content(tmp_path / name)) == 400
    assert content(tmp_path / name) == content(tmp_path / f"whole-{name}")


@pytest.mark.parametrize("kind", [str, Path])
def test_a_run_is_not_resumed_if_the_reference_picture_has_changed(tmp_path, tiny, kind):
    first, second, *_ = (picture.read_bytes() for picture in write_pictures(tmp_path / "in", 3))
    reference = tmp_path / "reference.png"
    options = {"table": tmp_path / "t.csv", "target": [camkit.targets.similar_to(kind(reference))]}
    reference.write_bytes(first)
    tabulate(tiny, tmp_path / "in", **options)
    assert tabulate(tiny, tmp_path / "in", **options, resume=True) == []
    reference.write_bytes(second)
    with pytest.raises(InputError, match=r"it was made with different settings \(targets\)"):
        tabulate(tiny, tmp_path / "in", **options, resume=True)


def test_a_huge_folder_is_listed_in_blocks_each_picture_once(tmp_path, monkeypatch):
    files = write_pictures(tmp_path, 50)
    assert find_pictures([tmp_path]) == files
    monkeypatch.setattr(listing, "_SORTED_AT_ONCE", 3)
    assert sorted(find_pictures([tmp_path])) == files
    assert Pictures([tmp_path]).count() == 50
    assert Pictures([tmp_path]).first(2) == find_pictures([tmp_path])[:2]


def test_pictures_that_are_reached_in_several_ways_are_listed_once(tmp_path, monkeypatch):
    files = [file.relative_to(tmp_path) for file in write_pictures(tmp_path, 25)]
    monkeypatch.chdir(tmp_path)
    for patterns in ([".", "001"], ["000", "."], [files[3], "."], [".", files[3]], ["*/*.png", "."], [".", "."]):
        found = find_pictures(patterns)
        assert sorted(path.absolute() for path in found) == [file.absolute() for file in files], patterns


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    smooth = np.add.outer(np.arange(600), np.arange(800))[..., None].repeat(3, 2) % 256
    for suffix in ("jpg", "png", "jpeg"):
        (tmp_path / "in").mkdir(exist_ok=True)
        Image.fromarray(smooth.astype(np.uint8)).save(tmp_path / "in" / f"{suffix}.{suffix}")
    return tmp_path / "in"


def drawn(photos: Path, *options: object) -> dict[str, tuple[int, int]]:
    out = photos.parent / "out"
    assert main([*map(str, [photos, "--model", "demo-fair", "--out", out, *options])]) == 0
    return {file.name: cv2.imread(str(file)).shape[1::-1] for file in sorted(out.iterdir())}


def test_overlays_have_the_type_and_size_of_their_pictures_unless_asked(photos):
    names = ["jpeg.jpeg.gradcam", "jpg.gradcam", "png.png.gradcam"]
    kept = {f"{name}.{kind}": (800, 600) for name, kind in zip(names, ("jpg", "jpg", "png"), strict=True)}
    assert drawn(photos, "--style", "overlay") == kept
    assert drawn(photos, "--style", "overlay", "--max-side", "400") == dict.fromkeys(kept, (400, 300))
    assert drawn(photos, "--style", "overlay", "--max-side", 0) == kept
    assert drawn(photos, "--style", "overlay", "--format", "png").keys() == {*kept, *(f"{name}.png" for name in names)}
    named = photos.parent / "heat.png"
    assert main([str(photos / "jpg.jpg"), "--model", "demo-fair", "-s", "overlay", "-o", str(named)]) == 0
    assert named.read_bytes().startswith(b"\x89PNG")


def test_max_side_is_off_in_python_and_keeps_the_heat_in_its_place(photos):
    found = camkit.explain("demo-fair", photos / "jpg.jpg")
    assert found.overlay().shape == (600, 800, 3)
    for most in (100, 300, 500, 799, 800, 5000):
        reduced = found.overlay(max_side=most)
        assert max(reduced.shape[:2]) == min(most, 800)
        whole = cv2.resize(found.overlay(), reduced.shape[1::-1], interpolation=cv2.INTER_AREA)
        assert np.abs(reduced.astype(int) - whole).mean() < 6
    for wrong in (0, -1):
        with pytest.raises(InputError, match="max_side must be a whole number from 1"):
            found.overlay(max_side=wrong)


@pytest.mark.parametrize("kind", ["JPEG", "MPO"])
def test_a_draft_is_a_smaller_picture_with_boxes_in_pixels_of_the_file(tmp_path, kind):
    """Phones write files with several views, which Pillow calls MPO."""
    view = Image.fromarray(cv2.resize(np.random.default_rng(0).integers(0, 256, (9, 12, 3), np.uint8), (2400, 1800)))
    view.save(tmp_path / "big.jpg", kind, **({"save_all": True, "append_images": [view]} if kind == "MPO" else {}))
    model = camkit.load_model("demo-fair")
    model = LoadedModel(model.module, "fair", ImageClassification(crop_size=128, resize_size=144), model.labels)
    (whole,) = camkit.explain_many(model, [tmp_path / "big.jpg"])
    (draft,) = camkit.explain_many(model, [tmp_path / "big.jpg"], draft=True)
    assert whole.reduction == 1
    assert draft.reduction == 4  # 450 pixels are more than twice 144, 225 are not
    assert draft.picture.shape == (450, 600, 3)
    assert draft.to_dict()["box"] == pytest.approx(whole.to_dict()["box"], abs=4)
    assert draft.target == whole.target
    assert np.corrcoef(draft.heatmap.ravel(), whole.heatmap.ravel())[0, 1] > 0.99


def test_a_draft_is_not_read_for_a_preprocessing_that_crops_pixels_first(tmp_path, tiny):
    write_pictures(tmp_path, 1, side=1200, suffix="jpg")[0].rename(tmp_path / "big.jpg")
    steps = [transforms.CenterCrop(256), transforms.Resize(32), transforms.ToTensor()]
    for preprocess in (transforms.Compose(steps), transforms.Compose([transforms.Pad(20), *steps[1:]])):
        model = LoadedModel(tiny.module, "tiny", preprocess, tiny.labels)
        (whole,) = camkit.explain_many(model, [tmp_path / "big.jpg"], target_layer="0")
        (draft,) = camkit.explain_many(model, [tmp_path / "big.jpg"], target_layer="0", draft=True)
        assert draft.reduction == 1
        assert draft.to_dict() == whole.to_dict()


@pytest.mark.parametrize("name", TABLES)
def test_the_command_writes_the_table_alone(tmp_path, capsys, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    write_pictures(tmp_path / "in", 4, side=64)
    (tmp_path / "in" / "bad.png").write_bytes(b"")
    call = ["in", "--model", "demo-fair", "--table", name, "--no-pictures"]
    assert main(call) == 2
    said = capsys.readouterr()
    assert "4 explained, 1 failed, 0 empty" in said.out
    assert f"wrote {name}" in said.out
    assert "bad.png" in said.err
    assert not (tmp_path / "camkit-out").exists()
    assert main(call) == 2
    assert "pass --resume to continue it, or --overwrite to replace it" in capsys.readouterr().err
    assert main([*call, "--resume"]) == 0
    assert "5 finished in an earlier run, 1 of them with an error (not tried again)" in capsys.readouterr().out
    assert main([*call, "--resume", "--method", "layercam"]) == 2
    assert "different settings (method); choose another --table" in capsys.readouterr().err
    assert main([*call, "--overwrite", "--target", "car"]) == 2
    assert [row.label for row in read(name)] == ["car"] * 4


def test_a_picture_that_lacks_one_of_its_drawings_is_explained_again(tmp_path, tiny):
    files = write_pictures(tmp_path / "in", 3)
    out = tmp_path / "out" / files[1].parent.name
    out.mkdir(parents=True)
    foreign = out / "00001.png.gradcam.2-c.png"
    foreign.write_bytes(b"of somebody else")
    options: dict[str, Any] = {"table": tmp_path / "t.csv", "target": ["a", "c"]}
    rows = list(run_folder(tiny, [tmp_path / "in"], tmp_path / "out", **options))
    assert [isinstance(row, Written) for row in rows] == [True, True, True, False, True, True]
    foreign.unlink()
    again = list(run_folder(tiny, [tmp_path / "in"], tmp_path / "out", resume=True, **options))
    assert [row.explanation.source for row in again] == [str(files[1])] * 2
    assert len(read(tmp_path / "t.csv")) == 6
    assert foreign.exists()


FORMULAS = [
    *("=1+1.png", "+1+1.png", "-1+1.png", "@SUM(A1).png", "\t=1.png", "\r=1.png", "'=1.png", "''-a.png"),
    "\uff1d1.png",
]
PLAIN = ["a=1.png", "'a.png", "1-2.png", "a\nb.png", "a\rb.png", 'a,"b.png']


def test_no_cell_of_a_csv_is_a_formula_and_the_table_is_read_back(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in FORMULAS + PLAIN:
        write_pictures(Path("in"), 1)[0].rename(name)
    Path("labels.json").write_text(json.dumps(["-0.5", "=cmd", "-1e3", "@x"]))
    call = [*[f"./{name}" for name in FORMULAS + PLAIN], "--model", "demo-fair", "--labels", "labels.json", "-k", "4"]

    assert main([*call, "--csv", "-o", "out"]) == 0
    printed = capsys.readouterr().out
    shown = list(csv.DictReader(StringIO(printed, newline="")))
    assert len(printed.splitlines()) == 1 + len(shown), "names with line ends stay in one line"
    assert {"a\\nb.png", "a\\rb.png", 'a,"b.png'} < {row["source"] for row in shown}
    assert main([*call, "--table", "t.csv", "--no-pictures"]) == 0
    with Path("t.csv").open(newline="") as lines:
        stored = list(csv.DictReader(lines))

    for rows, column in ((shown, "source"), (stored, "path")):
        for row in rows:
            cells = [row[column], row["label"], row["error"], row["layer"]]
            assert not [
                cell for cell in cells if re.match(r"[=+@\-\t\r\uff1d]", cell) and not re.fullmatch(r"-[\d.e]+", cell)
            ]
        assert {row["label"] for row in rows} == {"-0.5", "'=cmd", "-1e3", "'@x"}
    assert {float(row["score"]) for row in shown} == {float(row["score"]) for row in stored}
    back = read("t.csv")
    assert {Path(row.source).name for row in back} == {*FORMULAS, *PLAIN}
    assert {row.label for row in back} == {"-0.5", "=cmd", "-1e3", "@x"}
    assert main([*call, "--table", "t.csv", "--no-pictures", "--resume"]) == 0
    assert (
        f"0 explained, 0 failed, 0 empty; {len(FORMULAS + PLAIN)} finished in an earlier run" in capsys.readouterr().out
    )


@given(st.text(st.sampled_from("'=+-@\t0.5ea"), max_size=6))
def test_a_cell_is_read_as_the_text_it_was_made_of(text):
    cell = as_cell(text)
    assert from_cell(cell) == text
    assert re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", cell) or cell[:1] not in ("=", "+", "-", "@", "\t")


def test_tasks_wait_while_those_before_them_hold_too_many_bytes():
    started: list[int] = []
    tasks = (
        Task(lambda number=number: started.append(number) or number, in_thread=True, size=40) for number in range(12)
    )
    results = in_order(tasks, workers=2, ahead=100, most=100)
    assert next(results) == 0
    time.sleep(0.1)
    assert max(started) <= 3
    assert list(results) == list(range(1, 12))


def test_results_that_wait_hold_a_bounded_number_of_bytes():
    made: list[int] = []
    tasks = (Task(lambda: made.append(1) or bytes(40), in_thread=True) for _ in range(40))
    before = threading.active_count()  # other tests of this process may have left threads
    results = in_order(tasks, workers=3, ahead=100, most=100, size_of=len)
    for count in range(1, 30):
        next(results)
        time.sleep(0.002)
        assert len(made) <= count + 2 + 3 + 1  # those that fit, one in each thread, and the one that is due
    results.close()
    assert threading.active_count() == before


@pytest.mark.parametrize("most", [100, 0])
def test_a_result_larger_than_all_room_still_comes(most: int):
    tasks = (Task(lambda: bytes(500), in_thread=True) for _ in range(5))
    assert [len(result) for result in in_order(tasks, workers=2, ahead=3, most=most, size_of=len)] == [500] * 5


def test_large_pictures_make_small_batches(tmp_path):
    sizes: list[int] = []

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Conv2d(3, 4, 8, stride=8)

        def forward(self, images: Tensor) -> Tensor:
            sizes.append(len(images))
            return self.features(images).mean((2, 3))

    pictures = [np.zeros((2000, 2000, 3), np.uint8)] * 9
    preprocess = lambda picture: torch.from_numpy(np.asarray(picture.resize((64, 64))).copy()).permute(2, 0, 1) / 255  # noqa: E731
    rows = list(camkit.explain_many(Net(), pictures, "features", preprocess=preprocess))
    assert len(rows) == 9
    assert max(sizes) == 2  # 15 MiB each; a batch may have 36
