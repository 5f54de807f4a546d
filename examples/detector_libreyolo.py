"""Explain LibreYOLO's YOLOv9 (pip install libreyolo), whose raw output camkit reads.

camkit photo.jpg --model detector_libreyolo.py:build --output predictions --boxes yolo --labels labels.txt
"""

from libreyolo import LibreYOLO9
from libreyolo.preprocess.yolo9 import preprocess_image


def prepare(picture):
    """Return the model's input for a picture."""
    return preprocess_image(picture)[0][0]


def build(weights="LibreYOLO9t.pt"):
    """Return the network with these weights, and the function that prepares a picture for it."""
    return LibreYOLO9(weights, size="t", device="cpu").model, prepare
