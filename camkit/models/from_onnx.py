"""Loads ONNX files: as PyTorch modules if these give the same outputs as onnxruntime, else as black boxes.

onnxslim simplifies the graph, and onnx2pytorch makes a module of it whose layers have the names of the graph's nodes.
Some graphs are converted wrongly without an error, so each module is compared with onnxruntime.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import onnxslim
import torch
from onnx2pytorch import ConvertModel
from torch import Tensor, nn

from camkit.errors import ModelError, brief
from camkit.models.black_box import BlackBox
from camkit.models.from_file import described, file_to_read
from camkit.models.loaded import LoadedModel
from camkit.models.request import Request

TOLERANCE = 1e-4
"""How far a converted module's outputs may be from onnxruntime's, as a share of the largest output."""

_COLOURS = 3

_SIDE = 224
"""Height and width of the picture that the two are compared with, if the file takes any size."""


def load(request: Request) -> LoadedModel:
    """Load an ONNX file."""
    path = file_to_read(request)
    graph = _read(path)
    session = _session(path)
    inputs = session.get_inputs()
    if len(inputs) != 1 or len(inputs[0].shape) != 4:
        shapes = ", ".join(f"{each.name} {each.shape}" for each in inputs)
        raise ModelError(f"{path} takes the inputs {shapes}; camkit explains files whose only input is the picture")
    shape = tuple(length if isinstance(length, int) else None for length in inputs[0].shape)
    is_last = shape[3] == _COLOURS and shape[1] != _COLOURS
    if is_last:
        shape = (shape[0], shape[3], *shape[1:3])
    opsets = {entry.domain or "ai.onnx": entry.version for entry in graph.opset_import}
    size = request.size or (_SIDE, _SIDE)
    filled = [given or usual for given, usual in zip(shape, (2, 3, *size), strict=True)]
    picture = torch.randn(filled, generator=torch.Generator().manual_seed(0))
    runs = Session(session, channels_last=is_last)
    module, reason = _converted(graph, runs, picture)
    kind = f"an ONNX file of opset {opsets.get('ai.onnx', '?')}"
    kind += ", run as a PyTorch module" if reason is None else f", run by onnxruntime without gradients ({reason})"
    box = module or BlackBox(runs.scores, shape[0], path.read_bytes())
    return described(box, request, shape, kind, session.get_modelmeta().custom_metadata_map)


class Session:
    """An onnxruntime session as a function of pictures.

    Args:
        session: the session.
        channels_last: whether the file takes pictures (N, H, W, C), as files from TensorFlow do.
    """

    def __init__(self, session: onnxruntime.InferenceSession, *, channels_last: bool = False) -> None:
        self._session, self.channels_last = session, channels_last
        (self._input,) = session.get_inputs()

    def outputs(self, pictures: Tensor) -> list[np.ndarray]:
        """Return all outputs for pictures."""
        pictures = pictures.movedim(1, -1) if self.channels_last else pictures
        numbers = pictures.numpy().astype(np.float16 if self._input.type == "tensor(float16)" else np.float32)
        found: list[np.ndarray] = self._session.run(None, {self._input.name: numbers})
        return found

    def scores(self, pictures: Tensor) -> np.ndarray:
        """Return the first output for pictures: their scores."""
        return self.outputs(pictures)[0]


class _Concat(nn.Module):
    """Concatenates tensors; the converter does so in a function, which has no hooks."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, *parts: Tensor) -> Tensor:
        return torch.cat(parts, self.dim)


class _ChannelsLast(nn.Module):
    """Passes pictures (N, C, H, W) to a model that takes (N, H, W, C)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Any:
        return self.model(images.movedim(1, -1))


def _read(path: Path) -> onnx.ModelProto:
    try:
        graph = onnx.load(path, load_external_data=False)
        named = [entry.value for tensor in graph.graph.initializer for entry in tensor.external_data]
        if all(Path(name).name == name for name in named):
            return onnx.load(path)
    except Exception as error:  # a damaged file can make the parser raise anything
        raise ModelError(f"{path} cannot be read as an ONNX file ({brief(error)})") from error
    raise ModelError(f"{path} names weights in other folders; they must lie beside it")


def _session(path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # unknown operators, cycles, shapes that do not fit
        raise ModelError(f"{path} cannot be run by onnxruntime ({brief(error)})") from error


def _converted(graph: onnx.ModelProto, session: Session, picture: Tensor) -> tuple[nn.Module | None, str | None]:
    """Return the graph as a module, or None and why not."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            simple = onnxslim.slim(graph)
            for node in simple.graph.node:
                for attribute in [each for each in node.attribute if each.name == "training_mode"]:
                    node.attribute.remove(attribute)
            module: nn.Module = ConvertModel(simple, experimental=True).eval()
            joined = {name: part for name, part in vars(module).items() if getattr(part, "func", None) is torch.cat}
            for name, part in joined.items():
                setattr(module, name, _Concat(part.keywords["dim"]))
            module = _ChannelsLast(module) if session.channels_last else module
            with torch.no_grad():
                outputs: Any = module(picture)
    except Exception as error:  # noqa: BLE001 - the converter raises anything on operators that it lacks
        return None, f"it cannot be converted to PyTorch: {brief(error)}"
    expected = session.outputs(picture)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    largest = max(float(np.abs(right).max()) for right in expected)
    if [tuple(output.shape) for output in outputs] != [right.shape for right in expected]:
        return None, "converted to PyTorch, it returns other shapes"
    differs = max(float(np.abs(one.numpy() - right).max()) for one, right in zip(outputs, expected, strict=True))
    if not differs <= TOLERANCE * max(largest, 1.0):
        return None, f"converted to PyTorch, its outputs differ by {differs:.2g}"
    return module, None
