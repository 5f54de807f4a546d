"""The plugin for pytest, in runs of pytest as a user has them."""

from __future__ import annotations

import functools
import subprocess
import sys

import pytest

pytest_plugins = "pytester"

MODULE = """
import camkit, pytest

@pytest.mark.camkit
@pytest.mark.parametrize("name", ["demo-biased", "demo-fair"])
def test_it(camkit_check, tmp_path, name):
    pictures = camkit.scenes.write_scenes(tmp_path, 10)
    config = {"limits": {"least_pictures": 8}, "check": {"pastes": 1}}
    assert camkit_check(name, pictures, config=config, inconclusive="pass").verdict != "FAIL"
"""


@pytest.mark.extended
def test_a_verdict_fails_the_test_and_so_does_a_worse_model(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # the plugin may be installed, or not
    run = functools.partial(pytester.runpytest_subprocess, "-p", "camkit.pytest_plugin", "--strict-markers")
    pytester.makepyfile(test_model=MODULE)
    first = run("--camkit-out=reports", "--camkit-update")
    first.assert_outcomes(failed=1, passed=1)
    first.stdout.re_match_lines(
        [r"FAIL: .*: a gap of 1\.00 .*; see .*reports/test_model-test_it-demo-biased-1/rep.*html"]
    )
    assert "During handling" not in first.stdout.str(), "the sentence alone is shown"
    names = [f"test_model-test_it-demo-{name}-1.json" for name in ("biased", "fair")]
    assert sorted(file.name for file in (pytester.path / "camkit-baselines").iterdir()) == names
    assert sorted(file.name for file in (pytester.path / "reports").iterdir()) == [name[:-5] for name in names]
    pytester.makepyfile(test_model=MODULE.replace("camkit_check(name", "camkit_check('demo-biased'"))
    second = run("-m", "camkit", "-k", "fair")
    second.assert_outcomes(failed=1, deselected=1)
    second.stdout.re_match_lines([r"worse than the baseline: .*; see .*report\.html"])


def test_the_plugin_imports_no_pytorch() -> None:
    code = "import sys, camkit.pytest_plugin; print({'torch', 'numpy', 'camkit.background'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
