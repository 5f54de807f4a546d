"""What the project weighs, held as ceilings that only fall: a change that adds to one figure takes away elsewhere.

``python tests/house/test_weight.py`` writes lower figures into ``weight.json``, in the same commit as the change.
``allowances`` there names the features for which the ceilings once rose, with their statements.
"""

import ast
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
CEILINGS = Path(__file__).with_name("weight.json")
NAME_OF_A_CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]+")
BROAD = re.compile(r"\b(Base)?Exception\b")
REPEATED = 4  # a name that is declared this often is a value that wants to exist


def weigh() -> dict[str, int]:
    """Return the figures of the package, its tests and scripts."""
    package = {path: path.read_text() for path in ROOT.glob("camkit/**/*.py")}
    trees = [ast.parse(source) for source in package.values()]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    fields = [part.target.id for class_ in classes for part in class_.body if is_field(part)]
    declared = Counter([*fields, *keywords_of_constructors(nodes)])
    return {
        "statements": sum(isinstance(node, ast.stmt) and not is_docstring(node) for node in nodes),
        "lines": sum(source.count("\n") for source in package.values()),
        "files": len(package),
        "fields": len(fields),
        "dataclasses": sum(
            any("dataclass" in ast.unparse(mark) for mark in class_.decorator_list) for class_ in classes
        ),
        "constants": sum(bool(NAME_OF_A_CONSTANT.fullmatch(name)) for tree in trees for name in module_names(tree)),
        "raises": sum(isinstance(node, ast.Raise) for node in nodes),
        "broad excepts": sum(isinstance(node, ast.ExceptHandler) and is_broad(node) for node in nodes),
        "declarations of repeated names": sum(count for count in declared.values() if count >= REPEATED),
        "private functions used once": used_once(nodes, "\n".join(package.values())),
        "test lines": lines_below("tests"),
        "deep test imports": len(deep_imports()),
        "script lines": lines_below("scripts"),
    }


def is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def is_field(part: ast.stmt) -> bool:
    return isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)


def is_broad(node: ast.ExceptHandler) -> bool:
    return node.type is None or bool(BROAD.search(ast.unparse(node.type)))


def keywords_of_constructors(nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            yield from (argument.arg for argument in node.args.kwonlyargs)


def module_names(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if is_field(node) else []
        yield from (target.id for target in targets if isinstance(target, ast.Name))


def used_once(nodes: list[ast.AST], text: str) -> int:
    """Count the private functions that one other place names."""
    functions = Counter(node.name for node in nodes if isinstance(node, ast.FunctionDef))
    words = Counter(re.findall(r"\b_\w+", text))
    private = (name for name, count in functions.items() if re.match(r"_(?!_)", name) and count == 1)
    return sum(words[name] == 2 for name in private)


def lines_below(folder: str) -> int:
    return sum(path.read_text().count("\n") for path in ROOT.glob(f"{folder}/**/*.py"))


def deep_imports() -> set[tuple[Path, str]]:
    """Return the imports of tests from the inside of a package: more than one name behind ``camkit``."""
    found = set()
    for path in ROOT.glob("tests/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and re.match(r"camkit(\.\w+){2}", node.module or ""):
                found.add((path, node.module or ""))
    return found


def test_nothing_weighs_more_than_it_did() -> None:
    ceilings, now = json.loads(CEILINGS.read_text()), weigh()
    rose = {name: f"{ceilings[name]} -> {value}" for name, value in now.items() if value > ceilings[name]}
    assert not rose, "pay for it: take something away elsewhere"
    fell = {name: f"{ceilings[name]} -> {value}" for name, value in now.items() if value < ceilings[name]}
    assert not fell, "run python tests/house/test_weight.py, and commit weight.json with the change"


if __name__ == "__main__":
    earlier = json.loads(CEILINGS.read_text()) if CEILINGS.exists() else {}
    lowest = {name: min(value, earlier.get(name, value)) for name, value in weigh().items()}
    CEILINGS.write_text(json.dumps(earlier | lowest, indent=2) + "\n")
