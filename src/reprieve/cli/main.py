"""`reprieve`: dispatch and error handling. Exit status: 0 done, 1 a run failed, 2 bad usage, 130 interrupted."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from typing import NoReturn

import reprieve
from reprieve.cli.command import INTERRUPTED, Command
from reprieve.cli.flags import parse, program_name
from reprieve.errors import ReprieveError, did_you_mean

# Every verb, its class, and what it is for: help is printed without importing any of them.
COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("bench:Demo", "compare a trained and an untrained rule with lossless decoding, on the bundled pair"),
    "generate": ("generate:Generate", "answer one prompt, each token coloured by where it comes from"),
    "serve": ("generate:Serve", "serve an OpenAI-compatible API with rules per request, and a playground"),
    "bench": ("bench:Bench", "compare rules on a task: accuracy, speed, answer length"),
    "report": ("bench:Report", "write one HTML page from runs and certificates"),
    "monitor": ("certify:Monitor", "check a share of answers against lossless decoding"),
    "quickstart": ("quickstart:Quickstart", "mine, train, certify and report on your own models and data"),
    "certify": ("certify:Certify", "find the most lenient threshold whose loss is provably below a bound"),
    "mine autojudge": ("mine:MineAutoJudge", "label mismatches that change the answer (AutoJudge)"),
    "mine pivot": ("mine:MinePivot", "label tokens that sampling rejects, by rollouts (PAD)"),
    "mine arbitration": ("mine:MineArbitration", "label which token of a mismatch leads to the better answer (CoSpec)"),
    "labels show": ("mine:ShowLabels", "show labelled problems, token by token"),
    "labels stats": ("mine:LabelStats", "count labels by class of token"),
    "labels import": ("mine:ImportLabels", "add labels made by hand to a store"),
    "train judge": ("train:TrainJudge", "fit a linear head to labels (AutoJudge)"),
    "train pivot": ("train:TrainPivot", "fit an MLP to labels (PAD)"),
    "train state-arbiter": (
        "train:TrainStateArbiter",
        "fit two linear heads to traces: which token of a mismatch is better",
    ),
    "train arbiter": ("train:TrainArbiter", "train an arbiter on traces (CoSpec)"),
    "train lts": ("train:TrainLts", "calibrate the rule lts for a target (ARC-Decode)"),
    "train length": ("train:TrainLength", "train a head that decides how many tokens to draft"),
    "train eagle": ("train:TrainEagle", "train an EAGLE-3 drafting head on the target's own answers"),
    "rules": ("bench:Rules", "list rules with their parameters and sources"),
}
_GROUPS = {  # sections of `reprieve --help`, and their verbs
    "Decode": ("demo", "generate", "serve"),
    "Measure": ("bench", "report", "monitor", "rules"),
    "Prove": ("quickstart", "certify"),
    "Train": ("mine", "labels", "train"),
}


def usage(verb: str = "") -> str:
    """Return what `reprieve --help` prints, or the help of a verb with several commands."""
    command = f"reprieve {verb} COMMAND" if verb else "reprieve COMMAND"
    lines = [f"usage: {command} [FLAGS]", ""]
    if not verb:
        lines += ["Relaxed verification for speculative decoding.", ""]
    width = max(map(len, COMMANDS))
    for title, verbs in ({"": (verb,)} if verb else _GROUPS).items():
        if title:
            lines.append(f"{title}:")
        lines += [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items() if name.split()[0] in verbs]
        lines.append("")
    return "\n".join([*lines, f"`{command} --help` lists a command's flags."])


def command_of(name: str) -> type[Command]:
    """The class of a command, imported."""
    module, _, kind = COMMANDS[name][0].partition(":")
    command: type[Command] = getattr(importlib.import_module(f"reprieve.cli.{module}"), kind)
    return command


def main(arguments: Sequence[str]) -> int:
    """Run one command; returns the exit status."""
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    for number, argument in enumerate(arguments, start=1):
        try:
            argument.encode()
        except UnicodeEncodeError:
            print(f"reprieve: argument {number} must be UTF-8, got {argument!r}", file=sys.stderr)
            return 2
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"reprieve {reprieve.__version__}")
        return 0
    verb, rest = arguments[0], list(arguments[1:])
    if rest and f"{verb} {rest[0]}" in COMMANDS:
        return run_command(command_of(f"{verb} {rest[0]}"), rest[1:])
    if verb in COMMANDS:
        return run_command(command_of(verb), rest)
    below = [name.partition(" ")[2] for name in COMMANDS if name.startswith(f"{verb} ")]
    if below and rest[:1] in (["-h"], ["--help"]):
        print(usage(verb))
        return 0
    if below and rest:
        near = did_you_mean(rest[0], below)
        said = f"unknown command {f'{verb} {rest[0]}'!r}; {verb} takes {', '.join(below)}{near}"
        print(f"reprieve: {said}\n", file=sys.stderr)
    if below:
        print(usage(verb), file=sys.stderr)
        return 2
    known = list(dict.fromkeys(name.partition(" ")[0] for name in COMMANDS))
    said = f"unknown command {verb!r}; it must be one of {', '.join(known)}{did_you_mean(verb, known)}"
    print(f"reprieve: {said}", file=sys.stderr)
    return 2


def run_command(kind: type[Command], arguments: Sequence[str]) -> int:
    """Run a verb, or a script of `benchmarks/` that is written as one; returns the exit status."""
    name, command = program_name(kind.verb), None
    try:
        command = parse(kind, arguments, command=kind.verb)
        command.require_own_folder()
        return command.run()
    except ReprieveError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    except SystemExit as stop:  # help was printed, or a flag could not be read
        return int(stop.code or 0)
    except KeyboardInterrupt:
        folder = command.kept_in if command else None
        kept = f"; what is done is kept in {folder}: run again to resume" if folder else ""
        print(f"{name}: interrupted{kept}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        return _reader_gone()
    except OSError as error:
        where = "" if error.filename is None else f"{str(error.filename)!r}: "
        print(f"{name}: {where}{error.strerror or error}", file=sys.stderr)
        return 1


def _reader_gone() -> int:
    """Discard further output after the reader of a pipe has closed it; returns the exit status."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def run() -> NoReturn:
    """The `reprieve` script. SIGTERM acts like Ctrl-C, so that child processes end too."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for name in ("stdout", "stderr"):
        if (stream := getattr(sys, name)) is None:  # closed by the caller, as `>&-` does
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        else:  # a terminal that is not UTF-8 shows what it can
            stream.reconfigure(errors="backslashreplace")
    status = 0
    try:
        status = main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        status = _reader_gone()
    except OSError as error:  # a full disk behind standard output
        if not status:  # else the command has already said why it failed
            print(f"reprieve: standard output cannot be written: {error.strerror}", file=sys.stderr)
        status = _reader_gone()
    sys.exit(status)


if __name__ == "__main__":
    run()
