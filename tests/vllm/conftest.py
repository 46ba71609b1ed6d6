"""vLLM engines of the bundled pair inside this process, so that tests can inspect and replace the rule.

The same tests run on both model runners: `RUNNER=v2` selects V2, which runs under Triton's interpreter, about ten times
slower, on fewer problems.
"""

from tests.vllm.runner import V2  # sets the environment that vLLM reads when it is imported

# isort: split
import functools
import os
from pathlib import Path

import pytest
from vllm import LLM

from reprieve.policies.menu import Menu
from reprieve.vllm_plugin import startup
from tests.kit.pairs import ARITHMETIC
from tests.vllm import tested

K = 8


def pytest_sessionfinish(session, exitstatus):
    """Note in the table of tested versions that a whole file passed."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    files = {Path(item.path).name for item in session.items}
    num_passed = len(reporter.stats.get("passed", []))
    whole = not session.config.getoption("keyword") and not any("::" in given for given in session.config.args)
    if os.environ.get("RECORD_TESTED") == "1" and exitstatus == 0 and num_passed and len(files) == 1 and whole:
        from vllm.version import __version__

        tested.record(__version__.partition("+")[0], "v2" if V2 else "v1", files.pop(), num_passed)


_ALIVE = []  # dropping one engine would destroy the process group of the others


def make_llm(source=None, *, engine=None, **speculative):
    """A vLLM engine on the bundled pair; `source` configures the plugin, None leaves it off."""
    spec = {
        "method": "draft_model",
        "model": str(ARITHMETIC.role_folder("draft")),
        "num_speculative_tokens": K,
        **({"draft_sample_method": "probabilistic"} if V2 and "ngram" not in str(speculative.get("method")) else {}),
        **speculative,
    }
    settings = {
        "model": str(ARITHMETIC.role_folder("target")),
        "speculative_config": spec,
        "enforce_eager": True,
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 16,
        "seed": 0,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "distributed_executor_backend": "uni",
        "per_request_spec_decode_metrics": "summary",
        **({"max_num_batched_tokens": 1024} if V2 else {}),  # slots are padded up to it, at every drafted token
        "additional_config": {} if source is None else {"reprieve": source},
    }
    _ALIVE.append(LLM(**{**settings, **(engine or {})}))
    return _ALIVE[-1]


def worker_of(llm):
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


def rules_of(llm):
    return worker_of(llm).model_runner.reprieve.rules


def use_rule(llm, source):
    """Replace the rule of a running engine, which must have started with a rule that reads all inputs (fuzzy)."""
    worker = worker_of(llm)
    rules = startup.worker_rules(Menu.load(source, target=ARITHMETIC.name), worker)
    worker.model_runner.reprieve.rules = rules
    return rules


@functools.cache
def local_pair():
    from reprieve.engine import load_pair

    return load_pair(ARITHMETIC.name)


def local_decoder(spec):
    return local_pair().decoder(spec, num_draft_tokens=K)


def texts(outputs):
    return [output.outputs[0].text for output in outputs]


@pytest.fixture(scope="session")
def problems():
    from reprieve.tasks import load_task

    return load_task("arithmetic").problems("test", 100)
