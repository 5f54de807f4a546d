"""What the experiment changes in a picture.

Each picture of the sample gets a handful of edits. The statistics of the whole picture (``CUES``) are replaced twice:
by those of a picture of the same class, and by those of a picture of another class. With regions, the object is pasted
on backgrounds of its own class and of other classes, and the object is removed. Without regions, the outer ring is
exchanged for the ring of a picture of its own class or of another class, and the middle is made grey.

All edits act on model inputs (C, H, W). A preprocessing changes colours the same way at every pixel, so pasting before
it and pasting after it give the same result.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import cv2
import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from camkit.background.data import Item, grouped
from camkit.images.filling import fill_smoothly
from camkit.images.read import LOSSLESS
from camkit.images.regions import Shades, extent
from camkit.kit.statistics import MIN_GROUPS, seed_of

Arm: TypeAlias = Literal["same", "other", "same-cue", "other-cue", "removed"]
"""What an edit does: paste the object on a background of its own class or of another class, or exchange the outer ring;
exchange a statistic with a picture of its own class or of another class; or remove the object."""


class Edit(NamedTuple):
    """An edit of a picture.

    Attributes:
        arm: what the edit does.
        fill: how holes are filled, or RING; for an exchanged statistic, its name.
        lender: the picture that lends its background or its statistic.
    """

    arm: Arm
    fill: str
    lender: str = ""


Edits: TypeAlias = dict[Edit, Callable[[], Float[Tensor, "c h w"]]]
"""For each edit, what makes the edited picture."""

MIN_RECTANGLE = 0.02
"""Share of the picture that a rectangle beside the objects must cover. The texture of a smaller rectangle does not
represent the background."""


def fill_with_texture(picture: Float[Tensor, "c h w"], hole: Bool[Tensor, "h w"]) -> Float[Tensor, "c h w"]:
    """Fill a hole with mirrored copies of the largest rectangle beside it, or smoothly if no rectangle is large enough.

    The backgrounds of ImageNet-9 are made this way (Xiao et al. 2020, arXiv:2006.09994); the mirrors avoid seams.
    """
    rectangle = largest_rectangle(hole)
    if rectangle is None:
        return fill_smoothly(picture, hole)
    left, top, right, bottom = rectangle
    rows, columns = (
        torch.from_numpy(np.pad(np.arange(start, end), (start, length - end), mode="symmetric"))
        for length, start, end in ((hole.shape[0], top, bottom), (hole.shape[1], left, right))
    )
    return torch.where(hole, picture[:, rows][:, :, columns], picture)


def largest_rectangle(hole: Bool[Tensor, "h w"]) -> tuple[int, int, int, int] | None:
    """Return the largest rectangle (left, top, right, bottom) without a hole; None if all are below MIN_RECTANGLE."""
    height, width = hole.shape
    # Cells along the shorter side of the grid on which that rectangle is searched
    step = max(1, min(height, width) // 32)
    cells = functional.max_pool2d(hole.float()[None, None], step)[0, 0].numpy() > 0
    rows, columns = cells.shape
    tops, bottoms = np.triu_indices(rows)
    counts = np.pad(cells.cumsum(0), ((1, 0), (0, 0)))
    free = counts[bottoms + 1] == counts[tops]  # for each range of rows, the columns without a hole
    run, longest, end = np.zeros(len(tops), int), np.zeros(len(tops), int), np.zeros(len(tops), int)
    for column in range(columns):
        run = np.where(free[:, column], run + 1, 0)
        end = np.where(run > longest, column + 1, end)
        longest = np.maximum(longest, run)
    areas = longest * (bottoms + 1 - tops)
    best = int(areas.argmax())
    if areas[best] * step * step < MIN_RECTANGLE * height * width:
        return None
    left, top, right, bottom = end[best] - longest[best], tops[best], end[best], bottoms[best] + 1
    return int(left) * step, int(top) * step, int(right) * step, int(bottom) * step


TILE, BLUR = "tile", "blur"
FILLS = {TILE: fill_with_texture, BLUR: fill_smoothly}
"""How the hole of an object is filled. Both ways must agree before a model fails."""

RING = "ring"
"""Stands in place of a fill's name if the data has no regions, so that the outer ring is exchanged."""


def outer_ring(size: tuple[int, int], share: float) -> Bool[Tensor, "h w"]:
    """Return the outer ring of a picture of ``size`` (height, width). Its width is ``share`` of each side."""
    height, width = size
    down, across = max(1, round(share * height)), max(1, round(share * width))
    outer = torch.ones(size, dtype=torch.bool)
    outer[down : height - down, across : width - across] = False
    return outer


@dataclass(frozen=True, eq=False)
class PreparedPicture:
    """One picture of the sample as the model sees it.

    Attributes:
        tensor: the model's input (C, H, W).
        shades: black and white after the preprocessing.
        region: how much of each pixel the objects of the picture's own class cover, 0..1; None without regions.
        hole: the slightly widened boxes of all objects of the checked classes; None without regions.
        silhouettes: the slightly widened outlines of the same objects; None without regions.
        quality: the quality of the JPEG file; LOSSLESS if the file is not a JPEG.
    """

    tensor: Float[Tensor, "c h w"]
    shades: Shades
    region: Float[Tensor, "h w"] | None = None
    hole: Bool[Tensor, "h w"] | None = None
    silhouettes: Bool[Tensor, "h w"] | None = None
    quality: float = LOSSLESS

    @functools.cached_property
    def values(self) -> dict[str, Float[np.ndarray, " k"]]:
        """The statistics of the whole picture. They are kept because the picture lends them to others."""
        pixels, where = self._pixels
        of_pixels = {name: cue.measure(pixels, where) for name, cue in CUES.items() if cue.measure is not None}
        return {**of_pixels, COMPRESSION: np.array([self.quality])}

    @property
    def _pixels(self) -> tuple[Float[np.ndarray, "h w 3"], Bool[np.ndarray, "h w"]]:
        """The picture with values 0..1, and where its statistics are measured."""
        hole = torch.zeros_like(self.shades.view) if self.hole is None else self.hole
        pixels = self.shades.pixels(self.tensor).permute(1, 2, 0).numpy()
        return np.ascontiguousarray(pixels), beside(hole.numpy(), self.shades.view.numpy())

    def with_value(self, cue: str, lender: PreparedPicture) -> Float[Tensor, "c h w"]:
        """Return the picture with another picture's value of a statistic."""
        pixels, where = self._pixels
        imposed = torch.from_numpy(np.ascontiguousarray(CUES[cue].impose(pixels, where, lender.values[cue])))
        tensor = self.shades.black + imposed.permute(2, 0, 1) * self.shades.contrast
        return torch.where(self.shades.view, tensor, self.tensor)

    def pasted_on(self, background: PreparedPicture, fill: str) -> Float[Tensor, "c h w"]:
        """Return the object on the background of another picture, at the same place.

        The background is resized and cropped to cover the same part of the input, if the two differ.
        """
        assert self.region is not None
        lent, whole, view = background.as_background[fill], background.shades.view, self.shades.view
        if not torch.equal(whole, view):
            (left, top, right, bottom), (start, first, end, last) = extent(whole), extent(view)
            height, width = last - first, end - start
            times = max(height / (bottom - top), width / (right - left))
            size = max(height, round(times * (bottom - top))), max(width, round(times * (right - left)))
            shown = lent[None, :, top:bottom, left:right]
            resized = functional.interpolate(shown, size, mode="bilinear", antialias=True)[0]
            down, across = (size[0] - height) // 2, (size[1] - width) // 2
            lent = self.tensor.clone()
            lent[:, first:last, start:end] = resized[:, down : down + height, across : across + width]
        return self.tensor * self.region + lent * (1 - self.region)

    @functools.cached_property
    def as_background(self) -> dict[str, Float[Tensor, "c h w"]]:
        """The picture with only its objects' silhouettes filled, for each fill, to paste other objects onto.

        The boxes cover far more: filling them would destroy much of the background.
        """
        assert self.silhouettes is not None
        return {fill: self.with_fill(fill, self.silhouettes) for fill in FILLS}

    def with_fill(self, fill: str, hole: Bool[Tensor, "h w"]) -> Float[Tensor, "c h w"]:
        """Return the picture with a hole filled."""
        filled = FILLS[fill](self.tensor, hole | ~self.shades.view)
        return torch.where(hole & self.shades.view, filled, self.tensor)

    @functools.cached_property
    def has_background(self) -> bool:
        """Whether enough of the picture lies beside its objects to serve as a background."""
        return self.has_room_beside(self.silhouettes)

    def has_room_beside(self, hole: Bool[Tensor, "h w"] | None) -> bool:
        """Return whether enough of the picture is left if a hole is removed."""
        return hole is not None and largest_rectangle(hole | ~self.shades.view) is not None


Backgrounds: TypeAlias = Mapping[str, PreparedPicture]
"""The pictures that lend their background or their statistics, by name."""


def edits_of(
    picture: PreparedPicture, same: Backgrounds, other: Backgrounds, cues: Sequence[str], ring: float
) -> Edits:
    """List the edits of a picture: another background, other statistics, or no object.

    Without a region, the outer ring counts as the background; its width is the share ``ring`` of each side.
    """
    arms: Sequence[tuple[Arm, Arm, Backgrounds]] = (("same", "same-cue", same), ("other", "other-cue", other))
    listed: Edits = {}
    if picture.region is None:
        outer = outer_ring((picture.tensor.shape[1], picture.tensor.shape[2]), ring)
        grey = (picture.shades.black + picture.shades.white) / 2
        for arm, _, backgrounds in arms:
            for lender, background in backgrounds.items():
                listed[Edit(arm, RING, lender)] = functools.partial(picture.tensor.where, ~outer, background.tensor)
        listed[Edit("removed", RING)] = functools.partial(picture.tensor.where, outer, grey)
    else:
        boxes = picture.hole if picture.has_room_beside(picture.hole) else None
        for fill in FILLS:
            for arm, _, backgrounds in arms:
                for lender, background in backgrounds.items():
                    listed[Edit(arm, fill, lender)] = functools.partial(picture.pasted_on, background, fill)
            if boxes is not None:
                listed[Edit("removed", fill)] = functools.partial(picture.with_fill, fill, boxes)
    # Statistics need three colours; the first background of each kind lends its own
    for cue in cues if len(picture.tensor) == 3 and same and other else ():
        for _, arm, backgrounds in arms:
            lender, background = next(iter(backgrounds.items()))
            listed[Edit(arm, cue, lender)] = functools.partial(picture.with_value, cue, background)
    return listed


Partners: TypeAlias = tuple[tuple[tuple[Item, ...], ...], tuple[tuple[Item, ...], ...]]
"""The pictures that lend their backgrounds to a picture: of its own class, and of other classes.

Each entry holds the candidates for one background, all of one class. The first entries that have a usable candidate are
used. From each, the first candidate with nearly the most room is taken.
"""

MOST_CANDIDATES = 8
"""The number of candidates for each background, in a large class. On photos of Caltech-101, 0.15 of the picture is then
filled and in sight behind the object, and 0.25 with a random candidate; a network with real weights is right for 0.57
instead of 0.52 of the objects on backgrounds of their own class (scripts/results/validation.md)."""


def draw_partners(sample: Sequence[Item], backgrounds: Sequence[Item], wanted: int, seed: int) -> dict[Item, Partners]:
    """Draw each picture's partners: always of another group, and in the second part of another class.

    The pictures of a class meet the other classes in turn. The first candidates from a class come in a random order, in
    which no background repeats before all have been first. The other candidates are drawn at random. A class with fewer
    than MIN_GROUPS groups is used only if there is no other. If either kind has no candidate, the picture gets no
    partners.
    """
    by_class = grouped(backgrounds, lambda item: item.label)
    groups = {label: len({item.group for item in items}) for label, items in by_class.items()}
    enough = [label for label, count in groups.items() if count >= MIN_GROUPS]
    # The number of groups of a class for each candidate. If n backgrounds differ in room and c of them are drawn each
    # time, the choice is as varied as a choice among n * (2 * c - 1) / c**2 backgrounds. Here these are at least 12;
    # intervals need 5 groups.
    counts = {label: min(MOST_CANDIDATES, max(1, count // 8)) for label, count in groups.items()}
    rotations: dict[tuple[str, str], Iterator[Item]] = {}

    def candidates(item: Item, label: str, kind: str, rng: np.random.Generator) -> tuple[Item, ...]:
        """Return backgrounds of a class from other groups: the next one in turn, and others drawn at random.

        The pictures of a class get the backgrounds of a class in a random order that repeats. Spare backgrounds have a
        rotation of their own ``kind``: with a common one, each picture would skip the spares of the picture before, and
        in a class of 12 pictures only 3 might ever serve.
        """
        of_class, pair = by_class.get(label, []), (item.label, label + kind)
        if of_class and pair not in rotations:
            last, *order = own_generator("\0".join(pair), seed).permutation(len(of_class)).tolist()
            rotations[pair] = itertools.cycle([of_class[number] for number in (*order, last)])
        tried = itertools.islice(rotations.get(pair, ()), len(of_class))
        first = next((background for background in tried if background.group != item.group), None)
        if first is None:
            return ()
        others = [background for background in of_class if background.group != item.group and background != first]
        drawn = rng.choice(len(others), min(counts[label] - 1, len(others)), replace=False) if others else ()
        return (first, *(others[number] for number in drawn))

    turns = Counter[str]()
    drawn: dict[Item, Partners] = {}
    for item in sample:
        others = sorted(set(enough) - {item.label}) or sorted(by_class.keys() - {item.label})
        start, turns[item.label] = turns[item.label], turns[item.label] + wanted
        # How many more backgrounds of either kind get candidates, because some classes have no usable background
        rng, turn = own_generator(item.name, seed), [""] * wanted + [" to spare"] * 3
        in_turn = [others[(start + entry) % len(others)] for entry in range(len(turn))] if others else []
        own, foreign = (
            tuple(filter(None, (candidates(item, label, kind, rng) for kind, label in zip(turn, labels, strict=False))))
            for labels in ([item.label] * len(turn), in_turn)
        )
        drawn[item] = (own, foreign) if own and foreign else ((), ())
    return drawn


def own_generator(name: str, seed: int) -> np.random.Generator:
    """Return a random generator that depends on a name and the seed alone."""
    return np.random.default_rng([seed, seed_of(name)])


Picture = Float[np.ndarray, "h w 3"]
Where = Bool[np.ndarray, "h w"]
Value = Float[np.ndarray, " k"]


_BLUR = 1.0
"""Sharpness and noise compare a picture with a copy that is blurred by this deviation, in pixels."""


def brightness(picture: Picture) -> Float[np.ndarray, "h w"]:
    """Return the brightness of each pixel."""
    # The weights of red, green and blue in the brightness (ITU-R BT.601)
    return np.asarray(picture @ np.array([0.299, 0.587, 0.114], np.float32), np.float32)


def _blurred(picture: Float[np.ndarray, "h w *c"], deviation: float) -> Float[np.ndarray, "h w *c"]:
    return np.asarray(cv2.GaussianBlur(picture, (0, 0), deviation, borderType=cv2.BORDER_REFLECT))


def _sharpness(bright: Float[np.ndarray, "h w"], where: Where) -> float:
    """Return how much of the variation between neighbours a second blur removes (Crete et al. 2007, 10.1117/12.702790).

    It is near 1 for the sharpest picture, and near 0 for a blurred one. It hardly depends on what the picture shows.
    """
    again = _blurred(bright, _BLUR)
    before = after = 1e-6
    for (own, inside), (blurred, _) in zip(_neighbours(bright, where), _neighbours(again, where), strict=True):
        before += float(_sums(own, inside)[0])
        after += float(_sums(np.minimum(own, blurred), inside)[0])
    return 1 - after / before


def _neighbours(values: Float[np.ndarray, "h w *c"], where: Where) -> Iterator[tuple[np.ndarray, Where]]:
    """Yield how much neighbours differ, along the rows and along the columns, and where both are inside."""
    yield cv2.absdiff(values[1:], values[:-1]), where[1:] & where[:-1]
    yield cv2.absdiff(values[:, 1:], values[:, :-1]), where[:, 1:] & where[:, :-1]


def _sums(values: Float[np.ndarray, "h w *c"], where: Where) -> Value:
    """Return the sum of each channel over some pixels. OpenCV does this in a tenth of the time of NumPy's indexing."""
    channels = values.shape[2] if values.ndim == 3 else 1
    return np.array(cv2.mean(values, where.view(np.uint8))[:channels]) * np.count_nonzero(where)


def impose_sharpness(picture: Picture, where: Where, value: Value) -> Picture:
    """Blur or sharpen a picture until it has the given sharpness, within the largest blur and sharpening."""
    bright, target = brightness(picture), float(value[0])
    if _sharpness(bright, where) > target:
        # The largest deviation in pixels of the blur that is imposed; beyond it objects of 48 pixels are unrecognisable
        deviation = _bisected(0.05, 4.0, lambda strength: _sharpness(_blurred(bright, strength), where) > target)
        return _blurred(picture, deviation)
    detail = bright - _blurred(bright, _BLUR)
    # The largest weight of the detail that is added to a picture to sharpen it; beyond it edges get halos
    weight = _bisected(0.0, 3.0, lambda strength: _sharpness(bright + strength * detail, where) < target)
    return np.asarray((picture + weight * (picture - _blurred(picture, _BLUR))).clip(0, 1), np.float32)


def _bisected(low: float, high: float, goes_on: Callable[[float], bool]) -> float:
    """Return the largest strength at which a condition still holds; it holds for small strengths."""
    for _ in range(8):  # the value is met to within 1/256 of the range
        middle = (low + high) / 2
        low, high = (middle, high) if goes_on(middle) else (low, middle)
    return (low + high) / 2


_MAD = 0.6745
"""The median of the absolute values of normal numbers with deviation 1."""


def _residual(bright: Float[np.ndarray, "h w"]) -> Float[np.ndarray, "h w"]:
    # Immerkaer's mask (1996, 10.1006/cviu.1996.0060): it removes everything that is linear, and white noise keeps its
    # deviation
    return np.asarray(
        cv2.filter2D(
            bright, -1, (np.array([[1, -2, 1], [-2, 4, -2], [1, -2, 1]], np.float32) / 6), borderType=cv2.BORDER_REFLECT
        )
    )


def _deviation(residual: Float[np.ndarray, " n"]) -> float:
    return float(np.median(np.abs(residual))) / _MAD


def _is_below(residual: Float[np.ndarray, " n"], deviation: float) -> bool:
    """Whether the deviation is below a value. Counting is faster than finding the median."""
    return 2 * int(np.count_nonzero(np.abs(residual) < deviation * _MAD)) > len(residual)


def impose_noise(picture: Picture, where: Where, value: Value) -> Picture:
    """Add grey noise to a picture, or smooth it, until its noise has the given deviation."""
    residual, target = _residual(brightness(picture))[where], float(value[0])
    if _deviation(residual) < target:
        # Seeds the noise that is added. All pictures may have the same noise.
        noise = np.random.default_rng(1).standard_normal(picture.shape[:2], dtype=np.float32)
        of_noise = _residual(noise)[where]
        strength = _bisected(0.0, 2 * target, lambda much: _is_below(residual + much * of_noise, target))
        return np.asarray((picture + strength * noise[..., None]).clip(0, 1), np.float32)
    smooth = _blurred(picture, _BLUR)
    change = _residual(brightness(smooth))[where] - residual
    share = _bisected(0.0, 1.0, lambda much: not _is_below(residual + much * change, target))
    return np.asarray(picture + share * (smooth - picture), np.float32)


def measure_colour(picture: Picture, where: Where) -> Value:
    """Return the colour cast: the contrast of each channel at edges, as shares of their sum.

    Edges show the colour of the light better than means, which show the colours of the things in the picture (van de
    Weijer, Gevers and Gijsenij 2007, 10.1109/TIP.2007.901808).
    """
    contrast = sum(
        (_sums(differences, inside) for differences, inside in _neighbours(picture, where)), np.full(3, 1e-3)
    )
    return np.asarray(contrast / contrast.sum())


def impose_colour(picture: Picture, where: Where, value: Value) -> Picture:
    """Multiply the channels of a picture to give it a colour cast; the mean brightness stays the same."""
    # The largest and the smallest factor by which a channel is changed; a stronger cast is rare and would clip
    gains = (value / measure_colour(picture, where)).clip(0.5, 2.0)
    cast = np.asarray(picture * gains, np.float32)
    same = float(brightness(picture).mean()) / max(1e-6, float(brightness(cast).mean()))
    return np.asarray((cast * same).clip(0, 1), np.float32)


def impose_compression(picture: Picture, where: Where, value: Value) -> Picture:  # noqa: ARG001 - as all others
    """Compress a picture as a JPEG of the given quality; LOSSLESS leaves it as it is."""
    if float(value[0]) >= LOSSLESS:
        return picture
    levels = np.round(picture[..., ::-1] * 255).astype(np.uint8)
    _, encoded = cv2.imencode(".jpg", levels, [cv2.IMWRITE_JPEG_QUALITY, round(float(value[0]))])
    decoded = np.asarray(cv2.imdecode(encoded, cv2.IMREAD_COLOR), np.float32)
    return np.asarray(decoded[..., ::-1] / 255, np.float32)


class Cue(NamedTuple):
    """One statistic. ``measure`` is None if the value belongs to the picture's file and not to its pixels."""

    measure: Callable[[Picture, Where], Value] | None
    impose: Callable[[Picture, Where, Value], Picture]


COMPRESSION = "compression"

CUES: Mapping[str, Cue] = {
    "sharpness": Cue(lambda picture, where: np.array([_sharpness(brightness(picture), where)]), impose_sharpness),
    # The deviation of the noise in the brightness, by the median, which edges hardly move
    "noise": Cue(lambda picture, where: np.array([_deviation(_residual(brightness(picture))[where])]), impose_noise),
    "colour": Cue(measure_colour, impose_colour),
    COMPRESSION: Cue(None, impose_compression),
}
"""The statistics that are exchanged, by name."""


def beside(hole: Where, view: Where) -> Where:
    """Return where a statistic is measured: beside the objects, or everywhere if too little lies beside them."""
    outside = view & ~hole
    # If fewer pixels lie beside the objects, a statistic is measured over the whole picture
    return outside if np.count_nonzero(outside) >= 64 else view
