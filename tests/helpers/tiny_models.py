"""Tiny models with random weights, saved as folders that ``from_pretrained`` loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch


def lively(model: Any) -> Any:
    """Give a random model weights with which its answer depends on the input, and different queries differ."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.kaiming_normal_(parameter)
    return model.eval()


def saved_once(factory: pytest.TempPathFactory, make: Callable[[str, Path], tuple[Any, Any]]) -> Callable[[str], Path]:
    """Return a function from a family to the folder of its tiny model; each is saved once.

    Args:
        factory: makes the folders.
        make: returns the model and the processor of a family; it may write files of its own into the folder.
    """
    folders: dict[str, Path] = {}

    def folder_of(family: str) -> Path:
        if family not in folders:
            folder = folders[family] = factory.mktemp(family)
            model, processor = make(family, folder)
            lively(model).save_pretrained(folder)
            processor.save_pretrained(folder)
        return folders[family]

    return folder_of
