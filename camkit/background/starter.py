"""Write a commented ``camkit.toml`` to start from."""

from __future__ import annotations

import json
from pathlib import Path

from camkit.background.values import Dataset
from camkit.config.settings import Settings
from camkit.errors import printable

_MOST_CLASSES = 8
"""Classes listed in the comment at the top, at most."""


def starter_config(
    data: Dataset, *, where: Path, model: str | None, regions: Path | None, class_map: Path | None
) -> str:
    """Return the text of a config for these pictures; commented lines show the defaults.

    The paths are relative to the folder of the config.
    """
    check, limits = Settings().check, Settings().limits
    facts = "\n".join(f"# {printable(fact)}" for fact in data.facts)
    names = printable(", ".join(data.classes[:_MOST_CLASSES])) + (", ..." * (len(data.classes) > _MOST_CLASSES))
    example = _quoted(data.classes[0])
    return f"""# camkit check: does the model need the object, or is the background enough for it?
# Found:
{facts}
# classes: {names}

[model]
# as for camkit --model: a name in torchvision, timm:NAME, hf:NAME or file.py:factory
{"" if model else "# "}name = {_quoted(model or "resnet50")}
# weights = "model.pth"
# labels = "labels.txt"       # the names of the outputs, one per line
# size = 224
# device = "cuda"

[data]
path = {_quoted(where.as_posix())}
{_path_line("regions", regions, "instances.json", "   # found beside the pictures if not given")}
{_path_line("class_map", class_map, "classes.json", "    # from each class to outputs of the model")}
# group = "patient"           # the CSV column that says which pictures belong together

[check]
# per_class = {check.per_class}             # pictures of each class in the experiment
# pastes = {check.pastes}                  # backgrounds of each kind for each of them
# seed = {check.seed}
# layer = "layer4"            # camkit chooses one if not given
# ring_is_background = false  # true: without regions, the ring swap can fail a model and not only warn

[limits]
# gap = {limits.gap}                  # accuracy on own backgrounds minus accuracy on others
# sufficiency = {limits.sufficiency}          # accuracy without the object, above chance
# attraction = {limits.attraction}           # how often a background draws its class's name to other objects
# skill = {limits.skill}               # heat on the objects, 0 chance to 1 perfect; below it is a warning
# least_pictures = {limits.least_pictures}

# [classes.{example}]
# expect = "any"              # this class may be recognised by anything; ["rider"]: also by riders

# [[waivers]]
# class = {example}
# reason = "known; retraining is planned"
# expires = 2030-01-31
"""


def _quoted(value: str) -> str:
    """Return a TOML string.

    A JSON string is one, except that TOML escapes DEL, and allows no bytes of a file name that are not characters.
    """
    characters = value.encode(errors="backslashreplace").decode()
    return json.dumps(characters, ensure_ascii=False).replace("\x7f", "\\u007f")


def _path_line(key: str, path: Path | None, example: str, comment: str) -> str:
    """Return the line of a path that is known, or a commented example."""
    return f"{key} = {_quoted(path.as_posix())}" if path is not None else f"# {key} = {_quoted(example)}{comment}"
