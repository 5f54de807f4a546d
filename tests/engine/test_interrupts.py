"""Ctrl-C leaves nothing behind, wherever it comes; every signal here is real."""

from __future__ import annotations

import functools
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from folders import write_pictures
from networks import classifier
from PIL import Image
from pydantic_core import PydanticSerializationError
from tiers import represented_by
from torch import nn
from unchanged import unchanged

import camkit
import camkit.hooks
from camkit.engine import guard
from camkit.engine.guard import interruptible, undisturbed
from camkit.engine.streams import Task, in_order

SIZE = 16


def nothing_runs() -> bool:
    """Tell whether camkit believes that no pass is running, Ctrl-C has its usual handler, and no mode is left."""
    idle = not (guard._ctrl_c.blocks or guard._in_use or torch.overrides._len_torch_function_stack())
    return idle and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def small() -> nn.Module:
    """Return a network in training mode with everything that a pass would change: dropout, batch statistics, flags."""
    torch.manual_seed(0)
    first = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.5)
    return classifier(*first, nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), classes=2).train()


def explain(model: nn.Module, images: torch.Tensor) -> None:
    camkit.Explainer(model, "4").batch(images, 1)


def choose(model: nn.Module, images: torch.Tensor) -> None:
    camkit.Explainer(model)(images[0], 1)


def diagnose(model: nn.Module, images: torch.Tensor) -> None:
    camkit.diagnose(model, images)


def record(model: nn.Module, images: torch.Tensor) -> None:
    with camkit.hooks.record(model, "*", inputs=True):
        model.eval()(images)


DOORS: dict[Callable[[nn.Module, torch.Tensor], None], int] = {explain: 30, record: 30, choose: 20, diagnose: 20}
"""How often each function is interrupted."""


@pytest.fixture
def alarm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], None]]:
    """Return a function that sends a Ctrl-C after some seconds; 0 cancels it."""
    # Python drops a Ctrl-C that it raises in a __del__. pytest would keep it, and with it the frames and their threads.
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    before = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds) and None
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def interrupt(
    model: nn.Module, call: Callable[[], None], times: int, alarm: Callable[[float], None], after: Callable[[], None]
) -> None:
    """Interrupt a call several times, each with a Ctrl-C at a random moment of its shortest run.

    ``after`` runs after each call, and then nothing may be left. A call that Ctrl-C misses is repeated.
    """
    chance, came, missed = random.Random(7), 0, 0
    call()  # this also imports what the call needs
    start = time.perf_counter()
    call()
    seconds = time.perf_counter() - start
    while came < times:
        with unchanged(model):
            try:
                start = time.perf_counter()
                alarm(max(1.1 * seconds * chance.random(), 1e-6))
                call()
                alarm(0)
                seconds, missed = min(seconds, time.perf_counter() - start), missed + 1
            except (KeyboardInterrupt, PydanticSerializationError) as error:  # pydantic raises its own in its place
                assert "KeyboardInterrupt" in repr(error)
                came += 1
            after()
        assert nothing_runs()
        assert missed < 10 * times, "Ctrl-C hardly ever interrupts this call"


@pytest.mark.parametrize("door", represented_by(explain, among=DOORS))
def test_random_ctrl_c_leaves_nothing(
    door: Callable[[nn.Module, torch.Tensor], None], alarm: Callable[[float], None]
) -> None:
    model, images = small(), torch.randn(2, 3, SIZE, SIZE)
    if door is record:
        model.eval()

    def collect() -> None:
        hooked = any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
        if door is record and (hooked or not nothing_runs()):
            gc.collect()  # the caller's own code runs in the block; if contextlib was interrupted, this ends it

    interrupt(model, lambda: door(model, images), DOORS[door], alarm, collect)


def wait_for_readers() -> None:
    """Wait until camkit's threads have ended; other tests may have left threads of their own."""
    deadline = time.monotonic() + 20
    while any(thread.name.startswith("camkit") for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "a thread never ends"
        gc.collect()  # if contextlib was interrupted, this closes the stream
        time.sleep(0.01)


@pytest.mark.extended
def test_random_ctrl_c_in_a_check_leaves_nothing(tmp_path: Path, alarm: Callable[[float], None]) -> None:
    model, masks = small(), tmp_path / "masks"
    for file in write_pictures(tmp_path / "data", 24, side=44):  # two classes: the folders 000 and 001
        mask = np.zeros((44, 48), np.uint8)
        mask[12:36, 12:36] = 255
        (masks / file.parent.name).mkdir(parents=True, exist_ok=True)
        Image.fromarray(mask).save(masks / file.parent.name / file.name)

    def check() -> None:
        camkit.check(
            model,
            tmp_path / "data",
            regions=masks,
            labels=["000", "001"],
            preprocess=lambda picture: torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255,
        )

    interrupt(model, check, 6, alarm, wait_for_readers)


def take_stream() -> None:
    """Take all results of a stream with little room, so that its threads stop and start."""
    tasks = (Task(functools.partial(bytes, 50), in_thread=number % 5 > 0, size=50) for number in range(12))
    for _ in in_order(tasks, workers=2, ahead=4, most=200):
        pass


def test_streams_that_the_collector_closes_leave_ctrl_c_as_it_was() -> None:
    def abandon() -> None:
        cycle: list[Any] = [in_order(iter([Task(int, in_thread=False)] * 3), workers=1, ahead=1)]
        next(cycle[0])
        cycle.append(cycle)

    for _ in range(500):  # the handler was lost after about 50
        abandon()
        take_stream()
        assert nothing_runs()


def test_a_ctrl_c_that_comes_while_the_handler_is_put_back_is_raised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    usual, own = signal.signal, signal.getsignal(signal.SIGINT)

    def put(number: int, handler: Any) -> Any:
        before = usual(number, handler)
        if handler is own:
            os.kill(os.getpid(), signal.SIGINT)
        return before

    monkeypatch.setattr(signal, "signal", put)
    with pytest.raises(KeyboardInterrupt), undisturbed():
        os.kill(os.getpid(), signal.SIGINT)
    monkeypatch.undo()
    with undisturbed():
        pass  # no Ctrl-C has waited


def test_a_thread_that_cannot_start_ends_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    start, before, started = threading.Thread.start, torch.get_num_threads(), []

    def start_one(thread: threading.Thread) -> None:
        started.append(thread)
        if len(started) > 1:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_one)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        list(in_order([Task(int, in_thread=True)] * 4, workers=3, ahead=3, cores=1))
    assert torch.get_num_threads() == before


UNCLOSED = """
import functools
from camkit.engine.streams import Task, in_order

tasks = (Task(functools.partial(bytes, 50), in_thread=True) for _ in range(1000))
results = in_order(tasks, workers=2, ahead=100, most=100, size_of=len)
print(len(next(results)), flush=True)
raise KeyboardInterrupt
"""


def test_a_program_ends_although_a_stream_was_never_closed() -> None:
    call = [sys.executable, "-c", UNCLOSED]
    done = subprocess.run(call, capture_output=True, text=True, check=False, timeout=120)
    assert (done.stdout, done.returncode) == ("50\n", -2)
    assert "ignored" not in done.stderr


def test_ctrl_c_waits_until_the_end_of_the_block_and_the_third_comes_at_once() -> None:
    for presses in (1, 2, 9):
        pressed = []
        with pytest.raises(KeyboardInterrupt), undisturbed():
            for number in range(1, presses + 1):
                pressed.append(number)
                signal.raise_signal(signal.SIGINT)
        assert pressed[-1] == min(presses, 3)
        assert nothing_runs()


@pytest.mark.parametrize("before", [True, False])
def test_ctrl_c_comes_at_once_in_an_interruptible_block(before: bool) -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), undisturbed():
        if before:
            signal.raise_signal(signal.SIGINT)
        with interruptible():
            signal.raise_signal(signal.SIGINT)
            reached.append("too far")
    assert not reached
    assert nothing_runs()


def test_a_handler_that_the_model_sets_stays_and_a_process_that_ignores_ctrl_c_still_does() -> None:
    own = lambda *_: None  # noqa: E731
    try:
        with undisturbed():
            signal.signal(signal.SIGINT, own)
        assert signal.getsignal(signal.SIGINT) is own
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with undisturbed(), interruptible():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_ctrl_c_of_the_main_thread_is_not_held_by_a_pass_in_another() -> None:
    inside, done = threading.Event(), threading.Event()

    def run() -> None:
        with undisturbed():
            inside.set()
            done.wait(10)

    thread = threading.Thread(target=run)
    thread.start()
    inside.wait(10)
    with suppress(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
        pytest.fail("Ctrl-C was held back")
    done.set()
    thread.join()
    assert nothing_runs()


def test_a_ctrl_c_at_no_line_of_the_end_of_a_hooks_block_leaves_gradients_off() -> None:
    model, image = small(), torch.rand(1, 3, 8, 8)
    number = lines = 0
    while lines == number:  # until the block has no more lines
        number, lines = number + 1, 0

        def press(frame: Any, event: str, _: Any, at: int = number) -> Any:
            nonlocal lines
            lines += event == "line" and lines < at
            if event == "line" and lines == at:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
            return press

        try:
            with camkit.hooks.record(model, "*"):
                model(image)
                sys.settrace(press)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
            is_on = torch.is_grad_enabled()
            # Real signals never come between two plain statements, so nothing else cleans up behind this one.
            guard._ctrl_c.blocks = guard._ctrl_c.presses = 0
            guard._in_use.clear()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            torch.set_grad_enabled(True)
        assert is_on, number
