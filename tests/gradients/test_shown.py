"""``param.grad`` while the gradients are elsewhere: a keeper stands in for an engine, so no ranks are needed."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_zeroplus.gradients.dtype import check_assigned
from lightning_zeroplus.gradients.shown import ShownGradients, write_plain


class Keeper:
    """Keeps gradients as an engine would; records what it is asked."""

    keeps_parts = True

    def __init__(self, kept: dict[int, Tensor]) -> None:
        self.kept, self.pending, self.holding = kept, True, False
        self.gathered = self.first = 0
        self.busy, self.scale = False, 1.0
        self.sum = torch.full((2,), -1.0)
        self.cleared_: list[int] = []
        self.elsewhere, self.asked = False, 0
        self.outside: set[int] = set()
        self.averaged = 0
        self.params: list[nn.Parameter] = []

    def is_outside(self, index: int) -> bool:
        return index in self.outside

    def average_outside(self) -> None:
        self.averaged += 1

    def write_outside(self, param: nn.Parameter, value: Tensor | None) -> None:
        write_plain(param, value)

    def is_busy(self) -> bool:
        return self.busy

    def keeps_gradients(self) -> bool:
        return self.pending

    def whole_gradients(self) -> dict[int, Tensor]:
        self.gathered += 1
        return dict(self.kept)

    def whole_gradients_together(self) -> dict[int, Tensor]:
        return self.whole_gradients()

    def take_back(self, whole: dict[int, Tensor]) -> None:
        self.kept = {index: grad.clone() for index, grad in whole.items()}

    def take_some_back(self, whole: dict[int, Tensor]) -> None:
        self.kept |= {index: grad.clone() for index, grad in whole.items()}

    def does_any_rank(self, here: bool) -> bool:
        self.asked += 1
        return here or self.elsewhere

    def backward(self, shown: ShownGradients) -> None:
        """Adds one to the gradients."""
        shown.put_back()
        shown.before_backward()
        self.kept = {index: grad + 1 for index, grad in self.kept.items()}
        shown.follow()

    def step(self, shown: ShownGradients) -> None:
        shown.before_step()
        shown.put_back()
        shown.drop()
        shown.after_step()

    def is_holding(self) -> bool:
        return self.holding

    def is_stepping(self) -> bool:
        return False

    def gradient_in_backward(self, index: int, plain: Tensor | None) -> Tensor | None:
        return plain

    def write_in_backward(self, index: int, value: Tensor | None) -> None:
        write_plain(self.params[index], value)

    def has_both(self, index: int) -> bool:
        return False

    def is_unsynced(self, index: int) -> bool:
        return False

    def set_local(self, index: int, value: Tensor | None) -> None:
        raise AssertionError("nothing is unsynced")

    def loss_scale(self) -> float:
        return self.scale

    def window_gradient(self, index: int) -> Tensor | None:
        return self.sum

    def is_used_up(self, index: int) -> bool:
        return not self.pending and index not in self.cleared_

    def reread(self, index: int) -> bool:
        return False

    def set_first(self) -> None:
        self.pending, self.first = True, self.first + 1

    def cleared(self, index: int) -> None:
        self.cleared_.append(index)


class Parameters:
    """Two parameters, of which the first has a gradient."""

    def __init__(self) -> None:
        self.net = nn.ParameterList([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))])
        self.keeper = Keeper({0: torch.tensor([3.0, 4.0])})
        self.keeper.params = list(self.net)
        self.shown = ShownGradients(self.keeper, list(self.net))

    def __getitem__(self, index: int) -> Any:
        return self.net[index]


@pytest.fixture
def params() -> Parameters:
    return Parameters()


def test_within_a_backward_it_is_what_autograd_accumulates(params: Parameters) -> None:
    params.keeper.busy = True
    (2 * params[0].sum()).backward()
    assert params[0].grad.tolist() == [2, 2]
    params[0].grad = None
    assert params.keeper.gathered == params.keeper.first == 0
    params.keeper.busy = False
    assert params[0].grad.tolist() == [3, 4]


def test_reads_gather_once_and_what_is_written_counts(params: Parameters) -> None:
    assert params.keeper.gathered == 0
    assert params[0].grad.tolist() == [3, 4] and params[1].grad is None
    assert params[0].grad is params[0].grad and params.keeper.gathered == 1
    assert float(torch.nn.utils.clip_grad_norm_(list(params.net), 1.0)) == 5.0
    params[1].grad = torch.ones(3)
    params.shown.put_back()
    assert torch.allclose(params.keeper.kept[0], torch.tensor([0.6, 0.8])) and params.keeper.kept[1].tolist() == [1] * 3
    assert params.keeper.gathered == 1


@pytest.mark.parametrize("how", ["none", "del", "module"])
def test_a_gradient_that_is_dropped_is_no_gradient(params: Parameters, how: str) -> None:
    match how:
        case "none":
            params[0].grad = None
        case "del":
            del params[0].grad
        case "module":
            params.net.zero_grad()
    params.shown.put_back()
    assert params.keeper.kept == {}


def test_a_gradient_set_without_a_backward(params: Parameters) -> None:
    params.keeper.pending, params.keeper.kept = False, {}
    params[1].grad = torch.ones(3)
    assert params.keeper.first == 1 and params[1].grad.tolist() == [1] * 3


def test_after_the_step(params: Parameters) -> None:
    params.keeper.pending = False
    with pytest.raises(RuntimeError, match="after optimizer.step.*call zero_grad"):
        params[0].grad  # noqa: B018
    params[0].grad = None
    assert params.keeper.cleared_ == [0] and params[0].grad is None
    params.net.zero_grad()
    assert params.keeper.cleared_ == [0, 1] and params[1].grad is None


def test_a_wrong_shape_and_a_write_in_a_window_are_refused(params: Parameters) -> None:
    with pytest.raises(RuntimeError, match=r"shape \(3,\); the parameter has \(2,\)"):
        params[0].grad = torch.ones(3)
    params.keeper.holding = True
    assert params[0].grad.tolist() == [-1, -1]
    with pytest.raises(RuntimeError, match="Assign it after the window"):
        params[0].grad = torch.ones(2)
    assert params.keeper.kept[0].tolist() == [3, 4]


def test_a_wrong_dtype_is_refused_as_by_torch() -> None:
    low, any_dtype = torch.ones(2, dtype=torch.bfloat16), torch.ones(2)
    low.requires_grad_()
    any_dtype.requires_grad_().grad_dtype = None
    for param, dtype in ((torch.ones(2), torch.float64), (torch.ones(2), torch.bfloat16), (low, torch.float64)):
        with pytest.raises(RuntimeError, match=f"assigned a {dtype} tensor; the parameter is {param.dtype}"):
            check_assigned(torch.ones(2, dtype=dtype), param)
    check_assigned(torch.ones(2), torch.ones(2))
    check_assigned(torch.ones(2), low)
    check_assigned(torch.ones(2, dtype=torch.float64), any_dtype)


def test_in_a_window_it_has_no_loss_scale(params: Parameters) -> None:
    keeper = params.keeper
    keeper.holding, keeper.scale, keeper.sum = True, 4.0, torch.tensor([-4.0, 2.0**-24], dtype=torch.float16)
    assert params[0].grad.tolist() == [-1, 2.0**-26]
    params.shown.put_back()
    assert keeper.sum.tolist() == [-4, 2.0**-24]
    params[0].grad.add_(1)
    assert params[0].grad.tolist() == [0, 1]
    params.shown.put_back()
    assert keeper.sum.tolist() == [0, 4]
    params[0].grad.add_(1)
    params.shown.drop()
    params.shown.put_back()
    assert keeper.sum.tolist() == [0, 4]


def test_autograd_and_the_engine_see_the_tensor_itself(params: Parameters) -> None:
    (params[0] * 2).sum().backward()
    raw = torch.Tensor.grad.__get__(params[0])  # type: ignore[attr-defined]
    assert raw.tolist() == [2, 2] and params[0].grad.tolist() == [3, 4]
    params.net.to(torch.float64)  # moves the tensor itself
    assert params.keeper.gathered == 1


def test_copies_and_what_is_left_are_ordinary_parameters(params: Parameters) -> None:
    for made in (copy.deepcopy(params.net), pickle.loads(pickle.dumps(copy.deepcopy(params.net)))):
        assert all(type(param) is nn.Parameter for param in made)
        made[0].sum().backward()
        assert made[0].grad.tolist() == [1, 1]
    assert isinstance(params[0], nn.Parameter) and type(params[0]) is not nn.Parameter
    params.shown.close()
    assert all(type(param) is nn.Parameter and not vars(param) for param in params.net)
    assert params[0].grad is None


def test_dynamo_takes_the_parameters_for_ordinary_ones(params: Parameters) -> None:
    params.keeper.pending = False
    params.keeper.cleared_ = [0, 1]
    compiled = torch.compile(lambda: (params[0] * 2).sum() + params[1].sum(), backend="eager", fullgraph=True)
    compiled().backward()
    assert params[0].grad.tolist() == [2, 2]


def test_a_kept_gradient_follows_backwards_and_what_is_written_to_it_counts(params: Parameters) -> None:
    kept = params[0].grad
    params.keeper.backward(params.shown)
    assert kept.tolist() == [4, 5] and params[0].grad is kept
    kept.mul_(2)
    params.keeper.step(params.shown)
    assert params.keeper.kept[0].tolist() == [8, 10]
    kept.fill_(1)
    params.keeper.backward(params.shown)
    assert kept.tolist() == [2, 2]


@pytest.mark.parametrize("take", [lambda grad: grad[1:], lambda grad: grad.detach()[1:], lambda grad: grad.data[1:]])
def test_a_kept_view_follows(params: Parameters, take: Any) -> None:
    kept = take(params[0].grad)
    params.keeper.backward(params.shown)
    assert kept.tolist() == [5]
    kept.zero_()
    params.keeper.backward(params.shown)
    assert kept.tolist() == [1] and params[0].grad.tolist() == [5, 1]


def test_zeroing_in_place_zeroes_what_is_kept(params: Parameters) -> None:
    kept = params[0].grad
    for _ in range(2):
        params.shown.zero(set_to_none=False)
        params.shown.drop()
        params.keeper.kept = {0: torch.zeros(2)}
        assert kept.tolist() == [0, 0]
        params.keeper.backward(params.shown)
        assert kept.tolist() == [1, 1]
        params.keeper.step(params.shown)


@pytest.mark.parametrize("after", ["backward", "step"])
def test_what_is_kept_of_a_gradient_that_is_none_stays(params: Parameters, after: str) -> None:
    kept = params[0].grad
    if after == "step":
        params.keeper.step(params.shown)
    params.shown.zero(set_to_none=True)
    params.shown.drop()
    params.keeper.backward(params.shown)
    assert kept.tolist() == [3, 4] and params.keeper.asked == 0 and params[0].grad.tolist() == [4, 5]


def test_loops_that_keep_nothing_are_asked_at_most_once_for_each_read(params: Parameters) -> None:
    params.keeper.backward(params.shown)
    assert params.keeper.asked == params.keeper.gathered == 0
    assert params[0].grad.tolist() == [4, 5]
    for _ in range(2):
        params.keeper.backward(params.shown)
        assert params.keeper.asked == params.keeper.gathered == 1


def test_a_rank_shows_gradients_again_where_another_one_has_kept_them(params: Parameters) -> None:
    params.keeper.elsewhere = True
    assert params[0].grad.tolist() == [3, 4]
    params.keeper.backward(params.shown)
    assert params.keeper.gathered == 2


def test_what_was_got_in_a_window_and_is_written_after_its_reduction_is_refused(params: Parameters) -> None:
    params.keeper.holding = True
    kept = params[0].grad
    kept.mul_(2)  # counts
    params.shown.follow()
    params.keeper.holding = False
    params.shown.before_step()
    kept.mul_(2)
    with pytest.raises(RuntimeError, match=r"no_sync\(\), and written after it was reduced"):
        params.shown.before_step()
    params.shown.zero(set_to_none=True)
    params.shown.before_step()


def test_a_gradient_that_no_optimizer_has_is_averaged_where_it_is_read(params: Parameters) -> None:
    keeper = params.keeper
    keeper.outside, keeper.busy = {1}, True
    params[1].sum().backward()
    keeper.busy = False
    params.net.zero_grad(set_to_none=False)  # asks only whether there is one
    assert keeper.averaged == 0
    assert params[1].grad.tolist() == [0] * 3 and keeper.averaged == 1
    params[1].grad = torch.ones(3)
    assert params[1].grad.tolist() == [1] * 3 and keeper.averaged == 2, "the keeper knows whether it is due"
    del params[1].grad
    params[1].requires_grad = False
    assert params[1].grad is None and keeper.averaged == 2 and keeper.first == 0
