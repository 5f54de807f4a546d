"""Loads files of ultralytics' networks (``yolo11n.pt``), with the user's own copy of that package."""

from __future__ import annotations

import functools
import importlib
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torchvision.ops import batched_nms, box_convert

from camkit.errors import ModelError, advice, as_error, brief
from camkit.models.boxes import letterboxed
from camkit.models.from_file import file_to_read
from camkit.models.loaded import LoadedModel, Request, preset
from camkit.models.modules import Adapter

_OVERLAP, _MOST_BOXES = 0.7, 300
"""Boxes of one class that overlap by more are one object, and the most boxes of a picture: the package's own values."""

_LAYERS = re.compile(
    r"(torch\.nn\.modules\.\w+|ultralytics\.nn\.(tasks|modules\.(activation|block|conv|head|transformer|utils)))"
    r"\.(?!ParameterDict$)\w+"  # it returns any of its attributes by name
)
"""The modules that a file may be made of without ``trust_remote_code``."""

_VALUES: dict[str, Callable[..., Any]] = {
    "__builtin__.set": set,  # as Python 2 called it
    "_codecs.encode": lambda text, *_: text.encode("latin1"),
    "collections.OrderedDict": OrderedDict,
    "datetime.datetime": datetime,
    "numpy.dtype": lambda name, *_: np.dtype(name),
    "numpy.core.multiarray.scalar": lambda kind, data: np.frombuffer(data, kind)[0],
    "numpy._core.multiarray.scalar": lambda kind, data: np.frombuffer(data, kind)[0],
    "pathlib.PosixPath": PurePosixPath,
    "pathlib.WindowsPath": PureWindowsPath,
    "torch.Size": torch.Size,
    "torch.device": torch.device,
    "torch._utils._rebuild_tensor_v2": lambda *given: torch._utils._rebuild_tensor(*given[:4]),  # without hooks
    "torch._utils._rebuild_parameter": lambda *given: nn.Parameter(*given[:2]),
    "ultralytics.utils.IterableSimpleNamespace": SimpleNamespace,
}
"""The other values that it may be made of, and what makes each. A file can call these, and nothing else."""

_TASKS = ("detect", "segment", "pose", "obb", "classify")


def holds_ultralytics(path: Path) -> bool:
    """Return whether a file is a pickle that names the package ultralytics."""
    if not path.is_file() or not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        parts = [part for part in archive.infolist() if part.filename.endswith("/data.pkl")]
        # Without its tensors, such a pickle takes less than 1 MiB; larger ones are not searched.
        return any(b"ultralytics" in archive.read(part) for part in parts if part.file_size <= 64 << 20)


def load(request: Request) -> LoadedModel:
    """Load the network of a file, which is a pickle of the package's modules.

    Raises:
        ModelError: the package is missing, the file needs other code, or its task or its head is not known.
    """
    path = file_to_read(request)
    model = _network(path, trusted=request.trust_remote_code)
    task = str(getattr(model, "task", None) or _task_of(model))
    names = model.names
    labels = tuple(str(names[index]) for index in sorted(names)) if isinstance(names, dict) else tuple(map(str, names))
    if task not in _TASKS:
        raise ModelError(f"{path} is for the task {task!r}; camkit explains {', '.join(_TASKS[:-1])} and {_TASKS[-1]}")
    if type(model.model[-1]).__name__ == "RTDETRDecoder":
        raise ModelError(
            f"{path} holds ultralytics' RT-DETR, and camkit cannot read its boxes; pass the RT-DETR of transformers by "
            "its name, such as hf:PekingU/rtdetr_r50vd"
        )
    if task == "classify":
        size = request.size or _usual_size(model, 224)
        mean, std = request.mean or (0.0,) * 3, request.std or (1.0,) * 3
        return LoadedModel(Adapter(model, logits), request.name, preset(size, mean, std), labels)
    if request.mean is not None or request.std is not None:
        raise ModelError(f"{request.name} takes pictures from 0 to 1; leave out mean and std")
    note = None
    if getattr(model.model[-1], "end2end", False):
        model.model[-1].end2end = False
        note = "the boxes are those of the branch with overlapping boxes; the other branch passes no gradients back"
    if task == "obb":
        note = "the boxes are the upright ones around the turned boxes"
    prepare = functools.partial(letterboxed, size=request.size or _usual_size(model, 640))
    module = Adapter(model, functools.partial(boxes, classes=len(labels), task=task))
    return LoadedModel(module, request.name, prepare, labels, note, detects=True)


def _usual_size(model: Any, usual: int) -> tuple[int, int]:
    arguments = getattr(model, "args", None)
    size = arguments.get("imgsz") if isinstance(arguments, dict) else getattr(arguments, "imgsz", None)
    sides = [side for side in (size if isinstance(size, Sequence) else [size]) if isinstance(side, int) and side > 0]
    return (sides[0], sides[-1]) if sides else (usual, usual)


def _task_of(model: Any) -> str:
    """Return the task of a network that does not name it, by its last module."""
    last = type(model.model[-1]).__name__.lower()
    return next((task for task in _TASKS if last.endswith(task) or last.startswith(task[:7])), last)


def _network(path: Path, *, trusted: bool) -> Any:
    def said(error: Exception) -> str:
        lacks = isinstance(error, ModuleNotFoundError)
        needed = "; it needs the package ultralytics, which is not installed: pip install ultralytics" * lacks
        return f"{path} cannot be read ({brief(error)}){needed}"

    with as_error(ModelError, said):
        if not trusted:
            torch.serialization.get_unsafe_globals_in_checkpoint(path)  # refuses what torch.load would not unpickle
        reader = SimpleNamespace(Unpickler=_Unpickler, __name__=__name__)
        held = torch.load(path, "cpu", pickle if trusted else reader, weights_only=False)
        network = held.get("ema") or held.get("model") if isinstance(held, dict) else held
        if isinstance(network, nn.Module) and hasattr(network, "names"):
            return network.float().eval()
    raise ModelError(f"{path} does not hold an ultralytics network")


class _Object:
    """What becomes a module at the end. Until then, it has no methods."""


def _layer(name: str) -> Any:
    module, _, kind = name.rpartition(".")
    layer: Any = getattr(importlib.import_module(module), kind, None) if _LAYERS.fullmatch(name) else None
    if isinstance(layer, type) and issubclass(layer, nn.Module) and layer.__module__ == module:
        return layer
    raise ModelError(
        f"the file holds {name}, which is not a module of torch or ultralytics, and reading it may run code; "
        f"if you trust the file, pass {advice('trust_remote_code=True', '--trust-remote-code')}"
    )


def _call(reader: Any) -> None:
    given, called = reader.stack.pop(), reader.stack.pop()
    reader.append(_VALUES[called](*given) if called in _VALUES else _layer(f"a call of {called}"))


def _make(reader: Any) -> None:
    _, name = reader.stack.pop(), reader.stack.pop()
    reader.made.append(type(name, (_Object,), {})())
    reader.append(reader.made[-1])


def _fill(reader: Any) -> None:
    state = reader.stack.pop()
    if isinstance(reader.stack[-1], (_Object, SimpleNamespace)):  # others need no state
        vars(reader.stack[-1]).update(state)


class _Unpickler(pickle._Unpickler):
    """Reads a pickle that can call only ``_VALUES``: functions and classes are texts, and objects have no methods.

    At the end, the objects become modules. One with hooks, or with a module in place of a method, is refused.
    """

    dispatch = pickle._Unpickler.dispatch | {pickle.REDUCE[0]: _call, pickle.NEWOBJ[0]: _make, pickle.BUILD[0]: _fill}

    def find_class(self, module: str, kind: str) -> Any:
        name = f"{module}.{kind}"
        if name not in _VALUES:
            _layer(name)
        return name

    def load(self) -> Any:
        self.made: list[Any] = []
        held = super().load()
        for part in self.made:
            state, kinds = vars(part), (_Object, nn.Module)
            own = [key for key in state if isinstance(state[key], kinds) or ("_hooks" in key and state[key])]
            part.__class__ = layer = _layer(" with its own ".join([type(part).__name__, *own[:1]]))
            layer.__setstate__(part, dict(state))  # adds what older versions did not write
        return held


def logits(model: Any, images: Float[Tensor, "n c h w"]) -> Tensor:
    """Return the logits (N, K) of a classifier, which by itself returns probabilities and logits."""
    output = model(images)
    return cast("Tensor", output[1] if isinstance(output, (tuple, list)) else output)


def boxes(model: Any, images: Float[Tensor, "n c h w"], *, classes: int, task: str) -> list[dict[str, Tensor]]:
    """Return for each picture its ``boxes`` (K, 4) in pixels, their ``labels``, ``scores`` and ``logits`` (K,).

    ``all_boxes`` (A, 4), ``all_scores`` and ``all_logits`` (A, classes) are those before suppression; ``dense`` says
    that each cell has boxes. A network that segments also returns ``mask`` (K,): how sure it is of each box's mask.

    Args:
        model: returns a tensor (N, 4 + classes + more, anchors) with the boxes' middles and sizes in pixels and the
            probabilities of the classes, and a dictionary with the logits.
        images: the pictures.
        classes: how many classes it has.
        task: for "obb", the last row has the angles of the turned boxes. For "segment", a second tensor has prototypes,
            and the rows after the classes have their weights: a mask is the weighted sum of the prototypes.
    """
    first, raw = model(images)[:2]
    found = first[0] if isinstance(first, (tuple, list)) else first
    scores = raw.get("one2many", raw)["scores"] if isinstance(raw, dict) else found[:, 4 : 4 + classes].logit()
    prototypes = first[1] if task == "segment" else [None] * len(images)
    detections = []
    for by_class, rows, masks in zip(scores.transpose(1, 2), found.transpose(1, 2), prototypes, strict=True):
        best, labels = by_class.max(1)  # each anchor's best class
        if task == "obb":
            turned = torch.cat([rows[:, :4], rows[:, -1:]], 1)
            corners = upright(turned)
            kept = without_duplicates(turned.detach(), best.detach(), labels, _OVERLAP)[:_MOST_BOXES]
        else:
            corners = box_convert(rows[:, :4], "cxcywh", "xyxy")
            kept = batched_nms(corners.detach(), best.detach().sigmoid(), labels, _OVERLAP)[:_MOST_BOXES]
        everything = {"all_boxes": corners, "all_scores": rows[:, 4 : 4 + classes], "all_logits": by_class}
        everything["dense"] = torch.ones((), dtype=torch.bool)
        scored = {**everything, "scores": best[kept].sigmoid(), "labels": labels[kept], "logits": best[kept]}
        if masks is not None:
            cells = corners[kept].detach() * masks.shape[2] / images.shape[3]
            scored["mask"] = mask_logits(rows[kept, 4 + classes :], masks, cells)
        detections.append({"boxes": corners[kept], **scored})
    return detections


def mask_logits(
    weights: Float[Tensor, "k m"], prototypes: Float[Tensor, "m h w"], boxes: Float[Tensor, "k 4"]
) -> Float[Tensor, " k"]:
    """Return the mean logit of each mask over its own cells: those in its box whose logit is positive.

    Args:
        weights, prototypes: a mask's logits are the sum of the prototypes, each times its weight.
        boxes: left, top, right, bottom in cells.
    """
    flat = prototypes.flatten(1)
    rows, columns = (torch.arange(cells, device=flat.device) for cells in prototypes.shape[1:])
    left, top, right, bottom = boxes[:, :, None].unbind(1)
    inside = ((rows >= top) & (rows < bottom))[:, :, None] & ((columns >= left) & (columns < right))[:, None]
    own = (inside.flatten(1) & (weights.detach() @ flat.detach() > 0)).to(flat.dtype)
    means = own @ flat.T / own.sum(1, keepdim=True).clamp(min=1)  # the mean of a sum is the sum of the means
    return (weights * means).sum(1)


def upright(turned: Float[Tensor, "*n 5"]) -> Float[Tensor, "*n 4"]:
    """Return the upright boxes (left, top, right, bottom) around turned ones (x, y, width, height, angle)."""
    middles, sides, angle = turned[..., :2], turned[..., 2:4], turned[..., 4:]
    along, across = angle.cos().abs(), angle.sin().abs()
    halves = (sides * along + sides.flip(-1) * across) / 2
    return torch.cat([middles - halves, middles + halves], -1)


def without_duplicates(
    turned: Float[Tensor, "n 5"], scores: Float[Tensor, " n"], labels: Int[Tensor, " n"], most_overlap: float
) -> Int[Tensor, " k"]:
    """Return the boxes, best first, that overlap with no better box of their class by more than ``most_overlap``."""
    # Those with the highest scores: each pair that is compared takes memory.
    order = scores.argsort(descending=True, stable=True)[:1000]
    boxes, of_class = turned[order], labels[order]
    rivals: Bool[Tensor, "n n"] = (overlaps(boxes) > most_overlap) & (of_class[:, None] == of_class)
    return order[~rivals.triu(1).any(0)]


def overlaps(turned: Float[Tensor, "n 5"]) -> Float[Tensor, "n n"]:
    """Return how much each pair of boxes overlaps, from 0 to 1: one minus the Hellinger distance of two Gaussians.

    A box stands for the normal distribution with the mean and the covariance of its points (Murrugarra-Llerena et al.
    2021, arXiv:2106.06072).
    """
    x, y, width, height, angle = turned.double().unbind(-1)
    wide, high, cos, sin = width**2 / 12, height**2 / 12, angle.cos(), angle.sin()
    # The covariance of each box is [[a, c], [c, b]]; that of a pair, the mean of both.
    a, b, c = wide * cos**2 + high * sin**2, wide * sin**2 + high * cos**2, (wide - high) * cos * sin
    of_pairs_a, of_pairs_b, of_pairs_c = ((each[:, None] + each) / 2 for each in (a, b, c))
    dx, dy = x[:, None] - x, y[:, None] - y
    area = of_pairs_a * of_pairs_b - of_pairs_c**2
    apart = (of_pairs_b * dx**2 + of_pairs_a * dy**2 - 2 * of_pairs_c * dx * dy) / area
    alone = (a * b - c**2).clamp(min=0).sqrt()
    distance = apart / 8 + (area / (alone[:, None] * alone)).log() / 2
    return (1 - (1 - (-distance).exp()).clamp(min=0).sqrt()).to(turned.dtype)
