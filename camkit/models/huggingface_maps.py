"""Hugging Face's segmentation networks, whose queries each find a mask and its class, as networks of class maps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn


class QueriedMaps(nn.Module):
    """MaskFormer, Mask2Former, OneFormer or DETR's masks as a network that returns a map for each class.

    The libraries add the masks of all queries, each times the query's probability of the class (Cheng et al. 2021,
    semantic inference). The logarithm of that is a logit: its softmax is the share of the class.

    Args:
        model: takes ``pixel_values`` and returns ``class_queries_logits`` (N, queries, classes + 1) and
            ``masks_queries_logits`` (N, queries, h, w), or DETR's ``logits`` and ``pred_masks``. The last class is "no
            object".
        inputs: further arguments of the model, each for one picture.
    """

    def __init__(self, model: nn.Module, inputs: Mapping[str, Tensor] | None = None) -> None:
        super().__init__()
        self.model = model
        self._names = tuple(inputs or ())
        for name, value in (inputs or {}).items():
            self.register_buffer(name, value)

    def forward(self, images: Float[Tensor, "n c h w"]) -> dict[str, Tensor]:
        """Return the ``logits`` (N, K, h, w)."""
        rest = {name: getattr(self, name).expand(len(images), -1) for name in self._names}
        output: Any = self.model(pixel_values=images, **rest)
        names = ("logits", "pred_masks") if "pred_masks" in output else ("class_queries_logits", "masks_queries_logits")
        classes, masks = (output[name].float() for name in names)
        maps = torch.einsum("nqk,nqhw->nkhw", classes.softmax(-1)[..., :-1], masks.sigmoid())
        return {"logits": maps.clamp_min(torch.finfo(maps.dtype).tiny).log()}


def queried_maps(model: nn.Module, tokenizer: Any, _: tuple[str, ...] = ()) -> QueriedMaps:
    """Return a segmentation network as one of class maps; OneFormer's tokenizer writes its task."""
    if tokenizer is None:
        return QueriedMaps(model)
    length = int(getattr(model, "config").task_seq_len)  # noqa: B009 - a plain module has no config
    tokens = tokenizer("the task is semantic", padding="max_length", max_length=length, truncation=True)
    return QueriedMaps(model, {"task_inputs": torch.tensor([tokens["input_ids"]])})
