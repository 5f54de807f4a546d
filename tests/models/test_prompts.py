"""Networks that cut out what a point or a box names: the masks and maps are those of the library's own full pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import refused
from tiny_models import saved_once

import camkit
from camkit import targets
from camkit.cli import main
from camkit.errors import TargetError
from camkit.models import load_model

SIDE = 64
FAMILIES = ["sam", "sam_hq", "sam2"]


def made(family: str) -> tuple[Any, Any]:
    """Return a tiny random network of a family and its image processor."""
    t = pytest.importorskip("transformers")
    torch.manual_seed(0)
    decoder = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "mlp_dim": 32}
    decoder |= {"iou_head_hidden_dim": 16}
    prompts = {"hidden_size": 16, "image_size": SIDE, "patch_size": 8, "mask_input_channels": 4}
    if family == "sam2":
        stages = {"blocks_per_stage": [1, 1, 2], "embed_dim_per_stage": [8, 16, 32]}
        stages |= {"num_attention_heads_per_stage": [1, 2, 4], "window_size_per_stage": [4, 4, 4]}
        trunk = t.Sam2HieraDetConfig(
            hidden_size=8, num_attention_heads=1, image_size=[SIDE, SIDE], num_query_pool_stages=2,
            global_attention_blocks=[3],
            window_positional_embedding_background_size=[4, 4], **stages,
        )  # fmt: skip
        vision = t.Sam2VisionConfig(
            backbone_config=trunk, backbone_channel_list=[32, 16, 8], fpn_hidden_size=16,
            backbone_feature_sizes=[[16, 16], [8, 8], [4, 4]], num_feature_levels=3, fpn_top_down_levels=[1, 2],
        )  # fmt: skip
        parts = t.Sam2PromptEncoderConfig(**prompts | {"patch_size": 16}), t.Sam2MaskDecoderConfig(**decoder)
        model = t.Sam2Model(
            t.Sam2Config(vision_config=vision, prompt_encoder_config=parts[0], mask_decoder_config=parts[1])
        )
        return model, t.Sam2ImageProcessor(size={"height": SIDE, "width": SIDE})
    name = {"sam": "Sam", "sam_hq": "SamHQ"}[family]
    vision = getattr(t, f"{name}VisionConfig")(
        hidden_size=32, output_channels=16, num_hidden_layers=2, num_attention_heads=2, image_size=SIDE, patch_size=8,
        mlp_dim=32, global_attn_indexes=[1], window_size=4, num_pos_feats=8,
    )  # fmt: skip
    decoder |= {"vit_dim": 32} if family == "sam_hq" else {}
    parts = (
        getattr(t, f"{name}PromptEncoderConfig")(**prompts),
        getattr(t, f"{name}MaskDecoderConfig")(**decoder),
    )
    config = getattr(t, f"{name}Config")(
        vision_config=vision, prompt_encoder_config=parts[0], mask_decoder_config=parts[1]
    )
    processor = t.SamImageProcessor(size={"longest_edge": SIDE}, pad_size={"height": SIDE, "width": SIDE})
    return getattr(t, f"{name}Model")(config), processor


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from a family to the folder of its tiny network."""
    return saved_once(tmp_path_factory, lambda family, _: made(family))


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, folder_of: Callable[[str], Path]) -> Path:
    """Return the folder of one family after the other."""
    return folder_of(request.param)


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    """Return a file with a picture that is wider than high, so that its points are scaled and it is padded."""
    random = np.random.default_rng(1)
    cells = np.kron(random.integers(0, 255, (6, 10, 3), dtype=np.uint8), np.ones((16, 16, 1), np.uint8))
    Image.fromarray(cells).save(file := tmp_path / "picture.png")
    return file


def by_hand(model: Any, prompts: dict[str, torch.Tensor], pixels: torch.Tensor, layer: str) -> tuple[float, Any]:
    """Return the mask's mean logit and the Grad-CAM map, from one full pass of the library's own network."""
    kept: list[torch.Tensor] = []

    def keep(module: Any, inputs: Any, output: Any) -> None:
        kept.append(output if isinstance(output, torch.Tensor) else output[0])
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
def test_the_mask_and_its_map_are_those_of_the_librarys_full_pass(folder: Path, picture: Path, kind: str, monkeypatch):
    target, name, label = PROMPTS[kind]
    seen: list[dict[str, torch.Tensor]] = []
    loaded = load_model(f"hf:{folder}")

    def noted(_: Any, __: Any, inputs: dict[str, torch.Tensor]) -> None:
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
def test_a_shell_explains_what_a_point_or_a_box_names(folder_of: Any, picture: Path, capsys, tmp_path: Path):
    common = [str(picture), "--model", f"hf:{folder_of('sam2')}", "--overwrite", "-o", str(tmp_path / "heat.png")]
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
def test_a_network_as_an_object_says_to_pass_its_name():
    network, _ = made("sam")
    for target in (None, targets.mask_at(3, 4)):
        with refused("hf:NAME", TargetError):
            camkit.explain(network.eval(), torch.rand(3, SIDE, SIDE), target=target)


def test_points_are_finite_boxes_have_an_area_and_the_network_cuts_something_out():
    with refused("such as SAM", TargetError):
        camkit.explain("demo-fair", torch.rand(3, 96, 96), target=targets.mask_at(3, 4))
    with refused("mask_at takes x and y", TargetError):
        targets.mask_at(float("nan"), 3)
    with refused("left < right", TargetError):
        targets.mask_in(9, 2, 2, 9)
