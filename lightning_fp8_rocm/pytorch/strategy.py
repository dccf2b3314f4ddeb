"""``Trainer(strategy="fsdp2_fp8")``."""

from lightning.pytorch.strategies import ParallelStrategy

from lightning_fp8_rocm.plugins.flavour import LIGHTNING
from lightning_fp8_rocm.plugins.trainer import TrainerStrategyMixin


class FSDP2FP8Strategy(TrainerStrategyMixin, ParallelStrategy):  # noqa: D101, the mixin's
    __doc__ = TrainerStrategyMixin.__doc__
    _flavour = LIGHTNING
