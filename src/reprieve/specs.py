"""Parser of specifications `name:key=value,key=value`, the grammar of rules, drafters, tasks, graders and judges.

A value that contains one of the characters `,|&=:` is written in double quotes; a double quote in it is doubled.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any

from reprieve.errors import SpecError

SIGNS = ",|&=:"
_ARTICLE = {int: "a whole number", float: "a number", str: "a text"}


def parse_spec(text: str, *, what: str) -> tuple[str, dict[str, str]]:
    """Parse `name:a=1,b=x` into the name and a dictionary of strings.

    Args:
        what: noun for error messages, such as `rule` or `task`.

    Raises:
        SpecError: see `parse_parameters`.
    """
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
        given[key.strip()] = _unquoted(value.strip())
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


def construct(kind: type, given: Mapping[str, str], *, where: str) -> Any:
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
        name = known[key].name
        converted[name] = _convert(text, hints[name], f"{where}: {key}")
    required = [key for key, field in known.items() if _is_required(field) and field.name not in converted]
    if required:
        raise SpecError(f"{where} needs {', '.join(f'{key}=' for key in required)}")
    return kind(**converted)


def format_spec(name: str, record: Any, *, always: tuple[str, ...] = (), without: tuple[str, ...] = ()) -> str:
    """The shortest text that `parse_spec` and `construct` turn back into this record.

    Args:
        always: parameters that are written even at their default.
        without: parameters to leave out; the text then describes a different record.
    """
    given = [
        f"{key}={_format(getattr(record, field.name))}"
        for key, field in parameters_of(record).items()
        if key not in without and (key in always or getattr(record, field.name) != field.default)
    ]
    return name + (":" + ",".join(given) if given else "")


def quoted(text: str) -> str:
    """Quote a text if it has outer spaces or a character of the grammar; double quotes in it are doubled."""
    plain = not any(sign in text for sign in (*SIGNS, '"')) and text == text.strip()
    return text if plain else '"' + text.replace('"', '""') + '"'


def _unquoted(text: str) -> str:
    """Inverse of `quoted`."""
    return text[1:-1].replace('""', '"') if len(text) > 1 and text[0] == text[-1] == '"' else text


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


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


def _format(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return str(value).lower() if value is None or isinstance(value, bool) else quoted(str(value))
