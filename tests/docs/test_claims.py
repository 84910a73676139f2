"""What the docs claim about the code: the migration's table, the way imports point, the arguments in docstrings."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
from lightning.pytorch.strategies import DeepSpeedStrategy

import lightning_zeroplus as zp
from lightning_zeroplus.strategy.deepspeed.config.checks import check_sections
from tests.docs.blocks import ROOT
from tests.programs.program import programs

# -- coming from DeepSpeedStrategy ----------------------------------------------------------------------------------


def _migration() -> dict[str, str]:
    """Each argument of Lightning's strategy, and the cell that says what has become of it."""
    page = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", page.split("## Arguments")[1], re.MULTILINE)[1:]
    return {name: new for names, new in rows for name in re.findall(r"`(\w+)`", names)}


def _arguments(function: Any) -> dict[str, inspect.Parameter]:
    return {name: each for name, each in inspect.signature(function).parameters.items() if name != "self"}


def test_every_argument_of_lightnings_strategy_has_become_something() -> None:
    assert set(_migration()) == set(_arguments(DeepSpeedStrategy.__init__))


def test_what_arguments_have_become_is_accepted() -> None:
    theirs, ours = _arguments(DeepSpeedStrategy.__init__), _arguments(zp.ZeroPlusStrategy.__init__)
    keys = 0
    for name, new in _migration().items():
        if new == "the same":
            assert name in ours
        elif new.startswith("gone"):
            assert name not in ours
        elif (target := re.findall(r"`([\w.]+)`", new)[0]) in ours:
            pass
        else:
            for dotted in re.findall(r"`([\w.]+)`", new):
                value = theirs[name].default
                # Where Lightning has a default that stands for something else, take a value of the right type.
                value = {"logging_batch_size_per_gpu": 1, "remote_device": "cpu"}.get(name, value)
                config: Any = value
                for key in reversed(dotted.split(".")):
                    config = {key: config}
                strategy = zp.ZeroPlusStrategy(3, config=config)
                assert isinstance(strategy.config, dict)
                check_sections(strategy.config)
                keys += 1
            assert target
    assert keys > 30


def test_a_key_of_the_aio_section_is_one_that_deepspeed_reads() -> None:
    from deepspeed.runtime.swap_tensor import constants

    known = {value for name, value in vars(constants).items() if name.startswith("AIO_") and isinstance(value, str)}
    assert {new.strip("`").split(".")[1] for new in _migration().values() if new.startswith("`aio.")} <= known


# -- the house ------------------------------------------------------------------------------------------------------

_PACKAGE = ROOT / "lightning_zeroplus"


@pytest.mark.parametrize(
    ("place", "unknown"),
    [
        (
            "engine",
            {
                *(
                    "lightning",
                    "lightning_zeroplus.strategy",
                    "lightning_zeroplus.callbacks",
                    "lightning_zeroplus.fsdp",
                ),
                "lightning_zeroplus.precision",
            },
        ),
        ("gradients", {"lightning", "deepspeed", "lightning_zeroplus.engine", "lightning_zeroplus.fsdp"}),
        ("fsdp", {"lightning", "deepspeed", "lightning_zeroplus.strategy"}),
        ("weights", {f"lightning_zeroplus.{upward}" for upward in ("engine", "fsdp", "strategy", "callbacks")}),
        ("precision", {"lightning_zeroplus.strategy", "lightning_zeroplus.fsdp"}),
        ("strategy/fsdp2", {"deepspeed", "lightning_zeroplus.engine"}),
        ("strategy/common/window.py", {"deepspeed"}),
    ],
)
def test_imports_point_one_way(place: str, unknown: set[str]) -> None:
    path = ROOT / "lightning_zeroplus" / place
    for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
        for name in _imports(file):
            parts = name.split(".")
            assert not {".".join(parts[:count]) for count in (1, 2)} & unknown, f"{file} imports {name}"


def test_no_folder_has_more_than_twelve_files() -> None:
    counts = {folder: len(list(folder.glob("*.py"))) for folder in [_PACKAGE, *_PACKAGE.rglob("*/")]}
    assert not {str(folder): count for folder, count in counts.items() if count > 12}


def test_no_file_has_more_than_four_hundred_lines() -> None:
    lengths = {file: len(file.read_text().splitlines()) for file in _PACKAGE.rglob("*.py")}
    assert not {str(file): length for file, length in lengths.items() if length > 400}


def test_each_folder_says_what_it_is_for() -> None:
    for file in _PACKAGE.rglob("__init__.py"):
        assert ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))), file


def test_no_imports_run_in_a_circle() -> None:
    """Nor do those for annotations, and within functions."""
    paths = ((file, ".".join(file.relative_to(ROOT).with_suffix("").parts)) for file in _PACKAGE.rglob("*.py"))
    files = {name.removesuffix(".__init__"): file for file, name in paths}
    graph = nx.DiGraph((name, found) for name, file in files.items() for found in _modules(file, files) - {name})
    circles = [
        {name.removeprefix("lightning_zeroplus.") for name in circle}
        for circle in nx.strongly_connected_components(graph)
        if len(circle) > 1
    ]
    assert circles == []


def _modules(path: Path, known: Collection[str]) -> set[str]:
    """Which of the modules ``known`` a file imports: of ``from a import b`` it is ``a.b``, if ``b`` is a module."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names if names <= {*known} else names | {node.module}
    return found & {*known}


def _imports(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return names


# -- docstrings -----------------------------------------------------------------------------------------------------

PUBLIC = [getattr(zp, name) for name in zp.__all__ if name not in ("losses", "testing")]
PUBLIC += [getattr(zp.testing, name) for name in zp.testing.__all__]
PUBLIC += [getattr(zp.losses, name) for name in zp.losses.__all__]


def _methods(cls: type) -> list[Any]:
    return [each for name, each in vars(cls).items() if inspect.isfunction(each) and not name.startswith("_")]


@pytest.mark.parametrize("public", PUBLIC, ids=lambda public: public.__name__)
def test_docstrings_name_the_arguments(public: Any) -> None:
    assert public.__doc__
    for function in [public, *(_methods(public) if inspect.isclass(public) else [])]:
        doc = inspect.cleandoc(function.__doc__ or "")  # not that of the base class
        if function is not public and "Args:\n" not in doc:
            continue  # a short method, or an override
        section = re.search(r"^Args:\n((?:    .*\n?|\n)+)", doc, re.MULTILINE)
        documented = re.findall(r"^    \*{0,2}(\w+):", section[1], re.MULTILINE) if section else []
        if inspect.isclass(function) and "__init__" not in vars(function) and not documented:
            continue  # the base class's arguments
        assert documented == list(_arguments(function)), function


def test_every_public_name_is_in_the_reference() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    documented = set(re.findall(r":: lightning_zeroplus\.(?:(?:losses|testing)\.)?(\w+)$", page, re.MULTILINE))
    assert documented == {*zp.__all__, *zp.losses.__all__, *zp.testing.__all__} - {"losses", "testing"}


# -- refusals --------------------------------------------------------------------------------------------------------

#: What is refused and has no counterpart in a plain loop of torch.
_ALONE = {
    "outside_read_in_a_hook": "FSDP2 by hand shows None in a backward, silently",
    "reads_in_the_second_backward": "FSDP2 by hand shows None in a backward, silently",
    "reads_while_accumulating": "FSDP2 by hand shows None in a backward, silently",
    "hooks_and_direct_backwards": "FSDP2 by hand shows the last backward's gradient alone, silently",
    "clamps_in_direct_backwards": "FSDP2 by hand shows the last backward's gradient alone, silently",
    "compares_with_earlier": "FSDP2 by hand shows None in a backward, silently",
    **dict.fromkeys(
        (
            "read_after_a_blocked_one",
            "outside_averaged_in_part",
            "outside_after_no_sync",
            "read_in_a_blocked_one",
            "read_before_a_blocked_one",
            "read_in_the_next_batch",
            "read_without_zeroing",
            "read_after_zeroing",
            "read_after_modules_zeroed",
            "read_of_another_layer",
        ),
        "neither FSDP2 by hand nor accelerate's ZeRO has this rank's own gradient to read",
    ),
    "nothing_to_train": "DDP itself refuses a module without trainable parameters",
    "low_read_in_a_window": "a window is ours",
    "same_optimizer_twice": "a second fit is Lightning's",
    "same_optimizers_twice": "a second fit is Lightning's",
    "cast_and_cast_back": "DDP itself does not reduce any more, silently",
    "layer_cast_and_cast_back": "DDP itself does not reduce any more, silently",
    "validated_in_float64": "DDP itself does not reduce any more, silently",
    "data_of_another_dtype": "DDP itself does not reduce any more, silently",
    "bias_replaced": "DDP itself does not average the gradients of a new parameter, silently",
    "new_parameter_assigned": "DDP itself does not average the gradients of a new parameter, silently",
    "head_replaced": "DDP itself does not average the gradients of a new parameter, silently",
    "fabric_steps_an_optimizer_of_its_own": "what is set up is Fabric's",
    "ranks_vote": "FSDP2 by hand has no gradient to read there",
    "frozen_for_the_resumed_fit": "accelerate's checkpoints hold one partition, and no names of parameters",
    "tied_twice_in_a_group": "torch itself warns that it will be an error",
    "parametrization_removed": "torch refuses it for any DTensor",
    "layers_in_a_plain_list": "under DDP each rank trains its own",
    "entropy_minimized_in_validation": "a validation step is Lightning's",
    "differentiable_view_kept_in_init": "by hand, the view is made before anything is sharded, and stays as it was",
}


def test_every_refusal_was_tried_under_others() -> None:
    """A program that some strategy refuses is in docs/refusals.md, which says what others make of it."""
    refused = {name for name, program in programs().items() if program.refused}
    tried = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "refusals.md").read_text(encoding="utf-8")))
    assert refused - tried - set(_ALONE) == set()
    assert set(_ALONE) <= refused, "what is not refused any more needs no reason"
