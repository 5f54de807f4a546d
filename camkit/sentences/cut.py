"""Where the picture enters the part of a model that writes: its tokens there, and what the model says for others.

Two forms of a cut serve all families. ``DecoderCut``: the model passes the picture's tokens to a decoder, among its
``inputs_embeds`` or as ``encoder_hidden_states``; the decoder is run alone. ``OutputCut``: the tokens are what some
module returns; the rest of the model runs on other tokens instead.
"""

from __future__ import annotations

import abc
import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from camkit.engine.attach import hooked, mapped, with_tensor, with_tensors
from camkit.engine.guard import interruptible, undisturbed
from camkit.errors import ModelError

Entry: TypeAlias = Literal["inputs_embeds", "encoder_hidden_states"]
"""The arguments with which a decoder may get the picture's tokens."""
ArgumentPath: TypeAlias = tuple[str] | tuple[str, int]
"""An argument by its name, and the number of a tensor in it if it is a list."""


class Enough(Exception):  # noqa: N818 - ends a pass whose rest is not needed
    """Holds what was wanted of the pass."""


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
    def caught(self, inputs: Mapping[str, Any]) -> Float[Tensor, "m c"] | None:
        """Return the tokens of a picture, without running what follows; None if there are none of this form."""

    def tokens_of(self, inputs: Mapping[str, Any]) -> Float[Tensor, "n c"]:
        """Return the tokens of another picture, without running what follows.

        Raises:
            ModelError: the other picture has another number of tokens.
        """
        tokens = self.caught(inputs)
        if tokens is None or tokens.shape != self.tokens.shape:
            raise ModelError(
                f"a reference picture does not give {len(self.tokens)} tokens as the picture does, although both "
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
        rows: which rows of which arguments are the picture's, that of ``entry`` first. The others have a row for each
            of these tokens too (Qwen3-VL's features of earlier layers). A token's values are those of all arguments,
            one after the other.
    """

    decoder: nn.Module = field(repr=False)
    entry: Entry
    arguments: Mapping[str, Any] = field(repr=False)
    rows: Mapping[ArgumentPath, Int[Tensor, " n"]]

    @property
    def entering(self) -> Float[Tensor, "1 l c"]:
        """The whole tensor that holds the picture's tokens."""
        return self.arguments[self.entry]  # type: ignore[no-any-return]

    @property
    def positions(self) -> Int[Tensor, " n"]:
        """The positions of the picture's tokens in it."""
        return self.rows[self.entry,]

    def logits(
        self, tokens: Float[Tensor, "m n c"], *, attend: bool = True, keep: int | None = None
    ) -> Float[Tensor, "m t v"]:
        """Return the logits of the decoder alone."""
        output, last = self.output(tokens, attend=attend), keep or text_of(self.inputs).shape[1]
        logits = getattr(output, "logits", None)
        if logits is None:
            model: Any = self.model
            states = output[0] if isinstance(output, (tuple, Mapping)) else output
            logits = model.get_output_embeddings()(states[:, -last:])
        return logits[:, -last:].float()  # type: ignore[no-any-return]

    def output(self, tokens: Float[Tensor, "m n c"], *, attend: bool = True) -> Any:
        """Run the decoder for M versions of the picture's tokens."""
        count, tensors = len(tokens), _tensors(self.arguments)
        arguments = {name: repeated(value, count) for name, value in self.arguments.items()}
        parts = tokens.split([tensors[path].shape[-1] for path in self.rows], -1)
        for (path, rows), part in zip(self.rows.items(), parts, strict=True):
            old = tensors[path]
            every = old.detach().reshape(1, -1, old.shape[-1]).expand(count, -1, -1)
            new = every.index_copy(1, rows, part.to(old.dtype))
            arguments = with_tensor(arguments, path, new.flatten(0, 1) if old.dim() == 2 else new)
        return self.decoder(**(arguments if attend else arguments | self._hidden(count)))

    def caught(self, inputs: Mapping[str, Any]) -> Float[Tensor, "n c"] | None:
        """Return what the call gets of a picture."""

        def stop(_: nn.Module, __: Any, arguments: dict[str, Any]) -> None:
            fits = arguments[self.entry].shape == self.entering.shape
            raise Enough(_tokens(arguments, self.rows) if fits else None)

        return _until(self.model, inputs, hooked(before=[(self.decoder, stop)]))

    def _hidden(self, count: int) -> dict[str, Any]:
        """Return the arguments that hide the picture."""
        if self.entry == "encoder_hidden_states":
            return {self.entry: torch.zeros_like(self.entering).expand(count, -1, -1)}
        masks = self.arguments.get("attention_mask")
        if not isinstance(masks, Mapping) and not (isinstance(masks, Tensor) and masks.dim() == 4):
            masks = torch.ones(1, self.entering.shape[1], dtype=torch.long, device=self.entering.device)

        def hide(mask: Tensor) -> Tensor:
            hidden = torch.finfo(mask.dtype).min if mask.is_floating_point() else 0
            return mask.clone().index_fill_(-1, self.positions, hidden)

        return {"attention_mask": with_tensors(repeated(masks, count), hide)}


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

    def caught(self, inputs: Mapping[str, Any]) -> Float[Tensor, "m c"] | None:
        """Return what the call makes of a picture."""

        def stop(output: Any) -> Any:
            tensor = tensor_of(output)
            raise Enough(None if tensor is None else tensor[0])

        return _until(self.model, inputs, self._at_call(stop))

    def _at_call(self, act: Callable[[Any], Any]) -> AbstractContextManager[None]:
        calls = itertools.count()

        def hook(_: nn.Module, __: Any, ___: Any, output: Any) -> Any:
            return act(output) if next(calls) == self.number else output

        return hooked(after=[(self.module, hook)])


def _until(model: nn.Module, inputs: Mapping[str, Any], hooks: AbstractContextManager[None]) -> Tensor | None:
    """Run a model until a hook raises ``Enough``, and return the tokens that it holds."""
    try:
        with hooks:
            model(**inputs)
    except Enough as enough:
        return enough.args[0]  # type: ignore[no-any-return]
    return None


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
    rows: dict[ArgumentPath, Tensor] = {(entry,): torch.zeros(0)}
    of_other = _tensors(changed)
    for path, mine in _tensors(arguments).items():
        other = of_other.get(path)
        if other is None or torch.equal(mine, other):
            continue
        if not mine.is_floating_point() or mine.shape != other.shape or mine.dim() not in (2, 3):
            return None
        rows[path] = (mine != other).flatten(0, -2).any(-1).nonzero()[:, 0]
    # As many rows of each, and at least one: the one of ``entry`` is empty if the picture does not change it
    if not len(rows[entry,]) or len(set(map(len, rows.values()))) > 1:
        return None
    name = f"{type(decoder).__name__}: {entry}"
    return DecoderCut(name, model, inputs, _tokens(arguments, rows), decoder, entry, arguments, rows)


def text_of(inputs: Mapping[str, Any]) -> Int[Tensor, "1 t"]:
    """Return the text that the model reads or continues."""
    return inputs["decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"]  # type: ignore[no-any-return]


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


def _tokens(arguments: Mapping[str, Any], rows: Mapping[ArgumentPath, Tensor]) -> Float[Tensor, "n c"]:
    tensors = _tensors(arguments)
    parts = [tensors[path].flatten(0, -2)[numbers] for path, numbers in rows.items()]
    return torch.cat([part.to(parts[0].dtype) for part in parts], -1)


_before: defaultdict[int, list[str | None]] = defaultdict(list)
"""By configuration, what each block that is open has found there: the first one, the model's own implementation."""
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
            used = [key for key, name in names.items() if _before[key] or name not in ("sdpa", *kept)]
            for key in used:
                _before[key].append(names[key])
                configs[key]._attn_implementation_internal = "sdpa"
        try:
            with interruptible():
                yield
        finally:
            with _lock:
                for key in used:
                    configs[key]._attn_implementation_internal = _before[key].pop()
