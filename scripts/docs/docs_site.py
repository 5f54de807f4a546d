"""What MkDocs does with this repository: notebooks become pages, and linked files outside docs/ join the site.

mkdocs.yml names this file under ``hooks``. The pages stay plain Markdown whose links also work in the repository.
"""

from __future__ import annotations

import base64
import json
import posixpath
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]

RENAMED = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Files at the root of the repository, where people look for them first, and their pages in the site."""

_LINK = re.compile(r"(?<=\]\()([^)#:\s]+)(?=[)#])")
"""The path of a relative link or picture in Markdown."""

_NAMES = re.compile(r"(?m)(?:^- `[\w.]+(?:\(.*\))?`: .*\n)+")
"""A list of names of the API, as docs_api.py writes it."""

_PICTURE = re.compile(r'(<img [^>]*src="([^":]+)"[^>]*>)(?!\s*</a>)')
"""A picture in HTML that is a file of the site."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Show the version below every page."""
    config["copyright"] = f"camkit {version('camkit')}"
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each notebook, and every file outside docs/ that a page links to."""
    for notebook in [file for file in files if file.src_uri.endswith(".ipynb")]:
        text, pictures = from_notebook(notebook.content_string, Path(notebook.src_uri).stem)
        files.append(File.generated(config, site_path(f"docs/{notebook.src_uri}"), content=text))
        for name, content in pictures.items():
            files.append(
                File.generated(config, posixpath.join(posixpath.dirname(notebook.src_uri), name), content=content)
            )
    for name, uri in RENAMED.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / name)))
    pages = list(files.documentation_pages())
    for page in pages:  # grows: a file that joins the site may link to others
        for link in _LINK.findall(page.content_string):
            path = linked_path(page.src_uri, link)
            if path is None or files.get_file_from_path(site_path(path)) is not None or path.endswith(".ipynb"):
                continue
            joined = File.generated(
                config, site_path(path), abs_src_path=str(ROOT / path), inclusion=InclusionLevel.NOT_IN_NAV
            )
            files.append(joined)
            if joined.is_documentation_page():
                pages.append(joined)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Point the links to where the files are in the site, and put the docstrings below the names of the API."""

    def in_site(link: re.Match[str]) -> str:
        path = linked_path(page.file.src_uri, link[1])
        if path is None:
            return link[1]
        return posixpath.relpath(site_path(path), posixpath.dirname(page.file.src_uri) or ".")

    if page.file.src_uri.startswith("api/"):
        markdown = _NAMES.sub(lambda names: names[0] + docstrings(names), markdown)
    return _LINK.sub(in_site, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Let each picture open in its own size: figures have small text."""
    return _PICTURE.sub(r'<a class="picture" href="\2">\1</a>', html)


def docstrings(names: re.Match[str]) -> str:
    """Return the directives of mkdocstrings for a list of names; a class that users make shows its arguments."""
    level = 3 if "\n## " in names.string[: names.start()] else 2
    return "".join(
        f"\n::: camkit.{name}\n    options:\n      heading_level: {level}\n"
        f"      merge_init_into_class: {str(bool(call)).lower()}\n"
        for name, call in re.findall(r"(?m)^- `([\w.]+)(\()?", names[0])
    )


def site_path(path: str) -> str:
    """Return where a file of the repository is in the site."""
    if path.endswith(".ipynb"):
        path = path.removesuffix(".ipynb") + ".md"
    return RENAMED.get(path, path.removeprefix("docs/"))


def linked_path(page: str, link: str) -> str | None:
    """Return the file of the repository that a page of the site links to; None if there is no such file."""
    homes = {uri: name for name, uri in RENAMED.items()}
    home = homes.get(page, page if (ROOT / page).is_file() else f"docs/{page}")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(home), link))
    return path if not path.startswith("..") and (ROOT / path).is_file() else None


def from_notebook(text: str, name: str) -> tuple[str, dict[str, bytes]]:
    """Return a notebook as Markdown, and its pictures by their file names.

    Args:
        text: the notebook.
        name: the name of its file, without the suffix.
    """
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(_fenced(source, "python"))
        for output in cell["outputs"]:
            data: dict[str, Any] = output.get("data", {})
            if "text/html" in data:
                parts.append(f'<div class="output">{"".join(data["text/html"])}</div>')
            elif "image/jpeg" in data:
                file = f"{name}-{len(pictures) + 1}.jpg"
                pictures[file] = base64.b64decode("".join(data["image/jpeg"]))
                parts.append(f"![What the cell draws]({file})")
            else:
                printed = "".join(output.get("text", data.get("text/plain", "")))
                parts.append(_fenced(printed.rstrip(), "text"))
    title, *rest = parts[0].split("\n\n", 1)
    note = f'*This page is a notebook: <a href="{name}.ipynb" download>download it</a> and run it from top to bottom.*'
    return "\n\n".join([title, note, *rest, *parts[1:]]), pictures


def _fenced(text: str, language: str) -> str:
    ticks = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{ticks}{language}\n{text}\n{ticks}"
