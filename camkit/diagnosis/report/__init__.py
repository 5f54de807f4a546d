"""The reports of a diagnosis, one module for each format."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from camkit.diagnosis.report import json, picture
from camkit.diagnosis.values import Diagnosis

REPORTS: Mapping[str, Callable[[Diagnosis], bytes]] = MappingProxyType(
    {
        "diagnose.json": json.content,
        "diagnose.png": picture.content,
    }
)
"""The function that returns the content of each file that a diagnosis writes, by file name."""
