"""``lightning_fabric.Fabric(precision="fp8-rocm")``."""

from lightning_fabric.plugins.precision import Precision

from lightning_fp8_rocm.plugins.fabric import FabricPrecisionMixin
from lightning_fp8_rocm.plugins.flavour import STANDALONE


class FP8Precision(FabricPrecisionMixin, Precision):  # noqa: D101, the mixin's
    __doc__ = FabricPrecisionMixin.__doc__
    _flavour = STANDALONE
