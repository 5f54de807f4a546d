"""The demonstration of words: a tiny vision-language model describes a drawn scene, and always adds a tree."""

from __future__ import annotations

from pathlib import Path

from camkit.demo.scenes import words_model, words_pictures
from camkit.images.files import check_folder
from camkit.sentences import Words, words
from camkit.sentences.loading import load

QUESTION = "what is here ?"
"""The only question that the model learned."""


def run(out: Path) -> tuple[Words, list[Path]]:
    """Explain the words about one scene, compared with the others, and write the page and the sheet into a folder.

    Raises:
        ModelError: the package transformers is missing.
        OutputError: the folder cannot be created or written to.
    """
    check_folder(out)
    model, processor = load(f"hf:{words_model()}", "cpu")
    first, *others = words_pictures()
    found = words(model.float(), first, QUESTION, processor=processor, references=others)
    return found, [found.save(out / f"words{suffix}") for suffix in (".html", ".png")]
