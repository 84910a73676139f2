"""The oldest supported torch and the newest: a sample of every area, what compares numbers first.

Each release has a folder of several GB, so this runs only if it is asked for::

    make compat                                                         # the oldest and the newest
    TORCH_VERSIONS="2.13.0 2.14.1" pytest --every-cell tests/upstream/compat/test_other_torch.py

That a name exists is not enough: a release may have every name that we use and compute something else. So the tests of
an area run on the release, in a process of their own.
"""

from __future__ import annotations

import pytest

from tests.upstream.compat.installed import TORCH_VERSIONS, check_tests, run_python, torch_folder

pytestmark = pytest.mark.slow

AREAS = {
    "gradients": ("tests/matrix/test_gradient_matrix.py",),
    "dtypes": ("tests/engine/test_grad_dtype.py", "tests/engine/test_parameter_dtypes.py"),
    "programs": ("tests/programs/test_programs.py",),
    "fsdp": ("tests/fsdp",),
    "compile": ("tests/engine/compile/test_trainer.py", "tests/engine/compile/test_loops.py"),
    "windows": ("tests/engine/test_coalesce.py", "tests/strategy/test_window.py"),
    "several optimizers": ("tests/engine/several",),
    "weights": ("tests/weights",),
    "Fabric": ("tests/strategy/test_fabric.py",),
    "checkpoints": ("tests/checkpoint/test_files.py", "tests/checkpoint/test_resume.py"),
    "callbacks": ("tests/callbacks",),
    "losses": ("tests/losses/test_cached_loss.py",),
    "streams": ("tests/testing/streams",),
    "contracts": ("tests/upstream/test_torch_contract.py", "tests/upstream/test_upstream_contract.py"),
    "locks": ("tests/upstream/test_jit_locks.py",),
}


@pytest.mark.parametrize("version", TORCH_VERSIONS)
def test_it_is_that_torch(version: str) -> None:
    _, output = run_python(
        torch_folder(version), "-c", "import torch, lightning_zeroplus; print(torch.__version__, torch.__file__)"
    )
    found, file = output.split()[:2]
    assert found.split("+")[0] == version
    assert file.startswith(str(torch_folder(version)))


@pytest.mark.parametrize("version", TORCH_VERSIONS)
@pytest.mark.parametrize("area", AREAS)
def test_area(area: str, version: str) -> None:
    check_tests(torch_folder(version), *AREAS[area])
