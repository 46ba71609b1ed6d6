"""Forwards over several rows."""

from concurrent.futures import ThreadPoolExecutor

from reprieve.models.row_model import RowModel, Unread


def test_forwards_of_several_threads_leave_the_models_attention_as_it_was(target):
    before = target.config._attn_implementation

    def read(number):
        RowModel(target, 1).prefill([Unread(0, 0, [1, 2, 3 + number])])

    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            list(pool.map(read, range(16)))
    assert target.config._attn_implementation == before
