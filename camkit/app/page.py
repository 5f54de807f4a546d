"""The page of the app: what a visitor sees and clicks. What is computed is in ``viewer.py``."""

from __future__ import annotations

import contextlib
import html
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gradio as gr
import numpy as np
from fastapi import FastAPI
from markupsafe import Markup
from PIL import Image, ImageOps
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import FileResponse, PlainTextResponse

from camkit.app.viewer import CHOSEN, FILL_NAMES, THRESHOLD, Look, Viewer, found_box
from camkit.drawing.encode import encode
from camkit.drawing.figure import percent
from camkit.drawing.overlay import outlined
from camkit.drawing.text import PAPER, Canvas, width_of
from camkit.errors import CamkitError, InputError, as_error, as_markdown, brief, own_place, printable
from camkit.explaining.explanation import Explanation
from camkit.kit import wording
from camkit.kit.pages import templates
from camkit.types import Pixels

_BARS = 8
"""The most answers that are shown as bars; the other boxes of a detector can be clicked in the picture."""

_OPACITY = 0.5
"""The opacity of the heat when the page opens."""

_HERE = Path(__file__).parent
_HTML: Any = templates("camkit.app").get_template("parts.html", globals={"number": wording.number}).module


class _Parts:
    """The parts of the page, from top to bottom. An event changes those in ``seen``, in the order of ``_seen``.

    Args:
        viewer: what the page shows.
        first: what it shows first; that is computed here, so that the page is complete as soon as it opens. If this
            fails, ``first_seen`` is empty, and the page says why after it has opened.
    """

    def __init__(self, viewer: Viewer, first: Look) -> None:
        self.first_seen: tuple[Any, ...] = ()
        with contextlib.suppress(Exception):
            self.first_seen = _seen(viewer, first, _OPACITY)
        question, picture, heat, said, bars = self.first_seen[:5] or (None,) * 5
        others = _others(viewer, first) if self.first_seen else []
        detects = viewer.detects(first.model)
        named = [(Path(file).name, file) for file in viewer.pictures]
        self.look = gr.State(first)
        with gr.Row(elem_id="stage"):
            with gr.Column(elem_id="seen"):
                shown_question = gr.HTML(question, elem_id="question")
                with gr.Row(elem_classes="pictures"):
                    self.shown = _image("Picture", "shown", picture)
                    shown_heat = _image("Heat", "heat", heat)
                sentence = gr.Markdown(said, elem_id="sentence")
                with gr.Row(elem_classes="pictures", visible=False) as earlier:
                    whole = _image("Picture before", "whole")
                    before = _image("Heat before", "before")
                with gr.Accordion("Contrast, method, layer and opacity", open=False, elem_id="more"):
                    self.rather = gr.Dropdown(others, label="Rather than", elem_id="rather", visible=not detects)
                    self.method = gr.Dropdown(viewer.methods(), value=CHOSEN, label="Method", elem_id="method")
                    self.layer = gr.Dropdown(viewer.layers(first.model), value=CHOSEN, label="Layer", elem_id="layer")
                    self.opacity = gr.Slider(0, 1, _OPACITY, label="Opacity of the heat", elem_id="opacity")
            with gr.Column(elem_id="side"):
                with gr.Row(elem_id="sources"):
                    several = len(viewer.models) > 1
                    self.model = gr.Dropdown(
                        list(viewer.models), value=first.model, label="Model", elem_id="model", visible=several
                    )
                    self.picture = gr.Dropdown(named, value=first.picture, label="Picture", elem_id="picture")
                    self.upload = gr.UploadButton("Your own picture", file_types=["image"], elem_id="upload", size="sm")
                self.answers = _label("Answers: click on one for its heat", "answers", value=bars)
                self.fill = gr.Radio(list(FILL_NAMES), value=first.fill, label="Cover with", elem_id="fill")
                self.uncover = gr.Button("Uncover", elem_id="uncover", size="sm", interactive=False)
                self.compare = gr.Button("Compare a dozen methods", elem_id="compare", size="sm", visible=not detects)
                self.save = gr.Button("Save figure and values", elem_id="save", size="sm")
                answers_before = _label("Answers before", "answers-before", visible=False)
        self.pointed = gr.Textbox(visible="hidden", elem_id="pointed")
        # Gradio would add a button that uploads the picture
        self.sheet = _image(None, "sheet", visible=False, buttons=["download", "fullscreen"])
        self.files = gr.Files(label="Saved", visible=False, elem_id="files")
        of_look = [shown_question, self.shown, shown_heat, sentence, self.answers]
        of_cover = [earlier, whole, before, answers_before, self.uncover]
        self.seen = [self.look, *of_look, *of_cover, self.rather, self.compare, self.sheet, self.files]


def _image(label: str | None, name: str, value: Any = None, buttons: Sequence[str] = (), **options: Any) -> Any:
    return gr.Image(
        value, label=label, show_label=label is not None, interactive=False, elem_id=name, buttons=[*buttons], **options
    )


def _label(label: str, name: str, **options: Any) -> Any:
    return gr.Label(label=label, num_top_classes=_BARS, elem_id=name, show_heading=False, **options)


def application(viewer: Viewer, folder: Path, host: str) -> Any:
    """Return the page as an application that answers only to itself.

    Args:
        viewer: what it shows.
        folder: where files are that a visitor downloads.
        host: the machine's own address.
    """

    async def without_others(request: Any, call_next: Any) -> Any:
        if request.headers.get("origin", own := f"http://{request.headers['host']}") != own:
            return PlainTextResponse("only the app's own page may call it", 403)  # a page of another host cannot upload
        answer = await call_next(request)
        # The browser loads nothing from other hosts, whatever a library's page asks for
        answer.headers["Content-Security-Policy"] = (
            "default-src 'self' 'unsafe-inline' 'unsafe-eval' blob: data:; connect-src 'self'; frame-ancestors 'self'; "
            "form-action 'self'"
        )
        return answer

    served = FastAPI(openapi_url=None)
    served.add_middleware(TrustedHostMiddleware, allowed_hosts=[host, "localhost"])  # no page of another host
    served.middleware("http")(without_others)

    def report(number: int) -> FileResponse:
        return FileResponse(viewer.reports[number] / "report.html")

    served.get("/report/{number}")(report)
    page = _page(viewer, folder)
    page.has_launched = True  # otherwise Gradio reads any file that a request names as an upload
    # Bytes of a picture that a visitor may upload
    return gr.mount_gradio_app(
        served,
        page,
        path="/",
        server_name=host,
        allowed_paths=[],
        max_file_size=64 * 2**20,
        show_error=True,
        # The reader's own fonts: the page loads nothing from other hosts
        theme=gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["monospace"]),
        css_paths=_HERE / "page.css",
        js=(_HERE / "drag.js").read_text(),
        favicon_path=str(_HERE / "logo.svg"),
        footer_links=[],
    )


def _page(viewer: Viewer, saved: Path) -> Any:
    first = Look(next(iter(viewer.models)), viewer.first_readable())
    with gr.Blocks(title="camkit", analytics_enabled=False, delete_cache=(3600, 3600)) as page:
        gr.HTML(_HTML.header(Markup((_HERE / "logo.svg").read_text())), elem_id="header")
        with gr.Tabs(elem_id="tabs"):
            with gr.Tab("Why?"):
                parts = _Parts(viewer, first)
                _react(viewer, parts, page)
            with gr.Tab("May it ship?"):
                verdicts = gr.HTML(lambda: _verdicts(viewer), elem_id="verdicts")
                run = gr.Button("Check the demo networks", visible=viewer.check is not None, elem_id="run-check")

        def compared(asked: Look) -> Any:
            return _said(lambda: gr.update(value=viewer.comparison(asked), visible=True))

        def write(asked: Look, alpha: float) -> Any:
            return _said(lambda: gr.update(value=_saved(viewer, asked, alpha, saved), visible=True))

        def checked() -> Any:
            def act() -> str:
                viewer.reports = viewer.reports or viewer.check(saved)
                return _verdicts(viewer)

            return _said(act)

        parts.compare.click(compared, parts.look, parts.sheet, api_visibility="private")
        parts.save.click(write, [parts.look, parts.opacity], parts.files, api_visibility="private")
        run.click(checked, None, verdicts, api_visibility="private")
    return page


def _verdicts(viewer: Viewer) -> str:
    """Return the verdicts of the checks, or how to get one."""
    if not viewer.reports:
        return str(_HTML.no_check(viewer.check is not None))
    return "".join(_HTML.verdict(report, f"report/{place}") for place, report in enumerate(viewer.verdicts()))


def _react(viewer: Viewer, parts: _Parts, page: Any) -> None:
    """Let each event change what is looked at, and show that."""
    options = {"outputs": parts.seen, "api_visibility": "private", "show_progress": "minimal"}

    def shown(change: Callable[..., Look], asked: Look, alpha: float, *values: Any) -> Any:
        hidden = gr.update(visible=False)

        def seen() -> tuple[Any, ...]:
            look = change(asked, *values)
            return look, *_seen(viewer, look, alpha), hidden, hidden

        return _said(seen, len(parts.seen))

    def on(event: Any, change: Callable[..., Look], *inputs: Any) -> None:
        def act(*given: Any) -> Any:
            return shown(change, *given)

        event(act, [parts.look, parts.opacity, *inputs], **options)

    def another(asked: Look, file: str) -> Look:
        return Look(asked.model, file, layer=asked.layer, method=asked.method, fill=asked.fill)

    def pick(asked: Look, alpha: float, selected: gr.SelectData) -> Any:
        return shown(picked, asked, alpha, selected.value)

    def picked(asked: Look, name: str) -> Look:
        answers = viewer.answers(asked)
        names = [_name(row, number) for number, row in enumerate(answers)]
        chosen = answers[names.index(name) if name in names else 0]
        if viewer.detects(asked.model):
            return replace(asked, box=found_box(chosen))
        return replace(asked, target=chosen.target)

    def point(asked: Look, pointed: str) -> Look:
        """Cover the rectangle that was drawn, at least one pixel wide and high, or look at the box around a place."""
        with as_error(InputError, lambda _: "draw a rectangle in the picture"):
            shares = np.array(json.loads(pointed)[0], float).reshape(-1, 2).clip(0, 1)
            size = np.array(viewer.picture(asked.uncovered).size)
            left, top = np.minimum((shares.min(0) * size).round(), size - 1).astype(int).tolist()
            right, bottom = np.maximum((shares.max(0) * size).round(), [left + 1, top + 1]).astype(int).tolist()
        if len(shares) > 1:
            return replace(asked, cover=(left, top, right, bottom))
        return replace(asked, box=viewer.box_at(asked, (left, top))) if viewer.detects(asked.model) else asked

    def named(choice: str) -> str | None:
        return None if choice == CHOSEN else choice

    if not parts.first_seen:
        on(page.load, lambda asked: asked)
    on(parts.opacity.release, lambda asked: asked)
    on(parts.model.input, lambda asked, name: Look(name, asked.picture, fill=asked.fill), parts.model)
    on(parts.picture.input, lambda asked, file: another(asked, viewer.named(file)), parts.picture)
    on(parts.upload.upload, lambda asked, file: another(asked, str(file)), parts.upload)
    on(parts.pointed.change, point, parts.pointed)
    on(parts.fill.input, lambda asked, name: replace(asked, fill=name), parts.fill)
    on(parts.uncover.click, lambda asked: asked.uncovered)
    on(parts.rather.input, lambda asked, target: replace(asked, rather_than=target), parts.rather)
    on(parts.method.input, lambda asked, name: replace(asked, method=named(name)), parts.method)
    on(parts.layer.input, lambda asked, name: replace(asked, layer=named(name)), parts.layer)
    parts.answers.select(pick, [parts.look, parts.opacity], **options)

    def of_model(name: str) -> tuple[Any, ...]:
        return gr.update(choices=viewer.layers(name), value=CHOSEN), CHOSEN

    parts.model.input(of_model, parts.model, [parts.layer, parts.method], api_visibility="private")


def _said(act: Callable[[], Any], outputs: int = 1) -> Any:
    """Return what an action returns; an error becomes one sentence, and the page stays as it is."""
    try:
        return act()
    except CamkitError as error:
        sentence = str(error)
    except Exception as error:  # whatever the user's own model raises
        sentence = f"the model failed{own_place(error)}: {type(error).__name__}: {brief(error)}"
    gr.Warning(html.escape(printable(sentence)))
    return gr.skip() if outputs == 1 else (gr.skip(),) * outputs


def _seen(viewer: Viewer, look: Look, alpha: float) -> tuple[Any, ...]:
    """Return what the page shows: question, picture, heat, sentence and answers; those without the cover; choices."""
    row, found, detects = viewer.heat(look), viewer.answers(look), viewer.detects(look.model)
    said = _no_box(viewer, look) if row is None else _sentence(row)
    covered, before = None, [gr.update(visible=False), None, None, gr.update(visible=False)]
    if look.cover is not None:
        # The heat before is that of the same class, even if the covered picture has another best answer.
        asked = replace(look.uncovered, target=viewer.target(look))
        covered = viewer.covering(look)
        old_answers = gr.update(visible=True, value=_bars(viewer.answers(asked)))
        before = [gr.update(visible=True), _with_boxes(viewer, asked), _drawn(viewer, asked, alpha), old_answers]
    question = "Why no box?" if row is None else f"Why {row.name}?"
    return (
        str(_HTML.question(question, viewer.picture(look).size, covered, detects)),
        _with_boxes(viewer, look),
        _drawn(viewer, look, alpha),
        said,
        _bars(found),
        *before,
        gr.update(interactive=look.cover is not None),
        gr.update(choices=_others(viewer, look), value=look.rather_than, visible=not detects),
        gr.update(visible=not detects),
    )


def _others(viewer: Viewer, look: Look) -> list[tuple[str, int | None]]:
    """Return the classes that the target may be contrasted with, after a first empty choice."""
    return [("", None), *((each.name, each.target) for each in viewer.answers(look) if each.target is not None)]


def _with_boxes(viewer: Viewer, look: Look) -> Pixels:
    """Return the picture, with the boxes of a detector and their numbers among the answers."""
    picture = np.asarray(viewer.picture(look))
    if not viewer.detects(look.model):
        return picture
    size = max(12, min(picture.shape[:2]) // 25)
    drawn, canvas = picture.copy(), Canvas(picture.shape[1], picture.shape[0])
    boxes = [found_box(answer).box for answer in viewer.answers(look)]
    for box in reversed(boxes):
        drawn = outlined(drawn, box)
    canvas.picture(0, 0, drawn)
    for number, box in reversed(list(enumerate(boxes, 1))):
        left, top = max(box.left, 0), max(box.top, 0)
        canvas.box(left, top, left + width_of(str(number), size) + size * 0.6, top + size * 1.3, (0, 0, 0))
        canvas.text(left + size * 0.3, top + size * 0.65, str(number), size=size, colour=PAPER)
    return canvas.pixels()


def _drawn(viewer: Viewer, look: Look, alpha: float) -> Pixels:
    """Return the heat over the picture, in the picture's size; the picture alone if a detector does not find the box.

    If the part of the picture that the model sees is unknown, the heat is drawn on the model's input.
    """
    row, picture = viewer.heat(look), viewer.picture(look)
    drawn = picture if row is None else Image.fromarray(row.overlay(alpha=alpha, scale="each"))
    return np.asarray(ImageOps.pad(drawn, picture.size))


def _no_box(viewer: Viewer, look: Look) -> str:
    """Say that a detector does not find the box."""
    labels, wanted = viewer.models[look.model].labels, viewer.box(look)
    if wanted is None:
        return f"The detector finds no box with a score above {THRESHOLD:g}."
    name = "" if labels is None or wanted.label is None else f" **{plain(labels[wanted.label])}**"
    return f"The box{name} is no longer found: no box of this class with a score above {THRESHOLD:g} is in its place."


def _name(row: Explanation, number: int) -> str:
    return row.name if row.detection is None else f"{number + 1}: {row.name}"


def _bars(rows: list[Explanation]) -> dict[str, float]:
    return {
        _name(row, number): float(row.score if row.probability is None else row.probability)
        for number, row in enumerate(rows)
    }


def _sentence(row: Explanation) -> str:
    """Say what the colours mean, and in a second, small paragraph how the heat was made."""
    share = "" if row.probability is None else f" ({percent(row.probability)})"
    meaning = plain(row.meaning()) if row.status == "ok" else f"The map has no evidence: {row.status}."
    how = f"by {plain(row.method)} at {plain(row.layer)}: {plain(row.layer_reason)}"
    return f"**{plain(row.name)}**{share}. {meaning}\n\nHeat {how}."


def plain(text: str) -> str:
    """Return text that Gradio's Markdown shows as it is; it also knows formulas."""
    return as_markdown(text).replace("!", r"\!").replace("$", r"\$")


def _saved(viewer: Viewer, look: Look, alpha: float, folder: Path) -> list[str]:
    """Write the figure and the values into a new folder, and return the files."""
    own = Path(tempfile.mkdtemp(dir=folder))
    row = viewer.heat(look)
    drawn = _drawn(viewer, look, alpha) if row is None else row.overlay(style="figure", alpha=alpha, scale="each")
    (own / "heat.png").write_bytes(encode(drawn))
    about = {
        "model": look.model,
        "picture": Path(look.picture).name,
        "cover": look.cover,
        "fill": look.fill if look.cover else None,
        "answers": _bars(viewer.answers(look)),
        "answers_before": _bars(viewer.answers(look.uncovered)) if look.cover else None,
        "explanation": None if row is None else {**row.to_dict(), "source": Path(look.picture).name},
    }
    (own / "heat.json").write_text(json.dumps(about, indent=1))
    return [str(own / "heat.png"), str(own / "heat.json")]
