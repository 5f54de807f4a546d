"""The passes of methods that differentiate more than the head once: the whole model, or the head twice.

FullGrad needs what each operation of a pass adds to a network that is otherwise linear around one input: its bias.
Around an input x, an operation is y = J x + b. Convolutions, linear layers and additions of constants have the bias b
that they add; a batch norm in evaluation mode has the bias that its mean, variance, weight and bias give together. An
activation function has the implicit bias f(x) - f'(x) x (Srinivas and Fleuret 2019, section 3.1), which is zero for
ReLU; the product of two feature maps has -x y. The gradients times all biases, and the gradient times the input, add up
to the score.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from camkit.engine.attach import nodes_behind, precise, with_tensors
from camkit.engine.cut import Saved, Tape
from camkit.engine.guard import interruptible
from camkit.engine.heatmap import enlarge
from camkit.engine.passes import Capture, Features, Forward, Pass, detached, is_absent, is_out_of_memory
from camkit.errors import LayerError, MethodError
from camkit.methods.on_one_picture import refuse_boxes
from camkit.methods.registry import Method
from camkit.targets.scores import Scores
from camkit.types import GuidedGradients, LayerRef, PartsOfScore, Placement

Bias: TypeAlias = Callable[..., "Tensor | None"]
"""``bias(moves, function, *args, **named)`` returns what a call of one of PyTorch's functions adds; None if that is
nothing. ``moves(value)`` tells whether an argument depends on the network's input, and is neither a weight nor computed
from weights alone."""


class NotedBiases(TorchFunctionMode):
    """Calls ``note`` with the output and the bias of each operation in the block that has a bias.

    It acts in the current thread only, and changes nothing in the model. The bias broadcasts against the output.

    Raises:
        MethodError: (in the block) a feature map is complex.
    """

    def __init__(self, note: Callable[[Tensor, Tensor], None]) -> None:
        super().__init__()
        self._note = note
        self._moving: set[Node] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and note its bias."""
        named = dict(kwargs or {})
        given = (named.pop("input"), *args) if "input" in named else args
        find = _BIASES.get(func)
        bias = None if find is None or not torch.is_grad_enabled() else find(self._moves, func, *given, **named)
        output = func(*args, **(kwargs or {}))
        if isinstance(output, Tensor) and output.is_complex() and self._moves(output):
            raise MethodError(
                "this method cannot use complex feature maps, such as those of a Fourier transform; use 'hirescam' or "
                "'layercam'"
            )
        if bias is not None and self._moves(output):
            self._note(output, bias)
        return output

    def _moves(self, value: Any) -> bool:
        """Tell whether a value is a tensor that depends on the input."""
        if not isinstance(value, Tensor) or not value.requires_grad or isinstance(value, nn.Parameter):
            return False
        if value.grad_fn is None:  # the input itself
            return True
        waiting, seen = [value.grad_fn], {value.grad_fn}
        while waiting:
            node: Any = waiting.pop()
            if node in self._moving or (hasattr(node, "variable") and not isinstance(node.variable, nn.Parameter)):
                self._moving.add(value.grad_fn)
                return True
            new = {before for before, _ in node.next_functions if before is not None} - seen
            seen |= new
            waiting += new
        return False


def _of_layer(
    _moves: Any, _function: Any, _maps: Any, weight: Tensor, bias: Tensor | None = None, *_args: Any, **_named: Any
) -> Tensor | None:
    """Return the bias of a convolution (C, 1, ...), or of a linear layer (C,)."""
    return None if bias is None else bias.detach().reshape(-1, *[1] * (weight.dim() - 2))


def _at_zero(_moves: Any, function: Callable[..., Tensor], maps: Tensor, *args: Any, **named: Any) -> Tensor:
    """Return what a batch norm gives for zeros."""
    with torch.no_grad():
        return function(maps.new_zeros(1, maps.shape[1], *[1] * (maps.dim() - 2)), *args, **named)


def _of_sum(
    moves: Callable[[Any], bool], function: Callable[..., Tensor], *args: Any, terms: int = 2, **named: Any
) -> Tensor | None:
    """Return the constant that is added to a feature map, or from which it is subtracted.

    With three terms, it is the constant b in b + x W or b + W x; the product of two feature maps is not linear.
    """
    moving = list(map(moves, args[:terms]))
    if len(moving) < terms or not any(moving) or all(moving[-2:]):
        return None
    named.pop("out", None)
    with torch.no_grad():
        # Copies of the others, since the function may work in place.
        pairs = zip(args, moving, strict=False)
        first = [torch.zeros_like(value) if depends else with_tensors(value, Tensor.clone) for value, depends in pairs]
        return function(*first, *args[terms:], **named)


def _of_product(moves: Callable[[Any], bool], _function: Any, *factors: Any, **_named: Any) -> Tensor | None:
    """Return -x y for the product of two feature maps; the product with a constant has no bias."""
    if len(factors) < 2 or not all(map(moves, factors[:2])):
        return None
    product: Tensor = factors[0].detach() * factors[1].detach()
    return -product


def _of_activation(_moves: Any, function: Callable[..., Tensor], maps: Tensor, *args: Any, **named: Any) -> Tensor:
    """Return f(x) - f'(x) x."""
    with torch.enable_grad():
        leaf = maps.detach().clone().requires_grad_()
        values = function(leaf.clone(), *args, **named)
        (slope,) = torch.autograd.grad(values.sum(), leaf)
    return values.detach() - slope * leaf.detach()


_BIASES: Mapping[Any, Bias] = {
    **dict.fromkeys((torch.conv1d, torch.conv2d, torch.conv3d, functional.linear), _of_layer),
    **dict.fromkeys((torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d), _of_layer),
    functional.batch_norm: _at_zero,
    **dict.fromkeys(
        (
            *(functional.hardtanh, functional.relu6, functional.hardswish, functional.hardsigmoid, functional.silu),
            *(functional.gelu, functional.mish, functional.elu, functional.celu, functional.selu, functional.softplus),
            *(functional.logsigmoid, functional.softsign, functional.tanhshrink),
            *(functional.sigmoid, torch.sigmoid, Tensor.sigmoid, Tensor.sigmoid_),
            *(functional.tanh, torch.tanh, Tensor.tanh, Tensor.tanh_),
            *(torch.clamp, Tensor.clamp, Tensor.clamp_, torch.exp, Tensor.exp, torch.square, Tensor.square),
        ),
        _of_activation,
    ),
    **dict.fromkeys((torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__), _of_sum),
    **dict.fromkeys((torch.sub, Tensor.sub, Tensor.sub_, Tensor.__sub__, Tensor.__rsub__, Tensor.__isub__), _of_sum),
    **dict.fromkeys(
        (torch.addmm, Tensor.addmm, Tensor.addmm_, torch.baddbmm, Tensor.baddbmm, Tensor.baddbmm_),
        functools.partial(_of_sum, terms=3),
    ),
    **dict.fromkeys(
        (torch.mul, Tensor.mul, Tensor.mul_, Tensor.__mul__, Tensor.__rmul__, Tensor.__imul__), _of_product
    ),
}
"""The bias of each operation. ReLU, leaky ReLU, pooling and resizing have none: around an input, they are linear."""


_INPUT = LayerRef("input")


def of_parts(options: Pass, method: Method) -> Capture:
    """Run the model once, and weigh the parts of each target's score: the input's, and those of all biases.

    Raises:
        MethodError: the score has no gradient at the input, or the parts do not add up to it, or it is a box's.
    """
    inputs = options.inputs
    biases: list[tuple[Saved, Tensor]] = []

    def note(output: Tensor, bias: Tensor) -> None:
        shape_only = output.detach().new_zeros(()).expand(output.shape)
        biases.append((Saved(shape_only, get_gradient_edge(output)), bias))
        output.register_hook(biases[-1][0].keeper())

    with options.forward(during=NotedBiases(note), leaf=True) as run, interruptible():
        at_input = _leaf(run.images)
        tape = Tape({_INPUT: at_input})
        tape.layers |= {LayerRef(f"bias {number}"): saved for number, (saved, _) in enumerate(biases)}
        scores = _differentiated(tape, run, options)
        captured = run.captured((), scores)
    to_size = functools.partial(enlarge, size=tuple(inputs.shape[2:]))
    weights: list[Tensor] = []
    for number, scored in enumerate(scores):
        parts = [precise(inputs.detach()) * at_input.gradients[number]]
        parts += [precise(saved.gradients[number]) * bias for saved, bias in biases]
        _check_complete(parts, scored, options)
        placed: list[Tensor] = []
        rest = torch.zeros(len(inputs), device=inputs.device)
        for part in parts:
            if part.dim() == inputs.dim() and math.prod(part.shape[2:]) > 1:
                placed.append(part)
            # A part without a grid, or with one of a single cell, has no place.
            elif part.shape[:1] == inputs.shape[:1]:
                rest = rest + (part.flatten(1).sum(1) if part.dim() > 1 else part)
            else:  # it belongs to no image alone
                rest = rest + part.sum() / len(inputs)
        weights.append(method.weigh(inputs, PartsOfScore(tuple(placed), rest, to_size)))
    return replace(captured, features=(Features(inputs, tuple(weights)),), scores=tuple(map(detached, scores)))


def of_guided(options: Pass, method: Method) -> Capture:
    """Run the model once, and weigh each target's guided gradients; with layers, also their ordinary gradients.

    The guided ones come from a backward pass in which each ReLU removes what is negative. Hooks on the nodes of the
    autograd graph do that, so it does not matter whether a ReLU is a module, a function, or in place.

    Raises:
        MethodError: the score has no gradient at the input, the model has no ReLU, or a target is a box.
    """
    inputs, size = options.inputs, tuple(options.inputs.shape[2:])
    with options.forward(whole=True, leaf=True) as run, interruptible():
        explained = [Features(inputs, ())]
        if run.layouts:
            _differentiated(run.tape, run, options, keep_graph=True)
            explained = list(run.features())  # the hooks of the layers also save what the guided passes give
        at_input = _leaf(run.images)
        scores = _differentiated(Tape({_INPUT: at_input}), run, options, guided=True)
        captured = run.captured((), tuple(map(detached, scores)))
    features: list[Features] = []
    for maps in explained:
        # As in the paper, the map is spread evenly over the guided gradients, wherever its cells are drawn.
        to_size = functools.partial(enlarge, size=size, placement=Placement(maps.placement.extent))
        at_layer = maps.by_target or [None] * len(scores)
        pairs = zip(at_input.gradients, at_layer, strict=True)
        weights = tuple(method.weigh(maps.activations, GuidedGradients(*pair, to_size)) for pair in pairs)
        features.append(Features(inputs, weights))
    return replace(captured, features=tuple(features))


def _leaf(images: Tensor) -> Saved:
    """Return a record that collects the gradients at the input."""
    saved = Saved(images.detach(), images)
    images.register_hook(saved.keeper())
    return saved


def _differentiated(
    tape: Tape, run: Forward, options: Pass, *, keep_graph: bool = False, guided: bool = False
) -> list[Scores]:
    """Differentiate each target's score down to what is on the tape, and return the scores without a graph.

    Raises:
        LayerError: the score does not depend on a layer.
        MethodError: it does not depend on the input, the model has no ReLU to guide, or the target is a box.
    """
    scores: list[Scores] = []
    for number, target in enumerate(run.targets, start=1):
        scored = run.score(target)
        refuse_boxes([scored], "differentiate the whole model")
        keep = keep_graph or number < len(run.targets)
        with _guiding(scored.values) if guided else nullcontext():
            tape.differentiate(scored, keep_graph=keep, fp16=options.precision == "fp16")
        scores.append(replace(scored, values=scored.values.detach()))
    if any(is_absent(scored) for scored in scores):
        return scores
    for ref, saved in tape.layers.items():
        if saved.reached or ref.name.startswith("bias "):  # a bias that no score depends on may have no gradient
            continue
        if ref == _INPUT:
            raise MethodError(
                "the score does not depend on the picture in a differentiable way, so there is no gradient at the "
                "picture; use 'rise', a method without gradients, or a gradient method such as 'gradcam'"
            )
        raise LayerError(
            f"the score does not depend on layer {str(ref)!r} in a differentiable way; choose another layer"
        )
    return scores


@contextmanager
def _guiding(score: Tensor) -> Iterator[None]:
    """Let each ReLU behind a score pass on positive gradients alone in the block.

    Raises:
        MethodError: there is no ReLU.
    """
    clamps = ("HardtanhBackward0", "ClampMinBackward0", "ClampBackward1")  # ReLU6, or clamping at zero
    relus = [
        node
        for node in nodes_behind(score)
        if node.name() == "ReluBackward0"
        or (node.name() in clamps and getattr(node, "_saved_min_val", getattr(node, "_saved_min", None)) == 0)
    ]
    if not relus and score.requires_grad:
        raise MethodError(
            "guided backpropagation changes what ReLUs pass back, and this model ran none; use 'gradcam', 'hirescam' "
            "or 'scorecam'"
        )
    handles = [relu.register_prehook(lambda gradients: with_tensors(gradients, Tensor.relu)) for relu in relus]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _check_complete(parts: Sequence[Tensor], scored: Scores, options: Pass) -> None:
    """Refuse parts that do not add up to the score.

    A score from a softmax or sigmoid is not compared, since the gradients are the logit's, which is not known.

    Raises:
        MethodError: they do not.
    """
    if scored.activation is not None or is_absent(scored):
        return
    sums = [float(part.sum()) for part in parts]
    score = float(scored.values.double().sum())
    half = options.precision != "fp32" or scored.values.dtype in (torch.float16, torch.bfloat16)
    # A share of the absolute values of all parts' sums. In fp32, the rounding of torchvision's networks is below 1e-6,
    # and what a layer norm adds is far above 1e-3. In 16 bits, each part is rounded to 0.4 percent, and errors add up.
    tolerance = 5e-2 if half else 1e-3
    if abs(math.fsum(sums) - score) > tolerance * math.fsum(map(abs, [*sums, score])):
        raise MethodError(
            f"the gradients times the input and the biases add up to {math.fsum(sums):.4g}, but the score is "
            f"{score:.4g}: the model has parts that FullGrad has no bias for, such as layer norms or attention; use "
            "'hirescam' or 'layercam'"
        )


def second_derivatives(values: Tensor, saved: Saved) -> tuple[Tensor, Tensor]:
    """Return the gradients of the scores, and the product of their second derivatives with the feature maps."""
    end = cast("Tensor", saved.end)
    gradients = torch.autograd.grad(values.sum(), end, create_graph=True)[0]
    if not gradients.requires_grad:  # the head is linear
        return gradients, torch.zeros_like(gradients)
    refusal = MethodError(
        "an operation after the layer has no second derivative, which 'shapleycam' needs; use 'gradcam'"
    )
    # PyTorch's nodes in the place of an operation without a second derivative. It raises an error in most of them, but
    # skips a function that is marked as once differentiable.
    without = ("torch::autograd::Error", "torch::autograd::NotImplemented")
    if any(node.name() in without for node in nodes_behind(gradients)):
        raise refusal
    try:
        products = torch.autograd.grad(
            gradients, end, grad_outputs=saved.output.detach().to(gradients.dtype), retain_graph=True, allow_unused=True
        )[0]
    except RuntimeError as error:  # operations of other packages, such as torchvision's roi_align, raise their own
        if is_out_of_memory(error):
            raise
        raise refusal from error
    return gradients.detach(), torch.zeros_like(gradients) if products is None else products.detach()
