"""Train small detectors on drawn scenes, whose heat ``drawn_detectors`` judges.

    OMP_NUM_THREADS=1 python -m scripts.truth.train_detectors detr --out detectors/ --minutes 7 --device cuda

``detr``, ``conditional`` (a conditional DETR) and ``yolos`` are Hugging Face's classes with few weights. ``detect``
and ``obb`` are ultralytics' smallest networks; they need that package, whose training reads the scenes from a folder.
All start from random weights. ``segment`` adds masks to the trained ``detect``, and trains only these.

The loss of the first three is that of DETR (Carion et al. 2020). A scene has at most four toys and a network eight
boxes, so the best assignment is found by trying all of them at once, on the device.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import itertools
import multiprocessing
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from PIL import Image
from torch import Tensor, nn
from torchvision.ops import box_convert, box_iou, generalized_box_iou_loss, sigmoid_focal_loss

from scripts.truth.drawn_toys import JUDGED, MOST_TOYS, TRAINING, Scene, draw
from scripts.words.word_scenes import SHAPES, SIDE

QUERIES = 8
WEIGHTS = {"class": 1.0, "distance": 5.0, "overlap": 2.0}
"""Of the parts of DETR's loss."""
OF_NOTHING = 0.3
"""How much a query without a toy counts in the loss of the classes."""
WARM_UP = 500
"""Steps in which the rate grows."""
NOISE, LIGHT = 0.02, 0.1
"""Random changes of the training pictures, which have values from 0 to 1."""
ULTRALYTICS = {"detect": "yolo11n.yaml", "segment": "yolo11n-seg.yaml", "obb": "yolo11n-obb.yaml"}


@dataclass(frozen=True, eq=False)
class Wanted:
    """The toys of scenes: which of the four exist (N, 4), their classes (N, 4), and middles and sides (N, 4, 4)."""

    present: Tensor
    labels: Tensor
    boxes: Tensor


def names() -> dict[str, Any]:
    """Return what all configurations share."""
    return {"id2label": dict(enumerate(SHAPES)), "label2id": {shape: number for number, shape in enumerate(SHAPES)}}


def small_yolos() -> Any:
    """Return a YOLOS with random weights."""
    return hf.YolosForObjectDetection(
        hf.YolosConfig(
            hidden_size=96, intermediate_size=256, num_hidden_layers=5, num_attention_heads=4, image_size=[SIDE, SIDE],
            patch_size=8, num_detection_tokens=QUERIES, use_mid_position_embeddings=False, **names(),
        )
    )  # fmt: skip


def small_detr(network: str) -> Any:
    """Return a DETR or a conditional DETR with random weights. The classes freeze the backbone; here it learns too."""
    backbone = hf.ResNetConfig(
        embedding_size=32, hidden_sizes=[32, 64, 128], depths=[1, 2, 2], layer_type="basic", out_features=["stage2"]
    )
    settings = {
        "backbone_config": backbone, "use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None,
        "d_model": 96, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 256, "decoder_ffn_dim": 256, "dropout": 0.0,
        "num_queries": QUERIES, "auxiliary_loss": network == "detr", **names(),
    }  # fmt: skip
    if network == "detr":
        return hf.DetrForObjectDetection(hf.DetrConfig(**settings)).requires_grad_(True)
    return hf.ConditionalDetrForObjectDetection(hf.ConditionalDetrConfig(**settings)).requires_grad_(True)


def processor_of(network: str) -> Any:
    """Return the processor that prepares pictures for a network of Hugging Face."""
    kinds = {
        "yolos": hf.YolosImageProcessor,
        "detr": hf.DetrImageProcessor,
        "conditional": hf.ConditionalDetrImageProcessor,
    }
    return kinds[network](size={"height": SIDE, "width": SIDE}, do_pad=False)


def predicted(model: Any, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits (layers, N, queries, classes) and boxes (layers, N, queries, 4) of each trained layer.

    The last class is "nothing", but for the conditional DETR, whose classes are independent of each other.
    """
    if isinstance(model, hf.ConditionalDetrForObjectDetection):
        output = model(pixel_values=pixels)
        return output.logits[None], output.pred_boxes[None]
    if isinstance(model, hf.YolosForObjectDetection):
        states = model.vit(pixel_values=pixels).last_hidden_state[None, :, -QUERIES:]
    else:
        states = model.model(pixel_values=pixels).intermediate_hidden_states
    return model.class_labels_classifier(states), model.bbox_predictor(states).sigmoid()


def spread_evenly(model: nn.Module, pixels: Tensor) -> None:
    """Give each frozen batch norm the statistics of its own inputs; untrained, they would divide by 1."""

    def measure(norm: Any, given: tuple[Tensor, ...]) -> None:
        norm.running_mean.copy_(given[0].mean((0, 2, 3)))
        norm.running_var.copy_(given[0].var((0, 2, 3)))

    norms = [module for module in model.modules() if "FrozenBatchNorm" in type(module).__name__]
    handles = [norm.register_forward_pre_hook(measure) for norm in norms]
    with torch.no_grad():
        predicted(model, pixels)
    for handle in handles:
        handle.remove()


def assigned(costs: Tensor, present: Tensor, ways: Tensor) -> Tensor:
    """Return the query of each toy (N, 4) with the least sum of costs (N, queries, 4); ``ways`` are all assignments."""
    of_toys = (costs * present[:, None]).transpose(1, 2)  # N, toys, queries
    sums = sum(of_toys[:, toy].index_select(1, ways[:, toy]) for toy in range(ways.shape[1]))
    assert isinstance(sums, Tensor)
    return ways[sums.argmin(1)]


def loss_of(logits: Tensor, boxes: Tensor, wanted: Wanted, ways: Tensor) -> tuple[Tensor, Tensor]:
    """Return DETR's loss of one decoder layer, and the share of the toys whose query has the right class."""
    present, count = wanted.present.float(), wanted.present.sum()
    with torch.no_grad():
        wide = (len(boxes), QUERIES, MOST_TOYS, 4)
        pairs = boxes[:, :, None].expand(wide), wanted.boxes[:, None].expand(wide)
        independent = logits.shape[-1] == len(SHAPES)
        likely = logits.sigmoid() if independent else logits.softmax(-1)
        likely = likely.gather(2, wanted.labels[:, None].expand(-1, QUERIES, -1))
        costs = WEIGHTS["distance"] * (pairs[0] - pairs[1]).abs().sum(-1) - WEIGHTS["class"] * likely
        queries = assigned(costs + WEIGHTS["overlap"] * _apart(*pairs), present, ways)
    own = boxes.gather(1, queries[..., None].expand(-1, -1, 4))
    distance = ((own - wanted.boxes).abs().sum(-1) * present).sum() / count
    overlap = (_apart(own, wanted.boxes) * present).sum() / count
    nothing = torch.full(logits.shape[:2], len(SHAPES), device=logits.device)
    labels = nothing.scatter(1, queries, torch.where(wanted.present, wanted.labels, len(SHAPES)))
    if independent:
        truth = nn.functional.one_hot(labels, len(SHAPES) + 1)[..., :-1].float()
        by_class = 2 * sigmoid_focal_loss(logits, truth).sum() / count
    else:
        weights = torch.ones(len(SHAPES) + 1, device=logits.device)
        weights[-1] = OF_NOTHING
        by_class = nn.functional.cross_entropy(logits.transpose(1, 2), labels, weights)
    right = (logits.argmax(-1) == labels) & (labels < len(SHAPES))
    total = WEIGHTS["class"] * by_class + WEIGHTS["distance"] * distance + WEIGHTS["overlap"] * overlap
    return total, right.sum() / count


def _apart(boxes: Tensor, others: Tensor) -> Tensor:
    corners = [box_convert(each, "cxcywh", "xyxy") for each in (boxes, others)]
    apart: Tensor = generalized_box_iou_loss(*corners)
    return apart


def scenes_for(count: int, workers: int) -> tuple[Tensor, Wanted]:
    """Draw scenes in processes of their own; return the pictures (N, 3, 64, 64) as bytes, and their toys."""
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        scenes = pool.map(draw, [(TRAINING, number) for number in range(count)], chunksize=100)
    present = torch.zeros(count, MOST_TOYS, dtype=torch.bool)
    labels = torch.zeros(count, MOST_TOYS, dtype=torch.long)
    boxes = torch.full((count, MOST_TOYS, 4), 0.5)
    for number, scene in enumerate(scenes):
        toys = len(scene.labels)
        present[number, :toys] = True
        labels[number, :toys] = torch.tensor(scene.labels)
        boxes[number, :toys] = box_convert(torch.from_numpy(scene.boxes), "xyxy", "cxcywh") / SIDE
    pictures = torch.from_numpy(np.stack([scene.picture for scene in scenes])).permute(0, 3, 1, 2).contiguous()
    return pictures, Wanted(present, labels, boxes)


def changed(pictures: Tensor, boxes: Tensor) -> tuple[Tensor, Tensor]:
    """Return pictures as numbers from 0 to 1 and boxes, half of them mirrored, with other light and noise."""
    pixels = pictures.float() / 255
    mirrored = torch.rand(len(pixels), 1, 1, 1, device=pixels.device) < 0.5
    pixels = torch.where(mirrored, pixels.flip(3), pixels)
    other = torch.cat([1 - boxes[..., :1], boxes[..., 1:]], -1)
    light = 1 + LIGHT * (2 * torch.rand(len(pixels), 1, 1, 1, device=pixels.device) - 1)
    pixels = (pixels * light + NOISE * torch.randn_like(pixels)).clamp(0, 1)
    return pixels, torch.where(mirrored[:, 0], other, boxes)


def train(network: str, given: argparse.Namespace) -> None:
    """Train a network of Hugging Face for some minutes, and write it with its processor."""
    torch.set_float32_matmul_precision("high")
    start, seconds, folder = time.monotonic(), 60 * given.minutes, given.out / network
    device, processor = torch.device(given.device), processor_of(network)
    pictures, wanted = scenes_for(given.scenes, given.workers)  # before the device is used: its processes are forks
    model = (small_yolos() if network == "yolos" else small_detr(network)).to(device).train()
    pictures, present = pictures.to(device), wanted.present.to(device)
    labels, boxes = wanted.labels.to(device), wanted.boxes.to(device)
    mean, deviation = (
        torch.tensor(values, device=device).view(3, 1, 1) for values in (processor.image_mean, processor.image_std)
    )
    ways = torch.tensor(list(itertools.permutations(range(QUERIES), MOST_TOYS)), device=device)
    if network != "yolos":
        spread_evenly(model, (pictures[:1000].float() / 255 - mean) / deviation)
    print(f"{sum(each.numel() for each in model.parameters()):,} weights, {time.monotonic() - start:.0f} s", flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.rate, weight_decay=1e-4)
    shown, step, done = time.monotonic(), 0, 0.0
    while done < 1:
        for rows in torch.randperm(given.scenes, device=device).split(given.batch):
            done = min((time.monotonic() - start) / seconds, 1)
            optimizer.param_groups[0]["lr"] = given.rate * min((step + 1) / WARM_UP, 1) * (1 - done + 0.005)
            pixels, moved = changed(pictures[rows], boxes[rows])
            of_batch = Wanted(present[rows], labels[rows], moved)
            layers = zip(*predicted(model, (pixels - mean) / deviation), strict=True)
            losses = [loss_of(logits, at, of_batch, ways) for logits, at in layers]
            loss = torch.stack([each for each, _ in losses]).sum()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            if time.monotonic() - shown > given.every or done >= 1:
                shown = time.monotonic()
                model.save_pretrained(folder)
                processor.save_pretrained(folder)
                last, right = (float(each.detach()) for each in losses[-1])
                print(f"{step} at {done:.0%}: loss {last:.3f}, {right:.0%} of the classes", flush=True)
            if done >= 1:
                break


def train_ultralytics(task: str, given: argparse.Namespace) -> None:
    """Write the scenes as ultralytics reads them, and train its smallest network for the task."""
    ultralytics = importlib.import_module("ultralytics")  # the reader's own package
    data = given.out / f"scenes-{task}"
    for part, count, kind in (("train", given.scenes, TRAINING), ("val", 100, JUDGED)):
        for folder in ("images", "labels"):
            (data / folder / part).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            scene = draw((kind, number))
            Image.fromarray(scene.picture).save(data / f"images/{part}/{number}.png")
            (data / f"labels/{part}/{number}.txt").write_text("\n".join(_rows(scene, task)))
    listed = "".join(f"  {number}: {shape}\n" for number, shape in enumerate(SHAPES))
    (data / "data.yaml").write_text(f"path: {data.resolve()}\ntrain: images/train\nval: images/val\nnames:\n{listed}")
    ultralytics.YOLO(ULTRALYTICS[task]).train(
        data=str(data / "data.yaml"), imgsz=SIDE, batch=given.batch, device=given.device, workers=given.workers,
        epochs=given.epochs, time=given.minutes / 60 if given.minutes else None, optimizer="AdamW", lr0=1e-3,
        cache="ram", mosaic=0.0, amp=False,
        project=str(given.out.resolve()), name=task, exist_ok=True, plots=False, val=False,
    )  # fmt: skip


def train_masks(given: argparse.Namespace) -> None:
    """Give the trained ``detect`` a branch for masks, train only that, and write it as ``segment``.

    The loss is the package's: for the anchor with the best box of each toy, whether each cell of the box is covered.
    """
    ultralytics = importlib.import_module("ultralytics")
    known = torch.load(given.out / "detect/weights/last.pt", map_location="cpu", weights_only=False)
    whole = ultralytics.YOLO(ULTRALYTICS["segment"])
    model = ultralytics.nn.tasks.SegmentationModel(ULTRALYTICS["segment"], nc=len(SHAPES), verbose=False).eval()
    model.load_state_dict((known["ema"] or known["model"]).float().state_dict(), strict=False)
    model.names, model.args = dict(enumerate(SHAPES)), {**whole.overrides, "imgsz": SIDE, "task": "segment"}
    model.requires_grad_(False)
    branch = [*model.model[-1].proto.parameters(), *model.model[-1].cv4.parameters()]
    for parameter in branch:
        parameter.requires_grad_(True)
    optimizer = torch.optim.AdamW(branch, lr=2e-3)
    (given.out / "segment/weights").mkdir(parents=True, exist_ok=True)
    start, shown, step, done = time.monotonic(), time.monotonic(), 0, 0.0
    while done < 1:
        done = min((time.monotonic() - start) / (60 * given.minutes), 1)
        optimizer.param_groups[0]["lr"] = 2e-3 * (1 - done + 0.01)
        scenes = [draw((TRAINING, step * given.batch + number)) for number in range(given.batch)]
        pictures = np.stack([scene.picture for scene in scenes])
        (found, prototypes), raw = model(torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 255)
        losses = []
        for number, scene in enumerate(scenes):
            boxes, masks = torch.from_numpy(scene.boxes), torch.from_numpy(scene.masks).float()
            corners = box_convert(found[number, :4].detach().T, "cxcywh", "xyxy")
            likely = found[number, 4 : 4 + len(SHAPES)].detach().T[:, list(scene.labels)]
            anchors = (box_iou(corners, boxes) * likely).argmax(0)
            logits = torch.einsum("mk,mhw->khw", raw["mask_coefficient"][number][:, anchors], prototypes[number])
            covered, inside = (
                nn.functional.adaptive_avg_pool2d(each, (logits.shape[1], logits.shape[2]))
                for each in (masks, _filled(boxes))
            )
            loss = nn.functional.binary_cross_entropy_with_logits(logits, (covered > 0.5).float(), reduction="none")
            losses.append((loss * inside).sum() / inside.sum())
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if time.monotonic() - shown > given.every or done >= 1:
            shown = time.monotonic()
            held = copy.deepcopy(model).requires_grad_(False)
            torch.save({"model": held, "train_args": {}}, given.out / "segment/weights/last.pt")
            print(f"{step} at {done:.0%}: {float(loss.detach()):.3f}", flush=True)


def _filled(boxes: Tensor) -> Tensor:
    """Return boxes as masks (K, 64, 64)."""
    filled = torch.zeros(len(boxes), SIDE, SIDE)
    for mask, (left, top, right, bottom) in zip(filled, boxes.int().tolist(), strict=True):
        mask[top:bottom, left:right] = 1
    return filled


def _rows(scene: Scene, task: str) -> list[str]:
    """Return a line for each toy: its class, and the middle and sides of its box, or the corners of its turned box."""
    if task == "detect":
        places = list(box_convert(torch.from_numpy(scene.boxes), "xyxy", "cxcywh").numpy())
    else:
        places = list(scene.turned_boxes)
    return [
        f"{label} {' '.join(f'{value:.5f}' for value in np.clip(np.ravel(place) / SIDE, 0, 1))}"
        for label, place in zip(scene.labels, places, strict=True)
    ]


def main() -> None:
    """Train one detector."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("network", choices=["yolos", "detr", "conditional", *ULTRALYTICS])
    parser.add_argument("--out", type=Path, default=Path("detectors"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--minutes", type=float, default=7, help="0, for ultralytics alone: train for --epochs")
    parser.add_argument("--epochs", type=int, default=100, help="epochs for ultralytics' networks")
    parser.add_argument("--scenes", type=int, default=20_000)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rate", type=float, default=5e-4)
    parser.add_argument("--workers", type=int, default=2, help="processes that draw or read scenes")
    parser.add_argument("--every", type=float, default=30, help="seconds between two lines")
    given = parser.parse_args()
    torch.manual_seed(0)
    if given.network == "segment":
        train_masks(given)
    elif given.network in ULTRALYTICS:
        train_ultralytics(given.network, given)
    else:
        train(given.network, given)


if __name__ == "__main__":
    main()
