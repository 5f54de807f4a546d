"""The tiny model that ships with camkit: it says what is in the scene, and the tree needs no picture."""

from __future__ import annotations

import html
import re
from dataclasses import replace

import numpy as np
import pytest

import camkit
from camkit.cli import main
from camkit.cli.analyses import describe_scene

pytestmark = pytest.mark.extended  # the model is one of transformers'


@pytest.fixture(scope="module")
def described(tmp_path_factory):
    return describe_scene(tmp_path_factory.mktemp("words"))


def test_the_toy_and_the_ground_need_the_picture_and_the_tree_does_not(described):
    found = described
    assert found.sentence == "one toy , a purple triangle on the sea near a tree ."
    needed = [word.text for word in found if not word.needs_no_picture]
    assert needed == ["one", "purple", "triangle", "sea"]
    assert found.named("tree")[0].is_dictated


def test_the_heat_of_colour_and_shape_is_on_the_toy_and_that_of_the_ground_beside_it(described):
    found = described
    pixels = np.asarray(found.picture).astype(int)
    toy = (pixels[..., 1] < 80) & (pixels[..., 0] > pixels[..., 1] + 20)  # purple has little green
    assert 0.03 < toy.mean() < 0.15
    for text in ("purple", "triangle", "sea"):
        heat = found.named(text)[0].explanation.heatmap_on_picture()
        on_toy, beside = heat[toy].mean(), heat[~toy].mean()
        assert (on_toy < beside) if text == "sea" else (on_toy > 2 * beside)


def test_the_page_and_the_sheet_draw_no_heat_for_words_that_need_no_picture(described):
    found, (page, sheet) = described, described.files
    text = page.read_text()
    heat, none = 'alt="heat of the word ', 'alt="the picture without heat, for the word '
    image_of = {word: image for image, word in re.findall(f'<img src="(data:[^"]+)" (?:{heat}|{none})([^"]+)">', text)}
    assert f'{heat}purple"' in text
    assert f'{none}tree"' in text
    assert image_of["toy"] == image_of["tree"] == image_of["the"]
    assert len(set(image_of.values())) == 5  # four words with heat, and the picture itself
    assert len(found._drawn()) == 4
    only_tree = replace(found, words=tuple(found.named("tree")))
    assert [each.name for each in only_tree._drawn()] == ["tree (does not need the picture)"]
    assert "-0.00" not in text
    assert sheet.stat().st_size > 10_000
    opened = re.findall(r'<input [^>]*id="w(\d+)" checked', text)
    assert [found[int(number)].text for number in opened] == ["triangle"]
    assert "<p>There is no tree in the picture: " in html.unescape(text)
    assert str(camkit.scenes.words_pictures()[0].parent) not in text + found.source


def test_the_command_prints_each_word_and_nothing_of_the_loading(tmp_path, capsys):
    assert main(["demo", "--words", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert "Loading" not in printed.err
    assert "There is no tree in the picture" in printed.out
    assert re.search(r"purple +99\.\d%.*needs the picture", printed.out)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["words.html", "words.png"]
    assert main(["demo", "--words", "--check", "--out", str(tmp_path)]) == 2
    assert "pass one of them" in capsys.readouterr().err
