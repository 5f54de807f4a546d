"""Models that resize and pad their input by themselves, noticed while they run."""

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
    """What a model made of its input by itself, as detectors do: the padded size, and the input's place in it."""

    padded: tuple[int, ...] = ()
    extent: Extent = ()


@contextmanager
def resizing(model: nn.Module | None) -> Iterator[Resized]:
    """Notice a part of the model that resizes and pads its images into a batch, and says so as torchvision's does.

    Without a model nothing is noticed.
    """
    resized = Resized()

    def note(_: nn.Module, __: list[Tensor], output: Any) -> None:
        found = resized_input(output)
        if found is not None:
            resized.padded, resized.extent = found

    with forward_hooks(dict.fromkeys(() if model is None else model.children(), note)):
        yield resized


def resized_input(output: Any) -> tuple[tuple[int, ...], Extent] | None:
    """Return the padded size, and the part of it that is the first image, of a batch of resized and padded images."""
    batch = output[0] if isinstance(output, tuple) and output else output
    if isinstance(batch, dict):  # some answer any question for an attribute with a key's value, or with a KeyError
        return None
    sizes, tensors = getattr(batch, "image_sizes", None), getattr(batch, "tensors", None)
    if not sizes or not isinstance(tensors, Tensor):
        return None
    padded = tuple(tensors.shape[2:])
    return padded, tuple((0.0, side / whole) for side, whole in zip(sizes[0], padded, strict=True))
