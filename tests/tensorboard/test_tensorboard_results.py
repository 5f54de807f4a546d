"""What the commands and the examples write for TensorBoard, read back with its own reader."""

import io
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from disks import files_of_at_most
from PIL import Image
from torch import nn

import camkit
from camkit.cli import main
from camkit.errors import OutputError
from camkit.tensorboard import write_diagnosis, write_explanation

pytestmark = pytest.mark.extended

pytest.importorskip("tensorboard.backend")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter


def read(folder):
    found = EventAccumulator(str(folder), {"histograms": 0, "images": 0, "scalars": 0, "tensors": 0})
    found.Reload()
    return found


def picture(events, tag):
    (found,) = events.Images(tag)
    return np.asarray(Image.open(io.BytesIO(found.encoded_image_string)))


def said(events, tag):
    return events.Tensors(f"{tag}/text_summary")[0].tensor_proto.string_val[0].decode()


def test_explain_writes_the_pictures_that_it_draws(tmp_path):
    names = ("plane-sky", "car-sea")
    files = [str(camkit.scenes.scene_paths()[name]) for name in names]
    code = main(
        [*files, "--model", "demo-fair", "--top-k", "2", "--style", "side-by-side", "--format", "png",
         "--out", str(tmp_path / "out"), "--tensorboard", str(tmp_path / "runs")]
    )  # fmt: skip
    events = read(tmp_path / "runs")
    drawn = sorted((tmp_path / "out").glob("*.png"))

    assert code == 0
    assert sorted(events.Tags()["images"]) == [f"explain/{file.stem}" for file in drawn]
    assert len(drawn) == 4
    for file in drawn:
        with Image.open(file) as same:
            assert np.array_equal(picture(events, f"explain/{file.stem}"), np.asarray(same.convert("RGB")))


@pytest.mark.parametrize("options", [["--out", "out"], ["--table", "t.csv", "--no-pictures"]])
def test_each_explanation_has_a_tag_of_its_own(tmp_path, monkeypatch, options):
    monkeypatch.chdir(tmp_path)
    for folder, name in (("a", "plane-sky"), ("b", "car-sea")):
        Path("in", folder).mkdir(parents=True)
        shutil.copy(camkit.scenes.scene_paths()[name], f"in/{folder}/x.png")
    assert main(["in", "--model", "demo-fair", "--top-k", "3", "--tensorboard", "runs", *options]) == 0
    tags = read(tmp_path / "runs").Tags()["images"]
    assert len(tags) == 6
    drawn = [file.relative_to("out").with_suffix("") for file in Path("out").rglob("*.png")]
    assert not drawn or sorted(tags) == sorted(f"explain/{name.as_posix()}" for name in drawn)


def test_an_explanation_goes_to_a_writer_at_a_step(tmp_path):
    found = camkit.explain("demo-fair", camkit.scenes.scene_paths()["plane-sky"])
    with SummaryWriter(str(tmp_path)) as writer:
        for step in (3, 5):
            write_explanation(found, writer, step)
    events = read(tmp_path)

    (tag,) = events.Tags()["images"]
    assert tag == f"explain/{found.source}/plane"
    assert [one.step for one in events.Images(tag)] == [3, 5]


def test_diagnose_writes_its_table_and_its_findings(tmp_path):
    options = ["--model", "demo-fair", "--out", str(tmp_path / "out"), "--tensorboard", str(tmp_path / "runs")]
    main(["diagnose", *map(str, camkit.scenes.scene_paths().values()), *options])
    events = read(tmp_path / "runs")
    found = camkit.diagnose("demo-fair", list(camkit.scenes.scene_paths().values()))

    assert set(events.Tags()["histograms"]) == {
        *(f"activations/{row.name}" for row in found.rows),
        *(f"gradients/{row.name}" for row in found.rows if row.gradients is not None),
    }
    for row in found.rows:
        told = events.Histograms(f"activations/{row.name}")[0].histogram_value
        assert (told.num, told.min, told.max) == (row.activations.count, row.activations.low, row.activations.high)
        assert list(told.bucket) == list(row.activations.histogram.counts)
        if row.dead is not None:
            assert events.Scalars(f"dead_share/{row.name}")[0].value == pytest.approx(len(row.dead) / row.channels)
    with Image.open(tmp_path / "out" / "diagnose.png") as same:
        assert np.array_equal(picture(events, "diagnosis"), np.asarray(same.convert("RGB")))
    assert said(events, "findings")


def test_the_findings_of_a_broken_model_are_text(tmp_path):
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    with torch.no_grad():
        net[4].weight[0, 0] = torch.nan
    found = camkit.diagnose(net, (torch.randn(8, 3, 9, 9), torch.arange(8) % 2), training=True)
    write_diagnosis(found, tmp_path, step=4)
    events = read(tmp_path)

    assert found.findings
    assert events.Images("diagnosis")[0].step == 4
    assert all(one.text in said(events, "findings") for one in found.findings)
    norms = {row.name: row.parameter_gradient for row in found.rows if row.parameter_gradient is not None}
    for name, norm in norms.items():
        if np.isfinite(norm):
            assert events.Scalars(f"gradient_norm/{name}")[0].value == pytest.approx(norm, rel=1e-6)


def test_check_writes_its_verdict_its_measures_and_the_worst_pictures(tmp_path):
    data = camkit.scenes.write_scenes(tmp_path / "scenes", 10)
    config = tmp_path / "camkit.toml"
    config.write_text("[check]\nper_class = 10\npastes = 1\n[limits]\nleast_pictures = 10\n")
    code = main(
        ["check", str(data), "--model", "demo-biased", "--config", str(config), "--out", str(tmp_path / "out"),
         "--tensorboard", str(tmp_path / "runs")]
    )  # fmt: skip
    events, summary = read(tmp_path / "runs"), (tmp_path / "out" / "summary.md").read_text("utf-8")

    assert code == 1
    assert said(events, "check").strip() == summary.strip()
    tags = events.Tags()["scalars"]
    for what in ("accuracy", "gap", "sufficiency", "skill"):
        assert f"check/{what}/all classes" in tags
        assert f"check/{what}/plane" in tags
    assert events.Scalars("check/gap/all classes")[0].value > 0.5
    strips = [tag for tag in events.Tags()["images"] if tag.startswith("worst/")]
    assert len(strips) == 12 // 4 * 4
    for tag in strips:
        wide = picture(events, tag)
        assert wide.shape[1] > 3 * wide.shape[0]
        assert tag.split("/")[1] in said(events, tag)


@pytest.mark.parametrize("command", [[], ["diagnose"]])
def test_a_folder_that_cannot_be_written_is_an_error_before_anything_is_computed(tmp_path, capsys, command):
    (tmp_path / "file").write_text("in the way")
    options = ["--model", "demo-fair", "--out", str(tmp_path / "out"), "--tensorboard", str(tmp_path / "file")]
    code = main([*command, str(camkit.scenes.scene_paths()["plane-sky"]), *options])

    assert code == OutputError.exit_code
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert not list((tmp_path / "out").glob("*"))


def test_events_that_do_not_fit_are_an_error_and_all_else_is_written(tmp_path, capsys):
    (tmp_path / "pictures").mkdir()
    names = [f"{number}-{name}" for number in range(5) for name in camkit.scenes.scene_paths()]
    for name in names:  # so small that each picture fits, but the events of four do not
        picture = camkit.scenes.scene_paths()[name.partition("-")[2]]
        Image.open(picture).resize((160, 160)).save(tmp_path / "pictures" / f"{name}.png")
    folders = [tmp_path / "pictures", "--out", tmp_path / "out", "--tensorboard", tmp_path / "events"]
    with files_of_at_most(120_000):
        code = main([*map(str, folders), "--model", "demo-fair", "--style", "overlay"])

    captured = capsys.readouterr()
    assert code == OutputError.exit_code
    assert captured.err == f"camkit: cannot write events into {tmp_path / 'events'}: File too large\n"
    assert len(list((tmp_path / "out").glob("*.gradcam.png"))) == len(names) == 30
    assert all(f"{name}.png.gradcam.png" in captured.out for name in names)
