"""The rows of a table of explanations: one row for each picture and target, the same in every kind of table."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import torch
from jaxtyping import Float

from camkit.explanation import Explanation, LayerMaps, finite_or_none
from camkit.kit.store import Row
from camkit.types import Box, ClipFrame, Failure, Placement

Kind: TypeAlias = Literal["text", "whole", "real", "reals", "wholes", "halves"]
"""What a column holds: text, a whole number, a real number, or lists of these; halves are real numbers in 16 bits."""

COLUMNS: dict[str, Kind] = {
    "path": "text",
    "status": "text",
    "target": "whole",
    "label": "text",
    "score": "real",
    "probability": "real",
    "quantity": "text",
    "without_picture": "real",
    "unit": "text",
    "layer": "text",
    "layer_reason": "text",
    "method": "text",
    "smooth": "text",
    "box": "reals",
    "detection": "reals",
    "peak": "reals",
    "input": "wholes",
    "shape": "wholes",
    "extent": "reals",
    "positions": "reals",
    "frames": "wholes",
    "times": "reals",
    "raw": "halves",
    "raw_scale": "real",
    "drawing": "text",
    "error": "text",
}
"""The columns. ``status`` is the status of the Explanation, or "error". A row with "error" has only ``path`` and
``error``.

``box``, ``detection`` and ``peak`` are in pixels of the original picture. ``raw`` is the map on the layer's grid, row
by row, divided by ``raw_scale``, its largest absolute value: 16 bits have no room for very small and large numbers.
``shape`` is the shape of the grid, and ``input`` the shape of the model's input. ``extent`` says where the input starts
and ends along each axis of the grid, as shares of the axis. ``positions`` says where each row and then each column of
the grid is drawn, in pixels of the input; it is empty if they are spread evenly. ``frames`` are the numbers of a
clip's frames, and ``times`` their times in seconds if these are known. ``drawing`` is the file with the drawing.
"""

ERROR = "error"


def row_of(explanation: Explanation, drawing: Path | None = None) -> Row:
    """Return the row of an explanation."""
    raw, scale = _halves(explanation.raw)
    return {
        "path": text_of(explanation.source),
        "status": explanation.status,
        "target": explanation.target,
        "label": explanation.label,
        "score": explanation.score,
        "probability": explanation.probability,
        "quantity": explanation.quantity,
        "without_picture": finite_or_none(explanation.without_picture),
        "unit": explanation.unit,
        "layer": explanation.layer,
        "layer_reason": explanation.layer_reason,
        "method": explanation.method,
        "smooth": explanation.smooth,
        "box": explanation.in_file(explanation.box),
        "detection": explanation.in_file(explanation.detection),
        "peak": explanation.in_file(explanation.peak),
        "input": list(explanation.maps.size),
        "shape": list(explanation.raw.shape),
        "extent": [share for axis in explanation.placement.extent for share in axis],
        "positions": [place for axis in explanation.placement.positions for place in axis],
        "frames": [frame.number for frame in explanation.frames],
        "times": [frame.time for frame in explanation.frames if frame.time is not None],
        "raw": raw,
        "raw_scale": scale,
        "drawing": None if drawing is None else text_of(drawing),
        "error": None,
    }


def row_of_failure(failure: Failure) -> Row:
    """Return the row of a picture that could not be explained."""
    empty: Row = dict.fromkeys(COLUMNS)
    return {**empty, "path": text_of(failure.source), "status": ERROR, "error": text_of(str(failure.error))}


def explanation_of(row: Row, folder: Path = Path(), exact: Float[np.ndarray, "..."] | None = None) -> Explanation:
    """Return the Explanation of a row without faults.

    Its map has the precision of 16 bits. If several layers were fused, its heatmap is drawn from their fused map. The
    picture is read from its file when it is first drawn. The scores of ``references`` are not in a row.

    Args:
        row: a row whose status is not "error".
        folder: what a relative path in the row is relative to.
        exact: the map, if it is known with all its digits.
    """
    shares_of_scale = np.asarray(row["raw"], np.float16).reshape(row["shape"])
    raw = shares_of_scale.astype(np.float32) * np.float32(row["raw_scale"]) if exact is None else exact
    shares, places = _reals(row, "extent").tolist(), _reals(row, "positions")
    axes = np.split(places, np.cumsum(row["shape"])[:-1]) if len(places) else []
    numbers, times = _reals(row, "frames").tolist(), _reals(row, "times").tolist()
    frames = tuple(map(ClipFrame, map(int, numbers), times or [None] * len(numbers)))
    placement = Placement(
        tuple(zip(shares[::2], shares[1::2], strict=True)),
        tuple(tuple(axis.tolist()) for axis in axes),
        stepped=bool(frames),
    )
    box, detection = (None if row[name] is None else Box(*map(float, row[name])) for name in ("box", "detection"))
    return Explanation(
        maps=LayerMaps((torch.from_numpy(raw),), (placement,), "mean", tuple(map(int, row["input"]))),
        raw=raw,
        target=row["target"],
        label=row["label"],
        score=math.nan if row["score"] is None else row["score"],
        probability=row["probability"],
        layer=row["layer"],
        layer_reason=row["layer_reason"],
        method=row["method"],
        smooth=row["smooth"],
        status=row["status"],
        box=box,
        shown=None if box is None else folder / row["path"],
        source=row["path"],
        detection=detection,
        placement=placement,
        quantity=row["quantity"],
        frames=frames,
        without_picture=row["without_picture"],
        unit=row["unit"],
    )


def _reals(row: Row, name: str) -> Float[np.ndarray, " numbers"]:
    return np.asarray([] if row[name] is None else row[name], np.float64)  # a CSV has no empty lists


def text_of(name: str | Path) -> str:
    r"""Return text that every table can hold: bytes of a file's name that are not text are escaped as in Python.

    >>> import os
    >>> text_of(os.fsdecode(b"a\xff.jpg"))
    'a\\xff.jpg'
    """
    text = str(name)
    return text if text.isascii() else text.encode(errors="surrogateescape").decode(errors="backslashreplace")


def _halves(raw: Float[np.ndarray, "..."]) -> tuple[Float[np.ndarray, " cells"], float]:
    """Return a map as 16-bit numbers from -1 to 1, and what they were divided by."""
    finite = np.abs(raw[np.isfinite(raw)])
    scale = float(finite.max(initial=0)) or 1.0
    return (raw / np.float32(scale)).astype(np.float16).reshape(-1), scale
