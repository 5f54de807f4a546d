"""The stages that choose a layer, tested on recorded traces without running a network."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, replace

import pytest
import torch
from recorded import Recorded, load
from torch import Tensor

from camkit.layers.choose import choose
from camkit.layers.graph import Graph, Operation, contains
from camkit.layers.influence import ELSEWHERE, measure_influence
from camkit.layers.layouts import read_layouts
from camkit.layers.location import _are_in_order, _is_shown, locate
from camkit.layers.trace import Followed
from camkit.types import Layout

EXPECTED = {
    "resnet18": ("layer4", "channels_first", (2, 2), 0),
    "vit": ("encoder.layers.encoder_layer_1.ln_1", "tokens", (4, 4), 1),
    "swin": ("permute", "channels_first", (8, 8), 0),
}


@pytest.fixture(params=list(EXPECTED))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def run(recorded: Recorded, readings=None):
    readings = readings or read_layouts(recorded.trace)
    located = locate(recorded.trace, readings, recorded.changes)
    return choose(recorded.trace, located, measure_influence(recorded.trace, located, recorded.gradients))


def reading_of(recorded: Recorded, name: str, readings):
    return next(reading for call, reading in zip(recorded.trace.calls, readings, strict=True) if call.name == name)


def test_all_stages_together_choose_the_layer(name: str) -> None:
    layer = run(load(name)).chosen()
    assert (layer.name, layer.layout.kind, layer.layout.grid, layer.layout.prefix) == EXPECTED[name]
    assert layer.size == (64, 64)
    assert layer.sure


def test_a_stage_returns_the_same_result_for_the_same_record(name: str) -> None:
    first, second = load(name), load(name)
    assert read_layouts(first.trace) == read_layouts(first.trace) == read_layouts(second.trace)
    readings = read_layouts(first.trace)
    assert locate(first.trace, readings, first.changes) == locate(second.trace, readings, second.changes)
    assert run(first) == run(second)


def test_records_are_frozen(name: str) -> None:
    trace = load(name).trace
    for record, attribute in ((trace, "size"), (trace.calls[0], "name"), (trace.graph[0], "kind")):
        with pytest.raises(FrozenInstanceError):
            setattr(record, attribute, None)


def test_nothing_is_measured_for_a_network_of_convolutions() -> None:
    recorded = load("resnet18")
    readings = read_layouts(recorded.trace)

    def measured(calls):
        raise AssertionError(f"{calls} were measured")

    moved = [call.name for call in recorded.trace.calls if not call.kept and call.output is not None]
    assert not [name for name in moved if name.startswith("layer")]
    assert locate(recorded.trace, readings, measured) == readings


def test_tokens_are_measured() -> None:
    recorded = load("vit")
    measured = []
    locate(
        recorded.trace, read_layouts(recorded.trace), lambda calls: measured.extend(calls) or recorded.changes(calls)
    )
    assert ("encoder.layers.encoder_layer_1.ln_1", 1) in measured


def test_cells_that_lie_elsewhere_are_detected() -> None:
    """The measurements of the tokens are shuffled, as if the network had shuffled the tokens."""
    recorded = load("vit")
    order = torch.randperm(17, generator=torch.Generator().manual_seed(0))
    shuffled = {
        key: tuple(
            {kind: values[order] if len(values) == 17 else values for kind, values in half.items()} for half in halves
        )
        for key, halves in recorded.profiles.items()
        if key[0].startswith("encoder")
    }
    moved = replace(recorded, profiles={**recorded.profiles, **shuffled})
    located = locate(moved.trace, read_layouts(moved.trace), moved.changes)
    reading = reading_of(moved, "encoder.layers.encoder_layer_1.ln_1", located)
    assert reading.layout is None
    assert reading.elsewhere
    assert any(row.verdict == ELSEWHERE for row in run(moved).rows)


def test_without_a_measurement_tokens_are_unsure() -> None:
    recorded = load("vit")
    located = locate(recorded.trace, read_layouts(recorded.trace), lambda _: None)
    assert reading_of(recorded, "encoder.layers.encoder_layer_1.ln_1", located).unsure
    silent = replace(recorded, profiles={})
    assert not run(silent).chosen().sure


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
            Operation("ConvolutionBackward0", (0, 1), (1, 4, 8, 8), kernel=9),
            Operation("MulBackward0", (1, None)),
            Operation("RoiAlignBackward", (2,)),
        )
    )
    assert [contains(graph.ancestors(2), number) for number in range(5)] == [True, True, True, False, False]
    assert [graph.is_from_input(number) for number in range(5)] == [True, False, True, False, True]
    assert graph.is_learned(3)
    assert not graph.is_learned(None)
    assert graph.is_regional(4)
    assert not graph.is_regional(2)
    assert graph[2].is_spatial
    assert graph[2].moves_over_cells


@pytest.mark.parametrize(("inputs", "rows"), [((0, 1), 16), ((1, 0), 4)])
def test_the_result_of_attention_has_the_positions_of_its_queries(inputs: tuple[int, int], rows: int) -> None:
    """softmax(Q K^T) V has the rows of Q, even if the product uses the transposed matrices."""
    graph = Graph(
        (
            Operation("ViewBackward0", (), is_input=True),
            Operation("ViewBackward0"),
            Operation("BmmBackward0", (0, 1), (2, 16, 4)),
            Operation("SoftmaxBackward0", (2,), (2, rows, 20 - rows), axis=2),
            Operation("BmmBackward0", (3, 1), (2, rows, 8)),
        )
    )
    assert graph.queries_of(4) == [inputs[0]]
    assert graph.is_attention(3, 3)
    assert not graph.is_attention(3, 4)


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


@pytest.mark.parametrize("side", [2, 3, 4, 7, 14, 28])
def test_cells_that_were_moved_are_not_in_order(side: int) -> None:
    cells, layout = even_cells(side), Layout("channels_first", (side, side))
    assert _are_in_order(cells, layout)
    enlarged = cells.repeat_interleave(2, 1).repeat_interleave(2, 2)
    assert _are_in_order(enlarged, Layout("channels_first", (2 * side, 2 * side))) is not False
    if side > 5:
        at_the_edge = cells.clone()
        at_the_edge[2, -1] -= 0.8 / side  # 0.4 of a cell
        assert _are_in_order(at_the_edge, layout)
    for name, moved in reordered(cells).items():
        assert _are_in_order(moved, layout) is False, name


def test_channels_without_a_place_do_not_move_a_cell() -> None:
    cells, layout = even_cells(4), Layout("channels_first", (4, 4))
    assert _is_shown(layout, Followed({"channels_first": 0.6 * cells}, True))  # 60% of the channels are known
