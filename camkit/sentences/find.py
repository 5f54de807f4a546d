"""Finds the cut of a model: the last place where each of the picture's tokens looks at a place of its own.

All is measured, so that no family is named: a pass with another picture shows what depends on the picture, a pass with
a shorter text what does not depend on the text, and ``places_of`` where the tokens look.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn

from camkit.engine.attach import hooked
from camkit.errors import ModelError
from camkit.sentences.cut import ENTRIES, Cut, Entry, OutputCut, decoder_cut, tensor_of, text_of
from camkit.sentences.places import Places

_AGREEMENT, _IN_HALF = 1e-3, 0.3
"""How far log-probabilities of two ways may be apart: single precision leaves 1e-5, half precision some hundredths."""
_FEW = 5
"""Tokens that look at no place in usual models: a class token, and four registers."""
_MOST_TRIED = 6
"""Outputs that are measured: usual are an encoder, what squeezes its tokens into a few, and a projection."""

Locate: TypeAlias = Callable[[Cut], Places | None]


def find_cut(
    model: nn.Module, mine: Mapping[str, Any], other: Mapping[str, Any], shorter: Mapping[str, Any], locate: Locate
) -> tuple[Cut, Places]:
    """Return the cut, and where its tokens look.

    Args:
        model: the model, in evaluation mode.
        mine: the arguments for the picture and the whole text.
        other: the same for another picture.
        shorter: those for the picture and the text without its last token.
        locate: measures where the tokens of a cut look.

    Raises:
        ModelError: there is no such cut.
    """
    wanted = _logits(model, mine)
    blind = None
    for cut in _decoder_cuts(model, mine, other):
        if not _gives(cut, cut.tokens, wanted):
            continue
        places = locate(cut)
        if places is not None and places.without <= _FEW:
            return cut, places
        blind = cut
    found = []
    changed = _logits(model, other)
    moved = _apart(wanted, changed)
    for order, cut in itertools.islice(_output_cuts(model, mine, other, shorter), _MOST_TRIED):
        places = locate(cut)
        if places is not None and _gives(cut, cut.tokens_of(other), changed, moved / 4):
            found.append((places.without, -order, cut, places))
            if not places.without:
                break
    if found:
        return min(found, key=lambda each: each[:2])[2:]
    if blind is not None:
        raise ModelError(
            f"camkit cannot say where the {len(blind.tokens)} tokens that {type(model).__name__} makes of a picture "
            "look: each depends on all of it; pass a larger picture, or a model whose picture tokens are patches"
        )
    raise ModelError(
        f"camkit cannot find where the picture enters the part of {type(model).__name__} that writes; pass a "
        "Hugging Face model that writes text about one picture"
    )


def reads_in_order(model: nn.Module, mine: Mapping[str, Any], shorter: Mapping[str, Any]) -> bool:
    """Tell whether no word sees the ones after it: the text without its last token has the same logits.

    Raises:
        ModelError: the logits are not finite.
    """
    whole = _logits(model, mine)
    if whole.isnan().any():
        raise ModelError(
            f"{type(model).__name__} returns NaN for this picture; load it in another precision, such as float32"
        )
    return _agree(model, whole[:, :-1], _logits(model, shorter))


def _logits(model: Any, inputs: Mapping[str, Any]) -> Float[Tensor, "1 t v"]:
    with torch.no_grad():
        return model(**inputs).logits[:, -text_of(inputs).shape[1] :].float()  # type: ignore[no-any-return]


def _apart(first: Tensor, second: Tensor) -> float:
    """Return how far log-probabilities are apart at most."""
    return float((first.log_softmax(-1) - second.log_softmax(-1)).abs().max())


def _agree(model: nn.Module, first: Tensor, second: Tensor, limit: float = _IN_HALF) -> bool:
    if first.shape != second.shape:
        return False
    half = any(parameter.dtype in (torch.float16, torch.bfloat16) for parameter in model.parameters())
    return _apart(first, second) <= min(_IN_HALF if half else _AGREEMENT, limit)


def _gives(cut: Cut, tokens: Tensor, wanted: Tensor, limit: float = _IN_HALF) -> bool:
    """Tell whether a cut gives the whole model's logits; a module that is not the decoder fails in any way."""
    try:
        with torch.no_grad():
            found = cut.logits(tokens[None])
    except Exception:
        return False
    return _agree(cut.model, found, wanted, limit)


def _decoder_cuts(model: nn.Module, mine: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[Cut]:
    """Yield the calls that get the picture as ``inputs_embeds`` or ``encoder_hidden_states``."""
    calls, others = (_entries(model, inputs) for inputs in (mine, other))
    for (decoder, entry, arguments), (same, _, changed) in zip(calls, others, strict=False):
        cut = decoder_cut(model, mine, decoder, entry, arguments, changed) if decoder is same else None
        if cut is not None:
            yield cut


def _entries(model: nn.Module, inputs: Mapping[str, Any]) -> list[tuple[nn.Module, Entry, dict[str, Any]]]:
    """Return the calls of a pass that take one of the two arguments, with a place for each token of the text."""
    calls: list[tuple[nn.Module, Entry, dict[str, Any]]] = []
    lengths = {inputs[name].shape[1] for name in ("input_ids", "decoder_input_ids") if name in inputs}

    def record(module: nn.Module, _: Any, arguments: dict[str, Any]) -> None:
        entry = next((name for name in ENTRIES if isinstance(arguments.get(name), Tensor)), None)
        if entry is None or module is model:
            return
        text = arguments[entry] if entry == "inputs_embeds" else arguments.get("input_ids")
        # The hidden states of an encoder that also reads a prompt hold more than the picture.
        if isinstance(text, Tensor) and text.shape[1] in lengths and (entry == "inputs_embeds" or len(lengths) == 1):
            calls.append((module, entry, dict(arguments)))

    with hooked(before=[(module, record) for module in model.modules()]), torch.no_grad():
        model(**inputs)
    return calls


def _output_cuts(
    model: nn.Module, mine: Mapping[str, Any], other: Mapping[str, Any], shorter: Mapping[str, Any]
) -> Iterator[tuple[int, Cut]]:
    """Yield the outputs that depend on the picture and not on the text, with the number of the call.

    Of nested calls the outermost one counts. Those in the fewest others come first: a decoder's layers make thousands
    of such outputs of the encoder's.
    """
    (calls, around), (others, _), (shorter_calls, _) = (_traced(model, inputs) for inputs in (mine, other, shorter))
    fits = {
        call
        for call, sums in calls.items()
        if call in others and call in shorter_calls and others[call] != sums == shorter_calls[call]
    }
    outer = [(number, call) for number, call in enumerate(around) if call in fits and not around[call] & fits]
    names = {module: name for name, module in model.named_modules()}
    for number, call in sorted(outer, key=lambda each: (len(around[each[1]]), -each[0])):
        name = names[call[0]] + (f"#{call[1] + 1}" if call[1] else "")
        cut = OutputCut(name, model, mine, torch.zeros(0, 0), *call)
        yield number, replace(cut, tokens=cut.caught(mine))


_CallId: TypeAlias = tuple[nn.Module, int]


def _traced(
    model: nn.Module, inputs: Mapping[str, Any]
) -> tuple[dict[_CallId, tuple[int, float, float]], dict[_CallId, frozenset[_CallId]]]:
    """Run the model and return what each call made, as sums that any change of its tokens changes.

    The second dictionary has the calls around each, in the order in which they ended, also of those that made nothing.
    """
    counts: Counter[nn.Module] = Counter()
    open_calls: list[_CallId] = []
    sums: dict[_CallId, tuple[int, float, float]] = {}
    around: dict[_CallId, frozenset[_CallId]] = {}

    def begin(module: nn.Module, _: Any, __: Any) -> None:
        open_calls.append((module, counts[module]))
        counts[module] += 1

    def end(_: nn.Module, __: Any, ___: Any, output: Any) -> None:
        call, tensor = open_calls.pop(), tensor_of(output)
        around[call] = frozenset(open_calls)
        if tensor is not None:
            flat = tensor.double().flatten()
            order = torch.arange(len(flat), device=flat.device) % 1009
            sums[call] = len(flat), float(flat.sum()), float(flat @ order.double())

    modules = list(model.modules())
    with hooked([(module, begin) for module in modules], [(module, end) for module in modules]), torch.no_grad():
        model(**inputs)
    return sums, around
