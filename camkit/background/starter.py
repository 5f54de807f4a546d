"""A commented ``camkit.toml`` from what is found."""

from __future__ import annotations

import json
from pathlib import Path

from camkit.background.config import Settings
from camkit.background.values import Dataset


def starter(data: Dataset, *, where: Path, model: str | None, regions: Path | None, class_map: Path | None) -> str:
    """Return the text of a config for these pictures; what is commented out is the default.

    The paths are as seen from where the config will lie.
    """
    check, limits = Settings().check, Settings().limits

    def text(value: object) -> str:
        # JSON's text is TOML's, but for DEL, and bytes of a file's name that are no characters.
        known = str(value).encode(errors="backslashreplace").decode()
        return json.dumps(known, ensure_ascii=False).replace("\x7f", "\\u007f")

    def remark(value: str) -> str:
        return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in value)

    def path(key: str, value: Path | None, example: str) -> str:
        return f"{key} = {text(value.as_posix())}" if value is not None else f"# {key} = {text(example)}"

    facts = "\n".join(f"# {remark(fact)}" for fact in data.facts)
    names = remark(", ".join(data.classes[:8])) + (", ..." if len(data.classes) > 8 else "")
    first = data.classes[0]
    return f"""# camkit check: does the model need the object, or does it get by on the background?
# Found:
{facts}
# classes: {names}

[model]
# as for camkit --model: torchvision's, timm:NAME, hf:NAME, file.py:factory
{"" if model else "# "}name = {text(model or "resnet50")}
# weights = "model.pth"
# labels = "labels.txt"       # the names of the outputs, one a line
# size = 224
# device = "cuda"

[data]
path = {text(where.as_posix())}
{path("regions", regions, "instances.json")}{"" if regions else "   # found by themselves beside the pictures"}
{path("class_map", class_map, "classes.json")}{"" if class_map else "    # from a class to outputs of the model"}
# group = "patient"           # a column of the CSV: pictures that belong together

[check]
# per_class = {check.per_class}             # pictures of each class in the experiment
# pastes = {check.pastes}                  # backgrounds of either kind for each of them
# seed = {check.seed}
# layer = "layer4"            # chosen by itself otherwise
# ring_is_background = false  # without regions: let the ring swap fail a model, not only warn

[limits]
# gap = {limits.gap}                  # accuracy on own backgrounds minus that on others'
# sufficiency = {limits.sufficiency}          # accuracy without the object, above chance
# attraction = {limits.attraction}           # how often its background draws its name to other classes' objects
# skill = {limits.skill}               # heat on the objects, 0 chance to 1 perfect: below it is a warning
# least_pictures = {limits.least_pictures}

# [classes.{text(first)}]
# expect = "any"              # this class may be recognised by anything, or by other objects too: ["rider"]

# [[waivers]]
# class = {text(first)}
# reason = "known; retraining is planned"
# expires = 2030-01-31
"""
