"""``Trainer(precision="fp8-rocm")``."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from torch import nn
from typing_extensions import override

from lightning_fp8_rocm.plugins import FP8PrecisionMixin
from lightning_fp8_rocm.pytorch.strategy import FSDP2FP8Strategy

_STRATEGIES = (SingleDeviceStrategy, DDPStrategy, FSDP2FP8Strategy)


class FP8Precision(FP8PrecisionMixin, Precision):  # noqa: D101, the mixin's
    __doc__ = FP8PrecisionMixin.__doc__

    @override
    def _devices_of(self, module: nn.Module) -> list[torch.device]:
        if not isinstance(module, LightningModule):
            raise TypeError(
                f"Expected a `lightning.pytorch.LightningModule`, but got {type(module).__module__}."
                f"{type(module).__qualname__}. To convert a plain module, call `lightning_fp8_rocm.convert(module)`."
            )
        strategy = module.trainer.strategy
        if not isinstance(strategy, _STRATEGIES) or isinstance(strategy, DeepSpeedStrategy):
            raise TypeError(
                f'`precision="fp8-rocm"` does not work with {type(strategy).__name__}, which would convert the layers'
                " after it has sharded or copied them. Use strategy 'auto', 'ddp' or 'fsdp2_fp8'."
            )
        others = getattr(strategy, "parallel_devices", None) or []
        return [strategy.root_device, *(device for device in others if device != strategy.root_device)]

    @override
    def _compiled_by_strategy(self, module: nn.Module) -> bool:
        assert isinstance(module, LightningModule)
        strategy = module.trainer.strategy
        return isinstance(strategy, FSDP2FP8Strategy) and strategy.compiles_on(strategy.root_device)

    @override
    @contextmanager
    def train_step_context(self) -> Generator[None, None, None]:
        for watch in self._watches:
            watch.step_begins()
        with self.forward_context():
            yield
        for watch in self._watches:
            watch.step_ended()

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(*args, **kwargs)
        for watch in self._watches:
            watch.note()  # before the user's code clears the gradients
        return result
