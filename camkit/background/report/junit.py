"""A check as JUnit XML: one test case per class, and one for all classes together."""

from __future__ import annotations

from junitparser import Failure, JUnitXml, Skipped, TestCase, TestSuite

from camkit.background.check import CheckResult
from camkit.background.measures import OVERALL
from camkit.background.values import Inconclusive
from camkit.background.verdict import Judgement
from camkit.errors import printable


def render(result: CheckResult) -> str:
    """Return the XML. WARN passes, with its reasons as output. Waived classes are skipped.

    INCONCLUSIVE classes are skipped too, or fail if ``result.inconclusive`` is "fail".
    """
    suite = TestSuite(printable(f"camkit check of {result.plan.model.name}"))
    for name in result.classes:
        suite.add_testcase(_case(name, result.judged[name], result.inconclusive, is_all=False))
    suite.add_testcase(_case("all classes together", result.judged[OVERALL], result.inconclusive, is_all=True))
    for name, error in result.failures.items():
        case = TestCase(printable(name), "pictures")
        case.result = [Skipped(printable(f"could not be used: {error}"))]
        suite.add_testcase(case)
    document = JUnitXml()
    document.add_testsuite(suite)
    xml: bytes = document.tostring()
    return xml.decode()


def _case(name: str, judgement: Judgement, inconclusive: Inconclusive, *, is_all: bool) -> TestCase:
    case = TestCase(printable(name), "background")
    verdict = judgement.verdict
    why = printable("; ".join(reason.text for reason in judgement.reasons))
    if verdict in ("FAIL", "INCONCLUSIVE") and judgement.waived:
        case.result = [Skipped(printable(f"waived: {judgement.waived}: {why}"))]
    elif verdict == "FAIL" or (verdict == "INCONCLUSIVE" and inconclusive == "fail"):
        case.result = [Failure(why, "background")]
    elif verdict == "INCONCLUSIVE" and not is_all:
        case.result = [Skipped(why)]
    case.system_out = f"{verdict}: {why}"
    return case
