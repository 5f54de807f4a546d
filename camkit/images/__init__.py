"""Reads pictures, turns them into a model's input, and finds the part of the picture that the model sees."""
