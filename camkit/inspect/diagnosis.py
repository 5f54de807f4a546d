"""``diagnose()``: run a model on a batch and report what is wrong with it; and the ``Diagnosis`` that it returns."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor, nn

from camkit.drawing.encode import as_html, encode
from camkit.errors import InputError, TargetError, advice, as_error, brief
from camkit.explaining.explainer import configured_model
from camkit.explaining.explanation import finite_or_none
from camkit.images.files import write_file
from camkit.images.prepare import prepare, source_of, stacked, unbatched
from camkit.inspect.findings import Finding, findings
from camkit.inspect.layer_statistics import LayerStatistics, Measured, NamedLoss, measure
from camkit.inspect.picture import draw
from camkit.kit.wording import counted
from camkit.layers.trace import scored_tensor
from camkit.models import as_model, device_of, dtype_of, refuse_black_box, spatial_rank
from camkit.models.loaded import Loadable, LoadedModel
from camkit.models.modules import explained_failures
from camkit.options.settings import Settings, as_settings
from camkit.tables import Rows, Tabular, flat
from camkit.targets.scores import describe, final_activation, main_tensor, rows_that_sum_to
from camkit.types import ImageLike, Pixels, Precision, Preprocess

REPORTS = ("diagnose.json", "diagnose.png")
"""The files that a diagnosis writes."""


@dataclass(frozen=True)
class Diagnosis(Measured, Tabular):
    """What happens in each layer of a model on a batch of pictures.

    Attributes:
        model: the model's name.
        pictures: the number of pictures.
        training: whether the model ran as in a training step.
        findings: what is wrong; empty for a healthy model.
        parameters, trained: how many numbers the model's parameters hold, and how many of these require gradients.
    """

    model: str
    pictures: int
    training: bool
    findings: tuple[Finding, ...]
    parameters: int = 0
    trained: int = 0

    def __getitem__(self, layer: str) -> LayerStatistics:
        """Return the row of a layer.

        Raises:
            KeyError: no row has that name.
        """
        return {row.layer: row for row in self.rows}[layer]

    @property
    def remarks(self) -> tuple[str, ...]:
        """What to know when reading the numbers, although nothing is wrong."""
        zero = ", ".join(map(repr, self.zero_weights[:3])) + (", ..." if len(self.zero_weights) > 3 else "")
        remarks = (
            (self.loss is None, "there are no gradients: the output depends on nothing that can be differentiated"),
            (
                self.parameters and not self.trained,
                "no parameter requires gradients: the model is set up for use, not for training",
            ),
            (
                self.zero_weights,
                f"the weights of {zero} are all zero, perhaps as initialised, so no gradient passes them yet",
            ),
            (
                self.unnormalised,
                "batch normalisation has seen too few batches to normalise in evaluation mode, so vanishing and "
                "exploding gradients are not judged; use "
                f"{advice('training=True', '--train')} to see the model as it is trained",
            ),
        )
        return tuple(remark for applies, remark in remarks if applies)

    @property
    def batch_text(self) -> str:
        """The number of pictures and the mode, as reports begin."""
        mode = "as in training" if self.training else "in evaluation mode"
        return f"{counted(self.pictures, 'picture')} {mode}"

    @property
    def loss_text(self) -> str:
        """The loss and its name, as reports append them to a line; empty if there is no loss."""
        name = f" ({self.loss_name})" if self.loss_name else ""
        return "" if self.loss is None else f", loss {self.loss:.3g}{name}"

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain JSON values; null for numbers that are not finite."""
        return {
            "version": 1,  # raised when a field is removed or changes its meaning
            "model": self.model,
            "pictures": self.pictures,
            "training": self.training,
            "loss": finite_or_none(self.loss),
            "loss_name": self.loss_name,
            "parameters": self.parameters,
            "trained": self.trained,
            "findings": [finding.to_dict() for finding in self.findings],
            "remarks": list(self.remarks),
            "layers": [row.to_dict() for row in self.rows],
        }

    def table(self) -> Rows:
        """Return a row for each call of each layer; ``dead`` and ``off`` are numbers of channels."""
        return [flat(row.to_row()) for row in self.rows]

    def save(self, path: str | Path) -> Path:
        """Write the findings and the statistics as JSON (.json), or the drawing (any picture type).

        Raises:
            OutputError: the file cannot be written, or its type is unknown.
        """
        path = Path(path)
        as_json = path.suffix == ".json"
        write_file(path, f"{json.dumps(self.to_dict())}\n".encode() if as_json else encode(self.sheet(), path.suffix))
        return path

    def __repr__(self) -> str:
        """Return one line that lists the findings."""
        findings = ", ".join(f"{finding.kind} at {finding.layer!r}" for finding in self.findings) or "nothing wrong"
        size = f"{counted(self.pictures, 'picture')}, {counted(len(self.rows), 'layer')}"
        return f"<Diagnosis of {self.model} with {size}: {findings}>"

    def sheet(self) -> Pixels:
        """Draw a strip for each layer, red if the layer has a finding, height x width x 3 uint8 RGB.

        The axis of gradient magnitudes is logarithmic and shared by all layers, so that vanishing and exploding
        gradients show as a drift to the left or the right. The height of a bar is the square root of its share.
        """
        summary = f"{self.batch_text}, {counted(len(self.rows), 'layer')}{self.loss_text}"
        return draw(f"{self.model}: diagnosis by layer", summary, self.rows, self.findings)

    def _repr_html_(self) -> str:
        """Show the picture of the layers and the findings in a notebook."""
        return as_html(self.sheet(), repr(self))


def diagnose(
    model: Loadable | None,
    batch: ImageLike | Sequence[ImageLike] | tuple[Any, Any],
    loss: Callable[..., Tensor] | None = None,
    *,
    training: bool | None = None,
    precision: Precision | None = None,
    preprocess: Preprocess | None = None,
    device: str | torch.device | None = None,
    config: Settings | Mapping[str, Any] | str | Path | None = None,
) -> Diagnosis:
    """Measure each layer of a model on a batch of pictures, and report what is wrong.

    The model runs once and is differentiated once. Only statistics of the outputs and gradients are kept. The model
    comes back exactly as it went in: flags, buffers, ``.grad``, random generators, hooks.

    Args:
        model: as for ``camkit.explain``; None is the config's model.
        batch: a tensor (N, C, H, W), paths or other pictures, or a pair of such a batch and its labels. It takes
            eight or more pictures to tell a dead channel from one that does not respond to these pictures.
        loss: a function ``output -> number``, or with labels ``(output, labels) -> number``, to differentiate. If None,
            labels that are class indices (N, *cells) or shares that sum to 1 (N, K, *cells) give the cross entropy, and
            a single output or other labels from 0 to 1 the binary cross entropy. Without labels, it is the mean of the
            best class's score. The result's ``loss_name`` says which was used.
        training: run the model as in a training step, after ``model.train()``: dropout on, normalisation by the batch.
            None is the config's, or else it runs in evaluation mode.
        precision: "fp32", or "bf16" or "fp16" under autocast, to find what overflows in mixed precision. None is the
            config's, or else "fp32".
        preprocess: turns a PIL picture into the model's input (C, H, W); a model loaded by name has its own.
        device: the device of a model loaded by name; a module stays where it is.
        config: a ``camkit.toml``, or its tables as a mapping; camkit uses its tables ``model`` and ``diagnose``.

    Returns:
        A ``Diagnosis``: ``rows`` has statistics for each layer, ``findings`` says what is wrong, ``to_dict()`` gives
        JSON values.

    Raises:
        InputError: an argument or a picture is wrong.
        LayerError: the model is a black box.
        TargetError: no usual loss fits the output and the labels.
        Exception: whatever the model or the loss raises.

    Examples:
        >>> import camkit, torch
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Flatten(), nn.Linear(32, 2))
        >>> _ = nn.init.constant_(net[0].bias, -100)
        >>> diagnosis = camkit.diagnose(net, torch.rand(16, 1, 8, 3))
        >>> [(finding.kind, finding.layer) for finding in diagnosis.findings]
        [('dead', '1'), ('no gradient', '0')]
    """
    settings = as_settings(config)
    training = bool(settings.diagnose.train) if training is None else training
    precision = precision or settings.diagnose.precision or "fp32"
    if precision not in get_args(Precision):
        raise InputError(f"precision must be one of {', '.join(get_args(Precision))}, not {precision!r}")
    is_named = model is None or isinstance(model, str)
    named = configured_model(model, settings.model, device=device, trainable=True)
    loaded = as_model(named, preprocess=preprocess, device=None if is_named else device)
    refuse_black_box(loaded.module)
    pictures, labels = split_labels(batch, spatial_rank(loaded.module))
    inputs = prepared_batch(pictures, loaded)
    score = score_for(loss, labels, loaded.module)
    with explained_failures(loaded.module, inputs):
        measured = measure(loaded.module, inputs, score, training=training, precision=precision)
    to_train = training and not isinstance(model, LoadedModel)
    parameters = list(loaded.module.parameters())
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    return Diagnosis(
        **vars(measured),
        model=loaded.name,
        pictures=len(inputs),
        training=training,
        findings=tuple(findings(measured, len(inputs), to_train=to_train)),
        parameters=sum(parameter.numel() for parameter in parameters),
        trained=trained,
    )


def split_labels(batch: Any, rank: int) -> tuple[Any, Any]:
    """Return a batch's pictures and its labels, None if it has none.

    A batch with labels is a pair, as a data loader gives it: first a whole batch, either a tensor (N, C, H, W) or a
    list, and second anything but pictures. Every other sequence is a sequence of pictures.
    """
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        first, second = batch
        is_batch = isinstance(first, (list, tuple)) or (isinstance(first, Tensor) and first.dim() == rank + 2)
        is_pictures = isinstance(second, (str, Path, Image.Image)) or (
            isinstance(second, Tensor)
            and second.dim() == rank + 2
            and second.shape[1:] == getattr(first, "shape", ())[1:]
        )
        if is_batch and not is_pictures:
            return first, second
    return batch, None


def prepared_batch(pictures: Any, model: LoadedModel) -> Float[Tensor, "n c *size"]:
    """Return pictures as one tensor on the model's device, with its number type.

    Raises:
        InputError: there is no picture, one cannot be read, or they have several sizes.
    """
    rank = spatial_rank(model.module)
    items = list(pictures) if isinstance(pictures, (list, tuple)) else [cast("ImageLike", pictures)]
    tensors = [
        prepare(image, model.preprocess, source_of(image, number), rank).tensor
        for number, image in enumerate(unbatched(items, rank), start=1)
    ]
    if not tensors:
        raise InputError("the batch is empty; pass at least one picture")
    unfit = "the pictures of a batch must have one size after preprocessing"
    with as_error(InputError, lambda error: f"{unfit} ({brief(error)}); pass them one by one"):
        batch = stacked(tensors)
    return batch.to(device_of(model.module), dtype_of(model.module))


def score_for(loss: Callable[..., Tensor] | None, labels: Any, module: nn.Module) -> NamedLoss:
    """Return the function that turns the model's output into one number and its name.

    Without a loss, that is the usual loss if there are labels, and otherwise the mean of the best class's score; for
    maps of scores, the mean over their cells too.

    Raises:
        InputError: the loss is not a function, or the labels are not numbers.
    """
    if loss is not None and (isinstance(loss, type) or not callable(loss)):
        raise InputError(
            "loss must be a function of the output, and of the labels if you pass any, such as torch.nn.MSELoss(), not "
            f"{loss!r}"
        )
    if labels is not None and not isinstance(labels, (Tensor, dict)):
        unfit = (
            "labels must be numbers, such as class indices; for others, leave them out and pass loss=, a function of "
            "the output alone"
        )
        with as_error(InputError, lambda _: unfit):
            labels = torch.as_tensor(np.asarray(labels))
    labels = labels.to(device_of(module)) if isinstance(labels, Tensor) else labels

    def score(output: Any) -> tuple[Tensor | None, str]:
        if loss is not None:
            value = loss(output) if labels is None else loss(output, labels)
            if not isinstance(value, Tensor) or value.numel() != 1:
                kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                raise InputError(f"loss must return one number, a tensor with one element, not {kind}; use .mean()")
            return value.reshape(()), "own loss"
        if labels is not None:
            return usual_loss(output, labels)
        scores = scored_tensor(output)
        mean = None if scores is None else (scores.amax(1) if scores.dim() > 1 else scores).float().mean()
        return mean, "mean score of the best class"

    return score


_IGNORED = -100
"""The label that PyTorch's cross entropy leaves out."""


def usual_loss(output: Any, labels: Any) -> tuple[Tensor, str]:
    """Return the loss of a model's output, and its name.

    Labels that are class indices (N, *cells), or shares of the classes that sum to 1 (N, K, *cells), give the cross
    entropy. Labels of a single output, and other labels from 0 to 1 (N, K, *cells), give the binary cross entropy. The
    labels may have an axis of length 1 for the classes. The output of a softmax or sigmoid is read as probabilities.

    Raises:
        TargetError: no loss fits the output and the labels.
    """
    scores = main_tensor(output)
    if not (isinstance(scores, Tensor) and scores.is_floating_point() and scores.dim() and isinstance(labels, Tensor)):
        raise TargetError(
            f"camkit has no usual loss for a model that returns {describe(output)} and labels of the type "
            f"{type(labels).__name__}; pass loss=, a function of output and labels"
        )
    logits = _logits(scores if scores.dim() > 1 else scores[:, None])
    if logits.dim() > 2 and logits.shape[2:].numel() == 1:
        logits = logits.flatten(1)
    one_class, values = (len(logits), *logits.shape[2:]), ""
    if labels.shape == (len(logits), 1, *logits.shape[2:]):
        labels = labels.squeeze(1)
    if labels.shape == one_class and logits.shape[1] == 1:
        logits = logits.squeeze(1)
    elif labels.shape == one_class and not labels.is_floating_point():
        classes = labels[labels != _IGNORED]
        wrong = classes[(classes < 0) | (classes >= logits.shape[1])]
        if len(classes) and not len(wrong):
            return nn.functional.cross_entropy(logits, labels.long()), "cross entropy"
        values = f" (one is class {int(wrong[0])})" if len(wrong) else f" (all are {_IGNORED}, so they are ignored)"
    elif labels.shape == logits.shape and bool(rows_that_sum_to(1, labels.float().movedim(1, -1).flatten(0, -2)).all()):
        return nn.functional.cross_entropy(logits, labels.float()), "cross entropy"
    if labels.shape == logits.shape:
        labels = labels.to(logits.dtype)
        if bool(((labels >= 0) & (labels <= 1)).all()):
            return nn.functional.binary_cross_entropy_with_logits(logits, labels), "binary cross entropy"
        values = f" (they range from {float(labels.min()):g} to {float(labels.max()):g})"
    example = ", such as torch.nn.MSELoss()" if labels.is_floating_point() else ""
    raise TargetError(
        f"neither the cross entropy nor the binary cross entropy fits an output of shape {tuple(scores.shape)} and "
        f"{str(labels.dtype).removeprefix('torch.')} labels of shape {tuple(labels.shape)}{values}; pass loss=, a "
        f"function of output and labels{example}"
    )


def _logits(scores: Tensor) -> Tensor:
    """Return the logits behind probabilities, and other scores as they are, in float32 at least."""
    node = final_activation(scores)
    scores = scores.float() if scores.dtype != torch.float64 else scores
    if node is None or node.name().startswith("Log"):
        return scores  # logarithms of probabilities are logits too
    if node.name().startswith("Sigmoid"):
        return scores.logit(torch.finfo(scores.dtype).eps)
    return scores.clamp(min=torch.finfo(scores.dtype).tiny).log()
