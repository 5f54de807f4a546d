"""Sheets of feature maps, and the costs of layers."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from networks import Net, classifier, shown_in
from torch import nn
from unchanged import unchanged

import camkit
from camkit.cli import main
from camkit.errors import InputError
from camkit.inspect.costs import costs
from camkit.types import LayerRef

PLANE = str(camkit.scenes.scene_paths()["plane-sky"])


def network() -> nn.Sequential:
    return classifier(nn.Conv2d(3, 12, 3, 2, 1), nn.BatchNorm2d(12), nn.ReLU(inplace=True), classes=4).train()


class TestFeatureMaps:
    def test_maps_are_what_the_layer_returned_strongest_first(self) -> None:
        model, image = network().eval(), torch.randn(3, 32, 32)
        with unchanged(model):
            found = camkit.feature_maps(model, image, "2")
        maps = model[:3](image[None])[0].detach().numpy()
        strengths = np.abs(maps).mean(axis=(1, 2))
        assert found.total == 12
        assert list(found.channels) == np.argsort(-strengths, kind="stable").tolist()
        assert np.array_equal(found.maps, maps[list(found.channels)])
        assert found.strengths == pytest.approx(sorted(strengths.tolist(), reverse=True))

    def test_top_a_batch_of_one_a_module_and_the_chosen_layer(self) -> None:
        model, image = network(), torch.randn(1, 3, 32, 32)
        assert len(camkit.feature_maps(model, image, model[0], top=5).maps) == 5
        assert camkit.feature_maps(model, image).layer == camkit.explain(model, image).layer

    def test_they_show_themselves_on_one_line_and_in_a_notebook(self) -> None:
        found = camkit.feature_maps(network(), torch.randn(3, 32, 32), "2", top=5)
        assert repr(found) == "<FeatureMaps of layer '2' of Sequential for the picture: 5 of 12 maps, 16x16>"
        assert np.array_equal(shown_in(found._repr_html_()), found.sheet())
        wide = camkit.feature_maps(nn.Sequential(nn.Conv2d(3, 70, 3)), torch.randn(3, 8, 8), "0")
        assert shown_in(wide._repr_html_()).shape < wide.sheet().shape, "only the 64 strongest of 70"

    def test_a_sheet_scales_each_map_to_its_own_range_or_all_to_one(self) -> None:
        model = network()
        with torch.no_grad():
            model[0].weight[0] *= 100
        found = camkit.feature_maps(model, torch.randn(3, 32, 32), "2")
        assert found.channels[0] == 0
        each, together = found.sheet(), found.sheet(scale="together")
        with pytest.raises(InputError, match="scale must be 'each' or 'together', not 'All'"):
            found.sheet(scale="All")
        assert each.shape == together.shape
        weakest = np.s_[76:204, 4 * 132 + 4 : 5 * 132]  # the last tile of the first row
        assert each[weakest].max() > 200 > together[weakest].max()

    def test_signed_maps_and_nan_can_be_drawn(self, tmp_path: Path) -> None:
        model = network()
        found = camkit.feature_maps(model, torch.randn(3, 32, 48), "0")
        assert (found.maps < 0).any()
        assert cv2.imread(str(found.save(tmp_path / "sheet.png"))).shape == found.sheet().shape
        with torch.no_grad():
            model[0].weight[3] = torch.nan
        found = camkit.feature_maps(model, torch.randn(3, 32, 32), "0")
        assert found.channels[-1] == 3
        found.sheet()

    def test_the_command_writes_one_picture(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        options = ["--model", "demo-fair", "--layer", "features.2", "--top", "7", "--out", str(tmp_path)]
        assert main(["features", PLANE, *options]) == 0
        assert "7 of 48 maps" in capsys.readouterr().out
        assert [path.name for path in tmp_path.iterdir()] == ["plane-sky.features.features.2.png"]
        assert cv2.imread(str(next(tmp_path.iterdir()))).shape[2] == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["features"], "name a picture"),
        (["features", "none.jpg"], "no file none.jpg"),
        (["features", PLANE, "--top", "0"], "top must be a whole number from 1, not 0"),
        (["concepts"], "name a"),
        (["concepts", PLANE, "-n", "0"], "concepts must be a whole number from 1, not 0"),
        (["diagnose"], "name at least one picture"),
        (["diagnose", "none.jpg"], "no file none.jpg"),
        (["diagnose", PLANE, "--limit", "0"], "limit must be a whole number from 1, not 0"),
        (["diagnose", PLANE, "--out", "/dev/null/x"], "cannot write into the folder"),
    ],
)
def test_a_wrong_call_of_a_command_is_one_sentence_and_exit_code_2(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*arguments, "--model", "demo-fair"]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert (captured.err.count("\n"), captured.out) == (1, "")


def loops() -> nn.Sequential:
    """Return a model that runs one convolution twice."""
    conv = nn.Conv2d(3, 3, 3, padding=1)
    return classifier(conv, conv, classes=2).train()


class TestCosts:
    def test_costs_of_layers_and_of_the_model(self) -> None:
        model, image = network().train(), torch.randn(1, 3, 32, 32)
        with unchanged(model):
            found = costs(model, image)
        conv, head = found.of(LayerRef("0")), found.of(LayerRef("5"))
        assert conv is not None
        assert head is not None
        assert (conv.parameters, conv.memory) == (12 * 28, 12 * 16 * 16 * 4)
        assert conv.mult_adds == 12 * 28 * 16 * 16
        assert (head.parameters, head.memory) == (12 * 4 + 4, 16)
        assert found.total is not None
        assert found.total.parameters == sum(one.numel() for one in model.parameters())
        assert not found.remark

    def test_each_call_of_a_layer_and_torchinfo_keeps_no_model(self) -> None:
        from torchinfo import torchinfo  # noqa: PLC0415 - looked into

        before = dict(torchinfo._cached_forward_pass)
        found = costs(loops(), torch.randn(1, 3, 8, 8))
        assert torchinfo._cached_forward_pass == before
        assert found.of(LayerRef("0", 1)) == found.of(LayerRef("0", 2))
        assert found.of(LayerRef("0", 3)) is None

    @pytest.mark.parametrize("error", [ValueError("not today"), KeyboardInterrupt()])
    def test_if_torchinfo_fails_there_is_a_remark_and_no_number(self, error: BaseException) -> None:
        def stop(*_: object) -> None:
            raise error

        model, image = loops().append(Net(stop)).train(), torch.randn(1, 3, 8, 8)
        interrupts = pytest.raises(KeyboardInterrupt) if isinstance(error, KeyboardInterrupt) else nullcontext()
        with unchanged(model), interrupts:
            found = costs(model, image)
            assert (dict(found.by_call), found.total) == ({}, None)
            assert "ValueError: not today" in found.remark

    def test_a_remark_says_that_the_count_for_tokens_is_too_low(self) -> None:
        model = nn.Sequential(nn.Flatten(2), nn.Linear(64, 8), nn.Flatten(), nn.Linear(24, 2))
        assert "token" in costs(model, torch.randn(1, 3, 8, 8)).remark

    def test_the_command_lists_them(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["layers", "--model", "demo-fair", "--verbose"]) == 0
        out = capsys.readouterr().out
        line = next(line for line in out.splitlines() if line.split()[0] == "features.1.0")
        assert "6.91k" in line
        assert "7.08M" in line
        assert "128 KiB" in line
        assert "101,332 parameters, 34.6M multiply-adds" in out
        assert "chosen" in next(line for line in out.splitlines() if line.startswith(">"))
