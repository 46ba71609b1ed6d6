"""`reprieve rules`: what can be written after `--rule` and `--arm`."""

from __future__ import annotations

from reprieve.cli.options import console


def command() -> int:
    """List the rules with their parameters, defaults and dials."""
    from reprieve.rules import RULES
    from reprieve.rules.base import parameters_of

    out = console()
    for name, kind in RULES.items():
        summary = (kind.__doc__ or "").strip().splitlines()[0]
        out.print(f"[bold]{name}[/bold]  {summary}", soft_wrap=True)
        for parameter, field in parameters_of(kind).items():
            dial = "  (dial)" if parameter == kind.dial and name != "lossless" else ""
            out.print(f"    {parameter}={field.default}{dial}", soft_wrap=True)
    out.print("\nWrite name:parameter=value,...; a&b needs both, a|b either; start= and end= hold a rule to a span.")
    return 0
