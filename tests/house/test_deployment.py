"""The workflow and the example of docs/check.md run as they are printed there, with the demo networks."""

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
import yaml

import camkit
from camkit.background.report import REPORTS
from camkit.demo.scenes import write_scenes

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs/check.md").read_text("utf-8")
EXAMPLE = ROOT / "examples/test_before_deployment.py"


def workflow():
    block = re.search(r"<!-- workflow -->\n```yaml\n(.*?)```\n<!-- end -->", DOCS, re.DOTALL)
    assert block
    return yaml.safe_load(block[1])


def steps():
    (job,) = workflow()["jobs"].values()
    return job["steps"]


def test_the_workflow_runs_on_pull_requests_and_installs_checks_and_uploads():
    assert "pull_request" in workflow()[True]  # YAML 1.1 reads the key "on" as a boolean
    used = [step["uses"].partition("@")[0] for step in steps() if "uses" in step]
    commands = [step["run"] for step in steps() if "run" in step]

    assert used == ["actions/checkout", "actions/setup-python", "actions/upload-artifact"]
    assert commands[0] == 'python -m pip install "camkit @ git+https://github.com/OWNER/camkit"'
    assert "replace `OWNER`" in " ".join(DOCS.split())
    assert all("cache" not in step.get("with", {}) for step in steps()), "it fails without a list of requirements"
    assert commands[1].startswith("camkit check ")
    checking = next(number for number, step in enumerate(steps()) if "camkit check" in step.get("run", ""))
    assert all("!cancelled()" in step["if"] for step in steps()[checking + 1 :])  # the report matters most after a FAIL


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """Return a function that makes a repository with the files that the workflow names, for a demo network."""

    def make(network):
        folder = tmp_path_factory.mktemp(network)
        write_scenes(folder / "drawn")
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


def run(command, folder, **environment):
    """Run a step as GitHub's runner does: in bash, which stops at the first command that fails."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", command],
        cwd=folder, env={**os.environ, "PATH": path, **environment}, capture_output=True, text=True, timeout=900,
        check=False,
    )  # fmt: skip


@pytest.mark.extended
@pytest.mark.parametrize(("network", "code", "verdict"), [("demo-fair", 0, "PASS"), ("demo-biased", 1, "FAIL")])
def test_the_commands_of_the_workflow_do_what_it_says(repository, network, code, verdict):
    folder = repository(network)
    summary = folder / "step-summary.md"
    commands = [step["run"] for step in steps() if "pip install" not in step.get("run", "pip install")]

    checked, shown = (
        run(command, folder, GITHUB_ACTIONS="true", GITHUB_STEP_SUMMARY=str(summary)) for command in commands
    )

    assert checked.returncode == code, checked.stderr
    assert shown.returncode == 0, shown.stderr
    assert f"{verdict}: " in summary.read_text()
    titles = [line.split("::")[1] for line in checked.stdout.splitlines() if line.startswith("::")]
    failed = ["", " bird", " car", " plane", " ship"] if verdict == "FAIL" else []
    assert sorted(titles) == [f"error title=camkit%3A FAIL{name}" for name in failed]
    uploaded = next(step["with"]["path"] for step in steps() if "upload-artifact" in step.get("uses", ""))
    assert {file.name for file in (folder / uploaded).iterdir()} == set(REPORTS)
    assert "mine.pth (SHA-256 " in (folder / uploaded / "report.html").read_text()


def test_the_example_names_its_own_file():
    assert "../examples/test_before_deployment.py" in DOCS
    assert all(name in DOCS for name in ("CHECKED_MODEL", "CHECKED_PICTURES"))


@pytest.mark.extended
@pytest.mark.parametrize(
    ("network", "failing"), [("demo-fair", []), ("demo-biased", ["test_the_model_does_not_read_the_background"])]
)
def test_the_example_stops_the_biased_network_only(network, failing, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--junit-xml", tmp_path / "junit.xml", EXAMPLE],
        cwd=tmp_path, env={**os.environ, "CHECKED_MODEL": network}, capture_output=True, text=True, timeout=900,
        check=False,
    )  # fmt: skip

    cases = ET.parse(tmp_path / "junit.xml").findall(".//testcase")
    assert len(cases) == 3, done.stdout
    assert [case.get("name") for case in cases if case.find("failure") is not None] == failing
    assert done.returncode == bool(failing)
    assert ("relies on the background" in done.stdout or "FAIL: " in done.stdout) == bool(failing)
