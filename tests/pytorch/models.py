"""Small modules that know nothing of FP8, for tests that run a real Trainer: bodies for either name of Lightning."""

from typing import Any

import torch
from flavours import LIGHTNING
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

LARGE_TARGET = 1234567.0  # bf16 would make 1236992.0 of it


def batches(size: int = 8, count: int = 32, features: int = 32) -> DataLoader[Any]:
    """Inputs, fp32 targets no bf16 holds, integer labels."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, features, generator=generator)
    labels = torch.randint(0, 5, (count,), generator=generator)
    return DataLoader(TensorDataset(inputs, torch.full((count,), LARGE_TARGET), labels), batch_size=size)


class Blocks:
    """Two blocks and a head, so that the defaults have something to leave out."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(2)
        )
        self.head = nn.Linear(width, 16)
        self.kinds: dict[str, set[str]] = {}

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

    def step(self, name: str, batch: list[Tensor]) -> Tensor:
        inputs, targets, labels = batch
        assert inputs.dtype == torch.float32
        assert targets.dtype == torch.float32
        assert targets.eq(LARGE_TARGET).all()
        assert labels.dtype == torch.int64
        self.kinds.setdefault(name, set()).add(type(self.blocks[0][1]).__name__)
        loss = F.cross_entropy(self(inputs).float(), labels)
        self.log(f"{name}_loss", loss)
        return loss

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return self.step("train", batch)

    def validation_step(self, batch: list[Tensor], index: int) -> Tensor:
        return self.step("val", batch)

    def test_step(self, batch: list[Tensor], index: int) -> Tensor:
        return self.step("test", batch)

    def predict_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.step_kind = type(self.blocks[0][1]).__name__
        assert batch[1].eq(LARGE_TARGET).all()
        return self(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


trainer = LIGHTNING.trainer
