"""Every command reads the same prompt format: raw, or a Qwen3 chat template with thinking unset, on or off."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from reprieve.cli.main import main
from reprieve.engine import SpeculativeDecoder
from reprieve.engine.continuations import ContinuationDecoder
from reprieve.heads.loading import load_head
from reprieve.mining.store import LabelStore
from tests.kit.chats import save_chat_pair

LENGTH = "24"


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return save_chat_pair(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture
def read(monkeypatch):
    """Token ids of every prompt that is decoded."""
    seen = []
    generate, submit = SpeculativeDecoder.generate, ContinuationDecoder.submit

    def spied(self, prompt, *rest, **more):
        seen.append(self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt))
        return generate(self, prompt, *rest, **more)

    monkeypatch.setattr(SpeculativeDecoder, "generate", spied)
    monkeypatch.setattr(
        ContinuationDecoder, "submit", lambda self, given: seen.append(given.prefix_ids) or submit(self, given)
    )
    return seen


@pytest.fixture
def words(pair, tmp_path, monkeypatch):
    """Flags for the models and the data; the answer is the last letter of the response."""
    path = tmp_path / "q.jsonl"
    path.write_text("".join(json.dumps({"question": f"Say {n}!", "answer": "e"}) + "\n" for n in range(60)))
    monkeypatch.chdir(tmp_path)
    models = ["--target", pair[0], "--draft", pair[1], "--dtype", "float32"]
    return [*models, "--task", f'jsonl:path={path},grader="regex:\\w"']


FORMATS = {
    "raw": [],
    "template": ["--chat-template"],
    "on": ["--chat-template", "--thinking", "on", "--system-prompt", "Be brief."],
    "off": ["--chat-template", "--thinking", "off"],
}


def prompt_text(name):
    """Text that the template writes before and after the number in the question."""
    if name == "raw":
        return "Say ", "!"
    system = "<|im_start|>system\nBe brief.<|im_end|>\n" if name == "on" else ""
    empty = "<think>\n\n</think>\n\n" if name == "off" else ""
    return f"{system}<|im_start|>user\nSay ", f"!<|im_end|>\n<|im_start|>assistant\n{empty}"


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_every_command_reads_the_same_prompt_tokens(name, pair, read, words, capsys):
    form = [*FORMATS[name], "--max-new-tokens", LENGTH]
    few = ["--split", "all", "--limit", "2"]
    verbs = {
        "mine autojudge": ["mine", "autojudge", *words, *form, *few, "--out", "labels"],
        "mine pivot": ["mine", "pivot", *words, *form, *few, "--rollouts", "1", "--out", "pivots"],
        "mine arbitration": ["mine", "arbitration", *words, *form, *few, "--rollouts", "1", "--out", "traces"],
        "bench": ["bench", *words, *form, *few, "--arm", "margin:delta=1", "--num-draft-tokens", "4", "--out", "run"],
        "monitor": ["monitor", *words, *form, *few, "--rule", "margin:delta=1", "--share", "1"],
        "train lts": ["train", "lts", *words, *form, *few, "--delta", "0.5", "--out", "lts"],
    }
    tokenizer = AutoTokenizer.from_pretrained(pair[0])
    before, after = prompt_text(name)
    for verb, arguments in verbs.items():
        read.clear()
        assert main(arguments) in (0, 1), (verb, capsys.readouterr().err)
        assert read, verb
        for token_ids in read:
            text = tokenizer.decode(token_ids)
            assert text.startswith(before) and after in text, (verb, text)
            asked = tokenizer.encode(text.partition(after)[0] + after)
            assert token_ids[: len(asked)] == asked, verb
    assert LabelStore(Path("labels")).manifest["prompt"].get("chat_template", False) is (name != "raw")


@pytest.mark.slow
def test_a_head_records_its_prompt_format_and_problems(pair, read, words, capsys, recwarn):
    form = [*FORMATS["off"], "--max-new-tokens", LENGTH]
    models = words[:6]
    assert main(["mine", "autojudge", *words, *form, "--split", "all", "--limit", "30", "--out", "labels"]) == 0
    assert main(["train", "judge", *models, "--labels", "labels", "--out", "head"]) == 0
    head = load_head("head")
    assert head.prompt == {"chat_template": True, "thinking": "off"} and len(head.problems) == 30
    bench = ["bench", *words, "--split", "all", "--arm", "judge:path=head", "--num-draft-tokens", "4"]
    recwarn.clear()
    assert main([*bench, *form, "--offset", "30", "--limit", "2", "--out", "same"]) == 0
    assert not [str(item.message) for item in recwarn if "head" in str(item.message)]
    assert main([*bench, "--max-new-tokens", LENGTH, "--offset", "30", "--limit", "2", "--out", "raw"]) == 0
    told = [str(item.message) for item in recwarn]
    assert any("was made with the chat template, thinking 'off' and is used with raw prompts" in text for text in told)
    assert main([*bench, *form, "--offset", "29", "--limit", "2", "--out", "leak"]) == 0
    assert any("its head was made from 1 of these 2 problems" in str(item.message) for item in recwarn)


@pytest.mark.slow
def test_certifying_on_a_heads_training_problems_is_refused_by_name(pair, words, capsys):
    form = ["--max-new-tokens", LENGTH]
    assert main(["mine", "autojudge", *words, *form, "--split", "all", "--limit", "30", "--out", "labels"]) == 0
    assert main(["train", "judge", *words[:6], "--labels", "labels", "--out", "head"]) == 0
    certify = ["certify", "--rule", "judge:path=head", "--max-drop", "0.5", *words, *form, "--split", "all"]
    certify += ["--held-out-split", "all", "--limit", "10", "--held-out-limit", "5"]
    capsys.readouterr()
    assert main([*certify, "--offset", "25", "--out", "c1"]) == 2
    error = capsys.readouterr().err
    assert "5 of the calibration problems are among those that a head of judge:path=head" in error
    assert error.count("jsonl-") == 5
    assert main([*certify, "--offset", "0", "--out", "c2"]) == 2
    assert "and 5 more" in capsys.readouterr().err


def test_generate_takes_a_system_prompt_and_thinking(pair, read, capsys):
    models = ["--target", pair[0], "--draft", pair[1], "--dtype", "float32", "--max-new-tokens", "4"]
    tokenizer = AutoTokenizer.from_pretrained(pair[0])
    for name, flags in (
        ("on", ["--system-prompt", "Be brief.", "--thinking", "on"]),
        ("off", ["--template", "chat", "--thinking", "off"]),
    ):
        assert main(["generate", "Say 7!", *flags, *models, "--json"]) == 0
        before, after = prompt_text(name)
        assert tokenizer.decode(read[-1]) == f"{before}7{after}"
    assert main(["generate", "x", "--template", "raw", "--thinking", "on", *models]) == 2
    assert "thinking needs the chat template" in capsys.readouterr().err
