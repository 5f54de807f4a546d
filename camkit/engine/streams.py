"""Work done ahead in other threads, its results in order: reading pictures and writing them overlap with computing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")
Task = tuple[Callable[[], Result], bool]
"""What to do, and whether it is worth another thread."""


def in_order(tasks: Iterable[Task[Result]], *, workers: int, ahead: int, prompt: bool = False) -> Iterator[Result]:
    """Run tasks up to ``ahead`` of the one whose result is wanted.

    Args:
        tasks: taken only as fast as the results are; a task that needs no thread runs when its result is wanted.
        workers: threads.
        ahead: tasks begun but not yet asked for, at most.
        prompt: give a result as soon as it is there, rather than begin as many tasks as allowed first.

    Returns:
        An iterator over the results. Closing it cancels what has not begun and waits for what has.
    """
    waiting: deque[tuple[Callable[[], bool], Callable[[], Result]]] = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="camkit")
    failure: Exception | None = None
    iterator = iter(tasks)
    try:
        while True:
            try:
                function, in_thread = next(iterator)
            except StopIteration:
                break
            except Exception as error:  # results that come before it are given first
                failure = error
                break
            if in_thread:
                future = pool.submit(function)
                waiting.append((future.done, future.result))
            else:
                waiting.append((bool, function))
            while waiting and (len(waiting) > ahead or (prompt and waiting[0][0]())):
                yield waiting.popleft()[1]()
        while waiting:
            yield waiting.popleft()[1]()
        if failure is not None:
            raise failure
    finally:
        failure = None
        pool.shutdown(wait=True, cancel_futures=True)
