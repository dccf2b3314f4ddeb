"""`FP8Linear` against torchao bit for bit, against float64 within a derived bound, and as a citizen of autograd.

Letters: M tokens, K in_features, N out_features. ``emulate=True`` is what a CPU resolves to (dequantise and multiply);
``emulate=False`` is `torch._scaled_mm`, which the CPU build computes in a slow loop: those tests are tiny.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.config import CastConfig

from lightning_fp8_rocm.float8.convert import convert
from lightning_fp8_rocm.float8.linear import FP8Linear
from lightning_fp8_rocm.float8.recipe import RECIPE_NAMES, FP8Recipe, Operand, Product

K, N = 32, 64
BF16, FP32 = torch.bfloat16, torch.float32
# Both ways to multiply, in each format that has them on a CPU: its `torch._scaled_mm` rejects fnuz.
WAYS = [("ocp", False), ("ocp", True), ("fnuz", True)]
WAY_NAMES = ["ocp-scaled_mm", "ocp-emulated", "fnuz-emulated"]
every_recipe = pytest.mark.parametrize("recipe", RECIPE_NAMES)
every_way = pytest.mark.parametrize(("fp8_format", "emulate"), WAYS, ids=WAY_NAMES)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def varied_linear(k: int = K, n: int = N, *, bias: bool = True, dtype: torch.dtype = FP32) -> nn.Linear:
    """A layer whose rows differ in size, as after training: a fresh one has one power-of-two row scale in all."""
    layer = nn.Linear(k, n, bias=bias)
    with torch.no_grad():
        layer.weight.mul_(torch.randn(n, 1).exp())
    assert torch.exp2(torch.log2(448 / layer.weight.abs().amax(dim=1)).floor()).unique().numel() >= 4
    return layer.to(dtype)


def to_fp8(layer: nn.Module, recipe: str | FP8Recipe, *, fp8_format: str = "ocp", emulate: bool = True) -> nn.Module:
    """``layer`` itself, converted; the products by `torch._scaled_mm` if ``emulate`` is False."""
    convert(layer, recipe, fp8_format=fp8_format)
    for child in layer.modules():
        if isinstance(child, FP8Linear):
            assert child.fp8_recipe.emulate
            child.fp8_recipe = replace(child.fp8_recipe, emulate=emulate)
    return layer


def torchao_twin(layer: nn.Linear, recipe: str, *, fp8_format: str, emulate: bool) -> nn.Module:
    """torchao's layer over a copy of the parameters."""
    config = Float8LinearConfig.from_recipe_name(recipe)
    if fp8_format == "fnuz":
        fnuz = {torch.float8_e4m3fn: torch.float8_e4m3fnuz, torch.float8_e5m2: torch.float8_e5m2fnuz}
        casts = {f.name: getattr(config, f.name) for f in fields(config)}
        casts = {name: cast for name, cast in casts.items() if isinstance(cast, CastConfig)}
        config = replace(config, **{n: replace(c, target_dtype=fnuz[c.target_dtype]) for n, c in casts.items()})
    # The padding of the summed dimension is a fixed part of ours, and adds only zeros.
    config = replace(config, emulate=emulate, pad_inner_dim=not emulate)
    return convert_to_float8_training(copy.deepcopy(layer), config=config)


class Results(NamedTuple):
    output: Tensor
    grad_input: Tensor | None
    grad_weight: Tensor | None
    grad_bias: Tensor | None


def run(layer: nn.Module, x: Tensor, grad_output: Tensor) -> Results:
    """Forward and backward once, from clean gradients."""
    layer.zero_grad()
    x = x.clone().requires_grad_(x.is_floating_point())
    output = layer(x)
    output.backward(grad_output)
    return Results(
        output.detach(), x.grad, layer.weight.grad.clone(), layer.bias.grad.clone() if layer.bias is not None else None
    )


def assert_same_bits(ours: Results, theirs: Results) -> None:
    for name, a, b in zip(Results._fields, ours, theirs, strict=True):
        if a is None or b is None:
            assert a is b, name
        else:
            assert a.dtype == b.dtype, name
            # `equal` takes -0.0 for 0.0; the bits do not.
            bits = torch.int32 if a.dtype == FP32 else torch.int16
            assert torch.equal(a.contiguous().view(bits), b.contiguous().view(bits)), f"{name} differs from torchao's"


class ProductCounter(TorchDispatchMode):
    """Counts the matrix products that reach the dispatcher, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in ("mm", "addmm", "bmm", "_scaled_mm"):
            self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[Counter[str]]:
    with ProductCounter() as counter:
        yield counter.calls


# ---------------------------------------------------------------------------------------------------------------------
# torchao, bit for bit

# 1, 5, 15, 17, 32 and 33 tokens, in two to four dimensions.
SHAPES = [(1,), (5,), (3, 5), (17,), (2, 16), (1, 3, 11)]


@every_recipe
@every_way
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)) + "xK")
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize(
    ("weight_dtype", "input_dtype"), [(BF16, BF16), (FP32, FP32), (FP32, BF16)], ids=["bf16", "fp32", "bf16_over_fp32"]
)
def test_output_and_gradients_are_bit_for_bit_those_of_torchao(
    recipe, fp8_format, emulate, shape, bias, weight_dtype, input_dtype
):
    layer = varied_linear(bias=bias, dtype=weight_dtype)
    twin = torchao_twin(layer, recipe, fp8_format=fp8_format, emulate=emulate)
    to_fp8(layer, recipe, fp8_format=fp8_format, emulate=emulate)
    # Tokens of different sizes, so that the scales of rows and columns of the input differ too.
    x = (torch.randn(*shape, K) * torch.randn(*shape, 1).exp()).to(input_dtype)
    grad_output = (torch.randn(*shape, N) * torch.randn(*shape, 1).exp()).to(input_dtype)
    assert_same_bits(run(layer, x, grad_output), run(twin, x, grad_output))


@every_recipe
@every_way
def test_transposed_and_strided_inputs_give_the_bits_of_contiguous_ones(recipe, fp8_format, emulate):
    layer = to_fp8(varied_linear(dtype=BF16), recipe, fp8_format=fp8_format, emulate=emulate)
    x = torch.randn(3, K, 5, dtype=BF16).transpose(1, 2)
    grad_output = torch.randn(5, 3, 2 * N, dtype=BF16).transpose(0, 1)[..., ::2]
    assert not x.is_contiguous()
    assert not grad_output.is_contiguous()
    assert_same_bits(run(layer, x, grad_output), run(layer, x.contiguous(), grad_output.contiguous()))


# ---------------------------------------------------------------------------------------------------------------------
# torch.compile


@every_recipe
def test_compiled_equals_eager_except_for_one_rounding_of_the_biased_output(recipe):
    """Inductor fuses `product -> bf16 -> + bias -> bf16` and leaves the first rounding out; all else is equal.

    With p the fp32 product, b the bias and v = 2**-8 the half ulp of bf16 (8 significant bits), eager gives
    r(r(p) + b) and the compiled layer r(p + b). They differ by at most v |p| from the inner rounding, and v times each
    of the two outer values. In fp32 there is no inner rounding, and without a bias it is the only one.
    """
    layers = nn.ModuleDict(
        {
            "bf16": varied_linear(dtype=BF16),
            "bf16_no_bias": varied_linear(bias=False, dtype=BF16),
            "fp32": varied_linear(),
        }
    )
    to_fp8(layers, recipe)
    weights = [layer.weight for layer in layers.values()]
    inputs = [torch.randn(17, K, dtype=weight.dtype, requires_grad=True) for weight in weights]
    grads = [torch.randn(17, N, dtype=weight.dtype) for weight in weights]

    def forward(*inputs: Tensor) -> list[Tensor]:
        return [layer(x) for layer, x in zip(layers.values(), inputs, strict=True)]

    def forward_backward(forward: Callable[..., list[Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
        outputs = forward(*inputs)
        biases = [layer.bias for layer in layers.values() if layer.bias is not None]
        return outputs, list(torch.autograd.grad(outputs, [*inputs, *weights, *biases], grads))

    outputs, gradients = forward_backward(forward)
    compiled = torch.compile(forward, fullgraph=True)
    compiled_outputs, compiled_gradients = forward_backward(compiled)

    for ours, reference in zip(compiled_gradients, gradients, strict=True):
        assert torch.equal(ours, reference)
    (biased, plain, fp32), (compiled_biased, compiled_plain, compiled_fp32) = outputs, compiled_outputs
    assert torch.equal(compiled_plain, plain)
    assert torch.equal(compiled_fp32, fp32)
    v = 2.0**-8
    product = (biased.double() - layers["bf16"].bias.double()).abs() * (1 + 4 * v)
    bound = v * product + v * (biased.double().abs() + compiled_biased.double().abs())
    assert ((compiled_biased.double() - biased.double()).abs() <= bound).all()

    with torch.compiler.set_stance("fail_on_recompile"):
        again, _ = forward_backward(compiled)
    assert all(torch.equal(a, b) for a, b in zip(again, compiled_outputs, strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# float64

# (u, q, largest): half the ulp of 1, which is 2**-(mantissa bits + 1); the smallest subnormal, which is the spacing of
# all subnormals, 2**(smallest normal exponent - mantissa bits); the largest value.
ELEMENTS = {
    ("ocp", "e4m3"): (2.0**-4, 2.0**-9, 448.0),
    ("ocp", "e5m2"): (2.0**-3, 2.0**-16, 57344.0),
    ("fnuz", "e4m3"): (2.0**-4, 2.0**-10, 240.0),
    ("fnuz", "e5m2"): (2.0**-3, 2.0**-17, 57344.0),
}
EPS = 1e-12  # torchao's: a smaller amax counts as this one
HALF_ULP = {BF16: 2.0**-8, FP32: 2.0**-24}
# Spelled out, not asked of the package: for each product, (element, by row) of its left and right operand.
ROW, TENSOR = ("e4m3", True), ("e4m3", False)
TENSOR_E5M2 = ("e5m2", False)
CASTS = {
    "tensorwise": ((TENSOR, TENSOR), (TENSOR_E5M2, TENSOR), (TENSOR_E5M2, TENSOR)),
    "rowwise": ((ROW, ROW), (ROW, ROW), (ROW, ROW)),
    "rowwise_with_gw_hp": ((ROW, ROW), (ROW, TENSOR), None),
}


def half_spacing(operand: Tensor, element: str, by_row: bool, fp8_format: str, power_of_2: bool) -> Tensor:
    """Half the distance between two subnormals after the scale is divided out again: the underflow of one cast."""
    _, q, largest = ELEMENTS[fp8_format, element]
    amax = operand.abs().amax(dim=1, keepdim=True) if by_row else operand.abs().amax()
    scale = largest / amax.clamp(min=EPS)
    return q / 2 / (scale / 2 if power_of_2 else scale)  # rounding down to a power of two costs less than a factor 2


def error_bound(a: Tensor, b: Tensor, casts, *, fp8_format: str, power_of_2: bool, out_dtype) -> Tensor:
    """Derived in the test that uses it; ``a`` is (rows, summed), ``b`` (columns, summed)."""
    exact, size = (a @ b.t()).abs(), a.abs() @ b.abs().t()
    error = torch.zeros_like(size)
    if casts is not None:
        (left, a_row), (right, b_row) = casts
        u_a, u_b = ELEMENTS[fp8_format, left][0], ELEMENTS[fp8_format, right][0]
        eta_a = half_spacing(a, left, a_row, fp8_format, power_of_2).expand_as(a)
        eta_b = half_spacing(b, right, b_row, fp8_format, power_of_2).expand_as(b)
        error += (u_a + u_b + u_a * u_b) * size
        error += (1 + u_b) * eta_a @ b.abs().t() + (1 + u_a) * a.abs() @ eta_b.t() + eta_a @ eta_b.t()
    error += (a.shape[1] + 8) * 2.0**-24 * (size + error)
    error += HALF_ULP[out_dtype] * (exact + error)
    return error + 2.0**-133  # the smallest subnormal of bf16 (fp32's is smaller): the underflow of the result itself


def gaussian(x: Tensor, w: Tensor, g: Tensor) -> None:
    pass


def log_normal_rows(x: Tensor, w: Tensor, g: Tensor) -> None:
    for operand in (x, w, g):
        operand.mul_((2 * torch.randn(operand.shape[0], 1)).exp())


def outlier_rows(x: Tensor, w: Tensor, g: Tensor) -> None:
    for operand in (x, w, g):
        operand[3].mul_(1e4)


def outlier_columns(x: Tensor, w: Tensor, g: Tensor) -> None:
    for operand in (x, w, g):
        operand[:, 5].mul_(1e4)


def one_term_a_sum(x: Tensor, w: Tensor, g: Tensor) -> None:
    """Nothing averages out: this distribution comes closest to the bound, up to 0.9 of it."""
    for operand in (x, g):
        rows = torch.arange(operand.shape[0])
        values = operand.abs().amax(dim=1)
        operand.zero_()
        operand[rows, rows % operand.shape[1]] = values


def zero_row(x: Tensor, w: Tensor, g: Tensor) -> None:
    for operand in (x, w, g):
        operand[2] = 0


def zero_column(x: Tensor, w: Tensor, g: Tensor) -> None:
    for operand in (x, w, g):
        operand[:, 2] = 0


def zero_input(x: Tensor, w: Tensor, g: Tensor) -> None:
    x.zero_()


def zero_grad_output(x: Tensor, w: Tensor, g: Tensor) -> None:
    g.zero_()


def zero_weight(x: Tensor, w: Tensor, g: Tensor) -> None:
    w.zero_()


def sized(magnitude: float, which: int) -> Callable[[Tensor, Tensor, Tensor], None]:
    def distribution(*operands: Tensor) -> None:
        operands[which].mul_(magnitude)

    distribution.__name__ = f"{('input', 'weight', 'grad_output')[which]}_of_{magnitude:g}"
    return distribution


DISTRIBUTIONS = [
    gaussian,
    log_normal_rows,
    outlier_rows,
    outlier_columns,
    one_term_a_sum,
    zero_row,
    zero_column,
    zero_input,
    zero_grad_output,
    zero_weight,
    # 1e-15 is below EPS and 1e-18 so far below that the products are partly zero.
    *(sized(magnitude, which) for magnitude in (1e-18, 1e-15, 1e-10, 1e10, 1e30) for which in range(3)),
]


@every_recipe
@every_way
@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=lambda d: d.__name__)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
def test_error_against_float64_is_within_the_derived_bound(recipe, fp8_format, emulate, distribution, dtype):
    """``|y - ref| <= (2u + u^2) |x||w|`` plus underflow, elementwise, for each of the three products.

    Convention: u is half the ulp of 1, the largest relative error of rounding to nearest: 2**-4 with the 3 mantissa
    bits of e4m3, 2**-3 with the 2 of e5m2, 2**-8 for bf16, 2**-24 for fp32.

    1. *Cast.* With s the scale, x^ = fl8(s x) / s = x (1 + d) + h. For s x in the normal range |d| <= u and h = 0.
       Below it fl8 rounds to multiples of the smallest subnormal q: d = 0 and |h| <= q / (2 s) =: eta. s is largest /
       amax, or down to half of that where it is rounded to a power of two; an amax below EPS counts as EPS. Nothing
       saturates: s amax <= largest up to 2**-23, which rounds to largest.
    2. *Product.* |x^ w^ - x w| <= (u_x + u_w + u_x u_w) |x||w| + (1 + u_w) |w| eta_x + (1 + u_x) |x| eta_w
       + eta_x eta_w, summed over the summed dimension; with both u equal the first term is (2u + u^2) |x||w|.
    3. *Accumulation in fp32* of n terms: (n + 8) 2**-24 of the sum of |x^||w^|, the 8 for the fp32 scalings before and
       after.
    4. *Result*: one rounding to the output dtype. `torch._scaled_mm` writes no fp32 under row scales: there the value
       is rounded to bf16 and only then scaled, so that an fp32 result carries bf16's half ulp. The scales of the row
       recipes are powers of two, so scaling after that rounding adds none.

    `rowwise_with_gw_hp` casts nothing in grad_weight: steps 3 and 4 only.
    """
    m, k, n = (17, 32, 48) if not emulate else (33, 64, 48)
    x, w, g = torch.randn(m, k), torch.randn(n, k), torch.randn(m, n)
    w.mul_(torch.randn(n, 1).exp())
    distribution(x, w, g)
    x, w, g = x.to(dtype), w.to(dtype), g.to(dtype)
    layer = nn.Linear(k, n, bias=False, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(w)
    results = run(to_fp8(layer, recipe, fp8_format=fp8_format, emulate=emulate), x, g)

    x, w, g = x.double(), w.double(), g.double()
    operands = ((x, w), (g, w.t()), (g.t(), x.t()))
    for name, (a, b), casts, result in zip(Results._fields, operands, CASTS[recipe], results, strict=False):
        rounded_to_bf16 = not emulate and casts is not None and any(by_row for _, by_row in casts)
        bound = error_bound(
            a,
            b,
            casts,
            fp8_format=fp8_format,
            power_of_2=recipe != "tensorwise",
            out_dtype=BF16 if rounded_to_bf16 else dtype,
        )
        used = ((result.double() - a @ b.t()).abs() / bound).max()
        assert used <= 1, f"{name}: {used:.3f} times the bound"


@every_recipe
@every_way
def test_rows_and_tensors_of_zeros_give_exact_zeros(recipe, fp8_format, emulate):
    layer = to_fp8(varied_linear(bias=False), recipe, fp8_format=fp8_format, emulate=emulate)
    x, g = torch.randn(17, K), torch.randn(17, N)
    x[4], g[6], g[:, 9] = 0, 0, 0
    results = run(layer, x, g)
    assert not results.output[4].any()
    assert not results.grad_input[6].any()
    assert not results.grad_weight[9].any()
    assert not run(layer, torch.zeros_like(x), g).output.any()
    assert not any(gradient.any() for gradient in run(layer, x, torch.zeros_like(g))[1:3])


@every_way
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_output_is_exactly_zero_up_to_an_amax_of_half_the_smallest_subnormal_over_the_scale_of_eps(
    recipe, fp8_format, emulate
):
    """Below EPS = 1e-12 the scale grows no more: it stays largest / EPS, 448e12 (ocp) or 240e12 (fnuz).

    A value x is cast to zero if s x <= q / 2, a tie going to the even side, zero. So the output is exactly zero up to

    * tensorwise: 2**-10 / 448e12 = 2.18e-18 (ocp), 2**-11 / 240e12 = 2.03e-18 (fnuz);
    * rowwise: s is rounded down to 2**48 and 2**47, so 2**-58 = 3.47e-18 in both formats;

    and is not zero above. So nothing vanishes from an amax of 1e-12 down to 3.5e-18, it only loses bits.
    """
    last_zero = {
        ("tensorwise", "ocp"): 2.0**-10 / 448e12,
        ("tensorwise", "fnuz"): 2.0**-11 / 240e12,
        ("rowwise", "ocp"): 2.0**-10 / 2.0**48,
        ("rowwise", "fnuz"): 2.0**-11 / 2.0**47,
    }[recipe, fp8_format]
    layer = nn.Linear(K, N, bias=False)
    nn.init.ones_(layer.weight)
    to_fp8(layer, recipe, fp8_format=fp8_format, emulate=emulate)
    assert not layer(torch.full((16, K), last_zero * (1 - 1e-6))).any()
    assert (layer(torch.full((16, K), last_zero * (1 + 1e-6))) > 0).all()


@every_recipe
@pytest.mark.parametrize(("fp8_format", "largest"), [("ocp", 448.0), ("fnuz", 240.0)])
def test_a_row_of_equal_values_is_exact_in_both_formats_since_the_scale_is_of_the_largest_value(
    recipe, fp8_format, largest
):
    """Every value is the amax; the tensor scale casts it to the largest value, and 2**k is exact under row scales."""
    layer = nn.Linear(K, N, bias=False)
    nn.init.constant_(layer.weight, 0.5)
    to_fp8(layer, recipe, fp8_format=fp8_format)
    x = torch.full((16, K), 8.0)
    assert torch.equal(layer(x), torch.full((16, N), K * 4.0))
    assert torch.finfo(layer.fp8_recipe.dtype(Operand())).max == largest


# ---------------------------------------------------------------------------------------------------------------------
# NaN and infinity


@every_recipe
@every_way
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
def test_nan_and_infinity_reach_every_element_that_depends_on_them(recipe, fp8_format, emulate, bad, dtype):
    layer = varied_linear(dtype=dtype)
    clean = to_fp8(copy.deepcopy(layer), recipe, fp8_format=fp8_format, emulate=emulate)
    x, g = torch.randn(17, K, dtype=dtype), torch.randn(17, N, dtype=dtype)
    reference = run(clean, x, g)
    by_row = recipe != "tensorwise"

    def poisoned(tensor: Tensor, row: int, column: int) -> Tensor:
        tensor = tensor.clone()
        tensor[row, column] = bad
        return tensor

    of_input = run(clean, poisoned(x, 3, 7), g)
    assert not of_input.output[3].isfinite().any()
    assert not of_input.grad_weight[:, 7].isfinite().any()
    assert torch.equal(of_input.grad_input, reference.grad_input)  # it does not depend on the input

    of_grad_output = run(clean, x, poisoned(g, 3, 7))
    assert not of_grad_output.grad_input[3].isfinite().any()
    assert not of_grad_output.grad_weight[7].isfinite().any()
    assert not of_grad_output.grad_bias[7].isfinite()

    with torch.no_grad():
        layer.weight[3, 7] = bad
    of_weight = run(to_fp8(layer, recipe, fp8_format=fp8_format, emulate=emulate), x, g)
    assert not of_weight.output[:, 3].isfinite().any()
    assert not of_weight.grad_input[:, 7].isfinite().any()
    assert torch.equal(of_weight.grad_weight, reference.grad_weight)

    if by_row:  # one row has one scale: the others are what they were
        others = torch.arange(17) != 3
        assert torch.equal(of_input.output[others], reference.output[others])
        assert torch.equal(of_grad_output.grad_input[others], reference.grad_input[others])


# ---------------------------------------------------------------------------------------------------------------------
# Any number of tokens


@every_recipe
@every_way
@pytest.mark.parametrize("shape", [(), (1,), (5,), (15,), (17,), (33,), (2, 3, 5)])
def test_any_token_count_gives_the_shapes_and_dtypes_of_an_nn_linear(recipe, fp8_format, emulate, shape):
    linear = varied_linear(dtype=BF16)
    layer = to_fp8(copy.deepcopy(linear), recipe, fp8_format=fp8_format, emulate=emulate)
    x, g = torch.randn(*shape, K, dtype=BF16), torch.randn(*shape, N, dtype=BF16)
    for ours, theirs in zip(run(layer, x, g), run(linear, x, g), strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        # Rough by intent, the bound is tested above: the error of a sum of n terms is a few percent of its norm.
        assert (ours - theirs).float().norm() <= 0.15 * theirs.float().norm()


@every_recipe
@every_way
@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
def test_an_empty_batch_gives_what_an_nn_linear_gives_and_gradients_of_zeros(recipe, fp8_format, emulate, shape, bias):
    linear = varied_linear(bias=bias)
    layer = to_fp8(copy.deepcopy(linear), recipe, fp8_format=fp8_format, emulate=emulate)
    x, g = torch.empty(*shape, K), torch.empty(*shape, N)
    ours, theirs = run(layer, x, g), run(linear, x, g)
    assert_same_bits(ours, theirs)
    assert ours.grad_input.shape == x.shape
    assert ours.grad_weight.shape == (N, K)
    assert not ours.grad_weight.any()
    assert (ours.grad_bias is not None) == bias


def test_an_empty_batch_leaves_a_frozen_weight_without_gradient():
    layer = to_fp8(varied_linear(), "tensorwise")
    layer.weight.requires_grad_(False)
    x = torch.empty(0, K, requires_grad=True)
    layer(x).sum().backward()
    assert layer.weight.grad is None
    assert x.grad.shape == (0, K)
    assert not layer.bias.grad.any()


# ---------------------------------------------------------------------------------------------------------------------
# What is computed and what is kept


@pytest.mark.parametrize(
    ("frozen_weight", "input_grad", "expected"),
    [
        (False, True, {"tensorwise": 3, "rowwise": 3, "rowwise_with_gw_hp": 2}),
        (True, True, {"tensorwise": 2, "rowwise": 2, "rowwise_with_gw_hp": 2}),
        (False, False, {"tensorwise": 2, "rowwise": 2, "rowwise_with_gw_hp": 1}),
        (True, False, {"tensorwise": 1, "rowwise": 1, "rowwise_with_gw_hp": 1}),
    ],
    ids=["all", "frozen_weight", "input_without_gradient", "only_the_bias_trained"],
)
@every_recipe
def test_only_the_products_that_somebody_needs_are_computed(recipe, frozen_weight, input_grad, expected):
    layer = to_fp8(varied_linear(dtype=BF16), recipe, emulate=False)
    layer.weight.requires_grad_(not frozen_weight)
    x = torch.randn(5, K, dtype=BF16, requires_grad=input_grad)
    with counted() as calls:
        layer(x).sum().backward()
    # The one product that is not FP8 is grad_weight of `rowwise_with_gw_hp`.
    high_precision = 1 if recipe == "rowwise_with_gw_hp" and not frozen_weight else 0
    assert calls == Counter(_scaled_mm=expected[recipe], mm=high_precision)
    assert (layer.weight.grad is None) == frozen_weight
    assert (x.grad is None) == (not input_grad)


def test_without_gradient_only_the_output_is_computed_and_nothing_is_saved():
    layer = to_fp8(varied_linear(dtype=BF16), "tensorwise", emulate=False)
    with torch.no_grad(), counted() as calls, saved() as kept:
        layer(torch.randn(5, K, dtype=BF16))
    assert calls == {"_scaled_mm": 1}
    assert kept == []


@contextmanager
def saved() -> Iterator[list[Tensor]]:
    """Every tensor that autograd keeps for the backward."""
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


def nodes(node: torch.autograd.graph.Node | None) -> Iterator[torch.autograd.graph.Node]:
    """The backward graph from one node on."""
    if node is not None:
        yield node
        for following, _ in node.next_functions:
            yield from nodes(following)


@every_recipe
@pytest.mark.parametrize("frozen_weight", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("input_grad", [False, True], ids=["first_layer", "inner_layer"])
@pytest.mark.parametrize("shape", [(16,), (3, 5)])
def test_input_and_weight_are_saved_once_and_only_where_the_backward_reads_them(
    recipe, frozen_weight, input_grad, shape
):
    layer = to_fp8(varied_linear(), recipe)
    layer.weight.requires_grad_(not frozen_weight)
    x = torch.randn(*shape, K, requires_grad=input_grad)
    with saved() as kept:
        output = layer(x)
    expected = [] if frozen_weight else [x]
    expected += [layer.weight] if input_grad else []
    assert sum(tensor.nbytes for tensor in kept) == sum(tensor.nbytes for tensor in expected)
    assert {tensor.data_ptr() for tensor in kept} == {tensor.data_ptr() for tensor in expected}
    if expected:  # nor is a tensor kept past autograd's eyes, on the node itself
        (node,) = (node for node in nodes(output.grad_fn) if "FP8Matmul" in node.name())
        assert {type(value) for value in vars(node).values()} == {FP8Recipe, torch.Size}


def test_autocast_saves_the_cast_input_and_the_master_weight_and_nothing_else():
    layer = to_fp8(varied_linear(), "tensorwise")
    x = torch.randn(16, K, requires_grad=True)
    with saved() as kept, torch.autocast("cpu", BF16):
        layer(x)
    # 2 bytes an element of the input, 4 of the weight: no bf16 copy of it.
    assert sum(tensor.nbytes for tensor in kept) == 2 * x.numel() + 4 * layer.weight.numel()


# ---------------------------------------------------------------------------------------------------------------------
# The graph a second time


@every_recipe
@every_way
def test_a_second_backward_through_a_retained_graph_gives_the_same_gradients(recipe, fp8_format, emulate):
    layer = to_fp8(varied_linear(), recipe, fp8_format=fp8_format, emulate=emulate)
    x, g = torch.randn(17, K, requires_grad=True), torch.randn(17, N)
    output = layer(x)
    wanted = (x, layer.weight, layer.bias)
    first = torch.autograd.grad(output, wanted, g, retain_graph=True)
    second = torch.autograd.grad(output, wanted, g)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@every_recipe
def test_a_first_derivative_under_create_graph_is_the_plain_one(recipe):
    layer = to_fp8(varied_linear(), recipe)
    x, g = torch.randn(17, K, requires_grad=True), torch.randn(17, N)
    wanted = (x, layer.weight, layer.bias)
    plain = torch.autograd.grad(layer(x), wanted, g)
    graphed = torch.autograd.grad(layer(x), wanted, g, create_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(graphed, plain, strict=True))
    assert graphed[0].requires_grad
    assert graphed[1].requires_grad


@every_recipe
@pytest.mark.parametrize(
    ("of", "frozen_weight"),
    [("input", False), ("input", True), ("weight", False)],
    ids=["input", "input_of_a_frozen_layer", "weight"],
)
@pytest.mark.parametrize("empty", [False, True], ids=["5_tokens", "no_tokens"])
def test_a_second_derivative_is_refused_by_an_error_that_names_exclude(recipe, of, frozen_weight, empty):
    layer = to_fp8(varied_linear(), recipe)
    layer.weight.requires_grad_(not frozen_weight)
    x = torch.randn(0 if empty else 5, K, requires_grad=True)
    loss = layer(x).square().sum()
    (gradient,) = torch.autograd.grad(loss, x if of == "input" else layer.weight, create_graph=True)
    with pytest.raises(RuntimeError, match=r"differentiated twice.*exclude="):
        gradient.square().sum().backward()


def test_a_gradient_penalty_over_a_converted_layer_in_the_middle_is_refused_too():
    critic = nn.Sequential(nn.Linear(K, K), nn.Tanh(), nn.Linear(K, N), nn.Tanh(), nn.Linear(N, 1))
    to_fp8(critic, "tensorwise").requires_grad_(True)
    assert isinstance(critic[2], FP8Linear)
    x = torch.randn(5, K, requires_grad=True)
    (gradient,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="exclude"):
        (gradient.norm(dim=1) - 1).square().mean().backward()


# ---------------------------------------------------------------------------------------------------------------------
# Dtypes


@every_recipe
@every_way
@pytest.mark.parametrize("backward_inside", [False, True], ids=["backward_outside", "backward_inside"])
def test_autocast_equals_casting_the_input_and_keeps_master_gradients_in_fp32(
    recipe, fp8_format, emulate, backward_inside
):
    """Autocast must not reach into the layer: emulation multiplies in fp32, where bf16 has no room for x^ = fl8 / s."""
    layer = to_fp8(varied_linear(), recipe, fp8_format=fp8_format, emulate=emulate)
    x, g = torch.randn(17, K, requires_grad=True), torch.randn(17, N, dtype=BF16)
    by_hand = run(layer, x.detach().to(BF16), g)
    layer.zero_grad()
    with torch.autocast("cpu", BF16):
        output = layer(x)
    with torch.autocast("cpu", BF16, enabled=backward_inside):
        output.backward(g)
    assert output.dtype == BF16
    assert x.grad.dtype == layer.weight.grad.dtype == layer.bias.grad.dtype == FP32
    assert torch.equal(output, by_hand.output)
    assert torch.equal(x.grad, by_hand.grad_input.float())
    assert torch.equal(layer.weight.grad, by_hand.grad_weight)
    assert torch.equal(layer.bias.grad, by_hand.grad_bias)


def test_an_fp32_weight_is_quantised_from_fp32_also_under_autocast():
    """1 + 2**-4 is the tie between the e4m3 neighbours 1 and 1.125 and goes to the even one, 1; 2**-20 more does not.

    bf16 holds no 2**-20 beside 1: a weight that was rounded to it first would come out as 1.
    """
    layer = nn.Linear(16, 16, bias=False)
    with torch.no_grad():
        layer.weight.fill_(1 + 2.0**-4 + 2.0**-20)
        layer.weight[:, 0] = 1.75  # the amax: 448 / 1.75 is the power of two 256
    to_fp8(layer, "rowwise")
    x = torch.zeros(1, 16)
    x[0, 1] = 1.0
    with torch.autocast("cpu", BF16):
        assert torch.equal(layer(x), torch.full((1, 16), 1.125, dtype=BF16))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.int32, torch.bool, torch.complex64])
def test_an_input_of_a_dtype_that_fp8_does_not_take_is_a_type_error_that_names_exclude(dtype):
    layer = to_fp8(varied_linear(), "tensorwise")
    with pytest.raises(TypeError, match=rf"{dtype}.*exclude="):
        layer(torch.ones(5, K).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_autocast_casts_no_input_that_it_would_not_cast_for_an_nn_linear(dtype):
    x = torch.ones(5, K).to(dtype)
    linear = varied_linear()
    layer = to_fp8(copy.deepcopy(linear), "tensorwise")
    with torch.autocast("cpu", BF16):
        with pytest.raises(RuntimeError, match="dtype"):
            linear(x)
        with pytest.raises(TypeError, match="exclude"):
            layer(x)


def test_fp16_inputs_are_multiplied_too():
    layer = to_fp8(varied_linear(dtype=torch.float16), "tensorwise")
    results = run(layer, torch.randn(5, K).half(), torch.randn(5, N).half())
    assert all(result.dtype == torch.float16 and result.isfinite().all() for result in results)


def test_a_product_left_out_of_a_recipe_is_that_of_an_nn_linear():
    e4m3 = Product(Operand(), Operand())
    linear = varied_linear(bias=False)
    x, g = torch.randn(17, K), torch.randn(17, N)
    exact = run(linear, x, g)
    for name in ("output", "grad_input", "grad_weight"):
        recipe = FP8Recipe(**{"output": e4m3, "grad_input": e4m3, "grad_weight": e4m3, name: None})
        results = run(to_fp8(copy.deepcopy(linear), recipe), x, g)
        for field in ("output", "grad_input", "grad_weight"):
            error = (getattr(results, field) - getattr(exact, field)).norm() / getattr(exact, field).norm()
            # e4m3 leaves some 3 % on Gaussian operands, fp32 1e-7: nothing lies between.
            assert (error < 1e-6) == (field == name), f"{field} with {name}=None: relative error {error}"


def test_a_recipe_may_cast_the_grad_output_of_its_two_products_to_different_elements():
    e4m3, e5m2 = Product(Operand(), Operand()), Product(Operand(element="e5m2"), Operand())
    x, g = torch.randn(17, K), torch.randn(17, N)
    linear = varied_linear(bias=False)

    def gradients(grad_input: Product, grad_weight: Product) -> tuple[Tensor, Tensor]:
        recipe = FP8Recipe(output=e4m3, grad_input=grad_input, grad_weight=grad_weight)
        return run(to_fp8(copy.deepcopy(linear), recipe), x, g)[1:3]

    mixed, of_e5m2, of_e4m3 = gradients(e5m2, e4m3), gradients(e5m2, e5m2), gradients(e4m3, e4m3)
    assert not torch.equal(of_e5m2[1], of_e4m3[1])
    assert torch.equal(mixed[0], of_e5m2[0])
    assert torch.equal(mixed[1], of_e4m3[1])


def test_the_layer_says_its_recipe_and_format():
    layer = to_fp8(varied_linear(), "rowwise", fp8_format="fnuz")
    assert repr(layer) == f"FP8Linear(in_features={K}, out_features={N}, bias=True, fp8=rowwise/fnuz)"


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 32), (2, 3, 32), (0, 32)])
def test_the_output_may_be_changed_in_place(shape: tuple[int, ...], bias: bool) -> None:
    layer = nn.Linear(32, 32, bias=bias)
    convert(layer, "tensorwise")
    input = torch.randn(shape)
    expected = torch.relu(layer(input) + 1)
    output = layer(input)
    output += 1
    torch.relu_(output)
    assert torch.equal(output, expected)
    grads = [torch.autograd.grad(y.sum(), layer.weight)[0] for y in (output, expected)]
    assert torch.equal(*grads)
