"""Workflows, image and compose file: pinned, with minimal permissions, for the tested vLLM versions."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
import yaml

import reprieve
from reprieve.policies.menu import Menu
from reprieve.vllm_plugin.configuration import TESTED

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
DOCKERFILE = (ROOT / "Dockerfile").read_text()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_every_action_is_pinned_to_a_commit_and_names_its_version(path):
    uses = re.findall(r"uses: (.+)", path.read_text())
    assert uses
    for action in uses:
        assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action), action


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_only_publishing_and_reporting_jobs_have_write_permissions(path):
    workflow = yaml.safe_load(path.read_text())
    assert set(workflow["permissions"].values()) <= {"read"}
    writing = {
        name: {right for right, value in job.get("permissions", {}).items() if value == "write"}
        for name, job in workflow["jobs"].items()
    }
    allowed = {
        ("docs", "deploy"): {"pages", "id-token"},
        ("nightly", "report"): {"issues"},
        ("release", "pypi"): {"id-token"},
        ("release", "image"): {"packages"},
        ("release", "notes"): {"contents"},
    }
    assert {(path.stem, name): rights for name, rights in writing.items() if rights}.items() <= allowed.items()


def minor(version):
    return tuple(version.split(".")[:2])


def test_there_is_an_image_for_each_tested_vllm():
    release = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    versions = release["jobs"]["image"]["strategy"]["matrix"]["vllm"]
    tested = {row["vllm"] for row in json.loads(TESTED.read_text())}
    assert {minor(version) for version in versions} == {minor(version) for version in tested}
    assert re.search(r"^ARG VLLM=v(.+)$", DOCKERFILE, flags=re.M)[1] in versions


def test_the_image_does_not_run_as_root_and_checks_its_health():
    assert re.findall(r"^USER (.+)$", DOCKERFILE, flags=re.M)[-1] == "2000:0"
    assert "HEALTHCHECK" in DOCKERFILE
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for copied in re.findall(r"^COPY (.+) \S+$", DOCKERFILE, flags=re.M):
        for name in copied.split():
            assert f"!{name}" in ignored and (ROOT / name).exists(), name


def test_files_mounted_by_the_compose_file_exist_and_are_read_only():
    for service in COMPOSE["services"].values():
        for volume in service["volumes"]:
            source, _, target = volume.partition(":")
            assert source in COMPOSE["volumes"] or ((DEPLOY / source).is_file() and target.endswith(":ro")), volume


def test_the_compose_file_mounts_a_valid_policy():
    given = [part.removeprefix("--additional-config=") for part in COMPOSE["services"]["vllm"]["command"]]
    mounted = json.loads(next(part for part in given if part.startswith('{"reprieve"')))["reprieve"]
    assert f"./policy.json:{mounted}:ro" in COMPOSE["services"]["vllm"]["volumes"]
    Menu.load(json.loads((DEPLOY / "policy.json").read_text()), target="any")


def test_prometheus_and_the_dashboard_use_existing_services():
    scraped = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())["scrape_configs"][0]["static_configs"][0]
    host, _, port = scraped["targets"][0].partition(":")
    assert host in COMPOSE["services"] and f":{port}" in COMPOSE["services"][host]["ports"][0]
    source = yaml.safe_load((DEPLOY / "grafana/datasource.yaml").read_text())["datasources"][0]
    assert re.match(r"http://(\w+):", source["url"])[1] in COMPOSE["services"]
    [variable] = json.loads((ROOT / "docs/grafana.json").read_text())["templating"]["list"]
    assert variable["query"] == source["type"]


def test_a_release_takes_its_notes_from_the_changelog():
    spec = importlib.util.spec_from_file_location("release_notes", ROOT / ".github/release_notes.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.notes_of("# C\n\n## 2.0\n\n- new\n\n## 1.0 - then\n- old\n", "2.0") == "- new"
    assert module.notes_of((ROOT / "CHANGELOG.md").read_text(), reprieve.__version__)
    with pytest.raises(SystemExit, match=r"must have a section for 9\.9"):
        module.notes_of("## 1.0\n- old\n", "9.9")
