"""Explaining on a cluster: rows as on one machine, lost nodes, interrupted jobs, and what can be wrong."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import run_folder, write_pictures

import camkit
from camkit.cli import main
from camkit.errors import InputError
from camkit.models import LoadedModel, load_model

pq = pytest.importorskip("pyarrow.parquet")

LOOPBACK = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # without it, Ray listens on all interfaces
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
}
MEMORY = 200 * 2**20
"""Bytes of a node's object store."""
SIDE = 16
SOON = {"health_check_period_ms": 500, "health_check_initial_delay_ms": 0, "worker_niceness": 0}
"""How often Ray asks nodes whether they live: by default, it notices after about 30 seconds that one died. Workers get
as much of the processor as other tests, where Ray lets them wait for all else."""
WAIT = 240.0
"""Seconds after which something that should happen counts as missing."""

NETWORK = f"""
import os
import time
from pathlib import Path
import ray
import torch
from torch import nn
from torchvision.transforms._presets import ImageClassification

FOLDER = Path(__file__).parent


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


def deadly():
    model, preprocess = make()
    model.register_forward_pre_hook(die)
    return model, preprocess


def die(module, pictures):
    if os.getpid() != int((FOLDER / "driver").read_text()):
        os._exit(1)


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

        given = {"object_store_memory": MEMORY, "include_dashboard": False, "_system_config": SOON}
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
    (tmp_path / "driver").write_text(str(os.getpid()))
    return f"{tmp_path / 'network.py'}:make"


def rows_of(table: Path) -> list[dict[str, Any]]:
    """Return the rows of a table in the order of the pictures and targets."""
    rows = pq.read_table(table).to_pylist()
    return sorted(rows, key=lambda row: (row["path"], row["target"] if row["target"] is not None else -1))


def assert_same(rows: list[dict[str, Any]], others: list[dict[str, Any]], *, but: tuple[str, ...] = ()) -> None:
    """Compare rows: text exactly, numbers to the last digits, which depend on what shares a pass."""
    assert len(rows) == len(others)
    for row, other in zip(rows, others, strict=True):
        assert row.keys() == other.keys()
        for name in row.keys() - {"drawing", *but}:
            if isinstance(other[name], (float, list)):
                assert row[name] == pytest.approx(other[name], rel=1e-2, abs=1e-3), name
            else:
                assert row[name] == other[name], name


def explained(dataset_of: Callable[[Any], Any], model: Any, out: Path, **options: Any) -> list[dict[str, Any]]:
    """Return the rows of the dataset that ``dataset_of`` makes with ``ray.data``."""
    import ray  # noqa: PLC0415 - it reads the environment

    camkit.scale.explain_dataset(dataset_of(ray.data), model, batch_size=4, **options).write_parquet(str(out))
    return rows_of(out)


def rows_here(model: LoadedModel, files: list[Path], table: Path, **options: Any) -> list[dict[str, Any]]:
    """Return the rows of the same pictures on one machine."""
    list(run_folder(model, files, None, table=table, **options))
    return rows_of(table)


@on_cluster
def test_a_cluster_writes_the_rows_of_one_machine(nodes, tmp_path, model, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_pictures(tmp_path / "in", 40)
    (tmp_path / "in" / "broken.jpg").write_bytes(b"no picture")
    options = ["in", "--model", "network.py:make", "--layer", "0", "--top-k", "2", "--batch-size", "4"]
    assert main([*options, "--table", "one.parquet", "--no-pictures", "--quiet"]) == 2
    capsys.readouterr()
    assert main([*options, "--table", "many.parquet", "--out", "drawn", "--ray"]) == 2
    said = capsys.readouterr()
    assert "40 explained, 1 failed, 0 empty" in said.out
    assert "broken.jpg is not a picture" in said.err
    rows = pq.read_table("many.parquet").to_pylist()
    assert [row["path"] for row in rows] == [row["path"] for row in pq.read_table("one.parquet").to_pylist()]
    assert_same(rows_of(Path("many.parquet")), rows_of(Path("one.parquet")))
    assert len(rows) == 81
    assert all(Path(row["drawing"]).is_file() for row in rows if row["status"] == "ok")


@on_cluster
def test_pictures_come_as_pixels_and_the_model_from_a_function(nodes, tmp_path, model):
    files, targets = write_pictures(tmp_path / "in", 6), [0, 3]
    loaded = load_model(model)
    before = {name: value.clone() for name, value in loaded.module.state_dict().items()}
    pixels = lambda data: data.read_images(str(tmp_path / "in"), include_paths=True)  # noqa: E731
    rows = explained(pixels, _returns(loaded), tmp_path / "out", target=targets, target_layer="0")
    assert_same(rows, rows_here(loaded, files, tmp_path / "one.parquet", target=targets, layer=["0"]))
    assert all(torch.equal(value, before[name]) for name, value in loaded.module.state_dict().items())


def _returns(loaded: LoadedModel) -> Callable[[], LoadedModel]:
    """Return a function that knows nothing of this file, which no other process can import."""
    part = LoadedModel(loaded.module[:], "tiny", loaded.preprocess)  # type: ignore[index]
    return lambda: part


@on_cluster
def test_a_black_box_is_explained_as_on_one_machine(nodes, tmp_path, model):
    files = write_pictures(tmp_path / "in", 6)
    loaded = load_model(model)
    part, preprocess = loaded.module, loaded.preprocess
    source = camkit.black_box(lambda pictures: part(pictures).detach().numpy(), preprocess=preprocess)
    method = camkit.methods.variant("occlusion", window=4, stride=4)
    named = lambda data: data.from_items([{"path": str(file)} for file in files])  # noqa: E731
    rows = explained(named, source, tmp_path / "many", method=method, preprocess=preprocess)
    assert [row["status"] for row in rows] == ["ok"] * len(files)
    assert_same(rows, rows_here(loaded, files, tmp_path / "one.parquet", method=method))


@on_cluster
def test_bytes_without_a_name_are_named_by_their_checksum(nodes, tmp_path, model):
    files = write_pictures(tmp_path / "in", 5)
    data = [{"bytes": item} for item in [*(file.read_bytes() for file in files), b"damaged"]]
    rows = explained(lambda source: source.from_items(data), model, tmp_path / "out", target_layer="0")
    assert len({row["path"] for row in rows}) == 6
    (failed,) = (row for row in rows if row["status"] == "error")
    assert failed["error"] == f"{failed['path']} is not a picture"
    here = rows_here(load_model(model), files, tmp_path / "one.parquet", layer=["0"])
    read = sorted((row for row in rows if row["status"] == "ok"), key=lambda row: row["score"])
    assert_same(read, sorted(here, key=lambda row: row["score"]), but=("path",))


@on_cluster
def test_a_resumed_run_explains_the_rest_with_or_without_a_cluster(nodes, tmp_path, model, capsys):
    write_pictures(tmp_path / "in", 12)
    call = [str(tmp_path / "in"), "--layer", "0", "--table", str(tmp_path / "t.parquet"), "--no-pictures", "--resume"]
    assert main([*call, "--model", model, "--ray"]) == 0
    write_pictures(tmp_path / "in" / "more", 3)
    capsys.readouterr()
    assert main([*call, "--model", model.replace(":make", ":other"), "--ray"]) == 2
    assert "cannot be continued: it was made with different settings (model and weights)" in capsys.readouterr().err
    assert main([*call, "--model", model]) == 0
    assert "3 explained, 0 failed, 0 empty" in capsys.readouterr().out
    assert len({row["path"] for row in rows_of(tmp_path / "t.parquet")}) == 15


FINISHED = 12
"""How many pictures, three pieces, come before the one at which the model divides by zero."""
CHECKED = f"""
import itertools
import os
from pathlib import Path
import torch
from PIL import Image
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
        elif is_slice and next(PASSES) == 2 and not (FOLDER / "fail").exists() and not (FOLDER / "died").exists():
            (FOLDER / "died").touch()
            os._exit(1)
        return logits


def make():
    loaded = camkit.load_model("demo-biased")
    model = nn.Sequential(loaded.module, Mortal()).eval()
    if (FOLDER / "fail").exists():
        file = sorted((FOLDER / "pictures").rglob("*.jpg"))[{FINISHED}]
        fatal = loaded.preprocess(Image.open(file))

        def fail(module, pictures):
            if any(torch.equal(picture, fatal) for picture in pictures[0]):
                raise ArithmeticError("the model divides by zero")

        model.register_forward_pre_hook(fail)
    return model, loaded.preprocess
"""


@pytest.fixture
def check_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command of a check of five drawn scenes of each class, in the folder of the test."""
    monkeypatch.chdir(tmp_path)
    data = camkit.scenes.write_scenes(tmp_path, 5)
    (tmp_path / "network.py").write_text(CHECKED)
    (tmp_path / "driver").write_text(str(os.getpid()))
    (tmp_path / "labels").write_text("\n".join(load_model("demo-biased").labels or ()))
    options = ["--model", "network.py:make", "--labels", "labels", "--batch-size", "4", "--pastes", "1"]
    return ["check", data.name, *options, "--quiet"]


@on_cluster
def test_a_check_on_a_cluster_is_that_of_one_process_also_if_a_worker_dies(nodes, tmp_path, check_call, capsys):
    call = check_call
    assert main([*call, "--out", "one"]) == 3  # so few pictures are inconclusive
    (tmp_path / "fail").touch()
    assert main([*call, "--out", "many", "--ray"]) == 4
    assert "ArithmeticError: the model divides by zero" in capsys.readouterr().err
    assert (tmp_path / "many" / "unfinished.jsonl").read_bytes().count(b"\n") == 1 + FINISHED
    (tmp_path / "fail").unlink()
    assert main([*call, "--out", "many", "--ray", "--resume"]) == 3
    assert (tmp_path / "died").exists(), "no worker died"
    (one, numbers), (many, others) = (read_report(tmp_path / out / "report.json") for out in ("one", "many"))
    assert one["images"]
    assert json.dumps(many) == json.dumps(one)
    assert others == pytest.approx(numbers, abs=2e-3)


def read_report(file: Path) -> tuple[dict[str, Any], list[float]]:
    """Return a report and, apart from it, its fractions: their last digits depend on what shares a pass."""
    numbers: list[float] = []
    report = json.loads(file.read_text(), parse_float=lambda text: numbers.append(float(text)) or "a fraction")
    del report["checksum"]
    return report, numbers


def test_without_ray_it_is_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray.data", None)
    for command in ([], ["check"]):
        call = [*command, str(tmp_path), "--model", "demo-fair", "--out", str(tmp_path / "out"), "--ray"]
        assert main(call) == 2
        assert "needs Ray: pip install 'camkit[ray]'" in capsys.readouterr().err
    with pytest.raises(InputError, match="needs Ray"):
        camkit.scale.explain_dataset(None, "demo-fair")


@on_cluster
def test_an_address_at_which_nothing_answers_is_one_sentence(tmp_path, monkeypatch, capsys):
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'camkit[ray]'")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # whether or not the tests' cluster runs
    for command in ([], ["check"]):
        call = [*command, str(tmp_path), "--model", "demo-fair", "--out", str(tmp_path / "out"), "--ray"]
        assert main([*call, "127.0.0.1:1"]) == 2
        assert "no Ray cluster answers at 127.0.0.1:1: Connection refused" in capsys.readouterr().err
        assert main([*call, "photos/"]) == 2
        assert (
            "'photos/' is not the address of a Ray cluster; pass auto, host:port or ray://host:port"
            in capsys.readouterr().err
        )


@on_cluster
@pytest.mark.parametrize(
    ("factory", "said", "code"),
    [("deadly", "a worker died 4 times", 4), ("uncertain", "has another weights than the machine that started", 2)],
)
def test_what_is_wrong_is_one_sentence(nodes, tmp_path, model, capsys, factory, said, code):
    write_pictures(tmp_path / "in", 1)  # one actor, since every death of one takes seconds
    call = [str(tmp_path / "in"), "--layer", "0", "--table", str(tmp_path / "t.parquet"), "--no-pictures", "--ray"]
    assert main([*call, "--model", model.replace(":make", f":{factory}")]) == code
    message = capsys.readouterr().err
    assert said in message
    assert "Traceback" not in message


@on_cluster
def test_actors_that_do_not_fit_and_options_of_one_machine_are_refused(nodes, model):
    with pytest.raises(InputError, match="2 cores and 0 GPUs, too few for 3 actors"):
        camkit.scale.explain_dataset(None, model, actors=3)
    with pytest.raises(InputError, match="a cluster takes no progress"):
        camkit.scale.explain_dataset(None, model, progress=print)


def kill_at_work(cluster: Any, node: Any, passes: Path) -> threading.Event:
    """Kill a node as soon as it has written three passes into a file; the event says that it happened."""
    killed = threading.Event()

    def kill() -> None:
        deadline = time.monotonic() + WAIT
        while not passes.exists() or passes.stat().st_size < 3:
            assert time.monotonic() < deadline, "it never happened"
            time.sleep(0.05)
        cluster.remove_node(node, allow_graceful=False)
        killed.set()

    threading.Thread(target=kill, daemon=True).start()
    return killed


@on_cluster
def test_a_node_that_dies_costs_only_its_pieces(nodes, tmp_path, model, capsys):
    write_pictures(tmp_path / "in", 200)
    cluster = nodes[0]
    victim = cluster.add_node(num_cpus=1, object_store_memory=MEMORY)
    cluster.wait_for_nodes()
    killed = kill_at_work(cluster, victim, tmp_path / "passes" / victim.node_id)
    call = [str(tmp_path / "in"), "--layer", "0", "--target", "0", "--target", "3", "--batch-size", "4"]
    call += ["--no-pictures", "--model"]
    slow = model.replace(":make", ":slow")
    assert main([*call, slow, "--table", str(tmp_path / "many.parquet"), "--ray"]) == 0
    assert killed.is_set(), "the node ran until the end"
    assert "200 explained, 0 failed" in capsys.readouterr().out
    assert main([*call, model, "--table", str(tmp_path / "one.parquet")]) == 0
    assert_same(rows_of(tmp_path / "many.parquet"), rows_of(tmp_path / "one.parquet"))
