"""Export classifiers to ONNX with PyTorch's two exporters, and say what camkit does with each graph.

    python -m scripts.zoo.exported_graphs --state graphs.jsonl --markdown scripts/results/exported.md [FILE ...]

Each finished row is a line of the state file, and an interrupted run continues where it stopped. Each of 12 networks
with random weights is exported with the newer exporter (opset 18) and with the older one (opset 17), for any number of
pictures. Further files, such as ultralytics' exports, are loaded as they are. A row says how the graph runs, and how
far the module's outputs are from onnxruntime's at most, as a share of the largest, on other noise than that of camkit's
own comparison.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime
import torch

import camkit
from scripts.lab.lab_run import write_between
from scripts.zoo.exported import SIDE, built, kept, printed, said_by

MARK = "graphs"

NETWORKS = (
    *("resnet18", "mobilenet_v2", "mobilenet_v3_small", "squeezenet1_1", "densenet121", "efficientnet_b0"),
    *("shufflenet_v2_x0_5", "regnet_y_400mf", "convnext_tiny", "googlenet", "vit_b_32", "swin_t"),
)

EXPORTERS = {"newer exporter, opset 18": 18, "older exporter, opset 17": 17}

HEADS = ("file", "exported by", "what camkit does", "outputs differ by")


def export(name: str, file: Path, opset: int) -> None:
    """Write a network with the newer or the older exporter."""
    example, module = torch.randn(2, 3, SIDE, SIDE), built(name)
    if opset > EXPORTERS["older exporter, opset 17"]:
        torch.onnx.export(
            module,
            (example,),
            file,
            dynamo=True,
            opset_version=opset,
            dynamic_shapes=({0: "N"},),
            external_data=False,
            verbose=False,
        )
    else:
        torch.onnx.export(
            module,
            (example,),
            file,
            dynamo=False,
            opset_version=opset,
            input_names=["images"],
            dynamic_axes={"images": {0: "N"}},
        )


def row_of(file: Path, name: str, how: str) -> list[str]:
    """Return the row of a file."""
    try:
        loaded = camkit.load_model(str(file))
    except camkit.CamkitError as error:
        return [name, how, str(error).replace(str(file), "the file")[:300], ""]
    said = said_by(loaded.note)
    differs = f"{difference(file, loaded):.0e}" if "as a PyTorch module" in said else ""
    return [name, how, said, differs]


def difference(file: Path, loaded: camkit.LoadedModel) -> float:
    """Return how far a module's outputs are from onnxruntime's for noise, as a share of the largest of each output."""
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    (taken,) = session.get_inputs()
    usual = (1, 3, SIDE, SIDE)
    shape = [length if isinstance(length, int) else other for length, other in zip(taken.shape, usual, strict=True)]
    pictures = torch.rand(shape, generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        found = loaded.module(pictures)
    outputs: Sequence[torch.Tensor] = [found] if isinstance(found, torch.Tensor) else found
    expected = session.run(None, {taken.name: pictures.numpy()})
    pairs = zip(outputs, expected, strict=True)
    return max(float(np.abs(output.numpy() - right).max() / max(np.abs(right).max(), 1e-12)) for output, right in pairs)


def exported_row(name: str, how: str) -> list[str]:
    """Export a network, and return its row."""
    with tempfile.TemporaryDirectory() as folder:
        export(name, file := Path(folder) / "model.onnx", EXPORTERS[how])
        return row_of(file, name, how)


def main() -> None:
    """Print the table, and write it if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--state", type=Path, default=Path("graphs.jsonl"), metavar="FILE", help="the rows so far")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="the page to write the table into")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    jobs = {f"{file.name} ()": functools.partial(row_of, file, file.name, "") for file in options.files}
    jobs |= {f"{name} ({how})": functools.partial(exported_row, name, how) for how in EXPORTERS for name in NETWORKS}
    text = printed(HEADS, kept(options.state, jobs))
    if options.markdown is not None:
        write_between(options.markdown, MARK, text)


if __name__ == "__main__":
    main()
