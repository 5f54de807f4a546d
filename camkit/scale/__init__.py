"""Explains folders of pictures, and writes drawings and tables; ``read`` reads a table."""

from camkit.scale.bundle import read
from camkit.scale.cluster import explain_dataset
from camkit.scale.samples import add_verdicts, explain_samples

__all__ = ["add_verdicts", "explain_dataset", "explain_samples", "read"]
