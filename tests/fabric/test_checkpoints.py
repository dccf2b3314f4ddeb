"""`fabric.save` and `fabric.load` under `strategy="fsdp2_fp8"`; the Trainer loads what Fabric saved, and Fabric its."""

import random
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from loops import Net, accumulate, both, classify, data_of, fabric_of, our_strategy, same, whole
from ranks import Ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fp8_rocm import FSDP2FP8Strategy

both_forms = pytest.mark.parametrize("form", ["sharded", "full"])


class Noisy(Net):
    """Draws random numbers in every forward, so that a run resumes only if they resume."""

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(self.encode(x), 0.2)
        return self.head(x + 0.01 * np.random.rand() + 0.01 * random.random())


def made(fabric: Any, model: nn.Module | None = None) -> dict[str, Any]:
    plain = Noisy() if model is None else model
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model, optimizer = fabric.setup(plain, optimizer)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0, "note": "of this run"}


def epoch(fabric: Any, state: dict[str, Any]) -> list[float]:
    losses = accumulate(fabric, state["model"], state["optimizer"])
    state["scheduler"].step()
    state["step"] += len(losses)
    return losses


def seed(fabric: Any, number: int) -> None:
    fabric.seed_everything(number + fabric.global_rank, verbose=False)


# ---- resume


def resumed(name: str, form: str, folder: str, in_background: bool = False) -> list[bool]:
    path = Path(folder) / "run" / "a.ckpt"
    strategy = our_strategy(name, state_dict_type=form, async_checkpoint=in_background)
    with fabric_of(name, strategy=strategy) as fabric:
        state = made(fabric)
        seed(fabric, 1)
        epoch(fabric, state)
        fabric.save(path, state)
        expected = epoch(fabric, state)
        rates, end = state["scheduler"].get_last_lr(), whole(state["model"].module)
        fabric.strategy.wait_for_checkpoint()
    with fabric_of(name, strategy=our_strategy(name, state_dict_type=form)) as fabric:
        state = made(fabric)
        seed(fabric, 77)
        remainder = fabric.load(path, state)
        return [
            remainder == {},
            state["step"] == 4,
            epoch(fabric, state) == expected,
            state["scheduler"].get_last_lr() == rates,
            same(whole(state["model"].module), end),
            path.is_dir() is (form == "sharded"),
        ]


@both_forms
@both
def test_a_run_continues_bit_for_bit_from_what_it_saved(ranks: Ranks, name: str, form: str, tmp_path: Path) -> None:
    assert ranks(2, resumed, name, form, str(tmp_path)) == [[True] * 6] * 2


def test_a_run_continues_from_what_was_written_while_it_went_on(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, resumed, "lightning", "sharded", str(tmp_path), True) == [[True] * 6] * 2


class Remembers(DataLoader[int]):
    """Knows how far it came, which is different on each rank."""

    position = 0

    def __iter__(self) -> Any:
        for index in range(self.position, 8):
            self.position = index + 1
            yield index

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def read_on(path: str, saves: bool) -> tuple[int, bool]:
    with fabric_of() as fabric:
        loader = fabric.setup_dataloaders(Remembers(range(8)), use_distributed_sampler=False)
        metric = nn.BatchNorm1d(2)  # a module that is not sharded
        state = {**made(fabric, Net()), "loader": loader, "metric": metric}
        if saves:
            for index, _ in enumerate(loader):
                if index == fabric.global_rank + 1:
                    break
            metric.running_mean.fill_(5)
            fabric.save(path, state)
        else:
            fabric.load(path, state)
        return next(iter(loader)), bool(metric.running_mean.eq(5).all())


def test_each_rank_reads_on_where_it_was_and_other_ranks_where_the_first_was(ranks: Ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    assert ranks(2, read_on, path, True) == [(2, True), (3, True)]
    assert ranks(2, read_on, path, False) == [(2, True), (3, True)]
    assert ranks(3, read_on, path, False) == [(2, True)] * 3


def saved(form: str, path: str) -> dict[str, Tensor]:
    with fabric_of(strategy=our_strategy(state_dict_type=form)) as fabric:
        state = made(fabric, Net())
        epoch(fabric, state)
        fabric.save(path, state)
        return whole(state["model"].module)


def loaded(path: str, **flags: Any) -> tuple[dict[str, Tensor], list[float], int]:
    with fabric_of(**flags) as fabric:
        state = made(fabric, Net())
        fabric.load(path, state)
        weights = whole(state["model"].module)
        moments = [each["exp_avg"] for each in state["optimizer"].optimizer.state.values()]
        norms = [(each.full_tensor() if hasattr(each, "full_tensor") else each).norm().item() for each in moments]
        return weights, norms, state["step"]


@both_forms
def test_another_number_of_ranks_and_another_precision_load_the_same_weights_and_moments(
    ranks: Ranks, form: str, tmp_path: Path
) -> None:
    weights = ranks(2, saved, form, str(tmp_path / "a"))[0]
    (_, norms, _) = ranks(2, loaded, str(tmp_path / "a"))[0]
    for world, flags in ((1, {}), (3, {}), (2, {"precision": "32-true"})):
        for found, found_norms, step in ranks(world, loaded, str(tmp_path / "a"), **flags):
            assert same(found, weights)
            assert found_norms == pytest.approx(norms, rel=1e-6)
            assert step == 4


class Counted(nn.Module):
    """One of many models, with a buffer that is different on each rank until it is saved."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)
        self.register_buffer("count", torch.tensor([float(number)]))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def many_models(path: str) -> list[float]:
    with fabric_of() as fabric:
        plain = [Counted(number) for number in range(8)]
        garbage = [object() for _ in range(1000 * fabric.global_rank)]  # addresses differ between ranks
        models = {str(number): fabric.setup(each) for number, each in enumerate(plain)}
        optimizer = fabric.setup_optimizers(
            torch.optim.SGD([each for model in models.values() for each in model.parameters()], 0.1)
        )
        x = torch.randn(4, 32)
        fabric.backward(sum(model(x).square().mean() for model in models.values()))
        optimizer.step()
        for each in plain:
            each.count += 100 * fabric.global_rank
        fabric.save(path, models)
        del garbage
        for each in plain:
            each.count.zero_()
        fabric.load(path, models)
        return [each.count.item() for each in plain]


def test_many_models_are_saved_in_one_order_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, many_models, str(tmp_path / "a")) == [[float(number) for number in range(8)]] * 2


# ---- whole or not at all


def save_that_fails_on_one_rank(folder: str) -> tuple[str, bool]:
    class Unreadable:
        def state_dict(self) -> dict[str, Any]:
            raise OSError("this rank has lost its disk")

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    class Fine(Unreadable):
        def state_dict(self) -> dict[str, Any]:
            return {}

    path = Path(folder) / "a.ckpt"
    with fabric_of() as fabric:
        state = made(fabric, Net())
        fabric.save(path, state)
        before = whole(state["model"].module)
        epoch(fabric, state)
        with pytest.raises(Exception, match="this rank has lost its disk") as error:
            fabric.save(path, {**state, "loader": Unreadable() if fabric.global_rank == 1 else Fine()})
        fabric.load(path, state)
        return str(error.value), same(whole(state["model"].module), before) and state["step"] == 0


def test_a_save_that_fails_on_one_rank_raises_on_all_and_leaves_the_checkpoint_before(
    ranks: Ranks, tmp_path: Path
) -> None:
    (one, intact), (other, also_intact) = ranks(2, save_that_fails_on_one_rank, str(tmp_path))
    assert one == other
    assert "rank 1 of 2 raised OSError" in one
    assert intact
    assert also_intact
    assert [each.name for each in tmp_path.iterdir()] == ["a.ckpt"]


def refused(path: str) -> list[str]:
    told = []
    with fabric_of() as fabric:
        state = made(fabric, Net())
        for action in (
            lambda: fabric.load(path + ".none", state),
            lambda: fabric.load(path, {**state, "epoch": 3}),
            lambda: fabric.save("s3://bucket/a.ckpt", state),
            lambda: fabric.save(path, {"optimizer": state["optimizer"]}),
        ):
            with pytest.raises(Exception) as error:  # noqa: PT011, four kinds; their texts are looked at
                action()
            told.append(f"{type(error.value).__name__}: {error.value}")
    return told


def test_what_cannot_be_saved_or_loaded_is_the_same_error_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "a.ckpt")
    ranks(2, saved, "sharded", path)
    one, other = ranks(2, refused, path)
    assert one == other
    missing, key, remote, stranger = one
    assert missing.startswith("FileNotFoundError: No checkpoint at")
    assert key.startswith("KeyError: ")
    assert "'epoch'" in key
    assert remote.startswith("ValueError: ")
    assert "s3://bucket/a.ckpt" in remote
    assert stranger.startswith("ValueError: ")
    assert "'optimizer'" in stranger


# ---- the Trainer's and Fabric's


class Lit(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], index: int = 0) -> Tensor:
        loss = classify(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def batches(rank: int) -> DataLoader[Any]:
    x, y = (torch.cat(column) for column in zip(*data_of(rank), strict=True))
    return DataLoader(TensorDataset(x, y), batch_size=len(data_of(rank)[0][0]))


def trainer(form: str, epochs: int) -> L.Trainer:
    world = torch.distributed.get_world_size()
    return L.Trainer(
        accelerator="cpu",
        devices=world,
        precision="fp8-rocm",
        strategy=FSDP2FP8Strategy(state_dict_type=form),
        max_epochs=epochs,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def steps_in_fabric(fabric: Any, model: Any, optimizer: Any) -> list[float]:
    losses = []
    for x, y in data_of(fabric.global_rank):
        loss = model.training_step([x, y])
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def from_the_trainer_to_fabric(form: str, path: str) -> list[bool]:
    rank = torch.distributed.get_rank()
    run, lit = trainer(form, 1), Lit()
    run.fit(lit, batches(rank))
    run.save_checkpoint(path)
    run, again = trainer(form, 2), Lit()
    run.fit(again, batches(rank), ckpt_path=path)
    with fabric_of() as fabric:
        lit = Lit()
        model, optimizer = fabric.setup(lit, torch.optim.AdamW(lit.parameters(), lr=1e-2))
        state: dict[str, Any] = {"model": model, "optimizer": optimizer, "global_step": 0}
        remainder = fabric.load(path, state)
        continued = steps_in_fabric(fabric, model, optimizer)
        return [
            state["global_step"] == 4,
            "loops" in remainder,
            continued == again.losses,
            same(whole(lit), whole(again)),
        ]


@both_forms
def test_fabric_continues_a_run_of_the_trainer_bit_for_bit(ranks: Ranks, form: str, tmp_path: Path) -> None:
    assert ranks(2, from_the_trainer_to_fabric, form, str(tmp_path / "a.ckpt")) == [[True] * 4] * 2


def from_fabric_to_the_trainer(form: str, path: str) -> list[bool]:
    rank = torch.distributed.get_rank()
    with fabric_of(strategy=our_strategy(state_dict_type=form)) as fabric:
        lit = Lit()
        model, optimizer = fabric.setup(lit, torch.optim.AdamW(lit.parameters(), lr=1e-2))
        steps_in_fabric(fabric, model, optimizer)
        fabric.save(path, {"model": model, "optimizer": optimizer, "step": 4})
        end = whole(lit)
        continued = steps_in_fabric(fabric, model, optimizer)
    verdicts = [same(whole(Lit.load_from_checkpoint(path)), end)]
    run, again = trainer(form, 1), Lit()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run.fit(again, batches(rank), ckpt_path=path)
    says_so = any("was saved by Fabric" in str(each.message) for each in told)
    return [*verdicts, again.losses == continued, run.global_step == 4, says_so is (rank == 0)]


@both_forms
def test_the_trainer_continues_a_run_of_fabric_bit_for_bit_and_counts_from_zero(
    ranks: Ranks, form: str, tmp_path: Path
) -> None:
    assert ranks(2, from_fabric_to_the_trainer, form, str(tmp_path / "a.ckpt")) == [[True] * 4] * 2
