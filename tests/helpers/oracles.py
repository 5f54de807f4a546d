"""Slow references, written from the papers' formulas in float64.

Each oracle takes one image: activations A (C, \\*grid), and either the gradients dS/dA of the same shape or, for CAM,
the class weights (C,). It returns the signed map (\\*grid) before any ReLU on the sum. The grid may have any number of
axes; the papers write two of them, i and j.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray
Cell = tuple[int, ...]
Score = Callable[[Tensor], Tensor]
ScoreOfMaps = Callable[[Array], float]


def as_float64(values: Array | Tensor) -> Array:
    """Return the values as a float64 array; the conversion is exact."""
    if isinstance(values, Tensor):
        values = values.detach().to("cpu", torch.float64).numpy()
    return np.asarray(values, dtype=np.float64)


def cells_of(channel: Array) -> list[Cell]:
    """Return the index of every cell of a grid."""
    return list(np.ndindex(*channel.shape))


def weighted_by_channel(activations: Array, weights: list[float]) -> Array:
    """Return sum_k w_k A^k, cell by cell."""
    return sum((w * a for w, a in zip(weights, activations, strict=True)), np.zeros(activations.shape[1:]))


def cam(activations: Array | Tensor, class_weights: Array | Tensor) -> Array:
    """CAM: M_c(x, y) = sum_k w_k^c f_k(x, y), Zhou et al. 2016 (CVPR), Eq. 2.

    w^c is the row of the final linear layer that belongs to class c; its bias has no position on the map.
    """
    a, w = as_float64(activations), as_float64(class_weights)
    return weighted_by_channel(a, list(w))


def gradcam(activations: Array | Tensor, gradients: Array | Tensor) -> Array:
    """Grad-CAM: alpha_k = 1/Z sum_ij dS/dA_ij^k, map = sum_k alpha_k A^k, Selvaraju et al. 2017 (ICCV), Eq. 1 and 2."""
    a, g = as_float64(activations), as_float64(gradients)
    return weighted_by_channel(a, [channel.mean() for channel in g])


def gradcam_plus_plus(activations: Array | Tensor, gradients: Array | Tensor) -> Array:
    """Grad-CAM++: alpha_ij = g_ij^2 / (2 g_ij^2 + sum_ab A_ab g_ij^3), Chattopadhay et al. 2018 (WACV), Eq. 19.

    w_k = sum_ij alpha_ij relu(dY/dA_ij), map = sum_k w_k A^k, with Y = exp(S), so dY/dA = exp(S) g; the factor exp(S)
    is common to all weights and left out. alpha is 0 where g is 0. A cell with negative g adds nothing whatever its
    alpha. In the paper A is a feature map after a ReLU, so sum_ab A_ab cannot be negative; for a layer with negative
    values the sum is that of relu(A_ab), and the denominator is at least 2 g_ij^2.
    """
    a, g = as_float64(activations), as_float64(gradients)
    weights = []
    for channel, gradient in zip(a, g, strict=True):
        total = np.maximum(channel, 0).sum()
        weights.append(sum(g_ij**2 / (2 * g_ij**2 + total * g_ij**3) * g_ij for g_ij in gradient[gradient > 0]))
    return weighted_by_channel(a, weights)


def hirescam(activations: Array | Tensor, gradients: Array | Tensor) -> Array:
    """HiResCAM: map = sum_k dS/dA^k * A^k, element by element, Draelos & Carin 2020 (arXiv:2011.08891)."""
    return (as_float64(gradients) * as_float64(activations)).sum(0)


def xgradcam(activations: Array | Tensor, gradients: Array | Tensor) -> Array:
    """XGrad-CAM: w_k = sum_ij A_ij^k / (sum_ab A_ab^k) dS/dA_ij^k, Fu et al. 2020 (BMVC, arXiv:2008.02312).

    A channel that is zero everywhere has no weight by the formula (0/0) and no share in the map under any weight; it
    gets 0.
    """
    a, g = as_float64(activations), as_float64(gradients)
    weights = []
    for channel, gradient in zip(a, g, strict=True):
        weights.append((channel / channel.sum() * gradient).sum() if channel.any() else 0.0)
    return weighted_by_channel(a, weights)


def layercam(activations: Array | Tensor, gradients: Array | Tensor) -> Array:
    """LayerCAM: map_ij = sum_k relu(dS/dA_ij^k) A_ij^k, Jiang et al. 2021 (IEEE TIP 30)."""
    return (np.maximum(as_float64(gradients), 0) * as_float64(activations)).sum(0)


def gradcam_elementwise(activations: Array | Tensor, gradients: Array | Tensor) -> Array:
    """Elementwise Grad-CAM: map_ij = sum_k relu(dS/dA_ij^k A_ij^k), after Pillai & Pirsiavash 2021 (AAAI)."""
    return np.maximum(as_float64(gradients) * as_float64(activations), 0).sum(0)


def principal_direction(matrix: Array) -> Array:
    """Return the first right singular vector of a matrix (cells, channels), with the sign of a positive mean."""
    _, _, right = np.linalg.svd(matrix, full_matrices=False)
    first: Array = right[0]
    return first if float((matrix @ first).sum()) >= 0 else -first


def by_cell(activations: Array) -> Array:
    """Return a matrix with a row for each cell and a column for each channel."""
    return activations.reshape(len(activations), -1).T


def eigencam(activations: Array | Tensor) -> Array:
    """Eigen-CAM: M = A V_1, with A = U S V^T, A (cells, channels), Muhammad & Yeasin 2020 (IJCNN), Eq. 2 to 4."""
    a = as_float64(activations)
    matrix = by_cell(a)
    return (matrix @ principal_direction(matrix)).reshape(a.shape[1:])


def eigengradcam(activations: Array | Tensor, gradients: Array | Tensor) -> Array:
    """EigenGrad-CAM: the same with A replaced by gradient times activation."""
    return eigencam(as_float64(activations) * as_float64(gradients))


def kpcacam(activations: Array | Tensor) -> Array:
    """KPCA-CAM: the first kernel principal component of the cells, Karmani et al. 2024 (arXiv:2410.00267).

    The kernel is the sigmoid, tanh(x y / C + 1), of cells less their mean.
    """
    a = as_float64(activations)
    matrix = by_cell(a)
    matrix = matrix - matrix.mean(0)
    kernel = np.tanh(matrix @ matrix.T / matrix.shape[1] + 1)
    centring = np.eye(len(matrix)) - 1 / len(matrix)
    values, vectors = np.linalg.eigh(centring @ kernel @ centring)
    projection = vectors[:, -1] * math.sqrt(max(float(values[-1]), 0.0))
    agrees = float(projection @ matrix.sum(1)) >= 0
    return (projection if agrees else -projection).reshape(a.shape[1:])


def fem(activations: Array | Tensor) -> Array:
    """FEM: sum_k mean(A_k) where A_k > mean(A_k) + 2 std(A_k), Fuad et al. 2020 (IPTA)."""
    a = as_float64(activations)
    total = np.zeros(a.shape[1:])
    for channel in a:
        total[channel > channel.mean() + 2 * channel.std()] += channel.mean()
    return total


def ablationcam(activations: Array | Tensor, score: ScoreOfMaps) -> Array:
    """Ablation-CAM: w_k = S - S_k with channel k set to zero, Desai & Ramaswamy 2020 (WACV), Eq. 2 without its 1/S."""
    a, weights = as_float64(activations), []
    for k in range(len(a)):
        without = a.copy()
        without[k] = 0
        weights.append(score(a) - score(without))
    return weighted_by_channel(a, weights)


def feature_scorecam(activations: Array | Tensor, score: ScoreOfMaps) -> Array:
    """Score-CAM (Wang et al. 2020, Eq. 3 to 5) with the feature maps in the place of the picture.

    H_k is channel k scaled to 0..1, C_k = S(A H_k) - S(0), w = softmax(C). A constant channel has no weight.
    """
    a = as_float64(activations)
    increases: dict[int, float] = {}
    for k, channel in enumerate(a):
        low, high = float(channel.min()), float(channel.max())
        if low == high:
            continue
        increases[k] = score(a * (channel - low) / (high - low)) - score(np.zeros_like(a))
    powers = {k: math.exp(value - max(increases.values())) for k, value in increases.items()}
    return weighted_by_channel(a, [powers.get(k, 0.0) / sum(powers.values()) for k in range(len(a))])


def reciprocam(activations: Array | Tensor, score: ScoreOfMaps) -> Array:
    """Recipro-CAM: S of the maps times a 3 x 3 Gaussian (1/4, 1/2, 1/4 per axis) at each cell, less the lowest.

    Byun & Lee 2022 (arXiv:2209.14074), Eq. 2 to 4. The division by the largest value belongs to the drawing.
    """
    a = as_float64(activations)
    total = np.zeros(a.shape[1:])
    for middle in cells_of(total):
        masked = np.zeros_like(a)
        for cell in cells_of(total):
            steps = [abs(x - y) for x, y in zip(cell, middle, strict=True)]
            if max(steps) <= 1:
                share = math.prod(0.5 if step == 0 else 0.25 for step in steps)
                masked[:, *cell] = a[:, *cell] * share
        total[middle] = score(masked)
    return total - total.min()


def shapleycam(activations: Array | Tensor, score: Score) -> Array:
    """ShapleyCAM: w_k = mean_ij (g - H A / 2)_ij, Cai 2025 (arXiv:2501.06261), H the Hessian of the score.

    H A is the change of the gradient along A, by central differences of the gradient. ``score`` takes float64 maps.
    """
    a = torch.from_numpy(as_float64(activations))

    def gradient(maps: Tensor) -> Array:
        leaf = maps.clone().requires_grad_()
        (found,) = torch.autograd.grad(score(leaf), leaf)
        return as_float64(found)

    step = 1e-5
    product = (gradient(a + step * a) - gradient(a - step * a)) / (2 * step)
    change = gradient(a) - product / 2
    return weighted_by_channel(as_float64(a), [channel.mean() for channel in change])


def expected(activations: Array | Tensor, references: Array | Tensor, gradients: Array | Tensor) -> Array:
    """Expected gradients: the mean over B and a of (A - B) dS/dA at B + a (A - B), Erion et al. 2021, arXiv:1906.10670.

    ``references`` and ``gradients`` are (M, C, \\*grid), the gradients taken on the way from each reference to A. The
    paper attributes to each feature; the map adds the channels of a cell up.
    """
    a, references, gradients = as_float64(activations), as_float64(references), as_float64(gradients)
    return ((a - references) * gradients).mean(0).sum(0)


ORACLES: dict[str, Callable[[Array | Tensor, Array | Tensor], Array]] = {
    "cam": cam,
    "gradcam": gradcam,
    "gradcam++": gradcam_plus_plus,
    "hirescam": hirescam,
    "xgradcam": xgradcam,
    "layercam": layercam,
    "gradcam-elementwise": gradcam_elementwise,
}
"""The methods that weigh by gradients or class weights."""

OF_ACTIVATIONS: dict[str, Callable[[Array | Tensor], Array]] = {
    "eigencam": eigencam,
    "fem": fem,
    "kpcacam": kpcacam,
}
"""The methods that take feature maps alone."""

OF_SCORES: dict[str, Callable[[Array | Tensor, ScoreOfMaps], Array]] = {
    "ablationcam": ablationcam,
    "feature-scorecam": feature_scorecam,
    "reciprocam": reciprocam,
}
"""The methods that run the head on changed feature maps."""


ALL_ORACLES = {
    **ORACLES,
    **OF_ACTIVATIONS,
    **OF_SCORES,
    "eigengradcam": eigengradcam,
    "finercam": gradcam,
    "shapleycam": shapleycam,
    "refinecam": gradcam_plus_plus,
    "expected": expected,
}
"""Every method. What is special about the last ones, such as Finer-CAM's score, has tests of its own."""


def gradient_by_differences(score: Score, activations: Array | Tensor, step: float = 1e-4) -> Array:
    """Return dS/dA by central differences, (S(A + h e_ij) - S(A - h e_ij)) / 2h, one cell at a time.

    No autograd takes part. Exact up to rounding where S is linear within ``step`` of A, else off by O(step^2).
    """
    a = as_float64(activations)
    gradients = np.zeros_like(a)
    for cell in cells_of(a):
        up, down = a.copy(), a.copy()
        up[cell] += step
        down[cell] -= step
        with torch.no_grad():
            rise = float(score(torch.from_numpy(up))) - float(score(torch.from_numpy(down)))
        gradients[cell] = rise / (2 * step)
    return gradients


def gradcam_plus_plus_by_derivatives(score: Score, activations: Array | Tensor) -> Array:
    """Grad-CAM++ before its closed form: alpha from the true derivatives of Y = exp(S), Chattopadhay et al. 2018.

    alpha_ij = d2Y/dA_ij^2 / (2 d2Y/dA_ij^2 + sum_ab A_ab d3Y/dA_ij^3), w_k = sum_ij alpha_ij relu(dY/dA_ij). Here the
    factor exp(S) stays in the weights. Eq. 19 is this formula where S has no second derivative of its own.
    """
    a = torch.from_numpy(as_float64(activations))
    weights = [0.0] * len(a)
    for cell in cells_of(as_float64(a)):
        direction, shift = torch.zeros_like(a), torch.zeros((), dtype=torch.float64, requires_grad=True)
        direction[cell] = 1.0
        derivatives = [torch.exp(score(a + shift * direction))]
        for _ in range(3):
            derivatives += torch.autograd.grad(derivatives[-1], shift, create_graph=True)
        first, second, third = (float(each.detach()) for each in derivatives[1:])
        if first > 0:
            weights[cell[0]] += second / (2 * second + float(a[cell[0]].sum()) * third) * first
    return weighted_by_channel(as_float64(a), weights)


def source_position(pixel: int, pixels: int, cells: int) -> tuple[int, int, float]:
    """Return the two grid cells around a pixel's centre and the share of the second one.

    Centres lie at half-integers: pixel p sits at (p + 1/2) cells/pixels - 1/2 on the grid. Outside the first and last
    cell's centre the border value is repeated.
    """
    position = (pixel + 0.5) * cells / pixels - 0.5
    position = min(max(position, 0.0), cells - 1.0)
    below = math.floor(position)
    return below, min(below + 1, cells - 1), position - below


def enlarged(grid: Array, size: tuple[int, int]) -> Array:
    """Return a map (h, w) at another size: linear between the cells' centres, the border's value outside of them."""
    large = np.zeros(size)
    for y, x in cells_of(large):
        top, bottom, down = source_position(y, size[0], grid.shape[0])
        left, right, across = source_position(x, size[1], grid.shape[1])
        upper = (1 - across) * grid[top, left] + across * grid[top, right]
        lower = (1 - across) * grid[bottom, left] + across * grid[bottom, right]
        large[y, x] = (1 - down) * upper + down * lower
    return large


def heatmap_oracle(raw: Array | Tensor, size: tuple[int, int]) -> Array:
    """Return the picture (H, W) of a signed map (h, w): ReLU, bilinear upsampling, division by the largest value.

    A map without a positive value gives zeros.
    """
    picture = enlarged(np.maximum(as_float64(raw), 0), size)
    largest = picture.max()
    return picture / largest if largest > 0 else np.zeros(size)


def mean_over_versions(
    signed_map: Callable[[Tensor], Array], image: Tensor, columns: Sequence[float] | None = None
) -> Array:
    """Test-time augmentation: the mean of the maps of a picture and its mirror image, each times 0.9, 1 and 1.1.

    ``signed_map(image)`` returns the map of one picture (c, \\*size). The maps of mirror images are mirrored back. If
    it is known at which pixels the columns of a map look, its values between them are interpolated.
    """
    total: Array | None = None
    for factor in (0.9, 1.0, 1.1):
        for mirrored in (False, True):
            version = torch.flip(image, [-1]) if mirrored else image
            found = signed_map(version * factor)
            found = found[..., ::-1] if mirrored else found
            if mirrored and columns is not None:
                places = [image.shape[-1] - 1 - place for place in reversed(columns)]
                found = np.apply_along_axis(lambda row: np.interp(columns, places, row), -1, found)  # noqa: B023
            total = found.copy() if total is None else total + found
    assert total is not None
    return total / 6


def principal_map(weighted: Array) -> Array:
    """Return the projection of weighted maps (C, \\*grid) on their first right singular vector.

    The vector gets the sign with which the projection agrees with the sum of the maps over the channels.
    """
    matrix = by_cell(weighted)
    projection = matrix @ np.linalg.svd(matrix, full_matrices=False)[2][0]
    agrees = float(projection @ matrix.sum(1)) >= 0
    return (projection if agrees else -projection).reshape(weighted.shape[1:])
