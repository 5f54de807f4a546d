"""What decides the results of a run, in a form that can be compared: runs with the same fingerprint can be joined."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from camkit.kit.wording import listed
from camkit.methods import METHODS
from camkit.models.loaded import LoadedModel
from camkit.models.modules import black_box_in
from camkit.types import Preprocess

Fingerprint = dict[str, str]

CODE = "code"
"""The part of a fingerprint that ``digest_of_code`` returns."""

_SAMPLE_SIZE = (331, 257)
"""The size of the picture that shows what a preprocessing does: not square, and larger than most inputs."""


def fingerprint(model: LoadedModel, **options: Any) -> Fingerprint:
    """Return what decides the results of a run: a line of text for each of its parts.

    The device and the size of the batches do not count, since they change only the last digits.

    Args:
        model: the model, whose structure, weights and preprocessing count.
        **options: the method, the layers, the targets and whatever else decides the results.
    """
    return {
        "version of camkit": version("camkit"),
        "model": model.name,
        "network": digest(_without_addresses(str(model.module))),
        "weights": digest_of_weights(model.module),
        "preprocessing": digest_of_preprocessing(model.preprocess),
        "labels": digest(describe(model.labels)),
        **{name: describe(value) for name, value in options.items()},
    }


def differences(earlier: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return the names of the parts in which two fingerprints differ, as a phrase; "" if they are the same."""
    names = [name for name in {**now, **earlier} if earlier.get(name) != now.get(name)]
    if len(names) > 1:  # another method or preprocessing mostly lies in another file
        names = [name for name in names if name != CODE]
    return listed(names) if names else ""


def digest(contents: str | bytes | Iterable[str | bytes]) -> str:
    """Return the SHA-256 of a content, or of several one after another, as hexadecimal digits.

    >>> digest("cat") == digest(["c", b"at"])
    True
    """
    state = hashlib.sha256()
    for content in [contents] if isinstance(contents, (str, bytes)) else contents:
        state.update(content.encode(errors="surrogatepass") if isinstance(content, str) else content)
    return state.hexdigest()


def digest_of_code(model: LoadedModel, method: Any = None, targets: Any = None) -> str:
    """Return a checksum of the Python files that define a model, a method and targets, and that they import."""
    named = METHODS.get(method) if isinstance(method, str) else method
    functions = [getattr(named, "weights", named), *(targets if isinstance(targets, (list, tuple)) else [targets])]
    return digest(file.read_bytes() for file in code_files(model, *functions) if file.is_file())


def describe(value: Any, *, within: tuple[int, ...] = ()) -> str:
    """Return text that is the same for the same value in every process, without addresses in memory.

    Args:
        value: anything.
        within: the identities of the objects that hold the value, which may lead back to them.

    >>> describe(["cat", 3]), describe(None), describe({"b", "a"})
    ("['cat', 3]", 'None', "{'a', 'b'}")
    """
    if id(value) in within:
        return "..."
    inner = functools.partial(describe, within=(*within, id(value)))
    for kind, text_of in _TEXTS.items():
        if isinstance(value, kind):
            return text_of(value, inner)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return f"{type(value).__name__}({inner(_fields_of(value))})"
    text = _without_addresses(repr(value))
    attributes = getattr(value, "__dict__", None) if text != repr(value) else None  # the text names only its type
    return f"{text} {inner(dict(attributes))}" if attributes and not isinstance(value, type) else text


def _fields_of(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass with their values."""
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _of_array(array: np.ndarray, inner: Callable[[Any], str]) -> str:
    is_text = array.dtype.kind in "OUSV"  # of strings or objects
    return inner(array.tolist()) if is_text else f"{array.shape} {digest(array.tobytes())}"


def _of_path(path: Path) -> str:
    try:
        return digest(path.read_bytes()) if path.is_file() else str(path)  # a pipe would wait for its writer
    except OSError:
        return str(path)


def _of_function(function: FunctionType, inner: Callable[[Any], str]) -> str:
    code = digest(_code_of(function.__code__))
    return f"{function.__module__}.{function.__qualname__} {code} {inner(_held_by(function))}"


_TEXTS: Mapping[Any, Callable[[Any, Callable[[Any], str]], str]] = {
    Tensor: lambda value, _: f"{tuple(value.shape)} {digest(_bytes_of(value))}",
    np.ndarray: _of_array,
    (list, tuple): lambda value, inner: f"[{', '.join(map(inner, value))}]",
    Path: lambda value, _: _of_path(value),
    # The order of a set differs between processes.
    (set, frozenset): lambda value, inner: f"{{{', '.join(sorted(map(inner, value)))}}}",
    Mapping: lambda value, inner: ", ".join(f"{key}: {inner(item)}" for key, item in value.items()),
    FunctionType: _of_function,
    functools.partial: lambda value, inner: f"partial({inner([value.func, value.args, value.keywords])})",
    MethodType: lambda value, inner: f"{inner(value.__func__)} of {inner(value.__self__)}",
}
"""How values of each kind are described; the second argument describes what they hold."""


def _without_addresses(text: str) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def _held_by(function: FunctionType) -> list[Any]:
    """Return what a function holds: the variables around it, and its default values."""
    held = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # it is empty
            held.append(cell.cell_contents)
    return [*held, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]


def _code_of(code: CodeType) -> Iterable[bytes | str]:
    """Yield the parts of a function's code that decide its result, without its file and line numbers."""
    yield code.co_code
    yield from code.co_names
    for constant in code.co_consts:
        yield from _code_of(constant) if isinstance(constant, CodeType) else [describe(constant)]


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def digest_of_weights(module: nn.Module) -> str:
    """Return a checksum of a module's parameters and buffers."""

    def contents() -> Iterator[str | bytes]:
        for name, value in module.state_dict().items():
            is_tensor = isinstance(value, Tensor) and value.layout is torch.strided
            yield f"{name} {tuple(value.shape)} {value.dtype}" if is_tensor else name
            yield _bytes_of(value) if is_tensor else describe(value)

    return digest(contents())


def digest_of_preprocessing(preprocess: Preprocess | None) -> str:
    """Return a checksum of what a preprocessing makes of a picture: its settings may be anywhere in its code."""
    if preprocess is None:
        return "none"
    noise = np.random.default_rng(0).integers(0, 256, (_SAMPLE_SIZE[1], _SAMPLE_SIZE[0], 3), np.uint8)
    results = [_tried(preprocess, Image.fromarray(noise)) for _ in range(2)]
    return results[0] if results[0] == results[1] else describe(type(preprocess))


def _tried(preprocess: Callable[[Image.Image], Tensor], picture: Image.Image) -> str:
    try:
        return describe(preprocess(picture))
    except Exception as error:  # it may refuse such a picture, and then each picture says so
        return describe(type(error))


def code_files(model: LoadedModel, *more: Any) -> list[Path]:
    """Return the files that define a model's modules, its preprocessing and more objects, and the files they import.

    Code without a file, such as a notebook's, is left out, and so is what installed packages import.

    Args:
        model: the model.
        *more: functions and objects, such as a method or a target.
    """
    objects = [model.preprocess, *getattr(model.preprocess, "transforms", ()), *more]  # the steps of a Compose
    box = black_box_in(model.module)
    objects += [] if box is None else [box.function]
    objects += [part for item in objects for part in (getattr(item, "lambd", None), *_parts(item))]
    definitions = [*objects, *map(type, (*model.module.modules(), *objects))]
    modules: set[ModuleType] = set()
    _add_imported(modules, definitions)
    return sorted({Path(file) for file in map(_file_of, modules) if file is not None})


def _parts(item: Any) -> tuple[Any, ...]:
    """Return the function of a partial, and the object of a bound method."""
    return (item.func,) if isinstance(item, functools.partial) else (getattr(item, "__self__", None),)


def _add_imported(modules: set[ModuleType], definitions: Iterable[Any]) -> None:
    """Add the modules of classes, functions and objects, and those that the user's own ones among them import."""
    for definition in definitions:
        is_module = isinstance(definition, ModuleType)
        module = definition if is_module else sys.modules.get(str(getattr(definition, "__module__", None)))
        if module is not None and module not in modules:
            modules.add(module)
            if not _is_installed(module):
                _add_imported(modules, list(vars(module).values()))


def _is_installed(module: ModuleType) -> bool:
    """Return whether a module belongs to Python or to an installed package, which do not change during a run."""
    file = _file_of(module)
    if file is None or not _PACKAGE_FOLDERS.isdisjoint(Path(file).parts):
        return True
    return any(Path(file).is_relative_to(folder) for folder in (sysconfig.get_path("stdlib"), _CAMKIT))


_PACKAGE_FOLDERS = {"site-packages", "dist-packages"}
"""Folders with these names hold installed packages, in any environment."""

_CAMKIT = str(Path(__file__).parents[1])


def _file_of(module: ModuleType) -> str | None:
    """Return the file that holds a module's Python code, if there is one."""
    file: str | None = getattr(module, "__file__", None)
    return file if file is not None and file.endswith(".py") else None
