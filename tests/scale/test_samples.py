"""Datasets of FiftyOne get heat, answers and verdicts: with the real package and its database, where these are."""

import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

import camkit
from camkit.errors import InputError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of FiftyOne's database library


@pytest.fixture(scope="module")
def fo() -> Any:
    os.environ.setdefault("FIFTYONE_DO_NOT_TRACK", "true")
    fiftyone = pytest.importorskip("fiftyone", reason="FiftyOne is not installed")
    try:
        fiftyone.list_datasets()
    except fiftyone.core.config.FiftyOneConfigError as error:
        pytest.skip(f"FiftyOne's database does not run here: {error}")
    fiftyone.config.show_progress_bars = False
    return fiftyone


@pytest.fixture
def scenes(fo: Any, tmp_path: Path) -> Iterator[tuple[Any, Path]]:
    """Return a dataset of two pictures of each of four classes, and their folder."""
    folder = camkit.scenes.write_scenes(tmp_path, 2)
    dataset = fo.Dataset(f"camkit-{uuid.uuid4().hex}")
    dataset.add_samples([fo.Sample(filepath=str(file)) for file in sorted(folder.glob("*/*.*"))])
    yield dataset, folder
    dataset.delete()


@pytest.fixture
def explainer() -> camkit.Explainer:
    return camkit.Explainer(camkit.load_model("demo-fair", device="cpu"))


def test_samples_get_the_heat_and_the_answer_of_explain(
    fo: Any, scenes: tuple[Any, Path], explainer: camkit.Explainer
) -> None:
    dataset, _ = scenes
    assert camkit.scale.explain_samples(dataset, explainer) == len(dataset) == 8
    for sample in fo.load_dataset(dataset.name):
        expected = explainer(sample.filepath)
        assert sample.camkit_answer.label == expected.label
        assert sample.camkit_answer.confidence == pytest.approx(expected.probability, abs=1e-4)
        heat = expected.heatmap_on_picture()
        assert sample.camkit_heat.map.shape == heat.shape
        np.testing.assert_allclose(sample.camkit_heat.map, heat, atol=1e-3)
        assert (sample.camkit_heat.layer, sample.camkit_heat.status) == (expected.layer, "ok")
        assert sample.camkit_heat.range == [0, 1]


def test_a_view_a_target_and_a_large_picture(fo: Any, scenes: tuple[Any, Path], explainer: camkit.Explainer) -> None:
    dataset, folder = scenes
    large = folder / "zz.png"
    Image.open(next(folder.glob("*/*.*"))).resize((1024, 512)).save(large)
    dataset.add_sample(fo.Sample(filepath=str(large)))
    view = dataset.sort_by("filepath", reverse=True).limit(3)
    assert camkit.scale.explain_samples(view, explainer, "ship", field="ship") == 3
    found = dataset.exists("ship_heat")
    assert sorted(found.values("filepath")) == sorted(view.values("filepath"))
    assert set(found.values("ship_answer.label")) == {"ship"}
    assert dataset[str(large)].ship_heat.map.shape == (128, 256)


def test_a_damaged_picture_has_an_error_and_the_next_run_takes_it_away(
    fo: Any, scenes: tuple[Any, Path], explainer: camkit.Explainer
) -> None:
    dataset, _ = scenes
    file = Path(dataset.first().filepath)
    whole = file.read_bytes()
    file.write_bytes(whole[:300])
    assert camkit.scale.explain_samples(dataset, explainer) == 7
    assert file.name in dataset[str(file)].camkit_error
    assert dataset[str(file)].camkit_heat is None
    file.write_bytes(whole)
    assert camkit.scale.explain_samples(dataset.limit(1), explainer) == 1
    assert dataset[str(file)].camkit_error is None
    with pytest.raises(InputError, match="one heatmap"):
        camkit.scale.explain_samples(dataset, explainer, camkit.targets.boxes())


def test_samples_get_the_verdicts_of_a_check(fo: Any, scenes: tuple[Any, Path]) -> None:
    dataset, folder = scenes
    rows = [
        {"name": file.relative_to(folder).as_posix(), "label": file.parent.name, "same": {"blur": 1.0}, "other": other}
        for file, other in zip(sorted(folder.glob("*/*.*"))[:3], [{"blur": 0.25}, {"blur": 1.0}, {}], strict=True)
    ]
    classes = {row["label"]: {"verdict": "WARN"} for row in rows}
    report = {"verdict": "FAIL", "sentence": "it reads the sky", "images": rows, "classes": classes}
    assert camkit.scale.add_verdicts(dataset.view(), report, folder) == 3
    assert sorted(dataset.exists("camkit_change").values("camkit_change")) == [0.0, 0.75]
    assert dataset.count_values("camkit_verdict") == {"WARN": 3, None: 5}
    assert fo.load_dataset(dataset.name).info["camkit"]["verdict"] == "FAIL"


@pytest.mark.extended
def test_a_dataset_of_fiftyone_can_be_checked(fo: Any, tmp_path: Path) -> None:
    """Its own export to COCO is what the check reads."""
    pictures = camkit.scenes.write_scenes(tmp_path / "drawn", 2)
    dataset = fo.Dataset(f"camkit-{uuid.uuid4().hex}")
    for file in sorted(pictures.glob("*/*.*")):
        with Image.open(next((pictures.parent / "masks" / file.parent.name).glob(f"{file.stem}.*"))) as opened:
            mask = np.asarray(opened.convert("L")) > 0
        found = fo.Detection.from_mask(mask, file.parent.name)
        dataset.add_sample(fo.Sample(filepath=str(file), objects=fo.Detections(detections=[found])))
    coco = fo.types.COCODetectionDataset
    dataset.export(export_dir=str(tmp_path / "coco"), dataset_type=coco, label_field="objects")
    quick = {"check": {"pastes": 1}}
    result = camkit.check("demo-fair", tmp_path / "coco/data", regions=tmp_path / "coco/labels.json", config=quick)
    assert len(result.images) == 8
    assert camkit.scale.add_verdicts(dataset, result.to_dict(), tmp_path / "coco/data") == 0  # these are copies
    dataset.delete()


def test_without_fiftyone_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch, explainer: camkit.Explainer) -> None:
    monkeypatch.setitem(sys.modules, "fiftyone", None)
    with pytest.raises(InputError, match="pip install fiftyone"):
        camkit.scale.explain_samples(SimpleNamespace(), explainer)
