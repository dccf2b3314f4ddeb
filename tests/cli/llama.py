"""A Llama of Hugging Face with random weights in a LightningModule. It knows nothing of this package."""

from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 64


def config(tied: bool) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
    )


def tokens(batch: int, ranks: int = 1, rank: int = 0) -> DataLoader[Any]:
    """32 sequences of 8 tokens, in order, each rank every so-manieth."""
    data: Any = list(torch.randint(0, VOCABULARY, (32, 8), generator=torch.Generator().manual_seed(0)))
    return DataLoader(data, batch_size=batch, sampler=DistributedSampler(data, ranks, rank, shuffle=False))


class Llama(L.LightningModule):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(1)
        self.model = LlamaForCausalLM(config(tied))
        self.register_buffer("seen", torch.zeros(3))  # no part of the Hugging Face model
        with torch.no_grad():  # else all rows of a weight have one and the same power of two as scale
            for name, weight in self.model.named_parameters():
                if weight.dim() == 2 and "embed" not in name:
                    weight.mul_((1.5 * torch.randn(len(weight), 1)).exp())
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(float(self.trainer.strategy.reduce(loss.detach(), reduce_op="mean")))
        return loss

    def configure_optimizers(self) -> Any:
        decayed = [p for p in self.parameters() if p.dim() > 1]
        others = [p for p in self.parameters() if p.dim() <= 1]
        optimizer = torch.optim.AdamW([{"params": others, "weight_decay": 0.0}, {"params": decayed}], lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]
