"""How a model computes its attention, set for a while."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from camkit.engine.interrupts import interruptible, undisturbed


@contextmanager
def attending_by_sdpa(model: nn.Module, *kept: str | None) -> Iterator[None]:
    """Let a function of PyTorch's compute all attention in the block; implementations in ``kept`` stay as they are.

    Threads that share a model share this setting; the last one to leave restores it.
    """
    configs: dict[int, Any] = {id(each.config): each.config for each in model.modules() if hasattr(each, "config")}
    with undisturbed():
        with _lock:
            used = [setting for setting in map(functools.partial(_replace, kept), configs.values()) if setting]
        try:
            with interruptible():
                yield
        finally:
            with _lock:
                for setting in used:
                    setting.users -= 1
                    if not setting.users:
                        setting.config._attn_implementation_internal = setting.name
                        del _replaced[id(setting.config)]


def _replace(kept: Sequence[str | None], config: Any) -> _Replaced | None:
    """Count one more user of a model's setting, which is replaced for the first one; None if it stays as it is."""
    name = getattr(config, "_attn_implementation_internal", "sdpa")
    setting = _replaced.get(id(config))
    if setting is None and name in ("sdpa", *kept):
        return None
    if setting is None:
        setting = _replaced[id(config)] = _Replaced(config, name)
        config._attn_implementation_internal = "sdpa"
    setting.users += 1
    return setting


@dataclass
class _Replaced:
    """A setting of a model's that is replaced for now: its object, its name, and how many threads need that."""

    config: Any
    name: str | None
    users: int = 0


_replaced: dict[int, _Replaced] = {}
_lock = threading.Lock()
