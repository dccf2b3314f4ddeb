"""The EMA callback: its averages against a float64 sum by hand, what evaluations and checkpoints see of them."""

import copy
import signal
from collections.abc import Callable, Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from flavours import BOTH, Lightning, over
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

WIDTH = 32
DECAY = 0.5


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.one(x).tanh())


class Net:
    """Of two ranks one has 2 rows of `uneven` and no row of `single`; `gain` belongs to the module itself."""

    batches = 4

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.tied = Tied()
        self.uneven, self.single = nn.Linear(WIDTH, 5), nn.Linear(5, 1)
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.gain
        for block in self.blocks:
            x = block(x)
        return self.single(self.uneven(self.tied(self.frozen(x))))

    def loss(self, batch: list[Tensor]) -> Tensor:
        return F.mse_loss(self(batch[0]).float(), batch[1])

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: list[Tensor], index: int) -> None:
        self.log("loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: list[Tensor], index: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=0.1)

    def data(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(8 * self.batches, WIDTH, generator=generator)
        return DataLoader(TensorDataset(inputs, inputs[:, :1]), batch_size=8)

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = data


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every tensor in full, on every rank, a copy."""
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
        for name, tensor in tensors.items()
    }


def trained(module: Any) -> dict[str, Tensor]:
    return whole({name: p for name, p in module.named_parameters() if p.requires_grad})


def averages(ema: Any) -> dict[str, Tensor]:
    return whole(ema.state_dict()["weights"])


class Record:
    """The trained weights after each optimizer step, and around each validation within `fit`."""

    def __init__(self, ema: Any) -> None:
        self.ema = ema
        self.steps: list[dict[str, Tensor]] = []
        self.losses: list[float] = []
        self.averages: list[dict[str, Tensor]] = []
        self.changed: list[str] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step > len(self.steps):
            self.steps.append(trained(module))

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.averages.append(averages(self.ema))

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["loss"]))
        now = trained(module)
        self.changed += [name for name, weight in self.steps[-1].items() if not now[name].equal(weight)]


def by_hand(steps: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The averages of the weights after the given steps, in float64."""
    total = {name: weight.double() for name, weight in steps[0].items()}
    for weights in steps[1:]:
        total = {name: DECAY * total[name] + (1 - DECAY) * weight.double() for name, weight in weights.items()}
    return total


def assert_averages(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """To the roundings of fp32: half an ulp in each of a few updates of weights less than 2."""
    assert found.keys() == expected.keys()
    for name, average in found.items():
        assert average.dtype == torch.float32
        assert (average - expected[name]).abs().max() < 1e-6, name


def fit(
    pl: Lightning, ema: Any, *callbacks: Any, module: Any = None, ckpt_path: Path | None = None, **flags: Any
) -> tuple[Any, Any]:
    module = module or pl.module(Net)()
    run = pl.trainer(
        flags.pop("precision", "32-true"), callbacks=[*callbacks, ema], **{"num_sanity_val_steps": 0, **flags}
    )
    run.fit(module, ckpt_path=ckpt_path)
    return run, module


def loss_with(pl: Lightning, weights: dict[str, Tensor], **flags: Any) -> float:
    """The validation loss of a fresh module that was given some of its weights, under the same arguments."""
    module = pl.module(Net)()
    module.load_state_dict(weights, strict=False)
    (logged,) = pl.trainer(flags.pop("precision", "32-true"), **flags).validate(module, verbose=False)
    return float(logged["loss"])


# ---- averages


@pytest.mark.parametrize(
    ("arguments", "accumulate", "averaged"),
    [
        ({}, 1, [1, 2, 3, 4, 5, 6, 7, 8]),
        ({}, 2, [1, 2, 3, 4]),
        ({"every_n_steps": 3}, 1, [3, 6]),
        ({"start_step": 5}, 1, [5, 6, 7, 8]),
        ({"every_n_steps": 2, "start_step": 3}, 1, [3, 5, 7]),
    ],
    ids=str,
)
def test_the_averages_are_those_of_the_weights_after_the_optimizer_steps_that_count(
    pl: Lightning, arguments: dict[str, int], accumulate: int, averaged: list[int]
) -> None:
    ema = pl.EMA(DECAY, **arguments)
    record = pl.callback(Record)(ema)
    fit(pl, ema, record, max_epochs=2, accumulate_grad_batches=accumulate)
    assert_averages(averages(ema), by_hand([record.steps[step - 1] for step in averaged]))
    assert ema.updates == len(averaged)


def test_frozen_parameters_have_no_average_and_tied_ones_have_one(pl: Lightning) -> None:
    ema = pl.EMA(DECAY)
    fit(pl, ema, limit_val_batches=0)
    layers = {name.rpartition(".")[0] for name in ema.state_dict()["weights"]}
    assert layers == {"", "blocks.0.0", "blocks.1.0", "tied.one", "uneven", "single"}


def test_a_parameter_that_is_thawed_joins_with_its_value_of_then_and_one_that_is_frozen_is_averaged_on(
    pl: Lightning,
) -> None:
    class Exchange(pl.Callback):
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            if trainer.current_epoch == 1:
                module.frozen.requires_grad_(True)
                module.uneven.requires_grad_(False)

    class All(pl.module(Net)):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    ema = pl.EMA(DECAY)
    before = pl.callback(Record)(ema)
    fit(pl, ema, Exchange(), before, module=All(), max_epochs=2)
    first, second = before.steps[:4], before.steps[4:]
    joined = {name for name in second[0] if name.startswith("frozen")}
    left = {name for name in first[0] if name.startswith("uneven")}
    assert len(joined) == len(left) == 2
    now = averages(ema)
    assert_averages({name: now[name] for name in joined}, by_hand([{n: w[n] for n in joined} for w in second]))
    stays = [{name: weights[name] for name in left} for weights in [*first, *[first[-1]] * 4]]
    assert_averages({name: now[name] for name in left}, by_hand(stays))


def test_the_optimizer_steps_of_one_batch_under_manual_optimization_make_one_update(pl: Lightning) -> None:
    class Manual(pl.module(Net)):
        automatic_optimization = False

        def training_step(self, batch: list[Tensor], index: int) -> None:
            for _ in range(2):
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch))
                optimizer.step()

    class EachBatch(pl.callback(Record)):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            self.steps.append(trained(module))

    ema = pl.EMA(DECAY)
    record = EachBatch(ema)
    run, _ = fit(pl, ema, record, module=Manual())
    assert run.global_step == 8
    assert ema.updates == 4
    assert_averages(averages(ema), by_hand(record.steps))


def test_names_are_those_of_the_module_as_it_was_written(pl: Lightning) -> None:
    module = pl.module(Net)()
    names = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    module.blocks[0] = torch.compile(module.blocks[0], backend="eager")
    ema = pl.EMA(DECAY)
    run, _ = fit(pl, ema, module=module)
    assert ema.state_dict()["weights"].keys() == names
    assert run.validate(module, verbose=False)[0]["loss"] == pytest.approx(loss_with(pl, averages(ema)), rel=1e-6)


def test_bf16_weights_are_averaged_in_fp32_evaluated_rounded_and_back_bit_for_bit(pl: Lightning) -> None:
    ema = pl.EMA(DECAY)
    record = pl.callback(Record)(ema)
    _, module = fit(pl, ema, record, precision="bf16-true")
    assert module.uneven.weight.dtype == torch.bfloat16
    found = averages(ema)
    assert_averages(found, by_hand(record.steps))
    assert any(not average.equal(average.bfloat16().float()) for average in found.values())
    assert record.losses == [loss_with(pl, found, precision="bf16-true")]
    assert record.changed == []


# ---- evaluations


def test_validation_within_fit_runs_with_the_averages_and_leaves_the_trained_weights_bit_for_bit(pl: Lightning) -> None:
    ema = pl.EMA(DECAY)
    record = pl.callback(Record)(ema)
    fit(pl, ema, record, max_epochs=3)
    assert record.losses == [loss_with(pl, weights) for weights in record.averages]
    assert record.losses[-1] != pytest.approx(loss_with(pl, record.steps[-1]), rel=1e-3)
    assert record.changed == []


def test_validate_test_and_predict_after_fit_run_with_the_averages(pl: Lightning) -> None:
    ema = pl.EMA(DECAY)
    run, module = fit(pl, ema)
    weights = trained(module)
    expected = pl.module(Net)()
    expected.load_state_dict(averages(ema), strict=False)
    inputs = torch.cat([batch[0] for batch in module.data()])
    assert run.validate(module, verbose=False)[0]["loss"] == pytest.approx(loss_with(pl, averages(ema)))
    assert run.test(module, verbose=False)[0]["loss"] == pytest.approx(loss_with(pl, averages(ema)))
    assert torch.cat(run.predict(module)).allclose(expected(inputs))
    assert all(weight.equal(weights[name]) for name, weight in trained(module).items())


def test_without_evaluate_evaluations_run_with_the_trained_weights_but_within_averaged_weights(pl: Lightning) -> None:
    ema = pl.EMA(DECAY, evaluate=False)
    run, module = fit(pl, ema)
    weights = trained(module)
    assert run.validate(module, verbose=False)[0]["loss"] == pytest.approx(loss_with(pl, weights))
    with ema.averaged_weights(module):
        assert run.validate(module, verbose=False)[0]["loss"] == pytest.approx(loss_with(pl, averages(ema)))
        assert all(weight.equal(averages(ema)[name]) for name, weight in trained(module).items())
    assert all(weight.equal(weights[name]) for name, weight in trained(module).items())


def test_within_averaged_weights_an_evaluation_leaves_the_averages_in_place(pl: Lightning) -> None:
    ema = pl.EMA(DECAY)
    run, module = fit(pl, ema)
    weights = trained(module)
    with ema.averaged_weights(module):
        run.validate(module, verbose=False)
        assert all(weight.equal(averages(ema)[name]) for name, weight in trained(module).items())
    assert all(weight.equal(weights[name]) for name, weight in trained(module).items())


def test_before_the_first_update_validation_within_fit_runs_with_the_weights_as_they_are(pl: Lightning) -> None:
    ema = pl.EMA(DECAY, start_step=100)
    run, module = fit(pl, ema, num_sanity_val_steps=1)
    assert ema.updates == 0
    assert float(run.callback_metrics["loss"]) == pytest.approx(loss_with(pl, trained(module)))
    with pytest.raises(RuntimeError, match="no averages yet"), ema.averaged_weights(module):
        pass


def test_an_evaluation_outside_of_fit_without_averages_warns(pl: Lightning) -> None:
    with pytest.warns(UserWarning, match="EMA has no averages"):
        pl.trainer("32-true", callbacks=[pl.EMA()]).validate(pl.module(Net)(), verbose=False)


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Lightning ignores further interrupts after the first."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
@pytest.mark.parametrize(("error", "seen"), [(RuntimeError, RuntimeError), (KeyboardInterrupt, SystemExit)])
def test_an_interrupted_validation_leaves_and_saves_the_trained_weights(
    pl: Lightning, tmp_path: Path, error: type[BaseException], seen: type[BaseException]
) -> None:
    class Failing(pl.module(Net)):
        def validation_step(self, batch: list[Tensor], index: int) -> None:
            if self.trainer.current_epoch == 1 and index == 1:
                raise error
            super().validation_step(batch, index)

    ema = pl.EMA(DECAY)
    record = pl.callback(Record)(ema)
    module = Failing()
    # The order in the list is not that of the calls: Lightning calls it last.
    saving = pl.callbacks.ModelCheckpoint(
        tmp_path, "saved", save_on_exception=True, every_n_train_steps=0, every_n_epochs=0
    )
    with pytest.raises(seen):
        fit(pl, ema, saving, record, module=module, max_epochs=2, enable_checkpointing=True)
    assert len(record.steps) == 8
    saved = torch.load(tmp_path / "saved.ckpt")
    for name, weight in record.steps[-1].items():
        assert module.get_parameter(name).equal(weight)
        assert saved["state_dict"][name].equal(weight)
    assert_averages(saved["callbacks"][ema.state_key]["weights"], by_hand(record.steps))


# ---- checkpoints


def test_training_resumes_with_the_averages_bit_for_bit(pl: Lightning, tmp_path: Path) -> None:
    straight, first, second = pl.EMA(DECAY), pl.EMA(DECAY), pl.EMA(DECAY)
    fit(pl, straight, max_epochs=2)
    run, _ = fit(pl, first)
    run.save_checkpoint(tmp_path / "one.ckpt")
    fit(pl, second, max_epochs=2, ckpt_path=tmp_path / "one.ckpt")
    assert second.updates == straight.updates == 8
    found, expected = averages(second), averages(straight)
    assert found.keys() == expected.keys()
    assert all(average.equal(expected[name]) for name, average in found.items())


def test_an_evaluation_of_a_checkpoint_runs_with_its_averages_and_of_one_without_any_with_its_weights(
    pl: Lightning,
    tmp_path: Path,
) -> None:
    ema = pl.EMA(DECAY)
    run, module = fit(pl, ema)
    expected, weights = averages(ema), trained(module)
    run.save_checkpoint(tmp_path / "all.ckpt")
    run.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    fresh = pl.trainer("32-true", callbacks=[pl.EMA(DECAY)])
    (logged,) = fresh.validate(pl.module(Net)(), ckpt_path=tmp_path / "all.ckpt", verbose=False)
    assert logged["loss"] == pytest.approx(loss_with(pl, expected))
    with pytest.warns(UserWarning, match="EMA has no averages"):  # not with those of the module's training
        (logged,) = run.validate(module, ckpt_path=tmp_path / "weights.ckpt", verbose=False)
    assert logged["loss"] == pytest.approx(loss_with(pl, weights))


def test_a_checkpoint_saved_within_an_evaluation_holds_the_trained_weights(pl: Lightning, tmp_path: Path) -> None:
    class Saving(pl.module(Net)):
        def on_validation_epoch_end(self) -> None:
            self.trainer.save_checkpoint(tmp_path / "all.ckpt")
            self.seen = trained(self)

    ema = pl.EMA(DECAY)
    record = pl.callback(Record)(ema)
    _, module = fit(pl, ema, record, module=Saving())
    saved = torch.load(tmp_path / "all.ckpt")
    for name, weight in record.steps[-1].items():
        assert saved["state_dict"][name].equal(weight)
        assert module.seen[name].equal(record.averages[-1][name])


def test_weights_saved_within_averaged_weights_are_the_averages(pl: Lightning, tmp_path: Path) -> None:
    ema = pl.EMA(DECAY)
    run, module = fit(pl, ema)
    with ema.averaged_weights(module):
        run.save_checkpoint(tmp_path / "averages.ckpt", weights_only=True)
    saved = torch.load(tmp_path / "averages.ckpt")["state_dict"]
    assert all(saved[name].equal(average) for name, average in averages(ema).items())


def test_another_module_begins_with_averages_of_its_own(pl: Lightning) -> None:
    ema = pl.EMA(DECAY)
    fit(pl, ema)
    record = pl.callback(Record)(ema)
    fit(pl, ema, record, module=pl.module(Net)())
    assert_averages(averages(ema), by_hand(record.steps))


def lacking(weights: dict[str, Tensor]) -> None:
    del weights["uneven.bias"]


def with_another(weights: dict[str, Tensor]) -> None:
    weights["even.bias"] = torch.zeros(5)


def of_another_shape(weights: dict[str, Tensor]) -> None:
    weights["uneven.bias"] = torch.zeros(7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lacking, r"do not fit Net. They lack uneven.bias. .*strict_loading"),
        (with_another, r"do not fit Net. They have even.bias, which the module has not. .*strict_loading"),
        (of_another_shape, r"other shapes .* Net: uneven.bias \(average \(7,\), parameter \(5,\)\)"),
    ],
)
def test_averages_that_do_not_fit_the_module_are_refused_by_name(
    pl: Lightning, change: Callable[[dict[str, Tensor]], None], message: str
) -> None:
    state = {"decay": DECAY, "updates": 1, "weights": trained(pl.module(Net)())}
    change(state["weights"])
    ema = pl.EMA(DECAY)
    ema.load_state_dict(state)
    with pytest.raises(ValueError, match=message):
        fit(pl, ema)


def test_without_strict_loading_the_averages_that_both_have_are_used_and_the_others_begin_anew(pl: Lightning) -> None:
    state = {"decay": DECAY, "updates": 1, "weights": {name: w + 1 for name, w in trained(pl.module(Net)()).items()}}
    began = dict(state["weights"])
    lacking(state["weights"])
    with_another(state["weights"])
    module = pl.module(Net)()
    module.strict_loading = False
    ema = pl.EMA(DECAY)
    record = pl.callback(Record)(ema)
    ema.load_state_dict(copy.deepcopy(state))
    fit(pl, ema, record, module=module)
    expected = by_hand([began, *record.steps])
    expected["uneven.bias"] = by_hand(record.steps)["uneven.bias"]
    assert_averages(averages(ema), expected)


# ---- the other name


@pytest.mark.parametrize(("ours", "theirs"), permutations(BOTH), ids=lambda pl: f"{pl}")
def test_the_callback_of_the_other_name_works_in_a_list_as_lightning_looks_for_no_class_there(
    ours: Lightning, theirs: Lightning, tmp_path: Path
) -> None:
    found = []
    for pl in (ours, theirs):
        ema = ours.EMA(DECAY)
        run, _ = fit(pl, ema, max_epochs=2)
        run.save_checkpoint(tmp_path / f"{pl}.ckpt")
        found.append((averages(ema), float(run.callback_metrics["loss"]), ema.updates))
    assert_same(*found)
    for pl in (ours, theirs):  # and its averages are those of the same callback under either name
        loaded = theirs.EMA(DECAY)
        (logged,) = pl.trainer("32-true", callbacks=[loaded]).validate(
            pl.module(Net)(), ckpt_path=tmp_path / f"{theirs}.ckpt", verbose=False
        )
        assert_same((averages(loaded), logged["loss"], loaded.updates), found[0])


def assert_same(one: tuple[dict[str, Tensor], float, int], other: tuple[dict[str, Tensor], float, int]) -> None:
    assert one[0].keys() == other[0].keys()
    assert all(average.equal(other[0][name]) for name, average in one[0].items())
    assert one[1:] == other[1:]


# ---- arguments


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"decay": 1.0}, ValueError, "`decay` of EMA to be at least 0 and less than 1, but got 1.0"),
        ({"decay": -0.1}, ValueError, "`decay` of EMA to be at least 0"),
        ({"decay": "0.9"}, TypeError, "`decay` of EMA to be a number, but got '0.9'"),
        ({"every_n_steps": 0}, ValueError, "`every_n_steps` of EMA to be at least 1, but got 0"),
        ({"every_n_steps": 1.5}, TypeError, "`every_n_steps` of EMA to be a whole number, but got 1.5"),
        ({"start_step": -1}, ValueError, "`start_step` of EMA to be at least 0, but got -1"),
        ({"evaluate": 1}, TypeError, "`evaluate` of EMA to be True or False, but got 1"),
    ],
)
def test_an_argument_that_is_not_allowed_is_refused(
    pl: Lightning, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        pl.EMA(**arguments)


@pytest.mark.parametrize(
    ("before", "says"),
    [
        ([0.9], r"has averages of EMA\{'decay': 0\.9\}, .*begin anew\. To go on .* pass their `decay`"),
        ([], "has no averages"),
    ],
)
def test_where_a_checkpoint_has_no_averages_of_this_decay_they_begin_anew_and_a_warning_says_so(
    pl: Lightning, tmp_path: Path, before: list[float], says: str
) -> None:
    run = pl.trainer("32-true", callbacks=[pl.EMA(decay) for decay in before], num_sanity_val_steps=0)
    run.fit(pl.module(Net)())
    run.save_checkpoint(tmp_path / "a.ckpt")
    with pytest.warns(UserWarning, match=says):
        fit(pl, pl.EMA(0.99), ckpt_path=tmp_path / "a.ckpt", max_epochs=2)


def test_two_decays_are_averaged_side_by_side_and_one_of_them_evaluates(pl: Lightning, tmp_path: Path) -> None:
    short, long = pl.EMA(0.0), pl.EMA(0.9, evaluate=False)
    run, module = fit(pl, short, long)
    assert all(weight.equal(averages(short)[name]) for name, weight in trained(module).items())
    assert not averages(long)["uneven.bias"].equal(module.uneven.bias)
    run.save_checkpoint(tmp_path / "both.ckpt")
    assert {short.state_key, long.state_key} <= torch.load(tmp_path / "both.ckpt")["callbacks"].keys()
    with pytest.raises(ValueError, match=r"2 EMA callbacks .*0\.9, 0\.0.*evaluate=False"):
        fit(pl, pl.EMA(0.0), pl.EMA(0.9))


# ---- ranks


class Calling(Net):
    """Calls itself right before a validation and at its end: under FSDP2 that leaves `gain` gathered."""

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: list[Tensor], index: int) -> None:
        self(batch[0])

    @torch.no_grad()
    def on_validation_epoch_end(self) -> None:
        self(torch.ones(1, WIDTH))
        assert not isinstance(self.gain, DTensor)


class Local:
    """Counts the collectives of all that it does."""

    collectives = 0

    def _update(self) -> None:
        with CommDebugMode() as counted:
            super()._update()
        self.collectives += counted.get_total_counts()

    def _swap_in(self, module: nn.Module) -> None:
        with CommDebugMode() as counted:
            super()._swap_in(module)
        self.collectives += counted.get_total_counts()

    def _swap_out(self, module: nn.Module) -> None:
        with CommDebugMode() as counted:
            super()._swap_out(module)
        self.collectives += counted.get_total_counts()


def check_fit(pl: Lightning, strategy: str | dict[str, Any], precision: str | dict[str, Any] = "32-true") -> None:
    def flags() -> dict[str, Any]:  # a strategy and a precision serve one Trainer
        return {
            "devices": 2,
            "strategy": strategy if isinstance(strategy, str) else pl.FSDP2FP8Strategy(**strategy),
            "precision": precision if isinstance(precision, str) else pl.FP8Precision(**precision),
        }

    ema = over(Local, pl.EMA)(DECAY)
    record = pl.callback(Record)(ema)
    run, module = fit(pl, ema, record, module=pl.module(Calling)(), max_epochs=2, **flags())
    names = {name: p for name, p in module.named_parameters() if p.requires_grad}
    for name, average in ema.state_dict()["weights"].items():
        parameter = names[name]
        assert isinstance(average, DTensor) == isinstance(parameter, DTensor) == (strategy != "ddp")
        if isinstance(average, DTensor):
            assert average.placements == parameter.placements
            assert average.device_mesh == parameter.device_mesh
            average, parameter = average.to_local(), parameter.to_local()
        assert type(average) is Tensor
        assert average.shape == parameter.shape
    assert_averages(averages(ema), by_hand(record.steps))
    assert ema.collectives == 0
    assert record.changed == []
    expected = loss_with(pl, averages(ema), **flags())
    after = trained(module)
    assert record.losses[-1] == run.validate(module, verbose=False)[0]["loss"] == expected
    assert all(weight.equal(after[name]) for name, weight in trained(module).items())


def check_all_fits(pl: Lightning, specs: list[dict[str, Any]]) -> None:
    for spec in specs:
        check_fit(pl, **spec)


def test_two_ranks_average_their_shards_without_a_collective_and_evaluate_with_them(
    pl: Lightning, ranks: Ranks
) -> None:
    specs: list[dict[str, Any]] = [
        {"strategy": "ddp"},
        {"strategy": {}},
        {"strategy": {"device_mesh": (2, 1)}},
        {
            "strategy": {"compile": {"backend": "eager"}, "activation_checkpointing_policy": "full"},
            "precision": "fp8-rocm",
        },
        {"strategy": {"cpu_offload": True}, "precision": {"recipe": "rowwise", "weights_dtype": "bfloat16"}},
    ]
    ranks(2, check_all_fits, pl, specs)


def check_loading(pl: Lightning) -> None:
    def run_with(state: dict[str, Any]) -> float:
        ema = pl.EMA(DECAY)
        ema.load_state_dict(copy.deepcopy(state))  # as Lightning does
        run = pl.trainer("32-true", devices=2, strategy=pl.FSDP2FP8Strategy(), callbacks=[ema], num_sanity_val_steps=0)
        run.fit(module)
        for name, average in ema.state_dict()["weights"].items():
            assert average.placements == module.get_parameter(name).placements
            assert average.to_local().shape == module.get_parameter(name).to_local().shape
        loss = float(run.callback_metrics["loss"])
        module.load_state_dict(before)
        return loss

    first = pl.EMA(DECAY)
    _, module = fit(pl, first, devices=2, strategy=pl.FSDP2FP8Strategy())
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    sharded = copy.deepcopy(first.state_dict())
    as_whole = {**sharded, "weights": whole(sharded["weights"])}
    assert run_with(sharded) == run_with(as_whole)
    plain = pl.module(Net)()
    first.load_state_dict(sharded)
    with pytest.raises(ValueError, match="sharded otherwise than the parameters of Net"), first.averaged_weights(plain):
        pass
    first.load_state_dict(as_whole)
    with first.averaged_weights(plain):
        assert all(weight.equal(as_whole["weights"][name]) for name, weight in trained(plain).items())


def test_sharded_and_whole_averages_are_loaded_alike_into_a_sharded_module(pl: Lightning, ranks: Ranks) -> None:
    ranks(2, check_loading, pl)


def check_resuming(pl: Lightning, directory: Path) -> None:
    class Saving(pl.module(Net)):
        def on_validation_epoch_end(self) -> None:  # the averages stand in the module
            self.trainer.save_checkpoint(directory / f"{self.trainer.strategy.state_dict_type}.ckpt")

    for kind in ("sharded", "full"):
        first = pl.EMA(DECAY)
        record = pl.callback(Record)(first)
        fit(pl, first, record, module=Saving(), devices=2, strategy=pl.FSDP2FP8Strategy(state_dict_type=kind))
        loaded = pl.EMA(DECAY)
        run = pl.trainer("32-true", devices=2, strategy=pl.FSDP2FP8Strategy(state_dict_type=kind), callbacks=[loaded])
        module = pl.module(Net)()
        (logged,) = run.validate(module, ckpt_path=directory / f"{kind}.ckpt", verbose=False)
        assert logged["loss"] == record.losses[-1]
        assert all(weight.equal(record.steps[-1][name]) for name, weight in trained(module).items())
        assert all(average.equal(averages(first)[name]) for name, average in averages(loaded).items())


def test_a_checkpoint_of_two_ranks_saved_within_an_evaluation_holds_trained_weights_and_averages(
    pl: Lightning, ranks: Ranks, tmp_path: Path
) -> None:
    ranks(2, check_resuming, pl, tmp_path)
