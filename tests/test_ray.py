"""Explaining on a cluster: rows as on one machine, lost nodes, interrupted jobs, and what can be wrong."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import camkit
from camkit.cli import main
from camkit.demo.scenes import write_scenes
from camkit.errors import InputError, OutputError
from camkit.images.listing import Pictures
from camkit.models import load_model
from camkit.models.loaded import LoadedModel
from camkit.scale.actors import Pool
from camkit.scale.cluster import ParquetPictures, explain_on_cluster, parquet_pictures, prepared_job
from camkit.scale.folder import Drawing, explain_files
from camkit.scale.schema import COLUMNS

pq = pytest.importorskip("pyarrow.parquet")
ArrowInvalid = pytest.importorskip("pyarrow").ArrowInvalid

LOOPBACK = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # without it, Ray listens on all interfaces
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
}
MEMORY = 200 * 2**20
"""Bytes of a node's object store."""
SIDE = 16
WAIT = 120.0
"""Seconds after which something that should happen counts as missing; a node that dies is noticed after about 30."""

NETWORK = f"""
import time
from pathlib import Path
import ray
import torch
from torch import nn
from torchvision.transforms._presets import ImageClassification


class Slow(nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def forward(self, pictures):
        passes = Path(__file__).with_name("passes")
        passes.mkdir(exist_ok=True)
        with (passes / ray.get_runtime_context().get_node_id()).open("a") as file:
            file.write(".")
        time.sleep(self.seconds * len(pictures))
        return pictures


def make(seed=0, seconds=0.0):
    torch.manual_seed(seed)
    trunk = nn.Sequential(nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.ReLU())
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4)]
    slow = [Slow(seconds)] if seconds else []
    return nn.Sequential(trunk, *head, *slow).eval(), ImageClassification(crop_size={SIDE}, resize_size={SIDE})


def other():
    return make(1)


def slow():
    return make(0, 0.05)


def failing():
    model, preprocess = make()
    model.register_forward_pre_hook(fail)
    return model, preprocess


def fail(module, pictures):
    if len(pictures[0]) > 0 and float(pictures[0].sum()) == float(pictures[0].sum()):
        raise ArithmeticError("the model divides by zero")


def uncertain():
    return make(torch.seed() % 2**31)
"""


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[Any]]:
    """Start a cluster on the loopback device: a head without cores, and two nodes with one core each."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in LOOPBACK.items():
            patch.setenv(name, value)
        ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'camkit[ray]'")
        from ray.cluster_utils import Cluster  # noqa: PLC0415 - Ray reads the environment when it is imported

        given = {"object_store_memory": MEMORY, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **given})
        try:
            started = [cluster.add_node(num_cpus=1, object_store_memory=MEMORY) for _ in range(2)]
            cluster.wait_for_nodes()
            ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
            yield [cluster, *started]
        finally:
            ray.shutdown()
            cluster.shutdown()


pytestmark = pytest.mark.filterwarnings("default")  # Ray and its packages give warnings of their own
on_cluster = pytest.mark.extended


@pytest.fixture
def model(tmp_path: Path) -> str:
    """Return the name of a tiny network, which each process loads from its file."""
    (tmp_path / "network.py").write_text(NETWORK)
    return f"{tmp_path / 'network.py'}:make"


def write_pictures(folder: Path, count: int, side: int = 24) -> list[Path]:
    folder.mkdir()
    generator = np.random.default_rng(0)
    files = [folder / f"{number:05d}.png" for number in range(count)]
    for file in files:
        Image.fromarray(generator.integers(0, 256, (side, side + 4, 3), np.uint8)).save(file)
    return files


def rows_of(table: Path) -> list[dict[str, Any]]:
    """Return the rows of a table in the order of the pictures and targets."""
    rows = pq.read_table(table).to_pylist()
    return sorted(rows, key=lambda row: (row["path"], row["target"] if row["target"] is not None else -1))


def assert_same(rows: list[dict[str, Any]], others: list[dict[str, Any]], *, but: tuple[str, ...] = ()) -> None:
    """Compare rows: text exactly, numbers to the last digits, which depend on what shares a pass."""
    assert len(rows) == len(others)
    for row, other in zip(rows, others, strict=True):
        for name in COLUMNS.keys() - {"drawing", *but}:
            if isinstance(other[name], (float, list)):
                assert row[name] == pytest.approx(other[name], rel=1e-2, abs=1e-3), name
            else:
                assert row[name] == other[name], name


def scaled(model: Any, pictures: Any, out: Path, **options: Any) -> Any:
    """Explain pictures with one actor, since each takes seconds to start, and return what was finished."""
    ways = {name: options.pop(name) for name in ("resume", "overwrite") if name in options}
    job = prepared_job(model, "0", batch_size=4, **options)
    spare = isinstance(pictures, ParquetPictures) and pictures.has_data
    return explain_on_cluster(job, pictures, out, Pool.of_cluster(1, 1.0, None, spare=spare), **ways)


# --- the rows ---------------------------------------------------------------------------------------------------------


@on_cluster
def test_a_cluster_writes_the_rows_of_one_machine(nodes, tmp_path, model, capsys):
    files = write_pictures(tmp_path / "in", 40)
    files[7].write_bytes(files[8].read_bytes())
    (tmp_path / "in" / "broken.jpg").write_bytes(b"no picture")
    options = ["--model", model, "--layer", "0", "--top-k", "2", "--batch-size", "4"]
    table = tmp_path / "one.parquet"
    assert main([str(tmp_path / "in"), *options, "--table", str(table), "--no-pictures", "--quiet"]) == 2
    capsys.readouterr()
    assert main(["scale", str(tmp_path / "in"), *options, "--out", str(tmp_path / "many")]) == 2
    said = capsys.readouterr()
    assert "40 explained, 1 failed, 0 empty" in said.out
    assert "broken.jpg is not a picture" in said.err
    rows = rows_of(tmp_path / "many")
    assert_same(rows, rows_of(table))
    assert len(rows) == 81
    assert len({row["content"] for row in rows}) == 40, "two pictures have the same bytes"
    explanations = camkit.scale.read(tmp_path / "many")
    assert len(explanations) == 80
    assert explanations[0].heatmap.shape == (SIDE, SIDE)


@on_cluster
@pytest.mark.parametrize("kind", ["path", "bytes", "image"])
def test_pictures_come_as_paths_bytes_or_pixels(nodes, tmp_path, model, kind):
    import ray  # noqa: PLC0415

    files = write_pictures(tmp_path / "in", 12)
    paths = list(map(str, files))
    if kind == "image":
        dataset = ray.data.read_images(str(tmp_path / "in"), include_paths=True)
    else:
        data = {"bytes": [file.read_bytes() for file in files]} if kind == "bytes" else {}
        items = [dict(zip(["path", *data], row, strict=True)) for row in zip(paths, *data.values(), strict=True)]
        dataset = ray.data.from_items(items)
    rows = camkit.scale.explain_dataset(dataset, model, "0", target=[0, 3], batch_size=4)
    rows.write_parquet(str(tmp_path / "out"))
    list(
        explain_files(
            load_model(model), files, None, Drawing(), layers=["0"], targets=[0, 3], table=tmp_path / "one.parquet"
        )
    )
    assert_same(rows_of(tmp_path / "out"), rows_of(tmp_path / "one.parquet"))


@on_cluster
def test_a_model_comes_as_a_name_a_function_a_module_or_a_config(nodes, tmp_path, model):
    files = write_pictures(tmp_path / "in", 6)
    loaded = load_model(model)
    before = {name: value.clone() for name, value in loaded.module.state_dict().items()}
    module = LoadedModel(loaded.module[:4], "tiny", loaded.preprocess)  # type: ignore[index]
    results = []
    config = {"model": {"name": model}}
    for number, source in enumerate([model, _without_file(module), module, None]):
        options = {"config": config} if source is None else {}
        scaled(source, Pictures([tmp_path / "in"]), tmp_path / str(number), **options)
        results.append(rows_of(tmp_path / str(number)))
    assert len(results[0]) == len(files)
    for rows in results[1:]:
        assert_same(rows, results[0])
    assert all(torch.equal(value, before[name]) for name, value in loaded.module.state_dict().items())


def _without_file(loaded: LoadedModel) -> Callable[[], LoadedModel]:
    return lambda: loaded


@on_cluster
def test_bytes_without_a_name_are_named_by_their_checksum(nodes, tmp_path, model):
    import pyarrow as pa  # noqa: PLC0415

    files = write_pictures(tmp_path / "in", 5)
    pq.write_table(pa.table({"bytes": [*(file.read_bytes() for file in files), b"damaged"]}), tmp_path / "in.parquet")
    done = scaled(model, parquet_pictures(tmp_path / "in.parquet"), tmp_path / "out")
    assert (done.explained, done.failed) == (5, 1)
    rows = rows_of(tmp_path / "out")
    assert all(row["path"] == row["content"] for row in rows)
    assert [row["error"] for row in rows if row["status"] == "error"] == [
        next(f"{row['path']} is not a picture" for row in rows if row["status"] == "error")
    ]


@on_cluster
def test_a_table_does_not_replace_the_files_it_is_made_from(nodes, tmp_path, model):
    import pyarrow as pa  # noqa: PLC0415

    files = write_pictures(tmp_path / "pictures", 2)
    (tmp_path / "in").mkdir()
    part = tmp_path / "in" / "part-00000.parquet"  # a name that camkit gives to parts of its own tables
    pq.write_table(pa.table({"bytes": [file.read_bytes() for file in files]}), part)
    before = part.read_bytes()
    with pytest.raises(OutputError, match="is also an input"):
        scaled(model, parquet_pictures(part), tmp_path / "in", overwrite=True)
    assert part.read_bytes() == before


# --- interrupted jobs -------------------------------------------------------------------------------------------------


@on_cluster
def test_a_resumed_job_goes_by_content_and_not_by_order(nodes, tmp_path, model):
    files = write_pictures(tmp_path / "in", 20)
    first = tmp_path / "first"
    first.mkdir()
    for number in (3, 11, 17):
        files[number].rename(first / files[number].name)
    scaled(model, Pictures([tmp_path / "in"]), tmp_path / "out")
    for number in (3, 11, 17):
        (first / files[number].name).rename(files[number])
    changed = files[5].read_bytes()
    files[5].write_bytes(files[6].read_bytes())
    done = scaled(model, Pictures([tmp_path / "in"]), tmp_path / "out", resume=True)
    assert (done.explained, done.failed) == (4, 0)
    rows = rows_of(tmp_path / "out")
    assert [row["path"] for row in rows] == sorted([*map(str, files), str(files[5])])
    assert len({row["content"] for row in rows if row["path"] == str(files[5])}) == 2
    assert changed != files[5].read_bytes()
    assert scaled(model, Pictures([tmp_path / "in"]), tmp_path / "out", resume=True).explained == 0
    assert len(rows_of(tmp_path / "out")) == 21


@on_cluster
def test_a_truncated_part_is_set_aside_and_other_weights_are_refused(nodes, tmp_path, model, capsys):
    write_pictures(tmp_path / "in", 10)
    call = ["scale", str(tmp_path / "in"), "--layer", "0", "--actors", "1", "--out", str(tmp_path / "out"), "--resume"]
    assert main([*call, "--model", model]) == 0
    (part,) = (tmp_path / "out").glob("part-*.parquet")
    part.write_bytes(part.read_bytes()[:-40])
    capsys.readouterr()
    assert main([*call, "--model", model.replace(":make", ":other")]) == 2
    assert "cannot be continued: it was made with different settings (model and weights); choose another --out" in (
        capsys.readouterr().err
    )
    assert main([*call, "--model", model]) == 0
    assert "is damaged, so its pictures are explained again" in capsys.readouterr().err
    assert len(rows_of(tmp_path / "out")) == 10
    assert main([*call[:-1], "--model", model]) == 2
    assert "exists already; pass --resume" in capsys.readouterr().err


@on_cluster
def test_the_model_and_its_options_come_from_the_config_and_a_damaged_manifest_is_one_sentence(
    nodes, tmp_path, model, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    write_pictures(tmp_path / "in", 3)
    (tmp_path / "pyproject.toml").write_text(
        '[tool.camkit.model]\nname = "network.py:make"\n[tool.camkit.explain]\nlayer = "0"\nmethod = "layercam"\n'
    )
    call = ["scale", "in", "--config", "pyproject.toml", "--actors", "1", "--out", "out.csv", "--resume"]
    assert main(call) == 0
    assert {(row["method"], row["layer"]) for row in rows_of(tmp_path / "out.csv")} == {("layercam", "0")}
    manifest = tmp_path / "out.csv" / "_camkit.json"
    manifest.write_bytes(manifest.read_bytes()[:-20])
    write_pictures(tmp_path / "in" / "more", 2)
    assert main(call) == 0, "the parts say it too"
    assert len(rows_of(tmp_path / "out.csv")) == 5
    for part in (tmp_path / "out.csv").glob("part-*"):
        part.write_bytes(part.read_bytes()[:-20])
    capsys.readouterr()
    assert main(call) == 2
    said = capsys.readouterr().err
    assert f"the file that says how it was made, {manifest}, is missing or damaged; choose another name" in said
    assert "Traceback" not in said


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk of 256 KiB in memory, or skip where only an administrator may."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], check=False).returncode:
        pytest.skip("mounting a small disk needs the rights of an administrator")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


@on_cluster
def test_a_full_disk_and_an_unwritable_folder_are_one_sentence_and_nothing_is_lost(
    nodes, tmp_path, model, small_disk, capsys
):
    write_pictures(tmp_path / "in", 4)
    out = small_disk / "out"
    options = ["--model", model, "--layer", "0", "--actors", "1", "--out", str(out), "--resume"]
    call = ["scale", str(tmp_path / "in"), *options]
    assert main(call) == 0
    write_pictures(tmp_path / "in" / "more", 60)
    filler = small_disk / "filler"
    with pytest.raises(OSError, match="No space left"), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    capsys.readouterr()
    assert main(call) == 2
    said = capsys.readouterr().err
    assert f"cannot write {out}: No space left on device; its finished rows are kept, and --resume continues" in said
    assert "Traceback" not in said
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    assert main(call) == 2
    assert f"cannot write into the folder {out}: Read-only file system" in capsys.readouterr().err
    subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
    filler.unlink()
    assert main(call) == 0
    assert "60 explained, 0 failed, 0 empty" in capsys.readouterr().out
    rows = rows_of(out)
    assert len(rows) == len({row["path"] for row in rows}) == 64


@on_cluster
def test_a_job_that_is_killed_continues(nodes, tmp_path, model):
    write_pictures(tmp_path / "in", 2600)
    call = [sys.executable, "-m", "camkit", "scale", str(tmp_path / "in"), "--model", model, "--layer", "0"]
    call += ["--out", str(tmp_path / "out"), "--resume", "--address", nodes[0].address]
    with subprocess.Popen(call, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        until(lambda: any(map(is_complete, (tmp_path / "out").glob("part-*"))) or process.poll() is not None)
        assert process.poll() is None, "it ended before it could be killed"
        process.send_signal(signal.SIGKILL)
    done = subprocess.run(call, capture_output=True, text=True, check=True, timeout=600)
    explained, before = map(int, re.findall(r"(\d+) (?:explained|finished in an earlier run)", done.stdout))
    assert 1024 <= before < 2600
    assert explained + before == 2600
    rows = rows_of(tmp_path / "out")
    assert len(rows) == len({row["path"] for row in rows}) == 2600


def is_complete(part: Path) -> bool:
    try:
        return pq.read_metadata(part).num_rows > 0
    except (OSError, ArrowInvalid):
        return False


def until(happens: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT
    while not happens():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.05)


# --- the check --------------------------------------------------------------------------------------------------------

CHECKED = """
import itertools
import os
from pathlib import Path
from torch import nn
import camkit

FOLDER = Path(__file__).parent
PASSES = itertools.count()  # not in the module, whose state camkit restores after each pass


class Mortal(nn.Module):
    def forward(self, logits):
        is_slice = os.getpid() != int((FOLDER / "driver").read_text()) and len(logits) == 4
        if is_slice and (FOLDER / "passes").exists():
            import ray
            with (FOLDER / "passes" / ray.get_runtime_context().get_node_id()).open("a") as passes:
                passes.write(".")
        elif is_slice and next(PASSES) == 2:
            if (FOLDER / "fail").exists():
                raise ArithmeticError("the model divides by zero")
            if not (FOLDER / "died").exists():
                (FOLDER / "died").touch()
                os._exit(1)
        return logits


def make():
    loaded = camkit.load_model("demo-biased")
    return nn.Sequential(loaded.module, Mortal()).eval(), loaded.preprocess
"""


@pytest.fixture
def check_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command of a check of ten drawn scenes of each class, in the folder of the test."""
    monkeypatch.chdir(tmp_path)
    data = write_scenes(tmp_path, 10)
    (tmp_path / "network.py").write_text(CHECKED)
    (tmp_path / "driver").write_text(str(os.getpid()))
    (tmp_path / "labels").write_text("\n".join(load_model("demo-biased").labels or ()))
    options = ["--model", "network.py:make", "--labels", "labels", "--batch-size", "4", "--pastes", "1"]
    return ["check", data.name, *options, "--least-pictures", "10", "--quiet"]


@on_cluster
def test_a_check_on_a_cluster_is_that_of_one_process_also_if_a_worker_dies(nodes, tmp_path, check_call, capsys):
    call = check_call
    assert main([*call, "--out", "one"]) == 1
    (tmp_path / "fail").touch()
    assert main([*call, "--out", "many", "--ray"]) == 4
    assert "ArithmeticError: the model divides by zero" in capsys.readouterr().err
    assert (tmp_path / "many" / "unfinished.jsonl").read_bytes().count(b"\n") > 4
    (tmp_path / "fail").unlink()
    assert main([*call, "--out", "many", "--ray", "--resume"]) == 1

    assert (tmp_path / "died").exists(), "no worker died"
    assert_same_reports(tmp_path)


def assert_same_reports(folder: Path) -> None:
    """Compare the reports in the folders "one" and "many"."""
    one, many = (json.loads((folder / out / "report.json").read_text()) for out in ("one", "many"))
    assert one["images"]
    for report in (one, many):
        del report["checksum"]
    assert_close(many, one)


def assert_close(value: Any, expected: Any, where: str = "") -> None:
    """Compare what a report has: text exactly, numbers to the last digits."""
    if isinstance(expected, dict):
        assert list(value) == list(expected), where
        for name in expected:
            assert_close(value[name], expected[name], f"{where}.{name}")
    elif isinstance(expected, list):
        assert len(value) == len(expected), where
        for number, (item, other) in enumerate(zip(value, expected, strict=True)):
            assert_close(item, other, f"{where}[{number}]")
    elif isinstance(expected, float):
        assert value == pytest.approx(expected, abs=2e-3), where
    else:
        assert value == expected, where


# --- what is wrong ----------------------------------------------------------------------------------------------------


def test_without_ray_it_is_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["scale", str(tmp_path), "--model", "demo-fair", "--out", str(tmp_path / "out")]) == 2
    assert "needs Ray: pip install 'camkit[ray]'" in capsys.readouterr().err
    assert main(["check", str(tmp_path), "--model", "demo-fair", "--out", str(tmp_path / "out"), "--ray"]) == 2
    assert "needs Ray: pip install 'camkit[ray]'" in capsys.readouterr().err
    with pytest.raises(InputError, match="needs Ray"):
        camkit.scale.explain_dataset(None, "demo-fair")


@on_cluster
def test_an_address_at_which_nothing_answers_is_one_sentence(tmp_path, monkeypatch, capsys):
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'camkit[ray]'")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # whether or not the tests' cluster runs
    call = ["scale", str(tmp_path), "--model", "demo-fair", "--out", str(tmp_path / "out")]
    assert main([*call, "--address", "127.0.0.1:1"]) == 2
    assert "no Ray cluster answers at 127.0.0.1:1: Connection refused" in capsys.readouterr().err
    call = ["check", str(tmp_path), "--model", "demo-fair", "--out", str(tmp_path / "out"), "--ray"]
    assert main([*call, "127.0.0.1:1"]) == 2
    assert "no Ray cluster answers at 127.0.0.1:1: Connection refused" in capsys.readouterr().err
    assert main([*call, "photos/"]) == 2
    assert (
        "'photos/' is not the address of a Ray cluster; pass auto, host:port or ray://host:port"
        in capsys.readouterr().err
    )


@on_cluster
@pytest.mark.parametrize(
    ("options", "said", "code"),
    [
        (["--model", "{model}:make", "--out", "{file}"], "cannot write into the folder", 2),
        (["--model", "{model}:make", "--actors", "3", "--out", "{out}"], "2 cores and 0 GPUs, too few for 3 actors", 2),
        (["--model", "{model}:failing", "--out", "{out}"], "ArithmeticError: the model divides by zero", 4),
        (["--model", "{model}:uncertain", "--out", "{out}"], "has another weights than the machine that started", 2),
        (["--model", "nonet", "--out", "{out}"], "unknown model 'nonet'", 2),
    ],
    ids=["unwritable", "too many actors", "the model fails", "other weights on a node", "unknown model"],
)
def test_what_is_wrong_is_one_sentence(nodes, tmp_path, model, capsys, options, said, code):
    write_pictures(tmp_path / "in", 6)
    (tmp_path / "file").write_text("a file")
    places = {"model": model.removesuffix(":make"), "file": tmp_path / "file", "out": tmp_path / "out"}
    call = [option.format(**places) for option in options]
    assert main(["scale", str(tmp_path / "in"), "--layer", "0", *call]) == code
    message = capsys.readouterr().err
    assert said in message
    assert "Traceback" not in message


@on_cluster
@pytest.mark.parametrize("damage", ["truncated", "columns"])
def test_a_damaged_list_of_pictures_is_one_sentence(nodes, tmp_path, model, capsys, damage):
    import pyarrow as pa  # noqa: PLC0415

    file = tmp_path / "in.parquet"
    pq.write_table(pa.table({"path" if damage == "truncated" else "name": ["a.png"]}), file)
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-20])
    assert main(["scale", str(file), "--model", model, "--layer", "0", "--out", str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert f"{file} {'cannot be read' if damage == 'truncated' else 'has the columns name'}" in message
    assert "Traceback" not in message


# --- a node dies ------------------------------------------------------------------------------------------------------


def kill_at_work(cluster: Any, node: Any, passes: Path) -> threading.Event:
    """Kill a node as soon as it has written three passes into a file; the event says that it happened."""
    killed = threading.Event()

    def kill() -> None:
        until(lambda: passes.exists() and passes.stat().st_size >= 3)
        cluster.remove_node(node, allow_graceful=False)
        killed.set()

    threading.Thread(target=kill, daemon=True).start()
    return killed


@on_cluster
def test_a_node_that_dies_in_a_check_costs_only_its_slices(nodes, tmp_path, check_call):
    cluster = nodes[0]
    victim = cluster.add_node(num_cpus=1, object_store_memory=MEMORY)
    cluster.wait_for_nodes()
    assert main([*check_call, "--out", "one"]) == 1
    (tmp_path / "passes").mkdir()
    killed = kill_at_work(cluster, victim, tmp_path / "passes" / victim.node_id)
    assert main([*check_call, "--out", "many", "--ray"]) == 1
    assert killed.is_set(), "the node ran until the end"
    assert_same_reports(tmp_path)


@on_cluster
def test_a_node_that_dies_costs_only_its_blocks(nodes, tmp_path, model):
    files = write_pictures(tmp_path / "in", 360)
    cluster = nodes[0]
    victim = cluster.add_node(num_cpus=1, object_store_memory=MEMORY)
    cluster.wait_for_nodes()
    job = prepared_job(model.replace(":make", ":slow"), "0", batch_size=4, target=[0, 3])
    killed = kill_at_work(cluster, victim, tmp_path / "passes" / victim.node_id)
    done = explain_on_cluster(job, Pictures([tmp_path / "in"]), tmp_path / "out", Pool.of_cluster(3, 1.0, None))
    assert killed.is_set(), "the node ran until the end"
    assert (done.explained, done.failed) == (360, 0)
    targets, table = [0, 3], tmp_path / "one.parquet"
    list(explain_files(load_model(model), files, None, Drawing(), layers=["0"], targets=targets, table=table))
    assert_same(rows_of(tmp_path / "out"), rows_of(table))
