"""Words of each family: a tiny model in a folder is loaded, scored as it writes, and its heat lies where it must."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import camkit
from camkit.errors import InputError, ModelError
from camkit.sentences import explain
from camkit.sentences.inputs import load

pytestmark = pytest.mark.extended

pytest.importorskip("transformers")

from tests.sentences.families import FAMILIES, localised

PROMPT = "what is here ?"
SENTENCE = "a red boat ."
WITHOUT_PROMPT = ("trocr", "vit_gpt2")
PATCH = (68, 2, 80, 13)
"""A bright patch (left, top, right, bottom) in a picture of 90 x 60 pixels: near one corner, away from all others."""
NEAR = 12
"""Pixels around it: half of the largest cell."""


def made(name: str) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model, processor = FAMILIES[name]()
    return localised(model).eval(), processor


def words_of(family: tuple[Any, Any], shown: Any, prompt: str | None = PROMPT, **options: Any) -> camkit.Words:
    model, processor = family
    return camkit.words(model, shown, prompt, processor=processor, words=SENTENCE, **options)


def pictures() -> tuple[Image.Image, Image.Image]:
    plain = np.random.default_rng(0).integers(90, 130, (60, 90, 3), dtype=np.uint8)
    bright = plain.copy()
    bright[PATCH[1] : PATCH[3], PATCH[0] : PATCH[2]] = 255
    return Image.fromarray(bright), Image.fromarray(plain)


def as_written(model: Any, processor: Any, picture: Any, prompt: str | None, name: str = "") -> list[torch.Tensor]:
    """Return the log-probabilities after each token of the sentence while the model itself writes it."""
    ids = processor.tokenizer(SENTENCE, add_special_tokens=False)["input_ids"]
    before = [processor.tokenizer.bos_token_id] if name == "florence2" else []
    text = {} if prompt is None else {"text": [prompt]}
    inputs = {**processor(images=[picture], return_tensors="pt", **text)}
    inputs.pop("labels", None)
    forced = iter(before + ids)
    written = model.generate(
        **inputs, max_new_tokens=len(before + ids), do_sample=False, output_logits=True, return_dict_in_generate=True,
        prefix_allowed_tokens_fn=lambda *_: [next(forced)],
    )  # fmt: skip
    steps = written.logits[len(before) :]
    return [step[0].float().log_softmax(-1)[token] for step, token in zip(steps, ids, strict=True)]


def share_near_the_patch(explanation: camkit.Explanation, patch: tuple[int, ...] = PATCH) -> float:
    """Return the share of the heat, of either sign, in cells whose middle is near the patch."""
    raw, box = np.abs(explanation.raw), explanation.box
    rows = box.top + (np.arange(raw.shape[0]) + 0.5) / raw.shape[0] * (box.bottom - box.top)
    columns = box.left + (np.arange(raw.shape[1]) + 0.5) / raw.shape[1] * (box.right - box.left)
    left, top, right, bottom = patch
    inside = (
        ((rows > top - NEAR) & (rows < bottom + NEAR))[:, None] & (columns > left - NEAR) & (columns < right + NEAR)
    )
    return float(raw[inside].sum() / raw.sum())


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # PaliGemma's processor and NumPy 2
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_scored_as_it_writes_and_a_bright_patch_has_the_heat(name, tmp_path):
    """The reference is the same picture without the patch, so nothing else can have any heat."""
    model, processor = made(name)
    for part in (model, *(processor if isinstance(processor, tuple) else (processor,))):
        part.save_pretrained(tmp_path)
    model, processor = load(f"hf:{tmp_path}", "cpu")
    bright, plain = pictures()
    found = words_of((model, processor), bright, None if name in WITHOUT_PROMPT else PROMPT, references=[plain])
    assert [word.text for word in found] == SENTENCE.split()
    with_patch, without = (as_written(model, processor, each, found.prompt, name) for each in (bright, plain))
    for word in found:
        own, other = (sum(float(steps[token]) for token in word.tokens) for steps in (with_patch, without))
        assert np.log(word.probability) == pytest.approx(own, abs=1e-4)
        assert word.needs_picture == pytest.approx(own - other, abs=1e-4)
        assert share_near_the_patch(word.explanation) > 0.65  # of chance 0.16


@pytest.mark.parametrize("size", [(64, 64), (160, 40), (40, 240)])
@pytest.mark.parametrize("name", ["llava_next", "llava_onevision"])
def test_the_grid_of_a_long_picture_is_that_of_its_unpadded_tiles(name, size):
    """The model itself puts the tiles' features in rows, each with a token at its end."""
    model, processor = made(name)
    plain = np.random.default_rng(0).integers(90, 130, (*size[::-1], 3), dtype=np.uint8)
    bright = plain.copy()
    bright[-16:-4, -16:-4] = 255
    shown, without = Image.fromarray(bright), Image.fromarray(plain)
    prepared = processor.image_processor([without], return_tensors="pt")
    features = [torch.zeros(prepared["pixel_values"].shape[1], 16, 32)]
    options = {"vision_feature_select_strategy": "default"} if name == "llava_next" else {}
    options |= {"image_newline": torch.ones(32)}
    packed = model.model.pack_image_features(features, prepared["image_sizes"], **options)[0][0]
    found = words_of((model, processor), shown, references=[without], only="boat")
    explanation = found.named("boat")[0].explanation
    rows, columns = explanation.raw.shape
    assert columns == packed[16:, 0].nonzero()[0]
    assert len(packed) == 16 + rows * (columns + 1)
    assert np.isfinite(explanation.heatmap).all()
    raw = np.abs(explanation.raw)
    assert raw[rows // 2 :, columns // 2 :].sum() > 0.85 * raw.sum()


def test_pictures_of_few_pixels_have_finite_heat_and_one_pixel_has_none():
    torch.manual_seed(0)
    model, processor = FAMILIES["idefics3"]()
    family = model.eval(), processor
    for size, grid in (((200, 3), (1, 4)), ((1, 50), (4, 1))):
        shown = Image.fromarray(np.random.default_rng(0).integers(0, 255, (*size[::-1], 3), dtype=np.uint8))
        explanation = words_of(family, shown, only="boat").named("boat")[0].explanation
        assert explanation.raw.shape == grid
        assert np.isfinite(explanation.heatmap).all()
    with pytest.raises(ModelError, match="pass a larger picture, or a model whose picture tokens are patches"):
        words_of(family, Image.new("RGB", (1, 1)), only="boat")


@pytest.mark.parametrize("name", ["llava_next", "qwen3_vl", "idefics3"])
def test_of_two_pictures_in_a_prompt_each_has_the_heat_of_its_own_patch(name):
    model, processor = made(name)
    bright, plain = pictures()
    both, references = ([each, each.transpose(Image.Transpose.ROTATE_180)] for each in (bright, plain))
    right, down = plain.size
    turned = (right - PATCH[2], down - PATCH[3], right - PATCH[0], down - PATCH[1])
    for number, patch in enumerate((PATCH, turned)):
        without = [*both]
        without[number] = references[number]
        found = words_of((model, processor), both, references=references[number:][:1], picture=number)
        own, other = (as_written(model, processor, shown, found.prompt) for shown in (both, without))
        for word in found:
            needs = sum(float(own[token] - other[token]) for token in word.tokens)
            assert word.needs_picture == pytest.approx(needs, abs=1e-4)
            assert share_near_the_patch(word.explanation, patch) > 0.65  # of chance 0.16
        assert found.beside == (f"picture {2 - number}",)


def test_a_wrong_number_of_pictures_is_one_sentence():
    both, one = list(pictures()), pictures()[0]
    for family, images, prompt, picture, kind, said in (
        ("blip", both, PROMPT, 0, ModelError, "BlipFor.* takes one picture in a prompt, not 2; pass one"),
        ("blip", both, PROMPT, 2, InputError, "there is no picture 2: 2 pictures given, numbered from 0"),
        ("llava_next", both, "<image> what", 0, InputError, "the prompt has 1 x <image>, .* number of pictures is 2;"),
        ("llava_next", one, "<image> or <image>", 0, InputError, "has 2 x <image>, .* is 1; write it once for each"),
        ("llava_next", [], PROMPT, 0, InputError, "there is no picture 0: 0 pictures given"),
        ("llava_next", one, PROMPT, 1, InputError, "there is no picture 1: 1 picture given"),
    ):
        with pytest.raises(kind, match=said):
            words_of(made(family), images, prompt, picture=picture)


@pytest.mark.parametrize("name", ["qwen3_vl", "blip2"])
def test_references_in_one_pass_are_as_one_after_another(name, monkeypatch):
    torch.manual_seed(0)
    model, processor = FAMILIES[name]()
    picture, plain = pictures()
    references = [plain, plain.transpose(Image.Transpose.ROTATE_180), Image.new("RGB", plain.size, (30, 60, 200))]
    maps = []
    for room in (0, 1e6):
        monkeypatch.setattr(explain, "_ROOM", room)
        found = words_of((model.eval(), processor), picture, references=references, only="red")
        maps.append(found[1].explanation.raw)
    np.testing.assert_allclose(maps[0], maps[1], atol=1e-6)
    assert np.abs(maps[0]).max() > 1e-5


def test_token_activation_maps_need_logits_at_the_picture():
    bright, plain = pictures()
    found = words_of(made("qwen2_vl"), bright, references=[plain], method="tam")
    assert all(np.isfinite(word.explanation.raw).all() and word.explanation.raw.min() >= 0 for word in found)
    with pytest.raises(ModelError, match="BlipForConditionalGeneration has no logits at the picture's tokens"):
        words_of(made("blip"), bright, references=[plain], method="tam")


@pytest.mark.parametrize(
    ("name", "method", "meetings"),
    [
        ("llava_next-eager", "attention", ["patch_embedding", "language_model.layers.0"]),
        ("git", "expected", ["patch_embedding"]),
    ],
)
def test_threads_that_share_a_model_explain_as_one_thread_does(name, method, meetings, monkeypatch):
    """In each pass the threads wait for each other inside the model, where the hooks of both are set."""
    monkeypatch.setattr(explain, "_MOST_POINTS", 1)  # as many passes for each picture
    family, _, eager = name.partition("-")
    model, processor = made(family)
    if eager:
        model.set_attn_implementation("eager")
    shown = pictures()
    references = [picture.transpose(Image.Transpose.ROTATE_180) for picture in shown]

    def explained(picture: Image.Image) -> np.ndarray:
        found = words_of((model, processor), picture, references=references, method=method)
        return np.stack([[*word.explanation.raw.ravel(), word.needs_picture] for word in found])

    alone = [explained(picture) for picture in shown]
    both = threading.Barrier(2, timeout=20)

    def meet(*_: Any) -> None:
        both.wait()

    for path, module in model.named_modules():
        if path.endswith(tuple(meetings)):
            module.register_forward_pre_hook(meet)
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(explained, shown))
    np.testing.assert_allclose(together, alone, atol=1e-6)
    assert not np.allclose(alone[0][1], alone[1][1], atol=1e-4)
    assert not eager or model.config.get_text_config()._attn_implementation == "eager"
