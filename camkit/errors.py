"""Every error that camkit itself raises.

    CamkitError
    ├── InputError          the call or a file is wrong (exit code 2); also a ValueError
    │   ├── ImageError      a picture cannot be read or has the wrong form
    │   ├── ModelError      the model is unknown, its weights do not fit, or it cannot be explained
    │   ├── LayerError      the layer does not exist, has no grid or runs several times, or none can be chosen
    │   ├── MethodError     the method is unknown, or the model's head does not allow it
    │   ├── TargetError     the output does not have this class, label or score
    │   └── OutputError     a file cannot be written
    └── RunError            the model or the program failed (exit code 4); also a RuntimeError

An exception raised by the user's own model, preprocessing or target passes through unchanged. The one exception is
``sys.exit()`` in a check or in a command: it becomes a RunError, because a program that ends without a verdict must not
look like one that passed.

All text that people read passes through ``printable``: on the terminal, in annotations, Markdown, JUnit and HTML.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import operator
import re
import stat
import sysconfig
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any


class CamkitError(Exception):
    """The base of all errors; each message is one sentence for the person who made the call."""

    exit_code = 4


class InputError(CamkitError, ValueError):
    """The call or a file is wrong, and nothing was computed."""

    exit_code = 2


class ImageError(InputError):
    """A picture cannot be read, or its shape or type does not fit the model."""


class ModelError(InputError):
    """The model is unknown, its weights do not fit, or camkit cannot explain models of its kind."""


class LayerError(InputError):
    """The target layer does not exist, has no spatial grid, or cannot be chosen."""


class MethodError(InputError):
    """The method is unknown, its weights have the wrong shape, or the model's head does not allow it."""


class TargetError(InputError):
    """The model's output does not have this class, label or score."""


class OutputError(InputError):
    """A file cannot be written."""


class RunError(CamkitError, RuntimeError):
    """The model or the program failed while running."""


_LONGEST_QUOTE = 200
"""An error quotes at most this many characters of another error: a parser may repeat a whole damaged file."""


def brief(error: object) -> str:
    r"""Return the message of another error on one line, cut off if it is long.

    >>> brief(ValueError("line 1:\n  no number"))
    'line 1: no number'
    >>> brief(KeyError("path"))
    "'path' is missing"
    """
    text = " ".join((f"{error} is missing" if isinstance(error, KeyError) else str(error)).split())
    if not text and isinstance(error, BaseException):
        text = type(error).__name__  # a MemoryError, for example, says nothing
    return text[:_LONGEST_QUOTE] + "..." * (len(text) > _LONGEST_QUOTE)


@contextlib.contextmanager
def as_error(kind: Callable[[str], CamkitError], said: Callable[[Exception], str]) -> Iterator[None]:
    """Raise an error of camkit's in place of whatever the block raises: libraries raise anything on damaged files.

    Args:
        kind: the class of the error. Errors of camkit's own pass through.
        said: makes its sentence of the other error.
    """
    try:
        yield
    except CamkitError:
        raise
    except Exception as error:
        raise kind(said(error)) from error


def refuse(*problems: tuple[object, str], kind: type[InputError] = InputError) -> None:
    """Refuse a call because of the first of its problems, each a condition and the sentence about it.

    Raises:
        InputError: a condition is true; ``kind`` is the class of the error.
    """
    for is_so, sentence in problems:
        if is_so:
            raise kind(sentence)


def optional(module: str, needs: str) -> Any:
    """Return a module of a package that camkit does not require; ``needs`` says what needs it and how to install it.

    Raises:
        InputError: it cannot be imported.
    """
    with as_error(InputError, lambda _: needs):
        return importlib.import_module(module)


def own_place(error: BaseException) -> str:
    """Return ``" in FILE, line N"``: the innermost line of the user's own code in the traceback; "" if none."""
    libraries = ("<", str(Path(__file__).parent), sysconfig.get_path("stdlib"))
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        file = frame.f_code.co_filename
        if not file.startswith(libraries) and {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts):
            return f" in {file}, line {line}"
    return ""


class _Door:
    """Through which door the calls come: Python, or the command line."""

    is_shell = False


@contextlib.contextmanager
def advising_shell() -> Iterator[None]:
    """Give advice for the command line inside the block, in all threads."""
    _Door.is_shell = True
    try:
        yield
    finally:
        _Door.is_shell = False


def advice(python: str, shell: str) -> str:
    """Return the advice that fits the door the call came through: an argument in Python, an option in a shell.

    >>> print("the weights are missing; pass", advice("weights=...", "--weights FILE"))
    the weights are missing; pass weights=...
    """
    return shell if _Door.is_shell else python


def listing_layers() -> str:
    """Return what lists a model's layers."""
    return advice("model.named_modules() lists them", "camkit layers --model NAME lists them")


def refuse_pipe(path: Path, kind: type[InputError] = InputError) -> None:
    """Refuse what is neither a file nor a folder: a pipe waits until somebody writes into it, and a device never ends.

    Whoever opens the path reports that it does not exist.

    Raises:
        InputError: it is a pipe or a device; ``kind`` is the class of the error.
    """
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return
    is_pipe = not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)
    if is_pipe:
        raise kind(f"{path} is a pipe or a device; save its contents to a file and pass that")


def whole_number(value: Any, what: str, least: int | None = None, kind: type[InputError] = InputError) -> int:
    """Return a whole number of any type, numpy's and tensors' included, as an int.

    Raises:
        InputError: the value is not a whole number, or below ``least``; ``kind`` is the class of the error.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or (least is not None and number < least):
        raise kind(f"{what} must be a whole number{'' if least is None else f' from {least}'}, not {value!r}")
    return number


def refuse_unknown_options(function: Callable[..., Any], options: Iterable[str], known: Collection[str]) -> None:
    """Refuse options that a function does not have, as Python refuses arguments that are not in its signature.

    Raises:
        TypeError: an option is not among the known ones; the message suggests the nearest argument of the function.
    """
    unknown = next((name for name in options if name not in known), None)
    if unknown is not None:
        parameters = inspect.signature(function).parameters.values()
        named = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
        hint = did_you_mean(unknown, [*named, *known])
        raise TypeError(f"{function.__name__}() got an unexpected keyword argument {unknown!r}{hint}")


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return ``"; did you mean 'a' or 'b'?"`` with up to 5 near choices, or an empty string if none is similar.

    Choices that contain all words of ``word`` come first, then those with similar letters. If there are none, a choice
    with a similar word is near.

    >>> did_you_mean("resnet5", ["resnet50", "vgg16"])
    "; did you mean 'resnet50'?"
    >>> did_you_mean("cat", ["Egyptian cat", "cart", "tiger cat"])
    "; did you mean 'Egyptian cat' or 'tiger cat' or 'cart'?"
    >>> did_you_mean("dungenes", ["Dungeness crab", "cab"])
    "; did you mean 'Dungeness crab'?"
    """
    by_folded = {choice.lower(): choice for choice in choices}
    wanted = _words(word)
    containing = [folded for folded in by_folded if wanted and wanted <= _words(folded)]
    similar = difflib.get_close_matches(word.lower(), list(by_folded))
    if not similar and not containing:
        of_words = {part: folded for folded in by_folded for part in _words(folded)}
        near = difflib.get_close_matches(word.lower(), list(of_words))
        similar = [of_words[part] for part in near]
    return _question(by_folded[folded] for folded in [*dict.fromkeys([*containing, *similar])][:5])


def nearest_numbers(name: str, choices: Iterable[str]) -> str:
    """Return ``"; did you mean 'a'?"`` with choices that differ from a name in its numbers only, the nearest first.

    The first number counts most.

    >>> nearest_numbers("features.99", ["features.9.conv", "features.9", "features.18"])
    "; did you mean 'features.18' or 'features.9'?"
    """
    wanted = _numbers(name)

    def distances(choice: str) -> list[int]:
        return [abs(number - other) for number, other in zip(_numbers(choice), wanted, strict=True)]

    alike = [choice for choice in choices if _NUMBER.sub("#", choice) == _NUMBER.sub("#", name)]
    return _question(sorted(alike, key=distances)[:3])


def _question(choices: Iterable[str]) -> str:
    listed = " or ".join(map(repr, choices))
    return f"; did you mean {listed}?" if listed else ""


def _words(text: str) -> set[str]:
    return set(re.split(r"[\W_]+", text.lower())) - {""}


_NUMBER = re.compile(r"\d+")


def _numbers(text: str) -> list[int]:
    return [int(digits) for digits in _NUMBER.findall(text)]


@contextlib.contextmanager
def refusing_exit() -> Iterator[None]:
    """Refuse ``sys.exit()`` inside the block, which would end the program without a result, perhaps with code 0.

    Raises:
        RunError: the block raises SystemExit.
    """
    try:
        yield
    except SystemExit as error:
        raise RunError(
            f"the model, its factory or its preprocessing called sys.exit({error.code!r}) before camkit had a result; "
            "remove that call"
        ) from error


_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f"  # control characters: escape sequences, line feeds, C1
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # marks and overrides of the direction of text
    "\u2028\u2029"  # separators of lines and paragraphs
    "\u200b\u2060-\u2064\ufeff\ufff9-\ufffb"  # characters without width; those that join emoji and letters may stay
    "\ud800-\udfff\ufffe\uffff]"  # what UTF-8 or XML cannot hold
)


def without_control(text: str) -> str:
    r"""Return text for a file's name: with a hyphen in place of each character that ``printable`` escapes.

    >>> without_control("cat\x1b[2J\n")
    'cat-[2J-'
    """
    return _UNSAFE.sub("-", text)


def printable(text: str) -> str:
    r"""Return text on one line that cannot control a terminal, a log or the direction of reading.

    Names of files, classes, labels and layers may hold such characters; they are escaped as in Python. Escaping the
    result again changes nothing.

    >>> print(printable("cat\x1b[2J\n::error::"), printable("::error::x"), printable("Käfer 🐞"))
    cat\x1b[2J\n::error:: \x3a:error::x Käfer 🐞
    """
    one_line = _UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
    # Commands that build servers find in a log: GitHub's at the start of a line, those of Azure and TeamCity anywhere
    command = r"^\s*:(?=:)|#(?=#\w*\[)"
    return re.sub(command, lambda match: f"{match[0][:-1]}\\x{ord(match[0][-1]):02x}", one_line)


def as_cell(text: str) -> str:
    """Return text for a cell of a CSV, with an apostrophe before it if a spreadsheet program could run it as a formula.

    >>> as_cell("=1+1"), as_cell("-a.jpg"), as_cell("-0.5"), as_cell("a=b"), from_cell(as_cell("'=1"))
    ("'=1+1", "'-a.jpg", '-0.5', 'a=b', "'=1")
    """
    return f"'{text}" if _is_formula(text) else text


def text_of(name: str | Path) -> str:
    r"""Return text that every table can hold: bytes of a file's name that are not text are escaped as in Python.

    >>> import os
    >>> text_of(os.fsdecode(b"a\xff.jpg"))
    'a\\xff.jpg'
    """
    return str(name).encode(errors="surrogateescape").decode(errors="backslashreplace")


def from_cell(text: str) -> str:
    """Return the text that was passed to ``as_cell``."""
    return text[1:] if text.startswith("'") and _is_formula(text) else text


def _is_formula(text: str) -> bool:
    """Return whether text without leading apostrophes is a formula, so that ``from_cell`` removes only added ones.

    These signs start a formula in spreadsheet programs, also in full width. A number on its own is not a formula.
    """
    rest = text.lstrip("'")
    is_number = re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", rest)
    return re.match("[=+@\\-\t\r\n\uff0b\uff0d\uff1d\uff20]", rest) is not None and is_number is None


def as_markdown(text: str) -> str:
    r"""Return text on one line, escaped so that Markdown shows it literally.

    >>> print(as_markdown("layer_1 | 2"))
    layer\_1 \| 2
    """
    return re.sub(r"([\\`*_{}\[\]<>|#])", r"\\\1", printable(text))
