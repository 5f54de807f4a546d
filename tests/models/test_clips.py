"""Models of clips by name: frames and preprocessing as their library's, and heat for each frame."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import attention_oracles as oracles
import cv2
import numpy as np
import pytest
import torch
import torchvision
from folders import run_folder
from refusals import refused
from tiers import Extra
from tiny_models import gradient_times_activation, lively, saved_once

import camkit
from camkit.cli import main
from camkit.errors import ImageError, InputError
from camkit.images.prepare import prepare
from camkit.models import load_model
from camkit.models.modules import taking_clips

t = Extra("transformers")
FAMILIES = ["videomae", "vivit", "timesformer", "vjepa2"]
FEW = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32, "image_size": 32,
    "num_frames": 8, "num_labels": 3,
}  # fmt: skip
TALL, WIDE, FRAMES, RATE = 48, 64, 21, 12


def made(family: str, **options: Any) -> tuple[Any, Any]:
    """Return a tiny random model of a family and the processor that its folders on the hub name."""
    torch.manual_seed(0)
    sides = {"size": {"shortest_edge": 36}, "crop_size": {"height": 32, "width": 32}}
    if family == "videomae":
        config = t.VideoMAEConfig(patch_size=8, tubelet_size=2, **FEW, **options)
        return t.VideoMAEForVideoClassification(config), t.VideoMAEImageProcessor(**sides)
    if family == "vivit":
        config = t.VivitConfig(tubelet_size=[2, 8, 8], **FEW, **options)
        return t.VivitForVideoClassification(config), t.VivitImageProcessor(**sides)
    if family == "vjepa2":
        few = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_pooler_layers": 1}
        parts = {"patch_size": 8, "crop_size": 32, "frames_per_clip": 8, "tubelet_size": 2, "num_labels": 3}
        predictor = {"pred_hidden_size": 48, "pred_num_attention_heads": 4, "pred_num_hidden_layers": 1}
        config = t.VJEPA2Config(**few, **parts, **predictor, **options)
        return t.VJEPA2ForVideoClassification(config), t.VJEPA2VideoProcessor(**sides)
    config = t.TimesformerConfig(patch_size=8, **FEW, **options)
    return t.TimesformerForVideoClassification(config), t.VideoMAEImageProcessor(**sides)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the folder of a family's tiny model; each is saved once."""
    return saved_once(tmp_path_factory, lambda family, _: made(family))


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a video in which a bright square moves to the right."""
    file = tmp_path_factory.mktemp("clip") / "clip.mp4"
    frames = np.full((FRAMES, TALL, WIDE, 3), 60, np.uint8)
    for number, frame in enumerate(frames):
        frame[10:26, 2 * number : 2 * number + 16] = (40, 200, 230)
    write(file, frames)
    return file


def write(file: Path, frames: Iterable[np.ndarray], rate: int = RATE) -> None:
    first, *others = frames
    kind = cv2.VideoWriter.fourcc(*("mp4v" if file.suffix == ".mp4" else "MJPG"))
    writer = cv2.VideoWriter(str(file), kind, rate, first.shape[1::-1])
    for frame in (first, *others):
        writer.write(frame)
    writer.release()


def read(file: Path) -> list[np.ndarray]:
    capture, frames = cv2.VideoCapture(str(file)), []
    while (got := capture.read())[0]:
        frames.append(cv2.cvtColor(got[1], cv2.COLOR_BGR2RGB))
    return frames


@pytest.mark.extended
@pytest.mark.parametrize("family", FAMILIES)
def test_a_clip_is_sampled_and_prepared_as_its_library_does(saved, clip, family):
    loaded = load_model(f"hf:{saved(family)}", device="cpu")

    row = camkit.explain(loaded, clip)

    frames = read(clip)
    processor = t.AutoVideoProcessor.from_pretrained(saved(family))
    metadata = t.video_utils.VideoMetadata(total_num_frames=len(frames), fps=RATE)
    numbers = processor.sample_frames(metadata, num_frames=8)
    sampled = np.stack([frames[number] for number in numbers])
    (prepared,) = processor(videos=[sampled], return_tensors="pt", do_sample_frames=False).values()
    model = t.AutoModelForVideoClassification.from_pretrained(saved(family)).eval()
    logits = model(prepared).logits[0]
    assert [frame.number for frame in row.frames] == [int(number) + 1 for number in numbers]
    assert torch.equal(row.shown, prepared[0].transpose(0, 1))
    assert row.target == int(logits.argmax())
    assert row.score == pytest.approx(float(logits.max().detach()), abs=1e-5)
    assert row.raw.shape == ((8 if family == "timesformer" else 4), 4, 4)
    assert row.heatmap.shape == (8, 32, 32)


@pytest.mark.extended
def test_tables_and_bundles_keep_the_frames_of_a_clip(saved, clip, tmp_path):
    loaded = load_model(f"hf:{saved('videomae')}", device="cpu")
    for name in ("t.csv", "t.parquet"):
        list(run_folder(loaded, [clip], None, table=tmp_path / name, bundle=tmp_path / f"bundle of {name}"))

    written = camkit.explain(loaded, clip)

    assert written.frames[-1].time
    for file in tmp_path.iterdir():
        if not file.name.startswith("."):
            (found,) = camkit.scale.read(file)
            assert found.frames == written.frames
            assert found.placement == written.placement
            assert np.abs(found.heatmap - written.heatmap).max() < 2e-3
            assert np.abs(found.overlay().astype(int) - replace(written, shown=None).overlay()).max() <= 8


@pytest.mark.extended
@pytest.mark.parametrize("family", ["videomae", "vivit", "timesformer"])
def test_the_attention_of_a_clip_equals_the_slow_reference(family):
    """TimeSformer's attention over all patches and frames counts the frames of a patch first."""
    joint = {"attention_type": "joint_space_time"} if family == "timesformer" else {}
    model = lively(made(family, attn_implementation="eager", **joint)[0])
    image = torch.randn(1, 3, 8, 32, 32)

    row = camkit.explain(taking_clips(model, "pixel_values"), image, target=2, method="chefer" if joint else "auto")

    output = model(image.transpose(1, 2), output_attentions=True)
    gradients = torch.autograd.grad(output.logits[0, 2], output.attentions)
    prefix = 0 if family == "videomae" else 1
    rows = np.zeros(output.attentions[0].shape[-1])
    rows[: prefix or None] = 1 / (prefix or len(rows))
    both = [[layer[0].detach().double().numpy() for layer in each] for each in (output.attentions, gradients)]
    cells = oracles.chefer(*both, rows)[prefix:]
    expected = cells.reshape(4, 4, 8).transpose(2, 0, 1) if joint else cells.reshape(4, 4, 4)
    assert row.method == "chefer"
    assert np.allclose(row.raw, expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.extended
def test_tokens_that_run_through_the_frames_of_each_patch_are_put_in_order():
    """TimeSformer's tokens: for each patch, row by row, all frames; the class token comes first."""
    model = lively(made("timesformer")[0])
    image = torch.randn(1, 3, 8, 32, 32)
    name = "timesformer.encoder.layer.0"

    # Before time is mixed, a cell depends on its own patch and frame alone.
    changed = image.clone()
    changed[0, :, 5, 8:16, 16:24] += 1
    explainer = camkit.Explainer(taking_clips(model, "pixel_values"), f"model.{name}", method="gradcam")
    explainer(image[0], target=2)
    order = explainer.layer.layout
    assert (order.grid, order.prefix, order.order) == ((8, 4, 4), 1, (1, 2, 0))
    before, after = (model.timesformer.embeddings(one.transpose(1, 2)) for one in (image, changed))
    moved = camkit.engine.passes.to_grid((after - before).abs(), order).sum(1)[0]
    assert (moved > 1e-6).nonzero().tolist() == [[5, 1, 2]]


@pytest.mark.extended
@pytest.mark.parametrize("family", ["timesformer", "vjepa2"])
def test_the_tokens_of_a_clip_give_the_map_of_the_slow_reference(family):
    model = lively(made(family)[0])
    layer, name = f"{family}.encoder.layer.0", model.main_input_name
    image = torch.randn(1, 3, 8, 32, 32)

    row = camkit.explain(taking_clips(model, name), image, f"model.{layer}", target=1, method="hirescam")

    score = partial(lambda clip: model(**{name: clip}).logits[0, 1], image.transpose(1, 2))
    cells = gradient_times_activation(model, layer, score).sum(2)[0].numpy()
    by_frame = cells.reshape(4, 4, 4) if family == "vjepa2" else cells[1:].reshape(4, 4, 8).transpose(2, 0, 1)
    assert np.allclose(row.raw, by_frame, atol=1e-4 * np.abs(by_frame).max())


@pytest.mark.extended
def test_heat_is_repeated_over_a_tubelet_and_not_smeared_over_time(saved, clip):
    row = camkit.explain(f"hf:{saved('videomae')}", clip, device="cpu")

    each = np.stack([camkit.engine.heatmap.positive(torch.tensor(one)[None], (32, 32))[0] for one in row.raw])
    assert np.allclose(row.heatmap, np.repeat(each, 2, axis=0) / each.max(), atol=1e-6)
    assert all(np.array_equal(row.heatmap[frame], row.heatmap[frame + 1]) for frame in (0, 2, 4, 6))
    assert not np.allclose(row.heatmap[1], row.heatmap[2], atol=1e-3)


def test_cells_of_known_places_take_the_nearest_one_in_time():
    cells = torch.rand(1, 3, 2, 2)
    places = ((0.0, 4.0, 6.0), (0.5, 2.5), (0.5, 2.5))

    found = camkit.engine.heatmap.enlarge(cells, (8, 4, 4), camkit.types.Placement((), places, stepped=True))

    for frame, cell in enumerate((0, 0, 0, 1, 1, 1, 2, 2)):
        plain = camkit.engine.heatmap.enlarge(cells[:, cell], (4, 4), camkit.types.Placement((), places[1:]))
        assert torch.equal(found[:, frame], plain)


@pytest.mark.parametrize("name", ["r3d_18", "mvit_v2_s", "swin3d_t"])
def test_torchvisions_video_networks_are_loaded_by_name(tmp_path, name):
    write(tmp_path / "a.avi", (np.full((64, 96, 3), 2 * number, np.uint8) for number in range(128)), 30)
    torch.manual_seed(0)

    loaded = load_model(name, pretrained=False, device="cpu")
    numbers = loaded.preprocess.chosen(128, 30.0)
    prepared = prepare(tmp_path / "a.avi", loaded.preprocess, "a.avi", 3)

    step = 4 if "mvit" in name else 2  # 7.5 and 15 of 30 frames a second
    count = 32 if "swin" in name else 16
    assert numbers == [round((127 - (count - 1) * step) / 2) + step * index for index in range(count)]
    preset = torchvision.models.get_model_weights(name).DEFAULT.transforms()
    frames = read(tmp_path / "a.avi")
    expected = preset(torch.from_numpy(np.stack([frames[number] for number in numbers])).permute(0, 3, 1, 2))
    assert torch.equal(prepared.tensor, expected)
    assert [frame.number for frame in prepared.frames] == [number + 1 for number in numbers]
    assert loaded.labels[:2] == ("abseiling", "air drumming")
    with pytest.raises(ImageError, match=f"takes {(count - 1) * step + 1} frames, but the video has 20"):
        loaded.preprocess.chosen(20, 30.0)


@pytest.mark.extended
def test_a_video_network_of_torchvision_is_explained_by_name(tmp_path):
    write(tmp_path / "a.avi", (np.full((64, 96, 3), 9 * number, np.uint8) for number in range(16)), 15)
    torch.manual_seed(0)

    row = camkit.explain(load_model("r3d_18", pretrained=False, device="cpu"), tmp_path / "a.avi", "layer3")

    assert row.heatmap.shape == (16, 112, 112)
    assert row.raw.shape == (4, 14, 14)
    assert all(np.array_equal(row.heatmap[frame], row.heatmap[frame // 4 * 4]) for frame in range(16))


def run(file: Path, folder: Path, out: Path, *options: str) -> int:
    return main([str(file), "--model", f"hf:{folder}", "--device", "cpu", "--out", str(out), *options])


@pytest.mark.extended
def test_a_clip_is_drawn_as_a_video_and_a_sheet_in_a_shell(saved, clip, tmp_path, capsys):
    assert run(clip, saved("videomae"), tmp_path, "--style", "overlay", "--json") == 0

    (line,) = capsys.readouterr().out.splitlines()
    printed = json.loads(line)
    drawn = read(Path(printed["file"]))
    row = camkit.explain(f"hf:{saved('videomae')}", clip, device="cpu")
    expected = list(row.drawn_frames())
    assert len(drawn) == len(expected) == 8
    assert all(np.abs(one.astype(int) - other).mean() < 12 for one, other in zip(drawn, expected, strict=True))
    span = (row.frames[-1].number - row.frames[0].number) / RATE
    assert printed["rate"] == pytest.approx(7 / span)
    sheet = cv2.cvtColor(cv2.imread(printed["sheet"]), cv2.COLOR_BGR2RGB)
    assert np.array_equal(sheet, row.overlay())
    assert str(row.frames[1]) == "frame 3, 0.17 s"

    assert run(clip, saved("videomae"), tmp_path / "heat.mp4") == 0
    assert [file.name for file in tmp_path.iterdir() if file.suffix == ".mp4"].count("heat.mp4") == 1
    figure = read(tmp_path / "heat.mp4")[0]
    assert figure.shape[0] > 320, "the frame, its caption and the colours"
    assert "frames" in capsys.readouterr().out


@pytest.mark.extended
def test_what_a_model_of_clips_cannot_take_is_refused_in_one_sentence(saved, clip, tmp_path, capsys):
    picture, folder = camkit.scenes.scene_paths()["plane-sky"], saved("videomae")
    write(tmp_path / "short.mp4", np.zeros((5, TALL, WIDE, 3), np.uint8))

    assert run(picture, folder, tmp_path) == 2
    assert "is not a video, and the model takes clips" in capsys.readouterr().err
    assert run(tmp_path / "short.mp4", folder, tmp_path) == 2
    assert "the model takes 8 frames, but the video has 5" in capsys.readouterr().err
    assert run(clip, folder, tmp_path, "--every", "2") == 2
    assert "leave out --every" in capsys.readouterr().err
    with refused("this is one picture", ImageError):
        camkit.explain(f"hf:{folder}", np.zeros((8, 8, 3), np.uint8), device="cpu")
    with refused("leave out size"):
        load_model(f"hf:{folder}", size=16)
    with refused("no frames of a clip", InputError):
        next(camkit.explain("demo-fair", picture).drawn_frames())
