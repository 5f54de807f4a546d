"""Serves the page on this machine alone: one address, no analytics, no file that was not named."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from camkit.app.viewer import Viewer
from camkit.errors import InputError, as_error

HOST = "127.0.0.1"
"""Only programs on this machine can connect."""

FIRST_PORT = 7860


_POLICY = (
    "default-src 'self' 'unsafe-inline' 'unsafe-eval' blob: data:; connect-src 'self'; frame-ancestors 'self'; "
    "form-action 'self'"
)
"""The browser loads nothing from other hosts, whatever a library's page asks for."""


def free_port(wanted: int | None) -> socket.socket:
    """Return a socket that listens on a port: the wanted one, or the first free one.

    Raises:
        InputError: the port is taken.
    """
    for port in [wanted] if wanted is not None else range(FIRST_PORT, FIRST_PORT + 20):
        with contextlib.suppress(OSError):
            return socket.create_server((HOST, port))
    raise InputError(f"port {wanted or FIRST_PORT} is taken; name another one with --port")


def serve(viewer: Callable[[], Viewer], port: int | None, opened: Callable[[str], None]) -> None:
    """Serve a page until Ctrl-C.

    Args:
        viewer: makes what the page shows; it is called when Gradio is found to be installed.
        port: the port; None for the first free one.
        opened: called with the address when the page can be opened.

    Raises:
        InputError: Gradio is not installed, or the port is taken.
    """
    bound = free_port(port)
    with tempfile.TemporaryDirectory(prefix="camkit-app-") as folder, bound:
        # Read when Gradio is imported: nothing is reported, and uploads are deleted with the folder.
        os.environ.update(GRADIO_ANALYTICS_ENABLED="False", GRADIO_TEMP_DIR=folder, HF_HUB_DISABLE_TELEMETRY="1")
        application = _application(viewer, Path(folder))
        import uvicorn  # noqa: PLC0415 - comes with gradio

        class Server(uvicorn.Server):  # type: ignore[misc]
            async def startup(self, sockets: Any = None) -> None:
                await super().startup(sockets)
                opened(f"http://{HOST}:{bound.getsockname()[1]}/")

            async def shutdown(self, sockets: Any = None) -> None:
                logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # an open page is not an error
                await super().shutdown(sockets)

        # Seconds that open requests may take after Ctrl-C; without a limit, an open page keeps its connection for ever
        settings = uvicorn.Config(application, log_level="warning", timeout_graceful_shutdown=1)
        Server(settings).run([bound])


def _application(viewer: Callable[[], Viewer], folder: Path) -> Any:
    with as_error(InputError, lambda _: "the app needs Gradio: pip install 'camkit[app]'"):
        import gradio as gr  # noqa: PLC0415 - optional
        from fastapi import FastAPI  # noqa: PLC0415
        from starlette.middleware.trustedhost import TrustedHostMiddleware  # noqa: PLC0415
        from starlette.responses import PlainTextResponse  # noqa: PLC0415
    from camkit.app.page import STYLE, build, theme  # noqa: PLC0415

    async def without_others(request: Any, call_next: Any) -> Any:
        if request.headers.get("origin", own := f"http://{request.headers['host']}") != own:
            return PlainTextResponse("only the app's own page may call it", 403)  # a page of another host cannot upload
        answer = await call_next(request)
        answer.headers["Content-Security-Policy"] = _POLICY
        return answer

    application = FastAPI(openapi_url=None)
    application.add_middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])  # no page of another host
    application.middleware("http")(without_others)
    page = build(viewer(), folder)
    page.has_launched = True  # otherwise Gradio reads any file that a request names as an upload
    # Bytes of a picture that a visitor may upload
    return gr.mount_gradio_app(
        application,
        page,
        path="/",
        server_name=HOST,
        allowed_paths=[],
        max_file_size=64 * 2**20,
        show_error=True,
        theme=theme(),
        css=STYLE,
        js=(Path(__file__).parent / "drag.js").read_text(),
        footer_links=[],
    )
