"""Models with several inputs or outputs: one input is the picture, the others are held fixed; one output is used."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from camkit.errors import InputError, ModelError, brief, did_you_mean


class Adapter(nn.Module):
    """A model as one that takes pictures alone, and returns what camkit reads.

    Args:
        model: the model.
        run: returns the output of the model for pictures (N, C, *size).
        held: what else ``run`` takes, by name; it moves with the model to another device.

    Attributes:
        spatial_axes: how many axes the input has after the channels, if the model's first convolution does not say it.
    """

    spatial_axes: int | None = None

    def __init__(self, model: nn.Module, run: Callable[..., Any], **held: Tensor) -> None:
        super().__init__()
        self.model = model
        self._run, self._held = run, tuple(held)
        for name, value in held.items():
            self.register_buffer(name, value)

    def forward(self, pictures: Tensor) -> Any:
        """Return the output for a batch of pictures."""
        return self._run(self.model, pictures, **{name: getattr(self, name) for name in self._held})


class HeldInputs(nn.Module):
    """Runs a model on pictures and on other inputs that are the same for each of them.

    Args:
        model: the model.
        others: its other arguments by name. A tensor whose first axis has one element is repeated for each picture of
            a batch, also inside lists and dictionaries; everything else is passed on as it is.
        picture: the name of the argument for the picture; None passes it first.
    """

    def __init__(self, model: nn.Module, others: Mapping[str, Any], picture: str | None = None) -> None:
        super().__init__()
        self.model = model
        self.others = dict(others)
        self.picture = picture

    def forward(self, pictures: Tensor) -> Any:
        """Return the model's output for a batch of pictures.

        Raises:
            InputError: the output has a row for each row of an input instead of one for each picture.
        """

        def beside(value: Tensor) -> Tensor:
            value = value.to(pictures.device)
            return value.expand(len(pictures), *value.shape[1:]) if value.shape[:1] == (1,) else value

        others = tree_map_only(Tensor, beside, self.others)
        named = others if self.picture is None else {self.picture: pictures, **others}
        output = self.model(pictures, **named) if self.picture is None else self.model(**named)
        rows = next((len(leaf) for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.dim()), None)
        for name, value in self.others.items():
            if isinstance(value, Tensor) and value.dim() > 1 and rows == len(value) != len(pictures):
                raise InputError(
                    f"the input {name!r} has {rows} rows, and so does the model's output; pass one row, of shape "
                    f"{(1, *value.shape[1:])}, which camkit repeats for each picture"
                )
        return output


class OneOutput(nn.Module):
    """Returns one of several outputs of a model.

    Args:
        model: the model, which returns a dictionary, a tuple, a list, or an object with attributes.
        name: the key, the attribute, or the index, from 0.
    """

    def __init__(self, model: nn.Module, name: str | int) -> None:
        super().__init__()
        self.model = model
        self.name = name

    def forward(self, pictures: Tensor) -> Any:
        """Return this output for a batch of pictures.

        Raises:
            ModelError: the model has no such output.
        """
        output: Any = self.model(pictures)
        named = dict(output) if isinstance(output, Mapping) else {}
        if isinstance(output, (tuple, list)):
            named = {str(place): value for place, value in enumerate(output)}
            named |= output._asdict() if hasattr(output, "_asdict") else {}
        elif not named:
            named = dict(getattr(output, "__dict__", {}))
        keys = {str(key): key for key in named}
        if str(self.name) not in keys:
            has = f"; it has {', '.join(map(repr, keys))}" if keys else ""
            raise ModelError(f"the model has no output {str(self.name)!r}: it returned a {type(output).__name__}{has}")
        return named[keys[str(self.name)]]


def adapted(model: nn.Module, others: Any = None, picture: Any = None, output: str | int | None = None) -> nn.Module:
    """Return a model that holds its other inputs and returns one of its outputs; the model itself if none is named.

    Raises:
        InputError: ``others`` is not a dictionary of names, ``picture`` is not a name or is one of the others, or the
            model has no such argument.
    """
    names = [] if others is None else others
    if others is not None and not (isinstance(others, Mapping) and all(isinstance(name, str) for name in others)):
        raise InputError(
            f"inputs must be a dictionary of the model's other arguments by name, not {brief(repr(others))}"
        )
    if picture is not None and (not isinstance(picture, str) or not picture):
        raise InputError(f"picture must be the name of the model's argument for the picture, not {picture!r}")
    if others is not None or picture is not None:
        parameters = inspect.signature(model.forward, follow_wrapped=False).parameters
        first = picture or next(iter(parameters), None)
        if first in names:
            raise InputError(
                f"{first!r} is the argument for the picture, but also among the other inputs; leave it out of inputs, "
                "or name the picture's argument with picture=..."
            )
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        for name in () if takes_any else [*names, *([picture] if picture else [])]:
            if name not in parameters:
                near = did_you_mean(name, parameters)
                raise InputError(f"the model's forward has no argument {name!r}; it has {', '.join(parameters)}{near}")
        model = HeldInputs(model, others or {}, picture)
    return model if output is None else OneOutput(model, output)
