"""Tiny models of random weights, one of each family, with their processors: all classes are Hugging Face's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from tokenizers import processors
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics2.image_processing_pil_idefics2 import Idefics2ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from scripts.words.word_model import tokenizer_for

WORDS = "a red boat near two trees on the sea . what is here ? user assistant describe"
TOKENS = {"image_token": "<image>", "video_token": "<video>"}
TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}MARK{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %} assistant{% endif %}"
)
SQUARE = {"size": {"height": 32, "width": 32}}
CROPPED = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}


def chat(mark: str = "<image>") -> dict[str, str]:
    """Return the template of a processor that writes ``mark`` for each picture."""
    return {"chat_template": TEMPLATE.replace("MARK", mark)}


def tokenizer(*, named: bool = True, framed: bool = False, unknown: str = "<unk>", **special: str) -> Any:
    """Return a tokenizer with further special tokens under names; ``framed`` puts texts between a start and an end."""
    made = tokenizer_for([WORDS] * 50).backend_tokenizer
    if framed:
        ends = [(token, made.token_to_id(token)) for token in ("<s>", "</s>")]
        made.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    tokens = {"unk_token": unknown, "pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    extra = {**(TOKENS if named else {}), **special}
    return hf.PreTrainedTokenizerFast(tokenizer_object=made, **tokens, extra_special_tokens=extra)


def ids(words: Any) -> dict[str, Any]:
    """Return the vocabulary's size, and the ids of the tokens that all models have."""
    known = {name: getattr(words, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    return {"vocab_size": len(words), **known}


SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
TEXT: dict[str, Any] = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": False}
VIEW: dict[str, Any] = {**SIZES, "hidden_size": 24, "image_size": 32, "patch_size": 8}


def llava_next() -> tuple[Any, Any]:
    """Base picture and tiles, cut out of the padded picture; a token ends each row."""
    words, points = tokenizer(), [[32, 64], [64, 32], [64, 64]]
    config = hf.LlavaNextConfig(
        vision_config=hf.CLIPVisionConfig(**VIEW, projection_dim=24),
        text_config=hf.LlamaConfig(**TEXT, **ids(words)),
        image_token_index=words.image_token_id, image_grid_pinpoints=points, image_seq_length=16,
    )  # fmt: skip
    images = hf.LlavaNextImageProcessorPil(**CROPPED, image_grid_pinpoints=points)
    select = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    processor = hf.LlavaNextProcessor(images, words, patch_size=8, **select, **chat())
    return hf.LlavaNextForConditionalGeneration(config), processor


def llava_onevision() -> tuple[Any, Any]:
    """Tiles as before."""
    words, points = tokenizer(), [[32 * a, 32 * b] for a in (1, 2, 3) for b in (1, 2, 3)]
    config = hf.LlavaOnevisionConfig(
        vision_config=hf.SiglipVisionConfig(**VIEW, vision_use_head=False),
        text_config=hf.Qwen2Config(**TEXT, **ids(words)),
        image_token_index=words.image_token_id, video_token_index=words.video_token_id,
        image_grid_pinpoints=points, vision_aspect_ratio="anyres_max_9",
    )  # fmt: skip
    images = hf.LlavaOnevisionImageProcessorPil(**SQUARE, image_grid_pinpoints=points)
    processor = hf.LlavaOnevisionProcessor(
        images, words, hf.LlavaOnevisionVideoProcessor(), num_image_tokens=16, vision_feature_select_strategy="full",
        **chat(), vision_aspect_ratio="anyres_max_9",
    )  # fmt: skip
    return hf.LlavaOnevisionForConditionalGeneration(config), processor


def _qwen(name: str, **vision: Any) -> tuple[Any, Any]:
    words = tokenizer(
        image_token="<|image_pad|>", video_token="<|video_pad|>", start="<|vision_start|>", end="<|vision_end|>"
    )
    named = getattr(hf, f"{name}Config")
    text: dict[str, Any] = {**TEXT, **ids(words), "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    if name == "Qwen3VL":
        text["head_dim"] = 8
        text["rope_parameters"]["mrope_interleaved"] = True
    text["rope_parameters"]["mrope_section"] = [2, 1, 1]
    config = named(
        text_config=text,
        vision_config={"num_heads": 4, "patch_size": 8, "depth": 2, **vision},
        image_token_id=words.image_token_id, video_token_id=words.video_token_id,
        vision_start_token_id=words.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=words.convert_tokens_to_ids("<|vision_end|>"),
    )  # fmt: skip
    images = Qwen2VLImageProcessorPil(patch_size=8, size={"shortest_edge": 16 * 16, "longest_edge": 64 * 64})
    videos = hf.Qwen3VLVideoProcessor() if name == "Qwen3VL" else hf.Qwen2VLVideoProcessor()
    mark = "<|vision_start|><|image_pad|><|vision_end|>"
    processor = getattr(hf, f"{name}Processor")(images, words, videos, **chat(mark))
    return getattr(hf, f"{name}ForConditionalGeneration")(config), processor


def qwen2_vl() -> tuple[Any, Any]:
    """Any size of picture, patches in the order of merged blocks, positions of three kinds."""
    return _qwen("Qwen2VL", embed_dim=32, hidden_size=32, mlp_ratio=2)


MERGED = {"hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 48}


def qwen2_5_vl() -> tuple[Any, Any]:
    """The same with windows, whose order differs from the picture's."""
    return _qwen("Qwen2_5_VL", **MERGED, window_size=32, fullatt_block_indexes=[1])


def qwen3_vl() -> tuple[Any, Any]:
    """The same; features of an earlier layer enter the decoder too."""
    return _qwen("Qwen3VL", **MERGED, num_position_embeddings=64, deepstack_visual_indexes=[0])


def paligemma() -> tuple[Any, Any]:
    """The prompt is read in both directions, the sentence from left to right."""
    words = tokenizer()
    images = hf.SiglipImageProcessorPil(**SQUARE)
    images.image_seq_length = 16
    processor = hf.PaliGemmaProcessor(images, words)
    config = hf.PaliGemmaConfig(
        vision_config=hf.SiglipVisionConfig(**VIEW, vision_use_head=False, projection_dim=32),
        text_config=hf.GemmaConfig(**{**TEXT, "tie_word_embeddings": True}, head_dim=8, **ids(words)),
        image_token_index=words.image_token_id, projection_dim=32,
    )  # fmt: skip
    return hf.PaliGemmaForConditionalGeneration(config), processor


def idefics3(kind: str = "Idefics3") -> tuple[Any, Any]:
    """Tiles and a small whole picture, with four patches in each token."""
    rows = {f"row_{a}_{b}": f"<row_{a}_col_{b}>" for a in range(1, 4) for b in range(1, 4)}
    words = tokenizer(fake="<fake_token_around_image>", whole="<global-img>", ends="<end_of_utterance>", **rows)
    config = getattr(hf, f"{kind}Config")(
        vision_config=VIEW, text_config=hf.LlamaConfig(**TEXT, **ids(words)), image_token_id=words.image_token_id,
        scale_factor=2, pad_token_id=words.pad_token_id,
    )  # fmt: skip
    images = hf.Idefics3ImageProcessorPil(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    processor = hf.Idefics3Processor(images, words, image_seq_len=4, **chat())
    return getattr(hf, f"{kind}ForConditionalGeneration")(config), processor


def smolvlm() -> tuple[Any, Any]:
    """As Idefics3, whose processor it takes here: its own needs a package for videos."""
    return idefics3("SmolVLM")


def internvl() -> tuple[Any, Any]:
    """Tiles and a small whole picture, pixels shuffled into tokens; a class token that is left out."""
    words = tokenizer(
        start_image_token="<img>", end_image_token="</img>", context_image_token="<IMG_CONTEXT>", video_token="<video>"
    )
    config = hf.InternVLConfig(
        vision_config={**VIEW, "image_size": [32, 32], "patch_size": [8, 8], "layer_scale_init_value": 1.0},
        text_config=hf.Qwen2Config(**TEXT, **ids(words)),
        image_token_id=words.context_image_token_id, image_seq_length=4,
    )  # fmt: skip
    images = GotOcr2ImageProcessorPil(**SQUARE, crop_to_patches=True, max_patches=6)
    videos = hf.InternVLVideoProcessor()
    processor = hf.InternVLProcessor(images, words, videos, image_seq_length=4, **chat("<IMG_CONTEXT>"))
    return hf.InternVLForConditionalGeneration(config), processor


def gemma3() -> tuple[Any, Any]:
    """Patches averaged in blocks; the picture's tokens see one another in both directions."""
    words = tokenizer(boi_token="<start_of_image>", eoi_token="<end_of_image>", image_token="<image_soft_token>")
    text = hf.Gemma3TextConfig(**{**TEXT, "tie_word_embeddings": True}, head_dim=8, sliding_window=64, **ids(words))
    config = hf.Gemma3Config(
        vision_config=hf.SiglipVisionConfig(**{**VIEW, "image_size": 64}, vision_use_head=False), text_config=text,
        mm_tokens_per_image=16, boi_token_index=words.boi_token_id, eoi_token_index=words.eoi_token_id,
        image_token_index=words.image_token_id,
    )  # fmt: skip
    images = hf.Gemma3ImageProcessorPil(size={"height": 64, "width": 64})
    processor = hf.Gemma3Processor(images, words, image_seq_length=16, **chat("<start_of_image>"))
    model = hf.Gemma3ForConditionalGeneration(config)
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight)  # which starts as zeros
    return model, processor


def florence2() -> tuple[Any, Any]:
    """An encoder of windows and channels, and a text encoder that reads picture and prompt together."""
    words = tokenizer()
    text = hf.BartConfig(
        d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=256, is_encoder_decoder=True,
        decoder_start_token_id=words.eos_token_id, forced_bos_token_id=None, forced_eos_token_id=None, **ids(words),
    )  # fmt: skip
    vision = {
        "depths": [1, 1], "patch_size": [7, 3], "patch_stride": [4, 2], "patch_padding": [3, 1],
        "patch_prenorm": [False, True], "embed_dim": [16, 24], "num_heads": [2, 4], "num_groups": [2, 4],
        "window_size": 4, "projection_dim": 32, "drop_path_rate": 0.0,
    }  # fmt: skip
    config = hf.Florence2Config(text_config=text, vision_config=vision, image_token_id=words.image_token_id)
    side = {"height": 48, "width": 48}
    images = hf.CLIPImageProcessorPil(size=side, crop_size=side, do_center_crop=False)
    images.image_seq_length = 37
    model = hf.Florence2ForConditionalGeneration(config)
    model.generation_config.forced_bos_token_id = words.bos_token_id
    return model, hf.Florence2Processor(images, words)


def blip() -> tuple[Any, Any]:
    """A decoder that attends to the picture's tokens, and changes the prompt's first token."""
    words = tokenizer(framed=True)
    config = hf.BlipConfig(
        vision_config={**VIEW, "projection_dim": 24, "initializer_range": 0.02},
        text_config={
            **SIZES, **ids(words), "encoder_hidden_size": 24, "projection_dim": 24, "sep_token_id": words.eos_token_id,
            "max_position_embeddings": 64,
        },
        projection_dim=24, image_text_hidden_size=24,
    )  # fmt: skip
    images = hf.BlipImageProcessorPil(**SQUARE)
    return hf.BlipForConditionalGeneration(config), hf.BlipProcessor(images, words)


def with_queries(config: Any, model: Any, words: Any, read: Any) -> Any:
    """Return a model in which a few queries that each read the whole picture stand between encoder and decoder."""
    text = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    text |= {"word_embed_proj_dim": 32, "max_position_embeddings": 128}
    query = {**SIZES, "vocab_size": len(read), "encoder_hidden_size": 24, "cross_attention_frequency": 1}
    net = model(
        config(
            vision_config={**VIEW, "initializer_range": 0.02},
            qformer_config=query,
            text_config=hf.OPTConfig(**text, **ids(words)),
            num_query_tokens=5,
            image_token_index=words.convert_tokens_to_ids("<image>"),
        )
    )
    # Random queries, since queries that are all zero write the same about all pictures.
    torch.nn.init.normal_(net.query_tokens)
    return net


def blip2() -> tuple[Any, Any]:
    """The queries read the picture alone."""
    words = tokenizer(named=False)
    images = hf.BlipImageProcessorPil(**SQUARE)
    model = with_queries(hf.Blip2Config, hf.Blip2ForConditionalGeneration, words, words)
    return model, hf.Blip2Processor(images, words, num_query_tokens=5)


def instructblip() -> tuple[Any, Any]:
    """The queries read the prompt too."""
    words, read = tokenizer(named=False), tokenizer(framed=True)
    images = hf.BlipImageProcessorPil(**SQUARE)
    model = with_queries(hf.InstructBlipConfig, hf.InstructBlipForConditionalGeneration, words, read)
    return model, hf.InstructBlipProcessor(images, words, read, num_query_tokens=5)


def idefics2() -> tuple[Any, Any]:
    """Latent tokens that each read the whole picture, made of the encoder's."""
    words = tokenizer(image_boundary_token="<fake_token_around_image>", ends="<end_of_utterance>")
    config = hf.Idefics2Config(
        vision_config=VIEW, text_config=hf.MistralConfig(**TEXT, **ids(words)), image_token_id=words.image_token_id,
        perceiver_config={
            "hidden_size": 32, "resampler_n_latents": 5, "resampler_depth": 1, "resampler_n_heads": 4,
            "resampler_head_dim": 8, "num_key_value_heads": 2,
        },
    )  # fmt: skip
    images = Idefics2ImageProcessorPil(size={"shortest_edge": 32, "longest_edge": 48}, do_image_splitting=False)
    processor = hf.Idefics2Processor(images, words, image_seq_len=5, **chat())
    return hf.Idefics2ForConditionalGeneration(config), processor


def git() -> tuple[Any, Any]:
    """The picture's tokens stand before the text, in a decoder that takes no arguments for them."""
    words = tokenizer()
    config = hf.GitConfig(vision_config=VIEW, **SIZES, **ids(words), max_position_embeddings=64)
    images = hf.CLIPImageProcessorPil(**CROPPED)
    return hf.GitForCausalLM(config), hf.GitProcessor(images, words)


def kosmos2() -> tuple[Any, Any]:
    """Latent tokens that each read the whole picture, at places that a mask shows."""
    words = tokenizer(unknown="<video>")  # the latent tokens get the 64 ids after it
    images = hf.CLIPImageProcessorPil(**CROPPED)
    processor = hf.Kosmos2Processor(images, words, 64)
    text = {
        "embed_dim": 32, "layers": 2, "ffn_dim": 48, "attention_heads": 4, "max_position_embeddings": 256,
        "dropout": 0.0, "attention_dropout": 0.0, **ids(words),
    }  # fmt: skip
    config = hf.Kosmos2Config(text_config=text, vision_config=VIEW, latent_query_num=64)
    return hf.Kosmos2ForConditionalGeneration(config), processor


def localised(model: Any) -> Any:
    """Let the encoder's tokens hardly mix, as in trained encoders they do not, so that a patch's place is known."""
    for name, parameter in model.named_parameters():
        in_encoder = any(part in name for part in ("vision", "visual", "encoder.", "image_encoder"))
        if in_encoder and "decoder." not in name and name.endswith(MIXING):
            torch.nn.init.zeros_(parameter)
    return model


MIXING = ("out_proj.weight", "attn.proj.weight", "attn.projection.weight", "o_proj.weight", "projection_layer.weight")


def _encoder_decoder(encoder: Any, decoder: Any, words: Any) -> Any:
    config = hf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    model = hf.VisionEncoderDecoderModel(config)
    for each in (model.config, model.generation_config):
        each.decoder_start_token_id, each.pad_token_id = words.bos_token_id, words.pad_token_id
        each.eos_token_id = words.eos_token_id
    return model


def trocr() -> tuple[Any, Any]:
    """A ViT of two extra tokens, and a decoder that attends to its output."""
    words = tokenizer()
    sizes = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}
    decoder = hf.TrOCRConfig(**sizes, max_position_embeddings=64, cross_attention_hidden_size=24, **ids(words))
    model = _encoder_decoder(hf.DeiTConfig(**VIEW), decoder, words)
    return model, hf.TrOCRProcessor(hf.ViTImageProcessorPil(**SQUARE), words)


def vit_gpt2() -> tuple[Any, Any]:
    """The same with GPT-2; its folder has a tokenizer and an image processor, but no processor of both."""
    words = tokenizer()
    decoder = hf.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, **ids(words))
    model = _encoder_decoder(hf.ViTConfig(**VIEW), decoder, words)
    return model, (hf.ViTImageProcessorPil(**SQUARE), words)


FAMILIES: dict[str, Callable[[], tuple[Any, Any]]] = {
    make.__name__: make
    for make in (
        llava_next, llava_onevision, qwen2_vl, qwen2_5_vl, qwen3_vl, paligemma, idefics3, smolvlm, internvl, gemma3,
        florence2, blip, blip2, instructblip, idefics2, git, kosmos2, trocr, vit_gpt2,
    )
}  # fmt: skip
