"""The branches that a network ends in, beside the one that is explained."""

from __future__ import annotations

from camkit.layers.lineage import ancestors, behind
from camkit.layers.trace import Call


def twins(best: Call, fit: list[Call]) -> list[Call]:
    """Return the branches beside the best layer, of its grid and not computed from one another, and that layer.

    None where nothing is beside it: most networks end in one place.
    """
    beside: dict[int, Call] = {}
    for call in reversed(ends_beside(best, fit)):
        if call.layout is not None and best.layout is not None and call.layout.grid == best.layout.grid:
            beside.setdefault(id(call.output), call)
    return [*reversed(beside.values()), best] if beside else []


def shared(branches: list[Call], calls: list[Call], fit: list[Call]) -> Call | None:
    """Return what the branches were computed from, where each is a single layer, such as an attention pool's keys.

    None where they are longer: then none of them can stand for the others.
    """
    if not branches:
        return None
    ways = [ancestors(call.node) for call in branches]
    common = set.intersection(*ways)
    known = [call for call in fit if call.name and call.channels > 1 and call.is_among(common)]
    if not known:
        return None
    own = [way - common for way in ways]
    weighted = [call for call in calls if any(True for _ in call.module.parameters(recurse=False))]
    longest = max(len({call.module for call in weighted if call.is_among(way)}) for way in own)
    return max(known, key=lambda call: call.finished) if longest <= 1 else None


def ends_beside(best: Call, fit: list[Call]) -> list[Call]:
    """Return the last layers that the score depends on as well, on none of the ways to or from the best one."""
    if best.node is None:
        return []
    before = ancestors(best.node)
    others = [call for call in fit if call.name and call.channels > 1 and call.output is not best.output]
    others = [call for call in others if call.node is not None and not call.is_among(before)]
    on_the_way = ancestors(*(node for call in others if call.node is not None for node in behind(call.node)))
    return [call for call in others if not call.is_among(on_the_way) and best.node not in ancestors(call.node)]
