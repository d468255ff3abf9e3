import dataclasses
import enum

import pytest

from muse_jit.constants.base import ConstantSet, field_types
from muse_jit.errors import ConstantsError


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass(frozen=True, eq=False)
class Everything(ConstantSet):
    number: int | float | bool = 1
    text: str = "a"
    nothing: int | None = None
    colour: Colour = Colour.RED
    shape: tuple[int, ...] = (1, 2)
    pair: tuple[int, str] = (1, "x")


@dataclasses.dataclass(frozen=True)
class WithDataclassEquality(ConstantSet):
    number: int | float | bool = 1


@pytest.mark.parametrize("cls", [Everything, WithDataclassEquality])
def test_one_true_and_one_point_zero_are_three_constants(cls):
    sets = {cls(number=1): "int", cls(number=True): "bool", cls(number=1.0): "float"}
    assert [sets[cls(number=n)] for n in (1, True, 1.0)] == ["int", "bool", "float"]
    assert cls(number=1) != cls(number=1.0)


def test_signed_zeros_differ_and_equal_values_from_different_objects_are_equal():
    assert Everything(number=0.0) != Everything(number=-0.0)
    assert Everything(text="".join(["a", "b"])) == Everything(text="ab")
    assert hash(Everything(text="".join(["a", "b"]))) == hash(Everything(text="ab"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("text", 1),
        ("nothing", "x"),
        ("colour", "red"),
        ("shape", [1, 2]),
        ("shape", (1, True)),
        ("pair", (1,)),
        ("number", None),
        ("number", float("inf")),
        ("number", float("nan")),
    ],
)
def test_a_wrong_type_names_the_field_and_the_value(field, value):
    with pytest.raises(ConstantsError, match=rf"Everything\.{field} is ") as caught:
        Everything(**{field: value})
    assert repr(value) in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("annotation", [list, dict, object, bytes, set, "tuple[list, ...]"])
def test_annotations_outside_the_closed_list_are_refused(annotation):
    cls = dataclasses.make_dataclass("Bad", [("field", annotation)], bases=(ConstantSet,), frozen=True, eq=False)
    with pytest.raises(ConstantsError, match=r"Bad\.field is annotated"):
        field_types(cls)


def test_an_enum_and_its_value_cannot_share_a_field():
    cls = dataclasses.make_dataclass("Mixed", [("field", Colour | str)], bases=(ConstantSet,), frozen=True, eq=False)
    with pytest.raises(ConstantsError, match="an enum cannot share a field"):
        field_types(cls)


def test_dict_form_round_trips_with_exact_types():
    original = Everything(number=2.0, nothing=3, colour=Colour.BLUE, shape=(), pair=(5, "y"))
    plain = original.as_dict()
    assert plain["colour"] == "blue"
    assert plain["shape"] == []
    again = Everything.from_dict(plain)
    assert again == original
    assert type(again.number) is float


def test_dict_form_names_unknown_and_missing_fields():
    with pytest.raises(ConstantsError, match="no field 'wrong'"):
        Everything.from_dict({"wrong": 1})
    cls = dataclasses.make_dataclass("Needy", [("needed", int)], bases=(ConstantSet,), frozen=True, eq=False)
    with pytest.raises(ConstantsError, match="Needy needs the field 'needed'"):
        cls.from_dict({})


def test_sets_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Everything().text = "b"
