"""Slow references of the methods that change or differentiate the picture, in float64 with explicit loops.

``Network`` is a small network in NumPy, with its passes written out by hand. The oracles of Score-CAM and its relatives
take a function from one picture (c, H, W) to its score, and the feature maps (C, h, w). Each oracle returns the signed
map (h, w), or (H, W) for the methods whose maps have the picture's size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from oracles import Array, as_float64, enlarged, weighted_by_channel
from torch import nn

Score = Callable[[Array], float]


def to_unit(values: Array) -> Array:
    """Return values scaled to 0..1; zeros if all are equal."""
    low, high = values.min(), values.max()
    return (values - low) / (high - low) if high > low else np.zeros_like(values)


def softmax(values: list[float]) -> list[float]:
    largest = max(values)
    powers = [math.exp(value - largest) for value in values]
    return [power / sum(powers) for power in powers]


def scorecam(score: Score, image: Array, activations: Array) -> Array:
    """Score-CAM, Wang et al. 2020, Algorithm 1: the baseline is black; all channels vary."""
    baseline = score(np.zeros_like(image))
    gained = [score(image * to_unit(enlarged(channel, image.shape[1:]))) - baseline for channel in activations]
    return weighted_by_channel(activations, softmax(gained))


def sscam(score: Score, image: Array, activations: Array, noise: Callable[[int], Array], samples: int) -> Array:
    """SS-CAM(2), Wang et al. 2020: the mean over masks with noise; ``noise(number)`` is that of one picture."""
    baseline, gained = score(np.zeros_like(image)), []
    for k, channel in enumerate(activations):
        mask, total = to_unit(enlarged(channel, image.shape[1:])), 0.0
        for sample in range(samples):
            total += score(image * (mask + noise(k * samples + sample))) - baseline
        gained.append(total / samples)
    return weighted_by_channel(activations, softmax(gained))


def iscam(score: Score, image: Array, activations: Array, steps: int) -> Array:
    """IS-CAM, Naidu et al. 2020: M grows by (X H_k) j / N in each step j = 0, ..., N - 1."""
    baseline, gained = score(np.zeros_like(image)), []
    for channel in activations:
        mask, total = to_unit(enlarged(channel, image.shape[1:])), 0.0
        masked = np.zeros_like(image)
        for j in range(steps):
            masked = masked + image * mask * j / steps
            total += score(masked) - baseline
        gained.append(total / steps)
    return weighted_by_channel(activations, softmax(gained))


def rise(probability: Score, image: Array, grids: list[Array], corners: list[tuple[int, int]], kept: float) -> Array:
    """RISE, Petsiuk et al. 2018, Eq. 6, less the same for the mean probability in place of each.

    A mask is a grid (s, s), enlarged by one cell more than the picture has, and cut out at its corner.
    """
    height, width = image.shape[1:]
    masks, found = [], []
    for grid, (top, left) in zip(grids, corners, strict=True):
        cell = math.ceil(height / len(grid)), math.ceil(width / len(grid))
        large = enlarged(grid, ((len(grid) + 1) * cell[0], (len(grid) + 1) * cell[1]))
        masks.append(large[top : top + height, left : left + width])
        found.append(probability(image * masks[-1]))
    total = np.zeros((height, width))
    for mask, value in zip(masks, found, strict=True):
        total += (value - sum(found) / len(found)) * mask
    return total / (len(masks) * kept)


def occlusion(score: Score, image: Array, window: int, stride: int) -> Array:
    """Occlusion, Zeiler & Fergus 2014: the mean loss of the score over the places of the window that cover a pixel."""
    height, width = image.shape[1:]
    total, times = np.zeros((height, width)), np.zeros((height, width))
    for top in range(0, height - window + stride, stride):
        for left in range(0, width - window + stride, stride):
            covered = image.copy()
            covered[:, top : top + window, left : left + window] = 0
            total[top : top + window, left : left + window] += score(image) - score(covered)
            times[top : top + window, left : left + window] += 1
    return total / times


@dataclass
class Network:
    """3x3 convolutions with zeros around the picture, each with batch norm and ReLU, then a mean and a linear layer.

    Attributes:
        weights, biases: of the convolutions, (D, C, 3, 3) and (D,).
        norms: mean, variance, weight and bias (D,) of each batch norm, and its epsilon.
        strides: of the convolutions.
        linear, last: the weight (classes, D) and bias of the linear layer.
    """

    weights: list[Array]
    biases: list[Array]
    norms: list[tuple[Array, Array, Array, Array, float]]
    strides: list[int]
    linear: Array
    last: Array
    inputs: list[Array] = field(default_factory=list)
    """What each convolution got in the last run; the maps of the last ReLU follow."""

    @classmethod
    def of(cls, model: nn.Module) -> Network:
        """Read a network's weights."""
        convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
        norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
        linear = next(module for module in model.modules() if isinstance(module, nn.Linear))
        return cls(
            [as_float64(module.weight) for module in convolutions],
            [as_float64(module.bias) for module in convolutions],
            [
                (*(as_float64(value) for value in (m.running_mean, m.running_var, m.weight, m.bias)), m.eps)
                for m in norms
            ],
            [module.stride[0] for module in convolutions],
            as_float64(linear.weight),
            as_float64(linear.bias),
        )

    def logits(self, image: Array) -> Array:
        """Run the network, and keep what each convolution gets."""
        self.inputs = [image]
        for weight, bias, norm, stride in zip(self.weights, self.biases, self.norms, self.strides, strict=True):
            height, width = (-(-side // stride) for side in image.shape[1:])
            maps = np.zeros((len(weight), height, width))
            padded = np.pad(image, ((0, 0), (1, 1), (1, 1)))
            for d, y, x in np.ndindex(*maps.shape):
                window = padded[:, y * stride : y * stride + 3, x * stride : x * stride + 3]
                maps[d, y, x] = (window * weight[d]).sum() + bias[d]
            mean, variance, scale, shift, epsilon = norm
            for d in range(len(maps)):
                maps[d] = (maps[d] - mean[d]) / math.sqrt(variance[d] + epsilon) * scale[d] + shift[d]
            image = np.where(maps > 0, maps, 0)
            self.inputs.append(image)
        return self.linear @ image.mean((1, 2)) + self.last

    def backward(self, index: int, *, guided: bool) -> tuple[Array, list[tuple[Array, Array]]]:
        """Return dS/d(picture), and for each block from the last to the first dS/d(norm) and dS/d(convolution).

        If ``guided``, a ReLU passes on positive gradients alone (Springenberg et al. 2015, Figure 1).
        """
        last = self.inputs[-1]
        gradient = np.ones(last.shape) * self.linear[index][:, None, None] / last[0].size
        blocks = []
        for number in reversed(range(len(self.weights))):
            after_norm = np.where(self.inputs[number + 1] > 0, gradient, 0)
            if guided:
                after_norm = np.where(after_norm > 0, after_norm, 0)
            _, variance, scale, _, epsilon = self.norms[number]
            after_convolution = after_norm * (scale / np.sqrt(variance + epsilon))[:, None, None]
            blocks.append((after_norm, after_convolution))
            weight, stride = self.weights[number], self.strides[number]
            padded = np.zeros(np.pad(self.inputs[number], ((0, 0), (1, 1), (1, 1))).shape)
            for d, y, x in np.ndindex(*after_convolution.shape):
                window = padded[:, y * stride : y * stride + 3, x * stride : x * stride + 3]
                window += after_convolution[d, y, x] * weight[d]
            gradient = padded[:, 1:-1, 1:-1]
        return gradient, blocks

    def fullgrad(self, image: Array, index: int) -> tuple[Array, float]:
        """FullGrad, Srinivas and Fleuret 2019, Eq. 8: the map, and the sum of all parts, which is the score."""
        self.logits(image)
        gradient, blocks = self.backward(index, guided=False)
        parts = [gradient * image]
        for number, (after_norm, after_convolution) in zip(reversed(range(len(blocks))), blocks, strict=True):
            mean, variance, scale, shift, epsilon = self.norms[number]
            of_norm = shift - mean * scale / np.sqrt(variance + epsilon)
            parts.append(after_norm * of_norm[:, None, None])
            parts.append(after_convolution * self.biases[number][:, None, None])
        total = np.zeros(image.shape[1:])
        for part in parts:
            scaled = to_unit(np.abs(part))
            for channel in scaled:
                total += enlarged(channel, image.shape[1:])
        return total, sum(float(part.sum()) for part in parts) + float(self.last[index])

    def guided_backpropagation(self, image: Array, index: int) -> Array:
        """Return the guided gradient (c, H, W) at the picture."""
        self.logits(image)
        return self.backward(index, guided=True)[0]

    def guided_gradcam(self, image: Array, index: int) -> Array:
        """Guided Grad-CAM at the last ReLU: the largest guided gradient of the colours times the positive Grad-CAM."""
        guided = np.abs(self.guided_backpropagation(image, index)).max(0)
        maps = self.inputs[-1]
        cam = weighted_by_channel(maps, [float(weight) / maps[0].size for weight in self.linear[index]])
        return guided * enlarged(np.where(cam > 0, cam, 0), image.shape[1:])


OF_PICTURES = {
    "scorecam": scorecam,
    "sscam": sscam,
    "iscam": iscam,
    "rise": rise,
    "occlusion": occlusion,
    "fullgrad": Network.fullgrad,
    "guidedbackprop": Network.guided_backpropagation,
    "guidedgradcam": Network.guided_gradcam,
}
