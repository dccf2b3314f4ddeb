"""`fp8-rocm` as a name: in Trainer, Fabric, environment variables and LightningCLI; and an unknown Lightning.

The real Trainer, Fabric and LightningCLI throughout; a private part of Lightning that is missing is pretended.
"""

import os
import re
import subprocess
import sys
from importlib import import_module
from importlib.metadata import requires
from itertools import permutations, product
from pathlib import Path

import pytest
import torch
import yaml
from flavours import BOTH, LIGHTNING, STANDALONE, Lightning, over
from torch import nn
from torch.utils.data import DataLoader

from lightning_fp8_rocm import registration
from lightning_fp8_rocm.registration import UnsupportedLightningError

for each in BOTH:  # so that each entry point is taught here
    each.Trainer, each.of_fabric("fabric")

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
ON_CPU = {"accelerator": "cpu", "devices": 1, "fast_dev_run": 1, **QUIET}


class Model:
    """Two layers: one that can be FP8 and one, of two outputs, that cannot."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, 2))


def model(pl: Lightning):
    return over(Model, pl.of("demos.boring_classes").BoringModel)


def fabric(pl: Lightning, **arguments):
    return pl.of_fabric("fabric").Fabric(**{"accelerator": "cpu", "devices": 1, **arguments})


def python(*args: object, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, args)]
    return subprocess.run(
        command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, timeout=300, check=False
    )


# ---- Trainer and Fabric


def test_a_trainer_takes_the_name(pl: Lightning):
    trainer = pl.Trainer(precision="fp8-rocm", **ON_CPU)
    assert type(trainer.precision_plugin) is pl.FP8Precision
    assert trainer.precision_plugin.recipe == "auto"
    assert trainer.precision == "fp8-rocm"


def test_a_trainer_takes_the_name_beside_the_name_of_a_strategy(pl: Lightning):
    trainer = pl.Trainer(precision="fp8-rocm", strategy="ddp", **ON_CPU)
    assert type(trainer.precision_plugin) is pl.FP8Precision
    assert trainer.strategy.precision_plugin is trainer.precision_plugin


def test_every_trainer_has_a_plugin_of_its_own(pl: Lightning):
    first, second = (pl.Trainer(precision="fp8-rocm", **ON_CPU) for _ in range(2))
    assert first.precision_plugin is not second.precision_plugin


def test_fabric_takes_the_name(pl: Lightning):
    assert type(fabric(pl, precision="fp8-rocm")._precision) is pl.for_fabric("FP8Precision")


def test_a_trainer_reads_the_name_from_the_environment(pl: Lightning, monkeypatch):
    monkeypatch.setenv("PL_TRAINER_PRECISION", "fp8-rocm")
    assert type(pl.Trainer(**ON_CPU).precision_plugin) is pl.FP8Precision


def test_fabric_reads_the_name_from_the_environment(pl: Lightning, monkeypatch):
    monkeypatch.setenv("LT_PRECISION", "fp8-rocm")
    monkeypatch.setenv("LT_CLI_USED", "1")  # what `fabric run` sets
    assert type(fabric(pl)._precision) is pl.for_fabric("FP8Precision")


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "32-true", "64-true", 32])
def test_other_precisions_are_what_they_were(pl: Lightning, precision):
    trainer = pl.Trainer(precision=precision, **ON_CPU)
    assert not isinstance(trainer.precision_plugin, pl.FP8Precision)
    assert trainer.precision == ("32-true" if precision == 32 else precision)


@pytest.mark.parametrize("entry", ["Trainer", "Fabric"])
@pytest.mark.parametrize("precision", ["fp8", "FP8-ROCM", "fp8_rocm", 8])
def test_an_unknown_precision_is_lightnings_own_error(pl: Lightning, entry, precision):
    with pytest.raises(ValueError, match=rf"Precision {precision!r} is invalid. Allowed precision values: \("):
        {"Trainer": pl.Trainer, "Fabric": pl.of_fabric("fabric").Fabric}[entry](
            precision=precision, accelerator="cpu", devices=1
        )


def test_a_trainer_takes_the_name_of_the_strategy_in_any_case_and_with_any_precision(pl: Lightning):
    for name, precision in (("fsdp2_fp8", "fp8-rocm"), ("FSDP2_FP8", "bf16-mixed"), ("fsdp2_fp8", None)):
        trainer = pl.Trainer(strategy=name, precision=precision, **ON_CPU)
        assert type(trainer.strategy) is pl.FSDP2FP8Strategy
        assert trainer.strategy.precision_plugin is trainer.precision_plugin


def test_the_registry_lists_the_strategy_with_a_description(pl: Lightning):
    assert "fsdp2_fp8" in pl.strategies.StrategyRegistry.available_strategies()
    assert pl.strategies.StrategyRegistry["fsdp2_fp8"]["description"] == "FSDP2 with FP8 weight all-gather"
    assert type(pl.strategies.StrategyRegistry.get("fsdp2_fp8")) is pl.FSDP2FP8Strategy
    assert pl.strategies.StrategyRegistry.get("fsdp2_fp8") is not pl.strategies.StrategyRegistry.get("fsdp2_fp8")


# ---- together with plugins


@pytest.mark.parametrize("as_list", [True, False])
@pytest.mark.parametrize(
    "plugin",
    [lambda pl: pl.plugins.MixedPrecision("bf16-mixed", "cpu"), lambda pl: pl.FP8Precision()],
    ids=["bf16", "fp8"],
)
def test_the_name_together_with_a_precision_plugin_is_an_error(pl: Lightning, plugin, as_list):
    plugin = plugin(pl)
    with pytest.raises(ValueError, match=r"Received both `precision='fp8-rocm'` and a precision plugin") as error:
        pl.Trainer(precision="fp8-rocm", plugins=[plugin] if as_list else plugin, **ON_CPU)
    assert f"plugins=[{type(plugin).__name__}(...)]" in str(error.value)
    assert "pass `plugins=[FP8Precision(...)]` to set the arguments of FP8" in str(error.value)


def test_the_name_together_with_a_precision_plugin_is_an_error_in_fabric(pl: Lightning):
    with pytest.raises(ValueError, match="Received both `precision='fp8-rocm'` and a precision plugin"):
        fabric(pl, precision="fp8-rocm", plugins=pl.of_fabric("plugins").MixedPrecision("bf16-mixed", "cpu"))


@pytest.mark.parametrize("container", [lambda x: x, lambda x: [x], lambda x: (x,)], ids=["alone", "list", "tuple"])
def test_the_name_together_with_another_kind_of_plugin_works(pl: Lightning, container):
    checkpoint_io = pl.of("plugins.io").TorchCheckpointIO()
    trainer = pl.Trainer(precision="fp8-rocm", plugins=container(checkpoint_io), **ON_CPU)
    assert trainer.strategy.checkpoint_io is checkpoint_io
    assert type(trainer.precision_plugin) is pl.FP8Precision


def test_the_users_list_of_plugins_is_left_as_it_was(pl: Lightning):
    plugins = [pl.of("plugins.io").TorchCheckpointIO()]
    pl.Trainer(precision="fp8-rocm", plugins=plugins, **ON_CPU)
    assert len(plugins) == 1


def test_a_strategy_that_carries_a_precision_is_lightnings_own_error(pl: Lightning):
    strategy = pl.strategies.SingleDeviceStrategy(
        device="cpu", precision_plugin=pl.plugins.MixedPrecision("bf16-mixed", "cpu")
    )
    with pytest.raises(Exception, match="precision set through both strategy class and plugins, choose one"):
        pl.Trainer(precision="fp8-rocm", strategy=strategy, **ON_CPU)


# ---- what is of another Lightning

CALLS = {
    "fit": lambda trainer, module, data: trainer.fit(module, data),
    "validate": lambda trainer, module, data: trainer.validate(module, data),
    "test": lambda trainer, module, data: trainer.test(module, data),
    "predict": lambda trainer, module, data: trainer.predict(module, data),
}


@pytest.mark.parametrize(("pl", "other"), list(permutations(BOTH)), ids=str)
@pytest.mark.parametrize("call", CALLS)
def test_a_lightning_module_of_the_other_name_is_refused_by_both_names(pl: Lightning, other: Lightning, call):
    trainer, data = pl.Trainer(precision="fp8-rocm", **ON_CPU), DataLoader(torch.ones(1, 32))
    with pytest.raises(TypeError) as error:
        CALLS[call](trainer, model(other)(), data)
    assert str(error.value) == (
        f"Model is a LightningModule of `{other.package}`, but was passed to a Trainer of `{pl.package}`, which are two"
        f" packages with classes of their own. Import both from one: `import {pl.package} as pl`, or `import"
        f" {other.package} as pl`."
    )
    CALLS[call](trainer, model(pl)(), data)


@pytest.mark.parametrize(("pl", "other"), list(permutations(BOTH)), ids=str)
def test_a_compiled_module_of_the_other_name_is_refused_as_that(pl: Lightning, other: Lightning):
    compiled = torch.compile(model(other)())
    with pytest.raises(TypeError, match=rf"^Model is a LightningModule of `{other.package}`"):
        pl.Trainer(**ON_CPU).fit(compiled)


@pytest.mark.parametrize("module", [nn.Linear(2, 2), "a module"], ids=lambda module: type(module).__name__)
def test_what_is_no_lightning_module_of_any_is_lightnings_own_error(pl: Lightning, module):
    with pytest.raises(TypeError, match=r"`model` must be a `LightningModule`.*, got `(Linear|str)`"):
        pl.Trainer(**ON_CPU).fit(module)


# Each of our four folders of classes, with the entry point that takes it.
PLACES = {
    "lightning.pytorch.Trainer": lambda name: getattr(LIGHTNING, name),
    "lightning.fabric.Fabric": LIGHTNING.for_fabric,
    "pytorch_lightning.Trainer": lambda name: getattr(STANDALONE, name),
    "lightning_fabric.Fabric": STANDALONE.for_fabric,
}


def enter(place: str, **arguments):
    package, _, owner = place.rpartition(".")
    entry = getattr(import_module(package), owner)
    return entry(accelerator="cpu", devices=1, **arguments, **(QUIET if owner == "Trainer" else {}))


@pytest.mark.parametrize("subclassed", [False, True], ids=["itself", "a subclass"])
@pytest.mark.parametrize("name", ["FP8Precision", "FSDP2FP8Strategy"])
@pytest.mark.parametrize(("of", "to"), list(product(PLACES, repeat=2)), ids=str)
def test_our_plugin_and_strategy_are_taken_where_they_belong_and_refused_by_name_elsewhere(of, to, name, subclassed):
    kind = PLACES[of](name)
    given = (type("Mine", (kind,), {}) if subclassed else kind)()
    ways = {"FP8Precision": [{"plugins": given}, {"plugins": [given]}], "FSDP2FP8Strategy": [{"strategy": given}]}[name]
    for arguments in ways:
        if of == to:
            entered = enter(to, **arguments)
            strategy = entered.strategy if to.endswith("Trainer") else entered._strategy
            assert given in (strategy, entered.precision_plugin if to.endswith("Trainer") else entered._precision)
            continue
        with pytest.raises(TypeError) as error:
            enter(to, **arguments)
        theirs, ours = PLACES[of](name).__module__.split(".")[1], PLACES[to](name).__module__.split(".")[1]
        assert str(error.value) == (
            f"This {type(given).__name__} is of `lightning_fp8_rocm.{theirs}`, for `{of}`, but was passed to `{to}`."
            f" Take the one of `lightning_fp8_rocm.{ours}`."
        )


# ---- strategies that convert too late


@pytest.fixture
def process_group(monkeypatch):
    """What Lightning sets up for one process of a distributed run is gone afterwards."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_model_parallel_strategy_is_refused_by_name_at_setup(pl: Lightning):
    class Configured(model(pl)):
        def configure_model(self) -> None:
            pass

    trainer = pl.Trainer(precision="fp8-rocm", strategy=pl.strategies.ModelParallelStrategy(), **ON_CPU)
    with pytest.raises(
        TypeError, match=r"does not work with ModelParallelStrategy.* Use strategy 'auto', 'ddp' or 'fsdp2_fp8'"
    ):
        trainer.fit(Configured())


def test_fsdp_refuses_the_plugin_with_lightnings_own_error(pl: Lightning):
    # What happens on a GPU in the Trainer's constructor; on a CPU Lightning refuses the strategy before that.
    with pytest.raises(TypeError, match=r"FSDP strategy can only work with the `FSDPPrecision` plugin"):
        pl.strategies.FSDPStrategy().precision_plugin = pl.FP8Precision()


# ---- the order of imports

ORDER = """
import sys
from importlib import import_module, reload

for step in sys.argv[1:]:
    verb, name = step.split(":")
    reload(sys.modules[name]) if verb == "reload" else import_module(name)


packages = {"lightning": ("lightning.pytorch", "lightning.fabric"),
            "pytorch_lightning": ("pytorch_lightning", "lightning_fabric")}
imported = dict.fromkeys(step.partition(":")[2] for step in sys.argv[1:])
for pytorch, fabric in (packages[name] for name in imported if name in packages):
    Trainer, Fabric = import_module(pytorch).Trainer, import_module(f"{fabric}.fabric").Fabric
    quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    print("told", type(Trainer(precision="fp8-rocm", strategy="fsdp2_fp8", devices=1, **quiet).strategy))
    print("told", type(Trainer(precision="fp8-rocm", **quiet).precision_plugin))
    print("told torchao asked for", "torchao" in sys.modules)
    print("told", type(Fabric(precision="fp8-rocm", accelerator="cpu", devices=1)._precision))
    connectors = (import_module(f"{pytorch}.trainer.connectors.accelerator_connector")._AcceleratorConnector,
                  import_module(f"{fabric}.connector")._Connector)
    functions = [connector._check_config_and_set_final_flags for connector in connectors]
    functions += [import_module(f"{pytorch}.core.saving").pl_load,
                  import_module(f"{pytorch}.trainer.trainer")._maybe_unwrap_optimized]
    for function in functions:
        depth = 0
        while hasattr(function, "__wrapped__"):
            depth, function = depth + 1, function.__wrapped__
        print("told wrapped", depth)
    for annotation in (Trainer.__init__.__annotations__["precision"], Fabric.__init__.__annotations__["precision"],
                       import_module(f"{fabric}.plugins.precision.precision")._PRECISION_INPUT_STR):
        print("told named", str(annotation).count("fp8-rocm"))
    params = import_module(f"{fabric}.cli")._run.params
    option = next(option for option in params if option.name == "precision")
    print("told offered", "fp8-rocm" in option.type.choices)
"""
OURS = "lightning_fp8_rocm"


@pytest.mark.parametrize(
    "steps",
    [
        [f"import:{OURS}", "import:lightning", "import:pytorch_lightning"],
        ["import:pytorch_lightning", "import:lightning", f"import:{OURS}"],
        [
            "import:lightning",
            f"import:{OURS}",
            f"reload:{OURS}.registration",
            f"reload:{OURS}",
            "import:pytorch_lightning",
        ],
        ["import:pytorch_lightning", f"import:{OURS}", f"reload:{OURS}"],
    ],
    ids=["before both", "after both", "between them, again and again", "after one, alone"],
)
def test_the_order_of_imports_does_not_matter_and_nothing_is_wrapped_twice(steps, tmp_path):
    script = tmp_path / "order.py"
    script.write_text(ORDER)
    done = python(script, *steps, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    imported = [pl for step in steps for pl in BOTH if step == f"import:{pl}"]
    assert [line.removeprefix("told ") for line in done.stdout.splitlines() if line.startswith("told ")] == [
        line
        for pl in imported
        for line in [
            f"<class 'lightning_fp8_rocm.{pl.room}.strategy.FSDP2FP8Strategy'>",
            f"<class 'lightning_fp8_rocm.{pl.room}.precision.FP8Precision'>",
            "torchao asked for False",
            f"<class 'lightning_fp8_rocm.{pl.fabric_room}.precision.FP8Precision'>",
            *["wrapped 1"] * 4,
            *["named 1"] * 3,
            "offered True",
        ]
    ]


def test_registering_again_adds_no_second_finder():
    def finders() -> int:
        return sum(isinstance(finder, registration._WhenImported) for finder in sys.meta_path)

    before = finders()
    registration.register()
    assert finders() == before == 1


# ---- LightningCLI, in this process


@pytest.fixture(autouse=True)
def no_arguments(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["main.py"])


def cli(pl: Lightning, *args: str, **kwargs):
    kwargs = {"run": False, "save_config_callback": None, "seed_everything_default": False, **kwargs}
    flags = [f"--trainer.{key}={str(value).lower()}" for key, value in ON_CPU.items()]
    data = pl.of("demos.boring_classes").BoringDataModule
    return pl.cli.LightningCLI(model(pl), data, args=[*flags, *args], **kwargs)


def test_the_cli_takes_the_name_as_an_argument(pl: Lightning):
    assert type(cli(pl, "--trainer.precision=fp8-rocm").trainer.precision_plugin) is pl.FP8Precision


def test_the_cli_takes_the_name_from_yaml(pl: Lightning, tmp_path):
    config = tmp_path / "fp8.yaml"
    config.write_text("trainer:\n  precision: fp8-rocm\n")
    assert type(cli(pl, f"--config={config}").trainer.precision_plugin) is pl.FP8Precision


def test_the_cli_takes_the_name_as_a_default(pl: Lightning):
    assert type(cli(pl, trainer_defaults={"precision": "fp8-rocm"}).trainer.precision_plugin) is pl.FP8Precision


def test_the_cli_takes_the_name_from_its_environment_variable(pl: Lightning, monkeypatch):
    monkeypatch.setenv("PL_TRAINER__PRECISION", "fp8-rocm")
    assert type(cli(pl, parser_kwargs={"default_env": True}).trainer.precision_plugin) is pl.FP8Precision


def test_the_cli_takes_the_name_for_a_subclass_of_trainer_that_hands_keywords_on(pl: Lightning):
    class TrainerWithKeywords(pl.Trainer):
        """As users write it: what it does not know it hands on, and jsonargparse finds out what that is."""

        def __init__(self, *args, note: str = "", **kwargs):
            super().__init__(*args, **kwargs)
            self.note = note

    trainer = cli(pl, "--trainer.precision=fp8-rocm", "--trainer.note=mine", trainer_class=TrainerWithKeywords).trainer
    assert type(trainer.precision_plugin) is pl.FP8Precision
    assert trainer.note == "mine"


def test_the_cli_takes_the_name_of_the_strategy_from_yaml_and_as_a_default(pl: Lightning, tmp_path):
    config = tmp_path / "fsdp2.yaml"
    config.write_text("trainer:\n  precision: fp8-rocm\n  strategy: fsdp2_fp8\n")
    for trainer in (cli(pl, f"--config={config}").trainer, cli(pl, trainer_defaults={"strategy": "fsdp2_fp8"}).trainer):
        assert type(trainer.strategy) is pl.FSDP2FP8Strategy


def test_print_config_shows_the_name_of_the_strategy(pl: Lightning, capsys):
    with pytest.raises(SystemExit):
        cli(pl, "--trainer.strategy=fsdp2_fp8", "--print_config")
    assert yaml.safe_load(capsys.readouterr().out)["trainer"]["strategy"] == "fsdp2_fp8"


def test_help_for_the_strategy_shows_every_argument_with_its_docs(pl: Lightning, capsys):
    with pytest.raises(SystemExit) as stop:
        cli(pl, f"--trainer.strategy.help={pl.class_path('FSDP2FP8Strategy')}")
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert "FSDP2 for any module, with the weights of FP8 layers gathered in FP8" in shown
    paragraphs = [" ".join(part.split()) for part in shown.split("\n  --trainer.strategy.")]
    for argument, docs in {
        "auto_wrap_policy AUTO_WRAP_POLICY": "Which modules are gathered and freed together",
        "activation_checkpointing_policy ACTIVATION_CHECKPOINTING_POLICY": "What is recomputed in backward",
        "fp8_all_gather FP8_ALL_GATHER": "Whether the weights of FP8 layers travel in FP8",
        "device_mesh DEVICE_MESH": "hold one copy of the model (HSDP)",
        "reshard_after_forward {true,false,null}": "freed between forward and backward",
        "reduce_dtype {float32,bfloat16}": "In which gradients are summed over ranks",
        "cpu_offload {true,false}": "in the host's memory",
        "compile COMPILE": "Compile each block with ``torch.compile``",
        "gradient_sync {last,every}": "Under ``accumulate_grad_batches``",
        "forward_prefetch FORWARD_PREFETCH": "How many blocks ahead",
        "backward_prefetch BACKWARD_PREFETCH": "The same in backward",
        "state_dict_type {sharded,full}": "a checkpoint is a directory",
        "async_checkpoint": "while a checkpoint is written",
        "process_group_backend PROCESS_GROUP_BACKEND": "(RCCL)",
        "timeout TIMEOUT": "that a rank does not join",
    }.items():
        assert [docs in part for part in paragraphs if part.startswith(argument)] == [True], argument
    assert "others" not in shown  # what refuses the arguments of FSDP1 is none


def test_the_cli_takes_other_precisions_as_before(pl: Lightning):
    assert type(cli(pl, "--trainer.precision=bf16-mixed").trainer.precision_plugin) is pl.plugins.MixedPrecision


def test_the_cli_refuses_an_unknown_precision_and_lists_the_name(pl: Lightning, capsys):
    with pytest.raises(SystemExit):
        cli(pl, "--trainer.precision=fp8")
    error = capsys.readouterr().err
    assert 'Parser key "trainer.precision"' in error
    assert "fp8-rocm" in error


def test_print_config_shows_the_name(pl: Lightning, capsys):
    with pytest.raises(SystemExit) as stop:
        cli(pl, "--trainer.precision=fp8-rocm", "--print_config")
    assert stop.value.code == 0
    assert yaml.safe_load(capsys.readouterr().out)["trainer"]["precision"] == "fp8-rocm"


def test_help_lists_the_name_for_the_precision_of_the_trainer(pl: Lightning, capsys):
    with pytest.raises(SystemExit) as stop:
        cli(pl, "fit", "--help", run=True)
    assert stop.value.code == 0
    _, _, rest = capsys.readouterr().out.partition("  --trainer.precision PRECISION")
    about_precision, _, _ = rest.partition("\n  --trainer.")
    assert "'fp8-rocm'" in about_precision


def test_help_for_the_plugin_shows_every_argument_with_its_docs(pl: Lightning, capsys):
    with pytest.raises(SystemExit) as stop:
        cli(pl, f"--trainer.plugins.help={pl.class_path('FP8Precision')}")
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert "FP8 matrix products for any module; everything else in bf16" in shown
    paragraphs = [" ".join(part.split()) for part in shown.split("\n  --trainer.plugins.")]
    for argument, docs in {
        "recipe RECIPE": "How the operands are scaled",
        "include INCLUDE": "fully-qualified layer names to convert",
        "exclude EXCLUDE": "layer names to leave in bf16",
        "skip_small SKIP_SMALL": "Leave out layers that are too small to gain speed",
        "weights_dtype {float32,bfloat16}": "Of the master weights",
        "compute_dtype bfloat16": "Of all that is not FP8",
        "fp8_format FP8_FORMAT": "what the hardware multiplies",
        "on_unsupported {error,bf16,emulate}": "What to do on a GPU without FP8",
    }.items():
        assert [docs in part for part in paragraphs if part.startswith(argument)] == [True], argument


@pytest.mark.parametrize("recipe", ["fp9", "row"])
def test_the_cli_refuses_an_unknown_recipe_and_lists_the_known_ones(pl: Lightning, recipe):
    with pytest.raises(ValueError, match=r"one of 'auto', 'tensorwise', 'rowwise', 'rowwise_with_gw_hp', but got"):
        cli(pl, f"--trainer.plugins={pl.class_path('FP8Precision')}", f"--trainer.plugins.recipe={recipe}")


# ---- LightningCLI, as a user starts it

MAIN = """
import sys
{imports}
from {package}.demos.boring_classes import BoringDataModule, BoringModel
from torch import nn


class Model(BoringModel):
    def __init__(self, width: int = 32):
        super().__init__()
        print("torchao imported before the run:", "torchao" in sys.modules)
        self.layer = nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, 2))


if __name__ == "__main__":
    print("imported before the CLI:", "lightning_fp8_rocm" in sys.modules)
    LightningCLI(Model, BoringDataModule)
"""
LIGHTNING_CLI = "from {package}.cli import LightningCLI"
SHORT = ["--trainer.accelerator=cpu", "--trainer.max_steps=1", "--trainer.limit_val_batches=0"]
SHORT += [f"--trainer.{key}=false" for key in QUIET]


def script(folder: Path, *imports: str, package: str = LIGHTNING.package) -> Path:
    path = folder / "main.py"
    path.write_text(MAIN.format(imports="\n".join(imports).format(package=package), package=package))
    return path


def test_a_config_saved_by_one_run_is_used_by_the_next(tmp_path):
    main = script(tmp_path, LIGHTNING_CLI, "import lightning_fp8_rocm")
    first = python(
        main, "fit", *SHORT, "--trainer.precision=fp8-rocm", f"--trainer.default_root_dir={tmp_path}", cwd=tmp_path
    )
    assert "FP8 conversion: recipe tensorwise" in first.stdout, first.stderr
    saved = tmp_path / "config.yaml"
    assert yaml.safe_load(saved.read_text())["trainer"]["precision"] == "fp8-rocm"

    main = script(tmp_path, "import lightning_fp8_rocm", LIGHTNING_CLI)  # the other order
    second = python(main, "fit", f"--config={saved}", f"--trainer.default_root_dir={tmp_path / 'second'}", cwd=tmp_path)
    assert second.returncode == 0, second.stderr
    assert "FP8 conversion: recipe tensorwise" in second.stdout
    assert yaml.safe_load((tmp_path / "second" / "config.yaml").read_text())["trainer"]["precision"] == "fp8-rocm"


PLUGINS_YAML = """
trainer:
  devices: 1
  strategy:
    class_path: {strategy}
    init_args: {{auto_wrap_policy: [Sequential], compile: false}}
  plugins:
    - class_path: {precision}
      init_args:
        recipe:  # one of one's own: scales by row, the gradient of the weight in bf16
          output: {{left: {{granularity: row}}, right: {{granularity: row}}}}
          grad_input: {{left: {{granularity: row, element: e5m2}}, right: {{granularity: row}}}}
          grad_weight: null
          name: mine
        include: ["layer.*"]
        fp8_format: fnuz
    - class_path: {package}.plugins.io.TorchCheckpointIO
"""


IN_ARGUMENTS = [f"--trainer.plugins={LIGHTNING.class_path('FP8Precision')}", "--trainer.plugins.recipe=rowwise"]
IN_YAML = ["--config=fp8.yaml"]
BY_CLASS_PATH = {
    "arguments": (LIGHTNING, IN_ARGUMENTS),
    "yaml": (LIGHTNING, IN_YAML),
    "yaml, pytorch_lightning": (STANDALONE, IN_YAML),
}


@pytest.fixture(scope="module", params=BY_CLASS_PATH)
def run_by_class_path(request, tmp_path_factory):
    """What a script without an import of ours printed, and the arguments that it had."""
    pl, arguments = BY_CLASS_PATH[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    paths = {"strategy": pl.class_path("FSDP2FP8Strategy"), "precision": pl.class_path("FP8Precision")}
    (folder / "fp8.yaml").write_text(PLUGINS_YAML.format(**paths, package=pl.package))
    done = python(script(folder, LIGHTNING_CLI, package=pl.package), "fit", *SHORT, *arguments, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout, arguments


def test_the_class_path_works_in_a_script_without_an_import_of_ours(run_by_class_path):
    printed, arguments = run_by_class_path
    assert "imported before the CLI: False" in printed
    assert f"FP8 conversion: recipe {'mine, format fnuz' if arguments is IN_YAML else 'rowwise'}" in printed
    assert ("FSDP2: " in printed) is (arguments is IN_YAML)


def test_the_class_path_imports_no_torchao_before_the_run(run_by_class_path):
    printed, _ = run_by_class_path
    assert "torchao imported before the run: False" in printed


# ---- a Lightning that is not as known


METHOD = "_check_config_and_set_final_flags"


def connector(entry):
    return getattr(import_module(entry.connector[0]), entry.connector[1])


def annotations(entry):
    return getattr(import_module(entry.trigger), entry.owner).__init__.__annotations__


OF_BOTH = {
    "the connector": lambda m, entry: m.delattr(import_module(entry.connector[0]), entry.connector[1]),
    "the method of the connector": lambda m, entry: m.delattr(connector(entry), METHOD),
    "its argument `precision`": lambda m, entry: m.setattr(connector(entry), METHOD, lambda self, plugins: None),
    "its argument `plugins`": lambda m, entry: m.setattr(connector(entry), METHOD, lambda self, precision: None),
    "the class": lambda m, entry: m.delattr(import_module(entry.trigger), entry.owner),
    "the annotation": lambda m, entry: m.delitem(annotations(entry), "precision"),
    "the registry of strategies": lambda m, entry: m.delattr(import_module(entry.strategies), entry.registry),
    "the list of precisions": lambda m, entry: m.delattr(import_module(entry.literals[0][0]), entry.literals[0][1]),
    "the list of the error": lambda m, entry: m.delattr(import_module(entry.literals[1][0]), entry.literals[1][1]),
    "the module of the connector": lambda m, entry: m.setitem(sys.modules, entry.connector[0], None),
}
OF_THE_TRAINER = {
    "what reads checkpoints": lambda m, entry: m.delattr(import_module(entry.reader[0]), entry.reader[1]),
    "what looks at modules": lambda m, entry: m.delattr(import_module(entry.trigger), "_maybe_unwrap_optimized"),
}
GONE = [
    (entry, part)
    for entry in registration._ENTRIES
    for part in (*OF_BOTH, *(OF_THE_TRAINER if entry.owner == "Trainer" else ()))
]


@pytest.mark.parametrize(("entry", "part"), GONE, ids=lambda value: getattr(value, "place", value))
def test_a_private_part_that_is_pretended_to_be_gone_is_one_error_that_names_the_supported_range(
    entry, part, monkeypatch
):
    (OF_BOTH | OF_THE_TRAINER)[part](monkeypatch, entry)
    with pytest.raises(UnsupportedLightningError) as error:
        registration._teach(entry)
    with pytest.raises(UnsupportedLightningError):
        registration.register()  # what a user's import does, which teaches all of them
    told = re.search(
        rf"cannot teach ({'|'.join(entry.distributions)}) \S+ the precision 'fp8-rocm'.* Supported: (\S+)\. Install",
        str(error.value),
    )
    assert told, error.value
    distribution, supported = told.groups()
    assert supported in [line.partition(";")[0] for line in requires("lightning-fp8-rocm")]
    assert supported.startswith(f"{distribution}!=")
    assert supported.endswith(",>=2.6.1")
    assert "remove `import lightning_fp8_rocm`" in str(error.value)


def test_a_list_of_precisions_that_is_pretended_to_be_no_literal_is_left_alone(pl: Lightning, monkeypatch):
    precisions = pl.of_fabric("plugins.precision.precision")
    monkeypatch.setattr(precisions, "_PRECISION_INPUT_STR", str)
    with pytest.raises(UnsupportedLightningError):
        registration.register()
    assert precisions._PRECISION_INPUT_STR is str


@pytest.mark.parametrize("entry", registration._ENTRIES, ids=lambda entry: entry.place)
def test_the_error_names_the_pretended_version(entry, monkeypatch):
    monkeypatch.setattr(registration, "installed", lambda distribution: "2.6.9")
    monkeypatch.delattr(connector(entry), METHOD)
    with pytest.raises(
        UnsupportedLightningError,
        match=rf"cannot teach ({'|'.join(entry.distributions)}) 2\.6\.9 the precision 'fp8-rocm'",
    ):
        registration.register()


def test_after_the_pretence_everything_works_again(pl: Lightning):
    registration.register()
    assert type(pl.Trainer(precision="fp8-rocm", **ON_CPU).precision_plugin) is pl.FP8Precision
    assert type(fabric(pl, precision="fp8-rocm")._precision) is pl.for_fabric("FP8Precision")


PRETENDED = """
import sys
from dataclasses import replace
from importlib import import_module
from lightning_fp8_rocm import registration

broken = [entry for entry in registration._ENTRIES if entry.place in sys.argv[1:]]
registration._ENTRIES = tuple(
    replace(entry, connector=(entry.connector[0], "_RenamedByLightning")) if entry in broken else entry
    for entry in registration._ENTRIES
)
for entry in broken:
    try:
        import_module(entry.package.partition(".")[0])
    except ImportError as error:
        print("told", type(error).__name__, error)
"""


@pytest.mark.parametrize(
    "places",
    [
        ("lightning.fabric.Fabric", "pytorch_lightning.Trainer"),
        ("lightning.pytorch.Trainer", "lightning_fabric.Fabric"),
    ],
)
def test_a_pretended_rename_is_told_also_when_lightning_is_imported_later(places, tmp_path):
    done = python("-c", PRETENDED, *places, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stdout.splitlines() if line.startswith("told ")]
    assert len(told) == len(places)
    for line, place in zip(told, places, strict=True):
        (entry,) = (entry for entry in registration._ENTRIES if entry.place == place)
        assert re.match(
            f"told UnsupportedLightningError lightning_fp8_rocm cannot teach ({'|'.join(entry.distributions)}) ", line
        )
        assert f"module '{entry.connector[0]}' has no attribute '_RenamedByLightning'" in line
