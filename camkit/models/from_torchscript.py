"""Loads TorchScript files (``.pt``, ``.ts``) as black boxes: scripted modules have no hooks."""

from __future__ import annotations

import re
import warnings
import zipfile
from pathlib import Path

import torch

from camkit.errors import ModelError
from camkit.models.black_box import BlackBox
from camkit.models.from_file import described, file_to_read, refuse_bomb
from camkit.models.loaded import LoadedModel
from camkit.models.request import Request
from camkit.models.weights import first_line

_WRITES = re.compile(rb"\b(?:torch|aten)\.(?:save|from_file)\b")
"""What a script could harm the machine with; everything else in TorchScript computes."""


def load(request: Request) -> LoadedModel:
    """Load a TorchScript file, which camkit can run but not look into."""
    path = file_to_read(request)
    _refuse_others(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TorchScript is deprecated
            script = torch.jit.load(path, map_location="cpu").eval()
    except Exception as error:  # a damaged file can make PyTorch raise anything
        raise ModelError(f"{path} cannot be read as a TorchScript file ({first_line(error)})") from error
    kind = "a TorchScript file, run without gradients"
    return described(BlackBox(torch.no_grad()(script.forward)), request, (None, 3, None, None), kind)


def _refuse_others(path: Path) -> None:
    """Refuse what is not TorchScript: state dicts and pickled modules have the same suffix.

    Raises:
        ModelError: the file is something else.
    """
    with path.open("rb") as file:
        names = []
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                refuse_bomb(archive, path)
                names = [name.partition("/")[2] for name in archive.namelist()]
                code = [archive.read(name) for name in archive.namelist() if name.endswith(".py")]
                if any(_WRITES.search(text) for text in code):
                    raise ModelError(f"{path} writes to files while it runs, which camkit does not allow")
    if "constants.pkl" not in names:
        raise ModelError(
            f"{path} is not a TorchScript file; if it holds a state dict, name the network and pass the file as its "
            "weights"
        )
