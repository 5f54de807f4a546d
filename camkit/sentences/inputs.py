"""From a picture and a prompt to the model's arguments, and where the picture's tokens lie on it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Int
from PIL import Image
from torch import Tensor, nn

from camkit.errors import ModelError
from camkit.images.crop import CropBoxes
from camkit.images.prepare import located, prepare
from camkit.types import Box

_MOST_BEFORE_GRID = 2
"""Tokens before a grid that stand for the whole picture: a class token, and one of distillation."""


class Inputs:
    """Turns pictures into the arguments of one model, all with the same prompt.

    Args:
        model: the model.
        processor: its processor.
        prompt: the prompt as the user writes it; None for none.
    """

    def __init__(self, model: nn.Module, processor: Any, prompt: str | None) -> None:
        self._model: Any = model
        self._processor = processor
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self.is_encoder_decoder = bool(getattr(self._model.config, "is_encoder_decoder", False))
        self.prompt = self._full(prompt)

    def _full(self, prompt: str | None) -> str | None:
        """Return the prompt with the place of the picture, as the model's chat template or processor writes it."""
        marks = [str(mark) for mark in (getattr(self._processor, "image_token", None),) if mark]
        if prompt is not None and any(mark in prompt for mark in marks):
            return prompt
        if getattr(self._processor, "chat_template", None):
            parts: list[dict[str, str]] = [{"type": "image"}]
            parts += [] if prompt is None else [{"type": "text", "text": prompt}]
            messages = [{"role": "user", "content": parts}]
            return str(self._processor.apply_chat_template(messages, add_generation_prompt=True))
        if marks and not self.is_encoder_decoder:
            return f"{marks[0]}{'' if prompt is None else prompt}"
        return prompt

    def of(self, picture: Image.Image) -> dict[str, Any]:
        """Return the arguments for a picture and the prompt.

        Raises:
            ModelError: the processor fails.
        """
        text = {} if self.prompt is None else {"text": [self.prompt]}
        try:
            made = dict(self._processor(images=[picture], return_tensors="pt", **text))
        except Exception as error:
            raise ModelError(
                f"the processor {type(self._processor).__name__} cannot prepare the picture and the prompt ({error}); "
                "pass processor=... that belongs to the model"
            ) from error
        weights = next(self._model.parameters())
        return {
            name: value.to(weights.device, weights.dtype if value.is_floating_point() else None)
            for name, value in made.items()
            if isinstance(value, Tensor)
        }

    def generated(self, inputs: Mapping[str, Any], most: int) -> Int[Tensor, " t"]:
        """Return the tokens of the text that the model writes, with what it starts from, but without the end."""
        with torch.no_grad():
            return self._model.generate(**inputs, max_new_tokens=most, do_sample=False, num_beams=1)[0]  # type: ignore[no-any-return]

    def start(self, inputs: Mapping[str, Any]) -> Int[Tensor, " t"]:
        """Return the tokens before the sentence."""
        if "input_ids" in inputs and not self.is_encoder_decoder:
            return inputs["input_ids"][0]  # type: ignore[no-any-return]
        configs = [self._model.generation_config, self._model.config, getattr(self._model.config, "decoder", None)]
        names = ("decoder_start_token_id", "bos_token_id")
        found = [getattr(config, name, None) for name in names for config in configs if config is not None]
        start = next((each for each in found if each is not None), None)
        if start is None:
            raise ModelError("the model's configuration has no decoder_start_token_id, from which its sentences start")
        return torch.tensor([start], device=next(self._model.parameters()).device)

    def with_text(self, inputs: Mapping[str, Any], text: Int[Tensor, " t"]) -> dict[str, Any]:
        """Return the arguments for the prompt and a sentence after it."""
        arguments = dict(inputs)
        if self.is_encoder_decoder:
            return {**arguments, "decoder_input_ids": text[None], "use_cache": False}
        old = arguments["input_ids"].shape[1] if "input_ids" in arguments else 0
        for name, value in inputs.items():
            if name != "input_ids" and old and value.shape[:2] == (1, old):  # a mask, or the kind of each token
                fill = torch.ones if name == "attention_mask" else torch.zeros
                more = fill(1, len(text) - old, dtype=value.dtype, device=value.device)
                arguments[name] = torch.cat([value, more], 1)
        return {**arguments, "input_ids": text[None], "use_cache": False}


def grid_of(inputs: Mapping[str, Any], positions: Sequence[int]) -> tuple[int, int, int]:
    """Return the rows and columns of the picture's tokens, and how many come before them.

    Raises:
        ModelError: they are not one grid.
    """
    count = len(positions)
    is_run = positions[-1] - positions[0] + 1 == count
    sizes = inputs.get("image_grid_thw")
    if sizes is not None and len(sizes) == 1:
        _, rows, columns = sizes[0].tolist()
        merged = math.isqrt(rows * columns // count)
        if merged and rows // merged * (columns // merged) == count:
            return rows // merged, columns // merged, 0
    for before in range(_MOST_BEFORE_GRID + 1):
        side = math.isqrt(max(count - before, 0))
        if is_run and side > 1 and side * side == count - before:
            return side, side, before
    raise ModelError(
        f"the picture's {count} tokens are not one square grid, so camkit cannot say where they lie; pass a processor "
        "that makes one grid of the whole picture, without tiles or crops"
    )


def box_of(processor: Any, picture: Image.Image) -> Box | None:
    """Return the part of the picture that the model sees; None if that cannot be found."""
    images = getattr(processor, "image_processor", processor)

    def preprocess(shown: Image.Image) -> Tensor:
        values: Tensor = images(images=[shown], return_tensors="pt")["pixel_values"]
        return values[0]

    tensor = preprocess(picture)
    if tensor.dim() != 3:  # patches, cut from a picture that is resized but not cropped
        return Box(0, 0, *picture.size)
    return located(prepare(picture, preprocess, "the picture"), preprocess, CropBoxes()).box
