"""The config: what is accepted, the error for each mistake, and the config to start from."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import math
import re
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from refusals import refused

import camkit
from camkit.background.check import plan_check, starter_config
from camkit.background.data import Dataset
from camkit.cli import main
from camkit.errors import InputError
from camkit.options.settings import Settings, read_config, settings_from
from camkit.options.toml import find_config


def read(folder: Path, text: str, name: str = "camkit.toml") -> Settings:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return read_config(file)


WAIVER = '[[waivers]]\nclass = "cat"\nreason = "known"\nexpires = 2030-01-31\n'


def test_every_kind_of_setting_is_read(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        """\ufeff
        [model]
        name = "resnet18"
        size = [224, 336]
        mean = [0.5, 0, 1]
        std = [1, 2, 3.5]
        text = ["a", "b"]
        [check]
        per_class = 7
        seed = 3
        precision = "bf16"
        ring_is_background = true
        [limits]
        gap = 0
        skill = -0.5
        [classes.cat]
        expect = "any"
        [classes."big dog.v2"]
        expect = ["Rider", "SADDLE"]
        """
        + WAIVER,
    )
    assert (config.model.name, config.model.size, config.model.std) == ("resnet18", [224, 336], [1, 2, 3.5])
    assert (config.check.per_class, config.check.seed, config.check.precision) == (7, 3, "bf16")
    assert (config.limits.gap, config.limits.skill, config.limits.sufficiency) == (0, -0.5, 0.1)
    assert [config.expects_anything(name) for name in ("cat", "big dog.v2")] == [True, False]
    assert config.also_allowed("big dog.v2") == {"rider", "saddle"}
    assert config.also_allowed("cat") == config.also_allowed("mouse") == frozenset()
    assert read(tmp_path, "") == Settings()


def test_a_waiver_ends_after_its_last_day(tmp_path: Path) -> None:
    config = read(tmp_path, WAIVER + WAIVER.replace("cat", "dog").replace("2030-01-31", '"2030-02-01"'))
    last = dt.date(2030, 1, 31)
    assert set(config.waived(last)) == {"cat", "dog"}
    assert not config.expired(last)
    after = last + dt.timedelta(days=1)
    assert set(config.waived(after)) == {"dog"}
    assert [one.name for one in config.expired(after)] == ["cat"]


def test_paths_are_relative_to_the_config(tmp_path: Path) -> None:
    (tmp_path / "nets").mkdir()
    for name in ("model.pth", "nets/own.py"):
        (tmp_path / name).write_text("")
    config = read(
        tmp_path,
        """
        model = {name = "nets/own.py:make", weights = "model.pth", labels = "../labels.txt"}
        data = {path = "val", regions = "/abs/i.json", class_map = "c.json"}
        """,
    )
    assert config.model.name == f"{tmp_path}/nets/own.py:make"
    assert config.model.weights == f"{tmp_path}/model.pth"
    assert config.model.labels == tmp_path / "../labels.txt"
    assert (config.data.path, config.data.regions) == (tmp_path / "val", Path("/abs/i.json"))
    assert config.data.class_map == tmp_path / "c.json"
    named = read(tmp_path, '[model]\nname = "timm:resnet18"\nweights = "IMAGENET1K_V1"')
    assert (named.model.name, named.model.weights) == ("timm:resnet18", "IMAGENET1K_V1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[chek]", "there is no setting 'chek'; did you mean 'check'?"),
        ("[check]\nper_clas = 7", "there is no setting 'check.per_clas'; did you mean 'per_class'?"),
        ("[limits]\nzzzzzz = 1", "there is no setting 'limits.zzzzzz'"),
        ("[classes.cat]\nexpet = 'any'", "there is no setting 'classes.cat.expet'; did you mean 'expect'?"),
        (WAIVER + WAIVER.replace("reason", "reson"), "there is no setting 'waivers.1.reson'; did you mean 'reason'?"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        read(tmp_path, text)
    assert str(caught.value) == f"{tmp_path / 'camkit.toml'}: {message}"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("[model]\nsize = 'big'", "model.size"),
        ("[model]\nmean = [nan, 0, 0]", "model.mean.0"),
        ("[check]\nmethod = ['gradcam', 'layercam']", "check.method"),
        ("[limits]\ngap = 1.1", "limits.gap"),
        ("[classes.cat]\nexpect = 'objekt'", "classes.cat.expect"),
        (WAIVER.replace("2030-01-31", "'soon'"), "waivers.0.expires"),
        (WAIVER.replace('reason = "known"\n', ""), "waivers.0.reason"),
        (WAIVER + WAIVER.replace('class = "cat"\n', ""), "waivers.1.class"),
    ],
)
def test_a_wrong_value_is_refused_in_one_sentence_with_its_setting(tmp_path: Path, text: str, place: str) -> None:
    with refused(f"^{re.escape(str(tmp_path / 'camkit.toml'))}: '{re.escape(place)}' is (?!.*http)", InputError):
        read(tmp_path, text)


@pytest.mark.parametrize("text", [b"a = [1", b"words", b'[model]\nname = "\xff"', None])
def test_a_config_that_is_missing_or_no_toml_is_refused_in_one_sentence(tmp_path: Path, text: bytes | None) -> None:
    file = tmp_path / "camkit.toml"
    if text is not None:
        file.write_bytes(text)
    with pytest.raises(InputError, match=r"the config .*camkit\.toml cannot be read: "):
        read_config(file)


def test_pyproject_counts_if_it_has_a_table_for_camkit(tmp_path: Path) -> None:
    project = tmp_path / "pyproject.toml"
    assert find_config(tmp_path) is None
    for text in ("", "tool = 3", "[tool]\nother = 3", "[project]\nname = 'x'"):
        project.write_text(text)
        assert find_config(tmp_path) is None
        with pytest.raises(InputError, match=r"has no \[tool\.camkit\]"):
            read_config(project)
    project.write_text("[tool.camkit.check]\nseed = 5\n[tool.other]\nx = 1")
    assert find_config(tmp_path) == project
    assert read_config(project).check.seed == 5
    project.write_text("[tool.camkit.check]\nsed = 5")
    with pytest.raises(InputError, match=r"there is no setting 'check\.sed'; did you mean 'seed'"):
        read_config(project)
    project.write_text("[tool]\ncamkit = 3")
    with pytest.raises(InputError, match=r"\[tool\.camkit\] in .* must be a table of settings, not 3"):
        find_config(tmp_path)
    (tmp_path / "camkit.toml").write_text("")
    assert find_config(tmp_path) == tmp_path / "camkit.toml", "camkit.toml comes first"


def test_options_replace_settings_and_none_leaves_them() -> None:
    settings = settings_from({"limits": {"gap": 0.3, "strict": True}, "run": {"quick": True}})

    changed = settings.with_options(limits={"gap": None, "strict": False}, run={"out": "reports"})

    assert (changed.limits.gap, changed.limits.strict) == (0.3, False)
    assert (changed.run.quick, changed.run.out) == (True, Path("reports"))
    with pytest.raises(InputError, match=r"'limits\.gap' is 2: "):
        settings.with_options(limits={"gap": 2})


# The config to start from


def written(*classes: str, facts: tuple[str, ...] = ("3 pictures",), where: str = "val", **paths: Path | None) -> str:
    data = Dataset(Path(where), (), classes, facts)
    return starter_config(data, settings_from({"model": {"name": "resnet50"}, "data": {"path": where, **paths}}))


def uncommented(text: str) -> str:
    """Return the config with every example active."""
    return re.sub(r"^# (?=[a-z_]+ = |\[)", "", text, flags=re.MULTILINE)


def test_the_starter_config_names_the_data_and_its_examples_are_the_defaults() -> None:
    assert tomllib.loads(starter_config(Dataset(Path("val"), (), ("cat",)), Settings()))["model"] == {}
    text = written("cat", "dog", where="my data/val", regions=Path("i.json"), class_map=Path("c.json"))
    table = tomllib.loads(text)
    assert table["data"] == {"path": "my data/val", "regions": "i.json", "class_map": "c.json"}
    assert "# 3 pictures\n# classes: cat, dog\n" in text
    config = settings_from(tomllib.loads(uncommented(text)), "starter")
    assert dataclasses.replace(config.check, layer=None) == Settings().check
    assert config.limits == Settings().limits
    assert config.expects_anything("cat")
    assert set(config.waived(dt.date(2030, 1, 31))) == {"cat"}


@settings(max_examples=10, deadline=None)
@given(st.text(st.characters(exclude_characters="/"), min_size=1, max_size=12), st.text(max_size=12))
def test_the_starter_config_is_valid_for_any_text(name: str, fact: str) -> None:
    text = written(name, facts=(fact,))
    table = tomllib.loads(text.encode().decode())
    assert table["model"] == {"name": "resnet50"}
    assert table.keys() == {"model", "data", "check", "limits"}
    classes = settings_from(tomllib.loads(re.sub(r"^# (?=\[classes|expect = )", "", text, flags=re.M)), "x").classes
    assert list(classes) == [name.encode(errors="backslashreplace").decode()]


# One config for every command, in the shell and in Python


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose config names a model, with the weights of the other demo network."""
    torch.save(camkit.load_model("demo-biased").module.state_dict(), tmp_path / "mine.pth")
    (tmp_path / "photo.jpg").write_bytes(camkit.scenes.scene_paths()["plane-wood"].read_bytes())
    (tmp_path / "labels.txt").write_text("aircraft\nvessel\nvehicle\nanimal\n")
    (tmp_path / "camkit.toml").write_text(PROJECT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


PROJECT = """
[model]
name = "demo-fair"
weights = "mine.pth"
labels = "labels.txt"
[explain]
method = "layercam"
layer = "features.3"
out = "heat"
style = "side-by-side"
[diagnose]
train = true
limit = 1
out = "layers"
[check]
seed = 5
[limits]
gap = 0.2
"""


def explained(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["photo.jpg", "--json", *arguments]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_explain_uses_the_config_and_options_come_first(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    biased = camkit.explain("demo-biased", "photo.jpg", "features.3", method="layercam")
    assert isinstance(biased, camkit.Explanation)

    from_config = explained(capsys)
    typed = explained(capsys, "--method", "gradcam", "--out", "other", "-m", "demo-fair")
    other = explained(capsys, "--model", "demo-biased")

    assert from_config["score"] == pytest.approx(biased.score, rel=1e-5)
    assert (from_config["method"], from_config["layer"]) == ("layercam", "features.3")
    assert from_config["label"] in ("aircraft", "vessel", "vehicle", "animal")
    assert from_config["file"] == "heat/photo.layercam.features.3.jpg"
    assert (typed["method"], typed["layer"], typed["score"]) == ("gradcam", "features.3", from_config["score"])
    assert typed["file"] == "other/photo.gradcam.features.3.jpg"
    assert other["label"] in ("plane", "ship", "car", "bird"), "the weights and labels are those of the config's model"


def test_each_command_says_which_config_it_uses(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sentence = "using the config camkit.toml in this folder; to use another, pass --config FILE"
    for command in (["photo.jpg"], ["layers"], ["diagnose", "photo.jpg"], ["features", "photo.jpg"], ["check", "."]):
        assert main(command) in (0, 2)
        assert sentence in capsys.readouterr().err, command
        assert main([*command, "--quiet"]) in (0, 2)
        assert sentence not in capsys.readouterr().err, command
    assert main(["layers", "--config", "camkit.toml"]) == 0
    assert capsys.readouterr().err.splitlines()[0] == "camkit: using the config camkit.toml"


def test_layers_and_diagnose_use_the_config(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layers", "-q"]) == 0
    assert capsys.readouterr().out == "features\n"
    (project / "again.jpg").write_bytes((project / "photo.jpg").read_bytes())
    assert main(["diagnose", ".", "--json", "--limit", "2"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["model"], result["pictures"], result["training"]) == ("demo-fair", 2, True)
    assert sorted(path.name for path in (project / "layers").iterdir()) == ["diagnose.json", "diagnose.png"]


def test_python_uses_the_same_config(project: Path) -> None:
    biased = camkit.explain("demo-biased", "photo.jpg", "features.3", method="layercam")
    for config in ("camkit.toml", read_config(project / "camkit.toml"), tomllib.loads(PROJECT)):
        for model in (None, "demo-fair") if config == "camkit.toml" else (None,):
            many = camkit.explain_many(model, ["photo.jpg"], config=config)
            one = camkit.explain(model, "photo.jpg", config=config)
            for found in (*many, one, camkit.Explainer(model, config=config)("photo.jpg")):
                assert np.allclose(found.raw, biased.raw, atol=1e-6)
                assert found.label in ("aircraft", "vessel", "vehicle", "animal")
                assert (found.method, found.layer) == ("layercam", "features.3")
        assert camkit.explain(None, "photo.jpg", "features", method="gradcam", config=config).layer == "features"
        assert camkit.diagnose(None, ["photo.jpg", "photo.jpg"], config=config).training is True
    assert camkit.explain("demo-fair", "photo.jpg").label in ("plane", "ship", "car", "bird"), "no config is searched"
    with pytest.raises(InputError, match="no model is named"):
        camkit.explain(None, "photo.jpg", config={"check": {"seed": 1}})


def test_reference_pictures_of_a_config_hold_for_the_methods_that_use_them(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "others").mkdir()
    for name in ("ship-sea", "bird-wood"):
        shutil.copy(camkit.scenes.scene_paths()[name], project / "others")
    (project / "camkit.toml").write_text('[model]\nname = "demo-fair"\n[explain]\nreferences = "others"\n')
    typed = explained(capsys, "--method", "expected")
    assert typed["references"]["pictures"] == "2 pictures of others"
    assert explained(capsys)["references"] is None
    python = camkit.explain(None, "photo.jpg", method="expected", config="camkit.toml")
    assert python.references.mean == pytest.approx(typed["references"]["mean"], rel=1e-4)
    assert camkit.explain(None, "photo.jpg", config="camkit.toml").references is None


def test_a_module_of_the_callers_is_not_replaced_by_the_configs_model(project: Path) -> None:
    fair = camkit.load_model("demo-fair")
    plain = camkit.explain(fair, "photo.jpg", "features.3", method="layercam")
    assert np.array_equal(camkit.explain(fair, "photo.jpg", config="camkit.toml").raw, plain.raw)


def test_a_check_in_python_honours_the_configs_model(project: Path) -> None:
    for number, name in enumerate(("plane", "bird")):
        (project / "val" / name).mkdir(parents=True)
        (project / "val" / name / f"{number}.jpg").write_bytes((project / "photo.jpg").read_bytes())
    text = PROJECT.replace('labels = "labels.txt"', "") + '[data]\npath = "val"\n[run]\nout = "reports"\nquick = true\n'
    (project / "camkit.toml").write_text(text)
    for model in (None, "demo-fair"):
        loaded = plan_check(model, config="camkit.toml").model
        state = loaded.module.state_dict()
        biased = camkit.load_model("demo-biased", device="cpu").module.state_dict()
        assert all(torch.equal(state[name].cpu(), biased[name]) for name in biased)
    result = camkit.check(config="camkit.toml")
    assert result.plan.settings.check.pastes == 1, "a quick check"
    assert result.plan.settings.limits.gap == 0.2
    assert (project / "reports" / "report.json").is_file()


WRONG = [
    ("[explain]\nmethd = 'gradcam'", "camkit.toml: there is no setting 'explain.methd'; did you mean 'method'?"),
    ("[diagnose]\nlimit = 0", "camkit.toml: 'diagnose.limit' is 0: "),
    ("[explian]", "camkit.toml: there is no setting 'explian'; did you mean 'explain'?"),
    ("[model", "the config camkit.toml cannot be read: "),
]


@pytest.mark.parametrize(
    ("command", "text", "said"),
    [
        *((["layers"], *wrong) for wrong in WRONG),
        *((command, *WRONG[0]) for command in (["photo.jpg"], ["diagnose", "photo.jpg"], ["check", "."])),
    ],
)
def test_a_wrong_config_is_one_sentence_for_every_command(
    project: Path, command: list[str], text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "camkit.toml").write_text(text)
    assert main([*command, "--model", "demo-fair"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"camkit: {said}")
    assert (captured.err.count("\n"), captured.out) == (1, "")
    assert main([*command[:1], "--help"] if command[0] != "photo.jpg" else ["--help"]) == 0, "help needs no config"


MADE = """
from pathlib import Path
import camkit
Path("ran").touch()
def build(): return camkit.load_model("demo-fair")
"""


@pytest.mark.parametrize(
    ("name", "file"), [("stranger:build", "pyproject.toml"), ("./stranger.py:build", "camkit.toml")]
)
def test_a_config_that_was_only_found_runs_no_code(
    project: Path, name: str, file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "stranger.py").write_text(MADE)
    (project / "camkit.toml").unlink()
    table = "[tool.camkit.model]" if file == "pyproject.toml" else "[model]"
    (project / file).write_text(f'{table}\nname = "{name}"\n')
    commands = [["photo.jpg"], ["layers"], ["diagnose", "photo.jpg"], ["features", "photo.jpg"], ["check", "."]]
    commands += [["compare", "photo.jpg"], ["judge", "."], ["concepts", "."], ["scale", ".", "-o", "table"]]

    for command in commands:
        assert main(command) == 2, command
        said = capsys.readouterr().err
        assert said.startswith(f"camkit: the model in {file} is Python code ("), command
        assert said.endswith(f"if you trust this code, pass --config {file}\n"), command
        assert not (project / "ran").exists(), command

    for options, runs in ((["--model", "demo-fair"], False), (["--config", file], True), (["--model", name], True)):
        (project / "ran").unlink(missing_ok=True)
        monkeypatch.delitem(sys.modules, "stranger", raising=False)
        assert main(["layers", *options]) == 0
        assert (project / "ran").exists() == runs, "the code runs if the user names it or its config"
    monkeypatch.delitem(sys.modules, "stranger", raising=False)


@pytest.mark.parametrize("options", [[], ["--activation", "sigmoid"]])
def test_the_activation_is_chosen_in_the_config_or_the_shell(
    project: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    chosen = "" if options else 'activation = "sigmoid"\n'
    (project / "camkit.toml").write_text(f'[model]\nname = "demo-fair"\n{chosen}')
    assert main(["photo.jpg", "--target", "ship", "--json", *options]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["probability"] == pytest.approx(1 / (1 + math.exp(-row["score"])), abs=1e-6)
    assert camkit.explain(
        None, "photo.jpg", target="ship", activation="sigmoid", config="camkit.toml"
    ).probability == pytest.approx(row["probability"], abs=1e-6)


PAGE = (Path(__file__).parents[2] / "docs" / "command.md").read_text("utf-8")


def test_the_keys_of_the_config_in_the_docs_exist() -> None:
    block = re.search(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert block
    assert settings_from(tomllib.loads(block[1]), "docs/command.md").explain.method == "layercam"
    for key in re.findall(r"further keys: (.*)", block[1]):
        for name in key.split(", "):
            assert any(hasattr(table, name) for _, table in Settings()), name


# Options of the check


def test_limits_and_sample_can_be_given_in_the_shell(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("plane", "bird"):
        (project / "val" / name).mkdir(parents=True)
        for number in range(4):
            Image.open("photo.jpg").rotate(90 * number).save(project / "val" / name / f"{number}.jpg")
    (project / "camkit.toml").write_text("[check]\nseed = 5\npastes = 1\n[limits]\ngap = 0.2\nskill = 0.1\n")
    options = ["--per-class", "3", "--gap", "0.3", "--least-pictures", "2", "--pastes", "2", "--inconclusive", "pass"]
    assert main(["check", "val", "-m", "demo-fair", *options, "-q"]) in (0, 1)
    shown = capsys.readouterr()
    assert shown.err == ""
    assert len(shown.out.splitlines()) < 12, "the verdict only"
    settings = json.loads((project / "camkit-check" / "report.json").read_text())["settings"]
    check, limits = settings["check"], settings["limits"]
    assert (check["per_class"], check["seed"], check["pastes"]) == (3, 5, 2)
    assert (limits["gap"], limits["skill"], limits["least_pictures"]) == (0.3, 0.1, 2)
    for option, value in (("--per-class", "1"), ("--gap", "2"), ("--alpha", "0")):
        assert main(["check", "val", "-m", "demo-fair", option, value]) == 2
        said = capsys.readouterr().err
        assert f"camkit: {option} is {value}" in said
        assert "--per-class is 1: input should be" in said or option != "--per-class"


def test_init_takes_every_option_of_the_check_and_writes_it(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def options_of(*command: str) -> set[str]:
        assert main([*command, "--help"]) == 0
        return set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", capsys.readouterr().out))

    (project / "val" / "plane").mkdir(parents=True)
    (project / "val" / "plane" / "a.jpg").write_bytes((project / "photo.jpg").read_bytes())
    missing = options_of("check") - options_of("check", "init")
    assert missing == {"--ray"}, "where a check is computed is no setting of it"

    (project / "camkit.toml").unlink()
    (project / "configs").mkdir()
    typed = (
        "check init val -m demo-fair -w mine.pth --labels labels.txt --size 128 --mean 0.5,0.5,0.5 --std 1,1,1 "
        "--per-class 7 --gap 0.3 --seed 4 --ring 0.2 --out reports --quick --inconclusive pass "
        "--method layercam --layer features.3 --file configs/camkit.toml"
    )
    assert main(typed.split()) == 0
    config = read_config(project / "configs" / "camkit.toml")
    assert Path(str(config.model.weights)).resolve() == project / "mine.pth"
    assert (config.model.size, config.model.mean, config.model.std) == (128, [0.5, 0.5, 0.5], [1, 1, 1])
    assert (config.check.per_class, config.check.seed, config.check.ring) == (7, 4, 0.2)
    assert (config.check.method, config.check.layer) == ("layercam", "features.3")
    assert (config.limits.gap, config.run.quick, config.run.inconclusive) == (0.3, True, "pass")
    paths = [Path(str(path)).resolve() for path in (config.run.out, config.data.path)]
    assert paths == [project / "reports", project / "val"]
    assert main(typed.split()) == 2
    assert "exists already; name another file with --file, or pass --overwrite" in capsys.readouterr().err
    more = ["check", "init", "-c", "configs/camkit.toml", "--gap", "0.4", "--file", "camkit.toml"]
    with (project / "configs" / "camkit.toml").open("a") as file:
        file.write('[classes.plane]\nexpect = ["rider"]\n' + WAIVER.replace("cat", "plane"))
    assert main(more) == 0
    config = read_config(project / "camkit.toml")
    assert (config.limits.gap, config.check.seed) == (0.4, 4)
    assert config.also_allowed("plane") == {"rider"}
    assert [waiver.name for waiver in config.waivers] == ["plane"]


@pytest.mark.parametrize("name", ["out", "baseline", "card", "regions", "class_map", "config"])
def test_an_empty_path_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"^{name} is empty; name a file or a folder"):
        camkit.check("demo-fair", tmp_path, **{name: ""})
