"""The training of the tiny models asks for the loss that Hugging Face's own classes define."""

from __future__ import annotations

import pytest
import torch
from PIL import Image
from torch import nn

pytestmark = pytest.mark.extended

pytest.importorskip("transformers")

from scripts.words.train_words import examples
from scripts.words.word_model import ARCHITECTURES, tokenizer_for
from scripts.words.word_scenes import draw


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_tokens_to_learn_are_those_of_the_models_own_loss(name: str) -> None:
    kind, scenes = ARCHITECTURES[name], [draw((0, number)) for number in range(3)]
    processor = kind.processor(tokenizer_for((scene.sentence for scene in scenes), **kind.tokens))
    model = kind.build(processor.tokenizer).eval()
    made = examples(kind, model, processor, scenes)
    with torch.no_grad():
        logits = model(**made.batch(torch.arange(3))).logits
        found = nn.functional.cross_entropy(logits.flatten(0, 1), made.wanted.flatten(), reduction="none")
        cells = kind.seen(model, made.batch(torch.arange(3)))
    assert cells.shape[:2] == (3, 64)
    losses, counts = found.reshape(3, -1).sum(1), (made.wanted >= 0).sum(1)
    for number, scene in enumerate(scenes):  # alone, so that nothing is padded
        picture = Image.fromarray(scene.picture)
        inputs = processor(text=[f"{kind.before} {scene.sentence}</s>".strip()], images=[picture], return_tensors="pt")
        if "labels" not in inputs:
            inputs["labels"] = inputs["input_ids"].clone()
            inputs["labels"][:, : len(processor(text=[kind.before], images=[picture])["input_ids"][0])] = -100
        with torch.no_grad():
            own = model(**inputs).loss
        assert losses[number] / counts[number] == pytest.approx(float(own), rel=1e-4)
