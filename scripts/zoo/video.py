"""Explain torchvision's video networks with random weights: is the map's grid that of the network's last stage?

    python -m scripts.zoo.video --markdown scripts/results/zoo_video.md

The true grid comes from the strides that the papers give. Noise in the first or the last frames must change the first
or the last slices of the map's cells most.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torchvision

import camkit
from scripts.zoo.zoo import capture, table, trained_like

FRAMES = 16

STRIDES: dict[str, tuple[int, int, int]] = {
    "mc3_18": (1, 16, 112),
    "r3d_18": (8, 16, 112),
    "r2plus1d_18": (8, 16, 112),
    "s3d": (8, 32, 224),
    "swin3d_t": (2, 32, 224),
    "swin3d_s": (2, 32, 224),
    "swin3d_b": (2, 32, 224),
    "mvit_v1_b": (2, 32, 224),
    "mvit_v2_s": (2, 32, 224),
}
"""By network: the stride of its last stage over frames and over pixels, and the sides of its usual input."""


def follows_time(model: torch.nn.Module, clip: torch.Tensor, layer: str, slices: int) -> str:
    """Say whether noise in the first, or the last, half of the frames changes that half of the map's cells most."""
    if slices < 2:
        return "one slice"
    before, _ = capture(model, clip, layer)
    axis = next(axis for axis in range(1, before.dim()) if before.shape[axis] == slices) if before.dim() == 5 else 1
    changes = []
    for half in range(2):
        changed = clip.clone()
        part = changed.narrow(2, half * FRAMES // 2, FRAMES // 2)
        part.copy_(torch.randn(part.shape, generator=torch.Generator().manual_seed(3)))
        change = (capture(model, changed, layer)[0] - before).abs()
        if before.dim() == 3:  # tokens, the class token first
            change = change[:, change.shape[1] % slices :].unflatten(1, (slices, -1))
        first, last = change.movedim(axis, 0).flatten(1).mean(1).chunk(2)
        changes.append(float(first.mean() / last.mean()))
    return "yes" if changes[0] > changes[1] else "no"


def look(name: str) -> list[str]:
    """Return the row of one network."""
    in_time, in_space, side = STRIDES[name]
    torch.manual_seed(0)
    model = torchvision.models.get_model(name, weights=None)
    clip = torch.randn(1, 3, FRAMES, side, side, generator=torch.Generator().manual_seed(1))
    model = trained_like(model, torch.cat([clip, clip.flip(2)]))
    explainer = camkit.Explainer(model)
    found = explainer(clip[0])
    deepest = explainer.using("gradcam")(clip[0])
    truth = (FRAMES // in_time, side // in_space, side // in_space)
    grid = tuple(deepest.raw.shape)
    right = "right" if grid == truth and abs(found.raw).max() > 0 else "wrong"
    time = follows_time(model, clip, deepest.layer, grid[0])
    return [
        name,
        f"`{deepest.layer}`",
        *("x".join(map(str, of)) for of in (grid, truth)),
        time,
        f"{found.method}",
        right,
    ]


def main() -> None:
    """Explain the networks and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--markdown", type=Path, default=None, help="the page to write")
    parser.add_argument("--only", nargs="+", choices=STRIDES, default=list(STRIDES), help="explain only these networks")
    options = parser.parse_args()
    rows = []
    for name in options.only:
        rows.append(look(name))
        print(*rows[-1], flush=True)
    heads = ("network", "layer", "grid", "truth", "follows the frames", "auto", "status")
    if options.markdown is not None:
        text = (
            f"# torchvision's video networks\n\nResults of `scripts/zoo/video.py`: random weights, {FRAMES} frames.\n\n"
        )
        options.markdown.write_text(f"{text}{table(heads, rows)}\n")


if __name__ == "__main__":
    main()
