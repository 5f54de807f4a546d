"""The methods for words, and from a picture and a prompt to the words that a model writes, each with its heat."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from PIL import Image
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from camkit.engine.guard import guarded, interruptible
from camkit.errors import ImageError, InputError, MethodError, ModelError, as_cell, whole_number
from camkit.explaining.explanation import Explanation, LayerMaps, status_of
from camkit.images.files import check_folder, csv_line, write_file
from camkit.images.listing import FoundPicture, Pictures
from camkit.images.prepare import MOST_REFERENCES, source_of
from camkit.kit.picture_names import drawing_names
from camkit.kit.wording import counted
from camkit.methods import METHODS
from camkit.sentences.cut import Cut, DecoderCut, attending_by_sdpa
from camkit.sentences.inputs import Inputs, Text, load, processor_beside, read, reference_pictures
from camkit.sentences.places import Places, find_cut, in_order
from camkit.sentences.result import NUMBERS, PREDICTABLE, Word, Words, spans
from camkit.types import Failure, ImageLike, Placement, ReferenceScores, ReferencesLike

_ROOM = 0.5
"""The memory of a pass's activations, as a share of the weights': the total stays below 1.5 times the weights."""

_MOST_POINTS = 8
"""Points on the way from each reference, at most."""


@dataclass(frozen=True, eq=False)
class Reading:
    """What the model was asked and answered, and what the words score.

    Attributes:
        found: the words, without heat.
        text: the prompt's tokens and the sentence's.
        cut: where the picture's tokens are taken.
        places: where they look.
        references: the tokens of the reference pictures (M, n, C).
        own, mean: the log-probabilities of the words (W,) with this picture, and their means over the references.
    """

    found: Words
    text: Text
    cut: Cut
    places: Places
    references: Float[Tensor, "m n c"]
    own: Float[Tensor, " w"]
    mean: Float[Tensor, " w"]


def scores(
    cut: Cut, text: Text, words: Sequence[range], tokens: Float[Tensor, "m n c"], *, attend: bool = True
) -> Float[Tensor, "m w"]:
    """Return the log-probability of each word after those before it: that of its tokens, added.

    Args:
        cut: where the picture's tokens are replaced.
        text: the text.
        words: the tokens of its words among those of the sentence, one word or more.
        tokens: M versions of the picture's tokens.
        attend: False hides the picture from the text.
    """
    logits = cut.logits(tokens, attend=attend, keep=len(text.ids) - text.places[0] + 1)
    places = [text.places[token] for word in words for token in word]
    earlier = len(text.ids) - logits.shape[1]
    before = logits[:, [place - 1 - earlier for place in places]].float().log_softmax(-1)
    each = before.gather(-1, text.ids[places].expand(len(logits), -1)[..., None])[..., 0]
    return torch.stack([part.sum(1) for part in each.split(list(map(len, words)), dim=1)], 1)


def expected_gradients(reading: Reading, words: Sequence[int]) -> Float[Tensor, "w n"]:
    """Give token i the mean over the references B of (A_i - B_i) dS/dA_i, taken at points B + a (A - B).

    S is a word's log-probability. The tokens sum to S minus its mean over the references, but for the error of so
    short a sum (Erion et al. 2021, arXiv:1906.10670). In each round, each reference has one a, and together they lie
    evenly in (0, 1). A word takes part in further rounds until its sum is close.

    The first pass takes one reference, and says how many more fit into a pass.
    """
    cut, references, needs = reading.cut, reading.references, (reading.own - reading.mean)[list(words)]
    tokens = [reading.found[word].tokens for word in words]
    total = torch.zeros(len(needs), len(cut.tokens), device=needs.device)
    rounds = torch.zeros(len(needs), device=needs.device)
    at_once = 1
    for number in range(_MOST_POINTS):
        missing = (total.sum(1) / rounds.clamp(min=1) - needs).abs()
        # The sum is close if it is within a fifth of what the word needs, or a tenth of a nat
        active = torch.nonzero((rounds == 0) | (missing > (0.2 * needs.abs()).clamp(min=0.1))).flatten().tolist()
        if not active:
            break
        shares = _shares(len(references), number).to(references.device)
        done = 0
        while done < len(references):
            part = slice(done, done + at_once)
            steps = cut.tokens.float() - references[part].float()
            points = (references[part].float() + shares[part, None, None] * steps).requires_grad_()
            with torch.enable_grad(), _counted(cut.model) as taken:
                of_words = scores(cut, reading.text, tokens, points).sum(0)
            for word in active:
                (slope,) = torch.autograd.grad(of_words[word], points, retain_graph=word != active[-1])
                total[word] += (slope * steps).sum((0, 2)).detach() / len(references)
            done += at_once
            if number == 0 and done == 1:
                weights = sum(parameter.untyped_storage().nbytes() for parameter in cut.model.parameters())
                fitting = int(_ROOM * weights / max(sum(taken.values()), 1))  # references in a pass
                at_once = max(min(fitting, len(references)), 1)
        rounds[active] += 1
    return total / rounds[:, None]


@contextmanager
def _counted(model: nn.Module) -> Iterator[dict[int, int]]:
    """Count the bytes that a pass keeps for its gradients, without the model's weights."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    taken: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            taken[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield taken


def _shares(count: int, number: int = 0) -> Float[Tensor, " count"]:
    """Return a point in each of ``count`` equal parts of (0, 1), in random order, the same in every run.

    Args:
        count: the number of parts.
        number: the number of the round. Each moves all points on by the golden ratio, so that those of one reference
            lie evenly too.
    """
    generator = torch.Generator().manual_seed(0)
    points = (torch.randperm(count, generator=generator) + torch.rand(count, generator=generator)) / count
    return (points + number * ((5**0.5 - 1) / 2)) % 1


def attention_rows(reading: Reading, words: Sequence[int]) -> Float[Tensor, "w n"]:
    """Return how much the tokens that predict each word attend to the picture's: mean over layers, heads and tokens.

    Only these rows are computed, from queries and keys; the attention itself runs as usual.

    Raises:
        ModelError: the words do not attend to the picture's tokens, or not through an attention that camkit can read.
    """
    # for each word, the positions of the text from which its tokens are predicted
    rows = [[reading.text.places[token] - 1 for token in reading.found[word].tokens] for word in words]
    cut = reading.cut
    wanted = sorted({place for places in rows for place in places})
    layers: list[Tensor] = []
    if isinstance(cut, DecoderCut) and ("decoder_input_ids" not in cut.inputs or cut.entry == "encoder_hidden_states"):
        with torch.no_grad(), attending_by_sdpa(cut.decoder), _Recorder(wanted, cut.entering.shape[1]) as recorder:
            cut.output(cut.tokens[None])
        layers = [attended[:, cut.positions] for attended in recorder.layers]
    if not layers:
        raise ModelError(
            f"camkit cannot read how {type(cut.model).__name__} attends to the picture's tokens; use method='expected'"
        )
    mean = torch.stack(layers).mean(0)
    return torch.stack([mean[[wanted.index(place) for place in places]].mean(0) for places in rows])


class _Recorder(TorchFunctionMode):
    """Records rows of attention on a sequence of the given length, each (rows, length), in the current thread."""

    def __init__(self, wanted: list[int], length: int) -> None:
        super().__init__()
        self.layers: list[Tensor] = []
        self._wanted, self._length = wanted, length

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if function is nn.functional.scaled_dot_product_attention:
            self._record(*args, **options)
        return function(*args, **options)

    def _record(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,  # noqa: ARG002 - these are the arguments of PyTorch's function
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,  # noqa: ARG002
        is_causal: bool = False,
        scale: float | None = None,
        **_: Any,
    ) -> None:
        """Record rows of softmax(q k / sqrt(d)), the mean over the heads."""
        if query.dim() != 4 or key.shape[2] != self._length or query.shape[2] <= max(self._wanted):
            return
        rows = query[0, :, self._wanted].float()
        keys = key[0].float().repeat_interleave(query.shape[1] // key.shape[1], 0)
        scores = rows @ keys.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
        if attn_mask is not None:
            part = attn_mask.expand(*query.shape[:3], self._length)[0, :, self._wanted]
            scores = scores.masked_fill(~part, -torch.inf) if part.dtype is torch.bool else scores + part
        elif is_causal:
            places = torch.arange(self._length, device=keys.device)
            scores = scores.masked_fill(places > places[self._wanted, None], -torch.inf)
        self.layers.append(scores.softmax(-1).mean(0))


@torch.no_grad()
def activation_maps(reading: Reading, words: Sequence[int]) -> Float[Tensor, "w n"]:
    """Return each word's token activation map (TAM), before the filter: the mean over the word's tokens.

    Li et al. 2025, Token Activation Map to Visually Explain Multimodal LLMs, ICCV (arXiv:2506.23270): where the model's
    output layer finds the word in the picture's tokens, without gradients. A token's map is the positive part of its
    logit at each of the picture's tokens. The tokens before it leave their own maps there, so a multiple of their mean
    is subtracted. Last, a filter over the ranks of 3 x 3 neighbours removes single outliers.

    Raises:
        ModelError: the picture's tokens are not among the text's, so they have no logits.
    """
    cut, text = reading.cut, reading.text
    if not isinstance(cut, DecoderCut) or cut.entry != "inputs_embeds" or cut.entering.shape[1] != len(text.ids):
        raise ModelError(
            f"{type(cut.model).__name__} has no logits at the picture's tokens, which method='tam' needs; "
            "use method='expected'"
        )
    columns, ids = text.ids.unique(return_inverse=True)  # a vocabulary has 100,000 columns and more
    logits = cut.logits(cut.tokens[None])[0][:, columns].clamp(min=0)
    maps = [
        [_own(logits, ids, cut.positions, text.places[token]) for token in reading.found[word].tokens] for word in words
    ]
    return torch.stack([torch.stack(parts).mean(0) for parts in maps])


def _own(
    logits: Float[Tensor, "t v"], ids: Int[Tensor, " t"], picture: Int[Tensor, " n"], place: int
) -> Float[Tensor, " n"]:
    """Return the map of one token, less what the tokens between the picture and it explain; equal ones do not count.

    Each earlier token counts as much as its state predicts this token. Least squares fit the multiple of their mean.
    """
    wanted = ids[place]
    between = torch.arange(int(picture.max()) + 1, place, device=ids.device)
    earlier = between[ids[between] != wanted]
    own, asks = logits[picture, wanted], logits[earlier, wanted]
    others = logits[picture][:, ids[earlier]] @ asks
    length = others @ others
    return own if length == 0 else (own - (own @ others) / length * others).clamp(min=0)


def filtered(cells: Float[Tensor, "h w"]) -> Float[Tensor, "h w"]:
    """Return the rank Gaussian filter of a map that is nowhere negative.

    Each cell becomes a mean of its ranked neighbours; their weights fall with the distance from the middle rank, as a
    Gaussian whose width in ranks is the neighbours' standard deviation over their mean. Outside, the map is reflected;
    a single row or column is repeated.
    """
    around = cells[None, None]
    for axis, padding in ((2, (0, 0, 1, 1)), (3, (1, 1, 0, 0))):
        around = nn.functional.pad(around, padding, mode="reflect" if around.shape[axis] > 1 else "replicate")
    ranked = nn.functional.unfold(around, 3)[0].sort(0).values
    mean = ranked.mean(0)
    width = (ranked.std(0, correction=0) / mean).nan_to_num().clamp(min=torch.finfo(torch.float32).tiny ** 0.25)
    ranks = torch.arange(len(ranked), device=cells.device)[:, None] - len(ranked) // 2
    weights = (-(ranks**2) / (2 * width**2)).exp()
    return ((ranked * weights).sum(0) / weights.sum(0)).reshape(cells.shape)


@dataclass(frozen=True)
class WordMethod:
    """One way to make the heat of words.

    Attributes:
        maps: ``maps(reading, words)`` makes the heat of words, named by their numbers, at the picture's tokens (W, n);
            it refuses a model that lacks what the method needs.
        unit: what the values are, as the first words of a caption.
        compares: True if the cells sum to how much the word needs the picture, compared with the references.
        smooth: True if single outliers on the grid are removed.
    """

    maps: Callable[[Reading, Sequence[int]], Float[Tensor, "w n"]]
    unit: str
    compares: bool = False
    smooth: bool = False


DEFAULT = "expected"
"""The method for words unless the caller names one."""

WORD_METHODS = {
    "expected": WordMethod(expected_gradients, METHODS["expected"].unit, compares=True),
    "attention": WordMethod(attention_rows, "Share of attention"),
    "attention-expected": WordMethod(
        lambda reading, words: attention_rows(reading, words) * expected_gradients(reading, words).clamp(min=0),
        "Share of attention times expected gradients",
    ),
    "tam": WordMethod(activation_maps, "Logit at the picture's token, less what earlier words explain", smooth=True),
}
"""Every method for words by its name."""


class SentenceReader:
    """Lets a model read pictures with one prompt, and keeps where its tokens look in pictures of one size.

    Args:
        model: the model, or the name under which it is loaded.
        processor: its processor; by default that of the folder from which the model was loaded.
        prompt: the prompt as the user writes it; None for none.
        device: where a named model runs.
        words, method, max_new_tokens, only: as for ``camkit.words``.

    Raises:
        MethodError: there is no such method.
        InputError: the model may write no token.
        ModelError: the model cannot be loaded, or there is no processor beside it.
    """

    def __init__(
        self,
        model: nn.Module | str,
        processor: Any,
        prompt: str | None,
        device: str | None = None,
        words: str | None = None,
        method: str = DEFAULT,
        max_new_tokens: int = 64,
        only: str | None = None,
    ) -> None:
        if method not in WORD_METHODS:
            raise MethodError(f"{method!r} is not a method for words; use one of {', '.join(WORD_METHODS)}")
        max_new_tokens = whole_number(max_new_tokens, "max_new_tokens", 1)
        self._prompt, self._sentence, self._most, self._only = prompt, words, max_new_tokens, only
        self._model, beside = load(model, device) if isinstance(model, str) else (model, None)
        processor = beside if processor is None else processor
        self._processor = processor_beside(self._model) if processor is None else processor
        self._method, self._looks = method, dict[Any, Places | None]()

    def explain(
        self, image: ImageLike | Sequence[ImageLike], references: ReferencesLike | None, picture: int = 0
    ) -> Words:
        """Explain the words that the model writes about a picture, or about one of several in one prompt.

        Raises:
            InputError, ImageError, ModelError: as for ``camkit.words``.
        """
        images: list[ImageLike] = list(image) if isinstance(image, (list, tuple)) else [cast("ImageLike", image)]
        if not 0 <= picture < len(images):
            raise InputError(f"there is no picture {picture}: {counted(len(images), 'picture')} given, numbered from 0")
        sources = [source_of(each, number) for number, each in enumerate(images, start=1)]
        shown = [read(each, source) for each, source in zip(images, sources, strict=True)]
        with guarded(self._model), interruptible():
            self._model.requires_grad_(requires_grad=False)  # a pass then keeps nothing for the weights
            reading = self.read(shown, sources, references, picture)
            found, method = reading.found, WORD_METHODS[self._method]
            wanted = range(len(found)) if self._only is None else found.numbers_of(self._only)
            maps = [reading.places.drawn(each) for each in method.maps(reading, wanted)]
        words = list(found)
        for number, cells in zip(wanted, maps, strict=True):
            raw = filtered(cells) if method.smooth else cells
            words[number] = replace(words[number], explanation=self._explanation(reading, number, raw))
        return replace(found, words=tuple(words))

    def read(
        self, pictures: list[Image.Image], sources: list[str], references: ReferencesLike | None, number: int = 0
    ) -> Reading:
        """Let the model write a sentence about pictures, or take the given one, and score its words.

        Args:
            pictures: the prompt's pictures.
            sources: their names.
            references: other pictures.
            number: the one that is explained; the others never change.

        Raises:
            InputError, ImageError, ModelError: as for ``camkit.words``.
        """
        picture = pictures[number]
        inputs = Inputs(self._model, self._processor, self._prompt, pictures, number)
        prepared = inputs.of(picture)
        given = self._sentence
        text = inputs.written(prepared, self._most) if given is None else inputs.given(prepared, given)
        ids = text.ids[text.places].tolist()
        decode: Callable[[Sequence[int]], str] = inputs.tokenizer.decode
        parts = spans(ids, decode)
        if not parts:
            raise InputError("the model writes no word about this picture; pass words='a sentence' to explain one")
        text = in_order(inputs, prepared, text)
        grey = inputs.with_text(inputs.of(Image.new("RGB", picture.size, (128, 128, 128))), text)
        cut, places = find_cut(inputs, inputs.with_text(prepared, text), grey, picture.size, self._looks)
        others, origin = reference_pictures(references, picture)
        with torch.no_grad():
            score = functools.partial(scores, cut, text, [tokens for _, tokens in parts])
            tokens = torch.stack([cut.tokens_of(inputs.with_text(inputs.of(each), text)) for each in others])
            own, compared = score(cut.tokens[None])[0], torch.cat([score(each[None]) for each in tokens])
            of_grey, of_none = score(cut.tokens_of(grey)[None])[0], score(cut.tokens[None], attend=False)[0]
        mean, spread, least = compared.mean(0), compared.std(0, correction=0), compared.exp().amin(0)
        needs, above_grey, above_none = (
            [float(one) - float(other) for one, other in zip(own, less, strict=True)]
            for less in (mean, of_grey, of_none)
        )
        words = tuple(
            Word(
                part,
                of_part,
                probability=float(own[place].exp()),
                needs_picture=needs[place],
                spread=float(spread[place]),
                above_grey=above_grey[place],
                above_none=above_none[place],
                is_dictated=bool(least[place] >= PREDICTABLE) and any(map(str.isalnum, part)),
            )
            for place, (part, of_part) in enumerate(parts)
        )
        found = Words(
            decode(ids).strip(),
            words,
            picture,
            sources[number],
            inputs.prompt,
            origin,
            written=given is None,
            beside=(*sources[:number], *sources[number + 1 :]),
        )
        return Reading(found, text, cut, places, tokens, own, mean)

    def _explanation(self, reading: Reading, number: int, heat: Float[Tensor, "h w"]) -> Explanation:
        """Return the heat of a word as an Explanation, drawn on the part of the picture that the model sees."""
        raw, found = heat.detach().float().cpu(), reading.found
        box = reading.places.box
        size = max(round(box.bottom - box.top), 1), max(round(box.right - box.left), 1)
        axes = zip((reading.places.rows, reading.places.columns), size, strict=True)
        placement = Placement(positions=tuple(tuple(share * side - 0.5 for share in axis) for axis, side in axes))
        maps = LayerMaps((raw,), (placement,), "mean", size)
        own, mean = float(reading.own[number]), float(reading.mean[number])
        method = WORD_METHODS[self._method]
        return Explanation(
            maps=maps,
            raw=np.asarray(raw.numpy()),
            target=None,
            label=found[number].text,
            score=own,
            probability=float(np.exp(own)),
            layer=reading.cut.name,
            layer_reason="the picture enters the decoder here",
            method=self._method,
            status=status_of(maps, raw.numpy(), influenced=bool(raw.any())),
            box=box,
            shown=found.picture,
            source=found.source,
            quantity="log-probability",
            references=ReferenceScores(found.references, "log-probability", own, mean) if method.compares else None,
            unit=method.unit,
        )


TABLE = "words.csv"
"""The file with a row for each word of all pictures."""


def words_of_files(
    model: nn.Module | str,
    pictures: Iterable[str | Path],
    out: str | Path,
    prompt: str | None = None,
    *,
    processor: Any = None,
    device: str | None = None,
    references: ReferencesLike | None = None,
    together: bool = False,
    **settings: Any,
) -> Iterator[Words | Failure]:
    """Explain the words about picture files, and write a page, a sheet and JSON for each, and a table of several.

    Args:
        model: a Hugging Face model that writes text about pictures, or its name: hf:NAME, or hf: and a folder.
        pictures: files, folders and glob patterns.
        out: the folder for what is written.
        prompt: the question.
        processor: the model's processor; by default that beside the model.
        device: where a named model runs; by default the first of CUDA, MPS and CPU.
        references: what each picture is compared with; by default up to 16 of the others, or some pictures that camkit
            makes if there are no others.
        together: put all pictures into one prompt, and explain each in turn. The default references are made then.
        **settings: the other arguments of ``words``: words, method, max_new_tokens and only.

    Returns:
        For each picture, its ``Words`` with the written files, or a ``Failure`` with the reason. The table is written
        after the last one.

    Raises:
        InputError: the call is wrong; nothing has been computed. While it runs: there is one picture, or all are
            together, and they cannot be explained.
        ModelError: the model cannot be loaded.
        OutputError: a file cannot be written.
    """
    out = Path(out)
    found = list(Pictures(pictures, skip=out))
    if not found:
        raise InputError("name at least one picture or folder")
    check_folder(out)
    reader = SentenceReader(model, processor, prompt, device, **settings)
    return _explained(reader, found, references, out, together=together)


def _explained(
    reader: SentenceReader,
    files: Sequence[FoundPicture],
    references: ReferencesLike | None,
    out: Path,
    *,
    together: bool,
) -> Iterator[Words | Failure]:
    """Explain the pictures one after another, and write the results; the table of several pictures comes last."""
    paths, names = [file.path for file in files], drawing_names({file.path: file.place for file in files})
    # Some of the others, at equal distances
    apart = max(len(paths) // (MOST_REFERENCES + 1), 1)
    compared = references is None and len(paths) > 1 and not together
    pool = list(itertools.islice(_readable(paths[::apart]), MOST_REFERENCES + 1)) if compared else []
    table = [csv_line(("picture", "number", "word", *NUMBERS, "verdict"))]
    for number, path in enumerate(paths):
        others = [other for other in pool if other != path][:MOST_REFERENCES] or references
        try:
            words = reader.explain(paths, references, number) if together else reader.explain(path, others)
        except InputError as error:  # other pictures may be readable, or have the word
            if together or len(paths) == 1:
                raise
            yield Failure(str(path), error)
            continue
        place = out / names[path]
        saved = [words.save(place.with_name(f"{place.name}.words{suffix}")) for suffix in (".html", ".png", ".json")]
        for position, word in enumerate(words):
            numbers = [f"{getattr(word, name):.6g}" for name in NUMBERS]
            table.append(csv_line(map(as_cell, (words.source, str(position), word.text, *numbers, word.verdict))))
        yield replace(words, files=tuple(saved))
    if len(paths) > 1:
        write_file(out / TABLE, b"".join(table))


def _readable(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        with suppress(ImageError):
            read(path, str(path))
            yield path
