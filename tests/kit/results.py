"""Results of a run to change for a test."""

from typing import get_args, get_type_hints

from reprieve.bench.engine import RunConfig
from reprieve.bench.results import ArmResults, Bounds, Environment, Results, ThroughputResults


def arm_results(spec: str, **changes) -> ArmResults:
    """Return an arm of this label; what is not given is zero, empty or None."""
    values = {"spec": spec, "name": spec, "short": spec, **changes}
    blank = {name: _blank(hint) for name, hint in get_type_hints(ArmResults).items()}
    return ArmResults(**blank | {"tokens_vs_lossless": [0.0] * 3, "truncated_vs_lossless": [0.0] * 3} | values)


def throughput_results(arm: str, **changes) -> ThroughputResults:
    """Return a row of speed under load; what is not given is zero, empty or None."""
    hints = get_type_hints(ThroughputResults)
    values = {name: [0.0, 0.0] if hint == Bounds else _blank(hint) for name, hint in hints.items()}
    return ThroughputResults(**values | {"arm": arm, **changes})


def results(arms: list[ArmResults], throughput: list[ThroughputResults]) -> Results:
    """Return results on vLLM in this environment."""
    config = RunConfig(
        command="reprieve bench", target="t", draft="d", dtype="float32", device="cpu", weights="w", engine="vllm",
        num_draft_tokens=[4], arms=[arm.spec for arm in arms],
    )  # fmt: skip
    return Results(
        config=config, environment=Environment.here(), num_workers=1, complete=True, graded=False, num_problems=1,
        arms=arms, throughput=throughput,
    )  # fmt: skip


def _blank(hint):
    if type(None) in get_args(hint):
        return None
    return {"dict": dict, "list": list}.get(getattr(hint, "__origin__", hint).__name__, hint)()
