"""Gradients of parameters, as each backward pass leaves them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TypeVar

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from camkit.layers.names import parameters_by_name

Statistic = TypeVar("Statistic")


@contextmanager
def parameter_gradients(model: nn.Module, reduce: Callable[[Tensor], Statistic]) -> Iterator[dict[str, Statistic]]:
    """Keep a statistic of each parameter's ``.grad`` as the latest backward pass left it.

    ``.grad`` is the sum over the backward passes since the gradients were set to zero, before anything clips it. A
    parameter that two modules share has an entry under its name in each, with the same statistic.

    Args:
        model: the model, or any part of it; only parameters that require gradients and are not lazy are used.
        reduce: a function from a gradient, which has the parameter's shape, to the statistic to keep.

    Returns:
        A context manager that gives a dictionary from parameter names to statistics; backward passes inside the block
        fill it.

    >>> net = nn.Linear(2, 1)
    >>> with parameter_gradients(net, lambda gradient: float(gradient.norm())) as norms:
    ...     net(Tensor([[3.0, 4.0]])).sum().backward()
    >>> norms["weight"], norms["bias"]
    (5.0, 1.0)

    """
    statistics: dict[str, Statistic] = {}
    with ExitStack() as stack:
        names: defaultdict[nn.Parameter, list[str]] = defaultdict(list)
        for name, parameter in parameters_by_name(model).items():
            names[parameter].append(name)
        for parameter in names:
            if parameter.requires_grad and not is_lazy(parameter):
                hook = partial(_keep, statistics, names[parameter], reduce)
                stack.callback(parameter.register_post_accumulate_grad_hook(hook).remove)
        yield statistics


def _keep(
    statistics: dict[str, Statistic], names: list[str], reduce: Callable[[Tensor], Statistic], parameter: Tensor
) -> None:
    if parameter.grad is not None:
        statistics.update(dict.fromkeys(names, reduce(parameter.grad.detach())))
