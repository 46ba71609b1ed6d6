"""`reprieve serve`: an OpenAI-compatible server and a playground over the local engine."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from reprieve.cli import options as o
from reprieve.errors import SpecError, import_extra

BUNDLED_RULES = [
    "judge:path=reprieve/arithmetic-judge,threshold=0.04",
    "pivot:path=reprieve/arithmetic-pivot",
    "margin:delta=2",
    "top_k:k=2",
    "typical",
    "fuzzy:threshold=0.1",
]
KEY = "REPRIEVE_API_KEY"


def command(
    rule: Annotated[
        list[str],
        typer.Option(
            help="A rule on offer: a specification, or a JSON file that also names levels and a cap. Give it several "
            "times; the first is the default. Default: six rules of the bundled pair."
        ),
    ] = [],  # noqa: B006
    target: o.Target = o.BUNDLED,
    draft: o.Draft = None,
    drafter: o.DrafterSpec = "draft",
    num_draft_tokens: Annotated[int, typer.Option(help="K: drafted tokens a round.")] = 8,
    host: Annotated[
        str, typer.Option(help="Address to listen on; anything but loopback lets others in.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.")] = 8000,
    model_name: Annotated[str | None, typer.Option(help="What clients call the model. Default: the target.")] = None,
    api_key: Annotated[str | None, typer.Option(help=f"Clients must send it. Default: ${KEY}, if it is set.")] = None,
    max_waiting: Annotated[int, typer.Option(help="Requests that may wait; more are answered 429.")] = 64,
    timeout: Annotated[float, typer.Option(help="Longest a request may take, in seconds, waiting included.")] = 120.0,
    grace: Annotated[float, typer.Option(help="Seconds left to requests when the server is told to stop.")] = 20.0,
    max_tokens: Annotated[int, typer.Option(help="Most new tokens of one answer.")] = 4096,
    task: Annotated[str | None, typer.Option(help="Task whose answers the quality checks compare.")] = None,
    check_share: Annotated[float, typer.Option(help="Share of relaxed requests to answer losslessly too.")] = 0.0,
    max_changed: Annotated[
        float | None, typer.Option(help="Alarm once a larger share of changed answers is proved, 0.02 for 2%.")
    ] = None,
    dtype: o.Dtype = "auto",
    device: o.Device = None,
) -> int:
    """Serve the OpenAI API, /metrics, /health and a playground at /, one request at a time."""
    for module in ("uvicorn", "fastapi", "prometheus_client"):
        import_extra(module, "serve")
    for name, value in (("timeout", timeout), ("grace", grace), ("max_tokens", max_tokens)):
        if not value > 0:
            raise SpecError(f"{name} must be above 0, got {value!r}")
    if not 0 <= port < 65536:
        raise SpecError(f"port must be in [0, 65535], got {port}")
    rules = rule or (BUNDLED_RULES if target == o.BUNDLED else ["margin:delta=1"])
    from reprieve.serving.policy import Policy

    policies = [Policy.load(source) for source in rules]
    o.quiet_transformers()
    from reprieve.engine import load_pair
    from reprieve.serving.server.app import Settings
    from reprieve.serving.server.launch import LOOPBACK, make_app, run

    screen = o.console(stderr=True)

    def tell(line: str) -> None:
        screen.print(line, soft_wrap=True, markup=False)

    settings = Settings(
        model=model_name or target,
        api_key=api_key or os.environ.get(KEY) or None,
        timeout_s=timeout,
        grace_s=grace,
        max_tokens=max_tokens,
        hosts=(*LOOPBACK, "[::1]") if host in LOOPBACK else None,
    )
    app = make_app(
        load_pair(target, draft, dtype=dtype, device=device),
        policies,
        settings,
        drafter=drafter,
        num_draft_tokens=num_draft_tokens,
        max_waiting=max_waiting,
        task=task,
        check_share=check_share,
        max_changed=max_changed,
        on_alarm=lambda status: tell(f"quality alarm: {status.sentence()}"),
        announce=tell,
    )
    if host not in LOOPBACK and settings.api_key is None:
        tell(f"warning: {host} may be reached by others, and there is no API key (--api-key)")
    run(app, host=host, port=port, grace_s=grace, limit_concurrency=max(256, 4 * max_waiting))
    return 0
