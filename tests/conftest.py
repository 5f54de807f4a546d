"""What every test shares: fixed seeds, one thread, the data folder; with ``--types``, checks of shapes and types."""

from __future__ import annotations

import gc
import os
import random
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when PyTorch is imported: threads that wait do not spin

import numpy as np
import pytest
import torch
from PIL import Image

if TYPE_CHECKING:
    from playwright.sync_api import Browser

# beartype draws the items it checks from Python's generator, which camkit must be seen to leave alone: give it its own.
with mock.patch("random.getrandbits", random.Random(0).getrandbits):
    import checked

pytest.register_assert_rewrite("unchanged")

torch.set_num_threads(1)  # pytest-xdist gives each processor a worker of its own
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the same for the commands that tests start


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--types", action="store_true", help="check the shapes and types of all calls: a third more time")


def pytest_configure(config: pytest.Config) -> None:
    """Check shapes and types if asked, before any test imports camkit; let Ctrl-C interrupt."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a script's background job and its children ignore Ctrl-C
    if config.option.types:
        checked.install()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep the garbage collector from modules and tests: 800,000 objects that stay, which it read again and again."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run what takes longest first, mypy and the tests on a cluster: other workers would wait for it at the end."""
    items.sort(key=lambda item: item.path.name not in ("test_house.py", "test_ray.py"))


@pytest.fixture(autouse=True)
def fitting_types() -> Iterator[None]:
    """Fail a test in which a value did not fit its annotation, also if something caught the error."""
    checked.violations.clear()
    yield
    assert checked.violations == []


@pytest.fixture
def checks_types(request: pytest.FixtureRequest) -> None:
    """Skip a test of the checks themselves if they are off."""
    if not request.config.option.types:
        pytest.skip("needs --types")


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(0)  # torch.manual_seed also formats a stack for each kind of device
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)


@pytest.fixture(autouse=True)
def few_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let methods that need thousands of passes by default need a few; their own tests say how many they want."""
    from camkit.methods import METHODS, variant  # noqa: PLC0415 - camkit is imported after ``checked`` is installed

    few = {"sscam": {"samples": 1}, "iscam": {"steps": 2}, "rise": {"masks": 50}}
    for name, options in few.items():
        monkeypatch.setitem(METHODS, name, variant(name, **options))


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    sync_playwright = pytest.importorskip("playwright.sync_api").sync_playwright
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=_FLAGS)
        yield started
        started.close()


@pytest.fixture(scope="session")
def test_data() -> Path:
    """Return the folder of real weights and photos, or skip where a machine does not have it."""
    default = Path(__file__).parents[1] / "../shared/data"
    folder = Path(os.environ.get("CAMKIT_TEST_DATA", default)).resolve()
    if not folder.is_dir():
        pytest.skip(f"no folder of weights and photos at {folder}; set CAMKIT_TEST_DATA to where it is")
    return folder


@pytest.fixture
def scene_folder(tmp_path: Path) -> Path:
    """Return a folder with the scenes that camkit ships, as PNG files."""
    import camkit  # noqa: PLC0415 - few tests need it

    folder = tmp_path / "pictures"
    folder.mkdir()
    for number, scene in enumerate(camkit.scenes.scene_paths().values()):
        Image.open(scene).save(folder / f"{number}.png")
    return folder
