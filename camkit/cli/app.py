"""``camkit app``: looks at a model's answers in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from camkit.cli.options import GENERAL, Common, OptionalSource, command
from camkit.cli.terminal import emit

if TYPE_CHECKING:
    from camkit.app.viewer import Viewer

_MOST_PICTURES = 1000
"""Pictures in the list of the page."""


@command
def app(
    *pictures: str,
    source: OptionalSource = OptionalSource(),
    port: Annotated[int | None, Parameter(group=GENERAL, metavar="NUMBER")] = None,
    browser: Annotated[bool, Parameter(group=GENERAL, show_default=False)] = True,
    common: Common = Common(),
) -> int:
    """Look at a model's answers in a browser: click on a class for its heat, and cover parts of the picture.

    The page is served on this machine alone. Without a model, it shows the demo networks; without pictures, drawn
    scenes. With the folder of a check's reports, it shows the result of the check.

    Args:
        pictures: Files, folders or quoted glob patterns; or the folder of a check's reports.
        port: The port. Default: the first free one from 7860.
        browser: Open the page in the browser (the default), or only print its address.
    """
    common.begin()
    import webbrowser

    from camkit.app.serve import REPORT, serve

    report = Path(pictures[0]) if len(pictures) == 1 and (Path(pictures[0]) / REPORT).is_file() else None

    def opened(address: str) -> None:
        emit(f"camkit is at {address} (press Ctrl-C to stop)")
        if browser:
            webbrowser.open(address)

    def build(folder: Path) -> object:
        from camkit.app import page
        from camkit.app import report as report_page

        if report is not None:
            return report_page.build(report)
        return page.build(_viewer(pictures, source), folder)

    try:
        serve(build, port, opened)
    except KeyboardInterrupt:
        return 0
    return 0


def _viewer(pictures: tuple[str, ...], source: OptionalSource) -> Viewer:
    """Load what the page shows."""
    from camkit.app.viewer import Viewer
    from camkit.demo.scenes import scene_paths
    from camkit.images.listing import Pictures
    from camkit.models import DEMO_MODELS, load_model

    # The plane is first: the demo networks look at different things in it.
    tour = [file for _, file in sorted(scene_paths().items(), key=lambda pair: not pair[0].startswith("plane"))]
    files = Pictures(pictures).first(_MOST_PICTURES) if pictures else tour
    if source.name is None:
        return Viewer({name: load_model(name) for name in DEMO_MODELS}, files)
    return Viewer({source.name: source.load()}, files)
