"""Pipelines of commands: finished stages are skipped, and a failed stage ends the pipeline."""

from dataclasses import dataclass, field

import pytest

from reprieve.cli.command import Command, Pipeline
from reprieve.errors import ReprieveError


@dataclass(frozen=True)
class Scripted(Command):
    """A command that ends with a given status.

    Args:
        status: Exit status.
    """

    verb = "scripted"

    status: int = 0
    calls: list = field(default_factory=list, metadata={"flag": False}, compare=False)

    def run(self):
        self.calls.append(self.status)
        return self.status


def test_a_finished_stage_is_skipped_until_its_flags_change(tmp_path, capsys):
    calls = []
    for status in (0, 0, 1):
        assert Pipeline(tmp_path, "account").run("one", Scripted(status, calls), results=(0, 1)) == status
    assert calls == [0, 1]
    assert "one: done before" in capsys.readouterr().out


def test_a_failed_stage_ends_the_pipeline_and_is_tried_again(tmp_path):
    calls = []
    for _ in range(2):
        with pytest.raises(ReprieveError, match=r"stage one .*failed with status 1"):
            Pipeline(tmp_path, "account").run("one", Scripted(1, calls))
    assert calls == [1, 1]


def test_an_interrupted_stage_is_not_recorded(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        Pipeline(tmp_path, "account").run("one", Scripted(130))
    assert not (tmp_path / "account.json").exists()


def test_an_unreadable_account_is_ignored(tmp_path):
    (tmp_path / "account.json").write_text("{")
    assert Pipeline(tmp_path, "account").run("one", Scripted(0)) == 0
