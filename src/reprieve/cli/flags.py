"""Flags from dataclasses: every field of a command's record, and of the records in it, is one flag.

A record's docstring has the help texts, in its `Args:`. Values come from the command line, then from a `--config`
file, then from the record's own defaults. A run keeps the same record as YAML in its folder.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar

from reprieve.bundles import bundle_of
from reprieve.errors import ReprieveError, SpecError, did_you_mean, require_choice
from reprieve.files import read_file
from reprieve.settings import BUNDLED_TASK, read_draft_tokens

T = TypeVar("T")
CONFIG = "config.yaml"  # in a run's folder
_COMMAND = "command"  # its first key
_KNOWN_COUNTS = ("num_draft_tokens", "num_fewshot", "num_threads")  # the field's own names


@dataclass(frozen=True)
class Flag:
    """One field of a record, as a flag or an argument by position."""

    name: str  # as in Python
    hint: Any
    default: Any  # MISSING where it must be given
    help: str
    group: str  # the record it belongs to, in words; "" for the command's own
    positional: bool

    @property
    def option(self) -> str:
        """Flag on the command line, such as `--top-p`."""
        return "--" + self.key.replace("_", "-")

    @property
    def key(self) -> str:
        """Key in YAML: `lambda` for the field `lambda_`, `workers` for `num_workers`."""
        return self.name if self.name in _KNOWN_COUNTS else self.name.removeprefix("num_").rstrip("_")

    @property
    def many(self) -> bool:
        """True for tuples: texts and paths are given by repeating the flag, numbers are separated by commas."""
        return typing.get_origin(self.hint) is tuple

    @property
    def optional(self) -> bool:
        """True where None is a value too."""
        return types.NoneType in typing.get_args(self.hint)

    @property
    def kind(self) -> Any:
        """Type of its value, or of each of its values, None left out; a function for `num_draft_tokens`."""
        hint = typing.get_args(self.hint)[0] if self.many else self.hint
        options = [option for option in typing.get_args(hint) or (hint,) if option is not types.NoneType]
        return read_draft_tokens if len(options) > 1 else options[0]

    def read(self, text: object) -> Any:
        """Convert one value, as it is typed or as a configuration file holds it.

        Raises:
            ArgumentTypeError: another type, or a text that no file or model can take.
        """
        wanted = f"must be {_KINDS[self.kind][0]}, got {text!r}"
        if not isinstance(text, str):  # a list in a configuration file, for instance
            raise argparse.ArgumentTypeError(wanted)
        if self.kind in (int, float) and ("_" in text or not text.isascii()):  # Python's own notations
            raise argparse.ArgumentTypeError(wanted)
        try:
            value = {bool: _boolean, float: _number}.get(self.kind, self.kind)(text)
        except ValueError:
            raise argparse.ArgumentTypeError(wanted) from None
        if self.kind is Path and not text:
            raise argparse.ArgumentTypeError("must name a path, got ''")
        if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
            raise argparse.ArgumentTypeError(f"must be text without NUL and lone surrogates, got {text!r}")
        return value

    def read_list(self, text: str) -> tuple[Any, ...]:
        """Convert several values, separated by commas.

        Raises:
            ArgumentTypeError: none, or one of another type.
        """
        values = tuple(self.read(part.strip()) for part in text.split(",") if part.strip())
        if not values:
            raise argparse.ArgumentTypeError(f"must be numbers separated by commas, got {text!r}")
        return values


_KINDS: dict[Any, tuple[str, str]] = {  # words in errors, and the value's name in help
    read_draft_tokens: ("a whole number, or a text", "N"),
    int: ("a whole number", "N"),
    float: ("a number", "X"),
    str: ("a text", "TEXT"),
    bool: ("true or false", ""),
    Path: ("a path", "PATH"),
}


def _boolean(text: str) -> bool:
    """Return the meaning of `true` or `false` in a configuration file."""
    return ("false", "true").index(text.lower()) == 1


def _number(text: str) -> float:
    """Return a number; kept configurations hold YAML's `.inf` and `.nan`."""
    return float(re.sub(r"\.(?=(inf|nan)$)", "", text))


def flags_of(kind: type, *, default: Any = dataclasses.MISSING, group: str = "") -> Iterator[Flag]:
    """The flags of a record and of the records in it.

    Args:
        default: an instance whose values are the defaults, where a record holds this one.
    """
    hints = typing.get_type_hints(kind)
    helps = argument_helps(kind)
    for field in dataclasses.fields(kind):
        if not field.init or field.metadata.get("flag") is False:
            continue
        value = _default_of(field, default)
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            inner = group if field.name == "settings" else field.name.replace("_", " ")
            yield from flags_of(hint, default=value, group=inner)  # type: ignore[arg-type]
            continue
        yield Flag(field.name, hint, value, helps.get(field.name, ""), group, bool(field.metadata.get("positional")))


def argument_helps(kind: type) -> dict[str, str]:
    """The texts of the `Args:` section of a class's docstring, and of those it inherits from, by name."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        section = re.search(r"^Args:\n((?:    .*\n?|\n)*)", inspect.cleandoc(base.__dict__.get("__doc__") or ""), re.M)
        for entry in re.split(r"\n(?=\S)", textwrap.dedent(section[1]).strip() if section else ""):
            name, colon, text = entry.partition(":")
            if colon:
                texts |= {part.strip(): " ".join(text.split()) for part in name.split(",")}
    return texts


def parser_of(kind: type, *, prog: str) -> argparse.ArgumentParser:
    """Return a parser of a record's flags. Flags that are not given are absent from its result."""
    flags = list(flags_of(kind))
    assert len({flag.name for flag in flags}) == len(flags), f"{prog}: a flag is declared twice"
    positional = [flag.key.upper() + (" ..." if flag.many else "") for flag in flags if flag.positional]
    example = str(getattr(kind, "example", ""))
    parser = _Parser(
        prog=prog,
        usage=" ".join([prog, *positional, "[FLAGS]"]) + (example and f"\nexample: {example}"),
        description=inspect.cleandoc(kind.__doc__ or "").partition("\nArgs:")[0].strip(),
        formatter_class=partial(argparse.HelpFormatter, max_help_position=30, width=110),
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    groups: dict[str, Any] = {"": parser}
    for flag in flags:
        if flag.group not in groups:
            groups[flag.group] = parser.add_argument_group(flag.group)
        _add(groups[flag.group], flag)
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML with values for these flags; flags win.")
    return parser


def _add(group: Any, flag: Flag) -> None:
    ending = "" if "Default:" in flag.help else _default_text(flag.default)
    options: dict[str, Any] = {"help": (flag.help + ending).replace("%", "%%")}
    if flag.positional:
        many = {"nargs": "+"} if flag.many else {}
        group.add_argument(flag.name, type=flag.read, metavar=flag.key.upper(), **many, **options)
        return
    metavar = _KINDS[flag.kind][1]
    if flag.kind is bool:
        options |= {"action": argparse.BooleanOptionalAction}
    elif not flag.many:
        options |= {"type": flag.read, "metavar": metavar}
    elif flag.kind in (str, Path):
        options |= {"type": flag.read, "metavar": metavar, "action": "append"}
    else:
        options |= {"type": flag.read_list, "metavar": f"{metavar},{metavar}"}
    group.add_argument(flag.option, dest=flag.name, **options)


def _default_text(default: Any) -> str:
    """Return the default as the end of a help text; empty if the text itself has to state it."""
    if default is dataclasses.MISSING or default in (None, (), "") or isinstance(default, bool):
        return ""
    values = default if isinstance(default, tuple) else (default,)
    return f" Default: {','.join(f'{value:g}' if isinstance(value, float) else str(value) for value in values)}."


class _Parser(argparse.ArgumentParser):
    """Names the flag that a misspelt one may have meant."""

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        if unknown:
            known = [name for name in self._option_string_actions if name.startswith("--")]
            near = did_you_mean(unknown[1][2:], [name[2:] for name in known], prefix="--")
            message = f"unknown flag {unknown[1]}{near}"
        elif message.endswith("expected one argument"):
            message += "; a value that begins with - is written --flag=-1"
        self.exit(2, f"{self.prog}: {message}\n`{self.prog} --help` lists the flags.\n")


def program_name(command: str) -> str:
    """Return a command as it is typed: `reprieve bench`, or the path of a script."""
    return command if command.endswith(".py") else f"reprieve {command}"


def parse(kind: type[T], arguments: Sequence[str], *, command: str) -> T:
    """The record that a command line describes.

    Raises:
        SpecError: a value out of range, or a configuration that does not fit.
        SystemExit: help was requested, or the usage is wrong (2).
    """
    parser = parser_of(kind, prog=program_name(command))
    given = vars(parser.parse_args(list(arguments)))
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    path = given.pop("config", None)
    flags = {flag.name: flag for flag in flags_of(kind)}
    values = {**(_from_file(path, flags, command) if path is not None else {}), **given}
    if presets := getattr(kind, "presets", None):  # they replace defaults; flags and configuration files win
        preset = values.get("preset", flags["preset"].default)
        require_choice("--preset", preset, tuple(presets))
        values = {**presets[preset], **values}
    bundle = bundle_of(values.get("target"))
    if bundle is not None and "task" in flags and flags["task"].default == BUNDLED_TASK:
        values.setdefault("task", bundle.task)
    required = [flag for flag in flags.values() if flag.default is dataclasses.MISSING]
    if missing := [flag.option for flag in required if flag.name not in values]:
        parser.error(f"the following arguments are required: {', '.join(missing)}")
    return build(kind, values)


def build(kind: type[T], values: Mapping[str, Any], *, default: Any = dataclasses.MISSING) -> T:
    """Build a record and the records in it from values by field name; other fields keep their defaults.

    Raises:
        SpecError: a value that a record refuses.
    """
    hints = typing.get_type_hints(kind)
    arguments = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        if not field.init:
            continue
        fallback = _default_of(field, default)
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            arguments[field.name] = build(hint, values, default=fallback)  # type: ignore[arg-type]
        elif field.name in values and field.metadata.get("flag") is not False:
            arguments[field.name] = values[field.name]
        elif fallback is not dataclasses.MISSING:
            arguments[field.name] = fallback
    return kind(**arguments)


def to_yaml(record: Any, command: str) -> str:
    """All values of a record by flag, the command first: what `--config` reads."""
    import yaml

    values = {flag.key: _plain(flag.default) for flag in flags_of(type(record), default=record)}
    text: str = yaml.safe_dump({_COMMAND: command, **values}, sort_keys=False, allow_unicode=True, width=120)
    return text


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def command_in(path: Path) -> str | None:
    """Return the command that a configuration belongs to; None where it does not say, or cannot be read."""
    try:
        command: str | None = _read_config(path).get(_COMMAND)
    except ReprieveError:
        return None
    return command


def _from_file(path: Path, flags: Mapping[str, Flag], command: str) -> dict[str, Any]:
    """Values of a configuration file by field name.

    Raises:
        ReprieveError: it cannot be read.
        SpecError: another command's, an unknown key, or a value of another type.
    """
    where = f"--config {str(path)!r}"
    written = _read_config(path)
    if (other := written.pop(_COMMAND, command)) != command:
        raise SpecError(f"{where} belongs to `reprieve {other}`, not to `reprieve {command}`")
    by_key = {flag.key: flag for flag in flags.values()}
    values: dict[str, Any] = {}
    for key, value in written.items():
        if key not in by_key:
            raise SpecError(f"{where}: `reprieve {command}` has no {key!r}{did_you_mean(str(key), by_key)}")
        flag = by_key[key]
        if flag.many and not isinstance(value, list):
            raise SpecError(f"{where}: {key} must be a list, got {value!r}")
        try:
            if value is None and flag.optional:
                values[flag.name] = None
            else:
                values[flag.name] = tuple(map(flag.read, value)) if flag.many else flag.read(value)
        except argparse.ArgumentTypeError as error:
            raise SpecError(f"{where}: {key} {error}") from None
    return values


def _read_config(path: Path) -> dict[Any, Any]:
    """Return what a configuration file says: texts, or None for null; the flags themselves read numbers.

    Raises:
        ReprieveError: no YAML in UTF-8, a duplicate key, or no mapping.
    """
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """YAML without numbers and booleans, so that a value means what it means as a flag: 010 is ten."""

        yaml_implicit_resolvers: ClassVar[Any] = {
            first: [(tag, pattern) for tag, pattern in resolvers if tag == "tag:yaml.org,2002:null"]
            for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [key.value for key, _ in node.value]
            if twice := sorted({key for key in keys if keys.count(key) > 1}):
                raise ValueError(f"the key {twice[0]!r} stands twice")
            return super().construct_mapping(node, deep)

    try:
        written = yaml.load(read_file(path, "--config").decode("utf-8"), Loader)  # a SafeLoader
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ReprieveError(f"--config {str(path)!r} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(written, dict):
        kind = "nothing" if written is None else f"a {type(written).__name__}"
        raise SpecError(f"--config {str(path)!r} must hold lines such as limit: 100, got {kind}")
    return written


def _default_of(field: dataclasses.Field[Any], holder: Any) -> Any:
    """Return the value in the record that holds the field; the field's own default where there is no record."""
    if dataclasses.is_dataclass(holder):
        return getattr(holder, field.name)
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
