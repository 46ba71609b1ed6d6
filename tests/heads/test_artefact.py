"""Every head is saved, shared and bound to its pair in one way."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch

from reprieve import load_head
from reprieve.bundles import BUNDLED_HEADS, BY_KEY
from reprieve.errors import PairError, ReprieveError
from reprieve.heads.artefact import HEADS
from reprieve.heads.certificates import Certificate
from reprieve.heads.files import claim_head, find_head, signature
from tests.kit.tiny import IDENTITY, random_head

KINDS = ["judge", "pivot", "state_arbiter", "lts", "arbiter", "length"]


def certified(folder: Path) -> Path:
    """Copy the bundled head's certificates into a head's folder."""
    shutil.copytree(find_head("reprieve/arithmetic-judge") / "certificates", folder / "certificates")
    return folder


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A fake hub in a folder, for uploads and downloads."""
    asked = {}

    def create_repo(self, repo_id, **options):
        (tmp_path / "hub" / repo_id).mkdir(parents=True, exist_ok=True)
        asked["repo"] = options
        return huggingface_hub.RepoUrl(f"https://huggingface.co/{repo_id}")

    def upload_folder(self, *, repo_id, folder_path, **options):
        shutil.copytree(folder_path, tmp_path / "hub" / repo_id, dirs_exist_ok=True)
        asked["upload"] = options

    def snapshot_download(repo_id, *, allow_patterns, **options):
        asked["download"] = options
        found = tmp_path / "hub" / repo_id
        if not found.is_dir():
            raise FileNotFoundError(f"no repository {repo_id}")
        copy = tmp_path / "cache" / repo_id
        for path in found.rglob("*"):
            name = path.relative_to(found)
            if path.is_file() and any(name.match(pattern) for pattern in allow_patterns):
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, copy / name)
        return str(copy)

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", create_repo)
    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", upload_folder)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return asked


def test_every_kind_is_tested_here():
    assert set(HEADS.names()) == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_round_trips_through_the_hub(kind, hub, tmp_path):
    head = random_head(kind)
    head.push_to_hub("me/head", private=True, token="secret", commit_message="first")
    assert hub["repo"]["private"] is True
    assert hub["upload"]["commit_message"] == "first"
    again = load_head("me/head")
    assert type(again) is type(head)
    assert again.fingerprint == head.fingerprint
    assert again.task == head.task and again.pair == head.pair
    assert all(torch.equal(tensor, head.weights[name]) for name, tensor in again.weights.items())
    type(head).from_pretrained("me/head", revision="v2", token="secret")
    assert hub["download"]["revision"] == "v2"
    with pytest.raises(ReprieveError, match="'me/other' is not a folder here, and the hub says: no repository"):
        load_head("me/other")


def test_certificates_travel_with_the_head(hub, tmp_path):
    head = random_head("judge")
    head.save_pretrained(tmp_path / "head")
    loaded = load_head(certified(tmp_path / "head"))
    assert list(loaded.certificates)
    loaded.push_to_hub("me/certified")
    again = load_head("me/certified")
    assert dict(again.certificates) == dict(loaded.certificates)


def test_the_card_states_the_heads_own_certificates_only(tmp_path):
    judge = load_head("reprieve/arithmetic-judge")
    statement = json.loads(next(iter(judge.certificates.values())))["statement"]
    assert statement in judge.card()
    other = dataclasses.replace(random_head("judge"), certificates=judge.certificates)
    assert statement not in other.card() and "Not certified" in other.card()


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_card_says_what_it_is_for(kind, tmp_path):
    head = random_head(kind)
    head.save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    about, _, text = card.removeprefix("---\n").partition("---\n")
    assert "library_name: reprieve" in about
    assert "base_model: tiny/target" in about
    assert head.purpose in text
    assert "| task | arithmetic |" in text
    assert "| target | tiny/target |" in text
    assert text.lstrip().startswith("> **Not certified.**")
    if head.reads_draft:
        assert "| draft | tiny/draft |" in text


@pytest.mark.parametrize("name", sorted(BUNDLED_HEADS))
def test_the_bundled_heads_have_their_kind_and_task(name):
    if name.endswith("eagle3"):
        pytest.skip("a drafting head, in the speculators library's own format")
    head = load_head(name)
    assert head.kind == BUNDLED_HEADS[name].name.partition("-")[0]
    assert head.task == BY_KEY[BUNDLED_HEADS[name].parent.name].task
    with pytest.raises(PairError):
        head.require_pair(IDENTITY, name)


def test_a_head_of_another_kind_is_refused_by_name(tmp_path):
    random_head("pivot").save_pretrained(tmp_path)
    with pytest.raises(ReprieveError, match=r"must have \{'kind': 'judge', 'schema': 1\}, got"):
        load_head(tmp_path, kind="judge")
    with pytest.raises(ReprieveError, match=r"has no config\.json"):
        load_head(tmp_path.parent)


def test_a_certificate_of_wrong_types_is_refused_and_a_pipe_does_not_hang(tmp_path):
    random_head("judge").save_pretrained(tmp_path / "head")
    folder = certified(tmp_path / "head")
    path = next((folder / "certificates").glob("*.json"))
    values = json.loads(path.read_text())
    del values["sha256"]
    for changes, message in (
        ({"calibration": []}, "calibration must be of type"),
        ({"conditions": values["conditions"] | {"sampling": 5}}, "sampling must be of type"),
        ({"conditions": values["conditions"] | {"extra": 5}}, "unknown: extra"),
    ):
        changed = values | changes
        path.write_text(json.dumps(changed | {"sha256": signature(changed)}))
        with pytest.raises(ReprieveError, match=message):
            Certificate.load(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ReprieveError, match="not a regular file"):
        load_head(folder)


def test_a_claimed_folder_is_locked_for_other_processes(tmp_path):
    claim_head(tmp_path / "head", "judge")
    claim_head(tmp_path / "head", "judge")  # again in this process
    script = "import sys, pathlib; from reprieve.heads.files import claim_head; claim_head(pathlib.Path(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "head")], capture_output=True, text=True)
    assert done.returncode == 1 and "is in use by another run" in done.stderr
