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
        [r"FAIL: .*: a gap of 1\.00 .*; see .*reports/test_model\.py-test_it-demo-biased-\w{6}-1/rep.*html"]
    )
    assert "During handling" not in first.stdout.str(), "the sentence alone is shown"
    for name in ("biased", "fair"):
        [_] = pytester.path.glob(f"camkit-baselines/test_model-test_it-demo-{name}-*-1.json")
        [_] = pytester.path.glob(f"reports/test_model.py-test_it-demo-{name}-*-1")
    pytester.makepyfile(test_model=MODULE.replace("camkit_check(name", "camkit_check('demo-biased'"))
    second = run("-m", "camkit", "-k", "fair")
    second.assert_outcomes(failed=1, deselected=1)
    second.stdout.re_match_lines([r"FAIL: .*; worse than the baseline: .*; see .*report\.html"])
    pytester.makepyfile(test_model=MODULE.replace("camkit_check(name", "camkit_check('demo-fiar'"))
    third = run("-k", "fair")
    third.stdout.re_match_lines([r"unknown model 'demo-fiar'; did you mean 'demo-fair'.*"])
    assert "Traceback" not in third.stdout.str() and "plan.py" not in third.stdout.str()


WITHOUT_A_CHECK = """
import camkit, camkit.background.report

class Result(str):
    def assert_ok(self): pass

def check(model, data, out, **options):
    if out is not None: out.mkdir(parents=True)
    return Result(f"{model} {data} {sorted(options)}")

camkit.check, camkit.background.report.render_json = check, str
"""
TWO_CALLS = """
import pytest

@pytest.mark.parametrize("name", ["fair/", "fair"])
def test_it(camkit_check, name):
    camkit_check(name, 1)
    camkit_check(name, 2, out=None)
"""


@pytest.mark.extended
def test_each_call_has_its_own_files(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    run = functools.partial(pytester.runpytest_subprocess, "-p", "camkit.pytest_plugin", "--import-mode=importlib")
    pytester.makeconftest(WITHOUT_A_CHECK)
    for folder in map(pytester.mkdir, "ab"):
        (folder / "test_model.py").write_text(TWO_CALLS)
    for reports in ("first", "second"):
        run("--camkit-update", f"--camkit-out={reports}").assert_outcomes(passed=4)
        assert len([*(pytester.path / reports).iterdir()]) == 4, "two tests in two folders, and out=None"
        for folder in "ab":
            written = sorted(file.read_text() for file in (pytester.path / folder / "camkit-baselines").iterdir())
            assert written == ["fair 1 []", "fair 2 []", "fair/ 1 []", "fair/ 2 []"], "not compared with the first"


def test_the_plugin_imports_no_pytorch() -> None:
    code = "import sys, camkit.pytest_plugin; print({'torch', 'numpy', 'camkit.background'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
