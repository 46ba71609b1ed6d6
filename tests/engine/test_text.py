"""Stop texts: found across token boundaries, held back no longer than needed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprieve.engine.text import TextStream
from reprieve.errors import SpecError
from reprieve.settings import MAX_STOP_LENGTH, SamplingParams


class Letters:
    """One token per letter."""

    def decode(self, ids, *, skip_special_tokens=False):
        return "".join(map(chr, ids))


@given(st.text("ab", max_size=40), st.lists(st.text("ab", min_size=1, max_size=6), max_size=4))
def test_the_text_ends_where_the_first_stop_text_begins(text, stops):
    stream = TextStream(Letters(), tuple(stops))
    shown, pushed = "", ""
    for letter in text:
        pushed += letter
        shown += stream.push(ord(letter))
        found = [at for stop in stops if (at := pushed.find(stop)) >= 0]
        if found:
            assert stream.stopped and stream.text == pushed[: min(found)] == shown
            break
        held = [size for stop in stops for size in range(1, len(stop)) if pushed.endswith(stop[:size])]
        assert shown == pushed[: len(pushed) - max(held, default=0)], "no more is held back than could be a stop text"
    else:
        assert not stream.stopped and shown + stream.finish() == text


@pytest.mark.parametrize("stop", [("",), ("x" * (MAX_STOP_LENGTH + 1),), ("x",) * 65, (3,), (None,), (b"x",)], ids=repr)
def test_stop_texts_are_bounded(stop):
    with pytest.raises(SpecError, match="stop must hold"):
        SamplingParams(stop=stop)


def test_invalid_utf8_is_released_in_linear_time():
    decoded = []

    class Bytes:
        def decode(self, token_ids, *, skip_special_tokens=False):
            decoded.append(len(token_ids))
            return bytes(token_ids).decode(errors="replace")

    stream = TextStream(Bytes())
    released = "".join(stream.push(0x80) for _ in range(4000)) + stream.finish()
    assert released == "\ufffd" * 4000
    assert max(decoded) <= 20, "a window, not all of it"
