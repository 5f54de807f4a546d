"""The watch as a callback of Lightning, where that is installed."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from camkit.errors import InputError
from camkit.tensorboard.watch import TrainingWatch
from camkit.types import ImageLike

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def lightning_watch(
    images: ImageLike | Sequence[ImageLike],
    writer: Any | str | Path | None = None,
    *,
    pictures_every: int | None = 0,
    **settings: Any,
) -> Any:
    """Return a ``lightning.pytorch.Callback`` that watches a training.

    Heat and feature maps are written at the end of each epoch, unless ``pictures_every`` says otherwise.

    Args:
        images: the pictures that are explained, as for ``TrainingWatch``.
        writer: a SummaryWriter, or a folder; None is the trainer's TensorBoardLogger.
        pictures_every, settings: as for ``TrainingWatch``.

    Raises:
        InputError: Lightning is not installed; at the training's start: there is no logger that takes events.
    """
    base = _callback()

    class LightningWatch(base):  # type: ignore[misc, valid-type] # of whichever package is installed
        """Calls a TrainingWatch at the end of each batch."""

        watch: TrainingWatch | None = None
        _seen = 0

        def on_train_start(self, trainer: Any, module: Any) -> None:
            """Begin, with the trainer's own event file if no other was named."""
            to = writer or _events_of(trainer)
            self._seen = trainer.global_step
            self.watch = TrainingWatch(module, images, to, pictures_every=pictures_every, **settings)

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
            """Take note of a step, once for all the batches whose gradients it is of."""
            if self.watch is not None and trainer.global_step != self._seen:
                self._seen = trainer.global_step
                self.watch.step(trainer.global_step)

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:  # noqa: ARG002
            """Write the pictures."""
            if self.watch is not None and not pictures_every:
                self.watch.pictures(trainer.global_step)

        def on_train_end(self, trainer: Any, module: Any) -> None:  # noqa: ARG002
            """Take the hooks off."""
            self._end()

        def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:  # noqa: ARG002
            """Take the hooks off."""
            self._end()

        def _end(self) -> None:
            if self.watch is not None:
                self.watch.close()
            self.watch = None

    return LightningWatch()


def _callback() -> Any:
    for package in _PACKAGES:
        try:
            return importlib.import_module(package).Callback
        except ImportError:
            continue
    raise InputError("the callback needs the package lightning: pip install lightning")


def _events_of(trainer: Any) -> Any:
    for logger in trainer.loggers:
        if hasattr(logger.experiment, "add_histogram_raw"):
            return logger.experiment
    raise InputError("the trainer has no TensorBoardLogger; give lightning_watch a writer or a folder")
