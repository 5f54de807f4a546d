"""Segmentation and depth networks of Hugging Face by name: prepared and decoded as their library does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import refused
from tiers import represented_by
from tiny_models import gradient_times_activation, saved_once, tokenizer_of_letters
from torch import Tensor, nn

import camkit
from camkit import targets
from camkit.cli import main
from camkit.errors import TargetError
from camkit.metrics import Evaluator
from camkit.models import load_model

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


def swin(t: Any) -> Any:
    return t.SwinConfig(embed_dim=8, depths=[1, 1, 1, 1], num_heads=[2] * 4, image_size=64, **STAGES)


def made(family: str, folder: Path) -> tuple[Any, Any]:
    """Return a tiny random network of a family and its image processor; a tokenizer goes into the folder."""
    t = pytest.importorskip("transformers")
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
            backbone_config=swin(t), decoder_config=decoder, fpn_feature_size=32, mask_feature_size=32, **LABELS
        )
        return t.MaskFormerForInstanceSegmentation(config), t.MaskFormerImageProcessor(**size)
    if family == "mask2former":
        config = t.Mask2FormerConfig(backbone_config=swin(t), feature_size=32, hidden_dim=32, **QUERIES, **LABELS)
        return t.Mask2FormerForUniversalSegmentation(config), t.Mask2FormerImageProcessor(**size)
    few = {name: value for name, value in QUERIES.items() if name != "mask_feature_size"}
    texts = {"task_seq_len": 8, "text_encoder_width": 16, "text_encoder_num_layers": 1, "text_encoder_vocab_size": 64}
    config = t.OneFormerConfig(
        backbone_config=swin(t), hidden_dim=32, conv_dim=32, mask_dim=32, query_dec_layers=1, **few, **texts, **LABELS
    )
    names = {str(index): {"name": name, "isthing": 1} for index, name in NAMES.items()}
    (folder / "classes.json").write_text(json.dumps(names))
    tokenizer_of_letters(folder, 8)
    processor = t.OneFormerImageProcessor(class_info_file="classes.json", repo_path=str(folder), **size)
    return t.OneFormerForUniversalSegmentation(config), processor


def of_depths(family: str) -> tuple[Any, Any]:
    t = pytest.importorskip("transformers")
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
    return saved_once(
        tmp_path_factory,
        lambda family, folder: of_depths(family) if family in ("dpt", "depth_anything") else made(family, folder),
    )


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
    t = pytest.importorskip("transformers")
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
@pytest.mark.parametrize("family", represented_by("mask2former", among=FAMILIES))
def test_camkit_chooses_a_layer_of_a_segmentation_network(saved, family):
    row = camkit.explain(f"hf:{saved(family)}", PLANE, device="cpu", target="cat")

    assert row.label == "cat"
    assert min(row.raw.shape) >= 2
    assert row.raw.any()


@pytest.mark.extended
@pytest.mark.parametrize("family", represented_by("dpt", among=["dpt", "depth_anything"]))
def test_the_mean_depth_of_a_region_is_explained(saved, family):
    t = pytest.importorskip("transformers")
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


class Depth(nn.Module):
    """Returns the depth of each pixel."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.maps, self.depth = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 1, 1)

    def forward(self, picture: Tensor) -> dict[str, Tensor]:
        return {"predicted_depth": self.depth(self.maps(picture).relu())[:, 0]}


def test_a_region_of_a_photo_is_the_same_place_for_maps_and_their_measures():
    def smaller(picture: Image.Image) -> Tensor:
        return torch.from_numpy(np.array(picture.convert("RGB").resize((32, 24)))).permute(2, 0, 1) / 255

    net, photo = Depth().eval(), Image.open(PLANE).convert("RGB").resize((160, 96))
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
        camkit.explain(Depth(), torch.rand(3, 32, 32), target=targets.region(500, 500, 600, 600))
