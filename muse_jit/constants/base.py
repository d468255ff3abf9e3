"""What every constant set has in common: exact field types, one identity, plain-value export.

A constant set is a frozen dataclass that derives from `ConstantSet`. Its fields are the key: there is no other place
where a specialisation could be described, and no hand-written hash that could forget one.
"""

import dataclasses
import enum
import math
import types
import typing
from typing import Any, ClassVar

from muse_jit.errors import ConstantsError

_SCALARS = (int, float, bool, str, type(None))


@dataclasses.dataclass(frozen=True, eq=False)
class ConstantSet:
    """Base of the constant sets of all kernel families.

    Field types come from a closed list: `int`, `float`, `bool`, `str`, `None`, an `enum.Enum`, tuples of these, and
    unions of these. Each value must have exactly an annotated type: `True` is not an `int` here and `1` is not a
    `float`, so equal-looking sets never stand for one another. Two sets are equal when their class, the exact types
    and the exact bits of all values are (0.0 and -0.0 differ). Infinities and NaN are
    refused.

    Raises:
        ConstantsError: (a ValueError) naming the field, the value and what is allowed.
    """

    family: ClassVar[str] = ""
    """The kernel family that this set specialises, as it is registered."""

    _identity: ClassVar[tuple[Any, ...]]  # of each instance; a class variable to dataclass, so that it is no field
    _hash: ClassVar[int]

    def __post_init__(self) -> None:
        identity = []
        for name, allowed in field_types(type(self)).items():
            value = getattr(self, name)
            _check_type(self, name, value, allowed)
            identity.append(_exact(value))
        self.validate()
        object.__setattr__(self, "_identity", tuple(identity))
        object.__setattr__(self, "_hash", hash((type(self), self._identity)))

    def validate(self) -> None:
        """Check the values and their combinations. Raises `ConstantsError`."""

    def validate_for(self, arch: str) -> None:
        """Check that this set is possible on a GPU architecture such as "sm_90a". Raises `ConstantsError`."""

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return type(self) is type(other) and self._identity == other._identity

    def __hash__(self) -> int:
        return self._hash

    def as_dict(self) -> dict[str, Any]:
        """Field name to value; enum members by value, tuples as lists: what JSON can hold."""
        return {field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> typing.Self:
        """The inverse of `as_dict`, exact types included.

        Raises:
            ConstantsError: a field is missing or unknown, or its value is not possible.
        """
        known = field_types(cls)
        for name in values:
            if name not in known:
                raise ConstantsError(f"{cls.__name__} has no field {name!r}; its fields are {', '.join(known)}")
        required = {f.name for f in dataclasses.fields(cls) if f.default is f.default_factory is dataclasses.MISSING}
        for name in sorted(required - values.keys()):
            raise ConstantsError(f"{cls.__name__} needs the field {name!r}")
        return cls(**{name: _from_plain(value, known[name]) for name, value in values.items()})

    def refuse(self, field: str, allowed: str) -> typing.NoReturn:
        """Raise the error for one field: its name, its value, and `allowed` in words."""
        raise ConstantsError(f"{type(self).__name__}.{field} is {getattr(self, field)!r}; {allowed}")

    def require_choice(self, field: str, choices: tuple[str, ...]) -> None:
        """Refuse a value outside `choices`."""
        if getattr(self, field) not in choices:
            self.refuse(field, "allowed: " + ", ".join(repr(c) for c in choices))

    def require_eps(self, field: str) -> None:
        """Refuse an epsilon that is not finite and positive."""
        value = getattr(self, field)
        if not (math.isfinite(value) and value > 0.0):
            self.refuse(field, "it must be finite and positive")


_field_types: dict[type, dict[str, tuple[Any, ...]]] = {}


def field_types(cls: type[ConstantSet]) -> dict[str, tuple[Any, ...]]:
    """Field name to the tuple of types (or tuple aliases) its value may have, in field order; worked out once.

    Raises:
        ConstantsError: a field is annotated with something outside the closed list.
    """
    if cls not in _field_types:
        _field_types[cls] = _read_field_types(cls)
    return _field_types[cls]


def _read_field_types(cls: type[ConstantSet]) -> dict[str, tuple[Any, ...]]:
    if cls.__eq__ is not ConstantSet.__eq__:
        # A subclass decorated without eq=False got dataclass's comparison, in which 1 == True == 1.0.
        cls.__eq__ = ConstantSet.__eq__  # type: ignore[method-assign]
        cls.__hash__ = ConstantSet.__hash__  # type: ignore[method-assign]
    hints = typing.get_type_hints(cls)
    result = {}
    for field in dataclasses.fields(cls):
        union = typing.get_origin(hints[field.name]) in (typing.Union, types.UnionType)
        members = typing.get_args(hints[field.name]) if union else (hints[field.name],)
        enums = [m for m in members if isinstance(m, type) and issubclass(m, enum.Enum)]
        if enums and set(members) - {enums[0], type(None)}:
            # Both would have the same plain form, and so the same key.
            raise ConstantsError(f"{cls.__name__}.{field.name}: an enum cannot share a field with another type")
        for member in members:
            if not _possible(member):
                raise ConstantsError(
                    f"{cls.__name__}.{field.name} is annotated {member!r}; a constant is an int, float, bool, str, "
                    "None, an enum, or a tuple of these"
                )
        result[field.name] = tuple(members)
    return result


def _possible(member: Any) -> bool:
    if typing.get_origin(member) is tuple:
        return all(m is Ellipsis or _possible(m) for m in typing.get_args(member))
    return member in _SCALARS or (isinstance(member, type) and issubclass(member, enum.Enum))


def _matches(value: Any, member: Any) -> bool:
    if typing.get_origin(member) is tuple:
        if type(value) is not tuple:
            return False
        args = typing.get_args(member)
        if len(args) == 2 and args[1] is Ellipsis:
            return all(_matches(v, args[0]) for v in value)
        return len(value) == len(args) and all(_matches(v, a) for v, a in zip(value, args, strict=True))
    return type(value) is member


def _check_type(owner: ConstantSet, name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if not any(_matches(value, member) for member in allowed):
        names = " or ".join("None" if m is type(None) else getattr(m, "__name__", str(m)) for m in allowed)
        owner.refuse(name, f"it must be of type {names} exactly, not {type(value).__name__}")
    if type(value) is float and not math.isfinite(value):
        owner.refuse(name, "it must be finite: a key holds numbers that JSON can write and read back")


def _exact(value: Any) -> Any:
    """A value whose `==` is exactness: with its type, floats by their bits."""
    if type(value) is tuple:
        return (tuple, tuple(_exact(v) for v in value))
    return (type(value), value.hex() if type(value) is float else value)


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    return [_plain(v) for v in value] if type(value) is tuple else value


def _from_plain(value: Any, allowed: tuple[Any, ...]) -> Any:
    for member in allowed:
        if isinstance(member, type) and issubclass(member, enum.Enum) and type(value) is not member:
            for choice in member:
                if type(choice.value) is type(value) and choice.value == value:
                    return choice
        if typing.get_origin(member) is tuple and isinstance(value, list):
            args = typing.get_args(member)
            inner = [args[0]] * len(value) if args[-1] is Ellipsis else list(args)
            if len(inner) == len(value):
                return tuple(_from_plain(v, (a,)) for v, a in zip(value, inner, strict=True))
    return value
