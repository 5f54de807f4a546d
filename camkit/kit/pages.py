"""Reports as one HTML file each, which loads nothing else: no network, no fonts, no foreign scripts."""

from __future__ import annotations

import base64
import hashlib

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from camkit.errors import printable


def templates(package: str) -> Environment:
    """Return the templates in the folder ``templates`` of a package; every value is escaped, also control characters.

    Args:
        package: the name of the package.
    """
    environment = Environment(
        loader=PackageLoader(package),
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup) or not isinstance(value, str) else printable(value),
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    environment.filters["printable"] = printable
    return environment


def allowed_script(script: str) -> dict[str, str]:
    """Return a script and the hash by which a page allows this script alone, as its template takes them."""
    return {
        "script": Markup(script),
        "script_hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    }
