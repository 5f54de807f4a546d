"""The mirror test for torchvision's networks with random weights: is the heat of a bright patch drawn at the patch?

    python -m scripts.placement.mirror_networks --out mirror.jsonl

Patches are planted in a picture of noise. Their heat is the change of the feature maps at the layer that camkit
chooses, drawn with the cells spread evenly and at the centres of their kernels. The same is done for the picture turned
by 180 degrees, and its heat is turned back. The error is half the shift at which the two are most alike, in cells, down
and to the right. (The centre of mass of heat lies too near to the middle: wide receptive fields are cut off.)

Kernels with random weights have a heavier side, which shifts heat too, so each is made symmetric first, unless
``--plain`` is given. A network with an error above 0.1 is also measured at twice the size, where less is cut off.
Networks that have a line in ``--out`` are not measured again.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import camkit
from camkit.types import CellPositions, Placement
from scripts.placement.placements import best_shift, drawn, likenesses, profiles
from scripts.zoo.zoo import Claim, as_cells, capture
from scripts.zoo.zoo_models import SOURCES, Entry

PLACES = ((0.3, 0.7), (0.5, 0.5), (0.7, 0.3))
"""Where patches are planted, down and to the right, as shares of the picture."""

MORE = 16
"""Pixels that the second size has more: half a stride. One pixel more would make most grids symmetric, and the mirror
test shows nothing there."""

FARTHEST, MOST = 1.5, 0.1
"""In cells: the largest shift that is tried, and the largest error of a network that passes."""


def make_symmetric(model: nn.Module) -> None:
    """Replace each kernel with the mean of its mirror images, at its former length."""
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
            weight = module.weight.detach()
            images = weight + weight.flip(2) + weight.flip(3) + weight.flip(2, 3)
            module.weight.data.copy_(images * (weight.norm() / images.norm()))


def heats(cells_of: Callable[[Tensor], Tensor], picture: Tensor, *, turned: bool) -> Tensor:
    """Return the heat of a patch at each place, (places, h, w); ``turned`` turns the picture with its patch."""
    axes = (1, 2) if turned else ()
    length = picture.shape[1] // 8
    before, rows = cells_of(picture.flip(axes)[None]), []
    for place in PLACES:
        top, left = (round(share * (side - length)) for share, side in zip(place, picture.shape[1:], strict=True))
        bright = picture.clone()
        bright[:, top : top + length, left : left + length] += 4  # standard deviations of the noise
        rows.append((cells_of(bright.flip(axes)[None]) - before).abs().sum(0))
    return torch.stack([row / row.sum() for row in rows])


def errors(heat: Tensor, turned: Tensor, side: int, places: CellPositions) -> list[float]:
    """Return how far heat lies from where it should, down and to the right, if its cells are drawn at these places."""
    maps, others = drawn(heat, (side, side), places), drawn(turned, (side, side), places).flip(1, 2)
    found = []
    for axis, cells in enumerate(places):
        stride = (cells[-1] - cells[0]) / (len(cells) - 1)
        likeness = likenesses(profiles(maps, axis), profiles(others, axis), round(FARTHEST * stride))
        found.append(round(best_shift(likeness.mean(0)) / 2 / stride, 3))
    return found


def measure(entry: Entry, model: nn.Module, side: int) -> dict[str, Any]:
    """Return the errors of one network at one size, by how its cells are spread; or why there are none."""
    picture = torch.randn(3, side, side, generator=torch.Generator().manual_seed(1))
    explainer = camkit.Explainer(model, method="gradcam", spread="centres")
    try:
        explanation: Any = explainer(picture, target=entry.target)
    except Exception as error:  # noqa: BLE001 - many networks take one size only
        return {"side": side, "said": f"{type(error).__name__}: {error}"[:200]}
    layout: Any = explainer.layer.layout
    layer, grid, placement = explanation.layer, explanation.raw.shape, explanation.placement
    claimed = Claim(layer, layout.kind, layout.prefix, layout.grid, grid, False, (), "")

    def cells_of(images: Tensor) -> Tensor:
        return as_cells(capture(model, images, layer, whole=False)[0], claimed).double()

    heat, turned = (heats(cells_of, picture, turned=turned) for turned in (False, True))
    row: dict[str, Any] = {"side": side, "layer": layer, "grid": grid, "followed": bool(placement.positions)}
    for spread, places in (("even", Placement(placement.extent)), ("centres", placement)):
        row[spread] = errors(heat, turned, side, places.centres(grid, (side, side)))
    return row


def visit(entry: Entry, *, plain: bool) -> dict[str, Any]:
    """Return the line of one network."""
    torch.manual_seed(0)
    model = entry.build().eval()
    if not plain:
        make_symmetric(model)
    detector: Any = getattr(model, "roi_heads", model)
    if hasattr(detector, "score_thresh"):  # otherwise random weights find no box to explain
        detector.score_thresh = 0.0
    rows = {"usual": measure(entry, model, entry.side), "larger": measure(entry, model, entry.side + MORE)}
    if any(max(map(abs, row.get("centres", [0]))) > MOST for row in rows.values()):
        rows["twice"] = measure(entry, model, 2 * entry.side)
    return {"model": entry.model, "plain": plain, "rows": rows}


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Return how many networks are followed, the larger errors of both axes, and what fails and why."""
    text = [f"{len(lines)} networks; size, followed, spread, median and largest error in cells:"]
    for size in ("usual", "larger", "twice"):
        rows = [line["rows"][size] for line in lines if line["rows"].get(size, {}).get("followed")]
        for spread in ("centres", "even") if rows else ():
            largest = [max(map(abs, row[spread])) for row in rows]
            text.append(f"{size:8} {len(rows):8}  {spread:7} {np.median(largest):7.3f} {max(largest):8.3f}")
    for line in lines:
        for size, row in line["rows"].items():
            lost = row.get("said") or (not row["followed"] and f"not followed at {row['layer']}")
            if lost or max(map(abs, row["centres"])) > MOST or size == "twice":
                text.append(f"{line['model']} at {row['side']}: {lost or row['centres']}")
    return "\n".join(text)


def main() -> None:
    """Measure the networks that have no line yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the file with a line for each network")
    parser.add_argument("--skip", nargs="*", default=[], help="networks to leave out")
    parser.add_argument("--plain", action="store_true", help="leave the kernels as they are initialised")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    lines = [json.loads(line) for line in given.out.read_text("utf-8").splitlines()] if given.out.exists() else []
    lines = [line for line in lines if line["plain"] == given.plain]
    for entry in SOURCES["torchvision"]({}):
        if entry.model not in [*given.skip, *(line["model"] for line in lines)]:
            lines.append(visit(entry, plain=given.plain))
            with given.out.open("a", encoding="utf-8") as file:
                print(json.dumps(lines[-1]), file=file)
    print(table(lines))


if __name__ == "__main__":
    main()
