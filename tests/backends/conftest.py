"""The bundled task in the pair's prompt format."""

import pytest

from reprieve.settings import PromptSettings
from reprieve.tasks import load_task
from reprieve.tasks.prompting import with_prompts


@pytest.fixture
def task(bundled_pair):
    return with_prompts(load_task("arithmetic"), bundled_pair.tokenizer)


@pytest.fixture
def short(bundled_pair):
    """The task with answers of 28 tokens, for tests that do not read them."""
    return with_prompts(load_task("arithmetic"), bundled_pair.tokenizer, PromptSettings(max_new_tokens=28))
