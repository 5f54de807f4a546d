"""The documentation: its examples run, its tables and notebooks are up to date, the site builds and fits a phone."""

from __future__ import annotations

import ast
import doctest
import functools
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from inspect import isfunction
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urljoin, urlsplit

import pytest
from tiers import Extra, represented_by

import camkit
from camkit.background.report import REPORTS
from camkit.cli import app, main
from scripts.docs import docs_methods, docs_metrics

if TYPE_CHECKING:
    from playwright.sync_api import Browser

docs_api = Extra("scripts.docs.docs_api")
docs_notebooks = Extra("scripts.docs.docs_notebooks")

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in [ROOT / "README.md", *DOCS.glob("*.md")]
}
TUTORIALS = sorted(path.stem for path in (DOCS / "tutorials").glob("*.py"))

RUN = ("docs/index.md", "docs/targets.md", "docs/methods.md")
"""Pages whose Python examples run as they stand, one after another, beside the pictures that ``workplace`` writes."""

FIGURE = re.compile(r"-?\d+\.\d+")
"""A number that was measured, as a page writes it."""

RUN_LONGER = ("docs/reading-heat.md", "docs/models.md", "docs/metrics.md", "docs/diagnose.md", "docs/assistants.md")
"""The same, in the extended tier."""


def blocks(page: str, language: str) -> list[str]:
    """Return the fenced blocks of a page in one language."""
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```$", PAGES[page])


def commands(page: str) -> list[list[str]]:
    """Return the arguments of each call of camkit in the shell blocks of a page."""
    lines = "\n".join(blocks(page, "sh")).splitlines()
    words = (shlex.split(line, comments=True) for line in lines if line.strip())
    return [line[1:] for line in words if Path(line[0] if line else "").name == "camkit"]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder, with the files that the examples name."""
    scenes = camkit.scenes.scene_paths()
    (tmp_path / "photos").mkdir()
    for name, scene in (("image.jpg", "plane-sky"), ("photos/1.jpg", "car-sea"), ("photos/2.jpg", "bird-wood")):
        shutil.copy(scenes[scene], tmp_path / name)
    (tmp_path / "notes.txt").write_text("no picture")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_pages_have_examples() -> None:
    assert all(blocks(page, "python") for page in (*RUN, *RUN_LONGER))
    assert sum(len(commands(page)) for page in PAGES) > 40


@pytest.mark.parametrize(("script", "names"), [(docs_methods, camkit.METHODS), (docs_metrics, camkit.metrics.METRICS)])
def test_the_tables_of_methods_and_metrics_are_those_of_the_registries(script: Any, names: Any) -> None:
    assert script.page() == script.PAGE.read_text("utf-8"), f"run {script.__name__}"
    assert all(f"| `{name}` |" in script.page() for name in names)


def test_the_pages_name_every_target_and_every_report() -> None:
    makers = {
        name for name, item in vars(camkit.targets).items() if name in camkit.targets.__all__ and isfunction(item)
    }
    of_page, of_readme = (re.findall(r"targets\.(\w+)\(", PAGES[page]) for page in ("docs/targets.md", "README.md"))
    assert set(of_page) == makers - {"as_targets", "describe", "logits_of"} >= set(of_readme)
    assert [name for name in REPORTS if f"`{name}`" not in PAGES["docs/check.md"]] == []


def test_the_figures_of_the_results_are_in_the_complete_tables() -> None:
    tables = (ROOT / "scripts/results").glob("*.md")
    measured = {figure for file in tables for figure in FIGURE.findall(file.read_text("utf-8"))}
    quoted = FIGURE.findall(PAGES["docs/results.md"])
    assert len(quoted) > 100
    assert [figure for figure in quoted if figure not in measured] == []


def test_the_tests_that_the_table_of_families_names_exist() -> None:
    named = re.findall(r"([\w/]*\.py)?::(test_\w+)", (ROOT / "scripts/results/families.md").read_text("utf-8"))
    files = {file: file.read_text("utf-8") for file in (ROOT / "tests").glob("*/test_*.py")}
    assert len(named) > 20
    for where, name in named:
        assert any(f"def {name}(" in text for file, text in files.items() if file.as_posix().endswith(where)), name


def test_every_public_name_is_in_the_reference() -> None:
    reference = "\n".join(page.read_text("utf-8") for page in (DOCS / "api").glob("*.md"))
    shown = set(re.findall(r"(?m)^- `([\w.]+)", reference)) - {"errors." + name for name in vars(camkit.errors)}
    modules = {name: getattr(camkit, name) for name in ("targets", "hooks", "metrics", "tensorboard", "scale")}
    expected = {f"{name}.{part}" for name, module in modules.items() for part in module.__all__}
    shown |= {f"{name}.{part}" for name in modules if name in shown for part in modules[name].__all__}
    shown -= set(modules)
    expected |= set(camkit.__all__) - {*modules, "errors", "methods", "scenes", "__version__", "CamkitError"}
    assert expected <= shown
    assert {name for name in shown if not name.startswith(("methods.", "scenes."))} == expected
    assert "- `errors.CamkitError`: The base" in reference  # stands with the other errors


@pytest.mark.extended
def test_the_lists_of_the_reference_are_those_of_the_code() -> None:
    pages = {path: path.read_text("utf-8") for path in docs_api.PAGES}
    assert [path.name for path, text in pages.items() if docs_api.page(path) != text] == [], "run scripts.docs.docs_api"
    assert "- `check(model, data, ...)`: Check whether" in "".join(pages.values())


def test_the_links_of_the_readme_and_of_contributing_lead_to_files() -> None:
    for page in ("README.md", "CONTRIBUTING.md"):
        links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text("utf-8"))
        assert [link for link in links if not (ROOT / link).exists()] == [], page


@pytest.mark.parametrize("name", ["demo", "test"])
def test_the_set_up_commands_of_the_readme_are_single_lines(name: str) -> None:
    block = re.search(rf"<!-- {name} command -->\n```sh\n(.*?)\n```\n<!-- end -->", PAGES["README.md"], re.DOTALL)
    assert block
    assert re.fullmatch(r"python3 -m venv \.venv && .*", block[1])


def test_every_option_on_the_pages_of_models_and_targets_exists(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--help"])
    main(["export", "--help"])
    known = capsys.readouterr().out
    options = set(re.findall(r"--[a-z][a-z-]*", PAGES["docs/models.md"] + PAGES["docs/targets.md"]))
    assert [option for option in options if option not in known] == []


def test_the_python_example_of_the_readme_names_what_exists() -> None:
    """Its attributes, on a network that needs no download."""
    explanation = camkit.explain("demo-fair", camkit.scenes.scene_paths()["plane-sky"])
    attributes = set(re.findall(r"\bwhy\.(\w+)", blocks("README.md", "python")[0])) - {"png"}
    assert len(attributes) >= 7
    assert [attribute for attribute in attributes if not hasattr(explanation, attribute)] == []


def test_the_examples_of_the_hooks_page_are_right() -> None:
    """Every example there, in one session; the fences between them are no output."""
    text = re.sub(r"(?m)^```.*$", "", PAGES["docs/hooks.md"])
    session = doctest.DocTestParser().get_doctest(text, {}, "docs/hooks.md", None, 0)
    assert len(session.examples) > 30
    failed = io.StringIO()
    doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS).run(session, out=failed.write)
    assert not failed.getvalue()


@pytest.mark.parametrize("page", sorted(PAGES))
def test_python_examples_are_python(page: str) -> None:
    for block in blocks(page, "python"):
        if ">>>" not in block:
            ast.parse(block)


@pytest.mark.parametrize("page", [page for page in sorted(PAGES) if commands(page)])
def test_the_command_takes_what_the_pages_type(page: str) -> None:
    for arguments in commands(page):
        if {"--help", "--install-completion"} & set(arguments):
            continue
        # its model may stand in the config of the run that it continues
        if "--resume" in arguments and not {"--model", "-m"} & set(arguments):
            arguments = [*arguments, "--model", "resnet50"]  # noqa: PLW2901
        app.parse_args(arguments, print_error=False, exit_on_error=False)


@pytest.mark.parametrize("page", [*RUN, *(pytest.param(page, marks=pytest.mark.extended) for page in RUN_LONGER)])
def test_python_examples_run(page: str, workplace: Path) -> None:
    registered = set(camkit.METHODS)
    session: dict[str, Any] = {}
    try:
        for number, block in enumerate(blocks(page, "python")):
            exec(compile(block, f"{page}, example {number + 1}", "exec"), session)
    finally:
        for name in set(camkit.METHODS) - registered:
            del camkit.METHODS[name]


@pytest.mark.extended
@pytest.mark.parametrize("page", [page for page in sorted(PAGES) if "demo-" in str(commands(page))])
def test_commands_with_the_demo_networks_run(page: str, workplace: Path) -> None:
    for arguments in commands(page):
        if "demo-fair" in arguments or "demo-biased" in arguments:
            assert main(arguments) == 0, arguments


def test_the_file_for_coding_assistants_has_the_calls_of_the_page_and_links_that_exist() -> None:
    text = (ROOT / "llms.txt").read_text("utf-8")
    assert text.startswith("# camkit\n\n> ")
    (calls,) = re.findall(r"(?ms)^```python\n(.*?)^```$", text)
    assert [calls] == blocks("docs/assistants.md", "python")
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) > 10
    assert [link for link in links if not (ROOT / link).is_file()] == []


def test_the_factory_on_the_page_of_models_loads(workplace: Path) -> None:
    block = re.search(r"<!-- file: mine.py -->\n```python\n(.*?)```", PAGES["docs/models.md"], re.DOTALL)
    assert block
    (workplace / "mine.py").write_text(block[1])
    assert camkit.explain("mine.py:build", "image.jpg").box is not None


def sources(notebook: Any) -> list[tuple[str, str]]:
    return [(cell["cell_type"], "".join(cell["source"])) for cell in notebook["cells"]]


@pytest.mark.extended
@pytest.mark.parametrize("name", TUTORIALS)
def test_the_notebook_is_that_of_its_script_and_small(name: str) -> None:
    file = docs_notebooks.TUTORIALS / f"{name}.ipynb"
    text = file.read_text("utf-8")
    notebook = json.loads(text)
    script = docs_notebooks.source_cells(file.with_suffix(".py"))
    assert sources(notebook) == sources(script), f"run scripts/docs/docs_notebooks.py {name}"
    assert len(text) < 1_000_000
    codes = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in codes] == list(range(1, len(codes) + 1)), "not run from top to bottom"
    assert not re.search(r"/(tmp|home|root|Users)/|/site-packages/", text), "a path of the machine that ran it"


@pytest.mark.extended
@pytest.mark.parametrize("name", [name for name in TUTORIALS if name != "mend-a-network"])  # which trains for minutes
def test_the_notebook_runs_from_top_to_bottom(name: str) -> None:
    done = docs_notebooks.run(docs_notebooks.source_cells(docs_notebooks.TUTORIALS / f"{name}.py"))
    shown = [output for cell in done.cells for output in cell.get("outputs", [])]
    assert sum("text/html" in output.get("data", {}) or "image/png" in output.get("data", {}) for output in shown) >= 2


class Links(HTMLParser):
    """The links of a page, and the places that links can name."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.places: set[str] = {""}
        self.feed(page.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.places |= {name for name in (values.get("id"), values.get("name") if tag == "a" else None) if name}
        if tag == "a" and values.get("href"):
            self.links.append(str(values["href"]))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        build, cwd=ROOT, capture_output=True, text=True, check=False, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.extended
def test_the_site_builds_strictly_and_its_links_lead_somewhere(site: Path) -> None:
    pages = {page.relative_to(site).as_posix(): Links(page) for page in site.rglob("*.html")}
    assert len(pages) > 30
    for name, page in pages.items():
        if name == "404.html":  # its links start at the root of a server
            continue
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme:
                assert parts.scheme in ("http", "https"), f"{name} links to {link}"
                assert re.fullmatch(r"[\w-]+(\.[\w-]+)+(:\d+)?", parts.netloc), f"{name} links to {link}"
                continue
            path = unquote(urlsplit(urljoin(name, parts.path)).path) if parts.path else name
            assert (site / path).is_file(), f"{name} links to {link}"
            if path in pages and parts.fragment:
                assert unquote(parts.fragment) in pages[path].places, f"{name} links to {link}"


@pytest.fixture(scope="module")
def served(site: Path) -> Iterator[str]:
    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name that the base class uses
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


TOO_WIDE = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
BROKEN = "Array.from(document.images).filter(image => !image.naturalWidth).map(image => image.src)"


@pytest.mark.extended
@pytest.mark.parametrize("width", represented_by(1280, 400, among=[1280, 400]))
def test_every_page_fits_a_screen_and_a_phone(site: Path, served: str, browser: Browser, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900})
    asked: list[str] = []
    errors: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    for file in sorted(site.rglob("*.html")):
        page.goto(f"{served}/{file.relative_to(site).as_posix()}")
        assert not page.evaluate(TOO_WIDE), f"{file.name} is wider than {width} pixels"
        assert page.evaluate(BROKEN) == [], file.name
    page.close()
    assert errors == []
    assert [url for url in asked if not url.startswith((served, "data:", "blob:"))] == []
