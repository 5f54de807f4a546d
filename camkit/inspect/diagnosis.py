"""``diagnose()``: run a model on a batch and report what is wrong with it; and the ``Diagnosis`` that it returns."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from camkit.drawing.encode import as_html, encode
from camkit.errors import InputError, ModelError, advice
from camkit.explaining.choices import configured_model
from camkit.explaining.explanation import finite_or_none
from camkit.images.files import check_folder, set_aside, write_file
from camkit.inspect.batch import BatchLike, Loss, prepared_batch, score_for, split_labels
from camkit.inspect.findings import Finding, findings
from camkit.inspect.layer_statistics import LayerStatistics
from camkit.inspect.measurement import Measured, measure
from camkit.inspect.picture import draw
from camkit.kit.wording import counted
from camkit.models import about_channels, as_model, refuse_black_box, spatial_rank
from camkit.models.loaded import Loadable, LoadedModel
from camkit.models.modules import explained_failures
from camkit.options.settings import Settings, as_settings
from camkit.tables import Rows, Tabular, flat
from camkit.types import Pixels, Precision, Preprocess

REPORTS = ("diagnose.json", "diagnose.png")
"""The files that a diagnosis writes."""

VERSION = 1
"""The version of the JSON format, raised when a field is removed or changes its meaning."""


@dataclass(frozen=True)
class Diagnosis(Tabular):
    """What happens in each layer of a model on a batch of pictures.

    Attributes:
        model: the model's name.
        pictures: the number of pictures.
        training: whether the model ran as in a training step.
        loss: the number that was differentiated; None if it could not be.
        rows: a ``LayerStatistics`` for each call of each layer, in the order in which they ended.
        findings: what is wrong; empty for a healthy model.
        remarks: what to know when reading the numbers.
        parameters, trained: how many numbers the model's parameters hold, and how many of these require gradients.
        loss_name: what ``loss`` is: "cross entropy", "binary cross entropy", "own loss" or "mean score of the best
            class".
    """

    model: str
    pictures: int
    training: bool
    loss: float | None
    rows: tuple[LayerStatistics, ...]
    findings: tuple[Finding, ...]
    remarks: tuple[str, ...] = ()
    parameters: int = 0
    trained: int = 0
    loss_name: str = ""

    def __getitem__(self, layer: str) -> LayerStatistics:
        """Return the row of a layer.

        Raises:
            KeyError: no row has that name.
        """
        row = next((row for row in self.rows if row.layer == layer), None)
        if row is None:
            raise KeyError(layer)
        return row

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
        in_json = path.suffix == ".json"
        write_file(path, json.dumps(self.to_dict()).encode() if in_json else encode(self.sheet(), path.suffix))
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
    batch: BatchLike,
    loss: Loss | None = None,
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
    with explained_failures(loaded.module), _explaining_mistakes(loaded.module, inputs):
        measured = measure(loaded.module, inputs, score, training=training, precision=precision)
    to_train = training and not isinstance(model, LoadedModel)
    parameters = list(loaded.module.parameters())
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    return Diagnosis(
        loaded.name,
        len(inputs),
        training,
        measured.loss,
        tuple(measured.rows),
        tuple(findings(measured, len(inputs), to_train=to_train)),
        tuple(_remarks(measured, bool(parameters), trained)),
        sum(parameter.numel() for parameter in parameters),
        trained,
        measured.loss_name,
    )


@contextmanager
def _explaining_mistakes(module: nn.Module, inputs: Tensor) -> Iterator[None]:
    """Turn PyTorch's errors about a wrong number of channels or pictures into a sentence about the call."""
    try:
        yield
    except RuntimeError as error:
        sentence = about_channels(module, inputs)
        if sentence is None:
            raise
        raise ModelError(sentence) from error
    except ValueError as error:
        if len(inputs) > 1 or "more than 1 value per channel" not in str(error):
            raise
        raise InputError("batch normalisation in training mode needs more than one picture; pass several") from error


def _remarks(measured: Measured, parameters: bool, trained: int) -> Iterator[str]:
    """Yield what to know when reading the numbers, although nothing is wrong."""
    if measured.loss is None:
        yield "there are no gradients: the output depends on nothing that can be differentiated"
    if parameters and not trained:
        yield "no parameter requires gradients: the model is set up for use, not for training"
    if zero := measured.zero_weights:
        listed = ", ".join(map(repr, zero[:3])) + (", ..." if len(zero) > 3 else "")
        yield f"the weights of {listed} are all zero, perhaps as initialised, so no gradient passes them yet"
    if measured.unnormalised:
        yield (
            "batch normalisation has seen too few batches to normalise in evaluation mode, so vanishing and exploding "
            f"gradients are not judged; use {advice('training=True', '--train')} to see the model as it is trained"
        )


def as_json(result: Diagnosis) -> str:
    """Return a diagnosis as strict JSON in ASCII, which every terminal and pipe can handle."""
    return json.dumps({"version": VERSION, **result.to_dict()}, allow_nan=False)


def diagnose_files(
    model: LoadedModel,
    pictures: Sequence[Path],
    out: Path,
    *,
    training: bool = False,
    precision: Precision = "fp32",
    limit: int = 32,
) -> Diagnosis:
    """Diagnose a model on picture files as one batch, and write the reports into a folder.

    The reports of an earlier run are kept as ``before-diagnose.json`` and ``before-diagnose.png``.

    Args:
        model: a model from ``camkit.load_model``, with ``trainable=True`` to see which parameters are frozen.
        pictures: picture files.
        out: the folder for the reports; it is created if it does not exist.
        training, precision: as for ``camkit.diagnose``.
        limit: use at most this many pictures, spread evenly over the files.

    Raises:
        InputError: a picture cannot be read, the model cannot be used, or the folder cannot be written to.
    """
    if limit < 1:
        raise InputError(f"limit must be at least 1 picture, not {limit}")
    check_folder(out)
    if len(pictures) > limit:
        pictures = [pictures[number * len(pictures) // limit] for number in range(limit)]
    result = diagnose(model, list(pictures), training=training, precision=precision)
    set_aside(out, REPORTS)
    write_file(out / "diagnose.json", f"{as_json(result)}\n".encode())
    write_file(out / "diagnose.png", encode(result.sheet()))
    return result
