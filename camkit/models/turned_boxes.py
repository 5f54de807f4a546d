"""Turned boxes of an ultralytics network: their overlap, and the upright boxes around them."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

_MOST_COMPARED = 1000
"""The most boxes that are compared with each other, those with the highest scores: each pair takes memory."""


def upright(turned: Float[Tensor, "*n 5"]) -> Float[Tensor, "*n 4"]:
    """Return the upright boxes (left, top, right, bottom) around turned ones (x, y, width, height, angle)."""
    middles, sides, angle = turned[..., :2], turned[..., 2:4], turned[..., 4:]
    along, across = angle.cos().abs(), angle.sin().abs()
    halves = (sides * along + sides.flip(-1) * across) / 2
    return torch.cat([middles - halves, middles + halves], -1)


def without_duplicates(
    turned: Float[Tensor, "n 5"], scores: Float[Tensor, " n"], labels: Int[Tensor, " n"], most_overlap: float
) -> Int[Tensor, " k"]:
    """Return the boxes, best first, that overlap with no better box of their class by more than ``most_overlap``."""
    order = scores.argsort(descending=True, stable=True)[:_MOST_COMPARED]
    boxes, of_class = turned[order], labels[order]
    rivals: Bool[Tensor, "n n"] = (overlaps(boxes) > most_overlap) & (of_class[:, None] == of_class)
    return order[~rivals.triu(1).any(0)]


def overlaps(turned: Float[Tensor, "n 5"]) -> Float[Tensor, "n n"]:
    """Return how much each pair of boxes overlaps, from 0 to 1: one minus the Hellinger distance of two Gaussians.

    A box stands for the normal distribution with the mean and the covariance of its points (Murrugarra-Llerena et al.
    2021, arXiv:2106.06072).
    """
    x, y, width, height, angle = turned.double().unbind(-1)
    wide, high, cos, sin = width**2 / 12, height**2 / 12, angle.cos(), angle.sin()
    # The covariance of each box is [[a, c], [c, b]]; that of a pair, the mean of both.
    a, b, c = wide * cos**2 + high * sin**2, wide * sin**2 + high * cos**2, (wide - high) * cos * sin
    of_pairs_a, of_pairs_b, of_pairs_c = ((each[:, None] + each) / 2 for each in (a, b, c))
    dx, dy = x[:, None] - x, y[:, None] - y
    area = of_pairs_a * of_pairs_b - of_pairs_c**2
    apart = (of_pairs_b * dx**2 + of_pairs_a * dy**2 - 2 * of_pairs_c * dx * dy) / area
    alone = (a * b - c**2).clamp(min=0).sqrt()
    distance = apart / 8 + (area / (alone[:, None] * alone)).log() / 2
    return (1 - (1 - (-distance).exp()).clamp(min=0).sqrt()).to(turned.dtype)
