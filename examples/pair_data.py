"""The pairs of ``doc_pairs`` as token ids: a byte-pair vocabulary and a ``LightningDataModule``."""

from __future__ import annotations

import json
import os
import re
import zlib
from pathlib import Path

import torch
from doc_pairs import Pair, mine_pairs, split_by_module
from lightning.pytorch import LightningDataModule
from text_encoder import PAD
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.trainers import BpeTrainer
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

VOCABULARY = 6000
MAX_TOKENS = 24

# Words of prose and of identifiers alike: `getHTTPResponse` and `get_http_response` are three words each.
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+|[^\w\s]")


class PairData(LightningDataModule):
    """Mined pairs as batches ``(index, signature ids, docstring ids)``.

    One process mines the pairs and trains the vocabulary; the others read its files. A folder that has them is used
    as it is: delete it to mine again.

    Args:
        folder: Where the files are kept.
        batch_size: Pairs per process and step.
        max_validation: Largest number of validation pairs.
    """

    def __init__(self, folder: Path, batch_size: int, max_validation: int = 1024) -> None:
        super().__init__()
        self.folder = folder
        self.batch_size = batch_size
        self.max_validation = max_validation
        self.train: list[Pair] = []
        self.validation: list[Pair] = []

    def prepare_data(self) -> None:
        """Write the files; Lightning calls this in one process and lets the others wait."""
        if not (self.folder / "tokenizer.json").exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            pairs = mine_pairs()
            tokenizer = train_tokenizer(split_by_module(pairs)[0])
            _write(self.folder / "pairs.json", json.dumps(pairs))
            _write(self.folder / "tokenizer.json", tokenizer.to_str())

    def setup(self, stage: str) -> None:
        pairs = [Pair(*fields) for fields in json.loads((self.folder / "pairs.json").read_text(encoding="utf-8"))]
        self.train, validation = split_by_module(pairs)
        # A sample that depends on nothing but the texts, so that it is the same on every rank.
        validation.sort(key=lambda pair: zlib.crc32(pair.signature.encode()))
        self.validation = validation[: self.max_validation]
        self.tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Shuffled; Lightning gives each rank its share."""
        return DataLoader(self._encode(self.train), self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self._encode(self.validation), self.batch_size)

    def _encode(self, pairs: list[Pair]) -> TensorDataset:
        signatures = encode(self.tokenizer, [pair.signature for pair in pairs])
        docstrings = encode(self.tokenizer, [pair.docstring for pair in pairs])
        return TensorDataset(torch.arange(len(pairs)), signatures, docstrings)


def train_tokenizer(pairs: list[Pair]) -> Tokenizer:
    """A byte-pair vocabulary of ``VOCABULARY`` ids over both texts of ``pairs``. Id 0 is ``PAD``."""
    tokenizer = Tokenizer(BPE(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    trainer = BpeTrainer(vocab_size=VOCABULARY, special_tokens=["[PAD]", "[UNK]"], show_progress=False)
    tokenizer.train_from_iterator((_words(text) for pair in pairs for text in pair[1:]), trainer)
    tokenizer.enable_truncation(MAX_TOKENS)
    tokenizer.enable_padding(pad_id=PAD, pad_token="[PAD]", length=MAX_TOKENS)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> Tensor:
    """Token ids of texts, ``(texts, MAX_TOKENS)``."""
    return torch.tensor([encoding.ids for encoding in tokenizer.encode_batch([_words(text) for text in texts])])


def _words(text: str) -> str:
    return " ".join(_WORDS.findall(text)).lower()


def _write(path: Path, text: str) -> None:
    # Under another name first: an interrupted run leaves no half-written file behind.
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)
