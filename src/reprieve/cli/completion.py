"""`reprieve completion`: what a shell needs to complete commands and flags."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field

from reprieve.cli.command import Command
from reprieve.errors import require_choice

SHELLS = ("bash", "zsh", "tcsh")


@dataclass(frozen=True)
class Completion(Command):
    """Print a completion script: eval "$(reprieve completion bash)" in ~/.bashrc.

    Args:
        shell: bash, zsh or tcsh.
    """

    verb = "completion"

    shell: str = field(default="bash", metadata={"positional": True})

    def run(self) -> int:
        require_choice("shell", self.shell, SHELLS)
        import shtab

        print(shtab.complete(_whole_parser(), shell=self.shell))
        return 0


def _whole_parser() -> argparse.ArgumentParser:
    """All commands as one parser."""
    from reprieve.cli.flags import parser_of
    from reprieve.cli.main import COMMANDS, command_of

    whole = argparse.ArgumentParser(prog="reprieve")
    verbs = whole.add_subparsers()
    parsers: dict[str, argparse.ArgumentParser] = {}
    groups: dict[str, argparse._SubParsersAction[argparse.ArgumentParser]] = {}
    for name, (_, text) in COMMANDS.items():
        verb, _, rest = name.partition(" ")
        if rest and verb not in groups:
            # shtab leaves out what has no help.
            above = parsers.get(verb) or verbs.add_parser(verb, help=f"reprieve {verb} --help lists its commands")
            groups[verb] = above.add_subparsers()
        flags = parser_of(command_of(name), prog=f"reprieve {name}")
        place = groups[verb] if rest else verbs
        parsers[name] = place.add_parser(
            rest or verb, help=text, parents=[flags], add_help=False, conflict_handler="resolve"
        )
    return whole
