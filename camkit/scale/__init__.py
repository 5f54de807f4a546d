"""Explains folders of pictures, and writes drawings and tables; ``read`` reads a table."""

from camkit.scale.cluster import explain_dataset
from camkit.scale.table import read

__all__ = ["explain_dataset", "read"]
