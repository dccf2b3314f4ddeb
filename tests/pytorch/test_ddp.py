"""Two real processes under Lightning's own launchers, against one process that sees the same global batch."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from flavours import LIGHTNING, Lightning
from ranks import MODULE_PATHS

SCRIPT = """
import json, sys
from pathlib import Path

import lightning_fp8_rocm
import torch
from flavours import NAMED
from models import Blocks, batches
from torch import nn

pl = NAMED[sys.argv[1]]
strategy, devices, precision, out = sys.argv[2], int(sys.argv[3]), sys.argv[4], Path(sys.argv[5])


class Report(pl.Callback):
    def on_train_end(self, trainer, module):
        weights = nn.utils.parameters_to_vector(module.parameters()).double()
        facts = {"weights": weights.tolist(), "kinds": sorted(module.kinds["train"]), "world": trainer.world_size}
        (out / f"{trainer.global_rank}.json").write_text(json.dumps(facts))


class InOrder(pl.module(Blocks)):
    # Lightning shuffles what it distributes. Here ranks take turns, so that two batches of 4 are one of 8.
    def train_dataloader(self):
        run = self.trainer
        whole = batches().dataset
        mine = torch.utils.data.Subset(whole, range(run.global_rank, len(whole), run.world_size))
        return torch.utils.data.DataLoader(mine, batch_size=8 // run.world_size)


if __name__ == "__main__":
    flags = {"strategy": strategy, "devices": devices, "use_distributed_sampler": False}
    run = pl.trainer(precision, max_epochs=2, callbacks=[Report()], **flags)
    module = InOrder()
    (out / "before.json").write_text(json.dumps(nn.utils.parameters_to_vector(module.parameters()).tolist()))
    run.fit(module)
"""


def fit(
    tmp_path: Path, strategy: str, devices: int, precision: str = "fp8-rocm", pl: Lightning = LIGHTNING
) -> tuple[list[Any], Any, str]:
    import torch

    out = tmp_path / f"{strategy}-{devices}-{precision}"
    out.mkdir()
    script = out / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), str(pl), strategy, str(devices), precision, str(out)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, MODULE_PATHS)), "OMP_NUM_THREADS": "1"},
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((out / f"{rank}.json").read_text()) for rank in range(devices)]
    for rank in ranks:
        assert rank["world"] == devices
        rank["weights"] = torch.tensor(rank["weights"], dtype=torch.float64)
    return ranks, torch.tensor(json.loads((out / "before.json").read_text()), dtype=torch.float64), done.stdout


def test_two_ddp_processes_equal_one_on_the_same_global_batch_to_the_tolerance_of_the_format(tmp_path: Path) -> None:
    (one,), before, _ = fit(tmp_path, "auto", 1)
    (first, second), _, printed = fit(tmp_path, "ddp", 2)
    (bf16_one,), _, _ = fit(tmp_path, "auto", 1, "bf16-mixed")
    assert one["kinds"] == first["kinds"] == second["kinds"] == ["FP8Linear"]
    assert printed.count("FP8 conversion") == 1  # rank 0 alone shows the table
    assert first["weights"].equal(second["weights"])
    # A rank takes its scale from its own half of the batch, so the halves round otherwise than the whole: by the same
    # e5m2/e4m3 steps by which FP8 itself departs from bf16. AdamW turns those into steps of its own size.
    moved = (one["weights"] - before).norm()
    fp8_error = (one["weights"] - bf16_one["weights"]).norm() / moved
    between = (one["weights"] - first["weights"]).norm() / moved
    assert 0 < between < 2 * fp8_error
    assert fp8_error < 0.5


@pytest.mark.parametrize("strategy", ["ddp_spawn", "ddp_fork"])
def test_launchers_that_start_processes_from_this_one_train_in_fp8(
    tmp_path: Path, pl: Lightning, strategy: str
) -> None:
    ranks, _, _ = fit(tmp_path, strategy, 2, pl=pl)
    assert [rank["kinds"] for rank in ranks] == [["FP8Linear"]] * 2
    assert ranks[0]["weights"].equal(ranks[1]["weights"])
    assert ranks[0]["weights"].isfinite().all()
