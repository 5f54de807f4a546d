"""The reports of a judgement, one module for each format."""

REPORTS = ("judge.html", "judge.json", "judge.md")
"""The files that a judgement writes."""
