"""The action, the workflow and the example of docs/check.md run as they are printed there, with the demo networks."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
import yaml
from composite import in_bash, run_action

import camkit
from camkit.background.report import REPORTS
from camkit.cli import app

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs/check.md").read_text("utf-8")
ACTION = ROOT / "action.yml"
EXAMPLE = ROOT / "examples/test_before_deployment.py"


WORKFLOW = yaml.safe_load(re.search(r"<!-- workflow -->\n```yaml\n(.*?)```\n<!-- end -->", DOCS, re.DOTALL)[1])
CHECKOUT, CALL = next(iter(WORKFLOW["jobs"].values()))["steps"]
"""The two steps of the only job; CALL calls the action."""


def test_the_workflow_runs_on_pull_requests_and_may_write_nothing():
    assert "pull_request" in WORKFLOW[True]  # YAML 1.1 reads the key "on" as a boolean
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert "Replace `OWNER`" in DOCS
    assert len(WORKFLOW["jobs"]) == 1
    assert CHECKOUT["uses"].startswith("actions/checkout@")
    assert CALL["uses"] == "OWNER/camkit@main"


def test_the_action_passes_every_option_that_it_offers(tmp_path):
    action = yaml.safe_load(ACTION.read_text("utf-8"))
    assert set(CALL["with"]) <= set(action["inputs"])
    check = next(step for step in action["runs"]["steps"] if step.get("id") == "check")
    assert {"data", "model", "weights", "labels", "regions", "config", "options", "out"} <= {
        value.removeprefix("${{ inputs.").removesuffix(" }}") for value in check["env"].values()
    }
    (tmp_path / "empty").touch()  # a config is read while the call is
    names = ["--model", "--weights", "--labels", "--regions", "--config", "--out"]
    words = [word for name in names for word in (name, str(tmp_path / "empty"))]
    app.parse_args(["check", "pictures", *words], print_error=False, exit_on_error=False)


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """Return a function that makes a repository with the files that the workflow names, for a demo network."""

    def make(network, per_class=10):
        folder = tmp_path_factory.mktemp(network)
        camkit.scenes.write_scenes(folder / "drawn", per_class)
        (folder / "drawn/pictures").rename(folder / "validation")
        (folder / "drawn/masks").rename(folder / "masks")
        (folder / "mine.py").write_text(
            "import camkit\n\n\ndef build():\n"
            "    loaded = camkit.load_model('demo-fair', device='cpu')\n"
            "    return loaded.module, loaded.preprocess\n"
        )
        loaded = camkit.load_model(network, device="cpu")
        torch.save(loaded.module.state_dict(), folder / "mine.pth")
        (folder / "labels.txt").write_text("\n".join(loaded.labels))
        return folder

    return make


def act(folder, tmp_path, options, **more):
    """Run the action on a repository with the inputs of docs/check.md and other options."""
    temp = tmp_path / "runner"
    temp.mkdir()
    return run_action(ACTION, folder, {**CALL["with"], "options": options, **more}, temp=temp, skip="Install camkit")


def titles(ran):
    return sorted(line.split("::")[1] for line in ran.stdout.splitlines() if line.startswith("::"))


SMALL = "--pastes 1 --batch-size 8 --least-pictures 10"
WIDE = "--gap 0.3 --sufficiency 0.3 --attraction 0.5"
"""Limits that 40 pictures are enough to exclude."""


@pytest.mark.extended
def test_too_few_pictures_are_inconclusive_and_a_wrong_call_gives_no_verdict(repository, tmp_path):
    folder = repository("demo-fair", per_class=2)
    ran = act(folder, tmp_path, SMALL)
    assert (ran.code, ran.outputs) == (3, {"verdict": "INCONCLUSIVE", "exit-code": "3"}), ran.stderr
    assert "❔ INCONCLUSIVE: " in ran.summary
    assert "warning title=camkit%3A INCONCLUSIVE" in titles(ran)
    assert ran.used[1:] == [
        ("actions/upload-artifact@v7", {"name": "background-check", "path": "camkit-check"}),
        (
            "actions/upload-artifact@v7",
            {"path": f"{tmp_path}/runner/background-check.png", "archive": "False", "overwrite": "True"},
        ),
    ]
    assert {file.name for file in (folder / "camkit-check").iterdir()} == set(REPORTS)
    (tmp_path / "second").mkdir()
    wrong = act(folder, tmp_path / "second", "--no-such-option", **{"python-version": ""})
    assert (wrong.code, wrong.outputs) == (2, {"verdict": "", "exit-code": "2"})
    assert "No verdict: camkit check ended with exit code 2" in wrong.summary
    assert wrong.used == []  # neither sets up Python nor uploads the reports of the run before


@pytest.mark.extended
@pytest.mark.parametrize(
    ("network", "options", "code", "verdict"),
    [("demo-fair", WIDE, 0, "PASS"), ("demo-biased", "", 1, "FAIL")],
)
def test_the_steps_of_the_action_do_what_the_page_says(repository, tmp_path, network, options, code, verdict):
    folder = repository(network)
    ran = act(folder, tmp_path, f"{SMALL} {options}")
    assert (ran.code, ran.outputs) == (code, {"verdict": verdict, "exit-code": str(code)}), ran.stderr
    assert f" {verdict}: " in ran.summary.splitlines()[0]
    assert "](evidence.png)" not in ran.summary
    assert "[The evidence in pictures](https://example.org/picture)" in ran.summary
    assert "[All reports](https://example.org/reports)" in ran.summary
    of_model = {"PASS": [], "FAIL": ["error title=camkit%3A FAIL"]}[verdict]
    assert [title for title in titles(ran) if title.endswith(verdict)] == of_model
    if verdict == "FAIL":
        assert "on a background of class" in ran.summary
        assert "wrong: " in ran.summary
    assert "mine.pth (SHA-256 " in (folder / "camkit-check/report.html").read_text()


@pytest.mark.extended
def test_the_action_installs_the_camkit_that_lies_beside_it(tmp_path):
    """In an environment of its own, from a copy, with the packages that this environment has."""
    own = tmp_path / "action"
    own.mkdir()
    for name in ("camkit", "pyproject.toml", "README.md", "LICENSE", "action.yml"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, own / name)
    venv.create(tmp_path / "venv", with_pip=True)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    for own_tools in site.glob("*setuptools*"):  # that of Python 3.11 is too old, and pip builds without an index here
        shutil.rmtree(own_tools)
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    install = next(
        step for step in yaml.safe_load(ACTION.read_text("utf-8"))["runs"]["steps"] if step["name"] == "Install camkit"
    )
    run = ["bash", "-eo", "pipefail", "-c", install["run"]]
    environment = {
        "PATH": f"{tmp_path}/venv/bin{os.pathsep}{os.environ['PATH']}", "GITHUB_ACTION_PATH": str(own), "INDEX": "",
        "PACKAGES": "", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_INDEX": "1",
    }  # fmt: skip
    done = subprocess.run(run, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (site / "camkit/cli/__init__.py").is_file()
    assert (tmp_path / "venv/bin/camkit").is_file()


def test_the_projects_workflows_are_short_of_rights_and_pin_their_actions():
    files = sorted((ROOT / ".github/workflows").glob("*.yml"))
    assert [file.name for file in files] == ["release.yml", "tests.yml"]
    for file in files:
        flow = yaml.safe_load(file.read_text("utf-8"))
        assert flow["permissions"] == {"contents": "read"}
        for name, job in flow["jobs"].items():
            assert job["timeout-minutes"]
            assert job.get("permissions", {}) == ({"id-token": "write"} if name == "publish" else {})
            for step in job["steps"]:
                assert "@" in step.get("uses", "@") or step["uses"] == "./", step
                assert "${{" not in step.get("run", ""), "an expression in a script is code"


@pytest.mark.parametrize(("tag", "dated", "code"), [("v0.1.0", True, 0), ("v0.1.1", True, 1), ("v0.1.0", False, 1)])
def test_a_release_needs_the_tag_of_its_version_and_a_dated_changelog(tmp_path, tag, dated, code):
    release = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text("utf-8"))
    compare = next(step for step in release["jobs"]["build"]["steps"] if "tag" in step.get("name", ""))
    for name in ("pyproject.toml", "CITATION.cff", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    changelog = tmp_path / "CHANGELOG.md"
    changelog.write_text(changelog.read_text("utf-8").replace("(unreleased)", "(2026-12-01)" if dated else ""), "utf-8")
    done = in_bash({"shell": "bash", **compare}, tmp_path, {"TAG": tag})
    assert bool(done.returncode) == bool(code), done.stderr


@pytest.mark.extended
def test_the_example_stops_the_biased_network(tmp_path):
    pictures = camkit.scenes.write_scenes(tmp_path, 10)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--junit-xml", tmp_path / "junit.xml", EXAMPLE],
        cwd=tmp_path, env={**os.environ, "CHECKED_MODEL": "demo-biased", "CHECKED_PICTURES": str(pictures)},
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    cases = ET.parse(tmp_path / "junit.xml").findall(".//testcase")
    assert len(cases) == 3, done.stdout
    failing = [case.get("name") for case in cases if case.find("failure") is not None]
    assert failing == ["test_the_model_does_not_read_the_background"]
    assert done.returncode == 1
    assert "FAIL: " in done.stdout or "relies on the background" in done.stdout
