"""A model together with its preprocessing and labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, get_args

import torch
from torch import nn
from torch.export import ExportedProgram

from camkit.errors import InputError
from camkit.types import Activation, Preprocess


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model together with its preprocessing and labels.

    Raises:
        InputError: the activation is unknown.

    Attributes:
        module: the network.
        name: the name it was loaded by, or its class.
        preprocess: turns a PIL picture into the model's input (C, H, W); None if it is unknown.
        labels: the names of the classes in the order of their indices; None if they are unknown.
        note: what the user should know about how the model was loaded.
        activation: turns logits into probabilities; None means softmax for several logits and sigmoid for one, and
            becomes "sigmoid" if the model's configuration says that a picture may have several labels.
        weights: the file or the name of the weights, if they were named.
        detects: True if it is known to be a detector, which returns boxes.
    """

    module: torch.nn.Module
    name: str
    preprocess: Preprocess | None = None
    labels: tuple[str, ...] | None = None
    note: str | None = None
    activation: Activation | None = None
    weights: str | None = None
    detects: bool = False

    def __post_init__(self) -> None:
        problem = getattr(getattr(self.module, "config", None), "problem_type", None)
        if self.activation is None and problem == "multi_label_classification":  # as Hugging Face's models say
            object.__setattr__(self, "activation", "sigmoid")
        if self.activation not in (None, *get_args(Activation)):
            raise InputError(f"activation must be one of {', '.join(get_args(Activation))}, not {self.activation!r}")

    def __repr__(self) -> str:
        """Return one line; the module's own text has a line for each layer."""
        classes = "" if self.labels is None else f", {len(self.labels)} labels"
        return f"<LoadedModel {self.name!r}: {type(self.module).__name__}{classes}>"


Loadable: TypeAlias = nn.Module | str | LoadedModel | ExportedProgram
"""What ``model=`` takes: a module, a name as ``camkit.load_model`` takes it, what that returned, or a program."""
