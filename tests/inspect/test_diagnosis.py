"""A diagnosis finds planted faults and none in healthy networks, and its figures are right."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

import cv2
import numpy as np
import pytest
import torch
import torchvision
from networks import Net, shown_in
from tiers import Extra, represented_by
from torch import Tensor, nn
from unchanged import unchanged

import camkit
from camkit.cli import main
from camkit.errors import InputError, TargetError
from camkit.inspect import Diagnosis, findings, picture
from camkit.inspect.layer_statistics import statistics

timm = Extra("timm")


def pictures(number: int = 8, side: int = 16) -> Tensor:
    return torch.randn(number, 3, side, side)


def small(*, norm: bool = True) -> nn.Sequential:
    """Return an ordinary small network: convolutions, in-place ReLUs, pooling, a linear layer."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 16), (16, 16), (16, 24)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), *([nn.BatchNorm2d(outputs)] if norm else [])]
        layers.append(nn.ReLU(inplace=True))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 5))


def stack(kind: Callable[[], nn.Module], depth: int, std: float | None = None) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(3 * 16 * 16, 24)]
    for _ in range(depth):
        layers += [kind(), nn.Linear(24, 24)]
    for layer in layers[1::2] if std else ():
        nn.init.normal_(layer.weight, std=std)
    return nn.Sequential(*layers)


def planted(model: nn.Module, name: str, value: float, where: Any = ...) -> nn.Module:
    """Write a value into numbers of a parameter."""
    with torch.no_grad():
        model.get_parameter(name)[where] = value
    return model


def frozen(model: nn.Sequential, *numbers: int) -> nn.Module:
    for number in numbers:
        model[number].requires_grad_(requires_grad=False)
    return model


def own(code: Callable[..., Any], *shape: int) -> Net:
    """Return code of the user's, ``code(convolution, inputs)``, and the convolution's arguments if it has one."""
    conv = nn.Conv2d(*shape) if shape else None
    return Net(lambda net, inputs: code(net.conv, inputs), conv=conv).train()


def root(_: None, inputs: Tensor) -> Tensor:
    return inputs.sqrt()


def found(result: Diagnosis) -> list[tuple[str, str]]:
    return [(one.kind, one.layer) for one in result.findings]


def only(result: Diagnosis, kind: str) -> findings.Finding:
    of_kind = [one for one in result.findings if one.kind == kind]
    assert len(of_kind) == 1, result.findings
    return of_kind[0]


WIDE = torch.randn(7, 5, 9, 3, generator=torch.Generator().manual_seed(0)) * 3 + 2
FAR = np.random.default_rng(0).normal(1e6, 1, 200_000)


@pytest.mark.parametrize(
    "values",
    [
        *(WIDE.relu().to(dtype) for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16)),
        *map(
            torch.from_numpy, (np.arange(41.0), np.arange(-300.0, 301), np.arange(81) / 2, np.arange(17) - 1e6)
        ),  # edges
        torch.from_numpy(FAR).float(),
    ],
)
def test_statistics_equal_a_plain_reference(values: Tensor) -> None:
    got, plain = statistics(values, magnitudes=True), values.double().numpy().ravel()
    assert got.count == plain.size
    assert got.mean == pytest.approx(plain.mean(), rel=1e-9, abs=1e-12)
    assert got.std == pytest.approx(plain.std(), rel=1e-6)
    assert (got.low, got.high) == (plain.min(), plain.max())
    assert got.zeros == (plain == 0).mean()
    assert got.norm == pytest.approx(math.sqrt((plain**2).sum()), rel=1e-9)
    assert list(got.histogram.counts) == np.histogram(plain, 40)[0].tolist()
    assert np.allclose(got.histogram.edges, np.histogram_bin_edges(plain, 40))
    assert got.magnitudes is not None
    logs = np.log10(np.abs(plain[plain != 0]))
    assert list(got.magnitudes.counts) == np.histogram(logs, np.array(got.magnitudes.edges))[0].tolist()


@pytest.mark.parametrize("value", [0.0, -3.0, 1e30, 1e-30])
def test_the_deviation_of_one_value_is_zero(value: float) -> None:
    got = statistics(torch.full((5, 7), value))
    assert got.std == pytest.approx(0.0, abs=abs(value) * 1e-7)
    assert sum(got.histogram.counts) == 35
    assert got.norm == pytest.approx(abs(torch.tensor(value).item()) * math.sqrt(35), rel=1e-9)


def test_statistics_of_numbers_that_are_not_finite_complex_or_missing() -> None:
    got = statistics(torch.tensor([math.nan, 1.0, math.inf, 3.0, -math.inf]))
    assert (got.nan, got.inf, got.mean, got.low, got.high, sum(got.histogram.counts)) == (1, 2, 2.0, 1.0, 3.0, 2)
    none = statistics(torch.tensor([math.nan, math.inf]))
    assert math.isnan(none.mean)
    assert none.to_dict()["mean"] is None
    assert sum(none.histogram.counts) == 0
    assert statistics(torch.tensor([3 + 4j])).mean == 5
    assert statistics(torch.zeros(0, 3)).count == 0


def test_one_picture_is_too_few_for_batch_normalisation_in_training() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.BatchNorm1d(4), nn.Linear(4, 2))
    with pytest.raises(InputError, match="more than one picture"):
        camkit.diagnose(model, pictures()[:1], training=True)
    camkit.diagnose(model, pictures()[:1])
    camkit.diagnose(model, pictures()[:2], training=True)


@pytest.mark.parametrize("training", [False, True])
def test_rows_equal_what_a_plain_pass_retains(*, training: bool) -> None:
    model, inputs = small().train(), pictures()
    model(pictures())  # so that the normalisation has seen a batch
    labels = torch.arange(8) % 5
    result = camkit.diagnose(model, (inputs, labels), training=training)

    model.train(training)
    kept: dict[str, Tensor] = {}
    value = inputs.clone().requires_grad_()
    for name, layer in model.named_children():
        value = layer(value)
        value.retain_grad()
        kept[name] = value
        value = value.clone()  # an in-place ReLU changes this copy
    loss = nn.functional.cross_entropy(value, labels)
    loss.backward()

    assert [row.layer for row in result.rows] == [name for name in kept if name != "10"]  # the flattening
    assert result.loss == pytest.approx(loss.item(), rel=1e-6)
    for row in result.rows:
        values, back = kept[row.layer].detach(), kept[row.layer].grad
        assert row.shape == tuple(values.shape)
        assert row.activations == statistics(values)
        assert back is not None
        assert row.gradients is not None
        assert row.gradients.norm == pytest.approx(back.double().norm().item(), rel=1e-4)
        assert row.gradients.zeros == pytest.approx((back == 0).double().mean().item(), abs=1e-3)
        if isinstance(model.get_submodule(row.layer), nn.ReLU):
            silent = (values == 0).all(dim=3).all(dim=2).all(dim=0)
            assert row.dead == tuple(silent.nonzero().flatten().tolist())
        own = list(model.get_submodule(row.layer).parameters())
        assert row.parameters == sum(one.numel() for one in own)
        norm = math.sqrt(sum(one.grad.double().square().sum().item() for one in own if one.grad is not None))
        assert row.parameter_gradient == (pytest.approx(norm, rel=1e-4) if own else None)


class TestHealthy:
    """Networks without a fault have no finding; the limits are set by them."""

    @pytest.mark.parametrize("training", [False, True])
    @pytest.mark.parametrize(
        "name", represented_by("resnet18", among=["resnet18", "squeezenet1_1", "mobilenet_v3_small"])
    )
    def test_fresh_networks(self, name: str, *, training: bool) -> None:
        model = torchvision.models.get_model(name, weights=None, num_classes=10)
        assert found(camkit.diagnose(model, pictures(8, 64), training=training)) == []

    def test_vanishing_is_judged_again_when_normalisation_has_seen_enough(self) -> None:
        layers = [layer for _ in range(30) for layer in (nn.Linear(24, 24), nn.Sigmoid())]
        model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 24), nn.BatchNorm1d(24), *layers, nn.Linear(24, 5))
        for kinds in (set(), {"vanishing"}):
            for _ in range(20):
                model.train()(pictures(8))
            result = camkit.diagnose(model, pictures())
            assert {kind for kind, _ in found(result)} == kinds
            assert any("too few batches" in remark for remark in result.remarks) == (not kinds)

    def test_zeros_that_come_from_no_relu(self) -> None:
        def run(net: Net, inputs: Tensor) -> Tensor:
            maps = net.relu(net.norm(net.first(inputs)))
            return net.head(net.wider(maps + net.scaled(maps) + net.signs(maps)))

        # A branch scaled by zeros, as LayerScale, LoRA or ReZero start; channels padded with zeros, as in the shortcuts
        # of small ResNets; numbers that are not zero by a ReLU
        scaled = Net(lambda net, maps: net.scale * maps, scale=nn.Parameter(torch.zeros(1)))
        wider = own(lambda _, maps: nn.functional.pad(maps, (0, 0, 0, 0, 8, 8)))
        signs = own(lambda _, maps: (maps > 100).float())
        parts = {"first": nn.Conv2d(3, 8, 3), "norm": nn.BatchNorm2d(8), "relu": nn.ReLU()}
        net = Net(run, **parts, wider=wider, scaled=scaled, signs=signs, head=nn.Sequential(*POOLED, nn.Linear(24, 5)))
        assert found(camkit.diagnose(net, pictures(), training=True)) == []

    @pytest.mark.parametrize("number", [1, 2, 8, 32])
    @pytest.mark.parametrize("norm", [False, True])
    def test_a_small_network_with_any_number_of_pictures(self, number: int, *, norm: bool) -> None:
        assert found(camkit.diagnose(small(norm=norm), pictures(number))) == []

    @pytest.mark.parametrize("name", ["demo-fair", "demo-biased"])
    def test_the_demo_networks(self, name: str) -> None:
        scenes = list(camkit.scenes.scene_paths().values())
        assert found(camkit.diagnose(name, scenes)) == []
        assert found(camkit.diagnose(name, scenes[0], training=True)) == []
        assert found(camkit.diagnose(camkit.load_model(name).module, torch.randn(8, 3, 128, 128))) == []

    def test_zero_heads_are_a_remark(self) -> None:
        result = camkit.diagnose(planted(small(), "11.weight", 0), pictures())
        assert found(result) == []
        assert any("'11'" in remark and "zero" in remark for remark in result.remarks)

    def test_a_network_in_use_is_frozen_as_a_whole(self) -> None:
        model = small().requires_grad_(requires_grad=False)
        result = camkit.diagnose(model, pictures())
        assert found(result) == []
        assert result.rows[0].gradients is not None
        assert found(camkit.diagnose(model, pictures(), training=True)) == [("frozen", "0")]

    def test_a_sure_sigmoid_at_the_end(self) -> None:
        model = planted(nn.Sequential(small(norm=False), nn.Sigmoid()), "0.8.bias", -20)
        assert found(camkit.diagnose(model, pictures())) == []

    def test_few_sigmoids_and_many(self) -> None:
        assert found(camkit.diagnose(stack(nn.Sigmoid, 3), pictures())) == []
        assert len(only(camkit.diagnose(stack(nn.Sigmoid, 30), pictures()), "vanishing").layers) > 30


class TestPlanted:
    @pytest.mark.parametrize("number", [1, 8])
    def test_a_dead_relu(self, number: int) -> None:
        result = camkit.diagnose(planted(small(norm=False), "2.bias", -100), pictures(number))
        finding = only(result, "dead")
        assert finding.layer == "3"
        assert "16 of 16 channels" in finding.text
        assert ("this picture" in finding.text) == (number == 1)
        assert ("the layer is dead" in finding.text) == (number == 8)
        assert result["3"].dead == tuple(range(16))
        assert only(result, "no gradient").layers == ("0", "2")

    @pytest.mark.parametrize("number", [1, 8])
    def test_a_few_dead_channels(self, number: int) -> None:
        result = camkit.diagnose(planted(small(), "4.bias", -50, [2, 5]), pictures(number))
        assert found(result) == [("dead", "5")]
        assert "channel 2, 5" in result.findings[0].text
        assert set(result["5"].off) == {2, 5}

    @pytest.mark.parametrize(
        "end",
        [
            torch.relu,
            nn.functional.relu6,
            lambda maps: maps.clamp(min=0),
            lambda maps: torch.where(maps > 0, maps, 0.0),
            lambda maps: nn.functional.dropout(maps.relu(), 0.2),
            lambda maps: maps.relu().permute(0, 1, 3, 2).contiguous(),
        ],
    )
    def test_a_function_like_relu_in_the_models_own_code(self, end: Callable[[Tensor], Tensor]) -> None:
        first = own(lambda conv, inputs: end(conv(inputs)), 3, 32, 3)
        model = nn.Sequential(first, nn.Conv2d(32, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
        assert found(camkit.diagnose(model, pictures(), training=True)) == []
        result = camkit.diagnose(planted(model, "0.conv.bias", -50, slice(29)), pictures(), training=True)
        assert result["0"].dead == tuple(range(29))
        assert found(result) == [("dead", "0")]

    def test_a_relu_of_tokens(self) -> None:
        model = nn.Sequential(nn.Flatten(2), nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 8), nn.Flatten())
        result = camkit.diagnose(planted(model, "1.bias", -100, 7), pictures())
        assert result["2"].channels == 32
        assert result["2"].dead == (7,)


FAULTS: dict[str, tuple[Callable[[], nn.Module], str, str | tuple[str, ...], str]] = {
    "gradients that vanish": (lambda: stack(nn.Sigmoid, 30), "vanishing", "1", "the gradient's norm falls"),
    "gradients that explode": (lambda: stack(nn.ReLU, 20, std=2.0), "exploding", "1", "the gradient's norm grows"),
    "a flat sigmoid": (lambda: planted(stack(nn.Sigmoid, 3), "3.bias", 300), "saturated", ("4",), "function is flat"),
    "a flat tanh": (lambda: planted(stack(nn.Tanh, 3), "3.bias", 300), "saturated", ("4",), "function is flat"),
    "frozen layers": (lambda: frozen(small(), 0, 3), "frozen", ("0", "3"), "do not require gradients"),
    "NaN of a layer": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), own(root), nn.Conv2d(8, 4, 1), nn.Conv2d(4, 4, 1)),
        "nan", ("1", "2", "3"), "its input has none",
    ),
    "NaN in weights": (
        lambda: planted(small(), "3.weight", math.nan, (0, 0, 0, 0)), "nan", "3", "parameters hold NaN",
    ),
    "NaN in a block's own code": (
        lambda: nn.Sequential(nn.Conv2d(3, 16, 3), own(lambda conv, inputs: conv(inputs.log()), 16, 4, 1)),
        "nan", "1", "passes it to '1.conv'",
    ),
    "NaN on the way back": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), own(root), nn.Conv2d(8, 4, 1)), "nan", ("1",), "gradient",
    ),
    "infinity": (lambda: planted(small(norm=False), "2.weight", 3e38), "infinity", "2", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_where_it_begins(name: str) -> None:
    make, kind, layers, said = FAULTS[name]
    finding = only(camkit.diagnose(make(), pictures()), kind)
    assert layers in (finding.layer, finding.layers)
    assert said in finding.text


def test_nan_in_the_pictures_is_no_layers_fault() -> None:
    assert only(camkit.diagnose(small(), pictures().sqrt()), "nan").layer == ""


@pytest.mark.parametrize("training", [False, True])
def test_the_model_comes_back_as_it_was_also_after_an_exception(*, training: bool) -> None:
    model, inputs = nn.Sequential(small(), nn.Dropout()).train(), pictures()
    model[0][3].eval()
    model[0][0].weight.grad = torch.ones_like(model[0][0].weight)
    with unchanged(model):
        camkit.diagnose(model, inputs, training=training)
    with unchanged(model), torch.inference_mode():
        camkit.diagnose(model, inputs, training=training)
    for error in (ValueError, KeyboardInterrupt):

        def stop(*_: Any, error: type[BaseException] = error) -> None:
            raise error("stop")

        with unchanged(model), pytest.raises(error):
            camkit.diagnose(model, inputs, stop, training=training)
        broken = nn.Sequential(model, own(stop))
        with unchanged(broken), pytest.raises(error):
            camkit.diagnose(broken, inputs, training=training)


POOLED = (nn.AdaptiveAvgPool2d(1), nn.Flatten())
ZERO_ONE = torch.tensor([0, 1, 1, 0, 1, 0, 0, 1])
SEVERAL = torch.stack([ZERO_ONE, ZERO_ONE.flip(0), ZERO_ONE.roll(1), 1 - ZERO_ONE], 1)
EIGHT = torch.zeros(8, 3, 8, 8)
CELLS = torch.arange(8 * 16 * 16).reshape(8, 16, 16) % 3


def binary(scores: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy(scores.sigmoid(), labels.float().reshape(scores.shape))


def of_classes(scores: Tensor, labels: Tensor) -> Tensor:
    """The cross entropy from its formula."""
    scores, labels = scores.movedim(1, -1).flatten(0, -2), labels.flatten()
    return -scores.softmax(1)[range(len(labels)), labels].log().mean()


LABELLED: dict[str, tuple[Sequence[nn.Module], Tensor, Callable[[Tensor, Tensor], Tensor], str]] = {
    "one logit, (N, 1)": ((*POOLED, nn.Linear(6, 1)), ZERO_ONE[:, None].float(), binary, "binary cross entropy"),
    "one logit, (N,)": (
        (*POOLED, nn.Linear(6, 1), nn.Flatten(0)), ZERO_ONE.float(), binary, "binary cross entropy",
    ),
    "one probability": (
        (*POOLED, nn.Linear(6, 1), nn.Sigmoid()),
        ZERO_ONE,
        lambda scores, labels: binary(scores.logit(), labels),
        "binary cross entropy",
    ),
    "several labels": ((*POOLED, nn.Linear(6, 4)), SEVERAL.float(), binary, "binary cross entropy"),
    "a map of one logit": ((nn.Conv2d(6, 1, 1),), (CELLS > 0)[:, None].float(), binary, "binary cross entropy"),
    "classes": ((*POOLED, nn.Linear(6, 3)), ZERO_ONE, of_classes, "cross entropy"),
    "shares of classes": (
        (*POOLED, nn.Linear(6, 3)),
        nn.functional.one_hot(ZERO_ONE, 3).float(),
        lambda scores, labels: of_classes(scores, labels.argmax(1)),
        "cross entropy",
    ),
    "probabilities": (
        (*POOLED, nn.Linear(6, 3), nn.Softmax(1)),
        ZERO_ONE,
        lambda scores, labels: of_classes(scores.log(), labels),
        "cross entropy",
    ),
    "maps of classes": ((nn.Conv2d(6, 3, 1),), CELLS, of_classes, "cross entropy"),
}  # fmt: skip


class TestCalls:
    def test_losses(self) -> None:
        model, inputs = small().eval(), pictures()
        assert camkit.diagnose(model, inputs).loss == pytest.approx(model(inputs).amax(1).mean().item(), rel=1e-5)
        added = camkit.diagnose(model, inputs, torch.sum)
        assert added.loss == pytest.approx(model(inputs).sum().item(), rel=1e-4)
        both = camkit.diagnose(model, [list(inputs), torch.ones(8)], lambda output, ones: (output[:, 0] - ones).mean())
        assert both.loss == pytest.approx(model(inputs)[:, 0].mean().item() - 1, rel=1e-4)
        assert camkit.diagnose(model, inputs[0]).pictures == 1
        assert camkit.diagnose(model, list(inputs[:2])).pictures == 2

    @pytest.mark.parametrize("name", LABELLED)
    def test_labels_decide_the_loss(self, name: str) -> None:
        torch.manual_seed(4)
        tail, labels, expected, loss_name = LABELLED[name]
        model, inputs = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), *tail), pictures()
        result = camkit.diagnose(model, (inputs, labels))
        value = expected(model(inputs), labels)
        assert value > 0.05
        assert result.loss == pytest.approx(value.item(), rel=1e-4)
        assert result.loss_name == result.to_dict()["loss_name"] == loss_name
        assert loss_name in picture.findings(result).plain
        assert result.findings == ()
        value.backward()
        assert result["0"].parameter_gradient == pytest.approx(
            torch.cat([each.grad.flatten() for each in model[0].parameters()]).norm().item(), rel=1e-3
        )

    def test_an_output_without_gradient_is_a_remark(self) -> None:
        result = camkit.diagnose(nn.Sequential(small(), own(lambda _, output: output.detach())), pictures())
        assert result.loss is None
        assert any("no gradients" in remark for remark in result.remarks)
        assert "no gradient" not in [kind for kind, _ in found(result)]

    @pytest.mark.parametrize(
        ("batch", "options", "kind", "said"),
        [
            ([torch.zeros(3, 8, 8), torch.zeros(3, 8, 9)], {}, InputError, "one size"),
            ([], {}, InputError, "the batch is empty"),
            (EIGHT, {"loss": lambda output: output}, InputError, "one number"),
            (EIGHT, {"loss": nn.CrossEntropyLoss}, InputError, r"such as torch\.nn\.MSELoss\(\)"),
            ((EIGHT, ["cat"] * 8), {}, InputError, "labels must be numbers"),
            (torch.zeros(2, 4, 8, 8), {}, InputError, "4 channels"),
            ("none.jpg", {}, InputError, "none.jpg"),
            ((EIGHT, torch.zeros(3)), {}, TargetError, "cross entropy"),
            ((EIGHT, torch.linspace(-3, 2, 40).reshape(8, 5)), {}, TargetError, "range from -3 to 2.*MSELoss"),
            ((EIGHT, torch.full((8,), -100)), {}, TargetError, "all are -100, so they are ignored"),
            ((EIGHT, torch.arange(8)), {}, TargetError, "one is class 5"),
            ((EIGHT, torch.zeros(8, 4)), {}, TargetError, r"\(8, 5\).*\(8, 4\)"),
            ((EIGHT, {"boxes": torch.zeros(8, 4)}), {}, TargetError, "labels of the type dict"),
        ],
    )
    def test_a_wrong_call_is_one_sentence(self, batch: Any, options: dict, kind: type[Exception], said: str) -> None:
        with pytest.raises(kind, match=said) as caught:
            camkit.diagnose(small(), batch, **options)
        assert "\n" not in str(caught.value)

    def test_the_result(self) -> None:
        result = camkit.diagnose(small(), pictures(1))
        assert json.loads(json.dumps(result.to_dict(), allow_nan=False))["layers"][0]["layer"] == "0"
        assert "1 picture," in repr(result)
        assert "\n" not in repr(result)
        assert np.array_equal(shown_in(result._repr_html_()), result.sheet())
        with pytest.raises(KeyError):
            result["none"]


class TestCommand:
    def test_prints_and_writes(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        plane = camkit.scenes.scene_paths()["plane-sky"]
        assert main(["diagnose", str(plane), "--model", "demo-fair", "--out", str(tmp_path / "out")]) == 0
        out = capsys.readouterr().out
        assert "features.3.2" in out
        assert "nothing wrong was found" in out
        written = json.loads((tmp_path / "out" / "diagnose.json").read_text("utf-8"))
        assert written["pictures"] == 1
        assert written["findings"] == []
        assert cv2.imread(str(tmp_path / "out" / "diagnose.png")).shape[0] > 500

    def test_a_folder_is_a_batch(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        for number in range(5):
            cv2.imwrite(str(tmp_path / f"{number}.png"), np.full((40, 60, 3), 40 * number, np.uint8))
        arguments = [tmp_path, "--model", "demo-fair", "--json", "--limit", "3", "--out", tmp_path / "out", "--train"]
        assert main(["diagnose", *map(str, arguments)]) == 0
        printed = json.loads(capsys.readouterr().out)
        assert (printed["pictures"], printed["training"]) == (3, True)


def test_the_picture_draws_what_is_wrong() -> None:
    healthy = camkit.diagnose(small(), pictures()).sheet()
    broken = camkit.diagnose(planted(small(), "3.weight", math.nan, (0, 0, 0, 0)), pictures()).sheet()
    red = [int(((drawn[..., 0] > 180) & (drawn[..., 1] < 60)).sum()) for drawn in (healthy, broken)]
    assert red[0] == 0
    assert red[1] > 500


def test_every_kind_of_finding_is_in_the_guide() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "diagnose.md").read_text("utf-8")
    table = guide.partition("## What is found")[2].partition("\n## ")[0].partition("\n\nOn one picture")[0]
    kinds = get_args(get_type_hints(findings.Finding)["kind"])
    assert set(re.findall(r"`([a-z ]+)`", table.replace("`training=True`", ""))) == set(kinds)


@pytest.mark.parametrize("look", [camkit.diagnose, lambda net, batch: camkit.feature_maps(net, batch[0])])
def test_a_model_that_needs_another_input_is_one_sentence(look):
    class WithAge(nn.Conv2d):
        def forward(self, inputs: Tensor, age: Tensor) -> Tensor:
            return super().forward(inputs).mean((2, 3)) + age

    with pytest.raises(camkit.errors.ModelError, match=r"needs more than the picture.*'age'"):
        look(WithAge(3, 2, 3), torch.rand(2, 3, 8, 8))
