"""One pass that leaves the model unchanged: its precision, memory format and size, and what to do if it fails."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from camkit.engine.guard import guarded
from camkit.engine.interrupts import interruptible
from camkit.engine.nested import tensors_in
from camkit.engine.record import ModelRecord
from camkit.types import Precision

T = TypeVar("T")

DTYPES = {"bf16": torch.bfloat16, "bf16-forced": torch.bfloat16, "fp16": torch.float16}

_NO_BF16 = (
    "this CPU has no units for bf16, so bf16 would take several times as long as fp32; camkit uses fp32 instead "
    "(precision 'bf16-forced' uses bf16 anyway)"
)

_FEW_IMAGES = 2
"""The smallest batch that is passed in the channels-last format. On ResNet-50, the format takes 0.96 of the processor
time for 2 pictures and 0.90 for 4; on MobileNetV2, 0.90 and 0.82. For one picture, the two passes that compare the
formats cost more than it saves."""

_SAME_FP32, _SAME_AUTOCAST = 1e-3, 5e-2
"""How far a model's outputs in the two formats may differ, as a share of the largest value: a little more than
rounding."""


def usable_precision(precision: Precision, device: torch.device) -> tuple[Precision, str]:
    """Return the precision to run in, and a message for the user if it differs from the given one.

    Args:
        precision: the user's choice.
        device: the model's device.
    """
    if precision == "bf16" and device.type == "cpu" and not _cpu_has_bf16():
        return "fp32", _NO_BF16
    return precision, ""


def _cpu_has_bf16() -> bool:
    """Tell whether the CPU computes in bf16; older versions of PyTorch report this for x86 only."""
    if not hasattr(torch.cpu, "get_capabilities"):
        return platform.machine() not in ("x86_64", "AMD64") or torch.cpu._is_avx512_bf16_supported()
    capabilities = torch.cpu.get_capabilities()
    if capabilities.get("architecture") == "x86_64":
        return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16"))
    return bool(capabilities.get("bf16", True))


@contextmanager
def quiet_pass(
    model: nn.Module,
    device: torch.device,
    precision: Precision,
    record: ModelRecord | None = None,
    *,
    users_code: bool = True,
) -> Iterator[None]:
    """Prepare one pass: evaluation mode, no graph, the given precision. Everything is undone at the end.

    It works inside the caller's ``no_grad``, ``inference_mode`` and ``autocast``, and does not share autocast's weight
    cache. Ctrl-C waits in the block; run the model inside ``interruptible``.

    Args:
        model: the model; it is restored exactly.
        device: the model's device.
        precision: "fp32", or "bf16" or "fp16" under autocast.
        record: the model's record, if it is already prepared; a new one walks through all modules.
        users_code: True if functions of the user run inside, besides the model.
    """
    with (
        guarded(model, record, users_code=users_code),
        torch.inference_mode(mode=False) if torch.is_inference_mode_enabled() else nullcontext(),
        torch.no_grad(),
        autocasting(device, precision),
    ):
        yield


def autocasting(device: torch.device, precision: Precision = "fp32") -> AbstractContextManager[None]:
    """Return a context in this precision, whatever the caller's ``autocast`` is, and without sharing its cache."""
    if precision not in DTYPES and not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, dtype=DTYPES.get(precision), enabled=precision in DTYPES, cache_enabled=False)


def faster_format(
    model: nn.Module,
    inputs: Float[Tensor, "n c *size"],
    precision: Precision,
    remembered: dict[Precision, bool] | None = None,
) -> torch.memory_format:
    """Return the memory format in which the model should receive a batch.

    Convolutions on a CPU are faster with the channels last, without any change to the model; docs/results.md has
    the figures. A model that gives different results in this format gets the ordinary one.

    Args:
        model: the model; it is restored exactly.
        inputs: the batch.
        precision: the precision of the pass.
        remembered: for each precision, whether the model gives the same results in both formats; one image decides
            this, and the answer is added here.
    """
    if inputs.dim() != 4 or inputs.device.type != "cpu" or len(inputs) < _FEW_IMAGES:
        return torch.preserve_format
    remembered = {} if remembered is None else remembered
    if precision not in remembered:
        convolves = any(isinstance(module, nn.Conv2d) for module in model.modules())
        remembered[precision] = convolves and _same_in_both_formats(model, inputs[:1], precision)
    return torch.channels_last if remembered[precision] else torch.preserve_format


def _same_in_both_formats(model: nn.Module, image: Tensor, precision: Precision) -> bool:
    """Tell whether the model's outputs for one image are equal in both formats, up to rounding."""
    tolerance = _SAME_FP32 if precision == "fp32" else _SAME_AUTOCAST
    with quiet_pass(model, image.device, precision), interruptible():
        try:
            ordinary = [tensor.double() for tensor in tensors_in(model(image.clone()))]
            channels_last = list(tensors_in(model(image.clone(memory_format=torch.channels_last))))
        except Exception:  # a model may raise anything if it does not expect this memory order
            return False
        return len(ordinary) == len(channels_last) and all(
            are_alike(*pair, tolerance) for pair in zip(ordinary, channels_last, strict=True)
        )


def are_alike(expected: Tensor, values: Tensor, tolerance: float) -> bool:
    """Tell whether two tensors differ by at most a share of the largest expected value."""
    if expected.shape != values.shape:
        return False
    largest = float(expected.nan_to_num(0, 0, 0).abs().amax()) if expected.numel() else 0.0
    return torch.allclose(expected, values.double(), rtol=0, atol=tolerance * largest, equal_nan=True)


_MOST_AT_ONCE = 4
"""At most this many passes run at the same time on a CPU; more cores work together on each."""


def passes_at_once(record: ModelRecord) -> int:
    """Return how many passes through a model may run at the same time; each gets a part of the cores.

    On a CPU, two passes on a core each take less time than one after the other on both. A model with code or hooks of
    the user's own may be unable to run in two threads.
    """
    if record.placement[0].type != "cpu" or record.runs_own_code:
        return 1
    return min(torch.get_num_threads(), _MOST_AT_ONCE)


def cores_of_a_pass() -> int:
    """Return how many cores each of several passes gets that run at the same time."""
    return torch.get_num_threads() // min(torch.get_num_threads(), _MOST_AT_ONCE)


def in_parts(count: int, at_once: int, run: Callable[[range], None]) -> int:
    """Run ``count`` pictures through the model, ``at_once`` per pass, and half as many whenever memory runs out.

    Args:
        count: how many pictures there are.
        at_once: the most pictures of one pass.
        run: runs the pictures with these numbers.

    Returns:
        The most pictures of one pass from now on.
    """
    done = 0
    while done < count:
        part = range(done, min(done + at_once, count))
        try:
            run(part)
        except RuntimeError as error:
            if len(part) == 1 or not is_out_of_memory(error):
                raise
            at_once = len(part) // 2
            continue
        done = part.stop
    return at_once


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an exception means that the batch was too large for the device."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def differentiated(run: Callable[[], T]) -> T:
    """Return what ``run`` returns. If a backward pass in it needs overwritten tensors, run it again with copies.

    A detector may overwrite the results of its sigmoids, for example. PyTorch refuses to differentiate such a model,
    unless it keeps copies of the tensors.
    """
    try:
        return run()
    except RuntimeError as error:
        if not is_overwriting(error):
            raise
    with keeping_overwritten():
        return run()


def is_overwriting(error: Exception) -> bool:
    """Tell whether a backward pass failed because the model has overwritten a tensor that it needs."""
    return isinstance(error, RuntimeError) and "modified by an inplace operation" in str(error)


def keeping_overwritten() -> AbstractContextManager[None]:
    """Return a context in which each operation keeps a copy of what its backward pass needs.

    PyTorch's ``allow_mutation_on_saved_tensors`` copies less, but has one switch for all threads.
    """
    return cast("AbstractContextManager[None]", saved_tensors_hooks(_kept, lambda kept: kept))


def _kept(tensor: Tensor) -> Tensor:
    return tensor if isinstance(tensor, nn.Parameter) else tensor.clone()
