"""Overrides for one object, and taking them out again."""

from __future__ import annotations

from abc import ABC

import pytest

from lightning_zeroplus.gradients.patches.specialize import generalize, specialize


class Plain:
    def says(self) -> list[str]:
        return ["plain"]


class First:
    def says(self) -> list[str]:
        return ["first", *super().says()]  # type: ignore[misc]


class Second:
    def says(self) -> list[str]:
        return ["second", self.extra, *super().says()]  # type: ignore[misc, attr-defined]


class Abstract(ABC, Plain):
    """Its instances get their attributes in another place, because its first base has none."""


@pytest.mark.parametrize("cls", [Plain, Abstract])
def test_mixins_are_taken_out_in_any_order(cls: type[Plain]) -> None:
    thing, other = cls(), cls()
    specialize(specialize(thing, First), Second, extra="attribute of the class")
    specialize(other, First)
    assert thing.says() == ["second", "attribute of the class", "first", "plain"]
    generalize(thing, First)  # that on which Second was put
    assert thing.says() == ["second", "attribute of the class", "plain"]
    assert type(thing).__name__ == cls.__name__ and "extra" not in vars(thing)
    assert isinstance(thing, cls) and isinstance(thing, Second) and not isinstance(thing, First)
    generalize(thing, Second)
    assert type(thing) is cls
    assert other.says() == ["first", "plain"]


def test_objects_of_one_class_share_the_subclass() -> None:
    # Dynamo compiles a frame anew for each class of parameters that it meets.
    assert type(specialize(Plain(), First)) is type(specialize(Plain(), First))


def test_what_was_never_put_in_cannot_be_taken_out() -> None:
    with pytest.raises(IndexError):
        generalize(Plain(), First)
