"""Write a commented ``camkit.toml`` to start from."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path
from typing import Any

from markupsafe import Markup

from camkit.background.data import Dataset
from camkit.kit.pages import templates
from camkit.options import given_in
from camkit.options.settings import Settings


def starter_config(data: Dataset, settings: Settings) -> str:
    """Return the text of a config for these pictures.

    The lines of ``settings`` that are set are active; the others are commented and show the defaults. The paths are
    relative to the folder of the config.
    """
    environment = templates("camkit.background.report")
    environment.filters["toml"] = lambda value: Markup(_toml(value))  # is not escaped again
    tables = {name: getattr(settings, name) for name in ("model", "data", "check", "limits", "run")}
    given = {name: dict(sorted(given_in(table).items())) for name, table in tables.items()}
    text: str = environment.get_template("camkit.toml").render(data=data, settings=settings, given=given)
    return text


def _toml(value: Any) -> str:
    """Return a value as TOML writes it.

    A JSON string is a TOML string too, except that TOML escapes DEL and cannot hold bytes of a file name that are not
    characters.
    """
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float, dt.date)):
        return str(value)
    text = value.as_posix() if isinstance(value, Path) else str(value)
    characters = text.encode(errors="backslashreplace").decode()
    return json.dumps(characters, ensure_ascii=False).replace("\x7f", "\\u007f")
