"""Drawn scenes and two small networks, so that you can try camkit without a download."""
