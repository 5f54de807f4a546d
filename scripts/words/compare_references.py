"""Compares kinds of pictures that could stand for references: do they tell which words need the picture?

    OMP_NUM_THREADS=1 python -m scripts.words.compare_references --models trained/ more/ --scenes 40

For each kind and model, the table has the AUROC of ``needs_picture`` between words that something in the picture
decides and words that nothing in it decides; then, in brackets, the share of the former that stay below 0.69 nats, and
the share of the latter that exceed it.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from camkit.images.references import smooth_noise
from camkit.sentences.reading import SentenceReader
from camkit.sentences.references import made_pictures
from scripts.words.judge_words import SEED, auroc, words_known
from scripts.words.word_model import architecture_of, load
from scripts.words.word_scenes import IN_PICTURE, SIDE, draw

COUNT = 16
SIZE = (SIDE, SIDE)
HALVED = float(np.log(2))


def kinds() -> Mapping[str, Sequence[Image.Image]]:
    """Return 16 pictures of each kind."""
    generator = torch.Generator().manual_seed(0)
    noise = smooth_noise(3 * COUNT, SIZE).reshape(COUNT, 3, *SIZE)
    colours, contrasts = (torch.rand(COUNT, count, 1, 1, generator=generator) for count in (3, 1))
    plain = colours.expand(-1, -1, *SIZE)
    greys = torch.linspace(0, 1, 2 * COUNT + 1)[1::2, None, None, None].expand(-1, 3, *SIZE)
    varied = colours + contrasts * (noise - noise.mean((2, 3), keepdim=True))
    half = COUNT // 2
    return {
        "smooth noise, full contrast": _pictures(noise),
        "smooth noise, each around a colour and with a contrast of its own": _pictures(varied),
        "one colour each": _pictures(plain),
        "greys": _pictures(greys),
        "full contrast, and one colour each: half of either": _pictures(torch.cat([noise[:half], plain[:half]])),
        "varied noise, and one colour each: half of either": _pictures(torch.cat([varied[:half], plain[:half]])),
        "varied noise, and greys: half of either (camkit's)": made_pictures(SIZE),
    }


def _pictures(values: torch.Tensor) -> list[Image.Image]:
    levels = (255 * values.clamp(0, 1)).round().permute(0, 2, 3, 1).numpy().astype(np.uint8)
    return [Image.fromarray(each) for each in levels]


def judged(folder: Path, scenes: int) -> list[str]:
    """Return the cells of one model's column."""
    model, processor = load(folder)
    reader = SentenceReader(model, processor, architecture_of(model).prompt)
    needed: list[bool] = []
    needs: list[list[float]] = []
    for number in range(scenes):
        scene = draw((SEED, number))
        picture = Image.fromarray(scene.picture)
        readings = [reader.read(picture, scene.sentence, list(each), 40) for each in kinds().values()]
        known = words_known(readings[0])
        places = [place for place, word in enumerate(scene.words) if known[place] and word.text not in ",."]
        needed += [scene.words[place].cause in IN_PICTURE for place in places]
        needs += [[float(reading.needs[place]) for reading in readings] for place in places]
    decided = np.asarray(needed)
    return [
        f"{auroc(each[decided], each[~decided]):.3f} "
        f"({np.mean(each[decided] < HALVED):.2f}, {np.mean(each[~decided] > HALVED):.2f})"
        for each in np.asarray(needs).T
    ]


def main() -> None:
    """Judge the kinds on each model, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--models", type=Path, nargs="+", required=True)
    parser.add_argument("--scenes", type=int, default=40)
    given = parser.parse_args()
    columns = [judged(folder, given.scenes) for folder in given.models]
    print(f"| 16 pictures of | {' | '.join(map(str, given.models))} |")
    print(f"|---{'|---' * len(columns)}|")
    for name, cells in zip(kinds(), zip(*columns, strict=True), strict=True):
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
