"""One rank fails, all end and say why.

What is exchanged at agreed points runs on the pool of ranks. What ends processes runs in processes of its own: this
file is also the script that they run. All those runs happen at once, in the fixture `runs`, since most of their time
is waiting; each test then looks at one of them.
"""

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_fp8_rocm.distributed import faults
from lightning_fp8_rocm.distributed.faults import (
    DistributedError,
    Watcher,
    is_agreed,
    raise_together,
    same_on_all_ranks,
)

# ---- agreed points, on the pool


def caught(errors: dict[int, Exception], group_of: list[int] | None = None) -> dict[str, object]:
    """What leaves `raise_together` on this rank, where rank r raises `errors[r]`."""
    mine = errors.get(dist.get_rank())
    group = dist.new_group(group_of) if group_of is not None else None
    seen: BaseException | None = None
    try:
        with raise_together("loading the checkpoint", group):
            if mine is not None:
                raise mine
    except BaseException as error:
        seen = error
    dist.barrier()  # nothing of the exchange is left over
    return {
        "kind": type(seen).__name__,
        "text": str(seen),
        "own": mine is not None and seen is mine,
        "cause is own": mine is not None and seen is not None and seen.__cause__ is mine,
        "agreed": seen is not None and is_agreed(seen),
    }


def test_what_one_rank_raises_all_ranks_raise_with_the_same_text(ranks):
    told = ranks(3, caught, {1: FileNotFoundError("no such file: last.ckpt")})
    text = "loading the checkpoint: rank 1 of 3 raised FileNotFoundError: no such file: last.ckpt"
    assert [each["text"] for each in told] == [text] * 3
    assert [each["kind"] for each in told] == ["DistributedError"] * 3
    assert [each["cause is own"] for each in told] == [False, True, False]
    assert all(each["agreed"] for each in told)


def test_different_messages_stand_in_one_text(ranks):
    told = ranks(3, caught, {0: ValueError("a"), 1: ValueError("b"), 2: ValueError("a")})
    text = "loading the checkpoint: ranks 0, 2 of 3 raised ValueError: a; rank 1 of 3 raised ValueError: b"
    assert [each["text"] for each in told] == [text] * 3
    assert all(each["cause is own"] and each["agreed"] for each in told)


def test_the_same_message_of_different_types_is_no_agreement(ranks):
    told = ranks(2, caught, {0: ValueError("a"), 1: TypeError("a")})
    assert {each["kind"] for each in told} == {"DistributedError"}


def test_what_every_rank_raises_alike_each_raises_itself(ranks):
    told = ranks(3, caught, {rank: ValueError("bad argument") for rank in range(3)})
    assert all(each["own"] and each["agreed"] and each["kind"] == "ValueError" for each in told)


def test_where_no_rank_raises_nothing_is_raised(ranks):
    assert {each["kind"] for each in ranks(3, caught, {})} == {"NoneType"}


def test_a_group_of_some_ranks_exchanges_alone_and_the_others_must_still_be_told(ranks):
    told = ranks(3, caught, {2: ValueError("a")}, group_of=[1, 2])
    text = "loading the checkpoint: rank 2 of 3 raised ValueError: a"
    assert [each["text"] for each in told] == ["None", text, text]
    assert not any(each["agreed"] for each in told)


def test_a_message_that_cannot_be_made_is_told_as_such(ranks):
    told = ranks(2, caught, {1: Speechless()})
    text = "loading the checkpoint: rank 1 of 2 raised Speechless: (its message cannot be made)"
    assert [each["text"] for each in told] == [text] * 2


class Speechless(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def interrupted() -> str:
    try:
        with raise_together("setup"):
            raise KeyboardInterrupt
    except KeyboardInterrupt as error:
        return f"{type(error).__name__} {is_agreed(error)}"


def test_an_interrupt_passes_without_an_exchange(ranks):
    assert ranks(2, interrupted) == ["KeyboardInterrupt False"] * 2


def test_on_one_process_the_exception_passes_untouched():
    error = ValueError("a")
    with pytest.raises(ValueError, match="a") as caught_error, raise_together("setup"):
        raise error
    assert caught_error.value is error
    assert not is_agreed(error)


def compared(values: list[object]) -> str | None:
    try:
        same_on_all_ranks(values[dist.get_rank()], "`fp8_format`")
    except DistributedError as error:
        return f"{error}{'' if is_agreed(error) else ' (not agreed)'}"
    return None


def test_a_value_that_differs_is_refused_on_all_ranks_and_says_who_has_what(ranks):
    text = "`fp8_format` must be the same on all ranks, but is 'ocp' on ranks 0, 2 of 3; 'fnuz' on rank 1 of 3"
    assert ranks(3, compared, ["ocp", "fnuz", "ocp"]) == [text] * 3


@pytest.mark.parametrize("value", ["ocp", None, (2, 4), Path("a"), float("nan"), {"a"}], ids=repr)
def test_a_value_that_is_the_same_passes(ranks, value):
    assert ranks(2, compared, [value, value]) == [None, None]


def test_a_thousand_different_texts_make_one_short_message(monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda: 1024)
    shown = faults._by_rank([(rank, f"ValueError: row {rank}") for rank in range(1024)])
    assert shown[:2] == [("rank 0 of 1024", "ValueError: row 0"), ("rank 1 of 1024", "ValueError: row 1")]
    assert shown[8:] == [("ranks 8-1023 of 1024", "something else again")]


# ---- runs in processes of their own: what each rank does


def stuck() -> None:
    """The main thread waits in something that notices no peer."""
    time.sleep(60)


def one_rank_raises_and_the_others_are_stuck(rank: int, watcher: Watcher) -> None:
    if rank != 1:
        stuck()
    raise ValueError("loss is NaN")


def rank_0_raises_and_the_others_are_stuck(rank: int, watcher: Watcher) -> None:
    if rank != 0:
        stuck()
    raise ValueError("loss is NaN")


def one_rank_raises_and_the_others_cannot_handle_sigterm(rank: int, watcher: Watcher) -> None:
    signal.signal(signal.SIGTERM, lambda *_: None)  # as Lightning's in a collective: nothing comes of it
    one_rank_raises_and_the_others_are_stuck(rank, watcher)


def the_parent_is_killed(rank: int, watcher: Watcher) -> None:
    if rank == 0:
        os.kill(os.getppid(), signal.SIGKILL)
    stuck()


def one_rank_raises_and_the_others_wait_in_an_all_reduce(rank: int, watcher: Watcher) -> None:
    if rank == 1:
        raise ValueError("loss is NaN")
    dist.all_reduce(torch.ones(1))


def one_rank_raises_and_the_others_wait_for_the_store(rank: int, watcher: Watcher) -> None:
    if rank == 1:
        raise ValueError("loss is NaN")
    dist.distributed_c10d._get_default_store().get("never set")


def rank_1_is_killed(rank: int, watcher: Watcher) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    stuck()


def rank_0_is_killed(rank: int, watcher: Watcher) -> None:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    stuck()


def a_rank_leaves_without_stop(rank: int, watcher: Watcher) -> None:
    if rank == 1:
        sys.exit(0)  # its `finally` is skipped by the driver below
    stuck()


def rank_1_of_another_node_is_killed(rank: int, watcher: Watcher) -> None:
    rank_1_is_killed(rank, watcher)


def rank_0_of_another_node_is_killed(rank: int, watcher: Watcher) -> None:
    rank_0_is_killed(rank, watcher)


def a_node_goes_silent(rank: int, watcher: Watcher) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    stuck()


def the_node_of_the_store_goes_silent(rank: int, watcher: Watcher) -> None:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    stuck()


def rank_0_ends_5_seconds_early(rank: int, watcher: Watcher) -> None:
    if rank != 0:
        time.sleep(5)


def rank_1_ends_5_seconds_early(rank: int, watcher: Watcher) -> None:
    if rank != 1:
        time.sleep(5)


def ranks_end_one_after_the_other(rank: int, watcher: Watcher) -> None:
    time.sleep(3 * rank)


def many_runs_in_one_process(rank: int, watcher: Watcher) -> None:
    for _ in range(3):
        watcher.stop()
        watcher.stop()
        watcher.start()
        dist.all_reduce(torch.ones(1))
        dist.barrier(dist.new_group())  # the default store is as it was: groups that come later meet through it
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return  # there a second process group hangs, with no watcher too: the store has keys of the first
    for port in os.environ["MORE_PORTS"].split():  # at the old one, a rank may meet the old store, and hang or fail
        watcher.stop()
        dist.barrier()
        dist.destroy_process_group()
        os.environ["MASTER_PORT"] = port
        dist.init_process_group("gloo")
        watcher.start()
        dist.barrier(dist.new_group())


def a_fault_in_the_second_run(rank: int, watcher: Watcher) -> None:
    watcher.stop()
    watcher.start()
    one_rank_raises_and_the_others_are_stuck(rank, watcher)


def all_raise_and_catch_and_go_on(rank: int, watcher: Watcher) -> None:
    for _ in range(2):
        try:
            time.sleep(0.5 * rank)
            raise ValueError("early stop")
        except ValueError as error:
            watcher.announce(error)
            watcher.stop()
        watcher.start()
        time.sleep(5)  # longer than poll and grace


def all_raise_together(rank: int, watcher: Watcher) -> None:
    try:
        with raise_together("setup"):
            if rank == 1:
                raise ValueError("bad path")
    except DistributedError as error:
        watcher.announce(error)
    time.sleep(5)


def an_interrupt_is_not_announced(rank: int, watcher: Watcher) -> None:
    if rank == 1:
        watcher.announce(KeyboardInterrupt())
        watcher.announce(SystemExit(1))
    time.sleep(5)


# name of the function above -> the node of each rank
SCENARIOS: dict[str, list[str]] = {
    "all_raise_and_catch_and_go_on": ["a", "a", "b"],  # takes longest
    "one_rank_raises_and_the_others_are_stuck": ["a", "a", "a"],
    "rank_0_raises_and_the_others_are_stuck": ["a", "a"],
    "one_rank_raises_and_the_others_wait_in_an_all_reduce": ["a", "a", "a"],
    "one_rank_raises_and_the_others_wait_for_the_store": ["a", "a"],
    "rank_1_is_killed": ["a", "a", "a"],
    "rank_0_is_killed": ["a", "a", "a"],
    "a_rank_leaves_without_stop": ["a", "a"],
    "rank_1_of_another_node_is_killed": ["a", "a", "b"],
    "rank_0_of_another_node_is_killed": ["a", "b", "b"],
    "a_node_goes_silent": ["a", "b", "c"],
    "the_node_of_the_store_goes_silent": ["a", "b", "b"],
    "rank_0_ends_5_seconds_early": ["a", "a", "a"],
    "rank_1_ends_5_seconds_early": ["a", "a", "b"],
    "ranks_end_one_after_the_other": ["a", "a", "a"],
    "many_runs_in_one_process": ["a", "a"],
    "a_fault_in_the_second_run": ["a", "a"],
    "all_raise_together": ["a", "a"],
    "an_interrupt_is_not_announced": ["a", "a"],
}
SILENT = {"a_node_goes_silent": 1, "the_node_of_the_store_goes_silent": 0}  # and the rank that is stopped, not ended
TORCHRUN = [
    "one_rank_raises_and_the_others_cannot_handle_sigterm",
    "the_parent_is_killed",
    "rank_0_ends_5_seconds_early",
    "many_runs_in_one_process",
]


def as_a_run_does(name: str) -> None:
    """The life of a rank: as a strategy starts and stops, as Lightning tells it of an exception."""
    dist.init_process_group("gloo")
    watcher = Watcher()
    watcher.start()
    assert watcher._run is not None
    time.sleep(1)  # the others come out of the exchange of `start` a moment later
    began = time.monotonic()
    try:
        globals()[name](dist.get_rank(), watcher)
    except Exception as error:
        watcher.announce(error)
        raise
    finally:
        if not isinstance(sys.exc_info()[1], SystemExit):
            stopping = time.monotonic()
            watcher.stop()
            print(f"stop took {time.monotonic() - stopping:.1f} s", file=sys.stderr, flush=True)
    print(f"good after {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)


# ---- how they are started


def free_ports(count: int) -> list[int]:
    """Below the ports that the system hands out: the gloo sockets of one run would take the port of another."""
    ports: list[int] = []
    while len(ports) < count:
        port = random.randrange(15000, 32000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports += [port] if port not in ports else []
    return ports


def start_rank(name: str, rank: int, ports: list[int], folder: Path) -> int:
    """Fork a rank: torch is imported once for all of them. Nothing has been started in this process."""
    pid = os.fork()
    if pid:
        return pid
    nodes = SCENARIOS[name]
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(len(nodes)), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(ports[0]))
    os.environ["MORE_PORTS"] = " ".join(map(str, ports[1:]))
    with open(folder / f"{name}.{rank}.err", "wb") as err:
        os.dup2(err.fileno(), 2)
    faults._machine = lambda: nodes[rank]  # pretended: several nodes on this machine
    if name in SILENT:
        faults._SILENCE_S = 8.0
    status = 1
    try:
        as_a_run_does(name)
        status = 0
    except SystemExit as leaves:
        status = int(leaves.code or 0)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def serve(folder: Path) -> None:
    """Run all scenarios at once; write how each rank ended, and when. Dead ranks stay zombies until all have ended."""
    torch.set_num_threads(1)
    begun = time.monotonic()
    names = {}
    free = free_ports(3 * len(SCENARIOS))
    for number, name in enumerate(SCENARIOS):
        for rank in range(len(SCENARIOS[name])):
            names[start_rank(name, rank, free[3 * number : 3 * number + 3], folder)] = (name, rank)
    ended: dict[str, dict[int, list[float]]] = {name: {} for name in SCENARIOS}
    deadline = begun + 45
    while names and time.monotonic() < deadline:
        for pid, (name, rank) in list(names.items()):
            # Looks without reaping: the zombie stays.
            result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if result is not None:
                code = result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
                ended[name][rank] = [code, time.monotonic() - begun]
                del names[pid]
        if all(SILENT.get(name) == rank for name, rank in names.values()):
            break
        time.sleep(0.1)
    for pid in names:
        os.kill(pid, signal.SIGKILL)
    (folder / "ended.json").write_text(json.dumps(ended))


@dataclass
class Run:
    codes: list[int | None]
    """By rank; None for a rank that had not ended."""
    ended: list[float | None]
    """By rank, in seconds since the start of all runs."""
    said: list[str]
    """The standard error of each rank."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Callable[[str], Run]:
    folder = tmp_path_factory.mktemp("faults")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    ports = free_ports(len(TORCHRUN))
    elastic = {}
    for name, port in zip(TORCHRUN, ports, strict=True):
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}"]
        with open(folder / f"{name}.torchrun", "wb") as err:
            elastic[name] = subprocess.Popen([*command, __file__, name], env=environment, stdout=err, stderr=err)
    subprocess.run([sys.executable, __file__, "serve", str(folder)], env=environment, check=True, timeout=100)
    ended = json.loads((folder / "ended.json").read_text())
    codes = {name: process.wait(timeout=60) for name, process in elastic.items()}

    def look(name: str, torchrun: bool = False) -> Run:
        if torchrun:
            return Run([codes[name]], [], [(folder / f"{name}.torchrun").read_text()])
        of = [ended[name].get(str(rank), [None, None]) for rank in range(len(SCENARIOS[name]))]
        said = [(folder / f"{name}.{rank}.err").read_text() for rank in range(len(of))]
        return Run([code for code, _ in of], [at for _, at in of], said)

    return look


# ---- what they showed


def within(run: Run, seconds: float, first: int) -> bool:
    """Whether all ranks ended at most so long after rank `first` did."""
    assert None not in run.ended, run.said
    return max(run.ended) - run.ended[first] < seconds


def line(pattern: str, said: str) -> re.Match[str] | None:
    """The line of the watcher that begins so."""
    return re.search(f"^lightning_fp8_rocm: {pattern}", said, re.MULTILINE)


def test_when_a_rank_raises_the_others_end_though_their_main_thread_notices_nothing(runs):
    run = runs("one_rank_raises_and_the_others_are_stuck")
    assert run.codes == [1, 1, 1]
    assert within(run, 10, first=1)
    assert line(r"rank 1 of 3 \(.+, pid \d+\) raised ValueError: loss is NaN$", run.said[1])
    for rank in (0, 2):
        assert line(f"rank {rank} ends, because rank 1 raised ValueError: loss is NaN$", run.said[rank])


def test_when_the_rank_that_holds_the_store_raises_the_others_still_learn_what(runs):
    run = runs("rank_0_raises_and_the_others_are_stuck")
    assert run.codes == [1, 1]
    assert within(run, 10, first=0)
    assert line("rank 1 ends, because rank 0 raised ValueError: loss is NaN$", run.said[1])


def test_a_rank_that_waits_in_a_collective_ends_too(runs):
    run = runs("one_rank_raises_and_the_others_wait_in_an_all_reduce")
    assert run.codes == [1, 1, 1]
    assert within(run, 10, first=1)
    assert line(r"rank 1 of 3 \(.+\) raised ValueError: loss is NaN$", run.said[1])


def test_a_rank_that_waits_for_the_default_store_ends_too(runs):
    run = runs("one_rank_raises_and_the_others_wait_for_the_store")
    assert run.codes == [1, 1]
    assert within(run, 10, first=1)
    assert line("rank 0 ends, because rank 1 raised ValueError: loss is NaN$", run.said[0])


@pytest.mark.parametrize("dead", [0, 1])
def test_when_a_rank_is_killed_the_others_end_and_name_it(runs, dead):
    run = runs(f"rank_{dead}_is_killed")
    assert [run.codes[rank] for rank in range(3)] == [-9 if rank == dead else 1 for rank in range(3)]
    assert within(run, 10, first=dead)
    for rank in {0, 1, 2} - {dead}:
        assert line(rf"rank {rank} ends, because rank {dead} \(.+\) died ", run.said[rank])


@pytest.mark.parametrize("dead", [0, 1])
def test_when_a_rank_is_killed_the_ranks_of_other_nodes_end_and_name_it(runs, dead):
    run = runs(f"rank_{dead}_of_another_node_is_killed")
    assert [run.codes[rank] for rank in range(3)] == [-9 if rank == dead else 1 for rank in range(3)]
    assert within(run, 10, first=dead)
    for rank in {0, 1, 2} - {dead}:
        assert line(rf"rank {rank} ends, because rank {dead} .*died", run.said[rank])


def test_a_rank_that_leaves_without_having_stopped_counts_as_dead(runs):
    run = runs("a_rank_leaves_without_stop")
    assert run.codes == [1, 0]
    assert line(r"rank 0 ends, because rank 1 \(.+\) died without a word$", run.said[0])


def test_a_node_that_nothing_is_heard_of_counts_as_dead(runs):
    run = runs("a_node_goes_silent")
    assert run.codes == [1, None, 1]
    for rank in (0, 2):
        assert line(rf"rank {rank} ends, because nothing was heard of rank 1 \(.+\) for 8 s$", run.said[rank])


def test_a_store_that_goes_silent_ends_the_others(runs):
    run = runs("the_node_of_the_store_goes_silent")
    assert run.codes == [None, 1, 1]
    assert line("rank 1 ends, because rank 0 died or cannot be reached", run.said[1])
    assert "no answer for " in run.said[1]


@pytest.mark.parametrize(
    "name",
    ["rank_0_ends_5_seconds_early", "rank_1_ends_5_seconds_early", "ranks_end_one_after_the_other"],
)
def test_a_rank_that_ends_well_does_not_end_the_others(runs, name):
    run = runs(name)
    assert run.codes == [0, 0, 0], run.said
    assert max(run.ended) - min(run.ended) > 1.5  # they did end at different times
    assert not any("lightning_fp8_rocm" in said for said in run.said)


def test_many_runs_in_one_process_leave_the_default_store_as_it_was(runs):
    run = runs("many_runs_in_one_process")
    assert run.codes == [0, 0], run.said


def test_where_all_stop_together_nobody_waits(runs):
    took = [float(re.search(r"stop took (.+) s", said)[1]) for said in runs("many_runs_in_one_process").said]
    assert max(took) < 1.0


def test_a_fault_in_a_second_run_is_seen(runs):
    run = runs("a_fault_in_the_second_run")
    assert run.codes == [1, 1]
    assert line("rank 0 ends, because rank 1 raised ValueError: loss is NaN$", run.said[0])


def test_ranks_that_all_raise_and_catch_go_on(runs):
    run = runs("all_raise_and_catch_and_go_on")
    assert run.codes == [0, 0, 0], run.said
    assert all(said.count("raised ValueError: early stop") == 2 for said in run.said)


def test_what_was_raised_together_is_not_announced(runs):
    run = runs("all_raise_together")
    assert run.codes == [0, 0], run.said
    assert not any("lightning_fp8_rocm" in said for said in run.said)


def test_an_interrupt_and_an_exit_are_not_announced(runs):
    run = runs("an_interrupt_is_not_announced")
    assert run.codes == [0, 0], run.said
    assert not any("lightning_fp8_rocm" in said for said in run.said)


def test_under_torchrun_the_ranks_are_told_through_the_store_of_the_agent(runs):
    # The agent sends SIGTERM, and SIGKILL only after 30 s: a rank that says why it ends was told before that.
    run = runs("one_rank_raises_and_the_others_cannot_handle_sigterm", torchrun=True)
    assert run.codes == [1]
    assert line(r"rank 1 of 2 \(.+, pid \d+\) raised ValueError: loss is NaN", run.said[0])
    assert line("rank 0 ends, because rank 1 raised ValueError: loss is NaN$", run.said[0])


def test_when_the_agent_of_torchrun_is_killed_its_ranks_end(runs):
    run = runs("the_parent_is_killed", torchrun=True)
    assert run.codes == [-9]
    for rank in (0, 1):
        assert line(rf"rank {rank} ends, because (its torchrun agent \(pid \d+\)|the torchrun agent) died", run.said[0])


@pytest.mark.parametrize("name", ["rank_0_ends_5_seconds_early", "many_runs_in_one_process"])
def test_under_torchrun_good_runs_end_well(runs, name):
    run = runs(name, torchrun=True)
    assert run.codes == [0], run.said
    assert run.said[0].count("good after") == 2


# ---- where there is nothing to watch


def test_on_one_process_a_watcher_does_nothing(capfd):
    watcher = Watcher()
    watcher.start()
    watcher.announce(ValueError("a"))
    watcher.stop()
    assert capfd.readouterr().err == ""


def started_without_a_tcp_store(path: str) -> tuple[bool, bool]:
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(path, world), rank=rank, world_size=world)
    watcher = Watcher()
    watcher.start()
    seen = watcher._run is None, faults._is_distributed()
    dist.barrier()
    return seen


def test_without_a_tcp_store_a_watcher_does_nothing(ranks, tmp_path):
    assert ranks(2, started_without_a_tcp_store, str(tmp_path / "store")) == [(True, True)] * 2


def test_in_a_simulated_process_group_nothing_is_exchanged():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1024)
    try:
        with pytest.raises(ValueError, match=r"^a$"), raise_together("setup"):
            raise ValueError("a")
        same_on_all_ranks("ocp", "`fp8_format`")
        watcher = Watcher()
        watcher.start()
        assert watcher._run is None
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(Path(sys.argv[2]))
    else:
        as_a_run_does(sys.argv[1])
