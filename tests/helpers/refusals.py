"""What a user reads when camkit refuses something."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import pytest

from camkit.errors import CamkitError, ModelError


@contextlib.contextmanager
def refused(said: str = "", kind: type[CamkitError] = ModelError) -> Iterator[None]:
    """Expect an error that is one sentence and matches a pattern."""
    with pytest.raises(kind) as caught:
        yield
    text = str(caught.value)
    assert re.search(said, text), text
    assert 10 < len(text) < 500
    assert "\n" not in text
