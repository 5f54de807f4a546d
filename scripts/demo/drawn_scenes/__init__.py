"""Draws scenes with one object on one background: what the demo's networks were trained on, and what camkit ships."""

from scripts.demo.drawn_scenes.drawing import BACKGROUNDS, HOME, THINGS, Scene, draw, draw_background

__all__ = ["BACKGROUNDS", "HOME", "THINGS", "Scene", "draw", "draw_background"]
