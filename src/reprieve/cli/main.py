"""`reprieve`: dispatch and error handling. Exit status: 0 done, 1 a run failed, 2 bad usage, 130 interrupted."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import NoReturn

VERBS = {
    "demo": "the main job on the bundled pair: a trained head and six rules beside lossless, a table and a figure",
    "generate": "answer one prompt, streamed, each token coloured by where it comes from",
    "bench": "compare rules side by side on a task",
    "sweep": "one rule over thresholds and K",
    "tune": "the K that suits each arm, or FSD's protocol for thresholds",
    "certify": "the most lenient threshold whose loss is proved to stay below a bound",
    "study": "everything on one pair: tuned K, every rule, certificates, the report",
    "eval": "lm-evaluation-harness's tasks through several rules",
    "judge": "compare the answers of a run by a language model: for tasks without right answers",
    "serve": "an OpenAI-compatible server with per-request rules, and a playground",
    "monitor": "answer with a rule while a share of requests is checked losslessly, with an alarm",
    "report": "one self-contained page from runs and certificates",
    "mine": "label which mismatches matter: autojudge, pivot, arbitration",
    "train": "fit a head: judge, pivot and arbiter to labels, arbiter to its rollouts, eagle to the target's answers",
    "calibrate": "measure what a rule needs to know of a target: lts",
    "audit": "what accepted tokens did to the next step, and whether a bound held; arbitration: who chose better",
    "convert": "a published drafting head into the format used here: eagle3",
    "labels": "look at a label store, or fill one by hand: show, stats, import",
    "rules": "list the rules, their parameters and their sources",
}


def usage() -> str:
    """What `reprieve --help` prints."""
    lines = ["usage: reprieve COMMAND [OPTIONS]", "", "Relaxed verification for speculative decoding.", ""]
    lines += [f"  {verb:<10} {text}" for verb, text in VERBS.items()]
    return "\n".join([*lines, "", "`reprieve COMMAND --help` lists a command's options."])


def main(arguments: list[str]) -> int:
    """Run one command; returns the exit status."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from importlib.metadata import version

        print(f"reprieve {version('reprieve')}")
        return 0
    verb, rest = arguments[0], arguments[1:]
    if verb not in VERBS:
        print(f"reprieve: unknown command {verb!r}; it is one of {', '.join(VERBS)}", file=sys.stderr)
        return 2
    return _run_verb(verb, rest)


def _run_verb(verb: str, rest: list[str]) -> int:
    import typer

    from reprieve.errors import ReprieveError

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    module = importlib.import_module(f"reprieve.cli.{verb}")
    if rest and rest[0] in (nested := getattr(module, "NESTED", {})):  # beside what the verb takes by itself
        module = importlib.import_module(f"reprieve.cli.{nested[rest[0]]}")
        verb, rest = f"{verb} {rest[0]}", rest[1:]
    for name, command in getattr(module, "COMMANDS", {None: getattr(module, "command", None)}).items():
        app.command(name)(command)
    if hasattr(module, "COMMANDS"):
        app.callback()(_group(module))
    try:
        status = typer.main.get_command(app).main(args=rest, prog_name=f"reprieve {verb}", standalone_mode=False)
        return int(status or 0)
    except ReprieveError as error:
        print(f"reprieve {verb}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    except typer.Exit as stop:
        return int(stop.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        print(f"reprieve {verb}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of a pipe has gone away
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if type(error).__module__.partition(".")[0] in ("click", "typer") and hasattr(error, "exit_code"):
            error.show()  # type: ignore[attr-defined]
            return int(error.exit_code)
        raise


def _group(module: ModuleType) -> Callable[[], None]:
    """Keeps a verb's subcommands subcommands, even where there is one."""

    def group() -> None: ...

    group.__doc__ = (module.__doc__ or "").partition(":")[2].strip()
    return group


def run() -> NoReturn:
    """The `reprieve` script."""
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    run()
