"""A pytest plugin with the marker ``camkit`` and the fixture ``camkit_check``. Pytest loads it if camkit is installed.

    import pytest

    @pytest.mark.camkit
    def test_the_model_does_not_read_the_background(camkit_check):
        camkit_check("mine.py:build", "validation/")

Every pytest run loads this file, so it imports neither PyTorch nor the check.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import camkit


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add camkit's options."""
    parser.addoption("--camkit-out", metavar="FOLDER", help="the folder for camkit's reports; default: tmp_path")
    parser.addoption("--camkit-update", action="store_true", help="write the baselines that later runs compare with")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", "camkit: a background check, which is slow")


@pytest.fixture
def camkit_check(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Any]:
    """Return ``check(model, data, **options)``, which fails the test if the model may not ship.

    It takes and returns what ``camkit.check`` does. ``--camkit-update`` writes a baseline beside the test:
    ``camkit-baselines/FILE-TEST-DIGEST-1.json`` for its first call. If there is one, a model that is significantly
    worse fails too.
    """
    # A baseline lies beside its test, and its name does not depend on the folder in which pytest runs
    of_baseline = _file_name(f"{request.path.stem}-{request.node.nodeid.partition('::')[2]}")
    of_report = _file_name(request.node.nodeid)
    calls = itertools.count(1)

    def check(model: Any, data: Any, **options: Any) -> Any:
        call, update = next(calls), request.config.getoption("camkit_update")
        options.setdefault("out", Path(request.config.getoption("camkit_out") or tmp_path, f"{of_report}-{call}"))
        baseline = request.path.parent / "camkit-baselines" / f"{of_baseline}-{call}.json"
        if baseline.exists() and not update:
            options = {"baseline": baseline, "fail_on_worse": True, **options}
        try:
            result = camkit.check(model, data, **options)
        except camkit.CamkitError as error:
            raise pytest.fail.Exception(str(error), pytrace=False) from None
        if update:
            from camkit.background.report import render_json  # noqa: PLC0415 - it imports PyTorch
            from camkit.images.files import write_file  # noqa: PLC0415

            write_file(baseline, render_json(result).encode())
        try:
            result.assert_ok()
        except AssertionError as error:
            raise pytest.fail.Exception(str(error), pytrace=False) from None
        return result

    return check


def _file_name(test: str) -> str:
    """Return a name for a test, with a digest, because tests may differ only in characters that the name replaces."""
    return "-".join((re.sub(r"[^\w.-]+", "-", test).strip("-"), hashlib.sha256(test.encode()).hexdigest()[:6]))
