"""Videos and animated pictures: what the command writes, read back with OpenCV."""

import itertools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image
from tasks import Blobs

import camkit
from camkit.cli import main
from camkit.errors import ImageError

SIZE = (96, 128)


def frames(count: int, size: tuple[int, int] = SIZE) -> list[np.ndarray]:
    """Return frames of a plane that fades into a car, RGB."""
    first, last = (
        cv2.resize(cv2.cvtColor(cv2.imread(str(camkit.scenes.scene_paths()[name])), cv2.COLOR_BGR2RGB), size[::-1])
        for name in ("plane-sky", "car-sea")
    )
    shares = np.linspace(0, 1, count)
    return [(first * (1 - share) + last * share).astype(np.uint8) for share in shares]


def write_video(path: Path, pictures: list[np.ndarray], rate: float = 12, codec: str = "mp4v") -> Path:
    height, width = pictures[0].shape[:2]
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*codec), rate, (width, height))
    assert writer.isOpened()
    for picture in pictures:
        writer.write(cv2.cvtColor(picture, cv2.COLOR_RGB2BGR))
    writer.release()
    return path


def read_video(path: Path) -> tuple[list[np.ndarray], float]:
    capture = cv2.VideoCapture(str(path))
    assert capture.isOpened()
    read = []
    while (got := capture.read())[0]:
        read.append(cv2.cvtColor(got[1], cv2.COLOR_BGR2RGB))
    return read, capture.get(cv2.CAP_PROP_FPS)


def run(*arguments: Any) -> int:
    return main([*map(str, arguments), "--model", "demo-fair"])


def rows(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    ("name", "codec", "every"), [("clip.mp4", "mp4v", 1), ("CLIP.MKV", "MJPG", 1), ("clip.mp4", "mp4v", 4)]
)
def test_every_frame_of_a_video_or_every_nth_is_drawn_at_the_same_speed(tmp_path, capsys, name, codec, every):
    clip = write_video(tmp_path / name, frames(9), codec=codec)
    for form in ([], ["--json"]):
        assert run(clip, "--out", tmp_path / "out", "--style", "overlay", "--every", every, *form) == 0
    *text, row = capsys.readouterr().out.splitlines()
    row = json.loads(row)
    drawn, rate = read_video(Path(row["file"]))
    assert [file.name for file in (tmp_path / "out").iterdir()] == [f"{clip.name.removesuffix('.mp4')}.gradcam.mp4"]
    assert len(drawn) == row["frames"] == sum(row["labels"].values()) == (9 if every == 1 else 3)
    assert rate == row["rate"] == pytest.approx(12 / every)
    expected = [row.overlay().astype(int) for row in camkit.explain("demo-fair", read_video(clip)[0])]
    for number, picture in enumerate(drawn):
        differences = [np.abs(picture - other).mean() for other in expected]
        assert np.argmin(differences) == number * every
        assert min(differences) < 6, "lossy, but this frame and no other"
    assert f"{len(drawn)} frames, {12 // every} per second: " in "\n".join(text)
    assert "  colours on each frame's own scale" in text
    assert "plane in " in text[0]


def test_the_frames_of_a_video_share_a_scale_on_request_which_is_printed(tmp_path, capsys):
    clip = write_video(tmp_path / "clip.mp4", frames(6))
    found = camkit.explain("demo-fair", read_video(clip)[0])
    shared = found[0].colour_scale(found)
    for scale in ("each", "shared"):
        for form in ([], ["--json"]):
            assert run(clip, "--out", tmp_path / scale, "--style", "heatmap", "--scale", scale, *form) == 0
        *text, row = capsys.readouterr().out.splitlines()
        assert (f"  colours from {shared}" in text) == (scale == "shared")
        if scale == "shared":
            assert "one scale for 6 maps" in str(shared)
            assert json.loads(row)["scale"] == [pytest.approx(shared.largest, rel=1e-4)]
        drawn, _ = read_video(tmp_path / scale / "clip.gradcam.mp4")
        for picture, row in zip(drawn, found, strict=True):
            expected = row.overlay(style="heatmap", scale=found if scale == "shared" else "each")
            assert np.abs(picture.astype(int) - expected).mean() < 12
    assert run(clip, "--out", tmp_path, "--every", "100") == 0
    assert "  1 frame, 0.12 per second" in capsys.readouterr().out


def test_a_video_whose_frames_have_no_evidence_counts_as_empty(tmp_path, capsys):
    (tmp_path / "net.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "def make():\n"
        "    net = nn.Sequential(nn.AvgPool2d(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2)).eval()\n"
        "    net[3].weight.data = torch.tensor([[-1.0] * 3, [1.0] * 3])\n"
        "    return net\n"
    )
    clip, model = write_video(tmp_path / "clip.mp4", frames(2)), f"{tmp_path / 'net.py'}:make"
    call = [clip, "--model", model, "--size", 64, "--mean", "0,0,0", "--std", "1,1,1", "--method", "gradcam"]
    call += ["--scale", "shared", "--out", tmp_path]
    for target, status, summary in ((0, "no_positive_evidence", "1 empty"), (1, "ok", "0 empty")):
        assert main(list(map(str, [*call, "--target", target]))) == 0
        text = capsys.readouterr().out
        assert main(list(map(str, [*call, "--target", target, "--json"]))) == 0
        (row,) = rows(capsys)
        assert (row["status"], row["scale"] is None) == (status, target == 0)
        assert f"1 explained, 0 failed, {summary}" in text
        assert ("no positive evidence: " in text, "colours from" in text) == (target == 0, target == 1)


@pytest.mark.parametrize("side", [0, 64])
def test_the_frames_of_a_figure_have_one_size_and_their_own_captions(tmp_path, side):
    clip = write_video(tmp_path / "clip.mp4", frames(5, (97, 131)))  # odd sides
    assert run(clip, "--out", tmp_path, "--max-side", side) == 0
    drawn, _ = read_video(tmp_path / "clip.gradcam.mp4")
    assert len(drawn) == 5
    picture = read_video(clip)[0][0]
    figure = camkit.explain("demo-fair", picture).captioned(fixed=True, side=side or 960)
    height, width = figure.shape[:2]
    assert drawn[0].shape == (height + height % 2, width + width % 2, 3)
    top = drawn[0][:60].astype(int)
    assert np.abs(top - drawn[-1][:60]).mean() > 1, "another class, another caption"


@pytest.mark.parametrize(("name", "kind"), [("a.gif", "GIF"), ("a.webp", "WEBP"), ("a.png", "PNG")])
def test_an_animated_picture_becomes_a_video(tmp_path, capsys, name, kind):
    pictures = [Image.fromarray(frame) for frame in frames(5)]
    extra = {"lossless": True} if kind == "WEBP" else {}
    pictures[0].save(tmp_path / name, kind, save_all=True, append_images=pictures[1:], duration=250, **extra)
    assert run(tmp_path / name, "--out", tmp_path / "out", "--style", "overlay", "--json") == 0
    (row,) = rows(capsys)
    drawn, rate = read_video(Path(row["file"]))
    assert Path(row["file"]) == tmp_path / "out" / f"{name}.gradcam.mp4"
    assert len(drawn) == row["frames"] == 5
    assert rate == pytest.approx(4)
    pictures[0].save(tmp_path / f"still-{name}", kind)
    assert run(tmp_path / f"still-{name}", "--out", tmp_path / "out", "--json") == 0
    assert [Path(row["file"]).name for row in rows(capsys)] == [f"still-{name}.gradcam.png"]


def test_a_drawn_video_replaces_drawings_alone(tmp_path):
    clip, out = write_video(tmp_path / "clip.mp4", frames(4)), tmp_path / "out"
    for options, count in (((), 4), (("--every", "2"), 2)):
        assert run(clip, "--out", out, *options) == 0
        assert [file.name for file in out.iterdir()] == ["clip.gradcam.mp4"]
        assert len(read_video(out / "clip.gradcam.mp4")[0]) == count
    shutil.copy(clip, out / "clip.gradcam.mp4")
    assert run(clip, "--out", out) == 2
    assert (out / "clip.gradcam.mp4").read_bytes() == clip.read_bytes()
    assert run(clip, "--out", out / "one.mp4") == 0
    assert run(clip, "--out", out / "one.png") == 2


def test_a_frame_without_the_target_is_drawn_without_heat(tmp_path, capsys):
    model = tmp_path / "net.py"
    model.write_text("from tasks import Blobs\n\ndef make():\n    return Blobs(), Blobs.prepare\n")
    shown = np.asarray(Blobs.picture())
    pictures = [np.full_like(shown, 120), shown] * 2
    clip = write_video(tmp_path / "clip.mp4", pictures)
    arguments = [clip, "--model", f"{model}:make", "--target", 1]
    for style, side in itertools.product(("figure", "overlay", "side-by-side", "heatmap"), (0, 32)):
        options = ["--out", tmp_path / f"{style}{side}", "--style", style, "--max-side", side]
        assert main(list(map(str, [*arguments, *options, "--json"]))) == 0
        (row,) = rows(capsys)
        assert row["labels"] == {"class 1": 2}
        assert len(read_video(Path(row["file"]))[0]) == 4
    empty = write_video(tmp_path / "empty.mp4", pictures[::2])
    assert main(list(map(str, [empty, *arguments[1:], "--out", tmp_path / "empty"]))) == 2
    assert "empty.mp4  error: " in capsys.readouterr().err
    assert not list((tmp_path / "empty").iterdir())


@pytest.mark.extended
def test_bad_videos_are_a_sentence_each_and_print_none_of_their_bytes(tmp_path):
    whole = write_video(tmp_path / "whole.mp4", frames(30)).read_bytes()
    plain = write_video(tmp_path / "whole.avi", frames(3), codec="MJPG").read_bytes()
    bad = {
        "truncated.mp4": whole[:-2000], "text.mp4": b"this is a shopping list\n" * 50, "empty.mp4": b"",
        "codec.avi": plain.replace(b"MJPG", b"ZZZZ"), "odd.avi": plain.replace(b"movi", b"\x1b[\x9b\xff"),
    }  # fmt: skip
    for name, data in bad.items():
        (tmp_path / name).write_bytes(data)
    # Another process: FFmpeg's level is fixed when a process opens its first video, as this one has.
    command = [sys.executable, "-m", "camkit", *(str(tmp_path / name) for name in bad), "--model", "demo-fair"]
    done = subprocess.run([*command, "-o", str(tmp_path), "-v"], capture_output=True, check=False)
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if not line.startswith(b"camkit: ")]
    assert len(errors) == len(bad), "FFmpeg and OpenCV print nothing of their own"
    for line, name in zip(errors, bad, strict=True):
        assert re.fullmatch(rb"\S+  error: [\x20-\x7e]*", line), line
        assert re.search(rf"{name} (cannot be read as a video|has no frame that can)", line.decode())


@pytest.mark.parametrize(("name", "of"), [("bad.avi", " of 30"), ("bad.gif", "")])
def test_a_video_that_breaks_off_is_drawn_up_to_there(tmp_path, capsys, name, of):
    whole = tmp_path / f"whole{Path(name).suffix}"
    if name == "bad.avi":
        write_video(whole, frames(30), codec="MJPG")
    else:
        first, *more = [Image.fromarray(frame) for frame in frames(30)]
        first.save(whole, save_all=True, append_images=more, duration=100)
    (tmp_path / name).write_bytes(whole.read_bytes()[: whole.stat().st_size * 2 // 3])
    for form in ([], ["--json"]):
        assert run(tmp_path / name, "--out", tmp_path / "out", "--style", "overlay", *form) == 2
    *text, row = capsys.readouterr().out.splitlines()
    read, _ = read_video(Path(json.loads(row)["file"]))
    said = f"{name} breaks off after {len(read)}{of} frames"
    assert 10 < len(read) == json.loads(row)["frames"] < 30
    assert said in json.loads(row)["error"]
    if name == "bad.avi":
        assert [line for line in text if f"{said}; the frames before that are drawn" in line]


def other_name(file: Path, how: str) -> Path:
    """Return another path that leads to a file."""
    if how == "the same name":
        return file
    if how == "a detour":
        return file.parent / "sub" / ".." / file.name
    if how == "through a linked folder":
        (file.parent / "linked").symlink_to(file.parent, target_is_directory=True)
        return file.parent / "linked" / file.name
    other = file.with_name(f"other{file.suffix}")
    other.symlink_to(file) if how == "a link" else other.hardlink_to(file)
    return other


WAYS = ["the same name", "a detour", "through a linked folder", "a link", "a hard link"]


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("command", ["video", "picture", "compare", "features", "concepts", "mask"])
def test_no_command_replaces_what_it_reads(tmp_path, capsys, command, how):
    (tmp_path / "sub").mkdir()
    read = tmp_path / ("in.mp4" if command == "video" else "in.png")
    if command == "video":
        write_video(read, frames(2))
    else:
        cv2.imwrite(str(read), frames(1)[0])
    call = [command, read] if command in ("compare", "features", "concepts") else [read]
    if command == "mask":
        Image.new("RGB", SIZE[::-1]).save(tmp_path / "photo.png")
        call = [tmp_path / "photo.png", "-t", "plane", "--mask", read]
    out, before = other_name(read, how), read.read_bytes()
    assert run(*call, "-o", out, "--overwrite") == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0] == f"camkit: {out} is also an input ({read}), so camkit does not replace it; write to another file"
    assert read.read_bytes() == out.read_bytes() == before


def test_a_drawing_does_not_replace_another_input_of_the_same_run(tmp_path, capsys):
    first = write_video(tmp_path / "a.mp4", frames(2))
    second = write_video(tmp_path / "a.gradcam.mp4", frames(3))
    photo, other = tmp_path / "b.jpg", tmp_path / "b.gradcam.png"
    for file in (photo, other):
        cv2.imwrite(str(file), frames(1)[0])
    before = {file: file.read_bytes() for file in (second, other)}
    assert run(first, second, photo, other, "-o", tmp_path, "--overwrite") == 2
    assert {file: file.read_bytes() for file in before} == before
    errors = capsys.readouterr().err
    for file in before:
        assert f"{file} is itself a picture or video to explain; choose another folder" in errors


def test_no_command_replaces_a_file_that_an_option_names(tmp_path, capsys):
    for name in ("imgs/a.png", "imgs/diagnose.png", "data/plane/a.png", "data/ship/a.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(tmp_path / name), frames(1)[0])
    labels, classes, config = tmp_path / "names.csv", tmp_path / "report.json", tmp_path / "own.toml"
    labels.write_text("a\nb\nc\nd\n")
    classes.write_text('{"plane": 0, "ship": 1}')
    config.write_text("[explain]\nalpha = 0.2\n")
    project = tmp_path / "pyproject.toml"
    project.write_text("[project]\nname = 'own'\n")
    data, table = tmp_path / "data", tmp_path / "data.csv"
    table.write_text("path,label\nimgs/a.png,plane\n")
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    for call in (
        [tmp_path / "imgs" / "a.png", "--labels", labels, "--table", labels, "--no-pictures", "--overwrite"],
        ["diagnose", tmp_path / "imgs", "--out", tmp_path / "imgs"],
        ["check", data, "--class-map", classes, "--out", tmp_path],
        ["check", "init", data, "--config", config, "--file", config, "--overwrite"],
        ["check", "init", data, "--file", project, "--overwrite"],
        ["check", "init", data, "--file", data / "plane" / "a.png", "--overwrite"],
        ["check", "init", table, "--file", table, "--overwrite"],
    ):
        assert run(*call) == 2, call
        error = capsys.readouterr().err
        assert "is also an input" in error or "the config cannot be written to" in error
        assert {file: file.read_bytes() for file in before} == before


def test_a_video_has_one_target_and_in_python_its_frames_are_passed(tmp_path, capsys):
    clip = write_video(tmp_path / "clip.mp4", frames(2))
    assert run(clip, "--out", tmp_path / "out", "--target", "plane", "--target", "car") == 2
    assert "a video shows one target" in capsys.readouterr().err
    assert run(clip, "--out", tmp_path / "out", "--every", 0) == 2
    assert "every must be a number of frames, at least 1, not 0" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    with pytest.raises(ImageError, match=r"clip\.mp4 is a video; pass its frames to explain_many"):
        camkit.explain("demo-fair", clip)


@pytest.mark.extended
def test_a_long_video_needs_no_more_memory_than_a_short_one(tmp_path):
    code = (
        "import resource, sys\nfrom camkit.cli import main\n"
        "code = main(sys.argv[1:])\nprint(code, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)"
    )
    used = []
    for count in (40, 200):
        clip = write_video(tmp_path / f"{count}.avi", [np.zeros((1080, 1920, 3), np.uint8)] * count, codec="MJPG")
        command = [sys.executable, "-c", code, str(clip), "--model", "demo-fair", "--out", str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
        exit_code, megabytes = map(int, done.stdout.splitlines()[-1].split())
        assert exit_code == 0
        used.append(megabytes)
    assert used[1] < used[0] + 150, "160 more frames would take 1000 MB"
