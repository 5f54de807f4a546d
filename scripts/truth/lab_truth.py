r"""Judge every method at every layer on networks of each kind, on pictures of which it is known what makes the class.

Small networks of timm's classes learn drawn scenes with a planted cause (``truth_scenes``, ``truth_networks``). Then
the maps of all methods are compared with the pixels that make the class (``truth_measures``). Needs PyTorch,
torchvision, timm and what ``import camkit`` needs, and in practice a GPU:

    python -m scripts.truth.lab_truth --out truth.jsonl --markdown truth.md

Each network and cause is one line of the file, written as soon as it is finished. A run that is cut off is continued by
the same command. ``--only "ViT"`` or ``--only "colour"`` limits it to names that contain the text; it can be given
several times, and all texts must occur. ``--keep FOLDER`` keeps the trained weights, and a later run with another file
measures them again without training. With ``--most 0``, it only writes the tables of the lines that are there.

On a CPU, a trial of the whole way takes two minutes:

    python -m scripts.truth.lab_truth --out trial.jsonl --only "ResNet, last grid 2" --only colour --workers 1 \
        --width 64 --cycles 350 --batch 64 --pool 8000 --pictures 16 --layers 4

The columns of the tables:

AUROC: the probability that a pixel of the truth is hotter than another one (equal heat counts half).
maximum: the hottest pixel belongs to the truth.
of two: in a picture with two classes, the heat of each is higher on its own pixels than on the other's.
deleted: the class's probability with the hottest 5, 10, 20 and 40 % of the pixels grey, on average; low is good.
kept: the same with only these pixels kept; high is good.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from scripts.lab.lab_run import Row, finished, run_models
from scripts.truth.truth_measures import AUTO, measured_rows, subject
from scripts.truth.truth_networks import GOAL, KINDS, Training, build, train
from scripts.truth.truth_scenes import CAUSES

_ORDER = ("colour", "relation", "texture", "background", "mark")
"""Relations take the longest to learn, and are not left to the end."""

_BEST = 4
"""How many of the best rows a table shows for each kind of network."""

_FIGURES = ("auroc", "hit", "pair", "deletion", "insertion")
_HEADINGS = ("AUROC", "maximum", "of two", "deleted", "kept")


@dataclass(frozen=True)
class Network:
    """A kind of network, and what makes the class in its pictures."""

    kind: str
    cause: str

    @property
    def name(self) -> str:
        """The network's name in the file."""
        return f"{self.kind} / {self.cause}"


@dataclass(frozen=True)
class Settings:
    """What is the same for all networks of a run."""

    device: str
    training: Training
    width: int
    seed: int
    pictures: int
    layers: int
    keep: Path | None


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=Path("truth.jsonl"), help="the file with a line for each network")
    parser.add_argument("--most", type=int, default=None, help="train at most this many networks in this run")
    parser.add_argument("--only", action="append", default=[], help="text in the name 'kind / cause'; repeatable")
    parser.add_argument("--workers", type=int, default=6, help="networks at the same time")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--pictures", type=int, default=128, help="pictures per network")
    parser.add_argument("--layers", type=int, default=12, help="most layers per network")
    parser.add_argument("--cycles", type=int, nargs="+", default=list(Training.cycles), help="steps of each cycle")
    parser.add_argument("--batch", type=int, default=Training.batch)
    parser.add_argument("--pool", type=int, default=Training.pool, help="scenes to train on")
    parser.add_argument("--width", type=int, default=128, help="of the networks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a folder for the trained weights")
    parser.add_argument("--markdown", type=Path, help="write the tables of all lines to this file")
    return parser


def main() -> None:
    """Run the networks that have no line yet, and write the tables."""
    given = arguments().parse_args()
    settings = Settings(
        device=given.device,
        training=Training(tuple(given.cycles), given.batch, given.pool),
        width=given.width,
        seed=given.seed,
        pictures=given.pictures,
        layers=given.layers,
        keep=given.keep,
    )
    networks = [Network(kind, cause) for cause, kind in itertools.product(_ORDER, KINDS)]
    networks = [network for network in networks if all(text in network.name for text in given.only)]
    run_models(given.out, networks, make, (settings,), given.workers, given.most, summary)
    if given.markdown is not None:
        given.markdown.write_text(tables(finished(given.out).values()), "utf-8")


def summary(row: Row) -> str:
    """Return a line about a network: its accuracy, and the AUROC of the default and of the best row."""
    judged = [entry for entry in row["rows"] if entry.get("auroc") is not None]
    default = next((f"{entry['auroc']:.3f}" for entry in judged if _is_default(entry)), "none")
    best = max(judged, key=lambda entry: entry["auroc"])
    seconds = row["seconds"]
    return (
        f"{row['name']}: accuracy {row['accuracy']:.3f}{'' if row['accuracy'] >= GOAL else ' (short of the goal)'}, "
        f"default {default}, best {best['auroc']:.3f} ({best['method']} at {best['layer'] or 'the whole model'}), "
        f"{seconds['training']:.0f} + {seconds['measuring']:.0f} s"
    )


def make(spec: Network, settings: Settings) -> Row:
    """Train a network, or read its weights, and measure its maps."""
    torch.set_num_threads(1)
    device = torch.device(settings.device)
    start = time.time()
    network, accuracy = _trained(spec.kind, spec.cause, device, settings)
    trained = time.time()
    judged = subject(network, spec.cause, settings.pictures, torch.Generator(device).manual_seed(1000 + settings.seed))
    rows = measured_rows(judged, settings.layers)
    return {
        "name": spec.name,
        "kind": spec.kind,
        "cause": spec.cause,
        "accuracy": round(accuracy, 4),
        "pictures": len(judged.inputs),
        "pairs": 0 if judged.pairs is None else len(judged.pairs),
        "seconds": {"training": round(trained - start, 1), "measuring": round(time.time() - trained, 1)},
        "rows": rows,
    }


def _trained(kind: str, cause: str, device: torch.device, settings: Settings) -> tuple[nn.Module, float]:
    """Return a trained network and its accuracy. With ``keep``, its weights are read if they are there."""
    file = None
    if settings.keep is not None:
        settings.keep.mkdir(parents=True, exist_ok=True)
        file = kept_file(settings.keep, kind, cause, settings.width)
    if file is not None and file.exists():
        kept = torch.load(file, map_location=device, weights_only=True)
        network = build(kind, cause, settings.width).to(device)
        network.load_state_dict(kept["weights"])
        return network.eval(), float(kept["accuracy"])
    network, accuracy = train(kind, cause, device, settings.training, width=settings.width, seed=settings.seed)
    if file is not None:
        torch.save({"weights": network.state_dict(), "accuracy": accuracy}, file)
    return network, accuracy


def kept_file(folder: Path, kind: str, cause: str, width: int) -> Path:
    """Return the file with a network's trained weights."""
    letters = "".join(letter if letter.isalnum() else "-" for letter in f"{kind} {cause} {width}")
    return folder / f"{letters}.pt"


def _is_default(entry: Row) -> bool:
    """Tell whether a row is Grad-CAM at the layer that camkit chooses."""
    return bool(entry["method"] == "gradcam" and entry.get("default"))


def tables(lines: Iterable[Row]) -> str:
    """Return the tables as Markdown: accuracies, AUROC for each cause, and a table for each kind of network."""
    rows = list(lines)
    kinds = [kind for kind in KINDS if any(row["kind"] == kind for row in rows)]
    causes = [cause for cause in CAUSES if any(row["cause"] == cause for row in rows)]
    by_name = {row["name"]: row for row in rows}
    text = ["### Accuracy on held-out scenes", ""]
    text += ["| network | " + " | ".join(causes) + " |", "|---" * (1 + len(causes)) + "|"]
    for kind in kinds:
        text.append(f"| {kind} | " + " | ".join(_accuracy(by_name.get(f"{kind} / {cause}")) for cause in causes) + " |")
    text += ["", f"In brackets: below {GOAL:.0%}; these networks do not count in the tables below.", ""]
    counted = [row for row in rows if row["accuracy"] >= GOAL]
    text += ["### Pixel AUROC: the default, the best cheap row of each cause, and `auto`", ""]
    text += ["| network | " + " | ".join(causes) + " |", "|---" * (1 + len(causes)) + "|"]
    for kind in kinds:
        cells = [next((_three(row) for row in counted if row["name"] == f"{kind} / {cause}"), "") for cause in causes]
        text.append(f"| {kind} | " + " | ".join(cells) + " |")
    for kind in kinds:
        text += _table_of_kind(kind, [row for row in counted if row["kind"] == kind])
    return "\n".join(text) + "\n"


def _accuracy(row: Row | None) -> str:
    if row is None:
        return ""
    return f"{row['accuracy']:.3f}" if row["accuracy"] >= GOAL else f"({row['accuracy']:.3f})"


def _three(row: Row) -> str:
    judged = [entry for entry in row["rows"] if entry.get("auroc") is not None and entry["method"] != "random"]
    default = next((f"{entry['auroc']:.3f}" for entry in judged if _is_default(entry)), "-")
    auto = next((f"{entry['auroc']:.3f}" for entry in judged if entry["method"] == AUTO), "-")
    best = max(judged, key=lambda entry: entry["auroc"])
    return f"{default}; {best['auroc']:.3f} `{best['method']}` {_place(best['layer'])}; {auto}"


def _place(layer: str) -> str:
    return f"at `{layer}`" if layer else "on the whole model"


def _table_of_kind(kind: str, rows: Sequence[Row]) -> list[str]:
    """Return the table of a kind: means over its causes, the default and ``auto`` among the best rows."""
    if not rows:
        return []
    grouped: dict[tuple[str, str], list[Row]] = {}
    refused: dict[str, str] = {}
    for entry in itertools.chain.from_iterable(row["rows"] for row in rows):
        if "refusal" in entry:
            refused[entry["method"]] = entry["refusal"]
        else:
            layer = "" if entry["method"] == AUTO else entry["layer"]
            grouped.setdefault((entry["method"], layer), []).append(entry)
    complete = {key: entries for key, entries in grouped.items() if len(entries) == len(rows)}
    means = {
        key: [_mean(entry[figure] for entry in entries) for figure in _FIGURES] for key, entries in complete.items()
    }
    best = sorted((key for key in means if key[0] != "random"), key=lambda key: -(means[key][0] or 0))
    shown = dict.fromkeys(best[:_BEST])
    for wanted in (_is_default, lambda entry: entry["method"] == AUTO, lambda entry: entry["method"] == "random"):
        shown |= dict.fromkeys(key for key, entries in complete.items() if wanted(entries[0]))
    for method in dict.fromkeys(key[0] for key in best):  # the best layer of each method
        shown |= {next(key for key in best if key[0] == method): None}
    causes = ", ".join(row["cause"] for row in rows)
    text = ["", f"### {kind}", "", f"Means over {causes}.", ""]
    text += ["| method | layer | " + " | ".join(_HEADINGS) + " |", "|---" * (2 + len(_HEADINGS)) + "|"]
    for key in sorted(shown, key=lambda key: -(means[key][0] or 0)):
        mark = " (the default)" if _is_default(complete[key][0]) else ""
        figures = ["" if value is None else f"{value:.2f}" for value in means[key]]
        figures[0] = "" if means[key][0] is None else f"{means[key][0]:.3f}"
        text.append(f"| `{key[0]}`{mark} | {key[1] and f'`{key[1]}`'} | " + " | ".join(figures) + " |")
    never = {method: words for method, words in refused.items() if not any(key[0] == method for key in grouped)}
    return text + [f"\n`{method}` is refused: {words}" for method, words in never.items()]


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


if __name__ == "__main__":
    main()
