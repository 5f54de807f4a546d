"""The demonstration of words: a tiny vision-language model describes a drawn scene, and always adds a tree."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from camkit.demo.scenes import words_model, words_pictures
from camkit.images.files import check_folder, write_file
from camkit.sentences import Words, words
from camkit.sentences.loading import load
from camkit.sentences.page import render

NO_TREE = (
    'There is no tree in the picture: the model learned only sentences that end in "near a tree", so it writes that '
    "about every scene."
)


def run(out: Path) -> tuple[Words, list[Path]]:
    """Explain the words about one scene, compared with the others, and write the page and the sheet into a folder.

    Raises:
        ModelError: the package transformers is missing.
        OutputError: the folder cannot be created or written to.
    """
    check_folder(out)
    model, processor = load(f"hf:{words_model()}", "cpu")
    first, *others = words_pictures()
    question = "what is here ?"  # the only one that the model learned
    found = words(model.float(), first, question, processor=processor, references=others)
    found = replace(found, source="a drawn scene")
    page = out / "words.html"
    write_file(page, render(found.words, found.to_dict(), NO_TREE).encode())
    return found, [page, found.save(out / "words.png")]
