"""Judges the methods for words on the tiny LLaVA, where it is known what decides each word.

    OMP_NUM_THREADS=1 python -m scripts.words.judge_words --model trained/ --out raw.json --scenes 40

``needs_picture`` and three simpler figures are judged by AUROC between words that something in the picture decides and
words that nothing in it decides. Heat is judged on the pixels that decide the word: AUROC, whether the maximum lies on
them (pointing), and whether the right one of two toys has more heat (right of two).
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from camkit.sentences.cut import DecoderCut
from camkit.sentences.heat import attention_rows, combined, expected_gradients
from camkit.sentences.inputs import Inputs
from camkit.sentences.reading import Known, Reading, read_sentence
from camkit.sentences.scores import log_probabilities
from camkit.sentences.sentence import Span
from scripts.words.word_model import PROMPT, load
from scripts.words.word_scenes import IN_PICTURE, SIDE, Scene, SceneWord, draw

SEED, REFERENCE_SEED = 3, 4
REFERENCES = 8
WINDOW, STEP = 3, 2
"""Cells of a window of the slow reference, and from one window to the next."""
Maps: TypeAlias = dict[str, Tensor]


def main() -> None:
    """Judge, and write the raw results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scenes", type=int, default=40)
    given = parser.parse_args()
    model, processor = load(given.model)
    inputs = Inputs(model, processor, PROMPT)
    references = [Image.fromarray(draw((REFERENCE_SEED, number)).picture) for number in range(REFERENCES)]
    rows: list[dict[str, Any]] = []
    asked = right = 0
    looks: Known = {}
    for number in range(given.scenes):
        scene, start = draw((SEED, number)), time.monotonic()
        picture = Image.fromarray(scene.picture)
        noise, others = (
            read_sentence(model, inputs, picture, scene.sentence, each, 40, looks) for each in (None, references)
        )
        known = words_known(others)
        asked, right = asked + 1, right + all(known)
        rows += list(judged(number, scene, noise, others, known))
        given.out.write_text(json.dumps({"asked": asked, "right": right, "rows": rows}))
        print(f"{number}: {time.monotonic() - start:.0f} s, {right} of {asked} right", flush=True)
    print(table(given.out))


@torch.no_grad()
def words_known(reading: Reading) -> list[bool]:
    """Return for each word whether the model would write it here: each of its tokens is the most probable one."""
    best = reading.cut.logits(reading.cut.tokens[None])[0].argmax(-1)
    places = [[reading.text.places[token] for token in span.tokens] for span in reading.spans]
    return [all(best[place - 1] == reading.text.ids[place] for place in each) for each in places]


def judged(
    number: int, scene: Scene, noise: Reading, others: Reading, known: Sequence[bool]
) -> Iterator[dict[str, Any]]:
    """Yield a row for each word that the model has right, with the measures of its maps if the picture decides it."""
    places = [
        place
        for place, word in enumerate(scene.words)
        if word.truth is not None and word.cause in IN_PICTURE and known[place]
    ]
    spans = [others.spans[place] for place in places]
    maps = maps_of(noise, others, spans)
    for place, word in enumerate(scene.words):
        if not known[place]:
            continue
        row: dict[str, Any] = {"scene": number, "word": word.text, "cause": word.cause}
        for name, reading in (("references", others), ("noise", noise)):
            row[f"needs {name}"] = float(reading.own[place] - reading.others[:, place].mean())
        row["grey"] = float(others.own[place] - others.grey[place])
        row["hidden"] = float(others.own[place] - others.hidden[place])
        if place in places:
            chosen = places.index(place)
            row["heat"] = {name: measures(others.places.drawn(each[chosen]), word) for name, each in maps.items()}
        yield row


def maps_of(noise: Reading, others: Reading, spans: Sequence[Span]) -> Maps:
    """Return the maps (W, n) of all methods."""
    tokens = others.cut.tokens
    rows = [[others.text.places[token] - 1 for token in span.tokens] for span in spans]
    expected = expected_gradients(others.cut, others.tokens, functools.partial(others.score, chosen=spans))
    of_noise = expected_gradients(others.cut, noise.tokens, functools.partial(others.score, chosen=spans))
    attention = attention_rows(others.cut, rows)
    gradient = gradients(others, spans)
    count, side = len(spans), len(others.places.rows)
    random = torch.rand(count, len(tokens), generator=torch.Generator().manual_seed(len(spans)))
    place = torch.linspace(-1, 1, side)
    blob = (-(place[:, None] ** 2) - place**2).exp().flatten().expand(count, -1)
    return {
        "expected gradients": expected,
        "expected gradients, smooth noise": of_noise,
        "attention row": attention,
        "attention row, weighted by gradients": weighted_attention(others, spans, rows),
        "attention row x expected gradients": combined(attention, expected),
        "attention row x expected gradients, smooth noise": combined(attention, of_noise),
        "TAM-like (a simple form, not the paper's method)": activation_maps(others, spans),
        "length of the gradient": gradient.norm(dim=-1),
        "gradient x activation": (gradient * tokens).sum(-1),
        "windows replaced and kept (slow)": windows(others, spans),
        "random": random,
        "centred blob": blob,
    }


def gradients(reading: Reading, spans: Sequence[Span]) -> Tensor:
    """Return the gradient of each word's log-probability at the picture's tokens (W, n, C)."""
    point = reading.cut.tokens[None].detach().requires_grad_()
    with torch.enable_grad():
        scores = reading.score(point, spans)[0]
    return torch.stack([torch.autograd.grad(each, point, retain_graph=True)[0][0] for each in scores])


def weighted_attention(reading: Reading, spans: Sequence[Span], rows: Sequence[Sequence[int]]) -> Tensor:
    """Return each word's rows of attention times the positive part of their gradients, mean over layers and heads."""
    cut = reading.cut
    assert isinstance(cut, DecoderCut)
    config: Any = cut.decoder.config
    model: Any = cut.model
    before, config._attn_implementation_internal = config._attn_implementation_internal, "eager"
    try:
        point = cut.tokens[None].detach().requires_grad_()
        with torch.enable_grad():
            output = cut.output(point, output_attentions=True)
            scores = log_probabilities(model.get_output_embeddings()(output[0]), reading.text, spans)[0]
        layers = output.attentions
        maps = []
        for score, places in zip(scores, rows, strict=True):
            slopes = torch.autograd.grad(score, layers, retain_graph=True)
            parts = [
                (layer * slope).clamp(min=0)[0, :, list(places)].mean((0, 1))
                for layer, slope in zip(layers, slopes, strict=True)
            ]
            maps.append(torch.stack(parts).mean(0)[cut.positions].detach())
    finally:
        config._attn_implementation_internal = before
    return torch.stack(maps)


@torch.no_grad()
def activation_maps(reading: Reading, spans: Sequence[Span]) -> Tensor:
    """Return maps in a simple form of the idea of token activation maps (TAM, ICCV 2025), not the paper's method.

    A token's map is the positive part of its logit at each of the picture's tokens. Of that, a multiple of the mean of
    the earlier tokens' maps is taken away, each weighted by how much that earlier token's state asks for this one; the
    multiple leaves the least squares. Then each cell becomes the weighted mean of its ranked 3 x 3 neighbours.
    """
    cut = reading.cut
    assert isinstance(cut, DecoderCut)
    logits = cut.logits(cut.tokens[None])[0]
    side, first, text = len(reading.places.rows), reading.text.places[0], reading.text.ids
    at_picture = logits[cut.positions].clamp(min=0)
    maps = []
    for span in spans:
        parts = []
        for token in span.tokens:
            wanted = int(text[first + token])
            own = at_picture[:, wanted]
            earlier = text[first : first + token]
            if len(earlier):
                asks = logits[first - 1 : first + token - 1, wanted].clamp(min=0)
                other = (at_picture[:, earlier] * asks).sum(1) / asks.sum().clamp(min=1e-6)
                own = (own - (own @ other) / (other @ other).clamp(min=1e-6) * other).clamp(min=0)
            parts.append(own)
        maps.append(ranked(torch.stack(parts).mean(0).reshape(side, side)).flatten())
    return torch.stack(maps)


def ranked(cells: Tensor) -> Tensor:
    """Return the rank filter: a Gaussian over the ranks of the 3 x 3 neighbours, so that single outliers vanish."""
    padded = nn.functional.pad(cells[None, None], (1, 1, 1, 1), mode="replicate")
    ordered = nn.functional.unfold(padded, 3)[0].sort(0).values
    weights = torch.exp(-0.5 * ((torch.arange(9) - 4) / 1.5) ** 2)
    return (ordered * (weights / weights.sum())[:, None]).sum(0).reshape(cells.shape)


@torch.no_grad()
def windows(reading: Reading, spans: Sequence[Span], references: int = 2) -> Tensor:
    """Return how much each word loses if a window comes from references, plus what it gains if only it is kept."""
    tokens, side = reading.cut.tokens, len(reading.places.rows)
    starts = [*range(0, side - WINDOW, STEP), side - WINDOW]
    masks = torch.zeros(len(starts) ** 2, side, side)
    for number, (row, column) in enumerate((row, column) for row in starts for column in starts):
        masks[number, row : row + WINDOW, column : column + WINDOW] = 1
    flat = masks.flatten(1)[..., None]
    total = torch.zeros(len(flat), len(spans))
    for reference in reading.tokens[:references]:
        replaced = tokens + flat * (reference - tokens)
        kept = reference + flat * (tokens - reference)
        for versions, sign in ((replaced, -1), (kept, 1)):
            total += sign * torch.cat([reading.score(part, spans) for part in versions.split(8)])
    cover = flat[..., 0]
    return (cover.T @ total / cover.sum(0)[:, None]).T


def measures(raw: Tensor, word: SceneWord) -> dict[str, float]:
    """Return what a map (h, w) is worth on the pixels that decide the word; the heat is the positive part."""
    assert word.truth is not None
    heat = nn.functional.interpolate(raw.detach().float().clamp(min=0)[None, None], size=(SIDE, SIDE), mode="bilinear")
    pixels = heat[0, 0].numpy()
    found = {
        "auroc": auroc(pixels[word.truth], pixels[~word.truth]),
        "pointing": float(word.truth.ravel()[int(pixels.argmax())]) if pixels.any() else 0.0,
    }
    if word.rival is not None:
        found["right of two"] = float(pixels[word.truth].mean() > pixels[word.rival].mean())
    return found


def auroc(positive: NDArray[Any], negative: NDArray[Any]) -> float:
    """Return the probability that a positive value is above a negative one; ties count one half."""
    every = np.concatenate([positive, negative])
    _, inverse, counts = np.unique(every, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    count = len(positive)
    return float((ranks[:count].sum() - count * (count + 1) / 2) / (count * len(negative)))


def table(file: Path) -> str:
    """Return the tables in Markdown, from the raw results."""
    raw = json.loads(file.read_text())
    rows = [row for row in raw["rows"] if "cause" in row and row["word"] not in ",."]
    lines = [f"{raw['right']} of {raw['asked']} sentences right; {len(rows)} words are judged.", ""]
    lines += ["| how much a word needs the picture | AUROC |", "|---|---|"]
    titles = {
        "needs references": f"against {REFERENCES} reference pictures (`needs_picture`)",
        "needs noise": "against 16 pictures of smooth noise (`needs_picture`)",
        "grey": "against a grey picture",
        "hidden": "against the picture hidden",
    }
    for name, title in titles.items():
        sides = [[row[name] for row in rows if (row["cause"] in IN_PICTURE) is decided] for decided in (True, False)]
        lines.append(f"| {title} | {auroc(*map(np.asarray, sides)):.3f} |")
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        for method, values in row.get("heat", {}).items():
            found[method][row["cause"]].append(values["auroc"])
            found[method]["pointing"].append(values["pointing"])
            if "right of two" in values:
                found[method]["right"].append(values["right of two"])
    lines += [
        "",
        "| heat | colour | shape | ground | both toys | pointing | right of two |",
        "|---|---|---|---|---|---|---|",
    ]

    def mean(values: list[float]) -> str:
        return f"{np.mean(values):.2f}" if values else ""

    for method, by in found.items():
        cells = [mean(by[name]) for name in ("colour", "shape", "ground", "both", "pointing", "right")]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
