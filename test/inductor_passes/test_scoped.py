"""Functions of torch that are others in a block, for one thread, whatever other threads do
meanwhile.
"""

import threading

import pytest

from inductor_passes.torch_compat import wrapped


def louder(upstream):
    return lambda word: upstream(word) + "!"


@pytest.fixture(params=["function", "static", "class"])
def owner(request):
    class Owner:
        def function(word):
            return word

        @staticmethod
        def static(word):
            return word

        @classmethod
        def class_(cls, word):
            return word

    name = request.param.replace("class", "class_")
    return Owner, name


def test_a_block_ends_as_it_found_it(owner):
    cls, name = owner
    found = vars(cls)[name]
    with wrapped(cls, name, louder), wrapped(cls, name, louder):
        assert getattr(cls, name)("a") == "a!!"
    assert vars(cls)[name] is found and getattr(cls, name)("a") == "a"


def test_blocks_of_two_threads_may_end_in_any_order(owner):
    cls, name = owner
    found = vars(cls)[name]
    begun, end, heard = threading.Event(), threading.Event(), []

    def other():
        with wrapped(cls, name, louder):
            begun.set()
            end.wait(10)
            heard.append(getattr(cls, name)("b"))

    with wrapped(cls, name, louder):
        thread = threading.Thread(target=other)
        thread.start()
        begun.wait(10)
        assert getattr(cls, name)("a") == "a!"
    assert getattr(cls, name)("a") == "a"  # the other's block is not this thread's
    end.set()
    thread.join(10)
    assert heard == ["b!"] and vars(cls)[name] is found


def test_what_somebody_puts_in_its_place_meanwhile_stays(owner):
    cls, name = owner
    with wrapped(cls, name, louder):
        setattr(cls, name, staticmethod(lambda word: "theirs"))
    assert getattr(cls, name)("a") == "theirs"


def test_a_function_that_is_not_there_is_no_error():
    with wrapped(threading, "no_such_name", louder):
        pass
