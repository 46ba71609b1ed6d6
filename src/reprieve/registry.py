"""Registry of named classes from this package and from other packages.

A class registers itself with a decorator. The modules of its package are imported at the first lookup, so no list of
them is needed. Other packages register a class by an entry point: its name is the name in specifications, its object
the class.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
import warnings
from collections.abc import Iterator
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from reprieve.errors import ReprieveError, SpecError
from reprieve.specs import construct, parse_spec

T = TypeVar("T")
K = TypeVar("K", bound=type)


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
            close = difflib.get_close_matches(name, self.names(), n=1)
            guess = f"; did you mean {close[0]}?" if close else ""
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
