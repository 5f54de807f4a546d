"""Explains folders of pictures, and writes drawings and tables; ``read`` reads a table."""

from camkit.scale.cluster import explain_dataset
from camkit.scale.samples import add_verdicts, explain_samples
from camkit.scale.table import read

__all__ = ["add_verdicts", "explain_dataset", "explain_samples", "read"]
