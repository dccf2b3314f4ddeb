"""Fabric scripts as a user starts them: two processes, which end together, well or not."""

import os
import subprocess
import sys
from pathlib import Path
from textwrap import indent

import pytest
import torch
from loops import both

HERE = Path(__file__).parent
START = """
import sys, time
sys.path[:0] = {path!r}
from importlib import import_module
import torch
from loops import FABRICS, Net, accumulate, our_strategy

strategy = our_strategy({name!r}, **{arguments!r})
fabric = import_module(FABRICS[{name!r}]).Fabric(accelerator="cpu", devices=2, precision="fp8-rocm", strategy=strategy)
fabric.launch()
plain = Net()
model, optimizer = fabric.setup(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
print("losses", fabric.global_rank, accumulate(fabric, model, optimizer), flush=True)
"""


def run(
    folder: Path, then: str, name: str = "lightning", torchrun: bool = False, **arguments: object
) -> subprocess.CompletedProcess[str]:
    """A script that sets up, trains two steps, and goes on with ``then``; a hang is an error after two minutes."""
    script = folder / "script.py"
    script.write_text(START.format(path=[str(HERE), str(HERE.parent)], name=name, arguments=arguments) + then)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if torchrun else []
    return subprocess.run(
        [sys.executable, *launcher, str(script)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@both
def test_a_script_starts_its_processes_and_ends_without_a_word(name: str, tmp_path: Path) -> None:
    # One rank goes on for a while, alone; that is no fault, also after the process group is destroyed.
    then = """
torch.distributed.destroy_process_group()
if fabric.global_rank == 1:
    time.sleep(6)  # longer than what is given to a rank whose peer has failed
    print("rank 1 came to its end", flush=True)
"""
    done = run(tmp_path, then, name)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("losses") == 2
    assert "rank 1 came to its end" in done.stdout
    assert "lightning_fp8_rocm: rank" not in done.stderr


@pytest.mark.parametrize("torchrun", [False, True])
def test_a_rank_that_raises_alone_ends_the_other_which_says_why(torchrun: bool, tmp_path: Path) -> None:
    then = """
if fabric.global_rank == 1:
    raise ValueError("only here")
time.sleep(200)
"""
    done = run(tmp_path, then, torchrun=torchrun)
    assert done.returncode != 0
    assert "rank 1 of 2" in done.stderr
    assert "raised ValueError: only here" in done.stderr


def test_a_rank_that_loses_its_peer_in_a_collective_names_the_cause(tmp_path: Path) -> None:
    then = """
if fabric.global_rank == 1:
    raise ValueError("only here")
fabric.barrier()
"""
    done = run(tmp_path, then)
    assert done.returncode != 0
    told = [line for line in done.stderr.splitlines() if "rank 0 " in line and "lightning_fp8_rocm" in line]
    assert told, done.stderr
    assert all("rank 1 raised ValueError: only here" in line or "rank 1 (" in line for line in told)


ENDS = {
    "sys.exit": "sys.exit(3)",
    "another excepthook": "sys.excepthook = lambda *error: None\nraise ValueError('only here')",
    "a teardown in finally": "try:\n    raise ValueError('only here')\nfinally:\n    fabric.strategy.teardown()",
}


@pytest.mark.parametrize("end", ENDS)
def test_a_first_rank_that_leaves_alone_ends_the_other(end: str, tmp_path: Path) -> None:
    # It started the other one, which nobody but the watcher ends.
    then = f"""
if fabric.global_rank == 1:
    time.sleep(60)
    print("rank 1 was never told", flush=True)
else:
{indent(ENDS[end], "    ")}
"""
    done = run(tmp_path, then)
    assert done.returncode != 0
    assert "rank 1 was never told" not in done.stdout
    assert "rank 1 ends, because" in done.stderr


def test_the_end_of_the_script_completes_the_checkpoint_in_the_background(tmp_path: Path) -> None:
    then = """
expected = {key: value.full_tensor() for key, value in plain.state_dict().items()}
if fabric.global_rank == 0:
    torch.save(expected, "expected.pt")
fabric.save("a.ckpt", {"model": model, "optimizer": optimizer})
"""
    done = run(tmp_path, then, async_checkpoint=True, state_dict_type="full")
    assert done.returncode == 0, done.stderr
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)
    expected = torch.load(tmp_path / "expected.pt", weights_only=True)
    assert saved["model"].keys() == expected.keys()
    assert all(torch.equal(saved["model"][key], value) for key, value in expected.items())


def test_a_background_checkpoint_that_fails_is_told_at_the_end(tmp_path: Path) -> None:
    then = """
open("in_the_way", "w").close()
fabric.save("in_the_way/a.ckpt", {"model": model})
"""
    done = run(tmp_path, then, async_checkpoint=True)
    assert "could not be written" in done.stderr + done.stdout
