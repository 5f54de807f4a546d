"""The examples that show an exported file without PyTorch: a web page in Chromium, and a script."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional
from torchvision.transforms import v2
from torchvision.transforms._presets import ImageClassification

import camkit

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.extended
onnx = pytest.importorskip("onnx")

Opened: TypeAlias = Callable[..., "Page"]
EXAMPLES = Path(__file__).parents[2] / "examples"
SCENES = camkit.scenes.scene_paths()
BICUBIC = ImageClassification(
    crop_size=128, resize_size=146, mean=(0.45, 0.47, 0.47), std=(0.25,) * 3, interpolation=v2.InterpolationMode.BICUBIC
)
WIDE = v2.Compose([v2.ToImage(), v2.Resize((96, 160)), v2.ToDtype(torch.float32, scale=True)])
"""Resizes the whole picture, as camkit does for models whose input is not square."""

TOLERANCE = 2e-3
"""How far heat from 0 to 1 may differ if a photo is resized: the page resizes as Pillow does, the demo network's own
preprocessing as PyTorch does, with coarser weights. Some pixels differ by 1 of 255, and the heat by up to 0.0006."""


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if "ONNXRUNTIME_WEB" in os.environ:
        return Path(os.environ["ONNXRUNTIME_WEB"])
    npm, folder = shutil.which("npm"), tmp_path_factory.mktemp("npm")
    if npm is None:
        pytest.skip("needs npm, or the folder of onnxruntime-web in ONNXRUNTIME_WEB")
    call = [npm, "install", "--ignore-scripts", "--prefix", str(folder), "onnxruntime-web@1.30.0"]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"npm cannot fetch onnxruntime-web: {done.stderr[-300:]}")
    return folder / "node_modules/onnxruntime-web"


@pytest.fixture
def opened(browser: Browser, runtime: Path, tmp_path: Path) -> Iterator[Opened]:
    """Return a function that makes a file's page, opens it without a network, and gives it a picture."""
    context = browser.new_context(offline=True)
    page, requests, errors = context.new_page(), [], []
    page.on("request", lambda request: requests.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))

    def shown(file: Path, picture: Path, *extra: str) -> Page:
        call = [EXAMPLES / "web/make_page.py", file, runtime, tmp_path / "page.html", *extra]
        subprocess.run([sys.executable, *map(str, call)], check=True, stdout=subprocess.DEVNULL)
        page.goto((tmp_path / "page.html").as_uri())
        page.wait_for_selector("#file:enabled", state="attached")
        page.set_input_files("#file", picture)
        page.wait_for_selector("#panel")
        return page

    yield shown
    context.close()
    assert [url.partition(":")[0] for url in requests] == ["file"]
    assert errors == []


def tall_photo(folder: Path) -> Path:
    """Write a photo that lies on its side and says so: upright, it is 432 pixels wide and 701 high."""
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.open(SCENES["car-sea"]).resize((432, 701)).rotate(90, expand=True).save(folder / "photo.jpg", exif=exif)
    return folder / "photo.jpg"


def heat_in(page: Page) -> np.ndarray:
    return np.array(page.evaluate("window.result.heat"))


def test_the_page_shows_what_camkit_shows_of_a_photo(opened: Opened, tmp_path: Path) -> None:
    camkit.export("demo-biased", tmp_path / "heat.onnx", target="input", normalise=True)
    photo, explainer = tall_photo(tmp_path), camkit.Explainer("demo-biased")
    own = explainer(photo)
    page = opened(tmp_path / "heat.onnx", photo, str(SCENES["plane-sky"]))
    assert page.locator("#answer span").text_content() == own.label == "ship"
    assert page.locator("#answer small").text_content() == f"{own.probability:.1%}"
    assert page.locator("#top li").count() == 3
    assert page.evaluate("[photo, heat].map(each => each.height / each.width)") == [701 / 432] * 2
    assert np.abs(heat_in(page) - own.heatmap.ravel()).max() < TOLERANCE
    assert "gradcam at features" in page.inner_text("#about")

    page.select_option("#class", label="car")
    page.get_by_text("the evidence for “car”").wait_for()
    own = explainer(photo, target="car")
    assert np.abs(heat_in(page) - own.heatmap.ravel()).max() < TOLERANCE
    page.click("#photos button")  # the class is the best one again
    page.get_by_text("the evidence for “plane”").wait_for()
    assert np.abs(heat_in(page) - explainer(SCENES["plane-sky"]).heatmap.ravel()).max() < TOLERANCE
    page.select_option("#class", label="ship")
    page.get_by_text("no positive evidence for “ship”, so nothing is coloured").wait_for()
    assert not heat_in(page).any()
    page.set_input_files("#file", tmp_path / "heat.onnx")
    page.get_by_text("This browser cannot read heat.onnx").wait_for()


@dataclass
class Case:
    """A file, a picture, camkit's explanation and its heat, and how far another program's heat may be from that."""

    file: Path
    picture: Path
    own: camkit.Explanation
    heat: np.ndarray
    tolerance: float = 1e-4


@pytest.fixture(scope="module", params=["normalised", "evenly spread", "wide", "photo", "bicubic"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Return a case; the pictures have the input's size, except for the photos."""
    folder, kind = tmp_path_factory.mktemp("case"), request.param
    file, picture, size = folder / "heat.onnx", folder / "picture.png", (160, 96) if kind == "wide" else (128, 128)
    Image.open(SCENES["car-sea"]).resize(size).save(picture)
    if kind in ("photo", "bicubic"):
        picture = tall_photo(folder)
    options = {"wide": {"preprocess": WIDE}, "bicubic": {"preprocess": BICUBIC, "activation": "sigmoid"}}.get(kind, {})
    model = camkit.load_model("demo-biased", device="cpu").module if options else "demo-biased"
    camkit.export(model, file, normalise=kind == "normalised", img=picture, **options)
    own = camkit.explain(model, picture, **options)
    if kind != "evenly spread":
        return Case(file, picture, own, own.heatmap, TOLERANCE if kind == "photo" else 1e-4)
    changed = onnx.load(file)
    next(each for each in changed.metadata_props if each.key == "places").value = "[]"
    onnx.save(changed, file)
    cells = torch.from_numpy(own.raw)[None, None].relu()
    heat = functional.interpolate(cells, size[::-1], mode="bilinear")[0, 0].numpy()
    return Case(file, picture, own, heat / heat.max())


def test_the_page_computes_what_camkit_computes(opened: Opened, case: Case) -> None:
    page = opened(case.file, case.picture)
    assert page.evaluate("window.result.class") == case.own.target
    assert page.locator("#answer small").text_content() == f"{case.own.probability:.1%}"
    assert np.abs(heat_in(page) - case.heat.ravel()).max() < case.tolerance


def test_thirty_lines_draw_the_heat_without_camkit(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, drawn = EXAMPLES / "heat_without_camkit.py", tmp_path / "drawn.png"
    assert len(script.read_text().splitlines()) <= 30
    monkeypatch.setattr(sys, "argv", [script.name, str(case.file), str(case.picture), str(drawn)])
    for absent in ("camkit", "torch"):
        monkeypatch.setitem(sys.modules, absent, None)
    assert np.abs(runpy.run_path(str(script))["heat"] - case.heat).max() < case.tolerance
    assert capsys.readouterr().out == f"{case.own.label or case.own.target}: {case.own.probability:.1%}\n"
    if (
        case.picture.name == "picture.png" and case.heat is case.own.heatmap
    ):  # the script has nine of camkit's 256 colours
        assert np.abs(np.asarray(Image.open(drawn), float) - case.own.overlay()).mean() < 4
