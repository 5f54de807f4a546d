"""How a model computes its attention, set for a while."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from camkit.engine.interrupts import interruptible, undisturbed

_replaced: dict[int, str | None] = {}
_users: Counter[int] = Counter()
_lock = threading.Lock()


@contextmanager
def attending_by_sdpa(model: nn.Module, *kept: str | None) -> Iterator[None]:
    """Let a function of PyTorch's compute all attention in the block; implementations in ``kept`` stay as they are.

    Threads that share a model share this setting; the last one to leave restores it.
    """
    configs: dict[int, Any] = {id(each.config): each.config for each in model.modules() if hasattr(each, "config")}
    with undisturbed():
        with _lock:
            names = {key: getattr(config, "_attn_implementation_internal", "sdpa") for key, config in configs.items()}
            used = [key for key, name in names.items() if key in _replaced or name not in ("sdpa", *kept)]
            for key in used:
                _replaced.setdefault(key, names[key])
                _users[key] += 1
                configs[key]._attn_implementation_internal = "sdpa"
        try:
            with interruptible():
                yield
        finally:
            with _lock:
                for key in used:
                    _users[key] -= 1
                    if not _users[key]:
                        configs[key]._attn_implementation_internal = _replaced.pop(key)
