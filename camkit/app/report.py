"""The result of a check as a page: the verdict, its classes, and the pictures by how much they changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gradio as gr
import numpy as np
from PIL import Image

from camkit.app.page import SHEET_BUTTONS, plain
from camkit.app.result import class_rows, picture_rows, read_edits, read_report
from camkit.tables import Rows

_CLASS_COLUMNS = ("class", "verdict", "pictures", "accuracy", "gap", "attraction", "sufficiency")
_PICTURE_COLUMNS = ("picture", "class", "answer", "change", "own background", "other background", "the model names")


def build(folder: Path) -> Any:
    """Return the page of a folder of reports.

    Raises:
        InputError: the report cannot be read.
    """
    report = read_report(folder)
    classes, pictures, shown = class_rows(report), picture_rows(report), read_edits(folder)
    evidence = folder / "evidence.png"
    with gr.Blocks(title=f"camkit: {report['verdict']}", analytics_enabled=False) as page:
        gr.Markdown(f"### {report['verdict']}: {plain(report['sentence'])}", elem_id="verdict")
        reasons = gr.Markdown(_bullets(report["reasons"]), elem_id="reasons")
        chosen = gr.Dropdown(["all classes", *report["classes"]], value="all classes", label="Class", elem_id="class")
        gr.Dataframe(
            _cells(classes, _CLASS_COLUMNS), headers=list(_CLASS_COLUMNS), interactive=False, label="Classes",
            elem_id="classes",
        )  # fmt: skip
        table = gr.Dataframe(
            _cells(pictures, _PICTURE_COLUMNS), headers=list(_PICTURE_COLUMNS), interactive=False, elem_id="pictures",
            label="Pictures: how much more often the answer is right on backgrounds of the own class. Click on one",
        )  # fmt: skip
        gallery = gr.Gallery(
            visible=False, columns=3, object_fit="contain", interactive=False, elem_id="edits", buttons=SHEET_BUTTONS
        )
        if evidence.is_file():
            with Image.open(evidence) as opened:
                gr.Image(
                    np.asarray(opened.convert("RGB")), show_label=False, interactive=False, elem_id="evidence",
                    buttons=SHEET_BUTTONS,
                )  # fmt: skip

        def only(name: str) -> tuple[str, list[list[Any]]]:
            why = report["reasons"] if name == "all classes" else report["classes"][name]["reasons"]
            kept = [row for row in pictures if name in ("all classes", row["class"])]
            return _bullets(why), _cells(kept, _PICTURE_COLUMNS)

        def edits(event: gr.SelectData) -> Any:
            name = event.row_value[0]
            return gr.update(visible=True, value=shown.get(name, []), label=_about(name, shown))

        chosen.input(only, chosen, [reasons, table], api_visibility="private")
        table.select(edits, None, gallery, api_visibility="private")
    return page


def _about(name: str, shown: Mapping[str, Sequence[Any]]) -> str:
    if name in shown:
        return f"{name} on its backgrounds, and what the model answers"
    return f"The report shows the edits of {len(shown)} pictures whose answers changed most; {name} is not among them"


def _cells(rows: Rows, columns: Sequence[str]) -> list[list[Any]]:
    return [[row[name] for name in columns] for row in rows]


def _bullets(sentences: Sequence[str]) -> str:
    return "\n".join(f"- {plain(sentence)}" for sentence in sentences)
