import lightning as L
import pytest
import torch
from torch import nn

from lightning_fp8_rocm import FP8Linear
from lightning_fp8_rocm.fabric.precision import FP8Precision


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))


def train(fabric: L.Fabric, steps: int = 20) -> tuple[nn.Module, list[float]]:
    plain = model()
    module, optimizer = fabric.setup(plain, torch.optim.AdamW(plain.parameters(), 1e-2))
    inputs, labels = torch.randn(17, 32, generator=torch.Generator().manual_seed(1)), torch.arange(17) % 16
    losses = []
    for _ in range(steps):
        output = module(inputs)
        assert output.dtype == torch.float32
        loss = nn.functional.cross_entropy(output, labels)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return plain, losses


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_a_fabric_loop_trains_in_fp8(recipe: str) -> None:
    plugin = FP8Precision(recipe)
    plain, losses = train(L.Fabric(accelerator="cpu", devices=1, plugins=plugin))
    assert isinstance(plain[0], FP8Linear)
    assert losses[-1] < losses[0] / 2
    assert [layer.name for layer in plugin.report.converted] == ["0", "2"]
    plugin.teardown()
    assert type(plain[0]) is nn.Linear


def test_the_name_means_the_plugin() -> None:
    fabric = L.Fabric(accelerator="cpu", devices=1, precision="fp8-rocm")
    plain, named = train(fabric)
    assert isinstance(plain[2], FP8Linear)
    _, plugged = train(L.Fabric(accelerator="cpu", devices=1, plugins=FP8Precision()))
    assert named == plugged
