"""Explain detectors of MMDetection 3 (pip install mmdet): camkit photo.jpg --model detector_mmdetection.py:build.

Write the files of your network below.
"""

import numpy as np
import torch
from mmdet.apis import init_detector
from mmdet.models.dense_heads import base_dense_head
from mmdet.structures import DetDataSample
from torch import nn

CONFIG, WEIGHTS, SIDE = "rtmdet_tiny_8xb32-300e_coco.py", "rtmdet_tiny.pth", 640

# MMDetection's own function stops the gradients; this one lets them pass.
base_dense_head.select_single_mlvl = lambda levels, image, **_: [level[image] for level in levels]


class Boxes(nn.Module):
    """Returns the boxes that the detector predicts, in pixels of its input."""

    def __init__(self, detector):
        super().__init__()
        self.detector = detector

    def forward(self, images):
        """Return each picture's boxes."""
        size = tuple(images.shape[2:])
        shapes = dict.fromkeys(("img_shape", "ori_shape", "pad_shape", "batch_input_shape"), size)
        samples = [DetDataSample(metainfo={**shapes, "scale_factor": (1.0, 1.0)}) for _ in images]
        found = [sample.pred_instances for sample in self.detector.predict(images, samples, rescale=False)]
        return [{"boxes": each.bboxes, "scores": each.scores, "labels": each.labels} for each in found]

    def prepare(self, picture):
        """Return the model's input for a picture: blue first, and normalised by the detector itself."""
        pixels = torch.from_numpy(np.array(picture.resize((SIDE, SIDE))))
        return self.detector.data_preprocessor({"inputs": [pixels.permute(2, 0, 1).flip(0)]})["inputs"][0]


def build():
    """Return the detector, and the function that prepares a picture for it."""
    boxes = Boxes(init_detector(CONFIG, WEIGHTS, device="cpu"))
    return boxes, boxes.prepare
