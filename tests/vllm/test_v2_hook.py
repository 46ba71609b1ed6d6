"""The hook of `docs/contributing/vllm_hook.patch`, on vLLM's V2 rejection sampler with the patch applied."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from reprieve.policies.menu import Menu
from reprieve.rules.margin import margin_risk
from reprieve.vllm_plugin.rounds import WorkerRules
from tests.vllm import cpu_kernels
from tests.vllm.runner import V2
from tests.vllm.test_v2_decisions import Batch, V, admit, hooks_of, params_of, random_batch

pytestmark = pytest.mark.skipif(not V2, reason="of the V2 runner: RUNNER=v2")

PATCH = Path(__file__).parents[2] / "docs" / "contributing" / "vllm_hook.patch"
FOLDER = "vllm/v1/worker/gpu/spec_decode"
MODULE = "vllm.v1.worker.gpu.spec_decode.acceptance"


@pytest.fixture(scope="module")
def patched(tmp_path_factory):
    """The two patched modules, loaded next to the installed ones."""
    cpu_kernels.mend_interpreter()
    import vllm

    if not vllm.__version__.startswith("0.32."):
        pytest.skip("the patch is for vLLM 0.32")
    root = tmp_path_factory.mktemp("patched")
    (root / FOLDER).mkdir(parents=True)
    installed = Path(vllm.__file__).parents[1] / FOLDER / "rejection_sampler.py"
    (root / FOLDER / installed.name).write_bytes(installed.read_bytes())
    subprocess.run(["git", "apply", str(PATCH)], cwd=root, check=True)

    def load(name, file):
        spec = importlib.util.spec_from_file_location(name, root / FOLDER / file)
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    acceptance = load(MODULE, "acceptance.py")
    yield acceptance, load("patched_rejection_sampler", "rejection_sampler.py")
    del sys.modules[MODULE], sys.modules["patched_rejection_sampler"]


def verify(module, batch, heat, hook, draft_logits=None):
    """Tokens of each request, from the patched sampler's own verification."""

    def shaped(logits, slots, *rest):
        each = heat[slots.long()].unsqueeze(-1)
        return logits / torch.where(each == 0, 1.0, each)

    states = SimpleNamespace(temperature=SimpleNamespace(gpu=heat), seeds=SimpleNamespace(gpu=batch.seeds))
    sampler = SimpleNamespace(apply_sampling_params=shaped, sampling_states=states, use_fp64_gumbel=False)
    config = SimpleNamespace(
        num_speculative_tokens=int(batch.num_rows.max()) - 1,
        enable_adaptive_verification=False,
        rejection_sample_method="standard",
    )
    rejection = module.RejectionSampler(sampler, config, torch.device("cpu"))
    rejection.acceptance_hook = hook
    _, context = batch.context()
    _, sampled, num = rejection._verify(
        batch.logits.clone(),
        draft_logits,
        context.input_ids,
        context.pos,
        batch.ends,
        context.idx_mapping,
        context.idx_mapping_np,
        context.expanded_idx_mapping,
        context.expanded_local_pos,
        context.seq_lens_upper_bound_np,
        context.input_ids,
    )
    return [row[:count].tolist() for row, count in zip(sampled, num.tolist(), strict=True)]


def margin(acceptance, delta):
    """The rule `margin` as a hook."""

    def hook(context):
        judged = context.draft_sampled.roll(-1).long().clamp_min(0)
        accept = margin_risk(context.logits, judged) <= delta
        return acceptance.AcceptanceDecision(accept, torch.zeros_like(accept))

    return hook


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_rule_as_a_hook_decides_as_the_plugin_does(patched, temperature):
    acceptance, module = patched
    batch = random_batch(12, seed=4)
    heat = torch.full((64,), temperature)
    draft_logits = torch.randn(64, 3, V, generator=torch.Generator().manual_seed(2))
    processor = hooks_of(WorkerRules(Menu.load("margin:delta=1.5")))
    strict = hooks_of(WorkerRules(Menu.load("margin:delta=0")))
    for slot in range(12):
        admit(processor, slot, params_of(temperature))
        admit(strict, slot, params_of(temperature, {"reprieve_rule": "off"}))
    expected = batch.verify(processor, temperatures=heat, draft_logits=draft_logits)
    lossless = batch.verify(strict, temperatures=heat, draft_logits=draft_logits)
    assert verify(module, batch, heat, margin(acceptance, 1.5), draft_logits) == expected != lossless
    for idle in (None, lambda context: None, margin(acceptance, -1.0)):
        assert verify(module, batch, heat, idle, draft_logits) == lossless


def test_tokens_can_be_refused_and_impossible_ones_are_not_accepted(patched):
    acceptance, module = patched
    logits = torch.zeros(4, V)
    logits[:, 3] = 1.0
    masked = logits.clone()
    masked[1, 4] = -torch.inf
    batch = Batch([[3, 3, 3], [3, 4, 3], [5, -1, 3]], [logits, masked, logits])

    def hook(context):
        everything = torch.ones(len(context.logits), dtype=torch.bool)
        refused = torch.tensor([False, True, False, False] + [False] * 8)
        return acceptance.AcceptanceDecision(everything & ~refused, refused)

    # The second token is refused, masked or padding. Bonus rows are not judged, although the hook accepts there too.
    assert verify(module, batch, torch.zeros(64), hook) == [[3, 3], [3, 3], [5, 3]]
