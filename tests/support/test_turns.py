"""What is drawn of a test's cases."""

from __future__ import annotations

from itertools import product

from tests.support.turns import draw

_PRODUCT = {f"{a}-{b}": {"a": a, "b": b} for a, b in product(range(4), "xyz")}
_LIST = {f"case{at}": {"name": f"case{at}"} for at in range(40)}


def test_every_value_occurs_in_a_sample_of_a_product() -> None:
    drawn = draw(_PRODUCT)
    assert {name[0] for name in drawn} == {*"0123"} and {name[2] for name in drawn} == {*"xyz"}
    assert len(drawn) < 8 < len(_PRODUCT)


def test_a_list_has_one_case_in_so_many() -> None:
    assert len(draw(_LIST, every=4)) == 10
    assert len(draw(_LIST)) == 1


def test_a_sample_has_at_least_so_many() -> None:
    assert draw(_PRODUCT) < draw(_PRODUCT, every=1) == {*_PRODUCT}


def test_the_same_cases_are_drawn_in_any_order() -> None:
    assert draw(dict(reversed(_LIST.items())), 4) == draw(_LIST, 4)
    assert draw(dict(reversed(_PRODUCT.items()))) == draw(_PRODUCT)


def test_a_new_case_moves_at_most_one() -> None:
    assert len(draw(_LIST, 4) - draw({**_LIST, "new": {"name": "new"}}, 4)) <= 1
