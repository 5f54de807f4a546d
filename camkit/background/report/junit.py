"""A check as JUnit XML: one case per class, one for all together."""

from __future__ import annotations

import re
from typing import Literal

from junitparser import Failure, JUnitXml, Skipped, TestCase, TestSuite

from camkit.background.check import CheckResult
from camkit.background.verdict import Judged


def render(result: CheckResult, inconclusive: Literal["pass", "fail"] = "pass") -> str:
    """Return the XML; WARN passes with its reasons as output, waived classes are skipped.

    INCONCLUSIVE classes are skipped too, or fail where that is asked for.
    """
    suite = TestSuite(_printable(f"camkit check of {result.plan.model.name}"))
    for name in [*result.classes, ""]:
        suite.add_testcase(_case(name or "all classes together", result.judged[name], inconclusive, is_all=not name))
    for name, error in result.failures.items():
        case = TestCase(_printable(name), "pictures")
        case.result = [Skipped(_printable(f"could not be used: {error}"))]
        suite.add_testcase(case)
    xml = JUnitXml()
    xml.add_testsuite(suite)
    written: bytes = xml.tostring()
    return written.decode()


def _printable(text: str) -> str:
    """Return text without what XML cannot hold."""
    return re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", text)


def _case(name: str, judged: Judged, inconclusive: Literal["pass", "fail"], *, is_all: bool) -> TestCase:
    case = TestCase(_printable(name), "background")
    why = _printable("; ".join(reason.text for reason in judged.reasons))
    if judged.verdict in ("FAIL", "INCONCLUSIVE") and judged.waived:
        case.result = [Skipped(_printable(f"waived: {judged.waived}: {why}"))]
    elif judged.verdict == "FAIL" or (judged.verdict == "INCONCLUSIVE" and inconclusive == "fail"):
        case.result = [Failure(why, "background")]
    elif judged.verdict == "INCONCLUSIVE" and not is_all:
        case.result = [Skipped(why)]
    case.system_out = f"{judged.verdict}: {why}"
    return case
