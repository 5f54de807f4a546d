"""The command line: parses arguments, and turns errors into sentences and exit codes."""

from __future__ import annotations

import errno
import io
import os
import re
import sys
from collections.abc import Sequence
from traceback import TracebackException
from typing import Any, Literal

from cyclopts import App, CycloptsError, MissingArgumentError
from rich.table import Column, Table
from rich.text import Text

import camkit
from camkit.cli import commands
from camkit.cli.options import Common, fill_in, refuse_fractions
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


checks = App(
    name="check",
    help="Check whether a classifier or a detector may ship, or reads the background.",
    usage="Usage: camkit check DATA --model NAME [OPTIONS]\n       camkit check init DATA [OPTIONS]",
    console=QuietConsole(),
)
checks.default(commands.check)
checks.command(commands.init)
app.default(commands.explain)
app.command(checks)
others = (
    "explain",
    "regions",
    "mend",
    "export",
    "compare",
    "judge",
    "app",
    "demo",
    "words",
    "layers",
    "features",
    "concepts",
    "diagnose",
)
for name in others:
    app.command(getattr(commands, name))


@app.command
def methods() -> None:
    """List all methods with their papers."""
    from camkit.methods import METHODS
    from camkit.methods.registry import NEEDS

    headings = "what it weights by", "needs", "time in plain passes", "paper"
    table = Table(Column("method", no_wrap=True), *headings, box=None, pad_edge=False)
    for each in METHODS.values():
        table.add_row(Text(each.name, "bold"), *map(Text, (each.summary, NEEDS[each.needs], each.cost, each.paper)))
    print_table(table, folds=printer().is_terminal)
    printer().print(
        "auto, the default, takes chefer, gradcam-sharpened or gradcam, as the model needs, and hirescam for boxes"
    )


@app.command(name="--install-completion")
def install_completion(shell: Literal["bash", "zsh", "fish", "powershell"] | None = None) -> None:
    """Install the completion of commands and options for your shell.

    Args:
        shell: The shell. Default: the one that runs camkit.
    """
    instead = "name the shell: camkit --install-completion bash"
    with as_error(OutputError, lambda error: f"the completion cannot be written ({brief(error)}); {instead}"):
        file = app.install_completion(shell=shell)
    printer().print(f"wrote {file}; start a new shell to use it", markup=False)


@app.command(name="--overview", show=False)
def overview() -> None:
    """Print the commands and three examples, on one screen of 80 columns and 24 lines."""
    commands = {name: re.split("[:,.]", app[name].help)[0] for name in app if not name.startswith("-")}
    lines = [f"  {name:8}  {what}" for name, what in commands.items()]
    head = "camkit shows which pixels a vision model used.\n"
    tail = (
        "\ncamkit demo                                     # what two networks saw"
        "\ncamkit photo.jpg --model resnet50               # the class, and a drawing"
        "\ncamkit check validation/ --model mine.py:build  # does it read the background?"
        "\n\nAll options: camkit --help, and camkit COMMAND --help"
    )
    emit("\n".join([head, *lines, tail]))


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
    Common().begin()
    try:
        with plain_warnings(), refusing_exit(), advising_shell():
            _refuse_mistakes(typed)
            try:
                command, bound, _ = app.parse_args(typed or ["--overview"], exit_on_error=False, print_error=False)
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
        is_full = getattr(error, "errno", None) == errno.ENOSPC
        if is_full:
            discard_output(sys.stdout)
            fail("the output cannot be written: No space left on device; earlier rows are kept")
        else:
            message = str(TracebackException(type(error), error, None))  # even if the user's class fails to make one
            what = f"{type(error).__name__}: {''.join(message.splitlines()[:1])}"
            fail(f"the model or the program failed{own_place(error)}: {what} (CAMKIT_TRACEBACK=1 shows where)")
        return OutputError.exit_code if is_full else CamkitError.exit_code
    return result if isinstance(result, int) else 0


def _about_call(error: CycloptsError, typed: Sequence[str]) -> str:
    """Return one sentence about a call that does not fit the command's options."""
    if "-" in typed:
        return "camkit does not read pictures from standard input; save the picture to a file and pass the file"
    if isinstance(error.__cause__, InputError):
        return str(error.__cause__)
    missing = getattr(error, "argument", None) if isinstance(error, MissingArgumentError) else None
    if missing is not None and "--model" in missing.names and not {"--model", "-m"} & set(typed):
        return (
            "name the model: --model resnet50 (camkit --help lists the kinds), or name in camkit.toml's [model] table"
        )
    return " ".join(str(error).split())


def _refuse_mistakes(typed: Sequence[str]) -> None:
    """Refuse an empty argument, and a first word that looks like a mistyped command.

    An empty argument comes from an unset variable of the shell; as a path, it would mean the current folder. A name
    with a suffix, a folder or a wildcard is a picture's.
    """
    for number, argument in enumerate(typed, start=1):
        if re.fullmatch(r"(--[\w-]+=)?", argument):
            where = argument[:-1] or f"argument {number}"
            raise InputError(f"{where} is empty; if it comes from a variable, set that variable")
    parent, words = (checks, typed[1:]) if typed[:1] == ["check"] else (app, typed)
    names = [name for name in parent if not name.startswith("-")]
    word = words[0] if words else ""
    if word not in names and re.fullmatch(r"\w([\w-]*\w)?", word) and not os.path.lexists(word):
        hint = "; did you mean '--help'?" if word == "help" else did_you_mean(word, names)
        if hint:
            raise InputError(f"{word!r} is neither a command nor a file{hint}")
