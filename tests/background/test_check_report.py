"""The reports: the page in a real browser, the other formats in their own parsers."""

import contextlib
import copy
import hashlib
import html
import io
import json
import platform
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from results import with_run
from rich.console import Console
from scipy.stats import binomtest

import camkit
from camkit.background import report as words
from camkit.background.effects import LEVELS, OVERALL
from camkit.background.report import REPORTS, workflow_commands
from camkit.background.result import Change
from camkit.background.rule import VERDICTS, Reason
from camkit.background.showcase import Showcase
from camkit.cli.terminal import printer
from camkit.kit.statistics import Estimate

EVIL = "<script>document.title='taken'</script>"
UNFOLD = "document.querySelectorAll('details').forEach(part => { part.open = true; })"


def with_verdict(own, verdict, **more):
    """Return a copy of a judgement with this verdict."""
    levels = {"FAIL": "fail", "WARN": "warn", "INCONCLUSIVE": "open", "PASS": "excluded"}
    return replace(own, **{"required": [levels[verdict]], "others": (), "warned": False, **more})


def with_names(result, names, **more):
    """Return a copy of a result in which some classes have other names."""
    named = {names.get(name, name): replace(own, name=names.get(name, name)) for name, own in result.classes.items()}
    judged = {names.get(name, name): own for name, own in result.judged.items()}
    rows = tuple(replace(row, label=names.get(row.label, row.label)) for row in result.images)
    return replace(result, **{"classes": named, "judged": judged, "images": rows, **more})


@pytest.fixture(scope="session")
def result(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scenes")
    data = camkit.scenes.write_scenes(folder, 10)
    config = {"check": {"per_class": 10, "pastes": 2}, "limits": {"least_pictures": 10}}
    return camkit.check("demo-biased", data, config=config)


@pytest.fixture(scope="session")
def out(result, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    assert result.save(folder) == folder / "report.html"
    return folder


def test_each_entry_of_the_table_becomes_a_file_with_its_text(result, out):
    assert copy.deepcopy(result).to_dict() == result.to_dict()
    assert {file.name for file in out.iterdir()} == set(REPORTS)
    for name, render in REPORTS.items():
        contents = render(result)
        assert (out / name).read_bytes() == (contents if isinstance(contents, bytes) else contents.encode())


@pytest.mark.extended
def test_pictures_of_several_classes_have_a_probability_for_each(tmp_path):
    data = camkit.scenes.write_scenes(tmp_path / "data", 2)
    rows = [f"{file.relative_to(data).as_posix()},{file.parent.name}" for file in sorted(data.glob("*/*.*"))]
    config = {"check": {"pastes": 1}}

    for several in ([], [rows[0].split(",")[0] + ",plane"]):
        (data / "table.csv").write_text("\n".join(["path,label", *rows, *several]))
        row = camkit.check("demo-fair", data / "table.csv", config=config).images[-1]
        found = camkit.explain("demo-fair", data / row.name, target=row.label)
        wanted = 1 / (1 + np.exp(-found.score)) if several else found.probability
        assert row.probability == pytest.approx(wanted, abs=1e-6)


@pytest.mark.extended
def test_probabilities_are_read_as_explain_reads_them(tmp_path):
    data, demo = camkit.scenes.write_scenes(tmp_path, 2), camkit.load_model("demo-biased")
    ending = replace(demo, module=torch.nn.Sequential(demo.module, torch.nn.Sigmoid()).eval())
    config = {"check": {"pastes": 1}}

    by_module, without = (
        camkit.check(model, data, config=config) for model in (ending, replace(demo, activation="none"))
    )

    for row in by_module.images:
        found = camkit.explain(ending, data / row.name, target=row.label)
        assert row.probability == pytest.approx(found.probability, abs=1e-6)
    assert {row.probability for row in without.images} == {None}
    of_plane = re.compile(r"the model answers \w+; plane \d+%")
    assert of_plane.search(REPORTS["report.html"](by_module))
    assert not of_plane.search(REPORTS["report.html"](without))


def test_the_picture_for_a_comment_shows_the_triptychs(result, out):
    sheet = cv2.imread(out / "evidence.png")
    panels = [panel for strip in Showcase(result).triptychs for panel in strip.triptych]

    assert [panel.arm for panel in panels] == ["same", "other", "removed"] * 3
    assert sheet.shape[1] == 796
    assert sheet[0, 0].tolist() == [255, 255, 255]
    for panel in panels:
        scaled = cv2.resize(panel.pixels[..., ::-1], (260, 260), interpolation=cv2.INTER_NEAREST)
        assert cv2.matchTemplate(sheet, scaled, cv2.TM_SQDIFF_NORMED).min() < 1e-4
    assert "](evidence.png)" in (out / "summary.md").read_text()
    untested = replace(result, images=tuple(replace(row, same={}) for row in result.images))
    bare = cv2.imdecode(np.frombuffer(REPORTS["evidence.png"](untested), np.uint8), cv2.IMREAD_COLOR)
    assert bare.shape[0] < 250 and 900 < sheet.shape[0] < 1300


def test_the_page_shows_every_reason_once(result):
    reasons = tuple(Reason("a kind", f"reason {n}.") for n in range(20))
    judged = {**result.judged, OVERALL: replace(result.judged[OVERALL], reasons=reasons)}
    page = REPORTS["report.html"](replace(result, judged=judged))

    assert all(page.count(f"reason {n}.") == 1 for n in range(20))


def test_every_report_for_people_begins_with_the_same_sentence(result, out):
    sentence = words.sentence(result)

    assert result.classes["bird"].attraction.level == result.judged["bird"].effects["attraction"].level == "fail"
    assert sentence.startswith("demo-biased relies on the background: the model recognises 100% of the objects")
    assert f"</span>: {sentence}</h1>" in (out / "report.html").read_text()
    assert (out / "summary.md").read_text().splitlines()[0].endswith(sentence)
    assert words.verdict(result).plain.splitlines()[0] == f"FAIL: {sentence}"
    assert json.loads((out / "report.json").read_text())["sentence"] == sentence


def test_pictures_that_could_not_be_tested_say_why(result):
    why = {"a.png": "it has no region of its class", "b.png": "it cannot be read"}
    found = replace(result, untested={**why, "c.png": why["a.png"]})
    line = "2 pictures could not be tested, such as a.png: it has no region of its class"

    assert line in words.verdict(found).plain
    assert line in REPORTS["report.html"](found)
    assert json.loads(REPORTS["report.json"](found))["data"]["untested"] == found.untested


def undecided_by(result, *reasons, **lacking):
    """Return an INCONCLUSIVE result with these reasons, and with classes that lack so many pictures."""
    judged = {**result.judged, OVERALL: with_verdict(result.judged[OVERALL], "INCONCLUSIVE", reasons=reasons)}
    for name, lacks in lacking.items():
        judged[name] = with_verdict(judged[name], "INCONCLUSIVE", reasons=(Reason("few", "few", lacks=lacks),))
    return replace(result, judged=judged)


def test_of_open_effects_the_step_that_settles_most_is_named_in_every_report(result):
    found = undecided_by(
        result,
        Reason("open", "a gap is open", step="add about 25 to 83 pictures", more=(OVERALL, 83)),
        Reason("open", "a noise gap is open", step="add about 2 to 37 pictures", more=(OVERALL, 37)),
        Reason("open", "a gap is open", step="add about 9 to 50 pictures of cat", more=("cat", 50)),
        Reason("few", "the groups are few", step="add pictures from at least 4 more groups"),
    )
    steps = words.next_steps(found)
    assert steps == [reason.step for reason in found.judged[OVERALL].reasons if reason.more != (OVERALL, 37)]
    assert f"next: {steps[0]}" in words.verdict(found).plain
    for text in (REPORTS["report.html"](found), REPORTS["summary.md"](found)):
        assert steps[0] in text


def test_classes_with_too_few_pictures_are_one_step(result):
    few = Reason("few", "few", step="add at least 10 pictures, with regions", lacks=10)
    other = Reason("open", "a gap is open", step="add about 40 to 250 pictures")
    gather, *others = words.next_steps(undecided_by(result, few, other, bird=25, car=18))
    assert others == ["add about 40 to 250 pictures"]
    assert gather.startswith("add pictures with regions, at least ")
    assert {"25 of bird", "18 of car"} == set(gather.partition("at least ")[2].split(", "))


def test_a_failed_or_undecided_model_has_a_next_step_and_a_passed_one_has_none(result):
    assert words.next_steps(result)[0].startswith("do not ship this model; try camkit mend")
    bare = replace(result.plan.data, items=tuple(replace(item, objects=()) for item in result.plan.data.items))
    without_regions = replace(result, plan=replace(result.plan, data=bare))
    assert words.next_steps(without_regions)[0].endswith("on the backgrounds of other classes")
    judged = {name: with_verdict(own, "PASS") for name, own in result.judged.items()}
    passed = replace(result, judged=judged)
    assert words.next_steps(passed) == []
    undecided = replace(result, judged={name: with_verdict(own, "INCONCLUSIVE") for name, own in judged.items()})
    assert not any("do not ship" in step or "mend" in step for step in words.next_steps(undecided))
    assert words.next_steps(with_run(undecided, inconclusive="pass")) == words.next_steps(undecided) != []


def test_the_page_says_how_often_its_verdict_was_wrong_as_the_docs_do(out):
    lines = (Path(__file__).parents[2] / "docs" / "results.md").read_text("utf-8").splitlines()
    docs = {row[0]: row[1:] for row in ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines) if row}

    def both(name):
        return sum(int(cell.split()[0]) for cell in docs[name] if cell)

    biased, between, clean, marked = words.LABS.values()
    assert biased["FAIL"] == both("biased: FAIL") == sum(biased.values())
    assert clean == {verdict: both(f"clean: {verdict}") for verdict in clean}
    order = ("FAIL", "WARN", "INCONCLUSIVE", "PASS")
    in_between = [list(map(int, cell.split(","))) for cell in docs[f"in between: {', '.join(order)}"]]
    assert between == dict(zip(order, map(sum, zip(*in_between, strict=True)), strict=True))
    of_mark = docs["clean of their mark alone: FAIL, WARN, PASS"][1].split(",")
    assert [marked[verdict] for verdict in ("FAIL", "WARN", "PASS")] == [*map(int, of_mark)]

    for verdict in order:
        networks, small = sum(of[verdict] for of in words.LABS.values()), clean[verdict]
        assert docs[verdict] == [str(networks), str(small), str(networks - small)]
        counts = f"{networks} got {verdict}: {small} with a loss of less than 3 points"
        assert f"Of 292 networks whose truth is known, {counts}" in words.reliability(verdict)
    page = (out / "report.html").read_text()
    assert words.reliability("FAIL") in page
    assert '<a href="#labs">' in page and '<table id="labs">' in page


def test_a_waived_class_decides_neither_the_headline_nor_the_next_step(result):
    gap = result.judged[OVERALL].effects["gap"]
    judged = {name: replace(own, effects={}) for name, own in result.judged.items()}
    judged[OVERALL] = with_verdict(judged[OVERALL], "FAIL", effects={"colour": replace(gap, name="colour")})
    judged["bird"] = with_verdict(judged["bird"], "FAIL", effects={"gap": gap}, waived="known")
    found = replace(result, judged=judged)
    assert gap.level == "fail"
    assert words.sentence(found).startswith("demo-biased relies on the colour of the whole picture")
    assert "different colour of the whole picture" in words.next_steps(found)[0]


def test_a_warning_beside_an_untested_class_has_exit_code_3(result):
    judged = {name: with_verdict(own, own.verdict, untested=False) for name, own in result.judged.items()}
    judged[OVERALL] = with_verdict(judged[OVERALL], "WARN", untested=True)
    judged["bird"] = with_verdict(judged["bird"], "INCONCLUSIVE", untested=True)
    found = replace(result, judged=judged)

    assert (found.exit_code(), found.exit_code("pass")) == (3, 0)
    assert words.sentence(found).startswith("demo-biased may rely on the background")
    assert words.sentence(found).endswith("; bird could not be tested")


def test_a_result_shows_itself_on_one_line_and_in_a_notebook(result, out):
    line, html = repr(result), replace(result, report=out / "report.html")._repr_html_()

    assert line.startswith(f"<CheckResult {result.verdict} of demo-biased: {result.reasons[0][:20]}")
    assert "\n" not in line
    assert len(line) < 1000
    shown = ET.fromstring(f"<div>{html}</div>")
    assert shown.findtext("h4") == f"{result.verdict}: demo-biased"
    assert [item.text for item in shown.iter("li")] == list(result.reasons)
    assert shown.findtext("p") == f"report: {out / 'report.html'}"


@pytest.fixture(scope="module")
def page(browser, out):
    """Open the page once, and record its console messages, errors and requests."""
    opened = browser.new_page()
    opened.events = []
    opened.on("console", lambda message: opened.events.append(message.text))
    opened.on("pageerror", lambda error: opened.events.append(str(error)))
    opened.on("request", lambda request: opened.events.append(request.url) if request.url[:5] != "data:" else None)
    opened.goto((out / "report.html").as_uri())
    opened.evaluate(UNFOLD)
    yield opened
    opened.close()


@pytest.mark.extended
def test_the_page_logs_nothing_requests_nothing_and_loads_every_picture(page, out):
    assert page.events == [(out / "report.html").as_uri()]
    assert page.title().startswith("FAIL: demo-biased")
    sizes = page.eval_on_selector_all("img", "images => images.map(image => [image.naturalWidth, image.alt])")
    assert len(sizes) > 12 + 4 * 4
    assert all(width > 0 and alt for width, alt in sizes)


@pytest.mark.extended
@pytest.mark.parametrize("width", [400, 1280])
def test_the_first_screen_has_the_verdict_and_three_triptychs_and_folds_the_rest(browser, out, width):
    opened = browser.new_page(viewport={"width": width, "height": 1200})
    opened.goto((out / "report.html").as_uri())
    sections = opened.query_selector_all("#triptychs section")
    captions = [[caption.inner_text() for caption in section.query_selector_all("b")] for section in sections]
    bottom = opened.evaluate("document.querySelector('#triptychs').getBoundingClientRect().bottom")
    visible = [opened.is_visible(part) for part in ("h1", "#chart", "#table", ".rule", "dl.why")]
    marks = opened.locator(".chart .track").count()
    opened.close()

    assert [[text[0] for text in of_section] for of_section in captions] == [["r", "w", "s"]] * 3  # right, wrong, still
    assert bottom < 1200
    assert visible == [True, True, False, False, False]
    assert marks == 2 * 4 + 5  # two effects of each class; gap, sufficiency and three cues of all classes


def texts(page, selector):
    return page.eval_on_selector_all(selector, "all => all.map(element => element.innerText)")


@pytest.mark.extended
def test_the_page_explains_every_column_gives_the_reasons_by_class_and_outlines_the_classes_in_turn(page, result):
    assert page.inner_text("#table caption").startswith("Measures by class.")
    assert page.locator("#table th[scope=row]").count() == len(result.classes) + 1
    assert texts(page, "#columns dt") == texts(page, "#table th button")
    assert page.is_visible("#columns dd >> nth=-1")
    assert texts(page, "dl.why dt") == sorted(result.classes)  # every class fails
    assert "on bird backgrounds, the model calls 100% of the other objects" in page.inner_text("dl.why dd")
    outlined = [title.split(":")[0] for title in texts(page, "#data .grid figcaption")[:12]]
    assert outlined == sorted(result.classes) * 3


@pytest.mark.extended
def test_markup_in_a_name_is_shown_as_text_and_a_foreign_script_does_not_run(browser, evil, tmp_path):
    text = REPORTS["report.html"](evil).replace("</main>", "<script>document.title='taken'</script></main>")
    (tmp_path / "report.html").write_text(text)
    opened = browser.new_page()
    opened.goto((tmp_path / "report.html").as_uri())
    title, cells = opened.title(), opened.text_content("#table")
    opened.close()

    assert title.startswith("FAIL")
    assert EVIL in cells


@pytest.mark.extended
def test_strips_show_each_edit_with_a_probability(page):
    strips = page.query_selector_all("section.strip")

    assert len(strips) >= 8
    captions = [caption.inner_text() for caption in strips[0].query_selector_all("figcaption")]
    assert re.match(r"picture and region\n\w+; \w+ \d+%", captions[0])
    assert [captions[1].split()[0], *(text.split()[0] for text in captions[2:])] == ["heat", "on", "on", "object"]
    assert all(re.search(r"\d+%", text) for text in captions[2:])


@pytest.mark.extended
def test_the_table_sorts_by_mouse_and_keyboard(page):
    def column(number):
        return texts(page, f"#table tbody tr td:nth-child({number})")

    page.click("#table th:nth-child(1) button")
    ascending = column(1)
    page.click("#table th:nth-child(1) button")
    descending = column(1)
    page.focus("#table th:nth-child(8) button")
    page.keyboard.press("Enter")
    by_skill = [float(text.split()[0]) for text in column(8)]

    assert ascending == sorted(ascending)
    assert descending == ascending[::-1]
    assert by_skill == sorted(by_skill)
    assert page.get_attribute("#table th:nth-child(8)", "aria-sort") == "ascending"
    assert page.get_attribute("#table th:nth-child(1)", "aria-sort") == "none"


@pytest.mark.extended
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast_in_both_schemes(browser, out, scheme):
    opened = browser.new_page(color_scheme=scheme)
    opened.goto((out / "report.html").as_uri())
    pairs = opened.evaluate(
        """() => [...document.querySelectorAll('h1, h1 span, li, td, .soft, figcaption, dt')].map(element => {
          let ground = element;
          while (getComputedStyle(ground).backgroundColor === 'rgba(0, 0, 0, 0)') ground = ground.parentElement;
          return [getComputedStyle(element).color, getComputedStyle(ground).backgroundColor];
        })"""
    )
    opened.close()

    assert pairs
    assert min(contrast(*pair) for pair in {tuple(pair) for pair in pairs}) >= 4.5  # WCAG 2.2, 1.4.3


def contrast(first, second):
    lights = sorted(luminance(re.findall(r"\d+", colour)[:3]) for colour in (first, second))
    return (lights[1] + 0.05) / (lights[0] + 0.05)


def luminance(channels):
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (int(one) / 255 for one in channels)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.extended
def test_the_page_itself_never_scrolls_sideways(page):
    for width in (360, 1200):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.fixture(scope="module")
def evil(result):
    """Return the same result with a class whose name is markup."""
    return with_names(result, {"bird": EVIL}, failures={f"{EVIL}.png": EVIL})


UNSAFE = "::error::a\x1b[2J\x9b0m\u202egnp\u2028\n::error::b\r##[error]c"


def test_no_report_holds_a_control_character_of_a_name(result):
    plan = replace(result.plan, data=replace(result.plan.data, facts=(UNSAFE,), left_out={UNSAFE: (UNSAFE,)}))
    unsafe = with_names(result, {"bird": UNSAFE}, plan=plan, warnings=(UNSAFE,), failures={UNSAFE: UNSAFE})
    reasons = (unsafe.judged[UNSAFE].reasons[0]._replace(text=f"{UNSAFE} fails"),)
    unsafe.judged.update({name: replace(own, reasons=reasons) for name, own in unsafe.judged.items()})
    terminal = io.StringIO()
    with contextlib.redirect_stdout(terminal):
        for text in (words.data_summary(plan), words.table(unsafe), words.verdict(unsafe)):
            printer().print(text)
    rendered = {name: render(unsafe) for name, render in REPORTS.items()}
    reports = {name: text for name, text in rendered.items() if isinstance(text, str)}
    reports |= {"terminal": terminal.getvalue(), "annotations": "\n".join(workflow_commands(unsafe))}
    for name, text in reports.items():
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u202e]", text), name
        assert not re.search(r"^\s*::error::b", text, re.MULTILINE), name
        assert "error::a" in text.replace("%3A", ":"), name
    started = [line for line in reports["terminal"].splitlines() if line.strip().startswith("::")]
    assert (started, "##[" in reports["terminal"]) == ([], False)
    assert len(reports["annotations"].splitlines()) == len(unsafe.judged)


def test_markdown_and_annotations_stay_on_their_lines(evil):
    text = REPORTS["summary.md"](evil)
    commands = workflow_commands(evil)

    assert EVIL not in text
    assert EVIL in [case.get("name") for case in ET.fromstring(REPORTS["junit.xml"](evil)).iter("testcase")]
    assert all(line.count("|") - line.count(r"\|") == 11 for line in text.splitlines() if line.startswith("|"))
    assert all(re.match(r"::(error|warning) title=[^:,\n]*::[^\n]*$", line) for line in commands)


@pytest.mark.parametrize(("inconclusive", "skipped"), [("pass", 5), ("fail", 1)])
def test_junit_has_a_case_per_class_with_its_time_and_skips_an_undecided_model(result, inconclusive, skipped):
    judged = {name: with_verdict(judgement, "INCONCLUSIVE") for name, judgement in result.judged.items()}
    found = with_run(replace(result, judged=judged), inconclusive=inconclusive)
    suite = ET.fromstring(REPORTS["junit.xml"](found)).find("testsuite")
    cases = suite.findall("testcase")

    assert found.exit_code() == (0 if inconclusive == "pass" else 3)
    assert [case.get("name") for case in cases] == ["bird", "car", "plane", "ship", "all classes together"]
    assert [case.find("skipped") is not None for case in cases] == [skipped == 5] * 4 + [True]
    assert [case.find("failure") is not None for case in cases] == [skipped == 1] * 4 + [False]
    assert (suite.get("tests"), suite.get("skipped"), suite.get("failures")) == ("5", str(skipped), str(5 - skipped))
    times = [float(case.get("time")) for case in cases]
    assert (
        sum(times) == pytest.approx(result.run.seconds, abs=0.01) == pytest.approx(float(suite.get("time")), abs=0.01)
    )
    assert min(times[:-1]) > 0
    assert datetime.fromisoformat(suite.get("timestamp")).date() == result.run.started.date()


def test_junit_escapes_characters_that_xml_forbids_and_skips_waived_classes(result):
    names = {"bird": "bi\x07rd\x1b[0m", "car": "c\udce9r"}
    changed = with_names(result, names, failures={"a\x00.png": "what \x0b?"})
    for name, waived in (("plane", "until the new pictures are there"), ("ship", "")):
        changed.judged[name] = with_verdict(changed.judged[name], "INCONCLUSIVE", waived=waived)

    for inconclusive, kinds in (("pass", ["skipped"]), ("fail", ["failure"])):
        cases = ET.fromstring(REPORTS["junit.xml"](with_run(changed, inconclusive=inconclusive))).findall(".//testcase")
        by_name = {case.get("name"): case for case in cases}
        assert list(by_name) == [r"bi\x07rd\x1b[0m", r"c\udce9r", "plane", "ship", "all classes together", r"a\x00.png"]
        assert by_name["plane"].find("skipped").get("message").startswith("waived: until the new pictures")
        assert [element.tag for element in by_name["ship"] if element.tag != "system-out"] == kinds
        assert by_name[r"bi\x07rd\x1b[0m"].find("failure") is not None


def test_the_page_prints_the_decision_table(out):
    page = (out / "report.html").read_text()

    for rule in (*(rule for rules in LEVELS.values() for rule in rules), *VERDICTS):
        assert f"<td>{html.escape(rule.when, quote=False)}</td>".replace("'", "&#39;") in page


def test_the_page_says_how_the_check_can_be_repeated(result, tmp_path):
    file = tmp_path / "mine.pth"
    file.write_bytes(b"weights")
    plan = replace(result.plan, model=replace(result.plan.model, weights=str(file)))
    page = REPORTS["report.html"](replace(result, plan=plan))

    for what in ("date", "command", "hash of the weights in the model", "hash of the pictures and regions", "versions"):
        assert f"<dt>{what}</dt>" in page
    assert re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC, \d+ s", page)
    assert "camkit.check(...), called from Python" in page
    assert f"camkit {camkit.__version__}, torch {torch.__version__.partition('+')[0]}" in page
    assert f"Python {platform.python_version()}" in page
    assert f"<dd>mine.pth (SHA-256 {hashlib.sha256(b'weights').hexdigest()})</dd>" in page
    assert str(tmp_path) not in page


@pytest.mark.parametrize(
    ("gap", "skill", "said"),
    [
        (Estimate(0.1, 0.05, 0.15, 40), None, "gap +0.10 (95% interval 0.05 to 0.15)"),
        (Estimate(0.0, 0.0, 0.0, 40), Estimate(1e-7, -1e-7, 2e-7, 40),
         "gap unchanged (by less than 0.005), skill unchanged (by less than 0.005)"),
    ],
)  # fmt: skip
def test_the_change_since_the_baseline_is_a_bullet_without_intervals_of_0_to_0(result, gap, skill, said):
    summary = REPORTS["summary.md"](replace(result, change=Change(40, gap, skill)))

    (line,) = [line for line in summary.splitlines() if "since the baseline" in line]
    assert line == f"- change since the baseline, on 40 pictures: {said}"


def test_the_json_is_strict_and_says_what_is_excluded_and_how_many_more_pictures_it_takes(result, out):
    text = (out / "report.json").read_text()
    report = json.loads(text, parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))
    assert (report["schema"], report["verdict"], report["hashes"].keys()) == (
        1,
        "FAIL",
        {"weights", "settings", "data"},
    )
    assert [len(image["sha256"]) for image in report["images"]] == [64] * 40
    for name, stored in [*report["classes"].items(), ("", report["overall"])]:
        effects = result.judged[name].effects
        assert stored["excluded_above"] == {
            effect: pytest.approx(known.excluded_above, abs=1e-6) for effect, known in effects.items()
        }
        more = {effect: known.more_pictures for effect, known in effects.items()}
        assert stored["more_pictures"] == {effect: numbers and [*numbers] for effect, numbers in more.items()}
    summary = (out / "summary.md").read_text()
    assert "| excluded above | more pictures |" in summary
    assert "95% for each effect" in summary


@pytest.fixture(scope="session")
def passed(tmp_path_factory):
    """Return a check of the fair network; in four of ten pictures of cars stands a second car without an outline."""
    data = camkit.scenes.write_scenes(tmp_path_factory.mktemp("fair"), 10)
    for file in sorted((data / "car").iterdir())[:4]:
        picture = cv2.imread(file)
        mask = cv2.imread(data.parent / "masks" / "car" / f"{file.stem}.png", cv2.IMREAD_GRAYSCALE) > 0
        columns = np.flatnonzero(mask.any(0))
        room = columns[0] if columns[0] > mask.shape[1] - columns[-1] else columns[-1] - mask.shape[1]
        beside = np.roll(mask, -room, axis=1) & ~mask
        picture[beside] = np.roll(picture, -room, axis=1)[beside]
        cv2.imwrite(file, picture)
    limits = {"least_pictures": 10, "gap": 0.2, "attraction": 0.4, "sufficiency": 0.2}
    return camkit.check("demo-fair", data, config={"check": {"pastes": 2}, "limits": limits})


@pytest.mark.extended
def test_a_class_whose_effects_are_not_excluded_is_not_decided_in_any_report(passed):
    judged = {name: own for name, own in passed.judged.items() if name != OVERALL}
    open_classes = {
        name for name, own in judged.items() if any(not effect.high < effect.limit for effect in own.effects.values())
    }
    assert passed.verdict == "PASS" and open_classes
    wide = io.StringIO()
    Console(file=wide, width=200).print(words.table(passed))
    summary, page = REPORTS["summary.md"](passed), REPORTS["report.html"](passed)
    report = json.loads(REPORTS["report.json"](passed))
    cases = {case.get("name"): case for case in ET.fromstring(REPORTS["junit.xml"](passed)).iter("testcase")}
    for name in judged:
        shown = "not decided" if name in open_classes else "PASS"
        assert report["classes"][name]["verdict"] == shown
        assert re.search(rf"(?m)^{name} +{shown} ", wide.getvalue())
        assert f"| {name} | {shown} |" in summary
        assert f'<div class="name">{name}: {shown}</div>' in page
        assert (cases[name].find("skipped") is not None) == (name in open_classes)
        if name in open_classes:
            assert "cannot be excluded" in cases[name].find("skipped").get("message")
    assert cases["all classes together"].find("skipped") is None


@pytest.mark.extended
def test_pictures_that_still_show_the_class_are_counted_beside_a_typical_one(passed):
    cars = [row for row in passed.images if row.label == "car" and row.removed]
    count = f"car is named in {sum(any(row.removed.values()) for row in cars)} of {len(cars)} such pictures"
    note = next(warning for warning in passed.warnings if "with the object removed, the model still names" in warning)
    named = re.search(r"car in (\d+) of (\d+) pictures \(and in \d+% of the others\)", note)
    assert count == f"car is named in {named[1]} of {named[2]} such pictures"
    assert 2 * int(named[1]) < int(named[2])
    assert note in words.verdict(passed).plain and note in REPORTS["report.html"](passed)

    panels = [panel for strip in Showcase(passed).triptychs for panel in strip.triptych]
    assert [panel.comment[1] for panel in panels] == ["PASS", "PASS", ""] * 3, "no red exception leads a PASS"
    drawn = Showcase(passed)
    strips = [drawn._strip(row) for row in cars]
    assert all(count in strip.triptych[-1].title for strip in strips)


@pytest.fixture(scope="session")
def undecided(tmp_path_factory):
    """Return a check of a network that never answers "ship"."""
    loaded = camkit.load_model("demo-fair")
    never = torch.tensor([-1e4 * (label == "ship") for label in loaded.labels])

    class NeverShip(torch.nn.Sequential):
        def forward(self, pictures):
            return super().forward(pictures) + never

    data = camkit.scenes.write_scenes(tmp_path_factory.mktemp("never"), 10)
    limits = {"least_pictures": 10, "gap": 0.2, "attraction": 0.2, "sufficiency": 0.2}
    module = NeverShip(loaded.module).eval()
    return camkit.check(replace(loaded, module=module), data, config={"check": {"pastes": 1}, "limits": limits})


@pytest.mark.extended
def test_an_undecided_check_says_why_with_the_numbers(undecided):
    most = max(k for k in range(11) if binomtest(k, 10).proportion_ci(method="wilson").low <= 0.25)
    why = words.why_undecided(undecided)
    needed = f"with 10 pictures and chance at 25%, a test needs more than {most / 10:.0%}"
    untested = f"ship (0% right on own backgrounds; {needed})"
    assert undecided.verdict == "INCONCLUSIVE"
    assert why.startswith(f"1 of 4 classes could not be tested: {untested}; over the other classes, effects above 0.")
    assert why.endswith(" are excluded; do not ship on this evidence")
    rest = [row for row in undecided.images if row.label != "ship" and row.same]
    gap = np.mean([row.same[fill] - row.other[fill] for row in rest for fill in row.same])
    assert gap <= float(re.search(r"effects above ([\d.]+) are", why)[1]) < 0.3
    page, summary = REPORTS["report.html"](undecided), REPORTS["summary.md"](undecided)
    assert f'<p id="undecided">{why}.</p>' in page
    assert why in summary and why in words.verdict(undecided).plain
    assert json.loads(REPORTS["report.json"](undecided))["why_undecided"] == why


@pytest.mark.extended
def test_only_a_pass_says_that_a_pass_proves_nothing(passed, undecided, result):
    for found in (passed, undecided, result):
        for render in (REPORTS["report.html"], REPORTS["summary.md"], REPORTS["report.json"]):
            assert ("does not prove the absence of shortcuts" in render(found)) == (found is passed)
            assert "cannot see a shortcut that lies on the object itself" in render(found)
