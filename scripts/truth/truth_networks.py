"""The networks of the planted-truth lab: timm's classes of each kind, small, at 64 x 64 pixels, and their training."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from timm.layers import build_sincos2d_pos_embed
from timm.models.convnext import ConvNeXt
from timm.models.deit import VisionTransformerDistilled
from timm.models.efficientnet import mobilenetv2_050
from timm.models.mlp_mixer import MlpMixer
from timm.models.pit import PoolingVisionTransformer
from timm.models.pvt_v2 import PyramidVisionTransformerV2
from timm.models.resnet import BasicBlock, ResNet
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_hybrid import HybridEmbed
from torch import Tensor, nn
from torch.nn import functional

from scripts.truth.truth_scenes import CAUSES, SIDE, Scenes, draw, normalised

GOAL = 0.95
"""The accuracy from which on a network counts."""

_ENOUGH = 0.975
"""No further cycle of training follows once this share of the held-out scenes is right."""

_SHIFT = 4
"""A batch is moved by at most this many pixels; the pixels at its border are repeated."""

_WIDTH, _DEPTH, _HEADS = 128, 6, 4


@dataclass(frozen=True)
class Training:
    """How networks are trained.

    Attributes:
        cycles: steps of each cycle; a cycle starts only if the one before left the network short of the goal.
        batch: scenes in a step.
        pool: scenes to train on, drawn once.
        held_out: scenes to test on.
    """

    cycles: tuple[int, ...] = (700, 1200, 1800)
    batch: int = 256
    pool: int = 32768
    held_out: int = 2000


def _vit(classes: int, width: int = _WIDTH, **options: object) -> nn.Module:
    settings = {"img_size": SIDE, "patch_size": 8, "embed_dim": width, "depth": _DEPTH, "num_heads": _HEADS}
    network: nn.Module = VisionTransformer(**settings | options, num_classes=classes)
    return network


def _distilled(classes: int, width: int = _WIDTH) -> nn.Module:
    network: nn.Module = VisionTransformerDistilled(
        img_size=SIDE, patch_size=8, embed_dim=width, depth=_DEPTH, num_heads=_HEADS, num_classes=classes
    )
    return network


class _Stem(nn.Sequential):
    """Three convolutions with stride 2 before the tokens."""

    num_features = 128

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        for inputs, outputs in ((3, 32), (32, 64), (64, self.num_features)):
            layers += [nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        super().__init__(*layers)


def _hybrid(classes: int, width: int = _WIDTH) -> nn.Module:
    return _vit(classes, width, embed_layer=functools.partial(HybridEmbed, _Stem()), patch_size=1)


def _swin(classes: int, width: int = _WIDTH) -> nn.Module:
    sizes = {"depths": (2, 2, 2), "num_heads": (2, 4, 8), "embed_dim": 3 * width // 8}
    network: nn.Module = SwinTransformer(img_size=SIDE, window_size=4, num_classes=classes, drop_path_rate=0.0, **sizes)
    return network


def _pyramid(classes: int, width: int = _WIDTH) -> nn.Module:
    widths = (width // 4, width // 2, 3 * width // 4, width)
    sizes = {"depths": (1, 2, 2, 1), "num_heads": (1, 2, 4, 4), "sr_ratios": (4, 2, 1, 1), "mlp_ratios": (4, 4, 4, 4)}
    network: nn.Module = PyramidVisionTransformerV2(num_classes=classes, embed_dims=widths, **sizes)
    return network


def _pooling(classes: int, width: int = _WIDTH) -> nn.Module:
    sizes = {"patch_size": 8, "stride": 4, "base_dims": (width // 4,) * 3, "depth": (2, 2, 2), "heads": (2, 4, 8)}
    network: nn.Module = PoolingVisionTransformer(img_size=SIDE, num_classes=classes, **sizes)
    return network


def _mixer(classes: int, width: int = _WIDTH) -> nn.Module:
    network: nn.Module = MlpMixer(num_classes=classes, img_size=SIDE, patch_size=8, num_blocks=_DEPTH, embed_dim=width)
    return network


def _resnet(classes: int, width: int = _WIDTH, output_stride: int = 32) -> nn.Module:
    widths = (width // 4, width // 2, width, 2 * width)
    network: nn.Module = ResNet(
        BasicBlock, (2, 2, 2, 2), num_classes=classes, channels=widths, output_stride=output_stride
    )
    return network


def _mobilenet(classes: int, width: int = _WIDTH) -> nn.Module:  # noqa: ARG001 - its widths are its own
    network: nn.Module = mobilenetv2_050(num_classes=classes)
    return network


def _convnext(classes: int, width: int = _WIDTH) -> nn.Module:
    widths = (width // 4, width // 2, width, 2 * width)
    network: nn.Module = ConvNeXt(num_classes=classes, depths=(2, 2, 4, 2), dims=widths, ls_init_value=0.1)
    return network


KINDS: dict[str, Callable[..., nn.Module]] = {
    "ViT, class token": _vit,
    "ViT, mean of tokens": functools.partial(_vit, class_token=False, global_pool="avg"),
    "ViT, 4 registers": functools.partial(_vit, reg_tokens=4),
    "ViT, distillation token": _distilled,
    "convolutions, then ViT": _hybrid,
    "Swin": _swin,
    "PVTv2": _pyramid,
    "PiT": _pooling,
    "MLP-Mixer": _mixer,
    "ResNet, last grid 2 x 2": _resnet,
    "ResNet, last grid 8 x 8": functools.partial(_resnet, output_stride=8),
    "MobileNetV2": _mobilenet,
    "ConvNeXt": _convnext,
}
"""Each takes the number of classes and, for quick trials, a width."""

_WAVES = 100.0
"""The longest wave of the first positions: the usual 10,000 is for sentences; here a row has 8 to 15 cells."""

_CONVOLUTIONAL = ("ResNet", "MobileNet", "ConvNeXt")


def build(kind: str, cause: str, width: int = _WIDTH) -> nn.Module:
    """Return an untrained network whose positions, if it learns any, start as waves.

    With timm's start, which is almost 0, a small ViT stays at chance on relations for thousands of steps.
    """
    network = KINDS[kind](CAUSES[cause], width=width)
    positions = getattr(network, "pos_embed", None)
    if isinstance(positions, nn.Parameter):
        is_grid = positions.dim() == 4
        side = positions.shape[-1] if is_grid else math.isqrt(positions.shape[1])
        waves = 0.5 * build_sincos2d_pos_embed((side, side), positions.shape[1 if is_grid else 2], temperature=_WAVES)
        with torch.no_grad():
            if is_grid:
                positions.copy_(waves.T.reshape(positions.shape))
            else:
                positions[:, -side * side :] = waves  # the class token and its like come first
    return network


def train(
    kind: str,
    cause: str,
    device: torch.device,
    training: Training,
    *,
    width: int = _WIDTH,
    seed: int = 0,
) -> tuple[nn.Module, float]:
    """Train a network, and return it in evaluation mode with its accuracy on scenes that it has not seen.

    Args:
        kind: a key of ``KINDS``.
        cause: a key of ``truth_scenes.CAUSES``.
        device: where to train.
        training: how long.
        width: of the network.
        seed: of its weights and scenes.
    """
    torch.manual_seed(seed)
    random = torch.Generator(device).manual_seed(seed)
    network = build(kind, cause, width).to(device)
    pool = draw(cause, training.pool, random)
    held_out = draw(cause, training.held_out, random)
    images, labels = pool.images, pool.labels[:, 0]
    del pool
    rate = 2e-3 if kind.startswith(_CONVOLUTIONAL) else 1e-3
    reached = 0.0
    for number, steps in enumerate(training.cycles):
        _cycle(network, images, labels, steps, training.batch, rate / (1 + number / 2), random)
        reached = accuracy(network, held_out)
        if reached >= _ENOUGH:
            break
    return network.eval(), reached


def _cycle(
    network: nn.Module,
    images: Tensor,
    labels: Tensor,
    steps: int,
    batch: int,
    rate: float,
    random: torch.Generator,
) -> None:
    """Train for one rise and fall of the learning rate."""
    network.train()
    decayed = [weight for weight in network.parameters() if weight.dim() > 1]
    others = [weight for weight in network.parameters() if weight.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, rate, fused=images.is_cuda)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=steps, pct_start=0.2)
    for _ in range(steps):
        rows = torch.randint(len(images), (batch,), generator=random, device=images.device)
        loss = functional.cross_entropy(network(_shifted(images[rows])), labels[rows])
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimiser.step()
        schedule.step()


def _shifted(images: Tensor) -> Tensor:
    """Return the pictures as inputs, all moved by the same few pixels."""
    top, left = torch.randint(2 * _SHIFT + 1, (2,)).tolist()
    wider = functional.pad(normalised(images), [_SHIFT] * 4, mode="replicate")
    return wider[:, :, top : top + SIDE, left : left + SIDE]


@torch.inference_mode()
def logits(network: nn.Module, images: Tensor, batch: int = 1024) -> Tensor:
    """Return a network's outputs for pictures of uint8."""
    network.eval()
    return torch.cat([network(normalised(part)) for part in images.split(batch)])


def accuracy(network: nn.Module, scenes: Scenes) -> float:
    """Return the share of scenes whose class a network names."""
    return float((logits(network, scenes.images).argmax(1) == scenes.labels[:, 0]).double().mean())
