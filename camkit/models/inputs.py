"""Models with several inputs: one is the picture, and the others are held fixed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from camkit.errors import InputError


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
        """Return the model's output for a batch of pictures."""

        def beside(value: Tensor) -> Tensor:
            value = value.to(pictures.device)
            return value.expand(len(pictures), *value.shape[1:]) if value.shape[:1] == (1,) else value

        others = tree_map_only(Tensor, beside, self.others)
        if self.picture is None:
            return self.model(pictures, **others)
        return self.model(**{self.picture: pictures}, **others)


def with_inputs(model: nn.Module, others: Any, picture: Any) -> nn.Module:
    """Return a model that holds its other inputs; the model itself if none are named.

    Raises:
        InputError: ``others`` is not a dictionary of names, ``picture`` is not a name, or names one of the others.
    """
    if others is None and picture is None:
        return model
    if not isinstance(others or {}, Mapping) or not all(isinstance(name, str) for name in others or ()):
        raise InputError(f"inputs must be a dictionary of the model's other arguments by name, not {others!r}")
    if picture is not None and (not isinstance(picture, str) or not picture):
        raise InputError(f"picture must be the name of the model's argument for the picture, not {picture!r}")
    if picture is not None and picture in (others or {}):
        raise InputError(f"{picture!r} is named as the picture and among the other inputs")
    return HeldInputs(model, others or {}, picture)
