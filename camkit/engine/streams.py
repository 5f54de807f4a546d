"""Run tasks ahead in other threads and return their results in order, so that reading and writing overlap computing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")
Task = tuple[Callable[[], Result], bool]
"""A function, and whether to run it in another thread."""


def in_order(tasks: Iterable[Task[Result]], *, workers: int, ahead: int, prompt: bool = False) -> Iterator[Result]:
    """Run tasks in threads, at most ``ahead`` of the next result, and return their results in order.

    Args:
        tasks: read only as fast as the results are consumed; a task that needs no thread runs when its result is due.
        workers: the number of threads.
        ahead: the largest number of started tasks whose results have not been consumed.
        prompt: return each result as soon as it is ready, instead of first starting as many tasks as allowed.

    Returns:
        An iterator over the results. Closing it cancels tasks that have not started and waits for the others.
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
            except Exception as error:  # earlier results come first
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
