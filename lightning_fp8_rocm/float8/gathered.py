"""A weight that arrives already quantised: FP8 data and its scale under the face of an ordinary tensor."""

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from lightning_fp8_rocm.float8.quantize import Quantized, dequantize

_SAME = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}
# These ask for shape, dtype and device alone. FSDP2 makes zero gradients for weights whose storage it has freed, and to
# read those would end the process.
_LIKE = {
    getattr(torch.ops.aten, name)
    for kind in ("zeros", "ones", "empty", "full", "rand", "randn")
    for name in (f"{kind}_like", f"new_{kind}")
    if hasattr(torch.ops.aten, name)
} | {torch.ops.aten.new_empty_strided}


class GatheredWeight(Tensor):
    """An FP8 weight and its scale, for autograd a tensor of the compute dtype.

    :class:`~lightning_fp8_rocm.float8.linear.FP8Linear` multiplies the FP8 data. Whoever else reads it, as
    ``F.linear(x, layer.weight)`` or a penalty on the weight do, gets the tensor that the data stands for.

    Args:
        data: ``(N, K)`` in an FP8 dtype.
        scale: fp32, ``()`` for the tensor or ``(N, 1)`` for its rows; multiplied on the way to FP8.
        dtype: What it is to autograd, and what it is dequantised to.

    Raises:
        RuntimeError: If it is written in place: the weight that lasts is the sharded one.
    """

    _data: Tensor
    _scale: Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, data: Tensor, scale: Tensor, dtype: torch.dtype) -> "GatheredWeight":  # noqa: D102
        return torch.Tensor._make_wrapper_subclass(
            cls, data.size(), strides=data.stride(), dtype=dtype, device=data.device
        )

    def __init__(self, data: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        self._data, self._scale = data, scale

    @property
    def quantized(self) -> Quantized:
        """The FP8 data and the scale."""
        return self._data, self._scale

    @property
    def is_row_scaled(self) -> bool:
        """Whether each row has a scale of its own."""
        return self._scale.dim() == 2

    def dequantized(self) -> Tensor:
        """The ``(N, K)`` tensor that it stands for, in its dtype."""
        return dequantize(self._data, self._scale).to(self.dtype)

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["_data", "_scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], dtype: torch.dtype, size: Any, stride: Any) -> "GatheredWeight":
        return GatheredWeight(inner["_data"], inner["_scale"], dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, cls):
            # FSDP2 takes the whole of what it has gathered by `as_strided`.
            is_whole = func is torch.ops.aten.as_strided.default and (
                (tuple(args[1]), tuple(args[2]), *args[3:])
                in ((first.shape, first.stride()), (first.shape, first.stride(), 0))
            )
            if func in _SAME or is_whole:
                return cls(first._data, first._scale, first.dtype)
            if func.overloadpacket in _LIKE:
                shape = torch.empty_strided(first.shape, first.stride(), dtype=first.dtype, device=first.device)
                return func(shape, *args[1:], **kwargs)
        if func._schema.is_mutable and any(isinstance(tensor, cls) for tensor in _written(func, args, kwargs)):
            raise RuntimeError(
                f"{func} would write into a weight while it is gathered in FP8, and the value would be lost when it"
                " is sharded again. Change weights outside the module's forward, where they are sharded."
            )
        args, kwargs = pytree.tree_map_only(cls, cls.dequantized, (args, kwargs))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        scales = "row scales" if self.is_row_scaled else "one scale"
        return f"GatheredWeight({tuple(self.shape)}, {self._data.dtype}, {scales}, as {self.dtype})"


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that an operation writes, lists of tensors taken apart."""
    schema = func._schema.arguments
    given = {**dict(zip((argument.name for argument in schema), args, strict=False)), **kwargs}
    written = (argument.name for argument in schema if argument.alias_info is not None and argument.alias_info.is_write)
    return pytree.tree_leaves([given.get(name) for name in written])
