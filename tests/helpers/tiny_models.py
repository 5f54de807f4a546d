"""Tiny models with random weights, saved as folders that ``from_pretrained`` loads."""

import json
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn


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


def tokenizer_of_letters(folder: Path, length: int, pad: str = "!") -> dict[str, int]:
    """Save a tokenizer of single letters into a folder; return what the configuration of a text model needs."""
    letters = string.ascii_lowercase
    words = ["!", *letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    files = folder / "vocab.json", folder / "merges.txt"
    files[0].write_text(json.dumps({word: number for number, word in enumerate(words)}))
    files[1].write_text("#version: 0.2\n")
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.CLIPTokenizer(*map(str, files), model_max_length=length, pad_token=pad)
    tokenizer.save_pretrained(folder)
    last = len(words) - 1
    return {"vocab_size": last + 1, "bos_token_id": last - 1, "eos_token_id": last, "pad_token_id": words.index(pad)}


def gradient_times_activation(model: nn.Module, layer: str, score: Callable[[], Tensor]) -> Tensor:
    """Return the output of a layer, times the gradient of a score that runs the model, from autograd."""
    kept: list[Tensor] = []

    def begin(_: Any, __: Any, output: Any) -> Any:
        is_tensor = isinstance(output, Tensor)
        kept.append((output if is_tensor else output[0]).detach().requires_grad_())
        return kept[0].clone() if is_tensor else (kept[0].clone(), *output[1:])

    handle = model.get_submodule(layer).register_forward_hook(begin)
    score().backward()
    handle.remove()
    assert kept[0].grad is not None
    return (kept[0] * kept[0].grad).detach()
