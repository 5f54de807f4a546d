"""Errors as users read them: one sentence, without the insides of Python."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from camkit.errors import ModelError


@contextmanager
def refused(
    words: str | None = None, kind: type[Exception] = ModelError, *, quotes: bool = False
) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Expect an error of this kind in one sentence that matches a pattern; it may quote what a library raised."""
    with pytest.raises(kind, match=words or None) as caught:
        yield caught
    sentence = str(caught.value)
    assert 10 < len(sentence) < 500
    assert not any(sign in sentence for sign in ("\n", "object at 0x"))
    assert quotes or "Error" not in sentence


class Attack:
    """Pickles as a call of a function."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call
