"""Specifications `name:key=value,key=value`, and registries of the classes that they name.

Rules, drafters, tasks, graders and judges share this grammar. A value that contains one of the characters `,|&=:` is
written in double quotes; a double quote in it is doubled.

A class registers itself with a decorator. The modules of its package are imported at the first lookup, so no list of
them is needed. Other packages register a class by an entry point: its name is the name in specifications, its object
the class.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import types
import typing
import warnings
from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from reprieve.errors import ReprieveError, SpecError, did_you_mean

_ARTICLE = {int: "a whole number", float: "a number", str: "a text"}
T = TypeVar("T")
K = TypeVar("K", bound=type)


def parse_spec(text: str, *, what: str) -> tuple[str, dict[str, str]]:
    """Parse `name:a=1,b=x` into the name and a dictionary of strings.

    Args:
        what: noun for error messages, such as `rule` or `task`.

    Raises:
        SpecError: not a text; see `parse_parameters`.
    """
    if not isinstance(text, str):
        raise SpecError(f"{what} must be a text, name:parameter=value, got {text!r}")
    name, _, rest = text.strip().partition(":")
    return name, parse_parameters(rest, where=f"{what} {name}")


def parse_parameters(text: str, *, where: str) -> dict[str, str]:
    """`a=1,b=x` as a dictionary of texts.

    Raises:
        SpecError: a part without `=`, a parameter given twice, or a double quote that is not closed.
    """
    if text.count('"') % 2:
        raise SpecError(f"{where}: a double quote is not closed in {text!r}")
    given: dict[str, str] = {}
    for part in filter(None, split(text, ",")):
        key, equals, value = part.partition("=")
        if not equals or not key.strip():
            raise SpecError(f"{where}: parameters are written name=value, got {part!r}")
        if key.strip() in given:
            raise SpecError(f"{where}: parameter {key.strip()} is given twice")
        value = value.strip()
        if len(value) > 1 and value[0] == value[-1] == '"':
            value = value[1:-1].replace('""', '"')
        given[key.strip()] = value
    return given


def split(text: str, sign: str) -> list[str]:
    """Split at a sign, but not inside double quotes."""
    parts, inside = [""], False
    for character in text:
        inside ^= character == '"'
        if character == sign and not inside:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def parameters_of(kind: Any) -> dict[str, dataclasses.Field[Any]]:
    """The parameters of a dataclass by the names that specifications use: `lambda` for the field `lambda_`."""
    return {f.name.rstrip("_"): f for f in dataclasses.fields(kind) if f.init and f.metadata.get("spec", True)}


def construct(kind: type, given: Mapping[str, str], *, where: str, **fixed: Any) -> Any:
    """An instance of the dataclass `kind` from texts.

    Raises:
        SpecError: an unknown or missing parameter, a value of the wrong type, or one that the class refuses.
    """
    known = parameters_of(kind)
    hints = typing.get_type_hints(kind)
    converted = {}
    for key, text in given.items():
        if key not in known:
            raise SpecError(f"{where} has no parameter {key!r}; it takes {', '.join(sorted(known)) or 'none'}")
        if key == "path" and not text:  # an unset variable in a shell; left out, it means the bundled head
            raise SpecError(f"{where}: path must name a folder or a hub id, got nothing")
        name = known[key].name
        converted[name] = _convert(text, hints[name], f"{where}: {key}")
    required = [
        key
        for key, field in known.items()
        if field.default is field.default_factory is dataclasses.MISSING and field.name not in converted
    ]
    if required:
        raise SpecError(f"{where} needs {', '.join(f'{key}=' for key in required)}")
    return kind(**converted, **fixed)


def format_spec(name: str, record: Any, *, always: str | None = None, without: str | None = None) -> str:
    """The shortest text that `parse_spec` and `construct` turn back into this record.

    Args:
        name: or a specification, which gets the parameters too.
        always: parameter that is written even at its default.
        without: parameter to leave out; the text then describes a different record.
    """
    given = [
        f"{key}={format_value(getattr(record, field.name))}"
        for key, field in parameters_of(record).items()
        if key != without and (key == always or getattr(record, field.name) != field.default)
    ]
    return name + ("," if ":" in name else ":") + ",".join(given) if given else name


def format_value(value: Any) -> str:
    """Return a value as specifications write it."""
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return str(value).lower() if value is None or isinstance(value, bool) else quoted(str(value))


def quoted(text: str) -> str:
    """Quote a text if it has outer spaces or a character of the grammar; double quotes in it are doubled."""
    plain = not any(sign in text for sign in ',|&=:"') and text == text.strip()
    return text if plain else '"' + text.replace('"', '""') + '"'


def _convert(text: str, hint: Any, where: str) -> Any:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if type(None) in options and text.lower() == "none":
        return None
    wanted = next(option for option in options if option is not type(None))
    if wanted is bool:
        if text.lower() not in ("true", "false"):
            raise SpecError(f"{where} must be true or false, got {text!r}")
        return text.lower() == "true"
    try:
        return wanted(text)
    except ValueError:
        raise SpecError(f"{where} must be {_ARTICLE[wanted]}, got {text!r}") from None


class Registry(Generic[T]):
    """Classes by name.

    Args:
        what: noun for messages, such as `rule`.
        package: package whose modules define this project's classes, such as `reprieve.rules`.
        group: entry-point group for the classes of other packages. Default: the name of `package`.
        attribute: class attribute that holds the name.
    """

    def __init__(self, what: str, package: str, *, group: str | None = None, attribute: str = "name") -> None:
        self.what = what
        self.package = package
        self.group = group or package
        self.attribute = attribute
        self._classes: dict[str, type[T]] = {}
        self._imported = False

    def register(self, kind: K) -> K:
        """Class decorator: make `kind` known by its name.

        Raises:
            ReprieveError: the name is taken by another class.
        """
        name: str = getattr(kind, self.attribute)
        taken = self._classes.get(name)
        if taken is not None and (taken.__module__, taken.__qualname__) != (kind.__module__, kind.__qualname__):
            raise ReprieveError(
                f"{self.what} {name!r} is registered twice: by {taken.__module__} and by {kind.__module__}"
            )
        self._classes[name] = kind
        return kind

    def names(self) -> tuple[str, ...]:
        """Return all names in alphabetical order, without importing the plugins' classes."""
        self._import_own()
        return tuple(sorted({*self._classes, *self._plugins}))

    def get(self, name: str) -> type[T]:
        """The class of a name.

        Raises:
            SpecError: an unknown name; lists the known ones.
            ReprieveError: a plugin that cannot be imported.
        """
        self._import_own()
        if name not in self._classes and name in self._plugins:
            self._import_plugin(self._plugins[name])
        if name not in self._classes:
            guess = did_you_mean(name, self.names())
            raise SpecError(f"{self.what} must be one of {', '.join(self.names())}, got {name!r}{guess}")
        return self._classes[name]

    def __iter__(self) -> Iterator[type[T]]:
        """All classes by name; a plugin that cannot be imported is left out with a warning."""
        for name in self.names():
            try:
                yield self.get(name)
            except ReprieveError as error:
                warnings.warn(str(error), stacklevel=2)

    def make(self, spec: str) -> T:
        """Construct the object described by a specification `name:key=value,...`.

        Raises:
            SpecError: an unknown name or parameter, or a value that cannot be read or is out of range.
        """
        name, given = parse_spec(spec, what=self.what)
        item: T = construct(self.get(name), given, where=f"{self.what} {name}")
        return item

    @cached_property
    def _plugins(self) -> dict[str, EntryPoint]:
        """Entry points by name; one whose name is already taken is left out with a warning."""
        self._import_own()
        plugins: dict[str, EntryPoint] = {}
        for entry in entry_points(group=self.group):
            known = self._classes.get(entry.name)
            if entry.name in plugins or (known is not None and known.__module__ != entry.module):
                warnings.warn(
                    f"{self.what} {entry.name!r} of {entry.value} is left out: the name is taken", stacklevel=4
                )
            else:
                plugins[entry.name] = entry
        return plugins

    def _import_own(self) -> None:
        if self._imported:
            return
        path = importlib.import_module(self.package).__path__
        for module in pkgutil.iter_modules(path, prefix=f"{self.package}."):
            importlib.import_module(module.name)
        self._imported = True

    def _import_plugin(self, entry: EntryPoint) -> None:
        try:
            loaded: Any = entry.load()
            if (given := getattr(loaded, self.attribute, None)) != entry.name:
                raise ReprieveError(f"its class must have {self.attribute} = {entry.name!r}, got {given!r}")
            self.register(loaded)
        except Exception as error:  # an import can raise anything; the message must name the package
            source = entry.dist.name if entry.dist is not None else entry.value
            raise ReprieveError(f"{self.what} {entry.name!r} of package {source} cannot be used: {error}") from error
