"""The check as users run it: the installed command and the function, on drawn scenes whose truth is known."""

import contextlib
import io
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from folders import write_masked
from PIL import Image
from results import assert_is_a_result

import camkit
from camkit.background.check import plan_check
from camkit.background.report import REPORTS, checksum
from camkit.cli import main
from camkit.errors import InputError, RunError

QUICK = {"check": {"pastes": 1}}
PER_CLASS = 10
"""Limits that 40 pictures are enough to exclude."""

CONFIG = f"[check]\npastes = 1\nbatch_size = 8\n[limits]\nleast_pictures = {PER_CLASS}\n"


@pytest.fixture(scope="session")
def scenes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scenes")
    (folder / "camkit.toml").write_text(CONFIG)
    return camkit.scenes.write_scenes(folder, PER_CLASS)


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def run(data, *arguments):
    """Run the command as it is typed, in this process, with the small config that lies beside the drawn scenes."""
    out, err = io.StringIO(), io.StringIO()
    config = data.parent / "camkit.toml"
    more = ["--config", config] if config.exists() and "--config" not in arguments else []
    typed = ["camkit", "check", *map(str, [data, *arguments, *more])]
    with mock.patch.object(sys, "argv", typed), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main()
    return Done(code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="session")
def biased(scenes, tmp_path_factory):
    out = tmp_path_factory.mktemp("biased")
    return run(scenes, "--model", "demo-biased", "--out", out), out


def test_the_biased_network_fails_with_1_and_writes_every_report(biased):
    done, out = biased
    page = (out / "report.html").read_text()

    assert done.returncode == 1, done.stderr
    assert "FAIL: demo-biased relies on the background: the model recognises 100%" in " ".join(done.stdout.split())
    assert {file.name for file in out.iterdir()} == set(REPORTS)
    assert json.loads((out / "report.json").read_text())["verdict"] == "FAIL"
    assert "<dd>camkit check " in page and "--model demo-biased" in page
    for found in ("40 pictures of 4 classes", "classes matched by label", "the experiment has 40 pictures"):
        assert done.stdout.index(found) < done.stdout.index(" edits\n"), "data and cost come first"


@pytest.mark.extended
def test_the_report_does_not_depend_on_threads_batches_or_the_data_folder(biased, scenes, tmp_path):
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for name in ("pictures", "masks"):
        (moved / name).symlink_to(scenes.parent / name)
    config = tmp_path / "other.toml"
    config.write_text(CONFIG.replace("batch_size = 8", "batch_size = 5"))

    torch.set_num_threads(2)
    try:
        done = run(moved / "pictures", "--model", "demo-biased", "--out", tmp_path / "out", "--config", config)
    finally:
        torch.set_num_threads(1)

    assert done.returncode == 1, done.stderr
    assert (tmp_path / "out" / "report.json").read_bytes() == (biased[1] / "report.json").read_bytes()


@pytest.mark.extended
def test_a_killed_check_can_be_resumed(biased, scenes, tmp_path):
    command = [Path(sys.executable).with_name("camkit"), "check", scenes, "--model", "demo-biased"]
    command += ["--config", scenes.parent / "camkit.toml", "--out", tmp_path]
    journal = tmp_path / "unfinished.jsonl"
    wanted = 40 + 10  # well into the experiment
    running = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 300
        while time.monotonic() < end and running.poll() is None:
            if journal.exists() and journal.read_bytes().count(b"\n") > wanted:
                break
            time.sleep(0.05)
        running.send_signal(signal.SIGKILL)
    finally:
        running.kill()
        running.wait()
    kept = [json.loads(line) for line in journal.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]

    done = run(scenes, "--model", "demo-biased", "--out", tmp_path, "--resume")

    assert len(kept) > wanted
    assert done.returncode == 1, done.stderr
    left = 1 + 40 + 40 - len(kept)
    assert f"experiment: {left} to do" in done.stderr
    assert (tmp_path / "report.json").read_bytes() == (biased[1] / "report.json").read_bytes()
    assert not journal.exists()


@pytest.mark.extended
def test_labels_in_another_order_than_the_model_are_asked_about_everywhere(scenes, tmp_path):
    (tmp_path / "labels.txt").write_text("bird\nplane\ncar\nship\n")  # the model's order is plane, ship, car, bird

    done = run(scenes, "--model", "demo-fair", "--labels", tmp_path / "labels.txt", "--out", tmp_path / "out")

    question = (
        "the model mostly answers class 3 (ship) for 'bird', class 0 (bird) for 'plane', class 1 (plane) for 'ship': "
        "are the labels in the model's order?"
    )
    assert done.returncode == 3
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["warnings"][0] == question
    for text in (done.stdout, (tmp_path / "out" / "report.html").read_text()):
        assert question in " ".join(text.replace("&#39;", "'").split())


def test_an_inconclusive_check_exits_with_0_if_asked_and_a_pipe_gets_all_figures(tmp_path):
    pictures = camkit.scenes.write_scenes(tmp_path / "data", 2)
    name = "a class with a name that is longer than half of a line of eighty columns"
    for folder in (pictures, pictures.parent / "masks"):
        (folder / "bird").rename(folder / name)
    classes = tmp_path / "classes.json"
    classes.write_text(json.dumps({name: "bird", "car": "car", "plane": "plane", "ship": "ship"}))

    options = ["--out", tmp_path / "out", "--class-map", classes, "--inconclusive", "pass"]
    done = run(pictures, "--model", "demo-fair", *options)

    assert done.returncode == 0, done.stderr
    assert "INCONCLUSIVE: these pictures do not show whether demo-fair relies on the background" in done.stdout
    table = [line for line in done.stdout.splitlines() if re.match(r"(a class|car|plane|ship|all classes) ", line)]
    assert len(table) == 5
    assert "…" not in done.stdout
    assert table[0].startswith(name)
    assert all(len(re.findall(r"-?\d+\.\d\d|\d+%| -(?= |$)", line.rsplit("  ", 1)[0])) == 6 for line in table), table
    assert all(re.search(r" (-|\d+)$", line) for line in table), table


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"layer": "features.1"}, r"heat is from layer features\.1"),
        ({"grids": ["7x7"]}, r"grid 7x7, this run's from 16x16"),
        ({"checksum": "0"}, "is damaged: its checksum does not match its contents"),
        ({"sentence": "changed", "checksum": None}, "is damaged: its checksum does not match its contents"),
    ],
)
def test_a_baseline_that_does_not_fit_is_refused_before_anything_is_computed(
    biased, scenes, tmp_path, changed, message
):
    report = {**json.loads((biased[1] / "report.json").read_text()), **changed}
    other = tmp_path / "other.json"
    other.write_text(json.dumps(report if "checksum" in changed else {**report, "checksum": checksum(report)}))

    with pytest.raises(InputError, match=message):
        camkit.check(
            "demo-biased", scenes, config=scenes.parent / "camkit.toml", baseline=other,
            progress=lambda *stage: pytest.fail("something was computed"),
        )  # fmt: skip


def test_failing_on_what_is_worse_needs_a_baseline(scenes, tmp_path):
    """It may stand in the config, with the baseline in the call."""
    config = {**QUICK, "run": {"fail_on_worse": True}}
    done = run(scenes, "--model", "demo-fair", "--out", tmp_path / "out", "--fail-on-worse")
    assert (done.returncode, list(tmp_path.glob("out/*"))) == (2, [])
    assert "--fail-on-worse needs a baseline to compare with" in done.stderr
    with pytest.raises(InputError, match=r"missing\.json"):
        camkit.check("demo-fair", scenes, config=config, baseline=tmp_path / "missing.json")


def test_an_unknown_option_is_refused_with_the_nearest():
    message = r"check\(\) got an unexpected keyword argument 'regoins'; did you mean 'regions'\?"
    with pytest.raises(TypeError, match=message):
        camkit.check("demo-fair", "pictures", regoins="masks")


class Broken(torch.nn.Sequential):
    """Answers NaN to everything."""

    def forward(self, images):
        return super().forward(images).mean((2, 3)) * float("nan")


def test_a_model_that_always_answers_nan_is_an_error(scenes):
    broken = Broken(torch.nn.Conv2d(3, 4, 8, stride=8)).eval()
    with pytest.raises(RunError, match="NaN") as caught:
        camkit.check(broken, scenes, preprocess=camkit.scenes.preprocess, labels=camkit.scenes.LABELS)
    assert caught.value.exit_code == 4


def test_a_quick_check_shows_the_model_its_sample_alone(scenes, tmp_path):
    done = run(scenes, "--model", "demo-fair", "--quick", "--per-class", "5", "--out", tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())

    assert "the quick check takes 20 of these 40 pictures" in done.stdout
    assert "the model will see 20 pictures for the heat" in done.stdout
    assert len(report["images"]) == 20
    assert all(image["same"] for image in report["images"])
    assert report["next_steps"][0].startswith("use all pictures: leave out --quick and --per-class")
    assert not any(step.startswith("add ") for step in report["next_steps"]), "half of the pictures are unused"


def test_a_quick_check_keeps_a_class_without_regions_and_those_of_a_single_class_give_a_verdict(scenes, tmp_path):
    data = copied(scenes, tmp_path, PER_CLASS)
    shutil.rmtree(data.parent / "masks" / "car")
    result = camkit.check("demo-fair", data, config={"check": {"per_class": 3, "pastes": 1}}, quick=True)
    assert sorted(result.classes) == ["bird", "car", "plane", "ship"]
    assert [row.label for row in result.images].count("car") == 3
    for other in ("plane", "ship"):
        shutil.rmtree(data.parent / "masks" / other)
    config = {**QUICK, "limits": {"least_pictures": PER_CLASS}}
    assert camkit.check("demo-biased", data, config=config).verdict != "PASS"


@pytest.mark.extended
def test_the_demonstration_says_what_it_does(tmp_path, capsys):
    assert main(["demo", "--check", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert said.err.index("checking demo-biased") < said.err.index("heat: 160 to do")
    assert [line.split(":")[0] for line in said.out.splitlines() if line[:4] in ("FAIL", "PASS")] == ["FAIL", "PASS"]


def test_a_quick_check_never_takes_a_larger_sample(scenes):
    plan = plan_check("demo-fair", scenes, config=scenes.parent / "camkit.toml", quick=True)
    few = plan_check("demo-fair", scenes, config={"check": {"per_class": 5}}, quick=True)
    whole = plan_check("demo-fair", scenes, config={"run": {"quick": True}}, quick=False)

    assert plan.settings.check.per_class == 40
    assert few.settings.check.per_class == 5
    assert not whole.settings.run.quick, "the call decides, not the config"


@pytest.mark.extended
def test_real_photographs_with_few_pictures_per_class_are_inconclusive(test_data, tmp_path):
    coco = test_data / "coco"
    (tmp_path / "camkit.toml").write_text("[check]\npastes = 1\n")
    done = run(
        coco, "--model", "mobilenet_v2", "--weights", test_data / "weights/mobilenet_v2-coral_qat.pth",
        "--class-map", coco / "coco_to_imagenet.json", "--quick", "--out", tmp_path,
        "--config", tmp_path / "camkit.toml",
    )  # fmt: skip

    assert done.returncode == 3, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert "50 annotated pictures, 50 of them found here" in done.stdout
    assert "crowds, removed but not explained" in done.stdout
    assert report["verdict"] == "INCONCLUSIVE"
    assert len(report["classes"]) == 24
    assert sum(bool(image["same"]) for image in report["images"]) >= 25
    assert report["overall"]["skill"]["value"] > 0.1  # a trained network's heat lies on the objects
    assert (tmp_path / "report.html").stat().st_size > 100_000


def copied(scenes, folder, count):
    for name in ("pictures", "masks"):
        for file in sorted((scenes.parent / name).rglob("*.*")):
            if int(file.stem) < count:
                copy = folder / name / file.relative_to(scenes.parent / name)
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(file.read_bytes())
    return folder / "pictures"


def test_pictures_that_cannot_be_used_are_counted_and_listed(scenes, tmp_path):
    data = copied(scenes, tmp_path, 4)
    broken = ["bird/000.jpg", *(f"{label}/00{n}.jpg" for label in ("car", "plane", "ship") for n in (0, 1))]
    for name in broken:  # with ship/003.jpg, half of the pictures
        (data / name).write_bytes(f"no picture, {name}".encode())
    (data / "bird" / "900.jpg").write_bytes((data / "bird" / "001.jpg").read_bytes())
    (data / "car" / "901.jpg").write_bytes((data / "bird" / "002.jpg").read_bytes())
    Image.new("L", (64, 64), 255).save(tmp_path / "masks" / "ship" / "003.png")

    result = camkit.check("demo-fair", data, config=QUICK, out=tmp_path / "out")

    assert result.plan.data.left_out["copies of another picture"] == ("bird/900.jpg",)
    assert result.plan.data.left_out["copies of a picture of another class"] == ("car/901.jpg",)
    assert set(result.failures) == {*broken, "ship/003.jpg"}
    assert len(result.images) == 8
    assert "64x64" in result.failures["ship/003.jpg"]
    assert "bird/000.jpg" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.extended
@pytest.mark.parametrize("options", [{}, {"ring": 0.3, "ring_is_background": True}])
def test_without_regions_the_ring_is_exchanged_and_only_warns_unless_it_is_background(scenes, tmp_path, options):
    config = {"check": {**QUICK["check"], **options}, "limits": {"least_pictures": PER_CLASS}}

    (tmp_path / "alone").symlink_to(scenes)  # without the masks beside it
    result = camkit.check("demo-biased", tmp_path / "alone", config=config)

    assert result.overall.skill is None
    assert list(result.overall.gap.by_fill) == ["ring"]
    assert result.verdict in (("FAIL",) if options else ("WARN", "PASS"))


def test_the_users_model_comes_back_as_it_went_in(scenes, tmp_path):
    loaded = camkit.load_model("demo-fair")
    module = loaded.module.train()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    seed = torch.random.get_rng_state()

    camkit.check(loaded, copied(scenes, tmp_path, 2), config=QUICK)

    assert module.training
    assert all(part.training for part in module.modules())
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    assert torch.equal(seed, torch.random.get_rng_state())
    assert all(parameter.grad is None for parameter in module.parameters())


@pytest.mark.extended
def test_assert_ok_names_the_worst_class_its_numbers_and_the_report(scenes, tmp_path):
    data = copied(scenes, tmp_path, PER_CLASS)
    config = {**QUICK, "limits": {"least_pictures": PER_CLASS}}

    wide = {"least_pictures": 2, "skill": -1, "gap": 0.3, "sufficiency": 0.3, "attraction": 0.5}  # 40 pictures are few
    camkit.check("demo-fair", data, config={**config, "limits": wide}).assert_ok()
    worst = r"FAIL: class '(bird|car|plane|ship)': .* (gap|attraction) of 1\.00 .*report\.html"
    with pytest.raises(AssertionError, match=worst):
        camkit.check("demo-biased", data, config=config, out=tmp_path / "out").assert_ok()


@pytest.mark.extended
def test_the_table_is_flat(scenes, tmp_path):
    result = camkit.check("demo-fair", copied(scenes, tmp_path, 4), config=QUICK)

    rows = assert_is_a_result(result, tmp_path / "reports")
    assert result.to_dict() == json.loads((tmp_path / "reports/report.json").read_text())
    assert len(rows) == 16
    assert {"name", "label", "energy", "same_tile", "other_blur", "removed_tile"} <= rows[0].keys()
    assert not any(isinstance(value, dict) for row in rows for value in row.values())


@pytest.mark.extended
def test_a_function_weights_the_heat_as_the_method_of_that_formula_does(scenes, tmp_path):
    def mean_gradient(activations, gradients):
        return gradients.mean((2, 3), keepdim=True)

    data = copied(scenes, tmp_path, 2)
    by_function = {"check": {**QUICK["check"], "method": mean_gradient}}

    named = camkit.check("demo-fair", data, config=QUICK)
    own = camkit.check("demo-fair", data, config=by_function, out=tmp_path / "out")

    assert [row["energy"] for row in own.table()] == pytest.approx([row["energy"] for row in named.table()])
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["settings"]["check"]["method"] == "mean_gradient"
    assert "mean_gradient" in (tmp_path / "out" / "report.html").read_text()
    assert own.hashes["settings"] != named.hashes["settings"]


@pytest.mark.extended
def test_waivers_hold_until_they_expire(scenes, tmp_path):
    data = copied(scenes, tmp_path, 8)
    ends = {"bird": "2020-01-01", **dict.fromkeys(("car", "plane", "ship"), "2999-01-01")}
    waivers = [{"class": name, "reason": "known", "expires": end} for name, end in ends.items()]
    config = {**QUICK, "limits": {"least_pictures": 8}, "waivers": waivers}

    result = camkit.check("demo-biased", data, config=config)

    assert {name for name in camkit.scenes.LABELS if result.judged[name].waived} == {"car", "plane", "ship"}
    assert result.verdict == "FAIL"
    assert any("expired on 2020-01-01" in warning for warning in result.warnings)


@pytest.mark.extended
def test_cropped_away_objects_are_counted(tmp_path):
    """A preprocessing that shows the middle of wide pictures crops away objects at the far left."""
    rng = np.random.default_rng(0)
    for label in ("bird", "car"):
        for number in range(6):
            inside = np.zeros((128, 400), bool)
            left = 10 if number < 2 else 180
            inside[40:80, left : left + 40] = True
            data = write_masked(tmp_path, f"{label}/{number}.png", rng.integers(0, 255, (128, 400, 3)), inside)

    result = camkit.check("demo-fair", data, config=QUICK)

    assert any(warning.startswith("in 4 pictures the object lies outside the part") for warning in result.warnings)
    areas = [row.area for row in result.images if row.area is not None]
    assert areas == pytest.approx([40 * 40 / 128**2] * len(areas), rel=0.01)


@pytest.mark.parametrize("target", ["nowhere.toml", "camkit.toml"])
def test_a_config_whose_link_is_broken_is_not_ignored(tmp_path, monkeypatch, target):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "camkit.toml").symlink_to(target)

    (tmp_path / "alone").mkdir()
    done = run(tmp_path / "alone" / "data", "--model", "demo-fair")

    assert done.returncode == 2
    assert "the config camkit.toml cannot be read" in done.stderr


@pytest.mark.extended
def test_an_interrupted_check_goes_on_with_damaged_rows_and_the_baseline_that_it_renamed(scenes, tmp_path, monkeypatch):
    data = copied(scenes, tmp_path, 2)
    monkeypatch.chdir(tmp_path)
    expected = camkit.check("demo-biased", data, config=QUICK, out=tmp_path).to_dict()
    arguments = {"config": QUICK, "out": tmp_path, "baseline": Path("report.json")}

    def interrupt(stage, done, of):
        if stage == "experiment":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        camkit.check("demo-biased", data, **arguments, progress=interrupt)
    assert not (tmp_path / "report.json").exists()
    journal = tmp_path / "unfinished.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join([*lines[:3], lines[3][:40] + "\n", *lines[4:]]))
    with pytest.warns(UserWarning, match=r"damaged lines in .*unfinished\.jsonl: 1; their rows are computed again"):
        result = camkit.check("demo-biased", data, **arguments, resume=True)

    assert result.change is not None and result.change.pictures == 8
    assert result.to_dict()["images"] == expected["images"]
