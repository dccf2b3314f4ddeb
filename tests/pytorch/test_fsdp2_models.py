"""`fsdp2_fp8` on two ranks against one device on the same global batches: what users write in their modules."""

from itertools import pairwise
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from parity import EXACT, WIDTH, Case, assert_same, classify, distance, error_here, fit_alone, fit_here, fit_on
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inner, outer in pairwise(widths):
        layers += [nn.Linear(inner, outer), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


# ---------------------------------------------------------------------------------------------------------------------
# Modules of every shape


class Flat(Case):
    """No ModuleList, no blocks."""

    def build(self) -> None:
        self.embed, self.norm, self.head = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16)

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return classify(self.head(self.norm(self.embed(inputs).tanh())), labels)


class Direct(Flat):
    """Parameters directly on the LightningModule."""

    def build(self) -> None:
        super().build()
        self.scale = nn.Parameter(torch.ones(16))

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return classify(self.head(self.norm(self.embed(inputs).tanh())) * self.scale, labels)


class Helped(Direct):
    """Calls a method of its own in a hook, then writes to a parameter of its own: nothing may be left gathered."""

    def factor(self) -> float:
        return 0.5

    def on_train_start(self) -> None:
        self.scale.data.mul_(self.factor())

    def on_train_batch_end(self, *_: Any) -> None:
        factor = self.factor()
        with torch.no_grad():
            self.scale.mul_(factor)


class Llama(Case):
    tied = False
    lr = 0.3

    def build(self) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        self.config = LlamaConfig(
            vocab_size=48,
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            tie_word_embeddings=self.tied,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        )
        self.net = LlamaForCausalLM(self.config)

    @property
    def data(self) -> tuple[Tensor, ...]:
        return (torch.randint(3, 48, (48, 8), generator=torch.Generator().manual_seed(0)),)

    def loss(self, tokens: Tensor) -> Tensor:
        return self.net(input_ids=tokens, labels=tokens).loss


class TiedLlama(Llama):
    tied = True


class AutoencoderNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2))
        self.temperature = nn.Parameter(torch.ones(16))

    def encode(self, x: Tensor) -> Tensor:
        x = self.down(x)
        for block in self.blocks:
            x = block(x)
        return x * self.temperature

    def decode(self, z: Tensor) -> Tensor:
        return self.up(z)

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))

    def refine(self, x: Tensor) -> Tensor:
        """Uses the module itself after calls of its methods and of itself."""
        z = self.encode(x)
        y = self.decode(z * self.temperature)
        y = y + self(y)
        return self.up(z * self.temperature) + y


class Autoencoder(Case):
    """Never called by its forward."""

    lr = 0.02

    def build(self) -> None:
        self.vae = AutoencoderNet()

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return F.mse_loss(self.vae.decode(self.vae.encode(inputs).tanh()), inputs)


class MixedAutoencoder(Autoencoder):
    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        z = self.vae.encode(inputs)
        first = F.mse_loss(self.vae.decode(z), inputs)
        return first + F.mse_loss(self.vae(inputs), inputs) + F.mse_loss(self.vae.refine(inputs), inputs)


class Towers(Case):
    """Batches take turns with two towers, and with two layers of one unit. Zero gradients would decay what rests."""

    def build(self) -> None:
        self.left, self.right, self.pair = mlp(WIDTH, 16), mlp(WIDTH, 16), Pair()

    def training_step(self, batch: list[Tensor], index: int) -> Tensor | None:
        self.index = index
        return super().training_step(batch, index)

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        tower = self.left if self.index < 2 else self.right
        return classify(self.pair(tower(inputs), first=self.index % 2 == 0), labels)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-2, weight_decay=0.5)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, first: bool) -> Tensor:
        return self.first(x) if first else self.second(x)


class Experts(Case):
    """Even samples are of the first layer of a unit, odd ones of the second: of two ranks each uses one."""

    def build(self) -> None:
        self.pair = Pair()
        self.head = nn.Linear(16, 16)

    @property
    def data(self) -> tuple[Tensor, ...]:
        inputs, labels = super().data
        return inputs[:, :16], labels, torch.arange(len(labels)) % 2 == 0

    def loss(self, inputs: Tensor, labels: Tensor, is_even: Tensor) -> Tensor:
        outputs = torch.zeros_like(inputs)
        for mine, first in ((is_even, True), (~is_even, False)):
            if mine.any():
                outputs = outputs.index_put((mine.nonzero().squeeze(1),), self.pair(inputs[mine], first=first))
        return classify(self.head(outputs), labels)


# ---------------------------------------------------------------------------------------------------------------------
# Optimizers and hooks


class WassersteinGAN(Case):
    """Two optimizers, toggled; several steps of the critic, whose weights are clipped between them."""

    def build(self) -> None:
        self.automatic_optimization = False
        self.generator, self.critic = mlp(16, WIDTH, WIDTH), mlp(WIDTH, WIDTH, 1)

    def training_step(self, batch: list[Tensor], index: int) -> None:
        real = batch[0]
        of_generator, of_critic = self.optimizers()
        self.toggle_optimizer(of_critic)
        for _ in range(2):
            fake = self.generator(real[:, :16]).detach()
            of_critic.zero_grad()
            self.manual_backward(self.critic(fake).mean() - self.critic(real).mean())
            of_critic.step()
            for parameter in self.critic.parameters():
                parameter.data.clamp_(-0.08, 0.08)
        self.untoggle_optimizer(of_critic)
        self.toggle_optimizer(of_generator)
        of_generator.zero_grad()
        self.manual_backward(-self.critic(self.generator(real[:, :16])).mean())
        of_generator.step()
        self.untoggle_optimizer(of_generator)

    def configure_optimizers(self) -> Any:
        sgd = torch.optim.SGD(self.generator.parameters(), lr=1.0)
        return sgd, torch.optim.RMSprop(self.critic.parameters(), lr=1e-2, eps=1e-2)


class Accumulating(Flat):
    """Manual optimization that steps every second batch, and clips."""

    def build(self) -> None:
        super().build()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], index: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch[0], batch[1]) / 2)
        if index % 2 == 1:
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()


class GroupingNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = mlp(WIDTH, WIDTH, WIDTH), nn.Linear(WIDTH, 16)

    def param_groups(self) -> list[dict[str, Any]]:
        matrices = [p for p in self.parameters() if p.dim() > 1]
        vectors = [p for p in self.parameters() if p.dim() == 1]
        return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]

    def to_clip(self) -> list[nn.Parameter]:
        return list(self.head.parameters())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())


class Grouping(Case):
    """Asks methods of its child for parameters: for the optimizer, and in hooks that clip."""

    def build(self) -> None:
        self.net = GroupingNet()

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return classify(self.net(inputs), labels)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.param_groups(), lr=0.1, momentum=0.9)

    def configure_gradient_clipping(self, optimizer: torch.optim.Optimizer, *_: Any, **__: Any) -> None:
        nn.utils.clip_grad_norm_(self.net.to_clip(), 0.05)

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for parameter in self.net.to_clip():
                parameter.clamp_(-0.1, 0.1)


class Quiet(Case):
    def build(self) -> None:
        self.vae, self.head = AutoencoderNet(), nn.Linear(WIDTH, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.vae(x))

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return classify(self(inputs), labels)

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self(batch[0])

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


class Hooked(Quiet):
    """Uses its child and itself in hooks around the steps."""

    def probe(self, hook: str) -> None:
        probe = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)
        for is_enabled in (False, True):
            with torch.set_grad_enabled(is_enabled):
                for use in (self.vae, self.vae.encode, self.vae.refine, self, self.forward):
                    self.notes.setdefault("outputs", []).append((hook, use(probe).float().sum().item()))


def _hook(name: str) -> Any:
    def hook(self: Hooked, *_: Any) -> None:
        self.probe(name)

    return hook


HOOKS = (
    *("on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_before_zero_grad"),
    *("on_after_backward", "on_before_optimizer_step", "on_train_batch_end", "on_validation_start"),
    *("on_validation_batch_end", "on_validation_epoch_end", "on_train_epoch_end", "on_train_end"),
)
for _name in HOOKS:
    setattr(Hooked, _name, _hook(_name))


class Absent(Flat):
    """Leaves out a batch, on every rank."""

    def training_step(self, batch: list[Tensor], index: int) -> Tensor | None:
        return None if index == 1 else super().training_step(batch, index)


# ---------------------------------------------------------------------------------------------------------------------
# Frozen parameters


class Adapted(nn.Module):
    """A frozen bf16 layer and a fp32 adapter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).to(torch.bfloat16).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x.to(self.base.weight.dtype)).float() + self.up(self.down(x))


class LoRA(Case):
    def build(self) -> None:
        self.blocks = nn.ModuleList(nn.Sequential(Adapted(), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(WIDTH, 16).requires_grad_(False)

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return classify(self.head(inputs), labels)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


class Peft(Llama):
    """The adapters of the peft package on a frozen model, put there when the module is made."""

    lr = 1.0

    def build(self) -> None:
        super().build()
        self.adapt()

    def adapt(self) -> None:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(2)
        targets = ["q_proj", "v_proj", "up_proj"]
        self.net = get_peft_model(self.net, LoraConfig(r=16, target_modules=targets, init_lora_weights=False))


class PeftLater(Peft):
    """The same in `configure_model`, over a base that the loader left in bf16."""

    def build(self) -> None:
        Llama.build(self)
        self.net.to(torch.bfloat16)

    def configure_model(self) -> None:
        if not hasattr(self.net, "peft_config"):
            self.adapt()


class Backbone(LoRA):
    """A backbone that BackboneFinetuning thaws in the second epoch, a part of a unit that a callback thaws earlier."""

    def build(self) -> None:
        self.backbone = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)))
        self.head = mlp(WIDTH, WIDTH, 16)
        self.head[0].requires_grad_(False)

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return classify(self.head(self.backbone(inputs)), labels)

    def configure_optimizers(self) -> Any:
        parameters = [*self.head.parameters(), *(p for p in self.backbone.parameters() if p.requires_grad)]
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class Thaw(L.Callback):
    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, index: int) -> None:
        if trainer.global_step == 2:
            module.head[0].requires_grad_(True)
        if trainer.global_step == 6:
            module.head[0].requires_grad_(False)


def ThawBackbone() -> L.Callback:
    return BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.05, verbose=False)


# ---------------------------------------------------------------------------------------------------------------------
# Hugging Face, and modules made or sharded in `configure_model`


class CheckpointingLlama(Llama):
    def build(self) -> None:
        super().build()
        self.net.gradient_checkpointing_enable()


class GeneratingLlama(TiedLlama):
    """Continues prompts after each epoch; each rank has one of another length."""

    arguments: dict[str, Any] = {"min_new_tokens": 6}  # noqa: RUF012

    def val_dataloader(self) -> Any:
        prompts = [torch.arange(3, 3 + length)[None] for length in (4, 7)]
        return torch.utils.data.DataLoader(
            prompts if self.trainer.world_size == 1 else prompts[self.trainer.global_rank :][:1], batch_size=None
        )

    def validation_step(self, prompt: Tensor, index: int) -> None:
        made = self.net.generate(prompt, max_new_tokens=6, do_sample=False, **self.arguments)
        self.notes.setdefault(f"prompt of {prompt.shape[1]}", []).append(made.tolist())


class StoppingLlama(GeneratingLlama):
    """The shorter prompt ends with its first new token, the longer one goes on."""

    arguments: dict[str, Any] = {"eos_token_id": 6}  # noqa: RUF012


class MetaLlama(Llama):
    def build(self) -> None:
        pass

    def configure_model(self) -> None:
        if hasattr(self, "net"):
            return
        with torch.device("meta"):
            super().build()


class ShardedBlocks(Case):
    whole = False

    def build(self) -> None:
        pass

    def configure_model(self) -> None:
        torch.manual_seed(3)
        self.net = nn.Sequential(*(mlp(WIDTH, WIDTH, WIDTH) for _ in range(2)), nn.Linear(WIDTH, 16))
        if self.device_mesh is None:
            return
        mesh = self.device_mesh["data_parallel"]
        for block in self.net if self.whole else self.net[:2]:
            fully_shard(block, mesh=mesh)
        if self.whole:
            fully_shard(self, mesh=mesh)

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return classify(self.net(inputs), labels)


class ShardedWhole(ShardedBlocks):
    whole = True


def fits(specs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [fit_here(globals(), **spec) for spec in specs]


def error_of(spec: dict[str, Any]) -> str | None:
    return error_here(globals(), **spec)


MANUAL = {"manual": True}
OF_LLAMA = 1e-4
"""Of :func:`distance`: a softmax and norms in a row magnify the rounding of sums."""


@pytest.mark.parametrize("arguments", [{}, MANUAL], ids=["automatic", "manual"])
def test_modules_of_every_shape_train_the_weights_of_one_device(ranks: Ranks, arguments: dict[str, Any]) -> None:
    cases = ["Flat", "Autoencoder", "MixedAutoencoder", "Llama", "TiedLlama"]
    specs = [{"case": case, "arguments": arguments} for case in cases]
    for spec, several in zip(specs, fit_on(ranks, 2, fits, *specs), strict=True):
        one = fit_alone(ranks, fits, **spec)
        assert_same(one, several, spec, to=OF_LLAMA if "Llama" in spec["case"] else EXACT)


def test_modules_of_every_shape_train_in_fp8_up_to_its_rounding(ranks: Ranks) -> None:
    fp8 = {"recipe": "rowwise"}
    specs = [
        {"case": case, "precision": fp8, "arguments": arguments}
        for case in ("MixedAutoencoder", "TiedLlama")
        for arguments in ({}, MANUAL)
    ]
    for spec, several in zip(specs, fit_on(ranks, 2, fits, *specs), strict=True):
        one = fit_alone(ranks, fits, **spec)
        rounding = distance(one, fit_alone(ranks, fits, **{**spec, "precision": "bf16-mixed"}))
        assert 1e-3 < rounding < 0.5
        assert_same(one, several, spec, to=2 * rounding)


def test_parameters_directly_on_the_module_train_and_hooks_may_write_to_them(ranks: Ranks) -> None:
    for case, several in zip(
        ("Direct", "Helped"), fit_on(ranks, 2, fits, {"case": "Direct"}, {"case": "Helped"}), strict=True
    ):
        assert "scale" in several[0]["weights"]
        assert_same(fit_alone(ranks, fits, case=case), several, case)


def test_parameters_directly_on_the_module_are_refused_under_manual_optimization(ranks: Ranks) -> None:
    spec = {"case": "Direct", "arguments": MANUAL, "strategy": {}, "world": 2}
    for error in ranks(2, error_of, spec):
        assert error.startswith("ValueError")
        assert "'scale' belongs to the root" in error
        assert "put it into a submodule that is called" in error


# ---------------------------------------------------------------------------------------------------------------------


def test_several_optimizers_toggling_and_weights_clipped_between_steps(ranks: Ranks) -> None:
    exact, fp8 = fit_on(ranks, 2, fits, {"case": "WassersteinGAN"}, {"case": "WassersteinGAN", "precision": {}})
    assert_same(fit_alone(ranks, fits, case="WassersteinGAN"), exact)
    one = fit_alone(ranks, fits, case="WassersteinGAN", precision={})
    bf16 = fit_alone(ranks, fits, case="WassersteinGAN", precision="bf16-mixed")
    assert_same(one, fp8, to=2 * distance(one, bf16))
    for rank in (*exact, *fp8):
        largest = [abs(value).max() for name, value in rank["weights"].items() if name.startswith("critic")]
        assert max(largest) == pytest.approx(0.08)


def test_manual_accumulation_and_batches_left_out_are_those_of_one_device(ranks: Ranks) -> None:
    specs = [{"case": "Accumulating"}, {"case": "Absent", "arguments": MANUAL}]
    for spec, several in zip(specs, fit_on(ranks, 2, fits, *specs), strict=True):
        assert_same(fit_alone(ranks, fits, **spec), several, spec)


def test_parameters_that_a_method_returns_are_the_sharded_ones(ranks: Ranks) -> None:
    for arguments in ({}, MANUAL):
        spec = {"case": "Grouping", "arguments": arguments}
        (several,) = fit_on(ranks, 2, fits, spec)
        one = fit_alone(ranks, fits, **spec)
        assert_same(one, several, spec)
        for rank in (one, *several):
            now, before = (abs(rank[kind]["net.head.weight"]).max() for kind in ("weights", "before"))
            assert now <= 0.1 < before


@pytest.mark.parametrize("arguments", [{}, MANUAL], ids=["automatic", "manual"])
def test_hooks_may_use_the_module_at_any_time(ranks: Ranks, arguments: dict[str, Any]) -> None:
    specs: list[dict[str, Any]] = [
        {"case": case, "arguments": arguments, "precision": precision}
        for precision in ("32-true", {"recipe": "tensorwise"})
        for case in ("Quiet", "Hooked")
    ]
    quiet, hooked, quiet_fp8, hooked_fp8 = fit_on(ranks, 2, fits, *specs)
    assert_same(quiet[0], hooked, to=1e-7)
    assert_same(quiet_fp8[0], hooked_fp8, to=1e-7)
    assert_same(fit_alone(ranks, fits, **specs[1]), hooked)
    for spec, several, tolerance in ((specs[1], hooked, 1e-5), (specs[3], hooked_fp8, 0.2)):
        expected = fit_alone(ranks, fits, **spec)["notes"]["outputs"]
        called = {hook for hook, _ in expected}
        assert called == set(HOOKS) - (set() if not arguments else {"on_before_zero_grad"})
        for rank in several:
            assert [hook for hook, _ in rank["notes"]["outputs"]] == [hook for hook, _ in expected]
            ours, theirs = ([value for _, value in outputs] for outputs in (rank["notes"]["outputs"], expected))
            assert ours == pytest.approx(theirs, rel=tolerance, abs=tolerance)
        assert several[0]["notes"]["outputs"] == several[1]["notes"]["outputs"]


# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [{}, MANUAL], ids=["automatic", "manual"])
def test_what_a_step_does_not_use_rests_as_on_one_device(ranks: Ranks, arguments: dict[str, Any]) -> None:
    spec = {"case": "Towers", "arguments": arguments}
    one = fit_alone(ranks, fits, **spec)
    (several,) = fit_on(ranks, 2, fits, spec)
    for rank in several:
        assert distance(one, rank) < EXACT
        assert rank["notes"] == one["notes"]
        assert set(one["notes"]["unchanged"]) == {
            *("right.0.weight", "right.0.bias"),
            *("pair.second.weight", "pair.second.bias"),
        }


def test_ranks_may_use_different_parameters_of_a_unit_when_unused_ones_are_reduced_too(ranks: Ranks) -> None:
    spec = {"case": "Experts", "strategy": {"find_unused_parameters": True}}
    (several,) = fit_on(ranks, 2, fits, spec)
    assert_same(fit_alone(ranks, fits, case="Experts"), several)


def test_ranks_that_use_different_parameters_of_a_unit_are_told_before_the_first_step(ranks: Ranks) -> None:
    said = ranks(2, error_of, {"case": "Experts", "strategy": {}, "world": 2})
    assert said[0] == said[1]
    assert "pair.first.weight" in said[0]
    assert "find_unused_parameters=True" in said[0]


def test_frozen_bases_with_adapters_and_layers_thawed_during_training(ranks: Ranks) -> None:
    thawing = {"case": "Backbone", "max_epochs": 2, "callbacks": ["Thaw", "ThawBackbone"]}
    specs: list[dict[str, Any]] = [
        {"case": "LoRA"},
        {"case": "LoRA", "arguments": MANUAL},
        {"case": "LoRA", "precision": "bf16-mixed"},
        thawing,
        {**thawing, "arguments": MANUAL},
        {**thawing, "precision": "bf16-mixed"},
    ]
    for spec, several in zip(specs, fit_on(ranks, 2, fits, *specs), strict=True):
        one = fit_alone(ranks, fits, **spec)
        assert_same(one, several, spec, to=0.03 if "precision" in spec else EXACT)
        for rank in (one, *several):
            moved = {name for name, value in rank["weights"].items() if (value != rank["before"][name]).any()}
            if spec["case"] == "LoRA":
                assert moved == {f"blocks.{i}.0.{side}.weight" for i in range(2) for side in ("down", "up")}
            else:
                assert moved == set(rank["weights"])


# ---------------------------------------------------------------------------------------------------------------------


def test_the_checkpointing_of_a_hugging_face_model_works_alone_and_is_refused_beside_ours(ranks: Ranks) -> None:
    (several,) = fit_on(ranks, 2, fits, {"case": "CheckpointingLlama"})
    assert_same(fit_alone(ranks, fits, case="Llama"), several, to=OF_LLAMA)
    both = {"activation_checkpointing_policy": "full"}
    for error in ranks(2, error_of, {"case": "CheckpointingLlama", "strategy": both, "world": 2}):
        assert error.startswith("ValueError")
        assert "gradient_checkpointing_disable()" in error


def test_ranks_generate_from_prompts_of_different_lengths_what_one_device_generates(ranks: Ranks) -> None:
    cases = ("GeneratingLlama", "StoppingLlama")
    for case, several in zip(cases, fit_on(ranks, 2, fits, *({"case": case} for case in cases)), strict=True):
        one = fit_alone(ranks, fits, case=case)
        assert_same(one, several, case, to=OF_LLAMA)
        made = {name: tokens for rank in several for name, tokens in rank["notes"].items()}
        assert made == one["notes"]
        new = {name: len(tokens[0][0]) - int(name.split()[-1]) for name, tokens in made.items() if "prompt" in name}
        assert new == {"prompt of 4": 6 if case == "GeneratingLlama" else 1, "prompt of 7": 6}


def test_a_model_built_on_meta_trains_the_same_on_any_number_of_ranks(ranks: Ranks) -> None:
    ((one,),) = fit_on(ranks, 1, fits, {"case": "MetaLlama"})
    (several,) = fit_on(ranks, 2, fits, {"case": "MetaLlama"})
    assert_same(one, several, to=OF_LLAMA)


def test_a_model_that_the_user_sharded_in_part_or_whole_trains_the_same(ranks: Ranks) -> None:
    specs = [
        {"case": case, "arguments": arguments}
        for case, arguments in (("ShardedBlocks", {}), ("ShardedBlocks", MANUAL), ("ShardedWhole", {}))
    ]
    for spec, several in zip(specs, fit_on(ranks, 2, fits, *specs), strict=True):
        assert_same(fit_alone(ranks, fits, **spec), several, spec)


class Timed(nn.Module):
    """A whole model that gets its targets, and a time step that bf16 cannot hold."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2))
        self.recurrent = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.seen: list[float] = []

    def forward(self, inputs: Tensor, target: Tensor, *, step: Tensor) -> Tensor:
        assert target.dtype == step.dtype == torch.float32
        self.seen += [target.max().item(), step.item()]
        hidden = self.norm(self.embed(inputs + self.shift))
        for block in self.blocks:
            hidden = block(hidden)
        hidden, _ = self.recurrent(hidden.unsqueeze(1).repeat(1, 2, 1))
        return (hidden.float().mean(dim=(1, 2)) - target / step / 1e3).square().mean()


class Regression(Case):
    def build(self) -> None:
        self.net = Timed()

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = self.net(batch[0], torch.full((len(batch[0]),), 1234567.0), step=torch.tensor(999.0))
        assert self.net.seen[-2:] == [1234567.0, 999.0]
        return loss


def test_a_child_gets_targets_and_time_steps_as_they_are(ranks: Ranks) -> None:
    specs: list[dict[str, Any]] = [
        {"case": "Regression", "precision": precision} for precision in ("32-true", "bf16-mixed", {"recipe": "rowwise"})
    ]
    for spec, several in zip(specs, fit_on(ranks, 2, fits, *specs), strict=True):
        one = fit_alone(ranks, fits, **spec)
        assert_same(one, several, spec, to=EXACT if spec["precision"] == "32-true" else 0.2)


def test_adapters_of_peft_train_on_a_frozen_base(ranks: Ranks) -> None:
    pytest.importorskip("peft")
    fp8 = {"recipe": "rowwise"}
    specs: list[dict[str, Any]] = [
        {"case": "Peft", "precision": "32-true"},
        {"case": "Peft", "precision": fp8},
        {"case": "PeftLater", "precision": "bf16-mixed"},
        {"case": "PeftLater", "precision": fp8},
    ]
    for spec, several in zip(specs, fit_on(ranks, 2, fits, *specs), strict=True):
        one = fit_alone(ranks, fits, **spec)
        assert_same(one, several, spec, to=OF_LLAMA if spec["precision"] == "32-true" else 0.3)
        for rank in (one, *several):
            moved = {name for name, value in rank["weights"].items() if (value != rank["before"][name]).any()}
            assert len(moved) == 12, spec
            assert all("lora_" in name for name in moved), spec
