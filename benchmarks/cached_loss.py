"""Memory and time of a contrastive step over one large batch, beside sentence-transformers under DDP, on the CPU.

The same batch of pairs is shared out to 1, 2 and 4 ranks, in processes of their own. The contenders are:

- ``sentence-transformers``: its ``CachedMultipleNegativesRankingLoss`` with ``gather_across_devices=True``, under DDP.
- ``info_nce``: ``CachedLoss`` with ``info_nce(cross_rank=True)``, at stage 2: the ranks share the similarity matrix.
- ``cross_rank``: ``CachedLoss(cross_rank=True)`` with the plain cross-entropy, at stage 2: the whole matrix per rank.

The encoder is a random BERT of one layer. Reported are how far the resident set of a rank has grown at most in the
steps (the largest of the ranks), and the median of their times (the slowest rank's). The contenders take turns for some
rounds, so that what else the machine does slows all of them down, and each row has the medians of its rounds. In the
end ours must have come to the loss of one rank. sentence-transformers need not on several: DDP does not expect a loss
that runs backwards within a backward. The table says so where its loss differs.

    python benchmarks/cached_loss.py
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import socket
import statistics
import sys
import time
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

CONTENDERS = ("sentence-transformers", "info_nce", "cross_rank")
#: Of the losses, relative: fp32 sums in another order, after some steps.
BOUND = 1e-3
WORDS, TOKENS, WIDTH = 200, 8, 32


class Job(NamedTuple):
    """What a process is to train: ``pairs`` of all ranks, ``chunk`` texts at a time."""

    contender: str
    rank: int
    ranks: int
    pairs: int
    chunk: int
    steps: int
    port: int


class Row(NamedTuple):
    """One contender on so many ranks."""

    contender: str
    ranks: int
    pairs: int
    grown_mib: float
    seconds: float
    loss: float


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--ranks", type=int, action="append", help="repeatable (default: 1, 2, 4)")
    parser.add_argument("--pairs", type=int, default=4096, help="of all ranks")
    parser.add_argument("--chunk", type=int, default=64, help="texts per forward, and rows of a tile")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--rounds", type=int, default=3, help="how often everything is measured, the contenders in turn"
    )
    parser.add_argument("--quick", action="store_true", help="a tiny batch on 1 and 2 ranks: does the benchmark run?")
    parser.add_argument("--output", type=Path, default=Path("outputs", "cached_loss"))
    chosen = parser.parse_args(arguments)
    pairs, chunk, steps = (16, 4, 2) if chosen.quick else (chosen.pairs, chosen.chunk, chosen.steps)
    prepare()
    found: dict[tuple[int, str], list[Row]] = {}
    for _ in range(2 if chosen.quick else chosen.rounds):
        for ranks in chosen.ranks or ([1, 2] if chosen.quick else [1, 2, 4]):
            for contender in CONTENDERS:
                row = measure(contender, ranks, pairs, chunk, steps)
                found.setdefault((ranks, contender), []).append(row)
                print(table([row]).splitlines()[-1], flush=True)
    rows = [merged(rounds) for rounds in found.values()]
    for row in rows:
        if row.contender in CONTENDERS[1:] and not _alike(row, rows[0]):
            raise SystemExit(f"{row} has another loss than {rows[0]}: they train differently.")
    chosen.output.mkdir(parents=True, exist_ok=True)
    (chosen.output / "cached_loss.json").write_text(json.dumps([row._asdict() for row in rows], indent=1))
    (chosen.output / "cached_loss.md").write_text(table(rows))
    print(table(rows))


def merged(rounds: list[Row]) -> Row:
    """The medians of what was measured in each round."""
    grown, seconds, losses = (
        statistics.median(getattr(row, name) for row in rounds) for name in ("grown_mib", "seconds", "loss")
    )
    return rounds[0]._replace(grown_mib=grown, seconds=seconds, loss=losses)


def _alike(row: Row, first: Row) -> bool:
    return math.isclose(row.loss, first.loss, rel_tol=BOUND)


def prepare() -> None:
    """Import everything once: the ranks are forked, and share it."""
    os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    import lightning.pytorch  # noqa: F401
    import sentence_transformers  # noqa: F401
    import torch
    import transformers  # noqa: F401

    import lightning_zeroplus.engine.build  # noqa: F401

    torch.set_num_threads(1)


def measure(contender: str, ranks: int, pairs: int, chunk: int, steps: int) -> Row:
    """Train in processes of their own."""
    import torch.multiprocessing

    fork = torch.multiprocessing.get_context("fork")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = int(listener.getsockname()[1])
    ends, processes = [], []
    for rank in range(ranks):
        ours, theirs = fork.Pipe()
        processes.append(
            fork.Process(target=_rank, args=(Job(contender, rank, ranks, pairs, chunk, steps, port), theirs))
        )
        processes[-1].start()
        theirs.close()
        ends.append(ours)
    answers = [end.recv() for end in ends]
    for process in processes:
        process.join(10)
        process.kill()
    for answer in answers:
        if isinstance(answer, str):
            raise SystemExit(answer)
    grown, seconds, losses = zip(*answers, strict=True)
    return Row(contender, ranks, pairs, max(grown) / 2**20, max(seconds), sum(losses) / ranks)


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def _rank(job: Job, end: Connection) -> None:
    """Train on one rank, and send what was measured; does not return."""
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(job.port), "WORLD_SIZE": str(job.ranks)}
    os.environ.update(rendezvous, RANK=str(job.rank), LOCAL_RANK=str(job.rank), NODE_RANK="0")
    sys.argv = sys.argv[:1]
    try:
        end.send(_train(job))
    except BaseException as error:
        end.send(f"{job.contender}, rank {job.rank} of {job.ranks}: {type(error).__name__}: {error}")
    os._exit(0)  # gloo's threads may outlive the interpreter


def _encoder() -> Any:
    """Maps ids and a mask to normalized embeddings, as both sides of the comparison do."""
    import torch
    from sentence_transformers import SentenceTransformer
    from torch import nn
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    options: dict[str, Any] = {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2}
    options["intermediate_size"] = 2 * WIDTH
    # Large weights: texts differ from the start.
    config = BertConfig(vocab_size=WORDS, max_position_embeddings=TOKENS, initializer_range=0.3, **options)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0

    class Text(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = BertModel(config, add_pooling_layer=False)

        def forward(self, features: dict[str, Any], **_: Any) -> dict[str, Any]:
            states = self.bert(input_ids=features["input_ids"], attention_mask=features["attention_mask"])[0]
            features["sentence_embedding"] = nn.functional.normalize(states.mean(1), dim=-1)
            return features

        def save(self, *_: Any, **__: Any) -> None:
            raise NotImplementedError

    return SentenceTransformer(modules=[Text()], device="cpu").train()


def _train(job: Job) -> tuple[int, float, float]:
    import lightning.pytorch as pl
    import torch
    import torch.nn.functional as F
    from lightning.pytorch.strategies import DDPStrategy
    from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss
    from torch.utils.data import DataLoader

    import lightning_zeroplus as zp

    def contrast(queries: Any, documents: Any) -> Any:
        if job.contender == "info_nce":
            return zp.losses.info_nce(queries, documents, 0.05, cross_rank=True, tile_rows=job.chunk)
        return F.cross_entropy(queries @ documents.T / 0.05, torch.arange(len(queries)))

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.encoder = _encoder()
            self.cached = zp.CachedLoss(contrast, job.chunk, cross_rank=job.contender == "cross_rank")
            options: dict[str, Any] = {
                "scale": 20.0,
                "mini_batch_size": job.chunk,
                "gather_across_devices": job.ranks > 1,
            }
            self.theirs = (CachedMultipleNegativesRankingLoss(self.encoder, **options),)  # it holds the same encoder
            self.seconds: list[float] = []
            self.before = 0

        def training_step(self, batch: Any, index: int) -> None:
            optimizer: Any = self.optimizers()
            if index == 1:  # the first step makes what is kept
                Path("/proc/self/clear_refs").write_text("5")  # forget the highest resident set so far
                self.before = _status("VmRSS")
            started = time.perf_counter()
            sides = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in batch]
            if job.contender == "sentence-transformers":
                loss = self.theirs[0](sides, None)
                self.manual_backward(loss)
            else:
                loss = self.cached(self, lambda chunk: self.encoder(dict(chunk))["sentence_embedding"], *sides)
            optimizer.step()
            optimizer.zero_grad()
            self.seconds.append(time.perf_counter() - started)
            self.last = float(loss)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    generator = torch.Generator().manual_seed(0)
    share = slice(job.rank * job.pairs // job.ranks, (job.rank + 1) * job.pairs // job.ranks)
    batches: Any = [
        list(torch.randint(WORDS, (2, job.pairs, TOKENS), generator=generator)[:, share]) for _ in range(1 + job.steps)
    ]
    theirs = job.contender == "sentence-transformers"
    strategy: Any = DDPStrategy(process_group_backend="gloo") if theirs else zp.ZeroPlusStrategy(2)
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler")
    quiet: dict[str, Any] = dict.fromkeys(off, False)
    trainer = pl.Trainer(accelerator="cpu", devices=job.ranks, strategy=strategy, max_epochs=1, **quiet)
    module = Model()
    trainer.fit(module, DataLoader(batches, batch_size=None))
    return _status("VmHWM") - module.before, statistics.median(module.seconds[1:]), module.last


def table(rows: list[Row]) -> str:
    """The rows as Markdown."""
    lines = ["| contender | ranks | pairs of all ranks | peak MiB per rank | s per step |", "|---|---|---|---|---|"]
    for row in rows:
        name = row.contender if _alike(row, rows[0]) else f"{row.contender}, another loss"
        lines.append(f"| {name} | {row.ranks} | {row.pairs} | {row.grown_mib:.0f} | {row.seconds:.2f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
