"""``export()``: a file that returns a classifier's scores and its heat, for programs without Python.

Gradients cannot be exported, but their operations can. camkit runs its own pass on tensors that only note what is done
with them: the model, the way back from a score to the layer, and the method's weights. That graph is the file.
"""

from __future__ import annotations

import io
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, TypeAlias, Unpack

import torch
from jaxtyping import Int
from torch import Tensor
from torch._decomp import core_aten_decompositions
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from camkit.engine.guard import guarded
from camkit.engine.passes import are_alike
from camkit.errors import InputError, ModelError, as_error, brief, optional
from camkit.explaining.explainer import Explainer, showing
from camkit.images.files import write_file
from camkit.images.regions import measure_shades
from camkit.layers.names import Layers
from camkit.layers.places import SCENES
from camkit.methods.runs import signed_maps
from camkit.models.loaded import Loadable
from camkit.options import ExplainerOptions
from camkit.targets.scores import Scores, Target, final_activation, logits_of
from camkit.types import ImageLike, Preprocess

Run: TypeAlias = Callable[..., tuple[Tensor, Tensor]]
"""``run(pictures)`` or ``run(pictures, classes)`` returns scores (N, K) and heat (N, h, w)."""

TOLERANCE = 1e-4
"""How far a file's scores and heat may be from camkit's, as a share of the largest value."""


class _Traced(Target):
    """The logit of each picture's best class, or of given classes, in operations that a graph can hold."""

    def __init__(self, classes: Int[Tensor, " n"] | None = None) -> None:
        self.classes, self.logits = classes, torch.empty(0)

    def __call__(self, output: Any, batch: int) -> Scores:
        """Return the scores, and keep the logits of all classes."""
        logits = logits_of(output, batch)
        self.logits = logits.detach()
        of_picture = self.logits.argmax(1) if self.classes is None else self.classes
        chosen = torch.arange(logits.shape[1], device=logits.device) == of_picture[:, None]
        return Scores((logits * chosen).sum(1), activation=final_activation(logits))


@showing(ExplainerOptions)
def export(
    model: Loadable | None,
    path: str | Path,
    target_layer: Layers | None = None,
    *,
    img: ImageLike | None = None,
    target: Literal["best", "input"] = "best",
    normalise: bool = False,
    **options: Unpack[ExplainerOptions],
) -> dict[str, str]:
    """Write a classifier as a file that returns its scores and its heat, and compare it with camkit's own.

    The file takes ``image`` (N, C, H, W), any number of pictures as the model takes them, and returns ``scores`` (N, K)
    and ``heat`` (N, h, w): camkit's raw map, signed, in units of the score.

    Args:
        model, target_layer, options: as for ``camkit.Explainer``.
        path: the file: ``.onnx``, or ``.pt2`` for a program of ``torch.export``.
        img: the picture with which the file is compared with camkit; the file takes pictures of its size. None takes a
            drawn one.
        target: "best" is each picture's best class; with "input", the file takes ``target`` (N,), class numbers.
        normalise: True if the file takes values from 0 to 255 and normalises them itself.

    Returns:
        The metadata in the file: the preprocessing, the labels, the method, the layer, the grid, the places of its
        cells, and the versions.

    Raises:
        InputError: an argument is wrong, or the preprocessing is not known and ``normalise`` needs it.
        ModelError: the graph has an operation that the file cannot hold, or its results are not camkit's.
        OutputError: the file cannot be written.

    Examples:
        >>> camkit.export("resnet50", "with_heat.onnx")  # doctest: +SKIP
    """
    path = Path(path)
    if path.suffix.lower() not in _WRITERS:
        raise InputError(f"export writes {' and '.join(_WRITERS)} files, not {path}")
    explainer = Explainer(model, target_layer, **options)
    inputs, ran, captured = explainer.settled(sorted(SCENES.rglob("*.png"))[-1] if img is None else img)
    stated = _preprocessing(explainer.preprocess)
    mean, std = (torch.tensor(values, device=inputs.device).view(-1, 1, 1) for values in stated.values())
    if normalise:
        inputs = (inputs * std + mean) * 255
        stated = {"mean": [0.0] * len(mean), "std": [1 / 255] * len(mean)}

    def run(pictures: Tensor, *classes: Tensor) -> tuple[Tensor, Tensor]:
        found = _Traced(*classes)
        capture = captured((pictures / 255 - mean) / std if normalise else pictures, found)
        return found.logits, signed_maps(capture, ran.method)[0].raws[0]

    taken = {"image": inputs}
    if target == "input":
        taken["target"] = run(inputs)[0].argmax(1).flip(0)
    (features,), labels = ran.captured.features, explainer.labels
    facts = {
        "camkit": version("camkit"),
        "method": ran.method.name,
        "layer": "+".join(map(str, ran.layers)),
        "places": features.placement.positions,
        "imgsz": list(inputs.shape[2:]),
        "names": dict(enumerate(labels or ())),
        **stated,
    }
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in facts.items()}
    with guarded(explainer.model):  # the passes that are traced then save and restore nothing themselves
        graph = _graph(run, list(taken.values()))
    data, again = _WRITERS[path.suffix.lower()](graph, taken, texts)
    for name, own, other in zip(("scores", "heat"), run(*taken.values()), again, strict=True):
        if not are_alike(own, other, TOLERANCE):
            difference = float((own - other).abs().max() / own.abs().max())
            raise ModelError(f"the {name} of {path} would differ from camkit's by {difference:.1g} of the largest value")
    write_file(path, data)
    return texts


def _preprocessing(preprocess: Preprocess | None) -> dict[str, list[float]]:
    """Return mean and deviation of a preprocessing, for values from 0 to 1; those of values as they are if it is unknown."""
    if preprocess is None:
        return {"mean": [0.0] * 3, "std": [1.0] * 3}
    shades = measure_shades(preprocess, (256, 256))
    black, white = (each[:, each.shape[1] // 2, each.shape[2] // 2].double() for each in (shades.black, shades.white))
    return {"mean": (-black / (white - black)).tolist(), "std": (1 / (white - black)).tolist()}


def _graph(run: Run, inputs: Sequence[Tensor]) -> GraphModule:
    """Return a function as a graph of operations that files can hold, for any number of pictures.

    Raises:
        ModelError: it cannot be traced, for example because it decides something by values.
    """
    shapes = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    fakes = [
        shapes.from_tensor(
            each,
            symbolic_context=StatelessSymbolicContext([DimDynamic.DYNAMIC, *[DimDynamic.STATIC] * (each.dim() - 1)]),
        )
        for each in inputs
    ]
    table = {**core_aten_decompositions(), torch.ops.aten.convolution_backward.default: _convolution_backward}
    with _refusing(), shapes:
        graph = make_fx(run, decomposition_table=table, _allow_non_fake_inputs=True)(*fakes)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph.eval()


def _refusing() -> Any:
    """Turn what PyTorch raises for an operation that cannot be exported into a sentence that names it."""

    def said(error: BaseException) -> str:
        causes = " ".join(str(each) for each in (error, error.__cause__, error.__context__) if each)
        named = re.search(r"OpOverload\(op='([\w.]+)'|\b(aten\.[\w.]+)", causes)
        what = next(filter(None, named.groups()), "") if named else brief(error)
        return f"the model cannot be exported with its heat, because of {what}"

    return as_error(ModelError, said)


def _convolution_backward(
    gradient: Tensor,
    maps: Tensor,
    weight: Tensor,
    _: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    __: Any,
    groups: int,
    ___: Any,
) -> tuple[Tensor, None, None]:
    """Return the gradient of a convolution's input as a transposed convolution, or the other way round."""
    missing = [0] * len(stride)
    if not transposed:
        for axis, (step, beside, apart) in enumerate(zip(stride, padding, dilation, strict=True)):
            reached = (gradient.shape[2 + axis] - 1) * step - 2 * beside + apart * (weight.shape[2 + axis] - 1) + 1
            missing[axis] = maps.shape[2 + axis] - reached
    back = torch.ops.aten.convolution(gradient, weight, None, stride, padding, dilation, not transposed, missing, groups)
    return back, None, None


def _onnx(graph: GraphModule, taken: Mapping[str, Tensor], texts: Mapping[str, str]) -> tuple[bytes, list[Tensor]]:
    """Return a graph as the contents of an ONNX file, and what onnxruntime makes of the inputs."""
    runtime = optional("onnxruntime", "export to ONNX needs the extra onnx: pip install 'camkit[onnx]'")
    batch = torch.export.Dim("batch")
    with _refusing(), warnings.catch_warnings(action="ignore"):
        program = torch.onnx.export(
            graph,
            tuple(taken.values()),
            dynamo=True,
            verbose=False,
            input_names=list(taken),
            output_names=["scores", "heat"],
            dynamic_shapes=tuple({0: batch} for _ in taken),
        )
    assert program is not None
    program.model.metadata_props.update(texts)
    data = program.model_proto.SerializeToString()
    session = runtime.InferenceSession(data, providers=["CPUExecutionProvider"])
    return data, [torch.from_numpy(each) for each in session.run(None, {name: each.numpy() for name, each in taken.items()})]


def _pt2(graph: GraphModule, taken: Mapping[str, Tensor], texts: Mapping[str, str]) -> tuple[bytes, list[Tensor]]:
    """Return a graph as the contents of a file of ``torch.export``, and what it makes of the inputs."""
    batch, file = torch.export.Dim("batch"), io.BytesIO()
    with _refusing():
        program = torch.export.export(graph, tuple(taken.values()), dynamic_shapes=tuple({0: batch} for _ in taken))
        torch.export.save(program, file, extra_files=dict(texts))
    return file.getvalue(), list(program.module()(*taken.values()))


_WRITERS = {".onnx": _onnx, ".pt2": _pt2}
