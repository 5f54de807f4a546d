"""Loads a model that writes about pictures, with its processor, from the hub or a folder."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from camkit.errors import ModelError, brief
from camkit.models import pick_device


class ProcessorPair:
    """An image processor and a tokenizer, as the processor of a model whose folder names none of its own."""

    def __init__(self, image_processor: Any, tokenizer: Any) -> None:
        self.image_processor, self.tokenizer = image_processor, tokenizer

    def __call__(self, images: Any, text: Any = None, **options: Any) -> dict[str, Any]:
        """Return the arguments for pictures, and texts if there are any."""
        texts = {} if text is None else dict(self.tokenizer(text, **options))
        return {**self.image_processor(images, **options), **texts}


def processor_of(name: str) -> Any:
    """Return the processor of a model on the hub or in a folder.

    Raises:
        Exception: there is none; which one depends on transformers.
    """
    from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer  # noqa: PLC0415 - an optional package

    from camkit.models.from_huggingface import quiet  # noqa: PLC0415 - it needs the optional package

    with quiet():
        processor = AutoProcessor.from_pretrained(name, trust_remote_code=False)
        if hasattr(processor, "tokenizer") and hasattr(processor, "image_processor"):
            return processor
        return ProcessorPair(
            AutoImageProcessor.from_pretrained(name, trust_remote_code=False),
            AutoTokenizer.from_pretrained(name, trust_remote_code=False),
        )


def processor_beside(model: Any) -> Any:
    """Return the processor of the folder that a model was loaded from.

    Raises:
        ModelError: there is none.
    """
    name = getattr(model, "name_or_path", "")
    try:
        return processor_of(name)
    except Exception as error:
        raise ModelError(f"no processor found beside the model ({name or 'no folder'}); pass processor=...") from error


def load(name: str, device: str | None = None) -> tuple[nn.Module, Any]:
    """Return a model and its processor, ``hf:NAME`` or a folder; code that comes with a model is not run.

    Raises:
        ModelError: it cannot be loaded, or does not write text about pictures.
    """
    try:
        from transformers import AutoConfig, AutoModelForImageTextToText  # noqa: PLC0415 - an optional package
    except ImportError as error:
        raise ModelError("models that write need an optional package: pip install 'camkit[transformers]'") from error
    folder = name.removeprefix("hf:")
    from camkit.models.from_huggingface import quiet, refuse_kernels  # noqa: PLC0415 - it needs the optional package

    try:
        with quiet():
            refuse_kernels(AutoConfig.from_pretrained(folder, trust_remote_code=False), name)
            model, info = AutoModelForImageTextToText.from_pretrained(
                folder, output_loading_info=True, trust_remote_code=False
            )
        processor = processor_of(folder)
    except Exception as error:
        raise ModelError(
            f"{name} cannot be loaded as a model that writes about pictures ({brief(error)}); pass the name of one on "
            "the hub, or a folder with its weights and its processor"
        ) from error
    if missing := sorted(info["missing_keys"]):
        raise ModelError(
            f"{name} has no weights for {len(missing)} of its parameters (the first is {missing[0]!r}), which would "
            "stay random; pass a model with all of its weights"
        )
    module: nn.Module = model.eval().to(torch.device(pick_device(device)))
    return module, processor
