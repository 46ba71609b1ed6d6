"""Request bodies: limits, and errors that name the field and its value."""

import json

import pytest

from reprieve.playground.bodies import ChatBody, CompletionBody, read_body
from reprieve.playground.protocol import Prompts
from reprieve.policies.policy import RequestError
from tests.kit.chats import byte_tokenizer

LARGE = 100_000
USER = {"role": "user", "content": "Hello"}


def completion(**fields):
    return json.dumps({"prompt": "x", **fields}).encode()


def test_large_valid_bodies_are_read():
    assert len(read_body(CompletionBody, completion(user="u" * LARGE)).user) == LARGE
    messages = [{"role": "user", "content": "u" * 9}] * 2000
    assert len(read_body(ChatBody, json.dumps({"messages": messages}).encode()).messages) == 2000


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"surprise": "n" * LARGE}, "surprise"),
        ({"prompt": [[]] * LARGE}, "at most 32768 lists"),
        ({"prompt": ["a"] * LARGE}, "at most 65536 texts"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_large_bodies_are_refused_with_a_short_message(fields, named):
    with pytest.raises(RequestError, match=named) as error:
        read_body(CompletionBody, completion(**fields))
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (CompletionBody, {"foo": 1}, "foo is not a field of this request, got 1"),
        (CompletionBody, {"max_tokens": 8.0}, "max_tokens must be a whole number, got 8.0"),
        (CompletionBody, {"max_tokens": 0}, "max_tokens must be 1 or more, got 0"),
        (CompletionBody, {"n": None}, "n must be a whole number, got null"),
        (CompletionBody, {"temperature": "1"}, 'temperature must be a number, got "1"'),
        (CompletionBody, {"temperature": True}, "temperature must be a number, got true"),
        (CompletionBody, {"top_p": 0}, "top_p must be above 0.0, got 0"),
        (CompletionBody, {"stream": "yes"}, 'stream must be true or false, got "yes"'),
        (CompletionBody, {"echo": True}, "echo must be False, got true"),
        (CompletionBody, {"suffix": "x"}, 'suffix is not supported, got "x"'),
        (CompletionBody, {"reprieve_threshold": "1"}, 'reprieve_threshold must be a number, got "1"'),
        (ChatBody, {"prompt": "x", "messages": [USER]}, 'prompt is not a field of this request, got "x"'),
        (ChatBody, {}, "messages is required"),
        (
            ChatBody,
            {"messages": [{"role": "tool", "content": "x"}]},
            "messages.0.role must be 'system', 'developer', 'user' or 'assistant', got \"tool\"",
        ),
        (ChatBody, {"messages": [USER], "chat_template_kwargs": 1}, "chat_template_kwargs must be an object, got 1"),
        (
            ChatBody,
            {"messages": [USER], "chat_template_kwargs": {"foo": 1}},
            "chat_template_kwargs.foo is not a field of this request",
        ),
        (
            ChatBody,
            {"messages": [USER], "chat_template_kwargs": {"enable_thinking": "yes"}},
            'chat_template_kwargs.enable_thinking must be true or false, got "yes"',
        ),
    ],
)
def test_a_field_that_is_refused_is_named_with_its_value(kind, fields, message):
    body = {"prompt": "x", **fields} if kind is CompletionBody else fields
    with pytest.raises(RequestError) as refused:
        read_body(kind, json.dumps(body).encode())
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("read", "said"),
    [
        (lambda prompts: prompts.plain("n" * LARGE), "prompt must hold at most 100 tokens, got 100000 characters"),
        (lambda prompts: prompts.plain([1] * LARGE), "prompt must hold at most 100 tokens, got 100000"),
        (lambda prompts: prompts.chat([("user", "n" * LARGE)]), "messages must hold at most 100 tokens, got 100000"),
    ],
)
def test_prompts_longer_than_the_context_are_refused_before_they_are_tokenized(read, said, monkeypatch):
    tokenizer = byte_tokenizer()
    monkeypatch.setattr(tokenizer, "encode", lambda *_: pytest.fail("it was tokenized"))
    with pytest.raises(RequestError, match=said):
        read(Prompts(tokenizer, max_positions=101, vocab_size=500, wrap=None))


def test_texts_may_hold_any_number_of_brackets_commas_and_quotes():
    for text in ("[" * LARGE, "," * 200_000, '{"a": ' * LARGE, "\\" * LARGE, '\\"[' * LARGE):
        assert read_body(CompletionBody, completion(user=text)).user == text
