"""Weights without meaning: the entries of each weight tensor in random order."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


def shuffle_weights(modules: Iterable[nn.Module], generator: torch.Generator) -> int:
    """Shuffle the entries of the weights that modules hold themselves, in place, and return how many were shuffled.

    Tensors with one axis, such as biases and the scales of normalisations, stay: a channel without meaning gives them
    none. So the values keep their sizes, and the model its range of outputs. Call it on a copy of a model.

    Args:
        modules: the modules; those inside them are not visited.
        generator: a generator on the CPU.
    """
    shuffled = 0
    with torch.no_grad():
        for module in modules:
            for weight in module.parameters(recurse=False):  # includes those from which a parametrisation computes one
                if weight.dim() > 1 and weight.numel() > 1:
                    order = torch.randperm(weight.numel(), generator=generator).to(weight.device)
                    weight.copy_(weight.detach().flatten()[order].reshape(weight.shape))
                    shuffled += 1
    return shuffled
