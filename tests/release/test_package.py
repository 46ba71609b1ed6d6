"""One version everywhere, and a package page without the README's relative links."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import reprieve

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page_of():
    pytest.importorskip("hatchling", reason="part of `make setup`")
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.page_of


def test_the_version_is_the_same_in_code_changelog_and_citation():
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)[1]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert newest == reprieve.__version__ == citation["version"]


def test_the_command_prints_the_version():
    command = [sys.executable, "-m", "reprieve.cli.main", "--version"]
    assert subprocess.check_output(command, text=True) == f"reprieve {reprieve.__version__}\n"


def test_the_package_page_has_absolute_links_if_the_repository_is_known(page_of):
    page = page_of(README, "https://github.com/owner/name")
    links = re.findall(r"\]\(([^)]+)\)", page)
    assert len(links) == len(re.findall(r"\]\(([^)]+)\)", README))
    assert all(link.startswith(("https://", "#")) for link in links), links
    assert "](https://github.com/owner/name/raw/main/docs/images/playground.png)" in page
    assert "](https://github.com/owner/name/blob/main/docs/start.md)" in page


def test_the_package_page_has_no_relative_links_if_the_repository_is_unknown(page_of):
    page = page_of(README, "")
    assert not re.search(r"\]\((?!https?:)", page)
    assert "Getting started" in page


def test_the_classifiers_name_the_pythons_that_are_tested():
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    claimed = [found[1] for name in classifiers if (found := re.fullmatch(r".*Python :: (3\.\d+)", name))]
    tested = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["run"]["strategy"]["matrix"]
    assert claimed == tested["python"]
