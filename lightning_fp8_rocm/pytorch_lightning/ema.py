"""The callback ``EMA`` of ``pytorch_lightning``."""

from pytorch_lightning.callbacks import Callback

from lightning_fp8_rocm.plugins.ema import EMAMixin


class EMA(EMAMixin, Callback):  # noqa: D101, the mixin's
    __doc__ = EMAMixin.__doc__
