"""Checks the types and shapes in the signatures of camkit's functions while the tests run.

jaxtyping has an import hook for this, but under it the tests took several times as long. It also compiles, from their
source, all packages that camkit is the first to import, such as SciPy. Its decorator checks the arguments twice, and
compiles two functions for each one that it decorates, again in every call if that is a function inside a function.
"""

import ast
import dataclasses
import functools
import sys
import types
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from typing import Any, get_args, get_type_hints

import jaxtyping
from beartype import BeartypeConf, beartype
from beartype.door import die_if_unbearable, is_bearable


class ViolationError(jaxtyping.TypeCheckError):
    """A value does not fit an annotation. Code that catches all exceptions would hide it, so each one is noted."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        violations.append(self)


violations: list[ViolationError] = []
_CONF = BeartypeConf(violation_type=ViolationError)
_known_hints: dict[tuple[str, str, types.CodeType], dict[str, Any]] = {}


def install() -> None:
    """Check everything in camkit that is imported from now on."""
    sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] != "camkit":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    """Puts ``@__checked__`` on every function and class of a module; no bytecode file is read or written."""

    def get_code(self, fullname: str) -> types.CodeType:
        tree = _Decorate().visit(ast.parse(self.get_data(self.path), self.path))
        code: types.CodeType = compile(tree, self.path, "exec", dont_inherit=True)
        return code

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module)["__checked__"] = checked
        super().exec_module(module)


class _Decorate(ast.NodeTransformer):
    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        node.decorator_list.append(_decorator(node))  # the innermost, since others may drop the annotations
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        self.generic_visit(node)
        node.decorator_list.insert(0, _decorator(node))  # the outermost: ``@dataclass`` comes before it
        return node


def _decorator(node: ast.stmt) -> ast.expr:
    return ast.copy_location(ast.Name("__checked__", ast.Load()), node)


def checked(item: Any) -> Any:
    """Return a function that checks its arguments and what it returns; a dataclass checks its fields."""
    if isinstance(item, type):
        if dataclasses.is_dataclass(item) and "__init__" in vars(item):
            item.__init__ = checked(item.__init__)
        return item
    hints = _hints(item)
    function = _checked_by_hand(item, hints) if "<locals>" in item.__qualname__ else _checked_by_beartype(item, hints)
    return _with_own_axes(function) if any(map(_has_shape, hints.values())) else function


def _with_own_axes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let the names of axes stand for the same sizes within one call."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with jaxtyping.jaxtyped("context"):
            return function(*args, **kwargs)

    return call


def _checked_by_beartype(function: types.FunctionType, hints: dict[str, Any]) -> Callable[..., Any]:
    function.__annotations__ = hints
    checking: Callable[..., Any] = beartype(conf=_CONF)(function)
    return checking


def _checked_by_hand(function: Callable[..., Any], hints: dict[str, Any]) -> Callable[..., Any]:
    """Check a function that lives for one call: compiling a check for it would take longer than that call."""
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    hints = {name: hint for name, hint in hints.items() if hint is not Any}

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
            if name in hints:
                die_if_unbearable(value, hints[name], conf=_CONF)
        output = function(*args, **kwargs)
        if "return" in hints:
            die_if_unbearable(output, hints["return"], conf=_CONF)
        return output

    return call


def _hints(function: types.FunctionType) -> dict[str, Any]:
    """Return the annotations as types; one that is unknown while the tests run, or to beartype, accepts anything."""
    key = function.__module__, function.__qualname__, function.__code__  # two dataclasses may have equal code
    if key not in _known_hints:
        annotations = function.__annotations__.items()
        _known_hints[key] = {name: _hint(annotation, function.__globals__) for name, annotation in annotations}
    return _known_hints[key]


def _hint(annotation: Any, names: dict[str, Any]) -> Any:
    holder = types.SimpleNamespace(__annotations__={"it": annotation})
    try:
        hint = get_type_hints(holder, names, include_extras=True)["it"]
        is_bearable(None, hint)  # raises if beartype cannot check such a type, as Self
    except Exception:  # noqa: BLE001 - a NameError, or whatever an annotation raises if a name is missing
        return Any
    return hint


def _has_shape(hint: Any) -> bool:
    if isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray):
        return True
    return any(map(_has_shape, get_args(hint)))


def unchecked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function without its checks, whether they are on or off: it can be called with wrong types."""
    return getattr(function, "__wrapped__", function)
