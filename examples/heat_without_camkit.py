"""Draws heat without camkit: heat_without_camkit.py with_heat.onnx photo.jpg out.png [class, if the file takes it]."""

import json
import sys

import numpy as np
import onnxruntime
from PIL import Image, ImageOps

file, path, out, *target = sys.argv[1:]
session = onnxruntime.InferenceSession(file)
facts = {"mean": "0", "std": "1", "names": "{}", **session.get_modelmeta().custom_metadata_map}
size, names, places, mean, std = (json.loads(facts[key]) for key in ("imgsz", "names", "places", "mean", "std"))
resize = json.loads(facts.get("resize", facts["imgsz"]))  # one number is the shorter side
photo = ImageOps.exif_transpose(Image.open(path)).convert("RGB")
sides = resize[::-1] if len(resize) > 1 else [side * resize[0] // min(photo.size) for side in photo.size]
left, top = (round((side - own) / 2) for side, own in zip(sides, size[::-1], strict=True))  # crop the middle
photo = photo.resize(sides, Image.Resampling.BILINEAR).crop((left, top, left + size[1], top + size[0]))
image = ((np.asarray(photo) / 255 - mean) / std).transpose(2, 0, 1)[None].astype(np.float32)
(scores,), (heat,) = session.run(None, {"image": image} | ({"target": np.array(target, np.int64)} if target else {}))
heat = heat.clip(0)  # evidence against the class is not drawn
for axis, side in enumerate(size):  # from the cells to the pixels; the second turn transposes the map back
    at = places[axis] if places else (np.arange(len(heat)) + 0.5) * side / len(heat) - 0.5
    heat = np.array([np.interp(range(side), at, line) for line in heat.T])
heat /= heat.max() or 1
turbo = "30123b 466be3 28bceb 32f298 a4fc3c ecd13a fb8122 d23105 7a0403"
stops = np.frombuffer(bytes.fromhex(turbo), np.uint8).reshape(9, 3)
colours = np.stack([np.interp(heat, np.linspace(0, 1, 9), levels) for levels in stops.T], axis=2)
Image.fromarray(np.uint8(photo + np.minimum(heat / 0.4, 0.5)[..., None] * (colours - photo))).save(out)
print(f"{names.get(str(scores.argmax()), scores.argmax())}: {1 / np.exp(scores - scores.max()).sum():.1%}")
