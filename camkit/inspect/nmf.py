"""Non-negative matrix factorisation with multiplicative updates, as deep feature factorisation uses it."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

_RANDOM_STARTS = 2
"""Random starts beside the one from chosen cells; the best is kept, since one alone may end in a poor local minimum."""

_MEAN_SHARE = 0.1
"""The share of the mean cell in a start from chosen cells. Updates multiply, so that what starts at 0 would stay 0."""

_SMALLEST = torch.finfo(torch.float64).tiny
"""Divides in place of 0 if all feature maps are 0; all quotients are 0 then."""

_MOST_UPDATES = 1000
"""Updates of both factors at most: most photos need a few hundred."""

_CHECKED_EVERY = 10
"""Updates between two looks at the error, which cost as much as an update."""

_SMALL_GAIN = 1e-5
"""The updates end when the least error falls by less than this share of itself in ``_CHECKED_EVERY`` updates. With ten
times as much, concepts that overlap are not separated yet."""


def factorise_cells(
    cells: Float[Tensor, "cells c"], count: int
) -> tuple[Float[Tensor, "k cells"], Float[Tensor, "k c"]]:
    """Return non-negative H (k, cells) and W (k, C) for which H^T W is as near to the cells V as it gets.

    These are the updates of Lee and Seung (2001, Algorithms for Non-negative Matrix Factorization), which never let the
    squared error grow: H becomes H (W V^T) / (W W^T H), and W becomes W (H V) / (H H^T W), element by element. A
    quotient of 0 by 0 stands for an element that is 0 already, and stays 0.

    There are several starts. One takes k cells that differ as much as possible as its vectors, the others random ones.

    Args:
        cells: V, not negative.
        count: k.
    """
    largest = float(cells.amax()) or 1.0
    scaled = cells.double() / largest  # in float32, strengths that vanish would divide 0 by almost 0
    generator = torch.Generator().manual_seed(0)
    size = (float(scaled.mean()) / count) ** 0.5  # the product of random factors then has the mean of the cells
    maps, vectors = (
        size * torch.rand(1 + _RANDOM_STARTS, count, side, generator=generator).double() for side in scaled.shape
    )
    vectors[0] = _chosen_cells(scaled, count)
    maps[0] = vectors[0] @ scaled.mT / vectors[0].square().sum(1, keepdim=True).clamp(min=_SMALLEST)
    errors = _errors(scaled, maps, vectors)
    for number in range(1, _MOST_UPDATES + 1):
        maps *= _quotient((vectors.flatten(0, 1) @ scaled.mT).reshape(maps.shape), vectors @ vectors.mT @ maps)
        vectors *= _quotient((maps.flatten(0, 1) @ scaled).reshape(vectors.shape), maps @ maps.mT @ vectors)
        if number % _CHECKED_EVERY == 0:
            least, errors = float(errors.amin()), _errors(scaled, maps, vectors)
            if least - float(errors.amin()) <= _SMALL_GAIN * least:
                break
    best = int(errors.argmin())
    return maps[best].float(), (vectors[best] * largest).float()


def _chosen_cells(cells: Float[Tensor, "cells c"], count: int) -> Float[Tensor, "k c"]:
    """Return k cells, each the one that is least explained by those before it, and a share of the mean cell.

    This is the successive projection algorithm (Gillis and Vavasis 2014, arXiv:1208.1237).
    """
    left, chosen = cells.clone(), []
    for _ in range(count):
        sizes = left.norm(dim=1)
        place = int(sizes.argmax())
        chosen.append(cells[place])
        direction = left[place] / sizes[place] if sizes[place] > 0 else left[place]
        left = left - (left @ direction)[:, None] * direction
    return torch.stack(chosen) + _MEAN_SHARE * cells.mean(0)


def _errors(
    cells: Float[Tensor, "cells c"], maps: Float[Tensor, "starts k cells"], vectors: Float[Tensor, "starts k c"]
) -> Float[Tensor, " starts"]:
    """Return the norm of what each start leaves out."""
    return torch.stack([(cells - one.mT @ other).norm() for one, other in zip(maps, vectors, strict=True)])


def _quotient(above: Float[Tensor, "starts k _"], below: Float[Tensor, "starts k _"]) -> Float[Tensor, "starts k _"]:
    return torch.where(below > 0, above / below, 0)
