"""The policy of windows, without an engine: what it asks for, when, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_zeroplus.strategy.common.window import GradientWindow


class _Recorder:
    """A reducer that writes down what it is asked to do."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def open_window(self, max_bytes: int | None) -> str:
        self.asked.append(("open_window", max_bytes))
        return "report"

    def reduce_next_backward(self) -> None:
        self.asked.append("reduce_next_backward")

    def close_window(self, reduce: bool) -> None:
        self.asked.append(("close_window", reduce))


@pytest.fixture
def recorder() -> _Recorder:
    return _Recorder()


@pytest.fixture
def window(recorder: _Recorder) -> GradientWindow[str]:
    return GradientWindow(lambda: recorder)


def test_holds_and_reduces(window: GradientWindow[str], recorder: _Recorder) -> None:
    with window.coalesce(None, 7) as report:
        assert report == "report"
        for _ in range(3):
            window.before_backward()
    assert recorder.asked == [("open_window", 7), ("close_window", True)]


def test_the_last_backward_is_released(window: GradientWindow[str], recorder: _Recorder) -> None:
    with window.coalesce(3, None):
        for backward in range(3):
            assert recorder.asked == [("open_window", None)], backward
            window.before_backward()
        assert recorder.asked == [("open_window", None), "reduce_next_backward"]
    assert recorder.asked[-1] == ("close_window", True)


@pytest.mark.parametrize("count", [0, 2, 4])
def test_a_wrong_number_of_backwards_is_told_after_the_reduction(
    window: GradientWindow[str], recorder: _Recorder, count: int
) -> None:
    with pytest.raises(RuntimeError, match=rf"`coalesce\(backwards=3\)` saw {count} backwards"):
        with window.coalesce(3, None):
            for _ in range(count):
                window.before_backward()
    assert recorder.asked[-1] == ("close_window", True)
    with window.coalesce(None, None):  # closed: another can be opened
        pass


def test_an_exception_drops_and_is_passed_on(window: GradientWindow[str], recorder: _Recorder) -> None:
    with pytest.raises(KeyError, match="theirs"), window.coalesce(2, None):
        raise KeyError("theirs")
    assert recorder.asked == [("open_window", None), ("close_window", False)]


def test_nesting_is_refused_and_the_outer_window_drops(window: GradientWindow[str], recorder: _Recorder) -> None:
    with pytest.raises(RuntimeError, match="inside a coalesce"), window.coalesce(None, None):
        with window.coalesce(None, None):
            pass
    assert recorder.asked == [("open_window", None), ("close_window", False)]


def test_step_and_zero_grad_within(window: GradientWindow[str]) -> None:
    with window.coalesce(None, None):
        window.before_zero_grad(pending=True)  # before the window's first backward: gradients from before it
        with pytest.raises(RuntimeError, match="Step after the window"):
            window.before_step()
        window.before_backward()
        window.before_zero_grad(pending=False)  # a backward that reached nothing
        with pytest.raises(RuntimeError, match="zero_grad"):
            window.before_zero_grad(pending=True)
    window.before_step()
    window.before_zero_grad(pending=True)


def test_a_window_left_open(window: GradientWindow[str], recorder: _Recorder) -> None:
    window.check_closed()
    left = window.coalesce(None, None)
    left.__enter__()
    with pytest.raises(RuntimeError, match="still open at the end of training_step"):
        window.check_closed()
    assert recorder.asked == [("open_window", None), ("close_window", False)]
    left.__exit__(None, None, None)  # too late: nothing more happens
    assert len(recorder.asked) == 2


@pytest.mark.parametrize(
    "arguments", [{"backwards": 0}, {"backwards": -1}, {"backwards": 2.0}, {"max_bytes": 0}, {"max_bytes": True}]
)
def test_bad_arguments_are_refused_before_anything_is_held(
    window: GradientWindow[str], recorder: _Recorder, arguments: dict[str, Any]
) -> None:
    ((name, value),) = arguments.items()
    with pytest.raises(MisconfigurationException, match=rf"coalesce\({name}={value}\)"):
        window.coalesce(**({"backwards": None, "max_bytes": None} | arguments))
    assert not recorder.asked
