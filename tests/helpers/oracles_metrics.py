"""Slow references of the metrics, written from the papers' formulas in float64.

A score is a function from one picture (C, *size) to a number; a map is an array (*size). Nothing here is shared with
camkit.
"""

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

Array = np.ndarray
Score = Callable[[Array], float]


def _levels(heat: Array) -> list[set[tuple[int, ...]]]:
    """Return all sets of cells that are hotter than some level, from the empty one to that of all cells."""
    cells = list(np.ndindex(*heat.shape))
    return [{cell for cell in cells if heat[cell] > level} for level in sorted(set(heat.ravel()), reverse=True)] + [
        set(cells)
    ]


def at_share(score_of: Callable[[set[tuple[int, ...]]], float], heat: Array, share: float) -> float:
    """Return the score of the set of the hottest cells with share x cells in it.

    If cells of equal heat leave no such set, the score is on the line between the next smaller and larger one.
    """
    wanted = math.ceil(round(share * heat.size, 6))
    levels = _levels(heat)
    smaller = max((hot for hot in levels if len(hot) <= wanted), key=len)
    larger = min((hot for hot in levels if len(hot) >= wanted), key=len)
    if len(smaller) == len(larger):
        return score_of(smaller)
    weight = (wanted - len(smaller)) / (len(larger) - len(smaller))
    return (1 - weight) * score_of(smaller) + weight * score_of(larger)


def sets_of_a_curve(heat: Array, steps: int) -> list[set[tuple[int, ...]]]:
    """Return for each step the smallest such set with at least its number of cells; if larger, also the one before."""
    levels = _levels(heat)
    found = {0: levels[0], heat.size: levels[-1]}
    for step in range(1, steps + 1):
        wanted = math.ceil(round(step / steps * heat.size, 6))
        place = next(place for place, hot in enumerate(levels) if len(hot) >= wanted)
        found[len(levels[place])] = levels[place]
        if len(levels[place]) > wanted:
            found[len(levels[place - 1])] = levels[place - 1]
    return [found[count] for count in sorted(found)]


def changed(picture: Array, filled: Array, removed: set[tuple[int, ...]]) -> Array:
    """Return the picture with some cells taken from another one."""
    made = picture.copy()
    for cell in removed:
        made[:, *cell] = filled[:, *cell]
    return made


def trapezoids(points: Sequence[tuple[float, float]]) -> float:
    """Return the area under a polygon line."""
    return sum((right - left) * (low + high) / 2 for (left, low), (right, high) in itertools.pairwise(points))


def _points(score: Score, picture: Array, filled: Array, heat: Array, steps: int, kept: bool) -> float:
    cells = set(np.ndindex(*heat.shape))
    sets = sets_of_a_curve(heat, steps)
    points = []
    for hot in sets:
        value = score(changed(picture, filled, cells - hot if kept else hot))
        points.append((len(hot) / heat.size, value))
    return trapezoids(points)


def insertion(score: Score, picture: Array, filled: Array, heat: Array, steps: int) -> float:
    """Insertion (Petsiuk et al. 2018): area under the score of the filled picture into which the hottest cells come."""
    return _points(score, picture, filled, heat, steps, True)


def deletion(score: Score, picture: Array, filled: Array, heat: Array, steps: int) -> float:
    """Deletion (Petsiuk et al. 2018): area under the score of the picture from which the hottest cells go."""
    return _points(score, picture, filled, heat, steps, False)


def srg(score: Score, picture: Array, filled: Array, heat: Array, steps: int) -> float:
    """SRG (Bluecher et al. 2024): area with the least relevant first minus area with the most relevant first.

    Least relevant first is written as published: the coldest cells go, over the share that has gone.
    """
    cells = set(np.ndindex(*heat.shape))
    sets = sets_of_a_curve(heat, steps)
    least = sorted({len(cells - hot) / heat.size: score(changed(picture, filled, cells - hot)) for hot in sets}.items())
    most = sorted({len(hot) / heat.size: score(changed(picture, filled, hot)) for hot in sets}.items())
    return trapezoids(least) - trapezoids(most)


def top_loss(score: Score, picture: Array, filled: Array, heat: Array) -> float:
    """One step of deletion: the share of the score that is lost without the hottest fifth of the cells."""
    return 1 - at_share(lambda hot: score(changed(picture, filled, hot)), heat, 0.2) / score(picture)


def linear_imputation(picture: Array, removed: set[tuple[int, ...]], noise: Array) -> Array:
    """ROAD's imputation (Rong et al. 2022): x_p = sum_q w_pq x_q / sum_q w_pq over the neighbours in the picture.

    A neighbour that lies off along one more axis weighs half as much: in a picture 1/6 along an axis, and 1/12 on a
    diagonal. Noise is added where pixels were removed.
    """
    size = picture.shape[1:]
    row_of = {hole: row for row, hole in enumerate(sorted(removed))}
    if len(row_of) == math.prod(size):
        made = np.empty_like(picture)
        for channel in range(len(picture)):
            made[channel] = picture[channel].mean()
        return made + noise
    matrix, right = np.zeros((len(row_of), len(row_of))), np.zeros((len(row_of), len(picture)))
    for hole, row in row_of.items():
        for step in itertools.product((-1, 0, 1), repeat=len(size)):
            neighbour = tuple(place + along for place, along in zip(hole, step, strict=True))
            if not any(step) or not all(0 <= place < side for place, side in zip(neighbour, size, strict=True)):
                continue
            weight = 2.0 ** step.count(0) / 12
            matrix[row, row] += weight
            if neighbour in row_of:
                matrix[row, row_of[neighbour]] -= weight
            else:
                right[row] += weight * picture[(slice(None), *neighbour)]
    holes = list(row_of)
    solved = np.linalg.solve(matrix, right) if holes else right
    made = picture.copy()
    for row, cell in enumerate(holes):
        made[(slice(None), *cell)] = solved[row] + noise[(slice(None), *cell)]
    return made


def road(score: Score, picture: Array, heat: Array, noise: Array, shares: Sequence[float]) -> float:
    """ROAD: mean of LeRF - MoRF, where LeRF removes the coldest 1 - share and MoRF the hottest share."""
    cells = set(np.ndindex(*heat.shape))
    total = 0.0
    for share in shares:
        least = at_share(lambda hot: score(linear_imputation(picture, cells - hot, noise)), heat, share)
        most = at_share(lambda hot: score(linear_imputation(picture, hot, noise)), heat, share)
        total += least - most
    return total / len(shares)


def blurred(picture: Array, share: float) -> Array:
    """Gaussian blur along each axis; beyond the edge the nearest pixel repeats; the window has three deviations."""
    for axis in range(1, picture.ndim):
        length = picture.shape[axis]
        deviation = share * length
        reach = max(1, round(3 * deviation))
        weights = [math.exp(-((step / deviation) ** 2) / 2) for step in range(-reach, reach + 1)]
        made = np.zeros_like(picture)
        for place in range(length):
            for step, weight in zip(range(-reach, reach + 1), weights, strict=True):
                source = min(max(place + step, 0), length - 1)
                made[(slice(None),) * axis + (place,)] += weight / sum(weights) * picture.take(source, axis)
        picture = made
    return picture


def average_drop(score: Score, picture: Array, heat: Array) -> float:
    """Average drop of one picture (Chattopadhay et al. 2018): max(0, Y - O) / Y."""
    before, after = score(picture), score(picture * heat)
    return max(0.0, before - after) / before


def increase(score: Score, picture: Array, heat: Array) -> float:
    """Increase in confidence of one picture (Chattopadhay et al. 2018): 1 if Y < O."""
    return 1.0 if score(picture) < score(picture * heat) else 0.0


def complexity(heat: Array) -> float:
    """Complexity (Poppi et al. 2021): the L1 norm of the map, as a share of that of a map of ones."""
    return float(np.abs(heat).sum()) / heat.size


def pearson(first: Array, second: Array) -> float:
    """Pearson's correlation, cell by cell."""
    one, other = (values.ravel() - values.mean() for values in (first, second))
    return float((one * other).sum() / math.sqrt((one**2).sum() * (other**2).sum()))


def coherency(heat: Array, again: Array) -> float:
    """Coherency (Poppi et al. 2021): the correlation of a map with the map of the masked picture, brought to 0..1."""
    return (1 + pearson(heat, again)) / 2


def adcc(coherent: float, complex_: float, drop: float) -> float:
    """ADCC (Poppi et al. 2021): 3 (1/coherency + 1/(1 - complexity) + 1/(1 - average drop))^-1."""
    return 3 / (1 / coherent + 1 / (1 - complex_) + 1 / (1 - drop))


def max_sensitivity(heat: Array, others: Sequence[Array]) -> float:
    """Max-sensitivity (Yeh et al. 2019), relative: max |M(y) - M(x)| / |M(x)|."""
    return max(float(np.linalg.norm(other - heat)) for other in others) / float(np.linalg.norm(heat))


def ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of each value; equal values share their mean rank."""
    return [
        sum(other < value for other in values) + (sum(other == value for other in values) + 1) / 2 for value in values
    ]


def spearman(first: Array, second: Array) -> float:
    """Spearman's rank correlation: Pearson's of the ranks."""
    one, other = (ranks([float(v) for v in values.ravel()]) for values in (first, second))
    return pearson(np.array(one), np.array(other))


def mprt(heat: Array, others: Sequence[Array]) -> float:
    """MPRT (Adebayo et al. 2018): the mean similarity with the maps along the cascade."""
    return sum(spearman(heat, other) for other in others) / len(others)


def entropy(heat: Array, bins: int) -> float:
    """Entropy of the histogram of a map with equal bins between its extremes; the last bin includes its upper end."""
    low, high = float(heat.min()), float(heat.max())
    counts = [0] * bins
    for value in heat.ravel():
        counts[min(bins - 1, int((float(value) - low) / (high - low) * bins))] += 1
    return -sum(count / heat.size * math.log(count / heat.size) for count in counts if count)


def efficient_mprt(heat: Array, after: Array, bins: int) -> float:
    """Efficient MPRT (Hedstroem et al. 2024): the relative rise of complexity after full randomisation."""
    return (entropy(after, bins) - entropy(heat, bins)) / entropy(heat, bins)


def pointing(heat: Array, region: Array, tolerance: int) -> float:
    """Pointing game (Zhang et al. 2016): whether the maximum is near the region; ties count in part."""
    hottest = [cell for cell in np.ndindex(*heat.shape) if heat[cell] == heat.max()]
    inside = [cell for cell in np.ndindex(*heat.shape) if region[cell]]
    hits = [
        any(max(abs(a - b) for a, b in zip(cell, other, strict=True)) <= tolerance for other in inside)
        for cell in hottest
    ]
    return sum(hits) / len(hits)


def energy(heat: Array, region: Array) -> float:
    """Energy-based pointing game (Wang et al. 2020): the heat in the region over all heat."""
    return float(heat[region > 0].sum() / heat.sum())
