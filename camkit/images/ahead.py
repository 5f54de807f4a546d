"""Reads pictures ahead in other threads, and joins them into batches of one size."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from camkit.drawing.pixels import bytes_of
from camkit.engine.streams import Task, in_order
from camkit.errors import CamkitError
from camkit.images.crop import CropBoxes
from camkit.images.prepare import Prepared, located, prepare, source_of, unbatched
from camkit.types import Failure, ImageLike, Preprocess

_READERS = min(4, os.cpu_count() or 1)
"""The number of threads that read picture files: with four, decoding keeps up with most models."""

MOST_BYTES = 72 * 2**20
"""At most this many bytes of pictures are read ahead, and at most as many are in passes, so that memory does not grow
with the size of the pictures. They suffice for 90 pictures of 227 x 227. One picture at a time may be larger, such as a
picture of 20 megapixels."""

_MOST_BYTES_PER_BATCH = MOST_BYTES // 2

Batch: TypeAlias = "list[Prepared] | Failure"
"""Pictures of one size, or a picture that cannot be read."""


@dataclass(frozen=True)
class Reader:
    """How the pictures of a call become the model's input.

    Attributes:
        preprocess: as ``prepare`` takes it.
        rank: the number of axes after the channels.
        boxes: finds the part of a picture that the model sees.
    """

    preprocess: Preprocess | None
    rank: int
    boxes: CropBoxes

    def read(self, image: ImageLike, number: int = 1, *, draft: bool = False) -> Prepared:
        """Prepare one picture, the ``number``-th of the call.

        Raises:
            ImageError: it cannot be read or prepared.
        """
        prepared = prepare(image, self.preprocess, source_of(image, number), self.rank, draft=draft)
        return replace(prepared, number=number)

    def batches(self, images: Iterable[ImageLike], batch_size: int, *, draft: bool = False) -> Iterator[Batch]:
        """Join the pictures into batches of one size, in their order; a failure comes in its place.

        If the caller's iterable fails, what came before is returned first.

        Args:
            images: what ``prepare`` takes, and batches (N, C, H, W).
            batch_size: the most pictures in a batch; large ones fill it earlier.
            draft: as for ``prepare``.
        """
        batch: list[Prepared] = []
        held = 0
        try:
            for item in self._ahead(images, batch_size, draft=draft):
                size = _bytes(item)
                is_full = len(batch) == batch_size or held + size > _MOST_BYTES_PER_BATCH
                if batch and (not isinstance(item, Prepared) or is_full or item.tensor.shape != batch[0].tensor.shape):
                    yield batch
                    batch, held = [], 0
                if isinstance(item, Prepared):
                    batch.append(located(item, self.preprocess, self.boxes))
                    held += size
                    continue
                yield item
                del item  # while the batch is explained, only its list and its rows hold the pictures
        except Exception:
            if batch:
                yield batch
            raise
        if batch:
            yield batch

    def _ahead(self, images: Iterable[ImageLike], ahead: int, *, draft: bool) -> Iterator[Prepared | Failure]:
        """Prepare pictures in their order; files are read ahead in other threads."""

        def tasks() -> Iterator[Task[Prepared | Failure]]:
            for number, image in enumerate(unbatched(images, self.rank), start=1):
                if isinstance(image, (str, Path)):
                    yield Task(functools.partial(self._read_or_failed, image, number, draft=draft), in_thread=True)
                else:  # the caller may close it, or write into it, as soon as the next one is taken
                    yield Task(functools.partial(_same, self._read_or_failed(image, number)), in_thread=False)

        return in_order(tasks(), workers=_READERS, ahead=ahead, most=MOST_BYTES, size_of=_bytes)

    def _read_or_failed(self, image: ImageLike, number: int, *, draft: bool = False) -> Prepared | Failure:
        try:
            return self.read(image, number, draft=draft)
        except CamkitError as error:
            return Failure(source_of(image, number), error)


def in_rounds(batches: Iterable[Batch], workers: int) -> Iterator[tuple[Batch, bool]]:
    """Yield the batches in rounds of one for each worker, and tell of each whether the workers run it.

    They run all rounds except a last one that would leave some of them idle: one of fewer batches, or of batches of
    different lengths. A last picture alone, whose memory format would be slower, gets one from the batch before.
    """
    held: list[Batch] = []
    for batch in batches:
        if len(held) == workers:
            yield from ((held.pop(0), True) for _ in range(workers))
        held.append(batch)
    match held:
        case [*_, [_, _, _, *_] as before, [_] as last] if before[-1].tensor.shape == last[0].tensor.shape:
            last.insert(0, before.pop())
    lengths = {len(batch) if isinstance(batch, list) else 0 for batch in held}
    are_equal = len(held) == workers and len(lengths) == 1
    yield from ((held.pop(0), are_equal) for _ in range(len(held)))


def leaves_room(batch: Batch) -> bool:
    """Tell whether a batch leaves room in memory for others; a batch that does not is a single photo."""
    return bytes_of_batch(batch) <= _MOST_BYTES_PER_BATCH


def bytes_of_batch(batch: Batch) -> int:
    """Return the bytes that the pictures of a batch hold in memory."""
    return sum(map(_bytes, batch)) if isinstance(batch, list) else 0


def _bytes(item: Prepared | Failure) -> int:
    if not isinstance(item, Prepared):
        return 0
    return item.tensor.nbytes + (0 if item.picture is None else bytes_of(item.picture))


def _same(item: Prepared | Failure) -> Prepared | Failure:
    return item
