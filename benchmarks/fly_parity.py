"""Compare the `fly` rule with FLy in vLLM 0.33 or later, block by block on the same logits and the same draws.

    .venv-vllm/bin/python benchmarks/fly_parity.py FOLDER      # FOLDER holds the package `vllm`, unpacked

Both of vLLM's rejection samplers (V1, V2) run in Triton's interpreter, ours runs as in the plugin. Blocks are synthetic
(KINDS) or recorded from the bundled pair. A block agrees if both accept the same number of drafted tokens; the token
that follows is neither drawn nor compared. Writes results.json.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import importlib.metadata
import itertools
import json
import math
import os
import sys
import types
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

INTERPRETER = Path(__file__).parents[1] / "tests" / "vllm" / "interpreter"  # Triton's stub of a CPU backend
SIZE = 64  # vocabulary of synthetic blocks
KINDS = ("peaked", "flat", "mixed", "agreeing", "opposed", "ties", "even", "padded", "short", "masked", "unproposed")
MODES = ("greedy", "sampled", "certain")  # certain: sampled, with a drafter without probabilities, such as n-grams
THETAS = (0.0, 0.3, math.log(2))
TEMPERATURE = 0.5  # dividing by it is exact
ROUNDING = 1e-5


def use(folder: Path) -> None:
    """Make `vllm` importable from a folder of sources, as a CPU build with Triton's interpreter."""
    sys.path[:0] = [str(folder), str(INTERPRETER)]
    os.environ |= {"TRITON_INTERPRET": "1", "VLLM_PLUGINS": "", "VLLM_LOGGING_LEVEL": "ERROR"}
    installed: Any = importlib.metadata.version
    version = f"{version_of(folder)}+cpu"

    def version_or(name: str) -> str:
        return version if name == "vllm" else str(installed(name))

    setattr(importlib.metadata, "version", version_or)  # noqa: B010


def version_of(folder: Path) -> str:
    """Return the version of the vLLM in a folder, from its metadata; 0.33 without metadata."""
    found = [path.name.removesuffix(".dist-info") for path in folder.glob("vllm-*.dist-info")]
    return found[0].removeprefix("vllm-") if found else "0.33"


@dataclass(frozen=True)
class Blocks:
    """B drafted blocks of up to K tokens. All scores are after temperature."""

    kinds: list[str]  # [B]
    lengths: list[int]  # [B]
    token_ids: Any  # [B, K], int64; -1 is padding
    scores: Any  # [B, K, V]
    draft_scores: Any  # [B, K, V]

    def flat(self, values):
        """Concatenate the blocks, each cut to its length: [B, K, ...] to [N, ...]."""
        return torch.cat([row[:length] for row, length in zip(values, self.lengths, strict=True)])


def made_up(num: int, k: int, draw) -> Blocks:
    """Return `num` synthetic blocks of each kind."""
    kinds = [kind for kind in KINDS for _ in range(num)]
    rows = {kind: torch.tensor([one == kind for one in kinds]) for kind in KINDS}
    shape = (len(kinds), k)
    scale = torch.full(shape, 2.0)
    scale[rows["peaked"]], scale[rows["flat"]] = 6.0, 0.3
    scale[rows["mixed"]] = 6 * torch.rand(num, k, generator=draw)
    scores = scale.unsqueeze(-1) * torch.randn(*shape, SIZE, generator=draw)
    scores[rows["ties"]] = scores[rows["ties"]].round()
    scores[rows["even"]] = -math.inf
    scores[rows["even"], :, :2] = 1.0  # two equally likely tokens: entropy ln 2, which is one of THETAS
    draft = scores + torch.randn(*shape, SIZE, generator=draw)
    draft[rows["even"]] = torch.randn(num, k, SIZE, generator=draw)
    first, second = scores.topk(2, -1).indices.unbind(-1)
    token_ids = torch.where(torch.rand(shape, generator=draw) < 0.75, first, second)
    random_ids = torch.randint(SIZE, shape, generator=draw)
    token_ids = torch.where(torch.rand(shape, generator=draw) < 0.1, random_ids, token_ids)
    token_ids[rows["agreeing"]], token_ids[rows["opposed"]] = first[rows["agreeing"]], second[rows["opposed"]]
    selected = torch.rand(shape, generator=draw) < 0.3
    for kind, values in (("masked", scores), ("unproposed", draft)):
        hit = selected & rows[kind].unsqueeze(-1)
        chosen = values.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
        values.scatter_(-1, token_ids.unsqueeze(-1), torch.where(hit, -math.inf, chosen).unsqueeze(-1))
    ends = torch.randint(1, k + 1, (len(kinds),), generator=draw)
    padded = rows["padded"].unsqueeze(-1) & (torch.arange(k) >= ends.unsqueeze(-1))
    lengths = torch.where(rows["short"], ends.clamp_max(max(1, k - 1)), k).tolist()
    return Blocks(kinds, lengths, token_ids.masked_fill(padded, -1), scores, draft)


def recorded(num: int, k: int) -> Blocks:
    """Return blocks that the bundled pair drafted and verified on its task, at temperature 1."""
    from reprieve.bundles import bundle_of
    from reprieve.engine import SamplingParams, load_pair
    from reprieve.tasks import load_task

    engine: Any = importlib.import_module("reprieve.engine.decoder")
    rounds, accept = [], engine.accept

    def keep(rule, block, evidence, checked, **more):
        if block.num_tokens:
            rounds.append((block.token_ids, evidence.target_scores, evidence.draft_scores))
        return accept(rule, block, evidence, checked, **more)

    engine.accept = keep
    try:
        decoder = load_pair("reprieve/miniature").decoder("fly:theta=0,window=1", num_draft_tokens=k)
        params = SamplingParams(temperature=1.0, max_new_tokens=160)
        for problem in load_task(bundle_of("reprieve/miniature").task).problems("test", num):
            if len(rounds) < num:
                decoder.generate(problem.prompt, params)
    finally:
        engine.accept = accept
    rounds = rounds[:num]
    lengths = [len(token_ids) for token_ids, *_ in rounds]

    def padded(field):
        return torch.stack([F.pad(r[field].T, (0, k - len(r[0]))).T.contiguous() for r in rounds])

    return Blocks(["recorded"] * len(rounds), lengths, padded(0), padded(1).float(), padded(2).float())


def numbers(blocks: Blocks, num_bonus: int):
    """Return each row's block and column, and each block's end; every block has `num_bonus` further rows."""
    counts = torch.tensor(blocks.lengths) + num_bonus
    slots = torch.arange(len(counts)).repeat_interleave(counts)
    ends = counts.cumsum(0)
    return slots, torch.arange(int(ends[-1])) - (ends - counts)[slots], ends


def v1(blocks: Blocks, mode: str, window: int, theta: float, draws) -> list[int]:
    """Return how many tokens of each block vLLM's V1 sampler accepts."""
    from vllm.v1.sample import rejection_sampler as module

    num, k, size = blocks.scores.shape
    module.generate_uniform_probs = lambda *rest: draws.clone()  # the sampler overwrites its draws
    module.sample_recovered_tokens = lambda k, lengths, *rest: torch.zeros(sum(lengths), dtype=torch.int32)
    output = module.rejection_sample(
        blocks.flat(blocks.token_ids).int(),
        blocks.lengths,
        k,
        numbers(blocks, 0)[2].int(),
        blocks.flat(blocks.draft_scores).softmax(-1).contiguous() if mode == "sampled" else None,
        blocks.flat(blocks.scores).contiguous(),
        torch.full((num, 1), size - 1),
        types.SimpleNamespace(
            all_greedy=mode == "greedy", all_random=mode != "greedy", temperature=torch.ones(num), generators={}
        ),
        fly_window_size=window,
        fly_entropy_threshold=theta,
    )
    return [int((row != -1).sum()) - 1 for row in output]


def v2(blocks: Blocks, mode: str, window: int, theta: float, seeds) -> list[int]:
    """Return how many tokens of each block vLLM's V2 sampler accepts."""
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils as module

    num, k, size = blocks.scores.shape
    module._resample_kernel = collections.defaultdict(lambda: lambda *rest, **more: None)
    slots, columns, ends = numbers(blocks, 1)
    logits, fed = torch.zeros(len(slots), size), torch.zeros(len(slots), dtype=torch.int32)
    logits[columns < torch.tensor(blocks.lengths)[slots]] = blocks.flat(blocks.scores)
    fed[columns > 0] = blocks.flat(blocks.token_ids).int()  # row r judges the token that row r + 1 reads
    _, num_sampled = module.rejection_sample(
        logits,
        blocks.draft_scores * TEMPERATURE if mode == "sampled" else None,
        fed,
        F.pad(ends, (1, 0)).int(),
        columns + 100,
        torch.arange(num, dtype=torch.int32),
        slots.int(),
        columns.int(),
        torch.full((num,), 0.0 if mode == "greedy" else TEMPERATURE),
        seeds,
        k,
        fly_window_size=window,
        fly_entropy_threshold=theta,
    )
    return [int(count) - 1 for count in num_sampled]  # the last token is the target's own


def v2_draws(blocks: Blocks, seeds):
    """Return the draws of vLLM's V2 sampler: they depend on seed and position alone."""
    from reprieve.vllm_plugin.v2_processor import uniforms_of

    slots, columns, _ = numbers(blocks, 0)
    return uniforms_of(seeds, slots.int(), columns + 100)


def proposals(blocks: Blocks, mode: str):
    """Return the probability that each token was proposed with: [N]; None for a drafter without probabilities."""
    from reprieve.types import gather_token

    draft, token_ids = blocks.flat(blocks.draft_scores), blocks.flat(blocks.token_ids).clamp_min(0)
    return gather_token(draft.softmax(-1), token_ids) if mode == "sampled" else None


def ours(blocks: Blocks, mode: str, rule, draws) -> list[int]:
    """Return how many tokens of each block the rule accepts, as the plugin applies it."""
    from reprieve.rules import RiskBudget
    from reprieve.rules.batch import Batch, BatchRequest, decide
    from reprieve.types import gather_token

    token_ids, scores = blocks.flat(blocks.token_ids), blocks.flat(blocks.scores)
    batch = Batch(
        token_ids=token_ids,
        block_sizes=blocks.lengths,
        scores=scores,
        logits=scores,
        possible=gather_token(scores, token_ids.clamp_min(0)) > -math.inf,
        proposal_probs=proposals(blocks, mode),
        uniforms=None if mode == "greedy" else draws,
        num_draft_tokens=blocks.scores.shape[1],
    )
    greedy = mode == "greedy"
    rows = [BatchRequest("fly", rule, length, greedy, True, RiskBudget.of(rule)) for length in blocks.lengths]
    decisions = decide(rows, batch)
    passes = (decisions.accept | decisions.lossless) & (token_ids >= 0)
    return [int(flags.long().cumprod(0).sum()) for flags in passes.split(blocks.lengths)]


def cause(blocks: Blocks, mode: str, window: int, theta: float, draws, number: int, at: int) -> str:
    """Return the reason for a disagreement, from the first token that differs."""
    from reprieve.rules.fly import truncated_entropy

    start = sum(blocks.lengths[:number])
    around = slice(start + at, start + min(blocks.lengths[number], at + window + 1))
    scores, token_ids = blocks.flat(blocks.scores)[around].double(), blocks.flat(blocks.token_ids)[around].clamp_min(0)
    if mode != "greedy":
        q = proposals(blocks, mode)
        q = torch.ones(len(scores)) if q is None else q[around]
        p = scores.softmax(-1).gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
        if (q == 0).any():
            return "a token that the drafter gives no probability"
        if ((p / q - draws[around]).abs() <= ROUNDING * draws[around]).any():
            return "a draw within rounding of the ratio of probabilities"
    if abs(float(truncated_entropy(scores[0].softmax(-1), 3)) - theta) <= ROUNDING:
        return "an entropy within rounding of theta"
    if mode == "greedy" and (scores.topk(2, -1).values.diff(dim=-1) == 0).any():
        return "a tie for the target's first choice"
    return "unexplained"


def settings(ks):
    """Yield K, vLLM's window (None for its default) and theta."""
    for k, theta in itertools.product(ks, THETAS):
        for window in dict.fromkeys((None, 1, k - 1)):
            yield k, window, theta


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="folder of the package vllm, 0.33 or later; need not be installed")
    parser.add_argument("--blocks", type=int, default=1, help="synthetic blocks per kind, K, window and theta")
    parser.add_argument("--recorded", type=int, default=8, help="recorded blocks of the bundled pair, for each K")
    parser.add_argument("--num-draft-tokens", type=int, nargs="*", default=[4, 8, 16])
    parser.add_argument("--out", type=Path, default=Path("runs/fly-parity"))
    options = parser.parse_args()
    if not (options.folder / "vllm" / "v1" / "spec_decode" / "fly.py").is_file():
        sys.exit(f"error: {options.folder} holds no vLLM with FLy, which came with 0.33")
    use(options.folder)
    import vllm.v1.worker.cpu.shm  # noqa: F401  # vLLM's stand-in for pinned memory
    from vllm.triton_utils import HAS_TRITON, tl
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils

    from reprieve.rules import parse_rule

    assert HAS_TRITON, "Triton is not installed: pip install --no-deps triton"
    rejection_sampler_utils.tldevice = types.SimpleNamespace(log1p=lambda value: tl.log(1.0 + value))
    draw, tally = torch.Generator().manual_seed(0), Tally()
    recorded_blocks = {k: recorded(options.recorded, k) for k in options.num_draft_tokens} if options.recorded else {}
    options.out.mkdir(parents=True, exist_ok=True)
    for k, window, theta in settings(options.num_draft_tokens):
        width = min(6, k - 1) if window is None else window
        rule = parse_rule(f"fly:theta={theta!r},variant=vllm" + ("" if window is None else f",window={window}"))
        batches = [made_up(options.blocks, k, draw), *([recorded_blocks[k]] if k in recorded_blocks else [])]
        for mode, blocks, runner in itertools.product(MODES, batches, ("v1", "v2")):
            tally.compare(runner, mode, blocks, rule, width, draw)
        facts = {"command": " ".join(sys.argv), "vllm": version_of(options.folder), "last": [k, window, theta]}
        document = {**facts, **tally.document()}
        (options.out / "results.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        print(f"K = {k}, window {window}, theta {theta:.2f}: {document['agree']} of {document['blocks']}", flush=True)
    print(json.dumps({name: value for name, value in document.items() if name != "by_kind"}, indent=1))


COUNTS = ("blocks", "tokens", "relaxed", "agree")


class Tally:
    """Counts of blocks and agreements by runner, mode and kind; reasons for differences; counts of other variants."""

    def __init__(self) -> None:
        self.counts, self.others, self.causes = (collections.Counter() for _ in range(3))

    def compare(self, runner: str, mode: str, blocks: Blocks, rule, width: int, draw) -> None:
        """Decide the blocks with both implementations; `width` is vLLM's window."""
        seeds = torch.randint(2**40, (len(blocks.lengths),), generator=draw)
        if runner == "v1":
            draws = torch.rand(sum(blocks.lengths), dtype=torch.float64, generator=draw)
            expected = v1(blocks, mode, width, rule.theta, draws)
        else:
            draws = v2_draws(blocks, seeds)
            expected = v2(blocks, mode, width, rule.theta, seeds)
        plain = ours(blocks, mode, replace(rule, theta=math.inf), draws)
        accepted = ours(blocks, mode, rule, draws)
        for number, (kind, left, right) in enumerate(zip(blocks.kinds, accepted, expected, strict=True)):
            found = (1, min(blocks.lengths[number], max(left, right) + 1), right > plain[number], left == right)
            self.counts.update({(runner, mode, kind, name): value for name, value in zip(COUNTS, found, strict=True)})
            if left != right:
                why = cause(blocks, mode, width, rule.theta, draws, number, min(left, right))
                who = "ours" if left > right else "theirs"
                self.causes[f"{runner}, {mode}, {kind}: {why}, {who} accepts"] += 1
        for variant, (name, window) in itertools.product(
            ("amd", "normalised"), (("default window", None), ("the same window", width))
        ):
            other = ours(blocks, mode, replace(rule, variant=variant, window=window), draws)
            self.others[f"{variant}, {name}"] += sum(a == b for a, b in zip(other, expected, strict=True))

    def document(self) -> dict:
        """Return the counts; tokens are counted up to the later of the two first rejections."""
        cells = dict.fromkeys(key[:-1] for key in self.counts)
        return {
            **{name: sum(self.counts[(*cell, name)] for cell in cells) for name in COUNTS},
            "differences": dict(sorted(self.causes.items())),
            "other_variants_agree": dict(self.others),
            "by_kind": [
                dict(zip(("runner", "mode", "kind"), cell, strict=True))
                | {name: int(self.counts[(*cell, name)]) for name in COUNTS}
                for cell in cells
            ],
        }


if __name__ == "__main__":
    main()
