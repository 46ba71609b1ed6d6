"""Log-probabilities in responses: every alternative, character offsets, and the bytes of each token."""

import pytest

from reprieve.playground.protocol import Prompts, Replies
from reprieve.types import Provenance, Token
from tests.kit.chats import byte_tokenizer


class Words:
    """SentencePiece-like tokens: each has a leading space, which is dropped at the start of a text."""

    vocabulary = ("hello", "world", "world", "!")

    @property
    def tokenizer(self):
        return self

    def decode(self, token_ids, skip_special_tokens=False):
        return " ".join(self.vocabulary[token_id] for token_id in token_ids)

    def token_bytes(self, token_id):
        return None


@pytest.fixture(scope="module")
def prompts():
    return Prompts(byte_tokenizer(), max_positions=100, vocab_size=500, wrap=None)


def token(token_id, alternatives=()):
    return Token(token_id, Provenance.TARGET, logprob=-0.5, alternatives=tuple(alternatives))


def replies(texts, *, chat, num_logprobs):
    return Replies(chat, "m", texts, "lossless", num_prompt_tokens=1, num_logprobs=num_logprobs, provenance=False)


def completion(texts, tokens):
    return replies(texts, chat=False, num_logprobs=5)._logprobs(0, tokens)


def test_words_keep_their_leading_space_and_offsets_count_it():
    found = completion(Words(), [token(0), token(1), token(3)])
    assert found["tokens"] == ["hello", " world", " !"]
    assert found["text_offset"] == [0, 5, 11]


def test_tokens_with_the_same_text_are_both_returned():
    (top,) = completion(Words(), [token(0, [(1, -1.0), (2, -2.0), (3, -3.0)])])["top_logprobs"]
    assert top == {"world": -1.0, "token_id:2": -2.0, "!": -3.0}


def test_offsets_behind_an_emoji_count_characters(prompts):
    ids = prompts.plain("a😀b")
    found = completion(prompts, [token(token_id) for token_id in ids])
    assert found["text_offset"][0] == 0 and found["text_offset"][-1] == 2


def test_half_a_character_has_its_own_bytes(prompts):
    ids = prompts.plain("😀")
    chat = replies(prompts, chat=True, num_logprobs=0)
    content = chat._logprobs(0, [token(token_id) for token_id in ids])["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content) == "😀".encode()
