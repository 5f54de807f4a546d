"""Loads ONNX files: as PyTorch modules if these give the same outputs as onnxruntime, else as black boxes.

onnxslim simplifies the graph, and onnx2pytorch makes a module of it whose layers have the names of the graph's nodes.
Some graphs are converted wrongly without an error, so each module is compared with onnxruntime.
"""

from __future__ import annotations

import functools
import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import onnxslim
import torch
from onnx2pytorch import ConvertModel
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from camkit.errors import CamkitError, ModelError, as_error, brief
from camkit.models.from_file import COLOURS, described, file_to_read, with_heat
from camkit.models.loaded import LoadedModel, Request
from camkit.models.modules import Adapter, FileBox, dtype_of

TOLERANCE = 1e-4
"""How far a converted module's outputs may be from onnxruntime's: the norm of the difference, as a share of theirs."""

_QUANTISED = (
    *("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"),
    *("QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger"),
)

_DOMAINS = ("", "ai.onnx", "ai.onnx.ml", "com.microsoft", "com.microsoft.nchwc", "com.ms.internal.nhwc")
"""onnxruntime's own operators."""

_SIDE = 224
"""Height and width of the picture that the two are compared with, if the file takes any size."""


def load(request: Request) -> LoadedModel:
    """Load an ONNX file."""
    path = file_to_read(request)
    graph, beside = _read(path)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    with as_error(ModelError, lambda error: f"{path} cannot be run by onnxruntime ({brief(error)})"):
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    inputs, metadata = session.get_inputs(), session.get_modelmeta().custom_metadata_map
    runtime = f"onnxruntime {onnxruntime.__version__}"
    if "camkit" in metadata and [each.name for each in session.get_outputs()] == ["scores", "heat"]:
        has_target = len(inputs) == 2

        def explained(pictures: Tensor, classes: Tensor) -> list[Tensor]:
            given = {"image": pictures.numpy(), **({"target": classes.numpy()} if has_target else {})}
            return list(map(torch.from_numpy, session.run(None, given)))

        return with_heat(explained, request, inputs[0].shape, metadata, runtime, explains_any=has_target)
    if len(inputs) != 1 or len(inputs[0].shape) != 4 or inputs[0].type not in ("tensor(float)", "tensor(float16)"):
        shapes = ", ".join(f"{each.name} {each.shape} of {each.type}" for each in inputs)
        raise ModelError(
            f"{path} takes the inputs {shapes}; camkit explains files whose only input is a picture in floating point"
        )
    shape = tuple(length if isinstance(length, int) else None for length in inputs[0].shape)
    is_last = shape[3] == COLOURS and shape[1] != COLOURS
    if is_last:
        shape = (shape[0], shape[3], *shape[1:3])
    size = request.size or (_SIDE, _SIDE)
    filled = [given or usual for given, usual in zip(shape, (2, COLOURS, *size), strict=True)]
    noise = torch.randn(filled, generator=torch.Generator().manual_seed(0))
    runs = functools.partial(_run, session, is_last)
    # Networks take pictures that are normalised, or have values of 0 to 1 or 0 to 255. Networks that take normalised
    # ones blow the last up: onnxruntime's outputs of a RegNet with random weights are then 0.02 off those of double
    # precision.
    pictures = {noise: TOLERANCE, noise.abs() / noise.abs().max(): TOLERANCE, noise.abs().clamp(max=2.5) * 100: 5e-2}
    opset = next((entry.version for entry in graph.opset_import if entry.domain in ("", "ai.onnx")), "?")
    module: nn.Module
    try:
        with as_error(_NotConvertedError, lambda error: f"it cannot be converted to PyTorch: {brief(error)}"):
            module = _converted(graph, runs, pictures, shape[0], is_last=is_last)
        how = f"run as a PyTorch module, with gradients by torch {torch.__version__} (outputs as {runtime}'s)"
    except _NotConvertedError as reason:
        lacking = f"camkit runs this file without layers and gradients ({reason})"
        module = FileBox(runs, shape[0], sigmoid=_ends_in_sigmoid(graph.graph), reason=lacking)
        how = f"run by {runtime} without gradients ({reason})"
    kind = f"an ONNX file of opset {opset}, {how}"
    return described(module, request, shape, kind, metadata, beside)


class _NotConvertedError(CamkitError):
    """A graph cannot become a PyTorch module; the message says why."""


def _ends_in_sigmoid(graph: Any) -> bool:
    made_by = {name: node for node in graph.node for name in node.output}
    node = made_by.get(graph.output[0].name)
    # These operations leave the results of a sigmoid as they are.
    while node is not None and node.op_type in ("Cast", "Clip", "Identity"):
        node = made_by.get(node.input[0])
    return node is not None and node.op_type == "Sigmoid"


def _run(session: onnxruntime.InferenceSession, is_last: bool, pictures: Tensor) -> Tensor | tuple[Tensor, ...]:
    """Return what the file returns for pictures (N, C, H, W), which files from TensorFlow take as (N, H, W, C)."""
    (taken,) = session.get_inputs()
    pictures = pictures.movedim(1, -1) if is_last else pictures
    numbers = pictures.numpy().astype(np.float16 if taken.type == "tensor(float16)" else np.float32)
    outputs = tuple(map(torch.from_numpy, session.run(None, {taken.name: numbers})))
    return outputs[0] if len(outputs) == 1 else outputs


class _Concat(nn.Module):
    """Concatenates tensors; the converter does so in a function, which has no hooks."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, *parts: Tensor) -> Tensor:
        return torch.cat(parts, self.dim)


def _channels_last(model: nn.Module, images: Tensor) -> Any:
    """Pass pictures (N, C, H, W) to a model that takes (N, H, W, C)."""
    return model(images.movedim(1, -1))


class _Converted(ConvertModel):  # type: ignore[misc]
    """A converted graph that refuses pictures of a size that the file does not take, as onnxruntime does.

    The names of its layers have no dots, which would mean layers inside layers, and its concatenations are layers too.
    """

    def __init__(self, graph: onnx.ModelProto) -> None:
        super().__init__(graph, experimental=True)
        self._shape = tuple(axis.dim_value for axis in graph.graph.input[0].type.tensor_type.shape.dim)
        joined = {name: part for name, part in vars(self).items() if getattr(part, "func", None) is torch.cat}
        for name, part in joined.items():
            setattr(self, name, _Concat(part.keywords["dim"]))
        parts = dict(self._modules)
        self._modules.clear()
        for name, part in parts.items():
            self._modules[name.replace(".", "_")] = part
        self.mapping: dict[str, str] = {output: name.replace(".", "_") for output, name in self.mapping.items()}

    def forward(self, images: Tensor) -> Any:
        """Return the outputs for pictures.

        Raises:
            ModelError: they have another size than the file takes.
        """
        if any(wanted not in (0, length) for wanted, length in zip(self._shape[1:], images.shape[1:], strict=True)):
            raise ModelError(f"the file takes pictures of shape {self._shape[1:]}, not {tuple(images.shape[1:])}")
        outputs = super().forward(images)
        return tuple(outputs) if isinstance(outputs, list) else outputs


def _read(path: Path) -> tuple[onnx.ModelProto, list[bytes]]:
    """Return the graph with its weights, and the checksums of those that lie in files beside it."""
    with as_error(ModelError, lambda error: f"{path} cannot be read as an ONNX file ({brief(error)})"):
        graph = onnx.load(path, load_external_data=False)
        _refuse_code(graph, path)
        outside = [tensor for tensor in _tensors(graph) if tensor.data_location == onnx.TensorProto.EXTERNAL]
        named = {entry.value for tensor in outside for entry in tensor.external_data if entry.key == "location"}
        if all((path.parent / name).resolve().parent == path.parent.resolve() for name in named):
            onnx.load_external_data_for_model(graph, str(path.parent))
            return graph, [hashlib.sha256(tensor.raw_data).digest() for tensor in outside]
    raise ModelError(f"{path} names weights in other folders; they must lie beside it")


def _refuse_code(graph: onnx.ModelProto, path: Path) -> None:
    """Refuse what could become code: onnxslim and onnx2pytorch know operators only by name, and evaluate texts."""
    if graph.functions:
        raise ModelError(
            f"{path} holds functions, which camkit does not run; replace them by onnx.inliner.inline_local_functions"
        )
    for part in _parts(graph):
        if isinstance(part, onnx.NodeProto) and (part.domain not in _DOMAINS or part.op_type == "Tokenizer"):
            raise ModelError(f"{path} uses {part.domain}.{part.op_type}, which camkit does not run")
        is_tensor, is_attribute = isinstance(part, onnx.TensorProto), isinstance(part, onnx.AttributeProto)
        becomes_text = is_attribute and (
            part.name == "value_string"
            or (part.strings and part.name != "activations")
            or (part.name == "to" and part.i == onnx.TensorProto.STRING)
        )
        if becomes_text or (is_tensor and (part.string_data or part.data_type == part.STRING)):
            raise ModelError(f"{path} holds texts among its numbers, which camkit cannot run; export it without them")


def _parts(message: Any) -> Iterator[Any]:
    """Yield a message and those inside it: graphs, nodes, attributes, subgraphs, tensors."""
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for part in value if field.is_repeated else (value,):
                yield from _parts(part)


def _tensors(graph: onnx.ModelProto) -> list[onnx.TensorProto]:
    """Return the tensors of a graph: its weights, and the constants of its nodes and subgraphs."""
    return [part for part in _parts(graph) if isinstance(part, onnx.TensorProto)]


def _converted(
    graph: onnx.ModelProto,
    runs: Callable[[Tensor], Any],
    pictures: Mapping[Tensor, float],
    batch: int | None,
    *,
    is_last: bool,
) -> nn.Module:
    """Return the graph as a module that gives onnxruntime's outputs for each of the pictures, within its tolerance.

    ``batch`` is how many pictures the file takes at a time; None for any number.

    Raises:
        _NotConvertedError: it does not, takes several pictures, or is quantised.
    """
    if batch not in (None, 1):
        raise _NotConvertedError(f"it takes exactly {batch} pictures; export it for one, or for any number")
    if any(node.op_type in _QUANTISED for node in graph.graph.node):
        raise _NotConvertedError("it is quantised, and integers have no gradients")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        simple = onnxslim.slim(graph)
        for node in simple.graph.node:
            for attribute in [each for each in node.attribute if each.name == "training_mode"]:
                node.attribute.remove(attribute)
        is_half = any(tensor.data_type == onnx.TensorProto.FLOAT16 for tensor in _tensors(simple))
        module: nn.Module = _Converted(simple).eval()
        module = Adapter(module, _channels_last) if is_last else module
        for picture, tolerance in pictures.items():
            # Numbers of half precision have three digits.
            _compare(module, runs, picture, max(tolerance, 1e-2 * is_half))
    return module


def _compare(module: nn.Module, runs: Callable[[Tensor], Any], picture: Tensor, tolerance: float) -> None:
    """Compare a module's outputs for a picture with onnxruntime's.

    Raises:
        _NotConvertedError: they differ.
    """
    expected = tree_leaves(runs(picture))  # first: it refuses sizes that PyTorch would work on for hours
    with torch.no_grad():
        found = tree_leaves(module(picture.to(dtype_of(module))))
    if [output.shape for output in found] != [right.shape for right in expected]:
        raise _NotConvertedError("converted to PyTorch, it returns other shapes")
    for output, right in zip(found, expected, strict=True):
        exact = right.double()
        differs = output.double() - exact
        are_shares = bool(((exact >= 0) & (exact <= 1)).all())
        # Norms, not maxima: rounding changes a few of the 500,000 probabilities of PP-OCR's recognition by 0.01.
        error, size = float(differs.norm()), float(exact.norm())
        # Probabilities that differ by 1e-5 are the same; if all are tiny, rounding is a larger share of the largest.
        if not (error <= tolerance * size or (are_shares and bool((differs.abs() <= 1e-5).all()))):
            share = 100 * error / size if size else 100
            raise _NotConvertedError(f"converted to PyTorch, its outputs differ by {share:.2g} %")
