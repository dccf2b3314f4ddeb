"""``lightning_fabric.Fabric(strategy="fsdp2_fp8")``."""

from lightning_fabric.strategies.parallel import ParallelStrategy

from lightning_fp8_rocm.plugins.fabric import FabricStrategyMixin
from lightning_fp8_rocm.plugins.flavour import STANDALONE


class FSDP2FP8Strategy(FabricStrategyMixin, ParallelStrategy):  # noqa: D101, the mixin's
    __doc__ = FabricStrategyMixin.__doc__
    _flavour = STANDALONE
