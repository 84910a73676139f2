"""A function that takes the place of another one is there as long as anybody needs it, and no longer."""

from __future__ import annotations

from types import SimpleNamespace

from lightning_zeroplus.gradients.patches.replacement import Replacement


def test_the_last_user_gives_back() -> None:
    owner = SimpleNamespace(name=len)
    first, second = (replaced := Replacement(owner, "name", sum))(), replaced()
    with second:
        with first:
            assert owner.name is sum
        assert owner.name is sum
    assert owner.name is len


def test_what_others_have_put_there_stays() -> None:
    owner = SimpleNamespace(name=len)
    with Replacement(owner, "name", sum)():
        owner.name = max
    assert owner.name is max


def test_it_is_put_there_again() -> None:
    owner = SimpleNamespace(name=len)
    replaced = Replacement(owner, "name", sum)
    with replaced():
        owner.name = max
        with replaced():
            assert owner.name is sum
    assert owner.name is max


def test_an_inherited_method_is_inherited_again() -> None:
    class Base:
        def name(self) -> str:
            return "base"

    class Derived(Base):
        pass

    with Replacement(Derived, "name", lambda self: "other")():
        assert Derived().name() == "other" and Base().name() == "base"
    assert Derived().name() == "base" and "name" not in vars(Derived)


def test_a_switch_that_had_the_value_before_keeps_it() -> None:
    owner = SimpleNamespace(switch=False)
    replaced = Replacement(owner, "switch", False)
    with replaced(), replaced():
        assert owner.switch is False
    assert owner.switch is False
    owner.switch = True
    with replaced():
        assert owner.switch is False
    assert owner.switch is True
