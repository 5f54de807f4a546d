"""Every way a picture comes in, what becomes of a bad one, and where the heat lies on the original."""

from __future__ import annotations

import io
import itertools
import math
import os
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from networks import Net, features_and_head
from PIL import Image, ImageCms, ImageFile, ImageOps, PngImagePlugin
from refusals import refused
from tiers import represented_by, rows_represented
from torch import Tensor, nn
from torchvision import transforms
from torchvision.transforms import functional
from torchvision.transforms._presets import ImageClassification

import camkit
from camkit import cli
from camkit.errors import ImageError
from camkit.images.listing import find_pictures
from camkit.images.prepare import prepare
from camkit.images.read import open_picture, upright
from camkit.images.regions import CropBoxes

SIDE = 32
PRESET = ImageClassification(crop_size=SIDE, resize_size=36)
SQUASH = transforms.Compose([transforms.Resize((SIDE, SIDE)), transforms.ToTensor()])
MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])


def red_net(mean: Tensor, std: Tensor) -> Net:
    """Its one score is how much red there is, summed over cells of 4 x 4 pixels: its map is where the red is."""
    redness, mix = nn.Conv2d(3, 1, 1), torch.tensor([1.0, -0.5, -0.5])
    redness.weight.data = (mix * std).reshape(1, 3, 1, 1)
    redness.bias.data = (mix * mean).sum(0, keepdim=True) - 0.05
    return Net(
        lambda net, images: net.cells(net.redness(images).relu()).sum((2, 3)), redness=redness, cells=nn.AvgPool2d(4)
    )


@pytest.fixture
def net() -> Net:
    return features_and_head()


ROWS, COLUMNS = np.mgrid[0:40, 0:56]
PATTERN = np.stack([COLUMNS * 4, ROWS * 5, (ROWS + COLUMNS) * 2], axis=2).astype(np.uint8)
"""An upright picture without any symmetry, smooth enough to survive JPEG."""
PATTERN.setflags(write=False)


def shown(net: nn.Module, image: Any) -> np.ndarray:
    """Return what camkit took the picture for."""
    explanation = camkit.explain(net, image, "features", preprocess=PRESET)
    assert explanation.heatmap.shape == (SIDE, SIDE)
    assert explanation.box is not None
    return explanation.picture


# --- what must work ---------------------------------------------------------------------------------------------------


def test_16_bit_grey_is_scaled_and_not_clipped_to_white(net, tmp_path):
    levels = np.linspace(0, 65535, 40 * 56).reshape(40, 56).astype(np.uint16)
    big_endian = Image.frombytes("I;16B", (56, 40), levels.astype(">u2").tobytes())
    for name, deep in (("p.png", Image.fromarray(levels)), ("p.tiff", Image.fromarray(levels)), ("b.tiff", big_endian)):
        deep.save(tmp_path / name)
        expected = np.rint(levels / 257)[:, :, None].astype(np.uint8).repeat(3, axis=2)
        assert np.array_equal(shown(net, tmp_path / name), expected), name


@pytest.mark.parametrize("transparency", [None, 1, bytes([255, 40, 0])])
def test_palette_png_is_shown_in_its_colours_whatever_its_transparency(net, tmp_path, transparency):
    colours = np.array([[250, 10, 20], [30, 240, 50], [60, 70, 230]], np.uint8)
    indices = (np.arange(40 * 48).reshape(40, 48) % 3).astype(np.uint8)
    picture = Image.frombytes("P", (48, 40), indices.tobytes())
    picture.putpalette(colours.tobytes())
    picture.save(tmp_path / "p.png", **({} if transparency is None else {"transparency": transparency}))

    assert np.array_equal(shown(net, tmp_path / "p.png"), colours[indices])


@pytest.mark.parametrize("name", ["moving.gif", "pages.tif"])
def test_the_first_of_several_pictures_is_taken(net, tmp_path, name):
    pages = [Image.new("RGB", (48, 40), colour) for colour in ("red", "lime", "blue")]
    pages[0].save(tmp_path / name, save_all=True, append_images=pages[1:])
    pages[0].save(tmp_path / "stereo.jpg", "MPO", save_all=True, append_images=pages[1:])

    with pytest.warns(UserWarning, match=f"{name} holds several pictures, and camkit uses the first"):
        taken = shown(net, tmp_path / name)
    shown(net, tmp_path / "stereo.jpg")  # the second picture of a camera's file is for another device: no warning

    assert np.array_equal(np.unique(taken.reshape(-1, 3), axis=0), [[255, 0, 0]])


UNDO = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


def stored_turned(folder: Path, upright: Image.Image, orientation: int, suffix: str = "png", way: str = "exif") -> Path:
    """Write a picture as a camera held that way stores it; ``way`` says where the orientation stands in the file."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    xmp = f'<x:xmpmeta><rdf:Description tiff:Orientation="{orientation}"/></x:xmpmeta>'.encode()
    options = {"jpg": {"quality": 98}, "webp": {"lossless": True}, "avif": {"quality": 98}}.get(suffix, {})
    if way != "xmp":
        options["exif"] = exif
    if way != "exif" and suffix == "png":
        options["pnginfo"] = PngImagePlugin.PngInfo()
        options["pnginfo"].add_itxt("XML:com.adobe.xmp", xmp.decode())
    elif way != "exif":
        options |= {"tiffinfo": {700: xmp, **({274: orientation} if way == "both" else {})}} if suffix == "tiff" else {}
        options |= {"xmp": xmp} if suffix in ("jpg", "webp", "avif") else {}
    file = folder / f"camera-{way}.{suffix}"
    stored = upright.transpose(UNDO[orientation]) if orientation in UNDO else upright
    stored.save(file, **options)
    return file


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tiff", "avif"])
@pytest.mark.parametrize("way", ["exif", "xmp", "both"])
def test_a_picture_is_turned_once_however_often_it_is_prepared(tmp_path, suffix, way):
    file = stored_turned(tmp_path, with_marker((64, 64), 24, 8, 14), 6, suffix, way)
    own = transforms.Compose([ImageOps.exif_transpose, transforms.ToTensor()])

    opened = open_picture(file)

    assert np.array_equal(upright(opened, "again"), opened)
    assert np.array_equal(ImageOps.exif_transpose(opened), opened)
    with Image.open(file) as lazily:
        for given in (file, lazily):
            assert math.dist(camkit.explain(RED, given, "cells", preprocess=own).peak, (24, 8)) < 4


def test_compare_and_judge_see_a_turned_picture_as_explain_does(tmp_path):
    marked, ready = with_marker((64, 64), 24, 8, 14), transforms.ToTensor()
    file = stored_turned(tmp_path, marked, 6)
    explained = camkit.explain(RED, file, "cells", method="gradcam", preprocess=ready)

    compared = camkit.compare(RED, file, ["gradcam"], target_layer="cells", preprocess=ready).rows[0]
    judged = camkit.metrics.Evaluator(camkit.Explainer(RED, "cells", preprocess=ready), open_picture(file))

    assert np.array_equal(compared.maps[0].explanation.heatmap, explained.heatmap)
    assert torch.equal(judged.scores.picture, ready(marked))


def test_exif_entries_of_a_wrong_type_do_not_cost_the_picture(net, tmp_path):
    exif = Image.Exif()
    exif[0x0112], exif[0x010F] = 6, "maker"
    # Tag 0x0153 holds numbers; cameras and editors that write text there exist.
    damaged = exif.tobytes().replace(b"\x01\x0f\x00\x02", b"\x01\x53\x00\x02").replace(b"\x0f\x01", b"\x53\x01")
    Image.fromarray(PATTERN).transpose(UNDO[6]).save(tmp_path / "camera.jpg", exif=damaged, quality=98)

    assert np.abs(shown(net, tmp_path / "camera.jpg").astype(int) - PATTERN).max() <= 12


@pytest.mark.parametrize("size", [(1, 1), (3000, 10), (10, 3000), (7, 7), (40000, 300)])
@pytest.mark.parametrize("crop", [PRESET, SQUASH])
def test_tiny_and_very_long_pictures(net, size, crop):
    """Some functions of OpenCV take no picture wider than 32,767 pixels."""
    explanation = camkit.explain(net, Image.new("RGB", size, "orange"), "features", preprocess=crop)

    assert explanation.heatmap.shape == (SIDE, SIDE)
    if explanation.box is not None:
        assert explanation.picture.shape == (size[1], size[0], 3)
    assert explanation.overlay().shape == explanation.picture.shape


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (lambda p: p, lambda p: p),
        (lambda p: p.astype(np.float32) / 255, lambda p: p),
        (lambda p: p.astype(np.float64) / 255, lambda p: p),
        (lambda p: p[:, :, :1].astype(np.float16) / 255, lambda p: p[:, :, [0, 0, 0]]),
        (lambda p: p[:, :, 0], lambda p: p[:, :, [0, 0, 0]]),
        (lambda p: p[:, :, :1], lambda p: p[:, :, [0, 0, 0]]),
        (lambda p: np.dstack([p, np.full(p.shape[:2], 7, np.uint8)]), lambda p: p),
        (np.asfortranarray, lambda p: p),
        (lambda p: p[:, ::-1], lambda p: p[:, ::-1]),
        (lambda p: np.zeros_like(p, dtype=np.float32), np.zeros_like),
    ],
    ids=["uint8", "float32", "float64", "float16 Hx1", "HxW", "HxWx1", "HxWx4", "fortran", "view", "zeros"],
)
def test_arrays(net, given, expected):
    array = given(PATTERN)
    before = array.copy()

    assert np.abs(shown(net, array).astype(int) - expected(PATTERN)).max() <= (1 if array.dtype == np.float16 else 0)
    assert np.array_equal(array, before)


@pytest.mark.parametrize("mode", ["I;16", "I", "F", "P", "CMYK", "YCbCr", "HSV", "LAB", "LA", "PA", "1", "RGBA"])
def test_pil_pictures_of_every_mode(net, mode):
    grey = np.tile(np.arange(48) * 5, (40, 1))
    if mode in ("I;16", "I", "F"):
        dtype, scale = {"I;16": (np.uint16, 257), "I": (np.int32, 257), "F": (np.float32, 1)}[mode]
        picture, expected = Image.fromarray((grey * scale).astype(dtype)), grey
        assert picture.mode == mode
    else:
        picture = Image.fromarray(grey.astype(np.uint8)).convert("RGB").convert(mode)
        expected = np.asarray(picture.convert("RGB"))[:, :, 0].astype(int)
    if mode in ("LA", "RGBA"):  # transparency is dropped
        picture.putalpha(Image.fromarray(grey.astype(np.uint8)))

    assert np.abs(shown(net, picture)[:, :, 0].astype(int) - expected).max() <= 2


def test_a_tensor_is_used_as_it_is_and_a_batch_is_taken_apart(net):
    batch = torch.randn(3, 3, 20, 24)

    single = camkit.explain(net, batch[1], "features")
    several = camkit.explain(net, batch, "features")

    assert isinstance(several, list)
    assert len(several) == 3
    assert single.heatmap.shape == (20, 24)
    assert single.box == (0, 0, 24, 20)
    assert single.picture.shape == (20, 24, 3)
    assert np.allclose(single.raw, several[1].raw, atol=1e-6)
    assert single.score == pytest.approx(several[1].score, abs=1e-6)
    assert not isinstance(camkit.explain(net, batch[:1], "features"), list)
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        other = batch[1].to(dtype)
        found = camkit.explain(net, other.requires_grad_(), "features")
        assert np.allclose(found.raw, camkit.explain(net, other.detach().float(), "features").raw, atol=1e-6)


def test_a_tensor_of_four_channels_has_no_picture_but_a_map():
    explanation = camkit.explain(features_and_head(channels=4), torch.randn(4, 20, 24), "features")

    assert explanation.picture is None
    assert explanation.overlay().shape == (20, 24, 3)


@pytest.mark.parametrize(
    "weights",
    [
        "ResNet18_Weights.DEFAULT",
        "MobileNet_V2_Weights.IMAGENET1K_V2",
        "Swin_T_Weights.DEFAULT",
        "ViT_B_16_Weights.IMAGENET1K_SWAG_E2E_V1",
    ],
)
@pytest.mark.parametrize("size", [(500, 333), (57, 80), (256, 256)])
def test_preprocessing_equals_torchvisions_own_exactly(tmp_path, weights, size):
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8))
    picture.save(tmp_path / "p.png")
    preset = torchvision.models.get_weight(weights).transforms()

    assert torch.equal(prepare(tmp_path / "p.png", preset, "p").tensor, preset(picture))


# --- colour profiles --------------------------------------------------------------------------------------------------


def icc(space: bytes, tags: dict[bytes, bytes]) -> bytes:
    """Return an ICC profile, version 2, of a display or, for CMYK, of a printer (ICC.1:2001-04)."""
    table, data = struct.pack(">I", len(tags)), b""
    start = 128 + 4 + 12 * len(tags)
    for name, content in tags.items():
        table += name + struct.pack(">II", start + len(data), len(content))
        data += content + b"\0" * (-len(content) % 4)
    white = struct.pack(">iii", 63190, 65536, 54061)  # D50, in 1/65536
    kind, connection = (b"prtr", b"Lab ") if space == b"CMYK" else (b"mntr", b"XYZ ")
    header = struct.pack(">I4sI4s4s4s", start + len(data), b"", 0x02400000, kind, space, connection)
    header += struct.pack(">6H4s4s", 2026, 1, 1, 0, 0, 0, b"acsp", b"") + b"\0" * 24 + white
    return header + b"\0" * (128 - len(header)) + table + data


def xyz(*numbers: float) -> bytes:
    return b"XYZ \0\0\0\0" + struct.pack(">3i", *(round(number * 65536) for number in numbers))


def gamma(exponent: float) -> bytes:
    return b"curv\0\0\0\0" + struct.pack(">IH", 1, round(exponent * 256))


TEXT = {b"desc": b"desc\0\0\0\0" + struct.pack(">I", 5) + b"test\0" + b"\0" * 78, b"wtpt": xyz(0.9642, 1, 0.8249)}
DISPLAY_P3 = icc(
    b"RGB ",
    {
        **TEXT,
        b"rXYZ": xyz(0.51512, 0.24120, -0.00105),
        b"gXYZ": xyz(0.29198, 0.69225, 0.04189),
        b"bXYZ": xyz(0.15710, 0.06657, 0.78407),
        **dict.fromkeys((b"rTRC", b"gTRC", b"bTRC"), gamma(2.2)),
    },
)
GREY_1_0 = icc(b"GRAY", {**TEXT, b"kTRC": gamma(1.0)})


def cmyk_profile() -> bytes:
    """Return a profile in which K alone decides: no black is white, full black is black (Lab, 8 bits)."""
    corners = b"".join(bytes([0 if corner & 1 else 255, 128, 128]) for corner in range(16))
    identity = bytes(range(256))
    table = struct.pack(">4s4xBBBx9i", b"mft1", 4, 3, 2, 65536, 0, 0, 0, 65536, 0, 0, 0, 65536)
    return icc(b"CMYK", {**TEXT, b"A2B0": table + identity * 4 + corners + identity * 3})


def encoded_srgb(linear: np.ndarray) -> np.ndarray:
    """Return linear light 0..1 as sRGB levels (IEC 61966-2-1)."""
    linear = linear.clip(0, 1)
    return 255 * np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)


@pytest.mark.parametrize("ending", ["png", "jpg", "tif", "webp"])
def test_wide_gamut_colours_become_srgb(net, tmp_path, ending):
    colours = np.array([[200, 40, 60], [90, 200, 60], [30, 60, 180], [128, 128, 128]], np.uint8)
    pixels = np.repeat(colours, 14, 0)[None].repeat(40, 0)
    options = {"jpg": {"quality": 100, "subsampling": 0}, "webp": {"lossless": True}}.get(ending, {})
    Image.fromarray(pixels).save(tmp_path / f"p.{ending}", icc_profile=DISPLAY_P3, **options)
    to_srgb = np.array([[1.2249, -0.2247, 0.0], [-0.0420, 1.0419, 0.0], [-0.0197, -0.0786, 1.0979]])
    expected = encoded_srgb((pixels / 255) ** 2.2 @ to_srgb.T)

    assert np.abs(shown(net, tmp_path / f"p.{ending}") - expected).max() < 4
    with Image.open(tmp_path / f"p.{ending}") as opened:
        assert np.abs(shown(net, opened) - expected).max() < 4


def test_the_profile_of_srgb_leaves_every_pixel_as_it_is(net, tmp_path):
    for name in ("RGB", "L"):
        picture = Image.fromarray(PATTERN).convert(name)
        picture.save(tmp_path / "p.png", icc_profile=ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
        assert np.array_equal(shown(net, tmp_path / "p.png"), np.asarray(picture.convert("RGB")))


def test_grey_and_cmyk_are_converted_by_their_own_profiles(net, tmp_path):
    levels = np.repeat(np.arange(56) * 4, 40).reshape(56, 40).astype(np.uint8)
    for mode, dtype in (("L", np.uint8), ("I;16", np.uint16)):
        grey = Image.fromarray(levels.astype(dtype) * (257 if mode == "I;16" else 1))
        grey.save(tmp_path / "grey.png", icc_profile=GREY_1_0)
        expected = encoded_srgb(levels / 255)[..., None]
        difference = np.abs(shown(net, tmp_path / "grey.png") - expected)
        assert difference.mean() < 1
        assert difference.max() < 10  # the darkest levels of 8 bits lie far apart in sRGB
    inks = np.dstack([np.full_like(levels, 200)] * 3 + [levels])
    Image.fromarray(inks, "CMYK").save(tmp_path / "print.tif", icc_profile=cmyk_profile())
    picture = shown(net, tmp_path / "print.tif").astype(int)
    assert picture[0, 0].min() > 250  # no black ink: white by this profile, whatever the other inks
    assert (np.diff(picture[:, 0, 0]) <= 0).all()
    assert np.ptp(picture, axis=2).max() <= 2


@pytest.mark.parametrize(
    "profile",
    [b"no profile", DISPLAY_P3[:200], DISPLAY_P3[:150] + b"\xff" * 300, GREY_1_0, cmyk_profile()],
    ids=["text", "cut off", "damaged", "of grey", "of CMYK"],
)
def test_a_profile_that_cannot_be_used_is_ignored_with_a_note(net, tmp_path, profile):
    Image.fromarray(PATTERN).save(tmp_path / "p.png", icc_profile=profile)

    with pytest.warns(UserWarning, match=r"profile of .*p\.png cannot be used; its colours are taken as sRGB"):
        picture = shown(net, tmp_path / "p.png")

    assert np.array_equal(picture, PATTERN)


# --- numbers of 32 bits -----------------------------------------------------------------------------------------------


def test_a_tiff_of_32_bit_numbers_is_read_as_16_bits_or_refused_but_never_white(net, tmp_path):
    levels = np.linspace(0, 65535, 40 * 56).reshape(40, 56)
    Image.fromarray(levels.astype(np.int32)).save(tmp_path / "p.tif")
    assert np.array_equal(shown(net, tmp_path / "p.tif")[:, :, 0], np.rint(levels.astype(int) / 257).astype(np.uint8))
    for values in (levels * 30000, levels - 9, levels / 300):
        Image.fromarray(values.astype(np.int32)).save(tmp_path / "p.tif")
        with refused(r"holds 32-bit numbers from -?[0-9]+ to [0-9]+, so it is not clear", ImageError):
            shown(net, tmp_path / "p.tif")


@pytest.mark.skipif(os.name == "nt", reason="needs a program in a shell script")
def test_postscript_is_refused_and_not_run(net, tmp_path, monkeypatch):
    ghostscript = tmp_path / "gs"
    ghostscript.write_text(f"#!/bin/sh\ntouch {tmp_path / 'ran'}\n")
    ghostscript.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "cat.jpg").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 56 40\n%%EndComments\nshowpage\n")

    with refused("is PostScript, a program that camkit does not run", ImageError):
        shown(net, tmp_path / "cat.jpg")
    assert not (tmp_path / "ran").exists()


# --- finding files ----------------------------------------------------------------------------------------------------


EVERY = ["a.JPG", "b.png", "deep/c.webp", "odd[1].png", "sub/out/c.png"]


@pytest.mark.parametrize(
    ("patterns", "found"),
    [
        (["."], EVERY),
        (["b.png", "*.png"], ["b.png", "odd[1].png"]),
        (["**/*.webp"], ["deep/c.webp"]),
        (["*"], EVERY),
        (["**"], EVERY),
        (["d*/**", "s*"], ["deep/c.webp", "sub/out/c.png"]),
        (["*.txt"], ["notes.txt"]),
        (["odd[1].png"], ["odd[1].png"]),
        (["*.bmp", "gone.png"], ["*.bmp", "gone.png"]),
        (["out"], ["out/drawn.png"]),
        (["._a.png", ".cache"], ["._a.png", ".cache/b.png"]),
    ],
)
def test_pictures_are_found_in_order_and_once_without_hidden_files_and_the_output(
    tmp_path, monkeypatch, patterns, found
):
    for name in (*EVERY[::-1], "notes.txt", "deep/model.pth", "._a.png", ".cache/b.png", "out/drawn.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)

    assert [path.as_posix() for path in find_pictures(patterns, skip=Path("out"))] == found


def test_a_picture_too_thin_for_its_preset_is_refused_before_it_is_enlarged():
    preset = torchvision.models.ResNet18_Weights.DEFAULT.transforms()
    with pytest.raises(ImageError, match="1 x 1500 pixels and is too thin"):
        prepare(Image.new("RGB", (1, 1500)), preset, "thin")
    assert prepare(Image.new("RGB", (1500, 15)), preset, "wide").tensor.shape == (3, 224, 224)


# --- what must be refused in one sentence -----------------------------------------------------------------------------


def png_that_declares(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    parts = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(b"\0" * 64)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def encoded(kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(PATTERN).save(buffer, kind, **options)
    return buffer.getvalue()


BAD_FILES = {
    "cut.jpg": (encoded("JPEG")[:-200], "cannot be read"),
    "cut.png": (encoded("PNG")[:-60], "cannot be read"),
    "cut.webp": (encoded("WEBP", lossless=True)[:-30], "cannot be read"),
    "cut.avif": (encoded("AVIF")[:60] + b"\0" * 400, None),
    "empty.png": (b"", "an empty file"),
    "text.jpg": (b"this is a shopping list\n", "not a picture"),
    "bomb.png": (png_that_declares(100_000, 100_000), None),
    "no_width.png": (png_that_declares(0, 10), None),
    "a.heic": (bytes(128), "install pillow-heif"),
    "a.DCM": (bytes(128) + b"DICM", "not a picture"),
    "gone.png": (None, "no file"),
    "folder.png": (None, "folder"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_one_sentence_that_names_it(net, tmp_path, name):
    data, words = BAD_FILES[name]
    if data is not None:
        (tmp_path / name).write_bytes(data)
        assert [file.name for file in find_pictures([tmp_path])] == [name]
    if name == "folder.png":
        (tmp_path / name).mkdir()
    limits = Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES

    with refused(words, ImageError) as caught:
        camkit.explain(net, str(tmp_path / name), "features", preprocess=PRESET)

    assert name in str(caught.value)
    assert limits == (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES)


@pytest.mark.extended
def test_heic_is_read_if_pillow_heif_is_installed(net, tmp_path):
    heif = pytest.importorskip("pillow_heif", reason="pillow-heif is not installed")
    heif.from_pillow(Image.fromarray(PATTERN)).save(tmp_path / "a.heic", quality=-1)
    assert np.abs(shown(net, tmp_path / "a.heic").astype(int) - PATTERN).mean() < 4


def lazily_cut() -> Image.Image:
    """Return a PIL picture whose pixels are not read yet, and cannot be."""
    return Image.open(io.BytesIO(BAD_FILES["cut.jpg"][0]))


BAD_OBJECTS = {
    "NaN tensor": (lambda: torch.full((3, 8, 8), math.nan), "NaN or infinite"),
    "uint8 tensor": (lambda: torch.zeros(3, 8, 8, dtype=torch.uint8), "floating-point"),
    "2-D tensor": (lambda: torch.zeros(8, 8), r"\(8, 8\)"),
    "empty tensor": (lambda: torch.zeros(3, 0, 8), r"\(3, 0, 8\)"),
    "one channel": (lambda: torch.zeros(1, 16, 16), r"\b1 channels?\b.*\b3\b"),
    "four channels": (lambda: torch.zeros(4, 16, 16), r"\b4 channels\b.*\b3\b"),
    "float array above 1": (lambda: np.full((8, 8, 3), 1.5), "from 0 to 1"),
    "CHW array": (lambda: np.zeros((3, 16, 20), np.uint8), "channels-first"),
    "int64 array": (lambda: np.zeros((8, 8, 3), np.int64), "int64"),
    "4-D array": (lambda: np.zeros((1, 8, 8, 3)), r"\(1, 8, 8, 3\)"),
    "empty array": (lambda: np.zeros((0, 8, 3)), r"\(0, 8, 3\)"),
    "mode F above 255": (lambda: Image.fromarray(np.full((8, 8), 300, np.float32)), "255"),
    "PIL picture without pixels": (lambda: Image.new("RGB", (0, 8)), "pixels"),
    "PIL picture of a damaged file": (lazily_cut, "cannot be read"),
}


@pytest.mark.parametrize("layer", ["features", None])
@pytest.mark.parametrize("case", BAD_OBJECTS)
def test_a_bad_object_is_one_sentence(net, case, layer):
    make, words = BAD_OBJECTS[case]
    with refused(words, ImageError):
        camkit.explain(net, make(), layer, preprocess=PRESET)


def test_a_preprocessing_that_is_missing_or_returns_something_else_is_one_sentence(net):
    wrong = None, lambda picture: picture, lambda picture: torch.zeros(2, 3, 8, 8)
    for preprocess, words in zip(wrong, ("preprocess=", "preprocess must turn", "preprocess must turn"), strict=True):
        with refused(words, ImageError):
            camkit.explain(net, PATTERN, "features", preprocess=preprocess)
    with pytest.raises(KeyError, match="mine"):
        camkit.explain(net, PATTERN, "features", preprocess=lambda picture: {}["mine"])


# --- bad pictures among good ones -------------------------------------------------------------------------------------


def mixture(folder: Path) -> list[Any]:
    """Return pictures of every kind, good ones at even places and bad ones at odd places."""
    (folder / "bad.jpg").write_bytes(BAD_FILES["cut.jpg"][0])
    Image.fromarray(PATTERN).save(folder / "good.png")
    return [
        *(folder / "good.png", folder / "bad.jpg"),
        *(PATTERN[:, ::-1], folder / "gone.png"),
        *(torch.randn(3, 20, 24), torch.full((3, 20, 24), math.nan)),
        *(torch.randn(3, 20, 24), np.full((8, 8, 3), 7.0)),
        *(Image.fromarray(PATTERN[::-1]), torch.zeros(3, 8, 8, dtype=torch.int32)),
        *(str(folder / "good.png"), torch.zeros(1, SIDE, SIDE)),
        *(PATTERN, lazily_cut()),
        *(PATTERN[::-1], Image.new("RGB", (0, 5))),
        PATTERN[:20, :30],
    ]


@pytest.mark.parametrize(("batch_size", "layer"), [(1, "features"), (2, None), (32, "features")])
def test_failures_keep_their_place_and_the_others_are_as_if_alone(net, tmp_path, batch_size, layer):
    images = mixture(tmp_path)

    rows = list(camkit.explain_many(net, images, layer, preprocess=PRESET, on_error="yield", batch_size=batch_size))

    assert len(rows) == len(images)
    assert [isinstance(row, camkit.Failure) for row in rows] == [place % 2 == 1 for place in range(len(images))]
    assert all(isinstance(row.error, ImageError) for row in rows[1::2])
    assert [row.source for row in rows] == [
        str(image) if isinstance(image, (str, Path)) else f"picture {number}"
        for number, image in enumerate(images, start=1)
    ]
    gone = str(tmp_path / "gone.png")
    assert rows[3].to_dict() == {"source": gone, "status": "error", "error": f"there is no file {gone}"}
    for image, row in zip(images[::2], rows[::2], strict=True):
        alone = camkit.explain(net, image, layer, preprocess=PRESET)
        assert np.allclose(row.raw, alone.raw, atol=1e-6)
        assert np.allclose(row.heatmap, alone.heatmap, atol=1e-5)
        assert row.target == alone.target
        assert row.score == pytest.approx(alone.score, abs=1e-5)
        assert row.box == alone.box
        assert np.array_equal(row.picture, alone.picture)


@pytest.mark.parametrize("batch_size", [1, 2, 32])
def test_an_error_is_raised_after_the_results_before_it(net, tmp_path, batch_size):
    good = [PATTERN, PATTERN[::-1], PATTERN[:, ::-1]]

    def interrupted() -> Iterator[np.ndarray]:
        yield from good
        raise KeyError("the camera was unplugged")

    for images, kind, words in (
        ([*good, tmp_path / "gone.png", PATTERN], ImageError, r"gone\.png"),
        (interrupted(), KeyError, "unplugged"),
    ):
        stream = camkit.explain_many(net, images, "features", preprocess=PRESET, batch_size=batch_size)
        for image in good:
            assert np.array_equal(next(stream).picture, image)
        with pytest.raises(kind, match=words):
            next(stream)


# --- streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [[PATTERN], torch.zeros(1, 3, 16, 16), torch.zeros(2, 3, 16, 16)[None]])
def test_an_endless_stream_is_read_only_a_bounded_number_ahead(net, given):
    read, batch_size = [], 4

    def camera() -> Iterator[Any]:
        while True:
            read.extend(given)
            yield given[0]

    stream = camkit.explain_many(net, camera(), "features", preprocess=PRESET, batch_size=batch_size)
    assert not read

    for number, _ in enumerate(itertools.islice(stream, 40), start=1):
        assert len(read) * (2 if given[0].ndim == 4 else 1) <= number + 3 * batch_size + 2
    stream.close()


def test_a_generator_may_close_each_picture_or_write_over_it_when_the_next_is_wanted(net, tmp_path):
    frame = np.empty((400, 560, 3), np.uint8)
    for level in range(12):
        frame[:] = level * 20
        Image.fromarray(frame).save(tmp_path / f"{level:02}.png")

    def opened() -> Iterator[Image.Image]:
        for path in sorted(tmp_path.iterdir()):
            with Image.open(path) as picture:
                yield picture

    def camera() -> Iterator[np.ndarray]:
        for level in range(12):
            frame[:] = level * 20
            yield frame

    for pictures in (opened(), camera()):
        rows = list(camkit.explain_many(net, pictures, "features", preprocess=PRESET, batch_size=4))
        assert [np.unique(row.picture).tolist() for row in rows] == [[level * 20] for level in range(12)]


def test_reading_ahead_and_measuring_boxes_leaves_the_consumers_random_numbers_alone(net):
    expected = torch.rand(120, generator=torch.Generator().manual_seed(5)).tolist()
    pictures = (np.full((200 + number, 300, 3), 90, np.uint8) for number in range(24))
    drawn, boxes = [], []
    torch.manual_seed(5)

    for row in camkit.explain_many(net, pictures, "features", preprocess=SQUASH, batch_size=2):
        boxes.append(row.box)
        for _ in range(5):
            drawn.append(float(torch.rand(1)))
            time.sleep(0.001)

    assert drawn == pytest.approx(expected)
    assert None not in boxes


# --- the box: what part of the picture the model saw ------------------------------------------------------------------


@pytest.mark.parametrize("size", [(401, 703), (225, 224), (60, 77)])
@pytest.mark.parametrize(("resize", "crop"), [(256, 224), (224, 224), (236, 235), (181, 224)])
def test_the_box_of_a_torchvision_preset_is_the_one_that_is_measured(size, resize, crop):
    preset = ImageClassification(crop_size=crop, resize_size=resize)
    views = [CropBoxes().view(each, size, (crop, crop)) for each in (preset, transforms.Compose([preset]))]
    assert views[0].box == pytest.approx(views[1].box, abs=1.5)


def to_v1(*first: Any) -> Any:
    return transforms.Compose([*first, transforms.ToTensor(), transforms.Normalize(MEAN.tolist(), STD.tolist())])


def centre(size: tuple[int, int], side: float) -> tuple[float, float, float, float]:
    width, height = size
    return (width - side) / 2, (height - side) / 2, (width + side) / 2, (height + side) / 2


CROPPED = {
    "resize and crop": (to_v1(transforms.Resize(256), transforms.CenterCrop(224)), lambda s: centre(s, min(s) * 0.875)),
    "squashed": (to_v1(transforms.Resize((224, 224))), lambda s: (0, 0, *s)),
    "padded": (to_v1(transforms.Pad(50), transforms.Resize((224, 224))), lambda s: (-50, -50, s[0] + 50, s[1] + 50)),
    "padded grey": (
        to_v1(transforms.Pad((40, 0), fill=127), transforms.Resize((224, 224))),
        lambda s: (-40, 0, s[0] + 40, s[1]),
    ),
    "padded to a square": (to_v1(lambda picture: ImageOps.pad(picture, (224, 224))), lambda s: centre(s, max(s))),
    "crop alone": (to_v1(transforms.CenterCrop(320)), lambda s: centre(s, 320)),
    "crop larger than the picture": (
        to_v1(transforms.CenterCrop(1100), transforms.Resize(256)),
        lambda s: centre(s, 1100),
    ),
    "crop off the centre": (
        to_v1(lambda picture: picture.crop((50, 40, 350, 290)).resize((96, 96))),
        lambda s: (50, 40, 350, 290),
    ),
    "grey, inverted": (
        to_v1(transforms.Grayscale(3), ImageOps.invert, transforms.Resize(256), transforms.CenterCrop(224)),
        lambda s: centre(s, min(s) * 0.875),
    ),
    "nearest": (lambda picture: functional.to_tensor(picture.resize((64, 48), 0)), lambda s: (0, 0, *s)),
    "a batch of one": (lambda picture: functional.to_tensor(picture.resize((64, 48)))[None], lambda s: (0, 0, *s)),
    "half precision": (lambda picture: functional.to_tensor(picture.resize((64, 64))).half(), lambda s: (0, 0, *s)),
}


@pytest.mark.parametrize(
    ("case", "size"),
    rows_represented(lambda case, size: size == (640, 480), itertools.product(CROPPED, [(640, 480), (401, 703)])),
)
def test_the_box_of_the_callers_own_preprocessing(case, size):
    preprocess, expected = CROPPED[case]
    real = np.asarray(framed("black", 0).resize(size)).astype(float)
    real += 20 * np.random.default_rng(0).standard_normal(real.shape)

    for picture in (Image.new("RGB", size), Image.fromarray(real.clip(0, 255).astype(np.uint8))):
        explanation = camkit.explain(features_and_head(), picture, "features", preprocess=preprocess)

        assert explanation.box == pytest.approx(expected(size), abs=2)
        assert explanation.picture.shape == (size[1], size[0], 3)


def within(picture: Image.Image, inside: np.ndarray) -> Image.Image:
    """Crop a picture to the rows and columns that hold any pixel of a mask."""
    rows, columns = (np.flatnonzero(inside.any(axis)) for axis in (1, 0))
    return picture.crop((columns[0], rows[0], columns[-1] + 1, rows[-1] + 1)) if len(rows) else picture


def to_object(picture: Image.Image) -> Image.Image:
    """Crop to the pixels that differ from the corner's, if those are few enough for an object."""
    levels = np.asarray(picture.convert("L")).astype(int)
    differs = np.abs(levels - levels[0, 0]) > 20
    return within(picture, differs) if differs.mean() < 0.6 else picture


BY_CONTENT = {
    "black borders are trimmed": lambda picture: within(picture, np.asarray(picture).max(2) > 0),
    "white borders are trimmed": lambda picture: within(picture, np.asarray(picture).min(2) < 255),
    "cropped to the object": to_object,
}


def framed(colour: str, share: float) -> Image.Image:
    """Return a scene with a border of one colour, whose width is a share of each side."""
    with Image.open(camkit.scenes.scene_paths()["plane-sky"]) as scene:
        picture = scene.convert("RGB")
    border = tuple(round(side * share) for side in picture.size)
    return ImageOps.expand(picture, border, fill=colour)


@pytest.mark.parametrize("case", BY_CONTENT)
def test_a_preprocessing_that_crops_by_content_is_drawn_on_the_models_input(case):
    crop = BY_CONTENT[case]
    picture = framed("white" if "white" in case else "black", 0.1)
    if "object" in case:
        picture = Image.new("RGB", (300, 200), (30, 60, 30))
        picture.paste((250, 160, 20), (30, 40, 55, 90))
    preprocess = to_v1(crop, transforms.Resize((96, 96)))
    assert crop(picture).size != picture.size
    explainer = camkit.Explainer(features_and_head(), "features", preprocess=preprocess)

    for _ in range(2):
        explanation = explainer(picture)
        assert explanation.box is None
        assert explanation.picture.shape == (96, 96, 3)
    if case in ("black borders are trimmed", "white borders are trimmed"):
        assert explainer(crop(picture)).box is not None


def map_net() -> nn.Module:
    """Return a network that returns a map of numbers, as for depth."""
    return nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 1, 1))


@pytest.mark.parametrize(
    "target", [camkit.targets.region(0, 0, 20, 20), camkit.targets.box_at(9, 9), camkit.targets.mask_at(9, 9)]
)
def test_a_place_on_a_picture_that_the_preprocessing_turns_is_refused(target):
    turned = to_v1(lambda picture: picture.rotate(180), transforms.Resize((96, 96)))
    explainer, picture = camkit.Explainer(map_net(), "0", preprocess=turned), framed("black", 0)
    for explain in (explainer, explainer.scores_of):
        with pytest.raises(ImageError, match="cannot follow a place on the picture through this preprocessing"):
            explain(picture, target)


def test_a_place_is_refused_for_those_pictures_alone_whose_box_is_unknown():
    preprocess = to_v1(BY_CONTENT["black borders are trimmed"], transforms.Resize((96, 96)))
    bordered, region = framed("black", 0.1), camkit.targets.region(0, 0, 200, 200)
    plain = framed("black", 0).resize(bordered.size)
    explainer = camkit.Explainer(map_net(), "0", preprocess=preprocess)

    rows = list(explainer.stream([plain, bordered, plain], region, batch_size=3, on_error="yield"))

    assert [type(row) for row in rows] == [camkit.Explanation, camkit.types.Failure, camkit.Explanation]
    assert rows[0].score == rows[2].score == pytest.approx(explainer(plain, region).score)
    side = 200 * 96 / plain.width
    on_input = camkit.targets.region(0, 0, side, 200 * 96 / plain.height)
    assert rows[0].score == pytest.approx(explainer(preprocess(plain), on_input).score)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_region_that_the_model_does_not_see_fails_for_that_picture_alone(batch_size):
    preprocess = to_v1(transforms.Resize(96), transforms.CenterCrop(96))
    scene, region = framed("black", 0), camkit.targets.region(0, 20, 90, 90)
    small, large = scene.resize((97, 131)), scene.resize((640, 420))
    explainer = camkit.Explainer(map_net(), preprocess=preprocess)

    rows = list(explainer.stream([large, small], region, batch_size=batch_size, on_error="yield"))

    assert [type(row) for row in rows] == [camkit.types.Failure, camkit.Explanation]
    assert str(rows[0].error) == "picture 1: the region lies outside the part of the picture that the model sees"
    assert rows[1].score == pytest.approx(explainer(small, region).score)
    np.testing.assert_allclose(rows[1].raw, explainer(small, region).raw, atol=1e-6)


def trimming() -> tuple[nn.Module, Any]:
    """Return a network whose preprocessing trims black borders, for the command line."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.Flatten(), nn.Linear(3844, 3))
    return net, transforms.Compose([BY_CONTENT["black borders are trimmed"], to_v1(transforms.Resize((64, 64)))])


def test_the_command_line_says_that_the_place_is_unknown(tmp_path, capsys):
    framed("black", 0.2).save(tmp_path / "picture.png")
    Image.new("L", framed("black", 0.2).size, 255).save(tmp_path / "mask.png")
    out = ["--out", str(tmp_path / "out")]
    command = [str(tmp_path / "picture.png"), "--model", f"{__file__}:trimming", *out]

    assert cli.main(command) == 0
    assert "drawn on the model's input" in " ".join(capsys.readouterr().out.split())
    assert cli.main([*command, "--target", "1", "--mask", str(tmp_path / "mask.png")]) == 2
    assert "regions cannot be followed through this preprocessing" in " ".join(capsys.readouterr().err.split())


TWISTED = {
    "mirrored": to_v1(transforms.Resize((224, 224)), transforms.RandomHorizontalFlip(p=1)),
    "upside down": to_v1(transforms.RandomVerticalFlip(p=1)),
    "turned by 180 degrees": to_v1(lambda picture: picture.transpose(Image.Transpose.ROTATE_180)),
    "turned by 5 degrees": to_v1(transforms.RandomRotation((5, 5)), transforms.CenterCrop(200)),
    "transposed": to_v1(lambda picture: picture.transpose(Image.Transpose.TRANSPOSE)),
    "sheared": to_v1(transforms.RandomAffine(degrees=(0, 0), shear=(25, 25)), transforms.CenterCrop(200)),
    "in perspective": to_v1(transforms.Resize((224, 224)), transforms.RandomPerspective(distortion_scale=0.6, p=1)),
    "contrast stretched after the crop": to_v1(transforms.CenterCrop(200), ImageOps.autocontrast),
    "equalized after the crop": to_v1(transforms.CenterCrop(200), ImageOps.equalize),
    "not looking at the picture": lambda picture: torch.ones(3, 64, 64),
}


@pytest.mark.parametrize("case", represented_by("mirrored", "turned by 5 degrees", "sheared", among=TWISTED))
def test_other_changes_than_resize_and_crop_give_no_box_rather_than_a_wrong_one(case):
    explanation = camkit.explain(
        features_and_head(), Image.new("RGB", (500, 400)), "features", preprocess=TWISTED[case]
    )

    assert explanation.box is None
    assert explanation.picture.shape[:2] == explanation.heatmap.shape


RANDOM = {
    "mirrored now and then": to_v1(transforms.Resize((224, 224)), transforms.RandomHorizontalFlip()),
    "cropped at random": to_v1(transforms.Resize(256), transforms.RandomCrop(224)),
    "cropped and resized at random": to_v1(transforms.RandomResizedCrop(224)),
    "colours jittered": to_v1(transforms.ColorJitter(0.4, 0.4), transforms.Resize(256), transforms.CenterCrop(224)),
}


@pytest.mark.extended
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("case", RANDOM)
def test_a_random_preprocessing_gives_no_box_rather_than_another_draws(case, seed):
    torch.manual_seed(seed)
    preprocess, size = RANDOM[case], (500, 401 + seed)

    box = camkit.explain(features_and_head(), framed("black", 0).resize(size), "features", preprocess=preprocess).box

    if box is not None and case == "colours jittered":
        assert box == pytest.approx(centre(size, min(size) * 0.875), abs=2)
    else:
        assert box is None


# --- the heat lies where the red is -----------------------------------------------------------------------------------

CROP = ImageClassification(crop_size=224, resize_size=256)
RED = red_net(torch.zeros(3), torch.ones(3))


def with_marker(size: tuple[int, int], x: float, y: float, radius: float) -> Image.Image:
    """Return a grey picture with a red spot that is reddest at (x, y)."""
    rows, columns = np.mgrid[0 : size[1], 0 : size[0]] + 0.5
    red = np.clip(1 - np.hypot(columns - x, rows - y) / radius, 0, 1)
    pixels = np.full((size[1], size[0], 3), 120.0)
    pixels[:, :, 0] += red * 130
    pixels[:, :, 1:] -= red[:, :, None] * 110
    return Image.fromarray(np.rint(pixels).astype(np.uint8))


def hottest(overlay: np.ndarray, unheated: np.ndarray) -> tuple[float, float]:
    """Return the centre (x, y) of the brightest heat of an overlay drawn with alpha 1 in the colour map 'bone'."""
    heat = overlay.astype(float).sum(2)
    heat[unheated] = 0
    rows, columns = np.nonzero(heat >= 0.9 * heat.max())
    return columns.mean() + 0.5, rows.mean() + 0.5


def outside(box: Any, size: tuple[int, int]) -> np.ndarray:
    rows, columns = np.mgrid[0 : size[1], 0 : size[0]] + 0.5
    return (columns < box.left) | (columns > box.right) | (rows < box.top) | (rows > box.bottom)


SQUASHED = to_v1(transforms.Resize((224, 224)))


@pytest.mark.parametrize(
    ("size", "place", "preprocess"),
    [
        ((800, 500), (0.35, 0.4), CROP),
        ((500, 800), (0.6, 0.3), CROP),
        ((403, 299), (0.5, 0.8), CROP),
        ((300, 301), (0.2, 0.2), CROP),
        ((800, 500), (0.35, 0.4), to_v1(transforms.Resize(256), transforms.CenterCrop(224))),
        ((500, 800), (0.6, 0.3), SQUASHED),
    ],
)
def test_peak_and_overlay_lie_on_the_marker_of_the_original(size, place, preprocess):
    x, y = size[0] * place[0], size[1] * place[1]
    picture = with_marker(size, x, y, min(size) / 9)

    explanation = camkit.explain(red_net(MEAN, STD), picture, "cells", preprocess=preprocess)

    cell = 4 * max(size if preprocess is SQUASHED else (min(size) / 256 * 224,)) / 224
    assert explanation.status == "ok"
    assert math.dist(explanation.peak, (x, y)) < 0.75 * cell
    unseen = outside(explanation.box, size)
    drawn = explanation.overlay(colormap="bone", alpha=1.0)
    assert math.dist(hottest(drawn, unseen), (x, y)) < 0.6 * cell
    original = np.asarray(picture)
    assert np.array_equal(explanation.picture, original)
    overlay = explanation.overlay()
    assert (overlay[unseen] == overlay[unseen][:, :1]).all()
    assert (overlay[unseen] <= original[unseen]).all()
    both = explanation.overlay(style="side-by-side")
    assert np.array_equal(both, np.concatenate([original, overlay], axis=1))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_heat_lies_on_the_marker_of_a_turned_picture(tmp_path, orientation):
    size, marker = (420, 300), (250, 90)
    upright = with_marker(size, *marker, 30)
    file = stored_turned(tmp_path, upright, orientation)

    with Image.open(file) as opened:
        for given in (file, opened):
            explanation = camkit.explain(red_net(MEAN, STD), given, "cells", preprocess=CROP)
            assert np.array_equal(explanation.picture, np.asarray(upright))
            assert math.dist(explanation.peak, marker) < 4
            drawn = explanation.overlay(colormap="bone", alpha=1.0)
            assert math.dist(hottest(drawn, outside(explanation.box, size)), marker) < 4
        assert opened.getexif()[0x0112] == orientation, "the caller's picture stays as it is"


def test_without_a_box_the_heat_is_drawn_on_the_models_own_input():
    mirror = to_v1(transforms.Resize((224, 224)), transforms.RandomHorizontalFlip(p=1))

    explanation = camkit.explain(red_net(MEAN, STD), with_marker((448, 448), 100, 150, 40), "cells", preprocess=mirror)

    assert explanation.box is None
    assert explanation.picture.shape == (224, 224, 3)
    assert math.dist(explanation.peak, (224 - 50, 75)) < 3
    drawn = explanation.overlay(colormap="bone", alpha=1.0)
    assert math.dist(hottest(drawn, np.zeros((224, 224), bool)), (224 - 50, 75)) < 3
