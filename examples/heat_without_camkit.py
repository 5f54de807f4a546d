"""Draws heat without camkit: heat_without_camkit.py with_heat.onnx photo.jpg out.png [class, if the file takes one]."""

import json
import sys

import numpy as np
import onnxruntime
from PIL import Image, ImageOps

file, path, out, *target = sys.argv[1:]
session = onnxruntime.InferenceSession(file)
facts = {"mean": "0", "std": "1", "names": "{}", **session.get_modelmeta().custom_metadata_map}
size, names, places, mean, std = (json.loads(facts[key]) for key in ("imgsz", "names", "places", "mean", "std"))
resize = json.loads(facts.get("resize", facts["imgsz"]))  # one number is for the shorter side
photo = ImageOps.exif_transpose(Image.open(path)).convert("RGB")
sides = resize[::-1] if len(resize) > 1 else [side * resize[0] // min(photo.size) for side in photo.size]
left, top = (round((side - own) / 2) for side, own in zip(sides, size[::-1], strict=True))  # the middle is cropped
photo = photo.resize(sides, Image.Resampling[facts.get("interpolation", "bilinear").upper()])
photo = photo.crop((left, top, left + size[1], top + size[0]))
image = ((np.asarray(photo) / 255 - mean) / std).transpose(2, 0, 1)[None].astype(np.float32)
(scores,), (heat,) = session.run(None, {"image": image} | ({"target": np.array(target, np.int64)} if target else {}))
for axis, side in enumerate(size):  # from the cells to the pixels; the second turn transposes the map back
    at = places[axis] if places else (np.arange(len(heat)) + 0.5) * side / len(heat) - 0.5
    heat = np.array([np.interp(range(side), at, line) for line in heat.T.clip(0)])  # no heat against the class
heat /= heat.max() or 1
turbo = bytes.fromhex("30123b466be328bceb32f298a4fc3cecd13afb8122d231057a0403")
colours = np.stack([np.interp(heat, np.linspace(0, 1, 9), [*turbo[channel::3]]) for channel in range(3)], axis=2)
Image.fromarray(np.uint8(photo + np.minimum(heat / 0.4, 0.5)[..., None] * (colours - photo))).save(out)
shares = {"softmax": np.exp(scores - np.logaddexp.reduce(scores)), "sigmoid": 1 / (1 + np.exp(-scores)), "none": scores}
print(f"{names.get(str(scores.argmax()), scores.argmax())}: {shares[facts['activation']].max():.1%}")
