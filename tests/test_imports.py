"""What is imported when, and which room imports which: design section 2, told by `sys.modules` and by the source."""

import ast
import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import flavours
import pytest
from flavours import Lightning

import lightning_fp8_rocm
from lightning_fp8_rocm import FP8Recipe, Operand, Product

PACKAGE = Path(lightning_fp8_rocm.__file__).parent
LIGHTNING = {"lightning", "pytorch_lightning", "lightning_fabric"}
HEAVY = LIGHTNING | {"torch", "torchao", "rich", "jsonargparse", "transformers", "torchmetrics"}


def python(code: str) -> str:
    """Run `code` in a fresh process and return what it printed."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- in the order of a run

STEPS = {
    "the package": "import lightning_fp8_rocm",
    "a recipe": "lightning_fp8_rocm.FP8Recipe",
    "the mixins": "from lightning_fp8_rocm.plugins import ema, fabric, precision, strategy, trainer",
    "the classes for Fabric": """
from lightning_fp8_rocm.{fabric}.precision import FP8Precision as FabricFP8Precision
from lightning_fp8_rocm.{fabric}.strategy import FSDP2FP8Strategy as FabricFSDP2FP8Strategy
""",
    "the classes for the Trainer": """
from {FP8Precision} import FP8Precision
from {FSDP2FP8Strategy} import FSDP2FP8Strategy
from {EMA} import EMA
""",
    # Whoever asks for a device from here on is told off.
    "all classes, constructed": """
import torch

def told_off(*args, **kwargs):
    raise AssertionError("a device was asked")

for name in ("_lazy_init", "is_available", "device_count", "current_device", "get_device_properties",
             "get_device_capability", "get_device_name"):
    setattr(torch.cuda, name, told_off)
product = lightning_fp8_rocm.Product(lightning_fp8_rocm.Operand("row"), lightning_fp8_rocm.Operand("row"))
for each in (FP8Precision, FabricFP8Precision):
    each()
    each(recipe="rowwise", include=["*"], fp8_format="fnuz", on_unsupported="emulate")
    each(recipe=lightning_fp8_rocm.FP8Recipe(product, product, None))
for each in (FSDP2FP8Strategy, FabricFSDP2FP8Strategy):
    each()
    each(auto_wrap_policy=["Block"], activation_checkpointing_policy="full", device_mesh=(1, 2), compile=True)
EMA()
""",
}


@pytest.fixture(scope="module")
def after(pl: Lightning) -> dict[str, set[str]]:
    """Which of the heavy packages are in `sys.modules` after each step, all steps in one process."""
    rooms = {"fabric": pl.fabric_room, **{name: pl.class_path(name).rpartition(".")[0] for name in flavours.HOMES}}
    lines = ["import json, sys", "seen = {}"]
    for name, code in STEPS.items():
        lines += [code.format(**rooms), f"seen[{name!r}] = sorted({HEAVY!r} & sys.modules.keys())"]
    lines.append("print(json.dumps(seen))")
    return {name: set(found) for name, found in json.loads(python("\n".join(lines))).items()}


def test_importing_the_package_imports_nothing_heavy(after):
    assert after["the package"] == set()


def test_asking_for_a_recipe_imports_torch_alone(after):
    assert after["a recipe"] == {"torch"}


def test_the_mixins_import_torch_alone(after):
    assert after["the mixins"] == {"torch"}


def test_the_classes_import_the_lightning_that_they_are_for_and_no_other(after, pl: Lightning):
    of_fabric = {pl.fabric.partition(".")[0]}
    of_trainer = of_fabric | {pl.package.partition(".")[0]}  # the Trainer stands on Fabric
    assert after["the classes for Fabric"] & LIGHTNING == of_fabric
    assert after["the classes for the Trainer"] & LIGHTNING == of_trainer
    assert after["all classes, constructed"] & LIGHTNING == of_trainer


def test_asking_for_the_classes_imports_no_torchao(after):
    assert "torchao" not in after["the classes for the Trainer"]


def test_constructing_them_imports_no_torchao_and_asks_no_device(after):
    assert "torchao" not in after["all classes, constructed"]


def test_float8_imports_no_lightning_and_starts_no_processes():
    seen = python(
        "import sys, torch.distributed\n"
        "from lightning_fp8_rocm import FP8Linear, convert, revert, ConversionReport\n"
        f"print(sorted({LIGHTNING!r} & sys.modules.keys()), torch.distributed.is_initialized())"
    )
    assert seen.split() == ["[]", "False"]


# ---- the arrows

# Imports point from a later rank to an earlier one, or stay inside a room.
RANK = {
    "versions": 0,
    "hardware": 0,
    "float8": 1,
    "distributed": 2,
    "plugins": 3,
    "pytorch": 4,
    "fabric": 4,
    "pytorch_lightning": 4,
    "lightning_fabric": 4,
    "callbacks": 5,
    "cli": 6,
}
# Registration stands beside them: every room may do without it, and it names the classes by string.
BESIDE = {"__init__", "registration"}
MAY_NOT_IMPORT = {
    "registration": HEAVY,
    "__init__": HEAVY,
    "versions": HEAVY,
    "hardware": HEAVY - {"torch"},
    "float8": LIGHTNING | {"lightning_utilities", "torch.distributed"},
    "distributed": LIGHTNING,
    "plugins": LIGHTNING,
    "pytorch": LIGHTNING - {"lightning"} | {"lightning.fabric", "torchao"},
    "fabric": LIGHTNING - {"lightning"} | {"lightning.pytorch", "torchao"},
    "pytorch_lightning": LIGHTNING - {"pytorch_lightning"} | {"torchao"},
    "lightning_fabric": LIGHTNING - {"lightning_fabric"} | {"torchao"},
    "callbacks": LIGHTNING - {"lightning"} | {"lightning.fabric", "torchao"},
    "cli": LIGHTNING,
}


def imports(source: str) -> set[str]:
    """Every module that `source` imports, at its top and inside functions, `if TYPE_CHECKING:` aside."""

    def walk(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for other in node.orelse:
                yield from walk(other)
            return
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            yield from walk(child)

    return set(walk(ast.parse(source)))


def room(module: str) -> str:
    """`lightning_fp8_rocm.float8.recipe.FP8Recipe` -> `float8`."""
    return module.split(".")[1]


def arrows_that_point_wrong(of_room: str, source: str) -> list[str]:
    """The imports of the package's own modules that a module in `of_room` must not make."""
    own = [name for name in imports(source) if name.startswith("lightning_fp8_rocm.")]
    if of_room in BESIDE:
        return [name for name in own if room(name) not in BESIDE | {"versions"}]
    return [
        name for name in own if room(name) != of_room and (room(name) not in RANK or RANK[room(name)] >= RANK[of_room])
    ]


MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.parts[0].removesuffix(".py")


def test_every_room_has_a_rank():
    rooms = {room_of(path) for path in MODULES}
    assert {"hardware", "float8", "plugins", "pytorch", "fabric", "pytorch_lightning", "lightning_fabric"} <= rooms
    assert rooms <= RANK.keys() | BESIDE


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_imports_point_one_way(path):
    assert arrows_that_point_wrong(room_of(path), (PACKAGE / path).read_text()) == []


def imports_that_are_forbidden(in_room: str, source: str) -> list[str]:
    """The imports of packages that a module in `in_room` must not know."""
    forbidden = MAY_NOT_IMPORT.get(in_room, set())
    return [name for name in imports(source) if any(f"{name}.".startswith(f"{each}.") for each in forbidden)]


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_a_room_imports_only_what_it_may_know(path):
    assert imports_that_are_forbidden(room_of(path), (PACKAGE / path).read_text()) == []


@pytest.mark.parametrize(
    ("in_room", "source"),
    [
        ("plugins", "from pytorch_lightning import Callback"),
        ("pytorch", "from pytorch_lightning.strategies import ParallelStrategy"),
        ("pytorch", "from lightning.fabric.plugins import Precision"),
        ("fabric", "from lightning.pytorch.plugins import Precision"),
        ("pytorch_lightning", "from lightning.pytorch.plugins import Precision"),
        ("pytorch_lightning", "from lightning_fabric.plugins import Precision"),
        ("lightning_fabric", "from pytorch_lightning.plugins import Precision"),
        ("lightning_fabric", "from lightning.fabric.plugins import Precision"),
        ("lightning_fabric", "def later():\n    import torchao"),
    ],
)
def test_a_pretended_import_of_another_lightning_is_found(in_room, source):
    assert len(imports_that_are_forbidden(in_room, source)) == 1


@pytest.mark.parametrize(
    ("of_room", "source"),
    [
        ("hardware", "from lightning_fp8_rocm.float8.recipe import FP8Recipe"),
        ("float8", "def later():\n    import lightning_fp8_rocm.plugins"),
        ("pytorch", "from lightning_fp8_rocm.fabric.precision import FP8Precision"),
        ("pytorch_lightning", "from lightning_fp8_rocm.pytorch.precision import FP8Precision"),
        ("lightning_fabric", "from lightning_fp8_rocm.pytorch_lightning.precision import FP8Precision"),
        ("registration", "from lightning_fp8_rocm.pytorch.precision import FP8Precision"),
        ("plugins", "from lightning_fp8_rocm import registration"),
    ],
)
def test_a_pretended_wrong_arrow_is_found(of_room, source):
    assert len(arrows_that_point_wrong(of_room, source)) == 1


def test_an_import_for_the_type_checker_is_no_arrow():
    assert imports("if TYPE_CHECKING:\n    import lightning\nelse:\n    import torch") == {"torch"}


# ---- the public names


@pytest.mark.parametrize("name", lightning_fp8_rocm.__all__)
def test_a_public_name_resolves_to_itself_and_stands_in_dir(name):
    assert getattr(lightning_fp8_rocm, name).__name__ == name
    assert name in dir(lightning_fp8_rocm)


def test_the_type_checker_sees_the_names_that_there_are():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    declared = {
        alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    homes = {name: f"lightning_fp8_rocm.{home}" for name, home in lightning_fp8_rocm._HOME.items()}
    assert declared == homes
    assert set(lightning_fp8_rocm.__all__) == set(homes)


def test_an_unknown_attribute_is_an_attribute_error_that_names_it():
    with pytest.raises(AttributeError, match=r"module 'lightning_fp8_rocm' has no attribute 'FP9Precision'"):
        lightning_fp8_rocm.FP9Precision  # noqa: B018, the attribute access is what is tested


def test_the_version_is_that_of_the_installed_distribution():
    from importlib.metadata import version

    assert lightning_fp8_rocm.__version__ == version("lightning-fp8-rocm")


def test_a_recipe_pickles():
    recipe = FP8Recipe(Product(Operand("row"), Operand("row")), None, None, power_of_2_scales=True, fp8_format="fnuz")
    assert pickle.loads(pickle.dumps(recipe)) == recipe


@pytest.mark.parametrize("owner", ["Trainer", "Fabric"])
@pytest.mark.parametrize("recipe", ["rowwise", FP8Recipe(Product(Operand(), Operand()), None, None)], ids=type)
def test_the_plugin_pickles(pl: Lightning, owner, recipe):
    kind = pl.FP8Precision if owner == "Trainer" else pl.for_fabric("FP8Precision")
    plugin = kind(recipe=recipe, exclude=["head"], weights_dtype="bfloat16", fp8_format="ocp")
    again = pickle.loads(pickle.dumps(plugin))
    assert type(again) is kind
    assert vars(again) == vars(plugin)


def test_pickles_name_the_public_paths_of_the_classes(pl: Lightning):
    found = [pl.FP8Precision, pl.FSDP2FP8Strategy, pl.for_fabric("FP8Precision"), pl.for_fabric("FSDP2FP8Strategy")]
    assert [f"{kind.__module__}.{kind.__qualname__}" for kind in found] == [
        f"lightning_fp8_rocm.{room}.{name}"
        for room in (pl.room, pl.fabric_room)
        for name in ("precision.FP8Precision", "strategy.FSDP2FP8Strategy")
    ]
