"""The cache of one sequence."""

import pytest
import torch
from transformers.cache_utils import DynamicLayer

from reprieve.models.cache import RollbackCache
from tests.kit.tiny import tiny_model


def begun(layer, key_states, value_states, *args, **kwargs):
    layer.lazy_initialization(key_states, value_states)
    raise MemoryError


def test_a_failed_first_forward_leaves_a_cache_that_can_be_used(monkeypatch):
    model, cache, ids = tiny_model(), RollbackCache(), torch.arange(2, 9)[None]
    with torch.no_grad():
        expected = model(ids).logits
        with monkeypatch.context() as patch:
            patch.setattr(DynamicLayer, "update", begun)
            with pytest.raises(MemoryError):
                model(ids, past_key_values=cache)
        cache.truncate(0)
        assert torch.equal(model(ids, past_key_values=cache).logits, expected)
        cache.truncate(3)
        torch.testing.assert_close(model(ids[:, 3:], past_key_values=cache).logits, expected[:, 3:])
        assert cache.get_seq_length() == 7
