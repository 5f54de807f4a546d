"""The house rules: style, types, import directions, one command for all."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checked import checked, violations
from jaxtyping import TypeCheckError

from camkit.engine.heatmap import fuse_heatmaps
from camkit.engine.passes import usable_precision
from camkit.methods import METHODS
from camkit.types import LayerRef

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


@pytest.mark.parametrize(
    "command",
    [
        [BIN / "ruff", "check", "."],
        [BIN / "ruff", "format", "--check", "."],
        pytest.param(
            [BIN / "mypy", "camkit"], marks=pytest.mark.extended
        ),  # reads the types of packages that only that tier has
        [BIN / "lint-imports"],
    ],
    ids=lambda command: " ".join([command[0].name, *command[1:]]),
)
def test_the_tools_have_nothing_to_say(command: list) -> None:
    done = subprocess.run([*map(str, command)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_public_names_are_pinned() -> None:
    import camkit  # noqa: PLC0415

    pinned = """
    CamkitError CheckResult Comparison Concepts Diagnosis Explainer Explanation Failure METHODS MendResult
    MethodJudgement ModelComparison TargetLayer Word Words __version__ black_box check compare compare_models
    diagnose errors explain explain_many export factorise feature_maps hooks judge load_model mend methods metrics
    regions register_method scale scenes slide targets tensorboard words
    """
    assert sorted(camkit.__all__) == pinned.split()
    assert all(getattr(camkit, name) is not None for name in camkit.__all__)


def test_importing_camkit_is_quick_and_its_modules_need_no_import() -> None:
    code = "import camkit, sys; late = 'torch' not in sys.modules; camkit.methods.variant; sys.exit(not late)"
    assert subprocess.run([sys.executable, "-c", code], check=False, stderr=subprocess.PIPE).returncode == 0


def returns_text(number: int) -> int:
    @checked
    def inner(number: int = 1) -> int:
        return str(number)

    return inner(number)


@pytest.mark.usefixtures("checks_types")
@pytest.mark.parametrize(
    "call",
    [
        lambda: usable_precision("fp32", "cpu"),  # a function
        lambda: LayerRef(1),  # a dataclass
        lambda: fuse_heatmaps([torch.zeros(1, 4, 4, dtype=torch.int64)], (8, 8)),  # a function with shapes
        lambda: METHODS["hirescam"].weights(torch.zeros(1, 2, 3, 3), torch.zeros(1, 2, 3, 4)),  # axes that must agree
        lambda: checked(returns_text)("1"),
        lambda: returns_text("1"),  # the argument of a function inside a function
        lambda: returns_text(1),  # what it returns
    ],
)
def test_a_wrong_type_is_an_error_with_the_option_types(call) -> None:
    with pytest.raises(TypeCheckError, match="type hint"):
        call()
    violations.clear()
