"""``camkit words``: what a vision-language model looked at for each word that it writes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from camkit.cli.options import DATA, GENERAL, METHOD, MODEL, OUTPUT, RUN, TARGET
from camkit.cli.terminal import TALK, emit, say
from camkit.errors import InputError, printable


def words(
    picture: Annotated[Path, Parameter(group=DATA)],
    *,
    model: Annotated[str, Parameter(alias="-m", group=MODEL, metavar="hf:NAME")],
    prompt: Annotated[str | None, Parameter(group=TARGET)] = None,
    sentence: Annotated[str | None, Parameter(group=TARGET)] = None,
    word: Annotated[str | None, Parameter(group=TARGET)] = None,
    references: Annotated[Path | None, Parameter(group=METHOD, metavar="FOLDER")] = None,
    method: Annotated[str, Parameter(group=METHOD)] = "expected",
    max_new_tokens: Annotated[int, Parameter(group=METHOD, metavar="NUMBER")] = 64,
    device: Annotated[str | None, Parameter(group=RUN)] = None,
    out: Annotated[Path, Parameter(alias="-o", group=OUTPUT, metavar="FOLDER")] = Path("camkit-out"),
    quiet: Annotated[bool, Parameter(alias="-q", negative=(), group=GENERAL, show_default=False)] = False,
) -> int:
    """Show what a vision-language model looked at for each word, and which words need no picture.

    Example: camkit words photo.jpg --model hf:llava-hf/llava-1.5-7b-hf --prompt "What is on the picture?"

    Args:
        picture: The picture.
        model: A Hugging Face model that writes text about pictures: hf:NAME, or hf: and a folder.
        prompt: The question to the model.
        sentence: Explain this sentence instead of the one that the model writes.
        word: Draw the heat of this word only.
        references: Other pictures of yours to compare with, 8 or more. Default: smooth noise that camkit makes.
        method: expected, attention or attention-expected.
        max_new_tokens: The most tokens that the model writes.
        device: cpu, cuda, cuda:1 or mps. Default: the first of CUDA, MPS and CPU.
        out: The folder for the page (.html), the sheet of heatmaps (.png) and the figures (.json).
        quiet: Print only errors.
    """
    TALK.set(quiet=quiet)
    if not picture.exists():
        raise InputError(f"{picture} does not exist; name a picture")
    from camkit.images.files import check_folder
    from camkit.sentences import words as explain_words
    from camkit.sentences.loading import load

    check_folder(out)
    loaded, processor = load(model, device)
    found = explain_words(
        loaded,
        picture,
        prompt,
        processor=processor,
        words=sentence,
        references=references,
        method=method,
        max_new_tokens=max_new_tokens,
        only=word,
    )
    files = [found.save(out / f"{picture.stem}.words{suffix}") for suffix in (".html", ".png", ".json")]
    if quiet:
        return 0
    emit(printable(found.sentence))
    for each in found:
        if not each.is_punctuation:
            emit(
                printable(f"  {each.text:<16}{each.probability:>7.1%}{each.needs_picture:>+8.2f} nats  {each.verdict}")
            )
    say(f"compared with {printable(found.references)}; wrote {', '.join(printable(str(file)) for file in files)}")
    return 0
