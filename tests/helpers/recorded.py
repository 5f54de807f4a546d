"""Traces recorded once from real networks, so that the stages that choose a layer can be tested without a network.

``python tests/recorded.py`` from the project's root records them again. A file holds the trace, the masks of the
non-zero gradients of each score, and where the cells come from that are followed.
"""

from __future__ import annotations

import dataclasses
import json
import lzma
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from camkit.layers.graph import Graph, Operation
from camkit.layers.trace import Convolution, Followed, Trace, TracedCall, traced

FOLDER = Path(__file__).parents[1] / "traces"

_LAST = 24
"""How many outputs have gradients in a record: only the last layers decide, and masks take space."""


@dataclasses.dataclass(frozen=True, eq=False)
class Recorded:
    """All that the stages read of a pass."""

    trace: Trace
    masks: dict[str, dict[int, Tensor]]
    followed: dict[tuple[str, int], Followed]

    def gradients(self, score: str, tensors: Sequence[int]) -> dict[int, Tensor | None]:
        """Return recorded masks instead of differentiating a score."""
        masks = self.masks.get(score, {})
        return {number: masks[number] for number in tensors if number in masks}

    def places(self, calls: Sequence[tuple[str, int]], _: tuple[str, int] | None) -> Mapping[tuple[str, int], Followed]:
        """Return recorded places instead of running another pass."""
        return {key: self.followed[key] for key in calls if key in self.followed}


def record(model: nn.Module, image: Tensor) -> Recorded:
    """Record a pass, with all gradients and places that the stages may request."""
    with traced(model, image) as live:
        outputs = [call.output for call in live.trace.calls if call.output is not None][-_LAST:]
        masks = {}
        for score in ("best", "mixture", "head"):
            by_tensor = live.gradients(score, list(dict.fromkeys(outputs)))
            masks[score] = {number: mask for number, mask in by_tensor.items() if mask is not None}
        moved = [call.key for call in live.trace.calls if call.output is not None and not call.kept]
        return Recorded(live.trace, masks, live.places(moved, None))


def load(name: str) -> Recorded:
    """Read a recorded pass."""
    data = json.loads(lzma.decompress((FOLDER / f"{name}.json.xz").read_bytes()))
    rows = [{**row, "inputs": tuple(row["inputs"])} for row in data["graph"]]
    trace = Trace(
        tuple(data["size"]),
        tuple(map(_call, data["calls"])),
        Graph(tuple(Operation(**row) for row in rows)),
        data["detects"],
        data["scored"],
        data["maps"],
    )
    masks = {
        score: {int(number): _mask(*packed) for number, packed in by_tensor.items()}
        for score, by_tensor in data["masks"].items()
    }
    followed = {
        (name, number): Followed({kind: torch.tensor(values) for kind, values in places.items()}, certain)
        for name, number, places, certain in data["followed"]
    }
    return Recorded(trace, masks, followed)


def save(name: str, recorded: Recorded) -> None:
    """Write a recorded pass."""
    trace = recorded.trace
    data = {
        "size": trace.size,
        "calls": [dataclasses.asdict(call) for call in trace.calls],
        "graph": [dataclasses.asdict(operation) for operation in trace.graph.operations],
        "detects": trace.detects,
        "scored": trace.scored,
        "maps": trace.maps,
        "masks": {
            score: {number: _packed(mask) for number, mask in by_tensor.items()}
            for score, by_tensor in recorded.masks.items()
        },
        "followed": [
            [*key, {kind: _rounded(values) for kind, values in found.places.items()}, found.certain]
            for key, found in recorded.followed.items()
        ],
    }
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.json.xz").write_bytes(lzma.compress(json.dumps(data).encode(), preset=9))


def _tuple(values: Any) -> Any:
    return None if values is None else tuple(values)


def _call(row: dict[str, Any]) -> TracedCall:
    convolution = row.pop("convolution")
    lists = {key: tuple(value) for key, value in row.items() if isinstance(value, list)}
    geometry = None
    if convolution is not None:
        geometry = Convolution(
            **{key: _tuple(value) if isinstance(value, list) else value for key, value in convolution.items()}
        )
    return TracedCall(**{**row, **lists}, convolution=geometry)


def _packed(mask: Tensor) -> tuple[list[int], str]:
    return list(mask.shape), np.packbits(mask.numpy()).tobytes().hex()


def _mask(shape: list[int], packed: str) -> Tensor:
    bits = np.unpackbits(np.frombuffer(bytes.fromhex(packed), np.uint8), count=int(np.prod(shape)))
    return torch.from_numpy(bits.astype(bool).reshape(shape))


def _rounded(values: Tensor) -> Any:
    return np.char.mod("%.6g", values.double().numpy()).astype(float).tolist()


def _networks() -> dict[str, Callable[[], nn.Module]]:
    from torchvision.models import resnet18, swin_transformer, vision_transformer  # noqa: PLC0415

    def vit() -> nn.Module:
        model = vision_transformer.VisionTransformer(
            64, 16, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32, num_classes=5
        )
        nn.init.normal_(model.heads.head.weight)
        return model

    return {
        "resnet18": lambda: resnet18(num_classes=5),
        "vit": vit,
        "swin": lambda: swin_transformer.SwinTransformer([4, 4], 16, [2, 2], [2, 4], [2, 2], num_classes=5),
    }


def main() -> None:
    """Record all networks."""
    for name, build in _networks().items():
        torch.manual_seed(0)
        save(name, record(build().eval(), torch.randn(1, 3, 64, 64)))


if __name__ == "__main__":
    main()
