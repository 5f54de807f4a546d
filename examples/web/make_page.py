"""Writes one HTML file that shows a classifier's heat in a browser, without a server or a network.

    pip install 'camkit[onnx]'
    camkit export --model resnet50 --target input --normalise --out with_heat.onnx
    npm install onnxruntime-web
    python examples/web/make_page.py with_heat.onnx node_modules/onnxruntime-web heat.html

The page holds the model, its metadata and ONNX Runtime Web (licence MIT).
"""

from __future__ import annotations

import argparse
import base64
import gzip
import json
from pathlib import Path

import cv2
import numpy as np
import onnxruntime

HERE = Path(__file__).parent


def text(data: bytes) -> str:
    """Return bytes as base64 text, for HTML."""
    return base64.b64encode(data).decode()


def packed(path: Path) -> str:
    """Compress a file, and return it as text."""
    return text(gzip.compress(path.read_bytes()))


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="an ONNX file made by camkit export")
    parser.add_argument("runtime", type=Path, help="the folder of the package onnxruntime-web")
    parser.add_argument("page", type=Path, help="the HTML file to write")
    parser.add_argument("photos", type=Path, nargs="*", help="pictures that the page offers to try")
    given = parser.parse_args()
    session = onnxruntime.InferenceSession(given.model, providers=["CPUExecutionProvider"])
    turbo = cv2.applyColorMap(np.arange(256, dtype=np.uint8), cv2.COLORMAP_TURBO)[..., ::-1]
    contents = {
        "file": given.model.name,
        "facts": session.get_modelmeta().custom_metadata_map,
        "takesTarget": len(session.get_inputs()) == 2,
        "colours": turbo.ravel().tolist(),
        "photos": [{"name": path.stem, "data": text(path.read_bytes())} for path in given.photos],
        "version": json.loads((given.runtime / "package.json").read_text())["version"],
        "runtime": packed(given.runtime / "dist/ort.wasm.bundle.min.mjs"),
        "wasm": packed(given.runtime / "dist/ort-wasm-simd-threaded.wasm"),
        "model": packed(given.model),
    }
    page = (HERE / "page.html").read_text(encoding="utf-8")
    given.page.write_text(page.replace("CONTENTS", json.dumps(contents).replace("<", "\\u003c")), encoding="utf-8")
    print(f"{given.page}: {given.page.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
