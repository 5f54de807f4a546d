"""Hugging Face's networks that segment what is at a point or in a box: SAM, SAM-HQ and SAM 2."""

from __future__ import annotations

import inspect
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn


class Promptable(nn.Module):
    """A network that returns what its decoder needs to segment things in pictures (Kirillov et al. 2023, SAM).

    Args:
        model: has ``get_image_embeddings``, and takes ``image_embeddings`` with ``input_points`` or ``input_boxes``.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Float[Tensor, "n c h w"]) -> dict[str, Any]:
        """Return the ``image_embeddings`` of pictures, and the function that decodes them, for ``targets.mask_at``."""
        # The library's function computes no gradients; it wraps the one that would.
        model: Any = self.model
        embed = inspect.unwrap(type(model).get_image_embeddings)
        return {"image_embeddings": embed(model, images), "decode": self._decode}

    def _decode(self, embeddings: Any, prompts: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        embedded = {"image_embeddings": embeddings}
        if isinstance(embeddings, tuple):  # SAM-HQ's decoder also takes what its first blocks return
            embedded = dict(zip(("image_embeddings", "intermediate_embeddings"), embeddings, strict=True))
        output: Any = self.model(multimask_output=True, **embedded, **prompts)
        return output.pred_masks[:, 0].float(), output.iou_scores[:, 0].detach().float()
