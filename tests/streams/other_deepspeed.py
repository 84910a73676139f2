"""``python -m tests.streams.other_deepspeed``: scenarios on the DeepSpeed that PYTHONPATH names first, as JSON."""

from __future__ import annotations

import json

import deepspeed

from lightning_zeroplus.testing import RankPool
from tests.conftest import quiet
from tests.streams.scenarios import Scenario, run, stock


def races(ranks: RankPool, scenario: Scenario) -> list[dict[str, str]]:
    return [
        {"buffer": race.buffer, "first": race.first.location.split()[-1], "second": race.second.location.split()[-1]}
        for result in ranks.run(run, scenario, stock)
        for race in result.races
    ]


def main() -> None:
    zero = {"stage": 2, "overlap_comm": True}
    with RankPool(2, timeout=90, initializer=quiet) as ranks:
        result = {
            "version": deepspeed.__version__,
            "single": races(ranks, Scenario(streams=1, zero=zero)),
            "several": {model: races(ranks, Scenario(model, zero=zero)) for model in ("chain", "towers")},
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
