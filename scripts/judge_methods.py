"""Judges the methods on networks with real weights and photos, and writes the tables into docs/methods.md.

    .venv/bin/python scripts/judge_methods.py --data ../shared/data mobilenet_v2

Each seed draws 50 photos of its own and shuffles the weights anew. Each network has its own section of the page, so
that networks can be judged one by one. Each seed has a process of its own.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import camkit
from camkit.comparison.judge import MethodJudgement

PAGE = Path(__file__).parents[1] / "docs" / "methods.md"

NETWORKS = {
    "mobilenet_v2": ("mobilenet_v2", "mobilenet_v2-coral_qat.pth"),
    "squeezenet1_1": ("squeezenet1_1", "squeezenet1_1-winml_fp16.pth"),
    "tf_efficientnet_lite0": ("timm:tf_efficientnet_lite0", "tf_efficientnet_lite0-tpu.pth"),
}
"""For each network, what ``camkit.load_model`` takes, and the file of its weights."""

METHODS = (
    "gradcam",
    "gradcam++",
    "hirescam",
    "layercam",
    "finercam",
    "refinecam",
    "ablationcam",
    "reciprocam",
    "fullgrad",
    "eigencam",
    "kpcacam",
    "guidedbackprop",
    "guidedgradcam",
)
"""The usual methods of ``judge`` for convolutional networks, less ``shapleycam``, whose maps are those of ``gradcam``
here, since these networks are piecewise linear after the layer; and guided backpropagation in both forms."""

SEEDS = (0, 1)
PHOTOS = 50


def photos(data: Path) -> list[Path]:
    """Return the photos whose class ImageNet has, in a fixed order."""
    classes = json.loads((data / "caltech" / "to_imagenet.json").read_text("utf-8"))
    caltech = [path for name in classes if classes[name] for path in sorted((data / "caltech" / name).glob("*.jpg"))]
    licences = json.loads((data / "open_photos" / "LICENCES.json").read_text("utf-8"))
    others = {data / "open_photos" / entry["file"] for entry in licences if entry.get("imagenet_labels")}
    return sorted(caltech) + sorted(others)


def section(found: Sequence[MethodJudgement]) -> str:
    """Return what the page says about one network: the table of the first seed, and what each seed recommends."""
    first = found[0]
    seeds = " and ".join(str(judged.seed) for judged in found)
    recommended = [judged.recommendation.row or "none" for judged in found]
    if len(set(recommended)) == 1:
        repeated = f"The recommendation is the same for the seeds {seeds}."
    else:
        each = " and ".join(f"`{row}` for seed {judged.seed}" for row, judged in zip(recommended, found, strict=True))
        repeated = f"The recommendation depends on the sample: {each}."
    notes = [f"Seed {judged.seed}, {len(judged.pictures)} photos: {judged.recommendation.sentence}" for judged in found]
    unmoved = [", ".join(f"`{row.name}`" for row in judged.rows if row.hardly_changes) or "none" for judged in found]
    same = len(set(unmoved)) == 1
    shuffled = (
        unmoved[0]
        if same
        else "; ".join(f"{names} (seed {judged.seed})" for names, judged in zip(unmoved, found, strict=True))
    )
    lines = [*notes, repeated, f"Maps that hardly change under shuffled weights: {shuffled}."]
    return "\n".join([first.table(), "", *(f"- {line}" for line in lines), ""])


def write(network: str, text: str) -> None:
    """Replace a network's section of the page."""
    page = PAGE.read_text("utf-8")
    start, end = f"<!-- judged {network} -->\n", f"<!-- end of {network} -->\n"
    before, _, rest = page.partition(start)
    _, _, after = rest.partition(end)
    PAGE.write_text(before + start + text + end + after, "utf-8")


def _judged(seed: int, network: str, data: Path, out: Path | None, pictures: int) -> MethodJudgement:
    name, weights = NETWORKS[network]
    model = camkit.load_model(name, data / "weights" / weights)

    def tell(done: int, of: int) -> None:
        print(f"{network}, seed {seed}: {done} of {of}", flush=True)

    found = camkit.judge(model, photos(data), METHODS, pictures=pictures, seed=seed, progress=tell)
    if out is not None:
        found.save(out / f"{network}-{seed}")
    return found


def main() -> None:
    """Judge the networks one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("networks", nargs="*", choices=[*NETWORKS, []], help="default: all")
    parser.add_argument("--data", type=Path, required=True, help="the folder of weights and photos")
    parser.add_argument("--out", type=Path, help="a folder for the reports of each network and seed")
    parser.add_argument("--pictures", type=int, default=PHOTOS)
    arguments = parser.parse_args()
    for network in arguments.networks or NETWORKS:
        judged = functools.partial(
            _judged, network=network, data=arguments.data, out=arguments.out, pictures=arguments.pictures
        )
        with ProcessPoolExecutor(len(SEEDS)) as processes:
            write(network, section(list(processes.map(judged, SEEDS))))


if __name__ == "__main__":
    main()
