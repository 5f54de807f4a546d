"""Loads a model that writes about pictures, with its processor, from the hub or a folder."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from camkit.errors import ModelError, brief
from camkit.models import pick_device


def load(name: str, device: str | None = None) -> tuple[nn.Module, Any]:
    """Return a model and its processor, ``hf:NAME`` or a folder; code that comes with a model is not run.

    Raises:
        ModelError: it cannot be loaded, or does not write text about pictures.
    """
    try:
        from transformers import AutoModelForImageTextToText, AutoProcessor  # noqa: PLC0415 - an optional package
    except ImportError as error:
        raise ModelError("models that write need an optional package: pip install 'camkit[transformers]'") from error
    folder = name.removeprefix("hf:")
    try:
        model = AutoModelForImageTextToText.from_pretrained(folder)
        processor = AutoProcessor.from_pretrained(folder)
    except Exception as error:
        raise ModelError(
            f"{name} cannot be loaded as a model that writes about pictures ({brief(error)}); pass the name of one on "
            "the hub, or a folder with its weights and its processor"
        ) from error
    module: nn.Module = model.eval().to(torch.device(pick_device(device)))
    return module, processor
