"""A plugin of pytest, which loads it where camkit is installed: the marker ``camkit`` and the fixture ``camkit_check``.

    import pytest

    @pytest.mark.camkit(labels=["cat", "dog"])
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
    group = parser.getgroup("camkit")
    group.addoption("--camkit-out", metavar="FOLDER", help="where the reports go; default: the test's tmp_path")
    group.addoption("--camkit-update", action="store_true", help="write the checks' baselines, to compare with later")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", "camkit(**options): a background check; the options are those of camkit.check")


@pytest.fixture
def camkit_check(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Any]:
    """Return ``check(model, data, **options)``, which fails the test if the model may not ship.

    It takes what ``camkit.check`` takes; the options of the marker ``camkit`` come before those of the call. If the
    baseline ``camkit-baselines/FILE-TEST.json`` beside the test exists, it also fails a model that is significantly
    worse. ``--camkit-update`` writes this file.
    """
    test = re.sub(r"[^\w.-]+", "-", f"{request.path.stem}-{request.node.nodeid.partition('::')[2]}").strip("-")
    names = itertools.chain([test], (f"{test}-{number}" for number in itertools.count(2)))  # of several calls
    marker = request.node.get_closest_marker("camkit")

    def check(model: Any, data: Any, **options: Any) -> Any:
        name, update = next(names), request.config.getoption("camkit_update")
        options = {**(marker.kwargs if marker else {}), **options}
        options.setdefault("out", Path(request.config.getoption("camkit_out") or tmp_path, name))
        baseline = Path(options.pop("baseline", request.path.parent / "camkit-baselines" / f"{name}.json"))
        if baseline.exists() and not update:
            options = {"baseline": baseline, "fail_on_worse": True, **options}
        result = camkit.check(model, data, **options)
        if update:
            from camkit.images.files import write_file  # noqa: PLC0415 - it imports PyTorch

            write_file(baseline, result.report.with_name("report.json").read_bytes())
        try:
            result.assert_ok()
        except AssertionError as error:
            pytest.fail(str(error), pytrace=False)
        return result

    return check
