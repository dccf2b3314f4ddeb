"""`Fabric(precision="fp8-rocm")` on one device, under both names of Lightning."""

from importlib import import_module
from typing import Any

import pytest
import torch
from loops import FABRICS, both
from torch import nn

from lightning_fp8_rocm import FP8Linear, hardware


def plugin_of(name: str, *args: Any, **kwargs: Any) -> Any:
    room = FABRICS[name].removeprefix("lightning.")
    return import_module(f"lightning_fp8_rocm.{room}.precision").FP8Precision(*args, **kwargs)


def fabric_of(name: str, **flags: Any) -> Any:
    return import_module(FABRICS[name]).Fabric(**{"accelerator": "cpu", "devices": 1, **flags})


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))


def train(fabric: Any, steps: int = 20) -> tuple[nn.Module, list[float]]:
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


@both
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_a_fabric_loop_trains_in_fp8(name: str, recipe: str) -> None:
    plugin = plugin_of(name, recipe)
    plain, losses = train(fabric_of(name, plugins=plugin))
    assert isinstance(plain[0], FP8Linear)
    assert losses[-1] < losses[0] / 2
    assert [layer.name for layer in plugin.report.converted] == ["0", "2"]
    plugin.teardown()
    assert type(plain[0]) is nn.Linear


@both
def test_the_name_means_the_plugin(name: str) -> None:
    plain, named = train(fabric_of(name, precision="fp8-rocm"))
    assert isinstance(plain[2], FP8Linear)
    _, plugged = train(fabric_of(name, plugins=plugin_of(name)))
    assert named == plugged


def test_both_names_of_lightning_train_the_same() -> None:
    one, other = (train(fabric_of(name, precision="fp8-rocm"))[1] for name in FABRICS)
    assert one == other


@both
@pytest.mark.parametrize("by_name", [True, False])
def test_on_a_host_with_a_pretended_gpu_a_run_on_the_cpu_has_the_format_of_the_cpu(
    name: str, by_name: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(device: torch.device) -> hardware.Hardware:
        assert device.type == "cpu", f"{device} was asked, which the run does not use"
        return hardware.CPU

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(hardware, "of_device", asked)
    plugin = plugin_of(name)
    fabric = fabric_of(name, **({"precision": "fp8-rocm"} if by_name else {"plugins": [plugin]}))
    plain = model()
    fabric.setup(plain)
    assert plain[0].fp8_recipe.fp8_format == "ocp"
    assert plain[0].fp8_recipe.emulate


@both
def test_a_strategy_that_copies_the_model_is_refused_by_name(name: str) -> None:
    strategies = import_module(f"{FABRICS[name]}.strategies")
    fabric = fabric_of(name, precision="fp8-rocm")
    fabric._precision.connector.strategy = strategies.DataParallelStrategy(parallel_devices=[torch.device("cpu")])
    with pytest.raises(TypeError, match=r"does not work with DataParallelStrategy.* Use strategy 'auto', 'ddp' or"):
        fabric.setup(model())


@both
def test_model_parallel_strategy_is_refused_by_name(name: str) -> None:
    strategies = import_module(f"{FABRICS[name]}.strategies")
    strategy = strategies.ModelParallelStrategy(parallelize_fn=lambda module, mesh: module)
    fabric = fabric_of(name, precision="fp8-rocm", strategy=strategy)
    fabric._launched = True  # pretended: processes are not needed to be refused
    with pytest.raises(TypeError, match="does not work with ModelParallelStrategy"):
        fabric.setup(model())


def test_a_plugin_without_fabric_converts_for_the_devices_that_there_are() -> None:
    plugin = plugin_of("lightning")
    plain = plugin.convert_module(model())
    assert isinstance(plain[0], FP8Linear)
