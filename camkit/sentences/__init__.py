"""``words()``: what a vision-language model looked at for each word, and which words need no picture.

The picture's tokens enter the decoder in one tensor. Other pictures' tokens are put in their place, with the same words
before: how much less probable a word becomes says how much it needs this picture, and expected gradients between the
two say where its evidence lies. So both are one number, cell by cell.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from camkit.errors import refusing_exit
from camkit.sentences.explain import DEFAULT, WORD_METHODS, SentenceReader, words_of_files
from camkit.sentences.result import Word, Words
from camkit.types import ImageLike, ReferencesLike

__all__ = ["WORD_METHODS", "Word", "Words", "words", "words_of_files"]


@refusing_exit()
def words(
    model: nn.Module,
    image: ImageLike | Sequence[ImageLike],
    prompt: str | None = None,
    *,
    processor: Any = None,
    words: str | None = None,
    references: ReferencesLike | None = None,
    method: str = DEFAULT,
    max_new_tokens: int = 64,
    only: str | None = None,
    picture: int = 0,
) -> Words:
    """Explain each word that a vision-language model writes about a picture.

    Args:
        model: a Hugging Face model that writes text about a picture.
        image: the picture: a path, a PIL picture or an array (H, W, 3); or several in a list, which share one prompt.
        prompt: the question. If the processor has a chat template, it is put into that.
        processor: the model's processor; by default that of the folder from which the model was loaded.
        words: a sentence to explain instead of the one that the model writes.
        references: other pictures to compare with, a folder or a list; 8 are enough. By default 8 of smooth noise
            and 8 plain grey ones.
        method: "expected", "attention", "attention-expected" or "tam"; see docs/words.md.
        max_new_tokens: the most tokens that the model writes.
        only: draw the heat of this word only.
        picture: the number of the picture to explain if there are several, from 0; the others stay as they are.

    Returns:
        The words, each with its probability, how much it needs the picture in nats, and its heat.

    Raises:
        InputError: the call is wrong, or the model writes nothing.
        ImageError: a picture cannot be read.
        ModelError: camkit cannot find where the picture enters the part that writes, or the model has only tokens
            that each look at the whole picture.

    Examples:
        >>> import camkit  # doctest: +SKIP
        >>> found = camkit.words(model, "dog.jpg", "What is on the picture?", references="photos/")  # doctest: +SKIP
        >>> [(word.text, word.needs_picture) for word in found]  # doctest: +SKIP
    """
    reader = SentenceReader(
        model, processor, prompt, words=words, method=method, max_new_tokens=max_new_tokens, only=only
    )
    return reader.explain(image, references, picture)
