"""Decide what a check uses before anything is computed: pictures, classes, sample, and hashes of all of them."""

from __future__ import annotations

import datetime as dt
import functools
import hashlib
import json
import stat
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from camkit.background.classes import ClassMatch
from camkit.background.cues import COMPRESSION, CUES
from camkit.background.data import in_pixels
from camkit.background.experiment import PreparedPicture
from camkit.background.render import object_region, widened_boxes
from camkit.background.sampling import stratified
from camkit.background.values import Dataset, Item
from camkit.config.settings import Settings
from camkit.images.crop import CropBoxes
from camkit.images.filling import dilated
from camkit.images.masks import MaskFile
from camkit.images.prepare import prepare
from camkit.images.quality import LOSSLESS, jpeg_quality
from camkit.images.read import open_picture
from camkit.images.regions import ShadesBySize, preprocess_region
from camkit.layers.memory import ModelMemory
from camkit.models import device_of, usual_batch_size
from camkit.models.code import code_files
from camkit.models.loaded import LoadedModel
from camkit.types import Preprocess

_UNREADABLE = "unreadable"


class FileHashes:
    """Hashes the contents of files. An unchanged file is read only once."""

    def __init__(self) -> None:
        self._hashes: dict[tuple[Path, int, int], str] = {}

    def of(self, path: Path) -> str:
        """Return the SHA-256 of a file, "unreadable" if it cannot be read."""
        try:
            state = path.stat()
            if not stat.S_ISREG(state.st_mode):
                return _UNREADABLE
            key = (path, state.st_size, state.st_mtime_ns)
            if key not in self._hashes:
                self._hashes[key] = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError:
            return _UNREADABLE
        return self._hashes[key]


@dataclass(frozen=True)
class Plan:
    """A check that is ready to run.

    Attributes:
        model: the classifier.
        data: the pictures and their objects.
        matched: the model's outputs for each class.
        settings: the settings.
        sample: the pictures of the experiment.
        backgrounds: the pictures that lend their background: the sample itself. If the sample has only one class, it
            also includes classes that may be recognised by anything.
        with_regions: whether any object is annotated.
        today: the day that decides whether waivers are in force.
        files: the hashes of the pictures and masks.
        boxes: the parts of the pictures that the model sees.
    """

    model: LoadedModel
    data: Dataset
    matched: ClassMatch
    settings: Settings
    sample: tuple[Item, ...]
    backgrounds: tuple[Item, ...]
    with_regions: bool
    today: dt.date
    files: FileHashes = field(default_factory=FileHashes)
    boxes: CropBoxes = field(default_factory=CropBoxes)

    @functools.cached_property
    def memory(self) -> ModelMemory:
        """What the passes found out about the model."""
        return ModelMemory(self.model.module)

    @functools.cached_property
    def shades(self) -> ShadesBySize:
        """What the model's preprocessing makes of black and white, kept for the most recent picture sizes."""
        assert self.model.preprocess is not None
        return ShadesBySize(self.model.preprocess)

    @functools.cached_property
    def batch_size(self) -> int:
        """The number of pictures in one forward pass."""
        return self.settings.check.batch_size or usual_batch_size(device_of(self.model.module))

    @property
    def edits(self) -> int:
        """The most edits of each sample picture that the model classifies."""
        pastes = self.settings.check.pastes
        exchanges = 2 * len(self.cues)
        return exchanges + (2 * (2 * pastes + 1) + 4 if self.with_regions else 2 * pastes + 1)

    @functools.cached_property
    def cues(self) -> tuple[str, ...]:
        """The statistics of the whole picture that are exchanged: compression only if the files differ in it."""
        differs = len({jpeg_quality(item.path) for item in self.sample}) > 1
        return tuple(name for name in CUES if name != COMPRESSION or differs)

    def name_of(self, output: int) -> str:
        """Return the data's class for an output; if there is none, the model's label or the output's number."""
        if output < 0:
            return "no answer"
        label = next((name for name, indices in self.matched.indices.items() if output in indices), None)
        labels = self.model.labels
        return label or (labels[output] if labels and output < len(labels) else f"output {output}")

    @property
    def forwards(self) -> tuple[int, int]:
        """The number of pictures that pass through the model for the heat, and for the experiment."""
        return len(self.data.items), len(self.sample) * self.edits


def fingerprint(plan: Plan) -> dict[str, str]:
    """Return hashes of the weights, of the settings that influence results, and of the pictures with their regions."""
    weights = hashlib.sha256()
    for name, tensor in sorted(plan.model.module.state_dict().items()):
        if isinstance(tensor, Tensor):
            weights.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            weights.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    settings = {
        "check": plan.settings.check.model_dump(mode="json", exclude={"batch_size"}),
        "limits": plan.settings.limits.model_dump(mode="json"),
        "classes": {name: section.model_dump(mode="json") for name, section in plan.settings.classes.items()},
        "outputs": plan.matched.indices,
        "preprocessing": _hash_preprocess(plan.model.preprocess),
    }
    data = hashlib.sha256()
    for item in plan.data.items:
        data.update(
            f"{item.name}\0{item.label}\0{item.group}\0{item.place}\0{_describe_regions(item, plan.files)}\0".encode(
                errors="surrogateescape"
            )
        )
        data.update(plan.files.of(item.path).encode())
    text = json.dumps(settings, sort_keys=True)
    return {
        "weights": weights.hexdigest(),
        "settings": hashlib.sha256(text.encode()).hexdigest(),
        "data": data.hexdigest(),
    }


def _describe_regions(item: Item, files: FileHashes) -> str:
    """Return a text that changes if any annotation of a picture changes, or the file or meaning of a mask."""
    return ";".join(
        f"{annotation.category}{annotation.box}{annotation.shares}{annotation.crowd}{annotation.size}"
        f"{_describe_outline(annotation.outline, files)}"
        for annotation in (*item.objects, *item.others)
    )


def _describe_outline(outline: Any, files: FileHashes) -> str:
    if isinstance(outline, MaskFile):
        return f"{files.of(outline.path)}{sorted(outline.readings.items())}"
    return repr(outline)


def _hash_preprocess(preprocess: Preprocess | None) -> str:
    """Return a hash of what the preprocessing returns for a fixed picture; "" if it refuses that picture."""
    noise = np.random.default_rng(0).integers(0, 256, (90, 120, 3), dtype=np.uint8)
    try:
        tensor = prepare(Image.fromarray(noise), preprocess, "").tensor
    except Exception:  # noqa: BLE001 - the user's function may raise anything for a picture it was not made for
        return ""
    return hashlib.sha256(tensor.detach().float().cpu().contiguous().numpy().tobytes()).hexdigest()


def hash_code(model: LoadedModel, files: FileHashes) -> str:
    """Return a hash of the Python files that define the model's modules and its preprocessing, and that they import."""
    return hashlib.sha256("".join(sorted(map(files.of, code_files(model)))).encode()).hexdigest()


def without_duplicates(data: Dataset, files: FileHashes) -> Dataset:
    """Leave out pictures with the same content as an earlier one; list copies in another class separately."""
    originals: dict[str, Item] = {}
    kept: list[Item] = []
    copies: list[str] = []
    mislabelled: list[str] = []
    for item in data.items:
        content = files.of(item.path)
        original = originals.setdefault(item.name if content == _UNREADABLE else content, item)
        if original is item:
            kept.append(item)
        else:
            (copies if original.label == item.label else mislabelled).append(item.name)
    left_out = dict(data.left_out)
    if copies:
        left_out["copies of another picture"] = tuple(copies)
    if mislabelled:
        left_out["copies of a picture of another class"] = tuple(mislabelled)
    return replace(data, items=tuple(kept), left_out=left_out)


SPARE_PICTURES = 10
"""How many pictures are drawn for each class beyond the least that must be tested, because some cannot be tested."""


def make_plan(model: LoadedModel, data: Dataset, matched: ClassMatch, settings: Settings, today: dt.date) -> Plan:
    """Leave out duplicates and draw the sample."""
    files = FileHashes()
    data = without_duplicates(data, files)
    with_regions = any(item.objects for item in data.items)
    check = settings.check
    usable = [item for item in data.items if item.objects or not with_regions]
    most = max(check.most, len(data.classes) * (settings.limits.least_pictures + SPARE_PICTURES))
    drawn = stratified(usable, check.per_class, most, check.seed)
    sample = [item for item in drawn if not settings.expects_anything(item.label)]
    backgrounds = sample if len({item.label for item in sample}) > 1 else drawn
    return Plan(model, data, matched, settings, tuple(sample), tuple(backgrounds), with_regions, today, files=files)


_GROWTH = 0.035
"""How far the silhouettes that are filled in a background are widened, as a share of the shorter side: 8 of 224 pixels,
which covered soft edges and shadows of hand-drawn outlines."""


def load_prepared(plan: Plan, item: Item) -> PreparedPicture:
    """Load a picture and its regions as the model sees them."""
    preprocess = plan.model.preprocess
    assert preprocess is not None
    picture = open_picture(item.path)
    tensor = prepare(picture, preprocess, item.name).tensor.float()
    shades = plan.shades.of(picture.size)
    quality = jpeg_quality(item.path) if COMPRESSION in plan.cues else LOSSLESS
    if not plan.with_regions:
        return PreparedPicture(tensor, shades, quality=quality)
    own = [in_pixels(annotation, picture.size) for annotation in item.objects]
    others = [in_pixels(annotation, picture.size) for annotation in item.others]
    drawn_own = object_region(own, picture.size, round_boxes=True)
    drawn_all = object_region([*own, *others], picture.size)
    region = preprocess_region(drawn_own, preprocess, shades)
    alike = np.array_equal(drawn_own, drawn_all)
    silhouettes = (region if alike else preprocess_region(drawn_all, preprocess, shades)) > 0
    hole = preprocess_region(widened_boxes([*own, *others], picture.size), preprocess, shades) > 0
    growth = max(1, round(_GROWTH * min(silhouettes.shape)))
    return PreparedPicture(tensor, shades, region, hole, dilated(silhouettes, growth), quality)
