"""Heads are published with certificates and a report, and transformers can generate from the published folder."""

from __future__ import annotations

import json
import shutil

import huggingface_hub
import pytest

import reprieve
from reprieve.bundles import BY_KEY
from reprieve.cli.main import main
from reprieve.errors import ReprieveError, SpecError
from reprieve.heads.publishing import Repository
from tests.kit.pairs import ARITHMETIC

JUDGE, PIVOT = (BY_KEY["miniature"].folder / name for name in ("judge", "pivot"))


def text_below_the_header(card):
    return card.removeprefix("---\n").partition("---\n")[2].strip()


@pytest.fixture
def quickstart(tmp_path):
    """A folder as `quickstart` leaves it, with the certificates outside the head's folder."""
    folder = tmp_path / "run"
    shutil.copytree(JUDGE, folder / "head", ignore=shutil.ignore_patterns("certificates"))
    shutil.copytree(JUDGE / "certificates", folder / "certificates")
    (folder / "report.html").write_text("<p>measured</p>")
    return folder


def test_a_quickstart_folder_is_published_with_certificates_and_report(quickstart):
    made = Repository.of(quickstart, "me/judge")
    certificates = {path.name for path in (JUDGE / "certificates").iterdir()}
    assert {
        path.removeprefix("certificates/") for path in made.files if path.startswith("certificates/")
    } == certificates
    assert made.files["report.html"] == b"<p>measured</p>"
    assert "[report](report.html)" in made.files["README.md"].decode()
    assert "--arm judge:path=me/judge" in made.files["README.md"].decode()


def test_the_first_line_of_the_card_is_the_certificate(quickstart):
    made = Repository.of(quickstart, "me/judge")
    first = min((JUDGE / "certificates").iterdir())
    statement = json.loads(first.read_text())["statement"]
    assert text_below_the_header(made.files["README.md"].decode()).startswith(f"> **Certified.** {statement}")


def test_a_published_head_loads_with_its_certificates(quickstart, tmp_path):
    made = Repository.of(quickstart, "me/judge")
    head = reprieve.load_head(made.write(tmp_path / "out"))
    assert head.fingerprint == reprieve.load_head(JUDGE).fingerprint
    assert len(head.certificates) == 3


def test_a_certificate_of_another_head_is_refused(tmp_path):
    folder = tmp_path / "pivot"
    shutil.copytree(PIVOT, folder)
    shutil.copytree(JUDGE / "certificates", folder / "certificates")
    with pytest.raises(ReprieveError, match="must be about this head"):
        Repository.of(folder, "me/pivot")


@pytest.mark.parametrize(
    ("folder", "name", "message"),
    [
        (JUDGE, "judge", "repo must be owner/name, of letters"),
        (JUDGE.parent / "target", "me/target", "names no kind"),
        (JUDGE.parent / "nothing", "me/x", "there is no such folder"),
    ],
)
def test_invalid_folders_and_names_are_refused(folder, name, message):
    with pytest.raises((SpecError, ReprieveError), match=message):
        Repository.of(folder, name)


def test_other_folders_are_not_overwritten(tmp_path):
    mine = tmp_path / "me" / "judge" / "notes.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    made = Repository.of(JUDGE, "me/judge")
    with pytest.raises(ReprieveError, match="holds something else"):
        made.write(tmp_path)
    assert mine.read_text() == "mine"


def test_a_dry_run_writes_the_files_without_contacting_the_hub(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", lambda *_, **__: pytest.fail("the hub was asked"))
    command = ["publish", str(JUDGE), "--repo", "me/judge", "--dry-run", "--out", str(tmp_path)]
    assert main(command) == main(command) == 0
    assert (tmp_path / "me/judge/model.safetensors").is_file()
    assert "nothing was uploaded" in capsys.readouterr().out


def test_publishing_uploads_the_folder_in_one_commit(tmp_path, monkeypatch, capsys):
    uploads = []

    def create_repo(self, name, **options):
        assert options == {"private": True, "exist_ok": True}
        return f"https://huggingface.co/{name}"

    def upload_folder(self, *, repo_id, folder_path, **options):
        uploads.append((repo_id, sorted(path.name for path in folder_path.iterdir())))

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", create_repo)
    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", upload_folder)
    assert main(["publish", str(PIVOT), "--repo", "me/pivot", "--private", "--out", str(tmp_path)]) == 0
    assert uploads == [("me/pivot", ["README.md", "config.json", "custom_generate", "model.safetensors"])]
    assert "https://huggingface.co/me/pivot" in capsys.readouterr().out


def test_a_failed_upload_names_the_reason_and_the_folder(tmp_path, monkeypatch, capsys):
    def refuse(*_, **__):
        raise OSError("401: no token")

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", refuse)
    assert main(["publish", str(PIVOT), "--repo", "me/pivot", "--out", str(tmp_path)]) == 1
    assert "401: no token" in (message := capsys.readouterr().err) and str(tmp_path) in message


def test_transformers_generates_from_a_published_folder(bundled_pair, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    judge = ARITHMETIC.folder / "judge"
    folder = Repository.of(judge, "me/judge").write(tmp_path)
    tokenizer = bundled_pair.tokenizer
    prompt = tokenizer("Question: Ben has 4 coins. He finds 3. How many coins are there?\nAnswer:", return_tensors="pt")
    made = bundled_pair.target.generate(
        prompt.input_ids,
        custom_generate=str(folder),
        trust_remote_code=True,
        draft_model=bundled_pair.draft,
        text_tokenizer=tokenizer,
        rule="margin:delta=3",
        max_new_tokens=12,
        do_sample=False,
    )
    decoder = bundled_pair.decoder("margin:delta=3")
    expected = decoder.generate(prompt.input_ids[0].tolist(), reprieve.SamplingParams(max_new_tokens=12))
    assert made[0, prompt.input_ids.shape[1] :].tolist() == expected.token_ids
