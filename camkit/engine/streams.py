"""Run tasks ahead in other threads and return their results in order, so that reading and writing overlap computing.

The main thread holds Ctrl-C back whenever it uses the pool: the pool's locks are written in Python, and if Ctrl-C left
one locked, the threads could not end. No thread waits until the caller takes a result: when a program ends, Python
waits for all threads, even if the program never closed the stream.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from camkit.engine.guard import undisturbed

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Task(Generic[Result]):
    """A function, whether to run it in another thread, and how many bytes it keeps in memory until it is consumed."""

    function: Callable[[], Result]
    in_thread: bool
    size: int = 0


class _Job(Generic[Result]):
    """A task whose result has not been consumed. ``held`` is how many bytes that keeps in memory, None if unknown."""

    def __init__(self, task: Task[Result], size_of: Callable[[Result], int] | None) -> None:
        self._task, self._size_of = task, size_of
        self.future: Future[Result] | None = None
        self.held = None if task.in_thread and size_of is not None else task.size
        self.is_ready = False

    def run(self) -> Result:
        try:
            result = self._task.function()
            if self._size_of is not None:
                self.held = self._size_of(result)
            return result
        finally:
            self.is_ready = True


def in_order(
    tasks: Iterable[Task[Result]],
    *,
    workers: int,
    ahead: int,
    prompt: bool = False,
    most: int = sys.maxsize,
    size_of: Callable[[Result], int] | None = None,
    cores: int | None = None,
) -> Generator[Result, None, None]:
    """Run tasks in threads, at most ``ahead`` of the next result, and return their results in order.

    Args:
        tasks: read only as fast as the results are consumed; a task that needs no thread runs when its result is due.
        workers: the number of threads.
        ahead: the largest number of started tasks whose results have not been consumed.
        prompt: return each result as soon as it is ready, instead of first starting as many tasks as allowed.
        most: the most bytes in memory: no task is started while those before it hold more, by their ``size``. One task
            at a time may be larger.
        size_of: returns how many bytes a result holds, if that is known only when it is ready. Each thread may run a
            task whose size is not known yet; more of them wait if the size of the last result would be too much.
        cores: how many cores PyTorch uses in each thread; None leaves that to PyTorch.

    Returns:
        An iterator over the results. Closing it cancels tasks that have not started and waits for the others.
    """
    pool = ThreadPoolExecutor(workers, thread_name_prefix="camkit", initializer=_use_cores, initargs=(cores,))
    jobs: deque[_Job[Result]] = deque()
    failure: Exception | None = None
    usual, iterator = most, iter(tasks)

    def next_result() -> Result:
        nonlocal usual
        job = jobs.popleft()
        try:
            if job.future is None:
                return job.run()
            with undisturbed():
                result = job.future.result()
                _keep_own_cores(cores)
            usual = usual if job.held is None else job.held
            return result
        finally:
            del job  # otherwise the job, its exception, the traceback and this call would form a cycle

    def is_full(more: int) -> bool:
        done, running = sum(job.held or 0 for job in jobs), sum(job.held is None for job in jobs)
        return done + more > most or (running >= workers and done + running * usual > most)

    try:
        while True:
            try:
                task = next(iterator)
            except StopIteration:
                break
            except Exception as error:  # earlier results come first
                failure = error
                break
            while jobs and is_full(task.size):
                yield next_result()
            jobs.append(_Job(task, size_of))
            if task.in_thread:
                with undisturbed():
                    jobs[-1].future = pool.submit(jobs[-1].run)
            while jobs and (len(jobs) > ahead or (prompt and jobs[0].is_ready)):
                yield next_result()
        while jobs:
            yield next_result()
        if failure is not None:
            raise failure
    finally:
        with undisturbed():
            failure = None
            if isinstance(iterator, Generator):  # it may have threads of its own
                iterator.close()
            pool.shutdown(cancel_futures=True)
            _keep_own_cores(cores)


def _use_cores(cores: int | None) -> None:
    """Have PyTorch use this many cores in the current thread; None changes nothing."""
    if cores is not None:
        torch.get_num_threads()  # otherwise a thread that starts would take over the caller's number later
        torch.set_num_threads(cores)


def _keep_own_cores(of_threads: int | None) -> None:
    """Set the caller's number of cores again if other threads set theirs: PyTorch gives later threads the last one."""
    if of_threads is not None:
        torch.set_num_threads(torch.get_num_threads())


@contextmanager
def using_cores(cores: int) -> Iterator[None]:
    """Have PyTorch use this many cores in the current thread, and as many as before at the end."""
    before = torch.get_num_threads()
    torch.set_num_threads(cores)
    try:
        yield
    finally:
        torch.set_num_threads(before)
