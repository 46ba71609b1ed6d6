"""User-facing text: no docstring begins with a question word, and no text holds a banned phrase."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "reprieve"
PACKAGES = sorted({path.relative_to(SOURCE).parts[0] for path in SOURCE.rglob("*.py")})
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

QUESTIONS = ("What", "Who", "Whose", "Which", "How", "Where", "Whether")
BANNED = (
    "anew", "of late", "for want of", "beside what", "beside it", "nothing to alarm", "as many as pay", "busy machine",
    "stands over", "what comes out", "held beside", "is of servers", "tells no", "could show",
)  # fmt: skip
_BANNED = re.compile(r"\b(" + "|".join(BANNED).replace(" ", r"\s+") + r")\b", re.IGNORECASE)


@cache
def parsed(package):
    paths = [SOURCE / package] if package.endswith(".py") else sorted((SOURCE / package).rglob("*.py"))
    return [(path.relative_to(ROOT), ast.parse(path.read_text())) for path in paths]


def docstrings(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), text


def is_question(docstring):
    return docstring.split()[0].strip(",:;`") in QUESTIONS


def banned_in(text):
    return [found[0] for found in _BANNED.finditer(text)]


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_do_not_begin_with_a_question_word(package):
    wrong = [
        f"{path}:{line}: {text.splitlines()[0]}"
        for path, tree in parsed(package)
        for line, text in docstrings(tree)
        if is_question(text)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", PACKAGES)
def test_strings_in_the_code_contain_no_banned_phrase(package):
    """Help texts, error messages and log lines are strings of the source; docstrings become help and API pages."""
    wrong = [
        f"{path}:{node.lineno}: {phrase}"
        for path, tree in parsed(package)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for phrase in banned_in(node.value)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_pages_contain_no_banned_phrase(page):
    assert not banned_in(page.read_text())


def test_the_checks_detect_violations():
    assert banned_in("measured\nanew, for want\n  of time") == ["anew", "for want\n  of"]
    assert banned_in("the end of latency, the anewly named") == []
    assert is_question("Whether it branches.") and is_question("How: one of three.")
    assert not is_question("However many tokens.") and not is_question("Return what is left.")
