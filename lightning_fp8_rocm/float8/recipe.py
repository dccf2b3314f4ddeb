"""Which operand of the three products of a linear layer is cast to FP8, and how it is scaled.

Letters, here and in the whole package: M tokens, K in_features, N out_features.

=============== ============================== ==================== ====================
product         of                             left operand (rows)  right operand (rows)
=============== ============================== ==================== ====================
``output``      ``(M, K) @ (K, N) -> (M, N)``  input (a token)      weight (an output feature)
``grad_input``  ``(M, N) @ (N, K) -> (M, K)``  grad_output (token)  weight (an input feature)
``grad_weight`` ``(N, M) @ (M, K) -> (N, K)``  grad_output (output  input (an input feature)
                                               feature)
=============== ============================== ==================== ====================

A "row" is what one scale serves under row scaling: always a slice along the dimension over which the product sums.

This module imports no torchao: constructing a recipe must not ask the GPU anything. Annotations are evaluated here and
in ``plugins``, but for the quoted ones: for postponed annotations jsonargparse would run the ``TYPE_CHECKING`` block.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from lightning_fp8_rocm.hardware import FP8Format

if TYPE_CHECKING:
    from torchao.float8 import Float8LinearConfig

RecipeName = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]
RECIPE_NAMES: tuple[RecipeName, ...] = get_args(RecipeName)

Granularity = Literal["tensor", "row"]
Element = Literal["e4m3", "e5m2"]

_DTYPES: dict[tuple[FP8Format, Element], torch.dtype] = {
    ("ocp", "e4m3"): torch.float8_e4m3fn,
    ("ocp", "e5m2"): torch.float8_e5m2,
    ("fnuz", "e4m3"): torch.float8_e4m3fnuz,
    ("fnuz", "e5m2"): torch.float8_e5m2fnuz,
}
_MEANING = {dtype: key for key, dtype in _DTYPES.items()}


def choice_error(owner: str, argument: str, value: object, allowed: Sequence[object], hint: str = "") -> ValueError:
    """The error for a value that is none of the allowed."""
    choices = ", ".join(repr(choice) for choice in allowed)
    return ValueError(f"Expected argument `{argument}` of {owner} to be one of {choices}, but got {value!r}.{hint}")


def _check_choice(owner: str, argument: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise choice_error(owner, argument, value, allowed)


def check_patterns(owner: str, argument: str, patterns: object) -> tuple[str, ...] | None:
    """Patterns of layer names as a tuple; one string is one pattern, None is none given.

    >>> check_patterns("convert", "include", "blocks.*")
    ('blocks.*',)
    """
    if patterns is None:
        return None
    listed = (patterns,) if isinstance(patterns, str) else patterns
    if not isinstance(listed, list | tuple) or not listed or not all(isinstance(pattern, str) for pattern in listed):
        raise TypeError(
            f"Expected argument `{argument}` of {owner} to be None, a pattern of layer names like 'decoder.*', or"
            f" a list of them with at least one, but got {patterns!r}."
        )
    return tuple(listed)


def fp8_dtype(fp8_format: FP8Format, element: Element) -> torch.dtype:
    """The torch dtype of an element format in one of the two families.

    ``"ocp"`` is what MI350, RDNA4 and NVIDIA multiply (largest e4m3 value 448), ``"fnuz"`` what MI300 multiplies
    (largest e4m3 value 240). Source: OCP 8-bit Floating Point Specification 1.0; AMD CDNA3 ISA, section 6.

    >>> torch.finfo(fp8_dtype("ocp", "e4m3")).max, torch.finfo(fp8_dtype("fnuz", "e4m3")).max
    (448.0, 240.0)
    """
    return _DTYPES[fp8_format, element]


@dataclass(frozen=True)
class Operand:
    """How one operand of a product is cast.

    Args:
        granularity: ``"tensor"``: one scale for the whole operand. ``"row"``: one scale for each slice along the
            dimension that the product sums over.
        element: ``"e4m3"`` (3 mantissa bits) or ``"e5m2"`` (2 mantissa bits, larger range).
    """

    granularity: Granularity = "tensor"
    element: Element = "e4m3"

    def __post_init__(self) -> None:
        _check_choice("Operand", "granularity", self.granularity, get_args(Granularity))
        _check_choice("Operand", "element", self.element, get_args(Element))


@dataclass(frozen=True)
class Product:
    """How one of the three products is computed in FP8.

    Args:
        left: The cast of the left operand.
        right: The cast of the right operand.
        fast_accum: Whether NVIDIA's tensor cores may accumulate in less than fp32; AMD's matrix cores always
            accumulate in fp32 and ignore it.
    """

    left: Operand
    right: Operand
    fast_accum: bool = False

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            if not isinstance(getattr(self, name), Operand):
                raise TypeError(
                    f"Expected argument `{name}` of Product to be an `Operand`, but got {getattr(self, name)!r}."
                )


@dataclass(frozen=True)
class FP8Recipe:
    """The numerics of an FP8 linear layer: for each of its three products two casts, or ``None`` for no FP8.

    A product that is ``None`` runs in the dtype of the layer's input.

    Args:
        output: The product ``input @ weight.T``.
        grad_input: The product ``grad_output @ weight``.
        grad_weight: The product ``grad_output.T @ input``.
        power_of_2_scales: Round every scale down to a power of two, so that scaling itself adds no rounding error.
        fp8_format: ``"ocp"`` or ``"fnuz"``; ``"auto"`` is replaced at conversion by what the hardware multiplies.
        emulate: Dequantise and multiply, for hardware that cannot multiply the format. Decided at conversion.
        name: What reports call it.

    Raises:
        ValueError: If no product is in FP8, or a value is not one of the allowed.

    Example:
        >>> e4m3 = Operand("row", "e4m3")
        >>> recipe = FP8Recipe(output=Product(e4m3, e4m3), grad_input=Product(e4m3, e4m3), grad_weight=None)
        >>> recipe.row_scaled
        True
    """

    output: Product | None
    grad_input: Product | None
    grad_weight: Product | None
    power_of_2_scales: bool = False
    fp8_format: FP8Format | Literal["auto"] = "auto"
    emulate: bool = False
    name: str = "custom"

    def __post_init__(self) -> None:
        for name in ("output", "grad_input", "grad_weight"):
            product = getattr(self, name)
            if product is not None and not isinstance(product, Product):
                raise TypeError(
                    f"Expected argument `{name}` of FP8Recipe to be a `Product` or None, but got {product!r}."
                )
        if not any(self.products):
            raise ValueError(
                "FP8Recipe(output=None, grad_input=None, grad_weight=None) computes nothing in FP8. Give at least one"
                ' product, or train without this recipe (`precision="bf16-mixed"`).'
            )
        _check_choice("FP8Recipe", "fp8_format", self.fp8_format, ("auto", *get_args(FP8Format)))

    @property
    def products(self) -> tuple[Product | None, Product | None, Product | None]:
        """``(output, grad_input, grad_weight)``."""
        return self.output, self.grad_input, self.grad_weight

    @property
    def row_scaled(self) -> bool:
        """Whether any operand has one scale a row."""
        return any("row" in (p.left.granularity, p.right.granularity) for p in self.products if p is not None)

    @property
    def gather_granularity(self) -> Granularity | None:
        """How the weight can be scaled before it travels between ranks; None where it must travel in bf16.

        The bytes that arrive are the right operand of two products, so both must want them. ``"tensor"``: both cast the
        weight alike. ``"row"``: the output product wants one power-of-two scale a row, and the other product takes the
        same bytes, with the scales folded into ``grad_output``.
        """
        if self.output is None or self.grad_input is None:
            return None
        ours, other = self.output.right, self.grad_input.right
        if ours.element != other.element:
            return None
        if ours.granularity == "row":
            return "row" if self.power_of_2_scales else None
        return "tensor" if other.granularity == "tensor" else None

    def dtype(self, operand: Operand) -> torch.dtype:
        """The torch dtype to which ``operand`` is cast; the format must have been resolved."""
        if self.fp8_format == "auto":
            raise RuntimeError(f"The FP8 format of recipe {self.name!r} has not been resolved; convert() does that.")
        return fp8_dtype(self.fp8_format, operand.element)

    @classmethod
    def named(cls, name: RecipeName) -> "FP8Recipe":
        """One of torchao's recipes by its name, in the format still to be resolved.

        Raises:
            ValueError: If torchao has no such recipe, or this package does not offer it.
        """
        _check_choice("FP8Recipe.named", "name", name, RECIPE_NAMES)
        from torchao.float8 import Float8LinearConfig

        return replace(cls.from_torchao(Float8LinearConfig.from_recipe_name(name)), name=name, fp8_format="auto")

    @classmethod
    def from_torchao(cls, config: "Float8LinearConfig") -> "FP8Recipe":
        """The recipe that gives bit for bit what torchao's ``Float8Linear`` gives under ``config``.

        Raises:
            ValueError: If ``config`` sets a field which an argument of ours decides
                (``enable_fsdp_float8_all_gather``, ``pad_inner_dim``, ``emulate``), or mixes OCP and fnuz dtypes.
        """
        for field, ours in (
            ("enable_fsdp_float8_all_gather", "`FSDP2FP8Strategy(fp8_all_gather=...)` decides that"),
            ("pad_inner_dim", "`FP8Linear` pads the one product that needs it by itself"),
            ("emulate", '`FP8Precision(on_unsupported="emulate")` decides that, and a CPU always emulates'),
        ):
            if getattr(config, field):
                raise ValueError(
                    f"Float8LinearConfig({field}=True) contradicts lightning_fp8_rocm: {ours}. Leave `{field}` False."
                )
        formats: set[FP8Format] = set()

        def operand(cast: Any) -> Operand | None:
            if cast.scaling_type.value == "disabled":
                return None
            if cast.target_dtype not in _MEANING:
                known = ", ".join(str(dtype) for dtype in _MEANING)
                raise ValueError(f"Float8LinearConfig casts to {cast.target_dtype}, which is none of {known}.")
            fp8_format, element = _MEANING[cast.target_dtype]
            formats.add(fp8_format)
            return Operand("tensor" if cast.scaling_granularity.value == "tensorwise" else "row", element)

        def product(left: Any, right: Any, gemm: Any) -> Product | None:
            a, b = operand(left), operand(right)
            return Product(a, b, gemm.use_fast_accum) if a is not None and b is not None else None

        products = (
            product(config.cast_config_input, config.cast_config_weight, config.gemm_config_output),
            product(
                config.cast_config_grad_output, config.cast_config_weight_for_grad_input, config.gemm_config_grad_input
            ),
            product(
                config.cast_config_grad_output_for_grad_weight,
                config.cast_config_input_for_grad_weight,
                config.gemm_config_grad_weight,
            ),
        )
        if len(formats) > 1:
            raise ValueError(
                "Float8LinearConfig mixes OCP and fnuz dtypes in its `target_dtype`s; no hardware multiplies both."
                " Use one family, or leave `target_dtype` unset."
            )
        return cls(
            *products,
            power_of_2_scales=config.round_scales_to_power_of_2,
            fp8_format=formats.pop() if formats else "auto",
            name="torchao config",
        )

    def describe(self) -> str:
        """The recipe in one line, for reports and logs.

        >>> FP8Recipe(Product(Operand(), Operand()), None, None, fp8_format="ocp", name="mine").describe()
        'mine, ocp (output e4m3 x e4m3, tensor scales; grad_input bf16; grad_weight bf16)'
        """

        def text(name: str, product: Product | None) -> str:
            if product is None:
                return f"{name} bf16"
            scales = {product.left.granularity, product.right.granularity}
            return f"{name} {product.left.element} x {product.right.element}, {'/'.join(sorted(scales))} scales"

        parts = "; ".join(text(f.name, p) for f, p in zip(fields(self)[:3], self.products, strict=True))
        return f"{self.name}, {self.fp8_format}{', emulated' if self.emulate else ''} ({parts})"


def resolve_recipe(
    recipe: "RecipeName | Literal['auto'] | FP8Recipe | Float8LinearConfig",
    fp8_format: FP8Format | Literal["auto"],
    native_format: FP8Format | None,
) -> FP8Recipe:
    """Turn what a user may pass into the one internal form, its format and emulation decided.

    ``"auto"`` is ``"tensorwise"`` on every hardware: it is what AMD ships for MI300X to MI355X and the fastest that
    has been measured there (docs/recipes.md). This is the one place that decides, and only a measurement changes it.

    Args:
        recipe: A name, an :class:`FP8Recipe` or a torchao ``Float8LinearConfig``.
        fp8_format: What the user asked for.
        native_format: What the hardware multiplies; None for hardware without FP8.

    Raises:
        ValueError: If the recipe's own format and ``fp8_format`` exclude each other.
        TypeError: If ``recipe`` is none of the allowed types.
    """
    _check_choice("convert", "fp8_format", fp8_format, ("auto", *get_args(FP8Format)))
    if isinstance(recipe, str):
        _check_choice("convert", "recipe", recipe, ("auto", *RECIPE_NAMES))
        recipe = FP8Recipe.named("tensorwise" if recipe == "auto" else recipe)  # type: ignore[arg-type]
    elif not isinstance(recipe, FP8Recipe):
        from torchao.float8 import Float8LinearConfig

        if not isinstance(recipe, Float8LinearConfig):
            raise TypeError(
                f"Expected argument `recipe` to be one of {', '.join(map(repr, RECIPE_NAMES))}, an `FP8Recipe` or a"
                f" torchao `Float8LinearConfig`, but got {recipe!r} of type {type(recipe).__name__}."
            )
        recipe = FP8Recipe.from_torchao(recipe)
    asked = {fp8_format, recipe.fp8_format} - {"auto"}
    if len(asked) > 1:
        raise ValueError(
            f"The recipe {recipe.name!r} is in the {recipe.fp8_format!r} format, but `fp8_format={fp8_format!r}` was"
            f" asked for. Leave `fp8_format` at 'auto', or give a recipe by its name ({', '.join(RECIPE_NAMES)}), which"
            " follows `fp8_format`."
        )
    final: Any = asked.pop() if asked else native_format or "ocp"
    return replace(recipe, fp8_format=final, emulate=recipe.emulate or final != native_format)
