"""The quality of a JPEG file, from its quantisation table."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

LOSSLESS = 100.0
"""The quality of a file that is no JPEG, or that cannot be read."""

_BEST, _WORST = 1, 100

_STANDARD_MEAN = 57.625
"""The mean of the standard table for brightness (ITU-T T.81, Annex K.1), which has the quality 50."""


def jpeg_quality(path: Path) -> float:
    """Return the quality of a JPEG, 1..100, as the Independent JPEG Group's library scales its table.

    The library multiplies the standard table by 50 / quality below 50, and by 2 - quality / 50 above. This function
    compares the means of the tables, so it is right to about one step from 25 on; below, entries are cut at 255.
    """
    try:
        with Image.open(path) as picture:
            table = getattr(picture, "quantization", {}).get(0)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return LOSSLESS
    if not table:
        return LOSSLESS
    scale = sum(table) / len(table) / _STANDARD_MEAN
    quality = 100 - 50 * scale if scale <= 1 else 50 / scale
    return float(min(max(round(quality), _BEST), _WORST))
