"""Where the picture enters the part of a model that writes: its tokens there, and what the model says for others.

Two forms of a cut serve all families. ``DecoderCut``: the model passes the picture's tokens to a decoder, among its
``inputs_embeds`` or as ``encoder_hidden_states``; the decoder is run alone. ``OutputCut``: the tokens are what some
module returns; the rest of the model runs on other tokens instead.
"""

from __future__ import annotations

import abc
import functools
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from camkit.engine.attach import hooked, mapped, with_tensor
from camkit.engine.guard import interruptible, undisturbed
from camkit.errors import ModelError

Entry: TypeAlias = Literal["inputs_embeds", "encoder_hidden_states"]
ENTRIES: tuple[Entry, ...] = ("inputs_embeds", "encoder_hidden_states")
ArgumentPath: TypeAlias = tuple[str] | tuple[str, int]
"""An argument by its name, and the number of a tensor in it if it is a list."""


class Enough(Exception):  # noqa: N818 - ends a pass whose rest is not needed
    """The tokens are known."""


@dataclass(frozen=True, eq=False)
class Cut(abc.ABC):
    """A place in a model that all of a picture's evidence passes.

    Attributes:
        name: what is cut: a decoder and its argument, or a module; 'x#2' is the second call of x.
        model: the whole model.
        inputs: its arguments for the picture and the whole text.
        tokens: the picture's tokens here (n, C).
    """

    name: str
    model: nn.Module = field(repr=False)
    inputs: Mapping[str, Any] = field(repr=False)
    tokens: Float[Tensor, "n c"] = field(repr=False)

    @abc.abstractmethod
    def logits(
        self, tokens: Float[Tensor, "m n c"], *, attend: bool = True, keep: int | None = None
    ) -> Float[Tensor, "m t v"]:
        """Return the logits after the last ``keep`` tokens of the text, for M versions of the picture's tokens.

        Args:
            tokens: the picture's tokens in each version.
            attend: False hides the picture from the text.
            keep: the number of the text's last tokens; by default all.
        """

    @abc.abstractmethod
    def caught(self, inputs: Mapping[str, Any]) -> Float[Tensor, "n c"]:
        """Return the tokens of a picture, without running what follows."""

    def tokens_of(self, inputs: Mapping[str, Any]) -> Float[Tensor, "n c"]:
        """Return the tokens of another picture, without running what follows.

        Raises:
            ModelError: the other picture has another number of tokens.
        """
        tokens = self.caught(inputs)
        if tokens.shape != self.tokens.shape:
            raise ModelError(
                f"a reference picture gives {len(tokens)} tokens and the picture {len(self.tokens)}, although both "
                "have the same size; pass a processor whose number of tokens depends only on the size"
            )
        return tokens


@dataclass(frozen=True, eq=False)
class DecoderCut(Cut):
    """The arguments of a decoder's call, which is run alone.

    Attributes:
        decoder: the module that was called.
        entry: the name of the argument with the picture's tokens.
        arguments: all arguments of the call.
        positions: the positions of the picture's tokens.
        more: further arguments with a row for each of these tokens (Qwen3-VL's features of earlier layers), each with
            the numbers of these rows; if the prompt has several pictures, the argument has rows for the others too. A
            token's values are those of all arguments, one after the other.
    """

    decoder: nn.Module = field(repr=False)
    entry: Entry
    arguments: Mapping[str, Any] = field(repr=False)
    positions: Int[Tensor, " n"] = field(repr=False)
    more: Mapping[ArgumentPath, Int[Tensor, " n"]]

    @property
    def entering(self) -> Float[Tensor, "1 l c"]:
        """The whole tensor that holds the picture's tokens."""
        entering: Tensor = self.arguments[self.entry]
        return entering

    def logits(
        self, tokens: Float[Tensor, "m n c"], *, attend: bool = True, keep: int | None = None
    ) -> Float[Tensor, "m t v"]:
        """Return the logits of the decoder alone."""
        output, last = self.output(tokens, attend=attend), keep or text_of(self.inputs).shape[1]
        if getattr(output, "logits", None) is not None:
            return output.logits[:, -last:].float()  # type: ignore[no-any-return]
        model: Any = self.model
        states = output[0] if isinstance(output, (tuple, Mapping)) else output
        if not isinstance(states, Tensor) or states.dim() != 3:
            raise ModelError(f"{type(self.decoder).__name__} returns no state for each token")
        return model.get_output_embeddings()(states[:, -last:]).float()  # type: ignore[no-any-return]

    def output(self, tokens: Float[Tensor, "m n c"], *, attend: bool = True, **more: Any) -> Any:
        """Run the decoder for M versions of the picture's tokens; ``more`` are further arguments."""
        count = len(tokens)
        arguments = {name: repeated(value, count) for name, value in self.arguments.items()}
        tensors = _tensors(self.arguments)
        widths = [self.entering.shape[-1], *(tensors[path].shape[-1] for path in self.more)]
        first, *others = tokens.split(widths, -1)
        entering = self.entering.detach().expand(count, -1, -1)
        arguments[self.entry] = entering.index_copy(1, self.positions, first.to(entering.dtype))
        for (path, rows), part in zip(self.more.items(), others, strict=True):
            old = tensors[path]
            every = old.detach().reshape(1, -1, old.shape[-1]).expand(count, -1, -1)
            new = every.index_copy(1, rows, part.to(old.dtype))
            arguments = with_tensor(arguments, path, new.flatten(0, 1) if old.dim() == 2 else new)
        if not attend:
            arguments |= self._hidden(count)
        return self.decoder(**{**arguments, **more})

    def caught(self, inputs: Mapping[str, Any]) -> Float[Tensor, "n c"]:
        """Return what the call gets of a picture."""
        caught: list[dict[str, Any]] = []

        def stop(_: nn.Module, __: Any, arguments: dict[str, Any]) -> None:
            caught.append(arguments)
            raise Enough

        with hooked(before=[(self.decoder, stop)]), suppress(Enough):
            self.model(**inputs)
        (arguments,) = caught
        if arguments[self.entry].shape[1] != self.entering.shape[1]:
            return arguments[self.entry][0]  # type: ignore[no-any-return]
        return _tokens(arguments, self.entry, self.positions, self.more)

    def _hidden(self, count: int) -> dict[str, Any]:
        """Return the arguments that hide the picture."""
        if self.entry == "encoder_hidden_states":
            return {self.entry: torch.zeros_like(self.entering).expand(count, -1, -1)}
        given = self.arguments.get("attention_mask")
        hide = functools.partial(_without, positions=self.positions)
        if isinstance(given, Mapping):
            return {"attention_mask": {kind: hide(repeated(mask, count)) for kind, mask in given.items()}}
        if isinstance(given, Tensor) and given.dim() == 4:
            return {"attention_mask": hide(repeated(given, count))}
        seen = torch.ones(count, self.entering.shape[1], dtype=torch.long, device=self.entering.device)
        return {"attention_mask": _without(seen, self.positions)}


@dataclass(frozen=True, eq=False)
class OutputCut(Cut):
    """What a module returns in one of its calls; the part of the model before it runs on one picture.

    Attributes:
        module: the module.
        number: the number of its call, from 0.
    """

    module: nn.Module = field(repr=False)
    number: int

    def logits(
        self, tokens: Float[Tensor, "m n c"], *, attend: bool = True, keep: int | None = None
    ) -> Float[Tensor, "m t v"]:
        """Return the logits of the model with the tokens instead of the module's output."""
        count = len(tokens)
        new = tokens if attend else torch.zeros_like(tokens)
        names = {"input_ids", "decoder_input_ids"}
        length = self.inputs["input_ids"].shape[1] if "input_ids" in self.inputs else -1
        inputs = {
            name: repeated(value, count)
            if name in names or (isinstance(value, Tensor) and value.shape[:2] == (1, length))
            else value
            for name, value in self.inputs.items()
        }

        def swap(output: Any) -> Any:
            old = tensor_of(output)
            assert old is not None
            return mapped(output, lambda value: new.to(old.dtype) if value is old else value)

        with self._at_call(swap):
            logits = self.model(**inputs).logits[:, -(keep or text_of(self.inputs).shape[1]) :]
            return logits.float()  # type: ignore[no-any-return]

    def caught(self, inputs: Mapping[str, Any]) -> Float[Tensor, "n c"]:
        """Return what the call makes of a picture.

        Raises:
            ModelError: it makes no tokens.
        """
        caught: list[Tensor] = []

        def stop(output: Any) -> Any:
            tensor = tensor_of(output)
            caught.extend([] if tensor is None else [tensor])
            raise Enough

        with self._at_call(stop), suppress(Enough):
            self.model(**inputs)
        if not caught:
            raise ModelError(f"{self.name} returns no tokens for a reference picture; pass other references")
        return caught[0][0]

    def _at_call(self, act: Callable[[Any], Any]) -> AbstractContextManager[None]:
        calls = itertools.count()

        def hook(_: nn.Module, __: Any, ___: Any, output: Any) -> Any:
            return act(output) if next(calls) == self.number else output

        return hooked(after=[(self.module, hook)])


def decoder_cut(
    model: nn.Module,
    inputs: Mapping[str, Any],
    decoder: nn.Module,
    entry: Entry,
    arguments: Mapping[str, Any],
    changed: Mapping[str, Any],
) -> DecoderCut | None:
    """Return the cut at a decoder's call, or None if it reads the picture in another form.

    Args:
        model: the whole model.
        inputs: its arguments.
        decoder: the module that was called.
        entry: the name of the argument with the picture's tokens.
        arguments: those of the call for the picture.
        changed: those of the call for another picture.
    """
    if arguments[entry].shape != changed[entry].shape:
        return None
    positions = (arguments[entry] != changed[entry]).any(-1)[0].nonzero()[:, 0]
    if not len(positions):
        return None
    more: dict[ArgumentPath, Tensor] = {}
    of_other = _tensors(changed)
    for path, mine in _tensors(arguments).items():
        others = of_other.get(path)
        if path[0] == entry or others is None or torch.equal(mine, others):
            continue
        if not mine.is_floating_point() or mine.shape != others.shape or mine.dim() not in (2, 3):
            return None
        more[path] = (mine != others).flatten(0, -2).any(-1).nonzero()[:, 0]
        if len(more[path]) != len(positions):
            return None
    tokens = _tokens(arguments, entry, positions, more)
    name = f"{type(decoder).__name__}: {entry}"
    return DecoderCut(name, model, inputs, tokens, decoder, entry, arguments, positions, more)


def text_of(inputs: Mapping[str, Any]) -> Int[Tensor, "1 t"]:
    """Return the text that the model reads or continues."""
    text: Tensor = inputs["decoder_input_ids"] if "decoder_input_ids" in inputs else inputs["input_ids"]
    return text


def tensor_of(output: Any) -> Tensor | None:
    """Return the sequence (1, n, C) in a module's output: itself, or the first part of that form."""
    parts = list(output.values()) if isinstance(output, Mapping) else output
    parts = parts if isinstance(parts, (tuple, list)) else [parts]
    fitting = (part for part in parts if isinstance(part, Tensor) and part.dim() == 3 and part.is_floating_point())
    return next((part for part in fitting if part.shape[0] == 1), None)


def repeated(value: Any, count: int) -> Any:
    """Return an argument for a batch; caches are left out."""
    if isinstance(value, Tensor):
        if value.dim() and value.shape[0] == 1:
            return value.expand(count, *value.shape[1:])
        if value.dim() > 1 and value.shape[1] == 1:  # positions of three kinds come first in Qwen-VL
            return value.expand(value.shape[0], count, *value.shape[2:])
        return value
    if isinstance(value, dict):
        return {name: repeated(each, count) for name, each in value.items()}
    return None if type(value).__name__.endswith("Cache") else value


def _tensors(arguments: Mapping[str, Any]) -> dict[ArgumentPath, Tensor]:
    """Return the arguments that are tensors, and the tensors of those that are lists."""
    found: dict[ArgumentPath, Tensor] = {}
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            found[name,] = value
        elif isinstance(value, (list, tuple)):
            found |= {(name, number): each for number, each in enumerate(value) if isinstance(each, Tensor)}
    return found


def _tokens(
    arguments: Mapping[str, Any], entry: Entry, positions: Tensor, more: Mapping[ArgumentPath, Tensor]
) -> Float[Tensor, "n c"]:
    tensors = _tensors(arguments)
    parts = [arguments[entry][0, positions], *(tensors[path].flatten(0, -2)[rows] for path, rows in more.items())]
    return torch.cat([part.to(parts[0].dtype) for part in parts], -1)


def _without(mask: Any, positions: Tensor) -> Any:
    """Return a mask that hides some positions; None, which hides nothing, has no place for them."""
    if not isinstance(mask, Tensor):
        return mask
    hidden = torch.finfo(mask.dtype).min if mask.is_floating_point() else 0
    return mask.clone().index_fill_(-1, positions, hidden)


_replaced: dict[int, str | None] = {}
_users: Counter[int] = Counter()
_lock = threading.Lock()


@contextmanager
def attending_by_sdpa(model: nn.Module, *kept: str | None) -> Iterator[None]:
    """Let a function of PyTorch's compute all attention in the block; implementations in ``kept`` stay as they are.

    Threads that share a model share this setting; the last one to leave restores it.
    """
    configs: dict[int, Any] = {id(each.config): each.config for each in model.modules() if hasattr(each, "config")}
    with undisturbed():
        with _lock:
            names = {key: getattr(config, "_attn_implementation_internal", "sdpa") for key, config in configs.items()}
            used = [key for key, name in names.items() if key in _replaced or name not in ("sdpa", *kept)]
            for key in used:
                _replaced.setdefault(key, names[key])
                _users[key] += 1
                configs[key]._attn_implementation_internal = "sdpa"
        try:
            with interruptible():
                yield
        finally:
            with _lock:
                for key in used:
                    _users[key] -= 1
                    if not _users[key]:
                        configs[key]._attn_implementation_internal = _replaced.pop(key)
