"""Draws heatmaps onto pictures, draws sheets of text and pictures, and encodes image files."""
