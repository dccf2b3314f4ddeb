"""``Fabric(precision="fp8-rocm")``."""

from typing import Any

import torch
from lightning.fabric.plugins.precision import Precision
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from lightning_fp8_rocm.plugins.precision import FP8PrecisionMixin


class FP8Precision(FP8PrecisionMixin, Precision):  # noqa: D101, the mixin's
    __doc__ = FP8PrecisionMixin.__doc__

    @override
    def _devices_of(self, module: nn.Module) -> list[torch.device]:
        # Fabric converts before it moves, and does not tell its precision where to.
        if not torch.cuda.is_available():
            return [torch.device("cpu")]
        return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]

    @override
    def convert_output(self, data: Any) -> Any:
        # As Fabric's own mixed precision: the loss that follows is computed in the default dtype.
        default = torch.get_default_dtype()
        return tree_map_only(Tensor, lambda t: t.to(default) if t.is_floating_point() else t, data)

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(*args, **kwargs)
        for watch in self._watches:
            watch.step_ended()
            watch.note()
            watch.step_begins()
        return result
