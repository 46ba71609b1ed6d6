"""Answers as terminals, notebooks and files show them."""

import pickle

import pytest

from reprieve.display import html_of
from reprieve.errors import ReprieveError
from reprieve.types import DecodingStats, Generation

QUESTION = "Question: Anna has 23 apples. She buys 18 more apples. How many apples does Anna have now?\nAnswer:"


@pytest.fixture(scope="module")
def answer(bundled_pair):
    made = bundled_pair.decoder("margin:delta=6", num_draft_tokens=8).generate(QUESTION)
    assert made.num_rescued > 0
    return made


def test_pieces_split_the_text_by_token(answer, bundled_pair):
    assert "".join(text for text, _ in answer.pieces) == answer.text
    assert [kind for _, kind in answer.pieces] == [token.provenance.value for token in answer.tokens]
    stopped = bundled_pair.decoder().generate(QUESTION, stop=("final answer",))
    assert "".join(text for text, _ in stopped.pieces) == stopped.text


def test_a_file_has_each_rescued_token_in_double_brackets(answer, capsys):
    answer.show()
    shown = capsys.readouterr().out
    rescued = [text for text, kind in answer.pieces if kind == "rescued" and text]
    assert all(f"[[{text}]]" in shown for text in rescued) and shown.count("[[") == len(rescued) + 1
    assert f"{answer.num_rescued} rescued" in shown and "\x1b" not in shown


def test_a_terminal_has_colours(answer, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    answer.show()
    shown = capsys.readouterr().out
    assert "\x1b[1;33m" in shown and "[[" not in shown


def test_a_notebook_has_rescued_tokens_marked_and_text_escaped(answer):
    assert answer._repr_html_().count('title="rescued"') == len(
        [1 for text, kind in answer.pieces if kind == "rescued"]
    )
    page = html_of([("<script>", "rescued"), ("&", "target"), ("<b>", "matched")], "<i>")
    assert "<script>" not in page and "<b>" not in page and "<i>" not in page
    assert "&lt;script&gt;" in page and "&amp;" in page


def test_a_generation_without_a_tokenizer_says_so_and_others_can_be_pickled(answer):
    bare = Generation(prompt_ids=[1], tokens=[], text="", finish_reason="eos", **DecodingStats.total(()).stats)
    assert bare._repr_html_() is None
    with pytest.raises(ReprieveError, match="has no tokenizer"):
        bare.show()
    assert pickle.loads(pickle.dumps(answer)).pieces == answer.pieces
