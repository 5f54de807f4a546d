"""Loads TorchScript files (``.pt``, ``.ts``) as black boxes: scripted modules have no hooks."""

from __future__ import annotations

import warnings
import zipfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from camkit.errors import ModelError, as_error, brief
from camkit.models.black_box import FileBox
from camkit.models.from_file import COLOURS, described, extra_texts, file_to_read, refuse_code
from camkit.models.loaded import LoadedModel, Request
from camkit.models.modules import dtype_of


def load(request: Request) -> LoadedModel:
    """Load a TorchScript file, which camkit can run but not look into."""
    path = file_to_read(request)
    with as_error(ModelError, lambda error: f"{path} cannot be read as a TorchScript file ({brief(error)})"):
        metadata = _metadata(path)
        refuse_code(request, path, "TorchScript")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TorchScript is deprecated
            script = torch.jit.load(path, map_location="cpu").eval()
    kind = f"a TorchScript file, run without gradients by torch {version('torch')}"
    box = FileBox(
        lambda pictures: script(pictures.to(dtype_of(script))),
        sigmoid=_ends_in_sigmoid(script),
        reason="camkit cannot read the layers and gradients of a TorchScript file",
        way_out="export the model with torch.export and pass the .pt2 file",
    )
    return described(box, request, (None, COLOURS, None, None), kind, metadata)


_KEEPING = ("aten::to", "aten::clamp", "aten::clip", "aten::contiguous", "aten::clone", "aten::detach", "aten::float")
"""Operations after a sigmoid that leave its results as they are."""


def _ends_in_sigmoid(script: torch.jit.ScriptModule) -> bool:
    graph = script.inlined_graph  # the nodes live as long as it does
    node = next(graph.outputs()).node()
    while node.kind() in _KEEPING:
        node = next(node.inputs()).node()
    return str(node.kind()) in ("aten::sigmoid", "aten::sigmoid_")


def _metadata(path: Path) -> dict[str, Any]:
    """Return the texts beside a script, and refuse what is not TorchScript, such as state dicts."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if any(name.partition("/")[2] == "constants.pkl" for name in archive.namelist()):
                return extra_texts(archive)
    raise ModelError(
        f"{path} is not a TorchScript file; if it holds a state dict, name the network and pass the file as its weights"
    )
