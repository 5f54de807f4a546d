"""The stages that choose a layer, tested on recorded traces without running a network."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, replace

import pytest
import torch
from recorded import Recorded, load
from torch import Tensor

from camkit.layers.choose import Stages, choose
from camkit.layers.graph import Graph, Operation, contains
from camkit.layers.influence import ELSEWHERE, measure_influence
from camkit.layers.layouts import cells_of, grid_in, read_layouts
from camkit.layers.trace import Followed

EXPECTED = {
    "resnet18": ("layer4", "channels_first", (2, 2), 0),
    "vit": ("encoder.layers.encoder_layer_1.ln_1", "tokens", (4, 4), 1),
    "swin": ("permute", "channels_first", (8, 8), 0),
}


@pytest.fixture(params=list(EXPECTED))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def run(recorded: Recorded):
    readings = read_layouts(recorded.trace, recorded.places)
    return choose(Stages(recorded.trace, readings, measure_influence(recorded.trace, readings, recorded.gradients)))


def reading_of(name: str, readings):
    return next(reading for call, reading in readings.items() if call.name == name)


def test_all_stages_together_choose_the_layer(name: str) -> None:
    layer = run(load(name)).chosen()
    assert (layer.name, layer.layout.kind, layer.layout.grid, layer.layout.prefix) == EXPECTED[name]
    assert layer.size == (64, 64)
    assert layer.sure


def test_a_stage_returns_the_same_result_for_the_same_record(name: str) -> None:
    first, second = load(name), load(name)
    readings = [list(read_layouts(recorded.trace, recorded.places).values()) for recorded in (first, second)]
    assert readings[0] == readings[1]
    assert run(first) == run(second)


def test_records_are_frozen(name: str) -> None:
    trace = load(name).trace
    for record, attribute in ((trace, "size"), (trace.calls[0], "name"), (trace.graph[0], "kind")):
        with pytest.raises(FrozenInstanceError):
            setattr(record, attribute, None)


def test_cells_of_convolutions_are_not_followed() -> None:
    recorded = load("resnet18")
    moved = [call for call in recorded.trace.calls if not call.kept and call.output is not None]
    assert not [call for call in moved if call.name.startswith("layer")]
    assert not recorded.followed.keys() & {call.key for call in recorded.trace.calls if call.kept}


def test_cells_that_lie_elsewhere_are_detected() -> None:
    """The places of the tokens are shuffled, as if the network had shuffled the tokens."""
    recorded = load("vit")
    order = torch.randperm(17, generator=torch.Generator().manual_seed(0))
    shuffled = {
        key: Followed({"tokens": found.places["tokens"][:, order]}, found.certain)
        for key, found in recorded.followed.items()
        if len(found.places.get("tokens", [[]])[0]) == len(order)
    }
    moved = replace(recorded, followed={**recorded.followed, **shuffled})
    reading = reading_of("encoder.layers.encoder_layer_1.ln_1", read_layouts(moved.trace, moved.places))
    assert reading.layout is None
    assert reading.elsewhere
    assert any(row.verdict == ELSEWHERE for row in run(moved).rows)


def test_tokens_that_were_not_followed_are_unsure() -> None:
    recorded = load("vit")
    lost = {key: Followed({}, certain=True) for key in recorded.followed}
    assert not run(replace(recorded, followed=lost)).chosen().sure
    readings = read_layouts(recorded.trace, lambda calls, _: dict.fromkeys(calls, Followed({}, certain=False)))
    reading = reading_of("encoder.layers.encoder_layer_1.ln_1", readings)
    assert (reading.unsure, str(reading.layout)) == (True, "tokens 4x4 after 1")


def test_a_layer_without_influence_is_not_chosen() -> None:
    recorded = load("resnet18")
    last = next(call for call in recorded.trace.calls if call.name == "layer4")
    outputs = {call.output for call in recorded.trace.calls if call.name.startswith("layer4")}
    masks = {
        score: {number: mask & (number not in outputs) for number, mask in by_tensor.items()}
        for score, by_tensor in recorded.masks.items()
    }
    layer = run(replace(recorded, masks=masks)).chosen()
    assert last.name == "layer4"
    assert layer.name == "layer3"


def test_without_any_gradient_the_reason_says_so() -> None:
    decision = run(replace(load("resnet18"), masks={}))
    assert "its influence could not be measured" in decision.chosen().reason
    assert not decision.lasting


def test_a_graph_knows_each_operations_ancestors_and_origin() -> None:
    graph = Graph(
        (
            Operation("AccumulateGrad", is_input=True),
            Operation("AccumulateGrad"),
            Operation("ConvolutionBackward0", (0, 1)),
            Operation("MulBackward0", (1, None)),
            Operation("RoiAlignBackward", (2,)),
        )
    )
    assert [contains(graph.ancestors(2), number) for number in range(5)] == [True, True, True, False, False]
    assert graph.is_regional(4)
    assert not graph.is_regional(2)


def test_a_softmax_along_the_last_axis_is_attention() -> None:
    graph = Graph((Operation("ViewBackward0", (), is_input=True), Operation("SoftmaxBackward0", (0,), axis=2)))
    assert graph.is_attention(1, 3)
    assert not graph.is_attention(1, 4)
    assert not graph.is_attention(0, 3)


# --- the order of cells


def even_cells(side: int) -> Tensor:
    """Return the weights and the places of an even grid's cells, as positions are followed."""
    axis = (2 * torch.arange(side) + 1) / side - 1
    return torch.stack([torch.ones(side, side), *torch.meshgrid(axis, axis, indexing="ij")])


def reordered(cells: Tensor) -> dict[str, Tensor]:
    """Return the grid with its cells moved in several ways."""
    side = cells.shape[-1]
    found = {"transposed": cells.mT, "mirrored": cells.flip(2), "upside down": cells.flip(1)}
    found |= {f"rolled by {by}": cells.roll(by, 2) for by in range(1, side)}
    for place in range(side - 1):
        order = list(range(side))
        order[place : place + 2] = order[place : place + 2][::-1]
        found |= {f"columns from {place} swapped": cells[:, :, order], f"rows from {place} swapped": cells[:, order]}
    if side > 5:
        single, block, turned = cells.clone(), cells.clone(), cells.clone()
        single[:, 2, 2:4] = cells[:, 2, 2:4].flip(1)
        block[:, 2:5, 2:5] = cells[:, 2:5, 2:5].mT
        sine, cosine = math.sin(math.radians(20)), math.cos(math.radians(20))
        turned[1:] = torch.stack([cosine * cells[1] + sine * cells[2], cosine * cells[2] - sine * cells[1]])
        found |= {"two cells swapped": single, "block transposed": block, "turned by 20 degrees": turned}
    return found


def is_grid(cells: Tensor) -> bool:
    return grid_in("channels_first", cells) is not None


@pytest.mark.parametrize("side", [2, 3, 4, 7, 14, 28])
def test_cells_that_were_moved_are_not_in_order(side: int) -> None:
    cells = even_cells(side)
    assert is_grid(cells)
    assert is_grid(cells.repeat_interleave(2, 1).repeat_interleave(2, 2))
    if side > 5:
        at_the_edge = cells.clone()
        at_the_edge[2, -1] -= 0.8 / side  # 0.4 of a cell
        assert is_grid(at_the_edge)
    for name, moved in reordered(cells).items():
        assert not is_grid(moved), name


@pytest.mark.parametrize("shape", [(4, 4), (2, 7), (7, 2), (1, 5), (3, 5, 2)])
@pytest.mark.parametrize(("before", "after"), [(0, 0), (1, 0), (3, 2)])
def test_tokens_are_read_as_the_grid_that_they_come_from(shape: tuple[int, ...], before: int, after: int) -> None:
    axes = [(2 * torch.arange(side) + 1) / side - 1 for side in shape]
    places = torch.stack([torch.ones(shape), *torch.meshgrid(*axes, indexing="ij")]).flatten(1)
    rest = [torch.zeros(len(places), count) for count in (before, after)]
    layout, cells = grid_in("tokens", torch.cat([rest[0], places, rest[1]], 1))
    assert (layout.grid, layout.prefix) == (shape, before)
    assert torch.equal(cells.flatten(1), places)


def test_a_token_that_stands_for_the_whole_picture_is_not_one_of_its_patches() -> None:
    places = even_cells(4).flatten(1)
    whole = places.mean(1, keepdim=True)
    layout, _ = grid_in("tokens", torch.cat([whole, places, whole], 1))
    assert (layout.grid, layout.prefix) == ((4, 4), 1)


def test_channels_without_a_place_do_not_move_a_cell() -> None:
    assert is_grid(cells_of(0.6 * even_cells(4)))  # 60% of the channels are known
