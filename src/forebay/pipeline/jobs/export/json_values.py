"""JSON values with exact numbers: how they are parsed, which types hold them, and as what.

No number changes on its way from a message to a table. The parser keeps the text of numbers. A
double holds a number only if its shortest decimal form has the value of the text: it holds 0.1, and
does not hold 9007199254740993 or 1e400. A value that a type does not hold is Unfit for it.

`parse` makes Python objects of a value, `Shape` collects what the types of a batch must hold, and
`converter` makes a function that turns parsed values into values for Arrow. None of them does I/O,
and the same functions run on Spark's executors and in tests.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

import orjson

if TYPE_CHECKING:
    from pyspark.sql.types import ArrayType, DataType, StructType


NESTING_MAX: Final = 20
"""The deepest nesting of a value. Readers of Parquet take minutes for 30 lists in each other."""

PRECISION: Final = 38
"""The digits of a decimal column: the most that all the table formats have."""

SCALE: Final = 18
"""The digits after the point that a decimal column has room for, if the batch leaves them."""

_SAFE: Final = 2**53
"""Up to here, all whole numbers are exact as doubles."""

_LONG: Final = range(-(2**63), 2**63)
_LONG_DIGITS: Final = 19
_SHORT: Final = 16
"""A text of this length has a point and at most 15 digits, which a double always holds."""

_EXPONENT_DIGITS: Final = 6
_NUMBER: Final = re.compile(r"-?([0-9]+)(?:\.([0-9]+))?(?:[eE]([-+]?)0*([0-9]+))?")
_SPACES: Final = b" \t\n\r"
_SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F]")


class Unfit(Exception):
    """A record that cannot be a row of the table: it goes to the table of rejected records."""

    def __init__(self, text: str, path: str = "") -> None:
        super().__init__(text)
        self.text = text
        self.path = path

    def inside(self, place: str) -> Unfit:
        """The same, seen from the object or list around it."""
        return Unfit(self.text, place + self.path)

    @property
    def reason(self) -> str:
        return f"${self.path} {self.text}" if self.path else self.text


# ---- parsing ------------------------------------------------------------------------------------


class Number(str):
    """The JSON text of a number that is neither a short whole one nor a float."""

    __slots__ = ()


def parse(value: bytes | None) -> dict[str, Any]:
    """The JSON object in a value, with numbers as int, as float, or as Number.

    A float is one whose JSON text orjson writes again. Unfit if the value is not exactly one JSON
    object by RFC 8259, has a field twice or text that is not Unicode, or is nested too deeply.
    """
    if not value:
        raise Unfit("the value is empty")
    try:
        found = orjson.loads(value)
        again = orjson.dumps(found)
    except (ValueError, TypeError):
        return _parse_slowly(value)
    # orjson rounds numbers, and keeps the last of two fields. If it writes the same text again,
    # apart from spaces, then it has done neither. It is four times as fast as Python's parser.
    if again != value and again.translate(None, _SPACES) != value.translate(None, _SPACES):
        return _parse_slowly(value)
    if type(found) is not dict:
        raise Unfit("the value is not a JSON object")
    if value.count(b"{") + value.count(b"[") > NESTING_MAX:
        _require_plain(found, 1)
    return found


def _parse_slowly(value: bytes) -> dict[str, Any]:
    """As `parse`, for any value, and without floats."""
    try:
        text = str(value, "utf-8")
    except UnicodeDecodeError:
        raise Unfit("the value is not UTF-8") from None
    try:
        found = _decode(text)
    except RecursionError:
        raise _too_deep() from None
    except ValueError:
        raise Unfit("the value is not one JSON document") from None
    if type(found) is not dict:
        raise Unfit("the value is not a JSON object")
    # Looking at every object and string takes long, and only these can be wrong.
    if text.count("{") + text.count("[") > NESTING_MAX or _SURROGATE.search(text):
        _require_plain(found, 1)
    return found


def _integer(text: str) -> int | Number:
    # Python refuses to convert very long texts, and takes quadratic time for long ones.
    return int(text) if len(text) <= _LONG_DIGITS and text != "-0" else Number(text)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise Unfit("the value has a field twice")
    return found


def _constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")  # NaN and Infinity, which Python accepts otherwise


_decode: Final = json.JSONDecoder(
    parse_int=_integer,
    parse_float=Number,
    parse_constant=_constant,
    object_pairs_hook=_object,
).decode


def _too_deep() -> Unfit:
    return Unfit(f"the value is nested deeper than {NESTING_MAX} levels")


def _require_plain(value: Any, depth: int) -> None:
    kind = type(value)
    if kind is str:
        try:
            value.encode()
        except UnicodeEncodeError:
            raise Unfit("the value has a surrogate without its pair, which is no text") from None
    elif kind is dict or kind is list:
        if depth > NESTING_MAX:
            raise _too_deep()
        for each in value:
            _require_plain(each, depth + 1)
        for each in value.values() if kind is dict else ():
            _require_plain(each, depth + 1)


def text_of(value: Any) -> str:
    """A parsed value as JSON without spaces; numbers keep their text."""
    kind = type(value)
    if kind is Number:
        return str(value)
    if kind is dict:
        pairs = (f"{text_of(name)}:{text_of(each)}" for name, each in value.items())
        return "{" + ",".join(pairs) + "}"
    if kind is list:
        return "[" + ",".join(map(text_of, value)) + "]"
    return orjson.dumps(value).decode()


# ---- numbers ------------------------------------------------------------------------------------


def _normal(text: str) -> tuple[str, int] | None:
    """The digits without zeros at either end, and the power of ten that they are multiplied with.

    ("", 0) for zero. None if the exponent is so large that no type holds the number.
    """
    match = _NUMBER.fullmatch(text)
    assert match is not None, text
    whole, fraction, sign, power = match.groups("")
    digits = whole + fraction
    kept = digits.rstrip("0")
    exponent = len(digits) - len(kept) - len(fraction)
    kept = kept.lstrip("0")
    if not kept:
        return "", 0
    if len(power) > _EXPONENT_DIGITS:
        return None
    return kept, exponent + int(f"{sign}{power or 0}")


def _as_double(text: str) -> float | None:
    """The number as a double; None if the shortest form of that is another number."""
    value = float(text)
    if len(text) <= _SHORT and "e" not in text and "E" not in text and "." in text:
        return value
    shortest = repr(value)
    if shortest == text:
        return value
    return value if math.isfinite(value) and _normal(shortest) == _normal(text) else None


def _as_long(text: str) -> int | None:
    """The number, if it is whole and fits 64 bits: 1e5 and 2.0 are whole."""
    normal = _normal(text)
    if normal is None or normal[1] < 0 or sum(_extent(normal)) > _LONG_DIGITS:
        return None
    value = int(f"{'-' * text.startswith('-')}{normal[0] or 0}{'0' * normal[1]}")
    return value if value in _LONG else None


def _as_decimal(text: str, precision: int, scale: int) -> Decimal | None:
    normal = _normal(text)
    if normal is None:
        return None
    before, after = _extent(normal)
    if before > precision - scale or after > scale:
        return None
    return Decimal(f"{'-' * text.startswith('-')}{normal[0] or 0}E{normal[1]}")


def _extent(normal: tuple[str, int]) -> tuple[int, int]:
    """How many digits the number has before and after the point."""
    digits, exponent = normal
    return max(len(digits) + exponent, 0), max(-exponent, 0)


# ---- the types that a batch needs ---------------------------------------------------------------

_BOOLEAN, _STRING, _NUMERIC, _OBJECT, _LIST = 1, 2, 4, 8, 16


class Shape:
    """What the values of one field in a batch have in common; it grows with each value."""

    __slots__ = (
        "after",
        "before",
        "double",
        "element",
        "fields",
        "fraction",
        "high",
        "kinds",
        "long",
        "low",
        "settled",
    )

    def __init__(self) -> None:
        self.kinds = 0
        self.low = self.high = 0
        """The bounds of the numbers that are int."""
        self.fraction = False
        """Whether a number has a fraction or an exponent."""
        self.long = self.double = True
        """Whether these types hold all numbers. `long` is about whole numbers alone."""
        self.before = self.after = 0
        """The most digits before and after the point, of the numbers that are Number."""
        self.fields: dict[str, Shape] = {}
        self.element: Shape | None = None
        self.settled: object = None
        """A Python type: more values of it change nothing."""

    def add(self, value: Any) -> None:
        """Adds a parsed value. Nulls count for nothing."""
        kind = type(value)
        if kind is str:
            self.kinds |= _STRING
            self.settled = str
        elif kind is int:
            self.kinds |= _NUMERIC
            if value > self.high:
                self.high = value
            elif value < self.low:
                self.low = value
            if not -_SAFE <= value <= _SAFE:
                self.long = self.long and value in _LONG
                self.double = self.double and _as_double(str(value)) is not None
        elif kind is float:
            self._add_number(repr(value), exact=True)
        elif kind is Number:
            self._add_number(value)
        elif kind is dict:
            self.kinds |= _OBJECT
            fields = self.fields
            for name, each in value.items():
                if each is not None:
                    shape = fields.get(name)
                    if shape is None:
                        shape = fields[name] = Shape()
                    if type(each) is not shape.settled:
                        shape.add(each)
        elif kind is list:
            self.kinds |= _LIST
            if self.element is None:
                self.element = Shape()
            element = self.element
            for each in value:
                if type(each) is not element.settled:
                    element.add(each)
        elif kind is bool:
            self.kinds |= _BOOLEAN
            self.settled = bool

    def _add_number(self, text: str, *, exact: bool = False) -> None:
        self.kinds |= _NUMERIC
        point = text.find(".")
        plain = "e" not in text and "E" not in text
        if point < 0 and plain:
            self.long = self.long and _as_long(text) is not None
        else:
            self.fraction = True
        if not exact:
            self.double = self.double and _as_double(text) is not None
        if plain and point > 0:
            # As below, for most numbers in a third of the time.
            before = 0 if text.startswith(("0", "-0")) else point - text.startswith("-")
            after = len(text.rstrip("0")) - point - 1
        else:
            normal = _normal(text)
            before, after = (PRECISION + 1, 0) if normal is None else _extent(normal)
        self.before = max(self.before, before)
        self.after = max(self.after, after)

    def merge(self, other: Shape) -> None:
        """Adds the values of another shape."""
        self.kinds |= other.kinds
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self.fraction = self.fraction or other.fraction
        self.long, self.double = self.long and other.long, self.double and other.double
        self.before = max(self.before, other.before)
        self.after = max(self.after, other.after)
        for name, shape in other.fields.items():
            self.fields.setdefault(name, Shape()).merge(shape)
        if other.element is not None:
            self.element = self.element or Shape()
            self.element.merge(other.element)

    def state(self) -> list[Any]:
        """The shape as JSON can have it."""
        numbers = [self.low, self.high, self.fraction, self.long, self.double]
        fields = {name: each.state() for name, each in self.fields.items()}
        element = None if self.element is None else self.element.state()
        return [self.kinds, *numbers, self.before, self.after, fields, element]

    @classmethod
    def from_state(cls, state: list[Any]) -> Shape:
        made = cls()
        made.kinds, made.low, made.high, made.fraction, made.long, made.double = state[:6]
        made.before, made.after, fields, element = state[6:]
        made.fields = {name: cls.from_state(each) for name, each in fields.items()}
        made.element = None if element is None else cls.from_state(element)
        return made

    def struct(self) -> StructType:
        """The fields that have a type, by name."""
        from pyspark.sql.types import StructField, StructType

        found = ((name, self.fields[name].type()) for name in sorted(self.fields))
        return StructType([StructField(name, kind) for name, kind in found if kind is not None])

    def type(self) -> DataType | None:
        """The type that holds every value exactly; None if all are null, [] or {}."""
        from pyspark.sql.types import ArrayType, BooleanType, StringType

        if self.kinds == _NUMERIC:
            return self._number_type()
        if self.kinds == _BOOLEAN:
            return BooleanType()
        if self.kinds == _OBJECT:
            struct = self.struct()
            return struct if struct.fields else None
        if self.kinds == _LIST:
            element = None if self.element is None else self.element.type()
            return None if element is None else ArrayType(element)
        return StringType() if self.kinds else None

    def _number_type(self) -> DataType:
        from pyspark.sql.types import DecimalType, DoubleType, LongType, StringType

        before = max(self.before, len(str(max(self.high, -self.low))))
        if not self.fraction:
            if self.long:
                return LongType()
            return DecimalType(PRECISION, 0) if before <= PRECISION else StringType()
        if self.double:
            return DoubleType()
        scale = SCALE if before <= PRECISION - SCALE and self.after <= SCALE else self.after
        return DecimalType(PRECISION, scale) if before + scale <= PRECISION else StringType()


# ---- values for the columns ---------------------------------------------------------------------


class Rename(Protocol):
    def __call__(self, name: str, /, *, top: bool = True) -> str: ...


def row_converter(fields: StructType, rename: Rename) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A function from parsed objects to rows: dicts of what Arrow takes, under the new names.

    It raises Unfit for a value that its field's type does not hold exactly, and for a field that
    the fields do not have.
    """
    return _struct_converter(fields, rename, top=True)


def _converter(kind: DataType, rename: Rename) -> Callable[[Any], Any]:
    """The function for one type. It is not called for nulls."""
    from pyspark.sql.types import ArrayType, BooleanType, StringType, StructType

    if isinstance(kind, StructType):
        return _struct_converter(kind, rename, top=False)
    if isinstance(kind, ArrayType):
        return _list_converter(kind, rename)
    if isinstance(kind, StringType):
        return _text
    if isinstance(kind, BooleanType):
        return _boolean
    return _number_converter(kind)


def _text(value: Any) -> str:
    return value if type(value) is str else text_of(value)


def _boolean(value: Any) -> bool:
    if type(value) is bool:
        return value
    raise _mismatch(value, "boolean")


def _number_converter(kind: DataType) -> Callable[[Any], Any]:
    from pyspark.sql.types import DecimalType, DoubleType, LongType

    name = kind.simpleString()
    native: object = None  # the Python type of which all values fit
    small: Callable[[int], Any] | None
    exact: Callable[[str], Any] | None
    if isinstance(kind, LongType):
        small, exact = int, _as_long
    elif isinstance(kind, DoubleType):
        native, small, exact = float, float, _as_double
    elif isinstance(kind, DecimalType):
        exact = partial(_as_decimal, precision=kind.precision, scale=kind.scale)
        small = None
    else:
        small = exact = None  # somebody else has added the column: it takes nothing

    def convert(value: Any) -> Any:
        found = type(value)
        if found is native:
            return value
        if found is int and small is not None and -_SAFE <= value <= _SAFE:
            return small(value)
        if exact is None or found not in (int, float, Number):
            raise _mismatch(value, name)
        made = exact(str(value))
        if made is None:
            raise Unfit(f"is a number that does not fit the type {name} exactly")
        return made

    return convert


def _mismatch(value: Any, kind: str) -> Unfit:
    names = {str: "a string", bool: "a boolean", dict: "an object", list: "a list"}
    return Unfit(f"is {names.get(type(value), 'a number')}, which does not fit the type {kind}")


def _list_converter(kind: ArrayType, rename: Rename) -> Callable[[Any], Any]:
    element = _converter(kind.elementType, rename)

    def convert(value: Any) -> list[Any]:
        if type(value) is not list:
            raise _mismatch(value, "array")
        try:
            return [None if each is None else element(each) for each in value]
        except Unfit as error:
            raise error.inside("[*]") from None

    return convert


def _struct_converter(
    kind: StructType, rename: Rename, *, top: bool
) -> Callable[[Any], dict[str, Any]]:
    members = {
        each.name: (rename(each.name, top=top), _converter(each.dataType, rename))
        for each in kind.fields
    }
    lower = {name.lower() for name in members}

    def convert(value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            raise _mismatch(value, "struct")
        made = {}
        for name, each in value.items():
            if each is None:
                continue
            member = members.get(name)
            try:
                if member is not None:
                    made[member[0]] = member[1](each)
                elif not _is_empty(each):
                    raise _without_column(name, lower)
            except Unfit as error:
                raise error.inside(f"['{name}']") from None
        return made

    return convert


def _without_column(name: str, lower: Collection[str]) -> Unfit:
    twin = name.lower() in lower
    return Unfit("differs from another field in case alone" if twin else "has no column")


def _is_empty(value: Any) -> bool:
    """Whether a value has no type: null, [], {}, and those of nothing else."""
    if type(value) is dict:
        return all(map(_is_empty, value.values()))
    return value is None or (type(value) is list and all(map(_is_empty, value)))
