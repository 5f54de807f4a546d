"""From a picture and a prompt to the model's arguments, and to the text that the model writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from PIL import Image
from torch import Tensor, nn

from camkit.errors import InputError, ModelError


@dataclass(frozen=True, eq=False)
class Text:
    """The tokens that a model starts from and the sentence (T,), and the places of the sentence's tokens in it."""

    ids: Int[Tensor, " t"]
    places: list[int]


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
        configs = (self._model.config, self._model.config.get_text_config())
        self.is_encoder_decoder = any(getattr(config, "is_encoder_decoder", False) for config in configs)
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

    def of(self, picture: Image.Image, *, cast: bool = True) -> dict[str, Any]:
        """Return the arguments for a picture and the prompt, in the precision of the model unless ``cast`` is False.

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
        tensors = {name: value for name, value in made.items() if isinstance(value, Tensor) and name != "labels"}
        if self.prompt is not None and "input_ids" not in tensors:
            raise InputError(f"{type(self._model).__name__} reads no prompt, only a picture; leave out the prompt")
        if not cast:
            return tensors
        weights = next(self._model.parameters())
        return {
            name: value.to(weights.device, weights.dtype if value.is_floating_point() else None)
            for name, value in tensors.items()
        }

    def written(self, inputs: Mapping[str, Any], most: int) -> Text:
        """Return the text that the model writes, with what it starts from.

        Some models return the prompt with the sentence, some without it, and BLIP changes its first and last token.
        """
        arguments = {name: value.clone() for name, value in inputs.items()}  # BLIP writes to its input_ids
        with torch.no_grad():
            ids = self._model.generate(**arguments, max_new_tokens=most, do_sample=False, num_beams=1)[0].tolist()
        special = set(self.tokenizer.all_special_ids)
        prompt = [] if self.is_encoder_decoder or "input_ids" not in inputs else inputs["input_ids"][0].tolist()
        first = 1
        if prompt:
            words = [token for token in prompt if token not in special]
            lead = next((number for number, token in enumerate(ids) if token not in special), len(ids))
            if ids[: len(prompt)] == prompt:
                first = len(prompt)
            elif words and ids[lead : lead + len(words)] == words:
                first = lead + len(words)
            else:
                ids, first = prompt + ids, len(prompt)
        ends = set(self._ends())
        while len(ids) > first and (ids[-1] in ends or (len(ids) > first + 1 and ids[-1] in special)):
            ids.pop()
        places = [number for number in range(first, len(ids)) if ids[number] not in special]
        return Text(torch.tensor(ids, device=next(self._model.parameters()).device), places)

    def given(self, inputs: Mapping[str, Any], sentence: str) -> Text:
        """Return a given sentence after what the model starts from; a first token that it always writes stays."""
        start = self.written(inputs, 1)
        before = start.ids[:-1] if start.places else start.ids
        ids = self.tokenizer(sentence, add_special_tokens=False)["input_ids"]
        more = torch.tensor(ids, device=before.device, dtype=before.dtype)
        return Text(torch.cat([before, more]), list(range(len(before), len(before) + len(ids))))

    def _ends(self) -> list[int]:
        """Return the tokens that end a sentence."""
        configs = [self._model.generation_config, self._model.config, self.tokenizer]
        found = [getattr(config, name, None) for config in configs for name in ("eos_token_id", "sep_token_id")]
        return [each for value in found for each in (value if isinstance(value, list) else [value]) if each is not None]

    def with_text(self, inputs: Mapping[str, Any], text: Int[Tensor, " t"], kind: int = 0) -> dict[str, Any]:
        """Return the arguments for the prompt and a sentence after it.

        Args:
            inputs: the arguments for the prompt.
            text: the prompt and the sentence; for an encoder-decoder what the decoder starts from, and the sentence.
            kind: the kind of the sentence's tokens, for models whose arguments say for each token what it is.
        """
        arguments = dict(inputs)
        if self.is_encoder_decoder:
            return {**arguments, "decoder_input_ids": text[None], "use_cache": False}
        old = arguments["input_ids"].shape[1] if "input_ids" in arguments else 0
        for name, value in inputs.items():
            if name != "input_ids" and old and value.shape[:2] == (1, old):
                more = value.new_full((1, max(len(text) - old, 0)), 1 if name == "attention_mask" else kind)
                arguments[name] = torch.cat([value, more], 1)[:, : len(text)]
        return {**arguments, "input_ids": text[None], "use_cache": False}
