"""``Fabric(precision="fp8-rocm")``."""

from lightning.fabric.plugins.precision import Precision

from lightning_fp8_rocm.plugins.fabric import FabricPrecisionMixin
from lightning_fp8_rocm.plugins.flavour import LIGHTNING


class FP8Precision(FabricPrecisionMixin, Precision):  # noqa: D101, the mixin's
    __doc__ = FabricPrecisionMixin.__doc__
    _flavour = LIGHTNING
