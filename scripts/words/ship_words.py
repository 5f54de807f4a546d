"""Writes the trained tiny LLaVA in half precision, and drawn scenes for it, into the folder that ships with camkit.

python -m scripts.words.ship_words --model trained/
"""

from __future__ import annotations

import argparse
from pathlib import Path

from PIL import Image

from scripts.words.word_model import load
from scripts.words.word_scenes import draw

FOLDER = Path(__file__).parents[2] / "camkit/demo/files/words"
SEED, PICTURES = 6, 9


def main() -> None:
    """Write the folders ``model`` and ``pictures``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", type=Path, required=True)
    given = parser.parse_args()
    model, processor = load(given.model)
    model.half().save_pretrained(FOLDER / "model")
    processor.save_pretrained(FOLDER / "model")
    (FOLDER / "pictures").mkdir(exist_ok=True)
    for number in range(PICTURES):
        Image.fromarray(draw((SEED, number)).picture).save(FOLDER / f"pictures/{number}.png", optimize=True)
    total = sum(file.stat().st_size for file in FOLDER.rglob("*") if file.is_file())
    print(f"{FOLDER}: {total / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
