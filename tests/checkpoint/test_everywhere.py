"""What fails on one rank fails on all, with the same error."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from lightning_zeroplus.checkpoint.everywhere import everywhere


class _OwnMessage(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(f"failed with {code}")


def _raised(kind: str, failing: int | None) -> tuple[type[BaseException], str, list[str]]:
    class Local(ValueError):
        """Cannot be pickled."""

    errors = {
        "built in": OSError(28, "No space left on device", "file"),
        "local": Local("of this rank"),
        "own message": _OwnMessage(3),
    }

    def act() -> None:
        if failing in (None, dist.get_rank()):
            raise errors[kind]

    try:
        everywhere(act)
    except Exception as error:
        return type(error).__mro__[1 if isinstance(error, Local) else 0], str(error), getattr(error, "__notes__", [])
    raise AssertionError("no error")


def test_the_others_raise_the_same(ranks2: Any) -> None:
    for failing in (0, 1):
        answers = ranks2.run(_raised, "built in", failing)
        for type_, said, _ in answers:
            assert type_ is OSError and said == "[Errno 28] No space left on device: 'file'"
        (note,) = answers[1 - failing][2]
        assert f"Rank {failing} failed" in note
        assert "in act" in note and "raise errors[kind]" in note, "the traceback of where it happened"
        assert not answers[failing][2]


def test_an_error_that_cannot_be_sent(ranks2: Any) -> None:
    own, other = ranks2.run(_raised, "local", 0)
    assert own[:2] == (ValueError, "of this rank")
    assert other[:2] == (RuntimeError, "Local: of this rank") and "Rank 0 failed" in other[2][0]
    own, other = ranks2.run(_raised, "own message", 0)
    assert own[:2] == (_OwnMessage, "failed with 3")
    assert other[:2] == (RuntimeError, "_OwnMessage: failed with 3"), "not 'failed with failed with 3'"


def test_every_rank_keeps_its_own(ranks2: Any) -> None:
    for type_, said, notes in ranks2.run(_raised, "local", None):
        assert (type_, said, notes) == (ValueError, "of this rank", [])


def _succeeds() -> int:
    return everywhere(lambda: 10 + dist.get_rank())


def test_success(ranks2: Any) -> None:
    assert ranks2.run(_succeeds) == [10, 11]
