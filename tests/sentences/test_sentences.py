"""Words of tiny vision-language models: the scores against a slow reference, the model as it was, refusals."""

from __future__ import annotations

import copy
import csv
import json
import re
import string
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from results import assert_is_a_result
from scipy.ndimage import generic_filter
from scipy.optimize import minimize_scalar
from unchanged import unchanged

import camkit
from camkit.cli import main
from camkit.errors import ImageError, InputError, MethodError, ModelError
from camkit.sentences import WORD_METHODS, words_of_files
from camkit.sentences.explain import _shares
from camkit.sentences.inputs import load, made_pictures

pytestmark = pytest.mark.extended

pytest.importorskip("transformers")

import transformers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from scripts.words.word_model import PROMPT, PROMPT_TEXT, build, processor_for, tokenizer_for
from scripts.words.word_scenes import draw

SENTENCE = "a red triangle near a tree ."
PLANE = camkit.scenes.scene_paths()["plane-sky"]


@pytest.fixture(scope="module")
def llava():
    torch.manual_seed(0)
    processor = processor_for(tokenizer_for(draw((9, number)).sentence for number in range(40)), side=32)
    model = build(processor.tokenizer, width=32, layers=2, side=32).eval()
    return model, processor


@pytest.fixture(scope="module")
def folder(llava, tmp_path_factory):
    """Save the model and its processor."""
    path = tmp_path_factory.mktemp("model")
    for part in llava:
        part.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def picture():
    return Image.fromarray(draw((9, 1)).picture)


def words_of(llava, shown, **options):
    model, processor = llava
    return camkit.words(model, shown, PROMPT, **{"processor": processor, "words": SENTENCE, **options})


def drawn(count):
    return [Image.fromarray(draw((8, number)).picture) for number in range(count)]


def prepared(processor, picture, sentence=SENTENCE):
    """Return the arguments for a picture, the sentence's tokens, and the prompt's tokens with the sentence's."""
    ids = processor.tokenizer(sentence, add_special_tokens=False)["input_ids"]
    inputs = processor(text=[PROMPT_TEXT], images=[picture], return_tensors="pt")
    return inputs, ids, torch.cat([inputs["input_ids"], torch.tensor([ids])], 1)


def run(*arguments):
    """Run ``camkit words`` on the sentence, with the heat of one word."""
    options = ["--prompt", PROMPT, "--sentence", SENTENCE, "--word", "red", "--device", "cpu"]
    return main(["words", *map(str, arguments), *options])


def log_probability(model, processor, picture, sentence, word):
    """Return a word's log-probability from plain passes of the whole model, token by token."""
    inputs, ids, whole = prepared(processor, picture, sentence)
    total = 0.0
    for token in word.tokens:
        text = whole[:, : inputs["input_ids"].shape[1] + token]
        with torch.no_grad():
            logits = model(input_ids=text, pixel_values=inputs["pixel_values"]).logits[0, -1]
        total += float(logits.log_softmax(-1)[ids[token]])
    return total


def test_words_score_as_plain_passes_of_the_whole_model_do(llava, picture, tmp_path):
    model, processor = llava
    references = drawn(2)
    found = words_of(llava, picture, references=references)
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
    references = drawn(3)
    found = words_of(llava, picture, references=references)
    inputs, ids, text = prepared(processor, picture)
    first = inputs["input_ids"].shape[1]

    def tokens(shown):
        pixels = prepared(processor, shown)[0]["pixel_values"]
        chosen = {"vision_feature_layer": -2, "vision_feature_select_strategy": "default"}
        return model.get_image_features(pixel_values=pixels, **chosen).pooler_output[0].detach()

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
    found = words_of(llava, picture, method="attention")
    inputs, _, text = prepared(processor, picture)
    first, places = inputs["input_ids"].shape[1], text[0] == processor.image_token_id
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        layers = eager(input_ids=text, pixel_values=inputs["pixel_values"], output_attentions=True).attentions
    rows = [first + token - 1 for token in found[2].tokens]
    expected = torch.stack([layer[0, :, rows].mean((0, 1)) for layer in layers]).mean(0)[places]
    np.testing.assert_allclose(found[2].explanation.raw.ravel(), expected.numpy(), atol=1e-6)
    assert found[2].explanation.unit == "Share of attention"


def ranked(window):
    window = np.sort(window)
    if not window.any():
        return 0
    weights = np.exp(-(np.arange(-4, 5) ** 2) / 2 / (window.std() / window.mean()) ** 2)
    return (weights * window).sum() / weights.sum()


def test_token_activation_maps_follow_the_paper(llava, picture):
    """The slow reference computes each earlier token's map, fits the multiple by search, and filters cell by cell."""
    model, processor = llava
    found = words_of(llava, picture, method="tam")
    inputs, _, text = prepared(processor, picture)
    with torch.no_grad():
        logits = model(input_ids=text, pixel_values=inputs["pixel_values"]).logits[0].clamp(min=0).double().numpy()
    text, first = text[0].numpy(), inputs["input_ids"].shape[1]
    picture_tokens, drawn_maps = np.flatnonzero(text == processor.image_token_id), []
    for word in (found[0], found[1], found[2]):
        maps = []
        for token in word.tokens:
            place = first + token
            earlier = [at for at in range(picture_tokens[-1] + 1, place) if text[at] != text[place]]
            asks = [logits[at, text[place]] for at in earlier]
            maps_before = [ask * logits[picture_tokens, text[at]] for ask, at in zip(asks, earlier, strict=True)]
            mean = sum(maps_before) / (sum(asks) + 1e-8)
            own = logits[picture_tokens, text[place]]
            best = minimize_scalar(lambda multiple, own=own, mean=mean: ((own - multiple * mean) ** 2).sum()).x
            maps.append(np.maximum(own - best * mean, 0))
        side = round(len(picture_tokens) ** 0.5)
        expected = generic_filter(np.mean(maps, 0).reshape(side, side), ranked, 3, mode="mirror")
        np.testing.assert_allclose(word.explanation.raw, expected, atol=1e-5)
        drawn_maps.append(expected)
    assert any(each.any() for each in drawn_maps)


@pytest.mark.parametrize("method", ["expected", "attention", "attention-expected", "tam"])
def test_the_model_comes_back_also_after_an_error(llava, picture, method, monkeypatch):
    model = llava[0].train()
    with torch.no_grad():
        model(**prepared(llava[1], picture)[0])  # transformers sets hooks of its own in the first pass
    settings = model.generation_config.to_dict(), model.config.to_dict(), model.config._attn_implementation
    with unchanged(model):
        words_of(llava, picture, method=method)
    with monkeypatch.context() as patch:
        patch.setattr(model.lm_head, "forward", lambda _: 1 / 0)
        with unchanged(model), pytest.raises(ZeroDivisionError):
            words_of(llava, picture, method=method)
    assert (model.generation_config.to_dict(), model.config.to_dict(), model.config._attn_implementation) == settings
    model.eval()


def test_refusals_are_one_sentence(llava, picture, monkeypatch):
    model, processor = llava
    broken, array = copy.deepcopy(model), np.full((32, 32, 3), np.nan, np.float32)
    broken.lm_head.weight.data[3] = torch.nan
    for kind, said, shown, options in (
        (MethodError, "'guess' is not a method for words", picture, {"method": "guess"}),
        (InputError, "has no word 'cat'", picture, {"only": "cat"}),
        (InputError, "the model writes no word about this picture", picture, {"words": ""}),
        (ModelError, "pass processor=", picture, {"processor": None}),
        (ImageError, "^an array must be uint8", picture, {"references": [*drawn(1), array]}),
        (ImageError, "^an array must be uint8", np.full((32, 32, 3), 255.0), {}),
        (ImageError, "the picture itself is the only reference picture", picture, {"references": [picture]}),
    ):
        with pytest.raises(kind, match=said):
            words_of(llava, shown, **options)
    with pytest.raises(ModelError, match="LlavaForConditionalGeneration returns NaN for this picture; load it in"):
        words_of((broken, processor), picture)
    with pytest.raises(ModelError, match="Linear cannot write text; pass a Hugging Face model"):
        words_of((torch.nn.Linear(2, 2), processor), picture)
    embeddings = model.model.vision_tower.embeddings
    patches = embeddings.forward

    def spread(pixel_values, **options):  # each patch shows a frequency of the whole picture
        return patches(torch.fft.fft2(pixel_values).real, **options)

    monkeypatch.setattr(embeddings, "forward", spread)
    with pytest.raises(ModelError, match="cannot say where the 16 tokens that LlavaForConditionalGeneration makes"):
        words_of(llava, picture)


def test_a_picture_is_not_compared_with_itself(llava, picture):
    alone = words_of(llava, picture, references=drawn(2), only="red")
    found = words_of(llava, picture, references=[*drawn(2), picture.copy()], only="red")
    assert [word.needs_picture for word in found] == [word.needs_picture for word in alone]
    assert found.references == "3 pictures, passed as references, without this picture itself"


def test_settings_of_generation_stay_and_do_not_change_the_words(llava, picture):
    """A model that samples, with a static cache and slow attention, is explained as it writes without these."""
    options = {"words": None, "max_new_tokens": 6, "references": drawn(2)}
    plain = words_of(llava, picture, **options)
    model = copy.deepcopy(llava[0])
    sampling = {"do_sample": True, "temperature": 0.3, "max_length": 400, "cache_implementation": "static"}
    model.generation_config.update(**sampling, num_beams=1, use_cache=True)
    model.set_attn_implementation("eager")
    before = model.generation_config.to_dict(), model.config.to_dict(), set(vars(model))
    found = words_of((model, llava[1]), picture, method="attention-expected", **options)
    assert (model.generation_config.to_dict(), model.config.to_dict(), set(vars(model))) == before
    assert model.config.get_text_config()._attn_implementation == "eager"
    assert found.sentence == plain.sentence
    assert [word.needs_picture for word in found] == pytest.approx([word.needs_picture for word in plain], abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gives_nearly_the_same_words(llava, picture, dtype):
    rounded = copy.deepcopy(llava[0]).to(dtype), llava[1]
    exact, found = (words_of(each, picture, references=drawn(2)) for each in (llava, rounded))
    for whole, half in zip(exact, found, strict=True):
        assert half.probability == pytest.approx(whole.probability, rel=0.05)
        assert np.corrcoef(half.explanation.raw.ravel(), whole.explanation.raw.ravel())[0, 1] > 0.95


def test_half_of_the_pictures_that_camkit_makes_are_noise_and_half_are_grey():
    pictures = [np.asarray(each, float) for each in made_pictures((48, 32))]
    assert {each.shape for each in pictures} == {(32, 48, 3)}
    noise, greys = pictures[:8], pictures[8:]
    contrasts = sorted(each.std((0, 1)).mean() for each in noise)
    assert contrasts[0] < 10
    assert contrasts[-1] > 40
    assert np.ptp([each.mean((0, 1)) for each in noise], axis=0).min() > 100
    assert [np.unique(each).tolist() for each in greys] == [[16], [48], [80], [112], [143], [175], [207], [239]]
    assert all((one == again).all() for one, again in zip(pictures, made_pictures((48, 32)), strict=True))


@pytest.mark.parametrize("kind", ["LlamaTokenizer", "GPT2Tokenizer"])
def test_a_word_has_the_tokens_of_all_its_bytes(kind, picture):
    """Each byte is a token: so a word's place among the sentence's bytes says which are its own."""
    sentence = "a 狗 собака né 🐕🐈 👩‍🚒 � ��dog 犬と猫"
    special = ["<unk>", "<pad>", "<image>", "<s>", "</s>"]
    if kind == "GPT2Tokenizer":
        pieces = [*special, *bytes_to_unicode().values()]
    else:
        pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *string.printable.strip()]
    tokenizer = getattr(transformers, kind)(
        vocab={piece: number for number, piece in enumerate(pieces)},
        merges=[],
        pad_token="<pad>",
        eos_token="</s>",
        extra_special_tokens={"image_token": "<image>"},
    )
    processor = processor_for(tokenizer, side=32)
    model = build(tokenizer, width=32, layers=1, side=32).eval()
    found = words_of((model, processor), picture, words=sentence, method="attention")
    written = re.findall(r"\w+|[^\w\s]+", sentence)
    assert [word.text for word in found] == written
    lead = kind == "LlamaTokenizer"  # which puts a space before a sentence
    ends = np.cumsum([lead, *(len(piece.encode()) for piece in re.split(r"(\s|(?<=�)(?=d))", sentence))])
    assert [(word.tokens.start, word.tokens.stop) for word in found] == list(zip(ends[::2], ends[1::2], strict=True))
    for word in (found[1], found[-1]):
        own = log_probability(model, processor, picture, sentence, word)
        assert np.log(word.probability) == pytest.approx(own, abs=1e-4)


def test_the_command_writes_a_page_a_sheet_and_json(folder, picture, tmp_path, capsys):
    picture.save(tmp_path / "photo.png")
    model, out = ["--model", f"hf:{folder}"], ["-o", tmp_path / "out"]
    assert run(tmp_path / "photo.png", *model, *out) == 0
    assert SENTENCE in capsys.readouterr().out
    saved = json.loads((tmp_path / "out/photo.png.words.json").read_text())
    assert [word["text"] for word in saved["words"]] == SENTENCE.split()
    assert [word["needs_no_picture"] for word in saved["words"]] == [
        word["verdict"].startswith(("does not need", "punctuation")) for word in saved["words"]
    ]
    assert [word["text"] for word in saved["words"] if word["explanation"]] == ["red"]
    assert "without heat, for the word red" in (tmp_path / "out/photo.png.words.html").read_text()
    assert (tmp_path / "out/photo.png.words.png").exists()
    assert run(tmp_path / "photo.png", "--model", f"hf:{tmp_path / 'nothing'}", *out) == 2
    assert run(tmp_path / "no.png", *model, *out) == 2
    assert f"there is no file {tmp_path / 'no.png'}" in capsys.readouterr().err


def test_pictures_together_share_a_prompt_and_each_gets_a_page(folder, tmp_path, capsys):
    files = [str(tmp_path / name / "p.png") for name in "ab"]  # the folders tell them apart
    for file, drawing in zip(files, drawn(2), strict=True):
        Path(file).parent.mkdir()
        drawing.save(file)
    out = tmp_path / "out"
    assert run(*files, "--together", "--model", f"hf:{folder}", "-o", out, "--json") == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["source"], first["beside"], second["source"], second["beside"]) == (
        files[0], files[1:], files[1], files[:1],
    )  # fmt: skip
    assert first["words"][1]["probability"] == pytest.approx(second["words"][1]["probability"], abs=1e-5)
    assert first["words"][1]["needs_picture"] != pytest.approx(second["words"][1]["needs_picture"], abs=1e-5)
    assert f"in one prompt with {files[1]}" in (out / "a/p.png.words.html").read_text()
    assert f"in one prompt with {files[0]}" in (out / "b/p.png.words.html").read_text()


@pytest.mark.parametrize(
    ("pictures", "options", "said"),
    [
        ([PLANE], {"method": "guess"}, "'guess' is not a method for words; use one of expected, attention,"),
        ([PLANE], {"max_new_tokens": 0}, "max_new_tokens must be a whole number from 1, not 0"),
        ([], {}, "name at least one picture or folder"),
    ],
)
def test_a_wrong_call_is_refused_before_the_model_is_loaded(pictures, options, said, tmp_path):
    with pytest.raises(InputError, match=said):
        words_of_files("hf:nothing", pictures, tmp_path, PROMPT, **options)


def test_the_page_names_every_method_for_words():
    page = (Path(__file__).parents[2] / "docs/words.md").read_text("utf-8")
    assert [name for name in WORD_METHODS if f"\n| `{name}`" not in page] == []


def test_a_model_without_some_of_its_weights_is_refused(llava, tmp_path):
    model, processor = llava
    weights = {name: value for name, value in model.state_dict().items() if "projector.linear_1" not in name}
    model.save_pretrained(tmp_path, state_dict=weights)
    processor.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"has no weights for 2 of its parameters \(the first is '.*linear_1.bias'"):
        load(f"hf:{tmp_path}", "cpu")


OWN_CODE = {"model_type": "own", "auto_map": {"AutoConfig": "somebody/model--own.Config"}}
KERNEL = "code for its attention from 'somebody/attention' on the hub"


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        (OWN_CODE, "cannot be loaded as a model that writes about pictures"),
        ({"attn_implementation": "somebody/attention"}, KERNEL),
        ({"attn_implementation": {"text_config": "somebody/attention"}}, KERNEL),
    ],
)
def test_code_that_a_folder_names_is_refused_without_a_question(llava, tmp_path, monkeypatch, entries, said):
    monkeypatch.setattr("builtins.input", lambda _="": pytest.fail("a question was asked on standard input"))
    llava[0].config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**config, **entries}), "utf-8")
    with pytest.raises(ModelError, match=said):
        load(f"hf:{tmp_path}", "cpu")


def test_pictures_of_a_folder_are_compared_with_the_others(llava, folder, tmp_path, capsys):
    """A broken picture is named, stops no other and is no reference; the table has a row for each word."""
    photos = tmp_path / "photos"
    (photos / "more").mkdir(parents=True)
    (photos / "broken.png").write_bytes(b"no picture")
    places = ["a.png", "a.jpg", "more/b.png"]
    for place, drawing in zip(places, drawn(3), strict=True):
        drawing.save(photos / place, quality=100)
    assert run(photos, "--model", f"hf:{folder}", "-o", tmp_path / "out", "--json") == 2
    printed = capsys.readouterr()
    assert "broken.png" in printed.err
    assert "3 pictures explained, 1 failed" in printed.err
    by_source = {each["source"]: each for each in map(json.loads, printed.out.splitlines())}
    assert set(by_source) == {str(photos / place) for place in places}
    files = list((tmp_path / "out").rglob("*.html"))
    assert {str(file.relative_to(tmp_path / "out")) for file in files} == {
        "a.png.words.html", "a.words.html", "more/b.png.words.html",
    }  # fmt: skip
    others = [photos / place for place in places[:2]]
    alone = words_of(llava, photos / "more/b.png", references=others, only="red")
    saved = by_source[str(photos / "more/b.png")]["words"]
    assert [word["needs_picture"] for word in saved] == pytest.approx([word.needs_picture for word in alone], abs=1e-3)
    with (tmp_path / "out/words.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 * len(SENTENCE.split())
    red = next(row for row in rows if row["word"] == "red" and row["picture"].endswith("b.png"))
    assert float(red["needs_picture"]) == pytest.approx(alone[1].needs_picture, abs=1e-3)
