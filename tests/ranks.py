"""A pool of real processes, the ranks of gloo process groups: starting one costs seconds, so many tests share them.

A test names a function of its own module; every rank imports that module by its path and calls the function:

    def check(factor: int) -> int:            # runs on each rank
        return factor * torch.distributed.get_rank()

    def test_ranks_count(ranks: Ranks) -> None:
        assert ranks(2, check, factor=3) == [0, 3]

Each call has a process group of its own, made before and destroyed after, and the environment of ``torchrun``, so that
a Trainer in it starts no processes. A rank that raises ends the call with every rank's traceback.
"""

import os
import random
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from importlib.util import module_from_spec, spec_from_file_location
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).parent
MODULE_PATHS = (HERE, HERE / "pytorch", HERE / "fabric")  # where `ranks`, `models`, `loops` are importable from


class RanksFailedError(AssertionError):
    """What the ranks raised, rank by rank."""

    def __init__(self, tracebacks: dict[int, str]) -> None:
        super().__init__("\n".join(f"--- rank {rank}\n{text}" for rank, text in tracebacks.items()))
        self.tracebacks = tracebacks


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _module(path: str) -> ModuleType:
    name = "ranks_" + Path(path).stem
    known = sys.modules.get(name)
    if known is not None and known.__file__ == path:
        return known
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _serve(connection: Connection) -> None:
    """The life of one rank."""
    for path in MODULE_PATHS:
        sys.path.insert(0, str(path))
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    clean = dict(os.environ)
    while True:
        try:
            path, name, environment, args, kwargs = connection.recv()
        except EOFError:
            return
        os.environ.update(environment)
        random.seed(0)
        torch.manual_seed(0)
        try:
            function = _module(path)
            for part in name.split("."):
                function = getattr(function, part)
            dist.init_process_group("gloo")
            reply = (True, function(*args, **kwargs))
        except BaseException:
            reply = (False, traceback.format_exc())
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            os.environ.clear()
            os.environ.update(clean)
        connection.send(reply)


class Ranks:
    """The pool. Call it with a number of ranks, a function of a test module, and the function's arguments."""

    def __init__(self) -> None:
        self._context = get_context("spawn")
        self._ranks: list[tuple[Any, Connection]] = []

    def __call__(
        self, world: int, function: Callable[..., Any], *args: Any, timeout: float = 180.0, **kwargs: Any
    ) -> Any:
        """Run ``function`` on ``world`` ranks; returns what they returned, by rank."""
        while len(self._ranks) < world:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))
        shared = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "GROUP_RANK": "0",
            "TORCHELASTIC_RUN_ID": "ranks",
        }
        path = sys.modules[function.__module__].__file__
        for rank, (_, connection) in enumerate(self._ranks[:world]):
            environment = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            connection.send((path, function.__qualname__, environment, args, kwargs))
        replies: dict[int, tuple[bool, Any]] = {}
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._ranks[:world])}
        while waiting:
            failed = any(not good for good, _ in replies.values())
            ready = wait(list(waiting), timeout=10.0 if failed else timeout)
            for connection in ready:
                rank = waiting.pop(connection)  # type: ignore[arg-type]
                try:
                    replies[rank] = connection.recv()  # type: ignore[union-attr]
                except EOFError:
                    replies[rank] = (False, f"the process died, exit code {self._ranks[rank][0].exitcode}")
            if not ready:
                for rank in waiting.values():
                    replies[rank] = (
                        False,
                        "still running when the time was up" if failed else f"no answer in {timeout} s",
                    )
                break
        tracebacks = {rank: text for rank, (good, text) in sorted(replies.items()) if not good}
        if tracebacks:
            self.close()  # whatever state they are in, the next test gets fresh ones
            raise RanksFailedError(tracebacks)
        return [replies[rank][1] for rank in range(world)]

    def close(self) -> None:
        """End the processes; the next call starts new ones."""
        for process, connection in self._ranks:
            process.kill()
            connection.close()
        for process, _ in self._ranks:
            process.join()
        self._ranks.clear()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """The pool of this test process."""
    pool = Ranks()
    yield pool
    pool.close()
