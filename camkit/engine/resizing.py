"""Detect, while a model runs, that it resizes and pads its input itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from camkit.engine.attach import forward_hooks
from camkit.types import Extent


@dataclass
class Resized:
    """How a model resized its input itself, as detectors do: the padded size, and the part of it that is the input."""

    padded: tuple[int, ...] = ()
    extent: Extent = ()


@contextmanager
def resizing(model: nn.Module | None) -> Iterator[Resized]:
    """Detect a submodule that resizes and pads images into a batch, and returns an image list as torchvision's does.

    Without a model, nothing is detected.
    """
    resized = Resized()

    def note(_: nn.Module, __: list[Tensor], output: Any) -> None:
        size_and_extent = resized_input(output)
        if size_and_extent is not None:
            resized.padded, resized.extent = size_and_extent

    with forward_hooks(dict.fromkeys(() if model is None else model.children(), note)):
        yield resized


def resized_input(output: Any) -> tuple[tuple[int, ...], Extent] | None:
    """Return a resized batch's padded size, and the part that the first image covers; None for any other output."""
    batch = output[0] if isinstance(output, tuple) and output else output
    if isinstance(batch, dict):  # some return a key's value for any attribute, or raise a KeyError
        return None
    sizes, tensors = getattr(batch, "image_sizes", None), getattr(batch, "tensors", None)
    if not sizes or not isinstance(tensors, Tensor):
        return None
    padded = tuple(tensors.shape[2:])
    return padded, tuple((0.0, side / whole) for side, whole in zip(sizes[0], padded, strict=True))
