"""The parts of vLLM's V1 model runner that are touched."""

from __future__ import annotations

from reprieve.vllm_plugin.probing import part_of

RUNNER = "vllm.v1.worker.gpu_model_runner"
_SAMPLER = "vllm.v1.sample.rejection_sampler"
PARTS = (
    part_of(
        _SAMPLER,
        "rejection_sample",
        "draft_token_ids num_draft_tokens max_spec_len cu_num_draft_tokens draft_probs target_logits "
        "bonus_token_ids sampling_metadata",
        called=True,
    ),
    part_of(_SAMPLER, "apply_sampling_constraints", "logits cu_num_draft_tokens sampling_metadata"),
    part_of(_SAMPLER, "generate_uniform_probs", "num_tokens num_draft_tokens generators device", called=True),
    part_of(RUNNER, "GPUModelRunner.sample_tokens", "self grammar_output"),
    part_of(RUNNER, "GPUModelRunner.propose_draft_token_ids", "self"),
    part_of(RUNNER, "GPUModelRunner._copy_draft_token_ids_to_cpu", "self scheduler_output zeros_only"),
    part_of(
        "vllm.v1.spec_decode.llm_base_proposer",
        "SpecDecodeBaseProposer._sample_draft_tokens",
        "self hidden_states sampling_metadata",
        called=True,
        optional=True,
    ),
)
