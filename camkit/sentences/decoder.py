"""Where the picture enters the part of a model that writes: measured with two pictures, the same for every family.

A model that writes about pictures calls a decoder in one of two forms. It passes ``inputs_embeds``, a sequence in which
some positions hold the picture's tokens (LLaVA, Qwen-VL, PaliGemma); or ``encoder_hidden_states``, which hold nothing
but the picture's tokens (encoder-decoders, BLIP). The call whose tensor changes with the picture is the one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from camkit.errors import ModelError

Entry: TypeAlias = Literal["inputs_embeds", "encoder_hidden_states"]
_ENTRIES: tuple[Entry, ...] = ("inputs_embeds", "encoder_hidden_states")

_AGREEMENT = 1e-3
"""How far log-probabilities of the decoder alone may be from the whole model's: single precision leaves 1e-5."""


@dataclass(frozen=True, eq=False)
class Call:
    """A call of the decoder: its arguments, which of them holds the picture's tokens, and at which positions.

    Attributes:
        decoder: the module that was called.
        entry: the name of the argument with the picture's tokens.
        arguments: all arguments of the call.
        positions: the positions of the picture's tokens.
        head: turns the decoder's output into logits.
    """

    decoder: nn.Module
    entry: Entry
    arguments: Mapping[str, Any] = field(repr=False)
    positions: Int[Tensor, " n"]
    head: Callable[[Any], Tensor] = field(repr=False)

    @property
    def tokens(self) -> Float[Tensor, "n c"]:
        """The picture's tokens."""
        return self.entering[0, self.positions]

    @property
    def entering(self) -> Float[Tensor, "1 l c"]:
        """The whole tensor that holds the picture's tokens."""
        entering: Tensor = self.arguments[self.entry]
        return entering

    def logits(self, tokens: Float[Tensor, "m n c"], *, attend: bool = True) -> Float[Tensor, "m t v"]:
        """Return the logits after each token of the text, for M versions of the picture's tokens.

        Args:
            tokens: the picture's tokens in each version.
            attend: False hides the picture from the text.
        """
        return self.head(self.output(tokens, attend=attend)).float()

    def output(self, tokens: Float[Tensor, "m n c"], *, attend: bool = True, **more: Any) -> Any:
        """Run the decoder for M versions of the picture's tokens; ``more`` are further arguments."""
        count = len(tokens)
        arguments = {name: _repeated(value, count) for name, value in self.arguments.items()}
        entering = self.entering.detach().expand(count, -1, -1)
        arguments[self.entry] = entering.index_copy(1, self.positions, tokens.to(entering.dtype))
        if not attend:
            arguments |= self._hidden(count)
        return self.decoder(**{**arguments, **more})

    def _hidden(self, count: int) -> dict[str, Any]:
        """Return the arguments that hide the picture."""
        if self.entry == "encoder_hidden_states":
            return {self.entry: torch.zeros_like(self.entering).expand(count, -1, -1)}
        seen = torch.ones(count, self.entering.shape[1], dtype=torch.long, device=self.entering.device)
        seen[:, self.positions] = 0
        return {"attention_mask": seen}


class _Enough(Exception):  # noqa: N818 - ends a pass whose rest is not needed
    pass


def find_call(model: nn.Module, inputs: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[Call, Tensor]:
    """Return the decoder's call for a picture, and the whole model's logits (1, T, V).

    Args:
        model: the model, in evaluation mode.
        inputs: the arguments for the picture and the whole text.
        other: the same for another picture.

    Raises:
        ModelError: no call has the form that camkit knows, or the decoder alone does not give the model's logits.
    """
    text = text_of(inputs)
    with torch.no_grad(), _calls(model) as calls:
        logits = model(**inputs).logits.float()
        mine = list(calls)
        calls.clear()
        model(**other)
        others = list(calls)
    for (decoder, entry, arguments), (same, _, changed) in zip(mine, others, strict=False):
        first, second = arguments[entry], changed[entry]
        if decoder is not same or first.shape != second.shape or not _reads_text(entry, arguments, text.shape[1]):
            continue
        moved = (first != second).any(-1)[0].nonzero()[:, 0]
        if not len(moved):
            continue
        call = Call(decoder, entry, arguments, moved, _head(model))
        _check(call, logits)
        return call, logits
    raise ModelError(
        f"{type(model).__name__} passes its picture to no decoder as inputs_embeds or encoder_hidden_states; pass a "
        "Hugging Face model that writes text about one picture"
    )


def tokens_of(model: nn.Module, call: Call, inputs: Mapping[str, Any]) -> Float[Tensor, "n c"]:
    """Return the tokens of another picture, without running the decoder.

    Raises:
        ModelError: the other picture has another number of tokens.
    """
    caught: list[Tensor] = []

    def stop(_: nn.Module, __: Any, arguments: dict[str, Any]) -> None:
        caught.append(arguments[call.entry])
        raise _Enough

    handle = call.decoder.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        with torch.no_grad():
            model(**inputs)
    except _Enough:
        pass
    finally:
        handle.remove()
    (entering,) = caught
    if entering.shape != call.entering.shape:
        raise ModelError(
            f"the reference picture makes {entering.shape[1]} tokens and the picture {call.entering.shape[1]}; pass "
            "references whose sides have the picture's ratio"
        )
    return entering[0, call.positions]


def text_of(inputs: Mapping[str, Any]) -> Int[Tensor, "1 t"]:
    """Return the text that the model reads or continues."""
    text: Tensor = inputs["decoder_input_ids"] if "decoder_input_ids" in inputs else inputs["input_ids"]
    return text


@contextmanager
def _calls(model: nn.Module) -> Iterator[list[tuple[nn.Module, Entry, dict[str, Any]]]]:
    """Record the calls of all modules that take one of the two arguments."""
    calls: list[tuple[nn.Module, Entry, dict[str, Any]]] = []

    def record(module: nn.Module, _: Any, arguments: dict[str, Any]) -> None:
        entry = next((name for name in _ENTRIES if isinstance(arguments.get(name), Tensor)), None)
        if entry is not None and module is not model:
            calls.append((module, entry, dict(arguments)))

    handles = [module.register_forward_pre_hook(record, with_kwargs=True) for module in model.modules()]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _reads_text(entry: Entry, arguments: Mapping[str, Any], length: int) -> bool:
    """Tell whether a call is the decoder's, and not one inside an encoder: it has a place for each token."""
    if entry == "inputs_embeds":
        return bool(arguments[entry].shape[1] == length)
    text = arguments.get("input_ids")
    return isinstance(text, Tensor) and text.shape[1] == length


def _head(model: Any) -> Callable[[Any], Tensor]:
    def logits(output: Any) -> Tensor:
        if getattr(output, "logits", None) is not None:
            return output.logits  # type: ignore[no-any-return]
        return model.get_output_embeddings()(output[0])  # type: ignore[no-any-return]

    return logits


def _check(call: Call, logits: Tensor) -> None:
    with torch.no_grad():
        alone = call.logits(call.tokens[None])
    if alone.shape != logits.shape or float((alone.log_softmax(-1) - logits.log_softmax(-1)).abs().max()) > (
        _AGREEMENT if logits.dtype is torch.float32 and call.entering.dtype is torch.float32 else 0.3
    ):
        raise ModelError(
            f"{type(call.decoder).__name__} alone does not give the logits of the whole model, so camkit cannot "
            "compare pictures; pass a model whose output matrix reads the decoder's last states"
        )


def _repeated(value: Any, count: int) -> Any:
    """Return an argument for a batch; caches are left out."""
    if isinstance(value, Tensor):
        if value.dim() and value.shape[0] == 1:
            return value.expand(count, *value.shape[1:])
        if value.dim() > 1 and value.shape[1] == 1:  # positions of three kinds come first in Qwen-VL
            return value.expand(value.shape[0], count, *value.shape[2:])
        return value
    if isinstance(value, dict):
        return {name: _repeated(each, count) for name, each in value.items()}
    return None if type(value).__name__.endswith("Cache") else value
