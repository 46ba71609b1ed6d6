"""Answers of a V2 engine with N tensor-parallel ranks, printed: `RUNNER=v2 python -m tests.vllm.ranks N`."""

import json
import os
import sys

import tests.vllm.runner  # noqa: F401  # the environment
from tests.kit.pairs import ARITHMETIC

RULES = ("judge:threshold=0.1", "random:rate=0.7", "fuzzy:threshold=0.3", "margin:delta=3")


def main():
    num = int(sys.argv[1])
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_CPU_OMP_THREADS_BIND="|".join(map(str, range(num))))
    from vllm import LLM, SamplingParams

    from reprieve.tasks import load_task

    llm = LLM(
        model=str(ARITHMETIC.role_folder("target")),
        speculative_config={
            "method": "draft_model",
            "model": str(ARITHMETIC.role_folder("draft")),
            "num_speculative_tokens": 8,
            "draft_sample_method": "probabilistic",
        },
        enforce_eager=True,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=4,
        seed=0,
        enable_prefix_caching=False,
        tensor_parallel_size=num,
        distributed_executor_backend="mp",
        additional_config={"reprieve": {"rules": list(RULES)}},
        per_request_spec_decode_metrics="summary",
        disable_log_stats=False,
    )
    prompts = [problem.prompt for problem in load_task("arithmetic").problems("test", len(RULES))]
    params = [
        SamplingParams(max_tokens=16, temperature=0, extra_args={"reprieve_rule": spec.partition(":")[0]})
        for spec in RULES
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    made = [
        (list(output.outputs[0].token_ids), output.outputs[0].spec_decode_metrics.to_dict()["num_rescued_tokens"])
        for output in outputs
    ]
    failures = [status["failures"] for status in llm.collective_rpc("reprieve_status")]
    print("MADE", json.dumps({"answers": made, "failures": failures}))


if __name__ == "__main__":
    main()
