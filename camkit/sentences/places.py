"""Where on the picture each of its tokens looks, measured.

Two measurements say it for every family, also for tiles, crops, merged and reordered patches. Pictures whose brightness
rises from left to right, and from top to bottom, show through the processor where in the picture each value of the
model's input comes from. And gradients of the tokens show which values each reads, while every token attends only to
itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from PIL import Image
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from camkit.engine.attach import hooked
from camkit.errors import ModelError
from camkit.sentences.cut import Cut, Entry, OutputCut, attending_by_sdpa, decoder_cut, text_of
from camkit.sentences.inputs import Inputs, Text
from camkit.types import Box

_FEWEST = 4
"""Values that show where a token looks; with fewer, their spread says nothing about its size."""
_PARTS = 4
"""Pictures that show an axis, each a part of it: 256 levels are few for 100 cells."""
_SMALL = 0.25
"""The share of tokens below the size of the finest grid's: tokens at a picture's edge may read only a part of it."""


@dataclass(frozen=True, eq=False)
class Places:
    """Where the picture's tokens look, as shares of the cells of one grid.

    Attributes:
        shares: for each cell, its share of each token (rows * columns, n); a token's shares sum to 1, or to 0 if it
            looks at no place (a class token) or outside of the picture (padding).
        rows, columns: where each row and column of the grid looks, as shares of the box: those of the smallest tokens.
        box: the part of the picture that the tokens read.
    """

    shares: Float[Tensor, "g n"]
    rows: tuple[float, ...]
    columns: tuple[float, ...]
    box: Box

    def drawn(self, heat: Float[Tensor, " n"]) -> Float[Tensor, "h w"]:
        """Return the heat of tokens on the grid; the sum stays."""
        return (self.shares.to(heat.device, heat.dtype) @ heat).reshape(len(self.rows), len(self.columns))


def places_of(cut: Cut, inputs: Inputs, size: tuple[int, int]) -> Places | None:
    """Return where the tokens of a cut look on a picture (width, height); None if too many look at no place."""
    origin, count = _origin(inputs, size), len(cut.tokens)
    owners = _owners(cut, list(origin)) if origin else None
    if owners is None:
        return None
    chosen, owner = owners
    x, y, seen = (
        torch.cat([values.flatten() for values in each])[chosen] for each in zip(*origin.values(), strict=True)
    )
    reading = torch.bincount(owner, minlength=count) >= _FEWEST
    placed = torch.bincount(owner[seen], minlength=count) >= _FEWEST
    # Tokens that look at no place in usual models are a class token, and four registers
    if int((~reading).sum()) > min(5, count // 2) or not placed.any():
        return None
    owner, axes = owner[seen], [x[seen], y[seen]]
    middles, widths = zip(*(_look(owner, axis, count) for axis in axes), strict=True)
    # A token that reads more than this share of the picture has no place: a grid of 2 x 2 is the coarsest with one
    if float((widths[0] * widths[1])[placed].median()) > 0.4:
        return None
    places = _on_grid(owner, axes, middles, widths, placed, size)
    return places if len(places.shares) > 1 else None


def _origin(inputs: Inputs, size: tuple[int, int]) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Return where each value of the model's input comes from.

    For each tensor these are the shares of the picture's width and height, and whether the picture shows in the value.
    """
    width, height = size
    across, down = np.meshgrid((np.arange(width) + 0.5) / width, (np.arange(height) + 0.5) / height)
    rising = [(_PARTS * share - part).clip(0, 1) for share in (across, down) for part in range(_PARTS)]
    shades = [np.rint(255 * level).astype(np.uint8) for level in (np.zeros_like(across), np.ones_like(across), *rising)]
    greys = (Image.fromarray(np.repeat(shade[..., None], 3, 2)) for shade in shades)
    black, white, *shown = (inputs.of(grey, cast=False) for grey in greys)
    origin = {}
    for name, low in black.items():
        if low.is_floating_point() and not torch.equal(low, white[name]):
            step = white[name] - low
            seen = step.abs() > 1e-3 * step.abs().max()
            step = torch.where(seen, step, torch.ones_like(step))
            x, y = (
                sum((each[name] - low) / step for each in axis) / _PARTS for axis in (shown[:_PARTS], shown[_PARTS:])
            )
            origin[name] = x, y, seen
    return origin


def _owners(cut: Cut, pixels_in: Sequence[str]) -> tuple[Int[Tensor, " p"], Int[Tensor, " p"]] | None:
    """Return some values of the tensors that show the picture, and the token that reads each.

    The values are numbers into all these tensors, flattened, one after the other.

    Each token has a name of random signs. The gradient of the sum of all tokens, each times its sign, is at a value
    plus or minus that of the plain sum, exactly, if one token alone reads it. Of several, the nearest name wins.
    """
    count, given = len(cut.tokens), [cut.inputs[name].detach() for name in pixels_in]
    pixels = torch.cat([each.flatten() for each in given]).requires_grad_()
    generator = torch.Generator().manual_seed(0)
    # Eight signs besides two for each bit of the number of tokens: so no two tokens share a name
    names = 2 * torch.randint(0, 2, (8 + 2 * count.bit_length(), count), generator=generator) - 1
    direction = 2 * torch.randint(0, 2, (cut.tokens.shape[-1],), generator=generator) - 1
    with torch.enable_grad(), attending_by_sdpa(cut.model, "eager", None), _ToItself():
        parts = pixels.split([each.numel() for each in given])
        shown = {name: part.view_as(each) for name, part, each in zip(pixels_in, parts, given, strict=True)}
        tokens = cut.tokens_of({**cut.inputs, **shown})
        if not tokens.requires_grad:
            return None
        each = (tokens * direction.to(tokens)).sum(-1)

        def slopes(signs: Tensor) -> Tensor:
            return torch.autograd.grad((each * signs.to(each)).sum(), pixels, retain_graph=True)[0]

        plain = slopes(torch.ones(count))
        read = plain.nonzero()[:, 0]
        # For each token: a cell of 16 x 16 pixels has as many in each colour
        chosen = read[torch.randperm(len(read), generator=generator).to(read.device)[: 256 * count]]
        signs = [(slopes(code)[chosen] / plain[chosen]).float().clamp(-1, 1).cpu() for code in names]
    if not len(chosen):
        return None
    values = torch.stack(signs, 1).nan_to_num()
    # Products of values and tokens that are compared at once, for little memory
    owner = torch.cat([(part @ names.float()).argmax(1) for part in values.split(max((1 << 22) // count, 1))])
    return chosen.cpu(), owner


def _look(
    owner: Int[Tensor, " p"], places: Float[Tensor, " p"], count: int
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """Return the middle of each token's values, and the width of an even spread with their deviation.

    A few values far away, which several tokens read, are left out.
    """
    middle, width = torch.zeros(count), torch.ones(count)
    parts = places[torch.argsort(owner, stable=True)].split(torch.bincount(owner, minlength=count).tolist())
    for number, part in enumerate(parts):
        if len(part) >= _FEWEST:
            low, centre, high = part.quantile(torch.tensor([0.1, 0.5, 0.9])).tolist()
            near = part[(part - centre).abs() <= high - low + 1e-6]
            middle[number], width[number] = near.mean(), math.sqrt(12) * near.std(correction=0)
    return middle, width


def _on_grid(
    owner: Int[Tensor, " p"],
    axes: list[Tensor],
    middles: tuple[Tensor, ...],
    widths: tuple[Tensor, ...],
    placed: Bool[Tensor, " n"],
    size: tuple[int, int],
) -> Places:
    """Return the places of tokens on the grid of the smallest; larger ones are spread over its cells.

    Tokens are compared by their longer sides: those of a whole picture that was squeezed into a square are flat, and a
    token at a tile's edge is short on the side where the picture ends.
    """
    longer = torch.maximum(*(width * side for width, side in zip(widths, size, strict=True)))
    small = placed & (longer <= 1.4 * longer[placed].quantile(_SMALL))
    sizes = [max(float(width[small].quantile(1 - _SMALL)), 1e-6) for width in widths]
    ends = [_ends(owner, axis) for axis in axes]
    lines = [_lines(middle[small], width, end) for middle, width, end in zip(middles, sizes, ends, strict=True)]
    fits = small.clone()
    for middle, line, width in zip(middles, lines, sizes, strict=True):
        fits &= (middle - line[_nearest(line, middle)]).abs() < 0.3 * width
    columns, rows = (len(line) for line in lines)
    shares = torch.zeros(rows * columns, len(placed))
    column, row = (_nearest(line, middle)[fits] for line, middle in zip(lines, middles, strict=True))
    shares[row * columns + column, fits.nonzero()[:, 0]] = 1
    rest = (placed & ~fits)[owner]
    if rest.any():
        column, row = (_nearest(line, axis[rest]) for line, axis in zip(lines, axes, strict=True))
        shares.index_put_((row * columns + column, owner[rest]), torch.ones(int(rest.sum())), accumulate=True)
        shares /= shares.sum(0).clamp(min=1)
    (left, right), (top, bottom) = ends
    across, down = (
        tuple(((line - start) / (end - start)).tolist()) for line, (start, end) in zip(lines, ends, strict=True)
    )
    box = Box(left * size[0], top * size[1], right * size[0], bottom * size[1])
    return Places(shares, down, across, box)


def _lines(middles: Float[Tensor, " s"], width: float, ends: tuple[float, float]) -> Float[Tensor, " l"]:
    """Return the rows or columns in which small tokens lie; even ones if those of several grids do not agree."""
    ordered = middles.sort().values
    starts = (ordered.diff() > 0.25 * width).nonzero()[:, 0] + 1
    lines = torch.stack([group.mean() for group in ordered.tensor_split(starts)])
    if len(lines) == 1 or 0.6 * width < float(lines.diff().median()) < 1.5 * width:
        return lines
    count = max(round((ends[1] - ends[0]) / width), 1)
    return ends[0] + (torch.arange(count) + 0.5) / count * (ends[1] - ends[0])


def _nearest(lines: Float[Tensor, " l"], places: Float[Tensor, " p"]) -> Int[Tensor, " p"]:
    """Return the number of the line nearest to each place."""
    return torch.bucketize(places, (lines[1:] + lines[:-1]) / 2)


def _ends(owner: Int[Tensor, " p"], places: Float[Tensor, " p"]) -> tuple[float, float]:
    """Return where the values that tokens read start and end; each stands in the middle of a pixel.

    If a token reads values of only one place, its pixel may be as long as the picture.
    """
    most = places[owner == owner.bincount().argmax()]
    steps = (4096 * most).round().unique().diff()
    half = float(steps.median()) / 4096 / 2 if len(steps) else 0.5
    start, end = float(places.min()) - half, float(places.max()) + half
    level = 1 / 256  # what brightness cannot show of a picture's edge
    return (0.0 if start < level else start), (1.0 if end > 1 - level else end)


class _ToItself(TorchFunctionMode):
    """Lets each token attend only to itself, where a sequence attends to itself."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is nn.functional.scaled_dot_product_attention:
            query, key, value = args[:3]
            if query.shape[-2] == key.shape[-2]:
                return value.repeat_interleave(query.shape[1] // value.shape[1], 1) if query.dim() > 3 else value
        result = function(*args, **(kwargs or {}))
        softmaxes = (nn.functional.softmax, torch.softmax, Tensor.softmax)
        if function in softmaxes and result.dim() > 2 and result.shape[-1] == result.shape[-2]:
            return torch.eye(result.shape[-1], dtype=result.dtype, device=result.device).expand_as(result)
        return result


_OUTPUTS = {
    "blip-2": "vision_model",
    "florence2": "model.multi_modal_projector",
    "git": "git.visual_projection",
    "idefics2": "model.vision_model",
    "instructblip": "vision_model",
    "kosmos-2": "vision_model.model.post_layernorm#2",
}
"""Families in which no token that the decoder gets stands for a place in the picture: the module whose output still
does; "#2" is its second call."""


def find_cut(
    inputs: Inputs,
    mine: Mapping[str, Any],
    other: Mapping[str, Any],
    size: tuple[int, int],
    known: dict[Any, Places | None],
) -> tuple[Cut, Places]:
    """Return the cut, and where its tokens look.

    Args:
        inputs: of the model, in evaluation mode.
        mine: the arguments for the picture and the whole text.
        other: the same for another picture.
        size: the picture's width and height.
        known: where the tokens of cuts look in pictures of some sizes; what is measured is added.

    Raises:
        ModelError: there is no such cut.
    """
    name, wanted = type(inputs.model).__name__, _logits(inputs.model, mine)
    refusal = (
        f"camkit cannot find where the picture enters the part of {name} that writes; pass a Hugging Face model that "
        "writes text about one picture"
    )
    for cut in _cuts(inputs.model, mine, other):
        if not _gives(cut, wanted):
            continue
        key = cut.name, len(cut.tokens), size
        if key not in known:
            known[key] = places_of(cut, inputs, size)
        places = known[key]
        if places is not None:
            return cut, places
        refusal = (
            f"camkit cannot say where the {len(cut.tokens)} tokens that {name} makes of a picture look: each depends "
            "on all of it; pass a larger picture, or a model whose picture tokens are patches"
        )
    raise ModelError(refusal)


def _cuts(model: Any, mine: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[Cut]:
    """Yield the cut of a known family, or those at the calls that get the picture as an ``Entry``."""
    called = _OUTPUTS.get(model.config.model_type, "")
    name, _, call = called.partition("#")
    module = dict(model.named_modules()).get(name) if name else None
    if module is not None:
        cut = OutputCut(called, model, mine, torch.zeros(0, 0), module, int(call or 1) - 1)
        tokens = cut.caught(mine)
        if tokens is not None:
            yield replace(cut, tokens=tokens)
        return
    calls, others = (_entries(model, inputs) for inputs in (mine, other))
    for (decoder, entry, arguments), (same, _, moving) in zip(calls, others, strict=False):
        if decoder is same and (found := decoder_cut(model, mine, decoder, entry, arguments, moving)) is not None:
            yield found


def in_order(inputs: Inputs, prepared: Mapping[str, Any], text: Text) -> Text:
    """Return the text with the kind of the sentence's tokens with which no word sees the ones after it.

    The text without its last token then has the same logits. PaliGemma calls what it writes 1 and everything before it
    0, and Gemma 3 calls all text 0.

    Raises:
        ModelError: there is no such kind, or the logits are not finite.
    """
    model: nn.Module = inputs.model
    for kind in (0, 1):
        tried = replace(text, kind=kind)
        whole = _logits(model, inputs.with_text(prepared, tried))
        if whole.isnan().any():
            raise ModelError(
                f"{type(model).__name__} returns NaN for this picture; load it in another precision, such as float32"
            )
        shorter = _logits(model, inputs.with_text(prepared, replace(tried, ids=tried.ids[:-1])))
        if _agree(model, whole[:, :-1], shorter):
            return tried
    raise ModelError(
        f"{type(model).__name__} lets a word see the words after it, so camkit cannot score a sentence; pass a model "
        "that continues a text"
    )


def _logits(model: Any, inputs: Mapping[str, Any]) -> Float[Tensor, "1 t v"]:
    with torch.no_grad():
        return model(**inputs).logits[:, -text_of(inputs).shape[1] :].float()  # type: ignore[no-any-return]


def _agree(model: nn.Module, first: Tensor, second: Tensor) -> bool:
    if first.shape != second.shape:
        return False
    half = any(parameter.dtype in (torch.float16, torch.bfloat16) for parameter in model.parameters())
    apart = (first.log_softmax(-1) - second.log_softmax(-1)).abs().max()
    # Single precision leaves 1e-5 between log-probabilities of two ways, half precision some hundredths
    return float(apart) <= (0.3 if half else 1e-3)


def _gives(cut: Cut, wanted: Tensor) -> bool:
    """Tell whether a cut gives the whole model's logits; a module that is not the decoder fails in any way."""
    with suppress(Exception), torch.no_grad():
        return _agree(cut.model, cut.logits(cut.tokens[None]), wanted)
    return False


def _entries(model: nn.Module, inputs: Mapping[str, Any]) -> list[tuple[nn.Module, Entry, dict[str, Any]]]:
    """Return the calls of a pass that take one of the two arguments, with a place for each token of the text."""
    calls: list[tuple[nn.Module, Entry, dict[str, Any]]] = []
    lengths = {inputs[name].shape[1] for name in ("input_ids", "decoder_input_ids") if name in inputs}

    def record(module: nn.Module, _: Any, arguments: dict[str, Any]) -> None:
        entry = next((name for name in get_args(Entry) if isinstance(arguments.get(name), Tensor)), None)
        if entry is None or module is model:
            return
        text = arguments[entry] if entry == "inputs_embeds" else arguments.get("input_ids")
        # The hidden states of an encoder that also reads a prompt hold more than the picture.
        if isinstance(text, Tensor) and text.shape[1] in lengths and (entry == "inputs_embeds" or len(lengths) == 1):
            calls.append((module, entry, dict(arguments)))

    with hooked(before=[(module, record) for module in model.modules()]), torch.no_grad():
        model(**inputs)
    return calls
