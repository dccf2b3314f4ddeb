"""``pytorch_lightning.Trainer(strategy="fsdp2_fp8")``."""

from pytorch_lightning.strategies import ParallelStrategy

from lightning_fp8_rocm.plugins.flavour import STANDALONE
from lightning_fp8_rocm.plugins.trainer import TrainerStrategyMixin


class FSDP2FP8Strategy(TrainerStrategyMixin, ParallelStrategy):  # noqa: D101, the mixin's
    __doc__ = TrainerStrategyMixin.__doc__
    _flavour = STANDALONE
