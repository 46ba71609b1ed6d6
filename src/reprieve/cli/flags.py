"""Flags from dataclasses: every field of a command's record, and of the records in it, is one flag.

A record's docstring has the help texts, in its `Args:`. Values come from the command line, then from a `--config`
file, then from the record's own defaults. A run keeps the same record as YAML in its folder.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar

from reprieve.bundles import bundle_of
from reprieve.errors import ReprieveError, SpecError, require_choice
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
    def kind(self) -> Any:
        """Its type, None left out."""
        options = _options(self.hint)
        return read_draft_tokens if set(options) == {int, str} else options[0]

    @property
    def items(self) -> Any:
        """The type of its items, where it is a tuple; else None."""
        if typing.get_origin(self.kind) is not tuple:
            return None
        item = typing.get_args(self.kind)[0]
        return read_draft_tokens if set(_options(item)) == {int, str} else item

    @property
    def repeated(self) -> bool:
        """True where it may be given several times: tuples of texts; numbers are separated by commas."""
        return self.items in (str, Path)


def _options(hint: Any) -> list[Any]:
    """The types that a hint allows, None left out."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return [option for option in options if option is not type(None)]


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
        value = _default_of(field) if default is dataclasses.MISSING else getattr(default, field.name)
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
    example = str(getattr(kind, "example", ""))
    parser = _Parser(
        prog=prog,
        usage=" ".join([prog, *(_usage(flag) for flag in flags_of(kind) if flag.positional), "[FLAGS]"])
        + (example and f"\nexample: {example}"),
        description=inspect.cleandoc(kind.__doc__ or "").partition("\nArgs:")[0].strip(),
        formatter_class=_Help,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    groups: dict[str, Any] = {"": parser}
    known: set[str] = set()
    for flag in flags_of(kind):
        assert flag.name not in known, f"{prog}: {flag.option} is declared twice"
        known.add(flag.name)
        if flag.group not in groups:
            groups[flag.group] = parser.add_argument_group(flag.group)
        _add(groups[flag.group], flag)
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML with values for these flags; flags win.")
    return parser


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
    path = given.pop("config", None)
    flags = {flag.name: flag for flag in flags_of(kind)}
    values = {**(_from_file(path, flags, command) if path is not None else {}), **given}
    if presets := getattr(kind, "presets", None):
        values = {**_preset(presets, values.get("preset", flags["preset"].default)), **values}
    bundle = bundle_of(values.get("target"))
    if bundle is not None and "task" in flags and flags["task"].default == BUNDLED_TASK:
        values.setdefault("task", bundle.task)
    missing = [
        flag.option if not flag.positional else flag.key
        for flag in flags.values()
        if flag.default is dataclasses.MISSING and flag.name not in values
    ]
    if missing:
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
        fallback = _default_of(field) if default is dataclasses.MISSING else getattr(default, field.name)
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

    values: dict[str, Any] = {_COMMAND: command}
    for flag, value in _values(record):
        values[flag.key] = [_plain(item) for item in value] if isinstance(value, tuple) else _plain(value)
    text: str = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120)
    return text


def _values(record: Any) -> Iterator[tuple[Flag, Any]]:
    for flag in flags_of(type(record), default=record):
        yield flag, flag.default


def _from_file(path: Path, flags: Mapping[str, Flag], command: str) -> dict[str, Any]:
    """Values of a configuration file by field name.

    Raises:
        ReprieveError: it cannot be read.
        SpecError: another command's, an unknown key, or a value of another type.
    """
    import yaml

    try:
        written = _read_yaml(read_file(path, "--config"))
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ReprieveError(f"--config {str(path)!r} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(written, dict):
        raise SpecError(f"--config {str(path)!r} must hold flags by name, got {type(written).__name__}")
    if (other := written.pop(_COMMAND, command)) != command:
        raise SpecError(f"--config {str(path)!r} belongs to `reprieve {other}`, not to `reprieve {command}`")
    by_key = {flag.key: flag for flag in flags.values()}
    values = {}
    for key, value in written.items():
        if key not in by_key:
            near = difflib.get_close_matches(str(key), by_key, n=1)
            raise SpecError(
                f"--config {str(path)!r}: `reprieve {command}` has no {key!r}"
                + (f"; did you mean {near[0]}?" if near else "")
            )
        flag = by_key[key]
        values[flag.name] = _checked(flag, value, f"--config {str(path)!r}: {key}")
    return values


def _read_yaml(content: bytes) -> Any:
    """Return what a configuration file says.

    Raises:
        ValueError: not UTF-8, or a duplicate key.
        yaml.YAMLError: not YAML.
    """
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """YAML without base-60 numbers (1:30) and octal numbers (010); duplicate keys are refused."""

        # Without YAML 1.1's numbers to the base of 60.
        yaml_implicit_resolvers: ClassVar[Any] = {
            first: [(tag, pattern) for tag, pattern in resolvers if tag not in _NUMBER_TAGS]
            for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [key.value for key, _ in node.value]
            if twice := sorted({key for key in keys if keys.count(key) > 1}):
                raise ValueError(f"the key {twice[0]!r} stands twice")
            return super().construct_mapping(node, deep)

    Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value))  # 010 is ten
    for tag, pattern in _NUMBER_TAGS.items():
        Loader.add_implicit_resolver(tag, pattern, list("-+.0123456789"))
    return yaml.load(content.decode("utf-8"), Loader)  # a SafeLoader


def _preset(presets: Mapping[str, Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    """Return the values of a preset, which replace defaults; flags and configuration files win."""
    require_choice("--preset", name, tuple(presets))
    return presets[name]


def _checked(flag: Flag, value: Any, where: str) -> Any:
    if value is None and flag.kind != flag.hint:
        return None
    if flag.items is not None:
        if not isinstance(value, list):
            raise SpecError(f"{where} must be a list, got {value!r}")
        return tuple(_scalar(flag.items, item, where) for item in value)
    return _scalar(flag.kind, value, where)


def _scalar(kind: Any, value: Any, where: str) -> Any:
    allowed = {float: (int, float), Path: (str,), read_draft_tokens: (int, str)}.get(kind, (kind,))
    if kind is float and isinstance(value, str):  # YAML 1.1 takes 1e-3 for a text
        try:
            return float(value)
        except ValueError:
            pass
    if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
        raise SpecError(f"{where} must be {_WANTED[kind]}, got {value!r}")
    if isinstance(value, str):
        _require_text(kind, value, where)
    return kind(value)


def _require_text(kind: Any, value: str, where: str) -> None:
    """Refuse texts that no file or model can take: an empty path, a NUL, half of a surrogate pair.

    Raises:
        SpecError: names the value.
    """
    if kind is Path and not value:
        raise SpecError(f"{where} must name a path, got ''")
    if "\0" in value or any("\ud800" <= character <= "\udfff" for character in value):
        raise SpecError(f"{where} must be text without NUL and lone surrogates, got {value!r}")


_NUMBER_TAGS = {
    "tag:yaml.org,2002:int": re.compile(r"^[-+]?\d+$"),
    "tag:yaml.org,2002:float": re.compile(
        r"^[-+]?(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][-+]?\d+)?$|^[-+]?\.inf$|^\.nan$"
    ),
}
_WANTED = {
    read_draft_tokens: "a whole number, or a text",
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    Path: "a path",
}


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _default_of(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _add(group: Any, flag: Flag) -> None:
    if flag.positional:
        many = flag.items is not None
        optional = flag.default is not dataclasses.MISSING
        nargs = {(True, False): "+", (True, True): "*", (False, True): "?"}.get((many, optional))
        kind = _converter(flag.items or flag.kind)
        action = _Tuple if many else "store"
        group.add_argument(
            flag.name, type=kind, nargs=nargs, metavar=flag.key.upper(), action=action, help=_escaped(flag.help)
        )
        return
    ending = "" if "Default:" in flag.help else _default_text(flag.default)
    options: dict[str, Any] = {"dest": flag.name, "help": _escaped(flag.help + ending)}
    if flag.kind is bool:
        options |= {"action": argparse.BooleanOptionalAction}
    elif flag.repeated:
        options |= {"action": _Append, "type": _converter(flag.items), "metavar": _METAVARS[flag.items]}
    elif flag.items is not None:
        metavar = _METAVARS[flag.items]
        options |= {"type": _commas(_converter(flag.items)), "metavar": f"{metavar},{metavar}"}
    else:
        options |= {"type": _converter(flag.kind), "metavar": _METAVARS[flag.kind]}
    group.add_argument(flag.option, **options)


_METAVARS = {read_draft_tokens: "N", int: "N", float: "X", str: "TEXT", Path: "PATH"}


def _usage(flag: Flag) -> str:
    name = flag.key.upper() + (" ..." if flag.items is not None else "")
    return name if flag.default is dataclasses.MISSING else f"[{name}]"


def command_in(path: Path) -> str | None:
    """Return the command that a configuration belongs to; None where it does not say, or cannot be read."""
    import yaml

    try:
        written = _read_yaml(read_file(path, "--config"))
    except (ReprieveError, ValueError, RecursionError, yaml.YAMLError):
        return None
    return written.get(_COMMAND) if isinstance(written, dict) else None


def _default_text(default: Any) -> str:
    """Return the default as the end of a help text; empty if the text itself has to state it."""
    if default is dataclasses.MISSING or default in (None, (), "") or isinstance(default, bool):
        return ""
    if isinstance(default, tuple):
        return f" Default: {','.join(f'{item:g}' if isinstance(item, float) else str(item) for item in default)}."
    return f" Default: {default:g}." if isinstance(default, float) else f" Default: {default}."


def _escaped(text: str) -> str:
    return text.replace("%", "%%")


def _converter(kind: Any) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        if kind is Path and not text:
            raise argparse.ArgumentTypeError("must name a path, got ''")
        try:
            return kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be {_WANTED[kind]}, got {text!r}") from None

    return convert


def _commas(convert: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    def split(text: str) -> tuple[Any, ...]:
        items = tuple(convert(part.strip()) for part in text.split(",") if part.strip())
        if not items:
            raise argparse.ArgumentTypeError(f"must be numbers separated by commas, got {text!r}")
        return items

    return split


class _Append(argparse.Action):
    """Adds a value to a tuple that begins empty, whatever the default is."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, (*getattr(namespace, self.dest, ()), values))


class _Tuple(argparse.Action):
    """Several values by position, as a tuple; none of them leaves the default."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if values:
            setattr(namespace, self.dest, tuple(values))


class _Help(argparse.HelpFormatter):
    """Wide enough for sentences."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=110)


class _Parser(argparse.ArgumentParser):
    """Says which flag a misspelt one may have meant."""

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        if unknown:
            known = [name.removeprefix("--") for name in self._option_string_actions if name.startswith("--")]
            near = difflib.get_close_matches(unknown[1].removeprefix("--"), known, n=1)
            message = f"unknown flag {unknown[1]}" + (f"; did you mean --{near[0]}?" if near else "")
        elif message.endswith("expected one argument"):
            message += "; a value that begins with - is written --flag=-1"
        self.exit(2, f"{self.prog}: {message}\n`{self.prog} --help` lists the flags.\n")
