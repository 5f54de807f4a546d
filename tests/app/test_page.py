"""The app in a real browser: the installed command, its page, and what it serves."""

from __future__ import annotations

import contextlib
import html
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image
from tasks import Blobs

import camkit

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytest.importorskip("gradio", reason="the extra camkit[app] is not installed")
pytestmark = pytest.mark.extended

SCENES = camkit.scenes.scene_paths()
HERE = Path(__file__).parents[2]
WAIT = 40_000
"""Milliseconds that a busy machine may take."""


@contextlib.contextmanager
def app(folder: Path, *arguments: str) -> Iterator[str]:
    """Start the app in a folder, and yield its address; at the end, Ctrl-C ends it."""
    (folder / "tmp").mkdir(exist_ok=True)
    helpers = os.pathsep.join([str(HERE), str(HERE / "tests/helpers"), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-m", "camkit", "app", *arguments, "--no-browser"], cwd=folder, stdout=subprocess.PIPE,
        text=True, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": helpers, "TMPDIR": str(folder / "tmp")},
    )  # fmt: skip
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        found = re.match(r"camkit is at (http://127\.0\.0\.1:\d+/)", line)
        assert found, line
        yield found[1]
    finally:
        process.send_signal(signal.SIGINT)
        code = process.wait(60)
        process.stdout.close()
    assert code == 0


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("app")
    (folder / "secret.txt").write_text("secret")
    shutil.copy(SCENES["plane-sky"], folder / "secret.jpg")
    return folder


@pytest.fixture(scope="module")
def address(workplace: Path) -> Iterator[str]:
    with app(workplace) as url:
        yield url


def opened(browser: Browser, address: str, answer: str = "plane-confidence-set") -> Page:
    page = browser.new_page(viewport={"width": 1400, "height": 1100})
    page.set_default_timeout(WAIT)
    page.goto(address)
    page.wait_for_selector("#heat img")
    page.wait_for_selector(f"[data-testid='{answer}']")
    page.wait_for_selector("#pointed textarea", state="attached")  # the last part
    return page


@pytest.fixture
def page(browser: Browser, address: str) -> Iterator[Page]:
    page = opened(browser, address)
    yield page
    page.close()


def changes(page: Page, part: str) -> str:
    """Return a JavaScript condition: the picture of a part is another than now."""
    return f"document.querySelector('{part} img').src !== {json.dumps(page.get_attribute(f'{part} img', 'src'))}"


def place_in(page: Page, across: float, down: float) -> tuple[float, float]:
    """Return a place in the window: shares of the picture's width and height, when it is there."""
    page.wait_for_function("document.querySelector('#shown img').complete")
    box = page.locator("#shown img").bounding_box()
    assert box is not None
    return box["x"] + box["width"] * across, box["y"] + box["height"] * down


def says(page: Page, start: str) -> None:
    page.wait_for_function(f"document.querySelector('#sentence').innerText.startsWith({json.dumps(start)})")


def test_the_tour_starts_without_a_model_and_asks_nobody_else(page: Page, address: str) -> None:
    asked: list[str] = []
    errors: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.reload()
    page.wait_for_selector("#heat img")
    says(page, "plane")
    assert "Red: most evidence for plane; blue: little; no colour: none." in page.inner_text("#sentence")
    assert [url for url in asked if not url.startswith((address, "data:", "blob:"))] == []
    assert errors == []


def test_a_click_on_an_answer_shows_its_heat(page: Page) -> None:
    other = changes(page, "#heat")
    page.click("[data-testid=bird-confidence-set]")
    says(page, "bird")
    page.wait_for_function(other)


def boxes_of(page: Page, *parts: str) -> list[dict[str, float]]:
    """Return the places of parts in the window."""
    found = [page.locator(part).bounding_box() for part in parts]
    assert all(found), parts
    return [dict(box) for box in found if box]


def test_the_first_screen_needs_no_event(browser: Browser, address: str) -> None:
    """Question, answers, picture and heat are there although the page cannot ask for anything."""
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.route("**/queue/join*", lambda route: route.abort())
    page.goto(address)
    page.wait_for_function("document.querySelector('#heat img')?.naturalWidth > 0")
    assert page.inner_text("#question h1") == "Why plane?"
    assert page.inner_text("#answers .confidence-set >> nth=0").split() == ["plane", "100%"]
    sizes = page.evaluate("[...document.querySelectorAll('body *')].map(e => parseFloat(getComputedStyle(e).fontSize))")
    others = [size for size in sizes if size < max(sizes)]
    assert page.evaluate("parseFloat(getComputedStyle(document.querySelector('h1')).fontSize)") == max(sizes)
    assert max(sizes) > 1.5 * max(others)
    assert page.locator("#mark svg").bounding_box()
    page.close()


def test_nothing_is_empty_at_1280_and_a_phone_has_one_column(browser: Browser, address: str) -> None:
    page = opened(browser, address)
    page.set_viewport_size({"width": 1280, "height": 800})
    shown, heat, side = boxes_of(page, "#shown img", "#heat img", "#side")
    assert (shown["width"], shown["height"], shown["y"]) == (heat["width"], heat["height"], heat["y"])
    assert shown["x"] < 40
    assert heat["x"] - shown["x"] - shown["width"] < 40
    assert side["x"] - heat["x"] - heat["width"] < 40
    assert side["x"] + side["width"] > 1240
    assert 600 < shown["y"] + shown["height"] < 800
    assert 600 < max(box["y"] + box["height"] for box in boxes_of(page, "#save", "#compare")) < 800
    page.set_viewport_size({"width": 400, "height": 850})
    draw(page, (0.1, 0.1), (0.5, 0.4))
    page.wait_for_selector("#before img")
    column = boxes_of(
        page, "#question h1", "#shown", "#heat", "#whole", "#before", "#answers", "#answers-before", "#fill"
    )
    assert all(above["y"] + above["height"] <= below["y"] for above, below in itertools.pairwise(column))
    for tab in ("May it ship?", "Why?"):
        page.get_by_role("tab", name=tab).click()
        edges = "[...document.querySelectorAll('.contain *')].map(e => e.getBoundingClientRect().right)"
        assert max(page.evaluate(edges)) <= page.evaluate("document.documentElement.scrollWidth") == 400
    page.close()


def test_covering_says_what_it_did(page: Page) -> None:
    other = changes(page, "#heat")
    page.locator("#model input").click()
    page.get_by_role("option", name="demo-fair").click()
    page.wait_for_function(other)
    draw(page, (0.0, 0.0), (0.5, 1.0))
    page.wait_for_selector("#covered")
    other = changes(page, "#shown")
    page.get_by_label("mean").click()
    page.wait_for_function(other)
    cover = saved(page)["cover"]
    with Image.open(SCENES["plane-sky"]) as opened_picture:
        picture = np.array(opened_picture.convert("RGB"))
    picture[cover[1] : cover[3], cover[0] : cover[2]] = picture.reshape(-1, 3).mean(0).round()
    after = {
        row.label: row.probability
        for row in camkit.explain("demo-fair", Image.fromarray(picture), target=camkit.targets.top(4))
    }
    said = re.fullmatch(r"Covered: plane >99\.9% → ([\d.]+)%\. Now bird ([\d.]+)%\.", page.inner_text("#covered"))
    assert said
    assert [float(said[1]), float(said[2])] == pytest.approx([100 * after["plane"], 100 * after["bird"]], abs=1)
    page.click("#uncover")
    page.wait_for_selector("#covered", state="detached")


def test_the_demo_networks_are_checked(browser: Browser, page: Page, workplace: Path) -> None:
    page.get_by_role("tab", name="May it ship?").click()
    page.click("#run-check")
    page.wait_for_selector("#verdicts .PASS", timeout=5 * WAIT)
    for place, (name, verdict, red) in enumerate([("demo-biased", "FAIL", True), ("demo-fair", "PASS", False)]):
        (file,) = workplace.glob(f"tmp/camkit-app-*/{name}/report.json")
        gap = json.loads(file.read_text())["overall"]["mean"]["gap"]["effect"]
        section = page.locator("#verdicts section").nth(place)
        assert section.locator("h2").inner_text() == f"{verdict} {name}"
        figures = f"{gap['value']:.2f} ({gap['low']:.2f} to {gap['high']:.2f}), limit 0.10"
        assert section.locator("li").first.inner_text().splitlines() == ["accuracy lost on other backgrounds", figures]
        colour = section.locator("strong").evaluate("tag => getComputedStyle(tag).color")
        levels = [int(level) for level in re.findall(r"\d+", colour)]
        assert (levels[0] > levels[1]) == red, colour
        with page.expect_popup() as report:
            section.get_by_role("link").click()
        assert report.value.inner_text("h1").startswith(f"{verdict}: ")
        report.value.close()
    page.reload()
    page.get_by_role("tab", name="May it ship?").click()
    page.wait_for_selector("#verdicts .PASS")
    assert not page.is_visible("#run-check")
    with app(workplace, "--check", str(file.parent)) as url:
        other = opened(browser, url)
        other.get_by_role("tab", name="May it ship?").click()
        assert other.locator("#verdicts h2").all_inner_texts() == ["PASS demo-fair"]
        other.close()


def test_names_are_no_html() -> None:
    from camkit.app import page  # noqa: PLC0415 - imports Gradio

    assert "<h1>Why &lt;b&gt;?</h1>" in page._HTML.question("Why <b>?", (1, 1), None, detects=False)


def draw(page: Page, start: tuple[float, float], end: tuple[float, float]) -> None:
    """Draw a rectangle over the picture with the mouse, between shares of its width and height."""
    page.mouse.move(*place_in(page, *start))
    page.mouse.down()
    page.mouse.move(*place_in(page, *end), steps=3)
    page.mouse.up()


def saved(page: Page) -> dict[str, Any]:
    page.click("#save")
    with page.expect_download() as download:
        page.locator("#files a[download$='.json']").click()
    assert download.value.suggested_filename == "heat.json"
    found: dict[str, Any] = json.loads(Path(download.value.path()).read_text())
    return found


def test_a_drawn_rectangle_is_covered_and_one_over_the_edge_covers_all(page: Page) -> None:
    side = 384  # of the scenes
    draw(page, (0.25, 0.5), (0.75, 0.875))
    page.wait_for_selector("#before img")
    assert saved(page)["cover"] == pytest.approx([side * 0.25, side * 0.5, side * 0.75, side * 0.875], abs=2)
    page.click("#uncover")
    page.wait_for_selector("#before img", state="hidden")
    says(page, "plane")
    draw(page, (0.0, 0.0), (1.5, 1.2))
    page.wait_for_selector("#before img")
    assert saved(page)["cover"] == pytest.approx([0, 0, side, side], abs=1)


def test_a_contrast_and_a_method_are_chosen(page: Page) -> None:
    page.click("#more > button")
    page.locator("#rather input").click()
    page.get_by_role("option", name="bird", exact=True).click()
    says(page, "plane rather than bird")
    page.locator("#method input").fill("layercam")
    page.get_by_role("option", name="layercam", exact=True).click()
    page.wait_for_function("document.querySelector('#sentence').innerText.includes('by layercam')")
    page.locator("#picture input").click()
    page.get_by_role("option", name="plane-wood.jpg").click()
    says(page, "bird")
    assert "by layercam" in page.inner_text("#sentence"), "the menu still says so"


def test_methods_are_compared_and_what_is_seen_is_saved(page: Page) -> None:
    page.click("#compare")
    page.wait_for_selector("#sheet img")
    about = saved(page)
    assert (about["model"], about["picture"]) == ("demo-biased", "plane-sky.jpg")
    assert about["explanation"]["label"] == "plane"
    with page.expect_download() as download:
        page.locator("#files a[download$='.png']").click()
    assert download.value.suggested_filename == "heat.png"
    with Image.open(download.value.path()) as figure:
        assert figure.size[0] > 300


def test_a_damaged_upload_says_so_and_a_huge_one_works(page: Page, tmp_path: Path) -> None:
    (tmp_path / "broken.jpg").write_bytes(SCENES["car-sea"].read_bytes()[:300])
    page.set_input_files("input[type=file]", tmp_path / "broken.jpg")
    page.wait_for_selector(".toast-body")
    assert page.inner_text(".toast-body").splitlines()[-1].startswith("broken.jpg cannot be read")
    says(page, "plane")
    with Image.open(SCENES["car-sea"]) as scene:
        scene.resize((6000, 6000)).save(tmp_path / "huge.jpg")
    page.set_input_files("input[type=file]", tmp_path / "huge.jpg")
    says(page, str(camkit.explain("demo-biased", SCENES["car-sea"]).label))


@pytest.mark.parametrize("file", ["secret.txt", "secret.jpg", "../secret.txt"])
def test_no_other_file_is_served(workplace: Path, address: str, file: str) -> None:
    for path in (workplace / file, Path(file), Path("/etc/hostname"), SCENES["car-sea"]):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{address}gradio_api/file={path}", timeout=60)
        refused.value.close()
        assert refused.value.code in (403, 404), path


@pytest.mark.parametrize(("header", "value", "code"), [("Host", "evil.example", 400), ("Origin", "http://a.b", 403)])
def test_another_host_and_the_pages_of_others_are_refused(address: str, header: str, value: str, code: int) -> None:
    request = urllib.request.Request(address, headers={header: value})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=60)
    refused.value.close()
    assert refused.value.code == code


def test_a_request_cannot_name_a_file_as_an_upload(workplace: Path, address: str, page: Page, tmp_path: Path) -> None:
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.post_data or "") if "queue/join" in request.url else None)
    shutil.copy(SCENES["car-sea"], tmp_path / "mine.jpg")
    page.set_input_files("input[type=file]", tmp_path / "mine.jpg")
    says(page, "ship")
    forged = json.loads(sent[-1])
    assert Path(forged["data"][2]["path"]).name == "mine.jpg"
    forged["data"][2] = {**forged["data"][2], "path": str(workplace / "secret.jpg")}
    forged["session_hash"] = "another"
    request = urllib.request.Request(
        f"{address}gradio_api/queue/join", json.dumps(forged).encode(), {"Content-Type": "application/json"}
    )
    urllib.request.urlopen(request, timeout=60).close()
    with urllib.request.urlopen(f"{address}gradio_api/queue/data?session_hash=another", timeout=60) as events:
        messages = [json.loads(line[5:]) for line in events if line.startswith(b"data:")]
    assert [message["success"] for message in messages if message["msg"] == "process_completed"] == [False]
    assert not any("file=" in json.dumps(message) for message in messages)


def test_a_model_that_fails_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    from camkit.app import page  # noqa: PLC0415 - imports Gradio

    said: list[str] = []
    monkeypatch.setattr(page.gr, "Warning", said.append)

    def fail() -> None:
        raise ZeroDivisionError("<b>no</b>")

    assert len(page._said(fail, 3)) == 3
    place = f"{html.escape(__file__)}, line {fail.__code__.co_firstlineno + 1}"
    assert said == [f"the model failed in {place}: ZeroDivisionError: &lt;b&gt;no&lt;/b&gt;"]


def write_detector(folder: Path) -> None:
    (folder / "mine.py").write_text("from tasks import Blobs\n\ndef build():\n    return Blobs(), Blobs.prepare\n")
    (folder / "labels.txt").write_text("\n".join(Blobs.LABELS))
    Blobs.picture().save(folder / "two.png")


def test_boxes_of_a_detector_are_clicked_and_covered(browser: Browser, tmp_path: Path) -> None:
    """A red and a blue square, in a detector that knows the two colours."""
    write_detector(tmp_path)
    with app(tmp_path, "two.png", "--model", "mine.py:build", "--labels", "labels.txt") as url:
        page = opened(browser, url, "1: red-confidence-set")
        assert not page.is_visible("#compare")
        page.mouse.click(*place_in(page, 0.05, 0.1))
        page.wait_for_selector(".toast-body")
        assert "there is no box there" in page.inner_text(".toast-body")
        other = changes(page, "#heat")
        page.mouse.click(*place_in(page, 0.8, 0.5))
        says(page, "blue")
        page.wait_for_function(other)
        draw(page, (0.62, 0.2), (0.95, 0.8))
        page.wait_for_selector("#before img")
        page.get_by_label("mean").click()  # a blurred square is still blue
        says(page, "The box blue is no longer found")
        assert "blue" in page.inner_text("#answers-before")
        assert "blue" not in page.inner_text("#answers")
        page.click("#uncover")
        says(page, "blue")
    page.close()  # only now: an open page does not keep Ctrl-C from ending the app


def test_a_first_picture_that_cannot_be_explained_leaves_the_others(browser: Browser, tmp_path: Path) -> None:
    """Nothing shows that the model is a detector, because it finds no box."""
    write_detector(tmp_path)
    Image.new("RGB", (256, 128), "gray").save(tmp_path / "grey.png")
    with app(tmp_path, "grey.png", "two.png", "--model", "mine.py:build", "--labels", "labels.txt") as url:
        page = browser.new_page()
        page.goto(url)
        page.wait_for_selector(".toast-body", timeout=WAIT)
        assert "the detector found no box" in page.inner_text(".toast-body")
        page.locator("#picture input").click()
        page.get_by_role("option", name="two.png").click()
        says(page, "red")
        page.close()
