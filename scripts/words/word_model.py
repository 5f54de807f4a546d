"""The tiny LLaVA that learns the sentences of the drawn scenes: its tokenizer, processor and architecture.

All classes are Hugging Face's own, so that camkit explains it through the same code as a model from the hub.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

from scripts.words.word_scenes import CELL, SIDE

PROMPT = "what is here ?"
VOCABULARY = 120
"""So few that some words are several tokens, as rare words are in large models."""
TEMPLATE = (
    "{% for message in messages %}USER: {% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %} {{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %} ASSISTANT:{% endif %}"
)
PROMPT_TEXT = f"USER: <image> {PROMPT} ASSISTANT:"
"""What the template makes of ``PROMPT``."""


def tokenizer_for(sentences: Iterable[str]) -> PreTrainedTokenizerFast:
    """Train a byte-pair tokenizer in which a word starts with a space, as LLaMA's."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="never")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<pad>", "<s>", "</s>", "<image>"]
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([*sentences, *[f"USER: {PROMPT} ASSISTANT:"] * 1000], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        extra_special_tokens={"image_token": "<image>"},
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
        chat_template=TEMPLATE,
    )


def build(
    tokenizer: PreTrainedTokenizerFast, *, width: int = 128, layers: int = 3, side: int = SIDE, patch: int = CELL
) -> LlavaForConditionalGeneration:
    """Return an untrained LLaVA: a ViT of ``side / patch`` cells a side, a projector, and a decoder like LLaMA's."""
    vision = CLIPVisionConfig(
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
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
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-2,
        image_seq_length=(side // patch) ** 2,
    )
    model = LlavaForConditionalGeneration(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def load(folder: Path) -> tuple[Any, Any]:
    """Return the trained model and its processor."""
    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), LlavaProcessor.from_pretrained(folder, backend="pil")
