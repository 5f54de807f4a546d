"""Models from timm, Hugging Face and the caller's own code: their preprocessing, labels and wrong uses."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import networks
import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from refusals import Attack, refused
from safetensors.torch import save_file
from tiers import Extra, represented_by, rows_represented
from tiny_models import tokenizer_of_letters
from torch import nn

import camkit
from camkit import cli
from camkit.cli.explain import mask_on_input
from camkit.errors import InputError, ModelError
from camkit.models import as_model, load_model, read_labels
from camkit.sentences.inputs import processor_beside

timm, transformers = Extra("timm"), Extra("transformers")
PLANE = camkit.scenes.scene_paths()["plane-sky"]


def plane() -> Image.Image:
    with Image.open(PLANE) as picture:
        return picture.convert("RGB")


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")


# --- timm -------------------------------------------------------------------------------------------------------------


@pytest.mark.extended
def test_a_timm_network_brings_its_own_preprocessing():
    loaded = load_model("timm:test_vit", pretrained=False)
    config = timm.data.resolve_model_data_config(loaded.module)

    assert torch.equal(loaded.preprocess(plane()), timm.data.create_transform(**config)(plane()))
    assert config["input_size"] == (3, 160, 160)
    assert loaded.labels is not None
    assert loaded.labels[0].startswith("tench")


@pytest.mark.extended
def test_a_timm_network_takes_a_local_state_dict_of_other_classes(tmp_path):
    torch.manual_seed(0)
    trained = timm.create_model("test_vit", num_classes=3).eval()
    save_file(trained.state_dict(), tmp_path / "mine.safetensors")

    loaded = load_model("timm:test_vit", tmp_path / "mine.safetensors")
    found = camkit.explain(loaded, PLANE)

    logits = trained(loaded.preprocess(plane())[None])[0]
    assert loaded.labels is None
    assert found.target == int(logits.argmax())
    assert found.score == pytest.approx(logits.max().item(), abs=1e-4)
    assert found.raw.shape == (10, 10)
    assert found.box is not None


# --- Hugging Face -----------------------------------------------------------------------------------------------------


FEW = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def classifier(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    names = {"id2label": {0: "cat", 1: "dog", 2: "cow"}, "label2id": {"cat": 0, "dog": 1, "cow": 2}}
    config = transformers.ViTConfig(**FEW, image_size=64, patch_size=16, **names)
    folder = tmp_path_factory.mktemp("classifier")
    prepared = {"size": {"height": 64, "width": 64}, "image_mean": [0.2] * 3, "image_std": [0.4] * 3}
    for part in (transformers.ViTForImageClassification(config), transformers.ViTImageProcessor(**prepared)):
        part.save_pretrained(folder)
    return folder


@pytest.mark.extended
@pytest.mark.parametrize("prefix", ["", "hf:"])
def test_a_hugging_face_folder_brings_preprocessing_and_labels(classifier, prefix):
    loaded = load_model(f"{prefix}{classifier}")
    found = camkit.explain(loaded, PLANE)

    model = transformers.ViTForImageClassification.from_pretrained(classifier).eval()
    processor = transformers.AutoImageProcessor.from_pretrained(classifier)
    logits = model(**processor(images=plane(), return_tensors="pt")).logits[0]
    assert found.label == ("cat", "dog", "cow")[int(logits.argmax())]
    assert found.score == pytest.approx(logits.max().item(), abs=1e-4)
    assert found.raw.shape == (4, 4)
    width, height = plane().size
    assert list(found.box) == pytest.approx([0, 0, width, height], abs=2)


@pytest.mark.extended
def test_a_hugging_face_model_takes_a_local_state_dict(classifier, tmp_path):
    torch.manual_seed(5)
    loaded = load_model(str(classifier))
    state = {name: value + 0.1 for name, value in loaded.module.state_dict().items()}
    torch.save({"state_dict": {f"model.{name}": value for name, value in state.items()}}, tmp_path / "lightning.ckpt")

    again = load_model(str(classifier), tmp_path / "lightning.ckpt")

    assert torch.equal(again.module.classifier.weight, state["classifier.weight"])


@pytest.mark.extended
def test_a_hugging_face_model_without_weights_for_its_head_is_refused(classifier, tmp_path):
    whole = transformers.ViTForImageClassification.from_pretrained(classifier)
    whole.vit.save_pretrained(tmp_path)
    whole.config.save_pretrained(tmp_path)

    with refused(r"2 of its parameters .* would stay random"):
        load_model(str(tmp_path))


@pytest.mark.extended
def test_a_hugging_face_model_of_several_labels_gives_each_its_own_probability(classifier, tmp_path):
    model = transformers.ViTForImageClassification.from_pretrained(classifier)
    model.config.problem_type = "multi_label_classification"
    model.save_pretrained(tmp_path)
    transformers.ViTImageProcessor.from_pretrained(classifier).save_pretrained(tmp_path)

    found = camkit.explain(load_model(str(tmp_path)), PLANE)
    own = [camkit.explain(model, torch.rand(3, 64, 64)), camkit.Explainer(model)(torch.rand(3, 64, 64))]
    exclusive = camkit.explain(load_model(str(tmp_path), activation="softmax"), PLANE)

    for row in (found, *own):
        assert row.probability == pytest.approx(1 / (1 + np.exp(-row.score)), abs=1e-6)
    assert exclusive.probability == pytest.approx(camkit.explain(load_model(str(classifier)), PLANE).probability)


@pytest.mark.extended
def test_size_mean_and_std_replace_a_missing_preprocessor(classifier, tmp_path, capsys):
    for file in classifier.iterdir():
        if file.name != "preprocessor_config.json":
            (tmp_path / file.name).write_bytes(file.read_bytes())

    found = load_model(str(tmp_path), size=64, mean=0.2, std=0.4)

    assert torch.equal(found.preprocess(Image.open(PLANE)), load_model(str(classifier)).preprocess(Image.open(PLANE)))
    assert cli.main([str(PLANE), "--model", str(tmp_path), "--size", "64", "--out", str(tmp_path / "out")]) == 2
    assert "--size, --mean and --std together can replace" in capsys.readouterr().err
    with refused("size, mean and std together can replace"):
        load_model(str(tmp_path))


@pytest.fixture(scope="module", params=represented_by("clip", among=["clip", "siglip", "siglip2"]))
def comparer(request, tmp_path_factory) -> Path:
    """A tiny model that compares pictures with texts, with a tokenizer of single letters."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp(request.param)
    text = {**FEW, "max_position_embeddings": 16, **tokenizer_of_letters(folder, 16, pad="<|endoftext|>")}
    vision = {**FEW, "image_size": 32, "patch_size": 8}
    more = {"projection_dim": 16} if request.param == "clip" else {}
    if request.param == "siglip2":
        vision |= {"num_patches": 16}
    name = {"clip": "CLIP", "siglip": "Siglip", "siglip2": "Siglip2"}[request.param]
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision, **more)
    model = getattr(transformers, f"{name}Model")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    processor = transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    if request.param == "siglip2":
        processor = transformers.Siglip2ImageProcessor(patch_size=8, max_num_patches=20)
    for each in (model, processor):
        each.save_pretrained(folder)
    return folder


@pytest.mark.extended
def test_texts_are_the_classes_of_a_model_that_compares(comparer):
    texts = ["a plane", "a dog on a sea"]
    loaded = load_model(str(comparer), text=texts)
    found = camkit.explain(loaded, PLANE, target=["a plane", 1])

    model = transformers.AutoModel.from_pretrained(comparer).eval()
    padding = "max_length" if "siglip" in comparer.name else True
    tokens = transformers.AutoTokenizer.from_pretrained(comparer)(texts, padding=padding, return_tensors="pt")
    pixels = transformers.AutoImageProcessor.from_pretrained(comparer)(images=plane(), return_tensors="pt")
    with torch.no_grad():
        logits = model(**tokens, **pixels).logits_per_image[0]
    shares = logits.sigmoid() if "siglip" in comparer.name else logits.softmax(0)
    assert [row.label for row in found] == texts
    assert [row.score for row in found] == pytest.approx(logits.tolist(), abs=1e-3)
    assert [row.probability for row in found] == pytest.approx(shares.tolist(), abs=1e-3)
    grid = tuple(pixels["spatial_shapes"][0].tolist()) if "spatial_shapes" in pixels else (4, 4)
    assert {row.raw.shape for row in found} == {grid}
    assert not np.allclose(found[0].raw, found[1].raw)


@pytest.mark.extended
@pytest.mark.parametrize("picture", represented_by("portrait", among=[PLANE, "portrait"]))
def test_a_classifier_of_flattened_patches_gets_pictures_in_their_own_shape(picture, tmp_path):
    torch.manual_seed(0)
    vision = {**FEW, "patch_size": 8, "num_patches": 16}
    config = transformers.Siglip2Config(text_config=FEW, vision_config=vision, num_labels=3)
    transformers.Siglip2ForImageClassification(config).save_pretrained(tmp_path)
    transformers.Siglip2ImageProcessor(patch_size=8, max_num_patches=20).save_pretrained(tmp_path)
    image = plane() if picture == PLANE else plane().rotate(90, expand=True)
    image = image.crop((0, 0, image.width, image.height // 2))

    found = camkit.explain(load_model(str(tmp_path)), image)

    model = transformers.Siglip2ForImageClassification.from_pretrained(tmp_path).eval()
    inputs = transformers.AutoImageProcessor.from_pretrained(tmp_path)(images=image, return_tensors="pt")
    with torch.no_grad():
        logits = model(**inputs).logits[0]
    assert found.score == pytest.approx(logits.max().item(), abs=1e-4)
    assert found.raw.shape == tuple(inputs["spatial_shapes"][0].tolist())
    assert list(found.box) == pytest.approx([0, 0, *image.size], abs=3)

    for save in ((lambda _: None), transformers.ConvNextImageProcessor().save_pretrained):
        save(tmp_path)
        with refused("does not prepare pictures of another size"):
            load_model(str(tmp_path), size=64)


@pytest.mark.extended
def test_only_models_that_compare_pictures_with_texts_take_text(comparer, classifier):
    with refused(r"text=\['a photo"):
        load_model(str(comparer))
    for name in (str(classifier), "resnet18", "demo-fair"):
        with refused("takes pictures only"):
            load_model(name, text="a dog", pretrained=False)


REMOTE = """
from pathlib import Path
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

Path({trace!r}).touch()

class OwnConfig(ViTConfig):
    model_type = "own-vit"

class OwnModel(ViTForImageClassification):
    config_class = OwnConfig

class OwnProcessor(ViTImageProcessor):
    pass
"""


@pytest.fixture
def with_code(classifier, tmp_path, monkeypatch) -> Callable[[str], tuple[Path, Path]]:
    """Return a function that copies the classifier, with Python code for its model or its image processor."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("builtins.input", lambda _="": pytest.fail("a question was asked on standard input"))

    def copied(part: str) -> tuple[Path, Path]:
        folder, trace = tmp_path / part, tmp_path / "ran"
        shutil.copytree(classifier, folder)
        (folder / "own.py").write_text(REMOTE.format(trace=str(trace)))
        file = folder / ("config.json" if part == "model" else "preprocessor_config.json")
        values = json.loads(file.read_text())
        if part == "model":
            values["model_type"] = "own-vit"
            values["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForImageClassification": "own.OwnModel"}
        else:
            values["image_processor_type"] = "OwnProcessor"
            values["auto_map"] = {"AutoImageProcessor": "own.OwnProcessor"}
        file.write_text(json.dumps(values))
        return folder, trace

    return copied


@pytest.mark.extended
@pytest.mark.parametrize("part", ["model", "processor"])
def test_code_in_a_models_folder_runs_only_if_the_caller_trusts_it(with_code, part, tmp_path, capfd):
    folder, trace = with_code(part)
    command = [str(PLANE), "--model", str(folder), "--out", str(tmp_path / "out")]

    with refused("pass trust_remote_code=True"):
        load_model(str(folder), device="cpu")
    assert cli.main(command) == 2
    assert "pass --trust-remote-code" in capfd.readouterr().err
    assert not trace.exists()
    loaded = load_model(str(folder), device="cpu", trust_remote_code=True)
    assert trace.exists()
    assert cli.main([*command, "--trust-remote-code"]) == 0
    assert camkit.explain(loaded, PLANE).label in ("cat", "dog", "cow")


@pytest.mark.extended
def test_a_tokenizer_that_names_code_is_refused_without_a_question(comparer, tmp_path, monkeypatch):
    """The class is one of transformers' own that asks by itself, unlike the call that names it."""
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda question="": asked.append(question) or "n")
    folder = tmp_path / "asks"
    shutil.copytree(comparer, folder)
    for name, values in (
        ("config.json", {"auto_map": {"AutoModelForCausalLM": "own.OwnModel"}}),
        ("tokenizer_config.json", {"tokenizer_class": "AutoModelForCausalLM"}),
    ):
        (folder / name).write_text(json.dumps({**json.loads((folder / name).read_text()), **values}))

    names_its_own = comparer.name.startswith("siglip2")  # whatever the file names
    with nullcontext() if names_its_own else pytest.raises(ModelError, match="pass trust_remote_code=True"):
        load_model(str(folder), text="a dog", device="cpu")
    with nullcontext() if names_its_own else pytest.raises(ModelError, match="no processor found beside the model"):
        processor_beside(SimpleNamespace(name_or_path=str(folder)))

    assert not asked


@pytest.mark.extended
@pytest.mark.parametrize(
    ("kind", "attention"),
    [
        ("ViTConfig", "somebody/attention"),
        ("CLIPConfig", {"vision_config": "somebody/attention"}),
        ("Sam2Config", {"vision_config": {"backbone_config": "somebody/attention"}}),
    ],
    ids=["model", "part", "part-of-a-part"],
)
def test_attention_from_the_hub_is_code_too(tmp_path, kind, attention):
    getattr(transformers, kind)().save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "attn_implementation": attention}))

    with refused(r"'somebody/attention' on the hub.*pass trust_remote_code=True"):
        load_model(str(tmp_path), device="cpu")


@pytest.mark.extended
@pytest.mark.parametrize("source", ["hf", "timm"])
def test_pickled_code_among_a_folders_weights_is_refused_and_not_run(classifier, tmp_path, source):
    folder, trace = tmp_path / "folder", tmp_path / "ran"
    if source == "hf":
        shutil.copytree(classifier, folder)
        (folder / "model.safetensors").unlink()
        name = str(folder)
    else:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"architecture": "test_vit", "pretrained_cfg": {}}))
        name = f"timm:local-dir:{folder}"
    torch.save({"weight": Attack(Path.touch, (trace,))}, folder / "pytorch_model.bin")

    with refused():
        load_model(name, device="cpu")
    assert not trace.exists()


@pytest.mark.extended
@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.json", "{"),
        ("config.json", '{"model_type": "vit", "hidden_size": -3}'),
        ("config.json", '{"model_type": "vit", "quantization_config": {"quant_method": "gptq"}}'),
        ("preprocessor_config.json", "[1]"),
        ("model.safetensors", "no weights"),
    ],
)
def test_a_damaged_hugging_face_folder_is_one_sentence(classifier, tmp_path, file, text):
    folder = tmp_path / "folder"
    shutil.copytree(classifier, folder)
    (folder / file).write_text(text)

    with refused(quotes=True):
        load_model(str(folder), device="cpu")


@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("timm:resnet8", "did you mean"),
        ("timm:zzz", "no model 'zzz'"),
        ("timm:resnet18", r"with weights=\.\.\."),
        ("hf:nobody/nothing", "cannot be loaded"),
        ("bert", "is a bert model, which camkit cannot load"),
    ],
)
def test_a_name_that_a_library_cannot_load_is_one_sentence(name, said, tmp_path, monkeypatch):
    transformers.BertConfig(num_hidden_layers=1).save_pretrained(tmp_path / "bert")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    with refused(said):
        load_model(name)


@pytest.mark.parametrize(
    ("name", "package"),
    rows_represented(lambda _, package: package == "timm", [("timm:resnet18", "timm"), ("hf:a/b", "transformers")]),
)
def test_a_missing_package_is_named_with_what_to_install(name, package, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, package, None)
    for module in ("camkit.models.from_timm", "camkit.models.from_huggingface"):  # an earlier test may have imported it
        monkeypatch.delitem(sys.modules, module, raising=False)
    assert cli.main(["picture.png", "--model", name]) == 2
    said = capsys.readouterr().err
    assert f"pip install 'camkit[{package}]'" in said
    assert "Traceback" not in said


# --- the caller's own code --------------------------------------------------------------------------------------------

OWN = """
import torch
from torch import nn
from parts import block

def alone():
    torch.manual_seed(0)
    return nn.Sequential(block(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))

def prepare(picture):
    return torch.full((3, 16, 16), picture.width / 1000)

def with_preparation():
    return alone(), prepare

class Space:
    @staticmethod
    def inside():
        return with_preparation()

ready = alone()
number = 3

def exported():
    return torch.export.export(alone().eval(), (torch.randn(1, 3, 16, 16),))

def told():
    from camkit.models.loaded import LoadedModel
    return LoadedModel(alone(), "told", prepare, ("left", "right"), activation="sigmoid", weights="own.pth")
"""


@pytest.fixture
def own(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "own.py").write_text(OWN)
    (folder / "parts.py").write_text("from torch import nn\ndef block():\n    return nn.Conv2d(3, 4, 3, 2, 1)\n")
    yield folder
    for name in ("parts", "own", "camkit_model_own"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("attribute", ["with_preparation", "Space.inside"])
def test_a_factory_in_a_file_gives_module_and_preprocessing(own, attribute):
    before = list(sys.path)
    found = camkit.explain(load_model(f"{own / 'own.py'}:{attribute}"), PLANE)

    width = plane().width
    net = load_model(f"{own / 'own.py'}:alone").module
    logits = net(torch.full((1, 3, 16, 16), width / 1000))[0]
    assert found.score == pytest.approx(logits.max().item(), abs=1e-5)
    assert sys.path == before


@pytest.mark.extended
@pytest.mark.parametrize("library", ["timm", "transformers"])
def test_a_model_that_a_factory_gets_from_a_library_brings_its_preprocessing(library, classifier, tmp_path):
    call, usual = {
        "timm": ("create_model('test_vit', num_classes=5)", "timm:test_vit"),
        "transformers": (f"AutoModelForImageClassification.from_pretrained({str(classifier)!r})", str(classifier)),
    }[library]
    (tmp_path / "net.py").write_text(f"import {library}\ndef build():\n    return {library}.{call}")

    made = load_model(f"{tmp_path / 'net.py'}:build", device="cpu")

    expected = load_model(usual, device="cpu", pretrained=False)
    with Image.open(PLANE) as picture:
        assert torch.equal(made.preprocess(picture), expected.preprocess(picture))
    assert "pictures are prepared as" in made.note
    assert made.labels == (expected.labels if library == "transformers" else None)
    assert camkit.explain(made, PLANE).status == "ok"


def test_a_factory_in_a_module_of_the_current_folder(own, monkeypatch):
    monkeypatch.chdir(own)
    assert isinstance(load_model("own:ready", pretrained=False).module, nn.Sequential)


def test_files_of_the_current_folder_do_not_replace_what_an_installed_package_imports(tmp_path, monkeypatch):
    for folder in ("installed", "stranger"):
        (tmp_path / folder).mkdir()
    (tmp_path / "installed" / "package_of_nets.py").write_text(
        "try:\n    import dependency_of_nets\nexcept ImportError:\n    from torch.nn import Identity as make\n"
    )
    (tmp_path / "stranger" / "dependency_of_nets.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path / "installed")
    monkeypatch.chdir(tmp_path / "stranger")
    assert isinstance(load_model("package_of_nets:make", size=8, mean=0.5, std=0.5).module, nn.Identity)


def test_a_module_without_preprocessing_asks_for_it_and_takes_it(own):
    name = f"{own / 'own.py'}:alone"
    with refused("how to prepare pictures", InputError):
        camkit.explain(load_model(name), PLANE)
    with refused("name mean and std too"):
        load_model(name, size=32)

    loaded = load_model(name, size=(16, 32), mean=[0.1, 0.2, 0.3], std=[0.5, 0.5, 0.5])

    values = np.asarray(plane().resize((32, 16), Image.Resampling.BILINEAR)) / 255
    expected = (values - [0.1, 0.2, 0.3]) / 0.5
    assert np.allclose(loaded.preprocess(plane()).permute(1, 2, 0), expected, atol=0.02)
    found = camkit.explain(loaded, PLANE)
    width, height = plane().size
    assert list(found.box) == [0, 0, width, height]


def test_weights_fill_the_callers_own_module(own, tmp_path):
    name = f"{own / 'own.py'}:with_preparation"
    state = {key: value + 1 for key, value in load_model(name).module.state_dict().items()}
    torch.save(state, tmp_path / "own.pth")
    assert torch.equal(load_model(name, tmp_path / "own.pth").module[3].bias, state["3.bias"])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("{}:alon", "alone"),
        ("{}:number", "returned int"),
        ("nofile.py:f", "no file"),
        ("no.such:f", "no Python module"),
    ],
)
def test_an_error_in_the_callers_own_model_is_one_sentence(own, name, said):
    with refused(said):
        load_model(name.format(own / "own.py"))


def test_a_factory_may_return_an_exported_program(own):
    assert camkit.explain(load_model(f"{own / 'own.py'}:exported"), torch.ones(3, 16, 16), target=1).raw.ndim == 2


def test_a_factory_may_say_which_weights_it_loaded_and_what_its_logits_mean(own):
    loaded = load_model(f"{own / 'own.py'}:told")
    found = camkit.explain(loaded, PLANE)
    assert loaded.weights == "own.pth"
    assert found.label in ("left", "right")
    assert found.probability == pytest.approx(1 / (1 + np.exp(-found.score)), abs=1e-6)


# --- overrides and labels ---------------------------------------------------------------------------------------------


def test_size_mean_and_deviation_replace_those_of_a_preset(tmp_path):
    usual = load_model("resnet18", pretrained=False).preprocess
    changed = load_model("resnet18", pretrained=False, size=112, mean=[0.5] * 3).preprocess
    assert (changed.crop_size, changed.resize_size) == ([112], [128])
    assert (changed.mean, changed.std) == ([0.5] * 3, usual.std)
    for options, said in (
        ({"size": (3, 0)}, "height and width"),
        ({"std": [0.0] * 3}, "positive"),
        ({"mean": [0.1, 0.2]}, "one number, or one each for red"),
    ):
        with refused(said, InputError):
            load_model("resnet18", pretrained=False, **options)
    one = load_model("resnet18", pretrained=False, mean=0.5, std=0.25).preprocess
    three = load_model("resnet18", pretrained=False, mean=[0.5] * 3, std=[0.25] * 3).preprocess
    assert torch.equal(one(plane()), three(plane()))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("l.txt", "cat\ndog\n\n"),
        ("l.txt", "\ufeffcat\r\ndog"),
        ("l.json", '["cat", "dog"]'),
        ("l.json", '{"1": "dog", "0": "cat"}'),
    ],
)
def test_labels_are_read_from_lines_and_json(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert read_labels(tmp_path / name) == ("cat", "dog")


@pytest.mark.parametrize(
    ("name", "text"), [("l.txt", ""), ("l.txt", "a\n\nb"), ("l.json", "{"), ("l.json", "[]"), ("l.json", '{"1": "a"}')]
)
def test_invalid_labels_are_one_sentence(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with refused(kind=InputError):
        read_labels(tmp_path / name)
    with refused("cannot be read", InputError):
        read_labels(tmp_path / "gone.txt")


def test_the_command_line_passes_everything_on(own, tmp_path, capfd):
    (tmp_path / "labels.txt").write_text("left\nright\n")
    name = f"{own / 'own.py'}:alone"
    options = ["--size", "16x32", "--mean", "0.1,0.1,0.1", "--std", "1,1,1", "--labels", str(tmp_path / "labels.txt")]

    code = cli.main(
        [str(PLANE), "--model", name, *options, "--target", "right", "--versus", "left", "--out", str(tmp_path)]
    )

    assert code == 0
    assert "right rather than left" in capfd.readouterr().out
    for wrong, said in (
        (["--size", "a"], "--size"),
        (["--mean", "x"], "--mean"),
        (["--near", "1,2"], "--near"),
        (["--direction", "up", "--target", "left"], "index"),
    ):
        assert cli.main([str(PLANE), "--model", name, *options, *wrong]) == 2
        assert said in capfd.readouterr().err.replace("\n", " ")


def test_a_mask_is_cropped_as_its_picture_is(tmp_path):
    shown = load_model("resnet18", pretrained=False, size=64).preprocess  # the shorter side to 73, then the middle
    picture, mask = Image.new("RGB", (292, 146)), np.zeros((146, 292), np.uint8)
    mask[40:90, 120:180] = 255
    mask[:, :20] = 255  # is cropped away
    picture.save(tmp_path / "picture.png")
    Image.fromarray(mask).save(tmp_path / "mask.png")

    on_input = mask_on_input(tmp_path / "mask.png", [tmp_path / "picture.png"], shown)

    rows, columns = np.nonzero(on_input)
    left, top = (146 - 64) / 2, (73 - 64) / 2  # of the half-sized picture
    assert on_input.shape == (64, 64)
    assert (rows.min(), rows.max() + 1) == pytest.approx((40 / 2 - top, 90 / 2 - top), abs=1)
    assert (columns.min(), columns.max() + 1) == pytest.approx((120 / 2 - left, 180 / 2 - left), abs=1)
    Image.fromarray(mask * (np.arange(292) < 20).astype(np.uint8)).save(tmp_path / "aside.png")
    for name, pictures, said in (
        ("mask.png", ["picture.png", "picture.png"], "one picture"),
        ("aside.png", ["picture.png"], "lies outside the part of the picture that the model sees"),
    ):
        with refused(said, InputError):
            mask_on_input(tmp_path / name, [tmp_path / one for one in pictures], shown)


@pytest.mark.parametrize(
    "wanted", [["--direction", "down"], ["--similar-to", str(PLANE)], ["--direction", "up", "--target", "1"]]
)
def test_each_kind_of_target_runs_from_the_command_line(own, tmp_path, wanted, capfd):
    name = f"{own / 'own.py'}:with_preparation"
    assert cli.main([str(PLANE), "--model", name, *wanted, "--out", str(tmp_path / "out"), "--json"]) == 0
    rows = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert rows
    assert all(Path(row["file"]).is_file() for row in rows)


@pytest.mark.extended
def test_the_layers_of_a_model_are_listed_without_its_weights(capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["layers", "--model", "timm:vit_tiny_patch16_224"]) == 0
    said = capfd.readouterr().out
    assert "explain would use whole model: auto: attention runs between all tokens" in said
    assert "patch_embed" in said


@pytest.mark.parametrize("file", ["mine.pth", "mobilenet_v2-7ebf99e0.pth"])
def test_the_note_on_the_preprocessing_of_a_weights_file_gives_the_same_in_python(tmp_path, file):
    torch.save(torchvision.models.mobilenet_v2().state_dict(), tmp_path / file)
    loaded = camkit.load_model("mobilenet_v2", tmp_path / file, device="cpu")
    preprocess = eval(loaded.note.partition("the same in Python: preprocess=")[2], {"torchvision": torchvision})
    picture = Image.open(PLANE).resize((500, 375))
    assert torch.equal(loaded.preprocess(picture), preprocess(picture))
    assert preprocess.resize_size == [256 if file == "mine.pth" else 232], "the second recipe is known by its file"


@pytest.mark.parametrize(("classes", "asks"), [(100, True), (10, False)])
def test_random_weights_are_asked_about_if_all_of_many_classes_score_alike(classes, asks):
    network = torchvision.models.mobilenet_v3_small(num_classes=classes).eval()
    prepare = torchvision.models.get_weight("MobileNet_V3_Small_Weights.DEFAULT").transforms()
    best, second = camkit.explain_many(network, [PLANE], preprocess=prepare, target=[None, 0])
    assert best.doubt == (f"all {classes} classes have about the same score: were weights loaded?" if asks else "")
    assert second.doubt == "", "the user asked for this class, which may well be improbable"


@pytest.mark.extended
@pytest.mark.parametrize(("name", "file"), [("mobilenet_v2", "coral_qat"), ("squeezenet1_1", "winml_fp16")])
def test_real_weights_are_not_asked_about(name, file, test_data):
    loaded = camkit.load_model(name, test_data / "weights" / f"{name}-{file}.pth", device="cpu")
    pictures = sorted((test_data / "coco").glob("*.jpg"))[:5] + sorted((test_data / "scenes").rglob("*.jpg"))[::200]
    assert {row.doubt for row in camkit.explain_many(loaded, [*pictures, Image.new("RGB", (300, 300))])} == {""}


# --- wrappers ---------------------------------------------------------------------------------------------------------


def in_place(net: nn.Module, part: str = "") -> nn.Module:
    net.get_submodule(part).compile(backend="eager")
    return net


@pytest.mark.parametrize(
    "wrap",
    [
        *(nn.DataParallel, lambda net: torch.compile(net, backend="eager")),
        lambda net: nn.DataParallel(torch.compile(net, backend="eager")),
        *(in_place, lambda net: in_place(net, "0")),
    ],
    ids=["DataParallel", "compiled", "both", "compiled in place", "a compiled part"],
)
def test_wrapped_and_compiled_modules_give_the_same_map_and_layer(wrap):
    net = networks.classifier(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), classes=3)
    image = torch.randn(3, 12, 12)
    expected = camkit.explain(net, image, target=1)
    wrapped = wrap(net)
    wrapped(image[None])

    assert as_model(wrapped).module is net
    assert camkit.explain(wrapped, image, net[0]).layer == "0"
    for _ in range(2):
        found = camkit.explain(wrapped, image, target=1)
        assert (found.layer, found.method) == (expected.layer, expected.method)
        assert np.array_equal(found.raw, expected.raw)
