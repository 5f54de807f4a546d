"""``camkit words``: what a vision-language model looked at for each word that it writes."""

from __future__ import annotations

from collections.abc import Sequence
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from camkit.cli.options import DATA, GENERAL, METHOD, MODEL, OUTPUT, RUN, TARGET
from camkit.cli.terminal import TALK, emit, fail, say
from camkit.errors import CamkitError, InputError, as_cell, printable

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
    if not pictures:
        raise InputError("name at least one picture or folder")
    from camkit.images.files import check_folder, csv_line, write_file
    from camkit.images.listing import Pictures
    from camkit.kit.picture_names import drawing_names
    from camkit.sentences.folder import COLUMNS, explain_files, explain_together, rows_of
    from camkit.sentences.loading import load

    files = list(Pictures(pictures, skip=out))
    missing = next((file.path for file in files if not file.path.exists()), None)
    if missing is not None:
        raise InputError(f"{missing} does not exist; name pictures or folders")
    check_folder(out)
    loaded, processor = load(model, device)
    options = {"processor": processor, "words": sentence, "method": method, "max_new_tokens": max_new_tokens}
    names = drawing_names({file.path: file.place for file in files})
    failed, table = 0, [csv_line(COLUMNS)]
    explained = (explain_together if together else explain_files)(
        loaded, files, references, prompt=prompt, only=word, **options
    )
    for file, found in explained:
        if isinstance(found, CamkitError):
            if len(files) == 1:
                raise found
            failed += 1
            fail(f"{file.path}: {found}")
            continue
        written = [found.save(out / f"{names[file.path]}.words{suffix}") for suffix in (".html", ".png", ".json")]
        table += [csv_line(map(as_cell, map(str, row))) for row in rows_of(file, found)]
        if json:
            emit(dumps(found.to_dict(), allow_nan=False))
        elif not quiet:
            _print(found, written)
    if len(files) > 1:
        write_file(out / "words.csv", b"".join(table))
        file_of_all = printable(str(out / "words.csv"))
        say(f"{len(files) - failed} pictures explained, {failed} failed; {file_of_all} has all words")
    return 2 if failed else 0


def demo_words(out: Path) -> int:
    """Explain the words of the model that ships with camkit."""
    from camkit.demo.described import run

    _print(*run(out))
    return 0


def _print(found: Words, written: Sequence[Path]) -> None:
    emit(printable(found.sentence))
    for each in found:
        if not each.is_punctuation:
            emit(
                printable(f"  {each.text:<16}{each.probability:>7.1%}{each.needs_picture:>+z8.2f} nats  {each.verdict}")
            )
    say(f"compared with {printable(found.references)}; wrote {', '.join(printable(str(file)) for file in written)}")
