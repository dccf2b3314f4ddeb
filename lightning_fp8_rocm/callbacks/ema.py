"""The callback ``EMA`` of ``lightning.pytorch``."""

from lightning.pytorch.callbacks import Callback

from lightning_fp8_rocm.plugins.ema import EMAMixin


class EMA(EMAMixin, Callback):  # noqa: D101, the mixin's
    __doc__ = EMAMixin.__doc__
