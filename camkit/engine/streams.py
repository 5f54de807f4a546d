"""Run tasks ahead in other threads and return their results in order, so that reading and writing overlap computing."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Task(Generic[Result]):
    """A function, whether to run it in another thread, and how many bytes it keeps in memory until it is consumed."""

    function: Callable[[], Result]
    in_thread: bool
    size: int = 0


def in_order(
    tasks: Iterable[Task[Result]],
    *,
    workers: int,
    ahead: int,
    prompt: bool = False,
    most: int | None = None,
    size_of: Callable[[Result], int] | None = None,
    cores: int | None = None,
) -> Iterator[Result]:
    """Run tasks in threads, at most ``ahead`` of the next result, and return their results in order.

    Args:
        tasks: read only as fast as the results are consumed; a task that needs no thread runs when its result is due.
        workers: the number of threads.
        ahead: the largest number of started tasks whose results have not been consumed.
        prompt: return each result as soon as it is ready, instead of first starting as many tasks as allowed.
        most: the most bytes in memory: no task is started while those before it hold more, by their ``size``. One task
            at a time may be larger.
        size_of: returns how many bytes a result holds, if that is known only when it is ready. If a result would bring
            the waiting results beyond ``most`` bytes, its thread keeps it and starts nothing new until there is room or
            the result is due.
        cores: how many cores PyTorch uses in each thread; None leaves that to PyTorch.

    Returns:
        An iterator over the results. Closing it cancels tasks that have not started and waits for the others.
    """
    waiting: deque[tuple[Callable[[], bool], Callable[[], Result], int]] = deque()
    room = _Room(most, size_of)
    pool = ThreadPoolExecutor(workers, thread_name_prefix="camkit")
    failure: Exception | None = None
    iterator = iter(tasks)
    held = started = 0

    def due() -> Result:
        nonlocal held
        _, result, size = waiting.popleft()
        room.expect(started - len(waiting) - 1)
        held -= size
        return result()

    try:
        while True:
            try:
                task = next(iterator)
            except StopIteration:
                break
            except Exception as error:  # earlier results come first
                failure = error
                break
            while waiting and most is not None and held + task.size > most:
                yield due()
            if task.in_thread:
                if cores is not None:
                    _use_cores(pool, workers, cores)
                    cores = None
                future = pool.submit(room.enter, started, task.function)
                waiting.append((future.done, future.result, task.size))
            else:
                waiting.append((bool, task.function, task.size))
            started += 1
            held += task.size
            while waiting and (len(waiting) > ahead or (prompt and waiting[0][0]())):
                yield due()
        while waiting:
            yield due()
        if failure is not None:
            raise failure
    finally:
        failure = None
        close = getattr(iterator, "close", None)  # of a generator, which may have threads of its own
        if close is not None:
            close()
        room.close()
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def using_cores(cores: int) -> Iterator[None]:
    """Have PyTorch use this many cores in the current thread, and as many as before at the end."""
    before = torch.get_num_threads()
    torch.set_num_threads(cores)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _use_cores(pool: ThreadPoolExecutor, workers: int, cores: int) -> None:
    """Start the threads of a pool, and have PyTorch use this many cores in each.

    PyTorch gives threads that start later the number that was set last, so the caller's number is set again.
    """
    before = torch.get_num_threads()
    all_started = threading.Barrier(workers + 1)

    def start() -> None:
        torch.get_num_threads()  # otherwise the thread would take over the caller's number later
        torch.set_num_threads(cores)
        all_started.wait()

    try:
        for _ in range(workers):
            pool.submit(start)
        all_started.wait()
    except BaseException:  # Ctrl-C
        all_started.abort()
        raise
    finally:
        torch.set_num_threads(before)


class _Room(Generic[Result]):
    """The bytes of the results that wait to be consumed.

    The task whose result is due never waits, and threads start tasks in order, so the task that is due has always
    started.
    """

    def __init__(self, most: int | None, size_of: Callable[[Result], int] | None) -> None:
        self._most, self._size_of = most, size_of
        self._sizes: dict[int, int] = {}
        self._due = -1
        self._change = threading.Condition()

    def enter(self, number: int, function: Callable[[], Result]) -> Result:
        """Run a task, and wait until there is room for its result."""
        result = function()
        most = self._most
        if self._size_of is not None and most is not None:
            size = self._size_of(result)
            with self._change:
                self._change.wait_for(
                    lambda: number <= self._due or not self._sizes or sum(self._sizes.values()) + size <= most
                )
                if number > self._due:
                    self._sizes[number] = size
        return result

    def expect(self, number: int) -> None:
        """Say that the result of this number is due."""
        if self._size_of is None:
            return
        with self._change:
            self._due = number
            self._sizes.pop(number, None)
            self._change.notify_all()

    def close(self) -> None:
        """Let all threads go on."""
        with self._change:
            self._most = None
            self._due = 1 << 62
            self._change.notify_all()
