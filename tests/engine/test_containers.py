"""Containers that a module is called with: what it writes to its copies reaches the caller's."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lightning_zeroplus.internals.containers import Calls, given_containers, hidden_tensors


def _copied(value: Any) -> Any:
    """What FSDP2 gives a module: other containers, with other tensors."""
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(each) for each in value)
    return value.view_as(value) if isinstance(value, Tensor) else value


def test_a_list_follows_its_copy() -> None:
    first, second, third = torch.zeros(1), torch.ones(1), torch.full((1,), 2.0)
    own = [first, second]
    copies = _copied((own,))
    given = given_containers(((own,), {}), (copies, {}))
    assert given is not None
    copies[0].reverse()
    copies[0].append(third)
    assert given.follow() == [third]
    assert [each is want for each, want in zip(own, (second, first, third), strict=True)] == [True] * 3


def test_a_dict_follows_its_copy() -> None:
    x, hidden = torch.zeros(2), torch.ones(2)
    own: dict[str, Any] = {"x": x, "old": torch.zeros(1), "inner": {"all": [x]}}
    inner = own["inner"]
    copies = _copied(own)
    given = given_containers(((), {"state": own}), ((), {"state": copies}))
    assert given is not None
    copies["moved"] = copies["x"]
    copies["inner"]["all"].append(hidden)
    copies["new"] = [hidden]
    del copies["old"]
    assert all(each is hidden or each is copies["x"] for each in given.follow())
    assert own["x"] is own["moved"] is x and "old" not in own and own["inner"] is inner
    assert inner["all"][0] is x and inner["all"][1] is hidden and own["new"] == [hidden]


def test_what_is_not_copied_stays_and_new_tensors_are_found() -> None:
    bag, hidden = SimpleNamespace(x=torch.zeros(1)), torch.ones(1)
    before = bag.x
    given = given_containers(((bag,), {}), ((bag,), {}))
    assert given is not None
    bag.states = [{"h": hidden}]
    assert [each is hidden for each in given.follow()] == [True]
    assert bag.x is before


def test_calls_with_tensors_alone_have_no_containers() -> None:
    arguments = ((torch.zeros(1), 2, None, "name"), {"mask": torch.ones(1)})
    assert given_containers(arguments, arguments) is None


def test_tensors_are_found_in_objects_only() -> None:
    @dataclass
    class Out:
        hidden: Tensor
        rest: list[Any]

    seen, a, b = torch.zeros(1), torch.ones(1), torch.ones(2)
    found = list(hidden_tensors((seen, {"out": Out(a, [{"b": b}])})))
    assert [each is want for each, want in zip(found, (a, b), strict=True)] == [True, True]
    assert list(hidden_tensors([seen, {"seen": seen}])) == []


def test_calls_within_calls_and_calls_that_raise_are_told_apart() -> None:
    x, calls = torch.zeros(1), Calls()
    lists: list[list[Tensor]] = [[], [], []]
    copies = [(x, list(each)) for each in lists]
    for own, copy in zip(lists, copies, strict=True):  # the last one raises
        calls.begin(((x, own), {}), (copy, {}))
        copy[1].append(x)
    inner = (x, 1)
    calls.begin((inner, {}), (inner, {}))
    assert calls.end(inner) == []
    changed_by_a_hook = (torch.ones(1), copies[1][1])
    assert calls.end(changed_by_a_hook) == [x] and calls.end(copies[0]) == [x] and calls.end(copies[0]) == []
    assert [len(each) for each in lists] == [1, 1, 0]
