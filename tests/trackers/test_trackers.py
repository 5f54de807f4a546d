"""What trackers of experiments hold of a check and of explanations, read back with their own libraries."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from offline_runs import history, wandb_records
from PIL import Image

import camkit
from camkit.cli import main
from camkit.errors import InputError, OutputError
from camkit.trackers import TRACKERS, find_tracker

pytestmark = [pytest.mark.extended, pytest.mark.filterwarnings("ignore")]  # the libraries' own warnings
SCENES = list(camkit.scenes.scene_paths().values())[:2]
each_tracker = pytest.mark.parametrize("tracker", ["mlflow", "wandb", "trackio"])


@pytest.fixture(scope="module", autouse=True)
def stores(tmp_path_factory):
    """Let each tracker write into a folder of this machine."""
    folder = tmp_path_factory.mktemp("stores")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", (folder / "mlruns").as_uri())
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        patch.setenv("WANDB_MODE", "offline")
        for name in ("WANDB_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR", "TRACKIO_DIR"):
            patch.setenv(name, str(folder))
        patch.chdir(folder)
        getattr(sys.modules.get("wandb"), "teardown", int)()  # it reads these settings again
        yield folder


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    data = camkit.scenes.write_scenes(tmp_path_factory.mktemp("scenes"), 10)
    return camkit.check("demo-biased", data, config={"check": {"pastes": 1}, "limits": {"least_pictures": 10}})


@pytest.fixture(scope="module")
def found():
    return camkit.explain("demo-fair", SCENES, target=["plane", "ship"])


def last_run(tracker, name, folder):
    """Return the values, the settings, and the files and rows of the last run; a file is a path."""
    library = pytest.importorskip(tracker)
    if tracker == "mlflow":
        run = library.MlflowClient().search_runs(["0"], order_by=["start_time DESC"])[0]
        root = Path(library.artifacts.download_artifacts(f"runs:/{run.info.run_id}/"))
        files = {file.name: file for file in (root / name).iterdir()}
        table = library.load_table(f"{name}/pictures.json", run_ids=[run.info.run_id]).to_dict("records")
        rows = [{key: root / cell["filepath"] if isinstance(cell, dict) else cell for key, cell in row.items()}
                for row in table]  # fmt: skip
        return {**run.data.metrics, **run.data.tags}, run.data.params, files, rows
    if tracker == "trackio":
        run = max(library.Api().runs("camkit"), key=lambda run: run.config["_Created"])
        storage, media = library.sqlite_storage.SQLiteStorage, library.utils.MEDIA_DIR
        (logged,) = storage.get_logs("camkit", run.name)
        files = {"report.html": media / logged[f"{name}/report.html"]["file_path"]} if name == "check" else {}
        rows = [{key: media / cell["file_path"] if isinstance(cell, dict) else cell for key, cell in row.items()}
                for row in logged[f"{name}/pictures"]["_value"]]  # fmt: skip
        return logged, run.config, files, rows
    records = wandb_records(max(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime))
    values = {key: value for record in records for key, value in history(record).items()}
    settings = {item.key: json.loads(item.value_json) for record in records for item in record.config.update}
    entries = [entry for record in records for entry in record.artifact.manifest.contents]
    files = {entry.path: Path(entry.local_path) for entry in entries}
    table = json.loads(files[f"{name}/pictures.table.json"].read_text())
    rows = [[files[cell["path"]] if isinstance(cell, dict) else cell for cell in row] for row in table["data"]]
    return values, settings, files, [dict(zip(table["columns"], row, strict=True)) for row in rows]


@each_tracker
def test_a_check_is_a_verdict_effects_limits_and_reports(result, stores, tracker):
    pytest.importorskip(tracker)
    result.log_to(tracker)
    values, settings, files, rows = last_run(tracker, "check", stores)
    assert (values["check/verdict"], values["check/exit_code"]) == ("FAIL", 1)
    assert values["check/gap/all classes"] == pytest.approx(result.overall.gap.value)
    assert values["check/attraction/plane"] == pytest.approx(result.classes["plane"].attraction.value)
    assert float(settings["check/limits/gap"]) == 0.1
    assert b"<html" in files["report.html"].read_bytes()
    assert tracker == "trackio" or Image.open(files["evidence.png"]).size[0] > 700
    assert len(rows) == 12
    assert all(row["picture"] in row["sentence"] and Image.open(row["edits"]).size[0] > 600 for row in rows)


@each_tracker
def test_explanations_are_a_table_of_pictures_and_the_shell_prints_rows_only(found, stores, capsys, tracker):
    pytest.importorskip(tracker)
    options = ["--model", "demo-fair", "--target", "plane", "--target", "ship", "--json", "--log-to", tracker]
    assert main([*map(str, SCENES), *options]) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    rows = last_run(tracker, "explanations", stores)[3]
    for row, each, line in zip(rows, found, printed, strict=True):
        assert list(row) == ["source", "picture", "heat", "label", "probability", "layer", "method", "status"]
        assert {name: row[name] for name in ("source", "label", "layer")}.items() <= line.items()
        assert row["probability"] == pytest.approx(each.probability)
        assert np.array_equal(np.asarray(Image.open(row["heat"]).convert("RGB")), each.overlay())
        assert np.array_equal(np.asarray(Image.open(row["picture"]).convert("RGB")), each.picture)


@each_tracker
def test_the_active_run_goes_on(result, found, stores, tracker):
    library = pytest.importorskip(tracker)
    run = library.start_run() if tracker == "mlflow" else library.init(project="camkit")
    result.log_to(tracker, step=3)
    found[0].log_to(tracker, step=4)
    if tracker == "mlflow":
        assert library.active_run().info.run_id == run.info.run_id
        history = library.MlflowClient().get_metric_history(run.info.run_id, "check/exit_code")
        assert [each.step for each in history] == [3]
        other = replace(result.to_log(), settings={"check/limits/gap": 0.5}, values={"a_": 1, "a#": 2, "a$": 3})
        with pytest.raises(OutputError, match="mlflow did not take the results"):  # a setting of a run stays
            find_tracker(tracker)(other, None)
        logged = library.MlflowClient().get_run(run.info.run_id).data.metrics
        assert [logged[name] for name in ("a_", "a_ 2", "a_ 3")] == [1, 2, 3]
        library.end_run()
        return
    if tracker == "wandb":
        with pytest.raises(InputError, match="the run is at step 4, not 3; log at a later step"):
            result.log_to(tracker, step=3)
    run.log({"after": 1})
    library.finish()
    if tracker == "trackio":
        logged = library.sqlite_storage.SQLiteStorage.get_logs("camkit", run.name)
        assert [each["step"] for each in logged] == [3, 4, 5]
        assert "explanations/pictures" in logged[1]
    else:
        values, _, _, rows = last_run(tracker, "explanations", stores)
        assert (values["check/verdict"], values["after"], len(rows)) == ("FAIL", 1, 1)
        assert values["_step"] == 4


def test_tensorboard_gets_a_folder_of_its_own(found, stores):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found.log_to("tensorboard")
    (folder,) = stores.glob("runs/camkit-explanations-*")
    events = accumulator.EventAccumulator(str(folder), {"images": 0, "tensors": 0}).Reload()
    tags = [f"explain/{each.source}/{each.name}" for each in found]
    assert events.Tags()["images"] == [f"{tag}/{kind}" for tag in tags for kind in ("picture", "heat")]


@pytest.mark.parametrize(("tracker", "said"), [("wandb", "pip install wandb"), ("wanb", "did you mean 'wandb'?")])
def test_what_is_not_there_is_one_sentence_before_anything_is_computed(tmp_path, monkeypatch, capsys, tracker, said):
    monkeypatch.setitem(sys.modules, "wandb", None)
    data = camkit.scenes.write_scenes(tmp_path / "scenes", 2)
    assert main(["check", str(data), "--model", "demo-fair", "-o", str(tmp_path / "out"), "--log-to", tracker]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("inconclusive", "code"), [("pass", OutputError.exit_code), ("fail", 3)])
def test_a_tracker_that_refuses_is_an_error_and_reports_and_verdict_stay(
    tmp_path, monkeypatch, capsys, inconclusive, code
):
    def refuse(library, log, files, step):
        sys.stdout.write("of the library")
        raise ConnectionError(f"{library.__name__} {step} {len(list(Path(files).iterdir()))}")

    monkeypatch.setitem(TRACKERS, "mine", (refuse, "json", "json"))
    data = camkit.scenes.write_scenes(tmp_path / "scenes", 2)
    options = ["--inconclusive", inconclusive, "-o", str(tmp_path / "out"), "--log-to", "mine", "-q"]
    assert main(["check", str(data), "--model", "demo-fair", *options]) == code
    printed = capsys.readouterr()
    assert "mine did not take the results: json None 5\n" in printed.err
    assert ("of the library" in printed.err, "of the library" in printed.out) == (True, False)
    assert (tmp_path / "out/report.html").exists()
