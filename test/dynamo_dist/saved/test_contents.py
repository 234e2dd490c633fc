"""Contents are equal where a program cannot tell values apart, also in two processes."""

from contextvars import ContextVar
from functools import partial

import pytest
from torch.compiler import disable

from dynamo_dist.saved.contents import Contents, NotByContent


def made(constant, mark=None):
    """A class whose method is wrapped by Dynamo, as some of DTensor's are. The wrapper holds an address."""

    class Made:
        @disable(recursive=False)
        def method(self):
            return constant

        other = partial

    Made.method.mark = mark
    return Made


def test_a_class_made_twice_has_one_content():
    first, second = made(1), made(1)
    assert vars(first.method) != vars(second.method)
    assert Contents().kind(first) == Contents().kind(second)


@pytest.mark.parametrize("other", [made(1, mark=2), int])
def test_another_class_has_another(other):
    assert Contents().kind(made(1)) != Contents().kind(other)


def test_a_variable_of_the_context_is_known_by_its_name_and_value():
    def content(name, *values):
        variable = ContextVar(name)
        for each in values:
            variable.set(each)
        return Contents().of(variable)

    assert content("a", 1) == content("a", 0, 1)
    assert len({content("a"), content("a", 1), content("a", 2), content("b")}) == 4


def test_an_object_that_is_none_of_these_has_none():
    with pytest.raises(NotByContent, match=r"an object of builtins\.object"):
        Contents().of(object())
