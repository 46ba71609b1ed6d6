"""Check that an unpacked vLLM has everything that the plugin uses, without running it.

    python benchmarks/vllm_parts.py FOLDER            # FOLDER holds the package `vllm`
    python benchmarks/vllm_parts.py FOLDER OLDER      # and list wrapped functions that differ from an older one

Checks the parameters of wrapped functions (`vllm_plugin/probing.py`) and that each imported name is defined.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import reprieve
from reprieve.errors import ReprieveError
from reprieve.vllm_plugin import probing
from reprieve.vllm_plugin.probing import Part


def main() -> int:
    if not 2 <= len(sys.argv) <= 3:
        sys.exit(__doc__)
    folder = Path(sys.argv[1])
    problems = list(missing_names(folder))
    for kind, parts in probing.PARTS.items():
        try:
            probing.require_parts(parts, in_source(folder))
            print(f"{folder}: {kind} fits")
        except ReprieveError as error:
            problems.append(f"{kind}: {error}")
    print("\n".join(f"{folder}: {problem}" for problem in problems) or f"{folder}: all imported names exist")
    for change in differences(folder, Path(sys.argv[2])) if len(sys.argv) == 3 else ():
        print(change)
    return bool(problems)


def in_source(root: Path) -> Callable[[Part], dict[str, bool] | None]:
    """Return a reader of parameters, like `probing.live`, for an unpacked vLLM."""

    def parameters_of(part: Part) -> dict[str, bool] | None:
        node = node_in(root, part)
        if node is None:
            return None
        signature = node.args
        positional = [*signature.posonlyargs, *signature.args]
        num_required = len(positional) - len(signature.defaults)
        parameters = {item.arg: index < num_required for index, item in enumerate(positional)}
        keywords = zip(signature.kwonlyargs, signature.kw_defaults, strict=True)
        return parameters | {item.arg: default is None for item, default in keywords}

    return parameters_of


def node_in(root: Path, part: Part) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """Return the definition of a part in an unpacked vLLM, or None."""
    path = root.joinpath(*part.module.split(".")).with_suffix(".py")
    body: Sequence[ast.AST] = ast.parse(path.read_text(encoding="utf-8")).body if path.is_file() else ()
    node: ast.AST | None = None
    for name in part.name.split("."):
        named = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        node = next((item for item in body if isinstance(item, named) and item.name == name), None)
        body = node.body if isinstance(node, ast.ClassDef) else ()
    return node if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else None


def missing_names(folder: Path) -> Iterator[str]:
    """Yield the names that our code imports from vLLM and its modules do not define."""
    for file in sorted(Path(reprieve.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
                known = defined(folder, str(node.module))
                for name in {alias.name for alias in node.names} - known:
                    if not source_of(folder, f"{node.module}.{name}"):
                        yield f"{file.name} imports {node.module}.{name}, which does not exist"


def source_of(folder: Path, module: str) -> Path | None:
    path = folder.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def defined(folder: Path, module: str) -> set[str]:
    """Return the names that a module binds anywhere, including imports."""
    file = source_of(folder, module)
    if module == "vllm.version":  # written when a wheel is built; it imports its name
        return {"__version__"} if file else set()
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if file else ():
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def differences(new: Path, old: Path) -> Iterator[str]:
    """Yield the wrapped functions that changed: their parameters, or their body."""
    for part in dict.fromkeys(part for parts in probing.PARTS.values() for part in parts):
        then, now = (node_in(folder, part) for folder in (old, new))
        if then is None or now is None or ast.dump(then) == ast.dump(now):
            continue
        arguments = [ast.unparse(node.args) for node in (then, now)]
        change = "another body" if arguments[0] == arguments[1] else f"({arguments[1]}) instead of ({arguments[0]})"
        yield f"{part.module}.{part.name}: {change}"


if __name__ == "__main__":
    sys.exit(main())
