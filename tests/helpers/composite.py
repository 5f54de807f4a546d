"""Runs the shell steps of a GitHub Action as the runner does: in bash, with files for outputs and summary."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

_EXPRESSION = re.compile(r"\$\{\{ *([\w.-]+) *\}\}")


@dataclass
class Ran:
    """What a run of the action left behind; ``used`` has the inputs of each action that a step would have called."""

    code: int = 0
    stdout: str = ""
    stderr: str = ""
    summary: str = ""
    outputs: dict[str, str] = field(default_factory=dict)
    used: list[tuple[str, dict[str, str]]] = field(default_factory=list)


def run_action(file: Path, folder: Path, inputs: Mapping[str, str], *, temp: Path, skip: str = "") -> Ran:
    """Run the steps of a composite action in a folder. A step that calls another action succeeds and has a URL.

    Args:
        file: the action.yml.
        folder: the repository that the action checks.
        inputs: what stands under ``with``; the others have their defaults.
        temp: the runner's folder for files, which is empty.
        skip: the name of a step that is not run.
    """
    action = yaml.safe_load(file.read_text("utf-8"))
    assert action["runs"]["using"] == "composite"
    assert set(inputs) <= set(action["inputs"])
    known = {f"inputs.{name}": str(inputs.get(name, about["default"])) for name, about in action["inputs"].items()}
    known["runner.temp"] = str(temp)
    ran = Ran()
    for number, step in enumerate(action["runs"]["steps"]):
        if step["name"] == skip or not _holds(step.get("if", ""), known):
            continue
        if "uses" in step:
            ran.used.append((step["uses"], {key: _filled(value, known) for key, value in step["with"].items()}))
            known[f"steps.{step.get('id')}.outputs.artifact-url"] = f"https://example.org/{step.get('id')}"
            continue
        files = {name: temp / f"{name}-{number}" for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
        environment = {name: str(path) for name, path in files.items()}
        environment |= {"RUNNER_TEMP": str(temp), "GITHUB_ACTION_PATH": str(file.parent)}
        environment |= {name: _filled(value, known) for name, value in step.get("env", {}).items()}
        done = in_bash(step, folder, environment)
        ran.stdout, ran.stderr = ran.stdout + done.stdout, ran.stderr + done.stderr
        written = {name: path.read_text("utf-8") if path.exists() else "" for name, path in files.items()}
        ran.summary += written["GITHUB_STEP_SUMMARY"]
        for line in written["GITHUB_OUTPUT"].splitlines():
            name, _, value = line.partition("=")
            known[f"steps.{step['id']}.outputs.{name}"] = value
        ran.code = done.returncode
        if ran.code:
            break
    ran.outputs = {name: _filled(about["value"], known) for name, about in action["outputs"].items()}
    return ran


def in_bash(step: Mapping[str, Any], folder: Path, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    assert step["shell"] == "bash"
    assert "${{" not in step["run"], "an input in a script is code; it belongs into env"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
        cwd=folder, env={**os.environ, "PATH": path, "GITHUB_ACTIONS": "true", **environment},
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip


def _filled(text: Any, known: Mapping[str, str]) -> str:
    return _EXPRESSION.sub(lambda found: known.get(found[1], ""), str(text))


def _holds(condition: str, known: Mapping[str, str]) -> bool:
    if not condition:
        return True
    name, value = re.fullmatch(r"([\w.-]+) != '(.*)'", condition).groups()
    return known.get(name, "") != value
