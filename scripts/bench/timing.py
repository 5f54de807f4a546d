"""What the benchmarks share: networks with random weights, calls that take turns, ratios, and the machine's name."""

from __future__ import annotations

import functools
import gc
import platform
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import timm
import torch
import torchvision
from torch import Tensor, nn

from camkit.engine import guard, passes

Run = Callable[[], object]
Opener = Callable[[], AbstractContextManager[Run]]
"""Returns a context that yields the call to time; set-up and clean-up are not timed."""


@functools.cache
def network(name: str, device: str = "cpu") -> nn.Module:
    """Return a network with seeded random weights, on which the cost does not depend: "NAME" or "timm:NAME"."""
    torch.manual_seed(0)
    of_timm, _, rest = name.rpartition(":")
    model: nn.Module = timm.create_model(rest) if of_timm else torchvision.models.get_model(name, weights=None)
    for module in model.modules():  # torchvision's ViT starts with a head of zeros
        if isinstance(module, nn.Linear) and not bool(module.weight.any()):
            nn.init.normal_(module.weight, std=0.02)
    return model.eval().to(device)


def ready(run: Run) -> Opener:
    """Return a call that needs no set-up."""
    return lambda: nullcontext(run)


def plain(model: nn.Module, images: Tensor, times: int = 1) -> Run:
    """Return a call that runs the model ``times`` times, in the memory format that camkit would choose."""
    memory_format = passes.faster_format(model, images, "fp32", guard.ModelRecord.of_model(model))
    images = images.contiguous(memory_format=memory_format)

    def run() -> None:
        with torch.inference_mode():
            for _ in range(times):
                model(images)

    return run


def take_turns(
    runs: Mapping[str, Opener],
    rounds: int,
    warm_ups: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Return each call's seconds per round.

    All calls take turns in one process, so that a slow moment of the machine affects all of them. The order rotates
    every round, and every second round is reversed.
    """
    wait: Run = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    names = list(runs)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(warm_ups + rounds):
        start = number % len(names)
        for name in [*names[start:], *names[:start]][:: 1 if number % 2 == 0 else -1]:
            gc.collect()
            with runs[name]() as run:
                wait()
                begin = clock()
                run()
                wait()
                seconds[name].append(clock() - begin)
    return {name: taken[warm_ups:] for name, taken in seconds.items()}


def quartiles(seconds: Sequence[float], base: Sequence[float]) -> tuple[float, float, float]:
    """Return the quartiles of the ratios within each round: low, median and high."""
    low, middle, high = np.quantile(np.divide(seconds, base), (0.25, 0.5, 0.75)).tolist()
    return low, middle, high


def processor(device: str) -> tuple[str, list[str]]:
    """Return the processor's name and its units for fast arithmetic."""
    if device.startswith("cuda"):
        units = ["bf16"] if torch.cuda.get_device_capability(device) >= (8, 0) else []
        return torch.cuda.get_device_name(device), units
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    name = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    units = [unit for unit in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if re.search(rf"\b{unit}\b", cpuinfo)]
    return name[1] if name else platform.machine(), units


def resident(field: str) -> int:
    """Return a figure of this process's memory in bytes: "VmRSS" now, "VmHWM" at the peak. Only Linux has it."""
    match = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match is not None
    return 1024 * int(match[1])


def reset_peak() -> None:
    """Let the peak of the resident set count from here."""
    Path("/proc/self/clear_refs").write_text("5")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table that also reads well as text."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    padded = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in (header, rule, *rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in padded)
