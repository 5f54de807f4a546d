"""A pytest plugin with the marker ``camkit`` and the fixture ``camkit_check``. Pytest loads it if camkit is installed.

    import pytest

    @pytest.mark.camkit
    def test_the_model_does_not_read_the_background(camkit_check):
        camkit_check("mine.py:build", "validation/")

Every pytest run loads this file, so it imports neither PyTorch nor the check.
"""

from __future__ import annotations

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
    ``camkit-baselines/FILE-TEST-1.json`` for its first call. If there is one, a model that is significantly worse
    fails too.
    """
    test = re.sub(r"[^\w.-]+", "-", f"{request.path.stem}-{request.node.nodeid.partition('::')[2]}").strip("-")
    calls = itertools.count(1)

    def check(model: Any, data: Any, **options: Any) -> Any:
        name, update = f"{test}-{next(calls)}", request.config.getoption("camkit_update")
        options.setdefault("out", Path(request.config.getoption("camkit_out") or tmp_path, name))
        baseline = request.path.parent / "camkit-baselines" / f"{name}.json"
        if baseline.exists() and not update:
            options = {"baseline": baseline, "fail_on_worse": True, **options}
        result = camkit.check(model, data, **options)
        if update:
            from camkit.images.files import write_file  # noqa: PLC0415 - it imports PyTorch

            write_file(baseline, Path(options["out"], "report.json").read_bytes())
        try:
            result.assert_ok()
        except AssertionError as error:
            raise pytest.fail.Exception(str(error), pytrace=False) from None
        return result

    return check
