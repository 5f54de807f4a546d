"""``export()``: a file that returns a classifier's scores and its heat, for programs without Python.

Exporters cannot write a call for a gradient, but they can write the operations that compute it. camkit therefore traces
its own pass: the model, the way back from a score to the layer, and the method's weights. The file holds that graph.
"""

from __future__ import annotations

import io
import json
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, TypeAlias, Unpack

import torch
from jaxtyping import Int
from PIL import Image
from torch import Tensor
from torch._decomp import core_aten_decompositions
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from camkit.engine.guard import guarded
from camkit.errors import InputError, MethodError, ModelError, as_error, brief, optional
from camkit.explaining.explainer import Explainer, showing
from camkit.images.files import write_file
from camkit.images.regions import CropBoxes
from camkit.layers.names import Layers
from camkit.layers.places import SCENES
from camkit.methods.runs import CHANGES, signed_maps
from camkit.models.loaded import Loadable, are_shares, preset
from camkit.models.modules import refuse_black_box
from camkit.options import ExplainerOptions
from camkit.targets.scores import Scores, Target, final_activation, logits_of
from camkit.types import ImageLike, Preprocess

Run: TypeAlias = Callable[..., tuple[Tensor, Tensor]]
"""``run(pictures)`` or ``run(pictures, classes)`` returns scores (N, K) and heat (N, h, w)."""

TOLERANCE = 1e-4
"""The largest allowed difference between a file's outputs and camkit's, as a share of the largest value."""


class _TracedTarget(Target):
    """The logit of each picture's best class, or of given classes, in operations that a graph can hold.

    Attributes:
        logits: what the model returned, (N, K).
        final: the name of the softmax or sigmoid that it ends in; empty if there is none.
    """

    def __init__(self, classes: Int[Tensor, " n"] | None = None) -> None:
        self.classes, self.logits, self.final = classes, torch.empty(0), ""

    def __call__(self, output: Any, batch: int) -> Scores:
        """Return the scores, and keep the logits of all classes."""
        logits = logits_of(output, batch)
        self.logits = logits.detach()
        classes = self.logits.argmax(1) if self.classes is None else self.classes
        is_chosen = torch.arange(logits.shape[1], device=logits.device) == classes[:, None]
        scores = Scores((logits * is_chosen).sum(1), activation=final_activation(logits))
        self.final = scores.final
        return scores


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
    Before camkit writes the file, it runs the graph on six versions of a picture, and compares both outputs with its
    own.

    Args:
        model, target_layer, options: as for ``camkit.Explainer``.
        path: the file to write: ``.onnx``, or ``.pt2`` for a program of ``torch.export``.
        img: the picture for the comparison; None takes a drawn one. The file takes inputs of the size that this picture
            has once it is prepared.
        target: "best" explains each picture's best class; with "input", the file also takes ``target`` (N,), a class
            number for each picture.
        normalise: True if the file takes values from 0 to 255 and normalises them itself.

    Returns:
        The file's metadata: how pictures are prepared, the labels, the method, the layer, the grid, the places of its
        cells, and camkit's version. And "agreement": on how many versions of the picture its heat is camkit's own.

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
    if target not in ("best", "input"):
        raise InputError(f"target must be 'best' or 'input', not {target!r}")
    explainer = Explainer(model, target_layer, **options)
    refuse_black_box(explainer.model)
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
    if inputs.dim() != 4 or inputs.dtype != torch.float32:
        raise InputError(f"export takes models of pictures in float32, not of {inputs.dtype} with {inputs.dim()} axes")
    first = _TracedTarget()
    captured(inputs, first)
    preprocess, size = explainer.preprocess, tuple(inputs.shape[2:])
    scale = {} if preprocess is None else _normalisation(preprocess)
    stated = {} if preprocess is None or not scale else _preparation(preprocess, (size[0], size[1]), scale)
    if preprocess is not None and not stated:
        warnings.warn(
            "the file cannot say how to prepare pictures: the model's preprocessing does more than resize, crop and "
            "normalise",
            stacklevel=2,
        )
    if normalise:
        if not scale:
            raise InputError("normalise needs the model's mean and standard deviation; pass preprocess")
        mean, std = (torch.tensor(scale[key], device=inputs.device).view(-1, 1, 1) for key in ("mean", "std"))
        inputs = (inputs * std + mean) * 255
        stated |= {"mean": [0.0] * len(mean), "std": [1 / 255] * len(mean)} if stated else {}

    def run(pictures: Tensor, *classes: Tensor) -> tuple[Tensor, Tensor]:
        traced = _TracedTarget(*classes)
        capture = captured((pictures / 255 - mean) / std if normalise else pictures, traced)
        return traced.logits, signed_maps(capture, ran.method)[0].raws[0]

    given = {"image": inputs}
    if target == "input":  # any class but the best
        given["target"] = (first.logits.argmax(1) + 1) % first.logits.shape[1]
    with guarded(explainer.model):  # so the traced passes need not save and restore the model
        graph, given = _graph(run, given)
    usual = "sigmoid" if first.logits.shape[1] == 1 else "softmax"
    activation = "none" if first.final else explainer._loaded.activation or usual
    facts = {
        "camkit": version("camkit"),
        "method": ran.method.name,
        "layer": "+".join(map(str, ran.layers)),
        "grid": list(maps[0].activations.shape[2:]),
        "places": maps[0].placement.positions,
        "batch": "any" if len(given["image"]) > 1 else "1",
        "imgsz": list(size),
        "activation": activation,
        "final": first.final,
        **stated,
        **({} if explainer.labels is None else {"names": dict(enumerate(explainer.labels))}),
    }
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in facts.items()}
    data, call = _WRITERS[path.suffix.lower()](graph, given, texts)
    agreement = _agreement(run, call, given, path)
    write_file(path, data)
    return texts | {"agreement": agreement}


def _agreement(run: Run, call: Run, given: Mapping[str, Tensor], path: Path) -> str:
    """Compare a file with camkit's own pass on six versions of the picture; return on how many their heat agrees.

    Each runtime rounds in its own way, and rounding decides a ReLU whose input is almost 0. The heat of a right file
    then differs on some pictures, as camkit's own differs between float32 and float64 (ResNet-50: by up to 0.004 of the
    largest value on 5 of 24 pictures). A wrong graph differs on all pictures, so half of the versions must agree.

    Raises:
        ModelError: they do not, or some scores differ.
    """
    picture, *classes = (each[:1] for each in given.values())
    versions = [picture, *((picture.flip(-1) if mirrored else picture) * factor for mirrored, factor in CHANGES)]
    tests = [(version, *classes) for version in versions]
    if len(given["image"]) > 1:
        tests = [tuple(map(torch.cat, zip(*tests, strict=True)))]
    own, found = (
        [torch.cat(parts) for parts in zip(*(each(*test) for test in tests), strict=True)] for each in (run, call)
    )
    for name, right, other in zip(("scores", "heat"), own, found, strict=True):
        largest = right.flatten(1).abs().amax(1).clamp(min=torch.finfo(right.dtype).tiny)
        differences = (other.to(right.device) - right).flatten(1).abs().amax(1) / largest
        difference = float(differences.median() if name == "heat" else differences.max())
        if not difference <= TOLERANCE:
            raise ModelError(
                f"camkit did not write {path}: the exported {name} differ{'s' * (name == 'heat')} from camkit's by "
                f"{difference:.1g} of the largest value"
            )
    return f"{int((differences <= TOLERANCE).sum())} of {len(versions)}"


def _normalisation(preprocess: Preprocess) -> dict[str, list[float]]:
    """Return the mean and deviation for values from 0 to 1; nothing if a red picture shows that there is more to it."""
    pictures = [Image.new("RGB", (256, 256), colour) for colour in ("black", "white", "red")]
    black, white, red = (
        each.reshape(-1, *each.shape[-2:])[:, each.shape[-2] // 2, each.shape[-1] // 2].double()
        for each in map(preprocess, pictures)
    )
    values = {"mean": -black / (white - black), "std": 1 / (white - black)}
    found = {name: [round(float(each), 6) for each in value] for name, value in values.items()}
    is_all = torch.allclose(red, torch.cat([white[:1], black[1:]]), atol=1e-4)
    is_known = is_all and are_shares(found["mean"], -math.inf) and are_shares(found["std"], 0)
    return found if is_known else {}


def _preparation(preprocess: Preprocess, size: tuple[int, int], scale: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the file says of a preprocessing: mean, deviation, and how pictures are resized before the crop.

    As in torchvision, one number is the length of the shorter side, and two are height and width. The file says nothing
    if that does not prepare a drawn scene in the same way.
    """
    view = CropBoxes().view(preprocess, (640, 480), (size[1], size[0]))
    if view is None:
        return {}
    height = view.box.bottom - view.box.top
    is_whole = view.box.right - view.box.left > 639 and height > 479
    facts = {**scale, "resize": list(size) if is_whole else [round(size[0] * 480 / height)]}
    with Image.open(min(SCENES.rglob("*.jpg"))) as scene:
        picture = scene.convert("RGB").resize((640, 480))
    right = preprocess(picture)
    differences = {
        name: float((preset(size, **facts, interpolation=name)(picture) - right).abs().mean())
        for name in ("bilinear", "bicubic")
    }
    interpolation = min(differences, key=differences.__getitem__)
    # Half a step of 8 bits is 0.01 after the usual normalisation, and the two ways to interpolate differ by more.
    return {**facts, "interpolation": interpolation} if differences[interpolation] < 0.02 else {}


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
    table = {
        **core_aten_decompositions(),
        torch.ops.aten.convolution_backward.default: _convolution_backward,
        torch.ops.aten.avg_pool2d_backward.default: _avg_pool2d_backward,
        torch.ops.aten._adaptive_avg_pool2d_backward.default: _adaptive_avg_pool2d_backward,
        # Global pooling and its backward pass set only the order of the memory by these.
        torch.ops.aten.as_strided_.default: lambda maps, *_: maps,
        torch.ops.aten.as_strided.default: lambda maps, size, *_: maps.view(size),
        # ONNX's operator for copies does not spread a number over a mask.
        torch.ops.aten.copy.default: lambda into, source, *_: source.to(into).expand_as(into).clone(),
    }
    # The other kernels of attention have backward passes of their own, which files cannot hold.
    attention = sdpa_kernel(SDPBackend.MATH)
    with _naming_operators(), shapes, attention, _LinearRows(), warnings.catch_warnings(action="ignore"):
        graph = make_fx(run, table, "symbolic", _allow_non_fake_inputs=True)(*fakes)
    count = fakes[0].shape[0]
    if isinstance(count, torch.SymInt) and count.node.maybe_as_int() is not None:
        return _graph(run, {name: each[:1] for name, each in given.items()})
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph.eval(), given


class _LinearRows(TorchFunctionMode):
    """Runs linear layers on rows (N, C): for tokens (L, N, C) and any N, PyTorch repeats the weights for each token."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of PyTorch; a linear layer with rows (N, C)."""
        if function is functional.linear and args[0].dim() > 2:
            maps, *others = args
            rows = function(maps.reshape(-1, maps.shape[-1]), *others, **(kwargs or {}))
            return rows.reshape(*maps.shape[:-1], rows.shape[-1])
        return function(*args, **(kwargs or {}))


def _shapes(given: Mapping[str, Tensor]) -> Any:
    return tuple({0: torch.export.Dim("batch", min=1)} if len(each) > 1 else {} for each in given.values())


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
    sizes = zip(stride, padding, dilation, weight.shape[2:], gradient.shape[2:], maps.shape[2:], strict=True)
    if not transposed and weight.shape[:2] == (groups, 1) and set(stride) == {1}:
        # Runtimes are slow at transposed convolutions of single channels, and these are plain ones too.
        weight, transposed = weight.flip(*range(2, weight.dim())), True
        padding = [apart * (side - 1) - beside for _, beside, apart, side, _, _ in sizes]
    elif not transposed:
        missing = [
            whole - ((reached - 1) * step - 2 * beside + apart * (side - 1) + 1)
            for step, beside, apart, side, reached, whole in sizes
        ]
    back = torch.ops.aten.convolution(
        gradient, weight, None, stride, padding, dilation, not transposed, missing, groups
    )
    return back, None, None


def _avg_pool2d_backward(
    gradient: Tensor,
    maps: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor: int | None,
) -> Tensor:
    """Return the gradient of a pooling's input: pooling is a convolution with ones and a division."""
    steps, count = stride or kernel, maps.shape[1]
    ones, weight = maps.new_ones(1, 1, *maps.shape[2:]), maps.new_ones(count, 1, *kernel)
    means = functional.avg_pool2d(ones, kernel, stride, padding, ceil_mode, count_include_pad, divisor)
    shares = gradient * means / functional.conv2d(ones, weight[:1], None, steps, padding)
    return _convolution_backward(shares, maps, weight, None, steps, padding, [1, 1], False, None, count, None)[0]


def _adaptive_avg_pool2d_backward(gradient: Tensor, maps: Tensor) -> Tensor:
    """Return the gradient of a pooling's input, whose size must be a multiple of the gradient's."""
    kernel = [whole // part for whole, part in zip(maps.shape[2:], gradient.shape[2:], strict=True)]
    return _avg_pool2d_backward(gradient, maps, kernel, kernel, [0, 0], False, True, None)


def _onnx(graph: GraphModule, given: Mapping[str, Tensor], texts: Mapping[str, str]) -> tuple[bytes, Run]:
    """Return a graph as the contents of an ONNX file, and a function that runs it in onnxruntime."""
    needed = "export to ONNX needs the extra onnx: pip install 'camkit[onnx]'"
    _, runtime = (optional(package, needed) for package in ("onnxscript", "onnxruntime"))
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

    def call(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        arrays = dict(zip(given, (each.cpu().numpy() for each in inputs), strict=True))
        scores, heat = session.run(None, arrays)
        return torch.from_numpy(scores), torch.from_numpy(heat)

    return data, call


def _pt2(graph: GraphModule, given: Mapping[str, Tensor], texts: Mapping[str, str]) -> tuple[bytes, Run]:
    """Return a graph as the contents of a file of ``torch.export``, and a function that runs it."""
    file = io.BytesIO()
    with _naming_operators():
        program = torch.export.export(graph, tuple(given.values()), dynamic_shapes=_shapes(given))
        torch.export.save(program, file, extra_files=dict(texts))
    return file.getvalue(), torch.no_grad()(program.module())


_WRITERS = {".onnx": _onnx, ".pt2": _pt2}
