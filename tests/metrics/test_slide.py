from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import TYPE_CHECKING

import cv2
import numpy as np
import pytest
import torch
from PIL import Image

import camkit
from camkit.cli import main
from camkit.errors import InputError

if TYPE_CHECKING:
    from playwright.sync_api import Browser

SCENE = camkit.scenes.scene_paths()["plane-wood"]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.extended
def test_a_slide_says_what_the_model_itself_says() -> None:
    made = camkit.slide("demo-biased", SCENE, "plane")
    model = camkit.load_model("demo-biased", device="cpu")
    with torch.no_grad():
        shares = model.module(model.preprocess(Image.open(SCENE).convert("RGB"))[None]).softmax(1)[0]
    assert made.before == pytest.approx(float(shares.max()), abs=1e-5)
    assert made.sentence.startswith(f"demo-biased says {model.labels[int(shares.argmax())]}")
    assert made.after < made.before
    contrast = made.explanations[2]
    assert [row.name for row in made.explanations[:2]] == ["bird", "plane"]
    assert contrast.score == pytest.approx(made.explanations[0].score - made.explanations[1].score, rel=1e-4)


def test_a_right_answer_has_no_contrast_and_small_pictures_are_enlarged(tmp_path: Path) -> None:
    small = np.random.default_rng(0).integers(0, 255, (24, 32, 3), dtype=np.uint8)
    made = camkit.slide("demo-fair", small)
    assert len(made.panels) <= 3
    read = cv2.imread(str(made.save(tmp_path / "slide.png")))
    assert read is not None and read.shape == (1080, 1920, 3)
    ink = (read != 255).any(2)
    assert ink[300:800].mean() > 0.3


def test_the_command_draws_one_slide(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = [str(SCENE), "--model", "demo-biased", "--true", "plane", "--style", "slide", "-o", str(tmp_path / "s.png")]
    assert main(["explain", *call]) == 0
    assert "but the true class is plane" in capsys.readouterr().out
    assert main(call) == 0  # it shows the same
    (tmp_path / "s.png").write_bytes(b"mine")
    assert main(call) == 2
    assert "exists already" in capsys.readouterr().err
    assert main([*call[:-1], str(tmp_path / "s.doc")]) == 2
    assert "camkit cannot write .doc; use .png" in " ".join(capsys.readouterr().err.split())
    assert main([*call[:3], "--true", "plane"]) == 2
    assert main([str(SCENE), str(SCENE.with_name("bird-wood.jpg")), *call[1:-1], str(tmp_path / "t.png")]) == 2


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        (["--layer", "features", "--json"], "--layer and --json"),
        (["--top-k", "2"], "--top-k"),
        (["--table", "x.csv", "--ray"], "--table and --ray"),
    ],
)
def test_a_slide_refuses_options_that_it_does_not_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], extra: list[str], named: str
) -> None:
    call = [str(SCENE), "--model", "demo-biased", "--style", "slide", "-o", str(tmp_path / "s.png")]
    assert main([*call, *extra]) == 2
    assert f"--style slide does not use {named};" in " ".join(capsys.readouterr().err.split())
    assert not any(tmp_path.iterdir())


def test_one_slide_shows_several_targets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "s.png"
    call = [str(SCENE), "--model", "demo-biased", "-t", "plane", "-t", "bird", "-o", str(file)]
    assert main(call) == 2
    assert "name a folder; or draw one slide with --style slide" in " ".join(capsys.readouterr().err.split())
    assert main([*call, "--style", "slide"]) == 0
    assert "demo-biased: what speaks for plane and bird." in capsys.readouterr().out
    assert cv2.imread(str(file)).shape == (1080, 1920, 3)
    assert main([*call, "--style", "slide", "--true", "plane", "--overwrite"]) == 2
    assert "with --true, or shows targets; not both" in " ".join(capsys.readouterr().err.split())
    made = camkit.slide("demo-biased", SCENE, target=["plane", "bird"])
    assert [title.split(" (")[0] for title, _, _ in made.panels] == ["The picture", "plane", "bird"]
    assert made.panels[2][2] == "Red: most evidence for bird; blue: little; no colour: none."
    many = [camkit.targets.contrast(first, second) for first in range(3) for second in range(3) if first != second]
    with pytest.raises(InputError, match="1 to 5 targets, not 6"):
        camkit.slide("demo-fair", SCENE, target=many)


@pytest.mark.parametrize(("size", "columns"), [((64, 64), 4), ((256, 64), 2)])
def test_pictures_stand_so_that_they_are_large(tmp_path: Path, size: tuple[int, int], columns: int) -> None:
    made = camkit.slide("demo-fair", Image.open(SCENE).resize(size), target=["plane", "bird", "car"])
    pictures = list(ET.parse(made.save(tmp_path / "places.svg")).getroot().iter(f"{SVG}image"))
    assert len({picture.get("x") for picture in pictures}) == columns
    assert all(float(picture.get("width", 0)) >= 420 for picture in pictures)


def test_a_map_of_one_spot_blurs_that_spot_alone() -> None:
    def spot(activations: torch.Tensor, gradients: torch.Tensor) -> torch.Tensor:
        weights = torch.zeros_like(activations)
        weights[..., 3:5, 3:5] = activations[..., 3:5, 3:5].sign()
        return weights

    made = camkit.slide("demo-fair", SCENE, method=spot)
    assert (made.explanations[0].heatmap > 0).mean() < 0.1
    with Image.open(SCENE) as scene:
        picture = np.asarray(scene.convert("RGB").resize(made.panels[-1][1].shape[1::-1])).astype(int)
    changed = np.abs(picture - made.panels[-1][1]).max(2) > 40
    assert 0 < changed.mean() < 0.1
    (share,) = re.findall(r"Without the hottest ([\d.]+)%, ", made.sentence)
    assert made.panels[-1][0] == f"Without the hottest {share}%"
    assert changed.mean() <= float(share) / 100 < 0.1


def test_a_slide_is_a_page_or_a_drawing_with_text(tmp_path: Path) -> None:
    labels = [f"<{number}> & café" for number in range(4)]
    made = camkit.slide("demo-fair", SCENE, labels=labels)
    pdf = made.save(tmp_path / "slide.pdf").read_bytes()
    assert pdf.startswith(b"%PDF-")
    box = re.search(rb"/MediaBox *\[ *0 0 ([\d.]+) ([\d.]+) *\]", pdf)
    assert box is not None and [float(side) for side in box.groups()] == [960, 540]
    drawing = ET.parse(made.save(tmp_path / "slide.svg")).getroot()
    texts = [part.text or "" for part in drawing.iter(f"{SVG}text")]
    assert " ".join(texts[:2]).startswith("demo-fair says <") and "> & café" in texts[0]
    assert "Without the hottest fifth" in texts
    pictures = [part.get("href", "") for part in drawing.iter(f"{SVG}image")]
    assert len(pictures) == len(made.panels)
    assert all(picture.startswith("data:image/png;base64,") for picture in pictures)


@pytest.mark.extended
def test_the_svg_looks_like_the_picture(tmp_path: Path, browser: Browser) -> None:
    made = camkit.slide("demo-biased", SCENE, "plane")
    page = browser.new_page(viewport={"width": 1920, "height": 1080})
    page.goto(made.save(tmp_path / "slide.svg").as_uri())
    shown = cv2.imdecode(np.frombuffer(page.screenshot(), np.uint8), cv2.IMREAD_COLOR)[..., ::-1]
    page.close()
    drawn = made.draw()
    assert shown.shape == drawn.shape
    ours, theirs = (cv2.resize(each, (96, 54), interpolation=cv2.INTER_AREA).astype(int) for each in (drawn, shown))
    assert np.abs(ours - theirs).mean() < 4


def test_a_file_without_a_function_is_asked_for_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.py"
    file.write_text("raise SystemExit\ndef build(): ...\n")
    assert main([str(SCENE), "--model", str(file)]) == 2
    assert "names no function that returns a model; name it as file.py:factory" in capsys.readouterr().err
