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
from camkit.errors import InputError, optional

HOST = "127.0.0.1"
"""Only programs on this machine can connect."""

FIRST_PORT = 7860


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
        optional("gradio", "the app needs Gradio: pip install 'camkit[app]'")
        import uvicorn  # noqa: PLC0415 - comes with gradio

        from camkit.app.page import application  # noqa: PLC0415

        class Server(uvicorn.Server):  # type: ignore[misc]
            async def startup(self, sockets: Any = None) -> None:
                await super().startup(sockets)
                opened(f"http://{HOST}:{bound.getsockname()[1]}/")

            async def shutdown(self, sockets: Any = None) -> None:
                logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # an open page is not an error
                await super().shutdown(sockets)

        page = application(viewer(), Path(folder), HOST)
        # Seconds that open requests may take after Ctrl-C; without a limit, an open page keeps its connection for ever
        settings = uvicorn.Config(page, log_level="warning", timeout_graceful_shutdown=1)
        Server(settings).run([bound])
