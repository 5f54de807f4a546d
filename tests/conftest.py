"""What every test shares: shapes and types checked while the tests run, fixed seeds, one thread, the data folder."""

from __future__ import annotations

import os
import random
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from jaxtyping import install_import_hook

# beartype draws the items it checks from Python's generator, which camkit must be seen to leave alone: give it its own.
with mock.patch("random.getrandbits", random.Random(0).getrandbits):
    import beartype  # noqa: F401 - taken by name below

install_import_hook("camkit", "beartype.beartype")  # before any test imports camkit

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def test_data() -> Path:
    """Return the folder of real weights and photos, or skip where a machine does not have it."""
    default = Path(__file__).parents[1] / "../shared/data"
    folder = Path(os.environ.get("CAMKIT_TEST_DATA", default)).resolve()
    if not folder.is_dir():
        pytest.skip(f"no folder of weights and photos at {folder}; set CAMKIT_TEST_DATA to where it is")
    return folder
