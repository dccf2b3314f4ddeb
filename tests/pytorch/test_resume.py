"""Runs that stop and go on: as if they had not stopped, elsewhere, from what others wrote, and what lies on disk then.

Ranks are real gloo processes and every fit is that of a real Trainer. What is only pretended says so in its name.
"""

import json
import pickle
import random
import subprocess
import sys
import warnings
from collections.abc import Iterator
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from flavours import BOTH, LIGHTNING, STANDALONE, Lightning
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset

from lightning_fp8_rocm import FP8Linear
from lightning_fp8_rocm.distributed import publish
from lightning_fp8_rocm.distributed.storage import plain_name

FORMS = ("sharded", "full")
WIDTH = 16
GLOBAL_BATCH = 12  # 1, 2, 3 and 4 ranks divide it
BATCHES = 4

# ---------------------------------------------------------------------------------------------------------------------
# What is trained


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(BATCHES * GLOBAL_BATCH, WIDTH, generator=generator)
    return TensorDataset(inputs, inputs[:, :5].argmax(1))


class Deck(DataLoader[Any]):
    """Batches in an order of its own each time, and a memory of where it is, as the loader of torchdata has.

    The order is drawn from torch's generator when an iterator is made, so it is another one on each rank.
    """

    def __init__(self) -> None:
        super().__init__(data(), batch_size=4)
        self.seed, self.dealt, self.is_resumed = 0, 0, False

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Any:
        drawn = int(torch.randint(1 << 30, ()))
        if not self.is_resumed or self.dealt == len(self):
            self.seed, self.dealt = drawn, 0
        self.is_resumed = False
        return self.deal()

    def deal(self) -> Iterator[list[Tensor]]:
        order = torch.randperm(BATCHES * GLOBAL_BATCH, generator=torch.Generator().manual_seed(self.seed))
        inputs, labels = data().tensors
        while self.dealt < len(self):
            mine = order[self.dealt * 4 : self.dealt * 4 + 4]
            self.dealt += 1
            yield [inputs[mine], labels[mine]]

    def state_dict(self) -> dict[str, int]:
        return {"seed": self.seed, "dealt": self.dealt}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seed, self.dealt, self.is_resumed = state["seed"], state["dealt"], True


class Net:
    """Two blocks and a head; remembers its losses, as this rank sees them."""

    def __init__(self, optimizer: str = "adamw", loader: str = "turns", noisy: bool = False, step_lr: bool = False):
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(2)
        )
        self.dropout = nn.Dropout(0.2 if noisy else 0.0)
        self.head = nn.Linear(WIDTH, 5)
        self.automatic_optimization = optimizer != "two"
        if optimizer == "frozen":
            self.blocks[0].requires_grad_(False)
        self.losses: list[float] = []
        self.at_start: Any = None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + self.dropout(block(x))
        return self.head(x)

    def train_dataloader(self) -> Any:
        rank, world = self.trainer.global_rank, self.trainer.world_size
        if self.hparams.loader == "stateful":
            return Deck()
        if self.hparams.loader == "shuffled":
            return DataLoader(data(), batch_size=GLOBAL_BATCH // world, shuffle=True)
        # Ranks take turns, so that their batches together are the batch of one device.
        mine = Subset(data(), range(rank, BATCHES * GLOBAL_BATCH, world))
        return DataLoader(mine, batch_size=GLOBAL_BATCH // world)

    def val_dataloader(self) -> Any:
        return DataLoader(data(), batch_size=GLOBAL_BATCH)

    def test_dataloader(self) -> Any:
        return self.val_dataloader()

    def training_step(self, batch: list[Tensor], index: int) -> Tensor | None:
        inputs, labels = batch
        if self.hparams.noisy:
            inputs = inputs + 0.1 * random.random() + 0.1 * float(np.random.rand())
        loss = F.cross_entropy(self(inputs).float(), labels)
        self.losses.append(loss.item())
        self.log("seen", float(self.trainer.global_step))
        if self.automatic_optimization:
            return loss
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()
        return None

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        noise = 0.1 * torch.rand(()) + 0.1 * random.random() if self.hparams.noisy else 0.0
        self.log("val_loss", F.cross_entropy(self(batch[0] + noise).float(), batch[1]), sync_dist=True)

    def test_step(self, batch: list[Tensor], index: int) -> None:
        self.validation_step(batch, index)

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        if self.hparams.optimizer == "sgd":
            optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(trained, lr=0.1)]
        elif self.hparams.optimizer == "two":
            of_head = torch.optim.SGD(self.head.parameters(), lr=0.1, momentum=0.9)
            optimizers = [torch.optim.AdamW(self.blocks.parameters(), lr=1e-2), of_head]
        else:
            optimizers = [torch.optim.AdamW(trained, lr=1e-2)]
        if not self.hparams.step_lr:
            return optimizers
        schedule = torch.optim.lr_scheduler.StepLR(optimizers[0], 3, 0.7)
        return optimizers, [{"scheduler": schedule, "interval": "step"}]

    def on_train_start(self) -> None:
        self.at_start = state_of(self.trainer)
        self.is_fp8 = any(isinstance(module, FP8Linear) for module in self.modules())


def listed(value: Any) -> Any:
    """Tensors as lists, bit for bit comparable, and fit for a pipe."""
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), value.tolist()
    if isinstance(value, dict):
        return {key: listed(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [listed(each) for each in value]
    return value


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def state_of(run: Any) -> dict[str, Any]:
    """Weights, and what each optimizer keeps, by name; the same on all ranks, whatever the strategy."""
    module = run.lightning_module
    named = {plain_name(name): parameter for name, parameter in module.named_parameters()}
    kept = [
        {
            name: {key: whole(value) if isinstance(value, Tensor) else value for key, value in state.items()}
            for name, parameter in named.items()
            if (state := optimizer.state.get(parameter))
        }
        for optimizer in run.optimizers
    ]
    rates = [group["lr"] for optimizer in run.optimizers for group in optimizer.param_groups]
    weights = {name: whole(parameter.detach()) for name, parameter in named.items()}
    state: dict[str, Any] = listed({"weights": weights, "optimizers": kept, "rates": rates})
    return state


def make_trainer(pl: Lightning, precision: Any = "fp8-rocm", strategy: Any = None, **flags: Any) -> Any:
    """A Trainer over all ranks of this call; ``strategy`` are the arguments of ours, or one of Lightning's own."""
    return pl.trainer(
        pl.FP8Precision(**precision) if isinstance(precision, dict) else precision,
        strategy=pl.FSDP2FP8Strategy(**(strategy or {})) if isinstance(strategy, dict | None) else strategy,
        devices=dist.get_world_size() if dist.is_initialized() else 1,
        **{"use_distributed_sampler": False, "limit_val_batches": 0, **flags},
    )


# ---------------------------------------------------------------------------------------------------------------------
# As if it had not stopped


def seed(base: int) -> None:
    """Another one on each rank."""
    own = base + (dist.get_rank() if dist.is_initialized() else 0)
    random.seed(own)
    np.random.seed(own)
    torch.manual_seed(own)


def generators() -> dict[str, Any]:
    _, state, *_ = np.random.get_state()
    return {"python": random.getstate(), "numpy": state.tolist(), "torch": torch.get_rng_state().tolist()}


AT_EPOCH_ENDS = {"every_n_epochs": 1, "save_on_train_epoch_end": True}
STATEFUL = {"loader": "stateful"}
EXACT: dict[str, dict[str, Any]] = {
    **{
        f"at an epoch's end, {form}, async_checkpoint={background}": {
            "strategy": {"state_dict_type": form, "async_checkpoint": background},
            "saves": AT_EPOCH_ENDS,
            "stops": [4],
        }
        for form in FORMS
        for background in (False, True)
    },
    **{
        f"within an epoch, {form}, async_checkpoint={background}": {
            "strategy": {"state_dict_type": form, "async_checkpoint": background},
            "module": STATEFUL,
            "saves": {"every_n_train_steps": 3},
            "stops": [6] if background else [3],
        }
        for form in FORMS
        for background in (False, True)
    },
    "at an epoch's last batch, before it ends": {
        "module": STATEFUL,
        "saves": {"every_n_train_steps": 4},
        "stops": [4],
    },
    "at a validation in the middle of an epoch, and at its last batch": {
        "module": STATEFUL,
        "saves": {"monitor": "val_loss"},
        "stops": [2, 4],
        "val_check_interval": 2,
        "limit_val_batches": 1,
    },
    "within an epoch, gradients accumulated over two batches": {
        "module": STATEFUL,
        "saves": {"every_n_train_steps": 1},
        "stops": [1],
        "accumulate_grad_batches": 2,
    },
    "within an epoch, two optimizers stepped by hand": {
        "module": {**STATEFUL, "optimizer": "two"},
        "saves": {"every_n_train_steps": 6},
        "stops": [6],  # each batch counts two
    },
    "at an epoch's end, shuffled, after a validation": {
        "module": {"loader": "shuffled"},
        "saves": AT_EPOCH_ENDS,
        "stops": [4],
        "limit_val_batches": 1,
        "use_distributed_sampler": True,
    },
}
ON_ONE_RANK = {
    **{name: EXACT[name] for name in list(EXACT)[3:5]},
    "at an epoch's end, shuffled by torch's generator": {
        "module": {"loader": "shuffled"},
        "saves": AT_EPOCH_ENDS,
        "stops": [4],
    },
}


def go_on(
    pl: Lightning,
    folder: Path,
    saves: dict[str, Any],
    stops: list[int],
    strategy: dict[str, Any] | None = None,
    module: dict[str, Any] | None = None,
    **flags: Any,
) -> dict[str, Any]:
    """Train for two epochs, saving; then go on from the checkpoints of some steps. Names what differs."""

    def fit(resume: Path | None, *keep: Any) -> dict[str, Any]:
        net = pl.module(Net)(noisy=True, step_lr=True, **(module or {}))
        run = make_trainer(
            pl,
            {"recipe": "rowwise"},
            strategy,
            max_epochs=2,
            callbacks=[*keep],
            enable_checkpointing=bool(keep),
            **flags,
        )
        seed(7 if resume is None else 1000)
        run.fit(net, ckpt_path=resume)
        return {
            "losses": net.losses,
            "state": state_of(run),
            "schedules": [listed(each.scheduler.state_dict()) for each in run.lr_scheduler_configs],
            "progress": (run.current_epoch, run.global_step, run.fit_loop.epoch_loop.total_batch_idx),
            **generators(),
        }

    straight = fit(None, pl.callbacks.ModelCheckpoint(folder, "{step}", save_top_k=-1, **saves))
    found = {}
    for step in stops:
        resumed = fit(folder / f"step={step}.ckpt")
        left = len(resumed["losses"])
        assert 0 < left < len(straight["losses"]) == 2 * BATCHES
        wanted = {**straight, "losses": straight["losses"][-left:]}
        found[step] = [key for key in resumed if resumed[key] != wanted[key]]
    return found


def all_go_on(pl: Lightning, folder: Path) -> dict[str, Any]:
    cases = EXACT if dist.get_world_size() > 1 else ON_ONE_RANK
    return {name: go_on(pl, folder / str(number), **case) for number, (name, case) in enumerate(cases.items())}


@pytest.mark.parametrize(("pl", "world"), [(LIGHTNING, 1), (STANDALONE, 1), (LIGHTNING, 2)], ids=str)
def test_a_run_that_stopped_goes_on_bit_for_bit_on_each_rank(
    pl: Lightning, ranks: Ranks, tmp_path: Path, world: int
) -> None:
    """Losses, weights, optimizers, schedules, progress, and the generators of Python, numpy and torch."""
    for of_rank in ranks(world, all_go_on, pl, tmp_path):
        different = {name: found for name, found in of_rank.items() if any(found.values())}
        assert not different


def saves_and_does_not(pl: Lightning, folder: Path) -> bool:
    states = []
    for keep in ([], [pl.callbacks.ModelCheckpoint(folder, save_top_k=-1, every_n_train_steps=3)]):
        net = pl.module(Net)(noisy=True)
        run = make_trainer(pl, "32-true", {"async_checkpoint": True}, callbacks=keep, enable_checkpointing=bool(keep))
        seed(7)
        run.fit(net)
        states.append((net.losses, state_of(run), generators()))
    return states[0] == states[1]


def test_a_run_that_saves_is_one_that_does_not(pl: Lightning, ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, saves_and_does_not, pl, tmp_path) == [True, True]


# ---------------------------------------------------------------------------------------------------------------------
# With other ranks, in another form, in another precision

ROUNDED = 2e-5
"""Of a loss in fp32. Ranks add up what one device sums at once: see `EXACT` in parity.py, of weights."""

FORMATS = 0.02
"""Of a loss. What test_convergence.py allows between bf16 and FP8, and so between two kinds of FP8, after a run.

Compiled layers differ less: their sums are those of eager ones in another order, and a cast to FP8 may then go up where
it went down.
"""


def leg(world: int = 2, form: str = "sharded", **others: Any) -> dict[str, Any]:
    strategy = {"state_dict_type": form, **others.pop("strategy", {})}
    return {"world": world, "strategy": strategy, **others}


def there_and_back(one: dict[str, Any], other: dict[str, Any], within: float | None = 0.0) -> dict[str, Any]:
    """Three epochs, the second as ``other``, and how far the losses may be from those of a run that is all ``one``."""
    return {"legs": [leg(**one), leg(**other), leg(**one)], "within": within}


def into_one_file(**module: Any) -> dict[str, Any]:
    """Two epochs of FP8, with an optimizer of a kind; what was saved in shards is loaded, and saved in one file."""
    return {"legs": [leg(module=module), leg(form="full", module=module)], "within": 0.0}


FP32 = {"precision": "32-true"}
CHAINS: dict[str, dict[str, Any]] = {
    "HSDP and FSDP": there_and_back(
        {"world": 4, **FP32, "strategy": {"device_mesh": (2, 2)}}, {"world": 4, "form": "full", **FP32}, ROUNDED
    ),
    "two ranks, three, one": {
        "legs": [leg(2, "sharded", **FP32), leg(3, "full", **FP32), leg(1, "sharded", **FP32)],
        "within": ROUNDED,
    },
    "one rank, three, two": {
        "legs": [leg(1, "full", **FP32), leg(3, "sharded", **FP32), leg(2, "full", **FP32)],
        "within": ROUNDED,
    },
    "bf16-mixed and FP8": there_and_back({"precision": "bf16-mixed"}, {}, FORMATS),
    "tensorwise and rowwise": there_and_back({"form": "full"}, {"precision": {"recipe": "rowwise"}}, FORMATS),
    "fnuz of a pretended MI300 and ocp of a pretended MI350": there_and_back(
        {"precision": {"fp8_format": "fnuz"}}, {"precision": {"fp8_format": "ocp"}}, FORMATS
    ),
    "not compiled and compiled": there_and_back({}, {"strategy": {"compile": {"backend": "aot_eager"}}}, FORMATS),
    "activations kept and recomputed": there_and_back(
        {"form": "full"}, {"strategy": {"activation_checkpointing_policy": "full"}}
    ),
    "an optimizer without state": into_one_file(optimizer="sgd"),
    "two optimizers": into_one_file(optimizer="two"),
    "frozen weights": into_one_file(optimizer="frozen"),
    "a scheduler that comes and goes": there_and_back({}, {"module": {"step_lr": True}}, None),
}


def names_in(path: Path) -> list[str]:
    if path.is_file():
        return sorted(torch.load(path, weights_only=True, mmap=True)["state_dict"])
    found = FileSystemReader(path).read_metadata().state_dict_metadata
    return sorted(key.removeprefix("state_dict.") for key in found if key.startswith("state_dict."))


def run_legs(
    pl: Lightning, folder: Path, numbered: list[tuple[str, int, dict[str, Any]]], epoch: int
) -> list[dict[str, Any]]:
    """One epoch more of each chain; all of them without a stop if ``epoch`` is 0."""
    results = []
    for name, number, spec in numbered:
        flags = {key: value for key, value in spec.items() if key not in ("world", "module")}
        net = pl.module(Net)(**spec.get("module", {}))
        run = make_trainer(pl, max_epochs=epoch or len(CHAINS[name]["legs"]), **flags)
        run.fit(net, ckpt_path=folder / f"{name}{number - 1}.ckpt" if epoch > 1 else None)
        if epoch:
            run.save_checkpoint(folder / f"{name}{number}.ckpt")
            dist.barrier()
        losses = torch.tensor(net.losses)
        dist.all_reduce(losses)
        results.append(
            {
                "start": net.at_start,
                "end": state_of(run),
                "losses": (losses / dist.get_world_size()).tolist(),
                "fp8": net.is_fp8,
                "names": names_in(folder / f"{name}{number}.ckpt") if epoch else [],
                "step": run.global_step,
            }
        )
    return results


def kind_of(chain: dict[str, Any]) -> str:
    """Chains of one kind have the same run without a stop, up to the rounding of fp32."""
    first = chain["legs"][0]
    return f"{first.get('precision')} {first.get('module')}"


@pytest.fixture(scope="module")
def chains(ranks: Ranks, tmp_path_factory: Any) -> dict[str, list[dict[str, Any]]]:
    """The legs of each chain, by its name; and runs without a stop, by the kind of chain."""
    folder = tmp_path_factory.mktemp("chains")
    straight = {kind_of(chain): name for name, chain in CHAINS.items() if chain["within"] is not None}
    done: dict[str, list[dict[str, Any]]] = {}
    for epoch in range(4):
        by_world: dict[int, list[tuple[str, int, dict[str, Any]]]] = {}
        for name, chain in CHAINS.items():
            if epoch <= len(chain["legs"]) and (epoch > 0 or name in straight.values()):
                spec = chain["legs"][max(epoch - 1, 0)]
                by_world.setdefault(spec["world"], []).append((name, epoch, spec))
        for world, numbered in sorted(by_world.items()):
            of_ranks = ranks(world, run_legs, LIGHTNING, folder, numbered, epoch)
            for (name, *_), result in zip(numbered, of_ranks[0], strict=True):
                done.setdefault(name if epoch else kind_of(CHAINS[name]), []).append(result)
    return done


@pytest.mark.parametrize("name", CHAINS)
def test_a_run_goes_on_from_what_another_kind_of_run_saved(chains: Any, name: str) -> None:
    within, specs = CHAINS[name]["within"], CHAINS[name]["legs"]
    legs = chains[name]
    assert len(legs) == len(specs)
    assert [each["fp8"] for each in legs] == [each.get("precision") not in ("32-true", "bf16-mixed") for each in specs]
    assert [each["step"] for each in legs] == [legs[0]["step"] * number for number in range(1, len(legs) + 1)]
    assert all(each["names"] == sorted(LIGHTNING.module(Net)().state_dict()) for each in legs)
    for before, after in pairwise(legs):
        assert after["start"] == before["end"]
        assert after["end"]["weights"] != after["start"]["weights"]
        for kind in before["end"]["optimizers"]:
            assert (kind == {}) is ("without state" in name)
    losses = [loss for each in legs for loss in each["losses"]]
    assert len(losses) == len(legs) * BATCHES
    if within is None:
        assert sum(losses[-BATCHES:]) < sum(losses[:BATCHES])
        return
    (straight,) = chains[kind_of(CHAINS[name])]
    wanted = straight["losses"]
    for here, there in zip(losses, wanted, strict=True):
        assert abs(here - there) <= within * there
    # A leg that began anew would be seen: epochs are over the same batches.
    for epoch in range(1, len(legs)):
        first, now = wanted[:BATCHES], wanted[epoch * BATCHES :][:BATCHES]
        assert max(abs(one - other) / other for one, other in zip(first, now, strict=True)) > 2 * within


# ---------------------------------------------------------------------------------------------------------------------
# What Lightning's own strategies wrote, and what they read


class ShardedByItself(Net):
    """As Lightning's strategy for FSDP2 wants it."""

    def configure_model(self) -> None:
        if not any(isinstance(parameter, DTensor) for parameter in self.parameters()):
            for block in self.blocks:
                fully_shard(block, mesh=self.device_mesh["data_parallel"])
            fully_shard(self, mesh=self.device_mesh["data_parallel"])


def stock(pl: Lightning, name: str) -> tuple[Any, Any]:
    """A module and the strategy of Lightning that trains it on two ranks."""
    if name == "ddp":
        return pl.module(Net), pl.strategies.DDPStrategy(process_group_backend="gloo")
    return pl.module(ShardedByItself), pl.strategies.ModelParallelStrategy(
        data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=name == "model parallel, sharded"
    )


def pretended_fsdp1(pl: Lightning, folder: Path, form: str, like: dict[str, Any]) -> dict[str, Any]:
    """Write what Lightning's `FSDPStrategy` does, by its own methods: only its setup wants a GPU."""
    net = pl.module(Net)()
    wrapped = FullyShardedDataParallel(net, use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for number in range(BATCHES):
        mine = slice(number * GLOBAL_BATCH + dist.get_rank(), (number + 1) * GLOBAL_BATCH, 2)
        inputs, labels = (tensor[mine] for tensor in data().tensors)
        F.cross_entropy(wrapped(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    strategy = pl.strategies.FSDPStrategy(
        state_dict_type=form,
        cluster_environment=pl.of_fabric("plugins.environments").TorchElasticEnvironment(),
    )
    strategy.model = wrapped
    with FullyShardedDataParallel.summon_full_params(wrapped):
        weights = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    with pytest.MonkeyPatch.context() as patch:
        # Where a GPU's tensor would be copied, torch keeps a view of what it is about to free and use again.
        patch.setattr(Tensor, "cpu", lambda tensor: tensor.clone())
        state = strategy.optimizer_state(optimizer)
    state_dict = strategy.lightning_module_state_dict() if form == "sharded" else weights
    checkpoint = {**like, "state_dict": state_dict, "optimizer_states": [state]}
    strategy.save_checkpoint(checkpoint, folder / f"fsdp1, {form}.ckpt")
    dist.barrier()
    saved: dict[str, Any] = listed(weights)
    return saved


def stock_and_ours(pl: Lightning, folder: Path) -> dict[str, dict[str, Any]]:
    """By strategy: the state that was saved, that with which the other began, and its losses."""
    results: dict[str, dict[str, Any]] = {}

    def fit(epochs: int, net: Any, strategy: Any, resume: str | None = None) -> tuple[Any, Any]:
        run = make_trainer(pl, "32-true", strategy, max_epochs=epochs)
        run.fit(net, ckpt_path=folder / resume if resume else None)
        return net, run

    for name in ("ddp", "model parallel, sharded", "model parallel, full"):
        kind, strategy = stock(pl, name)
        _, run = fit(1, kind(), strategy)
        saved = state_of(run)
        run.save_checkpoint(folder / f"{name}.ckpt")
        dist.barrier()
        ours, _ = fit(2, pl.module(Net)(), {}, f"{name}.ckpt")
        results[f"{name} -> ours"] = {"saved": saved, "loaded": ours.at_start, "losses": ours.losses}
        if name == "ddp":
            kind, strategy = stock(pl, name)
            results["straight"] = {"losses": fit(2, kind(), strategy)[0].losses}
    like = torch.load(folder / "ddp.ckpt", weights_only=True)
    for form in FORMS:
        saved = {**results["ddp -> ours"]["saved"], "weights": pretended_fsdp1(pl, folder, form, dict(like))}
        ours, _ = fit(2, pl.module(Net)(), {}, f"fsdp1, {form}.ckpt")
        results[f"fsdp1, {form} -> ours"] = {"saved": saved, "loaded": ours.at_start, "losses": ours.losses}
    for form in FORMS:
        _, run = fit(1, pl.module(Net)(), {"state_dict_type": form})
        saved = state_of(run)
        run.save_checkpoint(folder / f"ours, {form}.ckpt")
        kind, strategy = stock(pl, "ddp" if form == "full" else "model parallel, sharded")
        theirs, _ = fit(2, kind(), strategy, f"ours, {form}.ckpt")
        results[f"ours, {form} -> stock"] = {"saved": saved, "loaded": theirs.at_start, "losses": theirs.losses}
    return results


def assert_close(one: Any, other: Any, where: str) -> None:
    """Alike up to rounding in fp32, in two structures of the same shape."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_close(one[key], other[key], f"{where}.{key}")
        return
    assert np.shape(one[2]) == np.shape(other[2]), where
    assert np.abs(np.array(one[2]) - np.array(other[2])).max() < ROUNDED, where


def test_checkpoints_of_lightnings_own_strategies_and_a_pretended_fsdp1_resume_under_ours_and_ours_under_them(
    pl: Lightning, ranks: Ranks, tmp_path: Path
) -> None:
    of_ranks = ranks(2, stock_and_ours, pl, tmp_path)
    for rank, results in enumerate(of_ranks):
        straight = results.pop("straight")["losses"]
        for name, result in results.items():
            saved, loaded = result["saved"], result["loaded"]
            assert loaded["optimizers"][0].keys() == saved["weights"].keys(), name
            if name.startswith("fsdp1"):  # trained without a Trainer: the same batches, other sums
                assert_close(saved["weights"], loaded["weights"], name)
                assert_close(saved["optimizers"][0], loaded["optimizers"][0], name)
            else:
                assert loaded == saved, name
            assert np.allclose(result["losses"], straight[BATCHES:], rtol=5 * ROUNDED), (name, rank)

    # And on one device, in this process.
    net = pl.module(Net)()
    pl.trainer("32-true", max_epochs=2, limit_val_batches=0).fit(net, ckpt_path=tmp_path / "ours, full.ckpt")
    assert net.at_start == of_ranks[0]["ours, full -> stock"]["saved"]
    of_both = np.mean([each["ours, full -> stock"]["losses"] for each in of_ranks], axis=0)
    assert np.allclose(net.losses, of_both, rtol=5 * ROUNDED)


# ---------------------------------------------------------------------------------------------------------------------
# Under the other name of Lightning


def save_in_both_forms(pl: Lightning, folder: Path) -> dict[str, Any]:
    states = {}
    for form in FORMS:
        run = make_trainer(pl, "fp8-rocm", {"state_dict_type": form})
        run.fit(pl.module(Net)("two", step_lr=True))
        run.save_checkpoint(folder / f"{form}.ckpt")
        states[form] = state_of(run)
    return states


def go_on_from_both_forms(pl: Lightning, folder: Path) -> dict[str, Any]:
    """What is loaded into a run and into a module alone, and how the run goes on."""
    found = {}
    for form in FORMS:
        path, net = folder / f"{form}.ckpt", pl.module(Net)("two", step_lr=True)
        run = make_trainer(pl, "fp8-rocm", {"state_dict_type": form}, max_epochs=2)
        run.fit(net, ckpt_path=path)
        alone = pl.module(Net).load_from_checkpoint(path)
        found[form] = {
            "start": net.at_start,
            "losses": net.losses,
            "end": state_of(run),
            "steps": run.global_step,
            "alone": listed(dict(alone.named_parameters())),
            "hyper-parameters": dict(alone.hparams),
        }
    return found


@pytest.mark.parametrize(("pl", "other"), list(permutations(BOTH)), ids=str)
def test_a_checkpoint_of_one_name_loads_bit_for_bit_under_the_other_which_goes_on_as_the_first_would(
    ranks: Ranks, tmp_path: Path, pl: Lightning, other: Lightning
) -> None:
    saved = ranks(2, save_in_both_forms, pl, tmp_path)
    own, others = (ranks(2, go_on_from_both_forms, each, tmp_path) for each in (pl, other))
    assert others == own
    for rank, forms in enumerate(others):
        for form, found in forms.items():
            assert found["start"] == saved[rank][form]
            assert found["alone"] == found["start"]["weights"]
            assert found["hyper-parameters"]["optimizer"] == "two"
            assert len(found["losses"]) == BATCHES
            assert found["end"]["weights"] != found["start"]["weights"]


BARE = """
import json, sys
from pathlib import Path

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torchao", "lightning", "pytorch_lightning", "lightning_fp8_rocm"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
import torch
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

sharded, full, out = map(Path, sys.argv[1:])
meta = torch.load(sharded / "meta.pt", weights_only=True)
dcp_to_torch_save(sharded, out)
converted = torch.load(out, weights_only=True)
whole = torch.load(full, weights_only=True)
weights = {name: torch.full_like(each, torch.nan) for name, each in converted["state_dict"].items()}
load({"state_dict": weights}, checkpoint_id=sharded)
print(json.dumps({
    "weights": {name: each.tolist() for name, each in weights.items()},
    "converted": {name: each.tolist() for name, each in converted["state_dict"].items()},
    "whole": {name: each.tolist() for name, each in whole["state_dict"].items()},
    "classes": sorted({type(each).__name__ for each in (*weights.values(), *whole["state_dict"].values())}),
    "optimizer": sorted(converted["optimizer_0"]["state"]),
    "moments": {name: each["exp_avg"].tolist() for name, each in converted["optimizer_0"]["state"].items()},
    "numbers": sorted(whole["optimizer_states"][0]["state"]),
    "epochs": [meta["epoch"], whole["epoch"]],
    "modules": [name for name in sys.modules if "lightning" in name or "torchao" in name],
}))
"""


def save_both(pl: Lightning, folder: Path) -> dict[str, Any]:
    for form in FORMS:
        run = make_trainer(pl, "fp8-rocm", {"state_dict_type": form})
        run.fit(pl.module(Net)())
        run.save_checkpoint(folder / f"{form}.ckpt")
    return state_of(run)


@pytest.mark.parametrize("pl", [LIGHTNING], ids=str)
def test_torch_alone_reads_either_form_where_neither_torchao_nor_lightning_nor_this_package_can_be_imported(
    pl: Lightning, ranks: Ranks, tmp_path: Path
) -> None:
    state, _ = ranks(2, save_both, pl, tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", BARE, *(str(tmp_path / name) for name in ("sharded.ckpt", "full.ckpt", "converted.pt"))],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    read = json.loads(done.stdout)
    weights = {name: values for name, (_, _, values) in state["weights"].items()}
    assert list(weights) == list(pl.module(Net)().state_dict())
    assert read["weights"] == read["converted"] == read["whole"] == weights
    assert read["moments"] == {name: each["exp_avg"][2] for name, each in state["optimizers"][0].items()}
    assert read["optimizer"] == sorted(weights)
    assert read["numbers"] == list(range(len(weights)))
    assert read["classes"] == ["Tensor"]
    assert read["epochs"] == [1, 1]
    assert read["modules"] == []


# ---------------------------------------------------------------------------------------------------------------------
# Weights alone, and objects


class Larger(Net):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.more = nn.Linear(WIDTH, WIDTH)


def weights_alone(pl: Lightning, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for form in FORMS:
        keep = pl.callbacks.ModelCheckpoint(folder, form, save_weights_only=True)
        run = make_trainer(pl, "fp8-rocm", {"state_dict_type": form}, callbacks=[keep], enable_checkpointing=True)
        run.fit(pl.module(Net)("sgd"))
        saved, path = state_of(run)["weights"], keep.best_model_path
        dist.barrier()

        again, net = make_trainer(pl, limit_val_batches=1), pl.module(Net)("sgd")
        again.validate(net, ckpt_path=path, verbose=False)
        again.fit(net)
        found[f"{form}, by validate"] = net.at_start["weights"] == saved

        net = pl.module(Net).load_from_checkpoint(path)
        make_trainer(pl).fit(net)
        found[f"{form}, by load_from_checkpoint"] = net.at_start["weights"] == saved
        found[f"{form}, hyper-parameters"] = net.hparams.optimizer == "sgd"
        net = pl.module(Net).load_from_checkpoint(path, map_location="cpu", optimizer="two")
        found[f"{form}, an argument in place of a hyper-parameter"] = net.hparams.optimizer == "two"
        try:
            pl.module(Larger).load_from_checkpoint(path)
        except RuntimeError as error:
            found[f"{form}, strict"] = 'Missing key(s) in state_dict: "more.weight", "more.bias"' in str(error)
        larger = pl.module(Larger).load_from_checkpoint(path, map_location=torch.device("cpu"), strict=False)
        weights = listed({name: each.detach() for name, each in larger.named_parameters() if "more" not in name})
        found[f"{form}, not strict"] = weights == saved
        try:
            make_trainer(pl).fit(pl.module(Net)("sgd"), ckpt_path=path)
        except ValueError as error:
            says = ("was saved with `save_weights_only=True`", "Pass it to `trainer.validate`", str(path))
            found[f"{form}, fit says what it lacks"] = all(part in str(error) for part in says)
    return found


def test_weights_alone_begin_a_run_by_validate_or_load_from_checkpoint_and_cannot_be_resumed_from(
    pl: Lightning, ranks: Ranks, tmp_path: Path
) -> None:
    for found in ranks(2, weights_alone, pl, tmp_path):
        assert len(found) == 14
        assert [name for name, holds in found.items() if not holds] == []


class Kept:
    """What `weights_only=True` does not load."""

    def __init__(self, value: int) -> None:
        self.value = value


class KeepsAnObject:
    def __init__(self, value: int) -> None:
        self.kept = Kept(value)

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = state["kept"]


def objects(pl: Lightning, folder: Path) -> dict[str, Any]:
    """What a resumed callback has, or the error."""

    def called(name: str, path: Path, **arguments: Any) -> Any:
        callback = pl.callback(KeepsAnObject)(0)
        run = make_trainer(pl, callbacks=[callback], max_epochs=2, limit_val_batches=1)
        try:
            getattr(run, name)(pl.module(Net)(), ckpt_path=path, **arguments)
        except pickle.UnpicklingError as error:
            return str(error)
        return callback.kept.value

    found = {}
    for form in FORMS:
        path = folder / f"{form}.ckpt"
        run = make_trainer(pl, "fp8-rocm", {"state_dict_type": form}, callbacks=[pl.callback(KeepsAnObject)(3)])
        run.fit(pl.module(Net)())
        run.save_checkpoint(path)
        for name in ("fit", "validate"):
            found[f"{form}, {name}, True"] = called(name, path, weights_only=True)
            found[f"{form}, {name}, None"] = called(name, path)
            found[f"{form}, {name}, False"] = called(name, path, weights_only=False)
    return found


@pytest.mark.parametrize(
    ("pl", "world"),
    [
        pytest.param(LIGHTNING, 1, id="one process"),
        pytest.param(STANDALONE, 1, id="one process, pytorch_lightning"),
        pytest.param(LIGHTNING, 2, id="two of torchrun"),
    ],
)
def test_objects_load_only_with_weights_only_false_and_the_error_says_so_on_all_ranks(
    pl: Lightning, ranks: Ranks, tmp_path: Path, world: int
) -> None:
    for found in [objects(pl, tmp_path)] if world == 1 else ranks(2, objects, pl, tmp_path):
        assert len(found) == 12
        for name, value in found.items():
            if name.endswith("False"):
                assert value == 3, name
            else:
                assert "If you trust its source, pass `weights_only=False`" in str(value), name
                assert name.partition(",")[0] + ".ckpt" in str(value), name


# ---------------------------------------------------------------------------------------------------------------------
# What lies on disk


def kept_files(pl: Lightning, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for form in FORMS:
        for save_last in (True, "link"):
            where = folder / f"{form}, {save_last}"
            keep = pl.callbacks.ModelCheckpoint(
                where, "{step}", monitor="seen", mode="max", save_top_k=2, save_last=save_last, every_n_train_steps=1
            )
            # A link would be there before what it points to, so in the background it is refused.
            strategy = {"state_dict_type": form, "async_checkpoint": save_last is True}
            net = pl.module(Net)()
            run = make_trainer(
                pl, "fp8-rocm", strategy, callbacks=[keep], enable_checkpointing=True, limit_test_batches=1
            )
            run.fit(net)
            trained = state_of(run)["weights"]
            dist.barrier()
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.zero_()
            run.test(net, ckpt_path="best", verbose=False)
            found[where.name] = {
                "best": Path(keep.best_model_path).name,
                "loaded": state_of(run)["weights"] == trained,
            }
    return found


@pytest.mark.parametrize("pl", [LIGHTNING], ids=str)
def test_the_checkpoints_that_were_to_be_kept_and_no_others_are_on_disk_whole_after_a_run(
    pl: Lightning, ranks: Ranks, tmp_path: Path
) -> None:
    for found in ranks(2, kept_files, pl, tmp_path):
        assert found.keys() == {f"{form}, {save_last}" for form in FORMS for save_last in (True, "link")}
        assert all(each == {"best": "step=4.ckpt", "loaded": True} for each in found.values()), found
    for folder in tmp_path.iterdir():
        assert sorted(path.name for path in folder.iterdir()) == ["last.ckpt", "step=3.ckpt", "step=4.ckpt"]
        for path in folder.iterdir():
            assert publish.verify(path) == []
            assert path.is_dir() is folder.name.startswith("sharded")
        last = folder / "last.ckpt"
        assert last.is_symlink() is folder.name.endswith("link")
        assert last.resolve().name == ("step=4.ckpt" if last.is_symlink() else "last.ckpt")


BEGINS = """
import sys
from pathlib import Path
from lightning_fp8_rocm.distributed.publish import Staging

for target in sys.argv[1:]:
    staging = Staging.begin(Path(target))
    staging.path.mkdir()
    (staging.path / "__0_0.distcp").write_bytes(b"half")
"""


def with_left_overs(pl: Lightning, folder: Path) -> dict[str, Any]:
    def hidden() -> int:
        dist.barrier()
        return len([path for path in folder.iterdir() if path.name.startswith(".")])

    def fit(resume: str, epochs: int) -> tuple[Any, list[str]]:
        net = pl.module(Net)()
        keep = pl.callbacks.ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
        run = make_trainer(pl, callbacks=[keep], enable_checkpointing=True, max_epochs=epochs, default_root_dir=folder)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run.fit(net, ckpt_path=resume)
        return net, [str(each.message) for each in caught if "did not complete" in str(each.message)]

    before = hidden()
    net, first = fit("hpc", 2)
    after = hidden()
    _, second = fit(str(folder / "epoch=1.ckpt"), 3)
    return {"hidden": [before, after], "first": first, "second": second, "resumed": net.at_start}


def save_for_slurm(pl: Lightning, folder: Path) -> dict[str, Any]:
    run = make_trainer(pl)
    run.fit(pl.module(Net)())
    run.save_checkpoint(folder / "hpc_ckpt_3.ckpt")
    return state_of(run)


def test_what_a_killed_run_left_is_named_once_does_not_disturb_a_resume_of_slurm_and_goes_with_the_next_save(
    pl: Lightning, ranks: Ranks, tmp_path: Path
) -> None:
    saved, _ = ranks(2, save_for_slurm, pl, tmp_path)
    targets = ["hpc_ckpt_4.ckpt", "last.ckpt"]
    subprocess.run([sys.executable, "-c", BEGINS, *(str(tmp_path / name) for name in targets)], check=True)
    first, second = ranks(2, with_left_overs, pl, tmp_path)
    assert first["hidden"] == second["hidden"] == [2, 0]
    assert first["resumed"] == second["resumed"] == saved
    (told,) = first["first"]
    assert told.startswith("Earlier runs began checkpoints that they did not complete: ")
    assert all(f"(of {name}, by " in told for name in targets)
    assert "These are not used, and the next checkpoint that is saved there removes them." in told
    assert first["second"] == second["first"] == second["second"] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch=1.ckpt", "epoch=2.ckpt", "hpc_ckpt_3.ckpt"]
