"""The installed command, as a person types it."""

import csv
import ctypes
import io
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
import torchvision
from folders import run_folder
from PIL import Image
from tiers import represented_by, rows_represented

import camkit
from camkit.cli import main
from camkit.errors import InputError

QUITS = """
import sys, threading
import torch
def quits(here):
    if here == SOURCE or (SOURCE == "thread" and threading.current_thread() is not threading.main_thread()):
        raise RAISED
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.features = torch.nn.Conv2d(3, 2, 8, stride=8)
    def forward(self, images):
        quits("forward")
        return self.features(images).mean((2, 3))
def prepare(picture):
    quits("preprocess")
    return torch.zeros(3, 64, 64)
def make():
    quits("factory")
    return Net(), prepare
quits("import")
"""
"""A network whose code raises something in one place."""
SOURCES = ("forward", "factory", "preprocess", "import", "thread")

COMMANDS = ("check", "compare", "concepts", "diagnose", "features", "judge", "layers", "methods", "demo")
CAMKIT = str(Path(sys.executable).parent / "camkit")


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [CAMKIT, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, **environment},
    )


def python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=True, timeout=300
    )


def files_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def plane() -> Path:
    return camkit.scenes.scene_paths()["plane-sky"]


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an empty folder the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refuse(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Assert that a call ends with 2 and one sentence on stderr, and return what it printed to stdout."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1
    return captured.out


class TestInstalled:
    def test_what_computes_nothing_does_not_import_torch(self) -> None:
        calls = [["--help"], ["--version"], ["methods"], *([command, "--help"] for command in COMMANDS)]
        done = python(
            "import json, sys\n"
            "from camkit.cli import main\n"
            "for call in json.loads(sys.argv[1]):\n"
            "    main(call)\n"
            "    print(call, 'torch' in sys.modules, file=sys.stderr)\n",
            json.dumps(calls),
        )
        assert done.stderr.splitlines() == [f"{call} False" for call in calls]
        assert "--model" in done.stdout
        assert camkit.__version__ in done.stdout
        assert all(name in done.stdout for name in camkit.METHODS)

    def test_explaining_imports_no_product(self, plane: Path, tmp_path: Path) -> None:
        done = python(
            "import sys\n"
            "from camkit.cli import main\n"
            "code = main(sys.argv[1:])\n"
            "print(code, *sorted(sys.modules), sep='\\n', file=sys.stderr)\n",
            plane,
            *("--model", "demo-fair", "--style", "overlay", "--out", tmp_path / "new" / "folder"),
        )
        code, *modules = done.stderr.splitlines()
        assert code == "0"
        assert "plane" in done.stdout
        assert "layer features" in done.stdout
        assert "deepest 16x16 grid" in done.stdout
        written = cv2.imread(str(tmp_path / "new" / "folder" / "plane-sky.gradcam.jpg"))
        assert written.shape == cv2.imread(str(plane)).shape
        assert "camkit.explaining.explainer" in modules
        products = ("app", "background", "demo.poster", "inspect", "metrics", "sentences", "tensorboard")
        needless = (*(f"camkit.{product}" for product in products), "scipy", "pycocotools")
        needless += ("pydantic", "jinja2", "junitparser", "torchinfo", "matplotlib", "pandas")
        assert not [name for name in modules if name.startswith(needless)]

    def test_an_unreadable_picture_does_not_stop_the_others(
        self, plane: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        bad = tmp_path / "bad.jpg"
        bad.write_bytes(b"")
        pictures = [str(path) for path in (bad, plane, tmp_path / "none.png")]
        assert main([*pictures, "--model", "demo-fair", "--out", str(tmp_path), "--json"]) == 2
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [row["status"] for row in rows] == ["error", "ok", "error"]
        assert "empty file" in rows[0]["error"]
        assert Path(rows[1]["file"]).is_file()

    @pytest.mark.extended
    def test_killed_leaves_whole_files_only(self, plane: Path, tmp_path: Path) -> None:
        pictures = []
        for number in range(40):
            copy = tmp_path / "in" / f"{number}.jpg"
            copy.parent.mkdir(exist_ok=True)
            copy.write_bytes(plane.read_bytes())
            pictures.append(copy)
        out = tmp_path / "out"
        command = [CAMKIT, *map(str, pictures), "--model", "demo-fair", "--out", str(out), "--batch-size", "1"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 300
        while not list(out.glob("*.png")) and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.02)
        process.kill()
        process.communicate()
        written = [path for path in out.glob("*.png") if not path.name.startswith(".")]
        assert written
        assert all(cv2.imread(str(path)) is not None for path in written)

    @pytest.mark.extended
    def test_a_reader_that_goes_away_ends_it_quietly(self, plane: Path, tmp_path: Path) -> None:
        pictures = [tmp_path / f"{number}.jpg" for number in range(60)]
        for picture in pictures:
            picture.write_bytes(plane.read_bytes())
        options = ["--model", "demo-fair", "--out", str(tmp_path / "out"), "--batch-size", "1"]
        with subprocess.Popen(
            [CAMKIT, *map(str, pictures), *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            assert "plane" in process.stdout.readline()
            process.stdout.close()
            said = process.stderr.read()
            assert process.wait(timeout=300) == 141
        assert said == ""

    def test_ctrl_c_says_how_many_pictures_are_finished(self, plane: Path, tmp_path: Path) -> None:
        pictures = [tmp_path / f"{number}.jpg" for number in range(300)]
        for picture in pictures:
            picture.write_bytes(plane.read_bytes())
        command = [
            CAMKIT,
            *map(str, pictures),
            "--model",
            "demo-fair",
            "--batch-size",
            "1",
            "--json",
            "--table",
            "t.csv",
        ]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "bufsize": 0}  # a buffer would keep later rows
        with subprocess.Popen(command, cwd=tmp_path, **pipes) as process:
            assert process.stdout is not None
            process.stdout.readline()
            process.send_signal(signal.SIGINT)
            rows, said = process.communicate(timeout=300)
        assert process.returncode == 130
        told = re.search(r"interrupted: (\d+) pictures? (is|are) finished; --resume continues", said.decode())
        assert told, said
        assert int(told[1]) - (1 + rows.count(b"\n")) in (0, 1), "it may be interrupted before it prints the last row"

    @pytest.mark.extended
    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
    def test_a_full_disk_behind_the_output_is_one_sentence(self, plane: Path, tmp_path: Path) -> None:
        command = [CAMKIT, str(plane), "--model", "demo-fair", "--json", "--out", str(tmp_path)]
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(command, check=False, stdout=full, stderr=subprocess.PIPE, text=True, timeout=300)
        assert done.returncode == 2
        assert "camkit: the output cannot be written: No space left on device; earlier rows are kept" in done.stderr

    @pytest.mark.extended
    def test_names_the_terminal_cannot_show_are_spelled_out(self, plane: Path, tmp_path: Path) -> None:
        odd = tmp_path / "vögel.jpg"
        odd.write_bytes(plane.read_bytes())
        done = run(odd, "--model", "demo-fair", "--out", tmp_path, PYTHONIOENCODING="ascii")
        assert done.returncode == 0, done.stderr
        assert r"v\xf6gel.jpg" in done.stdout
        done = run(odd, "--model", "demo-fair", "--out", tmp_path, "--json", PYTHONIOENCODING="ascii")
        assert json.loads(done.stdout)["source"] == str(odd)
        assert (tmp_path / "vögel.gradcam.png").is_file()

    @pytest.mark.extended
    def test_the_demo(self, tmp_path: Path) -> None:
        done = run("demo", "--out", tmp_path)
        assert done.returncode == 0, done.stderr
        assert "demo-biased" in done.stdout
        assert cv2.imread(str(tmp_path / "demo.png")).shape[1] > 1000


@pytest.fixture
def tree(plane: Path, tmp_path: Path) -> Path:
    """A folder with pictures of the same name, below each other and with other suffixes."""
    pixels = cv2.imread(str(plane))
    for name in ("cat.jpg", "cat.png", "2020/cat.jpg", "2020/deep/dog.jpg"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(tmp_path / "in" / name), pixels)
    return tmp_path / "in"


class TestNamesOfDrawings:
    def explain(self, *arguments: object) -> int:
        return main([*map(str, arguments), "-m", "demo-fair"])

    def test_a_folder_is_mirrored_and_no_picture_is_drawn_over_another(self, tree: Path, tmp_path: Path) -> None:
        assert self.explain(tree, "-o", tmp_path / "out") == 0
        everything = ["2020/cat.gradcam.png", "2020/deep/dog.gradcam.png", "cat.gradcam.png", "cat.png.gradcam.png"]
        assert files_in(tmp_path / "out") == everything
        assert self.explain(tree, "--no-recursive", "-o", tmp_path / "flat") == 0
        assert files_in(tmp_path / "flat") == ["cat.gradcam.png", "cat.png.gradcam.png"]

    def test_an_output_that_looks_like_a_file_of_another_type_is_refused(
        self, tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert self.explain(tree / "cat.jpg", "-o", tmp_path / "foo.xyz") == 2
        assert "camkit cannot write .xyz; use .png, .jpg, .jpeg or another" in capsys.readouterr().err
        assert not (tmp_path / "foo.xyz").exists()
        (tmp_path / "run.old").mkdir()
        assert self.explain(tree / "cat.jpg", "-o", tmp_path / "run.old") == 0
        assert self.explain(tree / "cat.jpg", "-o", tmp_path / "run-2.1") == 0

    def test_a_name_does_not_depend_on_other_pictures(self, tree: Path, tmp_path: Path) -> None:
        for picture in sorted(path for path in tree.rglob("*") if path.is_file()):
            alone = tmp_path / "alone" / picture.relative_to(tree).parent
            assert self.explain(picture, "-o", alone) == 0
        assert self.explain(tree, "-o", tmp_path / "together") == 0
        assert files_in(tmp_path / "alone") == files_in(tmp_path / "together")

    def test_several_folders_and_named_files_of_one_name_are_kept_apart(self, tree: Path, tmp_path: Path) -> None:
        assert self.explain(tree / "2020", tree / "2020" / "deep", "--no-recursive", "-o", tmp_path / "folders") == 0
        assert files_in(tmp_path / "folders") == ["2020/cat.gradcam.png", "deep/dog.gradcam.png"]
        assert self.explain(tree / "cat.jpg", tree / "2020" / "cat.jpg", "-o", tmp_path / "files") == 0
        assert files_in(tmp_path / "files") == ["2020/cat.gradcam.png", "in/cat.gradcam.png"]

    def test_a_file_of_somebody_else_is_replaced_only_with_overwrite(
        self, tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out, mine = tmp_path / "out", tmp_path / "out" / "cat.gradcam.png"
        out.mkdir()
        mine.write_bytes(b"mine")
        assert self.explain(tree / "cat.jpg", "-o", out) == 2
        assert "pass --overwrite" in capsys.readouterr().err
        assert mine.read_bytes() == b"mine"
        assert self.explain(tree / "cat.jpg", "-o", out, "--overwrite") == 0
        assert cv2.imread(str(mine)) is not None

    def test_overwrite_gives_the_plain_name(self, tree: Path, tmp_path: Path) -> None:
        for style in ("overlay", "heatmap"):
            call = [tree / "cat.jpg", "-o", tmp_path / "out", "--style", style, "--format", "png", "--overwrite"]
            assert self.explain(*call) == 0
        assert files_in(tmp_path / "out") == ["cat.gradcam.png"]

    @pytest.mark.parametrize("name", ["heat.png", "new/heat.jpg"])
    def test_one_picture_can_be_drawn_into_a_named_file(self, tree: Path, tmp_path: Path, name: str) -> None:
        assert self.explain(tree / "cat.jpg", "-o", tmp_path / "out" / name) == 0
        assert files_in(tmp_path / "out") == [name]
        assert cv2.imread(str(tmp_path / "out" / name)) is not None

    @pytest.mark.parametrize(
        ("more", "said"), [(["2020/cat.jpg"], "there are 2 pictures"), (["--top-k", "2"], "there are several targets")]
    )
    def test_a_named_file_holds_one_drawing(
        self, tree: Path, tmp_path: Path, more: list[str], said: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        more = [str(tree / word) if "/" in word else word for word in more]
        assert self.explain(tree / "cat.jpg", *more, "-o", tmp_path / "heat.png") == 2
        assert f"is one file, but {said}; name a folder" in capsys.readouterr().err
        assert not (tmp_path / "heat.png").exists()

    def test_a_sheet_of_feature_maps_can_be_named_too(self, tree: Path, tmp_path: Path) -> None:
        sheet = tmp_path / "sheet.png"
        assert main(["features", str(tree / "cat.jpg"), "-m", "demo-fair", "-o", str(sheet)]) == 0
        assert cv2.imread(str(sheet)) is not None

    def test_reports_of_two_models_are_kept(self, tree: Path, tmp_path: Path) -> None:
        for model in ("demo-fair", "demo-biased", "demo-fair"):
            for command in (["features", "--layer", "features.2"], ["diagnose"]):
                assert main([*command, str(tree / "cat.jpg"), "-m", model, "-o", str(tmp_path / "out"), "-q"]) == 0
        assert files_in(tmp_path / "out") == [
            *("before-diagnose.json", "before-diagnose.png"),
            *("cat.features.features.2.png", "diagnose.json", "diagnose.png"),
        ]


class TestWhatIsPrinted:
    def explain(self, *arguments: object) -> int:
        return main([*map(str, arguments), "-m", "demo-fair"])

    def test_the_same_error_of_many_pictures_is_printed_once_with_a_count(
        self, plane: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for number in range(5):
            (tmp_path / f"{number}.jpg").write_bytes(b"" if number < 4 else plane.read_bytes())
        (tmp_path / "other.jpg").write_text("no picture")
        assert self.explain(tmp_path, "-o", tmp_path / "out") == 2
        captured = capsys.readouterr()
        assert captured.err.splitlines() == [
            f"{tmp_path / '0.jpg'}  error: {tmp_path / '0.jpg'} is an empty file",
            f"{tmp_path / 'other.jpg'}  error: {tmp_path / 'other.jpg'} is not a picture",
            "3 more pictures have the same error as 0.jpg; --verbose lists them",
        ]
        assert re.fullmatch(
            r"1 explained, 5 failed, 0 empty; [\d.e+]+ pictures a second", captured.out.splitlines()[-1]
        )
        assert self.explain(tmp_path, "-o", tmp_path / "out", "--verbose") == 2
        assert capsys.readouterr().err.count("is an empty file") == 4

    def test_json_has_no_raw_maps_unless_asked(
        self, plane: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert self.explain(plane, "-o", tmp_path, "--json") == 0
        captured = capsys.readouterr()
        assert "raw" not in json.loads(captured.out)
        assert "1 explained, 0 failed, 0 empty" in captured.err
        assert self.explain(plane, "-o", tmp_path, "--json", "--raw") == 0
        assert np.array(json.loads(capsys.readouterr().out)["raw"]).shape == (16, 16)

    def test_a_table(self, plane: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "a, b.jpg").write_bytes(b"")
        assert self.explain(plane, tmp_path / "a, b.jpg", "-o", tmp_path / "out", "--csv", "-k", "2") == 2
        first, second, failed = csv.DictReader(io.StringIO(capsys.readouterr().out))
        assert (first["label"], first["status"]) == ("plane", "ok")
        assert Path(first["file"]).is_file()
        assert 0 <= float(second["probability"]) < float(first["probability"]) <= 1
        assert len(first["peak"].split()) == 2
        assert float(first["scale"]) == float(second["scale"] or first["scale"]) > 0, "two targets share a scale"
        assert failed["source"] == str(tmp_path / "a, b.jpg")
        assert "empty file" in failed["error"]

    def test_quiet_prints_errors_only_and_verbose_more(
        self, plane: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "bad.jpg").write_bytes(b"")
        state = torchvision.models.squeezenet1_1(num_classes=3).state_dict()
        torch.save(state, tmp_path / "mine.pth")  # which gives a note
        model = ["-m", "squeezenet1_1", "-w", str(tmp_path / "mine.pth"), "-o", str(tmp_path / "out")]
        assert main([str(plane), str(tmp_path / "bad.jpg"), *model, "-q"]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert len(captured.err.splitlines()) == 1
        assert "empty file" in captured.err
        assert self.explain(plane, "-o", tmp_path / "out", "-v") == 0
        assert "101,332 parameters on" in capsys.readouterr().err
        assert main(["layers", "-m", "demo-fair", "-q"]) == 0
        assert capsys.readouterr().out == "features\n"
        assert main(["features", str(plane), "-m", "demo-fair", "-o", str(tmp_path), "-q"]) == 0
        assert capsys.readouterr().out == ""

    def test_verbose_shows_where_a_program_failed(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "net.py").write_text("def build():\n    raise ValueError('cursed')\n")
        assert main(["layers", "-m", f"{tmp_path / 'net.py'}:build", "-v"]) == 4
        assert "in build" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["chek"], "'chek' is neither a command nor a file; did you mean 'check'?"),
            (["check", "inti", "photos"], "'inti' is neither a command nor a file; did you mean 'init'?"),
            (["layers.jpg", "-m", "demo-fair"], "layers.jpg  error: there is no file layers.jpg"),
            (["https://a.org/b.jpg", "-m", "demo-fair"], "https://a.org/b.jpg is a URL, but camkit reads only"),
            (["check", "https://a.org/b", "-m", "demo-fair"], "https://a.org/b is a URL, but camkit reads only"),
            (["-", "-m", "demo-fair"], "camkit does not read pictures from standard input; save the picture to a file"),
            (["a.jpg"], "name the model: --model resnet50"),
            (["a.jpg", "-m", "demo-fair", "-t", "0", "-q", "-v"], "--quiet and --verbose cannot be combined"),
            (["a.jpg", "-m", "demo-fair", "--json", "--csv"], "--json and --csv cannot be combined"),
            (["a.jpg", "-m", "demo-fair", "--raw"], "it needs --json"),
            (["a.jpg", "-m", "demo-fair", "-s", "overlay", "-s", "figure"], "-s specified multiple times"),
            (["a.jpg", "-m", "demo-fair", "--batch-size=0.5"], "--batch-size takes a whole number, not 0.5"),
            (["check", ".", "-m", "demo-fair", "--seed", "1.5"], "--seed takes a whole number, not 1.5"),
            (["help"], "'help' is neither a command nor a file; did you mean '--help'?"),
            (["a.jpg", "-c", "nowhere.toml"], "the config nowhere.toml cannot be read: "),
            (["a.jpg", "-m", "demo-fair", "--layr", "x"], "--layr. Did you mean --layer?"),
        ],
    )
    def test_a_call_that_names_nothing_is_one_sentence(
        self, arguments: list[str], said: str, empty_folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        refuse(arguments, said, capsys)

    def test_a_picture_may_be_called_like_a_mistyped_command(
        self, plane: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "chek").write_bytes(plane.read_bytes())
        monkeypatch.chdir(tmp_path)
        assert self.explain("chek") == 0
        assert Path("camkit-out/chek.gradcam.png").is_file()

    def test_an_address_is_refused_in_python_too(self) -> None:
        with pytest.raises(camkit.errors.ImageError, match=r"https://a\.org/b\.jpg is a URL, but camkit reads only"):
            camkit.explain("demo-fair", "https://a.org/b.jpg")

    def test_the_help_lists_the_required_option_first_and_promises_one_value(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for command in ("", "layers", "diagnose", "features", "concepts", "check"):
            assert main([*command.split(), "--help"]) == 0
            shown = capsys.readouterr().out
            options = re.findall(r"^│ [* ] +(--[\w-]+)", shown, re.MULTILINE)
            assert options[0] == "--model", command
            assert all(short in shown for short in (" -m ", " -q ", " -v ", " -c "))
            assert "..." not in re.sub(r"\(resnet50.*?\)|inferno, \.\.\.|\[ARGS\.\.\.\]", "", shown, flags=re.DOTALL)

    def test_the_help_says_how_the_command_is_called(self, capsys: pytest.CaptureFixture[str]) -> None:
        for command, usage in (("", "camkit PICTURES --model NAME"), ("check", "camkit check DATA --model NAME")):
            assert main([*command.split(), "--help"]) == 0
            assert capsys.readouterr().out.startswith(f"Usage: {usage} [OPTIONS]\n")

    def test_advice_fits_the_door(self, plane: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "net.py").write_text(BARE)
        model = f"{tmp_path / 'net.py'}:make"
        for picture, options, python, shell in (
            (plane, {}, "preprocess=...", "pass --size, --mean and --std"),
            (torch.zeros(3, 64, 64), {"target": "cat"}, "pass labels=[...]", None),
            (torch.zeros(3, 64, 64), {"target_layer": "(the model)"}, "pass None", None),
        ):
            with pytest.raises(InputError) as caught:
                camkit.explain(model, picture, **options)
            assert python in str(caught.value)
            assert "--" not in str(caught.value)
            if shell is not None:
                assert main([str(picture), "--model", model, "--out", str(tmp_path)]) == 2
                said = capsys.readouterr().err
                assert shell in said
                assert "=" not in said
        prepared = ["--size", "64", "--mean", "0", "--std", "1", "--out", str(tmp_path), "--model", model]
        assert main([str(plane), *prepared, "--target", "cat"]) == 2
        assert "pass --labels FILE or a class index" in capsys.readouterr().err
        assert main([str(plane), *prepared, "--layer", "(the model)"]) == 2
        assert "leave out --layer" in capsys.readouterr().err


BARE = """
import torch
def make():
    return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 8, 8), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_the_completion_that_is_installed_completes_commands_and_options(tmp_path: Path) -> None:
    done = run("--install-completion", "--shell", "bash", HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    script = Path(re.search(r"wrote (\S+);", done.stdout)[1])
    assert script.is_relative_to(tmp_path)
    for words, expected in (
        ("camkit che", "check"),
        ("camkit layers --mod", "--model"),
        ("camkit --over", "--overwrite"),
    ):
        code = (
            f"source {script}; COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); "
            f"COMP_LINE='{words}'; COMP_POINT={len(words)}; $(complete -p camkit | grep -o '_[a-z_]*camkit[a-z_]*'); "
            'printf "%s\\n" "${COMPREPLY[@]}"'
        )
        shown = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=False)
        assert expected in shown.stdout.split(), shown


class TestInProcess:
    def test_folders_and_globs(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        for name in ("a/x.png", "b/x.png", "b/y.png"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            cv2.imwrite(str(tmp_path / name), np.full((40, 60, 3), 90, np.uint8))
        (tmp_path / "a" / "notes.txt").write_text("not a picture")
        arguments = [tmp_path / "a", tmp_path / "b" / "*.png", "--model", "demo-fair", "--out", tmp_path / "out"]
        assert main(list(map(str, arguments))) == 0
        assert files_in(tmp_path / "out") == ["a/x.png.gradcam.png", "b/x.png.gradcam.png", "b/y.png.gradcam.png"]
        assert capsys.readouterr().out.count("wrote") == 3

    def test_top_k_gives_a_picture_each(self, plane: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([str(plane), "--model", "demo-fair", "--top-k", "3", "--out", str(tmp_path), "--json"]) == 0
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [row["probability"] for row in rows] == sorted((row["probability"] for row in rows), reverse=True)
        assert len({row["file"] for row in rows}) == 3

    def test_targets_methods_layers_and_styles(self, plane: Path, tmp_path: Path) -> None:
        for method in ("gradcam", "fullgrad"):
            arguments = ["--model", "demo-fair", "--method", method, "--out", tmp_path, "--style", "side-by-side"]
            assert main(list(map(str, [plane, *arguments, "--target", "car", "--target", "0"]))) == 0
            assert (tmp_path / f"plane-sky.{method}.1-car.jpg").is_file()
            assert (tmp_path / f"plane-sky.{method}.2-plane.jpg").is_file()

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["x.png", "--model", "resnet5"], "did you mean 'resnet50'"),
            (["x.png", "--model", "demo-fair", "--method", "gradcm"], "did you mean 'gradcam'"),
            (["x.png", "--model", "demo-fair", "--layer", "featurs"], "did you mean 'features'"),
            (["x.png", "--model", "demo-fair", "--target", "plain"], "did you mean 'plane'"),
            (["x.png", "--model", "demo-fair", "--style", "overly"], "did you mean 'overlay'"),
            (["x.png", "--model", "demo-fair", "--alpha", "2"], "between 0 and 1"),
            (["x.png", "--model", "demo-fair", "--top-k", "0"], "must be a whole number from 1"),
            (["x.png", "--model", "demo-fair", "--top-k", "2", "--target", "car"], "cannot be combined"),
            (
                [str(camkit.scenes.scene_paths()["plane-sky"]), "--model", "demo-fair", "--top-k", "9"],
                "there are no 9 best",
            ),
            (["x.png", "--model", "demo-fair", "--device", "tpu9"], "cannot be used"),
            (["x.png", "--model", "demo-fair", "--weights", "none.pth"], "no weights file none.pth"),
            (["--model", "demo-fair"], "name at least one picture"),
            (["x.png", "--model", "demo-fair", "--out", "/dev/null/x"], "cannot write into the folder"),
        ],
    )
    def test_a_wrong_call_is_one_sentence_and_exit_code_2(
        self, arguments: list[str], said: str, empty_folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert refuse(arguments, said, capsys) == ""

    def test_a_part_of_a_label_suggests_the_labels_that_contain_it(
        self, plane: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "labels.txt").write_text("tiger cat\ncart\nracoon\nEgyptian cat, Felis catus\n")
        assert main([str(plane), "--model", "demo-fair", "--labels", f"{tmp_path}/labels.txt", "--target", "cat"]) == 2
        assert "did you mean 'tiger cat' or 'Egyptian cat, Felis catus' or 'cart'?" in capsys.readouterr().err

    def test_without_network_the_error_says_what_to_type(
        self, plane: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("TORCH_HOME", str(tmp_path))
        for name in ("https_proxy", "HTTPS_PROXY"):
            monkeypatch.setenv(name, "http://127.0.0.1:9")
        assert main([str(plane), "--model", "resnet18"]) == 2
        said = capsys.readouterr().err
        assert "--weights FILE" in said
        assert "camkit demo" in said
        assert "Traceback" not in said

    @pytest.mark.parametrize("arguments", [["x.png"], ["x.png", "--model", "demo-fair", "--wrong"], ["layers"]])
    def test_a_wrong_option_is_exit_code_2(self, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        assert main(arguments) == 2
        captured = capsys.readouterr()
        assert "--" in captured.err + captured.out

    def test_a_model_that_fails_is_exit_code_4(
        self, plane: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def broken(*_: object) -> None:
            raise ValueError("the weights are cursed")

        monkeypatch.setattr(camkit.scenes.SceneNet, "forward", broken)
        assert main([str(plane), "--model", "demo-fair", "--out", str(tmp_path)]) == 4
        assert "ValueError: the weights are cursed" in capsys.readouterr().err

    def test_a_drawing_that_fails_is_a_row_and_exit_code_4(
        self, plane: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        other = tmp_path / "other.jpg"
        other.write_bytes(plane.read_bytes())
        draw = camkit.Explanation.overlay

        def broken(found: camkit.Explanation, **options: Any) -> Any:
            if found.source == str(plane):
                raise MemoryError("no room")
            return draw(found, **options)

        monkeypatch.setattr(camkit.Explanation, "overlay", broken)
        assert main([str(plane), str(other), "--model", "demo-fair", "--out", str(tmp_path)]) == 4
        captured = capsys.readouterr()
        assert "MemoryError: no room" in captured.err
        assert "other.gradcam.png" in captured.out

    def test_alone_it_shows_its_help(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([]) == 0
        assert "--model" in capsys.readouterr().out

    def test_runs_with_other_layers_and_targets_leave_each_others_files(self, plane: Path, tmp_path: Path) -> None:
        for options in ([], ["--target", "bird"], ["--target", "car"], ["--layer", "features"]):
            assert main([str(plane), "--model", "demo-fair", "--out", str(tmp_path), *options]) == 0
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            "plane-sky.gradcam.bird.png",
            "plane-sky.gradcam.car.png",
            "plane-sky.gradcam.features.png",
            "plane-sky.gradcam.png",
        ]

    @pytest.mark.parametrize(
        "wrong",
        [
            "PICTURE --model demo-fair --method none",
            "check SCENES --model demo-fair --baseline none.json",
            "mend nothere --model demo-fair --export out/deep",
        ],
    )
    def test_a_wrong_call_leaves_no_folder(self, plane: Path, tmp_path: Path, wrong: str) -> None:
        own = {
            "PICTURE": str(plane),
            "SCENES": str(camkit.scenes.labelled_scenes()),
            "out/deep": str(tmp_path / "out" / "deep"),
        }
        out = [] if "--export" in wrong else ["--out", str(tmp_path / "out")]
        assert main([*(own.get(word, word) for word in wrong.split()), *out]) == 2
        assert not (tmp_path / "out").exists()

    def test_the_preprocessing_for_local_weights_is_reported_once(
        self, plane: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        state = torchvision.models.squeezenet1_1(num_classes=3).state_dict()
        torch.save(state, tmp_path / "mine.pth")
        arguments = [
            plane,
            camkit.scenes.scene_paths()["plane-wood"],
            "--model",
            "squeezenet1_1",
            "--weights",
            tmp_path / "mine.pth",
        ]
        assert main([*map(str, arguments), "--out", str(tmp_path)]) == 0
        assert capsys.readouterr().err.count("prepared as for torchvision's SqueezeNet1_1_Weights.IMAGENET1K_V1") == 1

    def test_names_longer_than_a_file_system_takes(
        self, plane: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        long = tmp_path / f"{'é' * 120}.jpg"
        long.write_bytes(plane.read_bytes())
        arguments = [long, tmp_path / f"{'é' * 200}.jpg", "--model", "demo-fair", "--out", tmp_path / "out"]
        assert main(list(map(str, arguments))) == 2
        assert "too long" in capsys.readouterr().err
        assert len(list((tmp_path / "out").iterdir())) == 1

    def test_layers_lists_calls_and_the_choice(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["layers", "--model", "demo-fair"]) == 0
        out = capsys.readouterr().out
        assert "explain would use features: the deepest 16x16 grid" in out
        assert "next best:" in out
        assert "sharpen" not in out  # the grid is fine enough
        chosen = [line for line in out.splitlines() if line.startswith(">")]
        assert len(chosen) == 1
        assert "16x16" in chosen[0]

    @pytest.mark.parametrize("name", represented_by("demo-fair", among=["resnet18", "demo-fair"]))
    def test_layers_names_the_layers_that_explain_uses(self, name: str, capsys: pytest.CaptureFixture[str]) -> None:
        model = camkit.load_model(name, pretrained=name == "demo-fair")
        explained = camkit.explain(model, next(iter(camkit.scenes.scene_paths().values()))).layer
        assert main(["layers", "--model", name]) == 0
        out = capsys.readouterr().out
        assert f"explain would use {explained}: " in out
        marked = [line.split()[1] for line in out.splitlines() if line.startswith(">")]
        assert marked == ([] if explained == "whole model" else explained.split("+"))
        assert main(["layers", "--model", name, "--quiet"]) == 0
        assert capsys.readouterr().out.strip() == explained

    def test_methods_lists_every_method_with_its_paper(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["methods"]) == 0
        out = capsys.readouterr().out
        assert all(method.name in out and method.paper.split(",")[0] in out for method in camkit.METHODS.values())
        assert out.splitlines()[-1].startswith("auto, the default,")

    @pytest.mark.parametrize(
        ("command", "source", "raised"),
        rows_represented(
            lambda command, source, raised: (
                (raised == "SystemExit(0)" and (source == "forward" or command == "check"))
                or (command, source, raised) == ("check", "forward", "GeneratorExit")
            ),
            [
                (command, source, raised)
                for command in ("check", "diagnose", "features", "layers", "")
                for source in SOURCES
                for raised in ("SystemExit(0)", "SystemExit(None)", "GeneratorExit", "KeyboardInterrupt")
                if (source == "forward" or raised == "SystemExit(0)")
                and (command in ("check", "") or source != "thread")
            ],
        ),
    )
    def test_nothing_that_the_users_code_raises_ends_with_0_or_as_a_verdict(
        self, plane: Path, tmp_path: Path, command: str, source: str, raised: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "net.py").write_text(QUITS.replace("SOURCE", repr(source)).replace("RAISED", raised))
        data = tmp_path / "data"
        for number in range(6):
            picture = data / ("plane", "ship")[number % 2] / f"{number}.png"
            picture.parent.mkdir(parents=True, exist_ok=True)
            cv2.imwrite(str(picture), np.random.default_rng(number).integers(0, 255, (64, 64, 3), dtype=np.uint8))
        inputs = {"check": [data], "layers": []}.get(command, [plane])
        options = ["--model", f"{tmp_path / 'net.py'}:make"]
        options += [] if command == "layers" else ["--out", str(tmp_path / "out")]
        code = main([*filter(None, [command]), *map(str, inputs), *options])
        captured = capsys.readouterr()
        assert code in ((130,) if raised == "KeyboardInterrupt" else (2, 4)), captured
        assert "Traceback" not in captured.err
        assert not any(verdict in captured.out for verdict in ("PASS", "WARN", "FAIL"))
        assert not (tmp_path / "out" / "report.json").exists()

    @pytest.mark.parametrize("source", ["forward", "preprocess"])
    @pytest.mark.parametrize(
        ("raised", "said"),
        [
            ("BrokenPipeError('enough')", "BrokenPipeError: enough"),
            ("__import__('cyclopts').CycloptsError('enough')", "CycloptsError: enough"),
            ("StopIteration('enough')", "StopIteration: enough"),
        ],
    )
    def test_an_error_of_the_users_code_does_not_pass_for_one_of_the_command_itself(
        self, plane: Path, tmp_path: Path, source: str, raised: str, said: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "net.py").write_text(QUITS.replace("SOURCE", repr(source)).replace("RAISED", raised))
        assert main([str(plane), "--model", f"{tmp_path / 'net.py'}:make", "--out", str(tmp_path / "out")]) == 4
        place = f"{tmp_path / 'net.py'}, line 6"
        assert f"the model or the program failed in {place}: {said}" in capsys.readouterr().err

    def test_drawings_have_no_control_characters_in_their_names(self, plane: Path, tmp_path: Path) -> None:
        odd = tmp_path / "a\x1b[2J\u202e\nb.jpg"
        odd.write_bytes(plane.read_bytes())
        out = tmp_path / "out"
        assert main([str(odd), "--model", "demo-fair", "--out", str(out)]) == 0
        assert main(["features", str(odd), "--model", "demo-fair", "--out", str(out)]) == 0
        assert {file.name for file in out.iterdir()} == {
            "a-[2J--b-d0851533.gradcam.png",  # the checksum tells it from a picture that is called so
            "a-[2J--b-d0851533.features.features.png",
        }

    @pytest.mark.parametrize("body", ["exit_code = 0", "__str__ = lambda error: sys.exit(0)"])
    def test_an_error_of_the_users_own_class_does_not_end_with_0(self, tmp_path: Path, plane: Path, body: str) -> None:
        base = "import camkit\nclass Own(camkit.errors.CamkitError):\n    BODY\n"
        if "str" in body:
            base = "class Own(RuntimeError):\n    BODY\n"
        source = QUITS.replace("SOURCE", "'forward'").replace("RAISED", "Own")
        (tmp_path / "net.py").write_text("import sys\n" + base.replace("BODY", body) + source)
        (tmp_path / "data" / "plane").mkdir(parents=True)
        (tmp_path / "data" / "plane" / plane.name).write_bytes(plane.read_bytes())
        options = ["--model", f"{tmp_path / 'net.py'}:make", "--out", str(tmp_path / "out")]
        assert main(["check", str(tmp_path / "data"), *options]) == 4
        assert main([str(plane), *options]) == 4

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
    def test_an_error_that_cannot_be_printed_keeps_its_exit_code(self) -> None:
        with Path("/dev/full").open("w") as full:
            done = subprocess.run([CAMKIT, "check", ""], stderr=full, stdout=subprocess.PIPE, check=False, timeout=300)
        assert done.returncode == 2

    @pytest.mark.parametrize("arguments", [[""], ["check", ""], ["check", "--data="], ["--out", "", "--model", "x"]])
    def test_an_empty_argument_is_not_the_current_folder(
        self, arguments: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(arguments) == 2
        assert "is empty; if it comes from a variable" in capsys.readouterr().err

    def test_names_cannot_control_the_terminal_or_the_log(
        self, plane: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        names = ["::error::a.jpg", "##[error]b.jpg", "c\x1b[31m\n::error::x\x9b\u202egpj.jpg", "d\udcff\u2028.jpg"]
        for number, name in enumerate(names):
            (tmp_path / name).write_bytes(plane.read_bytes() if number % 2 else b"")
        labels = tmp_path / "labels.json"
        labels.write_text(json.dumps(["::x", "\x1b]0;taken\x07", "a\n::error::b", "\u2066c"]))
        monkeypatch.chdir(tmp_path)
        calls = [
            [".", "--model", "demo-fair", "--labels", "labels.json", "--top-k", "4"],
            [".", "--model", "demo-fair", "--labels", "labels.json", "--top-k", "4", "--csv"],
            ["compare", ".", "--model", "demo-fair", "--labels", "labels.json", "--method", "gradcam"],
            ["::x\x1b[1m\n::error::none", "--model", "\x1b[31m\n::error::"],
            ["--wrong\x1b[31m\n::error::", "x"],
            ["check", ".", "--model", "demo-fair", "--class-map", "\x1b[31m\n::y"],
        ]
        for call in calls:
            assert main(call) == 2
            captured = capsys.readouterr()
            for text in (captured.out, captured.err):
                assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u202e\u2066]", text)
                assert not [line for line in text.splitlines() if line.strip().startswith("::") or "##[" in line]

    def test_names_with_markup_are_text(self, plane: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        odd = tmp_path / "[red]x[bold].jpg"
        odd.write_bytes(plane.read_bytes())
        assert main([str(odd), "--model", "demo-fair", "--out", str(tmp_path)]) == 0
        assert "[red]x[bold].jpg" in capsys.readouterr().out


def test_files_are_explained_with_a_function_and_named_after_it(plane: Path, tmp_path: Path) -> None:
    def positive(activations: torch.Tensor, gradients: torch.Tensor) -> torch.Tensor:
        return gradients.relu()

    model = camkit.load_model("demo-fair")
    named = camkit.explain(model, plane, method="layercam")
    for method, name in (
        (positive, "positive"),
        (lambda _, gradients: gradients.relu(), "lambda"),
        (camkit.METHODS["layercam"], "layercam"),
    ):
        (row,) = run_folder(model, [plane], tmp_path, method=method)
        assert isinstance(named, camkit.Explanation)
        assert np.array_equal(row.explanation.raw, named.raw)
        assert row.file == tmp_path / f"{plane.stem}.{name}.jpg"
        assert row.file.exists()


def damaged_tiffs() -> dict[str, bytes]:
    """Return TIFF files about which libtiff and Pillow print lines of their own."""
    pixels = np.random.default_rng(0).integers(0, 256, (40, 56, 3), dtype=np.uint8)
    packed, plain = io.BytesIO(), io.BytesIO()
    Image.fromarray(pixels).save(packed, "TIFF", compression="tiff_deflate")
    Image.fromarray(pixels).save(plain, "TIFF", description="x" * 100)
    broken = bytearray(packed.getvalue())
    broken[200:260] = b"\xff" * 60
    entry = struct.pack("<HHI", 270, 2, 101), struct.pack("<HHI", 270, 2, 1 << 24)  # a description of 16 MB
    return {"broken.tif": bytes(broken), "greedy.tif": plain.getvalue().replace(*entry)}


@pytest.mark.extended
def test_libraries_print_neither_their_paths_nor_lines_of_their_own(tmp_path: Path) -> None:
    for name, data in damaged_tiffs().items():
        (tmp_path / name).write_bytes(data)

    lines = run(tmp_path, "--model", "demo-fair", "--out", tmp_path / "out").stderr.splitlines()
    assert len(lines) == 2, lines
    assert sum(line.startswith("camkit: note: ") for line in lines) == 1
    assert sum("broken.tif  error: " in line for line in lines) == 1
    assert not [line for line in lines if "site-packages" in line]


def powerless() -> None:
    """Give up the right of the superuser to read everything, so that a folder can be unreadable in a test."""
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in (1, 2):  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, in linux/capability.h
        libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP


@pytest.mark.skipif(sys.platform != "linux", reason="pipes, loops of links and rights as on Linux")
class TestFolders:
    @pytest.mark.extended
    def test_what_cannot_be_read_is_a_row_for_explain_and_refused_by_check(self, plane: Path, tmp_path: Path) -> None:
        folder = tmp_path / "in"
        for name in (
            "in/a.jpg",
            "in/locked/b.jpg",
            "in/z/c.jpg",
            "data/cat/a.jpg",
            "data/dog/b.jpg",
            "masks/cat/a.png",
        ):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(plane.read_bytes())
        (folder / "loop.jpg").symlink_to(folder / "loop.jpg")
        (folder / "loops").symlink_to(folder / "loops")
        (folder / "gone.jpg").symlink_to(folder / "nowhere.jpg")
        os.mkfifo(folder / "pipe.jpg")
        mask = Image.new("L", cv2.imread(str(plane)).shape[1::-1])
        mask.paste(255, (30, 30, 90, 90))
        mask.save(tmp_path / "masks/cat/a.png")
        explain = [str(folder), "--model", "demo-fair", "--json", "--out", str(tmp_path / "out")]
        check = ["check", str(tmp_path / "data"), "--model", "demo-fair", "--out", str(tmp_path / "out")]
        calls = [("in/locked", explain), ("data", check), ("data/dog", check), ("masks/cat", check)]
        code = "import os\nfrom camkit.cli import main\n" + "\n".join(
            f"os.chmod({str(tmp_path / name)!r}, 0)\nprint(main({call}))\nos.chmod({str(tmp_path / name)!r}, 0o700)"
            for name, call in calls
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, preexec_fn=powerless, check=True
        )
        *rows, code, _, _, _ = done.stdout.splitlines()
        assert (code, done.stdout.splitlines()[-3:]) == ("2", ["2"] * 3), done.stderr
        rows = [json.loads(row) for row in rows]
        said = {Path(row["source"]).relative_to(folder).as_posix(): row.get("error", "") for row in rows}
        assert [name for name, error in said.items() if not error] == ["a.jpg", "z/c.jpg"]
        assert "is a pipe or a device" in said["pipe.jpg"]
        assert "Too many levels of symbolic links" in said["loop.jpg"]
        assert "there is no file" in said["gone.jpg"]
        assert "Permission denied" in said["locked"]
        for (name, _), line in zip(calls[1:], done.stderr.splitlines()[-3:], strict=True):
            assert f"{tmp_path / name} cannot be read" in line

    def test_no_option_waits_for_a_pipe_or_reads_a_device(
        self, plane: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for name in ("p", "p.json", "p.csv", "p.xml", "p.toml", "p.pth", "p.index.json", "out/unfinished.jsonl"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            os.mkfifo(tmp_path / name)
        for name in ("cat/a.jpg", "dog/b.jpg"):
            (tmp_path / "data" / name).parent.mkdir(parents=True)
            (tmp_path / "data" / name).write_bytes(plane.read_bytes())
        explain = [str(plane), "--model", "demo-fair", "--out", str(tmp_path / "drawn")]
        classes = tmp_path / "map.json"
        classes.write_text('{"cat": 0, "dog": 1}')
        check = ["check", str(tmp_path / "data"), "--model", "demo-fair", "--out", str(tmp_path / "out")]
        check += ["--class-map", str(classes)]
        calls = [[*explain, "--weights", str(tmp_path / name)] for name in ("p.pth", "p.index.json")]
        calls += [[*explain, "--labels", str(tmp_path / name)] for name in ("p", "p.json")]
        calls += [[*explain, option, "/dev/zero"] for option in ("--weights", "--labels")]
        calls += [[*explain, "--target", "0", "--mask", str(tmp_path / "p")]]
        calls += [[*check, "--regions", str(tmp_path / name)] for name in ("p.json", "p.csv", "p.xml")]
        calls += [[*check, "--config", str(tmp_path / "p.toml")], [*check, "--baseline", str(tmp_path / "p.json")]]
        calls += [[*check, "--resume"], [*check[:-1], str(tmp_path / "p.json")]]
        assert [main(call) for call in calls] == [2] * len(calls)
        said = [line for line in capsys.readouterr().err.splitlines() if "using the config" not in line]
        assert all("is a pipe or a device; save its contents to a file" in line for line in said), said
        assert len(said) == len(calls)

    def test_a_pipe_among_the_pictures_does_not_stop_a_check(
        self, plane: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for name in ("plane/a.jpg", "ship/a.jpg"):
            (tmp_path / "data" / name).parent.mkdir(parents=True)
            (tmp_path / "data" / name).write_bytes(plane.read_bytes())
        os.mkfifo(tmp_path / "data/plane/b.jpg")
        os.mkfifo(tmp_path / "data.yaml")
        for data, code in ((tmp_path / "data", 3), (tmp_path / "data.yaml", 2)):
            assert main(["check", str(data), "--model", "demo-fair", "--out", str(tmp_path / "out")]) == code
        assert "data.yaml is a pipe or a device; save its contents to a file" in capsys.readouterr().err
        assert "b.jpg is a pipe or a device" in (tmp_path / "out/report.json").read_text()

    def test_masks_beside_pictures_are_not_explained(
        self, plane: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        mask = np.zeros((60, 60), np.uint8)
        mask[10:30, 10:30] = 255
        (tmp_path / "gt").mkdir()
        for name in ("a.jpg", "b_gt.png"):  # without b beside it, the second is a picture
            (tmp_path / name).write_bytes(plane.read_bytes())
        for name in ("a_gt.png", "gt/a.png"):
            cv2.imwrite(str(tmp_path / name), mask)
        for pattern in ("", "*"):
            call = [str(tmp_path / pattern), "--model", "demo-fair", "--out", str(tmp_path / "out"), "--json"]
            assert main(call) == 0
            rows = capsys.readouterr().out.splitlines()
            assert [Path(json.loads(row)["source"]).name for row in rows] == ["a.jpg", "b_gt.png"]

    @pytest.mark.parametrize("pattern", represented_by("*", among=["", "*", "**/*.png"]))
    def test_camkits_own_drawings_are_not_explained(
        self, plane: Path, tmp_path: Path, pattern: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        cv2.imwrite(str(tmp_path / "plane.png"), cv2.imread(str(plane)))
        for out in (tmp_path, tmp_path / "sub", tmp_path):
            assert main([str(tmp_path / pattern), "--model", "demo-fair", "--out", str(out), "--json"]) == 0
            rows = capsys.readouterr().out.splitlines()
            assert [json.loads(row)["source"] for row in rows] == [str(tmp_path / "plane.png")]
        drawing = tmp_path / "plane.png.gradcam.png"
        assert main([str(drawing), "--model", "demo-fair", "--out", str(tmp_path)]) == 0, (
            "if it is named, it is explained"
        )
