"""Measure what reading JPEG files as drafts changes in the maps, and what it saves.

    python -m scripts.bench.bench_draft PHOTOS --model mobilenet_v2 --weights mine.pth --side 4000

Photos smaller than ``--side`` are enlarged; all are saved with fine noise, as the photos of large cameras have it.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

import camkit
from camkit.images.listing import find_pictures
from camkit.images.prepare import prepare
from camkit.models import load_model

NOISE = 6
"""The standard deviation of the noise, of 255 levels: that of a small sensor in moderate light."""


def enlarged(file: Path, folder: Path, side: int) -> Path:
    """Save a photo whose longer side has at least ``side`` pixels."""
    with Image.open(file) as opened:
        photo = opened.convert("RGB")
    ratio = max(side / max(photo.size), 1)
    pixels = np.asarray(
        photo.resize((round(photo.width * ratio), round(photo.height * ratio)), Image.Resampling.BICUBIC)
    )
    noisy = pixels + np.random.default_rng(0).normal(0, NOISE, pixels.shape)
    Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8)).save(folder / f"{file.stem}.jpg", quality=92)
    return folder / f"{file.stem}.jpg"


def main() -> None:
    """Explain each photo whole and as a draft, for the class of the whole photo."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", nargs="+")
    parser.add_argument("--model", default="mobilenet_v2")
    parser.add_argument("--weights")
    parser.add_argument("--side", type=int, default=4000)
    options = parser.parse_args()
    model = load_model(options.model, options.weights)
    correlations, probabilities, reductions, same = [], [], [], 0
    with tempfile.TemporaryDirectory() as scratch:
        files = [enlarged(file, Path(scratch), options.side) for file in find_pictures(options.photos)]
        seconds = {}
        for draft in (False, True):
            started = time.process_time()
            for file in files:
                prepare(file, model.preprocess, str(file), draft=draft)
            seconds[draft] = (time.process_time() - started) / len(files)
        for file in files:
            (whole,) = camkit.explain_many(model, [file])
            (best,) = camkit.explain_many(model, [file], draft=True)
            (draft_of_class,) = camkit.explain_many(model, [file], draft=True, target=whole.target)
            same += whole.target == best.target
            reductions.append(best.reduction)
            correlations.append(np.corrcoef(whole.heatmap.ravel(), draft_of_class.heatmap.ravel())[0, 1])
            probabilities.append(abs((whole.probability or 0) - (draft_of_class.probability or 0)))
    print(f"{len(files)} photos, read at 1/{min(reductions):.0f} to 1/{max(reductions):.0f} of their size")
    print(f"reading and preprocessing: {1000 * seconds[False]:.0f} ms, as a draft {1000 * seconds[True]:.0f} ms")
    print(f"the same best class: {same}")
    print(f"correlation of the maps: median {np.median(correlations):.4f}, least {min(correlations):.4f}")
    print(f"probability: median change {np.median(probabilities):.3f}, largest {max(probabilities):.3f}")


if __name__ == "__main__":
    main()
