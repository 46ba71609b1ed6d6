"""Repository rules: import direction, README, docs and forbidden formats."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from reprieve import _HOMES

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "reprieve"
# A module may import only from its own entry of this list and from earlier ones.
FLOORS = (
    "errors", "display", "specs", "transfers", "types", "files", "stats", "concurrency",
    "bundles", "settings", "identity",
    "rules", "heads", "policies", "models", "drafters", "engine", "tasks",
    "bench", "backends", "mining", "training", "certify", "vllm_plugin", "playground", "cli",
)  # fmt: skip


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("reprieve"):
            yield from (
                (_HOMES.get(alias.name) or submodule(alias.name) for alias in node.names)
                if node.module == "reprieve"
                else (node.module,)
            )
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def submodule(name):
    """The module that `from reprieve import NAME` imports."""
    found = (SOURCE / name).is_dir() or (SOURCE / f"{name}.py").is_file()
    return f"reprieve.{name}" if found else "reprieve"


def test_imports_follow_the_order_of_packages():
    for path in sorted(SOURCE.rglob("*.py")):
        floor = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if floor == "__init__":
            continue
        assert floor in FLOORS, f"{path} is on no floor"
        for module in imports_of(path):
            parts = module.split(".")
            if parts[0] != "reprieve" or len(parts) == 1:
                continue
            assert FLOORS.index(parts[1]) <= FLOORS.index(floor), f"{path.relative_to(ROOT)} imports {module}"


def test_nothing_imports_the_plugin():
    for path in sorted(SOURCE.rglob("*.py")):
        if "vllm_plugin" not in path.parts:
            assert not any(module.startswith("reprieve.vllm_plugin") for module in imports_of(path)), path


def test_rules_import_errors_and_types_only():
    for path in sorted((SOURCE / "rules").glob("*.py")):
        for module in imports_of(path):
            if module.startswith("reprieve."):
                assert module.split(".")[1] in ("errors", "specs", "transfers", "types", "rules")
            assert not module.startswith("transformers")


def test_nothing_pickles_and_nothing_is_bound_to_a_gpu():
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text()
        assert not re.search(r"\bpickle\b|torch\.load\((?![^)]*weights_only=True)|joblib|cuda:0", text), path


def test_package_imports_without_loading_torch():
    code = "import sys, reprieve, reprieve.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_readme_names_the_two_commands_and_the_makefile_has_them():
    readme, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    for target in ("demo", "test"):
        assert f"make {target}" in readme
        assert re.search(rf"^{target}:", makefile, flags=re.M)
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_readme_and_docs_link_to_files_that_exist():
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.relative_to(ROOT)} links to {link}"


def test_every_rule_has_its_page_and_its_origin():
    """The docs' tables of rules and papers are generated from these."""
    from reprieve.rules import RULES

    for kind in RULES:
        assert kind.origin, f"{kind.__name__}.origin names no paper or software"
        page = (ROOT / "docs" / "rules" / f"{kind.name}.md").read_text()
        assert page.startswith(f"# `{kind.name}`")
        sections = ("Formula", "Parameters", "Guarantee lost", "When to use", "Example", "Source")
        assert re.findall(r"^\*\*([^*]+)\*\*", page, flags=re.M) == list(sections), kind.name


DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FAST_EXAMPLE = "one_answer.py"


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(path, id=path.name, marks=() if path.name == FAST_EXAMPLE else pytest.mark.slow)
        for path in sorted((ROOT / "examples").glob("*.py"))
    ],
)
def test_examples_are_short_and_run(example):
    assert len(example.read_text().splitlines()) < 40
    subprocess.run([sys.executable, str(example)], check=True, capture_output=True, timeout=600)  # a minute, alone


@pytest.mark.parametrize("page", DOCS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_names_imported_in_the_docs_exist(page):
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.S):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("reprieve"):
                module = importlib.import_module(node.module)
                assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)


def test_no_function_takes_more_than_twelve_parameters():
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                given = node.args
                names = [*given.posonlyargs, *given.args, *given.kwonlyargs]
                num = len([name for name in names if name.arg not in ("self", "cls")])
                assert num <= 12, f"{path.relative_to(ROOT)}: {node.name} takes {num} parameters"


def test_decoders_are_built_in_one_module():
    """Other modules get their decoders from a pair."""
    makers = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "SpeculativeDecoder"
    }
    assert makers == {"engine/pair.py"}


def test_readme_and_examples_import_public_names_only():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    pages = [path.read_text() for path in sorted((ROOT / "examples").glob("*.py"))]
    assert blocks
    for text in [*blocks, *pages]:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom):
                assert not (node.module or "").startswith("reprieve"), node.module
            if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "reprieve":
                import reprieve

                assert node.attr in reprieve.__all__, node.attr
