"""The house rules: style, types, import directions, one command for all."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent


@pytest.mark.parametrize(
    "command",
    [
        [BIN / "ruff", "check", "."],
        [BIN / "ruff", "format", "--check", "."],
        [BIN / "mypy"],
        [BIN / "lint-imports"],
    ],
    ids=lambda command: " ".join([command[0].name, *command[1:]]),
)
def test_the_tools_have_nothing_to_say(command: list) -> None:
    done = subprocess.run([*map(str, command)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_public_names_are_pinned() -> None:
    import camkit  # noqa: PLC0415

    assert sorted(camkit.__all__) == [
        "CamkitError",
        "CheckResult",
        "Diagnosis",
        "Explainer",
        "Explanation",
        "Failure",
        "METHODS",
        "TargetLayer",
        "__version__",
        "check",
        "diagnose",
        "errors",
        "explain",
        "explain_many",
        "feature_maps",
        "hooks",
        "load_model",
        "register_method",
        "scenes",
        "targets",
        "tensorboard",
    ]
    assert all(getattr(camkit, name) is not None for name in camkit.__all__)
