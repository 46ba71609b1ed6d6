"""The parts of vLLM's V2 model runner that are touched."""

from __future__ import annotations

from reprieve.vllm_plugin.probing import CALLED, OVERRIDDEN, part_of

_V2 = "vllm.v1.worker.gpu"
RUNNER = f"{_V2}.model_runner"
PARTS = (
    part_of(
        f"{_V2}.spec_decode.rejection_sampler_utils",
        "rejection_sample",
        "target_logits draft_logits draft_sampled cu_num_logits pos idx_mapping expanded_idx_mapping "
        "expanded_local_pos temperature seed num_speculative_steps",
        called=True,
        where=f"{_V2}.spec_decode.rejection_sampler",
    ),
    part_of(
        f"{_V2}.sample.sampler",
        "Sampler.apply_sampling_params",
        "self logits expanded_idx_mapping idx_mapping idx_mapping_np pos input_ids expanded_local_pos "
        "seq_lens_upper_bound_np",
        called=True,
    ),
    part_of(
        f"{_V2}.sample.logits_processor.interface",
        "LogitsProcessor.add_request",
        "self req_idx sampling_params",
        OVERRIDDEN,
    ),
    part_of(f"{_V2}.sample.logits_processor.interface", "LogitsProcessor.apply", "self logits ctx", OVERRIDDEN),
    part_of(f"{_V2}.sample.gumbel", "tl_rand32", "seed offset includes_zero", CALLED),
    part_of(RUNNER, "GPUModelRunner.sample_tokens", "self grammar_output"),
    part_of(RUNNER, "GPUModelRunner.finish_requests", "self scheduler_output"),
    part_of(f"{_V2}.async_utils", "AsyncOutput.get_output", "self", optional=True),
)
