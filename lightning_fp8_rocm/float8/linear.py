"""A linear layer whose three products run in FP8. Letters: see ``recipe``."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from typing_extensions import override

from lightning_fp8_rocm.float8.gathered import GatheredWeight
from lightning_fp8_rocm.float8.quantize import Quantized, pad_summed_dim, quantize, scaled_product
from lightning_fp8_rocm.float8.recipe import FP8Recipe, Operand, Product

_INPUT_DTYPES = (torch.bfloat16, torch.float32, torch.float16)


def _cast(tensor: Tensor, operand: Operand, recipe: FP8Recipe, *, row_dim: int) -> Quantized:
    return quantize(
        tensor,
        recipe.dtype(operand),
        row_dim=row_dim if operand.granularity == "row" else None,
        power_of_2=recipe.power_of_2_scales,
    )


def _cast_weight(weight: Tensor, operand: Operand, recipe: FP8Recipe, *, row_dim: int) -> Quantized:
    """A weight that was gathered in FP8 is cast already, as `gather_granularity` promised."""
    return weight.quantized if isinstance(weight, GatheredWeight) else _cast(weight, operand, recipe, row_dim=row_dim)


def _transposed(quantized: Quantized) -> Quantized:
    data, scale = quantized
    return data.t(), scale.t() if scale.dim() == 2 else scale


def _multiply(left: Quantized, right: Quantized, product: Product, recipe: FP8Recipe, out_dtype: torch.dtype) -> Tensor:
    return scaled_product(left, right, out_dtype, fast_accum=product.fast_accum, emulate=recipe.emulate)


def _output(rows: Tensor, weight: Tensor, recipe: FP8Recipe) -> Tensor:
    """``rows (M, K) @ weight (N, K).T``."""
    if recipe.output is None:
        return rows @ weight.t().to(rows.dtype)
    left = _cast(rows, recipe.output.left, recipe, row_dim=-1)
    right = _transposed(_cast_weight(weight, recipe.output.right, recipe, row_dim=-1))
    return _multiply(left, right, recipe.output, recipe, rows.dtype)


class _GradOutput:
    """``grad_output`` (M, N) as the left operand of two products: with one scale for the tensor it is cast once."""

    def __init__(self, rows: Tensor, recipe: FP8Recipe) -> None:
        self.rows = rows
        self._recipe = recipe
        self._cast_whole: dict[Operand, Quantized] = {}

    def cast(self, operand: Operand, *, row_dim: int) -> Quantized:
        if operand.granularity == "row":
            return _cast(self.rows, operand, self._recipe, row_dim=row_dim)
        if operand not in self._cast_whole:
            self._cast_whole[operand] = _cast(self.rows, operand, self._recipe, row_dim=row_dim)
        return self._cast_whole[operand]


# Two functions, so that the operands of the first product are gone when the second needs its own.


def _grad_input(grad_output: _GradOutput, weight: Tensor, recipe: FP8Recipe) -> Tensor:
    """``grad_output (M, N) @ weight (N, K)``."""
    dtype = grad_output.rows.dtype
    if recipe.grad_input is None:
        return grad_output.rows @ weight.to(dtype)
    if isinstance(weight, GatheredWeight) and weight.is_row_scaled:
        # This product sums over the rows of the weight, whose scales therefore cannot leave it. They go into the other
        # operand before that is cast: exact, since they are powers of two.
        data, scale = weight.quantized
        folded = grad_output.rows.to(torch.float32) / scale.t()
        left = _cast(folded, recipe.grad_input.left, recipe, row_dim=-1)
        return _multiply(left, (data, scale.new_ones(())), recipe.grad_input, recipe, dtype)
    left = grad_output.cast(recipe.grad_input.left, row_dim=-1)
    right = _cast_weight(weight, recipe.grad_input.right, recipe, row_dim=0)
    return _multiply(left, right, recipe.grad_input, recipe, dtype)


def _grad_weight(grad_output: _GradOutput, input: Tensor, recipe: FP8Recipe) -> Tensor:
    """``grad_output (M, N).T @ input (M, K)``."""
    dtype = grad_output.rows.dtype
    if recipe.grad_weight is None:
        return grad_output.rows.t() @ input.to(dtype)
    left_data, left_scale = grad_output.cast(recipe.grad_weight.left, row_dim=0)
    right_data, right_scale = _cast(input, recipe.grad_weight.right, recipe, row_dim=0)
    # Tokens are what this product sums over, and there may be any number of them.
    left = _transposed((pad_summed_dim(left_data), left_scale))
    return _multiply(left, (pad_summed_dim(right_data), right_scale), recipe.grad_weight, recipe, dtype)


class _NoSecondDerivative(torch.autograd.Function):
    """Hands its first argument on; its backward is an error instead of a wrong number."""

    @staticmethod
    @override
    def forward(ctx: FunctionCtx, grad: Tensor, *differentiable: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    @override
    def backward(ctx: FunctionCtx, *grads: Tensor) -> Any:
        raise RuntimeError(
            "An FP8 layer was differentiated twice (`create_graph=True`, as in a gradient penalty). FP8 products have"
            " no second derivative. Leave the layers that the penalty reaches in bf16:"
            ' FP8Precision(exclude=["<their names>"]), for instance exclude=["critic.*"].'
        )


def _once_only(grad: Tensor | None, sources: list[Tensor]) -> Tensor | None:
    return None if grad is None else _NoSecondDerivative.apply(grad, *sources)  # type: ignore[no-untyped-call]


def _autocast_is_on(tensor: Tensor) -> bool:
    device_type = tensor.device.type
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


def _as_written(tensor: Tensor) -> AbstractContextManager[object]:
    """No autocast within: it would round the dequantised operands of an emulated product to bf16."""
    return torch.autocast(tensor.device.type, enabled=False) if _autocast_is_on(tensor) else nullcontext()


class _FP8Matmul(torch.autograd.Function):
    """``input (..., K) @ weight (N, K).T -> (..., N)``, by the recipe."""

    @staticmethod
    @override
    def forward(ctx: Any, input: Tensor, weight: Tensor, recipe: FP8Recipe) -> Tensor:
        needs_grad_input, needs_grad_weight = ctx.needs_input_grad[:2]
        # The operands themselves, each only where the backward reads it: FP8 copies would be kept besides them.
        ctx.save_for_backward(input if needs_grad_weight else None, weight if needs_grad_input else None)
        ctx.recipe, ctx.input_shape, ctx.weight_shape = recipe, input.shape, weight.shape
        rows = input.reshape(-1, input.shape[-1])
        if rows.shape[0] == 0:
            return input.new_zeros(*input.shape[:-1], weight.shape[0])
        with _as_written(input):
            output = _output(rows, weight, recipe)
        # No view: autograd would forbid what may follow in place (`y += x`, `nn.ReLU(inplace=True)`).
        shape = [*input.shape[:-1], weight.shape[0]]
        return output if output.dim() == len(shape) else torch.ops.aten._unsafe_view(output, shape)

    @staticmethod
    @override
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        input, weight = ctx.saved_tensors
        grad_rows = grad_output.reshape(-1, grad_output.shape[-1])
        grad_input = grad_weight = None
        with torch.no_grad(), _as_written(grad_output):
            if grad_rows.shape[0] == 0:
                grad_input = grad_output.new_zeros(ctx.input_shape) if weight is not None else None
                grad_weight = grad_output.new_zeros(ctx.weight_shape) if input is not None else None
            else:
                shared = _GradOutput(grad_rows, ctx.recipe)
                if weight is not None:
                    grad_input = _grad_input(shared, weight, ctx.recipe).reshape(ctx.input_shape)
                if input is not None:
                    grad_weight = _grad_weight(shared, input.reshape(-1, input.shape[-1]), ctx.recipe)
        if torch.is_grad_enabled():
            sources = [t for t in (grad_output, input, weight) if t is not None]
            grad_input, grad_weight = (_once_only(grad, sources) for grad in (grad_input, grad_weight))
        return grad_input, grad_weight, None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _note_trace() -> None:
    """Runs when a layer is traced, and leaves nothing in the graph."""
    FP8Linear.traces += 1


class FP8Linear(nn.Linear):
    """An ``nn.Linear`` whose products run in FP8.

    It is made by :func:`~lightning_fp8_rocm.float8.convert.convert` from an existing layer, by changing that layer's
    class: parameters, hooks, ties and ``training`` are the same objects as before, the ``state_dict`` is that of an
    ``nn.Linear``, and :func:`~lightning_fp8_rocm.float8.convert.revert` changes the class back.

    Under autocast the input is cast to the autocast dtype, as by ``nn.Linear``. The weight is always quantised from
    the values it has, an fp32 master from fp32.

    Shape:
        Input ``(..., K)``, output ``(..., N)``, for any number of tokens, also none. K and N are multiples of 16.

    Raises:
        TypeError: If the input is not bf16, fp16 or fp32.
    """

    fp8_recipe: FP8Recipe
    traces: ClassVar[int] = 0
    """How often a compiler traced an FP8 layer of this process: compiled code notes no calls."""

    @override
    def forward(self, input: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            _note_trace()
        else:
            self.__dict__["_fp8_called"] = True  # past nn.Module.__setattr__, which costs microseconds
        if input.dtype not in _INPUT_DTYPES:  # also under autocast, which casts no others
            raise TypeError(
                f"An FP8 layer got an input of {input.dtype}; it takes torch.bfloat16, torch.float16 or torch.float32."
                ' Cast the input, or leave the layer out: FP8Precision(exclude=["<its name>"]).'
            )
        if _autocast_is_on(input):
            input = input.to(torch.get_autocast_dtype(input.device.type))
        output: Tensor = _FP8Matmul.apply(input, self.weight, self.fp8_recipe)  # type: ignore[no-untyped-call]
        return output if self.bias is None else output + self.bias.to(output.dtype)

    @override
    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, fp8={self.fp8_recipe.name}/{self.fp8_recipe.fp8_format}"
