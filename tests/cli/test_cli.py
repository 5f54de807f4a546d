"""The installed command, as a person types it."""

import csv
import ctypes
import io
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import cv2
import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from tiers import represented_by, rows_represented

import camkit
from camkit.cli import app, main
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
SOURCES = ("factory", "preprocess", "import", "thread")
EXITS = ("SystemExit(0)", "SystemExit(None)", "GeneratorExit", "KeyboardInterrupt")
OTHERS = ("diagnose", "features", "layers")

COMMANDS = ("check", "compare", "concepts", "diagnose", "features", "judge", "layers", "methods", "demo")
CAMKIT = str(Path(sys.executable).parent / "camkit")
PLANE, WOOD = (camkit.scenes.scene_paths()[name] for name in ("plane-sky", "plane-wood"))
Capsys: TypeAlias = pytest.CaptureFixture[str]
PIPES: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command, env = [CAMKIT, *map(str, arguments)], {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=env)


def python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)


def explain(*arguments: object) -> int:
    return main([*map(str, arguments), "-m", "demo-fair"])


def place(folder: Path, *names: str) -> list[Path]:
    """Copy the plane into a folder under these names."""
    files = [folder / name for name in names]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(PLANE.read_bytes())
    return files


def quitting(folder: Path, source: str, raised: str) -> list[str]:
    """Return the options for a network that raises something in one place."""
    (folder / "net.py").write_text(QUITS.replace("SOURCE", repr(source)).replace("RAISED", raised))
    return ["--model", f"{folder / 'net.py'}:make"]


def files_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an empty folder the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


class TestInstalled:
    def test_what_computes_nothing_does_not_import_torch(self) -> None:
        calls = [[], ["--help"], ["--version"], ["methods"], *([command, "--help"] for command in COMMANDS)]
        done = python(
            "import json, sys\n"
            "from camkit.cli import main\n"
            "for call in json.loads(sys.argv[1]):\n"
            "    print(call, main(call), 'torch' in sys.modules, file=sys.stderr)\n",
            json.dumps(calls),
        )
        assert done.stderr.splitlines() == [f"{call} 0 False" for call in calls]
        assert "\nUsage: camkit PICTURES --model NAME" in done.stdout
        assert camkit.__version__ in done.stdout
        methods = camkit.METHODS.values()
        assert all(method.name in done.stdout and method.paper.split(",")[0] in done.stdout for method in methods)

    def test_without_arguments_one_screen_names_all_commands_and_three_examples(self) -> None:
        done = run()
        lines = done.stdout.splitlines()
        assert (done.returncode, done.stderr) == (0, "")
        assert len(lines) <= 24
        assert max(map(len, lines)) <= 80
        assert [name for name in app if not name.startswith("-") and f"\n  {name} " not in done.stdout] == []
        examples = [shlex.split(line, comments=True)[1:] for line in lines if re.match(r"camkit .* #", line)]
        assert len(examples) == 3
        for arguments in examples:
            app.parse_args(arguments, print_error=False, exit_on_error=False)

    def test_explaining_imports_no_product(self, tmp_path: Path) -> None:
        done = python(
            "import sys\n"
            "from camkit.cli import main\n"
            "code = main(sys.argv[1:])\n"
            "print(code, *sorted(sys.modules), sep='\\n', file=sys.stderr)\n",
            PLANE,
            *("--model", "demo-fair", "--style", "overlay", "--out", tmp_path / "new" / "folder"),
        )
        code, *modules = done.stderr.splitlines()
        assert code == "0"
        assert "plane" in done.stdout
        assert "layer features" in done.stdout
        assert "deepest 16x16 grid" in done.stdout
        written = cv2.imread(str(tmp_path / "new" / "folder" / "plane-sky.gradcam.jpg"))
        assert written.shape == cv2.imread(str(PLANE)).shape
        assert "camkit.explaining.explainer" in modules
        products = ("app", "background", "cli.analyses", "inspect", "metrics", "sentences", "tensorboard")
        needless = (*(f"camkit.{product}" for product in products), "scipy", "pycocotools")
        needless += ("pydantic", "jinja2", "junitparser", "torchinfo", "matplotlib", "pandas")
        assert not [name for name in modules if name.startswith(needless)]

    @pytest.mark.extended
    def test_a_reader_that_goes_away_ends_it_quietly(self, tmp_path: Path) -> None:
        pictures = place(tmp_path, *(f"{number}.jpg" for number in range(60)))
        options = ["--model", "demo-fair", "--out", str(tmp_path / "out"), "--batch-size", "1"]
        with subprocess.Popen([CAMKIT, *map(str, pictures), *options], **PIPES) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            assert b"plane" in process.stdout.readline()
            process.stdout.close()
            said = process.stderr.read()
            assert process.wait(timeout=300) == 141
        assert said == b""

    def test_ctrl_c_says_how_many_pictures_are_finished(self, tmp_path: Path) -> None:
        pictures = place(tmp_path, *(f"{number}.jpg" for number in range(300)))
        options = ["--model", "demo-fair", "--batch-size", "1", "--json", "--table", "t.csv"]
        command = [CAMKIT, *map(str, pictures), *options]
        with subprocess.Popen(command, cwd=tmp_path, bufsize=0, **PIPES) as process:  # a buffer would keep later rows
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
    def test_a_full_disk_behind_the_output_is_one_sentence(self, tmp_path: Path) -> None:
        command = [CAMKIT, str(PLANE), "--model", "demo-fair", "--json", "--out", str(tmp_path)]
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(command, check=False, stdout=full, stderr=subprocess.PIPE, text=True, timeout=300)
            wrong = subprocess.run([CAMKIT, "check", ""], check=False, stderr=full, timeout=300)
            text = [CAMKIT, "layers", "--model", "demo-fair"]
            table = subprocess.run(text, check=False, stdout=full, stderr=subprocess.PIPE, text=True, timeout=300)
        assert done.returncode == table.returncode == 2
        for said in (done.stderr, table.stderr):
            assert "camkit: the output cannot be written: No space left on device; earlier rows are kept" in said
        assert wrong.returncode == 2, "an error that cannot be printed keeps its exit code"

    @pytest.mark.extended
    def test_names_the_terminal_cannot_show_are_spelled_out(self, tmp_path: Path) -> None:
        (odd,) = place(tmp_path, "vögel.jpg")
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
def tree(tmp_path: Path) -> Path:
    """A folder with pictures of the same name, below each other and with other suffixes."""
    place(tmp_path / "in", "cat.jpg", "2020/cat.jpg", "2020/deep/dog.jpg")
    Image.open(PLANE).save(tmp_path / "in" / "cat.png")
    (tmp_path / "in" / "notes.txt").write_text("not a picture")
    return tmp_path / "in"


class TestNamesOfDrawings:
    @pytest.mark.parametrize(
        ("inputs", "drawings"),
        [
            (".", "2020/cat.gradcam 2020/deep/dog.gradcam cat.gradcam cat.png.gradcam"),
            (". --no-recursive", "cat.gradcam cat.png.gradcam"),
            ("2020 2020/deep --no-recursive", "2020/cat.gradcam deep/dog.gradcam"),
            ("2020/deep *.png", "deep/dog.gradcam in/cat.png.gradcam"),
            ("cat.jpg 2020/cat.jpg", "2020/cat.gradcam in/cat.gradcam"),
            ("cat.jpg --target bird", "cat.gradcam.bird"),
            ("cat.jpg --target car --target 0", "cat.gradcam.1-car cat.gradcam.2-plane"),
            ("cat.jpg --layer features", "cat.gradcam.features"),
            ("cat.jpg --method fullgrad", "cat.fullgrad"),
        ],
    )
    def test_no_picture_and_no_run_with_other_settings_is_drawn_over_another(
        self, tree: Path, tmp_path: Path, inputs: str, drawings: str
    ) -> None:
        first, *more = inputs.split(" --")
        options = [word for option in more for word in f"--{option}".split()]
        assert explain(*(tree / name for name in first.split()), *options, "-o", tmp_path / "out") == 0
        assert files_in(tmp_path / "out") == [f"{drawing}.png" for drawing in drawings.split()]

    def test_a_name_does_not_depend_on_other_pictures(self, tree: Path, tmp_path: Path) -> None:
        for picture in sorted(path for path in tree.rglob("*.*g")):
            alone = tmp_path / "alone" / picture.relative_to(tree).parent
            assert explain(picture, "-o", alone) == 0
        assert explain(tree, "-o", tmp_path / "together") == 0
        assert files_in(tmp_path / "alone") == files_in(tmp_path / "together")

    def test_a_folder_may_look_like_a_file(self, tree: Path, tmp_path: Path) -> None:
        (tmp_path / "run.old").mkdir()
        for folder in ("run.old", "run-2.1"):
            assert explain(tree / "cat.jpg", "-o", tmp_path / folder) == 0
            assert files_in(tmp_path / folder) == ["cat.gradcam.png"]

    def test_a_drawing_replaces_drawings_alone(self, tree: Path, tmp_path: Path, capsys: Capsys) -> None:
        out, file = tmp_path / "out", tmp_path / "out" / "cat.gradcam.png"
        out.mkdir()
        file.write_bytes(b"mine")
        assert explain(tree / "cat.jpg", "-o", out) == 2
        assert "pass --overwrite" in capsys.readouterr().err
        assert file.read_bytes() == b"mine"
        assert explain(tree / "cat.jpg", "-o", out, "--overwrite") == 0
        before = cv2.imread(str(file))
        assert explain(tree / "cat.jpg", "-o", out, "--colormap", "jet") == 0
        assert (before != cv2.imread(str(file))).any()
        assert files_in(out) == ["cat.gradcam.png"]

    @pytest.mark.parametrize("name", ["heat.png", "new/heat.jpg"])
    @pytest.mark.parametrize("command", [[], ["features"]])
    def test_one_picture_can_be_drawn_into_a_named_file(
        self, tree: Path, tmp_path: Path, name: str, command: list[str]
    ) -> None:
        assert explain(*command, tree / "cat.jpg", "-o", tmp_path / "out" / name) == 0
        assert files_in(tmp_path / "out") == [name]
        assert cv2.imread(str(tmp_path / "out" / name)) is not None

    def test_reports_of_two_models_are_kept(self, tree: Path, tmp_path: Path) -> None:
        for model in ("demo-fair", "demo-biased", "demo-fair"):
            for command in (["features", "--layer", "features.2"], ["diagnose"]):
                assert main([*command, str(tree / "cat.jpg"), "-m", model, "-o", str(tmp_path / "out"), "-q"]) == 0
        assert files_in(tmp_path / "out") == [
            *("before-diagnose.json", "before-diagnose.png"),
            *("cat.features.features.2.png", "diagnose.json", "diagnose.png"),
        ]


WRONG: list[tuple[list[str], str]] = [
    (["chek"], "'chek' is neither a command nor a file; did you mean 'check'?"),
    (["check", "inti", "photos"], "'inti' is neither a command nor a file; did you mean 'init'?"),
    (["help"], "'help' is neither a command nor a file; did you mean '--help'?"),
    (["layers.jpg", "-m", "demo-fair"], "layers.jpg  error: there is no file layers.jpg"),
    (["https://a.org/b.jpg", "-m", "demo-fair"], "https://a.org/b.jpg is a URL, but camkit reads only"),
    (["check", "https://a.org/b", "-m", "demo-fair"], "https://a.org/b is a URL, but camkit reads only"),
    (["-", "-m", "demo-fair"], "camkit does not read pictures from standard input; save the picture to a file"),
    ([""], "is empty; if it comes from a variable"),
    (["check", "--data="], "--data is empty; if it comes from a variable"),
    (["--out", "", "--model", "x"], "argument 2 is empty; if it comes from a variable"),
    (["-m", "demo-fair"], "name at least one picture"),
    (["a.jpg"], "name the model: --model resnet50"),
    (["layers"], "name the model: --model resnet50"),
    (["a.jpg", "-m", "resnet5"], "did you mean 'resnet50'"),
    (["a.jpg", "-m", "demo-fair", "--weights", "none.pth"], "no weights file none.pth"),
    (["a.jpg", "-m", "demo-fair", "--device", "tpu9"], "cannot be used"),
    (["a.jpg", "-m", "demo-fair", "--layr", "x"], "--layr. Did you mean --layer?"),
    (["a.jpg", "-m", "demo-fair", "--layer", "featurs"], "did you mean 'features'"),
    (["a.jpg", "-m", "demo-fair", "--method", "gradcm"], "did you mean 'gradcam'"),
    (["a.jpg", "-m", "demo-fair", "--target", "plain"], "did you mean 'plane'"),
    (["a.jpg", "-m", "demo-fair", "--top-k", "0"], "must be a whole number from 1"),
    (["a.jpg", "-m", "demo-fair", "--top-k", "2", "--target", "car"], "--top-k and --target cannot be combined"),
    (["a.jpg", "-m", "demo-fair", "--top-k", "2", "--above", "0.5"], "--top-k and --above cannot be combined"),
    (["a.jpg", "-m", "demo-fair", "--box", "1", "--near", "0,0,9,9"], "--box and --near cannot be combined"),
    (["a.jpg", "-m", "demo-fair", "--similar-to", "a.png", "-t", "1"], "--similar-to and --target cannot be combined"),
    (["a.jpg", "-m", "demo-fair", "--threshold", "0.3", "-t", "1"], "leave out --threshold for the best"),
    (["a.jpg", "-m", "demo-fair", "--versus", "1"], "--versus needs one --target"),
    (["a.jpg", "-m", "demo-fair", "--direction", "up", "-t", "0", "-t", "1"], "takes one index"),
    ([str(PLANE), "-m", "demo-fair", "--top-k", "9"], "there are no 9 best"),
    (["a.jpg", "-m", "demo-fair", "--style", "overly"], "did you mean 'overlay'"),
    (["a.jpg", "-m", "demo-fair", "-s", "overlay", "-s", "figure"], "-s specified multiple times"),
    (["a.jpg", "-m", "demo-fair", "--alpha", "2"], "between 0 and 1"),
    (["a.jpg", "-m", "demo-fair", "--max-side", "-1"], "--max-side takes a number of pixels"),
    (["a.jpg", "-m", "demo-fair", "--batch-size=0.5"], "--batch-size takes a whole number, not 0.5"),
    (["check", ".", "-m", "demo-fair", "--seed", "1.5"], "--seed takes a whole number, not 1.5"),
    (["a.jpg", "-c", "nowhere.toml"], "the config nowhere.toml cannot be read: "),
    (["a.jpg", "-m", "demo-fair", "-t", "0", "-q", "-v"], "--quiet and --verbose cannot be combined"),
    (["a.jpg", "-m", "demo-fair", "--json", "--csv"], "--json and --csv cannot be combined"),
    (["a.jpg", "-m", "demo-fair", "--raw"], "it needs --json"),
    (["a.jpg", "-m", "demo-fair", "--no-pictures"], "needs --table"),
    (["a.jpg", "-m", "demo-fair", "--resume"], "needs --table"),
    ([str(PLANE), "-m", "demo-fair", "--table", "t.txt"], "ending in .parquet or .csv"),
    (["a.jpg", "-m", "demo-fair", "--out", "/dev/null/x"], "cannot write into the folder"),
    ([str(PLANE), "-m", "demo-fair", "--out", "foo.xyz"], "camkit cannot write .xyz; use .png, .jpg, .jpeg or another"),
    ([str(PLANE), "-m", "demo-fair", "--format", "jpg", "--out", "heat.png"], "heat.png does not end in .jpg"),
    ([str(PLANE), str(WOOD), "-m", "demo-fair", "-o", "heat.png"], "is one file, but there are 2 pictures; name a"),
    ([str(PLANE), "-m", "demo-fair", "-k", "2", "-o", "heat.png"], "is one file, but there are several targets"),
    (["check", str(WOOD.parent / "labelled/pictures"), "-m", "demo-fair", "--baseline", "none.json"], "none.json"),
    (["mend", "nothere", "-m", "demo-fair", "--export", "out/deep"], "nothere"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "said"), WRONG)
def test_a_wrong_call_is_one_sentence_and_exit_code_2_and_leaves_nothing(
    arguments: list[str], said: str, empty_folder: Path, capsys: Capsys
) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr().err
    assert said in printed
    assert printed.count("\n") == 1
    assert list(empty_folder.iterdir()) == []


class TestWhatIsPrinted:
    def test_the_same_error_of_many_pictures_is_printed_once_with_a_count(self, tmp_path: Path, capsys: Capsys) -> None:
        place(tmp_path, "4.jpg")
        for number in range(4):
            (tmp_path / f"{number}.jpg").write_bytes(b"")
        (tmp_path / "other.jpg").write_text("no picture")
        assert explain(tmp_path, "-o", tmp_path / "out") == 2
        captured = capsys.readouterr()
        assert captured.err.splitlines() == [
            f"{tmp_path / '0.jpg'}  error: {tmp_path / '0.jpg'} is an empty file",
            f"{tmp_path / 'other.jpg'}  error: {tmp_path / 'other.jpg'} is not a picture",
            "3 more pictures have the same error as 0.jpg; --verbose lists them",
        ]
        assert re.fullmatch(
            r"1 explained, 5 failed, 0 empty; [\d.e+]+ pictures a second", captured.out.splitlines()[-1]
        )
        assert explain(tmp_path, "-o", tmp_path / "out", "--verbose") == 2
        assert capsys.readouterr().err.count("is an empty file") == 4

    def test_json_has_no_raw_maps_unless_asked(self, tmp_path: Path, capsys: Capsys) -> None:
        assert explain(PLANE, "-o", tmp_path, "--json", "--top-k", "3") == 0
        captured = capsys.readouterr()
        rows = [json.loads(line) for line in captured.out.splitlines()]
        assert [row["probability"] for row in rows] == sorted((row["probability"] for row in rows), reverse=True)
        assert len({row["file"] for row in rows}) == 3
        assert not [row for row in rows if "raw" in row]
        assert "1 explained, 0 failed, 0 empty" in captured.err
        assert explain(PLANE, "-o", tmp_path, "--json", "--raw") == 0
        assert np.array(json.loads(capsys.readouterr().out)["raw"]).shape == (16, 16)

    def test_a_table(self, tmp_path: Path, capsys: Capsys) -> None:
        (tmp_path / "a, b.jpg").write_bytes(b"")
        assert explain(PLANE, tmp_path / "a, b.jpg", "-o", tmp_path / "out", "--csv", "-k", "2") == 2
        first, second, failed = csv.DictReader(io.StringIO(capsys.readouterr().out))
        assert (first["label"], first["status"]) == ("plane", "ok")
        assert Path(first["file"]).is_file()
        assert 0 <= float(second["probability"]) < float(first["probability"]) <= 1
        assert len(first["peak"].split()) == 2
        assert float(first["scale"]) == float(second["scale"] or first["scale"]) > 0, "two targets share a scale"
        assert failed["source"] == str(tmp_path / "a, b.jpg")
        assert "empty file" in failed["error"]

    def test_quiet_prints_errors_only_and_verbose_more(self, tmp_path: Path, capsys: Capsys) -> None:
        (tmp_path / "bad.jpg").write_bytes(b"")
        torch.save(torchvision.models.squeezenet1_1(num_classes=3).state_dict(), tmp_path / "mine.pth")
        model = ["-m", "squeezenet1_1", "-w", str(tmp_path / "mine.pth"), "-o", str(tmp_path / "out")]
        assert main([str(PLANE), str(WOOD), *model]) == 0
        assert capsys.readouterr().err.count("prepared as for torchvision's SqueezeNet1_1_Weights.IMAGENET1K_V1") == 1
        assert main([str(PLANE), str(tmp_path / "bad.jpg"), *model, "-q"]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert len(captured.err.splitlines()) == 1
        assert "empty file" in captured.err
        assert explain(PLANE, "-o", tmp_path / "out", "-v") == 0
        assert "101,332 parameters on" in capsys.readouterr().err
        assert explain("features", PLANE, "-o", tmp_path, "-q") == 0
        assert capsys.readouterr().out == ""
        assert main(["layers", *quitting(tmp_path, "factory", "ValueError('cursed')"), "-v"]) == 4
        assert "in make" in capsys.readouterr().err

    def test_a_picture_may_be_called_like_a_mistyped_command(self, empty_folder: Path) -> None:
        place(empty_folder, "chek")
        assert explain("chek") == 0
        assert Path("camkit-out/chek.gradcam.png").is_file()

    def test_the_help_lists_the_required_option_first_and_promises_one_value(self, capsys: Capsys) -> None:
        for command in ("", "layers", "diagnose", "features", "concepts", "check"):
            assert main([*command.split(), "--help"]) == 0
            shown = capsys.readouterr().out
            options = re.findall(r"^│ [* ] +(--[\w-]+)", shown, re.MULTILINE)
            assert options[0] == "--model", command
            assert all(short in shown for short in (" -m ", " -q ", " -v ", " -c "))
            assert "..." not in re.sub(r"\(resnet50.*?\)|inferno, \.\.\.|\[ARGS\.\.\.\]", "", shown, flags=re.DOTALL)
        assert shown.startswith("Usage: camkit check DATA --model NAME [OPTIONS]\n")

    def test_advice_fits_the_door(self, tmp_path: Path, capsys: Capsys) -> None:
        (tmp_path / "net.py").write_text(BARE)
        model = f"{tmp_path / 'net.py'}:make"
        tensor = torch.zeros(3, 64, 64)
        for picture, options, python in (
            (PLANE, {}, "preprocess=..."),
            (tensor, {"target": "cat"}, "pass labels=[...]"),
            (tensor, {"target_layer": "(the model)"}, "pass None"),
        ):
            with pytest.raises(InputError) as caught:
                camkit.explain(model, picture, **options)
            assert python in str(caught.value)
            assert "--" not in str(caught.value)
        prepared = ["--size", "64", "--mean", "0", "--std", "1"]
        for more, shell in (
            ([], "pass --size, --mean and --std"),
            ([*prepared, "--target", "cat"], "pass --labels FILE or a class index"),
            ([*prepared, "--layer", "(the model)"], "leave out --layer"),
        ):
            assert main([str(PLANE), *more, "--out", str(tmp_path), "--model", model]) == 2
            said = capsys.readouterr().err
            assert shell in said
            assert "=" not in said


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
    def test_a_drawing_that_fails_is_a_row_and_exit_code_4(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
    ) -> None:
        draw = camkit.Explanation.overlay

        def broken(found: camkit.Explanation, **options: Any) -> Any:
            if found.source == str(PLANE):
                raise MemoryError("no room")
            return draw(found, **options)

        monkeypatch.setattr(camkit.Explanation, "overlay", broken)
        assert explain(PLANE, *place(tmp_path, "other.jpg"), "--out", tmp_path) == 4
        captured = capsys.readouterr()
        assert "MemoryError: no room" in captured.err
        assert "other.gradcam.png" in captured.out

    def test_without_a_terminal_a_table_has_a_line_of_progress_each_minute(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
    ) -> None:
        clock = SimpleNamespace(perf_counter=itertools.count(0, 61).__next__)
        monkeypatch.setattr("camkit.cli.explain.time", clock)
        pictures = place(tmp_path, *(f"{number}.jpg" for number in range(4)))
        assert explain(*pictures, "--table", tmp_path / "t.csv", "--no-pictures") == 0
        assert re.search(r"^camkit: 2 pictures( of 4)?$", capsys.readouterr().err, re.MULTILINE)

    @pytest.mark.parametrize("name", represented_by("demo-fair", among=["resnet18", "demo-fair"]))
    def test_layers_names_the_layers_that_explain_uses(self, name: str, capsys: Capsys) -> None:
        model = camkit.load_model(name, pretrained=name == "demo-fair")
        explained = camkit.explain(model, next(iter(camkit.scenes.scene_paths().values()))).layer
        assert main(["layers", "--model", name]) == 0
        out = capsys.readouterr().out
        assert f"explain would use {explained}: " in out
        assert "next best:" in out
        marked = [line.split() for line in out.splitlines() if line.startswith(">")]
        assert [row[1] for row in marked] == ([] if explained == "whole model" else explained.split("+"))
        if name == "demo-fair":
            assert "explain would use features: the deepest 16x16 grid" in out
            assert "16x16" in marked[0][3]
        assert main(["layers", "--model", name, "--quiet"]) == 0
        assert capsys.readouterr().out.strip() == explained

    @pytest.mark.parametrize(
        ("command", "source", "raised"),
        rows_represented(
            lambda command, source, raised: raised == "SystemExit(0)",
            [
                *((command, "forward", raised) for command in (*OTHERS, "check", "") for raised in EXITS),
                *((command, source, EXITS[0]) for command in ("check", "") for source in SOURCES),
            ],
        ),
    )
    def test_nothing_that_the_users_code_raises_ends_with_0_or_as_a_verdict(
        self, tmp_path: Path, command: str, source: str, raised: str, capsys: Capsys
    ) -> None:
        data = tmp_path / "data"
        for number in range(6):
            picture = data / ("plane", "ship")[number % 2] / f"{number}.png"
            picture.parent.mkdir(parents=True, exist_ok=True)
            cv2.imwrite(str(picture), np.random.default_rng(number).integers(0, 255, (64, 64, 3), dtype=np.uint8))
        inputs = {"check": [data], "layers": []}.get(command, [PLANE])
        options = [] if command == "layers" else ["--out", str(tmp_path / "out")]
        code = main([*filter(None, [command]), *map(str, inputs), *quitting(tmp_path, source, raised), *options])
        captured = capsys.readouterr()
        assert code in ((130,) if raised == "KeyboardInterrupt" else (2, 4)), captured
        assert "Traceback" not in captured.err
        assert not any(verdict in captured.out for verdict in ("PASS", "WARN", "FAIL"))
        assert not (tmp_path / "out" / "report.json").exists()

    @pytest.mark.parametrize("source", ["forward", "preprocess"])
    @pytest.mark.parametrize(
        ("raised", "said"),
        [
            ("ValueError('enough')", "ValueError: enough"),
            ("BrokenPipeError('enough')", "BrokenPipeError: enough"),
            ("__import__('cyclopts').CycloptsError('enough')", "CycloptsError: enough"),
        ],
    )
    def test_an_error_of_the_users_code_does_not_pass_for_one_of_the_command_itself(
        self, tmp_path: Path, source: str, raised: str, said: str, capsys: Capsys
    ) -> None:
        assert main([str(PLANE), *quitting(tmp_path, source, raised), "--out", str(tmp_path / "out")]) == 4
        place_of_error = f"{tmp_path / 'net.py'}, line 6"
        assert f"the model or the program failed in {place_of_error}: {said}" in capsys.readouterr().err

    @pytest.mark.parametrize(
        "own",
        [
            "import camkit\nclass Own(camkit.errors.CamkitError):\n    exit_code = 0\n",
            "import sys\nclass Own(RuntimeError):\n    __str__ = lambda error: sys.exit(0)\n",
        ],
    )
    def test_an_error_of_the_users_own_class_does_not_end_with_0(self, tmp_path: Path, own: str) -> None:
        options = [*quitting(tmp_path, "forward", "Own"), "--out", str(tmp_path / "out")]
        network = tmp_path / "net.py"
        network.write_text(own + network.read_text())
        place(tmp_path / "data", "plane/a.jpg")
        assert main(["check", str(tmp_path / "data"), *options]) == 4
        assert main([str(PLANE), *options]) == 4

    def test_drawings_have_no_control_characters_in_their_names_and_names_of_their_own(self, tmp_path: Path) -> None:
        names = ["a\x1b[2J\u202e\nb.jpg", "a\nb.jpg", "a\rb.jpg", "a\tb.jpg", "a-b.jpg", os.fsdecode(b"a\xffb.jpg")]
        odd, *others = place(tmp_path, *names)
        out = tmp_path / "out"
        assert explain(odd, *others, "--out", out) == 0
        assert explain("features", odd, "--out", out) == 0
        drawings = files_in(out)
        assert len(drawings) == 7
        assert {
            "a-[2J--b-d0851533.gradcam.png",  # the checksum tells it from a picture that is called so
            "a-[2J--b-d0851533.features.features.png",
            "a-b.gradcam.png",
        } < set(drawings)
        assert all(name.isprintable() for name in drawings)

    def test_names_cannot_control_the_terminal_or_the_log(self, empty_folder: Path, capsys: Capsys) -> None:
        names = ["::error::a.jpg", "##[error]b.jpg", "c\x1b[31m\n::error::x\x9b\u202egpj.jpg", "d\udcff\u2028.jpg"]
        place(empty_folder, *names, "[red]x[bold].jpg")
        for name in names[::2]:
            (empty_folder / name).write_bytes(b"")
        Path("labels.json").write_text(json.dumps(["::x", "\x1b]0;taken\x07", "a\n::error::b", "\u2066c"]))
        calls = [
            [".", "--model", "demo-fair", "--labels", "labels.json", "--top-k", "4"],
            [".", "--model", "demo-fair", "--labels", "labels.json", "--top-k", "4", "--csv"],
            ["compare", ".", "--model", "demo-fair", "--labels", "labels.json", "--method", "gradcam"],
            ["::x\x1b[1m\n::error::none", "--model", "\x1b[31m\n::error::"],
            ["--wrong\x1b[31m\n::error::", "x"],
            ["check", ".", "--model", "demo-fair", "--class-map", "\x1b[31m\n::y"],
        ]
        for number, call in enumerate(calls):
            assert main(call) == 2
            captured = capsys.readouterr()
            for text in (captured.out, captured.err):
                assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u202e\u2066]", text)
                assert not [line for line in text.splitlines() if line.strip().startswith("::") or "##[" in line]
            assert number > 1 or "[red]x[bold].jpg" in captured.out, "markup in a name is text"


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
    def test_what_cannot_be_read_is_a_row_for_explain_and_refused_by_check(self, tmp_path: Path) -> None:
        folder = tmp_path / "in"
        place(folder, "a.jpg", "locked/b.jpg", "z/c.jpg")
        place(tmp_path, "data/cat/a.jpg", "data/dog/b.jpg", "masks/cat/a.png")
        (folder / "loop.jpg").symlink_to(folder / "loop.jpg")
        (folder / "loops").symlink_to(folder / "loops")
        (folder / "gone.jpg").symlink_to(folder / "nowhere.jpg")
        os.mkfifo(folder / "pipe.jpg")
        mask = Image.new("L", cv2.imread(str(PLANE)).shape[1::-1])
        mask.paste(255, (30, 30, 90, 90))
        mask.save(tmp_path / "masks/cat/a.png")
        explained = [str(folder), "--model", "demo-fair", "--json", "--out", str(tmp_path / "out")]
        check = ["check", str(tmp_path / "data"), "--model", "demo-fair", "--out", str(tmp_path / "out")]
        calls = [("in/locked", explained), ("data", check), ("data/dog", check), ("masks/cat", check)]
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

    def test_no_option_waits_for_a_pipe_or_reads_a_device(self, tmp_path: Path, capsys: Capsys) -> None:
        for name in ("p", "p.json", "p.csv", "p.xml", "p.toml", "p.yaml", "p.pth", "p.index.json"):
            os.mkfifo(tmp_path / name)
        (tmp_path / "out").mkdir()
        os.mkfifo(tmp_path / "out/unfinished.jsonl")
        place(tmp_path / "data", "cat/a.jpg", "dog/b.jpg")
        explained = [str(PLANE), "--model", "demo-fair", "--out", str(tmp_path / "drawn")]
        classes = tmp_path / "map.json"
        classes.write_text('{"cat": 0, "dog": 1}')
        check = ["check", str(tmp_path / "data"), "--model", "demo-fair", "--out", str(tmp_path / "out")]
        check += ["--class-map", str(classes)]
        calls = [[*explained, "--weights", str(tmp_path / name)] for name in ("p.pth", "p.index.json")]
        calls += [[*explained, "--labels", str(tmp_path / name)] for name in ("p", "p.json")]
        calls += [[*explained, option, "/dev/zero"] for option in ("--weights", "--labels")]
        calls += [[*explained, "--target", "0", "--mask", str(tmp_path / "p")]]
        calls += [[*check, "--regions", str(tmp_path / name)] for name in ("p.json", "p.csv", "p.xml")]
        calls += [[*check, "--config", str(tmp_path / "p.toml")], [*check, "--baseline", str(tmp_path / "p.json")]]
        calls += [[*check, "--resume"], [*check[:-1], str(tmp_path / "p.json")]]
        calls += [["check", str(tmp_path / "p.yaml"), "--model", "demo-fair", "--out", str(tmp_path / "out")]]
        assert [main(call) for call in calls] == [2] * len(calls)
        said = [line for line in capsys.readouterr().err.splitlines() if "using the config" not in line]
        assert all("is a pipe or a device; save its contents to a file" in line for line in said), said
        assert len(said) == len(calls)

    def test_a_pipe_among_the_pictures_does_not_stop_a_check(self, tmp_path: Path) -> None:
        place(tmp_path / "data", "plane/a.jpg", "ship/a.jpg")
        os.mkfifo(tmp_path / "data/plane/b.jpg")
        assert explain("check", tmp_path / "data", "--out", tmp_path / "out") == 3
        assert "b.jpg is a pipe or a device" in (tmp_path / "out/report.json").read_text()

    @pytest.mark.parametrize("pattern", represented_by("*", among=["", "*", "**/*.png"]))
    def test_neither_masks_nor_camkits_own_drawings_are_explained(
        self, tmp_path: Path, pattern: str, capsys: Capsys
    ) -> None:
        mask = np.zeros((60, 60), np.uint8)
        mask[10:30, 10:30] = 255
        (tmp_path / "gt").mkdir()
        place(tmp_path, "b_gt.png")  # without b beside it, it is a picture
        Image.open(PLANE).save(tmp_path / "a.png")
        for name in ("a_gt.png", *(["gt/a.png"] if pattern != "**/*.png" else [])):  # which names what lies in gt
            cv2.imwrite(str(tmp_path / name), mask)
        for out in (tmp_path, tmp_path / "sub", tmp_path):
            assert explain(tmp_path / pattern, "--out", out, "--json") == 0
            rows = capsys.readouterr().out.splitlines()
            assert [Path(json.loads(row)["source"]).name for row in rows] == ["a.png", "b_gt.png"]
        assert explain(tmp_path / "a.png.gradcam.png", "--out", tmp_path) == 0, "if it is named, it is explained"
