"""The Explainer: what it returns, what it remembers, and whether it notices that the model has changed."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import networks
import numpy as np
import psutil
import pytest
import torch
import torchvision
from PIL import Image
from refusals import refused
from tiers import represented_by
from torch import Tensor, nn
from torchvision.transforms.functional import to_tensor

import camkit
from camkit.cli import main
from camkit.engine.passes import usable_precision
from camkit.errors import ImageError, InputError, LayerError, MethodError, ModelError, TargetError

SIZE = 32
PLANE = str(camkit.scenes.scene_paths()["plane-sky"])


class Net(nn.Module):
    """A small classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.deep = nn.Conv2d(6, 10, 3, stride=2, padding=1)
        self.late = nn.Conv2d(10, 10, 3, padding=1)
        self.head = nn.Linear(10, 4)
        self.tally = networks.Tally()

    def forward(self, images: Tensor) -> Tensor:
        self.tally.count += 1
        maps = self.deep(self.norm(self.stem(images)).relu()).relu()
        return self.head(self.late(maps).relu().mean((2, 3)))


def made(seed: int = 0, kind: Any = Net) -> Any:
    torch.manual_seed(seed)
    return kind().eval()


def picture(seed: int = 1, size: int = SIZE) -> Tensor:
    return torch.randn(3, size, size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda e: e([picture(), picture()]), ImageError, "takes one picture"),
        (lambda e: e(torch.zeros(2, 3, SIZE, SIZE)), ImageError, "takes one picture"),
        (lambda e: e(picture(), target=[0, 1]), TargetError, "takes one target"),
        (lambda e: e(picture(), target=camkit.targets.above(0.1)), TargetError, "takes one target"),
        (lambda e: e.batch([picture()], batch_size=0), InputError, "batch_size"),
        (lambda e: e.batch([picture(), "nowhere.png"]), ImageError, "there is no file nowhere.png"),
        (lambda e: e.layer, LayerError, "first picture"),
        (lambda _: camkit.Explainer(made(), "dep"), LayerError, "did you mean 'deep'"),
        (lambda _: camkit.Explainer(made(), []), LayerError, "empty"),
        (lambda _: camkit.Explainer(made(), "(the model)"), LayerError, "the whole model is not a layer"),
        (lambda _: camkit.Explainer(made(), method="gradcamm"), MethodError, "did you mean 'gradcam'"),
        (lambda _: camkit.explain(made(), picture(), methd="cam"), TypeError, "did you mean 'method'"),
    ],
)
def test_a_wrong_call_is_one_sentence(call: Callable, error: type[Exception], words: str) -> None:
    with refused(words, error):
        call(camkit.Explainer(made()))


def test_the_layer_says_what_was_decided_and_can_be_passed_back() -> None:
    model = made()
    explainer = camkit.Explainer(model, method="gradcam", spread="even")
    first = explainer(picture())
    layer = explainer.layer
    assert (layer.name, layer.call, layer.layout.grid, layer.size, layer.sure) == ("late", None, (8, 8), (32, 32), True)
    assert "deepest" in layer.reason
    assert layer.runners_up
    with pytest.raises(AttributeError):
        layer.name = "other"

    before = model.tally.count
    again = camkit.Explainer(model, layer, method="gradcam", spread="even")
    assert np.array_equal(again(picture()).raw, first.raw)
    assert model.tally.count == before + 1, "nothing is looked at again"
    assert again.layer == layer
    assert camkit.Explainer(model, layer)(picture(size=48)).raw.shape == (12, 12), "of another size it is only a name"


def test_all_fused_layers_are_listed() -> None:
    explainer = camkit.Explainer(made(), ["deep", "late"])
    explainer(picture())
    assert [str(layer) for layer in explainer.layers] == ["deep", "late"]
    with pytest.raises(LayerError, match="2 layers are fused"):
        _ = explainer.layer


class Switched(Net):
    """Turns its picture by switches that lie in many places."""

    def __init__(self) -> None:
        super().__init__()
        self.turns, self.mirrors = 0, torch.zeros(1)
        self.pool = nn.MaxPool2d(1, 1)
        self.helper = types.SimpleNamespace(turns=0)  # where camkit does not look
        self.register_buffer("flag", torch.zeros(()))
        self.deeper = nn.Parameter(torch.zeros(()))

    def forward(self, images: Tensor) -> Tensor:
        images = images.rot90(self.helper.turns + self.turns + int(self.mirrors) + int(self.flag), (2, 3))
        maps = self.deep(self.norm(self.stem(self.pool(images))).relu()).relu()
        maps = maps + self.deeper * self.late(maps).relu()
        return self.head(maps.mean((2, 3)))


class Flipping(Switched):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.flip(2))


def _patch(model: Switched) -> None:
    original = model.forward
    model.forward = lambda images: original(images.flip(3))


def _opened_by_a_step(model: Switched) -> None:
    model.deeper.grad = torch.full((), -1.0)
    torch.optim.SGD([model.deeper], 1.0).step()


CHANGES = {
    "an attribute": lambda model: setattr(model, "turns", 1),
    "a plain tensor in place": lambda model: model.mirrors.fill_(1),
    "a stride": lambda model: setattr(model.pool, "stride", 4),
    "a module": lambda model: setattr(model, "deep", nn.Conv2d(6, 10, 1, 2)),
    "the function": _patch,
    "the class": lambda model: setattr(model, "__class__", Flipping),
    "a hook": lambda model: model.stem.register_forward_hook(lambda *called: called[-1].flip(3)),
    "the weights": lambda model: model.load_state_dict(made(9, Switched).state_dict()),
    "a weight in place": _opened_by_a_step,
    "the type": nn.Module.double,
    "a buffer": lambda model: setattr(model.norm, "running_mean", torch.linspace(-1, 1, 6)),
    "a buffer in place": lambda model: model.flag.fill_(1),
}


def answer_of(call: Callable[[], camkit.Explanation]) -> tuple[str | bytes, ...]:
    """Return the layer, the reason and the map, or the error."""
    try:
        found = call()
    except LayerError as error:
        return (str(error),)
    return found.layer, found.layer_reason, found.heatmap.tobytes(), found.raw.tobytes()


def answers_of(model: Switched, explainers: list[camkit.Explainer]) -> list[tuple[str | bytes, ...]]:
    """Return the answers of Explainers, and of ``explain``."""
    of_explain = lambda img, target: camkit.explain(model, img, target=target)  # noqa: E731
    return [answer_of(lambda call=call: call(picture(), 1)) for call in (*explainers, of_explain)]


@pytest.mark.parametrize("change", CHANGES)
def test_after_a_change_the_answer_is_that_of_a_new_explainer(change: str) -> None:
    model = made(kind=Switched)
    explainers = [camkit.Explainer(model), camkit.Explainer(model, "deep")]
    first = answers_of(model, explainers)
    assert [answer[0] for answer in first] == ["deep"] * 3
    CHANGES[change](model)
    found = answers_of(model, explainers)
    chosen, named, _ = answers_of(model, [camkit.Explainer(model), camkit.Explainer(model, "deep")])
    assert found == [chosen, named, chosen]
    assert found != first


def test_an_explainer_forgets_a_model_that_changed_where_camkit_does_not_look() -> None:
    model = made(kind=Switched)
    explainers = [camkit.Explainer(model), camkit.Explainer(model, "deep")]
    explainers += [explainer.using("layercam") for explainer in explainers]
    answers_of(model, explainers)
    model.helper.turns = 1
    for explainer in explainers[:2]:
        explainer.forget()
    chosen, named, _ = answers_of(model, [camkit.Explainer(model), camkit.Explainer(model, "deep")])
    assert chosen[0] != "deep" != named[0]
    assert [answer[:2] for answer in answers_of(model, explainers)] == [chosen[:2], named[:2]] * 2 + [chosen[:2]]


class Reading(Net):
    """Mirrors bright pictures, and leaves early for dark ones."""

    def forward(self, images: Tensor) -> Tensor:
        if images.mean() > 0.5:
            images = images.flip(3)
        maps = self.stem(images).relu()
        if images.mean() > -0.5:
            return self.head(self.deep(maps).relu().mean((2, 3)))
        return self.head(torch.cat([maps, maps[:, :4]], 1).mean((2, 3)))


@pytest.mark.parametrize("layer", [None, "stem"])
def test_a_model_that_looks_at_its_pictures_is_decided_for_each(layer: str | None) -> None:
    model = made(kind=Reading)
    pictures = [picture() + level for level in (0, 1, -1, 0)]
    explainer = camkit.Explainer(model, layer)
    expected = [answer_of(lambda one=one: camkit.Explainer(model, layer)(one, 1)) for one in pictures]
    assert [answer_of(lambda one=one: explainer(one, 1)) for one in pictures] == expected
    assert len({one[:2] for one in expected}) == 3 - (layer is not None)
    batch = explainer.batch(pictures[::2], 1)
    assert [(one.layer, one.layer_reason) for one in batch] == [one[:2] for one in expected[::2]]


@pytest.mark.extended
def test_a_thousand_calls_keep_nothing() -> None:
    explainer = camkit.Explainer(made())
    image = picture(size=16)
    for _ in range(100):
        explainer(image)
    gc.collect()
    process, objects = psutil.Process(), len(gc.get_objects())
    before = process.memory_info().rss
    for _ in range(1000):
        explainer(image)
    gc.collect()
    assert len(gc.get_objects()) - objects < 100
    assert process.memory_info().rss - before < 8 << 20


class Preparation:
    """A preprocessing that owns something, as a model's own preprocessing does."""

    size = (SIZE, SIZE)

    def prepare(self, picture: Image.Image) -> Tensor:
        return to_tensor(picture.resize(self.size))


def test_a_model_dies_with_its_explainer_while_another_lives_even_if_its_parts_know_it() -> None:
    kept, gone, preparation = made(), made(), Preparation()
    gone.late.parent = [gone]
    gone.deep.register_forward_hook(lambda *_: None)
    living, explainer = camkit.Explainer(kept), camkit.Explainer(gone)
    living(picture())
    explainer(picture())
    camkit.explain(gone, picture())
    camkit.explain(gone, picture(), gone.deep)
    camkit.explain(gone, PLANE, preprocess=preparation.prepare)
    references = weakref.ref(gone), weakref.ref(preparation)
    del gone, explainer, preparation
    gc.collect()
    assert [reference() for reference in references] == [None, None]
    living(picture())


@pytest.fixture
def two_cores() -> Iterator[None]:
    """Let PyTorch use two threads in this test."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def plain_net(classes: int = 4) -> nn.Sequential:
    """Return a network of PyTorch's own modules, whose passes may run at the same time."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()
    return networks.classifier(*layers, classes=classes)


def threads_of_passes(explainer: camkit.Explainer, images: Iterable[Any], **options: Any) -> set[int]:
    """Explain pictures, and return the threads in which the model ran.

    If there are others than this one, the first two wait for each other, so that neither runs all passes.
    """
    threads = {threading.get_ident()}
    both = threading.Barrier(2, timeout=60)
    run = explainer._explain_batch

    def noting(*arguments: Any) -> Any:
        if threading.get_ident() not in threads:
            threads.add(threading.get_ident())
            both.wait()
        return run(*arguments)

    explainer._explain_batch = noting  # type: ignore[method-assign]
    list(explainer.stream(images, **options))
    explainer._explain_batch = run
    return threads


@pytest.mark.usefixtures("two_cores")
def test_passes_that_run_at_once_give_the_same_rows_in_order() -> None:
    pictures = [picture(seed) for seed in range(30)]
    pictures[11] = torch.full((3, SIZE, SIZE), float("nan"))
    pictures[20] = picture(20, SIZE // 2)
    pictures[29] = picture(29, SIZE + 8)
    explainer = camkit.Explainer(plain_net(), method="layercam")
    rows = list(explainer.stream(pictures, [0, 1], batch_size=3, on_error="yield"))
    assert isinstance(rows[22], camkit.Failure)
    del rows[22], pictures[11]
    expected = [explainer(one, target) for one in pictures for target in (0, 1)]
    assert [row.target for row in rows] == [row.target for row in expected]
    for row, alone in zip(rows, expected, strict=True):
        np.testing.assert_allclose(row.raw, alone.raw, atol=1e-5)
    assert len(threads_of_passes(explainer, pictures, batch_size=3)) == 3  # two, and this one for the first batch
    labels = camkit.targets.each([0, 1] * 15)
    each_own = threads_of_passes(camkit.Explainer(plain_net()), [picture(seed) for seed in range(30)], target=labels)
    assert len(each_own) == 3


@pytest.mark.usefixtures("two_cores")
@pytest.mark.parametrize(
    "kind", represented_by("own model", "own method", among=["own model", "user's hook", "own method", "own target"])
)
def test_the_users_code_runs_in_the_users_thread(kind: str) -> None:
    model, method, target = made() if kind == "own model" else plain_net(), None, None
    if kind == "user's hook":
        model[0].register_forward_hook(lambda *_: None)
    if kind == "own method":
        method = lambda activations, gradients: gradients.mean((2, 3), keepdim=True)  # noqa: E731
    if kind == "own target":
        target = lambda output: output[:, 0]  # noqa: E731
    explainer = camkit.Explainer(model, method=method)
    threads = threads_of_passes(explainer, [picture(seed) for seed in range(6)], target=target, batch_size=2)
    assert threads == {threading.get_ident()}


@pytest.mark.usefixtures("two_cores")
def test_passes_at_once_leave_the_number_of_threads_and_no_thread() -> None:
    explainer = camkit.Explainer(plain_net())
    before = threading.active_count()
    rows = explainer.stream(map(picture, range(100)), batch_size=2)
    for _ in range(20):
        next(rows)
    rows.close()
    assert threading.active_count() == before
    with ThreadPoolExecutor(1) as pool:
        assert [torch.get_num_threads(), pool.submit(torch.get_num_threads).result()] == [2, 2]


@pytest.mark.usefixtures("two_cores")
def test_an_error_in_a_pass_at_once_comes_after_the_rows_before_it() -> None:
    explainer = camkit.Explainer(plain_net())
    pictures = [*(picture(seed) for seed in range(6)), torch.zeros(5, SIZE, SIZE), picture()]
    rows = explainer.stream(pictures, batch_size=2)
    assert len([next(rows) for _ in range(6)]) == 6
    with pytest.raises(ImageError, match="5 channels"):
        next(rows)


def test_an_error_ends_the_threads_that_read_although_its_traceback_lives(tmp_path: Path) -> None:
    """The collector may find a traceback while a thread starts, and would wait for the readers for ever."""
    files = [tmp_path / f"{number}.png" for number in range(12)]
    for file in files:
        Image.new("RGB", (SIZE, SIZE)).save(file)
    files[1].write_bytes(b"no picture")
    with pytest.raises(ImageError) as caught:
        list(camkit.explain_many(plain_net(), files, batch_size=1, preprocess=to_tensor))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("camkit")], caught


def test_a_picture_with_other_channels_is_no_reason_to_stop_whatever_the_model_raises() -> None:
    """The Vision Transformer of Hugging Face raises a ValueError."""

    def strict(model: Any, images: Tensor) -> Tensor:
        if images.shape[1] != 3:
            raise ValueError("Make sure that the channels match")
        return model.inner(images)

    model = networks.Net(strict, inner=plain_net())
    rows = list(camkit.explain_many(model, [torch.zeros(1, SIZE, SIZE), picture()], on_error="yield"))
    assert "the picture has 1 channels" in str(rows[0].error)
    assert rows[1].status == "ok"


def test_bf16_without_units_for_it_warns_and_runs_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("camkit.engine.passes._cpu_has_bf16", lambda: False)
    with pytest.warns(UserWarning, match="no units for bf16"):
        explainer = camkit.Explainer(made(), "deep", precision="bf16")
    assert np.array_equal(explainer(picture(), 1).raw, camkit.Explainer(made(), "deep")(picture(), 1).raw)
    for precision, device in (("bf16-forced", "cpu"), ("bf16", "cuda"), ("fp16", "cpu")):
        assert usable_precision(precision, torch.device(device)) == (precision, "")


def test_many_targets_keep_only_few_gradients_at_a_time() -> None:
    """The gradients of all targets, and a copy of its picture for each, would take gigabytes."""
    network, images, most = plain_net(150), torch.randn(2, 3, 32, 32), 0
    references: list[weakref.ref[Tensor]] = []

    def mean_gradient(activations: Tensor, gradients: Tensor) -> Tensor:
        nonlocal most
        references.append(weakref.ref(gradients))
        most = max(most, sum(reference() is not None for reference in references))
        return gradients.mean((2, 3), keepdim=True)

    several = camkit.explain(network, images, "4", target=list(range(150)), method=mean_gradient)

    assert most <= 64
    assert [one.target for one in several] == [*range(150)] * 2
    assert all(one.shown is several[0].shown for one in several[:150])
    for number in (0, 70, 149):
        alone = camkit.explain(network, images[1], "4", target=number, method=mean_gradient)
        assert np.allclose(several[150 + number].raw, alone.raw, atol=1e-6)


def test_one_explanation_that_is_kept_holds_its_own_picture_only() -> None:
    kept = camkit.explain(plain_net(), torch.randn(16, 3, 64, 64), "4")[0]
    assert isinstance(kept.shown, Tensor)
    assert kept.shown.untyped_storage().nbytes() == 3 * 64 * 64 * 4
    assert all(raw.untyped_storage().nbytes() == 32 * 32 * 4 for raw in kept.maps.raws)
    assert kept.raw.base is None


class WithAge(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(5, 3)

    def forward(self, x: Tensor, age: Tensor) -> Tensor:
        scores: Tensor = self.fc(torch.cat([self.conv(x).mean((2, 3)), age.expand(len(x), 1)], 1))
        return scores


class WithAgeAndPlace(WithAge):
    def forward(self, x: Tensor, *, age: Tensor, place: str) -> Tensor:  # type: ignore[override]
        assert place
        return super().forward(x, age)


class OfTextAndPicture(WithAge):
    def forward(self, input_ids: Tensor, pixel_values: Tensor | None = None) -> Tensor:  # type: ignore[override]
        _, width = input_ids.shape
        assert pixel_values is not None
        return super().forward(pixel_values, torch.full((1, 1), float(width)))


def test_a_map_of_one_cell_is_never_ok() -> None:
    pixels = torch.rand(8, 3, 1, 1, generator=torch.Generator().manual_seed(0))
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(4, 3)).eval()
    found = camkit.Explainer(net, method="rise").batch(pixels)
    assert {row.status for row in found} == {"no_influence"}


class Fused(nn.Module):
    """Reads a picture and a map of depths; the first argument is not the picture."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.colours, self.depths = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(1, 4, 3, 2, 1)
        self.head = nn.Linear(8, 3)

    def forward(self, depth: Tensor, extra: dict[str, list[Tensor]], pixel_values: Tensor) -> Tensor:
        assert len(depth) == len(extra["more"][0]) == len(pixel_values)
        maps = self.colours(pixel_values).relu(), self.depths(depth).relu() * extra["more"][0][:, :, None, None]
        scores: Tensor = self.head(torch.cat([one.mean((2, 3)) for one in maps], 1))
        return scores


def test_a_model_with_several_inputs_is_explained_with_the_others_held_fixed():
    net = Fused().eval()
    image, depth = torch.rand(3, 16, 16), torch.rand(1, 1, 16, 16)
    others = {"depth": depth, "extra": {"more": [torch.tensor([[2.0]])]}}

    for row in (
        camkit.explain(net, image, net.colours, inputs=others, picture="pixel_values", target=1, method="hirescam"),
        camkit.Explainer(net, "model.colours", inputs=others, picture="pixel_values", method="hirescam")(image, 1),
        camkit.explain(net, [image, image], inputs=others, picture="pixel_values", target=[0, 1], method="hirescam")[3],
    ):
        maps = net.colours(image[None]).detach().requires_grad_()
        beside = (net.depths(depth).relu() * 2).mean((2, 3))
        score = net.head(torch.cat([maps.relu().mean((2, 3)), beside], 1))[0, 1]
        score.backward()
        expected = (maps * maps.grad).sum(1)[0].detach().numpy()
        assert np.allclose(row.raw, expected, atol=1e-6)
        plain = image.mean((1, 2), keepdim=True).expand(3, 16, 16)
        without = float(net(depth, others["extra"], plain[None])[0, 1].detach())
        assert row.score == pytest.approx(score.item(), abs=1e-6)
        assert row.without_picture == row.to_dict()["without_picture"] == pytest.approx(without, abs=1e-6)
        share = None if without * score.item() <= 0 else pytest.approx(without / score.item(), rel=1e-4)
        assert row.beside_picture == share
        assert any("Without the picture, the other inputs give" in said for said in row.caption().remarks)
    assert camkit.explain("demo-fair", torch.rand(3, 128, 128)).to_dict()["without_picture"] is None

    beside_others = camkit.explain(
        net, image, inputs=others, picture="pixel_values", target=[camkit.targets.above(0.0), 1]
    )
    scores = net(depth, others["extra"], plain[None])[0].tolist()
    assert [row.without_picture for row in beside_others] == pytest.approx(
        [scores[row.target] for row in beside_others], abs=1e-6
    )
    assert len(beside_others) == 4  # all three classes, and the one that was named


def test_a_file_that_has_changed_is_loaded_again(tmp_path):
    code, weights = tmp_path / "net.py", tmp_path / "net.pth"
    code.write_text("from torchvision.models import squeezenet1_1\n\ndef build():\n    return squeezenet1_1().eval()\n")
    image, config = torch.rand(3, 64, 64), {"model": {"name": f"{code}:build", "weights": str(weights)}}
    for seed in (0, 1):
        torch.manual_seed(seed)
        net = torchvision.models.squeezenet1_1().eval()
        torch.save(net.state_dict(), weights)
        expected = float(net(image[None])[0, 7].detach())
        assert camkit.explain(None, image, target=7, config=config).score == pytest.approx(expected, rel=1e-4)


NEEDS = r"needs more than the picture; pass inputs=\{\.\.\.\} to camkit\.explain or Explainer.*"


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        *((WithAge, {"method": method}, NEEDS + "'age'") for method in ("gradcam", "rise", "chefer")),
        (WithAgeAndPlace, {}, NEEDS + "'age' and 'place'"),
        (WithAgeAndPlace, {"inputs": {"age": torch.zeros(1, 1)}}, NEEDS + "'place'"),
        (Fused, {"picture": "pixel_values", "output": "x"}, NEEDS + "'depth' and 'extra'"),
        (OfTextAndPicture, {}, "takes 'input_ids' first; pass picture='pixel_values' and inputs="),
        (OfTextAndPicture, {"output": 0}, "takes 'input_ids' first; pass picture='pixel_values' and inputs="),
    ],
)
def test_a_model_that_needs_several_inputs_is_an_error_that_shows_the_way_out(kind, options, words):
    with refused(words, ModelError):
        camkit.explain(kind().eval(), torch.zeros(3, 16, 16), **options)
    if kind is WithAge:
        with refused(NEEDS, ModelError):
            camkit.Explainer(WithAge().eval()).scores_of(torch.zeros(3, 16, 16))


class Tasks(nn.Module):
    """Returns scores of two tasks."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.conv, self.first, self.second = nn.Conv2d(3, 4, 3, 2, 1), nn.Linear(4, 3), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Any:
        pooled = self.conv(x).relu().mean((2, 3))
        both = self.first(pooled), self.second(pooled)
        if self.kind == "object":
            return types.SimpleNamespace(kind=both[0], age=both[1])
        return dict(zip(("kind", "age"), both, strict=True)) if self.kind == "dict" else both


@pytest.mark.parametrize(("kind", "name"), [("tuple", 1), ("tuple", "1"), ("dict", "age"), ("object", "age")])
def test_one_of_several_outputs_is_explained(kind, name):
    net = Tasks(kind).eval()
    image = torch.rand(3, 16, 16)
    row = camkit.explain(net, image, net.conv, output=name, target=4, method="hirescam")
    maps = net.conv(image[None]).detach().requires_grad_()
    score = net.second(maps.relu().mean((2, 3)))[0, 4]
    score.backward()
    assert row.score == pytest.approx(score.item(), abs=1e-6)
    assert np.allclose(row.raw, (maps * maps.grad).sum(1)[0].detach().numpy(), atol=1e-6)
    with pytest.raises(ModelError, match="the model has no output 'mood'"):
        camkit.explain(net, image, output="mood")


def places() -> tuple[nn.Module, Callable[[Image.Image], Tensor]]:
    return Tasks("tuple"), Preparation().prepare


def test_a_shell_names_the_option_that_chooses_an_output(tmp_path, capsys):
    call = [PLANE, "--model", f"{__file__}:places", "--device", "cpu", "--out", str(tmp_path)]
    assert main(call) == 2
    said = capsys.readouterr().err
    assert "--output 1" in said
    assert "lambda" not in said
    assert main([*call, "--output", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["status"] in ("ok", "no_positive_evidence")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"inputs": [1]}, "dictionary"),
        ({"inputs": "age"}, "dictionary"),
        ({"inputs": torch.ones(2, 1)}, "dictionary"),
        ({"inputs": {0: 1}}, "dictionary"),
        ({"inputs": {"x": torch.ones(1), "age": torch.ones(1, 1)}}, "'x' is the argument for the picture"),
        ({"picture": "x", "inputs": {"x": 1}}, "among the other inputs"),
        ({"inputs": {"ages": 1}}, "no argument 'ages'; it has x, age; did you mean 'age'"),
        ({"inputs": {"age": torch.ones(1, 1)}, "picture": "image"}, "no argument 'image'; it has x, age"),
    ],
)
def test_wrong_inputs_are_one_sentence(options, said):
    with refused(said, InputError):
        camkit.explain(WithAge().eval(), torch.zeros(3, 16, 16), **options)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda explainer: pickle.loads(pickle.dumps(explainer))])
def test_a_copy_of_an_explainer_explains_a_copy_of_the_model(copied):
    net, image = plain_net(), torch.rand(3, 16, 16)
    explainer = camkit.Explainer(net, net[0], method="hirescam")
    unused = copied(explainer)
    found = explainer(image)
    for other in (unused, copied(explainer)):
        again = other(image)
        assert other.model is not net
        assert (again.layer, again.method) == (found.layer, found.method)
        np.testing.assert_array_equal(again.raw, found.raw)
        with torch.no_grad():
            other.model[-1].weight.zero_()
        assert other(image).status != "ok"
    assert explainer(image).status == "ok"


def test_a_method_of_the_call_needs_no_layer_of_the_config(tmp_path, monkeypatch, capsys):
    config = {"explain": {"layer": "features.2"}}
    found = camkit.explain("demo-fair", PLANE, method="occlusion", config=config)
    assert found.layer == "whole model"
    (tmp_path / "camkit.toml").write_text('[explain]\nlayer = "features.2"\n')
    monkeypatch.chdir(tmp_path)
    shown = [PLANE, "--model", "demo-fair", "--json", "--method"]
    for method, layer in (("occlusion", "whole model"), ("layercam", "features.2")):
        assert main([*shown, method]) == 0
        assert json.loads(capsys.readouterr().out)["layer"] == layer
    assert main([*shown, "occlusion", "--layer", "features.2"]) == 2
    with refused("reads the whole model and no layer", MethodError):
        camkit.Explainer("demo-fair", config={"explain": {"layer": "features.2", "method": "occlusion"}})


def test_a_picture_in_a_tuple_with_another_input_is_refused():
    picture, age = torch.zeros(3, 16, 16), torch.ones(1, 1)
    with pytest.raises(InputError, match=r"pass inputs=\{\.\.\.\} .* 'age'\)"):
        camkit.explain(WithAge().eval(), (picture, age))


def test_a_type_error_of_the_models_own_passes_through():
    class Broken(WithAge):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return self.conv()

    with pytest.raises(TypeError, match="missing 1 required"):
        camkit.explain(Broken().eval(), torch.zeros(3, 16, 16))
