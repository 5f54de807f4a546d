"""Explain one model of every kind, with random weights, and check the map against two independent truths.

    python -m scripts.zoo.zoo --state zoo.jsonl --markdown scripts/results/zoo.md
    python -m scripts.zoo.zoo --state zoo.jsonl --only timm:vit --redo wrong refused

Each finished model is a line of the state file, and an interrupted run continues where it stopped. Each model is tested
on a square picture and a wider one. The true grid is that of the model's own description (``zoo_models.py``). For the
position, a strip of the picture is replaced with noise: the layer's cells must change most under it. A model is

right     if its map has the true grid and isn't blank, its cells lie where they are drawn, and the layer isn't in the
          first third of the calls, unless no later layer works;
refused   if camkit said that it can't choose a layer, or can't tell how its output is laid out;
doubted   if the map is not right, but camkit said that it isn't sure of the layer (``TargetLayer.sure``);
wrong     if none of these is true: camkit was silently wrong;
unusable  if the model itself can't be built or run, or takes no pictures;
failed    if anything else went wrong.
"""

from __future__ import annotations

import argparse
import gc
import json
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import camkit
from camkit.errors import LayerError
from camkit.layers.choose import decide
from scripts.zoo.zoo_models import SOURCES, Entry, Grid, Size, named

STATUSES = ("wrong", "failed", "doubted", "refused", "right", "unusable")
"""The worst status comes first; a model gets the worst status of its sizes."""

STRIPS = 6
"""How many rows, and columns, of the grid are tested by replacing the picture under them, twice each: more take too
long."""

LEAST_REPEATED = 0.8
"""The least correlation between the changes from two replacements of the same strips; below it, noise hides where the
cells lie. Layers that keep positions reach 0.98 and more, noise reaches 0.6."""

LEAST_PLACE = 0.8
"""The least correlation between a strip's position and the position of the cells that change most; by chance, both axes
reach it in 1 of 1,000 models."""

MOST_OFFSET = 0.75
"""The largest offset, in cells: strided convolutions shift by up to half a cell, a wrong prefix token by a whole
one."""

EARLY = {
    "ssd300_vgg16": "half of its calls come after the last grid that all boxes are computed from",
    "Perceiver": "only its input to attention has a grid",
}
"""Name prefixes of models whose deepest grid may be in the first third of the calls, and why."""


class Claim(NamedTuple):
    """What camkit claims of a model: the layer, the layout of its output, the map's grid, and whether it is blank.

    ``positions`` are in pixels, ``auto`` is what the default method took, and ``sure`` whether camkit had no doubt.
    """

    layer: str
    kind: str
    prefix: int
    layout: Grid
    grid: Grid
    blank: bool
    positions: tuple[np.ndarray, ...]
    auto: str
    sure: bool = True


@dataclass
class Seen:
    """The result for a model at one size, of Grad-CAM at the deepest grid; ``auto`` is what the default method took."""

    size: Size
    status: str = "unusable"
    said: str = ""
    layer: str = ""
    layout: str = ""
    grid: Grid = ()
    truth: Sequence[Grid] = ()
    depth: float | None = None
    place: float | None = None
    offset: float | None = None
    auto: str = ""


def trained_like(model: nn.Module, images: Tensor) -> nn.Module:
    """Make a new model pass signals on like a trained one, without changing its structure.

    Batch norms get these images' statistics and weights of one, since the activations of many networks fade otherwise;
    layers whose weights are all zero get small random ones; and a detector keeps boxes with low scores.
    """
    detector: Any = getattr(model, "roi_heads", model)
    if hasattr(detector, "score_thresh"):
        detector.score_thresh = 0.0
    generator = torch.Generator().manual_seed(1)
    for module in model.eval().modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, (nn.Linear, nn.Conv2d)) and isinstance(weight, Tensor) and not weight.any():
            weight.data.copy_(torch.randn(weight.shape, generator=generator) * 0.02)
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
            module.reset_parameters()
            module.momentum = None  # the plain mean
            module.train()
    with torch.no_grad():
        model(images)
    return model.eval()


def claim(model: nn.Module, images: Tensor, target: Any = None) -> Claim:
    """Explain the first image, and return what camkit claims."""
    explainer = camkit.Explainer(model)
    taken = explainer(images[0], target=target)
    explanation = explainer.using("hirescam" if taken.method == "hirescam" else "gradcam")(images[0], target=target)
    chosen = decide(model, images).chosen()
    layout = chosen.layout
    assert layout is not None
    blank = not all(np.abs(found.raw).max() > 0 for found in (explanation, taken))
    auto = f"{taken.method}, {taken.layer}"
    grid = explanation.raw.shape
    about = explanation.layer, layout.kind, layout.prefix, layout.grid, grid, blank, explanation.positions, auto
    return Claim(*about, chosen.sure)


def _feature_maps(output: Any) -> Tensor | None:
    if isinstance(output, Tensor):
        return output if output.dim() > 2 and output.is_floating_point() else None
    parts = output.values() if isinstance(output, dict) else output if isinstance(output, (tuple, list)) else ()
    return next((maps for part in parts if (maps := _feature_maps(part)) is not None), None)


class _Reached(Exception):  # noqa: N818 - not an error: it ends a pass after the layer
    pass


def capture(model: nn.Module, images: Tensor, layer: str, *, whole: bool = True) -> tuple[Tensor, float]:
    """Return a layer's output ("name#2": of its second call), and the share of all calls that had finished by then.

    Without ``whole`` the model stops after that layer, and the share is 1.
    """
    name, _, call = layer.partition("#")
    wanted = model.get_submodule(name)
    ended: list[nn.Module] = []
    captured: list[tuple[Tensor, int]] = []

    def hook(module: nn.Module, _: Any, output: Any) -> None:
        ended.append(module)
        maps = _feature_maps(output) if module is wanted and ended.count(module) == int(call or 1) else None
        if maps is not None:
            captured.append((maps.clone(), len(ended)))
            if not whole:
                raise _Reached

    handles = [module.register_forward_hook(hook) for module in model.modules()]
    with torch.no_grad(), suppress(_Reached):
        model(images)
    for handle in handles:
        handle.remove()
    return captured[0][0], captured[0][1] / len(ended)


def as_cells(output: Tensor, claimed: Claim) -> Tensor:
    """Return a layer's output (1, ...) as cells (C, h, w), read in the claimed layout."""
    if claimed.kind == "sequence_first":
        output = output.transpose(0, 1)
    if claimed.kind not in ("channels_first", "tokens_last"):
        output = output.movedim(-1, 1)
    cells = output[0]
    if not claimed.kind.startswith("channels"):
        last = claimed.prefix + claimed.layout[0] * claimed.layout[1]
        cells = cells[:, claimed.prefix : last].unflatten(1, claimed.layout)
    if tuple(cells.shape[1:]) != claimed.layout:
        raise ValueError(f"cells of shape {named(cells.shape)} are not a grid of {named(claimed.layout)}")
    return cells


def _repeated(rounds: Sequence[Tensor]) -> bool:
    return float(torch.corrcoef(torch.stack(list(rounds)).flatten(1))[0, 1]) > LEAST_REPEATED


def place(
    cells_of: Callable[[Tensor], Tensor], images: Tensor, positions: Sequence[np.ndarray]
) -> tuple[float, float] | None:
    """Return how well cells (C, h, w) lie where they are drawn: the axes' smallest correlation and largest offset.

    The offset is the mean distance, in cells, between the strips and the positions of the cells that change.
    A strip of the picture, as wide as a cell, is replaced with noise. In a random network every cell changes with every
    strip, so the cells that count change more than they do for the other strips. Returns None if two replacements of a
    strip disagree, as after attention that random weights leave uniform. If the channels agree instead of the cells,
    the axes are confused, and the correlation is 0.
    """
    cells = cells_of(images)
    generator = torch.Generator().manual_seed(3)
    by_axis: list[tuple[float, float]] = []
    for axis, side in enumerate(cells.shape[1:]):
        step = images.shape[axis + 2] / side
        strips = torch.linspace(0, side - 1, min(STRIPS, side)).round()
        middles = torch.tensor([(round(strip * step) + round((strip + 1) * step) - 1) / 2 for strip in strips.tolist()])
        if side < 2:
            continue
        by_cell, by_channel = [], []
        for _ in range(2):
            changes = []
            for strip in strips.tolist():
                changed = images.clone()
                part = changed.narrow(axis + 2, round(strip * step), round((strip + 1) * step) - round(strip * step))
                part.copy_(torch.randn(part.shape, generator=generator))
                change = (cells_of(changed) - cells).abs()
                changes.append(change / change.sum())
            more = torch.stack(changes) - torch.stack(changes).mean(0)
            by_cell.append(more.sum(1))
            by_channel.append(more.sum((2, 3)))
        if not _repeated(by_cell):
            if _repeated(by_channel):
                return 0.0, 0.0
            return None
        profile = torch.stack(by_cell).mean(0).sum(2 - axis).clamp(min=0)
        centres = (profile * torch.from_numpy(positions[axis])).sum(1) / profile.sum(1)
        offset = float((centres - middles).mean().abs()) / step
        by_axis.append((float(torch.corrcoef(torch.stack([centres.float(), middles]))[0, 1]), offset))
    if not by_axis:
        return None
    correlations, offsets = zip(*by_axis, strict=True)
    return min(correlations), max(offsets)


def judge(
    model: nn.Module,
    images: Tensor,
    truth: Sequence[Grid],
    claimed: Claim,
    *,
    early: bool = False,
    placed: bool = False,
) -> Seen:
    """Compare a claim with the true grids, and with the cells that change when the picture does.

    ``early`` allows an early layer. Measuring positions takes most of the time, so after one size has been ``placed``,
    only tokens are measured again: their axes could be confused at one size and not at another.
    """
    layout = claimed.kind + (f" after {claimed.prefix}" if claimed.prefix else "")
    status = "wrong" if claimed.sure else "doubted"
    seen = Seen((images.shape[2], images.shape[3]), status, "", claimed.layer, layout, claimed.grid, list(truth))
    seen.auto = claimed.auto
    if claimed.grid not in truth or claimed.layout != claimed.grid:
        seen.said = f"the grid is {' or '.join(map(named, truth))}, not {named(claimed.grid)}"
        return seen
    output, depth = capture(model, images, claimed.layer)
    seen.depth = round(depth, 2)
    try:
        as_cells(output, claimed)
    except (RuntimeError, ValueError) as error:
        seen.said = f"the layer's output does not have this layout: {error}"
        return seen
    if not placed or not claimed.kind.startswith("channels"):
        placed_at = place(
            lambda part: as_cells(capture(model, part, claimed.layer, whole=False)[0], claimed),
            images,
            claimed.positions,
        )
        seen.place, seen.offset = placed_at or (None, None)
    if claimed.blank:
        seen.said = "a blank map"
    elif depth < 1 / 3 and not early:
        seen.said = "an early layer"
    elif seen.place is not None and not (seen.place > LEAST_PLACE and (seen.offset or 0) < MOST_OFFSET):
        seen.said = f"cells lie elsewhere: correlation {seen.place:.2f}, {seen.offset:.2f} cells off"
    else:
        seen.status = "right"
    return seen


def look(entry: Entry, size: Size, models: dict[Size | None, nn.Module], *, placed: bool) -> Seen:
    """Explain a random picture of one size with the model, built for this size or else at its default size."""
    reason = entry.unusable
    early = entry.model.startswith(tuple(EARLY))
    for fitted in () if reason else (None, size) if size[0] == size[1] else (size, None):
        try:
            torch.manual_seed(0)
            model = models.get(fitted)
            if model is None:
                built = entry.build(**({"img_size": fitted} if fitted else {}))
                model = trained_like(built, torch.randn(4, 3, *size))
            models |= {} if fitted else {None: model}
            images = torch.randn(1, 3, *size, generator=torch.Generator().manual_seed(2))
            with torch.no_grad():
                truth = entry.truth(model, images)
        except TimeoutError:
            raise
        except Exception as error:  # noqa: BLE001 - any error of the model is recorded as the reason
            reason = f"{type(error).__name__}: {error}" if fitted is None or not reason else reason
            continue
        try:
            return judge(model, images, truth, claim(model, images, entry.target), early=early, placed=placed)
        except LayerError as error:
            return Seen(size, "refused", str(error), truth=truth)
    return Seen(size, said=reason)


def visit(entry: Entry, seconds: int = 300) -> dict[str, Any]:
    """Test a model at the first wider size that it accepts and at a square one, each within this many seconds."""

    def too_slow(*_: Any) -> None:
        raise TimeoutError(f"not finished after {seconds} s")

    begin, side, models = time.perf_counter(), entry.side, dict[Size | None, nn.Module]()
    sizes: list[Seen] = []
    signal.signal(signal.SIGALRM, too_slow)
    for widths in (
        (side * 3 // 2, side * 2, side * 3 // 2 // 28 * 28),
        (side,),
    ):  # whole windows; multiples of 14 for patches of 14
        tries: list[Seen] = []
        for width in widths[:1] if entry.unusable else widths:
            signal.alarm(seconds)
            try:
                tries.append(look(entry, (side, width), models, placed=any(seen.place for seen in sizes)))
            except Exception as error:  # noqa: BLE001 - the table must contain every failure
                tries.append(Seen((side, width), "failed", f"{type(error).__name__}: {error}"))
            finally:
                signal.alarm(0)
                gc.collect()
            if tries[-1].status != "unusable":
                break
        sizes.insert(0, min(tries, key=lambda seen: STATUSES.index(seen.status)))
    return {
        "source": entry.source,
        "model": entry.model,
        "status": min((seen.status for seen in sizes), key=STATUSES.index),
        "seconds": round(time.perf_counter() - begin, 1),
        "seen": [asdict(seen) for seen in sizes],
    }


PAGE = """# The zoo

Results of `scripts/zoo/zoo.py` on {date} with {versions}: models with random weights, each tested \
on a square and a wider picture.

{summary}

*Right*: the map has the grid that the model's own description gives, isn't blank, and its cells lie where they are \
drawn. *Refused*: camkit said that it can't choose a layer. *Doubted*: the map is not right, and camkit said that it \
isn't sure of the layer. *Wrong*: none of these. *Unusable*: the model can't be built or \
run, or takes no pictures; if only the wider size is unusable, the square one counts. *Place* is the correlation \
between the position of a replaced strip of the picture and the position of the cells that change; it is empty if \
random weights spread every change evenly. *Layer*, *layout*, *grid* and *place* are those of `gradcam`, and *auto* \
is what the default method takes. [Video networks](zoo_video.md) have a page of their own. Not tested: optical flow \
and quantized models, all but the smallest model of each timm family, and Hugging Face models other than image \
classifiers. Hugging Face's models are built with few layers.

{table}
"""


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in (header, ["---"] * len(header), *rows))


def _line(row: dict[str, Any]) -> list[str]:
    seen = row["seen"]
    layers = dict.fromkeys(f"`{result['layer']}`" for result in seen if result["layer"])
    grids = (f"{named(result['size'])}: {named(result['grid'])}" for result in seen if result["grid"])
    places = [result["place"] for result in seen if result["place"] is not None]
    remarks = [(result["said"].partition("\n")[0][:160], named(result["size"])) for result in seen if result["said"]]
    said = {remark.replace("|", "/"): size for remark, size in remarks}
    return [
        row["model"],
        ", ".join(layers),
        ", ".join(dict.fromkeys(result["layout"] for result in seen if result["layout"])),
        "; ".join(grids),
        f"{min(places):.2f}" if places else "",
        ", ".join(dict.fromkeys(result["auto"] for result in seen if result.get("auto"))),
        "; ".join([row["status"], *(f"{size}: {reason}" for reason, size in said.items())]),
    ]


def page(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as a Markdown page."""
    packages = ("camkit", "torch", "torchvision", "timm", "transformers")
    counts = {source: Counter(row["status"] for row in rows if row["source"] == source) for source in SOURCES}
    shown = ("right", "refused", "doubted", "wrong", "unusable", "failed")
    summary = [[source, count.total(), *(count[status] for status in shown)] for source, count in counts.items()]
    lines = [_line(row) for source in SOURCES for row in rows if row["source"] == source]
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    heads = ("", "models", *shown), ("model", "layer", "layout", "grid", "place", "auto", "status")
    tables = {"summary": table(heads[0], summary), "table": table(heads[1], lines)}
    return PAGE.format(date=f"{datetime.now(UTC):%Y-%m-%d}", versions=versions, **tables)


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--state", type=Path, default=Path("zoo.jsonl"), metavar="FILE", help="the file with the results so far"
    )
    parser.add_argument(
        "--sources", nargs="+", choices=SOURCES, default=list(SOURCES), help="test only these packages' models"
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="PREFIX",
        help="test only models whose SOURCE:MODEL starts with this, for example timm:vit",
    )
    parser.add_argument("--redo", nargs="+", choices=STATUSES, default=[], help="test models with these statuses again")
    parser.add_argument("--seconds", type=int, default=300, help="the time limit for each model and size")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the results to this page")
    return parser.parse_args()


def main() -> None:
    """Test the models that have no result yet, and write the page."""
    given = options()
    warnings.simplefilter("ignore")
    lines = [json.loads(line) for line in given.state.read_text().splitlines()] if given.state.exists() else []
    rows = {(line["source"], line["model"]): line for line in lines if "model" in line}
    smallest: dict[str, str] = next((line["smallest"] for line in reversed(lines) if "smallest" in line), {})
    with given.state.open("a") as file:
        for source in given.sources:
            entries = list(SOURCES[source](smallest))
            print(json.dumps({"smallest": smallest}), file=file, flush=True)
            for entry in entries:
                before = rows.get((source, entry.model), {"status": None})["status"]
                if not f"{source}:{entry.model}".startswith(given.only) or (before and before not in given.redo):
                    continue
                row = rows[source, entry.model] = visit(entry, given.seconds)
                print(json.dumps(row), file=file, flush=True)
                print(f"{row['status']:8}  {source}:{entry.model}  {row['seconds']} s", flush=True)
    if given.markdown:
        given.markdown.write_text(page(list(rows.values())))


if __name__ == "__main__":
    main()
