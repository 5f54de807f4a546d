"""Judges the methods for words on a tiny model, where it is known what decides each word.

    OMP_NUM_THREADS=1 python -m scripts.words.judge_words --model trained/ --out raw.json --scenes 40
    python -m scripts.words.judge_words --tables raw.json more.json

``needs_picture`` and three simpler figures are judged by AUROC between words that something in the picture decides and
words that nothing in it decides. Heat is judged on the pixels that decide the word: AUROC, whether the maximum lies on
them (pointing), and whether the right one of two toys has more heat (right of two). And by the model itself: how
probable a word stays if its hottest cells come from other pictures (deleted) and if only they are kept (kept), as means
over a tenth, a fifth and three tenths of the cells. Last, each scene is drawn again with one toy or the ground changed:
this says whether the model follows what the scenes say decides a word.

``--misread 1500`` searches 1,500 other scenes for colours and shapes that the model has wrong. It measures whether the
wrong word's heat is on the toy that the word is about, on the other toy or elsewhere, and whether leaving out either
toy makes the word less probable.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from camkit.sentences.cut import DecoderCut
from camkit.sentences.heat import attention_rows, expected_gradients
from camkit.sentences.reading import Reading, SentenceReader, log_probabilities
from camkit.sentences.tam import activation_maps, filtered
from scripts.words.train_words import examples, right
from scripts.words.word_model import Architecture, architecture_of, load
from scripts.words.word_scenes import COLOURS, IN_PICTURE, SHAPES, SIDE, Cause, Scene, SceneWord, draw

SEED, REFERENCE_SEED, GROUND_SEED, MISREAD_SEED = 3, 4, 5, 7
REFERENCES = 8
SHARES = 0.1, 0.2, 0.3
"""Of the cells, which are deleted or kept."""
WINDOW, STEP = 3, 2
"""Cells of a window of the slow reference, and from one window to the next."""
VOCABULARIES: Mapping[Cause, Sequence[str]] = {"colour": tuple(COLOURS), "shape": SHAPES}
"""What the model may call a toy instead."""
Maps: TypeAlias = dict[str, Tensor]


def main() -> None:
    """Judge, and write the raw results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--out", type=Path, default=Path("raw.json"))
    parser.add_argument("--first", type=int, default=0, help="the number of the first scene")
    parser.add_argument("--scenes", type=int, default=40)
    parser.add_argument("--quick", action="store_true", help="leave out the slow reference and half of the maps")
    parser.add_argument("--tables", type=Path, nargs="+", help="only print the tables of these results")
    parser.add_argument("--misread", type=int, default=0, help="how many other scenes to search for wrong words")
    given = parser.parse_args()
    if given.tables:
        print(table(given.tables))
        return
    if given.model is None:
        parser.error("pass --model")
    model, processor = load(given.model)
    kind = architecture_of(model)
    reader = SentenceReader(model, processor, kind.prompt)
    references = [Image.fromarray(draw((REFERENCE_SEED, number)).picture) for number in range(REFERENCES)]
    rows: list[dict[str, Any]] = []
    asked = correct = 0
    for number in range(given.first, given.first + given.scenes):
        scene, start = draw((SEED, number)), time.monotonic()
        picture = Image.fromarray(scene.picture)
        made, others = (reader.read(picture, scene.sentence, each, 40) for each in (None, references))
        known = words_known(others)
        asked, correct = asked + 1, correct + all(known)
        redrawn = reader.read(picture, scene.sentence, altered(scene, number), 40).others
        rows += list(judged(number, scene, made, others, redrawn, known, is_quick=given.quick))
        given.out.write_text(json.dumps({"asked": asked, "right": correct, "rows": rows}))
        print(f"{number}: {time.monotonic() - start:.0f} s, {correct} of {asked} right", flush=True)
    misread: list[dict[str, Any]] = []
    for number in wrong_scenes(kind, model, processor, given.misread):
        scene = draw((MISREAD_SEED, number))
        read = functools.partial(reader.read, Image.fromarray(scene.picture), references=references, most=40)
        misread += ({"scene": number, **each} for each in misread_words(scene, read))
        found = {"asked": asked, "right": correct, "rows": rows, "searched": given.misread, "misread": misread}
        given.out.write_text(json.dumps(found))
        print(f"scene {number}: {len(misread)} words", flush=True)
    print(table([given.out]))


def wrong_scenes(kind: Architecture, model: Any, processor: Any, count: int) -> Iterator[int]:
    """Yield the numbers of the scenes whose sentences the model does not write without a mistake."""
    for start in range(0, count, 50):
        numbers = range(start, min(start + 50, count))
        scenes = [draw((MISREAD_SEED, number)) for number in numbers]
        correct = right(model, examples(kind, model, processor, scenes)).tolist()
        yield from (number for number, is_right in zip(numbers, correct, strict=True) if not is_right)


@torch.no_grad()
def words_known(reading: Reading) -> list[bool]:
    """Return for each word whether the model would write it here: each of its tokens is the most probable one."""
    best = reading.cut.logits(reading.cut.tokens[None])[0].argmax(-1)
    places = [[reading.text.places[token] for token in span.tokens] for span in reading.spans]
    return [all(best[place - 1] == reading.text.ids[place] for place in each) for each in places]


def altered(scene: Scene, number: int) -> list[Image.Image]:
    """Return the scene without each toy, and with its toys on another ground."""
    ground = next(word.text for word in scene.words if word.cause == "ground")
    grounds = (draw((GROUND_SEED, number, further)) for further in range(100))
    other = next(each.empty for each in grounds if ground not in each.sentence.split())
    changed = [*(scene.without(toy) for toy in range(len(scene.masks))), scene.on(other)]
    return [Image.fromarray(each) for each in changed]


def losses(scene: Scene, word: SceneWord, own: float, redrawn: Sequence[float]) -> dict[str, float]:
    """Return by how many nats a word becomes less probable if what decides it is changed, and if something else is."""
    toys = [number for number, mask in enumerate(scene.masks) if word.cause == "both" or mask is word.truth]
    causes = [len(scene.masks)] if word.cause == "ground" else toys
    lost = [own - each for each in redrawn]
    rest = [each for number, each in enumerate(lost) if number not in causes]
    return {"its cause": float(np.mean([lost[number] for number in causes]))} | (
        {"something else": max(rest)} if rest else {}
    )


def misread_words(scene: Scene, read: Callable[..., Reading]) -> Iterator[dict[str, Any]]:
    """Yield where the heat of each wrong colour and shape is, and for comparison that of the scene's right ones."""
    as_drawn = read(given=scene.sentence)
    known = words_known(as_drawn)
    words = [each.text for each in scene.words]
    for place, word in enumerate(scene.words):
        if word.truth is None or (vocabulary := VOCABULARIES.get(word.cause)) is None:
            continue
        sentence, reading = scene.sentence, as_drawn
        if not known[place]:
            tried = {
                " ".join([*words[:place], other, *words[place + 1 :]]) for other in vocabulary if other != word.text
            }
            readings = {each: read(given=each) for each in sorted(tried)}
            sentence = max(readings, key=lambda each: float(readings[each].own[place]))
            reading = readings[sentence]
        said = sentence.split()[place]
        heat = enlarged(reading.places.drawn(expected_gradients(reading, [place])[0]))
        toys = {name: mask for name, mask in (("own", word.truth), ("other", word.rival)) if mask is not None}
        masks = [next(number for number, mask in enumerate(scene.masks) if mask is toy) for toy in toys.values()]
        without = read(given=sentence, references=[Image.fromarray(scene.without(number)) for number in masks])
        yield {
            "word": word.text,
            "cause": word.cause,
            "said": said,
            "other toy has it": any(
                said == each.text and each.truth is word.rival for each in scene.words if each.cause == word.cause
            ),
            "needs": float(reading.needs[place]),
            "maximum": next((name for name, mask in toys.items() if mask.ravel()[int(heat.argmax())]), "elsewhere"),
            **{name: float(heat[mask].sum() / heat.sum()) for name, mask in toys.items()},
            "lost": dict(zip(toys, (reading.own[place] - without.others[:, place]).tolist(), strict=True)),
        }


def judged(
    number: int,
    scene: Scene,
    made: Reading,
    others: Reading,
    redrawn: Tensor,
    known: Sequence[bool],
    *,
    is_quick: bool,
) -> Iterator[dict[str, Any]]:
    """Yield a row for each word that the model has right, with the measures of its maps if the picture decides it.

    ``redrawn`` (R, W) has the words' log-probabilities for the pictures of ``altered``.
    """
    places = [
        place
        for place, word in enumerate(scene.words)
        if word.truth is not None and word.cause in IN_PICTURE and known[place]
    ]
    maps = maps_of(None if is_quick else made, others, places) if places else {}
    caused = {name: causal(others, places, each) for name, each in maps.items()}
    for place, word in enumerate(scene.words):
        if not known[place]:
            continue
        row: dict[str, Any] = {"scene": number, "word": word.text, "cause": word.cause}
        for name, reading in (("references", others), ("made", made)):
            row[f"needs {name}"] = float(reading.needs[place])
        row["grey"] = float(others.own[place] - others.grey[place])
        row["hidden"] = float(others.own[place] - others.hidden[place])
        if place in places:
            chosen = places.index(place)
            row["cells"] = float(maps["expected gradients"][chosen].sum())
            row["redrawn"] = losses(scene, word, float(others.own[place]), redrawn[:, place].tolist())
            row["heat"] = {
                name: measures(each[chosen].reshape(len(others.places.rows), -1), word) | caused[name][chosen]
                for name, each in maps.items()
            }
        yield row


def maps_of(made: Reading | None, others: Reading, places: list[int]) -> Maps:
    """Return the cells (W, g) of all methods for some of the words; without ``made``, only of the quick ones.

    TAM needs logits at the picture's tokens.
    """
    tokens = others.cut.tokens
    rows = attention_rows(others, places)
    gradient = gradients(others, places)
    count, side = len(places), len(others.places.rows)
    random = torch.rand(count, side * side, generator=torch.Generator().manual_seed(len(places)))
    place = torch.linspace(-1, 1, side)
    blob = (-(place[:, None] ** 2) - place**2).exp().flatten().expand(count, -1)
    of_tokens = {"expected gradients": expected_gradients(others, places)}
    if made is not None:
        of_tokens["expected gradients, camkit's pictures"] = expected_gradients(made, places)
    of_tokens |= {
        "attention row": rows,
        "attention row, weighted by gradients": weighted_attention(others, places),
        **{
            name.replace("expected", "attention row x expected"): rows * each.clamp(min=0)
            for name, each in of_tokens.items()
        },
        "length of the gradient": gradient.norm(dim=-1),
        "gradient x activation": (gradient * tokens).sum(-1),
    }
    if made is not None:
        of_tokens["windows replaced and kept (slow)"] = windows(others, places)
    cells = {name: each @ others.places.shares.T for name, each in of_tokens.items()}
    if isinstance(others.cut, DecoderCut) and others.cut.entry == "inputs_embeds":
        activated = activation_maps(others, places) @ others.places.shares.T
        cells["TAM"] = torch.stack([filtered(each.reshape(side, side)).flatten() for each in activated])
    return cells | {"random": random, "centred blob": blob}


def gradients(reading: Reading, words: Sequence[int]) -> Tensor:
    """Return the gradient of each word's log-probability at the picture's tokens (W, n, C)."""
    point = reading.cut.tokens[None].detach().requires_grad_()
    with torch.enable_grad():
        scores = reading.score(point, words)[0]
    return torch.stack([torch.autograd.grad(each, point, retain_graph=True)[0][0] for each in scores])


def weighted_attention(reading: Reading, words: Sequence[int]) -> Tensor:
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
            logits = output.logits if "logits" in output else model.get_output_embeddings()(output[0])
            scores = log_probabilities(logits, reading.text, [reading.spans[word] for word in words])[0]
        layers = output.attentions if cut.entry == "inputs_embeds" else output.cross_attentions
        maps = []
        for score, word in zip(scores, words, strict=True):
            slopes = torch.autograd.grad(score, layers, retain_graph=True)
            parts = [
                (layer * slope).clamp(min=0)[0, :, reading.predicting(word)].mean((0, 1))
                for layer, slope in zip(layers, slopes, strict=True)
            ]
            maps.append(torch.stack(parts).mean(0)[cut.positions].detach())
    finally:
        config._attn_implementation_internal = before
    return torch.stack(maps)


@torch.no_grad()
def windows(reading: Reading, words: Sequence[int], references: int = 2) -> Tensor:
    """Return how much each word loses if a window comes from references, plus what it gains if only it is kept."""
    tokens, side = reading.cut.tokens, len(reading.places.rows)
    starts = [*range(0, side - WINDOW, STEP), side - WINDOW]
    masks = torch.zeros(len(starts) ** 2, side, side)
    for number, (row, column) in enumerate((row, column) for row in starts for column in starts):
        masks[number, row : row + WINDOW, column : column + WINDOW] = 1
    flat = (masks.flatten(1) @ reading.places.shares)[..., None]  # a class token is never replaced
    total = torch.zeros(len(flat), len(words))
    for reference in reading.tokens[:references]:
        replaced = tokens + flat * (reference - tokens)
        kept = reference + flat * (tokens - reference)
        for versions, sign in ((replaced, -1), (kept, 1)):
            total += sign * torch.cat([reading.score(part, words) for part in versions.split(8)])
    cover = flat[..., 0]
    return (cover.T @ total / cover.sum(0).clamp(min=1)[:, None]).T


@torch.no_grad()
def causal(reading: Reading, words: Sequence[int], maps: Tensor, references: int = 2) -> list[dict[str, float]]:
    """Return for each word how probable it stays if its hottest cells are deleted, and if only they are kept."""
    tokens, count = reading.cut.tokens, maps.shape[1]
    ranks = maps.argsort(1, descending=True).argsort(1)
    hot = torch.stack([(ranks < round(share * count)).float() for share in SHARES], 1)  # (W, S, g)
    hot = hot @ reading.places.shares > 0  # (W, S, n); a class token is neither deleted nor kept
    rows = []
    for number, word in enumerate(words):
        own = reading.score(tokens[None], [word]).exp().item()
        found = {}
        for name, keep in (("deleted", ~hot[number]), ("kept", hot[number])):
            versions = [torch.where(keep[..., None], tokens, other) for other in reading.tokens[:references]]
            found[name] = float(reading.score(torch.cat(versions), [word]).exp().mean()) / own
        rows.append(found)
    return rows


def measures(raw: Tensor, word: SceneWord) -> dict[str, float]:
    """Return what a map (h, w) is worth on the pixels that decide the word."""
    assert word.truth is not None
    pixels = enlarged(raw)
    found = {
        "auroc": auroc(pixels[word.truth], pixels[~word.truth]),
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


def auroc(positive: NDArray[Any], negative: NDArray[Any]) -> float:
    """Return the probability that a positive value is above a negative one; ties count one half."""
    every = np.concatenate([positive, negative])
    _, inverse, counts = np.unique(every, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    count = len(positive)
    return float((ranks[:count].sum() - count * (count + 1) / 2) / (count * len(negative)))


def table(files: Sequence[Path]) -> str:
    """Return the tables in Markdown, from the raw results of one model."""
    raws = [json.loads(file.read_text()) for file in files]
    rows = [row for raw in raws for row in raw["rows"] if row["word"] not in ",."]
    asked, correct = (sum(raw[name] for raw in raws) for name in ("asked", "right"))
    lines = [f"{correct} of {asked} sentences right; {len(rows)} words are judged.", ""]
    lines += ["| how much a word needs the picture | AUROC |", "|---|---|"]
    titles = {
        "needs references": f"against {REFERENCES} reference pictures (`needs_picture`)",
        "needs made": "against the 16 pictures that camkit makes (`needs_picture`)",
        "grey": "against a grey picture",
        "hidden": "against the picture hidden",
    }
    for name, title in titles.items():
        sides = [[row[name] for row in rows if (row["cause"] in IN_PICTURE) is decided] for decided in (True, False)]
        lines.append(f"| {title} | {auroc(*map(np.asarray, sides)):.3f} |")
    needing = [row for row in rows if "cells" in row and row["needs references"] >= np.log(2)]
    shares = [row["cells"] / row["needs references"] for row in needing]
    if shares:
        low, middle, high = np.quantile(shares, (0.1, 0.5, 0.9))
        of = f"{middle:.2f} of `needs_picture` (median; {low:.2f} to {high:.2f} for eight words of ten)"
        lines += ["", f"The cells of expected gradients sum to {of}."]
    misread = [each for raw in raws for each in raw.get("misread", [])]
    lines += ["", *_redrawn(rows), "", *_heat(rows), "", *_misread(misread)]
    return "\n".join(lines)


def _redrawn(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the table on scenes drawn again."""
    yield "| words whose probability at least halves | if their cause is redrawn | if something else is |"
    yield "|---|---|---|"
    for cause in IN_PICTURE:
        found = [row["redrawn"] for row in rows if row["cause"] == cause and "redrawn" in row]
        shares = (
            [each[name] >= np.log(2) for each in found if name in each] for name in ("its cause", "something else")
        )
        yield f"| {cause} | {' | '.join(f'{np.mean(each):.2f} of {len(each)}' if each else '' for each in shares)} |"


def _misread(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the table of wrong colours and shapes, and of the right ones in the same scenes."""
    wrong = [row for row in rows if row["said"] != row["word"]]
    kinds = {
        "wrong: the other toy's": [row for row in wrong if row["other toy has it"]],
        "wrong: no toy's": [row for row in wrong if not row["other toy has it"] and "other" in row],
        "wrong: the only toy": [row for row in wrong if "other" not in row],
        "right, beside another toy": [row for row in rows if row["said"] == row["word"] and "other" in row],
    }
    yield "| word | count | maximum on its own toy, the other | share of heat | its probability halves without it |"
    yield "|---|---|---|---|---|"
    for title, chosen in kinds.items():
        columns = []
        for name in ("own", "other"):
            there = [row for row in chosen if name in row]
            columns.append(
                [
                    [row["maximum"] == name for row in there],
                    [row[name] for row in there],
                    [row["lost"][name] >= np.log(2) for row in there],
                ]
            )
        cells = [", ".join(f"{np.mean(each):.2f}" for each in both if each) for both in zip(*columns, strict=True)]
        yield f"| {title} | {len(chosen)} | {' | '.join(cells)} |"


def _heat(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
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
