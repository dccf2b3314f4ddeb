"""Recipes: what they map to, and what is refused by which words."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torchao.float8 import CastConfig, Float8LinearConfig, ScalingType
from torchao.float8.config import Float8GemmConfig, ScalingGranularity

from lightning_fp8_rocm.float8.recipe import RECIPE_NAMES, FP8Recipe, Operand, Product, fp8_dtype, resolve_recipe

TENSOR, ROW = Operand("tensor", "e4m3"), Operand("row", "e4m3")
TENSOR_E5M2 = Operand("tensor", "e5m2")
# Written out from the documentation of torchao's recipes, not computed from them.
NAMED = {
    "tensorwise": FP8Recipe(
        output=Product(TENSOR, TENSOR, fast_accum=True),
        grad_input=Product(TENSOR_E5M2, TENSOR),
        grad_weight=Product(TENSOR_E5M2, TENSOR),
        name="tensorwise",
    ),
    "rowwise": FP8Recipe(
        output=Product(ROW, ROW, fast_accum=True),
        grad_input=Product(ROW, ROW),
        grad_weight=Product(ROW, ROW),
        power_of_2_scales=True,
        name="rowwise",
    ),
    "rowwise_with_gw_hp": FP8Recipe(
        output=Product(ROW, ROW, fast_accum=True),
        grad_input=Product(ROW, TENSOR),
        grad_weight=None,
        power_of_2_scales=True,
        name="rowwise_with_gw_hp",
    ),
}


def test_the_names_are_those_of_torchao():
    assert set(RECIPE_NAMES) == set(NAMED)


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_a_named_recipe_is_what_torchao_documents_and_what_its_config_maps_to(name):
    assert FP8Recipe.named(name) == NAMED[name]
    mapped = FP8Recipe.from_torchao(Float8LinearConfig.from_recipe_name(name))
    assert replace(mapped, name=name, fp8_format="auto") == NAMED[name]
    assert mapped.fp8_format == "ocp"  # of a config the format is what its dtypes say; of a name it is still open
    assert mapped.name == "torchao config"


@pytest.mark.parametrize(("name", "by_row"), [("tensorwise", False), ("rowwise", True), ("rowwise_with_gw_hp", True)])
def test_a_recipe_knows_whether_it_scales_rows(name, by_row):
    assert FP8Recipe.named(name).row_scaled is by_row


def test_a_recipe_that_scales_one_operand_by_row_is_row_scaled():
    assert FP8Recipe(None, None, Product(TENSOR, ROW)).row_scaled


def fnuz_config(**fields) -> Float8LinearConfig:
    e4m3, e5m2 = (CastConfig(target_dtype=d) for d in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz))
    casts = {"cast_config_input": e4m3, "cast_config_weight": e4m3, "cast_config_grad_output": e5m2}
    return Float8LinearConfig(**casts | fields)


def test_a_config_in_fnuz_dtypes_is_a_recipe_in_fnuz():
    recipe = FP8Recipe.from_torchao(fnuz_config())
    assert recipe.fp8_format == "fnuz"
    assert recipe.products == NAMED["tensorwise"].products
    assert recipe.dtype(recipe.grad_input.left) == torch.float8_e5m2fnuz


def test_a_config_of_disabled_casts_leaves_that_product_out_and_other_fields_are_mapped():
    row = CastConfig(scaling_granularity=ScalingGranularity.AXISWISE)
    recipe = FP8Recipe.from_torchao(
        Float8LinearConfig(
            cast_config_input=row,
            cast_config_input_for_grad_weight=CastConfig(scaling_type=ScalingType.DISABLED),
            cast_config_grad_output_for_grad_weight=CastConfig(scaling_type=ScalingType.DISABLED),
            gemm_config_output=Float8GemmConfig(use_fast_accum=False),
            gemm_config_grad_input=Float8GemmConfig(use_fast_accum=True),
            round_scales_to_power_of_2=True,
        )
    )
    assert recipe == FP8Recipe(
        output=Product(ROW, TENSOR, fast_accum=False),
        grad_input=Product(TENSOR_E5M2, TENSOR, fast_accum=True),
        grad_weight=None,
        power_of_2_scales=True,
        fp8_format="ocp",
        name="torchao config",
    )


@pytest.mark.parametrize(
    ("field", "ours"),
    [
        ("enable_fsdp_float8_all_gather", "fp8_all_gather"),
        ("pad_inner_dim", "pads"),
        ("emulate", "on_unsupported"),
    ],
)
def test_a_torchao_field_that_an_argument_of_ours_decides_is_an_error_that_names_both(field, ours):
    with pytest.raises(ValueError, match=rf"{field}=True.*{ours}.*Leave `{field}` False"):
        FP8Recipe.from_torchao(Float8LinearConfig(**{field: True}))


def test_a_config_that_mixes_the_formats_is_refused():
    mixed = fnuz_config(cast_config_grad_output=CastConfig(target_dtype=torch.float8_e5m2))
    with pytest.raises(ValueError, match=r"mixes OCP and fnuz.*target_dtype"):
        FP8Recipe.from_torchao(mixed)


def test_a_config_without_a_single_fp8_product_is_refused():
    disabled = CastConfig(scaling_type=ScalingType.DISABLED)
    config = Float8LinearConfig(
        cast_config_input=disabled, cast_config_weight=disabled, cast_config_grad_output=disabled
    )
    with pytest.raises(ValueError, match="computes nothing in FP8"):
        FP8Recipe.from_torchao(config)


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (
            lambda: Operand(granularity="column"),
            ValueError,
            r"`granularity` of Operand to be one of 'tensor', 'row', but got 'column'",
        ),
        (
            lambda: Operand(element="e3m4"),
            ValueError,
            r"`element` of Operand to be one of 'e4m3', 'e5m2', but got 'e3m4'",
        ),
        (lambda: Product("e4m3", TENSOR), TypeError, r"`left` of Product to be an `Operand`, but got 'e4m3'"),
        (lambda: Product(TENSOR, None), TypeError, r"`right` of Product to be an `Operand`, but got None"),
        (
            lambda: FP8Recipe("e4m3", None, None),
            TypeError,
            r"`output` of FP8Recipe to be a `Product` or None, but got 'e4m3'",
        ),
        (lambda: FP8Recipe(None, None, None), ValueError, r"computes nothing in FP8.*bf16-mixed"),
        (
            lambda: FP8Recipe(Product(TENSOR, TENSOR), None, None, fp8_format="nvfp4"),
            ValueError,
            r"`fp8_format` of FP8Recipe to be one of 'auto', 'ocp', 'fnuz', but got 'nvfp4'",
        ),
        (
            lambda: FP8Recipe.named("blockwise"),
            ValueError,
            r"`name` .*to be one of 'tensorwise', 'rowwise', 'rowwise_with_gw_hp', but got 'blockwise'",
        ),
        (
            lambda: resolve_recipe("Rowwise", "auto", None),
            ValueError,
            r"`recipe` of convert to be one of 'auto', 'tensorwise', .*, but got 'Rowwise'",
        ),
        (
            lambda: resolve_recipe("auto", "e4m3", None),
            ValueError,
            r"`fp8_format` of convert to be one of 'auto', 'ocp', 'fnuz', but got 'e4m3'",
        ),
        (
            lambda: resolve_recipe(8, "auto", None),
            TypeError,
            r"`recipe` to be one of 'tensorwise', .*`FP8Recipe` or .*`Float8LinearConfig`, but got 8 of type int",
        ),
        (
            lambda: resolve_recipe(None, "auto", None),
            TypeError,
            r"but got None of type NoneType",
        ),
    ],
    ids=lambda value: None if callable(value) else "",
)
def test_a_bad_argument_is_named_with_its_value_and_what_is_allowed(build, error, message):
    with pytest.raises(error, match=message):
        build()


@pytest.mark.parametrize(
    ("recipe", "asked"),
    [
        (replace(NAMED["rowwise"], fp8_format="ocp"), "fnuz"),
        (replace(NAMED["rowwise"], fp8_format="fnuz"), "ocp"),
        (Float8LinearConfig(), "fnuz"),
        (fnuz_config(), "ocp"),
    ],
    ids=["ocp recipe", "fnuz recipe", "ocp config", "fnuz config"],
)
def test_a_recipe_and_a_format_that_exclude_each_other_are_an_error_that_names_both(recipe, asked):
    own = {"fnuz": "ocp", "ocp": "fnuz"}[asked]
    with pytest.raises(ValueError, match=rf"'{own}' format.*fp8_format='{asked}'.*Leave `fp8_format` at 'auto'"):
        resolve_recipe(recipe, asked, None)


def test_auto_is_tensorwise_on_every_hardware():
    for native in ("ocp", "fnuz", None):
        resolved = resolve_recipe("auto", "auto", native)
        assert resolved.name == "tensorwise"
        assert resolved.products == NAMED["tensorwise"].products


@pytest.mark.parametrize(
    ("asked", "native", "final", "emulate"),
    [
        ("auto", "fnuz", "fnuz", False),
        ("auto", "ocp", "ocp", False),
        ("auto", None, "ocp", True),
        ("ocp", "ocp", "ocp", False),
        ("fnuz", "ocp", "fnuz", True),
        ("ocp", "fnuz", "ocp", True),
        ("fnuz", None, "fnuz", True),
    ],
)
@pytest.mark.parametrize("recipe", ["rowwise", NAMED["rowwise"]], ids=["name", "recipe"])
def test_the_format_is_the_one_asked_for_else_the_native_one_and_emulated_where_it_is_not_native(
    recipe, asked, native, final, emulate
):
    assert resolve_recipe(recipe, asked, native) == replace(NAMED["rowwise"], fp8_format=final, emulate=emulate)


def test_a_recipe_in_a_format_of_its_own_keeps_it_and_is_emulated_elsewhere():
    recipe = replace(NAMED["rowwise"], fp8_format="fnuz")
    assert resolve_recipe(recipe, "auto", "ocp") == replace(recipe, emulate=True)
    assert resolve_recipe(recipe, "fnuz", "fnuz") == recipe


def test_a_recipe_that_asks_for_emulation_is_emulated_also_on_hardware_that_has_its_format():
    recipe = replace(NAMED["rowwise"], emulate=True)
    assert resolve_recipe(recipe, "auto", "ocp").emulate


def test_a_dtype_is_not_guessed_before_the_format_is_resolved():
    with pytest.raises(RuntimeError, match=r"'rowwise' has not been resolved"):
        NAMED["rowwise"].dtype(ROW)


@pytest.mark.parametrize(
    ("fp8_format", "element", "dtype", "largest"),
    [
        ("ocp", "e4m3", torch.float8_e4m3fn, 448),
        ("ocp", "e5m2", torch.float8_e5m2, 57344),
        ("fnuz", "e4m3", torch.float8_e4m3fnuz, 240),
        ("fnuz", "e5m2", torch.float8_e5m2fnuz, 57344),
    ],
)
def test_each_format_has_its_two_dtypes(fp8_format, element, dtype, largest):
    assert fp8_dtype(fp8_format, element) is dtype
    assert torch.finfo(dtype).max == largest


def test_a_recipe_describes_itself_in_a_line():
    resolved = resolve_recipe("rowwise_with_gw_hp", "fnuz", None)
    assert resolved.describe() == (
        "rowwise_with_gw_hp, fnuz, emulated (output e4m3 x e4m3, row scales; grad_input e4m3 x e4m3, row/tensor scales;"
        " grad_weight bf16)"
    )


def test_constructing_and_resolving_an_own_recipe_imports_no_torchao_and_starts_no_gpu():
    script = """
import sys
import torch
from lightning_fp8_rocm.float8.recipe import FP8Recipe, Operand, Product, resolve_recipe
row = Operand("row", "e4m3")
recipe = FP8Recipe(Product(row, row), Product(row, row), None, fp8_format="fnuz")
resolve_recipe(recipe, "auto", None).describe()
loaded = sorted(name for name in sys.modules if name.split(".")[0] in ("torchao", "lightning", "triton"))
assert not loaded, loaded
assert not torch.cuda.is_initialized()
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
