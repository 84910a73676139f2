"""What is tested is what was asked for: a checkout, a wheel, or a failure."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tests.upstream.compat import installed


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network, and with no folder of an earlier run."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")


def _checkout(path: Path) -> None:
    (path / "deepspeed").mkdir(parents=True)
    (path / "deepspeed" / "__init__.py").write_text("of = 'a checkout'\n")
    (path / "setup.py").write_text("from setuptools import setup\nsetup(name='deepspeed', packages=['deepspeed'])\n")


def _wheel(path: Path) -> None:
    described = "Metadata-Version: 2.1\nName: deepspeed\nVersion: 1.0\n"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("deepspeed/__init__.py", "of = 'a wheel'\n")
        wheel.writestr("deepspeed-1.0.dist-info/METADATA", described)
        wheel.writestr(
            "deepspeed-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("deepspeed-1.0.dist-info/RECORD", "")


def test_a_checkout(tmp_path: Path) -> None:
    _checkout(tmp_path / "checkout")
    before = sorted(tmp_path.joinpath("checkout").rglob("*"))
    target = installed.folder(str(tmp_path / "checkout"))
    assert (target / "deepspeed" / "__init__.py").read_text() == "of = 'a checkout'\n"
    assert target.is_relative_to(tmp_path / "cache")
    assert sorted(tmp_path.joinpath("checkout").rglob("*")) == before, "the user's checkout stays as it was"


def test_a_wheel(tmp_path: Path) -> None:
    _wheel(tmp_path / "deepspeed-1.0-py3-none-any.whl")
    target = installed.folder(str(tmp_path / "deepspeed-1.0-py3-none-any.whl"))
    assert (target / "deepspeed" / "__init__.py").read_text() == "of = 'a wheel'\n"
    assert target.is_relative_to(tmp_path / "cache")


@pytest.mark.parametrize(
    ("kind", "is_requested"), [("release", True), ("release", False), ("wheel", True), ("torch", True)]
)
def test_what_cannot_be_installed_fails_if_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, is_requested: bool
) -> None:
    broken = tmp_path / "deepspeed-1.0-py3-none-any.whl"
    broken.write_text("no wheel")
    version = str(broken) if kind == "wheel" else "0.0.1"
    monkeypatch.setattr(installed, "REQUESTED", frozenset([version] if is_requested else []))
    install = installed.torch_folder if kind == "torch" else installed.folder
    with pytest.raises(pytest.fail.Exception if is_requested else pytest.skip.Exception, match="pip could not install"):
        install(version)


def test_a_path_that_does_not_exist_fails(tmp_path: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match="does not exist"):
        installed.folder(str(tmp_path / "nothing"))
