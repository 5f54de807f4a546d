"""Networks of Hugging Face that return maps, by name: prepared and decoded as their library does.

These are segments of classes, depths, and what a point or a box names.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from networks import Net
from PIL import Image
from pycocotools.coco import COCO
from refusals import refused
from tiers import Extra, represented_by
from tiny_models import gradient_times_activation, saved_once, tokenizer_of_letters
from torch import Tensor, nn

import camkit
from camkit import targets
from camkit.cli import main
from camkit.errors import TargetError
from camkit.metrics import Evaluator
from camkit.models import load_model

t = Extra("transformers")
PLANE = camkit.scenes.scene_paths()["plane-sky"]
NAMES = {0: "wall", 1: "cat", 2: "dog"}
LABELS = {"id2label": NAMES, "label2id": {name: index for index, name in NAMES.items()}}
WIDTHS = {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}
STAGES = {"out_features": ["stage1", "stage2", "stage3", "stage4"]}
QUERIES = {
    "mask_feature_size": 32, "encoder_feedforward_dim": 16, "encoder_layers": 1, "decoder_layers": 2,
    "num_attention_heads": 2, "dim_feedforward": 16, "num_queries": 6,
}  # fmt: skip
TOKENS = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
NECK = {"neck_hidden_sizes": [8, 8, 16, 16], "fusion_hidden_size": 16}
QUERIED = ["maskformer", "mask2former", "oneformer"]
FAMILIES = ["segformer", "upernet", *QUERIED]
LAYERS = {
    "segformer": "segformer.stages.3",
    "upernet": "backbone.encoder.stages.3",
    "maskformer": "model.model.pixel_level_module.decoder.mask_projection",
    "mask2former": "model.model.pixel_level_module.decoder.adapter_1",
    "oneformer": "model.model.pixel_level_module.decoder.adapter_1",
}


def swin() -> Any:
    return t.SwinConfig(embed_dim=8, depths=[1, 1, 1, 1], num_heads=[2] * 4, image_size=64, **STAGES)


def made(family: str, folder: Path) -> tuple[Any, Any]:
    """Return a tiny random network of a family and its image processor; a tokenizer goes into the folder."""
    torch.manual_seed(0)
    size = {"size": {"height": 64, "width": 96}}
    if family == "segformer":
        config = t.SegformerConfig(
            hidden_sizes=[8, 16, 24, 32], depths=[1] * 4, num_attention_heads=[1, 2, 3, 4], decoder_hidden_size=16,
            **LABELS,
        )  # fmt: skip
        return t.SegformerForSemanticSegmentation(config), t.SegformerImageProcessor(**size)
    if family == "upernet":
        backbone = t.ResNetConfig(layer_type="basic", **WIDTHS, **STAGES)
        more = {"pool_scales": [1, 2], "auxiliary_channels": 8, "auxiliary_in_channels": 24}
        config = t.UperNetConfig(backbone_config=backbone, hidden_size=16, **more, **LABELS)
        return t.UperNetForSemanticSegmentation(config), t.SegformerImageProcessor(**size)
    if family == "maskformer":
        few = {f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")}
        decoder = t.DetrConfig(
            d_model=32, encoder_ffn_dim=16, decoder_ffn_dim=16, num_queries=6, use_timm_backbone=False,
            use_pretrained_backbone=False, backbone=None, backbone_config=t.ResNetConfig(layer_type="basic", **WIDTHS),
            **few,
        )  # fmt: skip
        config = t.MaskFormerConfig(
            backbone_config=swin(), decoder_config=decoder, fpn_feature_size=32, mask_feature_size=32, **LABELS
        )
        return t.MaskFormerForInstanceSegmentation(config), t.MaskFormerImageProcessor(**size)
    if family == "mask2former":
        config = t.Mask2FormerConfig(backbone_config=swin(), feature_size=32, hidden_dim=32, **QUERIES, **LABELS)
        return t.Mask2FormerForUniversalSegmentation(config), t.Mask2FormerImageProcessor(**size)
    few = {name: value for name, value in QUERIES.items() if name != "mask_feature_size"}
    texts = {"task_seq_len": 8, "text_encoder_width": 16, "text_encoder_num_layers": 1, "text_encoder_vocab_size": 64}
    config = t.OneFormerConfig(
        backbone_config=swin(), hidden_dim=32, conv_dim=32, mask_dim=32, query_dec_layers=1, **few, **texts, **LABELS
    )
    names = {str(index): {"name": name, "isthing": 1} for index, name in NAMES.items()}
    (folder / "classes.json").write_text(json.dumps(names))
    tokenizer_of_letters(folder, 8)
    processor = t.OneFormerImageProcessor(class_info_file="classes.json", repo_path=str(folder), **size)
    return t.OneFormerForUniversalSegmentation(config), processor


def of_depths(family: str) -> tuple[Any, Any]:
    torch.manual_seed(0)
    if family == "dpt":
        config = t.DPTConfig(
            image_size=64, patch_size=8, intermediate_size=32, backbone_out_indices=[0, 1, 2, 3], is_hybrid=False,
            readout_type="ignore", **TOKENS, **NECK,
        )  # fmt: skip
        return t.DPTForDepthEstimation(config), t.DPTImageProcessor(size={"height": 64, "width": 64})
    backbone = t.Dinov2Config(image_size=56, reshape_hidden_states=False, **STAGES, **TOKENS)
    config = t.DepthAnythingConfig(backbone_config=backbone, reassemble_hidden_size=32, head_hidden_size=8, **NECK)
    sides = {"height": 56, "width": 56}
    return t.DepthAnythingForDepthEstimation(config), t.DPTImageProcessor(size=sides, ensure_multiple_of=14)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the folder of a family's tiny network; each is saved once."""

    def make(family: str, folder: Path) -> tuple[Any, Any]:
        if family in PROMPTABLE:
            return made_promptable(family)
        return of_depths(family) if family in ("dpt", "depth_anything") else made(family, folder)

    return saved_once(tmp_path_factory, make)


def by_queries(output: Any) -> Tensor:
    """Return the semantic map (K, h, w) of queries, added one by one."""
    classes, masks = output.class_queries_logits[0].double(), output.masks_queries_logits[0].double()
    total = torch.zeros(classes.shape[1] - 1, *masks.shape[1:], dtype=torch.float64)
    for query, mask in zip(classes, masks, strict=True):
        shares = query.exp() / query.exp().sum()
        for index in range(len(total)):
            total[index] += shares[index] / (1 + (-mask).exp())
    return total


@pytest.mark.extended
@pytest.mark.parametrize("family", represented_by("segformer", "maskformer", among=FAMILIES))
def test_a_class_is_explained_where_its_library_finds_it(saved, family):
    folder, layer = saved(family), LAYERS[family]
    picture = Image.open(PLANE).convert("RGB").resize((150, 100))

    loaded = load_model(str(folder), device="cpu")
    row = camkit.explain(loaded, picture, layer, method="hirescam")

    auto = t.AutoModelForUniversalSegmentation if family in QUERIED else t.AutoModelForSemanticSegmentation
    model = auto.from_pretrained(folder).eval()
    processor = t.AutoImageProcessor.from_pretrained(folder)
    more = {}
    if family == "oneformer":
        whole = t.OneFormerProcessor(processor, t.AutoTokenizer.from_pretrained(folder), 8, 8)
        prepared = whole(picture, ["semantic"], return_tensors="pt")
        more = {"task_inputs": prepared["task_inputs"]}
    prepared = processor(picture, return_tensors="pt") if not more else prepared
    with torch.no_grad():
        output = model(pixel_values=prepared["pixel_values"], **more)
    maps = by_queries(output).log() if family in QUERIED else output.logits[0].double()
    best = maps.argmax(0)
    if family in ("segformer", "maskformer"):  # Mask2Former's own decoding first enlarges the masks to 384 x 384
        sizes = [tuple(best.shape)]
        assert torch.equal(best, processor.post_process_semantic_segmentation(output, target_sizes=sizes)[0])
    index = int(torch.bincount(best.flatten(), minlength=3).argmax())
    inside = best == index
    assert torch.equal(loaded.preprocess(picture), prepared["pixel_values"][0])
    assert (row.label, row.target) == (NAMES[index], index)
    assert row.score == pytest.approx(float(maps[index][inside].mean()), abs=1e-4)
    assert row.probability == pytest.approx(float(maps.softmax(0)[index][inside].mean()), abs=1e-4)

    def score() -> Tensor:
        return loaded.module(prepared["pixel_values"])["logits"][0, index][inside].mean()

    expected = gradient_times_activation(loaded.module, layer, score).sum(1)[0].numpy()
    assert np.allclose(row.raw, expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.extended
@pytest.mark.parametrize("family", represented_by("dpt", among=["dpt", "depth_anything"]))
def test_the_mean_depth_of_a_region_is_explained(saved, family):
    picture, layer = Image.open(PLANE).convert("RGB").resize((160, 80)), "neck.fusion_stage.layers.1"
    loaded = load_model(str(saved(family)), device="cpu")

    near, far = camkit.explain(
        loaded, picture, layer, method="hirescam",
        target=[targets.region(40, 20, 100, 60), targets.region(40, 20, 100, 60, sign="-")],
    )  # fmt: skip
    whole = camkit.explain(loaded, picture, layer, method="hirescam")

    model = t.AutoModelForDepthEstimation.from_pretrained(saved(family)).eval()
    prepared = t.AutoImageProcessor.from_pretrained(saved(family))(picture, return_tensors="pt")["pixel_values"]
    depth = model(prepared).predicted_depth[0].detach()
    height, width = depth.shape
    rows, columns = (torch.arange(side) + 0.5 for side in depth.shape)
    inside = ((rows * 80 / height >= 20) & (rows * 80 / height < 60))[:, None]
    inside = inside & ((columns * 160 / width >= 40) & (columns * 160 / width < 100))
    assert torch.equal(loaded.preprocess(picture), prepared[0])
    assert near.score == pytest.approx(float(depth[inside].mean()), rel=1e-4)
    assert far.score == -near.score
    assert whole.score == pytest.approx(float(depth.mean()), rel=1e-4)
    assert (near.label, whole.label) == ("+ mean depth in 40,20,100,60", "+ mean depth of the picture")

    def score() -> Tensor:
        return loaded.module(prepared).predicted_depth[0][inside].mean()

    expected = gradient_times_activation(loaded.module, layer, score).sum(1)[0].numpy()
    assert np.allclose(near.raw, expected, atol=1e-4 * np.abs(expected).max())
    assert np.allclose(far.raw, -near.raw)


def depth_net() -> Net:
    """Return a network of the depth of each pixel."""

    def run(net: Net, pictures: Tensor) -> dict[str, Tensor]:
        return {"predicted_depth": net.depth(net.maps(pictures).relu())[:, 0]}

    return Net(run, maps=nn.Conv2d(3, 8, 3, 2, 1), depth=nn.Conv2d(8, 1, 1))


def test_a_region_of_a_photo_is_the_same_place_for_maps_and_their_measures():
    def smaller(picture: Image.Image) -> Tensor:
        return torch.from_numpy(np.array(picture.convert("RGB").resize((32, 24)))).permute(2, 0, 1) / 255

    net, photo = depth_net(), Image.open(PLANE).convert("RGB").resize((160, 96))
    explainer = camkit.Explainer(net, "maps", method="gradcam", preprocess=smaller)
    target = targets.region(90, 40, 150, 90)
    row = explainer(photo, target)

    inside = net(smaller(photo)[None])["predicted_depth"][0].detach()[5:11, 9:15]  # cells of ten by eight pixels
    scores = explainer.scores_of(photo, target)
    assert row.score == pytest.approx(float(inside.mean()), rel=1e-4)
    assert scores.confidence == pytest.approx(row.score, rel=1e-5)
    changed = scores(torch.stack([scores.picture, scores.picture.flip(-1), scores.picture]))
    assert changed.tolist()[::2] == pytest.approx([row.score] * 2, rel=1e-4)
    again = Evaluator(explainer, photo, target).heat(row).made_anew(scores.picture[None])
    assert np.allclose(again[0].numpy(), row.heatmap, atol=1e-5)


@pytest.mark.extended
def test_depth_in_a_shell(saved, tmp_path, capsys):
    options = [str(PLANE), "--model", f"hf:{saved('dpt')}", "--device", "cpu", "--out", str(tmp_path), "--json"]

    assert main([*options]) == 0
    assert main([*options, "--region", "0,0,64,64"]) == 0
    assert main([*options, "--region", "0,0,64,64", "--direction", "down"]) == 0
    whole, up, down = map(json.loads, capsys.readouterr().out.splitlines())
    assert whole["label"] == "+ mean depth of the picture"
    assert up["score"] == -down["score"]
    assert down["label"] == "- mean depth in 0,0,64,64"
    assert main([*options, "--region", "0,0,64"]) == 2
    assert "--region takes left,top,right,bottom" in capsys.readouterr().err
    assert main([*options, "--region", "0,0,4,4", "--box", "1"]) == 2
    assert "cannot be combined" in capsys.readouterr().err


def test_a_region_without_an_area_or_a_map_is_refused():
    for sides in ((1, 2, 3), (5, 5, 5, 9), (0, 0, float("nan"), 4)):
        with refused("takes left, top, right and bottom", TargetError):
            targets.region(*sides)
    with refused("not a map of numbers", TargetError):
        camkit.explain("demo-fair", PLANE, target=targets.region())
    with refused("outside the part", TargetError):
        camkit.explain(depth_net(), torch.rand(3, 32, 32), target=targets.region(500, 500, 600, 600))


# --- what a point or a box names

SIDE = 64
PROMPTABLE = ["sam", "sam_hq", "sam2"]


def made_promptable(family: str) -> tuple[Any, Any]:
    """Return a tiny random network of a family and its image processor."""
    torch.manual_seed(0)
    size = {"height": SIDE, "width": SIDE}
    prompts = {"hidden_size": 16, "image_size": SIDE, "mask_input_channels": 4}
    decoder = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "mlp_dim": 32}
    parts: dict[str, Any] = {"mask_decoder_config": decoder | {"iou_head_hidden_dim": 16}}
    if family == "sam2":
        trunk = {
            "hidden_size": 8, "num_attention_heads": 1, "image_size": [SIDE, SIDE], "num_query_pool_stages": 2,
            "blocks_per_stage": [1, 1, 2], "embed_dim_per_stage": [8, 16, 32], "window_size_per_stage": [4] * 3,
            "global_attention_blocks": [3], "num_attention_heads_per_stage": [1, 2, 4],
            "window_positional_embedding_background_size": [4, 4],
        }  # fmt: skip
        neck = {
            "backbone_channel_list": [32, 16, 8], "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
            "num_feature_levels": 3, "fpn_top_down_levels": [1, 2], "fpn_hidden_size": 16,
        }  # fmt: skip
        parts["vision_config"] = t.Sam2VisionConfig(backbone_config=t.Sam2HieraDetConfig(**trunk), **neck)
        config = t.Sam2Config(**parts, prompt_encoder_config=prompts | {"patch_size": 16})
        return t.Sam2Model(config), t.Sam2ImageProcessor(size=size)
    name = {"sam": "Sam", "sam_hq": "SamHQ"}[family]
    parts["vision_config"] = {
        "hidden_size": 32, "output_channels": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": SIDE,
        "patch_size": 8, "mlp_dim": 32, "global_attn_indexes": [1], "window_size": 4, "num_pos_feats": 8,
    }  # fmt: skip
    if family == "sam_hq":
        parts["mask_decoder_config"]["vit_dim"] = 32
    config = getattr(t, f"{name}Config")(**parts, prompt_encoder_config=prompts | {"patch_size": 8})
    return getattr(t, f"{name}Model")(config), t.SamImageProcessor(size={"longest_edge": SIDE}, pad_size=size)


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    """Return a file with a picture that is wider than high, so that its points are scaled and it is padded."""
    random = np.random.default_rng(1)
    cells = np.kron(random.integers(0, 255, (6, 10, 3), dtype=np.uint8), np.ones((16, 16, 1), np.uint8))
    Image.fromarray(cells).save(file := tmp_path / "picture.png")
    return file


def by_hand(model: Any, prompts: dict[str, Tensor], pixels: Tensor, layer: str) -> tuple[float, Any]:
    """Return the mask's mean logit and the Grad-CAM map, from one full pass of the library's own network."""
    kept: list[Tensor] = []

    def keep(module: Any, inputs: Any, output: Any) -> None:
        kept.append(output if isinstance(output, Tensor) else output[0])
        kept[-1].retain_grad()

    with torch.enable_grad():
        handle = model.get_submodule(layer.removeprefix("model.")).register_forward_hook(keep)
        output = model(pixel_values=pixels.requires_grad_(), multimask_output=True, **prompts)
        handle.remove()
        logits = output.pred_masks[0, 0, output.iou_scores[0, 0].argmax()]
        inside = logits > 0 if bool((logits > 0).any()) else torch.ones_like(logits, dtype=torch.bool)
        score = logits[inside].mean()
        score.backward()
    maps, gradients = kept[0].detach(), kept[0].grad
    assert gradients is not None
    channels = 3 if "layers" in layer else 1  # SAM's blocks return (N, h, w, C), SAM 2's neck (N, C, h, w)
    maps, gradients = maps.movedim(channels, 1), gradients.movedim(channels, 1)
    return float(score.detach()), (maps * gradients.mean((2, 3), keepdim=True)).sum(1)[0].numpy()


PROMPTS = {
    "point": (targets.mask_at(100, 40), "input_points", "mask at 100,40"),
    "box": (targets.mask_in(16, 8, 120, 70), "input_boxes", "mask in 16,8,120,70"),
}


@pytest.mark.extended
@pytest.mark.parametrize("kind", PROMPTS)
@pytest.mark.parametrize("family", PROMPTABLE)
def test_the_mask_and_its_map_are_those_of_the_librarys_full_pass(saved: Any, family: str, picture: Path, kind: str):
    target, name, label = PROMPTS[kind]
    seen: list[dict[str, Tensor]] = []
    loaded = load_model(f"hf:{saved(family)}")

    def noted(_: Any, __: Any, inputs: dict[str, Tensor]) -> None:
        if name in inputs:
            seen.append({key: value for key, value in inputs.items() if key.startswith("input_")})

    loaded.module.model.register_forward_pre_hook(noted, with_kwargs=True)
    found = camkit.explain(loaded, picture, target=target, method="gradcam")
    assert found.label == label
    model = loaded.module.model
    with Image.open(picture) as opened:
        width, height = opened.size
        pixels = loaded.preprocess(opened)[None]
    # SAM resizes the longer side and pads, SAM 2 resizes both sides.
    across, down = (SIDE / width, SIDE / height) if "Sam2" in type(model).__name__ else (SIDE / width, SIDE / width)
    expected = torch.tensor(target.points) * torch.tensor([across, down])
    # camkit measures where points go, whatever the preprocessing is.
    assert (seen[-1][name].flatten() - expected.flatten()).abs().max() < 0.5
    score, heat = by_hand(model, seen[-1], pixels, found.layer)
    assert abs(found.score - score) <= 1e-4 * abs(score)
    assert heat.shape == found.raw.shape
    assert np.abs(found.raw - heat).max() <= 1e-3 * np.abs(heat).max()


@pytest.mark.extended
def test_a_shell_explains_what_a_point_or_a_box_names(saved: Any, picture: Path, capsys, tmp_path: Path):
    common = [str(picture), "--model", f"hf:{saved('sam2')}", "--overwrite", "-o", str(tmp_path / "heat.png")]
    for option, words in {
        "--point=100,40": "mask at 100,40",
        "--box-prompt=16,8,120,70": "mask in 16,8,120,70",
    }.items():
        assert main([*common, option]) == 0
        assert words in capsys.readouterr().out
    refused = {(): "--point", ("--point", "3"): "takes x,y", ("--box-prompt", "9,9,2,2"): "left < right"}
    for options, words in refused.items():
        assert main([*common, *options]) == 2
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1


@pytest.mark.extended
@pytest.mark.parametrize("family", ["sam", "sam2"])
def test_masks_from_boxes_are_those_of_the_library(saved: Any, family: str, picture: Path, tmp_path: Path):
    box = (16, 8, 120, 70)
    (table := tmp_path / "boxes.csv").write_text(f"path,xmin,ymin,xmax,ymax\n{picture.name},16,8,120,70\n")
    coco = COCO(camkit.regions(picture.parent, regions=table, by=f"hf:{saved(family)}", out=tmp_path / "out"))
    (made,) = coco.anns.values()
    processor, model = t.AutoProcessor.from_pretrained(saved(family)), t.AutoModel.from_pretrained(saved(family))
    with Image.open(picture) as opened:
        prepared = processor(images=opened.convert("RGB"), input_boxes=[[[*map(float, box)]]], return_tensors="pt")
    with torch.no_grad():
        output = model.eval()(**prepared, multimask_output=True)
    sizes = [prepared["original_sizes"]] + ([prepared["reshaped_input_sizes"]] if family == "sam" else [])
    (masks,) = processor.post_process_masks(output.pred_masks, *sizes)
    best = masks[0, output.iou_scores[0, 0].argmax()].numpy()
    found = coco.annToMask(made).astype(bool)
    assert made["from_box"] == "cut"
    assert (found & best).sum() / (found | best).sum() > 0.95


def test_points_are_finite_boxes_have_an_area_and_the_network_cuts_something_out():
    with refused("such as SAM", TargetError):
        camkit.explain("demo-fair", torch.rand(3, 96, 96), target=targets.mask_at(3, 4))
    with refused("mask_at takes x and y", TargetError):
        targets.mask_at(float("nan"), 3)
    with refused("left < right", TargetError):
        targets.mask_in(9, 2, 2, 9)
