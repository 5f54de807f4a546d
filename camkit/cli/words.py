"""``camkit words``: what a vision-language model looked at for each word that it writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from camkit.cli.options import DATA, GENERAL, METHOD, MODEL, OUTPUT, RUN, TARGET
from camkit.cli.terminal import TALK, emit, fail, say
from camkit.errors import printable

if TYPE_CHECKING:
    from camkit.sentences import Words


def words(
    *pictures: Annotated[str, Parameter(group=DATA)],
    model: Annotated[str, Parameter(alias="-m", group=MODEL, metavar="hf:NAME")],
    prompt: Annotated[str | None, Parameter(group=TARGET)] = None,
    sentence: Annotated[str | None, Parameter(group=TARGET)] = None,
    word: Annotated[str | None, Parameter(group=TARGET)] = None,
    together: Annotated[bool, Parameter(group=DATA, negative=(), show_default=False)] = False,
    references: Annotated[Path | None, Parameter(group=METHOD, metavar="FOLDER")] = None,
    method: Annotated[str, Parameter(group=METHOD)] = "expected",
    max_new_tokens: Annotated[int, Parameter(group=METHOD, metavar="NUMBER")] = 64,
    device: Annotated[str | None, Parameter(group=RUN)] = None,
    out: Annotated[Path, Parameter(alias="-o", group=OUTPUT, metavar="FOLDER")] = Path("camkit-out"),
    json: Annotated[bool, Parameter(group=OUTPUT, negative=(), show_default=False)] = False,
    quiet: Annotated[bool, Parameter(alias="-q", negative=(), group=GENERAL, show_default=False)] = False,
) -> int:
    """Show what a vision-language model looked at for each word, and which words need no picture.

    Example: camkit words photo.jpg --model hf:llava-hf/llava-1.5-7b-hf --prompt "What is on the picture?"

    Args:
        pictures: Pictures, folders and quoted patterns.
        model: A Hugging Face model that writes text about pictures: hf:NAME, or hf: and a folder.
        prompt: The question to the model.
        sentence: Explain this sentence instead of the one that the model writes.
        word: Draw the heat of this word only.
        together: Put all pictures into one prompt, and show for each picture which words need it.
        references: Other pictures of yours to compare with, 8 or more. Default: the other
            pictures; for a single picture, and with --together, smooth noise and plain greys.
        method: expected, attention, attention-expected or tam.
        max_new_tokens: The most tokens that the model writes.
        device: cpu, cuda, cuda:1 or mps. Default: the first of CUDA, MPS and CPU.
        out: The folder for each picture's page (.html), sheet of heatmaps (.png) and figures (.json), and for the table
            of several pictures (words.csv).
        json: Print one JSON object for each picture.
        quiet: Print only errors.
    """
    TALK.set(quiet=quiet)
    from camkit.sentences.folder import TABLE, words_of_files
    from camkit.types import Failure

    explained = failed = 0
    for found in words_of_files(
        model,
        pictures,
        out,
        prompt,
        device=device,
        references=references,
        together=together,
        words=sentence,
        method=method,
        max_new_tokens=max_new_tokens,
        only=word,
    ):
        if isinstance(found, Failure):
            failed += 1
            fail(f"{found.source}: {found.error}")
            continue
        explained += 1
        if json:
            emit(dumps(found.words.to_dict(), allow_nan=False))
        elif not quiet:
            _print(found.words, found.files)
    if explained + failed > 1:
        say(f"{explained} pictures explained, {failed} failed; {printable(str(out / TABLE))} has all words")
    return 2 if failed else 0


NO_TREE = (
    'There is no tree in the picture: the model learned only sentences that end in "near a tree", so it writes that '
    "about every scene."
)


def demo_words(out: Path) -> int:
    """Explain the words of the model that ships with camkit."""
    _print(*describe_scene(out))
    emit(NO_TREE)
    return 0


def describe_scene(out: Path) -> tuple[Words, list[Path]]:
    """Explain the words about one drawn scene, compared with the others, and write the page and the sheet.

    Raises:
        ModelError: the package transformers is missing.
        OutputError: the folder cannot be created or written to.
    """
    from camkit.demo.scenes import words_model, words_pictures
    from camkit.images.files import check_folder, write_file
    from camkit.sentences import words as words_of
    from camkit.sentences.loading import load
    from camkit.sentences.words import render

    check_folder(out)
    model, processor = load(f"hf:{words_model()}", "cpu")
    first, *others = words_pictures()
    question = "what is here ?"  # the only one that the model learned
    found = words_of(model.float(), first, question, processor=processor, references=others)
    found = replace(found, source="a drawn scene")
    page = out / "words.html"
    write_file(page, render(found.words, found.to_dict(), NO_TREE).encode())
    return found, [page, found.save(out / "words.png")]


def _print(found: Words, written: Sequence[Path]) -> None:
    emit(printable(found.sentence))
    for each in found:
        if not each.is_punctuation:
            emit(
                printable(f"  {each.text:<16}{each.probability:>7.1%}{each.needs_picture:>+z8.2f} nats  {each.verdict}")
            )
    say(f"compared with {printable(found.references)}; wrote {', '.join(printable(str(file)) for file in written)}")
