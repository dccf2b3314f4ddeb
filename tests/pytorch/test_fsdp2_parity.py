"""`fsdp2_fp8` on several ranks against one device on the same global batches: what arguments of the two may change."""

from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from parity import (
    EXACT,
    GLOBAL_BATCH,
    WIDTH,
    Case,
    assert_same,
    classify,
    distance,
    fit_alone,
    fit_here,
    fit_on,
)
from ranks import Ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Blocks(Case):
    """Blocks and a head, directly on the LightningModule."""

    def build(self) -> None:
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 16)
        with torch.no_grad():  # else all rows have one scale
            for block in self.blocks:
                for layer in (block.up, block.down):
                    layer.weight.mul_(torch.randn(len(layer.weight), 1).exp())
                    assert layer.weight.abs().amax(1).log2().ceil().unique().numel() >= 4

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return classify(self(inputs), labels)


class Products(Case):
    """FP8 products with nothing between them whose rounding depends on who casts."""

    def build(self) -> None:
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2))
        self.head = nn.Linear(WIDTH, 16)

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return classify(self.head(inputs), labels)


class Noted(Blocks):
    """Logs the norm of gradients, in each of the ways that users know."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.log("total", torch.nn.utils.get_total_norm([p.grad for p in self.parameters()]))

        self.log_dict({f"norm of {name}": p.grad.norm() for name, p in self.named_parameters()}, prog_bar=True)

    def configure_gradient_clipping(self, optimizer: torch.optim.Optimizer, *_: Any, **__: Any) -> None:
        self.log("clipped", torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1))


class Read(Blocks):
    """Reads a sharded weight in a hook, in the ways that docs/fsdp2.md names."""

    def on_train_batch_end(self, *_: Any) -> None:
        weight = self.head.weight
        whole = weight.full_tensor().detach().cpu().numpy()
        self.notes["shapes"] = [tuple(weight.shape), whole.shape, tuple(weight.to_local().shape)]
        self.notes["norms"] = [
            float(np.linalg.norm(whole)),
            weight.norm().full_tensor().item(),
            weight.norm().item(),
            float(np.linalg.norm(weight.to_local().detach())),
        ]
        self.log("norm", weight.norm())


class Sampled(Blocks):
    """With the dataloader that a user writes, for Lightning to distribute; every sample names itself."""

    @property
    def data(self) -> tuple[Tensor, ...]:
        inputs, labels = super().data
        inputs[:, 0] = torch.arange(len(inputs))
        return inputs, labels

    def train_dataloader(self) -> DataLoader[Any]:
        data = TensorDataset(*self.data)
        return DataLoader(data, batch_size=GLOBAL_BATCH // self.trainer.world_size, shuffle=True)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.notes.setdefault("ids", []).extend(batch[0][:, 0].int().tolist())
        return self.loss(*batch)


class Skipping(Blocks):
    """The last batch of four does not use the first block."""

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.index = index
        return super().training_step(batch, index)

    def forward(self, x: Tensor) -> Tensor:
        if self.index != 3:
            x = self.blocks[0](x)
        return self.head(self.blocks[1](x))


class Normalised(Case):
    """BatchNorm within a block, as a block of its own, and directly on the LightningModule."""

    def build(self) -> None:
        self.first = nn.BatchNorm1d(WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.ReLU()) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 16)

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        x = self.first(inputs).tanh()  # else the next BatchNorm would take the first one's bias out again
        for block in self.blocks:
            x = block(x)
        return classify(self.head(x), labels)


class Evaluated(Normalised):
    """Evaluates while the statistics of the ranks differ; notes them where they must not."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.notes["own"] = [buffer.tolist() for buffer in self.buffers()]
        if self.global_step == 2:
            self.trainer.strategy.lightning_module_state_dict()
            self.note("checkpoint")

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.note(str(self.trainer.state.stage.value))

    test_step = predict_step = validation_step

    def note(self, where: str) -> None:
        self.notes[where] = [buffer.tolist() for buffer in self.buffers()]

    def val_dataloader(self) -> DataLoader[Any]:
        return self.train_dataloader()


class CountReductions(L.Callback):
    """Notes how often gradients are reduced."""

    def on_train_start(self, trainer: L.Trainer, module: Case) -> None:
        self.plain = torch.distributed.reduce_scatter_single
        module.notes["reductions"] = 0

        def counting(*args: Any, **kwargs: Any) -> Any:
            module.notes["reductions"] += 1
            return self.plain(*args, **kwargs)

        torch.distributed.reduce_scatter_single = counting

    def on_train_end(self, trainer: L.Trainer, module: Case) -> None:
        torch.distributed.reduce_scatter_single = self.plain


def fits(specs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [fit_here(globals(), **spec) for spec in specs]


# ---------------------------------------------------------------------------------------------------------------------
# Precisions and meshes


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_train_the_weights_of_one_device(ranks: Ranks, world: int) -> None:
    (several,) = fit_on(ranks, world, fits, {"case": "Blocks"})
    assert_same(fit_alone(ranks, fits, case="Blocks"), several)


# A precision, and the next better one: what the first rounds is seen by comparing the two.
ROUNDING: list[tuple[Any, Any]] = [
    ("bf16-mixed", "32-true"),
    ("bf16-true", "32-true"),
    ({"recipe": "tensorwise"}, "bf16-mixed"),
    ({"recipe": "rowwise"}, "bf16-mixed"),
    ({"recipe": "rowwise_with_gw_hp"}, "bf16-mixed"),
    ({"recipe": "tensorwise", "weights_dtype": "bfloat16"}, "bf16-true"),
]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_train_the_weights_of_one_device_up_to_the_rounding_of_the_precision(ranks: Ranks, world: int) -> None:
    for (precision, better), several in zip(
        ROUNDING, fit_on(ranks, world, fits, *({"case": "Blocks", "precision": p} for p, _ in ROUNDING)), strict=True
    ):
        one = fit_alone(ranks, fits, case="Blocks", precision=precision)
        rounding = distance(one, fit_alone(ranks, fits, case="Blocks", precision=better))
        assert 1e-3 < rounding < 0.5
        assert_same(one, several, precision, to=2 * rounding)


def test_fp8_products_with_gathered_weights_equal_those_of_ddp_bit_for_bit(ranks: Ranks) -> None:
    precisions: list[Any] = ["bf16-mixed", {"recipe": "tensorwise"}]
    specs = [{"case": "Products", "precision": p, "strategy": s} for p in precisions for s in ({}, "ddp")]
    for world in (2, 3):
        sharded_bf16, ddp_bf16, sharded_fp8, ddp_fp8 = fit_on(ranks, world, fits, *specs)
        assert distance(ddp_bf16[0], sharded_bf16[0]) < 1e-6
        assert distance(ddp_fp8[0], sharded_fp8[0]) < 1e-6
        assert distance(sharded_bf16[0], sharded_fp8[0]) > 1e-2  # it was FP8


def test_hsdp_trains_the_weights_of_one_device_and_its_replicas_stay_equal(ranks: Ranks) -> None:
    hsdp = {"device_mesh": (2, 2)}
    exact, fp8 = fit_on(
        ranks,
        4,
        fits,
        {"case": "Blocks", "strategy": hsdp},
        {"case": "Blocks", "strategy": hsdp, "precision": {"recipe": "rowwise"}},
    )
    assert_same(fit_alone(ranks, fits, case="Blocks"), exact)
    one = fit_alone(ranks, fits, case="Blocks", precision={"recipe": "rowwise"})
    rounding = distance(one, fit_alone(ranks, fits, case="Blocks", precision="bf16-mixed"))
    assert_same(one, fp8, to=2 * rounding)


def test_copies_of_one_rank_each_train_the_weights_of_one_device(ranks: Ranks) -> None:
    copies, fp8 = {"device_mesh": (2, 1)}, {"recipe": "tensorwise"}
    specs = [{"case": "Blocks", "strategy": copies}, {"case": "Blocks", "strategy": copies, "precision": fp8}]
    exact, rounded = fit_on(ranks, 2, fits, *specs)
    assert_same(fit_alone(ranks, fits, case="Blocks"), exact)
    one = fit_alone(ranks, fits, case="Blocks", precision=fp8)
    rounding = distance(one, fit_alone(ranks, fits, case="Blocks", precision="bf16-mixed"))
    assert_same(one, rounded, to=2 * rounding)


# ---------------------------------------------------------------------------------------------------------------------
# Accumulation and clipping

UNITS = 3  # of Blocks, with parameters: two blocks and the head


def test_accumulated_batches_are_one_large_batch_and_are_reduced_once_or_each_as_told(ranks: Ranks) -> None:
    spec = {"case": "Blocks", "accumulate_grad_batches": 4, "max_epochs": 2, "callbacks": ["CountReductions"]}
    last, every = fit_on(
        ranks,
        2,
        fits,
        {**spec, "strategy": {"gradient_sync": "last"}},
        {**spec, "strategy": {"gradient_sync": "every"}},
    )
    large = fit_alone(ranks, fits, case="Blocks", batch_size=4 * GLOBAL_BATCH, max_epochs=2)
    for several, reductions in ((last, 2 * UNITS), (every, 2 * 4 * UNITS)):
        assert_same(large, several)
        assert [rank["notes"]["reductions"] for rank in several] == [reductions] * 2


@pytest.mark.parametrize("sync", ["last", "every"])
def test_the_rest_of_an_epoch_and_blocks_that_the_last_batch_does_not_use_are_not_lost(ranks: Ranks, sync: str) -> None:
    specs = [
        {"case": "Blocks", "accumulate_grad_batches": 3, "max_epochs": 2},  # three batches and one
        {"case": "Skipping", "accumulate_grad_batches": 4, "max_epochs": 2},
        {"case": "Skipping", "accumulate_grad_batches": 4, "max_epochs": 2, "precision": "bf16-mixed"},
    ]
    for spec, several in zip(
        specs, fit_on(ranks, 2, fits, *({**spec, "strategy": {"gradient_sync": sync}} for spec in specs)), strict=True
    ):
        assert_same(fit_alone(ranks, fits, **spec), several, spec, to=0.05 if "precision" in spec else EXACT)


def test_clipping_by_norm_and_by_value_clips_what_one_device_clips(ranks: Ranks) -> None:
    specs = [
        {"case": "Blocks", "gradient_clip_val": 0.1},
        {"case": "Blocks", "gradient_clip_val": 0.005, "gradient_clip_algorithm": "value"},
        {"case": "Blocks", "gradient_clip_val": 0.1, "accumulate_grad_batches": 2},
    ]
    free = fit_alone(ranks, fits, case="Blocks")
    for spec, several in zip(specs, fit_on(ranks, 2, fits, *specs), strict=True):
        one = fit_alone(ranks, fits, **spec)
        assert distance(one, free) > 0.1
        assert_same(one, several, spec)


def test_norms_of_gradients_are_logged_as_on_one_device(ranks: Ranks) -> None:
    one = fit_alone(ranks, fits, case="Noted")
    (several,) = fit_on(ranks, 2, fits, {"case": "Noted"})
    assert one["logged"]["clipped"] > 0.1
    for rank in several:
        assert rank["logged"] == pytest.approx(one["logged"], rel=1e-5)
    assert_same(one, several)


# ---------------------------------------------------------------------------------------------------------------------
# Data and buffers


def test_ranks_see_different_samples_and_together_all_of_them(ranks: Ranks) -> None:
    for world, strategy in ((2, {}), (4, {"device_mesh": (2, 2)})):
        (several,) = fit_on(
            ranks, world, fits, {"case": "Sampled", "strategy": strategy, "use_distributed_sampler": True}
        )
        assert sorted(i for rank in several for i in rank["notes"]["ids"]) == list(range(4 * GLOBAL_BATCH))


def test_batch_norm_trains_and_keeps_statistics_as_under_ddp(ranks: Ranks) -> None:
    for world, strategy in ((2, {}), (4, {"device_mesh": (2, 2)})):
        ours, ddp = fit_on(
            ranks,
            world,
            fits,
            {"case": "Normalised", "strategy": strategy},
            {"case": "Normalised", "strategy": "ddp"},
        )
        assert_same(ddp[0], ours)
        for name, buffer in ddp[0]["buffers"].items():
            np.testing.assert_allclose(ours[0]["buffers"][name], buffer, rtol=1e-5, atol=1e-6)


def test_ranks_evaluate_and_save_with_the_statistics_of_rank_0(ranks: Ranks) -> None:
    ((first, second),) = fit_on(ranks, 2, fits, {"case": "Evaluated"})
    assert first["notes"]["own"] != second["notes"]["own"]
    assert first["notes"]["validate"] == second["notes"]["validate"] == first["notes"]["own"]
    assert first["notes"]["checkpoint"] == second["notes"]["checkpoint"]


def test_hooks_read_whole_weights_by_full_tensor_and_numbers_of_their_rows_without_it(ranks: Ranks) -> None:
    for rank in fit_on(ranks, 2, fits, {"case": "Read"})[0]:
        shape, whole, rows = rank["notes"]["shapes"]
        assert shape == whole == (2 * rows[0], *rows[1:])
        of_all, full, item, of_rows = rank["notes"]["norms"]
        assert full == pytest.approx(of_all)
        assert rank["logged"]["norm"] == pytest.approx(of_all)
        assert item == pytest.approx(of_rows)
        assert item < 0.9 * of_all


# ---------------------------------------------------------------------------------------------------------------------
# Arguments that change memory and speed alone


def test_arguments_of_memory_and_speed_leave_the_weights_as_they_are(ranks: Ranks) -> None:
    strategies: list[dict[str, Any]] = [
        {"activation_checkpointing_policy": "full"},
        {"activation_checkpointing_policy": "selective"},
        {"activation_checkpointing_policy": {"Block"}},
        {"activation_checkpointing_policy": {"Linear"}},
        {"cpu_offload": True},
        {"reshard_after_forward": True},
        {"reshard_after_forward": False},
        {"forward_prefetch": 2, "backward_prefetch": 2},
        {"auto_wrap_policy": {"Linear"}},
        {"auto_wrap_policy": {"Linear"}, "forward_prefetch": 2, "backward_prefetch": 1},
        {"fp8_all_gather": False},
    ]
    fp8 = {"recipe": "tensorwise"}
    plain, plain_fp8 = fit_on(ranks, 2, fits, {"case": "Blocks"}, {"case": "Blocks", "precision": fp8})
    exact = fit_on(ranks, 2, fits, *({"case": "Blocks", "strategy": strategy} for strategy in strategies))
    rounded = fit_on(
        ranks, 2, fits, *({"case": "Blocks", "strategy": strategy, "precision": fp8} for strategy in strategies[:-3])
    )
    for strategy, several in zip(strategies, exact, strict=True):
        assert_same(plain[0], several, strategy, to=1e-7)
    for strategy, several in zip(strategies[:-3], rounded, strict=True):
        assert_same(plain_fp8[0], several, strategy, to=1e-7)


def test_gradients_reduced_in_bf16_differ_by_its_rounding(ranks: Ranks) -> None:
    (several,) = fit_on(ranks, 2, fits, {"case": "Blocks", "strategy": {"reduce_dtype": "bfloat16"}})
    apart = distance(fit_alone(ranks, fits, case="Blocks"), several[0])
    assert EXACT < apart < 2**-7
