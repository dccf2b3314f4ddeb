"""`FSDP2FP8Strategy` under a real Trainer: its arguments and errors, the stages of a run, checkpoints, callbacks.

Ranks are real gloo processes. What is only pretended, the backend `nccl` and AMD's hardware, says so in its name.
"""

import inspect
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from flavours import LIGHTNING, STANDALONE, Lightning, over
from models import Blocks, batches
from ranks import Ranks
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor

from lightning_fp8_rocm import FP8Linear, Operand, Product, convert, hardware
from lightning_fp8_rocm import FP8Recipe as Recipe
from lightning_fp8_rocm.distributed.all_gather import MarkedShard


def fp8_layers(module: nn.Module) -> list[str]:
    return [name for name, child in module.named_modules() if isinstance(child, FP8Linear)]


def marked(module: nn.Module) -> list[str]:
    return [
        name
        for name, parameter in module.named_parameters()
        if isinstance(parameter, DTensor) and isinstance(parameter._local_tensor, MarkedShard)
    ]


def full_weights(module: nn.Module) -> dict[str, Tensor]:
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in module.named_parameters()
    }


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def sharded_trainer(pl: Lightning, precision: Any = "fp8-rocm", *, strategy: Any = "fsdp2_fp8", **flags: Any) -> Any:
    """A Trainer over all ranks of this call, or over one process."""
    flags.setdefault("devices", dist.get_world_size() if dist.is_initialized() else 1)
    return pl.trainer(precision, strategy=strategy, **flags)


HAS_TENSORBOARD = find_spec("tensorboard") is not None
WEIGHTS = ["blocks.0.1.weight", "blocks.0.3.weight", "blocks.1.1.weight", "blocks.1.3.weight"]

# ---------------------------------------------------------------------------------------------------------------------
# Arguments


def test_the_arguments_and_their_defaults_are_these(pl: Lightning) -> None:
    parameters = inspect.signature(pl.FSDP2FP8Strategy).parameters
    defaults = {name: p.default for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD}
    assert defaults == {
        "auto_wrap_policy": "auto",
        "activation_checkpointing_policy": None,
        "fp8_all_gather": "auto",
        "device_mesh": None,
        "reshard_after_forward": None,
        "reduce_dtype": "float32",
        "cpu_offload": False,
        "compile": "auto",
        "gradient_sync": "last",
        "forward_prefetch": None,
        "backward_prefetch": None,
        "find_unused_parameters": False,
        "state_dict_type": "sharded",
        "async_checkpoint": False,
        "process_group_backend": None,
        "timeout": timedelta(minutes=30),
    }


ALLOWED: dict[str, list[Any]] = {
    "auto_wrap_policy": ["auto", {nn.Linear}, ["Block"], (nn.Linear, "Block"), lambda module: False],
    "activation_checkpointing_policy": [None, "full", "selective", {nn.Linear}, ["Block"]],
    "fp8_all_gather": ["auto", True, False],
    "device_mesh": [None, (1, 2), [2, 4]],
    "reshard_after_forward": [None, True, False],
    "reduce_dtype": ["float32", "bfloat16"],
    "cpu_offload": [True, False],
    "compile": ["auto", True, False, {}, {"mode": "default"}],
    "gradient_sync": ["last", "every"],
    "forward_prefetch": [None, 0, 2],
    "backward_prefetch": [None, 0, 2],
    "find_unused_parameters": [True, False],
    "state_dict_type": ["sharded", "full"],
    "async_checkpoint": [True, False],
    "process_group_backend": [None, "gloo", "cpu:gloo,cuda:nccl"],
    "timeout": [None, timedelta(seconds=5)],
}


@pytest.mark.parametrize("argument", ALLOWED)
def test_allowed_values_are_taken(pl: Lightning, argument: str) -> None:
    for value in ALLOWED[argument]:
        pl.FSDP2FP8Strategy(**{argument: value})


REFUSED: dict[str, tuple[list[Any], str]] = {
    "auto_wrap_policy": (["Block", None, set(), {3}, 5, nn.Linear(2, 2), nn.Linear], r"'auto'.*a set of.*function"),
    "activation_checkpointing_policy": (["some", True, set(), {3}, [None]], r"None, 'full', 'selective'.*set of"),
    "fp8_all_gather": (["yes", None, 1], "'auto', True, False"),
    "device_mesh": ([2, (2,), (1, 2, 3), (0, 2), (1.0, 2), "1,2", (True, 2)], r"None or a pair \(replicate, shard\)"),
    "reshard_after_forward": (["auto", 2, 1], "None, True, False"),
    "reduce_dtype": (["float16", None, torch.float32], "'float32', 'bfloat16'"),
    "cpu_offload": ([None, 1, "cpu"], "True, False"),
    "compile": (["reduce-overhead", None, 1], "'auto', True, False.*A dict of arguments of `torch.compile`"),
    "gradient_sync": (["first", None, True], "'last', 'every'"),
    "forward_prefetch": ([-1, 1.0, True, "2"], r"None or a number of blocks >= 0"),
    "backward_prefetch": ([-1, 1.0, True, "2"], r"None or a number of blocks >= 0"),
    "find_unused_parameters": (["auto", None, 1], "True, False"),
    "state_dict_type": (["local", None], "'sharded', 'full'"),
    "async_checkpoint": ([None, 1, "auto"], "True, False"),
    "process_group_backend": ([5, ""], "None or the name of a backend"),
    "timeout": ([30, "30"], "None or a `datetime.timedelta`"),
}


@pytest.mark.parametrize("argument", REFUSED)
def test_another_value_is_refused_with_the_argument_what_is_allowed_and_what_was_given(
    pl: Lightning, argument: str
) -> None:
    values, allowed = REFUSED[argument]
    for value in values:
        with pytest.raises((TypeError, ValueError)) as error:
            pl.FSDP2FP8Strategy(**{argument: value})
        says = rf"argument `{argument}` of FSDP2FP8Strategy.*{allowed}"
        assert re.search(says, str(error.value), re.DOTALL), error.value
        assert repr(value) in str(error.value)
    assert set(ALLOWED) == set(REFUSED) == set(list(inspect.signature(pl.FSDP2FP8Strategy).parameters)[:-1])


def test_resharding_to_fewer_ranks_is_refused_with_the_reason(pl: Lightning) -> None:
    with pytest.raises(ValueError, match="smaller group of ranks does not work with weights gathered in FP8"):
        pl.FSDP2FP8Strategy(reshard_after_forward=4)


def test_every_argument_of_lightnings_own_sharded_strategies_that_is_none_of_ours_names_what_to_use(
    pl: Lightning,
) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    ours = set(ALLOWED)
    theirs: set[str] = set()
    for known in (
        pl.strategies.FSDPStrategy,
        pl.strategies.ModelParallelStrategy,
        FullyShardedDataParallel,
        fully_shard,
    ):
        theirs |= {n for n, p in inspect.signature(known).parameters.items() if p.kind is not p.VAR_KEYWORD}
    theirs -= ours | {"self", "module"}
    theirs |= {"activation_checkpointing", "use_fp8_all_gather", "accelerator"}
    assert {"mixed_precision", "sharding_strategy", "tensor_parallel_size", "mp_policy", "offload_policy"} <= theirs
    for name in sorted(theirs):
        with pytest.raises(TypeError, match=rf"FSDP2FP8Strategy has no argument `{name}`\. Use .+ instead\."):
            pl.FSDP2FP8Strategy(**{name: None})
        assert name not in ours


def test_a_mistyped_argument_is_a_type_error_that_lists_the_arguments(pl: Lightning) -> None:
    with pytest.raises(TypeError, match=r"unexpected argument `reduce_type`.*'reduce_dtype'") as error:
        pl.FSDP2FP8Strategy(reduce_type="float32")
    assert all(repr(name) in str(error.value) for name in ALLOWED)


# ---------------------------------------------------------------------------------------------------------------------
# Precisions


def test_a_precision_is_never_taken_from_the_strategy(pl: Lightning) -> None:
    with pytest.raises(TypeError, match=r"no argument `precision_plugin`\. Use `Trainer\(precision=...\)`"):
        pl.FSDP2FP8Strategy(precision_plugin=pl.FP8Precision())
    strategy = pl.FSDP2FP8Strategy()
    with pytest.raises(TypeError, match=r'Pass it to the Trainer: `Trainer\(precision="fp8-rocm"\)`'):
        strategy.precision_plugin = pl.FP8Precision()


@pytest.mark.parametrize(
    "make",
    [
        lambda precision: precision.HalfPrecision("16-true"),
        lambda precision: precision.MixedPrecision("16-mixed", "cuda"),
        lambda precision: precision.DoublePrecision(),
        lambda precision: type("TE", (precision.Precision,), {})(),
    ],
    ids=["half", "mixed", "double", "another"],
)
def test_other_precisions_are_refused_by_name(pl: Lightning, make: Callable[[Any], Any]) -> None:
    plugin = make(pl.of("plugins.precision"))
    with pytest.raises(ValueError, match=r"does not work with the precision.*Allowed: 'fp8-rocm', 'bf16-mixed'") as e:
        sharded_trainer(pl, plugin)
    assert repr(plugin.precision) in str(e.value)
    assert type(plugin).__name__ in str(e.value)


@pytest.mark.parametrize("name", ["16-true", "64-true"])
def test_other_precisions_are_refused_as_strings(pl: Lightning, name: str) -> None:
    with pytest.raises(ValueError, match=rf"does not work with the precision '{name}'"):
        sharded_trainer(pl, name)


def test_an_instance_that_has_served_one_trainer_serves_the_next_with_the_next_ones_precision(pl: Lightning) -> None:
    strategy, module = pl.FSDP2FP8Strategy(), pl.module(Blocks)()
    sharded_trainer(pl, "fp8-rocm", strategy=strategy, fast_dev_run=1).fit(module, batches())
    assert module.kinds.pop("train") == {"FP8Linear"}
    with pytest.raises(
        pl.of("utilities.exceptions").MisconfigurationException,
        match="accelerator set through both strategy class and accelerator",
    ):
        sharded_trainer(pl, "bf16-true", strategy=strategy)  # Lightning refuses any strategy that has served
    strategy._accelerator, strategy.parallel_devices = None, None
    second = sharded_trainer(pl, pl.plugins.MixedPrecision("bf16-mixed", "cpu"), strategy=strategy, fast_dev_run=1)
    assert second.strategy is strategy
    assert type(second.precision_plugin) is pl.plugins.MixedPrecision
    second.fit(module, batches())
    assert module.kinds["train"] == {"Linear"}
    assert fp8_layers(module) == []


class Made:
    """What torch was told of the blocks, where the arguments of the strategy take effect."""

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        states = [block._get_fsdp_state() for block in module.blocks]
        group = states[0]._fsdp_param_groups[0]
        self.found = {
            "cpu_offload": isinstance(group.offload_policy, CPUOffloadPolicy),
            "reduce_dtype": group.mp_policy.reduce_dtype,
            "reshard_after_forward": group._reshard_after_forward,
            "forward_prefetch": [states.index(state) for state in states[0]._states_to_forward_prefetch],
            "backward_prefetch": [states.index(state) for state in states[1]._states_to_backward_prefetch],
            "find_unused_parameters": group.reduce_scatter_unused_params,
            "activation_checkpointing_policy": "_unpatched_forward" in vars(module.blocks[0]),
            "compile": module.blocks[0]._compiled_call_impl is not None,
            "auto_wrap_policy": "blocks.0.1" in trainer.strategy.report.units,
        }


@pytest.mark.parametrize("pl", [LIGHTNING], ids=str)
def test_each_argument_reaches_what_it_is_for(pl: Lightning) -> None:
    def made(**arguments: Any) -> dict[str, Any]:
        seen = pl.callback(Made)()
        module = pl.module(Blocks)()
        sharded_trainer(pl, strategy=pl.FSDP2FP8Strategy(**arguments), callbacks=[seen], fast_dev_run=1).fit(
            module, batches()
        )
        assert "_unpatched_forward" not in vars(module.blocks[0])
        assert module.blocks[0]._compiled_call_impl is None
        return seen.found

    usual = {
        "cpu_offload": False,
        "reduce_dtype": torch.float32,
        "reshard_after_forward": True,
        "forward_prefetch": [],
        "backward_prefetch": [],
        "find_unused_parameters": False,
        "activation_checkpointing_policy": False,
        "compile": False,
        "auto_wrap_policy": False,
    }
    assert made() == usual
    assert made(
        cpu_offload=True,
        reduce_dtype="bfloat16",
        forward_prefetch=1,
        find_unused_parameters=True,
        activation_checkpointing_policy="full",
    ) == usual | {
        "cpu_offload": True,
        "reduce_dtype": torch.bfloat16,
        "forward_prefetch": [1],
        "find_unused_parameters": True,
        "activation_checkpointing_policy": True,
    }
    assert made(reshard_after_forward=False, backward_prefetch=1, compile={"backend": "eager"}) == usual | {
        "reshard_after_forward": False,
        "backward_prefetch": [0],
        "compile": True,
    }
    assert made(auto_wrap_policy={"Linear", "Sequential"})["auto_wrap_policy"]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_row_scales_alone_ask_inductor_for_the_casts_of_eager(
    pl: Lightning, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(nn.Module, "compile", lambda module, **kwargs: told.append(kwargs))
    strategy = pl.FSDP2FP8Strategy(compile=True)
    sharded_trainer(pl, pl.FP8Precision(recipe), strategy=strategy, fast_dev_run=1).fit(pl.module(Blocks)(), batches())
    assert told == [{"options": {"emulate_precision_casts": True}} if recipe == "rowwise" else {}] * 2


def test_a_module_may_be_made_on_meta_by_the_trainer(pl: Lightning) -> None:
    run = sharded_trainer(pl, fast_dev_run=1)
    with run.init_module(empty_init=True):
        module = pl.module(Blocks)()
    assert all(parameter.is_meta for parameter in module.parameters())
    run.fit(module, batches())
    assert all(parameter.full_tensor().isfinite().all() for parameter in module.parameters())


# ---------------------------------------------------------------------------------------------------------------------
# LightningCLI


@pytest.fixture
def cli(pl: Lightning, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    monkeypatch.setattr(sys, "argv", ["main.py"])

    def parse(strategy: str, *args: str) -> Any:
        path = tmp_path / "config.yaml"
        path.write_text(f"trainer:\n  accelerator: cpu\n  devices: 1\n  logger: false\n{strategy}")
        options = {"run": False, "save_config_callback": None, "seed_everything_default": 1}
        return pl.cli.LightningCLI(pl.module(Blocks), args=[f"--config={path}", *args], **options)

    return parse


def by_class_path(pl: Lightning, argument: str, text: str) -> str:
    """YAML for the strategy with one argument."""
    return f"""
  strategy:
    class_path: {pl.class_path("FSDP2FP8Strategy")}
    init_args:
      {argument}: {text}
"""


@pytest.mark.parametrize(
    ("argument", "text", "expected"),
    [
        ("auto_wrap_policy", "[torch.nn.GELU, torch.nn.LayerNorm]", {nn.GELU, nn.LayerNorm}),
        ("auto_wrap_policy", "[LlamaDecoderLayer, Block]", {"LlamaDecoderLayer", "Block"}),
        ("auto_wrap_policy", "[Block, torch.nn.GELU]", {"Block", nn.GELU}),
        ("auto_wrap_policy", "auto", "auto"),
        ("activation_checkpointing_policy", "selective", "selective"),
        ("activation_checkpointing_policy", "[torch.nn.GELU]", {nn.GELU}),
        ("device_mesh", "[1, 2]", (1, 2)),
        ("compile", "{mode: max-autotune, dynamic: false}", {"mode": "max-autotune", "dynamic": False}),
        ("compile", "auto", "auto"),
        ("compile", "false", False),
        ("timeout", "0:05:00", timedelta(minutes=5)),
        ("fp8_all_gather", "true", True),
        ("reduce_dtype", "bfloat16", "bfloat16"),
        ("forward_prefetch", "2", 2),
    ],
)
def test_the_cli_takes_arguments_from_yaml(pl: Lightning, cli: Any, argument: str, text: str, expected: Any) -> None:
    run = cli(by_class_path(pl, argument, text)).trainer
    assert type(run.strategy) is pl.FSDP2FP8Strategy
    names = {"device_mesh": "mesh_sizes", "timeout": "_timeout"}
    assert getattr(run.strategy, names.get(argument, argument)) == expected


@pytest.mark.parametrize("text", ["[1, 2]", "{mode: default}", "[torch.nn.GELU]", "0:05:00"])
def test_a_printed_config_can_be_read_again(pl: Lightning, cli: Any, text: str, capsys: Any, tmp_path: Path) -> None:
    argument = {"[1, 2]": "device_mesh", "{mode: default}": "compile", "0:05:00": "timeout"}.get(
        text, "auto_wrap_policy"
    )
    with pytest.raises(SystemExit):
        cli(by_class_path(pl, argument, text), "--print_config")
    printed = yaml.safe_load(capsys.readouterr().out)["trainer"]["strategy"]
    again = cli("  strategy: " + yaml.safe_dump(printed, default_flow_style=True).replace("\n", " ") + "\n")
    first = cli(by_class_path(pl, argument, text))
    names = {"device_mesh": "mesh_sizes", "timeout": "_timeout"}
    one, other = (getattr(c.trainer.strategy, names.get(argument, argument)) for c in (first, again))
    assert one == other


def test_the_cli_refuses_an_argument_of_fsdp1_by_name(pl: Lightning, cli: Any, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        cli(by_class_path(pl, "mixed_precision", "bf16"))
    assert "mixed_precision" in capsys.readouterr().err  # what jsonargparse says of it differs by version


def test_the_cli_takes_both_names_and_both_class_paths(pl: Lightning, cli: Any) -> None:
    by_name = cli("  strategy: fsdp2_fp8\n  precision: fp8-rocm\n").trainer
    by_path = cli(
        f"  strategy: {{class_path: {pl.class_path('FSDP2FP8Strategy')}}}\n"
        f"  plugins: [{{class_path: {pl.class_path('FP8Precision')}}}]\n"
    ).trainer
    for run in (by_name, by_path):
        assert type(run.strategy) is pl.FSDP2FP8Strategy
        assert type(run.precision_plugin) is pl.FP8Precision
        assert run.strategy.precision_plugin is run.precision_plugin


# ---------------------------------------------------------------------------------------------------------------------
# What cannot be sharded


def fails(pl: Lightning, module: Any, match: str, precision: Any = "fp8-rocm", **flags: Any) -> str:
    """Fit one batch, and expect that it is refused."""
    with pytest.raises((TypeError, ValueError, RuntimeError)) as error:
        sharded_trainer(pl, precision, fast_dev_run=1, **flags).fit(module, batches())
    assert re.search(match, str(error.value), re.DOTALL), error.value
    assert fp8_layers(module) == [], "the module is given back as it was"
    assert not isinstance(module, FSDPModule)
    return str(error.value)


@pytest.mark.parametrize("name", ["StochasticWeightAveraging", "WeightAveraging", "EMAWeightAveraging"])
def test_callbacks_that_copy_the_whole_model_are_refused_by_name(pl: Lightning, name: str) -> None:
    arguments = {"swa_lrs": 1e-3} if name.startswith("Stochastic") else {}
    callback = getattr(pl.callbacks, name)(**arguments)
    fails(
        pl,
        pl.module(Blocks)(),
        rf"The callback {name} copies the whole model.*Use `lightning_fp8_rocm\.EMA`",
        callbacks=[callback],
    )


def test_a_compiled_lightning_module_is_refused_by_lightning(pl: Lightning) -> None:
    with pytest.raises(RuntimeError, match="compiled model is incompatible with the current strategy: `FSDP2FP8Strate"):
        sharded_trainer(pl, fast_dev_run=1).fit(torch.compile(pl.module(Blocks)()), batches())


def test_one_device_runs_in_fp8_and_gathers_nothing(pl: Lightning, capsys: Any) -> None:
    module, seen = pl.module(Blocks)(), pl.callback(Watch)()
    run = sharded_trainer(pl, callbacks=[seen], fast_dev_run=2)
    run.fit(module, batches())
    assert module.kinds["train"] == {"FP8Linear"}
    assert seen.marked == []
    assert seen.sharded == [name for name, _ in module.named_parameters()]
    assert "FSDP2: 4 units on 1 rank, nothing to gather." in capsys.readouterr().out


def test_sync_batchnorm_is_refused(pl: Lightning) -> None:
    fails(
        pl,
        pl.module(Blocks)(),
        r"sync_batchnorm=True.*not supported by FSDP2FP8Strategy.*LayerNorm",
        sync_batchnorm=True,
    )


class OnMeta(Blocks):
    """Gets one more child, made on `meta`."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.make = make

    def configure_model(self) -> None:
        if not hasattr(self, "extra"):
            with torch.device("meta"):
                self.extra = self.make()


class CannotInitialise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(16, 16))


class LosesABuffer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(16, 16)
        self.register_buffer("angles", torch.arange(16.0), persistent=False)


def test_what_lies_on_meta_and_cannot_initialise_itself_is_refused_by_name(pl: Lightning) -> None:
    says = r"extra \(CannotInitialise: table\).*Give them a method `reset_parameters\(\)`"
    fails(pl, pl.module(OnMeta)(CannotInitialise), says)
    fails(
        pl,
        pl.module(OnMeta)(LosesABuffer),
        r"extra \(LosesABuffer\).*did not fill 'angles'.*the values would be random",
    )


def test_lazy_layers_and_scalars_are_refused_by_name(pl: Lightning) -> None:
    class Bad(pl.module(Blocks)):
        def __init__(self) -> None:
            super().__init__()
            self.lazy = nn.LazyLinear(16)
            self.scale = nn.Parameter(torch.tensor(1.0))

    message = fails(pl, Bad(), "FSDP2 cannot train this module as it is")
    assert "'scale' has no dimension to shard" in message
    assert "'lazy.weight' is not initialised yet" in message


def test_a_policy_that_matches_nothing_is_refused_and_lists_the_classes(pl: Lightning) -> None:
    strategy = pl.FSDP2FP8Strategy(auto_wrap_policy={"LlamaDecoderLayer"})
    fails(
        pl,
        pl.module(Blocks)(),
        r"'LlamaDecoderLayer' in `auto_wrap_policy` matches no module.*Sequential",
        strategy=strategy,
    )
    strategy = pl.FSDP2FP8Strategy(activation_checkpointing_policy={"LlamaDecoderLayer"})
    fails(
        pl,
        pl.module(Blocks)(),
        "'LlamaDecoderLayer'.*`activation_checkpointing_policy.*matches no module.*Classes in",
        strategy=strategy,
    )


def test_compile_without_blocks_is_refused_where_it_was_asked(pl: Lightning) -> None:
    class Flat(pl.module(Blocks)):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([self.blocks[0]])

    fails(pl, Flat(), "this one has none. Name them in `auto_wrap_policy`", strategy=pl.FSDP2FP8Strategy(compile=True))


def refused(pl: Lightning, module: Any, precision: Any = "fp8-rocm", **flags: Any) -> tuple[str, str]:
    """What a rank is told when it fits ``module``."""
    try:
        sharded_trainer(pl, precision, fast_dev_run=1, **flags).fit(module, batches())
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


class WithScalar(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(1.0))


class WithoutOptimizer(Blocks):
    def configure_optimizers(self) -> Any:
        raise ValueError("no learning rate")


class TensorParallel(Blocks):
    def configure_model(self) -> None:
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

        parallelize_module(self.head, self.device_mesh, ColwiseParallel())


class WrappedByFSDP1(Blocks):
    def configure_model(self) -> None:
        from torch.distributed.fsdp import FullyShardedDataParallel

        self.blocks[0] = FullyShardedDataParallel(self.blocks[0], device_id=torch.device("cpu"))


def _errors(pl: Lightning, path: Path) -> dict[str, tuple[str, str]]:
    first = dist.get_rank() == 0
    run = sharded_trainer(pl, fast_dev_run=1)
    run.fit(pl.module(Blocks)(), batches())
    run.save_checkpoint(path / "good.ckpt")
    unlike = Recipe(
        Product(Operand("row"), Operand("row")), Product(Operand("row", "e5m2"), Operand("row")), None, name="mine"
    )
    return {
        "mesh": refused(pl, pl.module(Blocks)(), strategy=pl.FSDP2FP8Strategy(device_mesh=(2, 2))),
        "all-gather": refused(
            pl, pl.module(Blocks)(), pl.FP8Precision(unlike), strategy=pl.FSDP2FP8Strategy(fp8_all_gather=True)
        ),
        "tp": refused(pl, pl.module(TensorParallel)()),
        "fsdp1": refused(pl, pl.module(WrappedByFSDP1)()),
        "one bad layer": refused(pl, pl.module(Blocks)() if first else pl.module(WithScalar)()),
        "one bad pattern": refused(pl, pl.module(Blocks)(), pl.FP8Precision(exclude=["head" if first else "lm_head"])),
        "one bad optimizer": refused(pl, pl.module(Blocks)() if first else pl.module(WithoutOptimizer)()),
        "two formats": refused(pl, pl.module(Blocks)(), pl.FP8Precision(fp8_format="ocp" if first else "fnuz")),
        "no file": fit_from(pl, path / ("no.ckpt" if first else "other.ckpt")),
        "no file on one": fit_from(pl, path / "good.ckpt", seen=first),
    }


def fit_from(pl: Lightning, path: Path, seen: bool = True) -> tuple[str, str]:
    from lightning_fp8_rocm.distributed import storage

    try:
        with pytest.MonkeyPatch.context() as patch:
            if not seen:
                patch.setattr(storage, "check_readable", lambda path: Path(path, "gone").read_bytes())
            sharded_trainer(pl, fast_dev_run=1).fit(pl.module(Blocks)(), batches(), ckpt_path=str(path))
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def test_what_one_rank_or_all_cannot_do_is_the_same_error_on_all_ranks(
    pl: Lightning, ranks: Ranks, tmp_path: Path
) -> None:
    one, other = ranks(2, _errors, pl, tmp_path)
    assert one == other
    for name, says in {
        "mesh": r"`device_mesh` to be \(replicate, shard\).*= 2, the number of processes, but got \(2, 2\)",
        "all-gather": r"`fp8_all_gather=True`, but these.*'blocks.0.1': two products.*Choose another recipe",
        "tp": r"'head.weight' is a DTensor over .*tensor parallelism",
        "fsdp1": "'blocks.0' is wrapped by FullyShardedDataParallel.*leave that out",
        "one bad layer": r"the setup of the model: rank 1 of 2 raised ValueError: FSDP2 cannot train.*'scalar'",
        "one bad pattern": r"rank 1 of 2 raised ValueError: .*'lm_head' in `exclude` matches none",
        "one bad optimizer": r"`configure_optimizers`: rank 1 of 2 raised ValueError: no learning rate",
        "two formats": r"the FP8 recipe and format must be the same on all ranks.*ocp.* on rank 0.*fnuz.*on rank 1",
        "no file": r"No checkpoint at .*no\.ckpt",
        "no file on one": "loading .*: rank 1 of 2 raised FileNotFoundError: .*gone",
    }.items():
        assert re.search(says, one[name][1], re.DOTALL), (name, one[name])


# ---------------------------------------------------------------------------------------------------------------------
# The stages of a run


@contextmanager
def pretended_nccl(pl: Lightning) -> Iterator[None]:
    """Let Lightning's loops believe that the backend is ``nccl``: they choose ``inference_mode`` then."""
    utilities = pl.of("loops.utilities")

    class Pretended:
        @staticmethod
        def get_backend() -> str:
            return "nccl"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utilities, "dist", Pretended)
        yield


class NoInference:
    """Counts the batches of evaluation, and those in which tensors would be unusable for training."""

    def __init__(self) -> None:
        self.batches: dict[str, int] = {}
        self.found = 0

    def look(self, trainer: Any, module: nn.Module) -> None:
        stage = str(trainer.state.stage.value)
        self.batches[stage] = self.batches.get(stage, 0) + 1
        tensors = [*module.parameters(), *module.buffers()]
        self.found += torch.is_inference_mode_enabled() + sum(tensor.is_inference() for tensor in tensors)

    def on_validation_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self.look(trainer, module)

    def on_test_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self.look(trainer, module)

    def on_predict_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self.look(trainer, module)


class WithoutOurSwitch:
    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            loop.inference_mode = True


def _all_stages(pl: Lightning, path: Path, recipe: str) -> None:
    data, module, spy = batches(), pl.module(Blocks)(), pl.callback(NoInference)()
    with pretended_nccl(pl):
        run = sharded_trainer(pl, pl.FP8Precision(recipe), callbacks=[spy])
        run.validate(module, data, verbose=False)
        start = full_weights(module)
        run.fit(module, data, data)
        after_first = full_weights(module)
        run.test(module, data, verbose=False)
        predictions = run.predict(module, data)
        run.fit_loop.max_epochs = 2
        run.fit(module, data, data)
        after_second = full_weights(module)
        run.save_checkpoint(path / "two.ckpt")
        fresh = pl.module(Blocks)()
        run.validate(fresh, data, ckpt_path=str(path / "two.ckpt"), verbose=False)
    assert spy.batches == {"validate": 2 + 2 + 2 + 2, "sanity_check": 2 + 2, "test": 2, "predict": 2}
    assert spy.found == 0
    assert module.kinds == {"val": {"FP8Linear"}, "train": {"FP8Linear"}, "test": {"FP8Linear"}}
    assert module.step_kind == "FP8Linear"
    assert not any(torch.equal(start[name], after_first[name]) for name in start)
    assert not any(torch.equal(after_first[name], after_second[name]) for name in start)
    assert equal(full_weights(fresh), after_second)
    assert fresh.kinds == {"val": {"FP8Linear"}}
    assert predictions is not None
    assert all(each.isfinite().all() for each in predictions)
    for weights in (start, after_first, after_second):
        gathered: list[Any] = [None, None]
        dist.all_gather_object(gathered, weights)
        assert equal(*gathered)
    assert marked(module) == fp8_layers(module) == []

    # Another Trainer over the same module does what that one says.
    losses = []
    for precision, kind in (("bf16-mixed", "Linear"), ("fp8-rocm", "FP8Linear")):
        module.kinds.clear()
        seen = pl.callback(Watch)()
        second = sharded_trainer(pl, precision, max_epochs=1, callbacks=[seen])
        second.fit(module, data)
        assert module.kinds == {"train": {kind}}
        assert seen.marked == (WEIGHTS if kind == "FP8Linear" else [])
        losses.append(second.callback_metrics["train_loss"])
        now = full_weights(module)
        assert not any(torch.equal(now[name], after_second[name]) for name in now)
        after_second = now
    assert all(loss.isfinite() for loss in losses)

    with pytest.raises(ValueError, match=r"was sharded before, to compute in torch\.bfloat16, and this.*new module"):
        sharded_trainer(pl, "32-true", max_epochs=1).fit(module, data)


class Watch:
    """What is marked while training goes on."""

    def on_train_batch_start(self, trainer: Any, module: Any, *args: Any) -> None:
        self.marked = marked(module)
        self.sharded = [n for n, p in module.named_parameters() if isinstance(p, DTensor)]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_all_stages_run_on_one_trainer_on_a_pretended_nccl_and_other_trainers_follow(
    pl: Lightning, ranks: Ranks, tmp_path: Path, recipe: str
) -> None:
    ranks(2, _all_stages, pl, tmp_path, recipe)


def _without_switch(pl: Lightning) -> str:
    module, spy = pl.module(Blocks)(), pl.callback(NoInference)()
    with pretended_nccl(pl):
        run = sharded_trainer(pl, strategy=over(WithoutOurSwitch, pl.FSDP2FP8Strategy)(), callbacks=[spy])
        run.strategy._watcher.start = lambda: None
        try:
            run.validate(module, batches(), verbose=False)
            run.fit(module, batches())
        except RuntimeError as error:
            return f"{spy.found > 0} {error}"
    return "went well"


def test_without_our_switch_a_pretended_nccl_would_fail(pl: Lightning, ranks: Ranks) -> None:
    for told in ranks(2, _without_switch, pl):
        assert re.search("(?i)inference", told), told


def _limits(pl: Lightning) -> None:
    data = batches()  # 32 samples: 2 batches of 8 a rank

    def fit(**flags: Any) -> tuple[Any, Any, Any]:
        module, spy = pl.module(Blocks)(), pl.callback(NoInference)()
        run = sharded_trainer(pl, **{"callbacks": [spy], **flags})
        run.fit(module, data, data)
        assert module.kinds["train"] == {"FP8Linear"}
        gathered: list[Any] = [None, None]
        dist.all_gather_object(gathered, full_weights(module))
        assert equal(*gathered)
        return run, module, spy

    run, _, spy = fit(max_epochs=2, limit_train_batches=0.5, limit_val_batches=1, num_sanity_val_steps=1)
    assert run.global_step == 2
    assert spy.batches == {"sanity_check": 1, "validate": 2}
    run, _, spy = fit(val_check_interval=1, num_sanity_val_steps=0)
    assert run.global_step == 2
    assert spy.batches == {"validate": 4}
    run, _, spy = fit(overfit_batches=1, max_epochs=2, num_sanity_val_steps=0)
    assert run.global_step == 2
    run, module, _ = fit(max_time={"seconds": 1}, max_epochs=-1, limit_val_batches=0)
    steps: list[Any] = [None, None]
    dist.all_gather_object(steps, run.global_step)
    assert steps[0] == steps[1] > 0
    barebones = pl.Trainer(
        accelerator="cpu", devices=2, barebones=True, precision="fp8-rocm", strategy="fsdp2_fp8", max_steps=2
    )
    barebones.fit(module, data)
    assert barebones.global_step == 2
    run.test(module, data, verbose=False)


def test_the_limits_of_a_trainer_hold(pl: Lightning, ranks: Ranks) -> None:
    ranks(2, _limits, pl)


class Logs(Blocks):
    """Logs its rank, and asks the strategy for what Lightning's callbacks ask it."""

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        rank, strategy = self.global_rank, self.trainer.strategy
        self.log("mean", float(rank), sync_dist=True)
        self.log("sum", float(rank + 1), sync_dist=True, reduce_fx="sum")
        assert strategy.broadcast({"rank": rank}) == {"rank": 0}
        assert strategy.broadcast({"rank": rank}, src=1) == {"rank": 1}
        assert strategy.reduce(torch.tensor([float(rank)]), reduce_op="sum").tolist() == [1.0]
        assert not strategy.reduce_boolean_decision(rank == 0)
        assert strategy.reduce_boolean_decision(rank == 0, all=False)
        assert strategy.all_gather(torch.tensor(rank)).tolist() == [0, 1]
        before = time.monotonic()
        if rank == 0:
            time.sleep(0.5)
        strategy.barrier()
        assert time.monotonic() - before > 0.3
        assert strategy.is_global_zero == (rank == 0)
        return super().training_step(batch, index)


def _logs(pl: Lightning) -> dict[str, float]:
    run = sharded_trainer(pl, max_steps=1)
    run.fit(pl.module(Logs)(), batches())
    return {name: run.logged_metrics[name].item() for name in ("mean", "sum")}


def test_values_are_reduced_and_sent_over_all_ranks(pl: Lightning, ranks: Ranks) -> None:
    assert ranks(2, _logs, pl) == [{"mean": 0.5, "sum": 3.0}] * 2


class Writes:
    """Puts other tensors in the place of the weights between the steps, and looks at once, as a user might."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: list[Tensor], index: int) -> None:
        with torch.no_grad():
            state = {name: value.detach().clone() * 3 for name, value in module.state_dict().items()}
            module.load_state_dict(state, assign=True)
            assert marked(module) == []
            check_output(module, batch[0])
            assert marked(module) == WEIGHTS


def check_output(module: Any, x: Tensor) -> None:
    """It is that of a model which was just built with the weights of now."""
    with torch.no_grad():
        output = module(x)
        fresh = LIGHTNING.module(Blocks)()
        fresh.load_state_dict(full_weights(module))
        convert(fresh)
        with torch.autocast("cpu", torch.bfloat16):
            expected = fresh(x)
    assert apart(output, expected) < 0.1  # the weights before they were multiplied by 3 would be 0.67 apart


def apart(output: Tensor, other: Tensor) -> float:
    return ((output.float() - other.float()).norm() / other.float().norm()).item()


def _writes(pl: Lightning) -> None:
    for manual in (False, True):
        module = pl.module(Blocks)() if not manual else pl.module(Manual)()
        run = sharded_trainer(pl, limit_train_batches=2, callbacks=[pl.callback(Writes)()])
        run.fit(module, batches())
        assert run.global_step == 2


class Manual(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], index: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.step("train", batch))
        optimizer.step()
        optimizer.zero_grad()
        for factor in (3, 1 / 3):
            for parameter in self.parameters():
                parameter.data.mul_(factor)
            check_output(self, batch[0])


@pytest.mark.parametrize("pl", [LIGHTNING], ids=str)
def test_weights_that_a_hook_or_a_manual_step_writes_count_at_once_and_travel_in_fp8(
    pl: Lightning, ranks: Ranks
) -> None:
    ranks(2, _writes, pl)


class Graphs:
    """How many graphs there are after each batch."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.counts.append(counters["stats"]["unique_graphs"])


def _compiled(pl: Lightning) -> None:
    found = []
    for compiled in ({"backend": "aot_eager", "fullgraph": True}, False):
        torch._dynamo.reset()
        counters.clear()
        graphs = pl.callback(Graphs)()
        module = pl.module(Blocks)()
        run = sharded_trainer(
            pl,
            strategy=pl.FSDP2FP8Strategy(compile=compiled, activation_checkpointing_policy="full"),
            callbacks=[graphs],
            max_epochs=2,
            accumulate_grad_batches=2,
        )
        run.fit(module, batches(4), batches(4))
        found.append(full_weights(module))
        assert not counters["graph_break"]
        if compiled:
            assert len(graphs.counts) == 8
            # Each mode was seen twice by the end of the first epoch.
            assert 0 < graphs.counts[3] == graphs.counts[-1], graphs.counts
        else:
            assert graphs.counts[-1] == 0
    assert all(apart(found[0][name], found[1][name]) < 1e-2 for name in found[0])


@pytest.mark.parametrize("pl", [LIGHTNING], ids=str)
def test_blocks_compiled_by_the_strategy_are_compiled_once_and_train_as_eager_ones(pl: Lightning, ranks: Ranks) -> None:
    ranks(2, _compiled, pl)


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints


def optimizer_tensors(run: Any) -> dict[str, Tensor]:
    state = run.optimizers[0].state
    return {
        f"{index}.{key}": (value.full_tensor() if isinstance(value, DTensor) else value).clone()
        for index, parameter in enumerate(run.lightning_module.parameters())
        for key, value in state[parameter].items()
    }


def _checkpoints(pl: Lightning, path: Path, kind: str, save_last: Any) -> dict[str, Tensor]:
    data = batches()

    def fit(epochs: int, folder: str, resume: str | None = None) -> tuple[Any, Any]:
        torch.manual_seed(3)
        keep = pl.callbacks.ModelCheckpoint(
            path / folder, "{epoch}", monitor="train_loss", save_top_k=2, save_last=save_last
        )
        run = sharded_trainer(
            pl,
            pl.FP8Precision("rowwise"),
            strategy=pl.FSDP2FP8Strategy(state_dict_type=kind),
            max_epochs=epochs,
            callbacks=[keep],
            enable_checkpointing=True,
            gradient_clip_val=1.0,
        )
        module = pl.module(Blocks)()
        run.fit(module, data, ckpt_path=resume)
        return run, module

    whole, uninterrupted = fit(3, "whole")
    wanted = full_weights(uninterrupted)
    first, module = fit(2, "parts")
    before = full_weights(module)
    assert not equal(before, wanted)
    first.validate(module, data, ckpt_path="best", verbose=False)
    first.test(module, data, ckpt_path="last", verbose=False)
    dist.barrier()
    found = sorted(each.name for each in (path / "parts").iterdir())
    assert found == ["epoch=0.ckpt", "epoch=1.ckpt", "last.ckpt"]
    last = path / "parts" / "last.ckpt"
    assert last.is_symlink() is (save_last == "link")
    assert last.is_dir() is (kind == "sharded")
    dist.barrier()

    for resume in ("last", str(last)):
        if resume == "last":
            again, resumed = fit(3, "parts", "last")
            resume = str(path / "parts" / "last.ckpt")
        else:
            again, resumed = fit(3, "others", str(path / "parts" / "epoch=1.ckpt"))
        assert again.global_step == whole.global_step == 6
        assert equal(full_weights(resumed), wanted), resume
        assert equal(optimizer_tensors(again), optimizer_tensors(whole))
    return wanted


@pytest.mark.parametrize(
    ("pl", "kind", "save_last"),
    [(LIGHTNING, "sharded", True), (STANDALONE, "sharded", "link"), (LIGHTNING, "full", True)],
    ids=str,
)
def test_a_run_resumes_from_its_checkpoint_as_if_it_had_not_stopped(
    pl: Lightning, ranks: Ranks, tmp_path: Path, kind: str, save_last: Any
) -> None:
    wanted, _ = ranks(2, _checkpoints, pl, tmp_path, kind, save_last)
    for file in (each for each in tmp_path.rglob("*") if each.is_file()):
        content = file.read_bytes()
        assert b"lightning_fp8_rocm" not in content, file
        assert b"torchao" not in content, file
    last = tmp_path / "whole" / "last.ckpt"
    if kind == "sharded":
        assert torch.load(last / "meta.pt", weights_only=True)["epoch"] == 2
        return
    checkpoint = torch.load(last, weights_only=True)
    assert {type(value) for value in checkpoint["state_dict"].values()} == {Tensor}
    assert equal(checkpoint["state_dict"], wanted)

    # On one device, without our strategy and without FP8, and back.
    module = pl.module(Blocks)()
    run = pl.trainer(pl.plugins.MixedPrecision("bf16-mixed", "cpu"), max_epochs=4)
    run.fit(module, batches(), ckpt_path=str(last))
    assert run.current_epoch == 4
    assert not equal(full_weights(module), wanted)
    run.save_checkpoint(tmp_path / "one.ckpt")
    one, _ = ranks(2, _load_from_one_device, pl, tmp_path / "one.ckpt")
    assert equal(one, full_weights(module))


def _load_from_one_device(pl: Lightning, path: Path) -> dict[str, Tensor]:
    module, seen = pl.module(Blocks)(), pl.callback(Start)()
    run = sharded_trainer(pl, max_epochs=5, callbacks=[seen])
    run.fit(module, batches(), ckpt_path=str(path))
    assert run.current_epoch == 5
    assert not equal(full_weights(module), seen.weights)
    return seen.weights


class Start:
    """The weights with which training starts."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.weights = full_weights(module)


# ---------------------------------------------------------------------------------------------------------------------
# Lightning's callbacks and loggers


class Tuned(Blocks):
    """Has what callbacks look for: `lr`, `backbone`, a scheduler, a metric."""

    def __init__(self, lr: float = 1e-2) -> None:
        from torchmetrics.classification import MulticlassAccuracy

        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.accuracy = MulticlassAccuracy(5, average="micro")

    @property
    def backbone(self) -> nn.Module:
        return self.blocks

    def validation_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.accuracy(self(batch[0])[:, :5], batch[2])
        self.log("accuracy", self.accuracy, on_epoch=True)
        return super().validation_step(batch, index)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer)]


class ThawsBlocks:
    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.blocks)

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.blocks, optimizer, lr=1e-2)


class AfterEpochs:
    def __init__(self) -> None:
        self.weights: list[dict[str, Tensor]] = []

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.weights.append(full_weights(module))


@contextmanager
def pretended_psutil(pl: Lightning) -> Iterator[list[torch.device]]:
    """What DeviceStatsMonitor asks for on a CPU, also where psutil is not installed; the devices that it asks about."""
    cpu = pl.of("accelerators.cpu")
    asked: list[torch.device] = []

    def stats(self: object, device: torch.device) -> dict[str, float]:
        asked.append(device)
        return {"cpu_percent": 1.0}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "_PSUTIL_AVAILABLE", True)
        patch.setattr(cpu, "get_cpu_stats", lambda: {"cpu_percent": 1.0})
        patch.setattr(cpu.CPUAccelerator, "get_device_stats", stats)
        yield asked


def _callbacks(pl: Lightning, path: Path) -> str:
    import contextlib
    import io

    data, calls = batches(), []
    printed = io.StringIO()
    loggers: list[Any] = [pl.loggers.CSVLogger(path, name="csv", version="0")]
    if HAS_TENSORBOARD:
        loggers.append(pl.loggers.TensorBoardLogger(path, name="tb", version="0"))
    lr, summary, timer = (
        pl.callbacks.LearningRateMonitor("step"),
        pl.callbacks.RichModelSummary(),
        pl.callbacks.Timer(),
    )
    every = [
        pl.callbacks.GradientAccumulationScheduler({0: 1, 1: 2}),
        summary,
        pl.callbacks.TQDMProgressBar(),
        lr,
        timer,
        pl.callbacks.EarlyStopping("val_loss", min_delta=1e9, patience=2),
        pl.callbacks.LambdaCallback(on_train_epoch_end=lambda *_: calls.append("epoch")),
        pl.callbacks.ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=2),
        pl.callbacks.DeviceStatsMonitor(cpu_stats=True),
    ]
    module = pl.module(Tuned)()
    with contextlib.redirect_stdout(printed), pretended_psutil(pl) as asked:
        run = sharded_trainer(
            pl, max_epochs=5, callbacks=every, logger=loggers, log_every_n_steps=1, enable_progress_bar=True
        )
        run.validate(module, data, verbose=False)
        run.fit(module, data, data)
    assert run.current_epoch == 3  # early stopping: one epoch sets the best, two do not better it
    assert calls == ["epoch"] * 3
    assert run.global_step == 2 + 1 + 1
    assert timer.time_elapsed("train") > 0
    assert set(asked) == {run.strategy.root_device}
    whole = sum(p.numel() for p in pl.module(Blocks)().parameters())
    assert run.strategy.lightning_module is module
    assert summary._summary(run, module).total_parameters == whole
    accuracies: list[Any] = [None, None]
    dist.all_gather_object(accuracies, run.callback_metrics["accuracy"].item())
    assert accuracies[0] == accuracies[1]
    assert round(accuracies[0] * 32, 4) % 1 == 0  # of all 32 samples, not of 16
    assert lr.lrs["lr-AdamW"]

    # Blocks are frozen for an epoch, then thawed.
    finetuned, after, start = pl.module(Tuned)(), pl.callback(AfterEpochs)(), pl.callback(Start)()
    with contextlib.redirect_stdout(io.StringIO()):
        sharded_trainer(
            pl,
            max_epochs=2,
            callbacks=[
                over(ThawsBlocks, pl.callbacks.BaseFinetuning)(),
                after,
                start,
                pl.callbacks.RichProgressBar(),
                pl.callbacks.ModelSummary(),
            ],
            enable_progress_bar=True,
        ).fit(finetuned, data)
    one, two = after.weights
    of_blocks = [name for name in one if name.startswith("blocks")]
    assert all(torch.equal(one[name], start.weights[name]) for name in of_blocks)
    assert not torch.equal(one["head.weight"], start.weights["head.weight"])
    assert not any(torch.equal(two[name], one[name]) for name in of_blocks)
    backbone = pl.callbacks.BackboneFinetuning(unfreeze_backbone_at_epoch=1, verbose=False)
    sharded_trainer(pl, max_epochs=2, callbacks=[backbone]).fit(pl.module(Tuned)(), data)

    # The finder trains, and puts back what it found.
    finder = pl.callbacks.LearningRateFinder(num_training_steps=4, update_attr=False)
    found, start = pl.module(Tuned)(), pl.callback(Start)()
    sharded_trainer(pl, max_steps=1, callbacks=[finder, start], default_root_dir=path).fit(found, data)
    assert finder.optimal_lr is not None
    assert equal(start.weights, full_weights_of(pl.module(Tuned)()))

    with pytest.raises(Exception, match=r"(?i)batch size finder is not supported with distributed strategies"):
        sharded_trainer(pl, max_steps=1, callbacks=[pl.callbacks.BatchSizeFinder()]).fit(pl.module(Tuned)(), data)
    return printed.getvalue()


def full_weights_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def test_lightnings_callbacks_and_loggers_work_with_sharded_modules(
    pl: Lightning, ranks: Ranks, tmp_path: Path
) -> None:
    first, second = ranks(2, _callbacks, pl, tmp_path)
    assert first.count("FP8 conversion: recipe tensorwise") == 1  # not again in the second stage
    assert first.count("FP8 recipe tensorwise, format ocp, emulated, ") == 1
    assert "FP8" not in second
    line = next(line for line in first.splitlines() if "FP8 recipe tensorwise, format" in line)
    assert re.search(r"FSDP2: 4 units on 2 ranks; .*, 4 weights in FP8 \(all in bf16: .*\)\.", line), line
    for kind in ("csv", "tb") if HAS_TENSORBOARD else ("csv",):
        facts = yaml.unsafe_load((tmp_path / kind / "0" / "hparams.yaml").read_text())
        ours = {key.removeprefix("fp8_rocm/"): value for key, value in facts.items() if key.startswith("fp8_rocm/")}
        assert facts["lr"] == 1e-2
        assert ours.pop("fp8_share") == pytest.approx(0.941, abs=1e-3)
        assert 0 < ours.pop("gathered_bytes") < ours.pop("gathered_bytes_in_bf16")
        assert ours == {
            "strategy": "fsdp2_fp8",
            "precision": "fp8-rocm",
            "fsdp2_units": 4,
            "ranks": "2",
            "fp8_recipe": "tensorwise",
            "fp8_format": "ocp",
            "fp8_emulated": True,
            "fp8_weights_gathered": 4,
        }


def test_pruning_is_refused_by_name(pl: Lightning) -> None:
    prune = pl.callbacks.ModelPruning("l1_unstructured", amount=0.5)
    fails(pl, pl.module(Blocks)(), "The callback ModelPruning replaces parameters.*Remove it", callbacks=[prune])


# ---------------------------------------------------------------------------------------------------------------------
# AMD's variables


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_variables_of_pretended_amd_hardware_are_set_where_they_are_not_and_told_once(
    arch: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from lightning_fp8_rocm.plugins.strategy import set_environment

    gpu = hardware.Hardware("AMD Instinct MI", arch, "ocp", source="test")
    wanted = gpu.environment()
    assert len(wanted) == 5
    for name in wanted:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    monkeypatch.setenv("GPU_MAX_HW_QUEUES", "4")
    del wanted["GPU_MAX_HW_QUEUES"]
    assert set_environment(gpu) == wanted
    assert {name: os.environ[name] for name in wanted} == wanted
    assert os.environ["GPU_MAX_HW_QUEUES"] == "4"
    assert set_environment(gpu) == {}
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1
    assert f"AMD Instinct MI ({arch})" in printed
    assert all(f"{name}={value}" in printed for name, value in wanted.items())
    assert "GPU_MAX_HW_QUEUES" not in printed
    assert set_environment(replace(gpu, arch="sm_90")) == {}


@pytest.mark.parametrize(
    ("arguments", "backend"),
    [
        ({}, "nccl"),
        ({"cpu_offload": True}, "cpu:gloo,cuda:nccl"),
        ({"process_group_backend": "mine", "timeout": timedelta(seconds=7)}, "mine"),
    ],
    ids=str,
)
def test_on_a_pretended_gpu_the_variables_are_set_before_the_process_group_which_is_that_of_gpus(
    pl: Lightning, arguments: dict[str, Any], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning_fp8_rocm.plugins import strategy as module

    class Stop(Exception):
        pass

    def start(environment: object, backend: str, timeout: timedelta, device_id: torch.device) -> None:
        calls.append((backend, timeout, device_id))
        raise Stop

    calls: list[Any] = []
    gpu = torch.device("cuda", 0)
    strategy = pl.FSDP2FP8Strategy(**arguments)
    run = sharded_trainer(pl, strategy=strategy)
    run.strategy.connect(pl.module(Blocks)())
    strategy.lightning_module._trainer = run
    strategy.parallel_devices = [gpu]
    monkeypatch.setattr(run.accelerator, "setup_device", lambda device: None)
    monkeypatch.setattr(module.hardware, "of_device", lambda device: f"hardware of {device}")
    monkeypatch.setattr(module, "set_environment", calls.append)
    monkeypatch.setattr(pl.of_fabric("utilities.distributed"), "_init_dist_connection", start)
    with pytest.raises(Stop):
        strategy.setup_environment()
    assert calls == ["hardware of cuda:0", (backend, arguments.get("timeout", timedelta(minutes=30)), gpu)]
