"""Expected gradients, compared with autograd in a loop over the references, and with what the cells must sum to."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from heads import CASES, CLASS, SIZE, built, with_output
from networks import Net, classifier
from oracles import as_float64, expected
from PIL import Image
from sklearn.metrics import roc_auc_score
from tiers import rows_represented
from torch import Tensor, nn
from unchanged import unchanged

import camkit
from camkit.cli import main
from camkit.engine.passes import to_grid
from camkit.errors import CamkitError, ImageError, LayerError, MethodError
from camkit.images.prepare import MOST_REFERENCES, smooth_noise
from camkit.methods import METHODS
from camkit.methods.on_one_picture import _shares
from camkit.targets import above, direction, finer
from camkit.types import LayerRef

REFERENCES = 6


def references(size: int = SIZE, count: int = REFERENCES) -> Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(7))


def explained(model: nn.Module, image: Tensor, layer: str | None, target: Any = CLASS, **options: Any) -> Any:
    return camkit.explain(model, image, layer, method="expected", target=target, **options)


def log_odds(logits: Tensor, index: int = CLASS) -> Tensor:
    """Return the logit of a class minus the logarithm of the summed exponentials of the others."""
    others = [logits[0, other] for other in range(logits.shape[1]) if other != index]
    return logits[0, index] - torch.stack(others).exp().sum().log()


def by_hook(
    model: nn.Module, ref: LayerRef, image: Tensor, pictures: Tensor, score: Callable[[Tensor], Tensor]
) -> tuple[Tensor, float, float]:
    """Return what each value of the layer's output adds, the score, and its mean over the reference pictures.

    The definition: a hook gives the layer other values, and autograd differentiates the whole model.
    """
    model, image = copy.deepcopy(model).double().eval(), image.double()
    own, logits = with_output(model, ref, image)
    total, scores = torch.zeros_like(own), []
    for picture, share in zip(pictures.double(), _shares(len(pictures)).tolist(), strict=True):
        other, of_other = with_output(model, ref, picture[None])
        between = (other + share * (own - other)).requires_grad_()
        changed = with_output(model, ref, image, lambda _, between=between: between * 1)[1]
        (gradient,) = torch.autograd.grad(score(changed), between)
        total += (own - other) * gradient / len(pictures)
        scores.append(float(score(of_other).detach()))
    return total, float(score(logits).detach()), float(np.mean(scores))


@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_head_equals_the_definition(name: str) -> None:
    """Chains, paths beside the layer, repeated calls, and tokens behind a class token."""
    model, ref, layout, image = built(name)
    with unchanged(model):
        found = explained(model, image, str(ref), references=references())
    total, score, mean = by_hook(model, ref, image, references(), log_odds)
    cells = to_grid(total, layout).sum(1)[0].numpy()
    assert np.abs(cells).max() > 0
    np.testing.assert_allclose(found.raw, cells, rtol=0, atol=2e-5 * np.abs(cells).max())
    compared, rounding = found.references, 2e-5 * max(abs(score), abs(mean), np.abs(cells).max() * cells.size)
    assert compared is not None
    assert (compared.score, compared.mean) == pytest.approx((score, mean), abs=rounding)
    assert compared.elsewhere == pytest.approx(float(total.sum()) - cells.sum(), abs=rounding)
    assert (compared.elsewhere == 0) == (layout.prefix == 0)
    assert found.residual == pytest.approx(score - mean - float(total.sum()), abs=3 * rounding)


OWN_SOFTMAX = Net(lambda _, logits: logits.exp() / logits.exp().sum(1, keepdim=True))


@pytest.mark.parametrize("last", [nn.Softmax(1), nn.LogSoftmax(1), OWN_SOFTMAX], ids=["softmax", "log", "own"])
def test_a_model_that_returns_probabilities_has_the_map_of_its_logits(last: nn.Module) -> None:
    model, ref, _, image = built("chain")
    with torch.no_grad():
        model[6].weight *= 30
    plain = explained(model, image, str(ref), references=references())
    found = explained(nn.Sequential(*model, last).eval(), image, str(ref), references=references())
    np.testing.assert_allclose(found.raw, plain.raw, rtol=0, atol=2e-4 * np.abs(plain.raw).max())
    assert found.residual == pytest.approx(plain.residual, abs=2e-4 * max(1.0, abs(plain.references.score)))
    assert plain.references.quantity == "log-odds"


def test_classes_that_do_not_exclude_each_other_have_no_rivals() -> None:
    model, ref, _, image = built("chain")
    logit = explained(model, image, str(ref), direction("+", CLASS), references=references())
    sigmoid = nn.Sequential(*model, nn.Sigmoid()).eval()
    for found in (
        explained(sigmoid, image, str(ref), references=references()),
        next(
            row for row in explained(model, image, str(ref), above(0.0), references=references()) if row.target == CLASS
        ),
    ):
        np.testing.assert_allclose(found.raw, logit.raw, rtol=0, atol=1e-4 * np.abs(logit.raw).max())
        assert found.residual == pytest.approx(logit.residual, abs=1e-4)


def test_a_single_logit_and_any_other_target_are_scores_themselves() -> None:
    model, ref, _, image = built("chain")
    single = nn.Sequential(*list(model)[:6], nn.Linear(8, 1)).eval()
    one, same = (explained(single, image, str(ref), target, references=references()) for target in (0, direction("+")))
    np.testing.assert_array_equal(one.raw, same.raw)
    for target in (lambda output: output[:, 0] * output[:, 1], finer(CLASS)):
        found = explained(model, image, str(ref), target, references=references())
        assert found.references.score == pytest.approx(found.score)
        assert found.references.quantity != "log-odds"


def test_several_layers_and_a_score_without_gradients_are_refused() -> None:
    model, _, _, image = built("chain")
    with pytest.raises(MethodError, match="explain one layer; name one, or use 'gradcam'"):
        explained(model, image, ["0", "2"])
    with pytest.raises(LayerError, match="does not depend on layer '2' in a differentiable way"):
        detached = Net(lambda _, maps: maps.detach())
        explained(nn.Sequential(*list(model)[:5], detached, *list(model)[5:]).eval(), image, "2")


def folder_of(folder: Path, count: int) -> Path:
    folder.mkdir()
    for number in range(count):
        Image.new("RGB", (40, 30), (12 * number, 80, 255 - 12 * number)).save(folder / f"{number:02}.png")
    return folder


def test_a_folder_a_list_and_a_tensor_are_the_same_references(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "others", 5)
    loaded = camkit.load_model("demo-fair")
    picture = camkit.scenes.scene_paths()["plane-sky"]
    files = sorted(folder.iterdir())
    tensors = torch.stack([loaded.preprocess(Image.open(file)) for file in files])
    found = [
        explained(loaded, picture, None, None, references=given) for given in (folder, str(folder), files, tensors)
    ]
    for other in found[1:]:
        np.testing.assert_allclose(other.raw, found[0].raw, rtol=0, atol=1e-6 * np.abs(found[0].raw).max())
    assert [each.references.pictures for each in found] == 2 * [f"5 pictures of {folder}"] + 2 * [
        "5 pictures, passed as references"
    ]
    assert found[0].to_dict()["references"]["residual"] == found[0].residual
    (remark,) = found[0].caption().remarks
    assert remark.startswith(f"Compared with 5 pictures of {folder}: log-odds ")
    assert "above their mean; the cells sum to" in remark


def test_of_many_references_some_at_equal_distances_are_used(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "others", 20)
    picture = camkit.scenes.scene_paths()["plane-sky"]
    found = explained("demo-fair", picture, None, None, references=folder)
    assert found.references.pictures == f"16 of 20 pictures of {folder}"
    chosen = [folder / f"{number * 20 // MOST_REFERENCES:02}.png" for number in range(MOST_REFERENCES)]
    same = explained("demo-fair", picture, None, None, references=chosen)
    np.testing.assert_array_equal(found.raw, same.raw)


def test_references_of_another_size_are_resized() -> None:
    model, ref, _, image = built("chain")
    grey = torch.full((4, 3, 2 * SIZE, SIZE), 0.3)
    found = explained(model, image, str(ref), references=grey)
    same = explained(model, image, str(ref), references=grey[..., :SIZE, :])
    np.testing.assert_allclose(found.raw, same.raw, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ([], ImageError, r"there are no reference pictures: \[\] is empty; pass 8 to 16 pictures"),
        ("nowhere", ImageError, "there is no file nowhere"),
        (torch.zeros(2, 4, SIZE, SIZE), ImageError, "a reference picture has 4 channels, but the picture has 3"),
        (torch.full((2, 3, SIZE, SIZE), torch.nan), ImageError, "reference picture 1 holds NaN or infinite values"),
    ],
)
def test_references_that_cannot_be_used_are_refused(given: Any, error: type[CamkitError], said: str) -> None:
    model, ref, _, image = built("chain")
    with pytest.raises(error, match=said):
        explained(model, image, str(ref), references=given)
    with pytest.raises(error, match=said):  # it is no picture's own error
        list(camkit.explain_many(model, [image, image], on_error="yield", method="expected", references=given))


def test_a_method_that_reads_no_references_refuses_them() -> None:
    model, _, _, image = built("chain")
    for method in (None, "layercam"):
        with pytest.raises(MethodError, match="uses no reference pictures; use 'expected', or leave out references"):
            camkit.explain(model, image, "2", method=method, references=references())
        with pytest.raises(MethodError, match="uses no reference pictures"):
            camkit.Explainer(model, "2", method=method, references=references())


def test_noise_fills_the_range_of_the_inputs_and_is_the_same_in_every_run() -> None:
    noise = smooth_noise(6, (32, 48))
    assert torch.equal(noise, smooth_noise(6, (32, 48)))
    assert (noise.flatten(1).amin(1).tolist(), noise.flatten(1).amax(1).tolist()) == (6 * [0.0], 6 * [1.0])
    assert noise.diff(dim=-1).abs().mean() < 0.05 < noise.std(dim=-1).mean()
    picture = camkit.scenes.scene_paths()["plane-sky"]
    one, two = (explained("demo-fair", picture, None, None) for _ in range(2))
    np.testing.assert_array_equal(one.raw, two.raw)
    assert one.references.pictures == "16 pictures of smooth noise, made by camkit"
    explainer = camkit.Explainer("demo-fair", method="expected")
    inputs = explainer.choices.options["references"](torch.zeros(1, 3, 128, 128)).inputs
    low, high = (camkit.scenes.preprocess(Image.new("RGB", (128, 128), name)) for name in ("black", "white"))
    assert inputs.amin((0, 2, 3)).tolist() == pytest.approx(low.amin((1, 2)).tolist(), abs=1e-5)
    assert inputs.amax((0, 2, 3)).tolist() == pytest.approx(high.amax((1, 2)).tolist(), abs=1e-5)


def test_the_map_equals_its_formula() -> None:
    draws = torch.randn(11, 4, 3, 5, generator=torch.Generator().manual_seed(1))
    found = METHODS["expected"].weights(draws[:1], draws[1:6], draws[6:])
    np.testing.assert_allclose(as_float64(found[0]), expected(draws[0], draws[1:6], draws[6:]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 40), (2, 6, 8, 10)])
def test_signals_and_volumes_are_compared_with_noise_too(shape: tuple[int, ...]) -> None:
    model = classifier(getattr(nn, f"Conv{len(shape) - 1}d")(shape[0], 6, 3), nn.ReLU(), classes=3)
    found = explained(model, torch.randn(shape), "1")
    assert found.status != "non_finite"
    assert abs(found.residual) < 0.2


def test_the_references_run_once_and_again_after_the_weights_change() -> None:
    model, ref, _, image = built("chain")
    explainer = camkit.Explainer(model, str(ref), method="expected", references=references(count=3))
    explainer(image, CLASS)
    batches: list[int] = []
    handle = model[0].register_forward_hook(lambda _, given, __: batches.append(len(given[0])))
    explainer(image, CLASS)  # another hook: another structure
    batches.clear()
    before = explainer(image.flip(-1), CLASS)
    assert batches.count(3) == 0
    with torch.no_grad():
        model[2].weight *= 2
    after = explainer(image.flip(-1), CLASS)
    assert batches.count(3) == 1
    handle.remove()
    fresh = camkit.Explainer(model, str(ref), method="expected", references=references(count=3))(image.flip(-1), CLASS)
    np.testing.assert_array_equal(after.raw, fresh.raw)
    assert np.abs(after.raw - before.raw).max() > 0
    layercam = explainer.using("layercam")
    np.testing.assert_array_equal(layercam.using("expected")(image.flip(-1), CLASS).raw, fresh.raw)


@pytest.mark.parametrize("precision", ["bf16-forced", "fp16"])
def test_every_precision_computes_in_fp32(precision: Any) -> None:
    model, ref, _, image = built("tokens")
    plain, found = (
        explained(model, image, str(ref), references=references(), precision=each) for each in ("fp32", precision)
    )
    np.testing.assert_array_equal(found.raw, plain.raw)


def test_the_command_takes_references_and_a_table_remembers_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder_of(tmp_path / "others", 3)
    picture = str(camkit.scenes.scene_paths()["plane-sky"])
    options = ["-m", "demo-fair", "--method", "expected", "--references", "others"]
    assert main([picture, *options, "--table", "rows.csv", "--json"]) == 0
    assert '"pictures": "3 pictures of others"' in capsys.readouterr().out
    assert main([picture, *options, "--table", "rows.csv", "--resume", "-q"]) == 0
    Image.new("RGB", (40, 30)).save(tmp_path / "others" / "00.png")
    assert main([picture, *options, "--table", "rows.csv", "--resume"]) == 2
    assert "references" in capsys.readouterr().err
    assert main([picture, "-m", "demo-fair", "--references", "others"]) == 2
    assert "leave out --references" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("layer", "own"), rows_represented(lambda _, own: not own, [("features", False), ("features.1", True)])
)
def test_it_finds_what_the_demo_networks_use(layer: str, own: bool) -> None:
    """One network uses the object, the other the background."""
    paths, areas = camkit.scenes.scene_paths(), {}
    for model in ("demo-fair", "demo-biased"):
        explainer = camkit.Explainer(model, layer, method="expected", references=list(paths.values()) if own else None)
        areas[model] = [
            roc_auc_score(camkit.scenes.scene_mask(name).ravel(), explainer(path).heatmap_on_picture().ravel())
            for name, path in paths.items()
        ]
    assert np.mean(areas["demo-fair"]) > 0.8
    assert np.mean(areas["demo-biased"]) < 0.4
