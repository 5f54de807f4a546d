"""Loads Hugging Face's networks, ``hf:NAME`` or a folder: classifiers, detectors, and models with texts as classes."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast
from unittest import mock

import numpy as np
import torch
import transformers
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from jaxtyping import Float
from PIL import Image
from torch import Tensor, nn
from torchvision.ops import box_convert

from camkit.errors import ModelError, advice, as_error, brief
from camkit.models.loaded import ONLY_PICTURES, LoadedModel, Request, read_weights
from camkit.models.modules import Adapter, ClipPreprocess, refuse_short, taking_clips
from camkit.types import Activation, Pixels


def text_logits(model: Any, images: Tensor, *, texts: Tensor) -> dict[str, Tensor]:
    """Return the ``logits`` (N, K) and ``image_embeds`` (N, D) of a CLIP-like model (Radford et al. 2021).

    The logits are the cosine similarities of the picture's embedding and each text's, times the learned scale, plus the
    learned bias if the model has one (SigLIP, Zhai et al. 2023).

    Args:
        model: the model.
        images: preprocessed pictures (N, C, H, W).
        texts: the embeddings (K, D) of the texts, of length 1.
    """
    embeddings = _embedding(model.get_image_features(**_inputs(model, images)))
    embeddings = nn.functional.normalize(embeddings.float(), dim=-1)
    logits = embeddings @ texts.T * model.logit_scale.exp()
    bias = getattr(model, "logit_bias", None)
    return {"logits": logits if bias is None else logits + bias, "image_embeds": embeddings}


def from_patches(model: Any, images: Tensor) -> Any:
    """Return the output of a classifier that takes flattened patches (SigLIP 2).

    The sides of the pictures (N, C, H, W) are multiples of the patch size.
    """
    return model(**_inputs(model, images))


class Prepare:
    """Preprocesses a PIL picture with an image processor; returns a tensor (C, H, W)."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor

    def __call__(self, picture: Image.Image) -> Tensor:
        """Return the model's input for one picture."""
        processed = self.processor(images=picture, return_tensors="pt")
        values: Tensor = processed["pixel_values"][0]
        if "pixel_mask" in processed:  # the model never looks at the padding
            seen = processed["pixel_mask"][0].bool()
            values = values[:, : int(seen.any(1).sum()), : int(seen.any(0).sum())]
        if "spatial_shapes" not in processed:
            return values
        rows, columns = processed["spatial_shapes"][0].tolist()
        side = self.processor.patch_size
        patches = values[: rows * columns].reshape(rows, columns, side, side, -1)
        return patches.permute(4, 0, 2, 1, 3).reshape(-1, rows * side, columns * side)


class PrepareClip(ClipPreprocess):
    """Prepares clips with a video processor.

    Args:
        processor: the video processor.
        frames: how many frames the model takes. If the processor names a rate, that decides in its place.
    """

    def __init__(self, processor: Any, frames: int) -> None:
        self.processor = processor
        self.frames = frames

    def chosen(self, count: int, rate: float) -> list[int]:
        """Return the numbers of the frames that the processor samples, from 0."""
        at_rate = getattr(self.processor, "fps", None)
        if at_rate is None:
            refuse_short(count, self.frames)
        metadata = transformers.video_utils.VideoMetadata(total_num_frames=count, fps=rate)
        wanted = {"num_frames": self.frames} if at_rate is None else {"fps": at_rate}
        return [int(number) for number in self.processor.sample_frames(metadata, **wanted)]

    def of_frames(self, frames: Sequence[Pixels]) -> Float[Tensor, "c t h w"]:
        """Return the model's input for these frames."""
        processed = self.processor(videos=[np.stack(frames)], do_sample_frames=False, return_tensors="pt")
        clip: Tensor = next(processed[name] for name in ("pixel_values", "pixel_values_videos") if name in processed)[0]
        return clip.transpose(0, 1)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep the hub's retries and progress bars, and the remarks and questions of transformers, off the terminal."""
    log, library = logging.getLogger("huggingface_hub"), transformers.utils.logging
    with contextlib.ExitStack() as stack:
        stack.callback(log.setLevel, log.level)
        if not are_progress_bars_disabled():
            stack.callback(enable_progress_bars)
        if library.is_progress_bar_enabled():
            stack.callback(library.enable_progress_bar)
        log.setLevel(logging.ERROR)
        disable_progress_bars()
        library.disable_progress_bar()
        stack.enter_context(mock.patch.object(transformers.dynamic_module_utils, "TIME_OUT_REMOTE_CODE", 0))
        yield


def load(request: Request) -> LoadedModel:
    """Build the network of a configuration, with published weights, with weights from a file, or with none."""

    def said(error: Exception) -> str:
        if "trust_remote_code" in str(error):
            return (
                f"{request.name} comes with Python code, which camkit does not run; if you have read the code and "
                f"trust it, pass {advice('trust_remote_code=True', '--trust-remote-code')}"
            )
        return (
            f"{request.name} cannot be loaded ({brief(error)}); pass the name of a model on the hub, or a folder "
            "with config.json, weights and preprocessor_config.json, which "
            + advice("size, mean and std", "--size, --mean and --std")
            + " together can replace"
        )

    with quiet(), as_error(ModelError, said):  # a damaged folder can make transformers raise anything
        return _loaded(request, request.name.removeprefix("hf:"))


def _loaded(request: Request, name: str) -> LoadedModel:
    config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=request.trust_remote_code)
    if not request.trust_remote_code:
        way_out = f"; if you trust that code, pass {advice('trust_remote_code=True', '--trust-remote-code')}"
        refuse_kernels(config, request.name, way_out)
    architectures = [str(architecture) for architecture in config.architectures or ()]
    for kind, adapted in _KINDS:
        build = kind.get(type(config), None)
        is_usable = kind is not _PROMPTABLE or hasattr(build, "get_image_embeddings")
        is_video = kind is transformers.MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING and not architectures
        if build is not None and (build.__name__ in architectures or is_video) and is_usable:
            return _adapted(request, name, config, kind, adapted)
    library = transformers.MODEL_MAPPING.get(type(config), None)  # None for code that comes with a model
    compares = library is None or hasattr(library, "get_text_features")
    compares = compares and hasattr(config, "text_config") and hasattr(config, "vision_config")
    if compares and not any(name.endswith("ForImageClassification") for name in architectures):
        return _adapted(request, name, config, None, comparing)
    own_code = getattr(config, "auto_map", None) or {}
    classified = transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING
    if type(config) not in classified and "AutoModelForImageClassification" not in own_code:
        raise ModelError(
            f"{request.name} is a {config.model_type} model, which camkit cannot load; "
            + advice(
                "load it yourself and pass the module, with a function of its output as target",
                "write a factory whose module returns class scores, maps or boxes (--model file.py:factory)",
            )
        )
    request.refuse("text", ONLY_PICTURES)
    return _complete(request, name, *_classifier(request, name, config))


def refuse_kernels(config: Any, name: str, way_out: str = "") -> None:
    """Refuse a model with code from the hub for its attention, in any part of its configuration.

    Raises:
        ModelError: it has such code; ``way_out`` ends the sentence.
    """
    kind = getattr(config, "_attn_implementation", None)
    if "/" in str(kind):
        raise ModelError(
            f"{name} uses code for its attention from {kind!r} on the hub, which camkit does not run{way_out}"
        )
    for part in getattr(config, "sub_configs", ()):
        refuse_kernels(getattr(config, part, None), name, way_out)


def described(module: Any, request: Request) -> LoadedModel:
    """Return a classifier of Hugging Face's with the preprocessing and labels of the folder it was loaded from.

    Raises:
        OSError: the folder has no preprocessing.
    """
    return _complete(request, module.name_or_path, module, _labels(module.config))


def _complete(
    request: Request,
    name: str,
    module: nn.Module,
    labels: tuple[str, ...] | None,
    note: str | None = None,
) -> LoadedModel:
    """Return a classifier with the preprocessing of its folder, in a form that takes pictures."""
    loaded = LoadedModel(module, request.name, _prepared(request, name), labels, note)
    return replace(loaded, module=Adapter(module, from_patches)) if takes_patches(module) else loaded


def _classifier(request: Request, name: str, config: Any) -> tuple[nn.Module, tuple[str, ...] | None, str | None]:
    """Return the network, its labels, and what the user should know about its weights."""
    build = transformers.AutoModelForImageClassification
    labels = _labels(config)
    if request.weights is None:
        return _built(request, build, name, config), labels, None
    weights = read_weights(request.weights)

    def make(classes: int | None) -> nn.Module:
        config.num_labels = classes or config.num_labels
        return cast("nn.Module", _untrained(request, build, config))

    module, classes = weights.build(make, request.name)
    return module, labels if classes is None else None, weights.note


_PROMPTABLE = transformers.MODEL_FOR_MASK_GENERATION_MAPPING


def _adapted(
    request: Request, name: str, config: Any, kind: Any, adapted: Callable[[Any, Any, tuple[str, ...]], nn.Module]
) -> LoadedModel:
    """Load a network of one of these kinds; of none if it compares pictures with texts."""
    request.refuse("weights", "loads its weights from its own folder")
    takes_texts = adapted in (with_texts, comparing)
    if not takes_texts:
        request.refuse("text", ONLY_PICTURES)
    elif not request.text:
        raise ModelError(
            f"{request.name} compares pictures with texts, so it needs a text that says what to find: "
            + advice("text=['a photo of a dog']", "--text 'a photo of a dog'")
        )
    tokenizer = None
    if takes_texts or config.model_type == "oneformer":
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=request.trust_remote_code)
    build = transformers.AutoModel if kind is None else kind[type(config)]
    module = adapted(_built(request, build, name, config), tokenizer, request.text)
    is_named = kind is not _PROMPTABLE and kind is not transformers.MODEL_FOR_DEPTH_ESTIMATION_MAPPING
    labels = request.text or (_labels(config) if is_named else None)
    activation: Activation | None = None
    if kind is None:
        activation = "sigmoid" if "siglip" in config.model_type else "softmax" if len(request.text) > 1 else "none"
    takes_clips = kind is transformers.MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING
    prepare = _prepared_clips(request, name, config) if takes_clips else _prepared(request, name)
    detects = kind is transformers.MODEL_FOR_OBJECT_DETECTION_MAPPING or adapted is with_texts
    return LoadedModel(module, request.name, prepare, labels, activation=activation, detects=detects)


def comparing(model: Any, tokenizer: Any, texts: tuple[str, ...]) -> Adapter:
    """Return a model that compares pictures with texts, such as CLIP and SigLIP, for these texts as classes."""
    if not hasattr(model, "logit_scale"):  # ALIGN divides by a temperature
        raise ModelError(
            f"{type(model).__name__} does not compare pictures with texts as CLIP and SigLIP do; wrap it in a module "
            "that returns class scores"
        )
    padding = "max_length" if "siglip" in model.config.model_type else True
    tokens = tokenizer(list(texts), padding=padding, truncation=True, return_tensors="pt")
    with torch.no_grad():
        embedded = nn.functional.normalize(_embedding(model.eval().get_text_features(**tokens)).float(), dim=-1)
    return Adapter(model, text_logits, texts=embedded)


def _prepared_clips(request: Request, name: str, config: Any) -> PrepareClip:
    request.refuse("size, mean and std", "takes clips, which its own processor prepares")
    processor = transformers.AutoVideoProcessor.from_pretrained(name, trust_remote_code=request.trust_remote_code)
    frames = getattr(processor, "num_frames", None) or getattr(config, "num_frames", None) or config.frames_per_clip
    return PrepareClip(processor, int(frames))


def takes_patches(model: nn.Module) -> bool:
    """Return whether a model takes flattened patches and the shape of their grid in place of pictures."""
    return "spatial_shapes" in inspect.signature(getattr(model, "get_image_features", model.forward)).parameters


def _inputs(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """Return the model's keyword arguments for pictures (N, C, H, W)."""
    if not takes_patches(model):
        return {"pixel_values": images}
    config: Any = model.config
    side = config.vision_config.patch_size
    grid = (images.shape[2] // side, images.shape[3] // side)
    patches = images.reshape(*images.shape[:2], grid[0], side, grid[1], side).permute(0, 2, 4, 3, 5, 1)
    flat = patches.flatten(3).flatten(1, 2)
    return {
        "pixel_values": flat,
        "pixel_attention_mask": flat.new_ones(flat.shape[:2], dtype=torch.int32),
        "spatial_shapes": torch.tensor([grid] * len(images), device=images.device),
    }


def _untrained(request: Request, build: Any, config: Any) -> Any:
    if not hasattr(build, "from_config"):  # the class of a network, not one of transformers' factories
        return build(config)
    return build.from_config(config, trust_remote_code=request.trust_remote_code)


def _built(request: Request, build: Any, name: str, config: Any) -> Any:
    """Build a network, with its weights if the request asks for them."""
    if not request.pretrained:
        return _untrained(request, build, config)
    model, info = build.from_pretrained(name, output_loading_info=True, trust_remote_code=request.trust_remote_code)
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(
            f"{request.name} has no weights for {len(missing)} of its parameters (the first is {missing[0]!r}), which "
            "would stay random; name a model trained for this task, or pass all of its weights with "
            + advice("weights=...", "--weights FILE")
        )
    return model


def _embedding(features: Any) -> Tensor:
    return cast("Tensor", features if isinstance(features, Tensor) else features.pooler_output)


def _labels(config: Any) -> tuple[str, ...] | None:
    names = dict(config.id2label)
    if all(str(name) == f"LABEL_{index}" for index, name in names.items()):
        return None
    return tuple(str(names[index]) for index in sorted(names))


def _prepared(request: Request, name: str) -> Prepare:
    try:
        processor = transformers.AutoImageProcessor.from_pretrained(name, trust_remote_code=request.trust_remote_code)
    except (OSError, ValueError):  # the folder has none
        if not {"size", "mean", "std"} <= request.changes.keys():
            raise
        processor = transformers.ViTImageProcessor()
    if request.size is not None:
        processor.size = dict(zip(("height", "width"), request.size, strict=True))
        processor.do_center_crop = False
        said = f"the image processor of {request.name} does not prepare pictures of another size; leave out size"
        with as_error(ModelError, lambda _: said):
            if tuple(Prepare(processor)(Image.new("RGB", (160, 100))).shape[1:]) != request.size:
                raise ModelError(said)
    if request.mean is not None:
        processor.image_mean, processor.do_normalize = list(request.mean), True
    if request.std is not None:
        processor.image_std, processor.do_normalize = list(request.std), True
    return Prepare(processor)


Detections = dict[str, Tensor]


def boxes(
    model: nn.Module,
    images: Float[Tensor, "n c h w"],
    *,
    classes: int,
    tokens: list[list[int]] | None = None,
    **texts: Tensor,
) -> list[Detections]:
    """Return for each picture its ``boxes`` (K, 4) in pixels, their ``labels``, ``scores`` and ``logits`` (K,).

    ``all_boxes`` (Q, 4), ``all_scores`` and ``all_logits`` (Q, classes) are those of all queries.

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
    shares = logits.softmax(-1)[:, :classes] if logits.shape[1] > classes else logits.sigmoid()
    if logits.shape[1] > classes:
        scores, labels = shares.max(-1)
        order = scores.detach().argsort(descending=True, stable=True)
        queries, labels, scores = order, labels[order], scores[order]
    else:
        flat = shares.flatten()
        # The libraries' own decoding returns 100 boxes for most of these networks; a network with fewer queries, one
        # for each.
        order = flat.detach().argsort(descending=True, stable=True)[: min(100, len(logits))]
        queries, labels, scores = order // logits.shape[1], order % logits.shape[1], flat[order]
    return {
        "boxes": corners[queries],
        "scores": scores,
        "labels": labels,
        "logits": logits[queries, labels],
        "all_boxes": corners,
        "all_scores": shares,
        "all_logits": logits[:, :classes],
    }


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


_KINDS: tuple[tuple[Any, Callable[[Any, Any, tuple[str, ...]], nn.Module]], ...] = (
    (
        transformers.MODEL_FOR_OBJECT_DETECTION_MAPPING,
        lambda model, *_: Adapter(model, functools.partial(boxes, classes=model.config.num_labels)),
    ),
    (transformers.MODEL_FOR_ZERO_SHOT_OBJECT_DETECTION_MAPPING, with_texts),
    (transformers.MODEL_FOR_UNIVERSAL_SEGMENTATION_MAPPING, queried_maps),
    (transformers.MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING, lambda model, *_: model),
    (transformers.MODEL_FOR_DEPTH_ESTIMATION_MAPPING, lambda model, *_: model),
    (_PROMPTABLE, lambda model, *_: Adapter(model, promptable)),
    (
        transformers.MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING,
        lambda model, *_: taking_clips(model, model.main_input_name),
    ),
)
"""Networks that return boxes (of the classes that they were trained for, or that texts name), maps (of queries with
their classes, of each class, of depths), masks for prompts, or the classes of clips; and what makes of the model, its
tokenizer and the texts a module that camkit reads."""
