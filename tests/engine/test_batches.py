"""Models that do not treat each picture of a batch as if it were alone are explained as if each picture were alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import oracles
import pytest
import torch
from networks import means, sizes_of_passes
from torch import Tensor, nn

import camkit
from camkit.background.data import Item
from camkit.background.plan import Plan
from camkit.engine.guard import ModelRecord
from camkit.engine.passes import keeps_pictures_apart
from camkit.errors import TargetError
from camkit.layers.memory import ModelMemory
from camkit.types import LayerRef

CLASS = 1
SIZE = 32


class Apart(nn.Module):
    """A small network; ``run`` makes the answers for a batch."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.act, self.fc = nn.Conv2d(3, 6, 4, 4), nn.ReLU(), nn.Linear(6, 4)
        self.last = nn.Conv2d(6, 6, 1)
        self.before, self.after = (nn.BatchNorm2d(count, track_running_stats=False) for count in (3, 6))
        self.run = run
        self.eval()

    def maps(self, images: Tensor) -> Tensor:
        return self.act(self.conv(images))

    def scores(self, images: Tensor) -> Tensor:
        return self.fc(self.maps(images).mean((2, 3)))

    def forward(self, images: Tensor) -> Tensor:
        return self.run(self, images)


def apart(net: Apart, images: Tensor) -> Tensor:
    return net.scores(images)


def sorted_inside(net: Apart, images: Tensor) -> Tensor:
    order = images.mean((1, 2, 3)).argsort()
    return net.scores(images[order])[order.argsort()]


def pairs(net: Apart, images: Tensor) -> Tensor:
    """Give each picture of an even number a share of its neighbour's scores."""
    scores = net.scores(images)
    if len(images) % 2:
        return scores
    beside = scores.reshape(-1, 2, 4)
    return (beside + 0.1 * beside.flip(1)).flatten(0, 1)


def more_than_two(net: Apart, images: Tensor) -> Tensor:
    scores = net.scores(images)
    return scores - scores.mean(0, keepdim=True) if len(images) > 2 else scores


def of_scores(change: Callable[[Tensor], Tensor]) -> Callable[[Apart, Tensor], Tensor]:
    return lambda net, images: change(net.scores(images))


def statistics_before(net: Apart, images: Tensor) -> Tensor:
    return net.scores(net.before(images))


def statistics_after(net: Apart, images: Tensor) -> Tensor:
    return net.fc(means(net.after(net.maps(images)).relu()))


def early_exit(net: Apart, images: Tensor) -> Tensor:
    """Leave out the last step if all pictures are bright enough; the first one is."""
    maps = net.maps(images)
    bright = (images.mean((1, 2, 3)) > 0.493).all()
    return net.fc(means(maps if bright else net.last(maps)))


MIXING: dict[str, Callable[[Apart, Tensor], Tensor]] = {
    "loop": lambda net, images: torch.cat([net.scores(image[None]) for image in images]),
    "by twos": lambda net, images: torch.cat([net.scores(two) for two in images.split(2)]),
    "takes one picture": lambda net, images: net.scores(images.reshape(1, 3, SIZE, SIZE)),
    "minus the mean": of_scores(lambda scores: scores - 0.5 * scores.mean(0, keepdim=True)),
    "share of the batch": of_scores(lambda scores: scores.softmax(0) * scores),
    "largest of the batch": of_scores(lambda scores: scores.amax(0, keepdim=True).expand(len(scores), -1)),
    "by place": of_scores(lambda scores: scores / torch.arange(1, len(scores) + 1)[:, None]),
    "statistics after": statistics_after,
    "statistics before": statistics_before,
    "turned inside": lambda net, images: net.scores(images.flip(0)).flip(0),
    "sorted inside": sorted_inside,
    "left sorted": lambda net, images: net.scores(images[images.mean((1, 2, 3)).argsort(descending=True)]),
    "pairs": pairs,
    "more than two": more_than_two,
}
EVERY = {"apart": apart} | MIXING


def pictures(count: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.rand(3, SIZE, SIZE, generator=generator) for _ in range(count)]


def expected(net: nn.Module, image: Tensor, maps: Tensor | None = None) -> tuple[Tensor, float, Tensor]:
    """Return the maps of the ReLU, the score and its gradients, of one picture alone; or with other maps."""
    kept: list[Tensor] = []

    def replace(*called: Tensor) -> Tensor:
        kept.append((called[-1] if maps is None else maps).detach().requires_grad_())
        return kept[0].clone()

    with net.get_submodule("act").register_forward_hook(replace):
        score = net(image[None])[0, CLASS]
    (gradient,) = torch.autograd.grad(score, kept[0])
    return kept[0].detach(), float(score.detach()), gradient


@pytest.mark.parametrize("batch_size", [2, 3, 4])
@pytest.mark.parametrize("run", [*MIXING.values(), early_exit], ids=[*MIXING, "early exit"])
def test_each_picture_of_a_list_gets_the_map_that_it_has_alone(run: Callable[..., Tensor], batch_size: int) -> None:
    net, images = Apart(run), pictures()
    found = camkit.explain(net, images, "act", method="hirescam", target=CLASS, batch_size=batch_size)
    for explanation, image in zip(found, images, strict=True):
        maps, score, gradient = expected(net, image)
        raw = (maps * gradient).sum(1)[0].numpy()
        assert explanation.score == pytest.approx(score, rel=1e-5)
        np.testing.assert_allclose(explanation.raw, raw, rtol=0, atol=1e-5 * np.abs(raw).max())


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        *(("ablationcam", kind) for kind in EVERY),
        *(("reciprocam", kind) for kind in ("apart", "takes one picture", "share of the batch", "pairs")),
    ],
)
def test_methods_of_the_head_are_right_if_it_mixes_the_pictures_of_a_batch(method: str, kind: str) -> None:
    net, (image,) = Apart(EVERY[kind]), pictures(1)
    maps, _, _ = expected(net, image)

    def score(changed: np.ndarray) -> float:
        return expected(net, image, torch.from_numpy(changed).float()[None])[1]

    raw = oracles.OF_SCORES[method](maps[0], score)
    found = camkit.explain(net, image, "act", method=method, target=CLASS)
    np.testing.assert_allclose(found.raw, raw, rtol=0, atol=1e-5 * np.abs(raw).max())
    assert np.abs(raw).max() > 0


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        *((kind, "scorecam") for kind in MIXING),
        *itertools.product(("takes one picture", "share of the batch"), ["rise", "feature-scorecam"]),
    ],
)
def test_methods_that_run_changed_versions_see_each_alone(kind: str, method: str) -> None:
    """The same methods agree if each pass takes one version, which needs no batch."""

    def alone(net: Apart, images: Tensor) -> Tensor:
        return torch.cat([MIXING[kind](net, image[None]) for image in images])

    (image,), layer = pictures(1), None if method == "rise" else "act"
    together, one_by_one = Apart(MIXING[kind]), Apart(MIXING[kind])
    one_by_one.run = alone
    found, raw = (camkit.explain(net, image, layer, method=method, target=CLASS).raw for net in (together, one_by_one))
    np.testing.assert_allclose(found, raw, rtol=0, atol=1e-3 * np.abs(raw).max())
    assert np.abs(raw).max() > 0


@pytest.mark.parametrize("kind", MIXING)
def test_metrics_see_each_changed_picture_alone(kind: str) -> None:
    net, (image,) = Apart(EVERY[kind]), pictures(1)
    scores = camkit.Explainer(net).scores_of(image, lambda output: output[:, CLASS])
    changed = torch.stack([image * share for share in (0.0, 0.3, 0.6, 1.0)])
    with torch.no_grad():
        alone = [float(net(version[None])[0, CLASS]) for version in changed]
    assert scores(changed).tolist() == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("kind", EVERY)
def test_the_check_judges_each_picture_alone(kind: str) -> None:
    net, batch = Apart(EVERY[kind]), torch.stack(pictures())
    plan = Mock(spec=Plan)
    plan.model, plan.settings, plan.memory = Mock(module=net), Mock(), ModelMemory(net)
    plan.settings.check.precision = "fp32"
    plan.outputs = {"cat": (CLASS,)}
    plan.detects = False
    found, _ = Plan.answer(plan, batch, [Item("cat.png", Path("cat.png"), "cat", "cat.png")] * len(batch))
    with torch.no_grad():
        shares = [float(net(image[None])[0].softmax(0)[CLASS]) for image in batch]
    assert [answer.share for answer in found] == pytest.approx(shares, rel=1e-5)


def test_what_was_found_out_is_remembered() -> None:
    net = Apart(apart)
    sizes = sizes_of_passes(net)
    explainer = camkit.Explainer(net, "act")
    explainer.batch(pictures(5), CLASS, batch_size=4)
    assert max(sizes) == 4, "no pass has more pictures than the caller allows"
    sizes.clear()
    explainer.batch(pictures(8), CLASS, batch_size=4)
    assert sizes == [4, 4]


def own(*layers: nn.Module, tokens: bool = False) -> nn.Module:
    """Return a network of PyTorch's own modules; ``tokens`` flattens its maps before the given layers."""
    flat = [nn.Flatten(2)] if tokens else []
    return nn.Sequential(nn.Conv2d(3, 6, 4, 4), *flat, *layers, nn.Flatten(), nn.Linear(6 * 64, 4)).eval()


BRIGHT = pictures(1)[0][None]


@pytest.mark.parametrize(
    ("net", "image", "keeps", "passes"),
    [
        (own(nn.ReLU()), BRIGHT, True, 0),  # networks of known packages are not tried
        (own(nn.Softmax2d()), BRIGHT, True, 0),
        (own(nn.BatchNorm2d(6, track_running_stats=False)), BRIGHT, False, 4),
        (own(nn.Softmax(0)), BRIGHT, False, 4),
        (own(nn.Softmax(-4)), BRIGHT, False, 4),
        # Attention that reads (N, C, L) as N tokens of C sequences.
        (own(nn.TransformerEncoderLayer(64, 2, 8, dropout=0.0), tokens=True), BRIGHT, False, 4),
        (Apart(MIXING["minus the mean"]), torch.zeros_like(BRIGHT), False, 4),
        *((Apart(apart).to(kind), BRIGHT.to(kind), True, 4) for kind in (torch.half, torch.bfloat16, torch.double)),
    ],
    ids=lambda value: None if isinstance(value, (bool, int)) else "",
)
def test_mixing_is_found_and_rounding_is_not_mixing(net: nn.Module, image: Tensor, keeps: bool, passes: int) -> None:
    record, sizes = ModelRecord.of_model(net), sizes_of_passes(net)
    name, layer = list(net.named_children())[1]
    assert keeps_pictures_apart(net, image, {LayerRef(name): layer}, record) == keeps
    assert len(sizes) == passes


def test_a_model_that_reads_the_first_picture_gets_one_at_a_time() -> None:
    (image,) = pictures(1)
    found, wanted = (
        camkit.explain(Apart(run), image, method="rise", target=CLASS)
        for run in (lambda net, images: net.scores(images[:1]), apart)
    )
    np.testing.assert_allclose(found.raw, wanted.raw, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"layer": "act"}, {"method": "occlusion"}, {"target": CLASS}])
def test_one_answer_for_several_pictures_is_a_question(options: dict[str, Any]) -> None:
    """As of networks for the pictures of one patient."""
    net = Apart(lambda net, images: net.scores(images).mean(0, keepdim=True))
    images, layer = pictures(3), options.pop("layer", None)
    with pytest.raises(TargetError, match=r"one answer for 3 pictures; pass batch_size=1 .*'occlusion'") as caught:
        camkit.explain(net, torch.stack(images), layer, **options)
    assert "\n" not in str(caught.value)
    alone = [camkit.explain(net, image, layer, **options) for image in images]
    for row, own in zip(camkit.explain(net, images, layer, batch_size=1, **options), alone, strict=True):
        np.testing.assert_array_equal(row.raw, own.raw)
