from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from PIL import Image

import camkit
from camkit.cli import main

SCENE = camkit.scenes.scene_paths()["plane-wood"]


@pytest.mark.extended
def test_a_slide_says_what_the_model_itself_says() -> None:
    made = camkit.slide("demo-biased", SCENE, "plane")
    model = camkit.load_model("demo-biased", device="cpu")
    assert model.preprocess is not None
    assert model.labels is not None
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
    assert "but this is a plane" in capsys.readouterr().out
    assert main(call) == 2
    assert "exists already" in capsys.readouterr().err
    assert main([*call[:-1], str(tmp_path / "s.pdf")]) == 2
    assert ".pdf is no type of picture" in " ".join(capsys.readouterr().err.split())
    assert main([*call[:3], "--true", "plane"]) == 2
    assert main([str(SCENE), str(SCENE.with_name("bird-wood.jpg")), *call[1:-1], str(tmp_path / "t.png")]) == 2


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        (["--alpha", "0.3"], "--alpha"),
        (["--layer", "features", "--json"], "--layer and --json"),
        (["--target", "bird"], "--target"),
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


def test_a_file_of_functions_lists_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.py"
    file.write_text("raise SystemExit\ndef build(): ...\ndef _hidden(): ...\nclass Net: ...\n")
    assert main([str(SCENE), "--model", str(file)]) == 2
    assert f"{file}:build or {file}:Net" in " ".join(capsys.readouterr().err.split())


def test_layers_fit_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layers", "--model", "mobilenet_v2"]) == 0
    table = capsys.readouterr().out.split("parameters,")[0].splitlines()
    assert max(map(len, table[:-1])) <= 80
