"""The model, the data and the loop of the tests of Fabric."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import lightning_fp8_rocm  # noqa: F401, what a user imports

WIDTH, BATCH, LARGE_TARGET = 32, 6, 1234567.0
FABRICS = {"lightning": "lightning.fabric", "lightning_fabric": "lightning_fabric"}
both = pytest.mark.parametrize("name", FABRICS)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks, a parameter on the root itself, one that never trains, and a method that is used like forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 5)

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.scale, 0.5, 1.5)

    def encode(self, x: Tensor) -> Tensor:
        x = self.frozen(x) * self.scale
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x))


def data_of(rank: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    return [
        (torch.randn(BATCH, WIDTH, generator=generator), torch.randint(0, 5, (BATCH,), generator=generator))
        for _ in range(4)
    ]


@contextmanager
def fabric_of(name: str = "lightning", **flags: Any) -> Iterator[Any]:
    """A Fabric on the ranks that there are; the strategy `fsdp2_fp8` unless another one is given."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    flags = {"precision": "fp8-rocm", "strategy": "fsdp2_fp8", **flags}
    fabric = import_module(FABRICS[name]).Fabric(accelerator="cpu", devices=world, **flags)
    fabric.launch()
    try:
        yield fabric
    finally:
        fabric.strategy.teardown()


def our_strategy(name: str = "lightning", **arguments: Any) -> Any:
    return import_module(f"lightning_fp8_rocm.{FABRICS[name].removeprefix('lightning.')}.strategy").FSDP2FP8Strategy(
        **arguments
    )


def classify(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels)


def whole(module: nn.Module) -> dict[str, Tensor]:
    return {
        key: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for key, value in module.state_dict().items()
    }


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def accumulate(fabric: Any, model: Any, optimizer: Any, *, clip: float | None = 1.0) -> list[float]:
    """Two batches a step, as the Trainer does under `accumulate_grad_batches=2`."""
    losses = []
    for index, (x, y) in enumerate(data_of(fabric.global_rank)):
        is_last = index % 2 == 1
        with fabric.no_backward_sync(model, enabled=not is_last):
            loss = classify(model(x), y)
            fabric.backward(loss / 2)
        losses.append(loss.item())
        if is_last:
            if clip is not None:
                fabric.clip_gradients(model, optimizer, max_norm=clip)
            optimizer.step()
            optimizer.zero_grad()
    return losses
