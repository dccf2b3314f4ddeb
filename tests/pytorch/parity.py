"""The same LightningModule on several ranks and on one device, over the same global batches.

A case is a :class:`Case` of the test module, named by a string: ranks import it by themselves. :func:`fits` runs specs
of it in one process of the pool; :func:`fit_on` and :func:`fit_alone` are what tests call.
"""

import functools
from collections.abc import Callable
from typing import Any

import lightning as L
import numpy as np
import torch
from models import LARGE_TARGET, trainer
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset

from lightning_fp8_rocm.pytorch.precision import FP8Precision
from lightning_fp8_rocm.pytorch.strategy import FSDP2FP8Strategy

WIDTH = 32
GLOBAL_BATCH = 12  # 1, 2, 3 and 4 ranks divide it


class Case(L.LightningModule):
    """Trains what :meth:`build` makes on :meth:`loss`; manually, by two backward passes and steps in each batch."""

    batch_size = GLOBAL_BATCH
    lr = 0.1

    def __init__(self, manual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.automatic_optimization = not manual
        self.notes: dict[str, Any] = {}
        self.build()

    def build(self) -> None:
        raise NotImplementedError

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        raise NotImplementedError

    @property
    def data(self) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(4 * GLOBAL_BATCH, WIDTH, generator=generator)
        return inputs, torch.randint(0, 5, (len(inputs),), generator=generator)

    def train_dataloader(self) -> DataLoader[Any]:
        # Ranks take turns, so that their batches together are the batch of one device.
        data = self.data
        targets = torch.full((len(data[0]),), LARGE_TARGET)
        run = self.trainer
        mine = range(run.global_rank, len(targets), run.world_size)
        return DataLoader(Subset(TensorDataset(*data, targets), mine), batch_size=self.batch_size // run.world_size)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor | None:
        *inputs, targets = batch
        if self.trainer.precision != "bf16-true":  # there Lightning itself rounds the batch
            assert targets.dtype == torch.float32
            assert targets.eq(LARGE_TARGET).all()
        if self.automatic_optimization:
            return self.loss(*inputs)
        for _ in range(2):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(*inputs))
            optimizer.step()
        return None

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def classify(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels)


def full(tensor: Tensor) -> Tensor:
    """The whole of a parameter or gradient, on every rank."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().float().clone()


def whole_weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: full(parameter) for name, parameter in module.named_parameters()}


class Watch(L.Callback):
    """Notes which trainable parameters the first step left as they were."""

    def on_train_start(self, trainer: L.Trainer, module: Case) -> None:
        self.before = whole_weights(module)
        if isinstance(trainer.strategy, FSDP2FP8Strategy):
            outside = [name for name, parameter in module.named_parameters() if not isinstance(parameter, DTensor)]
            assert not outside, outside

    def on_train_batch_end(self, trainer: L.Trainer, module: Case, *_: Any) -> None:
        if trainer.global_step and "unchanged" not in module.notes:
            now = whole_weights(module)
            trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
            module.notes["unchanged"] = [name for name in trained if now[name].equal(self.before[name])]


def fit_here(
    cases: dict[str, Any],
    case: str,
    precision: str | dict[str, Any] = "32-true",
    strategy: str | dict[str, Any] = "auto",
    arguments: dict[str, Any] | None = None,
    world: int = 1,
    **flags: Any,
) -> dict[str, Any]:
    """Train one case in this process, a rank; returns plain values."""
    module = cases[case](**(arguments or {}))
    for name in ("batch_size", "lr"):
        if name in flags:
            setattr(module, name, flags.pop(name))
    watch = Watch()
    run = trainer(
        FP8Precision(**precision) if isinstance(precision, dict) else precision,
        strategy=strategy if isinstance(strategy, str) else FSDP2FP8Strategy(**strategy),
        devices=world,
        callbacks=[watch, *(cases[name]() for name in flags.pop("callbacks", ()))],
        **{"use_distributed_sampler": False, **flags},
    )
    run.fit(module)
    logged = run.logged_metrics
    after = whole_weights(module)
    return {
        "weights": {name: weight.numpy() for name, weight in after.items()},
        "before": {name: weight.numpy() for name, weight in watch.before.items()},
        "buffers": {name: full(buffer).numpy() for name, buffer in module.named_buffers()},
        "notes": module.notes,
        "logged": {name: float(value) for name, value in logged.items()},
        "steps": run.global_step,
    }


def error_here(cases: dict[str, Any], **spec: Any) -> str | None:
    """What the fit raises, if it does; caught on the rank, since a rank that raises ends the pool."""
    try:
        fit_here(cases, **spec)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


Fits = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]


def fit_on(ranks: Ranks, world: int, fits: Fits, *specs: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Train the specs on ``world`` ranks; for each spec what its ranks say, after checking that they agree."""
    specs = tuple({"strategy": {}, "world": world, **spec} for spec in specs)
    by_spec = [list(said) for said in zip(*ranks(world, fits, list(specs)), strict=True)]
    for spec, (first, *others) in zip(specs, by_spec, strict=True):
        for other in others:
            for kind in ("weights",) if spec["strategy"] == "ddp" else ("weights", "buffers"):
                for name, value in first[kind].items():
                    assert np.array_equal(value, other[kind][name]), f"{spec}: ranks disagree on {name}"
    return by_spec


@functools.cache
def _alone(ranks: Ranks, fits: Fits, spec: str) -> dict[str, Any]:
    return ranks(1, fits, [eval(spec)])[0][0]


def fit_alone(ranks: Ranks, fits: Fits, **spec: Any) -> dict[str, Any]:
    """Train the case on one device without our strategy; once for all tests."""
    return _alone(ranks, fits, repr(spec))


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference of two fits over all parameters, as a part of how far training moved that parameter."""
    assert one["weights"].keys() == other["weights"].keys()
    worst = 0.0
    for name, weight in one["weights"].items():
        moved = np.linalg.norm(weight.astype(np.float64) - one["before"][name])
        apart = np.linalg.norm(weight.astype(np.float64) - other["weights"][name])
        worst = max(worst, float(apart / moved) if moved else float(apart))
    return worst


EXACT = 2e-5
"""Of :func:`distance` in fp32. Ranks add up what one device sums at once, and a weight of size 1 that moved by 1e-2 has
6e-8 / 1e-2 = 6e-6 of that movement in its rounding. Any fault that is no rounding is larger by orders."""


def assert_same(one: dict[str, Any], several: list[dict[str, Any]], spec: Any = "", to: float = EXACT) -> None:
    """Every rank has the weights of one device, and trained every parameter from the first step on."""
    for rank in several:
        assert rank["notes"]["unchanged"] == one["notes"]["unchanged"] == [], spec
        assert rank["steps"] == one["steps"] > 0
        apart = distance(one, rank)
        assert apart < to, f"{spec}: {apart:.2e} of the movement apart"
