"""The result of explaining one picture for one target, and how it is made from what a pass captured."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, SupportsIndex, TypeAlias, TypeVar, get_args, overload

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor

from camkit.drawing import figure, overlay
from camkit.drawing.encode import Drawable, as_html, encode, pixels_of, size_of
from camkit.drawing.figure import ColourScale, Resize, draw
from camkit.drawing.text import short_name
from camkit.engine import heatmap as heat
from camkit.engine.passes import Capture
from camkit.errors import InputError, MethodError, TargetError, advice
from camkit.images.files import write_picture
from camkit.images.prepare import Prepared, References, as_pixels, as_volume_pixels
from camkit.images.read import open_picture
from camkit.layers.decision import UNSURE
from camkit.layers.names import Layers
from camkit.methods import AUTO, SHARPENED, WEIGHTED, Method, find_method, known_method
from camkit.methods.registry import FROM_FILE
from camkit.methods.runs import CHANGES, SignedMaps
from camkit.options import ALLOWED, USUAL
from camkit.tables import Rows, Tabular, flat
from camkit.targets.classes import TopTarget, fixed_target
from camkit.targets.scores import Scores, Target
from camkit.trackers import Log, Loggable
from camkit.types import (
    EVEN,
    WHOLE_MODEL,
    Box,
    ClipFrame,
    Extent,
    Failure,
    Fusion,
    Opacity,
    Pixels,
    Placement,
    ReferenceScores,
    Scale,
    Smoothing,
    Status,
    Style,
    TargetLayer,
)

if TYPE_CHECKING:
    from camkit.options.settings import Settings

_NOTEBOOK_SIDE = 480
"""The longest side of a picture shown in a notebook, in pixels: it fits beside the code."""


def finite_or_none(number: float | None) -> float | None:
    """Return a number as JSON can hold it: None for NaN and infinity."""
    return number if number is not None and math.isfinite(number) else None


@dataclass(frozen=True, eq=False)
class LayerMaps:
    """The signed maps of the layers on their grids, from which the heatmap is drawn.

    Attributes:
        raws: a map (h, w) for each layer.
        placements: where the cells of each layer's grid lie on the input.
        fuse: how the maps of several layers are combined.
        size: the size of the model's input.
    """

    raws: tuple[Tensor, ...]
    placements: tuple[Placement, ...]
    fuse: Fusion
    size: tuple[int, ...]

    def heatmap(self, limits: Sequence[float] | None = None) -> Float[np.ndarray, "*size"]:
        """Return the heatmap at the size of the model's input; 1 stands for its maximum, or the layers' ``limits``."""
        raws = [raw[None] for raw in self.raws]
        return np.asarray(heat.fuse_heatmaps(raws, self.size, self.fuse, self.placements, limits)[0].numpy())

    @functools.cached_property
    def maxima(self) -> tuple[float, ...]:
        """The largest value of each layer's map at the size of the input, in the map's units; 0 if it is empty."""
        pairs = zip(self.raws, self.placements, strict=True)
        return tuple(float(heat.positive(raw[None], self.size, placement).max()) for raw, placement in pairs)


@dataclass(frozen=True, eq=False)
class Choices:
    """How pictures are explained: what the caller gave, else what the config says, else what is usual.

    Attributes:
        method: the method.
        target_layer: the layers that are named; None lets camkit choose.
        options: the other options, by name.
    """

    method: Method
    target_layer: Layers | None
    options: Mapping[str, Any]

    @classmethod
    def of(cls, target_layer: Layers | None, given: Mapping[str, Any], settings: Settings | None) -> Choices:
        """Merge the options of a call with a config; those that are None were not given.

        Raises:
            InputError: a choice is unknown, or the method cannot use it.
        """
        asked = {**given, "layer": target_layer}
        usual = {} if settings is None else vars(settings.explain)
        names = ("method", "layer", *USUAL)
        merged = {name: each[name] for each in (USUAL, usual, asked) for name in names if each.get(name) is not None}
        method = find_method(merged.pop("method", AUTO))
        if asked.get("references") is None and not method.compares:
            merged.pop("references", None)
        layer = merged.pop("layer", None)
        if asked.get("method") is not None and target_layer is None and not method.layer:
            layer = None  # the config's
        return cls(method, layer, USUAL | merged).checked()

    def but(self, **options: Any) -> Choices:
        """Return the same with other options."""
        return replace(self, options={**self.options, **options})

    def checked(self) -> Choices:
        """Return the choices, if they are possible."""
        for name, allowed in ALLOWED.items():
            value = self.options[name]
            if value is not None and value not in allowed:
                raise InputError(f"{name} must be one of {', '.join(allowed)}, not {value!r}")
        if self.target_layer is not None and not self.method.layer:
            rest = advice("pass no target_layer", "leave out --layer")
            raise MethodError(f"method {self.method.name!r} reads the whole model and no layer; {rest}")
        references = self.options["references"]
        if references is not None and not isinstance(references, References) and not self.method.compares:
            rest = advice("leave out references", "leave out --references")
            raise MethodError(f"method {self.method.name!r} uses no reference pictures; use 'expected', or {rest}")
        return self


@dataclass(frozen=True, eq=False)
class Made:
    """How an explanation was made, so that metrics can make maps of other pictures in the same way.

    It is not saved in tables or sent to other processes, because a method may be any function.

    Attributes:
        choices: those of its Explainer, with the method that was used, and without the layer, which may hold the model.
        asked: the target that the caller passed.
        scored: its score of the picture.
    """

    choices: Choices
    asked: Target
    scored: Scores

    @property
    def target(self) -> Target | None:
        """The class, fixed for changed versions of the picture; None for a box, or for what is not a class."""
        is_class = self.scored.indices is not None and self.scored.boxes is None
        return fixed_target(self.asked, self.scored) if is_class else None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Become None in a copy for another process."""
        return type(None), ()


Kind: TypeAlias = Literal["text", "whole", "real", "reals", "wholes", "halves"]
"""What a field holds: text, a whole number, a real number, or lists of these; halves are real numbers in 16 bits."""


class Field(NamedTuple):
    """A field of an Explanation, as every outlet writes it.

    Attributes:
        name: its name, as a key of JSON and a column of tables.
        kind: what it holds; None stands for a missing value of any kind.
        get: returns its value, which JSON can hold.
        parts: the names of the numbers of a list that has always the same number of them.
    """

    name: str
    kind: Kind
    get: Callable[[Explanation], Any]
    parts: tuple[str, ...] = ()


TEXT, WHOLE, REAL = ({"kind": kind} for kind in ("text", "whole", "real"))
"""The metadata of an attribute that is one of the fields; ``FIELDS`` and all outlets have it then."""


@dataclass(frozen=True, eq=False)
class Explanation(Loggable):
    """Why a model gave a picture its score for one target.

    Attributes:
        maps: the layers' maps that the heatmap is drawn from.
        raw: (h, w) float32, the signed map on the layer's grid, before any scaling, so that pictures can be compared;
            ``camkit.METHODS[method].unit`` says what the values are. For several layers, their maps are each divided by
            their largest absolute value and then fused. If the model pads its input, the grid covers the padded input.
        target: the class index, or None for a target function.
        label: the name of the class or of the target function; None if it has no name.
        score: the target's value; for a class, its logit, or its probability if the model returns probabilities.
        probability: softmax of the logits (sigmoid for a single logit), or what the model returns if that is a
            probability already; None for a target function.
        layer: the layer's name; several names are joined by "+".
        layer_reason: why this layer was chosen.
        method: the method's name.
        smooth: how the map is smoothed; None if it is not.
        status: "ok", or the reason why the heatmap is zero everywhere: "no_positive_evidence" if no cell supports the
            target, "no_influence" if the target's gradient at the layer is zero (it does not depend on the layer, or is
            a saturated probability), "non_finite" if the map contains NaN or infinity.
        box: the part of the original picture that the model saw, in pixels of that picture; None if the preprocessing
            rotates or warps, or if its crop depends on the picture's content, such as trimmed borders. ``picture`` is
            then the model's input.
        shown: the original picture, or the file that has it, or the model's input (C, H, W) or (C, D, H, W);
            ``picture`` is drawn from it.
        source: the file's name; without one, for example "picture 3" for the third picture of the call.
        detection: for a detector, the explained box, in pixels of ``picture``.
        missed: for a box that the detector does not find, what keeps it from being found; None for any other.
        placement: where the cells of ``raw`` lie on the model's input; ``positions`` has the same in pixels.
        quantity: what ``score`` is, as a phrase such as "logit".
        together: the maps of all targets that were explained for the picture at this layer and with this method, which
            share one scale when they are drawn; empty if there is only one, and for a detector's boxes.
        reduction: how many times the sides of the picture's file are longer than those of ``picture``, if a JPEG was
            read at a reduced size (``draft``).
        references: for a method that compares the picture with reference pictures, these and their mean score;
            ``residual`` says how much of the difference no cell shows.
        frames: for a model of clips, the frames that it saw; ``drawn_frames`` draws each.
        without_picture: for a model with other inputs, the score of the same class if the picture has one colour, its
            mean; ``beside_picture`` is this as a share of the score.
        unit: what the values of ``raw`` are, as a phrase, if ``camkit.METHODS`` does not have the method.
        made: how the map was made; None if it was read from a table.
    """

    maps: LayerMaps = field(repr=False)
    raw: Float[np.ndarray, "..."]
    target: int | None = field(metadata=WHOLE)
    label: str | None = field(metadata=TEXT)
    score: float = field(metadata=REAL)
    probability: float | None = field(metadata=REAL)
    layer: str = field(metadata=TEXT)
    layer_reason: str = field(metadata=TEXT)
    method: str = field(metadata=TEXT)
    status: Status = field(metadata=TEXT)
    box: Box | None
    shown: Image.Image | Tensor | Path | None = field(repr=False)
    source: str = field(metadata=TEXT)
    detection: Box | None = None
    placement: Placement = EVEN
    quantity: str = field(default="score", metadata=TEXT)
    smooth: Smoothing | None = field(default=None, metadata=TEXT)
    together: tuple[LayerMaps, ...] = field(default=(), repr=False)
    reduction: float = 1.0
    references: ReferenceScores | None = None
    frames: tuple[ClipFrame, ...] = ()
    without_picture: float | None = field(default=None, metadata=REAL)
    missed: str | None = field(default=None, metadata=TEXT)
    unit: str | None = field(default=None, metadata=TEXT)
    made: Made | None = field(default=None, repr=False)

    @property
    def doubt(self) -> str:
        """A question if the best of many classes has little more than its share, as with random weights; else "".

        With 1,000 classes, the best one of a trained model has at least 40 times its share, even on photos without an
        object. Among few classes, a model may really be undecided.
        """
        classes = self.made.scored.classes if self.made is not None and self.made.asked == TopTarget() else None
        if classes is None or classes < 100 or self.probability is None or self.probability > 2 / classes:
            return ""
        return f"all {classes} classes have about the same score: were weights loaded?"

    @property
    def beside_picture(self) -> float | None:
        """The share of the score that the model's other inputs carry: ``without_picture`` divided by ``score``.

        None if the model has no other inputs, or if the two differ in sign, so that there is no share.
        """
        if self.without_picture is None or self.without_picture * self.score <= 0:
            return None
        return self.without_picture / self.score

    @property
    def residual(self) -> float | None:
        """How much of the score's difference from its mean over the references is at no cell of ``raw``.

        It is the difference, less the sum of ``raw`` and less ``references.elsewhere``; None without references. Paths
        beside the layer carry it, and the mean over few references estimates an integral.
        """
        if self.references is None:
            return None
        compared = self.references
        return compared.score - compared.mean - compared.elsewhere - float(self.raw.sum(dtype=np.float64))

    @property
    def positions(self) -> tuple[Float[np.ndarray, " cells"], ...]:
        """Where each cell of ``raw`` is drawn, along each axis: 0 is the middle of the input's first pixel."""
        return tuple(map(np.asarray, self.placement.centres(self.raw.shape, self.maps.size)))

    @property
    def extent(self) -> Extent:
        """Where the input starts and ends along each axis of ``raw``, as shares; empty if it covers the whole map."""
        return self.placement.extent

    @functools.cached_property
    def heatmap(self) -> Float[np.ndarray, "*size"]:
        """(H, W) float32 at the size of the model's input, 0..1; 0 always means no evidence.

        (L,) for a signal, (D, H, W) for a volume. It is drawn from ``maps`` on first use.
        """
        return self.maps.heatmap()

    @functools.cached_property
    def picture(self) -> Pixels | None:
        """The original picture or else the model's input, H x W x 3 uint8 RGB; None if it is neither grey nor RGB.

        Raises:
            ImageError: the explanation was read from a table, and the file of its picture cannot be read.
        """
        drawable = self._drawable
        return None if drawable is None else pixels_of(drawable)

    @functools.cached_property
    def _drawable(self) -> Drawable | None:
        if isinstance(self.shown, Path):
            return open_picture(self.shown)
        if not isinstance(self.shown, Tensor):
            return self.shown
        if self.shown.dim() != 3:
            return None
        drawn = as_pixels(self.shown[None])
        return None if drawn is None else drawn[0]

    def released(self, file: Path) -> Explanation:
        """Return the explanation without the picture in memory: it is read from its file when it is next drawn.

        A picture that was read as a draft stays, since the box lies on it.
        """
        if not isinstance(self.shown, Image.Image) or self.reduction != 1:
            return self
        released = copy.copy(self)  # with the heatmap, if it was computed already
        object.__setattr__(released, "shown", file)
        for name in ("picture", "_drawable"):
            released.__dict__.pop(name, None)
        return released

    @property
    def picture_size(self) -> tuple[int, int] | None:
        """The height and width of ``picture``; None if there is none."""
        return None if self._drawable is None else size_of(self._drawable)

    def heatmap_on_picture(self, *, unseen: float = 0.0) -> Float[np.ndarray, "*size"]:
        """Return the heatmap aligned with the original picture, float32, 0..1.

        Args:
            unseen: the value of pixels that the model did not see. The default is 0, since 0 always means no evidence;
                pass ``math.nan`` to tell them from pixels that the model saw without evidence.

        Returns:
            An array (H, W) with the size of ``picture``; or ``heatmap``, if it is drawn on the model's input.

        Example:
            >>> import camkit, numpy as np
            >>> photo = np.zeros((200, 300, 3), np.uint8)
            >>> camkit.explain("demo-fair", photo).heatmap_on_picture().shape
            (200, 300)
        """
        if self.box is None or isinstance(self.shown, Tensor) or self.picture_size is None:
            return self.heatmap
        placed = overlay.stretch(self.heatmap, self.box, self.picture_size)
        return np.where(np.isnan(placed), np.float32(unseen), placed)

    def colour_scale(self, scale: ScaleLike = "shared") -> ColourScale:
        """Return the scale on which ``overlay`` and ``save`` draw the map.

        Raises:
            InputError: ``scale`` is none of the possible values.
        """
        if isinstance(scale, ColourScale):
            return scale
        if isinstance(scale, str) and scale not in get_args(Scale):
            raise InputError(f"scale is 'shared', 'each' or a list of explanations, not {scale!r}")
        others = self.together if scale == "shared" else ()
        if not isinstance(scale, str):
            others = tuple(row.maps for row in scale if row._units == self._units)
        different = {id(maps): maps.maxima for maps in (self.maps, *others)}
        return ColourScale.reaching(list(different.values()))

    @property
    def _units(self) -> tuple[str, str, Smoothing | None]:
        """Maps of another layer, method or smoothing have other units."""
        return self.layer, self.method, self.smooth

    def overlay(
        self,
        *,
        style: Style = "overlay",
        colormap: str = "turbo",
        alpha: float = 0.5,
        opacity: Opacity = "evidence",
        scale: ScaleLike = "shared",
        max_side: int | None = None,
    ) -> Pixels:
        """Draw the heatmap on the original picture. A volume is drawn as a sheet of slices along its first axis.

        Args:
            style: "overlay", "side-by-side", "heatmap", or "figure": the overlay with a caption and a colour bar.
            colormap: the name of one of OpenCV's colormaps.
            alpha: the weight of the colours, 0..1.
            opacity: "evidence" fades the colours out where the heat is low, so that the picture stays as it is where
                there is none; "even" gives all colours the same weight.
            scale: what the strongest colour stands for: "shared", the largest value among all targets that were
                explained for this picture (a detector's box has its own); "each", the largest value of this map; or
                a list of explanations, the largest value among them. Maps of another layer or method do not count.
            max_side: the most pixels of the picture's longer side; a larger picture is reduced. None keeps its size.

        Returns:
            The picture, H x W x 3 uint8 RGB. A figure has a size of its own.

        Raises:
            InputError: the style, colormap, opacity or scale is unknown, alpha or max_side is out of range, or the map
                has one axis.
        """
        overlay.check(style, colormap, alpha, opacity, max_side)
        resize: Resize | None = None
        if style == "figure":
            resize = functools.partial(figure.fitted, most=figure.side_within(max_side))
        elif max_side is not None:
            resize = functools.partial(overlay.limited, most=max_side)
        return self._draw(style, colormap, alpha, opacity, scale, resize)

    def captioned(
        self,
        *,
        colormap: str = "turbo",
        alpha: float = 0.5,
        opacity: Opacity = "evidence",
        scale: ScaleLike = "shared",
        side: int = figure.LARGEST_SIDE,
        fixed: bool = False,
    ) -> Pixels:
        """Draw the overlay with its caption and a colour bar.

        Args:
            colormap, alpha, opacity, scale: as for ``overlay``.
            side: the largest longer side of the picture in the figure; the figure itself is a little larger.
            fixed: give every text a fixed number of lines, so that the figures of all frames of a video have one size.

        Returns:
            The figure, height x width x 3 uint8 RGB.

        Raises:
            InputError: as for ``overlay``.
        """
        resize = functools.partial(figure.fitted, most=side)
        return self._draw("figure", colormap, alpha, opacity, scale, resize, fixed=fixed)

    def _draw(
        self,
        style: Style,
        colormap: str,
        alpha: float,
        opacity: Opacity,
        scale: ScaleLike,
        resize: Resize | None = None,
        *,
        fixed: bool = False,
        frame: int | None = None,
    ) -> Pixels:
        """Draw the map, or a frame of it, on the picture as ``resize`` returns it; with the words of a figure."""
        overlay.check(style, colormap, alpha, opacity)
        used = self.colour_scale(scale)
        heat = self.heatmap if used.maps == 1 else self.maps.heatmap(used.limits)
        paint = functools.partial(
            draw,
            style="overlay" if style == "figure" else style,
            colormap=colormap,
            alpha=alpha,
            opacity=opacity,
            resize=resize,
        )
        if frame is not None and self._volume is not None:
            panel = paint(heat[frame], self._volume[frame])
        else:
            names = tuple(map(str, self.frames))
            panel = paint(heat, self._drawable, self.box, self.detection, volume=self._volume, names=names)
        if style != "figure":
            return panel
        caption = self.caption(used)
        if self.status != "ok":
            return figure.compose(panel, caption, fixed=fixed)
        if self._drawable is None and self._volume is None:
            opacity = "even"  # the colours are drawn alone
        caption = replace(caption, meaning=self.meaning(colormap, opacity))
        reached = self.maps.maxima[0] if used.maps > 1 and len(used.limits) == 1 else None
        method = known_method(self.method)
        unit = self.unit or (WEIGHTED if method is None else method.unit)
        colours: dict[str, Any] = {"colormap": colormap, "opacity": opacity, "reached": reached}
        return figure.compose(panel, caption, used, unit=unit, fixed=fixed, **colours)

    @functools.cached_property
    def _volume(self) -> UInt8[np.ndarray, "d h w 3"] | None:
        return as_volume_pixels(self.shown) if isinstance(self.shown, Tensor) and len(self.maps.size) == 3 else None

    def meaning(self, colormap: str = "turbo", opacity: Opacity = "evidence") -> str:
        """Return what the colours mean as a sentence, for people who see such a picture for the first time."""
        # Everybody would call the ends of two colour maps so
        most, least = ("Red", "blue") if colormap in ("turbo", "jet") else ("Right end of the bar", "left end")
        if opacity == "evidence":
            least = f"{least}: little; no colour" if least == "blue" else "no colour"
        name = self.name if len(self.name) <= 40 else "it"
        return f"{most}: most evidence for {name}; {least}: none." + (f" But {self.doubt}" if self.doubt else "")

    def drawn_frames(
        self,
        *,
        style: Style = "overlay",
        colormap: str = "turbo",
        alpha: float = 0.5,
        opacity: Opacity = "evidence",
        scale: ScaleLike = "shared",
    ) -> Iterator[Pixels]:
        """Draw each frame of a clip, all on one scale. The arguments are those of ``overlay``.

        Raises:
            InputError: the style, colormap, opacity or scale is unknown, alpha is out of range, or the map is not of a
                clip.
        """
        if not self.frames or self._volume is None:
            raise InputError("the explanation has no frames of a clip to draw; use overlay")
        resize = functools.partial(figure.fitted, most=figure.LARGEST_SIDE) if style == "figure" else None
        for number in range(len(self._volume)):
            yield self._draw(style, colormap, alpha, opacity, scale, resize, fixed=True, frame=number)

    def caption(self, scale: ColourScale | None = None) -> figure.Caption:
        """Return the words of the figure: what is explained, how, and what to know when reading the map."""
        known = known_method(self.method)
        method = self.method if known is None else known.title
        cells = "x".join(map(str, self.raw.shape))
        *others, layer = map(short_name, self.layer.split("+"))
        where = f"layer {layer}, {cells} cells"
        if self.method == SHARPENED.name:
            method, where = "Grad-CAM", f"layer {layer}, sharpened by {others[0]}, {cells} cells"
        elif others:
            where = f"layers {' and '.join([*others, layer])}, fused"
        if self.layer == str(WHOLE_MODEL):
            where = f"no single layer, {cells} cells"
        if self.method == FROM_FILE.name:
            method, where = "Heat", f"{cells} cells, as the file returns it"
        smooth, value = self.smooth or "", f"{self.quantity}: {figure.number(self.score)}"
        where += ", first principal component" * ("eigen" in smooth)
        where += f", mean over {1 + len(CHANGES)} versions of the picture" * ("augment" in smooth)
        return figure.Caption(
            title=self.name if self.probability is None else f"{self.name}: {figure.percent(self.probability)}",
            lines=(f"{method} at {where}", f"{value} · {Path(self.source).name}"),
            warnings=tuple(self._warnings(scale)),
            remarks=tuple(self._remarks()),
        )

    def _warnings(self, scale: ColourScale | None) -> Iterator[str]:
        if self.status != "ok":
            yield {
                "no_positive_evidence": "Empty map: nothing in the picture speaks for this target at this layer.",
                "no_influence": "Empty map: the target's gradient is zero at this layer.",
                "non_finite": "No map: it contains NaN or infinity.",
            }[self.status]
        # Below a twentieth of the scale, colours can hardly be seen
        elif scale is not None and len(scale.limits) == 1 and self.maps.maxima[0] * 20 < scale.limits[0]:
            yield "The map is too weak to be visible on this scale."
        if self.missed is not None:
            yield f"{self.missed[0].upper()}{self.missed[1:]}."
        if UNSURE in self.layer_reason:
            yield "Unsure: camkit could not measure where in the picture the layer's cells lie."
        if self.box is None and self.heatmap.ndim == 2:
            yield "Drawn on the model's input: camkit cannot tell which part of the picture it shows."

    def _remarks(self) -> Iterator[str]:
        if self.references is not None:
            compared, cells = self.references, float(self.raw.sum(dtype=np.float64))
            above = compared.score - compared.mean
            yield (
                f"Compared with {compared.pictures}: {compared.quantity} {figure.number(abs(above))} "
                f"{'below' if above < 0 else 'above'} their mean; the cells sum to {figure.number(cells)}."
            )
        if self.without_picture is not None:
            share = "" if self.beside_picture is None else f", {self.beside_picture:.0%} of it"
            yield f"Without the picture, the other inputs give {figure.number(self.without_picture)}{share}."
        if self.detection is not None:
            corners = ", ".join(f"{side:.0f}" for side in self.detection)
            yield f"Outlined: the box (left, top, right, bottom: {corners})."
        size = None if isinstance(self.shown, Tensor) else self.picture_size
        if self.box is not None and size is not None and overlay.hides(self.box, size):
            yield "Dark edge: cut off, so the model did not see it."

    def save(
        self,
        path: str | Path,
        *,
        style: Style = "overlay",
        colormap: str = "turbo",
        alpha: float = 0.5,
        opacity: Opacity = "evidence",
        scale: ScaleLike = "shared",
        max_side: int | None = None,
    ) -> Path:
        """Write the drawing to a file; the suffix decides the type. ``overlay`` explains the arguments.

        Missing folders are created. If writing fails, no partial file is left.

        Raises:
            OutputError: the file cannot be written, or its type is unknown.
        """
        drawn = self.overlay(
            style=style, colormap=colormap, alpha=alpha, opacity=opacity, scale=scale, max_side=max_side
        )
        return write_picture(path, drawn)

    @property
    def peak(self) -> tuple[float, float] | None:
        """The largest value's position (x, y) on the original picture (or the input); None for an empty map."""
        if self.status != "ok" or self.heatmap.ndim != 2:
            return None
        row, column = np.unravel_index(int(self.heatmap.argmax()), self.heatmap.shape)
        height, width = self.heatmap.shape
        box = self.box or Box(0, 0, width, height)
        return (
            float(box.left + (column + 0.5) * (box.right - box.left) / width),
            float(box.top + (row + 0.5) * (box.bottom - box.top) / height),
        )

    def in_file(self, corners: Sequence[float | int] | None) -> list[float] | None:
        """Return a box or a position on ``picture`` in pixels of the picture's file; None stays None."""
        return None if corners is None else [self.reduction * number for number in corners]

    @property
    def name(self) -> str:
        """The label of the target; without one, "class" and its number."""
        return self.label if self.label is not None else f"class {self.target}"

    def values(self) -> dict[str, Any]:
        """Return every field of ``FIELDS`` as a plain value, without the map; numbers that are not finite are None."""
        values = {each.name: each.get(self) for each in FIELDS}
        return {name: finite_or_none(value) if isinstance(value, float) else value for name, value in values.items()}

    def to_log(self) -> Log:
        """Return what a tracker gets: a table with one row."""
        return Explanations([self]).to_log()

    def logged(self, **drawing: Any) -> dict[str, Any]:
        """Return the row in a tracker's table: the picture, the heat on it, and what is explained.

        Args:
            **drawing: the arguments of ``overlay``; ``style`` and ``max_side`` are ignored.
        """
        row: dict[str, Any] = {"source": self.source}
        if self.heatmap.ndim > 1:
            drawing |= {"style": "overlay", "max_side": 384}  # small enough for a table of hundreds of pictures
            row |= {"picture": self.overlay(**drawing | {"alpha": 0.0}), "heat": self.overlay(**drawing)}
        return row | {name: getattr(self, name) for name in ("label", "probability", "layer", "method", "status")}

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the pictures as JSON values; ``raw`` becomes nested lists, non-finite numbers None."""
        cells = self.raw.astype(object)
        cells[~np.isfinite(self.raw)] = None
        references = None if self.references is None else {**vars(self.references), "residual": self.residual}
        return {**self.values(), "references": references, "raw": cells.tolist()}

    def __repr__(self) -> str:
        """Return a line with the target, the method, the layer and the status."""
        share = "" if self.probability is None else f" {figure.percent(self.probability)}"
        return f"<Explanation of {self.name!r}{share} by {self.method} at {self.layer!r}: {self.status}>"

    def _repr_png_(self) -> bytes:
        """Return the overlay for a notebook that cannot show HTML."""
        return encode(self.overlay(max_side=_NOTEBOOK_SIDE))

    def _repr_html_(self) -> str | None:
        """Show the figure in a notebook; None, and so the line of text, if the map has one axis."""
        if self.heatmap.ndim == 1:
            return None
        return as_html(self.captioned(side=_NOTEBOOK_SIDE), repr(self))


class Explanations(Tabular, Loggable, list[Explanation]):
    """The explanations of one call, picture by picture, target by target within: a list that can be drawn.

    Example:
        >>> import camkit
        >>> camkit.explain("demo-fair", camkit.scenes.scene_paths()["plane-sky"], target=["plane", "bird"])
        <2 Explanations: 'plane' >99.9%, 'bird' <0.1%>
    """

    @overload
    def __getitem__(self, place: SupportsIndex) -> Explanation: ...

    @overload
    def __getitem__(self, place: slice) -> Explanations: ...

    def __getitem__(self, place: SupportsIndex | slice) -> Explanation | Explanations:
        """Return one explanation, or a part of the list, which can be drawn as well."""
        return Explanations(super().__getitem__(place)) if isinstance(place, slice) else super().__getitem__(place)

    def sheet(
        self,
        *,
        style: Style = "figure",
        colormap: str = "turbo",
        alpha: float = 0.5,
        opacity: Opacity = "evidence",
        scale: Scale | None = None,
    ) -> Pixels:
        """Draw all explanations side by side.

        Args:
            style, colormap, alpha, opacity: as for ``Explanation.overlay``.
            scale: "shared" draws all on one scale, so that pictures can be compared; "each" draws each on its own
                scale. With None, the targets of one picture share a scale.

        Raises:
            InputError: the list is empty, or as for ``Explanation.overlay``.
        """
        if not self:
            raise InputError("there is no explanation to draw: the list is empty")
        resize = functools.partial(figure.fitted, most=360)  # the longest side on a sheet
        drawn = [
            row._draw(style, colormap, alpha, opacity, self if scale == "shared" else scale or "shared", resize)
            for row in self
        ]
        return figure.sheet(drawn)

    def save(
        self,
        path: str | Path,
        *,
        style: Style = "figure",
        colormap: str = "turbo",
        alpha: float = 0.5,
        opacity: Opacity = "evidence",
        scale: Scale | None = None,
    ) -> Path:
        """Write the sheet to a file, completely or not at all; the suffix decides the type, and folders are created.

        Raises:
            OutputError: the file cannot be written, or its type is unknown.
        """
        drawn = self.sheet(style=style, colormap=colormap, alpha=alpha, opacity=opacity, scale=scale)
        return write_picture(path, drawn)

    def table(self) -> Rows:
        """Return a row for each explanation, without its maps."""
        parts = {each.name: each.parts for each in FIELDS if each.parts}
        rows = [row.values() for row in self]
        for row, (name, names) in itertools.product(rows, parts.items()):
            row[name] = dict(zip(names, row[name] or (None,) * len(names), strict=True))
        return [flat(row) for row in rows]

    def to_log(self) -> Log:
        """Return a table of pictures for a tracker."""
        return Log("explanations", pictures=[(f"explain/{row.source}/{row.name}", row.logged()) for row in self])

    def to_dict(self) -> dict[str, Any]:
        """Return all explanations as JSON values, as ``Explanation.to_dict`` does."""
        return {"explanations": [row.to_dict() for row in self]}

    def __repr__(self) -> str:
        """Return a line with the first few targets."""
        named = [
            f"{row.name!r}" + ("" if row.probability is None else f" {figure.percent(row.probability)}")
            for row in self[:3]
        ]
        more = ", ..." if len(self) > len(named) else ""
        kind = "Explanation" if len(self) == 1 else "Explanations"
        return f"<{len(self)} {kind}: {', '.join(named)}{more}>" if self else "<0 Explanations>"

    def _repr_html_(self) -> str | None:
        """Show the sheet in a notebook, of the first explanations if there are many."""
        # 12 figures are a few screens, and some megabytes in the file
        first = Explanations(row for row in self[:12] if row.heatmap.ndim > 1)
        if not first:
            return None
        rest = len(self) - len(first)
        more = f"<p>and {rest} more; .save(path) writes all of them into one picture</p>" if rest else ""
        return as_html(first.sheet(), repr(self)) + more


FIELDS: tuple[Field, ...] = (
    *(
        Field(each.name, each.metadata["kind"], attrgetter(each.name))
        for each in sorted(fields(Explanation), key=lambda each: each.name != "source")  # a table begins with it
        if each.metadata
    ),
    Field("box", "reals", lambda found: found.in_file(found.box), Box._fields),
    Field("detection", "reals", lambda found: found.in_file(found.detection), Box._fields),
    Field("peak", "reals", lambda found: found.in_file(found.peak), ("x", "y")),
    Field("input", "wholes", lambda found: list(found.maps.size)),
    Field("shape", "wholes", lambda found: list(found.raw.shape)),
    Field("extent", "reals", lambda found: [share for axis in found.placement.extent for share in axis]),
    Field("positions", "reals", lambda found: [place for axis in found.placement.positions for place in axis]),
    Field("frames", "wholes", lambda found: [frame.number for frame in found.frames]),
    Field("times", "reals", lambda found: [frame.time for frame in found.frames if frame.time is not None]),
)
"""Every field of an Explanation that JSON, tables, bundles, TensorBoard, FiftyOne and the shell have, besides the map.

``box``, ``detection`` and ``peak`` are in pixels of the picture's file. ``input`` is the shape of the model's input,
and ``shape`` that of the grid. ``extent`` says where the input starts and ends along each axis of the grid, as shares
of the axis. ``positions`` says where each row and then each column of the grid is drawn, in pixels of the input; it is
empty if they are spread evenly. ``frames`` are the numbers of a clip's frames, and ``times`` their times in seconds if
these are known.
"""


def explanation_of(values: Mapping[str, Any], raw: Float[np.ndarray, "..."], folder: Path = Path()) -> Explanation:
    """Return the Explanation that has these values.

    If several layers were fused, its heatmap is drawn from their fused map. The picture is read from its file when it
    is first drawn. The scores of ``references`` are not among the values.

    Args:
        values: what ``Explanation.values`` returned; a field with a default may be missing.
        raw: the map.
        folder: what a relative ``source`` is relative to.
    """
    declared = {each.name: values[each.name] for each in fields(Explanation) if each.metadata and each.name in values}
    box, detection = (None if values[name] is None else Box(*map(float, values[name])) for name in ("box", "detection"))
    lists = {name: [] if values[name] is None else values[name] for name in ("extent", "positions", "frames", "times")}
    extent = tuple((float(start), float(end)) for start, end in np.reshape(lists["extent"], (-1, 2)))
    axes = np.split(np.asarray(lists["positions"], float), np.cumsum(raw.shape)[:-1]) if len(lists["positions"]) else []
    frames = tuple(
        ClipFrame(int(number), time) for number, time in itertools.zip_longest(lists["frames"], lists["times"])
    )
    placement = Placement(extent, tuple(tuple(axis.tolist()) for axis in axes), stepped=bool(frames))
    return Explanation(
        **{**declared, "score": math.nan if declared["score"] is None else declared["score"]},
        maps=LayerMaps((torch.from_numpy(raw),), (placement,), "mean", tuple(map(int, values["input"]))),
        raw=raw,
        box=box,
        shown=None if box is None else folder / values["source"],
        detection=detection,
        placement=placement,
        frames=frames,
    )


ScaleLike: TypeAlias = "Scale | ColourScale | Sequence[Explanation]"
"""What ``scale=`` takes."""


_Row = TypeVar("_Row", "Explanation", "Explanation | Failure")


def sharing_scale(rows: Sequence[_Row]) -> list[_Row]:
    """Return the rows of one picture, in which each explanation knows the maps of all that have its units.

    A detector's boxes do not share a scale: a large box would be dark beside a small one.
    """
    explained = [row for row in rows if isinstance(row, Explanation) and row.detection is None]
    if len(explained) < 2:
        return list(rows)
    together = {row._units: tuple(other.maps for other in explained if other._units == row._units) for row in explained}
    return [
        replace(row, together=together[row._units])
        if isinstance(row, Explanation) and row.detection is None and len(together[row._units]) > 1
        else row
        for row in rows
    ]


def explanations(
    maps_by_target: Sequence[SignedMaps],
    captured: Capture,
    pictures: Sequence[Prepared],
    shown: Sequence[Image.Image | Tensor | None],
    layers: Sequence[TargetLayer],
    fuse: Fusion,
    choices: Choices,
    targets: Sequence[Target],
    labels: tuple[str, ...] | None,
) -> list[list[Explanation | Failure]]:
    """Turn signed maps into an Explanation for each picture and target.

    Args:
        maps_by_target: the signed maps of each target.
        captured: the pass whose scores are explained.
        pictures: the N pictures.
        shown: the pictures to draw on, each shared by all its targets; see ``shown_pictures``.
        layers: the layers that the feature maps come from.
        fuse: how the maps of several layers are combined.
        choices: how the Explainer explains, without the layer.
        targets: the target of each of the scores.
        labels: the names of the classes, if they are known.

    Returns:
        For each picture, an explanation for each target; a Failure for one that does not exist in the picture.
    """
    size = tuple(pictures[0].tensor.shape[1:])
    are_frames = bool(pictures[0].frames)
    placements = tuple(replace(maps.placement, stepped=are_frames) for maps in captured.features)
    placement = placements[heat.finest([maps.activations.shape[2:] for maps in captured.features])]
    names = "+".join(map(str, layers))
    reason = max((layer.reason for layer in layers), key=len)  # of two that sharpen, it names the other
    references = captured.references or (None,) * len(captured.scores)
    rows: list[list[Explanation | Failure]] = [[] for _ in pictures]
    for signed, scores, compared, target in zip(maps_by_target, captured.scores, references, targets, strict=True):
        fused = heat.fuse(signed.raws, fuse, placements).cpu().numpy()
        raws, influenced = tuple(raw.cpu() for raw in signed.raws), signed.influenced.tolist()
        values, used = scores.values.tolist(), replace(choices, method=signed.method)
        for place, (picture, of_picture) in enumerate(zip(pictures, rows, strict=True)):
            if scores.present is not None and not scores.present[place]:
                of_picture.append(Failure(picture.source, TargetError(f"{picture.source}: {scores.absence}")))
                continue
            index = None if scores.indices is None else scores.indices[place]
            raw = fused[place].copy()
            maps = LayerMaps(tuple(part[place].clone() for part in raws), placements, fuse, size)
            explanation = Explanation(
                maps=maps,
                raw=raw,
                target=index,
                label=_label_of(scores, index, labels),
                score=values[place],
                probability=None if scores.probabilities is None else scores.probabilities[place],
                layer=names,
                layer_reason=reason,
                method=signed.method.name,
                status=status_of(maps, raw, influenced=influenced[place]),
                box=picture.box,
                reduction=picture.reduction,
                shown=shown[place],
                source=picture.source,
                detection=None if scores.boxes is None else box_on_picture(scores.boxes[place], picture, size),
                missed=None if scores.missed is None else scores.missed[place],
                placement=placement,
                quantity=scores.quantity if isinstance(scores.quantity, str) else scores.quantity[place],
                smooth=choices.options["smooth"],
                references=compared,
                frames=picture.frames,
                unit=signed.method.unit if signed.method.users else None,
                made=Made(used, target, scores.of_image(place)),
            )
            of_picture.append(explanation)
    return rows


def existing(rows: Sequence[Explanation | Failure], scores: Sequence[Scores]) -> list[Explanation | Failure]:
    """Return a picture's explanations, and a Failure for each target that does not exist in it.

    Targets that one target expanded to give no Failure if any of them exists.
    """
    pairs = zip(rows, scores, strict=True)
    return [row for row, scored in pairs if isinstance(row, Explanation) or not scored.fewer] or [rows[0]]


def _label_of(scores: Scores, index: int | None, labels: tuple[str, ...] | None) -> str | None:
    """Return the name of a class, or of another target; refuse labels that do not fit the model's classes."""
    unfit = labels is not None and scores.classes not in (None, len(labels))
    if labels is not None and (unfit or (index is not None and index >= len(labels))):
        found = f"has {scores.classes} classes" if unfit else f"found class {index}"
        raise InputError(f"{len(labels)} labels were given, but the model {found}")
    if index is None:
        return scores.description
    return labels[index] if labels and index >= 0 else None


def shown_pictures(
    pictures: Sequence[Prepared], inputs: Float[Tensor, "n c *size"]
) -> list[Image.Image | Tensor | None]:
    """Return the pictures to draw on: the originals or, if these are not shown, copies of the model's inputs."""
    return [
        picture.picture if picture.picture is not None or tensor.dim() < 3 else tensor.detach().to("cpu", copy=True)
        for picture, tensor in zip(pictures, inputs, strict=True)
    ]


def box_on_picture(corners: tuple[float, ...] | None, item: Prepared, size: tuple[int, ...]) -> Box | None:
    """Return a detection's box in pixels of the picture that is shown."""
    if corners is None or len(size) != 2:
        return None
    shown = item.box if item.picture is not None and item.box is not None else Box(0, 0, size[1], size[0])
    across, down = (shown.right - shown.left) / size[1], (shown.bottom - shown.top) / size[0]
    left, top, right, bottom = corners
    return Box(
        shown.left + left * across, shown.top + top * down, shown.left + right * across, shown.top + bottom * down
    )


def status_of(maps: LayerMaps, raw: np.ndarray, *, influenced: bool) -> Status:
    """Return the status of a map; ``influenced`` tells whether the score depends on its cells at all."""
    if not np.isfinite(raw).all():
        return "non_finite"
    if not influenced or raw.size == 1:  # one cell says nothing about places
        return "no_influence"
    covers_input = len(maps.raws) == 1 and not maps.placements[0].extent  # then the cells decide, without drawing them
    has_evidence = raw.max() > 0 if covers_input else maps.heatmap().any()
    return "ok" if has_evidence else "no_positive_evidence"
