"""Hugging Face's detectors as modules that return boxes: the DETR family, YOLOS, and detectors that take texts."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torchvision.ops import box_convert

Detections = dict[str, Tensor]

_MOST_BOXES = 100
"""The most boxes of a picture: as many as the libraries' own decoding returns for most of these networks. A network
with fewer queries returns as many as it has queries."""


class Boxes(nn.Module):
    """A detector of Hugging Face's that returns each picture's boxes, best first.

    Args:
        model: takes ``pixel_values`` and returns ``logits`` (N, queries, classes) and ``pred_boxes`` (N, queries, 4).
        classes: how many classes it has. If it returns one logit more, this is for "no object", as in DETR.
        inputs: further arguments of the model, such as the tokens of texts, each for one picture.
    """

    def __init__(self, model: nn.Module, classes: int, inputs: dict[str, Tensor] | None = None) -> None:
        super().__init__()
        self.model = model
        self.classes = classes
        self._names = tuple(inputs or ())
        for name, value in (inputs or {}).items():
            self.register_buffer(name, value)

    def forward(self, images: Float[Tensor, "n c h w"]) -> list[Detections]:
        """Return for each picture its ``boxes`` (K, 4) in pixels, their ``labels``, ``scores`` and ``logits`` (K,)."""
        held = {name: getattr(self, name) for name in self._names}
        rest = {name: value.repeat(len(images), *[1] * (value.dim() - 1)) for name, value in held.items()}
        output: Any = self.model(pixel_values=images, **rest)
        height, width = images.shape[2:]
        sides = torch.tensor([width, height, width, height], device=images.device)
        corners = box_convert(output.pred_boxes, "cxcywh", "xyxy") * sides
        return [
            self._best(logits.float(), boxes)
            for logits, boxes in zip(self._by_class(output.logits), corners, strict=True)
        ]

    def _by_class(self, logits: Tensor) -> Tensor:
        """Return the logits (N, queries, classes) from the model's logits."""
        return logits

    def _best(self, logits: Float[Tensor, "q k"], boxes: Float[Tensor, "q 4"]) -> Detections:
        """Return the best pairs of a query and a class; with a logit for "no object", each query's best class only."""
        if logits.shape[1] > self.classes:
            scores, labels = logits.softmax(-1)[:, : self.classes].max(-1)
            order = scores.detach().argsort(descending=True, stable=True)
            queries, labels, scores = order, labels[order], scores[order]
        else:
            flat = logits.sigmoid().flatten()
            order = flat.detach().argsort(descending=True, stable=True)[: min(_MOST_BOXES, len(logits))]
            queries, labels, scores = order // logits.shape[1], order % logits.shape[1], flat[order]
        return {"boxes": boxes[queries], "scores": scores, "labels": labels, "logits": logits[queries, labels]}


class PhraseBoxes(Boxes):
    """A detector whose logits are for the tokens of one text (Grounding DINO): a class is the best of its tokens.

    Args:
        model, inputs: as for ``Boxes``.
        tokens: for each class, the places of its tokens in the text.
    """

    def __init__(self, model: nn.Module, inputs: dict[str, Tensor], tokens: list[list[int]]) -> None:
        super().__init__(model, len(tokens), inputs)
        self.tokens = tokens

    def _by_class(self, logits: Tensor) -> Tensor:
        return torch.stack([logits[:, :, places].amax(-1) for places in self.tokens], -1)


def with_texts(model: nn.Module, tokenizer: Any, texts: tuple[str, ...]) -> Boxes:
    """Return a detector that takes texts, for these texts as classes."""
    kind = str(getattr(model, "config").model_type)  # noqa: B009 - a plain module has no config
    if "dino" not in kind:
        tokens = tokenizer(list(texts), padding="max_length", truncation=True, return_tensors="pt")
        return Boxes(model, len(texts), {name: tokens[name] for name in ("input_ids", "attention_mask")})
    # Grounding DINO takes one text, in which full stops end the phrases.
    phrases = [text.strip().lower().rstrip(".") for text in texts]
    tokens = tokenizer(" . ".join(phrases) + " .", return_tensors="pt")
    stops = tokenizer(".", add_special_tokens=False)["input_ids"]
    ends = [number for number, one in enumerate(tokens["input_ids"][0].tolist()) if one in stops]
    starts = [0, *ends]
    places = [list(range(start + 1, end)) for start, end in zip(starts, ends, strict=False)]
    return PhraseBoxes(model, dict(tokens), places)
