"""What a model returned: class scores, maps of them, detections or an embedding, in whatever they are wrapped."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor

from camkit.errors import TargetError


def describe(output: Any) -> str:
    """Say in a few words what a model returned.

    >>> import torch
    >>> describe({"out": torch.zeros(2, 21, 8, 8), "aux": None})
    "a dict with 'out': a tensor of shape (2, 21, 8, 8), 'aux': a NoneType"
    """
    if isinstance(output, Tensor):
        return f"a tensor of shape {tuple(output.shape)}"
    if isinstance(output, dict):
        return f"a {type(output).__name__} with " + ", ".join(f"{key!r}: {describe(v)}" for key, v in output.items())
    if isinstance(output, (tuple, list)):
        first = f", first {describe(output[0])}" if output else ""
        return f"a {type(output).__name__} of {len(output)} items{first}"
    return f"a {type(output).__name__}"


def logits_of(output: Any, batch: int) -> Float[Tensor, "n k"]:
    """Find the class scores (N, K) in a model's output.

    Understands a tensor, a dictionary or object with ``logits`` (or ``out``), and a tuple or list that begins with one
    of these. An output (N,) counts as one logit, and (N, K, 1, 1) as (N, K).

    Raises:
        TargetError: there are no class scores, or several tensors that could hold them; the message says what the model
            returned.

    """
    several = rivals(output)
    if several:
        shapes = " and ".join(str(tuple(one.shape)) for one in several)
        raise TargetError(
            f"the model returned several tensors that could hold class scores, of shapes {shapes}; say which: "
            "target=a function, for example lambda output: output[1][:, 3] for class 3 of the second"
        )
    found = main_tensor(output)
    if isinstance(found, Tensor) and found.is_floating_point():
        if batch == 1 and found.dim() < 2 and found.numel() > 0:  # squeezed
            found = found.reshape(1, -1)
        if found.shape[:1] == (batch,) and found.dim() == 1:
            return found[:, None]
        if found.shape[:1] == (batch,) and found.dim() >= 2 and found.numel() == batch * found.shape[1] > 0:
            return found.flatten(1)
    raise TargetError(
        f"the model returned {describe(output)}, in which there are no class scores of shape ({batch}, classes); "
        "pass target=a function that takes this output and returns one score per image"
    )


def maps_of(output: Any, batch: int) -> Float[Tensor, "n k h w"] | None:
    """Return the maps of class scores (N, K, h, w) a segmentation network returned; None where there are none."""
    found = main_tensor(output)
    is_map = isinstance(found, Tensor) and found.dim() == 4 and found.is_floating_point() and len(found) == batch
    return found if is_map and found.shape[1] > 0 and found.shape[2] * found.shape[3] > 1 else None


def detections_of(output: Any, batch: int) -> list[dict[str, Tensor]] | None:
    """Return each image's detections: ``boxes`` (K, 4), ``scores`` (K,) and perhaps ``labels``.

    As torchvision's detectors return them, a list with one dictionary for each image; None for any other output.
    """
    found = output[0] if isinstance(output, tuple) and output and isinstance(output[0], list) else output
    if not isinstance(found, (list, tuple)) or len(found) != batch:
        return None
    shaped = all(
        isinstance(item, dict) and isinstance(item.get("boxes"), Tensor) and isinstance(item.get("scores"), Tensor)
        for item in found
    )
    return list(found) if shaped else None


def embedding_of(output: Any, batch: int) -> Float[Tensor, "n d"]:
    """Return the embedding (N, D) a model returned: a tensor, or what it calls ``image_embeds`` or ``pooler_output``.

    Raises:
        TargetError: there is none.

    """
    for name in ("image_embeds", "pooler_output"):
        value = output.get(name) if isinstance(output, dict) else getattr(output, name, None)
        if isinstance(value, Tensor):
            return value.reshape(batch, -1) if value.dim() > 2 else value
    return logits_of(output, batch)


_SCORE_KEYS = ("logits", "out", "last_hidden_state")
"""Where dictionaries hold class scores; the last where it is (N, K), as one network of Hugging Face has it."""


def main_tensor(output: Any) -> Any:
    """Follow dictionaries, objects with ``logits``, and tuples and lists to the tensor that holds the scores."""
    found = output
    while not isinstance(found, Tensor):
        key = next((key for key in _SCORE_KEYS if key in found), None) if isinstance(found, dict) else None
        if key is not None:
            found = found[key]
        elif isinstance(getattr(found, "logits", None), Tensor):
            found = found.logits
        elif isinstance(found, (tuple, list)) and found:
            found = found[0]
        else:
            break
    return found


def rivals(output: Any) -> list[Tensor]:
    """Return what could hold class scores (N, K) in a tuple or list of several tensors; nothing where that is clear."""
    if not isinstance(output, (tuple, list)) or isinstance(getattr(output, "logits", None), Tensor):
        return []
    found = [one for one in output if isinstance(one, Tensor) and one.dim() == 2 and one.is_floating_point()]
    alike = [one for one in found if len(one) == len(found[0]) and one.shape[1] > 0]
    return alike if len(alike) > 1 else []
