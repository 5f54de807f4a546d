"""Explains folders of pictures and writes the drawings."""
