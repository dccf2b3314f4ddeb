import copy
import os
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from flavours import Lightning
from models import LARGE_TARGET, Blocks, batches
from ranks import MODULE_PATHS
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fp8_rocm import FP8Linear, hardware

FP8_LAYERS = ["blocks.0.1", "blocks.0.3", "blocks.1.1", "blocks.1.3"]


def fp8_layers(module: nn.Module) -> list[str]:
    return [name for name, child in module.named_modules() if isinstance(child, FP8Linear)]


class Spy:
    """What the layers are while a stage runs."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.seen = fp8_layers(module)


# ---------------------------------------------------------------------------------------------------------------------
# One run


@pytest.mark.parametrize("recipe", ["auto", "tensorwise", "rowwise", "rowwise_with_gw_hp"])
@pytest.mark.parametrize("weights_dtype", ["float32", "bfloat16"])
def test_every_stage_runs_in_fp8_on_the_batch_as_it_came_and_gives_the_module_back(
    pl: Lightning, recipe: str, weights_dtype: str
) -> None:
    plugin = pl.FP8Precision(recipe, weights_dtype=weights_dtype)
    module, data, run = pl.module(Blocks)(), batches(), pl.trainer(plugin, max_epochs=2)
    before = copy.deepcopy(module.state_dict())
    run.validate(module, data, verbose=False)
    assert fp8_layers(module) == []
    run.fit(module, data, data)
    run.test(module, data, verbose=False)
    outputs = run.predict(module, data)
    assert module.kinds == {name: {"FP8Linear"} for name in ("train", "val", "test")}
    assert module.step_kind == "FP8Linear"
    assert all(output.isfinite().all() for output in outputs)
    assert fp8_layers(module) == []
    assert {type(child) for child in module.modules()} == {
        pl.module(Blocks),
        nn.ModuleList,
        nn.Sequential,
        nn.LayerNorm,
        nn.Linear,
        nn.GELU,
    }
    assert all(p.dtype == getattr(torch, weights_dtype) for p in module.parameters())
    assert all(not torch.equal(before[name], value.float()) for name, value in module.state_dict().items())
    assert [layer.name for layer in plugin.report.converted] == FP8_LAYERS


def test_training_in_fp8_lowers_the_loss_as_bf16_does(pl: Lightning) -> None:
    losses = {}
    for precision in ("fp8-rocm", "bf16-mixed"):
        pl.seed_everything(0, verbose=False)
        run, module = pl.trainer(precision, max_epochs=20), pl.module(Blocks)()
        run.fit(module, batches())
        losses[precision] = run.callback_metrics["train_loss"].item()
    assert losses["fp8-rocm"] == pytest.approx(losses["bf16-mixed"], abs=0.1)
    assert losses["fp8-rocm"] < 1.0  # from log(5) = 1.6


def test_a_second_trainer_over_the_same_module_runs_what_it_says(pl: Lightning) -> None:
    module, data = pl.module(Blocks)(), batches()
    pl.trainer().fit(module, data)
    module.kinds.clear()
    pl.trainer("bf16-mixed").fit(module, data)
    assert module.kinds["train"] == {"Linear"}
    module.kinds.clear()
    pl.trainer(pl.FP8Precision("rowwise")).fit(module, data)
    assert module.kinds["train"] == {"FP8Linear"}


def test_one_trainer_fits_twice(pl: Lightning) -> None:
    module, data, run = pl.module(Blocks)(), batches(), pl.trainer(max_epochs=1)
    run.fit(module, data)
    run.fit_loop.max_epochs = 2
    run.fit(module, data)
    assert run.current_epoch == 2
    assert fp8_layers(module) == []


def test_an_exception_in_a_step_leaves_no_layer_converted(pl: Lightning) -> None:
    class Breaks(pl.module(Blocks)):
        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            raise RuntimeError("broken step")

    module = Breaks()
    with pytest.raises(RuntimeError, match="broken step"):
        pl.trainer().fit(module, batches())
    assert fp8_layers(module) == []


def test_layers_that_the_user_converted_himself_stay_his(pl: Lightning) -> None:
    from lightning_fp8_rocm import convert

    module = pl.module(Blocks)()
    convert(module, "tensorwise", include=["blocks.0.1"])
    convert(module.head, "tensorwise")  # which the plugin leaves out
    with pytest.raises(ValueError, match=r"'blocks.0.1' already is FP8 under another recipe"):
        pl.trainer(pl.FP8Precision("rowwise")).fit(module, batches())
    assert fp8_layers(module) == ["blocks.0.1", "head"]
    pl.trainer(pl.FP8Precision("tensorwise")).fit(module, batches())
    assert fp8_layers(module) == ["blocks.0.1", "head"]


@pytest.mark.parametrize(
    "flags",
    [
        {"fast_dev_run": True},
        {
            "barebones": True,
            "logger": None,
            "enable_checkpointing": None,
            "enable_progress_bar": None,
            "enable_model_summary": None,
        },
        {"detect_anomaly": True},
        {"deterministic": True},
        {"overfit_batches": 1},
        {"limit_train_batches": 2, "limit_val_batches": 1},
        {"limit_train_batches": 0.5},
        {"accumulate_grad_batches": 3},
        {"gradient_clip_val": 0.1},
        {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
        {"max_steps": 3, "max_epochs": -1},
        {"num_sanity_val_steps": 1, "check_val_every_n_epoch": 1},
        {"inference_mode": False},
        {"enable_model_summary": True},
    ],
    ids=lambda flags: next(iter(flags)) + ("_value" if "gradient_clip_algorithm" in flags else ""),
)
def test_trainer_flags(pl: Lightning, flags: dict[str, Any]) -> None:
    deterministic = torch.are_deterministic_algorithms_enabled()
    module, spy = pl.module(Blocks)(), pl.callback(Spy)()
    before = copy.deepcopy(module.state_dict())
    if not flags.get("barebones"):
        flags = {**flags, "callbacks": [spy]}
    try:
        pl.trainer(**flags).fit(module, batches(size=5), batches(size=5))  # 32 examples: a last batch of 2
    finally:
        torch.use_deterministic_algorithms(deterministic)
    assert module.kinds["train"] == {"FP8Linear"}
    assert all(value.isfinite().all() for value in module.state_dict().values())
    assert all(not torch.equal(before[name], value) for name, value in module.state_dict().items())


@pytest.mark.parametrize("size", [1, 5, 15, 17, 31])
def test_any_batch_size_trains_also_with_a_last_batch_of_one(pl: Lightning, size: int) -> None:
    module = pl.module(Blocks)()
    pl.trainer().fit(module, batches(size=size, count=size + 1 if size > 1 else 3))
    assert all(value.isfinite().all() for value in module.state_dict().values())


def test_gradients_are_clipped_to_the_norm_that_was_asked_for(pl: Lightning) -> None:
    norms = []

    class Norm(pl.module(Blocks)):
        def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
            grads = [p.grad for p in self.parameters() if p.grad is not None]
            if grads:
                norms.append(torch.nn.utils.get_total_norm(grads).item())

    pl.trainer(gradient_clip_val=1e-3).fit(Norm(), batches())
    assert norms
    assert max(norms) <= 1e-3 * (1 + 1e-4)


def test_manual_optimization_with_two_optimizers_changes_every_parameter(pl: Lightning) -> None:
    class Two(pl.module(Blocks)):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: list[Tensor], index: int) -> None:
            for optimizer in self.optimizers():
                loss = self.step("train", batch)
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()

        def configure_optimizers(self) -> list[torch.optim.Optimizer]:
            return [torch.optim.SGD(self.blocks.parameters(), 0.1), torch.optim.SGD(self.head.parameters(), 0.1)]

    module = Two()
    before = copy.deepcopy(module.state_dict())
    pl.trainer(max_steps=2, max_epochs=-1).fit(module, batches())
    assert all(not torch.equal(before[name], value) for name, value in module.state_dict().items())


def test_frozen_layers_stay_as_they_are_and_the_rest_trains(pl: Lightning) -> None:
    module = pl.module(Blocks)()
    module.blocks[0].requires_grad_(False)
    before = copy.deepcopy(module.state_dict())
    plugin = pl.FP8Precision()
    pl.trainer(plugin).fit(module, batches())
    assert [layer.name for layer in plugin.report.converted] == FP8_LAYERS
    for name, value in module.state_dict().items():
        assert torch.equal(before[name], value) == name.startswith("blocks.0."), name


def test_fp32_masters_lift_trainable_bf16_weights_and_leave_frozen_ones(pl: Lightning) -> None:
    module = pl.module(Blocks)().to(torch.bfloat16)
    for layer in (module.blocks[0][1], module.blocks[0][3]):
        layer.requires_grad_(False)
    pl.trainer(pl.FP8Precision(weights_dtype="float32")).fit(module, batches())
    assert module.blocks[0][1].weight.dtype == torch.bfloat16
    assert module.blocks[1][1].weight.dtype == torch.float32
    assert module.head.weight.dtype == torch.float32


@dataclass
class Inputs:
    x: Tensor


class UsedInManyWays(Blocks):
    """A child called by another method than forward, with a dataclass, and with a float target as a keyword."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.layer, self.out = nn.LayerNorm(32), nn.Linear(32, 32), nn.Linear(32, 16)

        def encode(self, inputs: Inputs) -> Tensor:
            return self.layer(self.norm(inputs.x))

        def forward(self, inputs: Inputs, labels: Tensor) -> Tensor:
            assert labels.eq(LARGE_TARGET).all()
            return self.out(self.encode(inputs)).float().pow(2).mean()

    def __init__(self) -> None:
        super().__init__()
        self.net = self.Net()

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        latent = self.net.encode(Inputs(batch[0]))
        return (
            self.net(Inputs(batch[0]), labels=batch[1]) + latent.float().pow(2).mean() + self(batch[0]).float().mean()
        )


@pytest.mark.parametrize("weights_dtype", ["float32", "bfloat16"])
def test_a_child_may_be_used_past_its_forward_and_with_any_arguments(pl: Lightning, weights_dtype: str) -> None:
    module = pl.module(UsedInManyWays)()
    before = copy.deepcopy(module.state_dict())
    pl.trainer(pl.FP8Precision(weights_dtype=weights_dtype)).fit(module, batches())
    assert all(not torch.equal(before[name].to(value.dtype), value) for name, value in module.state_dict().items())
    assert not any(child._forward_pre_hooks for child in module.modules())


def test_compiled_submodules_train_in_fp8_without_graph_breaks(pl: Lightning, recwarn: Any) -> None:
    module, data = pl.module(Blocks)(), batches()
    for block in module.blocks:
        block.compile(fullgraph=True)
    run = pl.trainer("fp8-rocm", max_epochs=4)
    run.fit(module, data, data)
    assert not [w for w in recwarn if "did not call" in str(w.message)]
    eager = pl.module(Blocks)()
    reference = pl.trainer("fp8-rocm", max_epochs=4)
    reference.fit(eager, data, data)
    assert run.callback_metrics["train_loss"].item() == pytest.approx(
        reference.callback_metrics["train_loss"].item(), abs=0.05
    )


def test_row_scales_ask_inductor_for_the_casts_of_eager_only_while_they_train(pl: Lightning) -> None:
    import torch._inductor.config as inductor

    class Asks(pl.module(Blocks)):
        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            self.during = inductor.emulate_precision_casts
            return super().training_step(batch, index)

    before = inductor.emulate_precision_casts
    for recipe, expected in (("tensorwise", before), ("rowwise", True)):
        module = Asks()
        pl.trainer(pl.FP8Precision(recipe), fast_dev_run=True).fit(module, batches())
        assert module.during is expected
        assert inductor.emulate_precision_casts is before


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_gives_the_gradients_of_without(pl: Lightning, use_reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(pl.module(Blocks)):
        def forward(self, x: Tensor) -> Tensor:
            x = x.requires_grad_()
            for block in self.blocks:
                x = x + checkpoint(block, x, use_reentrant=use_reentrant)
            return self.head(x)

    one, other = pl.module(Blocks)(), Checkpointed()
    for module in (one, other):
        pl.trainer(pl.FP8Precision("rowwise"), max_steps=3, max_epochs=-1).fit(module, batches())
    for (name, value), same in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(value, same), name


def test_the_learning_rate_finder_and_weight_averaging_work_as_in_bf16(pl: Lightning) -> None:
    class Tuned(pl.module(Blocks)):
        lr = 1e-3

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=self.lr)

    module, swa = Tuned(), pl.callbacks.StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=1)
    run = pl.trainer(max_epochs=3, callbacks=[swa])
    assert pl.tuner.Tuner(run).lr_find(module, batches(size=2), num_training=15, update_attr=False) is not None
    run.fit(module, batches())
    assert module.kinds["train"] == {"FP8Linear"}
    assert fp8_layers(module) == []


def test_a_gan_with_two_networks_trains_both_and_is_not_warned_of(pl: Lightning, recwarn: Any) -> None:
    class GAN(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.generator = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32))
            self.critic = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))

        def training_step(self, batch: list[Tensor], index: int) -> None:
            generator, critic = self.optimizers()
            fake = self.generator(torch.randn(len(batch[0]), 16))
            for optimizer, loss in (
                (critic, lambda: self.critic(fake.detach()).float().mean() - self.critic(batch[0]).float().mean()),
                (generator, lambda: -self.critic(fake).float().mean()),
            ):
                self.toggle_optimizer(optimizer)
                optimizer.zero_grad()
                self.manual_backward(loss())
                optimizer.step()
                self.untoggle_optimizer(optimizer)

        def configure_optimizers(self) -> list[torch.optim.Optimizer]:
            return [torch.optim.Adam(self.generator.parameters()), torch.optim.Adam(self.critic.parameters())]

    module = GAN()
    before = copy.deepcopy(module.state_dict())
    pl.trainer().fit(module, batches())
    changed = {name for name, value in module.state_dict().items() if not torch.equal(before[name], value)}
    assert changed == set(before) - {"critic.2.bias"}  # its gradient is the same on both sides of the critic's loss
    assert not [w for w in recwarn if "did not call" in str(w.message)]


# ---------------------------------------------------------------------------------------------------------------------
# What is on disk

READ_WITHOUT_US = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("lightning_fp8_rocm", "torchao"):
            raise ImportError(name)

sys.meta_path.insert(0, Refuse())
import torch
from flavours import NAMED
from models import Blocks

checkpoint = torch.load(sys.argv[2], weights_only=True)
module = NAMED[sys.argv[1]].module(Blocks)()
module.load_state_dict(checkpoint["state_dict"])
assert type(module.blocks[0][1]) is torch.nn.Linear
facts = checkpoint.pop("fp8_rocm")
assert facts["fp8"]["recipe"] == "tensorwise" and "blocks.0.1" in facts["fp8"]["layers"]
assert not any("fp8" in str(key).lower() or "FP8" in str(value) for key, value in checkpoint.items())
print(float(module.head.weight.detach().double().sum()))
"""


def test_a_checkpoint_is_plain_and_read_where_neither_we_nor_torchao_are(pl: Lightning, tmp_path: Any) -> None:
    module, run = pl.module(Blocks)(), pl.trainer(max_epochs=1, enable_checkpointing=True, default_root_dir=tmp_path)
    run.fit(module, batches())
    path = run.checkpoint_callback.best_model_path
    script = tmp_path / "read.py"
    script.write_text(READ_WITHOUT_US)
    done = subprocess.run(
        [sys.executable, str(script), str(pl), path],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": os.pathsep.join(map(str, MODULE_PATHS)), "PATH": "/usr/bin"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == module.head.weight.detach().double().sum().item()


def test_training_resumes_from_a_checkpoint_as_if_it_had_not_stopped(pl: Lightning, tmp_path: Any) -> None:
    def fit(epochs: int, resume: str | None) -> Any:
        pl.seed_everything(3, verbose=False)
        module = pl.module(Blocks)()
        run = pl.trainer(pl.FP8Precision("rowwise"), max_epochs=epochs)
        run.fit(module, batches(), ckpt_path=resume)
        run.save_checkpoint(tmp_path / f"{epochs}.ckpt")
        return module

    fit(1, None)
    resumed, whole = fit(2, str(tmp_path / "1.ckpt")), fit(2, None)
    for (name, one), other in zip(resumed.state_dict().items(), whole.state_dict().values(), strict=True):
        assert torch.equal(one, other), name


def test_a_bf16_checkpoint_resumes_in_fp8_and_back(pl: Lightning, tmp_path: Any) -> None:
    path = None
    for epochs, precision in enumerate(["bf16-mixed", "fp8-rocm", "bf16-mixed"], start=1):
        module, run = pl.module(Blocks)(), pl.trainer(precision, max_epochs=epochs)
        run.fit(module, batches(), ckpt_path=path)
        assert run.current_epoch == epochs
        path = str(tmp_path / f"{epochs}.ckpt")
        run.save_checkpoint(path)


# ---------------------------------------------------------------------------------------------------------------------
# What a person is told


def test_the_table_is_printed_once_a_trainer_and_says_that_the_cpu_emulates(pl: Lightning, capsys: Any) -> None:
    module, data, run = pl.module(Blocks)(), batches(), pl.trainer()
    run.validate(module, data, verbose=False)
    run.fit(module, data)
    run.test(module, data, verbose=False)
    text = capsys.readouterr().out
    assert text.count("FP8 conversion: recipe tensorwise, format ocp, emulated") == 1
    assert "blocks.*.1" in text
    assert "output head" in text
    assert "attention products not counted" in text.replace("\n", " ")
    assert text.count("FP8 is emulated on CPU") == 1


def test_turning_the_logger_down_silences_the_table(pl: Lightning, capsys: Any, caplog: Any) -> None:
    caplog.set_level("WARNING", logger="lightning_fp8_rocm")
    pl.trainer(fast_dev_run=True).fit(pl.module(Blocks)(), batches())
    assert "FP8 conversion" not in capsys.readouterr().out


class ReadsPast(Blocks):
    """Reads one weight past its layer's forward, and leaves another out."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0]
        x = first[3](first[2](F.linear(first[0](x), first[1].weight.to(x.dtype))))
        return self.head(x)


@pytest.mark.parametrize("flags", [{"max_epochs": 1}, {"fast_dev_run": True}], ids=["epoch", "one step"])
def test_a_layer_that_the_first_step_does_not_call_is_named(
    pl: Lightning,
    flags: dict[str, Any],
) -> None:
    with pytest.warns(UserWarning, match="what the first step did not call") as caught:
        pl.trainer(**flags).fit(pl.module(ReadsPast)(), batches())
    messages = [str(w.message) for w in caught if "did not call" in str(w.message)]
    assert len(messages) == 1
    assert "'blocks.0.1', 'blocks.1.1', 'blocks.1.3'." in messages[0]  # the first has a gradient, and is not FP8


def test_what_a_validation_called_is_no_step(pl: Lightning, recwarn: Any) -> None:
    class OnlyInEval(pl.module(Blocks)):
        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            return self.head(batch[0]).float().pow(2).mean()

    pl.trainer(num_sanity_val_steps=1).fit(OnlyInEval(), batches(), batches())
    (message,) = [str(w.message) for w in recwarn if "did not call" in str(w.message)]
    assert all(repr(name) in message for name in FP8_LAYERS)


def test_a_first_batch_that_the_step_skips_names_nothing(pl: Lightning, recwarn: Any) -> None:
    class Skips(pl.module(Blocks)):
        def training_step(self, batch: list[Tensor], index: int) -> Tensor | None:
            return None if index == 0 else super().training_step(batch, index)

    pl.trainer().fit(Skips(), batches())
    assert not [w for w in recwarn if "did not call" in str(w.message)]


def test_a_module_whose_layers_are_all_called_is_not_warned_of(pl: Lightning, recwarn: Any) -> None:
    pl.trainer(accumulate_grad_batches=2).fit(pl.module(Blocks)(), batches())
    assert not [w for w in recwarn if "did not call" in str(w.message)]


# ---------------------------------------------------------------------------------------------------------------------
# Hardware that is not here

NO_FP8 = hardware.Hardware("AMD Instinct MI250X", "gfx90a", fp8_format=None, source="test")
RDNA4 = hardware.Hardware("RX 9070", "gfx1201", fp8_format="ocp", source="test", caution="RDNA4 promises nothing.")


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let the CPU pass for a GPU of the given row."""

    def pretend(*rows: hardware.Hardware) -> None:
        cycle = iter(rows * 100)
        monkeypatch.setattr(hardware, "of_device", lambda device: rows[0] if len(rows) == 1 else next(cycle))

    return pretend


def test_a_pretended_gpu_without_fp8_is_an_error_that_says_what_to_do(pl: Lightning, pretended_gpu: Any) -> None:
    pretended_gpu(NO_FP8)
    module = pl.module(Blocks)()
    with pytest.raises(RuntimeError, match=r"gfx90a.*gfx942.*on_unsupported=\"bf16\".*on_unsupported=\"emulate\""):
        pl.trainer().fit(module, batches())
    assert fp8_layers(module) == []


def test_a_pretended_gpu_without_fp8_trains_in_bf16_when_told_to(pl: Lightning, pretended_gpu: Any) -> None:
    pretended_gpu(NO_FP8)
    module, plugin = pl.module(Blocks)(), pl.FP8Precision(on_unsupported="bf16")
    with pytest.warns(UserWarning, match="gfx90a.*this run is in bf16"):
        pl.trainer(plugin, fast_dev_run=True).fit(module, batches())
    assert module.kinds["train"] == {"Linear"}
    assert plugin.report is None


def test_a_pretended_gpu_without_fp8_emulates_when_told_to(pl: Lightning, pretended_gpu: Any) -> None:
    pretended_gpu(NO_FP8)
    module, plugin = pl.module(Blocks)(), pl.FP8Precision(on_unsupported="emulate")
    pl.trainer(plugin, fast_dev_run=True).fit(module, batches())
    assert module.kinds["train"] == {"FP8Linear"}
    assert plugin.report.recipe.emulate


def test_pretended_rdna4_trains_with_a_warning(pl: Lightning, pretended_gpu: Any) -> None:
    pretended_gpu(RDNA4)
    with pytest.warns(UserWarning, match="RDNA4 promises nothing"):
        pl.trainer(pl.FP8Precision(fp8_format="ocp", skip_small=False), fast_dev_run=True).fit(
            pl.module(Blocks)(), batches()
        )


def test_small_layers_are_left_out_on_a_pretended_gpu_and_that_is_an_error_if_none_remains(
    pl: Lightning, pretended_gpu: Any
) -> None:
    pretended_gpu(replace(RDNA4, caution=None))
    with pytest.raises(ValueError, match=r"too small to gain \(`skip_small`\)"):
        pl.trainer().fit(pl.module(Blocks)(), batches())


@pytest.mark.parametrize(
    ("given", "native", "emulated"), [("auto", "ocp", False), ("fnuz", "ocp", True), ("auto", "fnuz", False)]
)
def test_the_format_is_that_of_the_pretended_hardware_and_another_one_is_emulated(
    pl: Lightning, pretended_gpu: Any, given: str, native: Any, emulated: bool
) -> None:
    pretended_gpu(hardware.Hardware("GPU", "gfx000", fp8_format=native, source="test"))
    from lightning_fp8_rocm import convert

    report = convert(pl.module(Blocks)(), fp8_format=given, skip_small=False, device=torch.device("cpu"))
    assert report.recipe.fp8_format == (native if given == "auto" else given)
    assert report.recipe.emulate is emulated


# ---------------------------------------------------------------------------------------------------------------------
# Bad input


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"recipe": "rowise"}, "`recipe`.*'tensorwise', 'rowwise', 'rowwise_with_gw_hp', but got 'rowise'"),
        ({"recipe": None}, "`recipe`.*but got None"),
        ({"recipe": {"output": None}}, "`recipe`.*'tensorwise'.*but got {'output': None}.*Float8LinearConfig"),
        ({"fp8_format": "e4m3"}, "`fp8_format`.*'auto', 'ocp', 'fnuz', but got 'e4m3'"),
        ({"weights_dtype": "float16"}, "`weights_dtype`.*'float32', 'bfloat16', but got 'float16'.*loss scaling"),
        ({"weights_dtype": torch.bfloat16}, "`weights_dtype`.*but got torch.bfloat16"),
        ({"compute_dtype": "float16"}, "`compute_dtype`.*but got 'float16'.*loss scaling"),
        ({"include": 5}, "`include` of FP8Precision.*a list of them with at least one, but got 5"),
        ({"exclude": []}, r"`exclude` of FP8Precision.*at least one, but got \[\]"),
        ({"include": ["a", 1]}, "`include`.*but got \\['a', 1\\]"),
        ({"skip_small": "yes"}, "`skip_small`.*'auto', True, False, but got 'yes'"),
        ({"skip_small": 1}, "`skip_small`.*but got 1"),
        ({"on_unsupported": "warn"}, "`on_unsupported`.*'error', 'bf16', 'emulate', but got 'warn'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_bad_argument_is_refused_when_it_is_given(pl: Lightning, arguments: dict[str, Any], says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=says):
        pl.FP8Precision(**arguments)


def _contradicting_config() -> Any:
    from torchao.float8 import Float8LinearConfig

    return Float8LinearConfig(pad_inner_dim=True)


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (
            lambda pl: pl.FP8Precision(exclude=["decoder.*"]),
            ValueError,
            r"'decoder.\*' in `exclude` matches none.*'blocks.0.1'",
        ),
        (lambda pl: pl.FP8Precision(include=["nothing"]), ValueError, "'nothing' in `include` matches none"),
        (lambda pl: pl.FP8Precision(_contradicting_config()), ValueError, "pad_inner_dim=True.*contradicts"),
        (
            lambda pl: pl.FP8Precision(exclude=["blocks.*"]),
            ValueError,
            "No layer would run in FP8.*excluded by `exclude`",
        ),
    ],
    ids=["exclude", "include", "torchao", "nothing left"],
)
def test_what_only_setup_can_know_is_refused_before_a_weight_changes(
    pl: Lightning, make: Any, error: Any, says: str
) -> None:
    module = pl.module(Blocks)()
    before = copy.deepcopy(module.state_dict())
    plugin = make(pl)
    plugin.weights_dtype = "bfloat16"
    with pytest.raises(error) as raised:
        pl.trainer(plugin).fit(module, batches())
    assert re.search(says, str(raised.value), re.DOTALL), raised.value
    assert fp8_layers(module) == []
    for name, value in module.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(before[name], value)


def test_deepspeed_is_refused_by_name_although_it_is_a_ddp_strategy(pl: Lightning) -> None:
    module = pl.module(Blocks)()
    run = pl.trainer()
    run.strategy.connect(module)
    module.trainer = run
    kind = pl.strategies.DeepSpeedStrategy
    run._accelerator_connector.strategy = kind.__new__(kind)  # the package is not installed
    with pytest.raises(TypeError, match="does not work with DeepSpeedStrategy"):
        pl.FP8Precision().convert_module(module)


def test_a_strategy_that_would_convert_too_late_is_refused_by_name(pl: Lightning) -> None:
    class Sharded(pl.module(Blocks)):
        def configure_model(self) -> None:
            pass

    strategy = pl.strategies.ModelParallelStrategy(1, 1, process_group_backend="gloo")
    with pytest.raises(TypeError, match=r"does not work with ModelParallelStrategy.*'auto', 'ddp' or 'fsdp2_fp8'"):
        pl.trainer(strategy=strategy).fit(Sharded(), batches())


class ReadsTwice(Blocks):
    """Under manual optimization: an optimizer steps between two forwards of one step, the first without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.outputs: list[torch.Tensor] = []

    def training_step(self, batch: list[torch.Tensor], index: int) -> None:
        optimizer = self.optimizers()
        with torch.no_grad():
            self(batch[0])
        for _ in range(2):
            output = self(batch[0])
            self.outputs.append(output.detach().float())
            optimizer.zero_grad()
            self.manual_backward(output.float().square().mean())
            optimizer.step()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.head.parameters(), lr=1.0)  # the head is no FP8 layer: autocast casts its weight


def test_within_one_step_a_cast_weight_is_never_that_of_before_an_optimizer_step_or_without_its_gradient(
    pl: Lightning,
) -> None:
    module = pl.module(ReadsTwice)()
    before = module.head.weight.detach().clone()
    pl.trainer(max_steps=2, max_epochs=1).fit(module, batches())
    assert not module.head.weight.equal(before)  # trained, although its first use in the step was under no_grad
    first, second = module.outputs[:2]
    assert (first - second).norm() > 0.1 * first.norm()  # the second forward has the weight that the first step left
