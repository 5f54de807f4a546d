"""The options of the command line that choose what to explain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from cyclopts import Parameter

import camkit
from camkit.cli.options import TARGET, numbers
from camkit.errors import InputError

if TYPE_CHECKING:
    import numpy as np

    from camkit.targets import Target, TargetLike, TopTarget
    from camkit.types import Preprocess

Part: TypeAlias = Literal["left", "top", "right", "bottom", "objectness", "mask"]

_COVERED = 0.5
"""A pixel of the model's input belongs to the mask if more than this share of it does."""


@Parameter(name="*", group=TARGET)
@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """What to explain; without any option, each picture's best class.

    Attributes:
        target: The class to explain: its label, or its index if no label is that number; repeat the option for several.
            Default: the best class.
        top_k: Explain the K best classes, or boxes, of each picture.
        above: Explain every class of a multi-label model whose probability (sigmoid) is above this.
        true: The true class of the picture; for --style slide.
        versus: Explain the target rather than this class.
        direction: Explain what raises or lowers one number of the output (one-logit model, regression).
        threshold: Explain all boxes of a detector whose score is above this, from 0 to 1; the default for detectors
            loaded by name, with 0.5.
        box: Explain the detector's box with this number; numbers start at 0.
        box_at: Explain the detector's box around this point x,y, in pixels of the picture.
        near: Explain the box that overlaps most with left,top,right,bottom, in pixels of the model's input.
        region: Explain the mean of a map of numbers, such as depth, in left,top,right,bottom, in pixels of the picture;
            --direction down explains what lowers it.
        part: Explain where one side of the box lies, its objectness or its mask, in place of the score of its class.
        point: Explain the mask of what lies at this point x,y, in pixels of the picture, for networks such as SAM.
        box_prompt: Explain the mask of what lies in left,top,right,bottom, in pixels of the picture, for networks such
            as SAM.
        mask: Explain the target of a segmentation network inside the object of this mask picture.
        everywhere: Explain the target of a segmentation network everywhere, not only where it is predicted.
        similar_to: Explain what makes the embedding similar to that of this picture.
    """

    target: Annotated[list[str] | None, Parameter(alias="-t", negative=(), metavar="CLASS")] = None
    top_k: Annotated[int | None, Parameter(alias="-k", metavar="K")] = None
    above: Annotated[float | None, Parameter(metavar="SHARE")] = None
    true: Annotated[str | None, Parameter(metavar="CLASS")] = None
    versus: Annotated[str | None, Parameter(metavar="CLASS")] = None
    direction: Literal["up", "down"] | None = None
    threshold: Annotated[float | None, Parameter(metavar="SCORE")] = None
    box: Annotated[int | None, Parameter(metavar="NUMBER")] = None
    box_at: Annotated[str | None, Parameter(metavar="X,Y")] = None
    near: Annotated[str | None, Parameter(metavar="L,T,R,B")] = None
    region: Annotated[str | None, Parameter(metavar="L,T,R,B")] = None
    part: Part | None = None
    point: Annotated[str | None, Parameter(metavar="X,Y")] = None
    box_prompt: Annotated[str | None, Parameter(metavar="L,T,R,B")] = None
    mask: Annotated[Path | None, Parameter(metavar="FILE")] = None
    everywhere: Annotated[bool, Parameter(negative=(), show_default=False)] = False
    similar_to: Annotated[Path | None, Parameter(metavar="FILE")] = None

    def check(self) -> None:
        """Check that the options fit together.

        Raises:
            InputError: an option is wrong, two exclude each other, or one needs another.
        """
        names = self.target or []
        for name in _FORMS:
            self._numbers(name)
        kinds = [f"--{name.replace('_', '-')}" for name in _ALONE if getattr(self, name) is not None]
        if self.region is not None and self.direction is not None:
            kinds.remove("--direction")
        refinements = [f"--{name}" for name in _REFINEMENTS if getattr(self, name) not in (None, False)]
        if len(kinds) > 1:
            raise InputError(f"{' and '.join(kinds)} cannot be combined")
        if kinds and kinds != ["--direction"] and names:
            raise InputError(f"{kinds[0]} and --target cannot be combined")
        if len(refinements) > 1 or (refinements and self.direction is not None):
            raise InputError(f"{' and '.join([*refinements, *kinds])} cannot be combined")
        if self.part is not None and not names and not {"--box", "--box-at", "--near"} & set(kinds):
            raise InputError("--part is a part of one box; name the box with --box, --box-at, --near or --target")
        if refinements and len(names) != 1:
            raise InputError(f"{refinements[0]} needs one --target")
        if self.direction is not None and self.region is None:
            self._direction_target()

    def targets(
        self, pictures: Sequence[Path], preprocess: Preprocess | None, *, detects: bool = False
    ) -> list[TargetLike] | None:
        """Return the targets; None for each picture's best class.

        Args:
            pictures: the pictures to explain; a mask belongs to a single one.
            preprocess: the model's preprocessing, which crops the mask as it crops the picture.
            detects: whether the model is a detector, of which all boxes are explained.

        Raises:
            InputError: as ``check``, or the mask does not fit the picture.
        """
        self.check()
        for option, make in _ALONE.items():
            if getattr(self, option) is not None:
                made = make(self)
                return list(made) if isinstance(made, list) else [made]
        if not self.target:
            return [camkit.targets.boxes()] if detects else None
        return [self._class_target(name, pictures, preprocess) for name in self.target]

    def _numbers(self, name: str) -> tuple[float, ...]:
        """Return the numbers in an option; none if it is not given."""
        text, form, option = getattr(self, name), _FORMS[name], name.replace("_", "-")
        found = () if text is None else numbers(option, text)
        if len(found) not in (0, len(form.split(","))):
            raise InputError(f"--{option} takes {form}, not {text!r}")
        return found

    def _direction_target(self) -> Target:
        """Return a target for one number of the output, by default the first."""
        indices = self.target or ["0"]
        if len(indices) > 1 or not indices[0].isdecimal():
            raise InputError("--direction explains one number of the output, so --target takes one index")
        return camkit.targets.direction("+" if self.direction == "up" else "-", int(indices[0]))

    def _class_target(self, name: str, pictures: Sequence[Path], preprocess: Preprocess | None) -> TargetLike:
        if self.part is not None:
            return camkit.targets.best_box(name, part=self.part)
        if self.versus is not None:
            return camkit.targets.contrast(name, self.versus)
        if self.mask is not None:
            return camkit.targets.segment(name, _mask_on_input(self.mask, pictures, preprocess))
        return camkit.targets.segment(name, everywhere=True) if self.everywhere else name


_ALONE: dict[str, Callable[[TargetOptions], TargetLike | list[TopTarget]]] = {
    "top_k": lambda options: camkit.targets.top(options.top_k or 0),
    "above": lambda options: camkit.targets.above(options.above or 0),
    "region": lambda options: camkit.targets.region(
        *options._numbers("region"), sign="-" if options.direction == "down" else "+"
    ),
    "direction": TargetOptions._direction_target,
    "threshold": lambda options: camkit.targets.boxes(options.threshold or 0),
    "box": lambda options: camkit.targets.box(options.box, part=options.part),
    "box_at": lambda options: camkit.targets.box_at(*options._numbers("box_at"), part=options.part),
    "point": lambda options: camkit.targets.mask_at(*options._numbers("point")),
    "box_prompt": lambda options: camkit.targets.mask_in(*options._numbers("box_prompt")),
    "near": lambda options: camkit.targets.box(near=options._numbers("near"), part=options.part),
    "similar_to": lambda options: camkit.targets.similar_to(options.similar_to),
}
"""What each option that chooses another kind of target makes; they exclude each other."""

_FORMS = {
    **dict.fromkeys(("near", "region", "box_prompt"), "left,top,right,bottom"),
    **dict.fromkeys(("box_at", "point"), "x,y"),
}
"""The numbers in an option."""

_REFINEMENTS = ("versus", "mask", "everywhere")
"""Options that refine one --target."""


def _mask_on_input(file: Path, pictures: Sequence[Path], preprocess: Preprocess | None) -> np.ndarray:
    """Return a mask (h, w) over the model's input, resized and cropped in the same way as its picture."""
    from camkit.images.crop import check_crop
    from camkit.images.masks import MaskFile, understand_masks
    from camkit.images.prepare import prepare
    from camkit.images.read import open_picture
    from camkit.images.regions import preprocess_region

    if len(pictures) != 1 or preprocess is None:
        raise InputError("--mask is for one picture; explain that picture alone")
    picture = open_picture(pictures[0])
    mask = MaskFile(file, understand_masks([file])).region(picture.size)
    check_crop(preprocess, picture, prepare(picture, preprocess, str(pictures[0])).tensor)
    inside = preprocess_region(mask, preprocess) > _COVERED
    if not bool(inside.any()):
        raise InputError(f"the object in {file} lies outside the part of the picture that the model sees")
    return inside.numpy()
