"""Extraction of the program in a response from its fenced code blocks (CommonMark)."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Collection, Iterator
from typing import Any

from markdown_it import MarkdownIt

BREAK = "\n\f\n"  # between the blocks of an extracted answer; a form feed is white space to Python
_MARKS = ("```", "~~~")
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def code_blocks(text: str) -> list[str]:
    """Return the Python blocks of a response, in order; without any, other blocks or the bare response.

    Blocks count if they are tagged as Python, or untagged and valid Python. This leaves out blocks that show output.
    """
    text = text.replace("\r\n", "\n")
    fences = [(token.info.strip().lower(), _without_marks(token.content)) for token in _fences(textwrap.dedent(text))]
    fences = [(info.split()[0] if info else "", content) for info, content in fences if content.strip()]
    if tagged := [content for info, content in fences if info.startswith("py") or (not info and _tree(content))]:
        return tagged
    before = text.partition("```")[0]
    if before.strip() and (_tree(textwrap.dedent(before)) or not fences):  # a bare completion and a stray fence
        return [before.rstrip()]
    return [content for _, content in fences] or [_without_marks(text)]


def _without_marks(text: str) -> str:
    """Return a text without lines that open or close a fence."""
    return "\n".join(line for line in text.split("\n") if not line.strip().startswith(_MARKS)).rstrip()


def is_fenced(text: str) -> bool:
    """Return whether a response contains a block that is not empty."""
    return any(token.content.strip() for token in _fences(textwrap.dedent(text)))


def program_of(answer: str, names: Collection[str]) -> str:
    """Return the program among an answer's blocks: the last one that defines one of these names, or the last whole one.

    Earlier blocks that contain only imports and other definitions are prepended.
    """
    blocks = answer.split(BREAK)
    defining = [number for number, block in enumerate(blocks) if defined_names(block) & set(names)]
    whole = [number for number, block in enumerate(blocks) if _tree(block)]
    last = (defining or whole or [len(blocks) - 1])[-1]
    helpers = [block for block in blocks[:last] if _only_defines(block) and not defined_names(block) & set(names)]
    return "\n\n".join([*helpers, blocks[last]])


def defined_names(program: str) -> set[str]:
    """Return the functions and classes that a program defines at its top level; none where it is not one."""
    tree = _tree(program)
    return set() if tree is None else {node.name for node in tree.body if isinstance(node, _DEFINITIONS)}


def future_first(program: str) -> str:
    """Return a program with its `__future__` imports first, where Python wants them."""
    lines = program.split("\n")
    future = [line for line in lines if line.startswith("from __future__ ")]
    return "\n".join([*future, *(line for line in lines if not line.startswith("from __future__ "))])


def _fences(text: str) -> Iterator[Any]:
    return (token for token in MarkdownIt("commonmark").parse(text) if token.type == "fence")


def _only_defines(block: str) -> bool:
    tree = _tree(block)
    wanted = (*_DEFINITIONS, ast.Import, ast.ImportFrom)
    return tree is not None and bool(tree.body) and all(isinstance(node, wanted) for node in tree.body)


def _tree(program: str) -> ast.Module | None:
    try:
        return ast.parse(program)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
