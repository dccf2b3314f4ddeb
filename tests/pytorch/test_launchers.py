"""Real scripts, started as users start them: every launcher gives the same sharded FP8 run, and a fault ends it.

Each start of a process costs seconds, so one script serves all, and says what it found as one line of JSON a rank.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from flavours import LIGHTNING, STANDALONE, Lightning
from ranks import MODULE_PATHS

FACTS = '''
import json, os, sys, time
from pathlib import Path

import torch
from flavours import NAMED
from models import Blocks, batches
from torch.distributed.tensor import DTensor


pl = NAMED[os.environ["LIGHTNING"]]


class Tell(pl.Callback):
    """What is so while training goes on, one file a rank."""

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if index != 1:
            return
        parameters = dict(module.named_parameters())
        local = {name: getattr(p, "_local_tensor", p) for name, p in parameters.items()}
        self.facts = {
            "world": trainer.world_size,
            "rank": trainer.global_rank,
            "kinds": sorted(module.kinds["train"]),
            "marked": sorted(name for name, t in local.items() if type(t).__name__ == "MarkedShard"),
            "sharded": all(isinstance(p, DTensor) for p in parameters.values()),
            "part": sum(t.numel() for t in local.values()) / sum(p.numel() for p in parameters.values()),
            "precision": str(trainer.precision),
            "strategy": type(trainer.strategy).__module__ + "." + type(trainer.strategy).__name__,
            "imported": sorted(NAMED.keys() & sys.modules.keys()),
        }

    def on_train_end(self, trainer, module):
        weights = [p.full_tensor() if isinstance(p, DTensor) else p for p in module.parameters()]
        self.facts["weights"] = torch.cat([w.detach().flatten().double() for w in weights]).tolist()
        Path(os.environ["OUT"], f"{trainer.global_rank}.json").write_text(json.dumps(self.facts))
'''

SCRIPT = (
    "import lightning_fp8_rocm\n"
    + FACTS
    + """

class Faulty(pl.module(Blocks)):
    def training_step(self, batch, index):
        fault = os.environ.get("FAULT")
        if fault and index == 1 and self.global_rank == 1:
            Path(os.environ["OUT"], "fault").write_text(f"{os.getpid()} {time.time()}")
            if fault == "raise":
                raise RuntimeError("the batch is bad")
            os.kill(os.getpid(), 9)
        return super().training_step(batch, index)


if __name__ == "__main__":
    run = pl.trainer("fp8-rocm", strategy="fsdp2_fp8", devices=2, callbacks=[Tell()], limit_train_batches=2)
    run.fit(Faulty(), batches(size=4))
"""
)

CLI = (
    "import lightning_fp8_rocm\n"
    + FACTS
    + """


class Data(pl.LightningDataModule):
    def train_dataloader(self):
        return batches(size=4)


if __name__ == "__main__":
    pl.cli.LightningCLI(pl.module(Blocks), Data, save_config_callback=None)
"""
)

YAML = """
trainer:
  accelerator: cpu
  devices: 2
  precision: fp8-rocm
  strategy: fsdp2_fp8
  max_epochs: 1
  limit_train_batches: 2
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  callbacks: [{class_path: __main__.Tell}]
"""

MARKED = [f"blocks.{block}.{layer}.weight" for block in (0, 1) for layer in (1, 3)]


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def environment(pl: Lightning, out: Path, **more: str) -> dict[str, str]:
    paths = os.pathsep.join(map(str, MODULE_PATHS))
    mine = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "OUT": str(out), "LIGHTNING": str(pl)}
    return {**os.environ, **mine, **more}


def start(command: list[str], env: dict[str, str], cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, env=env, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def finish(processes: list[subprocess.Popen[str]], timeout: float = 120.0) -> list[tuple[int, str]]:
    """Exit codes and what was printed; whatever is left of a run that hangs is killed."""
    try:
        told = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return [(process.returncode, text) for process, text in zip(processes, told, strict=True)]


def write(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(text)
    return str(path)


def torchrun(script: str, ranks: int = 2) -> list[str]:
    run = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    return [*run, "--master-addr=127.0.0.1", f"--master-port={free_port()}", script]


def check(pl: Lightning, out: Path) -> list[float]:
    """That all ranks ran FP8 over shards, and hold the same weights; returns the weights."""
    told = [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]
    for rank, one in enumerate(told):
        assert one["rank"] == rank
        assert one["world"] == 2
        assert one["kinds"] == ["FP8Linear"]
        assert one["marked"] == MARKED
        assert one["sharded"]
        assert one["part"] == pytest.approx(1 / 2)
        assert one["precision"] == "fp8-rocm"
        assert one["strategy"] == f"lightning_fp8_rocm.{pl.room}.strategy.FSDP2FP8Strategy"
        assert one["imported"] == [str(pl)]
        assert one["weights"] == told[0]["weights"]
    return told[0]["weights"]


def run_all(commands: list[list[str]], environments: list[dict[str, str]], cwd: Path) -> list[str]:
    done = finish([start(command, env, cwd) for command, env in zip(commands, environments, strict=True)])
    for code, text in done:
        assert code == 0, text
    return [text for _, text in done]


# ---- a run


def run_by_lightning(pl: Lightning, script: str, out: Path, cwd: Path) -> None:
    (printed,) = run_all([[sys.executable, script]], [environment(pl, out, MASTER_PORT=free_port())], cwd)
    assert printed.count("FSDP2: 4 units on 2 ranks") == 1  # rank 0 alone says so
    assert printed.count("FP8 conversion: recipe tensorwise") == 1


def test_the_launcher_of_pytorch_lightning_starts_two_processes(tmp_path: Path) -> None:
    run_by_lightning(STANDALONE, write(tmp_path, SCRIPT), tmp_path, tmp_path)
    check(STANDALONE, tmp_path)


def test_lightnings_own_launcher_torchrun_and_slurm_give_the_same_run(tmp_path: Path) -> None:
    script = write(tmp_path, SCRIPT)
    outs = {}
    for name in ("lightning", "torchrun", "slurm"):
        outs[name] = tmp_path / name
        outs[name].mkdir()
    run_by_lightning(LIGHTNING, script, outs["lightning"], tmp_path)
    run_all([torchrun(script)], [environment(LIGHTNING, outs["torchrun"])], tmp_path)
    slurm = {
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NODELIST": "localhost",
        "SLURM_NODEID": "0",
        "SLURM_NNODES": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
    }
    environments = [
        environment(LIGHTNING, outs["slurm"], **slurm, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank))
        for rank in range(2)
    ]
    run_all([[sys.executable, script]] * 2, environments, tmp_path)
    weights = [check(LIGHTNING, out) for out in outs.values()]
    assert weights[0] == weights[1] == weights[2]


def test_the_cli_starts_two_processes_from_both_names_in_yaml(pl: Lightning, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(YAML)
    command = [sys.executable, write(tmp_path, CLI), "fit", "--config=config.yaml"]
    run_all([command], [environment(pl, tmp_path, MASTER_PORT=free_port())], tmp_path)
    check(pl, tmp_path)


# ---- faults

# From the fault to the end of all processes; the promise is 10 s, the rest is for a machine that is busy.
WITHIN_S = 10.0 + 5.0


@pytest.mark.parametrize(
    ("pl", "launcher", "fault"),
    [
        (STANDALONE, "lightning", "raise"),
        (LIGHTNING, "lightning", "kill"),
        (LIGHTNING, "torchrun", "raise"),
        (LIGHTNING, "torchrun", "kill"),
    ],
    ids=str,
)
def test_a_rank_that_fails_in_a_step_ends_all_within_seconds_and_is_named(
    tmp_path: Path, pl: Lightning, launcher: str, fault: str
) -> None:
    script = write(tmp_path, SCRIPT)
    command = [sys.executable, script] if launcher == "lightning" else torchrun(script)
    env = environment(pl, tmp_path, FAULT=fault, **({"MASTER_PORT": free_port()} if launcher == "lightning" else {}))
    ((code, text),) = finish([start(command, env, tmp_path)])
    took = time.time() - float((tmp_path / "fault").read_text().split()[1])
    assert code != 0, text
    assert took < WITHIN_S, text
    assert not list(tmp_path.glob("[01].json"))
    said = {
        "raise": r"rank 1 of 2 \(.*\) raised RuntimeError: the batch is bad",
        "kill": r"rank 1 \([^)]*, pid \d+\) died without a word",
    }[fault]
    if (fault, launcher) == ("kill", "torchrun"):
        said += (
            r"|rank +: 1 \(local_rank: 1\)\s+exitcode +: -9"  # where torchrun ends the others before they can say it
        )
    assert re.search(said, text, re.DOTALL), text
