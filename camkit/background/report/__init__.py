"""The reports of a check, one module for each format."""
