"""TensorBoard: follow a training step by step, and write results as events.

    >>> from camkit.tensorboard import TrainingWatch  # doctest: +SKIP
    >>> watch = TrainingWatch(model, images, "runs/first", every=100)  # doctest: +SKIP
    >>> for inputs, labels in loader:  # doctest: +SKIP
    ...     train_on(inputs, labels)
    ...     watch.step()

It needs the extra ``camkit[tensorboard]``.
"""

from camkit.tensorboard.watch import TrainingWatch, lightning_watch, write_check, write_diagnosis, write_explanation

__all__ = ["TrainingWatch", "lightning_watch", "write_check", "write_diagnosis", "write_explanation"]
