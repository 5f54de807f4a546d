"""Where models come from: names, weights in files and in torchvision's cache, and the caller's own modules."""

from __future__ import annotations

import functools
import json
import os
import pickle
import random
import socket
import subprocess
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from safetensors.torch import save_file
from tiers import represented_by
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import camkit
from camkit import cli, models
from camkit.errors import InputError, ModelError, RunError, advising_shell
from camkit.models import LoadedModel, as_model, load_model, model_names

SMALL = "squeezenet1_1"


class Tiny(nn.Module):
    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU())
        self.head = nn.Linear(4, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images).mean((2, 3)))


@pytest.fixture(scope="module")
def squeezenet() -> nn.Module:
    torch.manual_seed(1)
    return torchvision.models.squeezenet1_1(weights=None).eval()


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

    for name in ("getaddrinfo", "create_connection"):
        monkeypatch.setattr(socket, name, refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return attempts


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder that torch.hub takes for its cache of checkpoints."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "home"))
    folder = tmp_path / "home/hub/checkpoints"
    folder.mkdir(parents=True)
    return folder


def assert_one_sentence(error: BaseException) -> None:
    text = str(error)
    assert 10 < len(text) < 500
    assert "\n" not in text
    assert "Traceback" not in text


def same_weights(module: nn.Module, expected: dict[str, Tensor], tolerance: float = 0.0) -> bool:
    found = module.state_dict()
    return found.keys() == expected.keys() and all(
        torch.allclose(found[key], expected[key].to(found[key].dtype), rtol=0, atol=tolerance) for key in expected
    )


def prefixed(prefix: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda state: {prefix + key: value for key, value in state.items()}


WRAPPED: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "plain": lambda state: state,
    "under state_dict": lambda state: {"state_dict": state, "epoch": 7, "lr": 0.1},
    "under model_state_dict": lambda state: {"model_state_dict": state, "epoch": 7},
    "under model, with state_dict in it": lambda state: {"model": {"state_dict": state}},
    "from DataParallel": prefixed("module."),
    "from torch.compile": prefixed("_orig_mod."),
    "from compile in DataParallel": prefixed("module._orig_mod."),
    "from DataParallel in compile": prefixed("_orig_mod.module."),
    "nested, from DataParallel": lambda state: {"state_dict": prefixed("module.")(state)},
    "half precision": lambda state: {key: value.half() for key, value in state.items()},
    "parameters": lambda state: OrderedDict((key, nn.Parameter(value)) for key, value in state.items()),
}


@pytest.mark.parametrize(("case", "ending"), [*((case, "pth") for case in WRAPPED), ("plain", "pt"), ("plain", "bin")])
def test_weights_in_a_file(squeezenet, tmp_path, case, ending):
    path = tmp_path / f"weights.{ending}"
    torch.save(WRAPPED[case](squeezenet.state_dict()), path)

    loaded = load_model(SMALL, path, "cpu")

    assert same_weights(loaded.module, squeezenet.state_dict(), 1e-3 if case == "half precision" else 0)
    assert all(parameter.dtype == torch.float32 for parameter in loaded.module.parameters())
    assert len(loaded.labels) == 1000
    assert not loaded.module.training
    assert loaded.preprocess(torchvision.transforms.functional.to_pil_image(torch.rand(3, 300, 400))).shape == (
        3,
        224,
        224,
    )


def test_weights_in_the_old_format_and_as_text_path(squeezenet, tmp_path):
    torch.save(squeezenet.state_dict(), tmp_path / "old.pth", _use_new_zipfile_serialization=False)

    assert same_weights(load_model(SMALL, str(tmp_path / "old.pth"), "cpu").module, squeezenet.state_dict())


@pytest.mark.parametrize("prefix", ["", "module."])
def test_safetensors(squeezenet, tmp_path, prefix):
    save_file(
        {prefix + key: value.contiguous() for key, value in squeezenet.state_dict().items()}, tmp_path / "w.safetensors"
    )

    assert same_weights(load_model(SMALL, tmp_path / "w.safetensors", "cpu").module, squeezenet.state_dict())


CLASSES_AT_THE_END = (
    "resnet18",
    "squeezenet1_1",
    "densenet121",
    "mobilenet_v3_small",
    "shufflenet_v2_x0_5",
    "convnext_tiny",
    "googlenet",
    "inception_v3",
    "swin_t",
    "maxvit_t",
)


@pytest.mark.parametrize(
    "name", represented_by("densenet121", "mobilenet_v3_small", "googlenet", among=CLASSES_AT_THE_END)
)
def test_another_number_of_classes_is_taken_from_the_file_and_the_labels_are_unknown(tmp_path, name):
    options = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    with torch.device("meta"):
        shapes = torchvision.models.get_model(name, weights=None, num_classes=7, **options).state_dict()
    torch.save({key: torch.zeros(value.shape, dtype=value.dtype) for key, value in shapes.items()}, tmp_path / "w.pth")

    loaded = load_model(name, tmp_path / "w.pth", "cpu")

    assert loaded.labels is None
    assert loaded.preprocess is not None
    assert loaded.module.state_dict().keys() == shapes.keys()
    assert all(value.shape == shapes[key].shape for key, value in loaded.module.state_dict().items())


@pytest.mark.parametrize("classes", [1000, 7])
def test_a_network_that_cannot_be_built_without_values_takes_a_file(tmp_path, classes):
    """RegNet computes its widths with tensors, so PyTorch's meta device cannot build it."""
    state = torchvision.models.regnet_y_400mf(num_classes=classes).state_dict()
    torch.save(state, tmp_path / "w.pth")

    loaded = load_model("regnet_y_400mf", tmp_path / "w.pth", "cpu")

    assert loaded.module.fc.out_features == classes
    assert (loaded.labels is None) == (classes != 1000)


def test_seven_classes_end_to_end(tmp_path, picture):
    torch.save(torchvision.models.squeezenet1_1(num_classes=7).state_dict(), tmp_path / "w.pth")

    explanation = camkit.explain(load_model(SMALL, tmp_path / "w.pth", "cpu"), picture)

    assert explanation.target in range(7)
    assert explanation.label is None
    assert explanation.name == f"class {explanation.target}"


def test_weights_saved_without_the_auxiliary_heads_are_enough(tmp_path):
    # torchvision's own googlenet(weights=...) drops these heads after loading, so that a saved copy lacks them.
    torch.manual_seed(0)
    state = torchvision.models.googlenet(weights=None, init_weights=False).state_dict()
    kept = {key: value for key, value in state.items() if not key.lower().startswith("aux")}
    assert len(kept) < len(state)
    torch.save(kept, tmp_path / "w.pth")

    module = load_model("googlenet", tmp_path / "w.pth", "cpu").module

    assert all(torch.equal(module.state_dict()[key], value) for key, value in kept.items())


def test_weights_of_another_architecture_are_refused(squeezenet, tmp_path):
    path = tmp_path / "squeeze.pth"
    torch.save(squeezenet.state_dict(), path)

    with pytest.raises(ModelError) as caught:
        load_model("resnet18", path, "cpu")

    assert_one_sentence(caught.value)
    assert str(path) in str(caught.value)
    assert "resnet18" in str(caught.value)
    assert 'Missing key(s) in state_dict: "conv1.weight"' in str(caught.value)


class Payload:
    """Writes a file when unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("how", ["torch.save", "bare pickle", "inside a checkpoint"])
def test_a_file_that_holds_code_is_refused_and_not_run(squeezenet, tmp_path, how):
    path, trace = tmp_path / "w.pth", tmp_path / "ran"
    if how == "bare pickle":
        path.write_bytes(pickle.dumps(Payload(trace)))
    else:
        held = Payload(trace)
        torch.save(held if how == "torch.save" else {"state_dict": squeezenet.state_dict(), "extra": held}, path)

    with pytest.raises(ModelError) as caught:
        load_model(SMALL, path, "cpu")

    assert not trace.exists()
    assert_one_sentence(caught.value)
    assert how == "bare pickle" or "torch.save(model.state_dict()" in str(caught.value)


DAMAGED: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda data: data[:-5000],
    "cut in half": lambda data: data[: len(data) // 2],
    "text": lambda data: b"hello\n",
    "empty": lambda data: b"",
    "a picture": lambda data: b"\x89PNG\r\n\x1a\n" + bytes(100),
}


@pytest.mark.parametrize("old_format", [False, True])
@pytest.mark.parametrize("ending", ["pth", "safetensors"])
@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_one_sentence(squeezenet, tmp_path, case, ending, old_format):
    path = tmp_path / f"w.{ending}"
    state = squeezenet.state_dict()
    if ending == "safetensors":
        save_file({key: value.contiguous() for key, value in state.items()}, path)
    else:
        torch.save(state, path, _use_new_zipfile_serialization=not old_format)
    path.write_bytes(DAMAGED[case](path.read_bytes()))

    with pytest.raises(ModelError) as caught:
        load_model(SMALL, path, "cpu")

    assert_one_sentence(caught.value)
    assert path.name in str(caught.value)


@pytest.mark.parametrize("content", [torch.zeros(3), [torch.zeros(3)], {}, {"epoch": 3}, {"a": 1.0}])
def test_a_file_without_a_state_dict_says_how_to_save_one(tmp_path, content):
    torch.save(content, tmp_path / "w.pth")

    with pytest.raises(ModelError, match="state dict") as caught:
        load_model(SMALL, tmp_path / "w.pth", "cpu")

    assert_one_sentence(caught.value)


def test_a_missing_file_names_the_published_weights(tmp_path):
    with pytest.raises(ModelError, match="no weights file") as caught:
        load_model(SMALL, tmp_path / "gone.pth", "cpu")

    assert_one_sentence(caught.value)
    assert "IMAGENET1K_V1" in str(caught.value)


def test_a_mistyped_weights_name_is_answered_with_the_nearest():
    with pytest.raises(ModelError, match="did you mean 'IMAGENET1K_V1'"):
        load_model(SMALL, "IMAGENET1K_v11", "cpu")


@pytest.mark.parametrize(
    ("typed", "meant"), [("resnet5", "resnet50"), ("squeezenet1-1", SMALL), ("demo-fare", "demo-fair")]
)
def test_an_unknown_name_is_answered_with_the_nearest(typed, meant):
    with pytest.raises(ModelError, match=meant) as caught:
        load_model(typed, device="cpu")

    assert_one_sentence(caught.value)


def test_a_name_unlike_any_other_is_answered_with_the_choices():
    with pytest.raises(ModelError, match="torchvision") as caught:
        camkit.explain("zzzz", torch.zeros(3, 32, 32))

    assert_one_sentence(caught.value)


def test_networks_for_pictures_and_clips_are_offered_and_no_others():
    names = model_names()

    assert {
        "resnet50",
        "vit_b_16",
        "fcn_resnet50",
        "fasterrcnn_resnet50_fpn",
        "r3d_18",
        "demo-fair",
        "demo-biased",
    } <= set(names)
    assert not [name for name in names if "raft" in name or "quantized" in name]


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "mps", "xpu", "cpu:x", "tpu"])
def test_a_device_that_is_not_here_is_one_sentence(device):
    if device == "mps" and torch.backends.mps.is_available():
        pytest.skip("this machine has the device")

    with pytest.raises(ModelError, match=device) as caught:
        load_model("demo-fair", device=device)

    assert_one_sentence(caught.value)


# --- weights that mean something else than they seem to ---------------------------------------------------------------


def demo_state() -> dict[str, Tensor]:
    return dict(load_model("demo-fair", device="cpu").module.state_dict())


def cast_to(dtype: torch.dtype) -> dict[str, Tensor]:
    return {key: value.to(dtype) if value.is_floating_point() else value for key, value in demo_state().items()}


@pytest.mark.parametrize("ending", ["pth", "safetensors"])
@pytest.mark.parametrize(
    "dtype", represented_by(
        torch.int8, torch.complex64, torch.float8_e4m3fn,
        among=[torch.int8, torch.uint8, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn],
    )
)  # fmt: skip
def test_weights_of_a_type_that_needs_scales_are_refused(tmp_path, dtype, ending):
    path = tmp_path / f"w.{ending}"
    (save_file if ending == "safetensors" else torch.save)(cast_to(dtype), path)

    with pytest.raises(ModelError, match=f"{dtype} for 'features.0.0.weight'") as caught:
        load_model("demo-fair", path, "cpu")

    assert_one_sentence(caught.value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_another_floating_point_type_are_rounded(tmp_path, dtype):
    torch.save(cast_to(dtype), tmp_path / "w.pth")

    assert same_weights(load_model("demo-fair", tmp_path / "w.pth", "cpu").module, cast_to(dtype))


@pytest.mark.parametrize(
    "content",
    [
        {1: torch.zeros(3)},
        {"a": torch.eye(3).to_sparse()},
        {"state_dict": {1: torch.zeros(3)}},
    ],
)
def test_a_file_of_other_tensors_is_one_sentence(tmp_path, content):
    torch.save(content, tmp_path / "w.pth")

    for name in ("demo-fair", SMALL):
        with pytest.raises(ModelError) as caught:
            load_model(name, tmp_path / "w.pth", "cpu")
        assert_one_sentence(caught.value)


@pytest.mark.parametrize("prefix", ["model.", "net.", "module.model.", "model._orig_mod."])
@pytest.mark.parametrize("classes", [7, 1000])
def test_weights_of_a_module_that_held_the_model_fit_with_any_number_of_classes(tmp_path, prefix, classes):
    state = torchvision.models.squeezenet1_1(num_classes=classes).state_dict()
    torch.save({"state_dict": prefixed(prefix)(state), "epoch": 3}, tmp_path / "lightning.ckpt")

    loaded = load_model(SMALL, tmp_path / "lightning.ckpt", "cpu")

    assert same_weights(loaded.module, state)
    assert (loaded.labels is None) == (classes == 7)


@pytest.mark.parametrize(
    ("content", "used", "said"),
    [
        (lambda plain, ema: {"model": plain, "model_ema": ema}, "plain", "'model', not those under 'model_ema'"),
        (lambda _, ema: {"model_ema": {**prefixed("module.")(ema), "n_averaged": torch.tensor(3)}}, "ema", "(EMA)"),
        (lambda plain, ema: {"model": plain, "state_dict": ema}, "ema", "'state_dict', not those under 'model'"),
    ],
)
def test_which_of_several_weights_are_used_is_said(tmp_path, content, used, said, capfd):
    plain, ema = demo_state(), {key: value * 2 for key, value in demo_state().items()}
    torch.save(content(plain, ema), tmp_path / "w.pth")

    loaded = load_model("demo-fair", tmp_path / "w.pth", "cpu")

    assert said in (loaded.note or "")
    assert same_weights(loaded.module, ema if used == "ema" else plain)
    picture = str(camkit.scenes.scene_paths()["plane-sky"])
    assert (
        cli.main([picture, "--model", "demo-fair", "--weights", str(tmp_path / "w.pth"), "--out", str(tmp_path)]) == 0
    )
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
    with pytest.raises(
        ModelError, match=r"00001-of-00002\.safetensors does not fit demo-fair \(.*Missing key"
    ) as caught:
        load_model("demo-fair", tmp_path / "w-00001-of-00002.safetensors", "cpu")
    assert_one_sentence(caught.value)
    for text in (
        "",
        "[]",
        "{}",
        '{"weight_map": {"a": 1}}',
        '{"weight_map": {"a": "../w"}}',
        '{"weight_map": {"a": "b"}}',
    ):
        index.write_text(text)
        with pytest.raises(ModelError) as caught:
            load_model("demo-fair", index, "cpu")
        assert_one_sentence(caught.value)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning")
@pytest.mark.parametrize("ending", ["pt", "safetensors", "bin"])
def test_the_content_of_a_file_tells_its_format(tmp_path, ending):
    path, state = tmp_path / f"w.{ending}", demo_state()
    for save in (torch.save, save_file):
        save(state, path)
        assert same_weights(load_model("demo-fair", path, "cpu").module, state)
    torch.jit.trace(Tiny().eval(), torch.zeros(1, 3, 8, 8)).save(path)
    with pytest.raises(ModelError, match="compressed archive, as TorchScript is") as caught:
        load_model("demo-fair", path, "cpu")
    assert_one_sentence(caught.value)


def test_a_cached_file_that_holds_code_is_refused_and_not_run(squeezenet, cache, no_network, tmp_path):
    trace = tmp_path / "ran"
    torch.save({**squeezenet.state_dict(), "more": Payload(trace)}, cache / Path(published(SMALL).DEFAULT.url).name)

    with pytest.raises(ModelError) as caught:
        load_model(SMALL, device="cpu")

    assert not trace.exists()
    assert_one_sentence(caught.value)


# --- weights of any content -------------------------------------------------------------------------------------------

FUZZED = 120
"""Cases of each kind; every case has a seed of its own, so that one that fails can be run alone."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> tuple[str, dict[str, Tensor]]:
    """Return the name of a small network, and weights that fit it."""
    file = tmp_path_factory.mktemp("net") / "net.py"
    file.write_text(
        "from torch import nn\n"
        "def build():\n"
        "    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 3))\n"
    )
    torch.manual_seed(1)
    state = load_model(f"{file}:build", device="cpu").module.state_dict()
    return f"{file}:build", {key: torch.randn_like(value) if value.dim() else value for key, value in state.items()}


def outcome(name: str, path: Path) -> dict[str, Tensor] | None:
    """Return the weights of the model with this file's weights; None if they are refused with one sentence."""
    try:
        return load_model(name, path, "cpu").module.state_dict()
    except ModelError as error:
        assert_one_sentence(error)
        return None


class Attack:
    """Pickles as a call of a function."""

    def __init__(self, call: tuple[Any, ...]) -> None:
        self.call = call

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore")
def test_a_loaded_models_text_is_one_short_line():
    resnet = load_model("resnet18", pretrained=False, device="cpu")
    assert repr(resnet) == "<LoadedModel 'resnet18': ResNet, 1000 labels>"
    assert repr(LoadedModel(nn.Sequential(nn.Conv2d(3, 1, 1)), "mine")) == "<LoadedModel 'mine': Sequential>"


def test_no_code_in_a_pickle_is_ever_run(tiny, tmp_path):
    name, state = tiny
    trace = tmp_path / "ran"
    touch = f"open({str(trace)!r}, 'w').close()"
    calls: list[tuple[Any, ...]] = [
        (Path.touch, (trace,)),
        (exec, (touch,)),
        (eval, (touch,)),
        (open, (str(trace), "w")),
        (os.system, (f"touch {trace}",)),
        (subprocess.check_call, (["touch", str(trace)],)),
        (os.open, (str(trace), os.O_CREAT)),
        (torch.save, (1, str(trace))),
        (functools.partial(exec, touch), ()),
        (getattr, (Path(trace), "touch")),
        (torch.hub.load, (str(tmp_path), "x")),
        (torch.load, (str(trace),)),
    ]
    for seed in range(FUZZED):
        draw = random.Random(seed)
        held: Any = Attack(draw.choice(calls))
        if draw.random() < 0.3:
            held = draw.choice([[held], (held, held), {"a": held}, OrderedDict(a=held)])
        place = draw.choice(["alone", "beside", "in place of a tensor", "first", "in a checkpoint"])
        content: Any = {
            "alone": held,
            "beside": {**state, "more": held},
            "in place of a tensor": {**state, "0.bias": held},
            "first": {"first": held, **state},
            "in a checkpoint": {"state_dict": state, "callbacks": held},
        }[place]
        path = tmp_path / f"w.{draw.choice(['pth', 'bin', 'safetensors'])}"
        protocol = draw.randrange(2, 6)
        if draw.random() < 0.3:
            path.write_bytes(pickle.dumps(held if place == "alone" else [held], protocol=protocol))
        else:
            is_zip = draw.random() < 0.6
            torch.save(content, path, pickle_protocol=protocol, _use_new_zipfile_serialization=is_zip)

        assert outcome(name, path) is None, seed
        assert not trace.exists(), seed


# --- torchvision's own weights ----------------------------------------------------------------------------------------


def published(name: str) -> Any:
    return torchvision.models.get_model_weights(name)


@pytest.mark.parametrize("asked", [None, "IMAGENET1K_V1", "DEFAULT"])
def test_published_weights_come_from_torchvisions_cache(squeezenet, cache, no_network, asked):
    weights = published(SMALL).DEFAULT
    torch.save(squeezenet.state_dict(), cache / Path(weights.url).name)

    loaded = load_model(SMALL, asked, "cpu")

    assert no_network == []
    assert same_weights(loaded.module, squeezenet.state_dict())
    assert loaded.labels == tuple(weights.meta["categories"])
    assert repr(loaded.preprocess) == repr(weights.transforms())


def test_the_second_recipe_brings_its_own_preprocessing(cache, no_network):
    first, second = published("mobilenet_v2").IMAGENET1K_V1, published("mobilenet_v2").IMAGENET1K_V2
    state = torchvision.models.mobilenet_v2(weights=None).state_dict()
    for weights in (first, second):
        torch.save(state, cache / Path(weights.url).name)

    by_default, by_name = load_model("mobilenet_v2", device="cpu"), load_model("mobilenet_v2", "IMAGENET1K_V1", "cpu")
    by_file = load_model("mobilenet_v2", cache / Path(second.url).name, "cpu")

    assert by_default.preprocess.resize_size == second.transforms().resize_size == [232]
    assert by_name.preprocess.resize_size == first.transforms().resize_size == [256]
    assert by_file.preprocess.resize_size == [232]


def test_without_cache_and_network_the_message_says_what_to_type(cache, no_network):
    began = time.monotonic()

    with pytest.raises(ModelError) as caught:
        load_model(SMALL, device="cpu")

    assert time.monotonic() - began < 5
    assert no_network
    assert_one_sentence(caught.value)
    assert "weights=" in str(caught.value)
    with pytest.raises(ModelError, match="--weights"), advising_shell():
        load_model(SMALL, device="cpu")
    assert SMALL in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"<html>blocked by the proxy</html>", b"\x80\x02" + bytes(50)])
def test_a_damaged_file_in_the_cache_is_a_model_error_that_names_it(cache, no_network, data):
    path = cache / Path(published(SMALL).DEFAULT.url).name
    path.write_bytes(data)

    with pytest.raises(ModelError) as caught:
        load_model(SMALL, device="cpu")

    assert_one_sentence(caught.value)
    assert path.name in str(caught.value)


def test_explaining_by_name_in_a_loop_reads_the_weights_once(squeezenet, cache, no_network, picture, monkeypatch):
    torch.save(squeezenet.state_dict(), cache / Path(published(SMALL).DEFAULT.url).name)
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
    picture = camkit.scenes.scene_paths()["plane-sky"]

    by_name = camkit.explain("demo-fair", picture, device="cpu")
    by_loaded = camkit.explain(loaded, picture)
    by_module = camkit.explain(loaded.module, picture, preprocess=loaded.preprocess, labels=loaded.labels)

    assert isinstance(loaded, LoadedModel)
    for other in (by_loaded, by_module):
        assert other.score == by_name.score
        assert other.label == by_name.label
        assert (other.raw == by_name.raw).all()


def test_the_callers_labels_and_preprocessing_take_the_place_of_the_models_own(picture):
    loaded = load_model("demo-fair", device="cpu")
    count = len(loaded.labels)

    replaced = as_model(loaded, labels=[f"my {number}" for number in range(count)], preprocess=lambda image: picture)

    assert replaced.labels == tuple(f"my {number}" for number in range(count))
    assert replaced.preprocess(None) is picture
    assert replaced.module is loaded.module
    assert loaded.labels != replaced.labels


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_wrong_number_of_labels_is_named_with_the_right_one(picture, count):
    with pytest.raises(InputError, match=rf"\b{count}\b.*\b3\b|\b3\b.*\b{count}\b") as caught:
        camkit.explain(Tiny(3), picture, "features", labels=["x"] * count, target=2)

    assert_one_sentence(caught.value)


def test_data_parallel_is_unwrapped(picture):
    net = Tiny()

    wrapped = as_model(nn.DataParallel(net))

    assert wrapped.module is net
    assert camkit.explain(nn.DataParallel(net), picture, "features").score == camkit.explain(net, picture).score


def test_a_compiled_model_is_unwrapped_also_inside_another_wrapper():
    net = Tiny()

    assert as_model(torch.compile(net)).module is net
    assert as_model(nn.DataParallel(torch.compile(net))).module is net


def test_the_layer_of_a_wrapped_model_may_be_named_as_the_bare_models(picture):
    net = Tiny()

    explanation = camkit.explain(torch.compile(net), picture, net.features)

    assert explanation.layer == "features"


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning")
@pytest.mark.parametrize("script", [torch.jit.script, lambda net: torch.jit.trace(net, torch.zeros(1, 3, 8, 8))])
def test_torchscript_is_one_sentence(picture, script):
    with pytest.raises(ModelError, match="TorchScript") as caught:
        camkit.explain(script(Tiny().eval()), picture)

    assert_one_sentence(caught.value)


@pytest.mark.parametrize("lazy", [lambda: nn.LazyConv2d(4, 1), nn.LazyBatchNorm2d])
def test_a_lazy_module_is_to_be_run_first(picture, lazy):
    net = nn.Sequential(nn.Conv2d(3, 4, 3), lazy(), nn.Flatten(), nn.LazyLinear(3)).eval()
    with pytest.raises(ModelError, match="run it once") as caught:
        camkit.explain(net, picture)

    assert_one_sentence(caught.value)
    net(picture[None])
    assert camkit.explain(net, picture).heatmap.shape == picture.shape[1:]


class Checkpointed(Tiny):
    """Runs its first part, or the rest, under reentrant activation checkpointing."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.part = part

    def rest(self, maps: Tensor) -> Tensor:
        return self.head(maps.mean((2, 3)))

    def forward(self, images: Tensor) -> Tensor:
        if self.part == "features":
            return self.rest(checkpoint(self.features, images, use_reentrant=True))
        return checkpoint(self.rest, self.features(images), use_reentrant=True)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: Checkpointed("features"), "reentrant"),
        (lambda: Checkpointed("rest"), "reentrant"),
        (lambda: nn.LazyConv2d(4, 3), "lazy"),
    ],
)
@pytest.mark.parametrize("layer", [None, "features"])
def test_a_model_that_cannot_be_differentiated_is_one_sentence(picture, tmp_path, build, said, layer):
    with pytest.raises(InputError, match=said) as caught:
        camkit.explain(build(), picture, layer)

    assert_one_sentence(caught.value)


def test_a_module_stays_where_it_is(picture):
    with pytest.raises(ModelError, match=r"model\.to\(") as caught:
        camkit.explain(Tiny(), picture, device="meta")

    assert_one_sentence(caught.value)
    assert camkit.explain(Tiny(), picture, device="cpu").status


def test_a_loaded_model_on_another_device_is_refused(picture):
    with pytest.raises(ModelError):
        camkit.explain(load_model("demo-fair", device="cpu"), torch.zeros(3, 64, 64), device="meta")


def test_a_model_without_parameters_works(picture):
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = nn.AvgPool2d(8)

        def forward(self, images: Tensor) -> Tensor:
            return self.cells(images.relu()).sum((2, 3))

    assert camkit.explain(Sum(), picture, "cells").status == "ok"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_input_takes_the_models_own_precision(picture, dtype):
    explanation = camkit.explain(Tiny().to(dtype), picture, "features")

    assert explanation.raw.dtype == "float32"
    assert explanation.status in ("ok", "no_positive_evidence")


def test_a_kind_of_model_counts_as_code_until_it_is_known_to_run_none(monkeypatch):
    assert models.runs_code("mine.py:build")
    assert not any(models.runs_code(name) for name in ("resnet50", "timm:resnet50", "hf:google/vit", "model.onnx"))
    monkeypatch.setattr(models, "_source", lambda _name: "from_somewhere")
    assert models.runs_code("somewhere:model")


def test_a_model_file_that_ends_the_program_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text("import sys\n\ndef build():\n    sys.exit(0)\n")
    with pytest.raises(RunError, match=r"called sys\.exit\(0\)"):
        load_model(f"{tmp_path / 'ends.py'}:build")
