"""Hugging Face's networks as networks that camkit reads: boxes, maps of classes, and masks for prompts.

Each function here takes the library's network, and the pictures, as ``Adapter`` runs it.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torchvision.ops import box_convert

from camkit.models.inputs import Adapter

Detections = dict[str, Tensor]

_MOST_BOXES = 100
"""The most boxes of a picture: as many as the libraries' own decoding returns for most of these networks. A network
with fewer queries returns as many as it has queries."""


def boxes(
    model: nn.Module,
    images: Float[Tensor, "n c h w"],
    *,
    classes: int,
    tokens: list[list[int]] | None = None,
    **texts: Tensor,
) -> list[Detections]:
    """Return for each picture its ``boxes`` (K, 4) in pixels, their ``labels``, ``scores`` and ``logits`` (K,).

    Args:
        model: takes ``pixel_values`` and returns ``logits`` (N, queries, classes) and ``pred_boxes`` (N, queries, 4).
        images: the pictures.
        classes: how many classes it has. If it returns one logit more, this is for "no object", as in DETR.
        tokens: for a detector whose logits are for the tokens of one text (Grounding DINO), the places of each class's
            tokens; a class is the best of its tokens.
        texts: further arguments of the model, such as the tokens of texts, each for one picture.
    """
    output: Any = model(pixel_values=images, **_for_each(images, texts))
    height, width = images.shape[2:]
    sides = torch.tensor([width, height, width, height], device=images.device)
    corners = box_convert(output.pred_boxes, "cxcywh", "xyxy") * sides
    logits = output.logits
    if tokens is not None:
        logits = torch.stack([logits[:, :, places].amax(-1) for places in tokens], -1)
    return [_best(each.float(), own, classes) for each, own in zip(logits, corners, strict=True)]


def _best(logits: Float[Tensor, "q k"], corners: Float[Tensor, "q 4"], classes: int) -> Detections:
    """Return the best pairs of a query and a class; with a logit for "no object", each query's best class only."""
    if logits.shape[1] > classes:
        scores, labels = logits.softmax(-1)[:, :classes].max(-1)
        order = scores.detach().argsort(descending=True, stable=True)
        queries, labels, scores = order, labels[order], scores[order]
    else:
        flat = logits.sigmoid().flatten()
        order = flat.detach().argsort(descending=True, stable=True)[: min(_MOST_BOXES, len(logits))]
        queries, labels, scores = order // logits.shape[1], order % logits.shape[1], flat[order]
    return {"boxes": corners[queries], "scores": scores, "labels": labels, "logits": logits[queries, labels]}


def with_texts(model: nn.Module, tokenizer: Any, texts: tuple[str, ...]) -> Adapter:
    """Return a detector that takes texts, for these texts as classes."""
    kind = str(getattr(model, "config").model_type)  # noqa: B009 - a plain module has no config
    run = functools.partial(boxes, classes=len(texts))
    if "dino" not in kind:
        tokens = tokenizer(list(texts), padding="max_length", truncation=True, return_tensors="pt")
        return Adapter(model, run, input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"])
    # Grounding DINO takes one text, in which full stops end the phrases.
    phrases = [text.strip().lower().rstrip(".") for text in texts]
    tokens = tokenizer(" . ".join(phrases) + " .", return_tensors="pt")
    stops = tokenizer(".", add_special_tokens=False)["input_ids"]
    ends = [number for number, one in enumerate(tokens["input_ids"][0].tolist()) if one in stops]
    places = [list(range(start + 1, end)) for start, end in zip([0, *ends], ends, strict=False)]
    return Adapter(model, functools.partial(run, tokens=places), **tokens)


def class_maps(model: nn.Module, images: Float[Tensor, "n c h w"], **texts: Tensor) -> dict[str, Tensor]:
    """Return the ``logits`` (N, K, h, w) of MaskFormer, Mask2Former, OneFormer or DETR's masks.

    The libraries add the masks of all queries, each times the query's probability of the class (Cheng et al. 2021,
    semantic inference). The logarithm of that is a logit: its softmax is the share of the class.

    Args:
        model: takes ``pixel_values`` and returns ``class_queries_logits`` (N, queries, classes + 1) and
            ``masks_queries_logits`` (N, queries, h, w), or DETR's ``logits`` and ``pred_masks``. The last class is "no
            object".
        images: the pictures.
        texts: further arguments of the model, each for one picture.
    """
    output: Any = model(pixel_values=images, **_for_each(images, texts))
    names = ("logits", "pred_masks") if "pred_masks" in output else ("class_queries_logits", "masks_queries_logits")
    classes, masks = (output[name].float() for name in names)
    maps = torch.einsum("nqk,nqhw->nkhw", classes.softmax(-1)[..., :-1], masks.sigmoid())
    return {"logits": maps.clamp_min(torch.finfo(maps.dtype).tiny).log()}


def queried_maps(model: nn.Module, tokenizer: Any, _: tuple[str, ...] = ()) -> Adapter:
    """Return a segmentation network as one of class maps; OneFormer's tokenizer writes its task."""
    if tokenizer is None:
        return Adapter(model, class_maps)
    length = int(getattr(model, "config").task_seq_len)  # noqa: B009 - a plain module has no config
    tokens = tokenizer("the task is semantic", padding="max_length", max_length=length, truncation=True)
    return Adapter(model, class_maps, task_inputs=torch.tensor([tokens["input_ids"]]))


def _for_each(images: Tensor, texts: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.repeat(len(images), *[1] * (value.dim() - 1)) for name, value in texts.items()}


def promptable(model: nn.Module, images: Float[Tensor, "n c h w"]) -> dict[str, Any]:
    """Return the ``image_embeddings`` of pictures, and the function that decodes them, for ``targets.mask_at``.

    For networks that segment what is at a point or in a box: SAM, SAM-HQ and SAM 2 (Kirillov et al. 2023).
    """
    # The library's function computes no gradients; it wraps the one that would.
    embed = inspect.unwrap(type(model).get_image_embeddings)  # type: ignore[attr-defined]
    return {"image_embeddings": embed(model, images), "decode": functools.partial(decode, model)}


def decode(model: nn.Module, embeddings: Any, prompts: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the masks (N, K, h, w) for ``input_points`` or ``input_boxes``, and how good each is (N, K)."""
    embedded = {"image_embeddings": embeddings}
    if isinstance(embeddings, tuple):  # SAM-HQ's decoder also takes what its first blocks return
        embedded = dict(zip(("image_embeddings", "intermediate_embeddings"), embeddings, strict=True))
    output: Any = model(multimask_output=True, **embedded, **prompts)
    return output.pred_masks[:, 0].float(), output.iou_scores[:, 0].detach().float()
