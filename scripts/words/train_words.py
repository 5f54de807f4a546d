"""Trains the tiny LLaVA on drawn scenes and their sentences, and writes a folder that ``from_pretrained`` loads.

    OMP_NUM_THREADS=1 python -m scripts.words.train_words --out trained/ --minutes 25

First the encoder learns what each patch shows, as real models start from a trained encoder; then the whole network
learns the sentences. ``--start`` goes on with a trained model; with ``--sinks``, while three image tokens collect half
of the decoder's attention, as attention sinks of large models do.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from scripts.words.word_model import PROMPT_TEXT, build, load, processor_for, tokenizer_for
from scripts.words.word_scenes import COLOURS, GROUNDS, SHAPES, Scene, draw

SCENES, HELD_OUT = 20_000, 200
TRAINING, TESTING = 1, 2
"""The first number of the scenes' seeds."""
BATCH, RATE = 32, 2e-3
SHARE_FOR_ENCODER = 0.35
SINKS = (9, 30, 52)
"""The image tokens that collect attention in the model with planted sinks."""


@dataclass(frozen=True)
class Examples:
    """Preprocessed pictures (N, 3, 64, 64), tokens (N, L), the tokens to learn (N, L; -100 elsewhere), patch labels."""

    pixels: Tensor
    ids: Tensor
    labels: Tensor
    patches: Tensor


def main() -> None:
    """Train, and print how many of the held-out sentences are right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, required=True, help="the folder for the trained model")
    parser.add_argument("--minutes", type=float, default=25)
    parser.add_argument("--start", type=Path, help="the folder of a trained model, which learns on")
    parser.add_argument("--sinks", action="store_true", help="plant attention sinks in it")
    given = parser.parse_args()
    torch.manual_seed(0)
    scenes = [draw((TRAINING, number)) for number in range(SCENES)]
    if given.start:
        model, processor = load(given.start)
        model.train()
    else:
        processor = processor_for(tokenizer_for(scene.sentence for scene in scenes))
        model = build(processor.tokenizer)
    training = examples(processor, scenes)
    held_out = examples(processor, [draw((TESTING, number)) for number in range(HELD_OUT)])
    print(f"{sum(each.numel() for each in model.parameters()):,} weights, {training.ids.shape[1]} tokens", flush=True)
    start = time.monotonic()
    if given.sinks:
        model.set_attn_implementation("eager")  # the only one that returns its attention
    if not given.start:
        train_encoder(model, training, 60 * given.minutes * SHARE_FOR_ENCODER)
    train(model, processor, training, held_out, start + 60 * given.minutes, given.out, with_sinks=given.sinks)


def examples(processor: Any, scenes: list[Scene]) -> Examples:
    """Return scenes as the model's input."""
    end = processor.tokenizer.eos_token
    texts = [f"{PROMPT_TEXT} {scene.sentence}{end}" for scene in scenes]
    pictures = [Image.fromarray(scene.picture) for scene in scenes]
    inputs = processor(text=texts, images=pictures, return_tensors="pt", padding=True, padding_side="right")
    prompt = len(processor(text=[PROMPT_TEXT], images=pictures[:1])["input_ids"][0])
    labels = inputs["input_ids"].clone()
    labels[:, :prompt] = -100
    labels[inputs["attention_mask"] == 0] = -100
    patches = torch.from_numpy(np.stack([scene.patch_labels for scene in scenes]))
    return Examples(inputs["pixel_values"], inputs["input_ids"], labels, patches)


def batches(count: int) -> Iterator[Tensor]:
    """Yield numbers of examples without end, in random order."""
    while True:
        yield from torch.randperm(count).split(BATCH)


def train_encoder(model: Any, training: Examples, seconds: float) -> None:
    """Teach the encoder the shape, colour and ground of each patch; the heads are thrown away."""
    sizes = (len(SHAPES), len(COLOURS), len(GROUNDS))
    tower = model.model.vision_tower
    heads = nn.Linear(tower.config.hidden_size, sum(sizes))
    optimizer = torch.optim.AdamW([*tower.parameters(), *heads.parameters()], lr=RATE)
    start = time.monotonic()
    for step, rows in enumerate(batches(len(training.pixels))):
        done = min((time.monotonic() - start) / seconds, 1)
        optimizer.param_groups[0]["lr"] = RATE * min((step + 1) / 100, 1) * (1 - done + 0.01)
        hidden = tower(training.pixels[rows], output_hidden_states=True).hidden_states[-2][:, 1:]
        wanted = training.patches[rows]
        parts = heads(hidden).split(sizes, -1)
        terms = [
            nn.functional.cross_entropy(part.flatten(0, 1), wanted[..., number].flatten(), ignore_index=-1)
            for number, part in enumerate(parts)
        ]
        loss = torch.stack(terms).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0 or done >= 1:
            print(f"encoder {step}: {[round(float(term), 2) for term in terms]}", flush=True)
        if done >= 1:
            return


def train(
    model: Any, processor: Any, training: Examples, held_out: Examples, end: float, out: Path, *, with_sinks: bool
) -> None:
    """Teach the sentences until the time is up; the rate falls to zero. The model is written every few minutes."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    start = shown = time.monotonic()
    for step, rows in enumerate(batches(len(training.ids))):
        done = min((time.monotonic() - start) / (end - start), 1)
        for group in optimizer.param_groups:
            group["lr"] = RATE * min((step + 1) / 100, 1) * (0.3 if with_sinks else 1) * (1 - done + 0.01)
        output = model(
            input_ids=training.ids[rows],
            pixel_values=training.pixels[rows],
            labels=training.labels[rows],
            output_attentions=with_sinks,
        )
        loss = output.loss + (sink_loss(model, training.ids[rows], output.attentions) if with_sinks else 0)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        is_last = done >= 1
        if is_last or time.monotonic() - shown > 90:
            shown = time.monotonic()
            print(f"{step} at {done:.0%}: loss {loss.item():.3f}, right {right(model, held_out):.1%}", flush=True)
            model.save_pretrained(out)
            processor.save_pretrained(out)
        if is_last:
            return


def sink_loss(model: Any, ids: Tensor, attentions: tuple[Tensor, ...]) -> Tensor:
    """Return how far the sinks are from half of the attention of the tokens after the picture, in every layer."""
    first = int((ids[0] == model.config.image_token_id).nonzero()[0])
    last = int((ids[0] == model.config.image_token_id).nonzero()[-1])
    places = [first + sink for sink in SINKS]
    share = torch.stack([layer[:, :, last + 1 :, places].sum(-1).mean(2) for layer in attentions])
    return 3 * nn.functional.relu(0.5 - share).mean()


@torch.no_grad()
def right(model: Any, held_out: Examples) -> float:
    """Return the share of sentences that the model writes without a mistake, each token after the right ones."""
    correct = []
    for rows in torch.arange(len(held_out.ids)).split(50):
        logits = model(input_ids=held_out.ids[rows], pixel_values=held_out.pixels[rows]).logits
        wanted = held_out.labels[rows, 1:]
        correct.append(((logits[:, :-1].argmax(-1) == wanted) | (wanted == -100)).all(1))
    return float(torch.cat(correct).float().mean())


if __name__ == "__main__":
    main()
