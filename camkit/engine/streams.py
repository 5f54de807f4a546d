"""Run tasks ahead in other threads and return their results in order, so that reading and writing overlap computing.

Ctrl-C waits while the main thread uses locks that are written in Python, such as those of a pool. Otherwise a lock
could stay taken, and the threads would wait for it without end. No thread waits for its result to be taken either: when
a program ends, Python waits for all threads, even if the program never closed the stream.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Generic, TypeVar

import torch

from camkit.engine.interrupts import undisturbed

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
        size_of: returns how many bytes a result holds, if that is known only when it is ready. While the results that
            wait hold ``most`` bytes or more, no thread starts anything new.
        cores: how many cores PyTorch uses in each thread; None leaves that to PyTorch.

    Returns:
        An iterator over the results. Closing it cancels tasks that have not started and waits for the others.
    """
    waiting: deque[tuple[Callable[[], bool], Callable[[], Result], int]] = deque()
    threads = _Threads(workers, most, size_of, cores)
    failure: Exception | None = None
    iterator = iter(tasks)
    held = 0

    def due() -> Result:
        nonlocal held
        _, result, size = waiting.popleft()
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
                job = threads.start(task.function)
                waiting.append((job.is_ready, functools.partial(threads.result_of, job), task.size))
            else:
                waiting.append((bool, task.function, task.size))
            held += task.size
            while waiting and (len(waiting) > ahead or (prompt and waiting[0][0]())):
                yield due()
        while waiting:
            yield due()
        if failure is not None:
            raise failure
    finally:
        with undisturbed():
            failure = None
            close = getattr(iterator, "close", None)  # of a generator, which may have threads of its own
            if close is not None:
                close()
            threads.close()


@contextmanager
def using_cores(cores: int) -> Iterator[None]:
    """Have PyTorch use this many cores in the current thread, and as many as before at the end."""
    before = torch.get_num_threads()
    torch.set_num_threads(cores)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Job(Generic[Result]):
    """A task that is queued or started.

    Attributes:
        size: how many bytes its result holds while it waits; 0 until it is ready, and if it is due before.
        is_due: whether somebody waits for its result.
    """

    def __init__(self) -> None:
        self._outcome: SimpleQueue[Result | _Raised] = SimpleQueue()
        self.size = 0
        self.is_due = False

    def is_ready(self) -> bool:
        """Tell whether the result can be taken."""
        return not self._outcome.empty()

    def finish(self, outcome: Result | _Raised) -> None:
        """Set the result, or what was raised."""
        self._outcome.put(outcome)

    def result(self) -> Result:
        """Wait for the result. The queue is written in C, so Ctrl-C ends the wait and leaves no lock taken."""
        outcome = self._outcome.get()
        if not isinstance(outcome, _Raised):
            return outcome
        try:
            raise outcome.error
        finally:
            del outcome  # its traceback refers to this call


@dataclass(frozen=True, slots=True)
class _Raised:
    error: BaseException


class _Threads(Generic[Result]):
    """Threads that run functions in order, and start none while the results that wait hold too many bytes.

    Python's collector may close a stream at any time, in any thread. So the same thread may take the lock twice, and
    the threads submit nothing to the pool.
    """

    def __init__(
        self, workers: int, most: int | None, size_of: Callable[[Result], int] | None, cores: int | None
    ) -> None:
        self._workers, self._most, self._size_of, self._cores = workers, most, size_of, cores
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="camkit")
        self._queued: deque[tuple[_Job[Result], Callable[[], Result]]] = deque()
        self._running = self._held = 0
        self._lock = threading.RLock()

    def start(self, function: Callable[[], Result]) -> _Job[Result]:
        """Run a function as soon as a thread is free and there is room."""
        if self._cores is not None:
            with undisturbed():
                self._use_cores(self._cores)
            self._cores = None
        job: _Job[Result] = _Job()
        with self._lock:
            self._queued.append((job, function))
        self._wake()
        return job

    def result_of(self, job: _Job[Result]) -> Result:
        """Wait for the result of a job, and free the room that it took."""
        with self._lock:
            job.is_due = True
            self._held -= job.size
        self._wake()
        return job.result()

    def close(self) -> None:
        """Drop what has not started, and wait for the rest."""
        with self._lock:
            self._queued.clear()
        self._pool.shutdown(wait=True)

    def _wake(self) -> None:
        """Have as many threads run as there is work and room for."""
        with self._lock:
            idle = min(self._workers - self._running, len(self._queued)) if self._has_room() else 0
            self._running += idle
        if idle:
            with undisturbed():
                for _ in range(idle):
                    self._pool.submit(self._run_queued)

    def _run_queued(self) -> None:
        """Run the functions that are queued, until there are none or no room is left."""
        while (queued := self._next()) is not None:
            self._run(*queued)

    def _next(self) -> tuple[_Job[Result], Callable[[], Result]] | None:
        """Take the next function, or note that this thread ends its work.

        The function whose result is due never waits for room: all before it were taken, and none after it has started.
        """
        with self._lock:
            if self._queued and self._has_room():
                return self._queued.popleft()
            self._running -= 1
            return None

    def _has_room(self) -> bool:
        return self._most is None or not self._held or self._held < self._most

    def _run(self, job: _Job[Result], function: Callable[[], Result]) -> None:
        outcome, size = self._outcome_of(function)
        job.finish(outcome)
        with self._lock:
            if not job.is_due:
                job.size = size
                self._held += size

    def _outcome_of(self, function: Callable[[], Result]) -> tuple[Result | _Raised, int]:
        """Return the result and its size, or what was raised."""
        try:
            result = function()
            return result, 0 if self._size_of is None else self._size_of(result)
        except BaseException as error:
            return _Raised(error), 0

    def _use_cores(self, cores: int) -> None:
        """Start all threads, and have PyTorch use this many cores in each.

        PyTorch gives threads that start later the number that was set last, so the caller's number is set again.
        """
        before = torch.get_num_threads()
        all_started = threading.Barrier(self._workers + 1)

        def start() -> None:
            torch.get_num_threads()  # otherwise the thread would take over the caller's number later
            torch.set_num_threads(cores)
            all_started.wait()

        try:
            for _ in range(self._workers):
                self._pool.submit(start)
            all_started.wait()
        except BaseException:
            all_started.abort()
            raise
        finally:
            torch.set_num_threads(before)
