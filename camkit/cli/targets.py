"""What a command line asks to have explained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from camkit.errors import InputError
from camkit.images.read import open_picture
from camkit.targets import TargetLike, above, box, contrast, direction, segment, similar_to, top
from camkit.types import Preprocess

_HALF = 127


@dataclass(frozen=True)
class Asked:
    """What a command line asks to have explained; the best class where it asks for nothing."""

    target: Sequence[str] = ()
    top_k: int | None = None
    above: float | None = None
    versus: str | None = None
    direction: Literal["up", "down"] | None = None
    box: int | None = None
    near: tuple[float, float, float, float] | None = None
    mask: Path | None = None
    everywhere: bool = False
    similar_to: Path | None = None

    def check(self) -> None:
        """Check that the options go together.

        Raises:
            InputError: options that exclude each other, or one that needs another.
        """
        kinds = ("top_k", "above", "direction", "box", "near", "similar_to")
        given = [f"--{name.replace('_', '-')}" for name in kinds if getattr(self, name) is not None]
        if len(given) > 1:
            raise InputError(f"{' and '.join(given)} exclude each other")
        if given and given != ["--direction"] and self.target:
            raise InputError(f"{given[0]} and --target exclude each other")
        of_one = {"--versus": self.versus, "--mask": self.mask, "--everywhere": self.everywhere or None}
        of_one = {name: value for name, value in of_one.items() if value is not None}
        if len(of_one) > 1 or (of_one and self.direction is not None):
            raise InputError(f"{' and '.join([*of_one, *given])} exclude each other")
        if of_one and len(self.target) != 1:
            raise InputError(f"{next(iter(of_one))} needs one --target")
        if self.direction is not None:
            self._number()

    def targets(self, pictures: Sequence[Path], preprocess: Preprocess | None) -> list[TargetLike] | None:
        """Return the targets.

        Args:
            pictures: that are explained; a mask is of one.
            preprocess: of the model, which the mask goes through as its picture does.

        Raises:
            InputError: as ``check``, or a mask that does not belong to the picture.
        """
        self.check()
        if self.direction is not None:
            return [self._number()]
        if self.target:
            return [self._class(one, pictures, preprocess) for one in self.target]
        makers: dict[str, Callable[[Any], Any]] = {
            "top_k": top,
            "above": above,
            "box": box,
            "near": lambda near: box(near=near),
            "similar_to": similar_to,
        }
        found = next(
            (make(getattr(self, name)) for name, make in makers.items() if getattr(self, name) is not None), None
        )
        return found if found is None or isinstance(found, list) else [found]

    def _number(self) -> TargetLike:
        """Return a target for one number of the output, the first if none is named."""
        if len(self.target) > 1 or not all(one.isdecimal() for one in self.target):
            raise InputError("--direction is of one number of the output: --target takes its index")
        return direction("+" if self.direction == "up" else "-", int(self.target[0]) if self.target else 0)

    def _mask(self, pictures: Sequence[Path], preprocess: Preprocess | None) -> Any:
        """Return the mask as the model's input shows it, resized and cropped as its picture is."""
        from camkit.images.regions import preprocess_region

        assert self.mask is not None
        mask = open_picture(self.mask).convert("L")
        if len(pictures) != 1 or preprocess is None:
            raise InputError("--mask is of one picture")
        size = open_picture(pictures[0]).size
        if mask.size != size:
            raise InputError(f"the mask is {mask.width}x{mask.height} pixels and the picture {size[0]}x{size[1]}")
        inside = preprocess_region(np.asarray(mask) > _HALF, preprocess) > 0.5
        if not bool(inside.any()):
            raise InputError(f"no white of {self.mask} is in the part of the picture that the model sees")
        return inside.numpy()

    def _class(self, name: str, pictures: Sequence[Path], preprocess: Preprocess | None) -> TargetLike:
        if self.versus is not None:
            return contrast(name, self.versus)
        if self.mask is not None:
            return segment(name, self._mask(pictures, preprocess))
        return segment(name, everywhere=True) if self.everywhere else name
