import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from folders import write_masked
from PIL import Image
from torch import nn
from torch.nn import functional
from torchvision.transforms import v2

import camkit
from camkit.background import edits
from camkit.background.check import plan_check
from camkit.background.data import Item
from camkit.background.edits import BLUR, MOST_CANDIDATES, draw_partners
from camkit.background.experiment import Experiment, ceiling, energies, headroom, heat_in_cells, measure
from camkit.engine.heatmap import fuse_heatmaps, upsample
from camkit.images.regions import Shades
from camkit.types import Placement

AS_TENSOR = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])


def disc(size, centre, radius):
    rows, columns = torch.meshgrid(*(torch.arange(side) for side in size), indexing="ij")
    return (rows - centre[0]) ** 2 + (columns - centre[1]) ** 2 < radius**2


@pytest.mark.parametrize(
    "placement",
    [
        Placement(),
        Placement(((0.125, 0.875), (0.0, 0.75))),
        Placement(positions=((0.0, 13.0, 26.0, 39.0, 52.5), tuple(12.0 * cell for cell in range(7)))),
    ],
)
def test_energy_and_shuffled_baseline_equal_those_of_the_upsampled_maps(placement):
    torch.manual_seed(0)
    size, grid = (60, 84), (5, 7)
    raws = torch.randn(6, *grid)
    regions = [disc(size, torch.rand(2) * torch.tensor(size), 12 + 4 * n) for n in range(6)]
    maps = fuse_heatmaps([raws], size, placements=[placement]).double()
    table = torch.stack([torch.stack([heat[region].sum() / heat.sum() for heat in maps]) for region in regions])

    within = np.stack([heat_in_cells(region, grid, placement) for region in regions])
    everywhere = heat_in_cells(torch.ones(size, dtype=torch.bool), grid, placement)
    own, shuffled = energies(raws.relu().flatten(1).double().numpy(), within, everywhere)

    np.testing.assert_allclose(own, table.diagonal(), atol=1e-6)
    np.testing.assert_allclose(shuffled, table.fill_diagonal_(0).sum(1) / 5, atol=1e-6)


def test_a_single_map_has_no_baseline():
    own, shuffled = energies(np.ones((1, 4)), np.full((1, 4), 0.25), np.ones(4))

    assert own == pytest.approx([0.25])
    assert np.isnan(shuffled).all()


@pytest.mark.parametrize(("size", "grid"), [((224, 224), (7, 7)), ((13, 40), (5, 7)), ((5, 6), (9, 6))])
def test_cells_that_are_spread_evenly_have_the_averages_of_pytorchs_pooling(size, grid):
    region = disc(size, (size[0] / 2, size[1] / 3), min(size) / 3)

    best = upsample(functional.adaptive_avg_pool2d(region.float()[None], grid), size)[0].double()
    assert ceiling(region, grid) == float(best[region].sum() / best.sum())


def test_the_ceiling_is_that_of_the_cells_where_they_lie():
    """Four cells with a stride of 8 do not fill 40 pixels; the object is what the second one in each direction sees."""
    strides = Placement(positions=((3.5, 11.5, 19.5, 27.5),) * 2)
    region = torch.zeros(40, 40, dtype=torch.bool)
    region[8:16, 8:16] = True

    within, everywhere = (heat_in_cells(part, (4, 4), strides) for part in (region, torch.ones_like(region)))
    assert ceiling(region, (4, 4), strides) == pytest.approx(within[5] / everywhere[5])


def test_pointing_and_rank_of_a_map_with_one_maximum_and_of_a_plateau():
    heat = torch.zeros(100, 100)
    heat[50, 50:60] = torch.arange(10, 0, -1).float()
    region = torch.zeros(100, 100, dtype=torch.bool)
    region[50, 55:65] = True
    view = torch.ones(100, 100, dtype=torch.bool)
    view[:, :20] = False

    measures = measure(heat, region, view, (5, 5))

    assert measures["hit"]  # 5 pixels off
    assert measures["rank"] == 0.5
    assert measures["area"] == pytest.approx(10 / 8000)
    assert not measure(heat.roll(-40, 1), region, view, (5, 5))["hit"]
    plateau = torch.zeros(100, 100)
    plateau[50, :] = 1  # of which the part within 15 pixels of the region counts
    near = (torch.arange(100) >= 40) & (torch.arange(100) < 80)
    assert measure(plateau, region, view, (5, 5))["hit"] == pytest.approx(near.double().mean().item())


@pytest.mark.parametrize("levels", [1, 2, 5, 10**6])
def test_equal_pixels_share_the_last_places_and_no_position_precedes_another(levels):
    generator = torch.Generator().manual_seed(levels)
    heat = (torch.rand(12, 17, generator=generator) * levels).floor() * (torch.rand(12, 17, generator=generator) < 0.2)
    heat[3, 4] = levels
    region = disc((12, 17), (7, 9), 4)
    view = torch.ones_like(region)

    measures = measure(heat, region, view, (3, 4))

    orders = [torch.randperm(heat.numel(), generator=generator) for _ in range(4000)]
    ranked = [order[heat.flatten()[order].argsort(descending=True, stable=True)] for order in orders]
    within = region.flatten()[torch.stack(ranked)[:, : int(region.sum())]].double()
    assert measures["rank"] == pytest.approx(float(within.mean()), abs=0.01)
    turned = [measure(*(field.rot90(turns) for field in (heat, region, view)), (3, 4)) for turns in (0, 2)]
    flipped = measure(heat.flip(1), region.flip(1), view, (3, 4))
    for other in (*turned, flipped):
        assert (other["rank"], other["hit"]) == pytest.approx((measures["rank"], measures["hit"]))


def test_a_hole_is_filled_from_its_surroundings():
    picture = torch.linspace(0, 1, 64).expand(3, 64, 64)
    hole = torch.zeros(64, 64, dtype=torch.bool)
    hole[20:40, 20:40] = True
    damaged = torch.where(hole, 9.0, picture)

    filled = edits.fill_smoothly(damaged, hole)

    assert torch.equal(filled[:, ~hole], picture[:, ~hole])
    assert (filled[:, hole] - picture[:, hole]).abs().max() < 0.15
    assert torch.equal(edits.fill_smoothly(picture, torch.ones_like(hole)), torch.zeros(3, 64, 64)), "zero, not NaN"


def test_the_largest_rectangle_beside_the_hole_is_found():
    rng = np.random.default_rng(0)
    for _ in range(10):
        hole = torch.zeros(64, 64, dtype=torch.bool)
        for top, left, height, width in rng.integers(4, 40, (2, 4)):
            hole[top : top + height, left : left + width] = True
        best = 0  # found by trying every rectangle on a grid of two pixels
        cells = functional.max_pool2d(hole.float()[None, None], 2)[0, 0].bool().numpy()
        sums = np.pad(cells.cumsum(0).cumsum(1), ((1, 0), (1, 0)))
        for top in range(32):
            for left in range(32):
                below, corner = sums[top + 1 :], sums[top]
                blocked = below[:, left + 1 :] - corner[left + 1 :] - below[:, [left]] + corner[left]
                rows, columns = np.nonzero(blocked == 0)
                best = max(best, ((rows + 1) * (columns + 1)).max(initial=0))

        rectangle = edits.largest_rectangle(hole)

        assert rectangle is not None
        left, top, right, bottom = rectangle
        assert (right - left) * (bottom - top) == 4 * best
        assert not hole[top:bottom, left:right].any()


def test_tiling_uses_only_pixels_outside_the_hole():
    picture = torch.arange(64 * 64).float().reshape(1, 64, 64).expand(3, -1, -1)
    hole = torch.zeros(64, 64, dtype=torch.bool)
    hole[10:50, 20:64] = True

    filled = edits.fill_with_texture(picture, hole)

    assert filled is not None
    assert torch.equal(filled[:, ~hole], picture[:, ~hole])
    assert not set(filled[0, hole].tolist()) & set(picture[0, hole].tolist())


@pytest.mark.parametrize(("start", "end"), [(7, 28), (98, 119), (175, 203)])
def test_tiles_are_mirrored_again_and_again_up_to_the_borders(start, end):
    picture, hole = torch.arange(224.0).expand(3, 224, 224), torch.ones(224, 224, dtype=torch.bool)
    hole[:, start:end] = False

    row = edits.fill_with_texture(picture, hole)[0, 0]

    assert row.diff().abs().tolist() == [float((x - start) % (end - start) != 0) for x in range(1, 224)]


def test_without_background_there_is_no_tiling():
    picture, hole = torch.rand(3, 64, 64), torch.ones(64, 64, dtype=torch.bool)
    hole[0] = False

    assert torch.equal(edits.fill_with_texture(picture, hole), edits.fill_smoothly(picture, hole))


def test_pasting_keeps_the_region_and_replaces_the_rest():
    picture, background = torch.rand(3, 8, 8), torch.rand(3, 8, 8)
    region = torch.zeros(8, 8)
    region[2:4], region[4] = 1, 0.5
    shades, nothing = Shades(torch.zeros(3, 8, 8), torch.ones(3, 8, 8)), torch.zeros(8, 8, dtype=torch.bool)
    lender = edits.PreparedPicture(background, shades, silhouettes=nothing)

    found = edits.PreparedPicture(picture, shades, region).pasted_on(lender, edits.BLUR)

    assert torch.equal(found[:, 2:4], picture[:, 2:4])
    assert torch.equal(found[:, 5:], background[:, 5:])
    torch.testing.assert_close(found[:, 4], (picture[:, 4] + background[:, 4]) / 2)


def test_a_ring_takes_the_given_share_of_each_side():
    outer = edits.outer_ring((40, 60), 0.15)

    assert not outer[6:34, 9:51].any()
    assert outer.sum() == 40 * 60 - 28 * 42


def test_headroom_is_the_gain_of_perfect_maps_in_their_own_region():
    apart = [disc((48, 48), centre, 9) for centre in ((12, 12), (12, 36), (36, 12), (36, 36))]
    alike = [disc((48, 48), (24, 24 + shift), 9) for shift in (0, 1, -1, 0)]
    everywhere = heat_in_cells(torch.ones(48, 48, dtype=torch.bool), (6, 6), Placement())

    def mean_headroom(regions):
        within = np.stack([heat_in_cells(region, (6, 6), Placement()) for region in regions])
        return float(headroom(within, everywhere).mean())

    assert mean_headroom(apart) > 0.4
    assert mean_headroom(alike) < 0.05


def items(counts, groups=1):
    return [
        Item(f"{label}/{number}.png", Path("x.png"), label, f"{label}/{number // groups}")
        for label, count in counts.items()
        for number in range(count)
    ]


def test_partners_come_from_other_groups_and_the_right_classes():
    pictures = items({"cat": 210, "dog": 75, "fox": 3}, groups=3)

    for item, (same, other) in draw_partners(pictures, pictures, 2, 0).items():
        if item.label == "fox":
            assert not same  # all three are of one group
            continue
        assert len(same) >= 2
        assert len(other) >= 2
        for candidates in (*same, *other):
            assert len(set(candidates)) == len(candidates)
            assert len(candidates) == (MOST_CANDIDATES if candidates[0].label == "cat" else 3)  # of 70 and 25 groups
            assert len({candidate.label for candidate in candidates}) == 1
            assert all(candidate.group != item.group for candidate in candidates)
        assert {candidates[0].label for candidates in same} == {item.label}
        assert {candidates[0].label for candidates in other} == {"cat", "dog"} - {item.label}  # few foxes


def test_the_other_classes_take_turns_whatever_their_size():
    pictures = items({"cat": 200, "dog": 200, "fox": 10})

    drawn = draw_partners(pictures, pictures, 1, 0)

    first = Counter(drawn[item][1][0][0].label for item in pictures[:200])
    assert first == {"dog": 100, "fox": 100}
    others = [[candidates[0] for candidates in drawn[item][1]] for item in pictures[:200]]
    dogs = [of_picture[0] for of_picture in others if of_picture[0].label == "dog"]
    assert len(dogs) == len(set(dogs)) == 100  # none repeats before all have been first
    spares = [background for of_picture in others for background in of_picture[1:] if background.label == "dog"]
    assert len(set(spares[:200])) == 200


@pytest.mark.parametrize("wanted", [1, 2])
def test_every_picture_lends_its_background_as_often_as_the_others(wanted: int):
    pictures = items({"cat": 20, "dog": 20})
    drawn = draw_partners(pictures, pictures, wanted, 0)
    for part, label in enumerate(("cat", "dog")):
        served = [drawn[item][part][:wanted] for item in pictures[:20]]
        times = Counter(candidates[0] for of_picture in served for candidates in of_picture)
        assert {item.label for item in times} == {label}
        assert len(times) >= 18  # a picture never lends to itself, so one or two may be passed over
        assert max(times.values()) <= wanted + 1


def test_a_class_of_few_groups_and_backgrounds_outside_the_sample_serve_if_there_is_no_other():
    pictures = items({"cat": 20, "dog": 3})

    for sample in (pictures, pictures[:20]):
        drawn = draw_partners(sample, pictures, 1, 0)
        assert {candidate.label for candidates in drawn[pictures[0]][1] for candidate in candidates} == {"dog"}
    assert draw_partners(pictures[:20], pictures[:20], 1, 0)[pictures[0]][1] == ()


def test_the_background_serves_in_which_the_least_remains_filled(tmp_path):
    rows, columns = np.mgrid[:48, :48]
    for label in "ab":
        for number in range(20):
            centre = 13 if number < 10 else 34
            disc = (rows - 24) ** 2 + (columns - centre) ** 2 < 11**2
            pixels = np.where(disc, 250, 60 + 8 * number + 4 * (label == "b"))[..., None].repeat(3, 2)
            data = write_masked(tmp_path, f"{label}/{number}.png", pixels, disc)

    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)).eval()
    plan = plan_check(model, data, preprocess=AS_TENSOR, labels=["a", "b"])
    experiment = Experiment(plan)

    hidden: list[bool] = []
    for item in plan.sample:
        for arm in ("same", "other"):
            served = [edit.lender for edit in experiment.edits(item, 2) if (edit.arm, edit.fill) == (arm, BLUR)]
            assert len(set(served)) == 2
            own = int(Path(item.name).stem) < 10
            hidden += [(int(Path(name).stem) < 10) == own for name in served]  # by a disc at the same place
    assert np.mean(hidden) > 0.65  # each candidate is at the same place half of the time, and 2 are drawn


def test_holes_of_pictures_with_many_channels_are_filled():
    picture, hole = torch.rand(6, 100, 100), disc((100, 100), (50, 50), 45)

    filled = edits.fill_smoothly(picture, hole)

    parts = [edits.fill_smoothly(picture[start : start + 3], hole) for start in (0, 3)]
    torch.testing.assert_close(filled, torch.cat(parts))


def write_crosses(folder, count=8):
    """Write red and blue pictures with a white diagonal cross, whose box is nearly the whole picture, and its masks."""
    rng = np.random.default_rng(0)
    rows, columns = np.indices((64, 64))
    cross = (np.abs(rows - columns) < 4) | (np.abs(rows + columns - 63) < 4)
    for name, colour in (("red", (200, 40, 40)), ("blue", (40, 40, 200))):
        for number in range(count):
            picture = np.clip(colour + rng.normal(0, 12, (64, 64, 3)), 0, 255)
            picture[cross] = 230
            write_masked(folder, f"{name}/{number}.png", picture, cross)
    return folder / "pictures"


@pytest.mark.extended
def test_a_gap_shows_on_objects_whose_boxes_fill_the_picture(tmp_path):
    reads_colour = nn.Sequential(
        nn.Conv2d(3, 2, 4, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 2)
    )
    with torch.no_grad():
        for layer in (reads_colour[0], reads_colour[4]):
            layer.weight.zero_()
            layer.bias.zero_()
        reads_colour[0].weight[0, 2] = reads_colour[0].weight[1, 0] = 1
        reads_colour[4].weight.copy_(torch.eye(2))
    options = {"preprocess": AS_TENSOR, "labels": ["blue", "red"], "config": {"check": {"layer": "1", "pastes": 1}}}

    result = camkit.check(reads_colour.eval(), write_crosses(tmp_path, 32), **options)

    assert result.overall.tested == 64
    assert all(gap.effect.value > 0.9 for gap in result.overall.gap.by_fill.values())
    assert not result.overall.sufficiency.by_fill, "without the boxes nothing is left of the pictures"
    assert result.verdict == "FAIL"


def test_the_heat_is_that_of_the_default_method(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.ReLU()),
        nn.Sequential(nn.Conv2d(8, 8, 4, 4), nn.ReLU()),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 2),
    ).eval()
    pictures, options = write_crosses(tmp_path), {"config": {"check": {"pastes": 1}}, "out": tmp_path / "report"}

    result = camkit.check(model, pictures, preprocess=AS_TENSOR, labels=["blue", "red"], **options)

    shown = next(row for row in result.images if row.status == "ok")
    alone = camkit.explain(model, pictures / shown.name, preprocess=AS_TENSOR, target=int(shown.label == "red"))
    region = np.asarray(Image.open(tmp_path / "masks" / shown.name)) > 0
    assert (result.method, result.layer) == (alone.method, alone.layer) == ("gradcam-sharpened", "0+1")
    assert shown.energy == pytest.approx(alone.heatmap[region].sum() / alone.heatmap.sum(), abs=1e-5)
    assert json.loads((tmp_path / "report" / "report.json").read_text())["method"] == "gradcam-sharpened"
