"""Request bodies: an error names the field, what it takes and what was given."""

from __future__ import annotations

import json

import pytest

from reprieve.playground.bodies import ChatBody, CompletionBody, read_body
from reprieve.policies.policy import RequestError

USER = {"role": "user", "content": "Hello"}


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
    ],
)
def test_a_field_that_is_refused_is_named_with_its_value(kind, fields, message):
    body = {"prompt": "x", **fields} if kind is CompletionBody else fields
    with pytest.raises(RequestError) as refused:
        read_body(kind, json.dumps(body).encode())
    assert str(refused.value) == message
