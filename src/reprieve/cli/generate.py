"""`reprieve generate`: one answer, streamed, each token coloured by where it comes from."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from reprieve.cli import options as o

if TYPE_CHECKING:
    from reprieve.types import Generation, Token

STYLES = {"target": "default", "matched": "green", "rescued": "bold yellow"}


def command(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    rule: Annotated[str, typer.Option(help="The rule, such as margin:delta=2.")] = "lossless",
    dial: Annotated[float | None, typer.Option(help="This request's own value of the rule's dial.")] = None,
    target: o.Target = o.BUNDLED,
    draft: o.Draft = None,
    drafter: o.DrafterSpec = "draft",
    num_draft_tokens: Annotated[int, typer.Option(help="K: drafted tokens a round.")] = 16,
    max_new_tokens: Annotated[int, typer.Option(help="Exact largest number of new tokens.")] = 256,
    stop: Annotated[list[str], typer.Option(help="A text that ends the answer. Give it several times.")] = [],  # noqa: B006
    template: Annotated[str, typer.Option(help="auto, raw or chat: how the prompt is wrapped.")] = "auto",
    temperature: o.Temperature = 0.0,
    top_p: o.TopP = 1.0,
    top_k: o.TopK = 0,
    draft_temperature: o.DraftTemperature = None,
    seed: o.Seed = 0,
    dtype: o.Dtype = "auto",
    device: o.Device = None,
    color: Annotated[bool | None, typer.Option("--color/--no-color", help="Default: only on a terminal.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
    trace: Annotated[bool, typer.Option(help="With --json or --out: every round in full.")] = False,
    out: Annotated[Path | None, typer.Option(help="Also write the JSON object to this file.")] = None,
) -> int:
    """Answer one prompt. Plain: the target's own token; green: drafted and matched; yellow: drafted and rescued."""
    from reprieve.rules import parse_rule

    parsed = parse_rule(rule)
    text = sys.stdin.read() if prompt == "-" else prompt
    sampling = o.sampling_options(temperature, top_p, top_k, draft_temperature)
    o.quiet_transformers()
    from reprieve.engine import load_pair
    from reprieve.evaluation.arms import Arm, build_decoder
    from reprieve.files import replace_file
    from reprieve.settings import SamplingParams

    params = SamplingParams(max_new_tokens=max_new_tokens, seed=seed, stop=tuple(stop), **sampling)
    pair = load_pair(target, draft, dtype=dtype, device=device)
    decoder = build_decoder(Arm(rule, parsed, num_draft_tokens), pair, drafter=drafter)
    wrapped = _wrap(text, template, target, pair.tokenizer)
    screen = o.console(color=color)

    def show(token: Token, piece: str) -> None:
        screen.print(Text(piece, style=STYLES[token.provenance.value]), end="", soft_wrap=True)

    made = decoder.generate(wrapped, params, dial=dial, on_token=None if as_json else show, trace=trace)
    document = json.dumps(_as_json(made, parsed.spec, pair.tokenizer))
    if out is not None:
        replace_file(out, document + "\n")
    if as_json:
        print(document)
        return 0
    screen.print()
    o.console(stderr=True).print(
        f"{len(made.tokens)} tokens in {made.num_rounds} rounds ({made.tokens_per_round:.2f} a round), "
        f"{made.num_accepted} drafted and accepted, {made.num_rescued} of them rescued; "
        f"{made.seconds:.2f} s, ended by {made.finish_reason}"
    )
    return 0


def _wrap(text: str, template: str, target: str, tokenizer: Any) -> Any:
    from reprieve.errors import SpecError, require_choice
    from reprieve.tasks import load_task

    require_choice("template", template, ("auto", "raw", "chat"))
    if template == "chat":
        if not tokenizer.chat_template:
            raise SpecError(f"template must be auto or raw for {target!r}: its tokenizer has no chat template")
        message = [{"role": "user", "content": text}]
        return tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=True, return_dict=False)
    if template == "auto" and target == o.BUNDLED:
        return load_task("arithmetic").wrap(text)
    return text


def _as_json(made: Generation, spec: str, tokenizer: Any) -> dict[str, Any]:
    document: dict[str, Any] = {
        "rule": spec,
        "text": made.text,
        "finish_reason": made.finish_reason,
        "num_tokens": len(made.tokens),
        "num_rounds": made.num_rounds,
        "num_drafted": made.num_drafted,
        "num_accepted": made.num_accepted,
        "num_rescued": made.num_rescued,
        "tokens_per_round": made.tokens_per_round,
        "seconds": made.seconds,
        "tokens": [
            {
                "token_id": token.token_id,
                "text": tokenizer.decode([token.token_id]),
                "provenance": token.provenance.value,
                "risk": token.risk if token.risk is not None and abs(token.risk) != float("inf") else None,
            }
            for token in made.tokens
        ],
    }
    if made.trace is not None:
        document["rounds"] = [_finite(dataclasses.asdict(entry)) for entry in made.trace]
    return document


def _finite(value: Any) -> Any:
    """JSON has no infinity: an infinite risk becomes null."""
    if isinstance(value, float):
        return value if abs(value) != float("inf") and value == value else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value
