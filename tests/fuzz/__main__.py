"""``python -m tests.fuzz SEED STRATEGY``: run a random program, and make it smaller if it fails."""

from __future__ import annotations

import sys

from lightning_zeroplus.testing import RankError, RankPool
from tests.conftest import Ranks, settle
from tests.fuzz.generate import generate
from tests.fuzz.program import Program
from tests.fuzz.run import Comparison, compare, train
from tests.fuzz.shrink import shrink
from tests.support.forkserver import fork_server

_FIRST_S, _LIMIT_S = 90.0, 20.0


def failure(pool: RankPool, program: Program, strategy: str, timeout: float = _LIMIT_S) -> str:
    """What is wrong; empty: nothing, or the program cannot be run at all."""
    try:
        Comparison.of(program, pool.world_size)
    except Exception:  # a statement needs one that was taken away
        return ""
    try:
        return "\n".join(compare(program, pool.run(train, program, strategy, timeout=timeout)).wrong)
    except RankError as error:
        return str(error)


def kind(text: str) -> str:
    """Enough to tell one failure from another: the first words of an exception, or that values differ."""
    if "Traceback" not in text:
        return "differs" if text else ""
    return text.split("\n\n")[0].strip().rsplit("\n", 1)[-1][:40]


def main() -> None:
    """Read the command line, run, shrink, report."""
    seed, strategy = int(sys.argv[1]), sys.argv[2]
    program = generate(seed).under(strategy)
    with Ranks(2, timeout=_FIRST_S, initializer=settle, mp_context=fork_server()) as pool:
        found = failure(pool, program, strategy, _FIRST_S)
        print(program, found or "equal", sep="\n\n")
        if found:
            smallest = shrink(program, lambda smaller: kind(failure(pool, smaller, strategy)) == kind(found))
            print("\nThe smallest that fails so:", smallest, failure(pool, smallest, strategy), sep="\n\n")


if __name__ == "__main__":
    main()
