"""Everything about a model and the process that an explanation might change, before and after a block."""

import copy
import hashlib
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional


class Held:
    """An object compared by identity; it is kept alive so that its identity is not reused."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Held) and self.value is other.value

    __hash__ = None

    def __repr__(self) -> str:
        return f"<{type(self.value).__name__} at {id(self.value):#x}>"


def bits(tensor: Tensor) -> str:
    """Return a checksum of a tensor's values, bit by bit, so that NaN equals itself."""
    return hashlib.blake2b(tensor.detach().cpu().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()


def describe_tensor(tensor: Tensor) -> dict[str, Any]:
    return {
        "identity": Held(tensor),
        "memory": tensor.data_ptr(),
        "values": bits(tensor),
        "version": None if tensor.is_inference() else tensor._version,
        "requires_grad": tensor.requires_grad,
        "grad_fn": Held(tensor.grad_fn),
        "hooks": list((tensor._backward_hooks or {}).items()),
        "accumulation hooks": list((tensor._post_accumulate_grad_hooks or {}).items()),
        "grad": None if tensor.grad is None else describe_tensor(tensor.grad),
    }


def describe_attribute(value: Any) -> Any:
    if isinstance(value, dict):  # PyTorch's tables of hooks, parameters, buffers and modules
        return [(key, Held(item)) for key, item in value.items()]
    if isinstance(value, set):
        return sorted(value, key=repr)
    return value if isinstance(value, (bool, int, float, str, type(None))) else Held(value)


def compiler_switch() -> str:
    """Return how compiled modules run; "" if nothing has been compiled in this process."""
    return torch._dynamo.eval_frame._stance.stance if "torch._dynamo" in sys.modules else ""


def describe_process() -> dict[str, Any]:
    registry = vars(torch.nn.modules.module)
    return {
        "torch generator": bits(torch.get_rng_state()),
        "NumPy generator": [part.tobytes() if isinstance(part, np.ndarray) else part for part in np.random.get_state()],
        "Python generator": random.getstate(),
        "gradients on": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": (
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
        ),
        "function modes": torch.overrides._len_torch_function_stack(),
        "attention": Held(functional.scaled_dot_product_attention),
        "attention kernels": (
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
            torch.backends.mha.get_fastpath_enabled(),
        ),
        "compiler": compiler_switch(),
        "global hooks": {
            key: describe_attribute(value) for key, value in registry.items() if key.startswith("_global_")
        },
        "threads": threading.active_count(),
        "torch threads": torch.get_num_threads(),
        "default dtype": torch.get_default_dtype(),
    }


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Return everything about a model and the process that an explanation might change, by name."""
    state = {f"process {name}": value for name, value in describe_process().items()}
    for name, module in model.named_modules(remove_duplicate=False):
        state |= {f"module {name!r} {key}": describe_attribute(value) for key, value in vars(module).items()}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        state |= {f"tensor {name!r} {key}": value for key, value in describe_tensor(tensor).items()}
    return state


@contextmanager
def unchanged(model: nn.Module, *, except_for: str | None = None) -> Iterator[None]:
    """Assert that the block leaves the state unchanged, even if it raises."""
    before = snapshot(model)
    try:
        yield
    finally:
        after = snapshot(model)
        changed = {
            key: (before.get(key), after.get(key))
            for key in before | after
            if (key in before) != (key in after) or before[key] != after[key]
        }
        assert not [key for key in changed if except_for is None or not key.endswith(except_for)], changed


def in_the_middle_of_training(model: nn.Module) -> nn.Module:
    """Return a copy with mixed training flags, some frozen parameters, and gradients for the next optimizer step."""
    model = copy.deepcopy(model).train()
    for number, module in enumerate(model.modules()):
        module.training = number % 3 != 2
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number % 4 != 3)
        if number % 2:
            parameter.grad = torch.full_like(parameter, float(number))
    return model
