"""What ``cached_contrastive.py`` shows at its end: a table of retrievals, a verdict, curves."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import matplotlib
import torch
from doc_pairs import Pair
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

matplotlib.use("Agg")  # no display is needed to write a file
from matplotlib import pyplot as plt


@dataclass
class History:
    """Curves of a run.

    Attributes:
        loss: Global loss of each step.
        learning_rate: Learning rate of each step.
        validation_step: Steps taken before each validation.
        recall_10: Share of queries whose answer is among the ten best.
        mrr: Mean reciprocal rank of the answer.
    """

    loss: list[float] = field(default_factory=list)
    learning_rate: list[float] = field(default_factory=list)
    validation_step: list[int] = field(default_factory=list)
    recall_10: list[float] = field(default_factory=list)
    mrr: list[float] = field(default_factory=list)

    def add_step(self, loss: float, learning_rate: float) -> None:
        self.loss.append(loss)
        self.learning_rate.append(learning_rate)

    def add_validation(self, step: int, recall_10: float, mrr: float) -> None:
        self.validation_step.append(step)
        self.recall_10.append(recall_10)
        self.mrr.append(mrr)


def chance(candidates: int) -> tuple[float, float]:
    """Recall@10 and mean reciprocal rank of a random order of ``candidates``."""
    return min(1.0, 10 / candidates), sum(1 / rank for rank in range(1, candidates + 1)) / candidates


def save_history(history: History, path: Path) -> None:
    """Write the curves as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(history), indent=1), encoding="utf-8")


def save_curves(history: History, candidates: int, path: Path) -> None:
    """Draw loss and recall over steps."""
    recall_by_chance, _ = chance(candidates)
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    left.plot(range(1, len(history.loss) + 1), history.loss, color="tab:blue")
    left.set(xlabel="step", ylabel="InfoNCE (nats)", title="Training loss, global batch", ylim=(0, None))
    right.plot(history.validation_step, history.recall_10, marker="o", color="tab:orange", label="recall@10")
    right.plot(history.validation_step, history.mrr, marker="s", color="tab:green", label="MRR")
    right.axhline(recall_by_chance, linestyle="--", color="gray", label=f"recall@10 by chance, {recall_by_chance:.1%}")
    right.set(xlabel="step", title=f"Docstring to signature, {candidates} held-out pairs", ylim=(0, 1))
    right.legend(loc="upper left")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=140)
    plt.close(figure)


def print_report(history: History, scores: Tensor, pairs: list[Pair], shown: int = 8) -> None:
    """Print some retrievals and the verdict.

    Args:
        history: The run.
        scores: ``(queries, candidates)`` similarities; the answer of a query has its index.
        pairs: The validation pairs, in the order of ``scores``.
        shown: Number of queries in the table.
    """
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)  # rich assumes 80 for a file
    table = Table(title="Held-out docstrings and the signatures found for them", show_lines=True, expand=True)
    table.add_column("docstring", ratio=4)
    table.add_column("three best signatures, ✓ the right one", ratio=6, no_wrap=True, overflow="ellipsis")
    table.add_column("rank", justify="right")
    for query in range(min(shown, len(pairs))):
        table.add_row(*_row(query, scores[query], pairs))
    console.print(table)

    recall_by_chance, mrr_by_chance = chance(len(pairs))
    console.print(
        f"recall@10 [bold]{history.recall_10[-1]:.3f}[/] (untrained {history.recall_10[0]:.3f},"
        f" chance {recall_by_chance:.3f}) · MRR [bold]{history.mrr[-1]:.3f}[/] (untrained {history.mrr[0]:.3f},"
        f" chance {mrr_by_chance:.3f}) · {len(pairs)} held-out pairs",
        highlight=False,
    )


def _row(query: int, scores: Tensor, pairs: list[Pair]) -> tuple[Text, Text, Text]:
    found = []
    for candidate in scores.topk(min(3, len(pairs))).indices.tolist():
        right = candidate == query
        line = f"{'✓' if right else ' '} {scores[candidate]:.2f}  {pairs[candidate].signature}"
        found.append(Text(line, style="bold green" if right else ""))
    docstring = pairs[query].docstring
    shortened = docstring if len(docstring) <= 120 else docstring[:119] + "…"
    rank = int(torch.sum(scores > scores[query])) + 1
    return Text(shortened), Text("\n").join(found), Text(str(rank))
