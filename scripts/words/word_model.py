"""The tiny models that learn the sentences of the drawn scenes: their tokenizer, processors and architectures.

All classes are Hugging Face's own, so that camkit explains them through the same code as models from the hub.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    GPT2Config,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    TrOCRProcessor,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
    ViTConfig,
    ViTImageProcessorPil,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from scripts.words.word_scenes import CELL, SIDE

PROMPT = "what is here ?"
VOCABULARY = 120
"""So few that some words are several tokens, as rare words are in large models."""
TEMPLATE = (
    "{% for message in messages %}USER: {% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}PICTURE{% else %} {{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %} ASSISTANT:{% endif %}"
)
PROMPT_TEXT = f"USER: <image> {PROMPT} ASSISTANT:"
"""What the template of the LLaVA makes of ``PROMPT``."""
ENCODER = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4}
"""The size of the encoders of the LLaVA and of the encoder-decoder."""
QWEN_PICTURE = "<|vision_start|><image><|vision_end|>"
QWEN_TOKENS = {"video_token": "<video>", "start": "<|vision_start|>", "end": "<|vision_end|>"}


@dataclass(frozen=True)
class Architecture:
    """A tiny model.

    Attributes:
        prompt: the prompt with which ``words`` is called; None for a model that takes none.
        before: what stands before the sentence in training.
        tokens: further special tokens, under their names.
        processor: makes the processor from the tokenizer.
        build: makes the untrained model from the tokenizer.
        tower: the model's encoder.
        seen: what the encoder makes of a batch's cells, row by row (N, 64, C).
    """

    prompt: str | None
    before: str
    tokens: Mapping[str, str]
    processor: Callable[[PreTrainedTokenizerFast], Any]
    build: Callable[[PreTrainedTokenizerFast], Any]
    tower: Callable[[Any], nn.Module]
    seen: Callable[[Any, Mapping[str, Tensor]], Tensor]


def tokenizer_for(sentences: Iterable[str], **special: str) -> PreTrainedTokenizerFast:
    """Train a byte-pair tokenizer in which a word starts with a space, as LLaMA's; ``special`` names more tokens."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="never")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    always = ["<unk>", "<pad>", "<s>", "</s>", "<image>"]
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=always, show_progress=False)
    tokenizer.train_from_iterator([*sentences, *[f"USER: {PROMPT} ASSISTANT:"] * 1000], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        extra_special_tokens={"image_token": "<image>", **special},
    )


def processor_for(tokenizer: PreTrainedTokenizerFast, side: int = SIDE, patch: int = CELL) -> LlavaProcessor:
    """Return the processor: pictures of ``side`` pixels, and as many image tokens as there are patches."""
    images = CLIPImageProcessorPil(
        size={"shortest_edge": side}, crop_size={"height": side, "width": side}, do_convert_rgb=True
    )
    return LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=patch,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE.replace("PICTURE", "<image>"),
    )


def build(
    tokenizer: PreTrainedTokenizerFast, *, width: int = 128, layers: int = 3, side: int = SIDE, patch: int = CELL
) -> LlavaForConditionalGeneration:
    """Return an untrained LLaVA: a ViT of ``side / patch`` cells a side, a projector, and a decoder like LLaMA's."""
    vision = CLIPVisionConfig(
        **ENCODER,
        image_size=side,
        patch_size=patch,
        projection_dim=64,
    )
    text = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        **_ends(tokenizer),
        tie_word_embeddings=False,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-2,
        image_seq_length=(side // patch) ** 2,
    )
    return _ending(LlavaForConditionalGeneration(config), tokenizer)


def qwen_processor_for(tokenizer: PreTrainedTokenizerFast) -> Qwen2VLProcessor:
    """Return the processor of Qwen2-VL: patches of half a cell, of which four are merged into a token."""
    images = Qwen2VLImageProcessorPil(
        patch_size=CELL // 2, merge_size=2, size={"shortest_edge": SIDE**2, "longest_edge": SIDE**2}
    )
    template = TEMPLATE.replace("PICTURE", QWEN_PICTURE)
    return Qwen2VLProcessor(images, tokenizer, Qwen2VLVideoProcessor(), chat_template=template)


def build_qwen(tokenizer: PreTrainedTokenizerFast) -> Qwen2VLForConditionalGeneration:
    """Return an untrained Qwen2-VL with as many tokens for a picture as the LLaVA."""
    config = Qwen2VLConfig(
        vision_config={
            "depth": 4,
            "embed_dim": 96,
            "hidden_size": 128,
            "mlp_ratio": 2,
            "num_heads": 4,
            "patch_size": CELL // 2,
            "spatial_merge_size": 2,
        },
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
            **_ends(tokenizer),
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<video>"),
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=tokenizer.convert_tokens_to_ids("<|vision_end|>"),
        tie_word_embeddings=False,
    )
    return _ending(Qwen2VLForConditionalGeneration(config), tokenizer)


def build_encoder_decoder(tokenizer: PreTrainedTokenizerFast) -> VisionEncoderDecoderModel:
    """Return an untrained ViT, and a GPT-2 that attends to its cells and its class token."""
    encoder = ViTConfig(
        **ENCODER,
        image_size=SIDE,
        patch_size=CELL,
    )
    decoder = GPT2Config(
        vocab_size=len(tokenizer),
        n_embd=128,
        n_inner=256,
        n_layer=3,
        n_head=4,
        n_positions=64,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        **_ends(tokenizer),
    )
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    model = VisionEncoderDecoderModel(config)
    for each in (model.config, model.generation_config):
        each.decoder_start_token_id = tokenizer.bos_token_id
    model.config.pad_token_id = tokenizer.pad_token_id
    return _ending(model, tokenizer)


def _ends(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    return {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}


def _ending(model: Any, tokenizer: PreTrainedTokenizerFast) -> Any:
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def _llava_cells(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    states: Tensor = model.model.vision_tower(batch["pixel_values"], output_hidden_states=True).hidden_states[-2]
    return states[:, 1:]


def _qwen_cells(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    clip = batch["image_grid_thw"]
    merged: Tensor = model.model.visual(batch["pixel_values"], grid_thw=clip).pooler_output
    return merged.reshape(int(clip[0, 0]), -1, merged.shape[-1])


def _encoder_cells(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    states: Tensor = model.encoder(batch["pixel_values"]).last_hidden_state
    return states[:, 1:]


ARCHITECTURES: Mapping[str, Architecture] = {
    "llava": Architecture(
        PROMPT,
        PROMPT_TEXT,
        {},
        processor_for,
        build,
        lambda model: model.model.vision_tower,
        _llava_cells,
    ),
    "qwen2-vl": Architecture(
        PROMPT,
        PROMPT_TEXT.replace("<image>", QWEN_PICTURE),
        QWEN_TOKENS,
        qwen_processor_for,
        build_qwen,
        lambda model: model.model.visual,
        _qwen_cells,
    ),
    "encoder-decoder": Architecture(
        None,
        "",
        {},
        lambda tokenizer: TrOCRProcessor(ViTImageProcessorPil(size={"height": SIDE, "width": SIDE}), tokenizer),
        build_encoder_decoder,
        lambda model: model.encoder,
        _encoder_cells,
    ),
}


def load(folder: Path) -> tuple[Any, Any]:
    """Return a trained model and its processor."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), AutoProcessor.from_pretrained(folder)


def architecture_of(model: Any) -> Architecture:
    """Return the architecture of a loaded model."""
    return ARCHITECTURES[{"llava": "llava", "qwen2_vl": "qwen2-vl"}.get(model.config.model_type, "encoder-decoder")]
