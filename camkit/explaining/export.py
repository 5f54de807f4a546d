"""``export()``: a file that returns a classifier's scores and its heat, for programs without Python.

Exporters cannot write a call for a gradient, but they can write the operations that compute it. camkit therefore traces
its own pass: the model, the way back from a score to the layer, and the method's weights. The file holds that graph.
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
from camkit.errors import InputError, MethodError, ModelError, as_error, brief, optional
from camkit.explaining.explainer import Explainer, showing
from camkit.images.files import write_file
from camkit.images.regions import CropBoxes, measure_shades
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
"""The largest allowed difference between a file's outputs and camkit's, as a share of the largest value."""


class _TracedTarget(Target):
    """The logit of each picture's best class, or of given classes, in operations that can be traced."""

    def __init__(self, classes: Int[Tensor, " n"] | None = None) -> None:
        self.classes, self.logits = classes, torch.empty(0)

    def __call__(self, output: Any, batch: int) -> Scores:
        """Return the scores, and keep the logits of all classes."""
        logits = logits_of(output, batch)
        self.logits = logits.detach()
        classes = self.logits.argmax(1) if self.classes is None else self.classes
        is_chosen = torch.arange(logits.shape[1], device=logits.device) == classes[:, None]
        return Scores((logits * is_chosen).sum(1), activation=final_activation(logits))


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
    """Write a classifier as a file that returns its scores and its heat.

    The file takes ``image`` (N, C, H, W), pictures prepared for the model, and returns ``scores`` (N, K) and ``heat``
    (N, h, w): camkit's raw map, signed, in units of the score. N is any number, or 1 if the model's code fixes it.
    Before camkit writes the file, it runs the graph on a picture and its mirror image, and compares both outputs with
    its own.

    Args:
        model, target_layer, options: as for ``camkit.Explainer``.
        path: the file to write: ``.onnx``, or ``.pt2`` for a program of ``torch.export``.
        img: the picture for the comparison; None takes a drawn one. The file takes inputs of the size that this picture
            has once it is prepared.
        target: "best" explains each picture's best class; with "input", the file also takes ``target`` (N,), a class
            number for each picture.
        normalise: True if the file takes values from 0 to 255 and normalises them itself.

    Returns:
        The file's metadata: how to prepare pictures, and how many the file takes; the labels, the method, the layer,
        the grid, the places of its cells, and camkit's version.

    Raises:
        InputError: an argument is wrong, the model is not a classifier, or the method runs the model many times.
        ModelError: PyTorch cannot export an operation, or the outputs differ from camkit's.
        OutputError: the file cannot be written.

    Examples:
        >>> import camkit
        >>> camkit.export("demo-fair", "with_heat.onnx")["layer"]  # doctest: +SKIP
        'features'
    """
    path = Path(path)
    if path.suffix.lower() not in _WRITERS:
        raise InputError(f"export writes {' and '.join(_WRITERS)} files, not {str(path)!r}")
    explainer = Explainer(model, target_layer, **options)
    if explainer.choices.options["smooth"] or explainer.choices.options["precision"] != "fp32":
        raise InputError("an exported file runs the model once, in fp32; leave out smooth and precision")
    if explainer.method.one_by_one:
        raise MethodError(
            f"method {explainer.method.name!r} runs the model many times, but an exported file runs it once; "
            "use 'gradcam'"
        )
    inputs, ran, captured = explainer._settled(min(SCENES.rglob("*.jpg")) if img is None else img)
    scored, maps = ran.captured.scores[0], ran.captured.features
    if scored.indices is None or scored.boxes is not None or scored.cells is not None or len(maps) > 1:
        raise InputError(
            "export takes a classifier and one layer; name only one layer, and pass a model that returns class scores"
        )
    preparation = {} if explainer.preprocess is None else _preparation(explainer.preprocess, inputs.shape[2:])
    if normalise:
        if not preparation:
            raise InputError("normalise needs the model's mean and standard deviation; pass preprocess")
        mean, std = (torch.tensor(preparation[key], device=inputs.device).view(-1, 1, 1) for key in ("mean", "std"))
        inputs = (inputs * std + mean) * 255
        preparation |= {"mean": [0.0] * len(mean), "std": [1 / 255] * len(mean)}

    def run(pictures: Tensor, *classes: Tensor) -> tuple[Tensor, Tensor]:
        traced = _TracedTarget(*classes)
        capture = captured((pictures / 255 - mean) / std if normalise else pictures, traced)
        return traced.logits, signed_maps(capture, ran.method)[0].raws[0]

    given = {"image": inputs}
    if target == "input":  # any class but the best
        scores = run(inputs)[0]
        given["target"] = (scores.argmax(1) + 1) % scores.shape[1]
    with guarded(explainer.model):  # so the traced passes need not save and restore the model
        graph, given = _graph(run, given)
    facts = {
        "camkit": version("camkit"),
        "method": ran.method.name,
        "layer": "+".join(map(str, ran.layers)),
        "grid": list(maps[0].activations.shape[2:]),
        "places": maps[0].placement.positions,
        "batch": "any" if len(given["image"]) > 1 else "1",
        "imgsz": list(inputs.shape[2:]),
        **preparation,
        **({} if explainer.labels is None else {"names": dict(enumerate(explainer.labels))}),
    }
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in facts.items()}
    data, returned = _WRITERS[path.suffix.lower()](graph, given, texts)
    for name, right, found in zip(("scores", "heat"), run(*_more(given)), returned, strict=True):
        if not are_alike(right, found, TOLERANCE):
            difference = float((found - right).abs().max() / right.abs().max())
            raise ModelError(
                f"camkit did not write {path}: the exported {name} differ{'s' * (name == 'heat')} from camkit's by "
                f"{difference:.1g} of the largest value"
            )
    write_file(path, data)
    return texts


def _preparation(preprocess: Preprocess, size: Sequence[int]) -> dict[str, list[float]]:
    """Return the mean and deviation for values from 0 to 1, and the size to which pictures are resized before the crop.

    As in torchvision, one number is the length of the shorter side, and two are height and width.
    """
    shades = measure_shades(preprocess, (256, 256))
    black, white = (each[:, each.shape[1] // 2, each.shape[2] // 2].double() for each in (shades.black, shades.white))
    values = {"mean": -black / (white - black), "std": 1 / (white - black)}
    found = {name: [round(float(each), 6) for each in value] for name, value in values.items()}
    view = CropBoxes().view(preprocess, (640, 480), (size[1], size[0]))
    if view is not None:
        box = view.box
        is_whole = box.right - box.left > 639 and box.bottom - box.top > 479
        found["resize"] = [*size] if is_whole else [round(size[0] * 480 / (box.bottom - box.top))]
    return found


def _graph(run: Run, given: dict[str, Tensor]) -> tuple[GraphModule, dict[str, Tensor]]:
    """Trace a function, and return the graph and the inputs that it was traced with.

    The graph takes any number of pictures, or one if the model's code turns their number into a constant.

    Raises:
        ModelError: the function cannot be traced, for example because it branches on values.
    """
    batch = DimDynamic.DYNAMIC if len(given["image"]) > 1 else DimDynamic.STATIC
    shapes = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    fakes = [
        shapes.from_tensor(
            each, symbolic_context=StatelessSymbolicContext([batch, *[DimDynamic.STATIC] * (each.dim() - 1)])
        )
        for each in given.values()
    ]
    table = {**core_aten_decompositions(), torch.ops.aten.convolution_backward.default: _convolution_backward}
    with _naming_operators(), shapes, warnings.catch_warnings(action="ignore"):
        graph = make_fx(run, decomposition_table=table, _allow_non_fake_inputs=True)(*fakes)
    count = fakes[0].shape[0]
    if isinstance(count, torch.SymInt) and count.node.maybe_as_int() is not None:
        return _graph(run, {name: each[:1] for name, each in given.items()})
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph.eval(), given


def _shapes(given: Mapping[str, Tensor]) -> Any:
    return tuple({0: torch.export.Dim("batch")} if len(each) > 1 else {} for each in given.values())


def _more(given: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the inputs with one more picture, if the graph takes any number."""
    return [torch.cat([each, each[:1]]) if len(each) > 1 else each for each in given.values()]


def _naming_operators() -> Any:
    """Turn PyTorch's error about an operation that it cannot export into a sentence that names the operation."""

    def said(error: BaseException) -> str:
        causes = " ".join(str(each) for each in (error, error.__cause__, error.__context__) if each)
        if "data-dependent" in causes:
            return (
                "the model cannot be exported with its heat: its code or the method's branches on the values of a "
                "picture; use torch.where there, or try another method"
            )
        named = re.search(r"OpOverload\(op='([\w.]+)'|\b(aten\.[\w.]+)", causes)
        what = f"PyTorch cannot export the operator {next(filter(None, named.groups()))}" if named else brief(error)
        return f"the model cannot be exported with its heat: {what}; try another method or layer"

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
    """Return the gradient at a convolution's input: a transposed convolution, or a plain one if it was transposed."""
    missing = [0] * len(stride)
    if not transposed:
        for axis, (step, beside, apart) in enumerate(zip(stride, padding, dilation, strict=True)):
            reached = (gradient.shape[2 + axis] - 1) * step - 2 * beside + apart * (weight.shape[2 + axis] - 1) + 1
            missing[axis] = maps.shape[2 + axis] - reached
    back = torch.ops.aten.convolution(
        gradient, weight, None, stride, padding, dilation, not transposed, missing, groups
    )
    return back, None, None


def _onnx(graph: GraphModule, given: Mapping[str, Tensor], texts: Mapping[str, str]) -> tuple[bytes, list[Tensor]]:
    """Return the contents of an ONNX file with the graph, and its outputs in onnxruntime."""
    runtime = optional("onnxruntime", "export to ONNX needs the extra onnx: pip install 'camkit[onnx]'")
    with _naming_operators(), warnings.catch_warnings(action="ignore"):
        program = torch.onnx.export(
            graph,
            tuple(given.values()),
            dynamo=True,
            verbose=False,
            input_names=list(given),
            output_names=["scores", "heat"],
            dynamic_shapes=_shapes(given),
        )
    assert program is not None
    program.model.metadata_props.update(texts)
    data = program.model_proto.SerializeToString()
    session = runtime.InferenceSession(data, providers=["CPUExecutionProvider"])
    arrays = dict(zip(given, (each.cpu().numpy() for each in _more(given)), strict=True))
    return data, [torch.from_numpy(each) for each in session.run(None, arrays)]


def _pt2(graph: GraphModule, given: Mapping[str, Tensor], texts: Mapping[str, str]) -> tuple[bytes, list[Tensor]]:
    """Return the contents of a file of ``torch.export`` with the graph, and its outputs."""
    file = io.BytesIO()
    with _naming_operators():
        program = torch.export.export(graph, tuple(given.values()), dynamic_shapes=_shapes(given))
        torch.export.save(program, file, extra_files=dict(texts))
    return file.getvalue(), [each.detach() for each in program.module()(*_more(given))]


_WRITERS = {".onnx": _onnx, ".pt2": _pt2}
