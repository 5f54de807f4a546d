"""Events of trainings, commands and results, read back with TensorBoard's own reader."""

import copy
import csv
import gc
import io
import math
import re
import shutil
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from disks import files_of_at_most
from networks import classifier
from offline_runs import history, wandb_records
from PIL import Image
from torch import nn

import camkit
from camkit.cli import main
from camkit.errors import InputError, OutputError
from camkit.tensorboard import TrainingWatch, contact_sheet, lightning_watch, write_diagnosis, write_explanation

pytestmark = pytest.mark.extended

pytest.importorskip("tensorboard.backend")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(8, 12, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 3),
    )  # fmt: skip


def batch():
    random = torch.Generator().manual_seed(1)
    return torch.randn(10, 3, 24, 24, generator=random), torch.randint(0, 3, (10,), generator=random)


def train(net, steps, watch=None, after=None):
    inputs, labels = batch()
    optimiser = torch.optim.SGD(net.parameters(), 0.1)
    for number in range(1, steps + 1):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(inputs), labels).backward()
        if after is not None:
            after(number, net)
        optimiser.step()
        if watch is not None:
            watch.step()


def watched_steps(folder, net, steps=1, pictures=2, **options):
    """Return the events of a training that is watched."""
    with TrainingWatch(net, batch()[0][:pictures], folder, **options) as watch:
        train(net, steps, watch)
    return read(folder)


def read(folder):
    found = EventAccumulator(str(folder), {"histograms": 0, "images": 0, "scalars": 0, "tensors": 0})
    found.Reload()
    return found


def pictures_in(events, tag="heat"):
    return [np.asarray(Image.open(io.BytesIO(one.encoded_image_string))) for one in events.Images(tag)]


def steps_of(events):
    return [one.step for one in events]


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """Train for seven steps, record every third, and note what the events should contain."""
    folder = tmp_path_factory.mktemp("events")
    net, noted = network().train(), {}
    with torch.no_grad():
        net[4].weight[:3] = 0
        net[4].bias[:3] = -4  # three of twelve channels are always zero

    def note(number, net):
        squares = {name: float(one.grad.double().square().sum()) for name, one in net.named_parameters()}
        hooked = bool(net[0]._forward_hooks)
        noted[number] = {"squares": squares, "first": net[0].weight.grad.clone(), "hooked": hooked}

    with TrainingWatch(net, batch()[0][:5], folder, every=3) as watch:
        train(net, 7, watch, note)
    return read(folder), noted, net


def test_the_first_and_every_nth_step_are_recorded_with_the_tags_of_the_guide(watched):
    events, noted, _ = watched
    tags = events.Tags()

    assert tags["graph"]
    for tag in ("gradient_norm", "dead_share/2"):
        assert steps_of(events.Scalars(tag)) == [1, 4, 7]
    for tag in ("heat", "features/5"):
        assert steps_of(events.Images(tag)) == [1, 4, 7]
    assert steps_of(events.Histograms("activations/0")) == [1, 4, 7]
    assert [step for step, each in noted.items() if each["hooked"]] == [1, 4, 7]
    assert [each.value for each in events.Scalars("dead_share/5")] == pytest.approx([3 / 12] * 3)
    guide = (Path(__file__).parents[2] / "docs/diagnose.md").read_text("utf-8").partition("## Watch a training\n")[2]
    written = [*tags["histograms"], *tags["images"], *tags["scalars"], "nonfinite/"]
    for tag in re.findall(r"`([^`]+)`", " ".join(re.findall(r"^\| (`.*?) \|", guide, re.MULTILINE))):
        stem = tag.replace("LAYER", "").replace("NAME", "").replace("...", "")
        assert any(one.startswith(stem) for one in written), tag


def test_gradient_norms_are_those_of_the_parameters(watched):
    events, noted, _ = watched

    for found in events.Scalars("gradient_norm"):
        assert found.value == pytest.approx(math.sqrt(sum(noted[found.step]["squares"].values())), rel=1e-5)
    for found in events.Scalars("gradient_norm/4"):
        squares = noted[found.step]["squares"]
        assert found.value == pytest.approx(math.sqrt(squares["4.weight"] + squares["4.bias"]), rel=1e-5)


def test_histograms_hold_the_values(watched):
    events, noted, net = watched

    for found in events.Histograms("weight_gradients/0.weight"):
        values = noted[found.step]["first"].double().numpy().ravel()
        told = found.histogram_value
        counts, _ = np.histogram(values, bins=[told.min, *told.bucket_limit])
        assert (told.num, told.min, told.max) == (values.size, pytest.approx(values.min()), pytest.approx(values.max()))
        assert told.sum == pytest.approx(values.sum(), rel=1e-4, abs=1e-6)
        assert told.sum_squares == pytest.approx(np.square(values).sum(), rel=1e-4)
        assert np.abs(np.array(told.bucket) - counts).sum() <= 2  # a value at the edge of two bins
    last = events.Histograms("weights/8.bias")[-1].histogram_value
    assert last.sum == pytest.approx(float(net[8].bias.detach().sum()), abs=1e-6)


def test_activations_and_their_gradients_are_those_of_the_step(tmp_path):
    inputs, labels = batch()
    plain = network().train()
    maps = plain[0](inputs)
    hidden = plain[1:5](maps.clone())
    hidden.retain_grad()
    nn.functional.cross_entropy(plain[5:](hidden.clone()), labels).backward()
    events = watched_steps(tmp_path, network().train(), every=5, pictures_every=0)

    for tag, values in (("activations/0", maps.detach()), ("gradients/4", hidden.grad)):
        told = events.Histograms(tag)[0].histogram_value
        assert told.num == values.numel()
        assert told.sum_squares == pytest.approx(float(values.double().square().sum()), rel=1e-4)


def two_grids():
    return classifier(nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 4, 3, 2, 1), nn.ReLU(), classes=3)


def transformer():
    sizes = {"image_size": 24, "patch_size": 8, "hidden_dim": 16, "mlp_dim": 16}
    net = torchvision.models.VisionTransformer(**sizes, num_layers=2, num_heads=2, num_classes=3)
    nn.init.normal_(net.heads[0].weight)
    return net


@pytest.mark.parametrize(
    ("make", "layer", "drawn"), [(two_grids, "1+3", ["heat", "features/3"]), (transformer, "whole model", ["heat"])]
)
def test_the_maps_of_the_deepest_layer_are_drawn_if_the_heat_reads_a_layer(tmp_path, make, layer, drawn):
    torch.manual_seed(0)
    net = make()
    assert camkit.explain(net, batch()[0][0]).layer == layer
    assert watched_steps(tmp_path, net).Tags()["images"] == drawn


def test_pictures_have_their_class_and_what_changed_since_the_last_ones(tmp_path, monkeypatch):
    net = classifier(nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(), classes=2)
    nn.init.constant_(net[4].weight, 0.1)
    given, sheets = [], []

    def mean_gradient(activations, gradients):
        given.append(activations.shape)
        return gradients.mean((2, 3), keepdim=True)

    def noted(tiles, title):
        sheets.append((title, tiles))
        return contact_sheet(tiles, title=title)

    monkeypatch.setattr("camkit.tensorboard.contact_sheet", noted)
    pictures, options = batch()[0][:2], {"labels": ["cat", "dog"], "method": mean_gradient}
    with TrainingWatch(net, pictures, tmp_path, pictures_every=0, graph=False, **options) as watch:
        for step, best in ((10, 0), (20, 0), (30, 1)):
            with torch.no_grad():
                net[4].bias.copy_(3 * nn.functional.one_hot(torch.tensor(best), 2))
            watch.pictures(step)
    assert given, "a function of the user's weights the heat"
    assert [title for title, _ in sheets] == ["step 10", "step 20", "step 30: 2 of 2 changed since step 20"]
    notes = [{tile.note for tile in tiles} for _, tiles in sheets]
    assert notes == [{""}, {""}, {"was cat at step 20"}]
    for tile, one in zip(sheets[2][1], camkit.explain(net, pictures, spread="even", **options), strict=True):
        assert np.array_equal(tile.pixels, one.overlay())
        assert tile.line == f"dog {one.probability:.1%}"
    events = read(tmp_path)
    assert np.array_equal(pictures_in(events)[2], contact_sheet(sheets[2][1], title=sheets[2][0]))
    maps = camkit.feature_maps(net, pictures[0], "1", top=16)
    assert np.array_equal(pictures_in(events, "features/1")[2], maps.sheet())


def test_watching_does_not_change_the_training(tmp_path):
    plain, other = network().train(), network().train()
    train(plain, 4)
    watched_steps(tmp_path, other, 4, every=2)

    assert other.training
    for (name, one), two in zip(plain.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(one, two), name


@pytest.mark.parametrize("ends", ["closed", "raised", "forgotten"])
def test_no_hook_is_left(tmp_path, ends):
    net = network()
    if ends == "raised":
        with pytest.raises(KeyboardInterrupt), TrainingWatch(net, batch()[0][:2], tmp_path):
            net(batch()[0])
            raise KeyboardInterrupt
    else:
        watch = TrainingWatch(net, batch()[0][:2], tmp_path, every=1)
        train(net, 2, watch)
        if ends == "closed":
            watch.close()
        del watch
    gc.collect()

    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())
    assert not any(one._post_accumulate_grad_hooks for one in net.parameters())
    gone = weakref.ref(net)
    del net
    gc.collect()
    assert gone() is None


def test_pictures_on_request_also_within_a_step_and_steps_with_given_numbers(tmp_path):
    net, (inputs, labels) = network(), batch()
    with TrainingWatch(net, inputs[:2], tmp_path, every=2, pictures_every=0) as watch:
        for number in (100, 200, 300):
            loss = nn.functional.cross_entropy(net(inputs), labels)
            watch.pictures(number + 50)
            loss.backward()
            watch.step(number)
    events = read(tmp_path)

    assert steps_of(events.Scalars("gradient_norm")) == [100, 300]
    assert steps_of(events.Histograms("gradients/4")) == [100, 300]
    assert [tag for tag in events.Tags()["histograms"] if "#" in tag] == []
    assert steps_of(events.Images("heat")) == [150, 250, 350]


def test_a_network_whose_heat_cannot_be_drawn_is_still_watched(tmp_path):
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 24 * 24, 3))  # has no grid of cells
    with pytest.warns(UserWarning, match="goes on") as told:
        events = watched_steps(tmp_path, net, 2, every=1)

    assert len(told) == 1
    assert events.Scalars("gradient_norm")
    assert any(tag.startswith("heat") for tag in events.Tags()["tensors"])
    assert "heat" not in events.Tags()["images"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"every": 0}, "must be at least 1 step"),
        ({"pictures_every": -1}, "must be at least 1 step"),
        ({"images": []}, "at least one picture"),
        ({"images": torch.zeros(0, 3, 8, 8)}, "at least one picture"),
        ({"method": "gradcan"}, "gradcam"),
        ({"layers": "nope"}, "no layer"),
        ({"target_layer": "nope"}, "nope"),
        ({"target": "wolf", "labels": ["cat", "dog", "bird"]}, "wolf"),
        ({"target": 1.5}, "target must be None"),
        ({"images": "nofile.png"}, "nofile.png"),
        ({"writer": print}, "SummaryWriter"),
        ({"images": camkit.scenes.scene_paths()["plane-sky"]}, "preprocess"),
    ],
)
def test_a_wrong_argument_is_one_sentence_before_the_training(tmp_path, wrong, said):
    with pytest.raises(InputError, match=said):
        TrainingWatch(network(), **{"images": batch()[0], "writer": tmp_path, **wrong})
    assert not list(tmp_path.iterdir())


def test_a_parameter_that_two_layers_share_is_written_under_both_names(tmp_path):
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
    net[1].weight = net[0].weight
    with TrainingWatch(net, torch.zeros(1, 2), tmp_path, pictures_every=0, graph=False) as watch:
        net(torch.ones(3, 2)).square().sum().backward()
        watch.step()
    events = read(tmp_path)

    norms = [each.weight.grad.norm().item() for each in net]
    for number, norm in enumerate(norms):
        assert events.Scalars(f"gradient_norm/{number}")[0].value == pytest.approx(norm, rel=1e-5)
        assert len(events.Histograms(f"weights/{number}.weight")) == 1
    assert events.Scalars("gradient_norm")[0].value == pytest.approx(math.hypot(norms[0], norms[2]), rel=1e-5)


def test_lazy_layers(tmp_path):
    net = nn.Sequential(nn.LazyConv2d(4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LazyLinear(3))
    with TrainingWatch(net, batch()[0][:2], tmp_path, every=1, pictures_every=0) as watch:
        net(batch()[0])  # lazy layers are initialised here and have no gradients before
        watch.step()
        train(net, 2, watch)
        watch.pictures(3)
    events = read(tmp_path)

    assert steps_of(events.Scalars("gradient_norm/0")) == [2, 3]
    assert steps_of(events.Histograms("weights/4.weight")) == [1, 2, 3]
    assert steps_of(events.Images("heat")) == [3]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's thread ends so
def test_a_training_goes_on_if_no_events_can_be_written(tmp_path):
    net = network()
    watch = TrainingWatch(net, batch()[0][:2], tmp_path, every=2, graph=False)
    with files_of_at_most(20_000), pytest.warns(match="cannot write events into .*File too large") as warned:
        train(net, 12, watch)
        watch.close()

    assert watch.steps == 12
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in net.modules())
    assert sum("the training goes on unwatched" in str(each.message) for each in warned) == 1


def test_a_closed_watch_takes_no_steps(tmp_path):
    net = network()
    watch = TrainingWatch(net, batch()[0], tmp_path, every=1)
    watch.close()
    watch.close()
    train(net, 2, watch)
    watch.pictures()
    assert len(list(tmp_path.iterdir())) == 1
    assert read(tmp_path).Tags()["images"] == []


def test_a_model_is_saved_and_copied_while_it_is_watched(tmp_path):
    net = network().train()
    with TrainingWatch(net, batch()[0][:2], tmp_path, every=1, pictures_every=0) as watch:
        train(net, 1, watch)
        torch.save(net, tmp_path / "waiting.pt")
        waiting = copy.deepcopy(net)
        net(batch()[0])  # a step has begun
        torch.save(net, tmp_path / "running.pt")
        running = copy.deepcopy(net)
        before = list(watch._recorded.by_name())
        for one in (waiting, running, *(torch.load(file, weights_only=False) for file in tmp_path.glob("*.pt"))):
            one(batch()[0])
        assert list(watch._recorded.by_name()) == before  # the hooks of copies do nothing
    alone = (
        "import sys; sys.modules['camkit'] = None; import torch\n"
        "for file in sys.argv[1:]:\n"
        "    torch.load(file, weights_only=False)(torch.zeros(2, 3, 24, 24))\n"
    )  # also without camkit installed
    files = sorted(tmp_path.glob("*.pt"))
    assert len(files) == 2
    subprocess.run([sys.executable, "-c", alone, *files], check=True)


def test_gradients_are_written_without_the_scale_of_mixed_precision(tmp_path):
    plain, scaled = network().train(), network().train()
    inputs, labels = batch()
    one = watched_steps(tmp_path / "plain", plain, pictures_every=0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with TrainingWatch(scaled, inputs[:2], tmp_path / "scaled", pictures_every=0, scaler=scaler) as watch:
        optimiser = torch.optim.SGD(scaled.parameters(), 0.1)
        scaler.scale(nn.functional.cross_entropy(scaled(inputs), labels)).backward()
        scaler.step(optimiser)
        scaler.update(5.0)
        watch.step()
    other = read(tmp_path / "scaled")

    for tag in ("gradient_norm", "gradient_norm/4"):
        assert other.Scalars(tag)[0].value == pytest.approx(one.Scalars(tag)[0].value, rel=1e-4)
    for tag in ("gradients/4", "weight_gradients/0.weight"):
        first, second = (events.Histograms(tag)[0].histogram_value for events in (one, other))
        assert (second.min, second.max) == (pytest.approx(first.min, rel=1e-4), pytest.approx(first.max, rel=1e-4))


def test_infinity_is_not_hidden(tmp_path):
    net = network().train()
    net[4].weight.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([0]), math.inf))
    events = watched_steps(tmp_path, net, pictures_every=0)

    assert events.Scalars("gradient_norm/4")[0].value == events.Scalars("gradient_norm")[0].value == math.inf
    assert math.isfinite(events.Scalars("gradient_norm/0")[0].value)
    assert events.Scalars("nonfinite/weight_gradients/4.weight")[0].value == 8 * 9


def test_the_last_of_several_forward_passes_is_recorded_and_no_validation(tmp_path):
    net, (inputs, labels) = network().train(), batch()

    def validate():
        net.eval()
        net(inputs)
        camkit.explain(net, inputs[:2])  # differentiates, in evaluation mode
        net.train()

    with TrainingWatch(net, inputs[:2], tmp_path, pictures_every=0, graph=False) as watch:
        validate()
        for part in (slice(0, 7), slice(7, 10)):
            nn.functional.cross_entropy(net(inputs[part]), labels[part]).backward()
        validate()
        watch.step()
    events = read(tmp_path)

    assert [tag for tag in events.Tags()["histograms"] if "#" in tag] == []
    assert events.Histograms("activations/0")[0].histogram_value.num == 3 * 8 * 24 * 24
    assert events.Histograms("gradients/0")[0].histogram_value.num == 3 * 8 * 24 * 24
    whole = math.sqrt(sum(float(one.grad.double().square().sum()) for one in net.parameters()))
    assert events.Scalars("gradient_norm")[0].value == pytest.approx(whole, rel=1e-5)


def test_a_compiled_model_is_watched_under_its_own_names(tmp_path):
    compiled = torch.compile(network().train(), backend="eager")
    compiled(batch()[0])  # code compiled before has no hooks
    events = watched_steps(tmp_path, compiled, 3, every=2, graph=False)

    assert steps_of(events.Histograms("gradients/4")) == [1, 3]
    assert steps_of(events.Scalars("gradient_norm/8")) == [1, 3]


@pytest.mark.filterwarnings("ignore")  # Lightning's own warnings with the newest PyTorch
@pytest.mark.parametrize("logs", ["tensorboard", "csv", "mlflow", "wandb"])
def test_the_callback_of_lightning_watches_a_training(tmp_path, monkeypatch, logs):
    lightning = pytest.importorskip("lightning.pytorch")
    getattr(pytest.importorskip(logs), "teardown", int)()  # W&B reads its settings again
    for name in ("WANDB_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    loggers = {
        "tensorboard": lambda of: False,
        "csv": lambda of: of.CSVLogger(tmp_path),
        "mlflow": lambda of: of.MLFlowLogger(tracking_uri=(tmp_path / "mlruns").as_uri()),
        "wandb": lambda of: of.WandbLogger(save_dir=tmp_path, offline=True),
    }
    logger = loggers[logs](lightning.loggers)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch()), batch_size=5)

    class Learner(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = network()

        def forward(self, inputs):
            return self.net(inputs)

        def training_step(self, pair, _):
            return nn.functional.cross_entropy(self(pair[0]), pair[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    learner = Learner()
    trainer = lightning.Trainer(
        max_epochs=3, accumulate_grad_batches=2, accelerator="cpu", logger=logger, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[lightning_watch(batch()[0][:4], None if logger else tmp_path, every=2)],
    )  # fmt: skip
    trainer.fit(learner, data)
    if logs == "tensorboard":
        events = read(tmp_path)
        norms, sheets = steps_of(events.Scalars("gradient_norm")), steps_of(events.Images("heat"))
    elif logs == "csv":
        rows = csv.DictReader(io.StringIO(Path(logger.log_dir, "metrics.csv").read_text()))
        norms = [int(row["step"]) for row in rows if row["gradient_norm/all"]]
        sheets = [1, 2, 3]  # it holds no pictures
    elif logs == "mlflow":
        norms = [each.step for each in logger.experiment.get_metric_history(logger.run_id, "gradient_norm/all")]
        paths = [image.path for image in logger.experiment.list_artifacts(logger.run_id, "images")]
        sheets = sorted(int(number) for path in paths for number in re.findall(r"/heat\W+step\W+(\d+).*png$", path))
    else:
        logger.experiment.finish()
        (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
        rows = [history(record) for record in wandb_records(file)]
        norms, sheets = (
            [row["trainer/global_step"] for row in rows if tag in row] for tag in ("gradient_norm/all", "heat")
        )

    assert norms == [1, 3]  # the optimizer's steps, each of two batches
    assert sheets == [1, 2, 3]  # at the end of each epoch
    assert not any(module._forward_hooks for module in learner.modules())


def test_without_tensorboard_the_sentence_says_what_to_install(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)

    with pytest.raises(camkit.CamkitError, match=r"pip install 'camkit\[tensorboard\]'") as caught:
        TrainingWatch(torch.nn.Conv2d(3, 2, 3), torch.zeros(1, 3, 8, 8), tmp_path)

    assert "\n" not in str(caught.value)


def said(events, tag):
    return events.Tensors(f"{tag}/text_summary")[0].tensor_proto.string_val[0].decode()


@pytest.mark.parametrize("drawn", [True, False])
def test_explain_writes_the_pictures_that_it_draws_each_under_a_tag_of_its_own(tmp_path, monkeypatch, drawn):
    monkeypatch.chdir(tmp_path)
    for folder, name in (("a", "plane-sky"), ("b", "car-sea")):
        Path("in", folder).mkdir(parents=True)
        shutil.copy(camkit.scenes.scene_paths()[name], f"in/{folder}/x.png")
    drawing = ["--out", "out", "--style", "side-by-side", "--format", "png"]
    options = drawing if drawn else ["--table", "t.csv", "--no-pictures"]
    assert main(["in", "--model", "demo-fair", "--top-k", "3", "--tensorboard", "runs", *options]) == 0
    events = read(tmp_path / "runs")
    tags, files = events.Tags()["images"], sorted(Path("out").rglob("*.png"))

    assert len(tags) == 6
    assert len(files) == 6 * drawn
    for file in files:
        tag = f"explain/{file.relative_to('out').with_suffix('').as_posix()}"
        with Image.open(file) as same:
            assert np.array_equal(pictures_in(events, tag)[0], np.asarray(same.convert("RGB")))


def test_an_explanation_goes_to_a_writer_at_a_step(tmp_path):
    found = camkit.explain("demo-fair", camkit.scenes.scene_paths()["plane-sky"])
    with SummaryWriter(str(tmp_path)) as writer:
        for step in (3, 5):
            write_explanation(found, writer, step)
    events = read(tmp_path)

    (tag,) = events.Tags()["images"]
    assert tag == f"explain/{found.source}/plane"
    assert [one.step for one in events.Images(tag)] == [3, 5]


def test_diagnose_writes_its_table_and_its_findings(tmp_path):
    options = ["--model", "demo-fair", "--out", str(tmp_path / "out"), "--tensorboard", str(tmp_path / "runs")]
    main(["diagnose", *map(str, camkit.scenes.scene_paths().values()), *options])
    events = read(tmp_path / "runs")
    found = camkit.diagnose("demo-fair", list(camkit.scenes.scene_paths().values()))

    assert set(events.Tags()["histograms"]) == {
        *(f"activations/{row.name}" for row in found.rows),
        *(f"gradients/{row.name}" for row in found.rows if row.gradients is not None),
    }
    for row in found.rows:
        told = events.Histograms(f"activations/{row.name}")[0].histogram_value
        assert (told.num, told.min, told.max) == (row.activations.count, row.activations.low, row.activations.high)
        assert list(told.bucket) == list(row.activations.histogram.counts)
        if row.dead is not None:
            assert events.Scalars(f"dead_share/{row.name}")[0].value == pytest.approx(len(row.dead) / row.channels)
        if row.parameters:
            norm = events.Scalars(f"gradient_norm/{row.name}")[0].value
            assert norm == pytest.approx(row.parameter_gradient, rel=1e-6)
    with Image.open(tmp_path / "out" / "diagnose.png") as same:
        assert np.array_equal(pictures_in(events, "diagnosis")[0], np.asarray(same.convert("RGB")))
    assert said(events, "findings")


def test_the_findings_of_a_broken_model_are_text(tmp_path):
    net = network()
    with torch.no_grad():
        net[8].weight[0, 0] = torch.nan
    found = camkit.diagnose(net, batch(), training=True)
    write_diagnosis(found, tmp_path, step=4)
    events = read(tmp_path)

    assert found.findings
    assert events.Images("diagnosis")[0].step == 4
    assert all(one.text in said(events, "findings") for one in found.findings)
    assert not [tag for tag in events.Tags()["scalars"] if tag.startswith("gradient_norm")], "all are NaN"


def test_check_writes_its_verdict_its_measures_and_the_worst_pictures(tmp_path):
    data = camkit.scenes.write_scenes(tmp_path / "scenes", 10)
    config = tmp_path / "camkit.toml"
    config.write_text("[check]\nper_class = 10\npastes = 1\n[limits]\nleast_pictures = 10\n")
    code = main(
        ["check", str(data), "--model", "demo-biased", "--config", str(config), "--out", str(tmp_path / "out"),
         "--tensorboard", str(tmp_path / "runs")]
    )  # fmt: skip
    events, summary = read(tmp_path / "runs"), (tmp_path / "out" / "summary.md").read_text("utf-8")

    assert code == 1
    assert said(events, "check").strip() == summary.strip()
    tags = events.Tags()["scalars"]
    for what in ("accuracy", "gap", "sufficiency", "skill"):
        assert f"check/{what}/all classes" in tags
        assert f"check/{what}/plane" in tags
    assert events.Scalars("check/gap/all classes")[0].value > 0.5
    strips = [tag for tag in events.Tags()["images"] if tag.startswith("worst/")]
    assert len(strips) == 12 // 4 * 4
    for tag in strips:
        wide = pictures_in(events, tag)[0]
        assert wide.shape[1] > 3 * wide.shape[0]
        assert tag.split("/")[1] in said(events, tag)


@pytest.mark.parametrize("command", [[], ["diagnose"]])
def test_a_folder_that_cannot_be_written_is_an_error_before_anything_is_computed(tmp_path, capsys, command):
    (tmp_path / "file").write_text("in the way")
    options = ["--model", "demo-fair", "--out", str(tmp_path / "out"), "--tensorboard", str(tmp_path / "file")]
    code = main([*command, str(camkit.scenes.scene_paths()["plane-sky"]), *options])

    assert code == OutputError.exit_code
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert not list((tmp_path / "out").glob("*"))


def test_events_that_do_not_fit_are_an_error_and_all_else_is_written(tmp_path, capsys):
    (tmp_path / "pictures").mkdir()
    names = [f"{number}-{name}" for number in range(5) for name in camkit.scenes.scene_paths()]
    for name in names:  # so small that each picture fits, but the events of four do not
        picture = camkit.scenes.scene_paths()[name.partition("-")[2]]
        Image.open(picture).resize((160, 160)).save(tmp_path / "pictures" / f"{name}.png")
    folders = [tmp_path / "pictures", "--out", tmp_path / "out", "--tensorboard", tmp_path / "events"]
    with files_of_at_most(120_000):
        code = main([*map(str, folders), "--model", "demo-fair", "--style", "overlay"])

    captured = capsys.readouterr()
    assert code == OutputError.exit_code
    assert captured.err == f"camkit: cannot write events into {tmp_path / 'events'}: File too large\n"
    assert len(list((tmp_path / "out").glob("*.gradcam.png"))) == len(names) == 30
    assert all(f"{name}.png.gradcam.png" in captured.out for name in names)
