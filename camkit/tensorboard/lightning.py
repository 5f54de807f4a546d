"""The watch as a Lightning callback, if Lightning is installed."""

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

    Heatmaps and feature maps are written at the end of each epoch, unless ``pictures_every`` says otherwise.

    Args:
        images: the pictures to explain, as for ``TrainingWatch``.
        writer: a SummaryWriter, or a folder; None means the trainer's TensorBoardLogger.
        pictures_every, settings: as for ``TrainingWatch``.

    Raises:
        InputError: Lightning is not installed; when the training starts: the trainer has no TensorBoardLogger.
    """
    base = _callback()

    class LightningWatch(base):  # type: ignore[misc, valid-type] # from whichever package is installed
        """Calls a TrainingWatch at the end of each batch."""

        watch: TrainingWatch | None = None
        _last_step = 0

        def on_train_start(self, trainer: Any, module: Any) -> None:
            """Start watching; events go to the trainer's own file if there is no other."""
            events = writer or _events_of(trainer)
            self._last_step = trainer.global_step
            self.watch = TrainingWatch(module, images, events, pictures_every=pictures_every, **settings)

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
            """Count a step, once for all the batches whose gradients it accumulates."""
            if self.watch is not None and trainer.global_step != self._last_step:
                self._last_step = trainer.global_step
                self.watch.step(trainer.global_step)

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:  # noqa: ARG002
            """Write the pictures."""
            if self.watch is not None and not pictures_every:
                self.watch.pictures(trainer.global_step)

        def on_train_end(self, trainer: Any, module: Any) -> None:  # noqa: ARG002
            """Remove the hooks."""
            self._close()

        def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:  # noqa: ARG002
            """Remove the hooks."""
            self._close()

        def _close(self) -> None:
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
    raise InputError("lightning_watch needs the package lightning: pip install lightning")


def _events_of(trainer: Any) -> Any:
    for logger in trainer.loggers:
        if hasattr(logger.experiment, "add_histogram_raw"):
            return logger.experiment
    raise InputError("the trainer has no TensorBoardLogger; pass a writer or a folder to lightning_watch")
