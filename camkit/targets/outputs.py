"""Finds class scores, maps of class scores, detections or an embedding in whatever a model returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils._pytree import tree_leaves

from camkit.errors import TargetError, advice

_BY_YOURSELF = (
    "pass target=FUNCTION, which takes this output and returns one score per image",
    "wrap it in a factory whose module returns them (--model file.py:factory)",
)
"""What to do with an output that camkit cannot read by itself, in Python and in a shell."""


def describe(output: Any) -> str:
    """Describe in a few words what a model returned.

    >>> import torch
    >>> describe({"out": torch.zeros(2, 21, 8, 8), "aux": None})
    "a dict with 'out': a tensor of shape (2, 21, 8, 8), 'aux': a NoneType"
    """
    if isinstance(output, Tensor) and (output.is_nested or output.is_sparse):
        return f"a {'nested' if output.is_nested else 'sparse'} tensor"
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

    The output may be a tensor, a dictionary or object with ``logits`` (or ``out``), or a tuple or list that begins with
    one of these. An output (N,) counts as one logit, and (N, K, 1, 1) as (N, K).

    Raises:
        TargetError: there are no class scores, or several tensors that could hold them; the message describes what the
            model returned.
    """
    scores = output if isinstance(output, Tensor) else scores_in(output)
    if not isinstance(output, Tensor):
        _refuse_boxes(output, batch)
    if isinstance(scores, Tensor) and scores.is_floating_point():
        if batch == 1 and scores.dim() < 2 and scores.numel() > 0:  # the model dropped the batch axis
            scores = scores.reshape(1, -1)
        if scores.shape[:1] == (batch,) and scores.dim() == 1:
            return scores[:, None]
        if scores.shape[:1] == (batch,) and scores.dim() >= 2 and scores.numel() == batch * scores.shape[1] > 0:
            return scores.flatten(1)
    if takes_prompts(output):
        raise TargetError(
            "the model segments the object at a point or in a box; pass "
            + advice("target=targets.mask_at(x, y) or targets.mask_in(...)", "--point x,y or --box-prompt l,t,r,b")
        )
    named = [
        str(key)
        for key, value in (output.items() if isinstance(output, dict) else ())
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() in (2, 4) and len(value) == batch
    ]
    if named:
        raise TargetError(
            f"the model returned {describe(output)}; choose the class scores by name, such as "
            + advice(f"output={named[0]!r}", f"--output {named[0]}")
        )
    by_name = "pass its name (hf:NAME) or folder, so that camkit can read its boxes, masks and maps, or "
    raise TargetError(
        f"the model returned {describe(output)}, but no class scores of shape ({batch}, classes); "
        f"{by_name * type(output).__module__.startswith('transformers.')}{advice(*_BY_YOURSELF)}"
    )


def _refuse_boxes(output: Any, batch: int) -> None:
    """Refuse the scores of boxes, or of the best classes: in another picture, they belong to others."""
    is_named = isinstance(output, dict) and any(key in output for key in _SCORE_KEYS)
    tensors = [] if is_named else [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    floats = [tensor for tensor in tensors if tensor.is_floating_point()]
    of_boxes = any(one.dim() > 0 and other.shape == (*one.shape, 4) for one in floats for other in floats)
    numbers = [tensor for tensor in tensors if tensor.dtype in (torch.int32, torch.int64) and tensor.numel() > batch]
    of_some = any(one.shape == other.shape for one in floats[:1] for other in numbers)
    if of_boxes or of_some:
        raise TargetError(
            f"the model returned tensors of shapes {_shapes(tensors)}, which may be the scores of boxes or of the best "
            "classes; wrap it in a module that returns a list with a dictionary of boxes, scores and labels for each "
            "picture; if one tensor has a score for each class, choose that, for example with "
            + advice("output=0", "--output 0")
        )


def scores_in(output: Any) -> Any:
    """Return what ``main_tensor`` finds, if nothing else in the output could hold the scores.

    Raises:
        TargetError: several tensors could hold the scores.
    """
    candidates = rivals(output)
    if candidates:
        raise TargetError(
            f"the model returned several tensors that could hold class scores, of shapes {_shapes(candidates)}; choose "
            f"one by its index, for example the second with {advice('output=1', '--output 1')}, or "
            + advice(*_BY_YOURSELF)
        )
    return main_tensor(output)


def _shapes(tensors: Sequence[Tensor]) -> str:
    return " and ".join(str(tuple(tensor.shape)) for tensor in tensors)


def takes_prompts(output: Any) -> bool:
    """Tell whether a model returned what its decoder needs to segment the object at a point or in a box."""
    return isinstance(output, dict) and "decode" in output


def maps_of(output: Any, batch: int) -> Float[Tensor, "n k h w"] | None:
    """Return the maps of class scores (N, K, h, w) in a segmentation network's output; None if there are none."""
    maps = main_tensor(output)
    are_maps = isinstance(maps, Tensor) and maps.dim() == 4 and _are_maps(maps) and len(maps) == batch
    return scores_in(output) if are_maps else None


def _are_maps(maps: Any) -> bool:
    """Tell whether a value can be maps (N, K, h, w) of class scores: more than one cell for each class."""
    is_float = isinstance(maps, Tensor) and maps.is_floating_point()
    return is_float and maps.dim() == 4 and maps.shape[1] > 0 and maps.shape[2] * maps.shape[3] > 1


def depth_of(output: Any) -> Tensor | None:
    """Return the depth of each pixel (N, h, w) in the output of a network of Hugging Face; None if there is none."""
    found = output.get("predicted_depth") if isinstance(output, dict) else getattr(output, "predicted_depth", None)
    return found if isinstance(found, Tensor) else None


def detections_of(output: Any, batch: int) -> list[dict[str, Tensor]] | None:
    """Return each image's detections: ``boxes`` (K, 4), ``scores`` (K,) and perhaps ``labels``.

    This is what torchvision's detectors return: a list with one dictionary per image. For any other output, None.
    """
    images = output[0] if isinstance(output, tuple) and output and isinstance(output[0], list) else output
    if not isinstance(images, (list, tuple)) or len(images) != batch:
        return None
    are_detections = all(
        isinstance(item, dict) and isinstance(item.get("boxes"), Tensor) and isinstance(item.get("scores"), Tensor)
        for item in images
    )
    return list(images) if are_detections else None


def embedding_of(output: Any, batch: int) -> Float[Tensor, "n d"]:
    """Return the embedding (N, D) in a model's output: ``image_embeds``, ``pooler_output``, or the tensor itself.

    Raises:
        TargetError: there is no embedding.
    """
    for name in ("image_embeds", "pooler_output"):
        value = output.get(name) if isinstance(output, dict) else getattr(output, name, None)
        if isinstance(value, Tensor):
            return value.reshape(batch, -1) if value.dim() > 2 else value
    return logits_of(output, batch)


_SCORE_KEYS = ("logits", "out", "last_hidden_state")
"""Keys under which dictionaries hold class scores; one Hugging Face network uses ``last_hidden_state`` for (N, K)."""


def main_tensor(output: Any) -> Any:
    """Follow dictionaries, objects with ``logits``, and tuples and lists to the tensor that holds the scores."""
    inner = output
    while not isinstance(inner, Tensor):
        key = next((key for key in _SCORE_KEYS if key in inner), None) if isinstance(inner, dict) else None
        if key is not None:
            inner = inner[key]
        elif isinstance(getattr(inner, "logits", None), Tensor):
            inner = inner.logits
        elif isinstance(inner, (tuple, list)) and inner:
            inner = inner[0]
        else:
            break
    return inner


def rivals(output: Any) -> list[Tensor]:
    """Return the tensors of a tuple or list, also a nested one, if more than one could hold scores; else an empty list.

    These are class scores (N, K), and maps (N, K, h, w) if the first tensor is one. Maps after class scores are the
    features that the scores are computed from.
    """
    if not isinstance(output, (tuple, list)) or isinstance(getattr(output, "logits", None), Tensor):
        return []
    leaves = tree_leaves(output, is_leaf=lambda item: isinstance(item, dict))
    tensors = [item for item in leaves if isinstance(item, Tensor) and item.is_floating_point()]
    maps = [item for item in tensors if _are_maps(item)] if tensors and _are_maps(tensors[0]) else []
    candidates = [*maps, *(item for item in tensors if item.dim() == 2 and item.shape[1] > 0)]
    candidates = [item for item in candidates if len(item) == len(candidates[0])]
    return candidates if len(candidates) > 1 else []
