"""Whole steps of ``FSDP2FP8Strategy`` in a Trainer beside a hand-written loop with torchao and ``fully_shard``.

    python benchmarks/fsdp.py --json benchmarks/fsdp.json

Two gloo processes on one CPU, eager. The hand-written loop is that of torchao's documentation:
``convert_to_float8_training`` with ``enable_fsdp_float8_all_gather=True``, ``fully_shard`` of each block and of the
model, and ``precompute_float8_dynamic_scale_for_fsdp`` after each optimizer step. torchao refuses to gather ``rowwise``
in FP8, so there it gathers in bf16; the row ``bf16`` has no FP8 on either side. Both sides have the same model, initial
values, batches, units, fp32 masters, dtypes of the reduction and AdamW.

* Both emulate FP8. The time ratios say what the Trainer, the strategy and the casts cost on the host, and nothing of
  FP8 hardware.
* Time: a step of ours lasts from one ``on_train_batch_start`` to the next, so all that Lightning does counts. Both
  models live in the same processes and take turns, step by step, with a barrier at each turn: the slower rank counts.
  The figure is the median of the ratios of a step to the two of the other side around it: a machine whose speed drifts
  slows both.
* Memory: each side runs alone in two fresh processes. The figure is the most memory that a steady step has resident,
  above what is resident before the model is built, on the rank that has more. glibc is told to map and return each
  larger block by itself, so this is what is in use and no history of the heap. (The profiler of the CPU misses what
  gloo's threads release.)
* Bytes: what a rank receives from the all-gathers of a step, its own part included.

The losses of both sides are compared; see ``LOSS_TOLERANCE``.
"""

import argparse
import json
import logging
import os
import platform
import socket
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from convergence import Block
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_fp8_rocm import FP8Precision, FSDP2FP8Strategy

ROWS = ("tensorwise", "rowwise", "bf16")
SIDES = ("ours", "theirs")
RANKS = 2
WIDTH, DEPTH, HEADS, VOCABULARY = 384, 4, 6, 256
BATCH, CONTEXT = 8, 64  # of each rank
WARM_UP = 3
WATCHED_STEPS = 5
# Without FP8 and with one scale a tensor both sides compute the same, bit for bit. A rowwise weight that was gathered
# in FP8 has other scales in backward, so there the two differ by rounding: after some steps by hundredths of the loss.
LOSS_TOLERANCE = {"tensorwise": 0.0, "rowwise": 0.05, "bf16": 0.0}


class Transformer(nn.Module):
    """Predicts the next token. Knows nothing of FP8."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, HEADS) for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens ``(batch, n)`` to logits ``(batch, n, VOCABULARY)``."""
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def model() -> Transformer:
    """The same on every rank and side, with rows of different magnitudes."""
    torch.manual_seed(0)
    made = Transformer()
    with torch.no_grad():
        for layer in made.blocks.modules():
            if isinstance(layer, nn.Linear):
                layer.weight.mul_(torch.randn(layer.out_features, 1).mul_(0.5).exp_())
    return made


def batches(count: int) -> DataLoader[Tensor]:
    """Random tokens, others on each rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    distinct = [torch.randint(0, VOCABULARY, (BATCH, CONTEXT + 1), generator=generator) for _ in range(4)]
    # Cut already: neither side's time is that of a dataset.
    return DataLoader([distinct[index % 4] for index in range(count)], batch_size=None)  # type: ignore[arg-type]


def loss_of(network: nn.Module, tokens: Tensor) -> Tensor:
    """Cross entropy of the next token."""
    return F.cross_entropy(network(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


def adamw(network: nn.Module) -> torch.optim.Optimizer:
    """As on a GPU, where ``foreach`` is the default."""
    return torch.optim.AdamW(network.parameters(), lr=1e-3, foreach=True)


class Ours(L.LightningModule):
    """What a user of the strategy writes."""

    def __init__(self) -> None:
        super().__init__()
        self.model = model()
        self.losses: list[Tensor] = []

    def training_step(self, tokens: Tensor, index: int) -> Tensor:
        """One batch."""
        loss = loss_of(self.model, tokens)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The same as of the hand-written loop."""
        return adamw(self)


class Theirs:
    """The hand-written loop."""

    def __init__(self, recipe: str) -> None:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        self.model: nn.Module = model()
        self.gathers_fp8 = recipe == "tensorwise"
        if recipe != "bf16":
            config = Float8LinearConfig.from_recipe_name(recipe)
            config = replace(config, enable_fsdp_float8_all_gather=self.gathers_fp8, emulate=True)
            convert_to_float8_training(self.model, config=config, module_filter_fn=lambda _, name: name != "head")
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        # gloo carries no FP8 dtype. Every unit here holds bf16 norms and biases beside its FP8 weights, and what has
        # several dtypes FSDP2 gathers as bytes.
        for block in self.model.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(self.model, mp_policy=policy)
        self.optimizer = adamw(self.model)
        self.losses: list[Tensor] = []

    def step(self, tokens: Tensor) -> None:
        """One batch."""
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        self.optimizer.zero_grad()
        loss = loss_of(self.model, tokens)
        self.losses.append(loss.detach())
        loss.backward()
        self.optimizer.step()
        if self.gathers_fp8:
            precompute_float8_dynamic_scale_for_fsdp(self.model)


def fit(recipe: str, steps: int, *callbacks: L.Callback) -> list[Tensor]:
    """Train ours by a Trainer; returns the losses."""
    module = Ours()
    flags: dict[str, Any] = {"precision": "bf16-mixed"} if recipe == "bf16" else {"plugins": FP8Precision(recipe)}
    trainer = L.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=FSDP2FP8Strategy(compile=False),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=list(callbacks),
        **flags,
    )
    trainer.fit(module, batches(steps))
    return module.losses


# ---------------------------------------------------------------------------------------------------------------------
# What the ranks do


class TakeTurns(L.Callback):
    """Before each step of ours one of theirs, on the same batch; the time of each, from barrier to barrier."""

    def __init__(self, theirs: Theirs) -> None:
        self.theirs = theirs
        self.seconds: dict[str, list[float]] = {side: [] for side in SIDES}
        self._since = 0.0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Tensor, index: int) -> None:
        """Ours began where this hook ended last time."""
        if index > 0:
            self._note("ours")
        self._since = _now()
        self.theirs.step(batch)
        self._note("theirs")

    def _note(self, side: str) -> None:
        now = _now()
        self.seconds[side].append(now - self._since)
        self._since = now


def _now() -> float:
    dist.barrier()
    return time.perf_counter()


@dataclass
class Times:
    """Of one rank. ``theirs`` has one step more than ``ours``: each of ours lies between two of theirs."""

    seconds: dict[str, list[float]]
    loss_differences: list[float]


def take_turns(recipe: str, rounds: int) -> Times:
    """Both sides, step by step."""
    theirs = Theirs(recipe)
    turns = TakeTurns(theirs)
    losses = fit(recipe, WARM_UP + rounds + 1, turns)
    differences = [abs(a - b).item() for a, b in zip(losses, theirs.losses, strict=True)]
    return Times({side: seconds[WARM_UP:] for side, seconds in turns.seconds.items()}, differences)


@dataclass
class Use:
    """Of one step on one rank."""

    peak_bytes: int
    gathered_bytes: int


class WatchPeak(L.Callback):
    """Forgets the peak of the setup when a steady step of ours begins."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Tensor, index: int) -> None:
        """The hook from which steps are counted."""
        if index == WARM_UP:
            _forget_peak()


def use_alone(recipe: str, side: str) -> Use:
    """Memory and bytes of one side."""
    import torchao.float8  # noqa: F401  # its code is not what is measured, on either side

    steps = WARM_UP + WATCHED_STEPS
    gathered = _gathered_bytes()
    before = _resident("VmRSS")
    if side == "ours":
        fit(recipe, steps, WatchPeak())
    else:
        theirs = Theirs(recipe)
        for index, batch in enumerate(batches(steps)):
            if index == WARM_UP:
                _forget_peak()
            theirs.step(batch)
    return Use(_resident("VmHWM") - before, sum(gathered) // steps)


def _resident(field: str) -> int:
    """Bytes of this process that are in memory: ``VmRSS`` now, ``VmHWM`` at most (``man 5 proc``)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field}: peak memory is measured on Linux alone.")


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _gathered_bytes() -> list[int]:
    """A list that grows with each all-gather of FSDP2 in this process."""
    found: list[int] = []
    gather = DefaultAllGather.__call__

    def counting(self: DefaultAllGather, output_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        found.append(output_tensor.nbytes)
        return gather(self, output_tensor, *args, **kwargs)

    DefaultAllGather.__call__ = counting  # type: ignore[method-assign]
    return found


# ---------------------------------------------------------------------------------------------------------------------
# The processes


def _serve(rank: int, port: int, answer: Connection, function: Callable[..., Any], *args: Any) -> None:
    """The life of a rank: what ``torchrun`` sets, so that the Trainer starts no processes."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(RANKS), "GROUP_RANK": "0"}
    os.environ |= {"TORCHELASTIC_RUN_ID": "benchmark"}
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning_fp8_rocm", "torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    dist.init_process_group("gloo")
    answer.send(function(*args))
    dist.destroy_process_group()


EXACT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
"""glibc reads these when a process starts; only where memory is measured, for they cost time."""


def on_ranks(function: Callable[..., Any], *args: Any) -> list[Any]:
    """What ``function`` returns on each of the ranks, which are fresh processes."""
    for name, value in EXACT_MEMORY.items():
        if function is use_alone:
            os.environ[name] = value
        else:
            os.environ.pop(name, None)
    context = get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    answers, processes = [], []
    for rank in range(RANKS):
        ours, theirs = context.Pipe(duplex=False)
        processes.append(context.Process(target=_serve, args=(rank, port, theirs, function, *args), daemon=True))
        processes[-1].start()
        theirs.close()  # a rank that dies ends the wait for its answer
        answers.append(ours)
    found = [answer.recv() for answer in answers]
    for process in processes:
        process.join()
    return found


# ---------------------------------------------------------------------------------------------------------------------
# The table


@dataclass
class Row:
    """One recipe. Ratios under 1 are in favour of ours; memory and bytes are of one rank, in MB."""

    recipe: str
    milliseconds: float
    milliseconds_torchao: float
    against_torchao: float
    gathered_mb: float
    gathered_mb_torchao: float
    peak_mb: float
    peak_mb_torchao: float
    peak_against_torchao: float
    loss_difference: float


def measure(recipe: str, rounds: int) -> Row:
    """One row.

    Raises:
        RuntimeError: If the two sides did not train the same.
    """
    times: Times = on_ranks(take_turns, recipe, rounds)[0]
    ours, theirs = times.seconds["ours"], times.seconds["theirs"]
    loss_difference = max(times.loss_differences)
    if not loss_difference <= LOSS_TOLERANCE[recipe]:
        raise RuntimeError(
            f"{recipe}: the losses of the two sides differ by up to {loss_difference:.3g}, more than"
            f" {LOSS_TOLERANCE[recipe]}: they do not do the same, so there is nothing to compare."
        )
    uses: dict[str, list[Use]] = {side: on_ranks(use_alone, recipe, side) for side in SIDES}
    peak = {side: max(use.peak_bytes for use in uses[side]) for side in SIDES}
    return Row(
        recipe=recipe,
        milliseconds=1e3 * statistics.median(ours),
        milliseconds_torchao=1e3 * statistics.median(theirs),
        against_torchao=statistics.median(
            step / ((before + after) / 2) for step, before, after in zip(ours, theirs, theirs[1:], strict=False)
        ),
        gathered_mb=uses["ours"][0].gathered_bytes / 1e6,
        gathered_mb_torchao=uses["theirs"][0].gathered_bytes / 1e6,
        peak_mb=peak["ours"] / 1e6,
        peak_mb_torchao=peak["theirs"] / 1e6,
        peak_against_torchao=peak["ours"] / peak["theirs"],
        loss_difference=loss_difference,
    )


def table(rows: list[Row]) -> Table:
    """The rows for eyes."""
    shown = Table(
        title=f"One step on {RANKS} ranks: ours / a hand-written loop with torchao",
        caption="MB gathered, MB at the peak. Ratios under 1 favour ours. FP8 is emulated: this is no speed of FP8",
    )
    columns = ("recipe", "ms", "time ratio", "gathered", "theirs", "peak", "theirs", "peak ratio")
    for column in columns:
        shown.add_column(column, justify="left" if column == "recipe" else "right")
    for row in rows:
        shown.add_row(
            row.recipe,
            f"{row.milliseconds:.1f}",
            f"{row.against_torchao:.3f}",
            f"{row.gathered_mb:.2f}",
            f"{row.gathered_mb_torchao:.2f}",
            f"{row.peak_mb:.1f}",
            f"{row.peak_mb_torchao:.1f}",
            f"{row.peak_against_torchao:.3f}",
        )
    return shown


def main() -> None:
    """Run all rows, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = [measure(recipe, arguments.rounds) for recipe in arguments.rows]
    Console().print(table(rows))
    if arguments.json:
        facts = {
            "device": f"CPU, {platform.machine()}, FP8 emulated",
            "ranks": RANKS,
            "threads_of_each_rank": 1,
            "torch": torch.__version__,
            "torchao": version("torchao"),
            "lightning": version("lightning"),
            "rounds": arguments.rounds,
            "model": {"width": WIDTH, "blocks": DEPTH, "tokens_of_each_rank": BATCH * CONTEXT},
        }
        arguments.json.write_text(json.dumps({**facts, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
