"""Words of tiny vision-language models: the scores against a slow reference, the model as it was, refusals."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image
from results import assert_is_a_result

import camkit
from camkit.cli import main
from camkit.errors import InputError, MethodError, ModelError
from camkit.sentences.heat import _shares
from camkit.sentences.sentence import spans
from scripts.words.word_model import PROMPT, PROMPT_TEXT, build, processor_for, tokenizer_for
from scripts.words.word_scenes import draw

SENTENCE = "a red triangle near a tree ."


@pytest.fixture(scope="module")
def llava():
    torch.manual_seed(0)
    processor = processor_for(tokenizer_for(draw((9, number)).sentence for number in range(40)), side=32)
    model = build(processor.tokenizer, width=32, layers=2, side=32).eval()
    return model, processor


@pytest.fixture(scope="module")
def picture():
    return Image.fromarray(draw((9, 1)).picture)


def hooks_of(model):
    return [[*module._forward_pre_hooks.values(), *module._forward_hooks.values()] for module in model.modules()]


def log_probability(model, processor, picture, sentence, word):
    """Return a word's log-probability from plain passes of the whole model, token by token."""
    ids = processor.tokenizer(sentence, add_special_tokens=False)["input_ids"]
    inputs = processor(text=[PROMPT_TEXT], images=[picture], return_tensors="pt")
    total = 0.0
    for token in word.tokens:
        text = torch.cat([inputs["input_ids"], torch.tensor([ids[:token]], dtype=torch.long)], 1)
        with torch.no_grad():
            logits = model(input_ids=text, pixel_values=inputs["pixel_values"]).logits[0, -1]
        total += float(logits.log_softmax(-1)[ids[token]])
    return total


def test_words_score_as_plain_passes_of_the_whole_model_do(llava, picture, tmp_path):
    model, processor = llava
    references = [Image.fromarray(draw((8, number)).picture) for number in range(2)]
    found = camkit.words(model, picture, PROMPT, processor=processor, words=SENTENCE, references=references)
    assert [word.text for word in found] == SENTENCE.split()
    assert found[-1].is_punctuation
    assert len(found.named("triangle")[0].tokens) > 1
    assert [row["text"] for row in assert_is_a_result(found, tmp_path / "words.html")] == SENTENCE.split()
    for word in (found[1], found[2]):
        own = log_probability(model, processor, picture, SENTENCE, word)
        others = [log_probability(model, processor, each, SENTENCE, word) for each in references]
        assert np.log(word.probability) == pytest.approx(own, abs=1e-4)
        assert word.needs_picture == pytest.approx(own - np.mean(others), abs=1e-4)
        assert word.spread == pytest.approx(np.std(others), abs=1e-4)


def test_the_heat_is_that_of_one_reference_after_another(llava, picture):
    """The slow reference replaces the tokens in the embeddings by hand and takes gradients of the whole model."""
    model, processor = llava
    references = [Image.fromarray(draw((8, number)).picture) for number in range(3)]
    found = camkit.words(model, picture, PROMPT, processor=processor, words=SENTENCE, references=references)
    ids = processor.tokenizer(SENTENCE, add_special_tokens=False)["input_ids"]
    inputs = processor(text=[PROMPT_TEXT], images=[picture, *references][:1], return_tensors="pt")
    text = torch.cat([inputs["input_ids"], torch.tensor([ids])], 1)
    first = inputs["input_ids"].shape[1]

    def tokens(shown):
        pixels = processor(text=[PROMPT_TEXT], images=[shown], return_tensors="pt")["pixel_values"]
        return (
            model.get_image_features(
                pixel_values=pixels, vision_feature_layer=-2, vision_feature_select_strategy="default"
            )
            .pooler_output[0]
            .detach()
        )

    own, word = tokens(picture), found[1]
    embeddings = model.get_input_embeddings()(text).detach()
    places = text[0] == processor.image_token_id
    total = torch.zeros(len(own))
    for share, reference in zip(_shares(3).tolist(), map(tokens, references), strict=True):
        point = (reference + share * (own - reference)).requires_grad_()
        entering = embeddings.clone()
        entering[0, places] = point
        logits = model(inputs_embeds=entering).logits[0].log_softmax(-1)
        score = sum(logits[first + token - 1, ids[token]] for token in word.tokens)
        total += (torch.autograd.grad(score, point)[0] * (own - reference)).sum(1) / 3
    np.testing.assert_allclose(word.explanation.raw.ravel(), total.numpy(), atol=1e-5)


def test_rows_of_attention_are_those_of_the_eager_attention(llava, picture):
    model, processor = llava
    found = camkit.words(model, picture, PROMPT, processor=processor, words=SENTENCE, method="attention")
    ids = processor.tokenizer(SENTENCE, add_special_tokens=False)["input_ids"]
    inputs = processor(text=[PROMPT_TEXT], images=[picture], return_tensors="pt")
    text = torch.cat([inputs["input_ids"], torch.tensor([ids])], 1)
    first, places = inputs["input_ids"].shape[1], text[0] == processor.image_token_id
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            layers = model(input_ids=text, pixel_values=inputs["pixel_values"], output_attentions=True).attentions
    finally:
        model.set_attn_implementation("sdpa")
    rows = [first + token - 1 for token in found[2].tokens]
    expected = torch.stack([layer[0, :, rows].mean((0, 1)) for layer in layers]).mean(0)[places]
    np.testing.assert_allclose(found[2].explanation.raw.ravel(), expected.numpy(), atol=1e-6)


@pytest.mark.parametrize("method", ["expected", "attention", "attention-expected"])
def test_the_model_comes_back_also_after_an_error(llava, picture, method, monkeypatch):
    model, processor = llava
    model.train()
    hooks = hooks_of(model)  # transformers sets some of its own, once, when a test asks it for hidden states
    before = {name: value.clone() for name, value in model.state_dict().items()}
    settings = model.generation_config.to_dict(), model.config.to_dict(), model.config._attn_implementation
    camkit.words(model, picture, PROMPT, processor=processor, words=SENTENCE, method=method)
    with monkeypatch.context() as patch:
        patch.setattr(model.lm_head, "forward", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            camkit.words(model, picture, PROMPT, processor=processor, words=SENTENCE, method=method)
    assert all(module.training for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert hooks_of(model) == hooks
    assert (model.generation_config.to_dict(), model.config.to_dict(), model.config._attn_implementation) == settings
    model.eval()


def test_refusals_are_one_sentence(llava, picture):
    model, processor = llava
    with pytest.raises(MethodError, match="'guess' is not a method for words"):
        camkit.words(model, picture, PROMPT, processor=processor, method="guess")
    with pytest.raises(InputError, match="has no word 'cat'"):
        camkit.words(model, picture, PROMPT, processor=processor, words=SENTENCE, only="cat")
    with pytest.raises(ModelError, match="pass processor="):
        camkit.words(model, picture, PROMPT)


def test_tokens_of_one_word_are_joined_and_punctuation_stands_alone():
    pieces = ["The", " air", "craft", "'s", " wing", ",", " now", "."]
    found = spans(list(range(len(pieces))), lambda ids: "".join(pieces[number] for number in ids))
    assert [(span.text, list(span.tokens)) for span in found] == [
        ("The", [0]), ("aircraft's", [1, 2, 3]), ("wing", [4]), (",", [5]), ("now", [6]), (".", [7]),
    ]  # fmt: skip
    assert [span.is_punctuation for span in found] == [False, False, False, True, False, True]


def test_the_command_writes_a_page_a_sheet_and_json_for_a_folder(llava, picture, tmp_path, capsys):
    model, processor = llava
    model.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    picture.save(tmp_path / "photo.png")
    arguments = ["words", str(tmp_path / "photo.png"), "--model", f"hf:{tmp_path / 'model'}", "--prompt", PROMPT]
    arguments += ["--sentence", SENTENCE, "--word", "red", "-o", str(tmp_path / "out"), "--device", "cpu"]
    assert main(arguments) == 0
    assert SENTENCE in capsys.readouterr().out
    saved = json.loads((tmp_path / "out/photo.words.json").read_text())
    assert [word["text"] for word in saved["words"]] == SENTENCE.split()
    assert [word["text"] for word in saved["words"] if word["explanation"]] == ["red"]
    assert "heat of the word red" in (tmp_path / "out/photo.words.html").read_text()
    assert main([*arguments[:3], f"hf:{tmp_path / 'nothing'}"]) == 2
