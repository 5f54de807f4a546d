"""A function from pictures to scores as a model: a server, an engine for inference, another framework."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map, tree_map_only

from camkit.errors import ModelError, RunError, brief
from camkit.models.loaded import Labels, LoadedModel, as_labels
from camkit.types import Preprocess

Scores: TypeAlias = Callable[[Tensor], Any]
"""Takes pictures (N, C, H, W), float32 and on the CPU, and returns one row of scores (N, classes) for each of them, as
a tensor or as anything that NumPy makes an array of; or a list with a dictionary of each picture's boxes."""


class BlackBox(nn.Module):
    """A module without layers and gradients that calls a function.

    Args:
        function: returns the scores of pictures.
        batch: how many pictures the function takes at a time; None for any number. The last pictures are filled up
            with copies.
        sigmoid: whether the scores are the results of a sigmoid.
        reason: why the model has neither layers nor gradients.
        way_out: what to do to have both; empty if nothing is known.

    Attributes:
        function: the function.
    """

    def __init__(
        self,
        function: Scores,
        batch: int | None = None,
        *,
        sigmoid: bool = False,
        reason: str = "a black box has neither layers nor gradients",
        way_out: str = "",
    ) -> None:
        super().__init__()
        self._reason, self._way_out = reason, way_out
        # A module is called, not registered: camkit would look for layers in it.
        self.function = function.__call__ if isinstance(function, nn.Module) else function
        self._batch, self._sigmoid = batch, sigmoid

    def lacks(self, instead: str = "") -> str:
        """Return a sentence: why there are neither layers nor gradients, and what to do, for example ``instead``."""
        ways = ", or ".join(way for way in (self._way_out, instead) if way)
        return f"{self._reason}; {ways}" if ways else self._reason

    def forward(self, images: Tensor) -> Any:
        """Return the scores of pictures (N, C, H, W), or their boxes, on the same device.

        Raises:
            RunError: the function returned something other than a row of numbers for each picture.
        """
        pictures = images.detach().float().cpu()
        parts = [pictures]
        if self._batch is not None:
            parts = list(pictures.split(self._batch))
            missing = self._batch - len(parts[-1])
            parts[-1] = torch.cat([parts[-1], parts[-1][-1:].expand(missing, *parts[-1].shape[1:])])
        with torch.no_grad():
            joined = self._joined([self._run(part) for part in parts], len(pictures))
        scores = tree_map_only(Tensor, lambda value: value.to(images.device), joined)
        return _with_sigmoid(scores) if self._sigmoid and isinstance(scores, Tensor) else scores

    def _joined(self, parts: Sequence[Any], count: int) -> Any:
        """Return the outputs of all parts as one, for the first pictures."""
        boxes = [detections for part in parts if isinstance(part, list) for detections in part]
        return boxes[:count] or torch.cat([part for part in parts if isinstance(part, Tensor)])[:count]

    def _run(self, pictures: Tensor) -> Any:
        scores = self.function(pictures.clone())  # which the function may write to
        if isinstance(scores, (list, tuple)) and scores and all(isinstance(each, dict) for each in scores):
            return _boxes(scores, len(pictures))
        try:
            rows = scores.detach() if isinstance(scores, Tensor) else torch.from_numpy(np.array(scores, np.float32))
        except (TypeError, ValueError, RuntimeError) as error:
            raise RunError(f"the function returned {type(scores).__name__}, not an array of scores") from error
        if rows.dim() != 2 or len(rows) != len(pictures):
            raise RunError(
                f"the function returned scores of shape {tuple(rows.shape)} for {len(pictures)} pictures; it must "
                "return a row of scores for each picture"
            )
        return rows.to("cpu", torch.float32, copy=True)  # the function may use its array again


class FileBox(BlackBox):
    """A file that camkit can only run. It may return anything that a model may; targets find the scores in it.

    Raises:
        RunError: (when it is called) the file failed.
    """

    def _run(self, pictures: Tensor) -> Any:
        try:
            outputs = self.function(pictures.clone())
        except Exception as error:  # what runs the file may raise anything
            lines = (str(error).strip() or type(error).__name__).splitlines()
            cause = lines[-1] if "TorchScript" in lines[0] else " ".join(lines)  # TorchScript begins with its trace
            raise RunError(f"the file failed on pictures of shape {tuple(pictures.shape)} ({brief(cause)})") from error
        detached = tree_map_only(Tensor, Tensor.detach, outputs)
        return tree_map_only(Tensor, lambda value: value.float() if value.is_floating_point() else value, detached)

    def _joined(self, parts: Sequence[Any], count: int) -> Any:
        if self._batch is None:
            return parts[0]
        return tree_map(lambda *values: torch.cat(values)[:count], *parts)


_ROUNDING = 1e-3
"""How far rounding may take a probability out of 0..1."""


def _with_sigmoid(scores: Tensor) -> Tensor:
    """Return the results of a sigmoid with its graph, which shows what they are.

    Raises:
        RunError: they cannot be the results of a sigmoid.
    """
    if bool(((scores < -_ROUNDING) | (scores > 1 + _ROUNDING)).any()):
        raise RunError("the function returned scores below 0 or above 1, which are not the results of a sigmoid")
    logits = scores.double().logit(torch.finfo(torch.float64).eps)
    return logits.requires_grad_(torch.is_grad_enabled()).sigmoid().to(scores.dtype)


def _boxes(rows: Sequence[dict[str, Any]], count: int) -> list[dict[str, Tensor]]:
    """Return the boxes of each picture as tensors.

    Raises:
        RunError: they are not ``boxes`` (K, 4) and ``scores`` (K,), perhaps with ``labels`` (K,), for each picture.
    """
    wrong = "the function must return a dictionary for each picture, with boxes (K, 4) and scores (K,)"
    try:
        found = [
            {name: torch.as_tensor(row[name]).detach().cpu() for name in ("boxes", "scores", "labels") if name in row}
            for row in rows
        ]
        sizes = [(each["boxes"].reshape(-1, 4), *each.values()) for each in found]
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise RunError(wrong) from error
    if len(found) != count or any(len({len(value) for value in values}) != 1 for values in sizes):
        raise RunError(wrong)
    return [
        {name: value.float() if name != "labels" else value.long() for name, value in each.items()} for each in found
    ]


def black_box(
    function: Scores,
    *,
    labels: Labels | None = None,
    preprocess: Preprocess | None = None,
    name: str | None = None,
    batch: int | None = None,
    sigmoid: bool = False,
) -> LoadedModel:
    """Return a function as a model, for ``camkit.explain``, ``camkit.check`` and everything else that takes models.

    camkit then knows only the scores. Methods that need layers or gradients are refused; "occlusion", the default, and
    "rise" run the function on changed pictures.

    Args:
        function: takes pictures (N, C, H, W) as a float32 tensor on the CPU, prepared by ``preprocess``, and returns
            their scores (N, classes): logits, or probabilities that add up to 1; or for a detector a list with a
            dictionary of ``boxes`` (K, 4), ``scores`` and ``labels`` (K,) for each. What it raises passes through.
        labels: the names of the classes.
        preprocess: prepares a PIL picture for the function.
        name: what reports call the model; the function's name if not given.
        batch: how many pictures the function takes at a time; None for any number.
        sigmoid: pass True if the scores are the results of a sigmoid: probabilities of classes that do not exclude each
            other. Otherwise camkit treats scores that do not add up to 1 as logits.

    Raises:
        ModelError: ``function`` cannot be called, or ``batch`` is below 1.

    Examples:
        >>> import camkit
        >>> brightness = camkit.black_box(lambda pictures: pictures.flatten(2).mean(2), labels=["red", "green", "blue"])
        >>> picture = camkit.scenes.scene_paths()["plane-sky"]
        >>> explanation = camkit.explain(brightness, picture, preprocess=camkit.load_model("demo-fair").preprocess)
        >>> explanation.method
        'occlusion'
    """
    if not callable(function):
        raise ModelError(f"a black box is a function from pictures to scores, not {function!r}")
    if batch is not None and (type(batch) is not int or batch < 1):
        raise ModelError(f"batch must be a whole number from 1, not {batch!r}")
    module = BlackBox(function, batch, sigmoid=sigmoid).eval()
    named = name or str(getattr(function, "__name__", type(function).__name__))
    return LoadedModel(module, named, preprocess, as_labels(labels))
