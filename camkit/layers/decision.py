"""What ``choose.py`` decided about a model's layers: which one to explain, and what speaks against the others."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from camkit.errors import LayerError, advice, listing_layers
from camkit.layers.influence import ELSEWHERE, NOT_MEASURED
from camkit.layers.layouts import LayoutReadings
from camkit.layers.trace import Trace, TracedCall
from camkit.types import LayerRef, Layout, TargetLayer

_LISTED = 6
"""How many layers an error message lists: the last ones are the likely choices, and six fit on one line."""

UNSURE = "; the position of its cells is not certain"


@dataclass(frozen=True)
class LayerRow:
    """What is known about one call of one module.

    Attributes:
        ref: the module's name, and the number of the call if the module runs several times.
        kind: the name of its class.
        shape: the shape of its output; None if it returned no maps.
        layout: how the output is laid out; None if it has no grid.
        verdict: why it cannot be explained; empty if it can.
        unsure: True if the position of its cells is not certain.
    """

    ref: LayerRef
    kind: str
    shape: tuple[int, ...] | None
    layout: Layout | None
    verdict: str = ""
    unsure: bool = False


class Levels(tuple[TargetLayer, ...]):
    """The grids of a detector's boxes, from the finest to the coarsest: the maps of all are added."""


@dataclass(frozen=True)
class Decision:
    """The layer to explain, and what is known about the others, for one input size.

    Attributes:
        size: the input size, (H, W), (L,) or (D, H, W).
        rows: one for each call of a module, in the order in which the calls finished.
        layer: the layer to explain; None if there is none, or if several are equally deep.
        equals: the layers that are equally deep, none of them computed from another.
        lasting: True if it may be remembered. It is false if the influence could not be measured, as with a head of
            zeros.
        of_weights: True if it must be made again when the weights change: a gate of zero may hide a layer, or some
            cells could not be located.
        of_picture: True if it holds for this picture only, because the model looks at the picture to choose its way.
        any_target: True if it holds for any target, because all outputs of the model are computed from the layer.
        finer: a layer before it that carries the whole score, and whose grid is finer; None if there is none, or if the
            layer's own grid is fine enough.
        levels: a layer of each grid, for a detector whose boxes come from several; None for other models.
        at_head: True if the levels are the inputs of the detector's head, and their cells have boxes.
    """

    size: tuple[int, ...]
    rows: tuple[LayerRow, ...]
    layer: TargetLayer | None = None
    equals: tuple[LayerRow, ...] = ()
    lasting: bool = True
    of_weights: bool = False
    of_picture: bool = False
    any_target: bool = False
    finer: TargetLayer | None = None
    levels: Levels | None = None
    at_head: bool = False

    def chosen(self) -> TargetLayer:
        """Return the layer to explain.

        Raises:
            LayerError: there is none, or several are equally deep; the message lists the candidates.
        """
        if self.equals and self.lasting:
            listed = ", ".join(f"{row.ref} {row.shape}" for row in self.equals)
            names = ", ".join(repr(str(row.ref)) for row in self.equals)
            options = " ".join(f"--layer {row.ref}" for row in self.equals)
            raise LayerError(
                f"the model ends in {len(self.equals)} branches that are equally deep: {listed}; name one of them, or "
                f"fuse them all with {advice(f'target_layer=[{names}]', options)}"
            )
        if self.layer is None and any(row.verdict == ELSEWHERE for row in self.rows):
            raise LayerError(
                "in every layer the cells lie elsewhere in the input than their shape suggests, as if the model crops, "
                "mirrors or reorders its input; explain the network inside the model, with pictures that are already "
                "prepared, or use 'occlusion' or 'rise', which need no layer"
            )
        if self.layer is None:
            spatial = [row for row in self.rows if row.layout is not None and row.ref.name]
            candidates = ", ".join(f"{row.ref} {row.shape}" for row in spatial[-_LISTED:])
            name_one = f", or name one with {advice('target_layer', '--layer')}: {candidates}" if candidates else ""
            reason = "no layer with a spatial grid gets a gradient from the score"
            if not any(row.ref.name and row.shape for row in self.rows):
                reason = (
                    "no module inside the model returned feature maps (a Keras model's layers do not run as PyTorch "
                    "modules, nor do those of an ExportedProgram's module(): pass the ExportedProgram itself)"
                )
            raise LayerError(
                f"{reason}, so camkit cannot choose a layer; use 'occlusion' or 'rise', which need none{name_one}"
            )
        return self.layer

    def of_tokens(self) -> TargetLayer:
        """Return a layer whose output has the tokens of a transformer, in the layout that most layers share.

        Raises:
            LayerError: as for ``chosen``, if no layer has tokens.
        """
        rows = [row for row in self.rows if row.layout is not None and row.layout.has_tokens and row.ref.name]
        sure = [row for row in rows if not row.unsure]
        if not sure and any(row.verdict == ELSEWHERE for row in self.rows):
            raise LayerError("the tokens are in another order than the cells of a grid")
        rows = sure or rows
        if not rows:
            return self.chosen()
        (layout, _), *_ = Counter(row.layout for row in rows).most_common(1)
        last = next(row for row in reversed(rows) if row.layout == layout)
        return self.named(last.ref, "its output has the tokens")

    def stages(self) -> tuple[TargetLayer, ...]:
        """Return the last layers of the four coarsest grids, the layer to explain among them, in execution order.

        Of the layers with one grid, those with the shortest names count, which are the model's own blocks.

        Raises:
            LayerError: as for ``chosen``.
        """
        chosen = self.chosen()
        by_grid: dict[tuple[int, ...], LayerRef] = {}
        for row in self.rows:
            if row.ref == chosen.ref:
                break
            usable = row.verdict in ("", NOT_MEASURED) and row.ref.name and not row.unsure
            if not usable or row.layout is None or chosen.layout is None or row.layout.grid == chosen.layout.grid:
                continue
            kept = by_grid.get(row.layout.grid)
            if kept is None or row.ref.name.count(".") <= kept.name.count("."):
                by_grid[row.layout.grid] = row.ref
        reason = f"the last layer of its grid; {chosen.reason}"
        # With the chosen one, as many grids as the usual networks have blocks.
        earlier = sorted(by_grid.items(), key=lambda item: -math.prod(item[0]))[-3:]
        return (*(self.named(ref, reason) for _, ref in earlier), chosen)

    def named(self, ref: LayerRef, reason: str) -> TargetLayer:
        """Return the target layer for a layer that the caller named.

        Raises:
            LayerError: the layer's cells lie elsewhere in the input than its shape suggests.
        """
        row = next((row for row in self.rows if (row.ref.name, row.ref.call or 1) == (ref.name, ref.call or 1)), None)
        if row is not None and row.verdict == ELSEWHERE:
            other = f"another layer ({listing_layers()})" if self.layer is None else repr(str(self.layer.ref))
            raise LayerError(
                f"layer {str(row.ref)!r} returned shape {row.shape}, but its cells lie elsewhere in the input than "
                f"this shape suggests, as if the model shuffles, mirrors or crops them; choose {other}"
            )
        unsure = row is not None and row.unsure
        layout = None if row is None else row.layout
        return TargetLayer(ref.name, ref.call, layout, self.size, reason + UNSURE * unsure, sure=not unsure)


def layer_at(trace: Trace, readings: LayoutReadings, call: TracedCall, reason: str, **more: Any) -> TargetLayer:
    """Return the target layer for an output, under the shortest name of a module that returns it."""
    ref = trace.ref_of(call)
    return TargetLayer(ref.name, ref.call, readings[call].layout, trace.size, reason, **more)


def rows_of(trace: Trace, readings: LayoutReadings, verdicts: Mapping[TracedCall, str]) -> tuple[LayerRow, ...]:
    """Return a row for each call of a trace."""
    return tuple(
        LayerRow(
            trace.refs[call],
            call.kind,
            None if call.output is None else call.shape,
            reading.layout,
            verdicts[call],
            reading.unsure,
        )
        for call, reading in readings.items()
    )


def next_best(layers: Iterable[LayerRef], chosen: LayerRef) -> tuple[LayerRef, ...]:
    """Return the next best three layers, none inside another; parts of the chosen layer only if there is no other."""
    others = [ref for ref in layers if ref != chosen]
    outside = [ref for ref in others if not ref.name.startswith(f"{chosen.name}.")]
    listed: list[LayerRef] = []
    for ref in outside or others:
        if len(listed) < 3 and not any(f"{ref.name}.".startswith(f"{other.name}.") for other in listed):
            listed.append(ref)
    return tuple(listed)
