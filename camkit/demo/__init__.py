"""Drawn scenes and two small networks, to try camkit with nothing to download."""
