"""A process that serves calls one by one and is replaced where it dies or hangs: a candidate may crash the compiler, hang the GPU or
run out of memory, and whatever it does, it does not do to the sweep."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

_starting = threading.Lock()


def reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[-300:]}"


def jobs_of(args: argparse.Namespace) -> int:
    """The processes that --jobs asks for."""
    if args.jobs < 1:
        raise ValueError(f"--jobs must be at least 1, got {args.jobs}")
    return args.jobs


class Worker:
    """make(*args), called in the process, gives the function that serves; everything is pickled on its way.

    A call returns what the function does, or {"refused": [why]} where it raises, dies, or says nothing for so many seconds.
    env: variables of the process, where they differ from this one's.
    """

    def __init__(self, make: Callable[..., Callable], *args: Any, env: Mapping[str, str] | None = None):
        self.make, self.args, self.env = make, args, dict(env or {})
        self.process: Any = None

    def __call__(self, *args: Any, seconds: float = 60.0) -> dict[str, Any]:
        if self.process is None or not self.process.is_alive():
            self._start()
        process = self.process
        try:
            self.connection.send(args)
            if self.connection.poll(seconds):
                return self.connection.recv()
            found = f"no result in {seconds:.0f} s"
        except (EOFError, OSError):
            if self.process is not process:
                raise CancelledError from None  # closed meanwhile: this says nothing of the candidate
            process.join(5)
            found = f"the process died ({process.exitcode})"
        self.close()
        return {"refused": [found]}

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other, self.make, self.args), daemon=True)
        with _starting, _environment(self.env):
            self.process.start()
        other.close()

    def close(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.join()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def spread(tasks: list[Any], jobs: int, new: Callable[[], Worker], call: Callable[[Worker, Any], Any]) -> Iterator[tuple[Any, Any]]:
    """(task, call(worker, task)) as they are done, by so many workers, each of which takes one task after another."""
    workers = [new() for _ in range(max(1, min(jobs, len(tasks))))]
    free: SimpleQueue[Worker] = SimpleQueue()
    for worker in workers:
        free.put(worker)

    def one(task: Any) -> Any:
        worker = free.get()
        try:
            return call(worker, task)
        finally:
            free.put(worker)

    pool = ThreadPoolExecutor(len(workers))
    try:
        pending = {pool.submit(one, task): task for task in tasks}
        for done in as_completed(pending):
            yield pending[done], done.result()
    finally:  # also where the caller stops early: what is under way is not waited for
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.close()


@contextmanager
def _environment(values: Mapping[str, str]):
    """A process inherits the environment of the moment it starts."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _serve(connection, make: Callable[..., Callable], args: tuple) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; whoever started this process ends it
    serve = make(*args)
    while True:
        try:
            call = connection.recv()
        except EOFError:
            return
        try:
            connection.send(serve(*call))
        except Exception as error:
            connection.send({"refused": [reason(error)]})
            if any(sign in str(error) for sign in ("CUDA error", "HIP error", "device-side assert")):
                return  # the context of the GPU is lost, and with it every later call
