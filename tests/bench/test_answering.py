"""Conversations and provenance."""

from __future__ import annotations

import pytest

from reprieve.backends.local import LocalEngine, spans_of
from reprieve.bench.arms import make_arms
from reprieve.bench.engine import RunConfig
from reprieve.bench.summary import summarise
from reprieve.engine.text import text_pieces
from reprieve.errors import SpecError
from reprieve.settings import PromptSettings, SamplingParams
from reprieve.tasks.prompting import PromptFormat
from tests.bench.toys import TwoTurns, run, run_arms, settings
from tests.kit.tiny import NumberTokenizer


class Template:
    chat_template = "yes"

    def apply_chat_template(self, messages, *, add_generation_prompt, tokenize):
        assert add_generation_prompt and not tokenize
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"

    def encode(self, text, *, add_special_tokens):
        assert not add_special_tokens
        return [ord(c) for c in text]


def test_conversations_use_the_chat_template_or_plain_text():
    first = {"role": "user", "content": "Hi"}
    chat = PromptFormat(Template(), PromptSettings(chat_template=True))
    messages = [first, *chat.next_turn("Yes?", "More")]
    assert "".join(map(chr, chat.encode(messages))) == "<user>Hi<assistant>Yes?<user>More<assistant>"
    plain = PromptFormat(NumberTokenizer())
    assert plain.encode([first | {"content": "1 2"}, *plain.next_turn("3", "4")]) == [1, 2, 3, 4]
    with pytest.raises(SpecError, match="chat template"):
        PromptFormat(NumberTokenizer(), PromptSettings(chat_template=True))


def test_later_turns_see_earlier_answers_and_are_counted(pair, tmp_path):
    arms = make_arms([], [4])
    config = RunConfig.of(LocalEngine(pair), arms, settings(limit=2))
    whole = run_arms(config, arms, LocalEngine(pair), TwoTurns(), tmp_path)
    record = next(r for r in whole.records if r.arm == "lossless")
    assert len(record.turns) == 2 and record.text == record.turns[1] and record.num_tokens == 24
    second = (
        arms[2]
        .decoder(pair)
        .generate([1, 2, 3, *map(int, record.turns[0].split()), 7, 8], SamplingParams(max_new_tokens=12))
    )
    assert second.text == record.turns[1]
    arm = summarise(whole).arms[2]
    assert arm.accuracy is None and arm.tokens_per_answer == 24


def test_spans_cover_the_text_and_merge_neighbours():
    kinds = ("target", "matched", "matched", "rescued")

    def spans(stop=()):
        return spans_of(list(zip(text_pieces(NumberTokenizer(), stop, [5, 11, 7, 40]), kinds, strict=True)))

    assert spans() == [[2, "t"], [5, "m"], [3, "r"]]
    assert spans(stop=("7",)) == [[2, "t"], [3, "m"]]
    assert spans_of([]) == []
    assert spans_of([("5 ", "matched"), ("", "target"), ("7", "matched")]) == [[3, "m"]]


def test_records_keep_rounds_and_spans(pair, tmp_path):
    whole = run(pair, make_arms(["margin:delta=3"], [4]), tmp_path)
    for record in whole.records:
        assert sum(record.round_lengths) == record.num_tokens
        assert sum(length for length, _ in record.spans) == len(record.text)
    assert any(code == "r" for record in whole.records for _, code in record.spans)
