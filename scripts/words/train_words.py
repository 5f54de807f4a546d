"""Trains a tiny model on drawn scenes and their sentences, and writes a folder that ``from_pretrained`` loads.

    OMP_NUM_THREADS=1 python -m scripts.words.train_words --out trained/ --minutes 25
    python -m scripts.words.train_words --architecture qwen2-vl --device cuda --out trained/ --minutes 6 --batch 64

First the encoder learns what each patch shows, as real models start from a trained encoder; then the whole network
learns the sentences.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from scripts.words.word_model import ARCHITECTURES, Architecture, tokenizer_for
from scripts.words.word_scenes import COLOURS, GROUNDS, SHAPES, Scene, draw

SCENES, HELD_OUT = 20_000, 200
TRAINING, TESTING = 1, 2
"""The first number of the scenes' seeds."""
RATE = 2e-3
ENCODERS_SHARE = 0.35
"""The share of the time in which the encoder learns the patches."""


@dataclass(frozen=True)
class Examples:
    """What a model is given and what it should write.

    Attributes:
        inputs: its arguments, with a row for each example.
        wanted: the token after each of the text's (N, L); -100 where none is learned.
        patches: what each patch shows (N, 64, 3).
    """

    inputs: Mapping[str, Tensor]
    wanted: Tensor
    patches: Tensor

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self.wanted)

    def on(self, device: torch.device) -> Examples:
        """Return the examples on a device."""
        inputs = {name: value.to(device) for name, value in self.inputs.items()}
        return Examples(inputs, self.wanted.to(device), self.patches.to(device))

    def batch(self, rows: Tensor) -> dict[str, Tensor]:
        """Return the model's arguments for some examples.

        Qwen2-VL takes the patches of all pictures one after the other, and three positions for each token. Pictures of
        one size are the frames of one clip to it, which do not see each other; many pictures take it much longer.
        """
        chosen = {name: value[rows] for name, value in self.inputs.items()}
        if "image_grid_thw" in chosen:
            clip = chosen["image_grid_thw"][:1].clone()
            clip[:, 0] = len(rows)
            chosen["image_grid_thw"] = clip
            chosen["pixel_values"] = chosen["pixel_values"].flatten(0, 1)
            chosen["position_ids"] = chosen["position_ids"].transpose(0, 1)
        return chosen


def main() -> None:
    """Train, and print how many of the held-out sentences are right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--architecture", choices=ARCHITECTURES, default="llava")
    parser.add_argument("--out", type=Path, required=True, help="the folder for the trained model")
    parser.add_argument("--minutes", type=float, default=25, help="how long it takes, including drawing the scenes")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--scenes", type=int, default=SCENES)
    parser.add_argument("--processes", type=int, default=1, help="how many processes draw scenes")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights and of the order of the scenes")
    given = parser.parse_args()
    end = time.monotonic() + 60 * given.minutes
    torch.manual_seed(given.seed)
    with multiprocessing.get_context("fork").Pool(given.processes) as pool:
        seeds = [(TRAINING, number) for number in range(given.scenes)]
        scenes = pool.map(draw, seeds + [(TESTING, number) for number in range(HELD_OUT)], chunksize=100)
    kind = ARCHITECTURES[given.architecture]
    processor = kind.processor(tokenizer_for((each.sentence for each in scenes[:-HELD_OUT]), **kind.tokens))
    model = kind.build(processor.tokenizer)
    device = torch.device(given.device)
    model.train().to(device)
    every = [examples(kind, model, processor, part) for part in (scenes[:-HELD_OUT], scenes[-HELD_OUT:])]
    training, held_out = (each.on(device) for each in every)
    weights = sum(each.numel() for each in model.parameters())
    print(f"{weights:,} weights, {training.wanted.shape[1]} tokens", flush=True)
    train_encoder(kind, model, training, (end - time.monotonic()) * ENCODERS_SHARE, given.batch)
    train(model, processor, training, held_out, end, given.out, given.batch)


def examples(kind: Architecture, model: Any, processor: Any, scenes: list[Scene]) -> Examples:
    """Return scenes as the model's input."""
    tokenizer = processor.tokenizer
    texts = [f"{kind.before} {scene.sentence}{tokenizer.eos_token}".strip() for scene in scenes]
    pictures = [Image.fromarray(scene.picture) for scene in scenes]
    made = dict(processor(text=texts, images=pictures, return_tensors="pt", padding=True, padding_side="right"))
    patches = torch.from_numpy(np.stack([scene.patch_labels for scene in scenes]))
    if "labels" in made:  # an encoder-decoder, whose decoder starts from a token of its own
        ids = made.pop("labels")
        start = torch.full((len(ids), 1), tokenizer.bos_token_id)
        return Examples(
            {**made, "decoder_input_ids": torch.cat([start, ids[:, :-1]], 1)},
            ids.masked_fill(ids == tokenizer.pad_token_id, -100),
            patches,
        )
    ids, count = made["input_ids"], len(scenes)
    prompt = len(processor(text=[kind.before], images=pictures[:1])["input_ids"][0])
    wanted = torch.full_like(ids, -100)
    wanted[:, prompt - 1 : -1] = ids[:, prompt:].masked_fill(made.pop("attention_mask")[:, prompt:] == 0, -100)
    if "image_grid_thw" in made:
        kinds = made.pop("mm_token_type_ids")
        places, _ = model.model.get_rope_index(ids[:1], kinds[:1], made["image_grid_thw"][:1])
        made["position_ids"] = places.transpose(0, 1).expand(count, -1, -1)
        made["pixel_values"] = made["pixel_values"].unflatten(0, (count, -1))
    return Examples(made, wanted, patches)


def batches(count: int, size: int) -> Iterator[Tensor]:
    """Yield numbers of examples without end, in random order."""
    while True:
        yield from torch.randperm(count).split(size)


def train_encoder(kind: Architecture, model: Any, training: Examples, seconds: float, size: int) -> None:
    """Teach the encoder the shape, colour and ground of each patch; the heads are thrown away."""
    sizes = (len(SHAPES), len(COLOURS), len(GROUNDS))
    with torch.no_grad():
        width = kind.seen(model, training.batch(torch.arange(2))).shape[-1]
    heads = nn.Linear(width, sum(sizes)).to(model.device)
    optimizer = torch.optim.AdamW([*kind.tower(model).parameters(), *heads.parameters()], lr=RATE)
    start = time.monotonic()
    for step, rows in enumerate(batches(len(training), size)):
        done = min((time.monotonic() - start) / seconds, 1)
        optimizer.param_groups[0]["lr"] = RATE * min((step + 1) / 100, 1) * (1 - done + 0.01)
        wanted = training.patches[rows]
        parts = heads(kind.seen(model, training.batch(rows))).split(sizes, -1)
        terms = [
            nn.functional.cross_entropy(part.flatten(0, 1), wanted[..., number].flatten(), ignore_index=-1)
            for number, part in enumerate(parts)
        ]
        loss = torch.stack(terms).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0 or done >= 1:
            print(f"encoder {step}: {[round(term.item(), 2) for term in terms]}", flush=True)
        if done >= 1:
            return


def train(
    model: Any,
    processor: Any,
    training: Examples,
    held_out: Examples,
    end: float,
    out: Path,
    size: int,
) -> None:
    """Teach the sentences until the time is up; the rate falls to zero. The model is written every few minutes."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    start = shown = time.monotonic()
    for step, rows in enumerate(batches(len(training), size)):
        done = min((time.monotonic() - start) / (end - start), 1)
        for group in optimizer.param_groups:
            group["lr"] = RATE * min((step + 1) / 100, 1) * (1 - done + 0.01)
        output = model(**training.batch(rows), use_cache=False)
        loss = nn.functional.cross_entropy(output.logits.flatten(0, 1), training.wanted[rows].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        is_last = done >= 1
        if is_last or time.monotonic() - shown > 90:
            shown = time.monotonic()
            share = right(model, held_out).float().mean().item()
            print(f"{step} at {done:.0%}: loss {loss.item():.3f}, right {share:.1%}", flush=True)
            model.save_pretrained(out)
            processor.save_pretrained(out)
        if is_last:
            return


@torch.no_grad()
def right(model: Any, held_out: Examples) -> Tensor:
    """Return which sentences the model writes without a mistake, each token after the right ones."""
    correct = []
    for rows in torch.arange(len(held_out)).split(50):
        best = model(**held_out.batch(rows), use_cache=False).logits.argmax(-1)
        wanted = held_out.wanted[rows]
        correct.append(((best == wanted) | (wanted == -100)).all(1))
    return torch.cat(correct)


if __name__ == "__main__":
    main()
