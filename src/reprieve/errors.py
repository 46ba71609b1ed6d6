"""Errors that Reprieve raises deliberately. Messages name the parameter, the allowed values and the value given."""

from __future__ import annotations

import difflib
import importlib
import shlex
from collections.abc import Iterable
from numbers import Integral, Real
from pathlib import Path
from typing import Any


class ReprieveError(Exception):
    """An error that the user can fix; the command line prints it without a traceback."""


class SpecError(ReprieveError, ValueError):
    """A rule, drafter or arm specification that cannot be read, or whose values are out of range."""


class PairError(ReprieveError, ValueError):
    """A target and a draft that cannot work together: different tokenizers or vocabularies."""


class ContextOverflowError(ReprieveError, ValueError):
    """Prompt and requested tokens do not fit into a model's context."""


class UnsupportedModelError(ReprieveError, ValueError):
    """A model without a required feature, such as a cache that can be rolled back, or hidden states."""


class EngineError(ReprieveError):
    """A server or a worker that died or does not respond; earlier answers are kept."""


def import_extra(module: str, extra: str) -> Any:
    """Import a module of an optional extra.

    Raises:
        ReprieveError: the module cannot be imported; the message gives the command that installs the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ReprieveError(f"{module} is not installed: {install_command(extra)} ({error})") from None


def install_command(extra: str) -> str:
    """Return the command that installs an extra: by the package's name, or from the checkout this runs in."""
    checkout = Path(__file__).resolve().parents[2]
    what = f"{checkout}[{extra}]" if (checkout / "pyproject.toml").is_file() else f"reprieve[{extra}]"
    return f"pip install {shlex.quote(what)}"


def require_range(
    name: str, value: float | None, low: float, high: float, *, low_open: bool = False, optional: bool = False
) -> None:
    """Refuse anything but a number in [low, high], or in (low, high] with `low_open`; NaN is always refused.

    Args:
        optional: also allow None.

    Raises:
        SpecError: names the parameter, the range and the value.
    """
    if optional and value is None:
        return
    inside = isinstance(value, Real) and (low < value if low_open else low <= value) and value <= high
    if not inside or isinstance(value, bool):
        bracket = "(" if low_open else "["
        raise SpecError(f"{name} must be in {bracket}{low:g}, {high:g}], got {value!r}")


def require_whole(name: str, value: int | None, low: int, high: int | None = None, *, optional: bool = False) -> None:
    """Refuse anything but a whole number from `low` to `high`, or of at least `low` if `high` is None.

    Args:
        optional: also allow None.

    Raises:
        SpecError: names the parameter, the range and the value.
    """
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise SpecError(f"{name} must be a whole number, got {value!r}")
    if value < low or (high is not None and value > high):
        wanted = f"{low} or more" if high is None else f"in [{low}, {high}]"
        raise SpecError(f"{name} must be {wanted}, got {value!r}")


def require_counts(record: object, *names: str) -> None:
    """Refuse a record with a field among these that is neither None nor a whole number of 1 or more.

    Raises:
        SpecError: names the field, the range and the value.
    """
    for name in names:
        require_whole(name, getattr(record, name), 1, optional=True)


def require_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Refuse a value that is not among the choices.

    Raises:
        SpecError: names the parameter, the choices and the value.
    """
    if value not in choices:
        raise SpecError(f"{name} must be one of {', '.join(map(str, choices))}, got {value!r}")


def did_you_mean(name: str, known: Iterable[str], *, prefix: str = "") -> str:
    """Return the end of an error message that suggests a similar name; empty if there is none."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {prefix}{near[0]}?" if near else ""
