"""``Trainer(precision="fp8-rocm")``."""

from lightning.pytorch.plugins.precision import Precision

from lightning_fp8_rocm.plugins.flavour import LIGHTNING
from lightning_fp8_rocm.plugins.trainer import TrainerPrecisionMixin


class FP8Precision(TrainerPrecisionMixin, Precision):  # noqa: D101, the mixin's
    __doc__ = TrainerPrecisionMixin.__doc__
    _flavour = LIGHTNING
