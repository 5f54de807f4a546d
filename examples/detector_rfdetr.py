"""Explain RF-DETR (pip install rfdetr): camkit photo.jpg --model detector_rfdetr.py:build --labels labels.txt.

With COCO weights, the index of a class is its COCO id, from 1 to 90; write "-" into the lines that no id uses.
"""

import torch
from rfdetr import RFDETRNano
from rfdetr.utilities.tensors import NestedTensor
from torch import nn
from torchvision.ops import box_convert
from torchvision.transforms import v2


class Boxes(nn.Module):
    """Returns the boxes of all queries, each for its best class."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, images):
        """Return each picture's boxes."""
        everywhere = torch.zeros(len(images), *images.shape[2:], dtype=torch.bool, device=images.device)
        output = self.network(NestedTensor(images, everywhere))  # nothing is padding
        logits, (best, labels) = output["pred_logits"], output["pred_logits"].max(-1)
        sides = torch.tensor(images.shape[:1:-1] * 2, device=images.device)
        corners = box_convert(output["pred_boxes"], "cxcywh", "xyxy") * sides
        found = {"boxes": corners, "labels": labels, "scores": best.sigmoid(), "logits": best}
        found |= {"all_boxes": corners, "all_scores": logits.sigmoid(), "all_logits": logits}
        return [{name: values[place] for name, values in found.items()} for place in range(len(images))]


def build(weights="rf-detr-nano.pth"):
    """Return the network with these weights, and the function that prepares a picture for it."""
    detector = RFDETRNano(pretrain_weights=weights, device="cpu")
    side = detector.model_config.resolution
    normalise = v2.Normalize(detector.means, detector.stds)
    prepare = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Resize((side, side)), normalise]
    return Boxes(detector.model.model), v2.Compose(prepare)
