"""`fp8-rocm` as a name: in Trainer, Fabric, environment variables and LightningCLI; and an unknown Lightning.

The real Trainer, Fabric and LightningCLI throughout; a private part of Lightning that is missing is pretended.
"""

import os
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import lightning as L
import pytest
import torch
import yaml
from lightning.fabric import connector as fabric_connector
from lightning.fabric.plugins import MixedPrecision as FabricMixedPrecision
from lightning.fabric.plugins.precision import precision as fabric_precision
from lightning.pytorch import strategies as trainer_strategies
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from lightning.pytorch.plugins import MixedPrecision, TorchCheckpointIO
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, SingleDeviceStrategy, StrategyRegistry
from lightning.pytorch.trainer import trainer as trainer_module
from lightning.pytorch.trainer.connectors import accelerator_connector
from torch import nn

from lightning_fp8_rocm import FP8Precision, FSDP2FP8Strategy, registration
from lightning_fp8_rocm.fabric.precision import FP8Precision as FabricFP8Precision
from lightning_fp8_rocm.registration import UnsupportedLightningError

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
ON_CPU = {"accelerator": "cpu", "devices": 1, "fast_dev_run": 1, **QUIET}


class Model(BoringModel):
    """Two layers: one that can be FP8 and one, of two outputs, that cannot."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, 2))


def python(*args: object, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, args)]
    return subprocess.run(
        command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, timeout=300, check=False
    )


# ---- Trainer and Fabric


def test_a_trainer_takes_the_name():
    trainer = L.Trainer(precision="fp8-rocm", **ON_CPU)
    assert type(trainer.precision_plugin) is FP8Precision
    assert trainer.precision_plugin.recipe == "auto"
    assert trainer.precision == "fp8-rocm"


def test_a_trainer_takes_the_name_beside_the_name_of_a_strategy():
    trainer = L.Trainer(precision="fp8-rocm", strategy="ddp", **ON_CPU)
    assert type(trainer.precision_plugin) is FP8Precision
    assert trainer.strategy.precision_plugin is trainer.precision_plugin


def test_every_trainer_has_a_plugin_of_its_own():
    first, second = (L.Trainer(precision="fp8-rocm", **ON_CPU) for _ in range(2))
    assert first.precision_plugin is not second.precision_plugin


def test_fabric_takes_the_name():
    assert type(L.Fabric(precision="fp8-rocm", accelerator="cpu", devices=1)._precision) is FabricFP8Precision


def test_a_trainer_reads_the_name_from_the_environment(monkeypatch):
    monkeypatch.setenv("PL_TRAINER_PRECISION", "fp8-rocm")
    assert type(L.Trainer(**ON_CPU).precision_plugin) is FP8Precision


def test_fabric_reads_the_name_from_the_environment(monkeypatch):
    monkeypatch.setenv("LT_PRECISION", "fp8-rocm")
    monkeypatch.setenv("LT_CLI_USED", "1")  # what `fabric run` sets
    assert type(L.Fabric(accelerator="cpu", devices=1)._precision) is FabricFP8Precision


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "32-true", "64-true", 32])
def test_other_precisions_are_what_they_were(precision):
    trainer = L.Trainer(precision=precision, **ON_CPU)
    assert not isinstance(trainer.precision_plugin, FP8Precision)
    assert trainer.precision == ("32-true" if precision == 32 else precision)


@pytest.mark.parametrize("entry", [L.Trainer, L.Fabric])
@pytest.mark.parametrize("precision", ["fp8", "FP8-ROCM", "fp8_rocm", 8])
def test_an_unknown_precision_is_lightnings_own_error(entry, precision):
    with pytest.raises(ValueError, match=rf"Precision {precision!r} is invalid. Allowed precision values: \("):
        entry(precision=precision, accelerator="cpu", devices=1)


def test_a_trainer_takes_the_name_of_the_strategy_in_any_case_and_with_any_precision():
    for name, precision in (("fsdp2_fp8", "fp8-rocm"), ("FSDP2_FP8", "bf16-mixed"), ("fsdp2_fp8", None)):
        trainer = L.Trainer(strategy=name, precision=precision, **ON_CPU)
        assert type(trainer.strategy) is FSDP2FP8Strategy
        assert trainer.strategy.precision_plugin is trainer.precision_plugin


def test_the_registry_lists_the_strategy_with_a_description():
    assert "fsdp2_fp8" in StrategyRegistry.available_strategies()
    assert StrategyRegistry["fsdp2_fp8"]["description"] == "FSDP2 with FP8 weight all-gather"
    assert type(StrategyRegistry.get("fsdp2_fp8")) is FSDP2FP8Strategy
    assert StrategyRegistry.get("fsdp2_fp8") is not StrategyRegistry.get("fsdp2_fp8")


# ---- together with plugins


@pytest.mark.parametrize("as_list", [True, False])
@pytest.mark.parametrize("plugin", [lambda: MixedPrecision("bf16-mixed", "cpu"), FP8Precision], ids=["bf16", "fp8"])
def test_the_name_together_with_a_precision_plugin_is_an_error(plugin, as_list):
    plugin = plugin()
    with pytest.raises(ValueError, match=r"Received both `precision='fp8-rocm'` and a precision plugin") as error:
        L.Trainer(precision="fp8-rocm", plugins=[plugin] if as_list else plugin, **ON_CPU)
    assert f"plugins=[{type(plugin).__name__}(...)]" in str(error.value)
    assert "pass `plugins=[FP8Precision(...)]` to set the arguments of FP8" in str(error.value)


def test_the_name_together_with_a_precision_plugin_is_an_error_in_fabric():
    with pytest.raises(ValueError, match="Received both `precision='fp8-rocm'` and a precision plugin"):
        L.Fabric(precision="fp8-rocm", plugins=FabricMixedPrecision("bf16-mixed", "cpu"), accelerator="cpu")


@pytest.mark.parametrize("container", [lambda x: x, lambda x: [x], lambda x: (x,)], ids=["alone", "list", "tuple"])
def test_the_name_together_with_another_kind_of_plugin_works(container):
    checkpoint_io = TorchCheckpointIO()
    trainer = L.Trainer(precision="fp8-rocm", plugins=container(checkpoint_io), **ON_CPU)
    assert trainer.strategy.checkpoint_io is checkpoint_io
    assert type(trainer.precision_plugin) is FP8Precision


def test_the_users_list_of_plugins_is_left_as_it_was():
    plugins = [TorchCheckpointIO()]
    L.Trainer(precision="fp8-rocm", plugins=plugins, **ON_CPU)
    assert len(plugins) == 1


def test_a_strategy_that_carries_a_precision_is_lightnings_own_error():
    strategy = SingleDeviceStrategy(device="cpu", precision_plugin=MixedPrecision("bf16-mixed", "cpu"))
    with pytest.raises(Exception, match="precision set through both strategy class and plugins, choose one"):
        L.Trainer(precision="fp8-rocm", strategy=strategy, **ON_CPU)


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
def test_model_parallel_strategy_is_refused_by_name_at_setup():
    class Configured(Model):
        def configure_model(self) -> None:
            pass

    trainer = L.Trainer(precision="fp8-rocm", strategy=ModelParallelStrategy(), **ON_CPU)
    with pytest.raises(
        TypeError, match=r"does not work with ModelParallelStrategy.* Use strategy 'auto', 'ddp' or 'fsdp2_fp8'"
    ):
        trainer.fit(Configured())


def test_fsdp_refuses_the_plugin_with_lightnings_own_error():
    # What happens on a GPU in the Trainer's constructor; on a CPU Lightning refuses the strategy before that.
    with pytest.raises(TypeError, match=r"FSDP strategy can only work with the `FSDPPrecision` plugin"):
        FSDPStrategy().precision_plugin = FP8Precision()


# ---- the order of imports

ORDER = """
import sys
from importlib import import_module, reload

for step in sys.argv[1:]:
    verb, name = step.split(":")
    reload(sys.modules[name]) if verb == "reload" else import_module(name)

import lightning as L
import lightning.fabric.cli
from lightning.fabric.connector import _Connector
from lightning.fabric.plugins.precision import precision
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
print(type(L.Trainer(precision="fp8-rocm", strategy="fsdp2_fp8", devices=1, **quiet).strategy))
print(type(L.Trainer(precision="fp8-rocm", **quiet).precision_plugin))
print("torchao asked for", "torchao" in sys.modules)
print(type(L.Fabric(precision="fp8-rocm", accelerator="cpu", devices=1)._precision))
for connector in (_AcceleratorConnector, _Connector):
    depth, function = 0, connector._check_config_and_set_final_flags
    while hasattr(function, "__wrapped__"):
        depth, function = depth + 1, function.__wrapped__
    print("wrapped", depth)
for annotation in (L.Trainer.__init__.__annotations__["precision"], L.Fabric.__init__.__annotations__["precision"],
                   precision._PRECISION_INPUT_STR):
    print("named", str(annotation).count("fp8-rocm"))
option = next(option for option in lightning.fabric.cli._run.params if option.name == "precision")
print("offered", "fp8-rocm" in option.type.choices)
"""
OURS = "lightning_fp8_rocm"


@pytest.mark.parametrize(
    "steps",
    [
        [f"import:{OURS}", "import:lightning"],
        ["import:lightning", f"import:{OURS}"],
        [f"import:{OURS}", f"reload:{OURS}.registration", f"reload:{OURS}", "import:lightning", f"reload:{OURS}"],
    ],
    ids=["before lightning", "after lightning", "again and again"],
)
def test_the_order_of_imports_does_not_matter_and_nothing_is_wrapped_twice(steps, tmp_path):
    script = tmp_path / "order.py"
    script.write_text(ORDER)
    done = python(script, *steps, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    starts = ("<class", "torchao", "wrapped", "named", "offered")
    told = [line for line in done.stdout.splitlines() if line.startswith(starts)]
    assert told == [
        "<class 'lightning_fp8_rocm.pytorch.strategy.FSDP2FP8Strategy'>",
        "<class 'lightning_fp8_rocm.pytorch.precision.FP8Precision'>",
        "torchao asked for False",
        "<class 'lightning_fp8_rocm.fabric.precision.FP8Precision'>",
        *["wrapped 1"] * 2,
        *["named 1"] * 3,
        "offered True",
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


def cli(*args: str, **kwargs) -> LightningCLI:
    kwargs = {"run": False, "save_config_callback": None, "seed_everything_default": False, **kwargs}
    flags = [f"--trainer.{key}={str(value).lower()}" for key, value in ON_CPU.items()]
    return LightningCLI(Model, BoringDataModule, args=[*flags, *args], **kwargs)


def test_the_cli_takes_the_name_as_an_argument():
    assert type(cli("--trainer.precision=fp8-rocm").trainer.precision_plugin) is FP8Precision


def test_the_cli_takes_the_name_from_yaml(tmp_path):
    config = tmp_path / "fp8.yaml"
    config.write_text("trainer:\n  precision: fp8-rocm\n")
    assert type(cli(f"--config={config}").trainer.precision_plugin) is FP8Precision


def test_the_cli_takes_the_name_as_a_default():
    assert type(cli(trainer_defaults={"precision": "fp8-rocm"}).trainer.precision_plugin) is FP8Precision


def test_the_cli_takes_the_name_from_its_environment_variable(monkeypatch):
    monkeypatch.setenv("PL_TRAINER__PRECISION", "fp8-rocm")
    assert type(cli(parser_kwargs={"default_env": True}).trainer.precision_plugin) is FP8Precision


class TrainerWithKeywords(L.Trainer):
    """As users write it: what it does not know it hands on, and jsonargparse finds out what that is."""

    def __init__(self, *args, note: str = "", **kwargs):
        super().__init__(*args, **kwargs)
        self.note = note


def test_the_cli_takes_the_name_for_a_subclass_of_trainer_that_hands_keywords_on():
    trainer = cli("--trainer.precision=fp8-rocm", "--trainer.note=mine", trainer_class=TrainerWithKeywords).trainer
    assert type(trainer.precision_plugin) is FP8Precision
    assert trainer.note == "mine"


def test_the_cli_takes_the_name_of_the_strategy_from_yaml_and_as_a_default(tmp_path):
    config = tmp_path / "fsdp2.yaml"
    config.write_text("trainer:\n  precision: fp8-rocm\n  strategy: fsdp2_fp8\n")
    for trainer in (cli(f"--config={config}").trainer, cli(trainer_defaults={"strategy": "fsdp2_fp8"}).trainer):
        assert type(trainer.strategy) is FSDP2FP8Strategy


def test_print_config_shows_the_name_of_the_strategy(capsys):
    with pytest.raises(SystemExit):
        cli("--trainer.strategy=fsdp2_fp8", "--print_config")
    assert yaml.safe_load(capsys.readouterr().out)["trainer"]["strategy"] == "fsdp2_fp8"


def test_help_for_the_strategy_shows_every_argument_with_its_docs(capsys):
    with pytest.raises(SystemExit) as stop:
        cli("--trainer.strategy.help=lightning_fp8_rocm.FSDP2FP8Strategy")
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


def test_the_cli_takes_other_precisions_as_before():
    assert type(cli("--trainer.precision=bf16-mixed").trainer.precision_plugin) is MixedPrecision


def test_the_cli_refuses_an_unknown_precision_and_lists_the_name(capsys):
    with pytest.raises(SystemExit):
        cli("--trainer.precision=fp8")
    error = capsys.readouterr().err
    assert 'Parser key "trainer.precision"' in error
    assert "fp8-rocm" in error


def test_print_config_shows_the_name(capsys):
    with pytest.raises(SystemExit) as stop:
        cli("--trainer.precision=fp8-rocm", "--print_config")
    assert stop.value.code == 0
    assert yaml.safe_load(capsys.readouterr().out)["trainer"]["precision"] == "fp8-rocm"


def test_help_lists_the_name_for_the_precision_of_the_trainer(capsys):
    with pytest.raises(SystemExit) as stop:
        cli("fit", "--help", run=True)
    assert stop.value.code == 0
    _, _, rest = capsys.readouterr().out.partition("  --trainer.precision PRECISION")
    about_precision, _, _ = rest.partition("\n  --trainer.")
    assert "'fp8-rocm'" in about_precision


def test_help_for_the_plugin_shows_every_argument_with_its_docs(capsys):
    with pytest.raises(SystemExit) as stop:
        cli("--trainer.plugins.help=lightning_fp8_rocm.FP8Precision")
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
def test_the_cli_refuses_an_unknown_recipe_and_lists_the_known_ones(recipe):
    with pytest.raises(ValueError, match=r"one of 'auto', 'tensorwise', 'rowwise', 'rowwise_with_gw_hp', but got"):
        cli("--trainer.plugins=lightning_fp8_rocm.FP8Precision", f"--trainer.plugins.recipe={recipe}")


# ---- LightningCLI, as a user starts it

MAIN = """
import sys
{imports}
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
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
LIGHTNING_CLI = "from lightning.pytorch.cli import LightningCLI"
SHORT = ["--trainer.accelerator=cpu", "--trainer.max_steps=1", "--trainer.limit_val_batches=0"]
SHORT += [f"--trainer.{key}=false" for key in QUIET]


def script(folder: Path, *imports: str) -> Path:
    path = folder / "main.py"
    path.write_text(MAIN.format(imports="\n".join(imports)))
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
    class_path: lightning_fp8_rocm.FSDP2FP8Strategy
    init_args: {auto_wrap_policy: [Sequential], compile: false}
  plugins:
    - class_path: lightning_fp8_rocm.FP8Precision
      init_args:
        recipe:  # one of one's own: scales by row, the gradient of the weight in bf16
          output: {left: {granularity: row}, right: {granularity: row}}
          grad_input: {left: {granularity: row, element: e5m2}, right: {granularity: row}}
          grad_weight: null
          name: mine
        include: ["layer.*"]
        fp8_format: fnuz
    - class_path: lightning.pytorch.plugins.io.TorchCheckpointIO
"""


BY_CLASS_PATH = {
    "arguments": (["--trainer.plugins=lightning_fp8_rocm.FP8Precision", "--trainer.plugins.recipe=rowwise"], "rowwise"),
    "yaml": (["--config=fp8.yaml"], "mine, format fnuz"),
}


@pytest.fixture(scope="module", params=BY_CLASS_PATH)
def run_by_class_path(request, tmp_path_factory):
    """What a script without an import of ours printed, and the recipe that it was told."""
    arguments, recipe = BY_CLASS_PATH[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "fp8.yaml").write_text(PLUGINS_YAML)
    done = python(script(folder, LIGHTNING_CLI), "fit", *SHORT, *arguments, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout, recipe


def test_the_class_path_works_in_a_script_without_an_import_of_ours(run_by_class_path):
    printed, recipe = run_by_class_path
    assert "imported before the CLI: False" in printed
    assert f"FP8 conversion: recipe {recipe}" in printed
    assert ("FSDP2: " in printed) is (recipe == BY_CLASS_PATH["yaml"][1])


def test_the_class_path_imports_no_torchao_before_the_run(run_by_class_path):
    printed, _ = run_by_class_path
    assert "torchao imported before the run: False" in printed


# ---- a Lightning that is not as known


METHOD = "_check_config_and_set_final_flags"
ACCELERATOR_CONNECTOR, CONNECTOR = accelerator_connector._AcceleratorConnector, fabric_connector._Connector
GONE = {
    "the Trainer's connector": lambda m: m.delattr(accelerator_connector, "_AcceleratorConnector"),
    "Fabric's connector": lambda m: m.delattr(fabric_connector, "_Connector"),
    "the method of the Trainer's connector": lambda m: m.delattr(ACCELERATOR_CONNECTOR, METHOD),
    "the method of Fabric's connector": lambda m: m.delattr(CONNECTOR, METHOD),
    "its argument `precision`": lambda m: m.setattr(ACCELERATOR_CONNECTOR, METHOD, lambda self, plugins: None),
    "its argument `plugins`": lambda m: m.setattr(CONNECTOR, METHOD, lambda self, precision: None),
    "the class Trainer": lambda m: m.delattr(trainer_module, "Trainer"),
    "the Trainer's annotation": lambda m: m.delitem(L.Trainer.__init__.__annotations__, "precision"),
    "Fabric's annotation": lambda m: m.delitem(L.Fabric.__init__.__annotations__, "precision"),
    "the registry of strategies": lambda m: m.delattr(trainer_strategies, "StrategyRegistry"),
    "the list of precisions": lambda m: m.delattr(fabric_precision, "_PRECISION_INPUT_STR"),
    "the module of the connector": lambda m: m.setitem(sys.modules, fabric_connector.__name__, None),
}


@pytest.mark.parametrize("part", GONE)
def test_a_private_part_that_is_pretended_to_be_gone_is_one_error_that_names_the_supported_range(part, monkeypatch):
    GONE[part](monkeypatch)
    with pytest.raises(UnsupportedLightningError) as error:
        registration.register()
    supported = next(line for line in requires("lightning-fp8-rocm") if line.startswith("lightning"))
    assert f"Supported: {supported}. " in str(error.value)
    assert ">=2.6.1" in supported
    assert "remove `import lightning_fp8_rocm`" in str(error.value)


def test_a_list_of_precisions_that_is_pretended_to_be_no_literal_is_left_alone(monkeypatch):
    monkeypatch.setattr(fabric_precision, "_PRECISION_INPUT_STR", str)
    with pytest.raises(UnsupportedLightningError):
        registration.register()
    assert fabric_precision._PRECISION_INPUT_STR is str


def test_the_error_names_the_pretended_version(monkeypatch):
    monkeypatch.setattr(registration, "installed", lambda distribution: {"lightning": "2.6.9"}[distribution])
    monkeypatch.delattr(CONNECTOR, METHOD)
    with pytest.raises(UnsupportedLightningError, match=r"cannot teach lightning 2\.6\.9 the precision 'fp8-rocm'"):
        registration.register()


def test_after_the_pretence_everything_works_again():
    registration.register()
    assert type(L.Trainer(precision="fp8-rocm", **ON_CPU).precision_plugin) is FP8Precision


PRETENDED = """
from dataclasses import replace
from lightning_fp8_rocm import registration

registration._ENTRIES = tuple(
    replace(entry, connector=(entry.connector[0], "_RenamedByLightning")) for entry in registration._ENTRIES
)
try:
    import lightning
except ImportError as error:
    print(type(error).__name__, error)
"""


def test_a_pretended_rename_is_told_also_when_lightning_is_imported_later(tmp_path):
    done = python("-c", PRETENDED, cwd=tmp_path)
    assert done.stdout.startswith("UnsupportedLightningError lightning_fp8_rocm cannot teach lightning"), done.stderr
    assert "_RenamedByLightning" in done.stdout
