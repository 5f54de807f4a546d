"""Judges the methods for words on a tiny model, where it is known what decides each word.

    OMP_NUM_THREADS=1 python -m scripts.words.judge_words --model trained/ --scenes 40

``needs_picture`` and two simpler figures are judged by AUROC between words that something in the picture decides and
words that nothing in it decides. Heat is judged on the pixels that decide the word: AUROC, whether the maximum lies on
them (pointing), and whether the right one of two toys has more heat (right of two). And by the model itself: how
probable a word stays if its hottest cells come from other pictures (deleted) and if only they are kept (kept), as means
over a tenth, a fifth and three tenths of the cells.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from camkit.sentences import explain
from camkit.sentences.cut import DecoderCut
from camkit.sentences.explain import Reading, SentenceReader
from scripts.lab.lab_report import auroc
from scripts.words.word_model import architecture_of, load
from scripts.words.word_scenes import IN_PICTURE, SIDE, Scene, SceneWord, draw

SEED, REFERENCE_SEED = 3, 4
REFERENCES = 8
SHARES = 0.1, 0.2, 0.3
"""Of the cells, which are deleted or kept."""

FIGURES = {
    "needs references": f"against {REFERENCES} reference pictures (`needs_picture`)",
    "needs made": "against the 16 pictures that camkit makes (`needs_picture`)",
    "grey": "against a grey picture",
    "hidden": "against the picture hidden",
}
"""How much a word needs the picture."""


def main() -> None:
    """Judge, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--scenes", type=int, default=40)
    given = parser.parse_args()
    model, processor = load(given.model)
    references = [Image.fromarray(draw((REFERENCE_SEED, number)).picture) for number in range(REFERENCES)]
    rows: list[dict[str, Any]] = []
    correct = 0
    for number in range(given.scenes):
        scene, start = draw((SEED, number)), time.monotonic()
        picture = Image.fromarray(scene.picture)
        reader = SentenceReader(model, processor, architecture_of(model).prompt, words=scene.sentence)
        made, others = (reader.read([picture], ["the scene"], each) for each in (None, references))
        known = words_known(others)
        correct += all(known)
        rows += judged(scene, made, others, known)
        print(f"{number}: {time.monotonic() - start:.0f} s, {correct} of {number + 1} right", flush=True)
    words = [row for row in rows if row["word"] not in ",."]
    print(f"{correct} of {given.scenes} sentences right; {len(words)} words are judged.\n")
    print("\n".join([*needs_table(words), "", *heat_table(words)]))


@torch.no_grad()
def words_known(reading: Reading) -> list[bool]:
    """Return for each word whether the model would write it here: each of its tokens is the most probable one."""
    best = reading.cut.logits(reading.cut.tokens[None])[0].argmax(-1)
    places = [[reading.text.places[token] for token in word.tokens] for word in reading.found]
    return [all(best[place - 1] == reading.text.ids[place] for place in each) for each in places]


def judged(scene: Scene, made: Reading, others: Reading, known: Sequence[bool]) -> Iterator[dict[str, Any]]:
    """Yield a row for each word that the model has right, with the measures of its maps if the picture decides it."""
    places = [
        place
        for place, word in enumerate(scene.words)
        if word.truth is not None and word.cause in IN_PICTURE and known[place]
    ]
    maps = maps_of(others, places) if places else {}
    caused = {name: causal(others, places, each) for name, each in maps.items()}
    for place, word in enumerate(scene.words):
        if not known[place]:
            continue
        row: dict[str, Any] = {"word": word.text, "cause": word.cause}
        row |= {"needs references": others.found[place].needs_picture, "needs made": made.found[place].needs_picture}
        row |= {"grey": others.found[place].above_grey, "hidden": others.found[place].above_none}
        if place in places:
            chosen = places.index(place)
            row["heat"] = {
                name: measures(each[chosen].reshape(len(others.places.rows), -1), word) | caused[name][chosen]
                for name, each in maps.items()
            }
        yield row


def maps_of(reading: Reading, places: list[int]) -> dict[str, Tensor]:
    """Return the cells (W, g) of all methods for some of the words. TAM needs logits at the picture's tokens."""
    count, side = len(places), len(reading.places.rows)
    place = torch.linspace(-1, 1, side)
    expected, rows = explain.expected_gradients(reading, places), explain.attention_rows(reading, places)
    of_tokens = {"expected": expected, "attention": rows, "attention-expected": rows * expected.clamp(min=0)}
    cells = {name: each @ reading.places.shares.T for name, each in of_tokens.items()}
    if isinstance(reading.cut, DecoderCut) and reading.cut.entry == "inputs_embeds":
        activated = explain.activation_maps(reading, places) @ reading.places.shares.T
        cells["tam"] = torch.stack([explain.filtered(each.reshape(side, side)).flatten() for each in activated])
    cells["random"] = torch.rand(count, side * side, generator=torch.Generator().manual_seed(count))
    cells["centred blob"] = (-(place[:, None] ** 2) - place**2).exp().flatten().expand(count, -1)
    return cells


@torch.no_grad()
def causal(reading: Reading, words: Sequence[int], maps: Tensor, references: int = 2) -> list[dict[str, float]]:
    """Return for each word how probable it stays if its hottest cells are deleted, and if only they are kept."""
    tokens, count = reading.cut.tokens, maps.shape[1]
    ranks = maps.argsort(1, descending=True).argsort(1)
    hot = torch.stack([(ranks < round(share * count)).float() for share in SHARES], 1)  # (W, S, g)
    hot = hot @ reading.places.shares > 0  # (W, S, n); a class token is neither deleted nor kept
    rows = []
    for number, word in enumerate(words):
        of_word = reading.cut, reading.text, [reading.found[word].tokens]
        own, found = explain.scores(*of_word, tokens[None]).exp().item(), {}
        for name, keep in (("deleted", ~hot[number]), ("kept", hot[number])):
            versions = [torch.where(keep[..., None], tokens, other) for other in reading.references[:references]]
            found[name] = float(explain.scores(*of_word, torch.cat(versions)).exp().mean()) / own
        rows.append(found)
    return rows


def measures(raw: Tensor, word: SceneWord) -> dict[str, float]:
    """Return what a map (h, w) is worth on the pixels that decide the word."""
    assert word.truth is not None
    pixels = enlarged(raw)
    found = {
        "auroc": auroc(pixels[word.truth].tolist(), pixels[~word.truth].tolist()),
        "pointing": float(word.truth.ravel()[int(pixels.argmax())]) if pixels.any() else 0.0,
    }
    if word.rival is not None:
        found["right of two"] = float(pixels[word.truth].mean() > pixels[word.rival].mean())
    return found


def enlarged(raw: Tensor) -> NDArray[Any]:
    """Return the positive part of a map (h, w) on the picture's pixels."""
    heat = nn.functional.interpolate(raw.detach().float().clamp(min=0)[None, None], size=(SIDE, SIDE), mode="bilinear")
    pixels: NDArray[Any] = heat[0, 0].numpy()
    return pixels


def needs_table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the table of how much words need the picture."""
    yield "| how much a word needs the picture | AUROC |"
    yield "|---|---|"
    for name, title in FIGURES.items():
        decided, others = ([row[name] for row in rows if (row["cause"] in IN_PICTURE) is one] for one in (True, False))
        yield f"| {title} | {auroc(decided, others):.3f} |"


def heat_table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the table of methods."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        for method, values in row.get("heat", {}).items():
            found[method][row["cause"]].append(values["auroc"])
            for name, value in values.items():
                found[method][name].append(value)
    columns = (*IN_PICTURE, "pointing", "right of two", "deleted", "kept")
    yield f"| heat | {' | '.join('both toys' if name == 'both' else name for name in columns)} |"
    yield f"|---{'|---' * len(columns)}|"
    for method, by in found.items():
        yield f"| {method} | {' | '.join(f'{np.mean(by[name]):.2f}' if by[name] else '' for name in columns)} |"


if __name__ == "__main__":
    main()
