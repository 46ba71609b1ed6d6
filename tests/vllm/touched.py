"""Print the attributes of vLLM that our code replaces or adds, once an engine with a rule is up."""

import functools
import json
import sys
import types

from tests.vllm.conftest import make_llm, worker_of

OURS = "/reprieve/vllm_plugin/"


def is_ours(value):
    """Return whether a call runs our code first; only functions are inspected, as other objects may fake attributes."""
    inner = value.func if isinstance(value, functools.partial) else value
    return isinstance(inner, types.FunctionType) and OURS in inner.__code__.co_filename


def of_modules():
    for name, module in list(sys.modules.items()):
        if module is None or not name.startswith("vllm."):
            continue
        for attribute, value in list(vars(module).items()):
            if is_ours(value):
                yield f"{name}.{attribute}"
            if isinstance(value, type) and value.__module__ == name:
                for member, held in list(vars(value).items()):
                    if is_ours(held) or member.startswith("reprieve"):
                        yield f"{name}.{value.__qualname__}.{member}"


def of_instances(*instances):
    for instance in instances:
        for member, held in vars(instance).items():
            if is_ours(held):
                owner = next(kind for kind in type(instance).__mro__[::-1] if member in vars(kind))
                yield f"{owner.__module__}.{owner.__qualname__}.{member}"


def main():
    llm = make_llm("fuzzy:threshold=0.4")  # reads the draft's probabilities
    runner = worker_of(llm).model_runner
    parts = [runner, runner.sampler, getattr(runner, "drafter", None) or runner.speculator]
    print(json.dumps(sorted({*of_modules(), *of_instances(*parts)})))


if __name__ == "__main__":
    main()
