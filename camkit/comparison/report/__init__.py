"""The reports of a judgement: a page, a Markdown table, and JSON."""
