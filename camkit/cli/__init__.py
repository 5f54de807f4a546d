"""The command line: parses arguments and passes them on. Each command imports what it needs only when it runs."""

from __future__ import annotations

import errno
import io
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, CycloptsError, MissingArgumentError, Parameter
from rich.table import Table
from rich.text import Text

import camkit
from camkit.cli.check import checks, demo_check, mend
from camkit.cli.commands import app as look
from camkit.cli.commands import compare, concepts, demo_words, diagnose, features, judge, layers, words
from camkit.cli.explain import explain
from camkit.cli.options import fill_in, refuse_fractions
from camkit.cli.terminal import (
    TALK,
    OutputClosedError,
    QuietConsole,
    discard_output,
    emit,
    fail,
    plain_warnings,
    print_table,
    print_traceback,
    printer,
)
from camkit.errors import (
    CamkitError,
    InputError,
    OutputError,
    advising_shell,
    as_error,
    brief,
    did_you_mean,
    own_place,
    printable,
    refusing_exit,
)

app = App(
    name="camkit",
    version=camkit.__version__,
    help="Show which pixels a vision model used. camkit explains pictures, or runs one of the commands below.\n\n"
    "Example: camkit image.jpg --model resnet50",
    help_format="markdown",  # joins the lines of a docstring again
    usage="Usage: camkit PICTURES --model NAME [OPTIONS]\n       camkit COMMAND --help",
    suppress_keyboard_interrupt=False,
    console=QuietConsole(),
    error_console=QuietConsole(stderr=True),
    config=[refuse_fractions, fill_in],
)


app.default(explain)
for command in (look, checks, compare, concepts, diagnose, explain, features, judge, layers, mend, words):
    app.command(command)


@app.command
def methods() -> int:
    """List all methods with their papers."""
    from camkit.methods import METHODS
    from camkit.methods.registry import NEEDS

    table = Table(box=None, pad_edge=False)
    for heading in ("method", "what it weights by", "needs", "time in plain passes", "paper"):
        table.add_column(heading, no_wrap=heading == "method")
    for each in METHODS.values():
        table.add_row(Text(each.name, "bold"), *map(Text, (each.summary, NEEDS[each.needs], each.cost, each.paper)))
    print_table(table, folds=printer().is_terminal)
    printer().print(
        "auto, the default, takes chefer, gradcam-sharpened or gradcam, as the model needs, and hirescam for boxes"
    )
    return 0


@app.command
def demo(
    *,
    out: Annotated[Path, Parameter(alias="-o", metavar="FOLDER")] = Path("camkit-out"),
    check: Annotated[bool, Parameter(name="--check", negative=(), show_default=False)] = False,
    words: Annotated[bool, Parameter(name="--words", negative=(), show_default=False)] = False,
) -> int:
    """Explain one plane with two networks: one looks at the sky, the other at the plane.

    Args:
        out: The folder for the picture, or for the reports.
        check: Run the background check on both networks instead, with scenes that ship with camkit.
        words: Explain the words of a tiny vision-language model instead; it always adds a tree.
    """
    if check and words:
        raise InputError("--check and --words are two demonstrations; pass one of them")
    if check:
        return demo_check(out)
    if words:
        return demo_words(out)
    from camkit.demo.poster import run

    answers, file = run(out)
    for scene, by_model in answers.items():
        printer().print(Text(scene.replace("-", " on "), "bold"))
        for model, (found, on_object) in by_model.items():
            label = f"{found.name} ({found.probability:.1%})"
            emit(printable(f"  {model:<12} says {label:<16} {on_object:4.0%} of its heat lies on the plane"))
    emit(printable(f"wrote {file}"))
    return 0


@app.command(name="--install-completion")
def install_completion(shell: Literal["bash", "zsh", "fish", "powershell"] | None = None) -> int:
    """Install the completion of commands and options for your shell.

    Args:
        shell: The shell. Default: the one that runs camkit.
    """
    instead = "name the shell: camkit --install-completion bash"
    with as_error(OutputError, lambda error: f"the completion cannot be written ({brief(error)}); {instead}"):
        file = app.install_completion(shell=shell)
    printer().print(f"wrote {file}; start a new shell to use it", markup=False)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    0 means done; ``check`` returns the code of its verdict. 2 means that the call or a file is wrong, and 4 that the
    model or the program failed or called ``sys.exit()``. As in every shell, 130 means interrupted, and 141 means that
    the reader of the output closed it early. ``os._exit()`` and signals end the process at once and cannot be caught.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # the terminal's encoding may lack letters of a name
    typed = sys.argv[1:] if arguments is None else list(arguments)
    TALK.set()
    try:
        with plain_warnings(), refusing_exit(), advising_shell():
            _refuse_empty(typed)
            _refuse_mistyped_command(typed)
            try:
                command, bound, _ = app.parse_args(typed or ["--help"], exit_on_error=False, print_error=False)
            except CycloptsError as error:  # one that the user's code raises later is not a mistake in the call
                fail(_about_call(error, typed))
                return InputError.exit_code
            result: Any = command(*bound.args, **bound.kwargs)
    except CamkitError as error:
        if TALK.verbose:
            print_traceback(error)
        fail(str(error))
        return error.exit_code or CamkitError.exit_code  # a class of the user's may say 0
    except KeyboardInterrupt as error:
        fail(f"interrupted: {error}" if error.args else "interrupted")
        return 130  # as of every shell: 128 plus the number of the signal, SIGINT
    except OutputClosedError:
        discard_output(sys.stdout)
        return 141  # SIGPIPE
    except BaseException as error:  # uncaught, it would end the program with 1, which means FAIL
        if TALK.verbose or os.environ.get("CAMKIT_TRACEBACK"):
            print_traceback(error)
        if isinstance(error.__cause__, StopIteration):  # raised in a generator, it becomes a RuntimeError
            error = error.__cause__
        is_full = getattr(error, "errno", None) == errno.ENOSPC
        if is_full:
            fail("the output cannot be written: No space left on device; earlier rows are kept")
        else:
            what = f"{type(error).__name__}: {_first_line(error)}"
            fail(f"the model or the program failed{own_place(error)}: {what} (CAMKIT_TRACEBACK=1 shows where)")
        return OutputError.exit_code if is_full else CamkitError.exit_code
    return result if isinstance(result, int) else 0


def _about_call(error: CycloptsError, typed: Sequence[str]) -> str:
    """Return one sentence about a call that does not fit the command's options."""
    if "-" in typed:
        return "camkit does not read pictures from standard input; save the picture to a file and pass the file"
    if isinstance(error.__cause__, InputError):
        return str(error.__cause__)
    argument = getattr(error, "argument", None)
    is_missing = isinstance(error, MissingArgumentError) and argument is not None and "--model" in argument.names
    if is_missing and not {"--model", "-m"} & set(typed):
        return (
            "name the model: --model resnet50 (camkit --help lists the kinds), or name in camkit.toml's [model] table"
        )
    return " ".join(str(error).split())


def _first_line(error: BaseException) -> str:
    """Return the first line of an error's message; nothing if the user's class fails to make one."""
    try:
        return (str(error).splitlines() or [""])[0]
    except BaseException:  # whatever it raises, the exit code must not depend on it
        return ""


def _refuse_mistyped_command(typed: Sequence[str]) -> None:
    """Refuse a first word that is neither a command nor a file but looks like a mistyped command.

    A name with a suffix, a folder or a wildcard is a picture's.
    """
    parent, words = (checks, typed[1:]) if typed[:1] == ["check"] else (app, typed)
    commands = [name for name in parent if not name.startswith("-")]
    word = words[0] if words else ""
    if word == "help" and not os.path.lexists(word):
        raise InputError("'help' is neither a command nor a file; did you mean '--help'?")
    if word not in commands and re.fullmatch(r"[\w-]*\w", word) and word[0] != "-" and not os.path.lexists(word):
        hint = did_you_mean(word, commands)
        if hint:
            raise InputError(f"{word!r} is neither a command nor a file{hint}")


def _refuse_empty(arguments: Sequence[str]) -> None:
    """Refuse an empty argument, such as an unset variable of the shell: as a path, it would mean the current folder."""
    for number, argument in enumerate(arguments, start=1):
        if re.fullmatch(r"(--[\w-]+=)?", argument):
            where = argument[:-1] or f"argument {number}"
            raise InputError(f"{where} is empty; if it comes from a variable, set that variable")
