"""Measures what it costs to explain all words of a sentence, beside writing it.

    OMP_NUM_THREADS=1 python -m scripts.words.bench_words --model tiny
    OMP_NUM_THREADS=2 python -m scripts.words.bench_words --model large --words 20
    OMP_NUM_THREADS=1 python -m scripts.words.bench_words --growth

``tiny`` has half a million weights and ``large`` about 540 million, both random, in Hugging Face's LLaVA. Each row is
measured in a process of its own, after one run to warm up for the tiny model: seconds, and the most memory that the
process held at any time, with the libraries and the weights. ``--growth`` varies the number of words, image tokens and
references of the tiny model in one process, and compares processor time, which other programs hardly change.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from PIL import Image
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

import camkit
from scripts.words.word_model import PROMPT, PROMPT_TEXT, build, processor_for, tokenizer_for
from scripts.words.word_scenes import draw

SEED = 9
SIDES = {"tiny": 64, "large": 224}
PATCHES = {"tiny": 8, "large": 14}
"""The sides of a picture and of a patch, in pixels: 64 and 256 picture tokens."""
ROWS = ("load", "write", "score", "explain")
USUAL = {"words": 10, "side": 64, "references": 4}
GROWTH = {"words": (5, 10, 20), "side": (64, 128), "references": (2, 4, 8)}
"""What ``--growth`` varies, one at a time: a side of 128 pixels has 256 image tokens."""


def main() -> None:
    """Measure the rows, each in a new process, and print them as a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", choices=list(SIDES), default="tiny")
    parser.add_argument("--words", type=int, default=20)
    parser.add_argument("--references", type=int, default=8)
    parser.add_argument("--side", type=int, help="the side of the picture in pixels: more tokens")
    parser.add_argument("--row", choices=ROWS, help="measure this row in this process, and print JSON")
    parser.add_argument("--growth", action="store_true", help="how the cost grows, for the tiny model")
    given = parser.parse_args()
    if given.growth:
        for line in growth():
            print(line, flush=True)
        return
    side = given.side or SIDES[given.model]
    if given.row is not None:
        print(json.dumps(measured(given.row, given.model, side, given.words, given.references)))
        return
    print(f"{given.model}, {given.words} words, {given.references} references, {torch.get_num_threads()} threads\n")
    print("| | seconds | peak memory, MB |\n|---|---|---|")
    for row in ROWS:
        options = ["--row", row, "--model", given.model, "--side", str(side)]
        options += ["--words", str(given.words), "--references", str(given.references)]
        command = [sys.executable, "-m", "scripts.words.bench_words", *options]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        print(f"| {found['title']} | {found['seconds']:.2f} | {found['megabytes']:.0f} |", flush=True)


def measured(row: str, name: str, side: int, words: int, references: int) -> dict[str, Any]:
    """Return what a row is, its seconds, and the peak memory of this process."""
    title, run = prepared(row, name, side, words, references)
    if name == "tiny":
        run()
    start = time.perf_counter()
    run()
    seconds = time.perf_counter() - start
    unit = 2**20 if sys.platform == "darwin" else 2**10
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
    return {"title": title, "seconds": seconds, "megabytes": peak, "process": os.getpid()}


def growth() -> Iterator[str]:
    """Yield the lines of a table: processor time of each setting, as multiples of writing in the usual one."""

    @functools.cache
    def seconds(row: str, words: int, side: int, references: int) -> float:
        _, run = prepared(row, "tiny", side, words, references)
        run()
        start = time.process_time()
        run()
        return time.process_time() - start

    unit = seconds("write", **USUAL)
    yield "| words | image tokens | references | write | all words scored, heat of one | heat of all words |"
    yield "|---:|---:|---:|---:|---:|---:|"
    for name, values in GROWTH.items():
        for value in values:
            setting = USUAL | {name: value}
            times = " | ".join(f"{seconds(row, **setting) / unit:.1f}" for row in ROWS[1:])
            tokens = (setting["side"] // PATCHES["tiny"]) ** 2
            yield f"| {setting['words']} | {tokens} | {setting['references']} | {times} |"


def prepared(row: str, name: str, side: int, words: int, references: int) -> tuple[str, Callable[[], None]]:
    """Return what a row is, and what it runs."""
    torch.manual_seed(0)
    scenes = [draw((SEED, number)) for number in range(40)]
    processor = processor_for(tokenizer_for(scene.sentence for scene in scenes), side=side, patch=PATCHES[name])
    make: dict[str, Callable[..., Any]] = {"tiny": build, "large": large}
    model = make[name](processor.tokenizer, side=side, patch=PATCHES[name]).eval()
    text = " ".join(" ".join(scene.sentence for scene in scenes).replace(" .", "").split()[:words])
    pictures = [Image.fromarray(scene.picture).resize((side, side)) for scene in scenes]
    tokens = len(processor.tokenizer(text, add_special_tokens=False)["input_ids"])
    inputs = processor(text=[PROMPT_TEXT], images=[pictures[0]], return_tensors="pt")
    titles = {
        "load": "weights and libraries alone",
        "write": f"write {tokens} tokens",
        "score": f"how much each of {words} words needs the picture, heat of one",
        "explain": f"heat of all {words} words",
    }

    def run() -> None:
        if row == "write":
            model.generate(**inputs, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
        elif row != "load":
            only = next(word for word in text.split() if text.split().count(word) == 1) if row == "score" else None
            some = pictures[1 : references + 1]
            camkit.words(model, pictures[0], PROMPT, processor=processor, words=text, references=some, only=only)

    return titles[row], run


def large(tokenizer: Any, *, side: int, patch: int) -> LlavaForConditionalGeneration:
    """Return a LLaVA of about 540 million random weights."""
    vision = CLIPVisionConfig(
        hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12, image_size=side,
        patch_size=patch, projection_dim=768,
    )  # fmt: skip
    text = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=1536, intermediate_size=4096, num_hidden_layers=16,
        num_attention_heads=12, num_key_value_heads=12, max_position_embeddings=1024, tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    config = LlavaConfig(
        vision_config=vision, text_config=text, image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=(side // patch) ** 2,
    )  # fmt: skip
    model = LlavaForConditionalGeneration(config)
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


if __name__ == "__main__":
    main()
