"""Imports go one way, heavy packages stay in their rooms, and only the drafter factory asks for an algorithm."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "exactspec"

# room -> rooms it may import (itself, errors and types are always allowed)
MAY_IMPORT = {
    "errors": set(),
    "types": set(),
    "cache": set(),
    "text": set(),
    "grammar": {"text"},
    "backend": set(),
    "sampling": {"backend"},
    "logprobs": {"backend", "sampling"},
    "model": {"backend", "text"},
    "naive": {"backend", "model", "sampling", "text"},
    "scheduler": {"cache"},
    "draft": {"backend", "model", "sampling"},
    "verify": {"backend", "sampling", "scheduler"},
    "engine": {"backend", "cache", "draft", "grammar", "logprobs", "model", "sampling", "scheduler", "text", "verify"},
}
ALL_ROOMS = set(MAY_IMPORT)
MAY_IMPORT["train"] = ALL_ROOMS
MAY_IMPORT["bench"] = ALL_ROOMS | {"train", "server"}
MAY_IMPORT["server"] = ALL_ROOMS
MAY_IMPORT["cli"] = ALL_ROOMS | {"train", "bench", "server"}
MAY_IMPORT["__main__"] = {"cli"}
MAY_IMPORT["__init__"] = {"engine", "types"}

HEAVY = {"fastapi", "uvicorn", "pydantic", "msgspec", "zmq", "prometheus_client", "starlette", "xgrammar", "gguf"}
HEAVY |= {"typer", "rich", "matplotlib", "xllamacpp", "triton", "openai"}
ALLOWED_AT_THE_TOP = {  # file or room -> heavy packages that may be imported when it is
    "server": {"fastapi", "uvicorn", "pydantic", "msgspec", "zmq", "prometheus_client", "starlette"},
    "cli": {"typer"},
    "backend/cuda": {"triton"},
    "train/kernels.py": {"triton"},
    "train/draft_kernels.py": {"triton"},
    "train/block_attention.py": {"triton"},
}
ALGORITHMS = {"dflash", "dspark", "ngram"}


def modules() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path, ast.parse(path.read_text())


def room_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else Path(parts[0]).stem


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        return [node.module]
    return []


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def top_level_imports(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if not is_type_checking(node):
            for inner in ast.walk(node) if isinstance(node, ast.If | ast.Try) else [node]:
                yield from imported(inner)


def test_rooms_import_only_the_rooms_below_them():
    faults = []
    for path, tree in modules():
        room = room_of(path)
        for node in ast.walk(tree):
            for name in imported(node):
                parts = name.split(".")
                if parts[0] != "exactspec" or len(parts) == 1:
                    continue
                if parts[1] not in MAY_IMPORT[room] | {room, "errors", "types"}:
                    faults.append(f"{path.relative_to(PACKAGE)} imports {name}")
    assert not faults, "\n".join(faults)


def test_every_room_is_in_the_rules():
    assert {room_of(path) for path, _ in modules()} <= set(MAY_IMPORT)


def test_heavy_packages_are_imported_only_in_their_rooms():
    faults = []
    for path, tree in modules():
        where = path.relative_to(PACKAGE).as_posix()
        allowed = set().union(*(names for place, names in ALLOWED_AT_THE_TOP.items() if where.startswith(place)))
        faults += [f"{where}: {name}" for name in top_level_imports(tree) if name.split(".")[0] in HEAVY - allowed]
    assert not faults, "\n".join(faults)


def test_nobody_outside_the_factory_branches_on_an_algorithms_name():
    """Comparisons with, and match cases on, an algorithm's name. Option tables and default values are no branches."""
    allowed = {"draft/factory.py", "draft/config.py"}
    faults = []
    for path, tree in modules():
        where = path.relative_to(PACKAGE).as_posix()
        if where in allowed or where.startswith("train/"):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Compare | ast.MatchValue):
                named = {
                    n.value.lower() for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)
                }
                if named & ALGORITHMS:
                    faults.append(f"{where}:{node.lineno}")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("module", ["exactspec", "exactspec.engine.llm", "exactspec.draft.factory"])
def test_the_engine_imports_without_web_grammar_or_messaging_packages(module):
    blocked = sorted(HEAVY - {"triton"})
    code = (
        "import sys, importlib\n"
        f"for name in {blocked!r}: sys.modules[name] = None\n"
        f"importlib.import_module({module!r})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


def test_functions_and_files_stay_small():
    faults = []
    for path, tree in modules():
        where = path.relative_to(PACKAGE).as_posix()
        if len(path.read_text().splitlines()) >= 500:
            faults.append(f"{where}: 500 lines or more")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                if length > 80:
                    faults.append(f"{where}: {node.name} has {length} lines")
    assert not faults, "\n".join(faults)


def test_the_map_names_every_file():
    text = (PACKAGE.parent / "docs" / "map.md").read_text()
    missing = [
        path.relative_to(PACKAGE).as_posix()
        for path, _ in modules()
        if path.name != "__init__.py" and f"`{path.relative_to(PACKAGE).as_posix()}`" not in text
    ]
    assert not missing, f"docs/map.md does not mention: {missing}"
