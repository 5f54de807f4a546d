"""Errors as users read them: one sentence, without the insides of Python."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from camkit.errors import ModelError


@contextmanager
def refused_as(kind: type[Exception], words: str | None = None) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Expect an error of this kind in one sentence that matches a pattern."""
    with pytest.raises(kind, match=words) as caught:
        yield caught
    sentence = str(caught.value)
    assert 10 < len(sentence) < 700
    assert not any(sign in sentence for sign in ("\n", "object at 0x"))


@contextmanager
def refused(words: str | None = None, kind: type[Exception] = ModelError) -> Iterator[None]:
    """Expect a model to be refused in one sentence that matches a pattern."""
    with refused_as(kind, words or None):
        yield
