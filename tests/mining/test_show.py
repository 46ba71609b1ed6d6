"""Labels for people: pages, classes, annotations."""

from __future__ import annotations

import dataclasses
import json

import pytest

from reprieve.errors import ReprieveError
from reprieve.mining.show import shares_by_class, summarise_labels, terminal_text, token_class
from reprieve.mining.store import read_annotations
from tests.kit.mining import WordTokenizer
from tests.mining.toys import labels

A, B, C, AB, BC, SPACE = range(1, 7)


def test_labels_are_shown_with_alternatives_and_outcomes():
    tokenizer = WordTokenizer()
    item = dataclasses.replace(labels(), response_ids=(1, 5, 9, 5, 0))
    shown = terminal_text(item, tokenizer)
    assert "5[6]" in shown.plain.replace(" ", "")
    assert "✗ 6" in shown.plain
    red = [shown.plain[span.start : span.end] for span in shown.spans if "red" in str(span.style)]
    assert any("5" in text for text in red)
    harmless = dataclasses.replace(labels(important=False), response_ids=(1, 6, 9, 5, 0))
    assert "6[5]" in terminal_text(harmless, tokenizer).plain.replace(" ", "")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (" 12", "number"),
        ("=", "operator"),
        (" then", "word"),
        (".", "punctuation"),
        ("\n", "space"),
        ("<eos>", "end of text"),
        ("a1", "other"),
    ],
)
def test_token_classes(text, kind):
    assert token_class(text) == kind


def test_summaries_count_labels_and_classes():
    items = [labels("a"), labels("b", False), labels("c", None)]
    summary = summarise_labels(items)
    assert (summary.num_labelled, summary.num_important, summary.num_unlabelled) == (2, 1, 1)
    assert "1 important: 50.0%" in summary.sentence()
    assert shares_by_class(items, WordTokenizer()) == [("number", 2, 1)]
    assert "no labelled mismatches" in summarise_labels([]).sentence()


def test_annotations_label_every_token_by_its_span(tmp_path, bundled_pair):
    tokenizer = bundled_pair.tokenizer
    path = tmp_path / "a.jsonl"
    response = " First, 5+3=9. The final answer is 9."
    start = response.index("9.")
    path.write_text(
        json.dumps({"id": "x", "prompt": "Question: ?\nAnswer:", "response": response, "wrong": [[start, start + 1]]})
        + "\n"
    )
    (found,) = read_annotations(path, tokenizer)
    path.write_text(path.read_text() * 2)
    with pytest.raises(ReprieveError, match="got 'x' twice"):
        read_annotations(path, tokenizer)
    wrong = [tokenizer.decode([m.draft_id]) for m in found.mismatches if m.important]
    assert wrong == ["9"]
    assert len(found.mismatches) == len(found.response_ids)
    for row, says in (
        ({"prompt": "p", "response": "r"}, "wrong is missing"),
        ({"prompt": "p", "response": "r", "wrong": 5}, "wrong must be a list"),
        ({"prompt": "p", "response": "r", "wrong": [["a", 1]]}, "a span must be"),
        (
            {"prompt": "p", "response": "r", "wrong": [[0, 9]]},
            r"a span must be \[start, end\) in \[0, 1\], got \[0, 9\]",
        ),
    ):
        path.write_text(json.dumps(row))
        with pytest.raises(ReprieveError, match=says):
            read_annotations(path, tokenizer)
