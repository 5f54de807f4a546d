"""Heatmaps drawn onto pictures, sheets to draw on, and image files."""
