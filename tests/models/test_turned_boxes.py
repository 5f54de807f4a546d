"""Turned boxes and masks of ultralytics' networks against slow references, without that package."""

from __future__ import annotations

import math

import numpy as np
import torch

from camkit.models.from_ultralytics import mask_logits, overlaps, upright, without_duplicates

Row = tuple[float, float, float, float, float]
BOXES: list[Row] = [
    (50, 40, 30, 10, 0.3),
    (52, 41, 10, 30, 0.3 + math.pi / 2),
    (50, 40, 28, 11, 0.4),
    (90, 20, 12, 12, 1),
]


def corners(box: Row) -> np.ndarray:
    x, y, width, height, angle = box
    turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    sides = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]]) * (width / 2, height / 2)
    return sides @ turn.T + (x, y)


def covariance(box: Row) -> np.ndarray:
    """That of points spread evenly over the box."""
    points = corners(box)
    sides = (points[1] - points[0], points[3] - points[0])
    return sum(np.outer(side, side) for side in sides) / 12


def alike(first: Row, second: Row) -> float:
    one, two = covariance(first), covariance(second)
    middle, apart = (one + two) / 2, np.subtract(first[:2], second[:2])
    affinity = (np.linalg.det(one) * np.linalg.det(two)) ** 0.25 / math.sqrt(np.linalg.det(middle))
    affinity *= math.exp(-apart @ np.linalg.solve(middle, apart) / 8)
    return 1 - math.sqrt(max(1 - affinity, 0))


def test_upright_boxes_hold_the_corners_of_turned_ones() -> None:
    expected = [[*corners(box).min(0), *corners(box).max(0)] for box in BOXES]
    assert torch.allclose(upright(torch.tensor(BOXES)), torch.tensor(expected, dtype=torch.float32), atol=1e-4)


def test_overlaps_are_those_of_gaussians() -> None:
    found = overlaps(torch.tensor(BOXES))
    expected = [[alike(first, second) for second in BOXES] for first in BOXES]
    assert torch.allclose(found, torch.tensor(expected, dtype=torch.float32), atol=1e-3)
    assert 0.7 < float(found[0, 1]) < 0.95


def test_of_boxes_that_overlap_the_best_of_each_class_stays() -> None:
    scores, turned = torch.tensor([0.2, 0.9, 0.5, 0.1]), torch.tensor(BOXES)
    assert without_duplicates(turned, scores, torch.tensor([0, 0, 0, 0]), 0.6).tolist() == [1, 3]
    assert without_duplicates(turned, scores, torch.tensor([0, 1, 0, 0]), 0.6).tolist() == [1, 2, 3]
    assert without_duplicates(turned, scores, torch.tensor([0, 0, 0, 0]), 0.99).tolist() == [1, 2, 0, 3]


def test_the_logit_of_a_mask_is_the_mean_over_its_own_cells() -> None:
    weights, prototypes = torch.randn(3, 4, requires_grad=True), torch.randn(4, 6, 9)
    boxes = torch.tensor([[1.5, 0.0, 7.2, 5.0], [3.0, 2.0, 3.2, 2.2], [0.0, 0.0, 9.0, 6.0]])
    found = mask_logits(weights, prototypes, boxes)
    for number, (left, top, right, bottom) in enumerate(boxes.tolist()):
        cells = [
            float(weights[number].detach() @ prototypes[:, row, column])
            for row in range(6)
            for column in range(9)
            if top <= row < bottom and left <= column < right
        ]
        own = [cell for cell in cells if cell > 0]
        assert math.isclose(float(found[number].detach()), sum(own) / max(len(own), 1), abs_tol=1e-5)
    assert found.requires_grad
