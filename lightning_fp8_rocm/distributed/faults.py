"""One rank fails: every rank says why, and ends within seconds instead of at the timeout of the process group.

At agreed points (setup, before the first step, load, save) ``raise_together`` exchanges what the ranks raised, and all
raise. Anywhere else the rank that fails tells the others through the store of the process group, where the thread of
a ``Watcher`` looks once a second: a main thread that waits in a collective runs no Python signal handler.
"""

import atexit
import logging
import os
import socket
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented, but not exported to type checkers
from torch.distributed.distributed_c10d import (
    PrefixStore,
    Store,
    _get_default_store,  # private: nothing public says where the store is
)

log = logging.getLogger("lightning_fp8_rocm")

T = TypeVar("T")

_AGREED = "_raised_on_all_ranks"
_LONGEST_TEXT = 4000  # characters of a message that travel
_MOST_KINDS = 8  # different failures, or values, that one message lists

_POLL_S = 1.0  # the store, across the network
_LOOK_S = 0.5  # at the processes of this machine, a few small reads of /proc
# In which a rank may raise by itself what another one raised: a user who catches it on all ranks goes on.
_GRACE_S = 3.0
_MEET_S = 5.0
# Rank 0 holds the store: so long its process stays for the others to read that it failed, or ended. Two polls and more.
_LINGER_S = 2.5
# A whole node or the way to it is gone when nothing is heard for this long. Longer than any C call holds the GIL.
_SILENCE_S = 60.0
# A process that is killed closes its sockets, which others notice, a moment before it counts as dead.
_DYING_S = 0.3
_CONNECT_S = 10.0


class DistributedError(RuntimeError):
    """What one or more ranks raised, raised with the same text on all ranks."""


# ---- agreed points


@contextmanager
def raise_together(where: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Make what one rank raises in the body an exception on all ranks.

    All ranks of ``group`` must come here. The body must hold no collectives: a rank that raised before one would leave
    the others waiting in it. Costs one small ``all_gather_object``. On one process it does nothing.

    Args:
        where: What the body does, as it stands in the message: ``"loading the checkpoint"``.
        group: Whose ranks exchange; the default group if None.

    Raises:
        DistributedError: On all ranks with the same text, unless every rank raised the same type and message; then each
            rank raises its own.
    """
    if not _is_distributed(group):
        yield
        return
    error: Exception | None = None
    try:
        yield
    except Exception as own:
        error = own
    try:
        told = exchange(None if error is None else (_kind(error), _text(error)), group)
    except Exception as broken:  # a peer died
        if error is None:
            raise
        raise error from broken
    if all(each is None for each in told):
        return
    agreed_by_all = len(told) == dist.get_world_size()
    if error is not None and all(each == told[0] for each in told):
        raise (agreed(error) if agreed_by_all else error)
    ranks = dist.get_process_group_ranks(group)
    raised = [(rank, f"{each[0]}: {each[1]}") for rank, each in zip(ranks, told, strict=True) if each is not None]
    failures = "; ".join(f"{who} raised {what}" for who, what in _by_rank(raised))
    failure: Exception = DistributedError(f"{where}: {failures}")
    raise (agreed(failure) if agreed_by_all else failure) from error


def same_on_all_ranks(value: object, what: str, group: dist.ProcessGroup | None = None) -> None:
    """Refuse, on all ranks, a value that differs between them.

    Args:
        value: Small and picklable: a name, a path, the sizes of a mesh. Compared with ``==``.
        what: Its name, as it stands in the message: ``"`fp8_format`"``.
        group: Whose ranks exchange; the default group if None.

    Raises:
        DistributedError: With the same text on all ranks: which rank has what.
    """
    if not _is_distributed(group):
        return
    values = exchange(value, group)
    if all(each == values[0] or (each != each and values[0] != values[0]) for each in values):  # NaN equals NaN here
        return
    has = [(rank, repr(each)) for rank, each in zip(dist.get_process_group_ranks(group), values, strict=True)]
    found = "; ".join(f"{value} on {who}" for who, value in _by_rank(has))
    failure = DistributedError(f"{what} must be the same on all ranks, but is {found}")
    raise agreed(failure) if len(values) == dist.get_world_size() else failure


def is_agreed(error: BaseException) -> bool:
    """Whether all ranks raised ``error`` at an agreed point, so that nobody has to be told."""
    return bool(getattr(error, _AGREED, False))


def agreed(error: Exception) -> Exception:
    """Mark an exception that every rank raises with the same text, so that nobody has to be told; returns it."""
    BaseException.__setattr__(error, _AGREED, True)  # past the `__setattr__` of an exception that is a frozen dataclass
    return error


def _is_distributed(group: dist.ProcessGroup | None = None) -> bool:
    """Whether ranks can exchange anything: the ``fake`` group of simulations has a world size and no peers."""
    if not dist.is_available() or not dist.is_initialized():
        return False
    return dist.get_rank(group) >= 0 and dist.get_world_size(group) > 1 and dist.get_backend(group) != "fake"


def exchange(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """What each rank of ``group`` (the default group if None) passes, by rank; small and picklable."""
    if not _is_distributed(group):
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def _kind(error: BaseException) -> str:
    return type(error).__qualname__


def _text(error: BaseException) -> str:
    try:
        return str(error)[:_LONGEST_TEXT]
    except Exception:
        return "(its message cannot be made)"


def _ranks(ranks: Sequence[int]) -> str:
    """Ranks as a person writes them.

    >>> _ranks([1])
    'rank 1'
    >>> _ranks([3, 5, 6, 7])
    'ranks 3, 5-7'
    """
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    named = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {named}"


def _by_rank(told: Sequence[tuple[int, str]]) -> list[tuple[str, str]]:
    """Which ranks tell what: each text once, and not more of them than a message can hold."""
    groups: dict[str, list[int]] = {}
    for rank, text in told:
        groups.setdefault(text, []).append(rank)
    kinds = [(ranks, text) for text, ranks in groups.items()]
    rest = sorted(rank for ranks, _ in kinds[_MOST_KINDS:] for rank in ranks)
    shown = kinds[:_MOST_KINDS] + ([(rest, "something else again")] if rest else [])
    return [(f"{_ranks(ranks)} of {dist.get_world_size()}", text) for ranks, text in shown]


# ---- anywhere else


class Watcher:
    """Ends this process within seconds when another rank has failed outside an agreed point.

    One instance serves many runs (validate, fit, test), each between ``start`` and ``stop``. A run that fails calls
    ``announce`` with its exception first. Without a ``TCPStore`` (one process, a ``FileStore``, a fake process group)
    it does nothing.

    What it sees, each within 10 s on all nodes, with a line on stderr that names the rank: an exception that was
    announced; a process that died in any way without having stopped; the end of the process that holds the store; the
    end of the ``torchrun`` agent. A node that is silent for 60 s, powered off or cut off, counts as dead.

    The cost: one request of some bytes per second and rank, and two per second and node. At 1,024 ranks on 128 nodes
    the store serves 1,280 requests per second, 32 ms of a thread of its own (25 us each there and back, measured on a
    CPU core). It holds one more socket per rank: with over 500 ranks ``ulimit -n`` of its process must exceed 1,024.
    """

    def __init__(self) -> None:
        self._run: _Run | None = None

    def start(self) -> None:
        """Begin to watch. All ranks call it together, after the process group is up: it exchanges who they are."""
        self.stop()
        address = _store_address()
        if address is None:
            log.debug("Other ranks are not watched: there is one process, or no TCPStore.")
            return
        store = _connect(*address)
        us = _Process.this(watches=store is not None)
        told = exchange((us, uuid.uuid4().hex))
        if store is None:
            return
        # The token of rank 0, new each time: a restart by torchrun finds no key of the run that failed.
        prefix = f"lightning_fp8_rocm/fault/{told[0][1]}"
        others = [each for each, _ in told if each.watches]
        self._run = _Run(PrefixStore(prefix, store), f"{address[0]}:{address[1]}", us, others, len(told))
        atexit.register(self._close)

    def announce(self, error: BaseException) -> None:
        """Tell all ranks that this one raised ``error``; they end unless they raise by themselves within 3 s.

        Keeps quiet about what all ranks raised together, and about ``KeyboardInterrupt`` and ``SystemExit``.
        """
        if self._run is None or is_agreed(error) or isinstance(error, KeyboardInterrupt | SystemExit):
            return
        self._run.announce(error)

    def meet(self) -> bool:
        """Whether all ranks call this within some seconds; no collective, so a rank that comes alone waits no longer.

        Where nothing is watched it is True: there are no others, or nothing is known of them.
        """
        return self._run is None or self._run.meet()

    def stop(self) -> None:
        """End watching: this rank is done, and its process may end. Does nothing where nothing was started.

        Comes after ``announce`` where the run failed, and before ``destroy_process_group``, which ends rank 0's store.
        The rank that holds the store waits up to 2.5 s for ranks that are still running to learn that it is done.
        """
        run, self._run = self._run, None
        if run is None:
            return
        atexit.unregister(self._close)
        run.close()
        run.say_done()

    def _close(self) -> None:
        # Threads that come back from C++ while the interpreter ends abort it. Nothing is said: a process that ends
        # without `stop` leaves the others waiting, and they must end.
        if self._run is not None:
            self._run.close()


@dataclass(frozen=True)
class _Process:
    """A rank's process, as others can look it up."""

    rank: int
    host: str
    pid: int
    started: str
    """In clock ticks since boot: a pid alone may be another process by now."""
    machine: str | None
    """Whose ``/proc`` shows it; a host name will not do, since containers of several nodes may share one."""
    watches: bool

    @staticmethod
    def this(watches: bool) -> "_Process":
        pid = os.getpid()
        try:
            started, machine = _stat(pid)[1], _machine()
        except OSError:
            started, machine = "", None
        return _Process(dist.get_rank(), socket.gethostname(), pid, started, machine, watches)

    @property
    def node(self) -> str:
        return self.machine or f"rank {self.rank}"

    def is_dead(self) -> bool:
        try:
            state, started = _stat(self.pid)
        except (FileNotFoundError, ProcessLookupError):
            return True
        except OSError:  # as too many open files: says nothing about the process
            return False
        # A zombie, dead and not waited for, still has a pid: rank 0 is the parent of the ranks that Lightning starts.
        return state in ("Z", "X") or started != self.started

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})"


class _Run:
    """Between one ``start`` and ``stop``.

    Two threads, since a request to a store whose machine went off never returns: one speaks with the store, the other
    looks at processes and decides.
    """

    def __init__(self, store: Store, address: str, us: _Process, watching: Sequence[_Process], world: int) -> None:
        self._store, self._address, self._us, self._world = store, address, us, world
        self._watching = len(watching)
        self._peers = [
            each for each in watching if us.machine is not None and each.machine == us.machine and each != us
        ]
        self._agent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._holds_store = us.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        # Scripts destroy the process group before they end; others must be able to read that it was no fault.
        self._held: Store | None = _get_default_store() if self._holds_store else None
        nodes: dict[str, list[_Process]] = {}
        for each in watching:
            nodes.setdefault(each.node, []).append(each)
        self._beats = len(nodes) > 1 and nodes[us.node][0] == us
        # Rank 0 listens to the nodes: their first ranks, and when their beat was last another one.
        self._nodes = [ranks for node, ranks in nodes.items() if us.rank == 0 and node != us.node]
        self._heard: list[tuple[int, float]] = [(0, time.monotonic()) for _ in self._nodes]

        self._reason: str | None = None  # for which this process has to end
        self._lost: str | None = None  # what speaking with the store raised
        self._answered = time.monotonic()
        self._holder_is_done = False
        self._rings = 0
        self._read: set[str] = set()
        self._suspects: deque[_Process] = deque()
        self._announced = False
        self._meetings = 0
        self._stopped, self._spared = threading.Event(), threading.Event()
        self._threads = [
            threading.Thread(target=target, name=f"lightning_fp8_rocm-{name}", daemon=True)
            for name, target in (("store", self._speak), ("watcher", self._watch))
        ]
        for thread in self._threads:
            thread.start()

    # ---- the main thread

    def announce(self, error: BaseException) -> None:
        if self._announced:
            return
        self._announced = True
        us = self._us
        what = f"raised {_kind(error)}: {_text(error)}{self._cause_of(error)}"
        _say(f"rank {us.rank} of {self._world} ({us.host}, pid {us.pid}) {what}")
        try:
            self._publish(f"rank {us.rank} {what}")
            self._spared.set()
            self._linger("fault")
        except dist.DistError as lost:
            self._spared.set()
            log.debug("The other ranks could not be told: %s", _first_line(lost))

    def _cause_of(self, error: BaseException) -> str:
        """Gloo raises at once where a peer died: then that is the cause, and what this rank raised its consequence."""
        with suppress(dist.DistError):
            if isinstance(error, RuntimeError) and self._store.check(["fault"]):
                return f" (after {self._store.get('fault').decode()})"
        deadline = time.monotonic() + _DYING_S
        while not (dead := [peer for peer in (*self._suspects, *self._peers) if peer.is_dead()]):
            if time.monotonic() > deadline:
                return ""
            time.sleep(0.02)
        with suppress(dist.DistError):
            dead = [peer for peer in dead if not self._store.check([f"done/{peer.rank}"])]
        return f" (after {' and '.join(map(str, dead))} died without a word)" if dead else ""

    def meet(self) -> bool:
        self._meetings += 1
        here, verdict = f"meeting/{self._meetings}", f"verdict/{self._meetings}"
        try:
            self._store.add(here, 1)
            deadline = time.monotonic() + _MEET_S
            while (all_came := self._store.add(here, 0) >= self._world) is False and time.monotonic() < deadline:
                time.sleep(0.05)
            # The first verdict counts: the last rank may come just as the first one leaves.
            return self._store.compare_set(verdict, "", "yes" if all_came else "no") == b"yes"
        except dist.DistError as lost:
            log.debug("The other ranks could not be met: %s", _first_line(lost))
            return False

    def close(self) -> None:
        self._spared.set()
        self._stopped.set()
        for thread in self._threads:
            thread.join(timeout=2.0)  # a request that is never answered is left behind

    def say_done(self) -> None:
        if self._threads[0].is_alive() or self._lost is not None:
            return
        try:
            for key in ("fault", "done"):
                self._acknowledge(key)
            if self._announced:
                return
            self._store.set(f"done/{self._us.rank}", "")
            if self._holds_store:
                # The store goes with this process. Ranks that are later must know by then that this was no fault.
                self._store.set("holder_is_done", "")
                self._store.add("bell", 1)
                self._linger("done")
        except dist.DistError as lost:
            log.debug("The other ranks could not be told that this one is done: %s", _first_line(lost))
        finally:
            self._held = None

    def _linger(self, key: str) -> None:
        deadline = time.monotonic() + _LINGER_S
        while self._holds_store and time.monotonic() < deadline and self._store.add(f"read/{key}", 0) < self._watching:
            time.sleep(0.05)

    # ---- the thread that speaks with the store

    def _speak(self) -> None:
        try:
            while not self._stopped.wait(_POLL_S):
                self._poll()
                self._answered = time.monotonic()
        except dist.DistError as lost:
            self._lost = _first_line(lost)
        except Exception:
            log.exception("The thread that watches other ranks failed; a failure of theirs may not be seen.")

    def _poll(self) -> None:
        rings = self._store.add("bell", 0)  # the one request of every second
        if rings != self._rings:
            self._rings = rings
            self._hear()
        while self._suspects:
            peer = self._suspects[0]
            if self._reason is None and not self._store.check([f"done/{peer.rank}"]):
                self._reason = f"{peer} died without a word"
                self._publish(self._reason)
            self._suspects.popleft()  # only now: if the store is gone, its name is part of the reason
        if self._beats:
            self._store.add(f"beat/{self._us.rank}", 1)
        self._listen_to_nodes()

    def _hear(self) -> None:
        if self._store.check(["holder_is_done"]):
            self._holder_is_done = True
            self._acknowledge("done")
        if self._store.check(["fault"]):
            self._reason = self._reason or self._store.get("fault").decode()
            self._acknowledge("fault")

    def _listen_to_nodes(self) -> None:
        now = time.monotonic()
        for index, ranks in enumerate(self._nodes):
            first = ranks[0].rank
            beat, since = self._store.add(f"beat/{first}", 0), self._heard[index][1]
            if beat != self._heard[index][0] or self._store.check([f"done/{first}"]):
                self._heard[index] = (beat, now)
            elif now - since > _SILENCE_S and self._reason is None:
                named = _ranks([each.rank for each in ranks])
                self._reason = f"nothing was heard of {named} ({ranks[0].host}) for {_SILENCE_S:.0f} s"
                self._publish(self._reason)

    def _publish(self, reason: str) -> None:
        self._store.compare_set("fault", "", reason)  # the first one is the cause
        self._store.add("bell", 1)

    def _acknowledge(self, key: str) -> None:
        if key not in self._read:
            self._read.add(key)
            self._store.add(f"read/{key}", 1)

    # ---- the thread that looks at processes and decides

    def _watch(self) -> None:
        while not self._spared.wait(_LOOK_S):
            if not dist.is_initialized():  # the user destroyed it: there is no collective left to wait in
                self._stopped.set()
                self._threads[0].join(timeout=2.0)
                self.say_done()
                return
            reason = self._reason_to_end()
            if reason is None:
                continue
            if self._spared.wait(_GRACE_S):
                return
            # The cause may have come meanwhile, where first only its consequence was seen.
            self._end(self._reason or reason)

    def _reason_to_end(self) -> str | None:
        if self._reason is not None:
            return self._reason
        if self._agent is not None and os.getppid() != self._agent:
            return f"its torchrun agent (pid {self._agent}) died"
        dead = [peer for peer in self._peers if peer.is_dead()]
        silent = time.monotonic() - self._answered
        if self._lost is None and silent < _SILENCE_S:
            self._peers = [peer for peer in self._peers if peer not in dead]
            self._suspects.extend(dead)  # the other thread asks whether they were done
            return None
        if self._holder_is_done:
            return None  # the run is ending everywhere, and there is nobody left to ask
        lost = self._lost or f"no answer for {silent:.0f} s"
        holder = "rank 0" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" else "the torchrun agent"
        dead_names = " and ".join(map(str, [*self._suspects, *dead]))
        return f"{dead_names or holder} died or cannot be reached: the store at {self._address} is gone ({lost})"

    def _end(self, reason: str) -> None:
        # In a thread: a standard error that nobody reads may block for ever.
        speaker = threading.Thread(target=_say, args=(f"rank {self._us.rank} ends, because {reason}",), daemon=True)
        speaker.start()
        speaker.join(timeout=2.0)
        os._exit(1)  # the main thread may wait in a collective, where no exception and no signal reaches it


def _say(line: str) -> None:
    with suppress(OSError, ValueError):  # a pipe that nobody reads any more must not hide the failure itself
        sys.stdout.flush()  # what was printed before is not lost with the process
    with suppress(OSError, ValueError):
        print(f"lightning_fp8_rocm: {line}", file=sys.stderr, flush=True)  # noqa: T201, logging may be off or in a file


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


def _store_address() -> tuple[str, int] | None:
    """Where the store of the default group listens, in torchrun's agent or in rank 0; None if there is none."""
    if not _is_distributed():
        return None
    store = _get_default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, TCPStore) else None


def _connect(host: str, port: int) -> Store | None:
    """A client of our own: requests of one client wait for each other, and the default one waits for whole minutes."""
    try:
        # No world size, no waiting for workers: so it is not counted among the ranks that the rendezvous waits for.
        return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=_CONNECT_S), wait_for_workers=False)
    except dist.DistError as error:
        log.debug("Other ranks are not watched: the store at %s:%d cannot be reached: %s", host, port, error)
        return None


def _machine() -> str:
    """Equal for processes that see each other's pids, different for any others."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()}/{boot}/{os.readlink('/proc/self/ns/pid')}"


def _stat(pid: int) -> tuple[str, str]:
    """The state letter and the start time of a process, from ``/proc/PID/stat`` (proc(5))."""
    text = Path(f"/proc/{pid}/stat").read_text()
    fields = text.rpartition(")")[2].split()  # the name, in parentheses, may hold anything; the state is field 3
    return fields[0], fields[19]
