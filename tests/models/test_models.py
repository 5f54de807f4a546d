"""Where models come from: names, weights in files and in torchvision's cache, and the caller's own modules."""

from __future__ import annotations

import copy
import functools
import json
import os
import pickle
import socket
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from networks import Net, features_and_head, means
from refusals import Attack, refused
from safetensors.torch import save_file
from tiers import represented_by
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import camkit
from camkit import cli, models
from camkit.errors import InputError, MethodError, ModelError, RunError, advising_shell
from camkit.models import LoadedModel, as_model, load_model, model_names

SMALL = "squeezenet1_1"
PLANE = camkit.scenes.scene_paths()["plane-sky"]


@pytest.fixture(scope="module")
def squeezenet() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return dict(torchvision.models.squeezenet1_1(weights=None).state_dict())


@pytest.fixture
def picture() -> Tensor:
    return torch.randn(3, 64, 64)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make every attempt to reach another machine fail at once, and list the attempts."""
    attempts: list[str] = []

    def refuse(*address: Any, **_: Any) -> None:
        attempts.append(str(address))
        raise OSError("the network is unreachable")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    return attempts


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_network: list[str]) -> Path:
    """Return an empty folder that torch.hub takes for its cache of checkpoints; there is no network."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "home"))
    folder = tmp_path / "home/hub/checkpoints"
    folder.mkdir(parents=True)
    return folder


def same_weights(module: nn.Module, expected: dict[str, Tensor], tolerance: float = 0.0) -> bool:
    found = module.state_dict()
    return found.keys() == expected.keys() and all(
        torch.allclose(found[key], expected[key].to(found[key].dtype), rtol=0, atol=tolerance) for key in expected
    )


def published(name: str) -> Any:
    return torchvision.models.get_model_weights(name)


def demo_state() -> dict[str, Tensor]:
    return dict(load_model("demo-fair", device="cpu").module.state_dict())


# --- weights in a file ------------------------------------------------------------------------------------------------


def prefixed(prefix: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda state: {prefix + key: value for key, value in state.items()}


def old_format(content: Any, path: Path) -> None:
    torch.save(content, path, _use_new_zipfile_serialization=False)


WRAPPED: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "plain": lambda state: state,
    "under state_dict": lambda state: {"state_dict": state, "epoch": 7, "lr": 0.1},
    "under model_state_dict": lambda state: {"model_state_dict": state, "epoch": 7},
    "under model, with state_dict in it": lambda state: {"model": {"state_dict": state}},
    "from DataParallel": prefixed("module."),
    "from torch.compile": prefixed("_orig_mod."),
    "from compile in DataParallel": prefixed("module._orig_mod."),
    "from Lightning": lambda state: {"state_dict": prefixed("model.")(state), "epoch": 3},
    "from compile in Lightning": lambda state: {"state_dict": prefixed("model._orig_mod.")(state)},
    "half precision": lambda state: {key: value.half() for key, value in state.items()},
    "parameters": lambda state: OrderedDict((key, nn.Parameter(value)) for key, value in state.items()),
}


@pytest.mark.parametrize(
    ("case", "save"),
    [
        *((case, torch.save) for case in WRAPPED),
        ("plain", old_format), ("plain", save_file), ("from DataParallel", save_file),
    ],
)  # fmt: skip
def test_weights_in_a_file(squeezenet, tmp_path, case, save):
    save(WRAPPED[case](squeezenet), tmp_path / "weights.bin")

    loaded = load_model(SMALL, str(tmp_path / "weights.bin"), "cpu")

    assert same_weights(loaded.module, squeezenet, 1e-3 if case == "half precision" else 0)
    assert all(parameter.dtype == torch.float32 for parameter in loaded.module.parameters())
    assert len(loaded.labels) == 1000
    assert not loaded.module.training
    prepared = loaded.preprocess(torchvision.transforms.functional.to_pil_image(torch.rand(3, 300, 400)))
    assert prepared.shape == (3, 224, 224)


CLASSES_AT_THE_END = (
    "resnet18", "squeezenet1_1", "densenet121", "mobilenet_v3_small", "shufflenet_v2_x0_5", "convnext_tiny",
    "googlenet", "inception_v3", "swin_t", "maxvit_t",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", represented_by("densenet121", "mobilenet_v3_small", "googlenet", among=CLASSES_AT_THE_END)
)
def test_another_number_of_classes_is_taken_from_the_file_and_the_labels_are_unknown(tmp_path, name):
    options = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    with torch.device("meta"):
        shapes = torchvision.models.get_model(name, weights=None, num_classes=7, **options).state_dict()
    zeros = {key: torch.zeros(value.shape, dtype=value.dtype) for key, value in shapes.items()}
    torch.save({"state_dict": prefixed("net.")(zeros)}, tmp_path / "w.pth")

    loaded = load_model(name, tmp_path / "w.pth", "cpu")

    assert loaded.labels is None
    assert loaded.preprocess is not None
    assert {key: value.shape for key, value in loaded.module.state_dict().items()} == {
        key: value.shape for key, value in shapes.items()
    }


def test_seven_classes_of_a_network_that_cannot_be_built_without_values(tmp_path, picture):
    """RegNet computes its widths with tensors, so PyTorch's meta device cannot build it."""
    torch.save(torchvision.models.regnet_y_400mf(num_classes=7).state_dict(), tmp_path / "w.pth")

    explanation = camkit.explain(load_model("regnet_y_400mf", tmp_path / "w.pth", "cpu"), picture)

    assert explanation.target in range(7)
    assert (explanation.label, explanation.name) == (None, f"class {explanation.target}")


def test_weights_saved_without_the_auxiliary_heads_are_enough(tmp_path):
    # torchvision's own googlenet(weights=...) drops these heads after loading, so that a saved copy lacks them.
    state = torchvision.models.googlenet(weights=None, init_weights=False).state_dict()
    kept = {key: value for key, value in state.items() if not key.lower().startswith("aux")}
    assert len(kept) < len(state)
    torch.save(kept, tmp_path / "w.pth")

    module = load_model("googlenet", tmp_path / "w.pth", "cpu").module

    assert all(torch.equal(module.state_dict()[key], value) for key, value in kept.items())


@pytest.mark.parametrize("save", [torch.save, save_file])
@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64, torch.float8_e4m3fn])
def test_weights_of_a_type_that_needs_scales_are_refused(tmp_path, dtype, save):
    state = demo_state().items()
    save({key: value.to(dtype) if value.is_floating_point() else value for key, value in state}, tmp_path / "w.pth")

    with refused(f"{dtype} for 'features.0.0.weight'"):
        load_model("demo-fair", tmp_path / "w.pth", "cpu")


@pytest.mark.parametrize(
    ("content", "used", "said"),
    [
        (lambda plain, ema: {"model": plain, "model_ema": ema}, "plain", "'model', not those under 'model_ema'"),
        (lambda _, ema: {"model_ema": {**prefixed("module.")(ema), "n_averaged": torch.tensor(3)}}, "ema", "(EMA)"),
        (lambda plain, ema: {"model": plain, "state_dict": ema}, "ema", "'state_dict', not those under 'model'"),
    ],
)
def test_which_of_several_weights_are_used_is_said(tmp_path, content, used, said, capfd):
    file = tmp_path / "w.pth"
    plain, ema = demo_state(), {key: value * 2 for key, value in demo_state().items()}
    torch.save(content(plain, ema), file)

    loaded = load_model("demo-fair", file, "cpu")

    assert said in (loaded.note or "")
    assert same_weights(loaded.module, ema if used == "ema" else plain)
    assert cli.main([str(PLANE), "--model", "demo-fair", "--weights", str(file), "--out", str(tmp_path)]) == 0
    assert said in capfd.readouterr().err.replace("\n", " ")


def test_weights_in_several_files_are_read_through_their_index(tmp_path):
    state = demo_state()
    names = sorted(state)
    shards = {"w-00001-of-00002.safetensors": names[:5], "w-00002-of-00002.safetensors": names[5:]}
    for file, keys in shards.items():
        save_file({key: state[key] for key in keys}, tmp_path / file)
    weight_map = {key: file for file, keys in shards.items() for key in keys}
    index = tmp_path / "w.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    assert same_weights(load_model("demo-fair", index, "cpu").module, state)
    with refused(r"00001-of-00002\.safetensors does not fit demo-fair \(.*Missing key", quotes=True):
        load_model("demo-fair", tmp_path / "w-00001-of-00002.safetensors", "cpu")
    for held in ("", "[]", "{}", *(f'{{"weight_map": {{"a": {file}}}}}' for file in ("1", '"../w"', '"b"'))):
        index.write_text(held)
        with refused():
            load_model("demo-fair", index, "cpu")


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning")
@pytest.mark.parametrize("ending", ["pt", "safetensors"])
def test_the_content_of_a_file_tells_its_format(tmp_path, ending):
    path, state = tmp_path / f"w.{ending}", demo_state()
    for save in (torch.save, save_file):
        save(state, path)
        assert same_weights(load_model("demo-fair", path, "cpu").module, state)
    torch.jit.trace(features_and_head(), torch.zeros(1, 3, 8, 8)).save(path)
    with refused("compressed archive, as TorchScript is"):
        load_model("demo-fair", path, "cpu")


def test_a_model_is_named_by_a_string_or_a_path(tmp_path):
    with refused("the name of a model must be a string, not SceneNet"):
        load_model(load_model("demo-fair", device="cpu").module)
    (tmp_path / "m.py").write_text("import torch\ndef make(): return torch.nn.Identity()\n")
    assert isinstance(load_model(tmp_path / "m.py:make", device="cpu").module, torch.nn.Identity)


DAMAGED: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda data: data[:-5000],
    "cut in half": lambda data: data[: len(data) // 2],
    "text": lambda data: b"hello\n",
    "empty": lambda data: b"",
    "a picture": lambda data: b"\x89PNG\r\n\x1a\n" + bytes(100),
}


@pytest.mark.parametrize("save", [torch.save, old_format, save_file])
@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_one_sentence(squeezenet, tmp_path, case, save):
    path = tmp_path / "w.pth"
    save(squeezenet, path)
    path.write_bytes(DAMAGED[case](path.read_bytes()))

    with refused("w.pth"):
        load_model(SMALL, path, "cpu")


NO_STATES = (torch.zeros(3), [torch.zeros(3)], {}, {"a": 1.0}, {"state_dict": {1: torch.zeros(3)}})


@pytest.mark.parametrize("content", NO_STATES)
def test_a_file_without_a_state_dict_says_how_to_save_one(tmp_path, content):
    torch.save(content, tmp_path / "w.pth")

    with refused("state dict"):
        load_model(SMALL, tmp_path / "w.pth", "cpu")


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("resnet18", {"weights": "squeeze.pth"}, 'squeeze.pth.*resnet18.*Missing key.* "conv1.weight"'),
        (SMALL, {"weights": "gone.pth"}, "no weights file .*IMAGENET1K_V1"),
        (SMALL, {"weights": "IMAGENET1K_v11"}, "did you mean 'IMAGENET1K_V1'"),
        ("resnet5", {}, "resnet50"),
        ("squeezenet1-1", {}, SMALL),
        ("demo-fare", {}, "demo-fair"),
        ("zzzz", {}, "choose a torchvision network"),
        *(("demo-fair", {"device": device}, device) for device in ("gpu", "cuda:99", "xpu", "cpu:x")),
    ],
)
def test_what_cannot_be_loaded_is_one_sentence(squeezenet, tmp_path, monkeypatch, name, options, said):
    monkeypatch.chdir(tmp_path)
    torch.save(squeezenet, "squeeze.pth")

    with refused(said, quotes=True):
        load_model(name, **{"device": "cpu", **options})


def test_networks_for_pictures_and_clips_are_offered_and_no_others():
    names = model_names()

    some = "resnet50 vit_b_16 fcn_resnet50 fasterrcnn_resnet50_fpn r3d_18 demo-fair demo-biased"
    assert set(some.split()) <= set(names)
    assert not [name for name in names if "raft" in name or "quantized" in name]


def test_a_loaded_models_text_is_one_short_line():
    resnet = load_model("resnet18", pretrained=False, device="cpu")
    assert repr(resnet) == "<LoadedModel 'resnet18': ResNet, 1000 labels>"
    assert repr(LoadedModel(nn.Sequential(nn.Conv2d(3, 1, 1)), "mine")) == "<LoadedModel 'mine': Sequential>"


# --- code in weights --------------------------------------------------------------------------------------------------


def test_a_file_in_the_cache_that_holds_code_is_refused_and_not_run(squeezenet, cache, tmp_path):
    trace = tmp_path / "ran"
    torch.save({**squeezenet, "more": Attack(Path.touch, (trace,))}, cache / Path(published(SMALL).DEFAULT.url).name)

    with refused():
        load_model(SMALL, None, "cpu")

    assert not trace.exists()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("place", ["alone", "beside", "in place of a tensor", "in a checkpoint"])
def test_no_code_in_a_pickle_is_ever_run(tmp_path, place):
    trace, state, path = tmp_path / "ran", demo_state(), tmp_path / "w.pth"
    touch = f"open({str(trace)!r}, 'w').close()"
    for function, *given in (
        *((Path.touch, trace), (exec, touch), (os.system, f"touch {trace}"), (functools.partial(exec, touch),)),
        *((getattr, Path(trace), "touch"), (torch.hub.load, str(tmp_path), "x"), (torch.load, str(trace))),
    ):
        held = Attack(function, tuple(given))
        content = {
            "alone": held,
            "beside": {**state, "more": [held]},
            "in place of a tensor": {**state, "head.bias": held},
            "in a checkpoint": {"state_dict": state, "callbacks": held},
        }[place]
        for save in (torch.save, old_format, lambda held, path: path.write_bytes(pickle.dumps(held))):
            save(content, path)
            with refused():
                load_model("demo-fair", path, "cpu")
            assert not trace.exists()


def test_a_kind_of_model_counts_as_code_until_it_is_known_to_run_none(monkeypatch):
    assert models.runs_code("mine.py:build")
    assert not any(models.runs_code(name) for name in ("resnet50", "timm:resnet50", "hf:google/vit", "model.onnx"))
    monkeypatch.setattr(models, "_source", lambda _name: "from_somewhere")
    assert models.runs_code("somewhere:model")


# --- torchvision's own weights ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [None, "IMAGENET1K_V1", "DEFAULT"])
def test_published_weights_come_from_torchvisions_cache(squeezenet, cache, no_network, asked):
    weights = published(SMALL).DEFAULT
    torch.save(squeezenet, cache / Path(weights.url).name)

    loaded = load_model(SMALL, asked, "cpu")

    assert no_network == []
    assert same_weights(loaded.module, squeezenet)
    assert loaded.labels == tuple(weights.meta["categories"])
    assert repr(loaded.preprocess) == repr(weights.transforms())


def test_without_cache_and_network_the_message_says_what_to_type(cache, no_network):
    began = time.monotonic()
    with refused(f"{SMALL} .*weights="):
        load_model(SMALL, device="cpu")
    assert time.monotonic() - began < 5
    assert no_network
    with refused("--weights"), advising_shell():
        load_model(SMALL, device="cpu")


@pytest.mark.parametrize("data", [b"", b"<html>blocked by the proxy</html>", b"\x80\x02" + bytes(50)])
def test_a_damaged_file_in_the_cache_is_a_model_error_that_names_it(cache, data):
    path = cache / Path(published(SMALL).DEFAULT.url).name
    path.write_bytes(data)

    with refused(path.name, quotes=True):
        load_model(SMALL, device="cpu")


def test_explaining_by_name_in_a_loop_reads_the_weights_once(squeezenet, cache, picture, monkeypatch):
    torch.save(squeezenet, cache / Path(published(SMALL).DEFAULT.url).name)
    built = []
    original = torchvision.models.get_model
    monkeypatch.setattr(torchvision.models, "get_model", lambda *a, **k: built.append(a) or original(*a, **k))

    first, second = (camkit.explain(SMALL, picture, device="cpu") for _ in range(2))

    assert len(built) <= 1
    assert first.score == second.score
    assert first.label in published(SMALL).DEFAULT.meta["categories"]


# --- models as they are passed ----------------------------------------------------------------------------------------


def test_names_modules_and_loaded_models_give_the_same_explanation():
    loaded = load_model("demo-fair", device="cpu")

    by_name = camkit.explain("demo-fair", PLANE, device="cpu")
    by_loaded = camkit.explain(loaded, PLANE)
    by_module = camkit.explain(loaded.module, PLANE, preprocess=loaded.preprocess, labels=loaded.labels)

    for other in (by_loaded, by_module):
        assert (other.score, other.label) == (by_name.score, by_name.label)
        assert (other.raw == by_name.raw).all()


def test_the_callers_labels_and_preprocessing_take_the_place_of_the_models_own(picture):
    loaded = load_model("demo-fair", device="cpu")

    replaced = as_model(loaded, labels=["a", "b", "c", "d"], preprocess=lambda image: picture)

    assert replaced.labels == ("a", "b", "c", "d")
    assert replaced.preprocess(None) is picture
    assert replaced.module is loaded.module
    assert loaded.labels != replaced.labels


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_wrong_number_of_labels_is_named_with_the_right_one(picture, count):
    with refused(rf"\b{count}\b.*\b3\b|\b3\b.*\b{count}\b", InputError):
        camkit.explain(features_and_head(3), picture, "features", labels=["x"] * count, target=2)


@pytest.mark.parametrize("lazy", [lambda: nn.LazyConv2d(4, 1), nn.LazyBatchNorm2d])
def test_a_lazy_module_is_to_be_run_first(picture, lazy):
    net = nn.Sequential(nn.Conv2d(3, 4, 3), lazy(), nn.Flatten(), nn.LazyLinear(3)).eval()
    with refused("run it once"):
        camkit.explain(net, picture)
    net(picture[None])
    assert camkit.explain(net, picture).heatmap.shape == picture.shape[1:]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("part", ["features", "rest"])
@pytest.mark.parametrize("layer", [None, "features"])
def test_a_model_with_reentrant_checkpointing_is_one_sentence(picture, part, layer):
    def rest(maps: Tensor) -> Tensor:
        return net.head(means(maps))

    def run(net: Net, images: Tensor) -> Tensor:
        if part == "features":
            return rest(checkpoint(net.features, images, use_reentrant=True))
        return checkpoint(rest, net.features(images), use_reentrant=True)

    net = Net(run, features=nn.Conv2d(3, 4, 3), head=nn.Linear(4, 3))
    with refused("reentrant", InputError):
        camkit.explain(net, picture, layer)


def test_modules_on_another_device_are_one_sentence(picture):
    for model in (features_and_head(), load_model("demo-fair", device="cpu")):
        with refused(r"model\.to\("):
            camkit.explain(model, picture, device="meta")
    assert camkit.explain(features_and_head(), picture, device="cpu").status


def test_a_model_without_parameters_works(picture):
    net = Net(lambda net, images: net.cells(images.relu()).sum((2, 3)), cells=nn.AvgPool2d(8))
    assert camkit.explain(net, picture, "cells").status == "ok"


def test_a_model_file_that_ends_the_program_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text("import sys\n\ndef build():\n    sys.exit(0)\n")
    with pytest.raises(RunError, match=r"called sys\.exit\(0\)"):
        load_model(f"{tmp_path / 'ends.py'}:build")


# --- models that other libraries changed: quantised, with adapters, or spread over devices


IMAGE = torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def network() -> Net:
    """Return a small network with linear layers behind its maps."""
    net = features_and_head()
    net.features = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 32, 3, 2, 1), nn.ReLU())
    net.head = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    return net


def quantised_by_torchao(network: Net) -> Net:
    torchao = pytest.importorskip("torchao.quantization")
    torchao.quantize_(network, torchao.Int8WeightOnlyConfig())
    return network


def quantised_by_bitsandbytes(network: Net) -> Net:
    bnb = pytest.importorskip("bitsandbytes")
    for name in ("0", "2"):
        linear = network.head.get_submodule(name)
        layer = bnb.nn.Linear8bitLt(linear.in_features, linear.out_features, has_fp16_weights=False)
        layer.load_state_dict(linear.state_dict())
        network.head[int(name)] = layer.to("cpu")
    return network


@pytest.mark.parametrize(("quantise", "least"), [(quantised_by_torchao, 0.99), (quantised_by_bitsandbytes, 0.98)])
def test_weights_that_a_library_quantised_are_explained(network: Net, quantise: Any, least: float) -> None:
    before = camkit.explain(network, IMAGE, target=1, method="gradcam")
    after = camkit.explain(quantise(copy.deepcopy(network)), IMAGE, target=1, method="gradcam")
    assert after.layer == before.layer
    assert np.corrcoef(before.raw.ravel(), after.raw.ravel())[0, 1] > least


def test_a_model_on_one_device_by_a_map_is_explained(network: Net) -> None:
    accelerate = pytest.importorskip("accelerate")
    before = camkit.explain(network, IMAGE, target=1, method="gradcam")
    devices = {"features": "cpu", "head": "cpu"}
    spread = accelerate.dispatch_model(copy.deepcopy(network), device_map=devices, force_hooks=True)
    after = camkit.explain(spread, IMAGE, target=1, method="gradcam")
    assert after.layer == before.layer
    assert np.allclose(after.raw, before.raw, atol=1e-6)


def test_an_adapter_of_peft_is_explained_as_the_merged_model(network: Net) -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(
        network, peft.LoraConfig(target_modules=["0", "2"], r=2, init_lora_weights=False)
    ).eval()

    with_adapter = camkit.explain(adapted, IMAGE, target=1, method="gradcam")

    merged = camkit.explain(copy.deepcopy(adapted).merge_and_unload(), IMAGE, target=1, method="gradcam")
    assert np.allclose(with_adapter.raw, merged.raw, atol=1e-5)
    assert with_adapter.layer.endswith(merged.layer)


def test_weights_that_are_not_in_memory_are_refused(network: Net) -> None:
    with pytest.raises(ModelError, match=r"some weights are not in memory.*black_box"):
        camkit.explain(copy.deepcopy(network).to("meta"), IMAGE, target=1)


def test_a_model_that_accelerate_offloads_is_a_black_box(network: Net) -> None:
    accelerate = pytest.importorskip("accelerate")
    offloaded = accelerate.cpu_offload(copy.deepcopy(network), execution_device=torch.device("cpu"))

    with pytest.raises((ModelError, MethodError), match="black_box"):
        camkit.explain(offloaded, IMAGE, target=1)

    explained = camkit.explain(camkit.black_box(offloaded), IMAGE, target=1, method="occlusion")
    assert explained.status == "ok"
