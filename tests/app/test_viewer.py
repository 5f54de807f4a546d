"""What the app shows, without a browser: answers, heat and covered pictures."""

import functools
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tasks import Blobs

import camkit
from camkit.app.serve import FIRST_PORT, HOST, free_port
from camkit.app.viewer import CHOSEN, FILL_NAMES, FoundBox, Look, Viewer, covered
from camkit.cli import main
from camkit.errors import ImageError, InputError
from camkit.models import LoadedModel
from camkit.types import Box

SCENES = camkit.scenes.scene_paths()


@pytest.fixture(scope="module")
def viewer() -> Viewer:
    models = {name: camkit.load_model(name, device="cpu") for name in ("demo-biased", "demo-fair")}
    return Viewer(models, list(SCENES.values()))


@pytest.fixture
def plane() -> Look:
    return Look("demo-biased", str(SCENES["plane-sky"]))


def test_answers_and_heat_are_those_of_explain(viewer: Viewer, plane: Look) -> None:
    found = viewer.answers(plane)
    expected = camkit.explain("demo-biased", SCENES["plane-sky"], target=camkit.targets.top(4))
    assert [row.label for row in found] == [row.label for row in expected]
    assert [row.probability for row in found] == pytest.approx([row.probability for row in expected], abs=1e-5)
    second = viewer.heat(Look(plane.model, plane.picture, target=expected[1].target))
    np.testing.assert_allclose(second.raw, expected[1].raw, atol=1e-4)


def test_a_contrast_a_method_and_a_layer_are_passed_on(viewer: Viewer, plane: Look) -> None:
    first, second = (row.target for row in viewer.answers(plane)[:2])
    for one, other in ((first, second), (second, first)):  # one of them is class 0
        made = viewer.heat(Look(plane.model, plane.picture, target=one, rather_than=other))
        expected = camkit.explain(plane.model, plane.picture, target=camkit.targets.contrast(one, other))
        np.testing.assert_allclose(made.raw, expected.raw, atol=1e-4)
    other = viewer.heat(Look(plane.model, plane.picture, method="layercam", layer="features"))
    assert (other.method, other.layer) == ("layercam", "features")
    with pytest.raises(InputError):
        viewer.heat(Look(plane.model, plane.picture, layer="nowhere"))
    assert viewer.layers(plane.model)[0] == viewer.methods()[0] == CHOSEN
    assert "features" in viewer.layers(plane.model)


def test_a_comparison_shows_the_contrast_and_the_layer(
    viewer: Viewer, plane: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_method = functools.partial(camkit.compare, methods=["gradcam"])
    monkeypatch.setattr(camkit, "compare", one_method)
    shown = viewer.comparison(replace(plane, target=3, rather_than=1, layer="features.0"))
    contrast = camkit.targets.contrast(3, 1)
    model = viewer.models[plane.model]
    expected = one_method(model, viewer.picture(plane), target_layer="features.0", target=contrast)
    assert (expected.rows[0].label, expected.rows[0].layer) == ("bird rather than ship", "features.0")
    np.testing.assert_array_equal(shown, expected.sheet())


def test_heat_before_a_cover_is_of_the_class_of_the_covered_picture(viewer: Viewer) -> None:
    look = Look("demo-fair", str(SCENES["plane-sky"]), rather_than=1, cover=(0, 0, 192, 384), fill="mean")
    assert [viewer.answers(each)[0].label for each in (look.uncovered, look)] == ["plane", "bird"]
    before = replace(look.uncovered, target=viewer.target(look))
    assert viewer.heat(before).name == viewer.heat(look).name == "bird rather than ship"


def test_a_covered_object_changes_the_answer_as_a_covered_picture_does(viewer: Viewer) -> None:
    mask = camkit.scenes.scene_mask("plane-wood")
    rows, columns = np.nonzero(mask)
    cover = int(columns.min()), int(rows.min()), int(columns.max()) + 1, int(rows.max()) + 1
    look = Look("demo-fair", str(SCENES["plane-wood"]), cover=cover, fill="mean")
    with Image.open(SCENES["plane-wood"]) as opened:
        picture = np.array(opened.convert("RGB"))
    left, top, right, bottom = cover
    picture[top:bottom, left:right] = picture.reshape(-1, 3).mean(0).round()
    assert np.abs(np.asarray(viewer.picture(look)).astype(int) - picture).max() <= 1
    before, after = viewer.answers(look.uncovered)[0], viewer.answers(look)[0]
    assert before.label == "plane"
    assert viewer.heat(Look(look.model, look.picture, before.target, cover=cover, fill="mean")).probability < 0.8
    assert after.probability == pytest.approx(
        camkit.explain("demo-fair", Image.fromarray(picture)).probability, abs=0.02
    )


def test_the_first_picture_is_one_that_can_be_read_and_a_huge_one_is_reduced(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(SCENES["car-sea"].read_bytes()[:300])
    (tmp_path / "b.png").write_text("no picture")
    Image.new("RGB", (5000, 2500), "navy").save(tmp_path / "c.png")
    files = [tmp_path / name for name in ("a.jpg", "b.png", "c.png")]
    assert Viewer({}, files).first_readable() == str(files[2])
    assert Viewer({}, files).picture(Look("", str(files[2]))).size == (1600, 800)
    with pytest.raises(ImageError, match=r"b\.png is not a picture"):
        Viewer({}, files[:2]).first_readable()
    with pytest.raises(ImageError) as refused:  # an upload
        Viewer({}, files[2:]).picture(Look("", str(files[0])))
    assert str(refused.value).startswith("a.jpg cannot be read")


@pytest.fixture
def detector(tmp_path: Path) -> tuple[Viewer, Look]:
    """A detector of one's own, of which camkit does not know that it is one, and a picture with two objects."""
    Blobs.picture().save(tmp_path / "two.png")
    model = LoadedModel(Blobs(), "own", Blobs.prepare, Blobs.LABELS)
    return Viewer({"own": model}, [tmp_path / "two.png"]), Look("own", str(tmp_path / "two.png"))


def test_the_boxes_of_a_detector_are_answers(detector: tuple[Viewer, Look]) -> None:
    viewer, look = detector
    expected = camkit.explain(viewer.models["own"], look.picture, target=camkit.targets.boxes())
    assert [row.label for row in viewer.answers(look)] == [row.label for row in expected] == ["red", "blue"]
    assert viewer.answers(look)[0].detection == pytest.approx((24, 32, 88, 96), abs=0.6)
    for row in expected:
        assert row.detection is not None
        middle = int(row.detection.left + row.detection.right) // 2, int(row.detection.top + row.detection.bottom) // 2
        found = viewer.box_at(look, middle)
        assert found == FoundBox(row.detection, row.target)
        np.testing.assert_allclose(viewer.heat(replace(look, box=found)).raw, row.raw, atol=1e-5)
    with pytest.raises(InputError, match="there is no box there"):
        viewer.box_at(look, (0, 0))


def test_a_box_whose_object_is_covered_is_not_found_any_more(detector: tuple[Viewer, Look]) -> None:
    viewer, look = detector
    first, second = viewer.answers(look)
    hidden = replace(look, cover=(20, 28, 92, 100), fill="mean")
    assert viewer.heat(replace(hidden, box=FoundBox(first.detection, first.target))) is None
    other = viewer.heat(replace(hidden, box=FoundBox(second.detection, second.target)))
    assert other is not None
    assert (other.label, other.detection) == (second.label, second.detection)


def test_a_picture_without_boxes_has_no_answers(detector: tuple[Viewer, Look]) -> None:
    viewer, look = detector
    empty = replace(look, cover=(0, 0, 256, 128), fill="mean")
    assert viewer.answers(look)
    assert viewer.answers(empty) == []
    assert viewer.heat(empty) is None


def test_a_box_is_the_same_if_it_overlaps_and_has_the_class() -> None:
    box = FoundBox(Box(0.0, 0.0, 10.0, 10.0), 1)
    assert box.same_as(FoundBox(Box(0.0, 5.0, 10.0, 15.0), 1)) == pytest.approx(1 / 3)
    assert box.same_as(FoundBox(Box(0.0, 0.0, 10.0, 10.0), 2)) == 0
    assert box.same_as(FoundBox(Box(20.0, 0.0, 30.0, 10.0), 1)) == 0
    assert box.same_as(box) == 1


@pytest.mark.parametrize("fill", FILL_NAMES)
def test_only_the_rectangle_changes(fill: str) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (40, 60, 3), dtype=np.uint8)
    made = np.asarray(covered(Image.fromarray(pixels), (10, 5, 30, 25), fill))
    inside = np.zeros((40, 60), bool)
    inside[5:25, 10:30] = True
    assert np.array_equal(made[~inside], pixels[~inside])
    assert made[inside].std() < pixels[inside].std() / 2


def test_only_named_pictures_can_be_chosen(viewer: Viewer) -> None:
    assert viewer.named(str(SCENES["car-sea"])) == str(SCENES["car-sea"])
    with pytest.raises(InputError, match="not named in the command"):
        viewer.named("/etc/hostname")


def test_two_visitors_get_their_own_answers(viewer: Viewer) -> None:
    looks = [Look(model, str(file)) for model in viewer.models for file in SCENES.values()]
    expected = [camkit.explain(look.model, look.picture).label for look in looks]
    fresh = Viewer(viewer.models, list(SCENES.values()))
    with ThreadPoolExecutor(2) as visitors:
        assert [row.label for row in visitors.map(fresh.heat, looks)] == expected


def test_a_taken_port_is_refused_and_the_first_free_one_is_found() -> None:
    with socket.socket() as other:
        other.bind((HOST, 0))
        other.listen()
        with pytest.raises(InputError, match="is taken; name another one with --port"):
            free_port(other.getsockname()[1])
    with socket.socket() as other:  # that of an app that is starting
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind((HOST, 0))
        with free_port(other.getsockname()[1]), pytest.raises(OSError, match="in use"):
            other.listen()
    with free_port(None) as bound:
        assert bound.getsockname()[1] >= FIRST_PORT
        assert bound.getsockname()[0] == "127.0.0.1"


def test_without_gradio_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "gradio", None)
    assert main(["app", "--no-browser"]) == 2
    assert "pip install 'camkit[app]'" in capsys.readouterr().err


def test_the_folder_of_a_check_opens_its_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "report.html").write_text("the page of a check")
    (tmp_path / "report.json").write_text("{}")
    assert main(["app", str(tmp_path), "--no-browser"]) == 0
    assert capsys.readouterr().out == f"camkit is at {(tmp_path / 'report.html').as_uri()}\n"


def test_the_folder_for_a_verdict_needs_a_report(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text('{"verdict": "PASS"}')
    assert Viewer({}, [], [tmp_path]).verdicts() == [{"verdict": "PASS"}]
    with pytest.raises(InputError, match=r"--check needs the folder of a check's reports.*nowhere"):
        Viewer({}, [], [tmp_path / "nowhere"]).verdicts()


def test_covering_says_the_old_and_new_share_of_the_answer_that_is_looked_at(detector: tuple[Viewer, Look]) -> None:
    viewer, look = detector
    first, second = viewer.answers(look)
    hidden = replace(look, cover=(20, 28, 92, 100), fill="mean")
    for row, after in ((first, "not found"), (second, f"{second.probability:.1%}")):
        covering = viewer.covering(replace(hidden, box=FoundBox(row.detection, row.target)))
        assert covering == (row.label, f"{row.probability:.1%}", after, "")
    assert viewer.covering(replace(hidden, picture=look.picture, box=None))[2] == "not found"
