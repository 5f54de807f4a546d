"""Loads a model that writes about pictures, makes its arguments of a picture and a prompt, and reads its text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms.functional import pil_to_tensor

from camkit.drawing.encode import size_within
from camkit.errors import ImageError, InputError, ModelError, as_error, brief
from camkit.images.prepare import chosen_references, prepare, smooth_noise
from camkit.models import pick_device
from camkit.types import ImageLike, ReferencesLike


@dataclass(frozen=True, eq=False)
class Text:
    """A sentence after what the model starts from: the prompt, or for an encoder-decoder what the decoder starts from.

    Attributes:
        ids: the tokens.
        places: the places of the sentence's tokens among them.
        kind: the kind of the sentence's tokens, for models whose arguments say for each token what it is.
    """

    ids: Int[Tensor, " t"]
    places: list[int]
    kind: int = 0


class Inputs:
    """Turns pictures into the arguments of one model, all with the same prompt.

    Args:
        model: the model.
        processor: its processor.
        prompt: the prompt as the user writes it; None for none.
        pictures: the prompt's pictures.
        number: the one that is explained; the others never change.

    Raises:
        InputError: the prompt has places for another number of pictures.
        ModelError: the model cannot write text, or there are several pictures and it takes only one.
    """

    def __init__(
        self,
        model: Any,
        processor: Any,
        prompt: str | None,
        pictures: Sequence[Image.Image],
        number: int,
    ) -> None:
        if not callable(getattr(model, "generate", None)):
            raise ModelError(f"{type(model).__name__} cannot write text; pass a Hugging Face model that has generate()")
        self.model, self._processor, self._pictures, self._number = model, processor, pictures, number
        self.tokenizer = getattr(processor, "tokenizer", processor)
        configs: list[Any] = [model.config, model.config.get_text_config()]
        self.is_encoder_decoder = any(getattr(config, "is_encoder_decoder", False) for config in configs)
        self.prompt = self._full(prompt, len(pictures))

    def _full(self, prompt: str | None, count: int) -> str | None:
        """Return the prompt with the places of the pictures, as the model's chat template or processor writes it."""
        mark = str(getattr(self._processor, "image_token", None) or "")  # what stands for a picture in a prompt
        if mark and prompt is not None and mark in prompt:
            if prompt.count(mark) != count:
                raise InputError(
                    f"the prompt has {prompt.count(mark)} x {mark}, the place of a picture, and the number of pictures "
                    f"is {count}; write it once for each picture, or leave it out"
                )
            return prompt
        if getattr(self._processor, "chat_template", None):
            parts: list[dict[str, str]] = [{"type": "image"}] * count
            parts += [] if prompt is None else [{"type": "text", "text": prompt}]
            messages = [{"role": "user", "content": parts}]
            return str(self._processor.apply_chat_template(messages, add_generation_prompt=True))
        # BLIP-2 puts the picture's tokens before the prompt by itself.
        if not mark or self.is_encoder_decoder or hasattr(self._processor, "num_query_tokens"):
            if count > 1:
                raise ModelError(f"{type(self.model).__name__} takes one picture in a prompt, not {count}; pass one")
            return prompt
        return f"{mark * count}{'' if prompt is None else prompt}"

    def of(self, picture: Image.Image, *, cast: bool = True) -> dict[str, Any]:
        """Return the arguments for a picture and the prompt, in the precision of the model unless ``cast`` is False.

        Raises:
            ModelError: the processor fails.
        """
        text = {} if self.prompt is None else {"text": [self.prompt]}
        images = [picture if number == self._number else each for number, each in enumerate(self._pictures)]
        unfit = f"the processor {type(self._processor).__name__} cannot prepare the picture and the prompt"
        with as_error(ModelError, lambda error: f"{unfit} ({error}); pass processor=... that belongs to the model"):
            made = dict(self._processor(images=[images] if images[1:] else images, return_tensors="pt", **text))
        tensors = {name: value for name, value in made.items() if isinstance(value, Tensor) and name != "labels"}
        if self.prompt is not None and "input_ids" not in tensors:
            raise InputError(f"{type(self.model).__name__} takes a picture and no prompt; leave out the prompt")
        if not cast:
            return tensors
        weights = next(self.model.parameters())
        return {
            name: value.to(weights.device, weights.dtype if value.is_floating_point() else None)
            for name, value in tensors.items()
        }

    def written(self, inputs: Mapping[str, Any], most: int) -> Text:
        """Return the text that the model writes, with what it starts from and without what ends it."""
        ids, first = self._generated(inputs, most)
        special, stop = set(self.tokenizer.all_special_ids), len(ids)
        configs = [self.model.generation_config, self.model.config, self.tokenizer]
        found = [getattr(config, name, None) for config in configs for name in ("eos_token_id", "sep_token_id")]
        ends = special.union(*(each if isinstance(each, list) else [each] for each in found))
        while stop > first and ids[stop - 1] in ends:
            stop -= 1
        return Text(self._tensor(ids[:stop]), [number for number in range(first, stop) if ids[number] not in special])

    def given(self, inputs: Mapping[str, Any], sentence: str) -> Text:
        """Return a given sentence after what the model starts from."""
        written, first = self._generated(inputs, 1)
        forced = getattr(self.model.generation_config, "forced_bos_token_id", None)  # what the model writes first
        start = written[: first + (forced is not None and written[first : first + 1] == [forced])]
        ids = self.tokenizer(sentence, add_special_tokens=False)["input_ids"]
        return Text(self._tensor([*start, *ids]), list(range(len(start), len(start) + len(ids))))

    def _generated(self, inputs: Mapping[str, Any], most: int) -> tuple[list[int], int]:
        """Return the text that the model writes after what it starts from, and where the new tokens begin.

        Some models return the prompt with the sentence, some without it, and BLIP changes its first and last token.
        """
        arguments = {name: value.clone() for name, value in inputs.items()}  # BLIP writes to its input_ids
        alone = f"{type(self.model).__name__} cannot write about a picture alone"
        failing = as_error(ModelError, lambda error: f"{alone} ({brief(error)}); pass a prompt")
        with torch.no_grad(), failing if self.prompt is None else nullcontext():
            ids = self.model.generate(**arguments, max_new_tokens=most, do_sample=False, num_beams=1)[0].tolist()
        if self.is_encoder_decoder or "input_ids" not in inputs:
            return ids, max(len(ids) - most, 1)
        prompt, special = inputs["input_ids"][0].tolist(), set(self.tokenizer.all_special_ids)
        words = [token for token in prompt if token not in special]
        lead = next((number for number, token in enumerate(ids) if token not in special), len(ids))
        if ids[: len(prompt)] == prompt:
            return ids, len(prompt)
        if words and ids[lead : lead + len(words)] == words:
            return ids, lead + len(words)
        if len(ids) > most:
            raise ModelError(
                f"{type(self.model).__name__} returns neither a sentence nor its prompt and a sentence; pass "
                "as processor=... the one that belongs to the model"
            )
        return prompt + ids, len(prompt)

    def _tensor(self, ids: list[int]) -> Int[Tensor, " t"]:
        return torch.tensor(ids, device=next(self.model.parameters()).device)

    def with_text(self, inputs: Mapping[str, Any], text: Text) -> dict[str, Any]:
        """Return the arguments for a sentence after the prompt, from those for the prompt."""
        arguments, ids = dict(inputs), text.ids
        if self.is_encoder_decoder:
            return {**arguments, "decoder_input_ids": ids[None], "use_cache": False}
        old = arguments["input_ids"].shape[1] if "input_ids" in arguments else 0
        for name, value in inputs.items():
            if name != "input_ids" and old and value.shape[:2] == (1, old):
                more = value.new_full((1, max(len(ids) - old, 0)), 1 if name == "attention_mask" else text.kind)
                arguments[name] = torch.cat([value, more], 1)[:, : len(ids)]
        return {**arguments, "input_ids": ids[None], "use_cache": False}


def processor_of(name: str) -> Any:
    """Return the processor of a model on the hub or in a folder.

    Raises:
        Exception: there is none; which one depends on transformers.
    """
    import transformers as hf  # noqa: PLC0415 - an optional package

    from camkit.models.from_huggingface import quiet  # noqa: PLC0415 - it needs the optional package

    with quiet():
        processor = hf.AutoProcessor.from_pretrained(name, trust_remote_code=False)
        if hasattr(processor, "tokenizer") and hasattr(processor, "image_processor"):
            return processor
        return hf.VisionTextDualEncoderProcessor(  # the folder names no processor of its own
            hf.AutoImageProcessor.from_pretrained(name, trust_remote_code=False),
            hf.AutoTokenizer.from_pretrained(name, trust_remote_code=False),
        )


def processor_beside(model: Any) -> Any:
    """Return the processor of the folder that a model was loaded from.

    Raises:
        ModelError: there is none.
    """
    name = getattr(model, "name_or_path", "")
    missing = f"no processor found beside the model ({name or 'no folder'}); pass processor=..."
    with as_error(ModelError, lambda _: missing):
        return processor_of(name)


def load(name: str, device: str | None = None) -> tuple[nn.Module, Any]:
    """Return a model and its processor, ``hf:NAME`` or a folder; code that comes with a model is not run.

    Raises:
        ModelError: it cannot be loaded, or does not write text about pictures.
    """
    with as_error(
        ModelError, lambda _: "models that write need an optional package: pip install 'camkit[transformers]'"
    ):
        from transformers import AutoConfig, AutoModelForImageTextToText  # noqa: PLC0415 - an optional package
    folder = name.removeprefix("hf:")
    from camkit.models.from_huggingface import quiet, refuse_kernels  # noqa: PLC0415 - it needs the optional package

    failing = as_error(
        ModelError,
        lambda error: (
            f"{name} cannot be loaded as a model that writes about pictures ({brief(error)}); pass the name of one on "
            "the hub, or a folder with its weights and its processor"
        ),
    )
    with failing:
        with quiet():
            refuse_kernels(AutoConfig.from_pretrained(folder, trust_remote_code=False), name)
            model, info = AutoModelForImageTextToText.from_pretrained(
                folder, output_loading_info=True, trust_remote_code=False
            )
        processor = processor_of(folder)
    if missing := sorted(info["missing_keys"]):
        raise ModelError(
            f"{name} has no weights for {len(missing)} of its parameters (the first is {missing[0]!r}), which would "
            "stay random; pass a model with all of its weights"
        )
    module: nn.Module = model.eval().to(torch.device(pick_device(device)))
    return module, processor


_EACH = 8
"""Pictures of noise, and plain ones, that stand for references."""


def read(image: ImageLike, source: str) -> Image.Image:
    """Return a picture, upright and RGB.

    Raises:
        ImageError: it cannot be read, or is a tensor, which has passed the processor already.
    """
    picture = prepare(image, pil_to_tensor, source).picture
    if not isinstance(picture, Image.Image):
        raise ImageError(f"{source} is a tensor; pass a path, a PIL picture or an array, or a list of these")
    return picture


def reference_pictures(references: ReferencesLike | None, picture: Image.Image) -> tuple[list[Image.Image], str]:
    """Return reference pictures at the size of a picture, and what they are, as a phrase.

    The picture itself may be in the folder of its references, and is left out.

    Raises:
        ImageError: there are none, or one cannot be read.
    """
    size = picture.size
    if references is None:
        return made_pictures(size), f"{_EACH} pictures of smooth noise and {_EACH} plain grey ones, made by camkit"
    pictures, words = chosen_references(references)
    read_in = [read(each, f"reference picture {number}") for number, each in enumerate(pictures, start=1)]
    others = [each for each in read_in if each.size != size or each.tobytes() != picture.tobytes()]
    if not others:
        raise ImageError("the picture itself is the only reference picture; pass others")
    words += ", without this picture itself" if len(others) < len(read_in) else ""
    return [each.resize(size, Image.Resampling.BICUBIC) for each in others], words


def made_pictures(size: tuple[int, int]) -> list[Image.Image]:
    """Return pictures (width, height) of smooth noise, each around a colour and with a contrast of its own, and greys.

    A model may say the same about all noise ("two things"), and something else about all plain pictures. A word that
    needs no picture is probable with both.
    """
    width, height = size_within(size, min(512, max(size)))  # enlarged for larger pictures
    noise = smooth_noise(3 * _EACH, (height, width)).reshape(_EACH, 3, height, width)
    generator = torch.Generator().manual_seed(0)
    colours, contrasts = (torch.rand(_EACH, count, 1, 1, generator=generator) for count in (3, 1))
    varied = (colours + contrasts * (noise - noise.mean((2, 3), keepdim=True))).clamp(0, 1)
    levels = (255 * varied).round().permute(0, 2, 3, 1).numpy().astype(np.uint8)
    greys = np.linspace(0, 255, 2 * _EACH + 1).round().astype(int)[1::2].tolist()
    enlarged = (Image.fromarray(each).resize(size, Image.Resampling.BICUBIC) for each in levels)
    return [*enlarged, *(Image.new("RGB", size, (grey, grey, grey)) for grey in greys)]
