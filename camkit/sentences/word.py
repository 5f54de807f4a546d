"""One word of a sentence: how much it needs the picture, and where its evidence lies."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from camkit.explanation import Explanation, LayerMaps, finite_or_none
from camkit.sentences.places import Places
from camkit.types import Placement, ReferenceScores, Status

PREDICTABLE = 0.5
"""A word that is at least this probable with every reference picture is one that the earlier words dictate."""
NEEDS_NO_PICTURE = math.log(2)
"""Nats: a word needs the picture if it is less than half as probable with other pictures."""

_UNITS = {
    "attention": "Share of attention",
    "attention-expected": "Share of attention times expected gradients",
    "tam": "Logit at the picture's token, less what earlier words explain",
}
"""What the values of a map are, for the methods that only words have."""


@dataclass(frozen=True, eq=False)
class Word:
    """One word of the sentence.

    Attributes:
        text: the word.
        tokens: the range of its tokens in the sentence.
        probability: its probability with this picture, after the words before it.
        needs_picture: the log-probability with this picture minus its mean over the reference pictures, with the same
            words before it, in nats.
        spread: the standard deviation of the log-probability over the reference pictures.
        above_grey, above_none: the same difference from a grey picture, and with the picture hidden. Read them with
            care: a model without a picture is outside of what it was trained on.
        is_punctuation: the word has neither letters nor digits.
        is_dictated: the words before it dictate it: it is probable with every reference picture.
        explanation: the heat on the picture; None for words that were not asked for.
    """

    text: str
    tokens: range
    probability: float
    needs_picture: float
    spread: float
    above_grey: float
    above_none: float
    is_punctuation: bool
    is_dictated: bool
    explanation: Explanation | None = field(repr=False)

    @property
    def needs_no_picture(self) -> bool:
        """Whether the word is about as probable with other pictures; its heat then explains almost nothing."""
        return self.is_punctuation or abs(self.needs_picture) < NEEDS_NO_PICTURE

    @property
    def verdict(self) -> str:
        """Whether the word needs the picture, as a phrase."""
        if self.is_punctuation:
            return "punctuation"
        if self.needs_picture >= NEEDS_NO_PICTURE:
            return "needs the picture"
        if self.needs_picture <= -NEEDS_NO_PICTURE:
            return "this picture speaks against it"
        if self.is_dictated:
            return "does not need the picture: the words before it dictate it"
        return "does not need the picture"

    def to_dict(self) -> dict[str, Any]:
        """Return the word as JSON values; non-finite numbers become None."""
        numbers = ("probability", "needs_picture", "spread", "above_grey", "above_none")
        return {
            "text": self.text,
            "tokens": [self.tokens.start, self.tokens.stop],
            **{name: finite_or_none(getattr(self, name)) for name in numbers},
            "is_punctuation": self.is_punctuation,
            "is_dictated": self.is_dictated,
            "needs_no_picture": self.needs_no_picture,
            "verdict": self.verdict,
            "explanation": None if self.explanation is None else self.explanation.to_dict(),
        }


def explanation_of(
    text: str,
    heat: Float[Tensor, "h w"],
    log_probability: float,
    compared: ReferenceScores | None,
    picture: Image.Image,
    places: Places,
    *,
    layer: str,
    method: str,
    source: str,
) -> Explanation:
    """Return the heat of a word as an Explanation, drawn on the part of the picture that the model sees."""
    raw = heat.detach().float().cpu()
    box = places.box
    size = max(round(box.bottom - box.top), 1), max(round(box.right - box.left), 1)
    axes = zip((places.rows, places.columns), size, strict=True)
    placement = Placement(positions=tuple(tuple(share * side - 0.5 for share in axis) for axis, side in axes))
    maps = LayerMaps((raw,), (placement,), "mean", size)
    cells = np.asarray(raw.numpy())
    status: Status = "ok"
    if not np.isfinite(cells).all():
        status = "non_finite"
    elif not cells.any():
        status = "no_influence"
    elif cells.max() <= 0:
        status = "no_positive_evidence"
    return Explanation(
        maps=maps,
        raw=cells,
        target=None,
        label=text,
        score=log_probability,
        probability=float(np.exp(log_probability)),
        layer=layer,
        layer_reason="the picture enters the decoder here",
        method=method,
        status=status,
        box=box,
        shown=picture,
        source=source,
        quantity="log-probability",
        references=compared,
        unit=_UNITS.get(method),
    )
