"""vLLM's kernels on a CPU, with a fix for 0.32, whose `expand_kernel` discards its result (issue 55005)."""

import types

from vllm.triton_utils.dispatcher import _registry, register_kernels

EXPAND = "vllm.v1.sample.rejection_sampler.expand_kernel"


def expand(output, values, ends, replace_from, replace_to, *rest):
    import torch

    counts = torch.diff(ends, prepend=torch.zeros_like(ends[:1]))
    values = torch.where(values == replace_from, replace_to, values) if replace_from != replace_to else values
    output.copy_(values.repeat_interleave(counts.long()))


def mend():
    """Apply the fix; call it once per process, before sampling above temperature 0."""
    from vllm.platforms import current_platform

    if "vllm.v1.sample.rejection_sampler.rejection_greedy_sample_kernel" not in _registry:
        current_platform.register_triton_kernel_overrides()
    if _registry.get(EXPAND, (None, None))[1] is not expand:
        register_kernels({EXPAND: expand})


def mend_interpreter():
    """Replace what Triton's interpreter cannot run: a device library of V2's rejection sampler, and the kernel for
    top-k and top-p, which has an equivalent in torch.
    """
    import vllm.v1.worker.cpu.shm  # noqa: F401  # vLLM's own stand-in for pinned memory, which its CPU worker imports
    from vllm.triton_utils import tl
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils

    rejection_sampler_utils.tldevice = types.SimpleNamespace(log1p=lambda value: tl.log(1.0 + value))
    in_torch = topk_topp_sampler.apply_top_k_top_p_pytorch
    topk_topp_sampler.apply_top_k_top_p_triton = lambda logits, k, p, **hints: in_torch(logits, k, p)  # hints from 0.33
