"""Models that are sharded without Lightning, and what is in them, bit for bit comparable."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_fp8_rocm.distributed.checkpoint import model_state, optimizer_state

FORMS = ("sharded", "full")


class Marked(torch.Tensor):
    """A shard with a mark: ordinary storage, another class."""

    __torch_function__ = torch._C._disabled_torch_function_impl


class Net(nn.Module):
    """7 and 5 rows are uneven on 2 and 3 ranks; of 2 rows the third rank has none."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 5)) for _ in range(2)
        )
        self.head = nn.Linear(5, 2)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        x = self.frozen(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x) * self.scale.sum()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.block = nn.Linear(5, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(x @ self.embedding.weight.T @ self.embedding.weight))


def build(kind: type[nn.Module] = Net, **kwargs: Any) -> Any:
    torch.manual_seed(1)
    return kind(**kwargs)


def shard(model: nn.Module, mark: bool = False) -> Any:
    for block in getattr(model, "blocks", [getattr(model, "block", None)]):
        if block is not None:
            fully_shard(block)
    fully_shard(model)
    if mark:
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter._local_tensor = parameter._local_tensor.detach().as_subclass(Marked)
    return model


def train(model: nn.Module, *optimizers: Optimizer, first: int = 0, steps: int = 2) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    for step in range(first, first + steps):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + rank))
        model(x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()


def listed(value: Any) -> Any:
    """Tensors as lists, bit for bit comparable, and fit for a pipe."""
    if isinstance(value, Tensor):
        assert type(value) is Tensor
        assert value.device.type == "cpu"
        return str(value.dtype), tuple(value.shape), value.tolist()
    if isinstance(value, dict):
        return {key: listed(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [listed(each) for each in value]
    return value


def everything(model: nn.Module, *optimizers: Optimizer) -> Any:
    """The whole state, the same on all ranks."""
    box = [
        [
            listed(model_state(model, full=True)),
            *(listed(optimizer_state(model, optimizer, full=True)) for optimizer in optimizers),
        ]
    ]
    dist.broadcast_object_list(box)
    return box[0]


def assert_plain(value: Any) -> None:
    if isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            assert_plain(each)
    elif isinstance(value, DTensor):
        assert type(value._local_tensor) is Tensor
    elif isinstance(value, Tensor):
        assert type(value) is Tensor
