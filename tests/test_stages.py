"""The stages that choose a layer, each on traces that were recorded once: no network runs here."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest
import torch
from recorded import Recorded, load

from camkit.layers.choose import choose
from camkit.layers.graph import Graph, Operation, contains
from camkit.layers.influence import ELSEWHERE, measure_influence
from camkit.layers.layouts import read_layouts
from camkit.layers.location import locate

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


def test_a_stage_gives_the_same_for_the_same_record(name: str) -> None:
    first, second = load(name), load(name)
    assert read_layouts(first.trace) == read_layouts(first.trace) == read_layouts(second.trace)
    readings = read_layouts(first.trace)
    assert locate(first.trace, readings, first.changes) == locate(second.trace, readings, second.changes)
    assert run(first) == run(second)


def test_the_records_cannot_be_changed(name: str) -> None:
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
    asked = []
    locate(recorded.trace, read_layouts(recorded.trace), lambda calls: asked.extend(calls) or recorded.changes(calls))
    assert ("encoder.layers.encoder_layer_1.ln_1", 1) in asked


def test_cells_that_lie_elsewhere_are_found() -> None:
    """The tokens' measurements are put into another order, as if the network had shuffled them."""
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


def test_a_graph_knows_ancestors_and_origin() -> None:
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
def test_the_queries_of_attention_are_where_its_result_lies(inputs: tuple[int, int], rows: int) -> None:
    """softmax(Q K^T) V has the rows of Q, also if the product is taken of the transposed matrices."""
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
