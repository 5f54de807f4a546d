"""A check as JUnit XML: one test case per class, and one for all classes together."""

from __future__ import annotations

from junitparser import Failure, JUnitXml, Skipped, TestCase, TestSuite

from camkit.background.effects import OVERALL
from camkit.background.report import words
from camkit.background.result import CheckResult, Inconclusive
from camkit.background.rule import Judgement
from camkit.errors import printable


def render(result: CheckResult) -> str:
    """Return the XML. WARN passes, with its reasons as output. Waived classes are skipped.

    INCONCLUSIVE of a class, or a WARN of one that could not be tested, fails, or is skipped if ``result.inconclusive``
    is "pass". A class that is not decided is skipped too. INCONCLUSIVE of all classes together is always skipped:
    nothing was found, and the exit code says that the model may not ship. The time of a class is its share of the
    check's duration, by the number of its pictures: the pictures of all classes pass through the model together.
    """
    suite = TestSuite(printable(f"camkit check of {result.plan.model.name}"))
    seconds = 0.0 if result.run is None else result.run.seconds
    if result.run is not None:
        suite.timestamp = result.run.started.isoformat(timespec="seconds")
    for name, measures in result.classes.items():
        case = _case(name, result.judged[name], result.inconclusive)
        case.time = round(seconds * measures.pictures / max(1, len(result.images)), 3)
        suite.add_testcase(case)
    overall = _case("all classes together", result.judged[OVERALL], "pass")
    overall.time = 0.0
    suite.add_testcase(overall)
    if result.change is not None:
        case = TestCase("since the baseline", "background", 0.0)
        if result.regressed:
            case.result = [Failure(printable("; ".join(result.regressed)), "background")]
        case.system_out = printable(words.change_since_baseline(result))
        suite.add_testcase(case)
    for name, error in result.failures.items():
        case = TestCase(printable(name), "pictures", 0.0)
        case.result = [Skipped(printable(f"could not be used: {error}"))]
        suite.add_testcase(case)
    document = JUnitXml()
    document.add_testsuite(suite)
    xml: bytes = document.tostring()
    return xml.decode()


def _case(name: str, judgement: Judgement, inconclusive: Inconclusive) -> TestCase:
    case = TestCase(printable(name), "background")
    verdict = judgement.verdict
    why = printable("; ".join(reason.text for reason in judgement.reasons))
    undecided = verdict == "INCONCLUSIVE" or (verdict == "WARN" and judgement.findings.untested)
    if (verdict == "FAIL" or undecided) and judgement.waived:
        case.result = [Skipped(printable(f"waived: {judgement.waived}: {why}"))]
    elif verdict == "FAIL" or (undecided and inconclusive == "fail"):
        case.result = [Failure(why, "background")]
    elif undecided or judgement.shown == "not decided":
        case.result = [Skipped(why)]
    case.system_out = f"{judgement.shown}: {why}"
    return case
