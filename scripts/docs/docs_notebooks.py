"""Runs the tutorials and writes them as notebooks with their outputs.

    .venv/bin/python -m scripts.docs.docs_notebooks                    # all
    .venv/bin/python -m scripts.docs.docs_notebooks wrong-prediction   # one

A tutorial is written in docs/tutorials/NAME.py, where ``# %%`` begins a cell. NAME.ipynb beside it is made from it.
"""

from __future__ import annotations

import argparse
import base64
import io
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import jupytext
import nbclient
import nbformat
from PIL import Image

ROOT = Path(__file__).parents[2]
TUTORIALS = ROOT / "docs" / "tutorials"

PNG_IN_HTML = re.compile(r"data:image/png;base64,([\w+/=]+)")

JPEG_QUALITY = 85
"""At this quality a drawing takes a tenth of a PNG's bytes, and no block edges are visible."""

QUIET = {"TQDM_DISABLE": "1", "PYTHONWARNINGS": "ignore:IProgress not found"}
"""Environment variables that keep progress bars out of a notebook's stored output."""

SECONDS_PER_CELL = 900
"""The longest cell trains a network for about a minute; a busy machine takes several times as long."""


def source_cells(script: Path) -> Any:
    """Return the notebook of a tutorial without outputs; its cells are numbered, so that it is the same each time."""
    notebook = jupytext.read(script, fmt="py:percent")
    for number, cell in enumerate(notebook.cells, 1):
        cell.id = f"cell-{number}"
        cell.metadata = {}
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


def run(notebook: Any) -> Any:
    """Run a notebook from top to bottom in an empty folder, and return it with its outputs.

    Raises:
        CellExecutionError: a cell failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        client = nbclient.NotebookClient(
            notebook, timeout=SECONDS_PER_CELL, resources={"metadata": {"path": folder}}, record_timing=False
        )
        return client.execute(env=os.environ | QUIET)


def slim(notebook: Any) -> None:
    """Keep one form of each output, and pictures as JPEG, so that the file stays small."""
    for cell in notebook.cells:
        outputs: list[Any] = []
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "text/html" in data:
                data.pop("image/png", None)  # a plainer drawing of the same
                data["text/html"] = PNG_IN_HTML.sub(
                    lambda found: f"data:image/jpeg;base64,{as_jpeg(found[1])}", data["text/html"]
                )
            elif "image/png" in data:
                data["image/jpeg"] = as_jpeg(data.pop("image/png"))
            if outputs and output.output_type == outputs[-1].output_type == "stream":
                outputs[-1].text += output.text
            else:
                outputs.append(output)
        if cell.cell_type == "code":
            cell.outputs = outputs


def as_jpeg(png: str) -> str:
    """Turn a PNG in base64 into a JPEG in base64."""
    file = io.BytesIO()
    Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB").save(file, "JPEG", quality=JPEG_QUALITY)
    return base64.b64encode(file.getvalue()).decode()


def main() -> None:
    """Run the tutorials that the arguments name, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", default=sorted(script.stem for script in TUTORIALS.glob("*.py")))
    for name in parser.parse_args().names:
        notebook = run(source_cells(TUTORIALS / f"{name}.py"))
        slim(notebook)
        notebook.metadata.pop("language_info", None)  # it names the version of Python that ran the cells
        file = TUTORIALS / f"{name}.ipynb"
        file.write_text(nbformat.writes(notebook) + "\n", "utf-8")
        print(f"{file.name}: {len(notebook.cells)} cells, {file.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main()
