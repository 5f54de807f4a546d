"""FiftyOne: answers and heat as fields of a dataset's samples, and the verdicts of a check. The package is optional."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import cv2
import numpy as np

from camkit.drawing.encode import size_within
from camkit.errors import optional, refuse
from camkit.explaining.explainer import Explainer
from camkit.explaining.explanation import Explanation
from camkit.targets import TargetLike
from camkit.targets.scores import Expands
from camkit.types import Failure

_NEEDS = "datasets of FiftyOne need its package: pip install fiftyone"


def explain_samples(
    samples: Any, explainer: Explainer, target: TargetLike | None = None, *, field: str = "camkit"
) -> int:
    """Explain the pictures of a FiftyOne dataset or view, and write the results into its samples.

    The field ``camkit_heat`` gets a ``fiftyone.Heatmap`` with all values of the explanation, such as ``method``,
    ``layer``, ``score`` and ``status``, and ``camkit_answer`` a ``Classification``, or for a box a ``Detection``.
    ``camkit_error`` says why a picture could not be explained.

    Args:
        samples: a dataset or a view of pictures.
        explainer: what explains them.
        target: one target; None for each picture's best class.
        field: the start of the fields' names.

    Returns:
        The number of samples that have heat now.

    Raises:
        InputError: FiftyOne is not installed, the samples are not pictures, or there are several targets.
    """
    fo = optional("fiftyone", _NEEDS)
    refuse(
        (
            isinstance(target, (list, tuple, Expands)),
            "a field holds one heatmap: pass one target, and for others call again with another field",
        ),
        (
            samples.media_type not in ("image", None),
            f"the samples must be pictures, not of the media type {samples.media_type!r}",
        ),
    )
    numbers, files = samples.values(["id", "filepath"])
    rows = explainer.stream(files, target, on_error="yield")
    written = 0
    in_order = samples.select(numbers, ordered=True)  # even if a view is sorted by what is written here
    for sample, row in zip(in_order.iter_samples(autosave=True), rows, strict=True):
        fields = _fields(fo, row)
        for name in ("heat", "answer", "error"):
            if name in fields or sample.has_field(f"{field}_{name}"):
                sample[f"{field}_{name}"] = fields.get(name)
        written += "heat" in fields
    return written


def add_verdicts(samples: Any, report: Mapping[str, Any], folder: str | Path, *, field: str = "camkit") -> int:
    """Write the verdicts of a check into the samples of a FiftyOne dataset or view.

    ``camkit_verdict`` is the verdict of the picture's class. ``camkit_change`` says how much more often the answer is
    right on backgrounds of the picture's own class than on those of other classes. The dataset's ``info`` gets the
    verdict.

    Args:
        samples: a dataset or a view of the checked pictures.
        report: what ``CheckResult.to_dict()`` returns, or ``report.json`` holds.
        folder: the folder of the pictures that was checked.
        field: the start of the fields' names.

    Returns:
        The number of samples that were among the checked pictures.
    """
    fo = optional("fiftyone", _NEEDS)
    images = {(Path(folder) / image["name"]).resolve(): image for image in report["images"]}
    written = 0
    for sample in samples.iter_samples(autosave=True):
        image = images.get(Path(sample.filepath).resolve())
        if image is None:
            continue
        sample[f"{field}_verdict"] = report["classes"][image["label"]]["verdict"]
        by_fill = [image.get("same"), image.get("other")]
        if all(by_fill):
            own, other = (round(fmean(shares.values()), 3) for shares in by_fill)
            sample[f"{field}_change"] = round(own - other, 3)
        written += 1
    dataset = fo.load_dataset(getattr(samples, "dataset_name", None) or samples.name)  # a view has no info of its own
    dataset.info[field] = {"verdict": report["verdict"], "sentence": report["sentence"]}
    dataset.save()
    return written


def _fields(fo: Any, row: Explanation | Failure) -> dict[str, Any]:
    if isinstance(row, Failure):
        return {"error": str(row.error)}
    fields = {"answer": _answer(fo, row)}
    if row.box is None:
        return {**fields, "error": "the preprocessing warps the picture, so its heat has no place on it"}
    heat = row.heatmap_on_picture()
    if max(heat.shape) > 256:  # finer than the model's grid, and small enough for the database
        heat = np.asarray(cv2.resize(heat, size_within(heat.shape, 256)[::-1], interpolation=cv2.INTER_AREA))
    return {**fields, "heat": fo.Heatmap(map=heat, range=[0, 1], **row.values())}


def _answer(fo: Any, row: Explanation) -> Any:
    said = {"label": row.name, "confidence": row.probability}
    if row.detection is None or row.picture_size is None:
        return fo.Classification(**said)
    height, width = row.picture_size
    left, top, right, bottom = row.detection
    corners = [left / width, top / height, (right - left) / width, (bottom - top) / height]
    return fo.Detection(bounding_box=corners, **said)
