"""What is checked, settled before anything is computed: pictures, classes, sample, and hashes of them."""

from __future__ import annotations

import datetime as dt
import functools
import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from camkit.background.classes import Matched
from camkit.background.config import Settings
from camkit.background.data import scaled
from camkit.background.experiment import PreparedPicture
from camkit.background.render import boxes, outline
from camkit.background.sampling import stratified
from camkit.background.values import Dataset, Item
from camkit.images.prepare import prepare
from camkit.images.read import open_picture
from camkit.images.regions import seen, shades
from camkit.models.loaded import LoadedModel
from camkit.types import Preprocess


@dataclass(frozen=True)
class Plan:
    """A check, ready to be made: its model, its pictures, what is known of them, and how it is to be made.

    ``sample`` are the pictures of the experiment; ``backgrounds`` those on whose background they are shown. These are
    the same, and only where they are of one class also pictures of classes that may be recognised by anything.
    """

    model: LoadedModel
    data: Dataset
    matched: Matched
    settings: Settings
    sample: tuple[Item, ...]
    backgrounds: tuple[Item, ...]
    with_regions: bool
    today: dt.date

    @property
    def edits(self) -> int:
        """How many edits are shown to the model for each picture of the sample, at most."""
        pastes = self.settings.check.pastes
        return 2 * (2 * pastes + 1) + 4 if self.with_regions else 2 * pastes + 1

    def name_of(self, output: int) -> str:
        """Return the class of the data that an output means; else the model's own label, or the output's number."""
        if output < 0:
            return "no answer"
        known = next((name for name, indices in self.matched.indices.items() if output in indices), None)
        labels = self.model.labels
        return known or (labels[output] if labels and output < len(labels) else f"output {output}")

    @property
    def forwards(self) -> tuple[int, int]:
        """Pictures through the model for the heat, and for the experiment."""
        return len(self.data.items), len(self.sample) * self.edits


def fingerprint(plan: Plan) -> dict[str, str]:
    """Return hashes of the weights, the settings that matter to the numbers, and the pictures with their regions."""
    weights = hashlib.sha256()
    for name, tensor in sorted(plan.model.module.state_dict().items()):
        if isinstance(tensor, Tensor):
            weights.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            weights.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    check = plan.settings.check.model_dump(mode="json", exclude={"batch_size"})
    settings = {
        "check": check,
        "limits": plan.settings.limits.model_dump(mode="json"),
        "classes": {name: one.model_dump(mode="json") for name, one in plan.settings.classes.items()},
        "outputs": plan.matched.indices,
        "preprocessing": _hash_of_preprocess(plan.model.preprocess),
    }
    data = hashlib.sha256()
    for item in plan.data.items:
        data.update(f"{item.name}\0{item.label}\0{item.group}\0{_regions_of(item)}\0".encode(errors="surrogateescape"))
        data.update(content_hash(item.path).encode())
    text = json.dumps(settings, sort_keys=True)
    return {
        "weights": weights.hexdigest(),
        "settings": hashlib.sha256(text.encode()).hexdigest(),
        "data": data.hexdigest(),
    }


def _regions_of(item: Item) -> str:
    def written(outline_of: Any) -> str:
        return content_hash(outline_of) if isinstance(outline_of, Path) else repr(outline_of)

    return ";".join(
        f"{one.category}{one.box}{one.shares}{one.crowd}{one.size}{written(one.outline)}"
        for one in (*item.objects, *item.others)
    )


def content_hash(path: Path) -> str:
    """Return a file's SHA-256; "unreadable" where it cannot be read. Known files are read again when they change."""
    try:
        found = path.stat()
        return _hash_of(path, found.st_size, found.st_mtime_ns)
    except OSError:
        return "unreadable"


@functools.lru_cache(maxsize=200_000)
def _hash_of(path: Path, size: int, changed: int) -> str:  # noqa: ARG001 - one for each state of a file
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _hash_of_preprocess(preprocess: Preprocess | None) -> str:
    """Return a hash of what a preprocessing makes of a fixed picture; nothing where it refuses that."""
    noise = np.random.default_rng(0).integers(0, 256, (90, 120, 3), dtype=np.uint8)
    try:
        tensor = prepare(Image.fromarray(noise), preprocess, "").tensor
    except Exception:  # noqa: BLE001 - the caller's own, made for other pictures
        return ""
    return hashlib.sha256(tensor.detach().float().cpu().contiguous().numpy().tobytes()).hexdigest()


def without_duplicates(data: Dataset) -> Dataset:
    """Leave out pictures whose file holds the same as an earlier one's; those of two classes are told apart."""
    first: dict[str, Item] = {}
    twice: list[str] = []
    torn: list[str] = []
    for item in data.items:
        known = first.setdefault(content_hash(item.path), item)
        if known is not item:
            (twice if known.label == item.label else torn).append(item.name)
    left_out = dict(data.left_out)
    if twice:
        left_out["copies of another picture"] = tuple(twice)
    if torn:
        left_out["copies of a picture of another class"] = tuple(torn)
    gone = {*twice, *torn}
    return replace(data, items=tuple(item for item in data.items if item.name not in gone), left_out=left_out)


SPARE = 10
"""Pictures of a class beyond those that must be testable, since some are not."""


def make_plan(model: LoadedModel, data: Dataset, matched: Matched, settings: Settings, today: dt.date) -> Plan:
    """Draw the sample, and settle how the check is made."""
    data = without_duplicates(data)
    with_regions = any(item.objects for item in data.items)
    settled = settings.check
    usable = [item for item in data.items if item.objects or not with_regions]
    most = max(settled.most, len(data.classes) * (settings.limits.least_pictures + SPARE))
    drawn = stratified(usable, settled.per_class, most, settled.seed)
    sample = [item for item in drawn if not settings.expects_anything(item.label)]
    backgrounds = sample if len({item.label for item in sample}) > 1 else drawn
    return Plan(model, data, matched, settings, tuple(sample), tuple(backgrounds), with_regions, today)


def load_prepared(plan: Plan, item: Item) -> PreparedPicture:
    """Return a picture as the model sees it, with its regions."""
    preprocess = plan.model.preprocess
    assert preprocess is not None
    picture = open_picture(item.path)
    tensor = prepare(picture, preprocess, item.name).tensor.float()
    known = shades(preprocess, picture.size)
    if not plan.with_regions:
        return PreparedPicture(tensor, known)
    own = [scaled(one, picture.size) for one in item.objects]
    every = [*own, *(scaled(one, picture.size) for one in item.others)]
    region = seen(outline(own, picture.size, round_boxes=True), preprocess)
    hole = seen(boxes(every, picture.size), preprocess) > 0
    return PreparedPicture(tensor, known, region, hole)
