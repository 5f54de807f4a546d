"""Detectors by name: loaded from a folder, decoded as their library does, and explained box by box."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from networks import Net
from PIL import Image
from refusals import refused
from tiers import Extra, represented_by
from tiny_models import gradient_times_activation, saved_once, tokenizer_of_letters
from torch import nn
from torch.nn import functional

import camkit
from camkit import targets
from camkit.cli import main
from camkit.errors import InputError
from camkit.layers import levels
from camkit.models import load_model

t = Extra("transformers")
PLANE = camkit.scenes.scene_paths()["plane-sky"]
NAMES = {0: "person", 1: "car", 2: "dog"}
FAMILIES = ["detr", "conditional_detr", "deformable_detr", "rt_detr", "rt_detr_v2", "d_fine", "yolos"]
LABELS = {"id2label": NAMES, "label2id": {name: index for index, name in NAMES.items()}}
NONE = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None}
SMALL = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "num_queries": 12,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
}  # fmt: skip
WIDTHS = {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}
HYBRID = {
    "encoder_hidden_dim": 32, "encoder_in_channels": [16, 24, 32], "encoder_layers": 1, "encoder_ffn_dim": 32,
    "encoder_attention_heads": 4, "d_model": 32, "num_queries": 12, "decoder_in_channels": [32, 32, 32],
    "decoder_ffn_dim": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "num_denoising": 0,
    "use_pretrained_backbone": False,
}  # fmt: skip
LAST = {"out_features": ["stage2", "stage3", "stage4"]}


def made(family: str) -> tuple[Any, Any]:
    """Return a tiny random detector of a family and its image processor."""
    torch.manual_seed(0)
    sides = {"shortest_edge": 96, "longest_edge": 160}
    if family == "yolos":
        few = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
        config = t.YolosConfig(image_size=[96, 128], num_detection_tokens=12, **few, **LABELS)
        return t.YolosForObjectDetection(config), t.YolosImageProcessor(size=sides)
    if family in ("rt_detr", "rt_detr_v2", "d_fine"):
        name = {"rt_detr": "RTDetr", "rt_detr_v2": "RTDetrV2", "d_fine": "DFine"}[family]
        backbone = t.RTDetrResNetConfig(layer_type="basic", **WIDTHS, **LAST)
        more = {"decoder_n_points": [2, 2, 2]} if family == "d_fine" else {}
        config = getattr(t, f"{name}Config")(backbone_config=backbone, **HYBRID, **LABELS, **more)
        return getattr(t, f"{name}ForObjectDetection")(config), t.RTDetrImageProcessor(size={"height": 96, "width": 96})
    name = {"detr": "Detr", "conditional_detr": "ConditionalDetr", "deformable_detr": "DeformableDetr"}[family]
    out = LAST if family == "deformable_detr" else {"out_features": ["stage4"]}
    backbone = t.ResNetConfig(layer_type="basic", **WIDTHS, **out)
    config = getattr(t, f"{name}Config")(**SMALL, **NONE, backbone_config=backbone, **LABELS)
    return getattr(t, f"{name}ForObjectDetection")(config), getattr(t, f"{name}ImageProcessor")(size=sides)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the folder of a family's tiny detector; each is saved once."""
    return saved_once(tmp_path_factory, lambda family, _: made(family))


@pytest.mark.extended
@pytest.mark.parametrize("family", represented_by("detr", "rt_detr", among=FAMILIES))
def test_a_detector_of_hugging_face_finds_the_boxes_that_its_library_finds(saved, family):
    picture = Image.open(PLANE).convert("RGB").resize((150, 100))
    folder = saved(family)

    loaded = load_model(f"hf:{folder}")
    found = camkit.explain(loaded, picture, target=targets.boxes(0.0))

    model = t.AutoModelForObjectDetection.from_pretrained(folder).eval()
    processor = t.AutoImageProcessor.from_pretrained(folder)
    prepared = processor(images=picture, return_tensors="pt")
    with torch.no_grad():
        output = model(**prepared)
    (expected,) = processor.post_process_object_detection(output, threshold=0.0, target_sizes=[(100, 150)])
    order = expected["scores"].argsort(descending=True, stable=True)[: len(found)]
    assert torch.equal(loaded.preprocess(picture), prepared["pixel_values"][0])
    assert [row.label for row in found] == [NAMES[int(index)] for index in expected["labels"][order]]
    assert [row.probability for row in found] == pytest.approx(expected["scores"][order].tolist(), abs=1e-5)
    # Cells of the ramps with which camkit measures where the input lies are a pixel wide.
    boxes = np.array([row.detection for row in found])
    assert np.abs(boxes - expected["boxes"][order].numpy()).max() < 1
    logits = {round(float(logit), 4) for logit in output.logits.flatten()}
    assert all(round(row.score, 4) in logits for row in found)


class Nearest:
    """Returns the logit of the first picture that is nearest to a score."""

    def __init__(self, score: float, run: Any) -> None:
        self.score, self.run, self.value = score, run, math.nan

    def __call__(self) -> torch.Tensor:
        logits = self.run()[0].flatten()
        found = logits[(logits - self.score).abs().argmin()]
        self.value = float(found.detach())
        return found


@pytest.mark.extended
@pytest.mark.parametrize("family", represented_by("conditional_detr", "d_fine", among=FAMILIES))
def test_the_map_of_a_detector_of_hugging_face_equals_the_slow_reference(tmp_path, family):
    model, processor = made(family)
    for parameter in model.parameters():
        if parameter.dim() > 1:  # the library's small weights leave features that differ by little more than rounding
            nn.init.kaiming_normal_(parameter, 0.3)
    for each in (model.eval().requires_grad_(True), processor):
        each.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path))
    convolutions = [name for name, module in model.named_modules() if isinstance(module, nn.Conv2d)]
    layer = next(name for name in convolutions if "proj" in name)

    found = camkit.explain(loaded, PLANE, f"model.{layer}", target=targets.box(0), method="hirescam", device="cpu")

    # Two pictures: with one, PyTorch's CPU gradients of batch norms before tokens are wrong (torch 2.14).
    pixels = loaded.preprocess(Image.open(PLANE).convert("RGB")).expand(2, -1, -1, -1)
    explained = Nearest(found.score, lambda: model(pixel_values=pixels).logits)
    expected = gradient_times_activation(model, layer, explained).sum(1)[0].numpy()
    assert np.abs(expected).max() > 1e-8
    assert found.score == pytest.approx(explained.value, abs=1e-5)
    assert np.allclose(found.raw, expected, atol=1e-3 * np.abs(expected).max())


@pytest.mark.extended
def test_padding_is_cut_off_where_the_library_masks_it(saved, tmp_path):
    folder = saved("detr")
    processor = t.AutoImageProcessor.from_pretrained(folder)
    processor.pad_size = {"height": 160, "width": 160}
    t.AutoModelForObjectDetection.from_pretrained(folder).save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    picture = Image.open(PLANE).convert("RGB").resize((150, 100))

    plain, padded = load_model(str(folder)), load_model(str(tmp_path))

    assert processor(images=picture, return_tensors="pt")["pixel_values"].shape[2:] == (160, 160)
    assert torch.equal(plain.preprocess(picture), padded.preprocess(picture))


class Pyramid(nn.Module):
    """A detector with three grids, a neck from coarse to fine and back, and a box for each cell."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 4, 1)
        self.stages = nn.ModuleList(nn.Conv2d(8, 8, 3, 2, 1) for _ in range(3))
        self.down = nn.ModuleList(nn.Conv2d(8, 8, 3, 1, 1) for _ in range(2))
        self.up = nn.ModuleList(nn.Conv2d(8, 8, 3, 2, 1) for _ in range(2))
        self.heads = nn.ModuleList(nn.Conv2d(8, 2, 3, 1, 1) for _ in range(3))

    def forward(self, images: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        maps = [self.stem(images).tanh()]
        for stage in self.stages:
            maps.append(stage(maps[-1]).tanh())
        fine, middle, coarse = maps[1:]
        middle = self.down[0](middle + functional.interpolate(coarse, scale_factor=2)).tanh()
        fine = self.down[1](fine + functional.interpolate(middle, scale_factor=2)).tanh()
        middle = middle + self.up[0](fine).tanh()
        coarse = coarse + self.up[1](middle).tanh()
        logits = [head(level).flatten(2) for head, level in zip(self.heads, (fine, middle, coarse), strict=True)]
        found = torch.cat(logits, 2)
        boxes = torch.tensor([8.0, 8.0, 40.0, 40.0]).expand(found.shape[2], 4)
        best = [one.max(0) for one in found]
        return [{"boxes": boxes, "scores": one.sigmoid(), "logits": one, "labels": label} for one, label in best]


@pytest.mark.parametrize("number", [9, 70, 82])
def test_a_boxs_heat_is_gradient_times_activation_added_over_the_inputs_of_the_neck(number):
    torch.manual_seed(0)
    net = Pyramid().eval()
    image = torch.rand(3, 64, 64)

    found = camkit.explain(net, image, target=targets.box(number), spread="even")

    names = ["stages.0", "stages.1", "stages.2"]
    assert found.layer.split("+") == names
    assert found.method == "odam"
    leaves: dict[str, torch.Tensor] = {}

    def starts(name: str) -> Any:
        def hook(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
            leaves[name] = output.detach().requires_grad_()
            return leaves[name].clone()

        return hook

    handles = [net.get_submodule(name).register_forward_hook(starts(name)) for name in names]
    net(image[None])[0]["logits"][number].backward()
    for handle in handles:
        handle.remove()
    expected = torch.zeros(1, 1, 8, 8)
    for name in names:
        cells = (leaves[name] * leaves[name].grad).sum(1, keepdim=True).relu().detach()
        larger = functional.interpolate(cells, size=(8, 8), mode="bilinear", align_corners=False)
        expected += larger * cells.numel() / 64
    right = expected[0, 0].numpy()
    assert right.max() > 0
    assert np.allclose(found.raw, right, atol=1e-5 * right.max())


class Dense(nn.Module):
    """A detector whose cells have a box each, on two grids that a neck mixes both ways.

    As in YOLO11, classes have a branch, and a layer returns the sides of all boxes, as channels of 1 x 4 cells.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.stage, self.up = (nn.Conv2d(given, 8, 3, step, 1) for given, step in ((3, 8), (8, 2), (8, 2)))
        self.down, self.mixed, self.tower, self.head = (nn.Conv2d(8, kept, 3, 1, 1) for kept in (8, 8, 8, 4))
        self.classes = nn.Sequential(*(nn.Conv2d(8, kept, 3, 1, 1) for kept in (8, 8, 2)))
        self.sides = nn.Softplus()

    def forward(self, images: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        fine = self.stem(images).tanh()
        coarse = self.stage(fine).tanh()
        fine = self.down(fine + functional.interpolate(coarse, scale_factor=2))
        coarse = self.mixed(coarse + self.up(fine.tanh()).tanh())
        rows = []
        for level in (fine, coarse):
            found = self.head(self.tower(level).tanh()).flatten(2).mT
            middles = (torch.cartesian_prod(*map(torch.arange, level.shape[2:])).flip(1) + 0.5) * 64 / level.shape[2]
            reach = 16 * self.sides(found.mT[:, None])[:, 0].mT
            corners = torch.cat([middles - reach[..., :2], middles + reach[..., 2:]], 2)
            rows.append((corners, self.classes(level).flatten(2).mT))
        corners, logits = (torch.cat(of_grids, 1) for of_grids in zip(*rows, strict=True))
        best, labels = logits.max(2)
        of_batch = {"all_boxes": corners, "all_logits": logits, "all_scores": logits.sigmoid(), "dense": best > 0}
        of_batch |= {"boxes": corners, "labels": labels, "logits": best, "scores": best.sigmoid()}
        return [{name: values[place] for name, values in of_batch.items()} for place in range(len(images))]


@pytest.mark.parametrize(("number", "width"), [(9, 64), (36, 64), (70, 64), (270, 256)])
def test_boxes_of_cells_are_explained_together_at_the_inputs_of_the_head(number, width):
    torch.manual_seed(0)
    net, images = Dense().eval(), torch.rand(2, 3, 64, width)

    found, _ = camkit.Explainer(net, spread="even").batch(list(images), target=targets.box(number))

    assert (found.method, found.layer) == ("layercam-centred", "down+mixed")
    leaves: list[torch.Tensor] = []

    def starts(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
        leaves.append(output.detach().requires_grad_())
        return leaves[-1].clone()

    net.down.register_forward_hook(starts)
    net.mixed.register_forward_hook(starts)
    (row,) = net(images[:1])
    label, box = row["labels"][number], row["boxes"][number]
    (top, total), area = (torch.tensor(0.0), 0.0), (box[2:] - box[:2]).prod()
    for other, logits in zip(row["boxes"], row["all_logits"], strict=True):
        shared = (torch.minimum(box[2:], other[2:]) - torch.maximum(box[:2], other[:2])).clamp(min=0).prod()
        if shared >= 0.5 * (area + (other[2:] - other[:2]).prod() - shared):
            top, total = top + logits[label].sigmoid().item() * logits[label], total + logits[label].sigmoid().item()
    (top / total).backward()
    expected = torch.zeros(8, width // 8)
    for leaf in leaves:
        above = (leaf - leaf.mean((2, 3), keepdim=True)).detach()
        cells = (leaf.grad.clamp(min=0) * above).sum(1, keepdim=True).clamp(min=0)
        larger = functional.interpolate(cells, size=expected.shape, mode="bilinear")[0, 0]
        expected += larger * cells.numel() / larger.numel()
    assert found.score == pytest.approx(float((top / total).detach()), abs=1e-5)
    assert float(expected.max()) > 0
    assert np.allclose(found.raw, expected.numpy(), atol=1e-5 * float(expected.max()))


def test_layers_from_which_no_path_leads_to_the_boxes_past_the_others_are_no_inputs_of_the_head(monkeypatch):
    monkeypatch.setattr(levels, "_LEAST_SIDE", 1)
    torch.manual_seed(0)

    found = camkit.explain(Dense().eval(), torch.rand(3, 64, 256), target=targets.box(270))

    assert (found.method, found.layer) == ("odam", "stem+stage")


def test_a_box_without_an_area_is_explained_by_its_own_logit():
    def flat(net: Net, images: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        found = net.net(images)
        for row in found:
            row |= {name: row[name][:, [0, 1, 0, 1]] for name in ("boxes", "all_boxes")}
        return found

    torch.manual_seed(0)
    image, net = torch.rand(3, 64, 64), Dense().eval()

    found = camkit.explain(Net(flat, net=net), image, target=targets.box(9))

    assert found.score == pytest.approx(float(net(image[None])[0]["logits"][9].detach()), abs=1e-5)
    assert found.raw.max() > 0


class Mixed(nn.Module):
    """Attention between the cells of a map, added to it, as at the end of YOLO11's backbone."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        cells = maps.flatten(2).mT
        return (20 * self.attend(cells, cells, cells)[0]).mT.reshape(maps.shape) + maps


def test_the_inputs_of_a_neck_are_the_same_if_attention_mixes_the_cells_of_one():
    torch.manual_seed(0)
    net = Pyramid().eval()
    net.stages[2] = nn.Sequential(net.stages[2], Mixed())

    found = [camkit.Explainer(net)(image, targets.box(0)) for image in torch.rand(6, 3, 64, 64)]

    assert {one.layer for one in found} == {"stages.0+stages.1+stages.2"}
    assert any("not certain" in one.layer_reason for one in found)


def test_the_layer_of_a_detector_with_one_grid_lies_before_attention_that_mixes_its_cells():
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(3, 8, 3, 4, 1), nn.Tanh(), nn.Conv2d(8, 8, 3, 4, 1), nn.Tanh(), Mixed())
    head = nn.Conv2d(8, 2, 3, 1, 1)

    def boxes(net: Net, images: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        logits = net.head(net.body(images))[0].flatten(1)
        best, labels = logits.max(0)
        corners = torch.tensor([8.0, 8.0, 40.0, 40.0]).expand(len(best), 4)
        return [{"boxes": corners, "scores": best.sigmoid(), "logits": best, "labels": labels}]

    for image in torch.rand(6, 3, 64, 64):
        found = camkit.explain(Net(boxes, body=body, head=head).eval(), image, target=targets.box(0))
        assert found.layer == "body.3"


@pytest.mark.parametrize("net", [Pyramid, Dense])  # in Dense, some boxes are computed from one of the layers alone
def test_the_boxes_of_a_picture_share_the_pass_and_have_a_backward_pass_each(net):
    torch.manual_seed(0)
    sizes, backwards = [], []

    def counting(net: Net, images: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        sizes.append(len(images))
        found = net.net(images)
        for each in found:
            each[name].register_hook(backwards.append)
        return found

    name = "all_logits" if net is Dense else "logits"
    explainer = camkit.Explainer(Net(counting, net=net()))
    explainer(torch.rand(3, 64, 64), target=targets.box(0))  # chooses the layers
    sizes.clear()
    backwards.clear()

    found = explainer.batch([torch.rand(3, 64, 64)], [targets.box(number) for number in range(0, 80, 7)])

    assert len(found) == 12
    assert sizes in ([1], [1, 1])
    assert len(backwards) == 12


WORDS = ["[PAD]", *(f"[{index}]" for index in range(1, 100)), "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS += ["car", "red", "truck", *(f"[{index}]" for index in range(107, 1012)), "."]


def searcher(folder: Path, family: str) -> None:
    """Save a tiny random detector that takes texts, with a tokenizer of letters (OWL-ViT) or of a few words."""
    torch.manual_seed(0)
    few = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    if family == "grounding_dino":
        (folder / "vocab.txt").write_text("\n".join(WORDS))
        backbone = t.SwinConfig(embed_dim=8, depths=[1, 1, 1, 1], num_heads=[2] * 4, out_indices=[2, 3, 4])
        config = t.GroundingDinoConfig(
            backbone_config=backbone, text_config=t.BertConfig(vocab_size=1013, **few), **SMALL | {"num_queries": 8}
        )
        model: Any = t.GroundingDinoForObjectDetection(config)
        processor = t.GroundingDinoImageProcessor(size={"shortest_edge": 96, "longest_edge": 160})
        t.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    else:
        name = {"owlvit": "OwlViT", "owlv2": "Owlv2"}[family]
        text, seen = few | tokenizer_of_letters(folder, 16), few | {"image_size": 64, "patch_size": 16}
        config = getattr(t, f"{name}Config")(text_config=text, vision_config=seen, projection_dim=32)
        model = getattr(t, f"{name}ForObjectDetection")(config)
        processor = getattr(t, f"{name}ImageProcessor")(size={"height": 64, "width": 64})
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.kaiming_normal_(parameter)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


SEARCHERS = ["owlvit", "owlv2", "grounding_dino"]
PROCESSORS = {"owlvit": "OwlViTProcessor", "owlv2": "Owlv2Processor", "grounding_dino": "GroundingDinoProcessor"}


@pytest.mark.extended
@pytest.mark.parametrize("family", represented_by("owlvit", among=SEARCHERS))
def test_a_detector_that_takes_texts_finds_what_its_library_finds(tmp_path, family):
    searcher(tmp_path, family)
    picture = Image.open(PLANE).convert("RGB").resize((150, 100))
    texts = ["car", "red truck"]

    loaded = load_model(str(tmp_path), text=texts)
    found = camkit.explain(loaded, picture, target=targets.boxes(0.0), device="cpu")

    model = t.AutoModelForZeroShotObjectDetection.from_pretrained(tmp_path).eval()
    tokenizer = t.AutoTokenizer.from_pretrained(tmp_path)
    processor = t.AutoImageProcessor.from_pretrained(tmp_path)
    pixels = processor(images=picture, return_tensors="pt")
    whole = getattr(t, PROCESSORS[family])(processor, tokenizer)
    with torch.no_grad():
        output = model(**whole(images=picture, text=[texts], return_tensors="pt"))
    logits = output.logits[0]
    if family == "grounding_dino":
        tokens = tokenizer(["car . red truck ."])["input_ids"][0]
        assert tokenizer.convert_ids_to_tokens(tokens) == ["[CLS]", "car", ".", "red", "truck", ".", "[SEP]"]
        logits = torch.stack([logits[:, 1], logits[:, 3:5].amax(1)], 1)
    boxes = processor_boxes(output, family)
    order = logits.flatten().argsort(descending=True, stable=True)[: len(found)]
    assert torch.equal(loaded.preprocess(picture), pixels["pixel_values"][0])
    assert len({row.label for row in found}) == 2
    assert [row.label for row in found] == [texts[int(index)] for index in order % 2]
    assert [row.score for row in found] == pytest.approx(logits.flatten()[order].tolist(), abs=1e-4)
    assert np.abs(np.array([row.detection for row in found]) - boxes[order // 2].numpy()).max() < 1
    assert all((row.raw != 0).sum() > 1 for row in found)  # a box of OWL-ViT is a function of one token at the end
    with refused("needs a text that says what to find"):
        load_model(str(tmp_path))


@pytest.mark.extended
@pytest.mark.parametrize("family", SEARCHERS)
def test_the_map_of_a_detector_that_takes_texts_equals_the_slow_reference(tmp_path, family):
    searcher(tmp_path, family)
    picture, texts = Image.open(PLANE).convert("RGB").resize((150, 100)), ["car", "red truck"]
    layer = "model.input_proj_vision.1.0" if family == "grounding_dino" else f"{family}.vision_model.encoder.layers.0"

    found = camkit.explain(
        load_model(str(tmp_path), text=texts), picture, f"model.{layer}", target=targets.box(0), method="hirescam",
        device="cpu",
    )  # fmt: skip

    model = t.AutoModelForZeroShotObjectDetection.from_pretrained(tmp_path).eval()
    parts = t.AutoImageProcessor.from_pretrained(tmp_path), t.AutoTokenizer.from_pretrained(tmp_path)
    prepared = getattr(t, PROCESSORS[family])(*parts)(images=[picture] * 2, text=[texts] * 2, return_tensors="pt")
    explained = Nearest(found.score, lambda: model(**prepared).logits)
    cells = gradient_times_activation(model, layer, explained)[0]
    expected = (cells.sum(0) if family == "grounding_dino" else cells[1:].sum(1).reshape(4, 4)).numpy()
    assert np.abs(expected).max() > 1e-8
    assert found.score == pytest.approx(explained.value, rel=1e-4)
    assert np.allclose(found.raw, expected, atol=1e-3 * np.abs(expected).max())


def processor_boxes(output: Any, family: str) -> torch.Tensor:
    """Return the corners of all boxes (Q, 4) in pixels of a picture of 150 x 100 pixels."""
    middle_x, middle_y, width, height = output.pred_boxes[0].unbind(1)
    corners = [middle_x - width / 2, middle_y - height / 2, middle_x + width / 2, middle_y + height / 2]
    # OWLv2 pads the picture to a square below.
    return torch.stack(corners, 1) * torch.tensor([150, 150 if family == "owlv2" else 100] * 2)


@pytest.mark.extended
@pytest.mark.parametrize("family", represented_by("rt_detr", among=["rt_detr", "deformable_detr"]))
def test_the_inputs_of_the_necks_of_transformers_are_found(saved, family):
    found = camkit.explain(f"hf:{saved(family)}", PLANE, target=targets.box(0), device="cpu")

    assert found.method == "odam"
    assert len(found.layer.split("+")) == {"deformable_detr": 4}.get(family, 3)
    assert "proj.0" in found.layer


@pytest.mark.extended
def test_all_boxes_above_a_threshold_are_explained_in_a_shell(saved, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["--model", str(saved("detr")), "--device", "cpu", "--out", str(tmp_path / "out"), "--json"]

    assert main([str(PLANE), *options, "--threshold", "0.2"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert main([str(PLANE), *options]) == 2
    none = capsys.readouterr()

    everything = camkit.explain(str(saved("detr")), PLANE, target=targets.boxes(0.2), device="cpu")
    assert len(rows) == len(everything) > 1
    assert [row["detection"] for row in rows] == [list(row.detection) for row in everything]
    assert len({row["file"] for row in rows}) == len(rows)
    assert all(Path(row["file"]).is_file() for row in rows)
    assert "no box above the threshold of 0.5: the best box has a score of 0." in none.out + none.err


@pytest.mark.extended
@pytest.mark.parametrize("target", [None, 1, targets.box(0), targets.boxes(0.5)])
def test_a_detector_as_an_object_says_to_pass_its_name(target):
    detector, _ = made("yolos")

    with refused("hf:NAME", InputError):
        camkit.explain(detector.eval(), torch.rand(3, 96, 128), target=target)


@pytest.mark.extended
def test_one_box_is_chosen_in_a_shell(saved, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = str(saved("rt_detr"))
    best, *_ = camkit.explain(folder, PLANE, target=targets.boxes(0.0), device="cpu")
    left, top, right, bottom = best.detection
    middle = f"{(left + right) / 2},{(top + bottom) / 2}"

    def detection(*options: str) -> list[float]:
        out = ["--model", folder, "--device", "cpu", "--json", "--out", str(tmp_path / "out")]
        assert main([str(PLANE), *out, *options]) == 0
        (row,) = map(json.loads, capsys.readouterr().out.splitlines())
        return list(row["detection"])

    assert detection("--box", "0") == detection("--box-at", middle) == list(best.detection)
    assert detection("--target", best.name) == list(best.detection)
    assert detection("--target", best.name, "--part", "left") == list(best.detection)
    refused = {("--part", "left"): "name the box", ("--box-at", "3"): "takes x,y", ("--threshold", "2"): "from 0 to 1"}
    for options, said in refused.items():
        assert main([str(PLANE), "--model", folder, "--device", "cpu", *options]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.extended
def test_a_side_of_a_box_is_a_score_that_grows_outwards(saved):
    loaded = load_model(f"hf:{saved('rt_detr')}")
    image = torch.rand(3, 96, 96)

    found = {part: camkit.explain(loaded, image, target=targets.box(0, part=part)) for part in ("left", "right")}

    assert found["left"].score == pytest.approx(-found["left"].detection.left, abs=1e-4)
    assert found["right"].score == pytest.approx(found["right"].detection.right, abs=1e-4)
    assert not np.allclose(found["left"].raw, found["right"].raw)
    wrong = (
        (targets.best_box("car", part="objectness"), "returns no objectness"),
        (targets.box_at(-5, -5), "point -5,-5"),
    )
    for target, said in wrong:
        with refused(said, InputError):
            camkit.explain(loaded, image, target=target)

    for options, said in (({"weights": "w.pth"}, "leave out weights"), ({"text": "a cat"}, "takes pictures only")):
        with refused(said):
            load_model(str(saved("rt_detr")), **options)
