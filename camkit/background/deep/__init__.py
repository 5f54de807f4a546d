"""Optional analyses: each is a file with a function that takes ``Material`` and returns a ``Finding``, or None."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from camkit.background.deep import hints, kinds, shortcuts
from camkit.background.deep.analysis import Finding, Material

Analysis = Callable[[Material], Finding | None]

BEFORE_THE_VERDICT: Mapping[str, Analysis] = MappingProxyType({"hints": hints.find, "kinds": kinds.find})
"""The analyses that may warn. No analysis fails a model."""

AFTER_THE_VERDICT: Mapping[str, Analysis] = MappingProxyType({"shortcuts": shortcuts.find})
"""The analyses that explain the verdict."""
