"""`reprieve rules`: what can be written after `--rule` and `--arm`."""

from __future__ import annotations

from dataclasses import dataclass

from reprieve.cli import screen
from reprieve.cli.command import Command


@dataclass(frozen=True)
class Rules(Command):
    """List the rules with their sources, parameters, defaults and dials."""

    verb = "rules"
    example = "reprieve rules"

    def run(self) -> int:
        from reprieve.rules import RULES
        from reprieve.specs import parameters_of

        out = screen.console()
        for kind in RULES:
            summary = (kind.__doc__ or "").strip().splitlines()[0]
            out.print(f"[bold]{kind.name}[/bold]  {summary}", soft_wrap=True)
            if kind.origin:
                out.print(f"    from {kind.origin}", soft_wrap=True, markup=False)
            for name, parameter in parameters_of(kind).items():
                dial = "  (dial)" if kind.own_dial is not None and name == kind.own_dial.name else ""
                out.print(f"    {name}={parameter.default}{dial}", soft_wrap=True, markup=False)
        out.print(
            "\nWrite name:parameter=value,...; a&b needs both, a|b either; start= and end= restrict a rule to a span."
        )
        return 0
