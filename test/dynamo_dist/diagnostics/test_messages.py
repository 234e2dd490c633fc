"""Dynamo's messages, taken apart."""

from dynamo_dist.diagnostics.breaks import parse

ASYNC = """async_op=True for distributed collectives
  Explanation: `torch.compile` doesn't support `async_op=True for <function all_reduce at 0x7f70795b32e0>
  Hint: Write it otherwise.
    In two lines.
  Hint: Report it.

  Developer debug context: <function all_reduce at 0x7f70795b32e0>, args=[]

 For more details about this graph break, please visit: https://example.org/gb0172.html"""


def test_a_message_has_four_parts():
    (message,) = parse(ASYNC)
    assert message.kind == "async_op=True for distributed collectives"
    assert message.explanation == (
        "`torch.compile` doesn't support `async_op=True for <function all_reduce>"
    )
    assert message.hints == ("Write it otherwise.\nIn two lines.", "Report it.")
    assert message.context == "<function all_reduce>, args=[]"


def test_a_chain_gives_the_first_cause_first():
    text = (
        ASYNC
        + "\n\n*** While handling this graph break, another graph break occurred: ***\n\n"
        + "graph break in loop\n  Explanation: In a loop.\n\n  Developer debug context: f"
    )
    first, second = parse(text)
    assert first == parse(ASYNC)[0]
    assert (second.kind, second.explanation) == ("graph break in loop", "In a loop.")


def test_the_name_of_an_exception_in_front_is_dropped():
    (message,) = parse(
        "UnsafeScriptObjectError: Attempted to access unregistered member on an OpaqueObject\n"
        "  Explanation: Member 'name' is not registered.\n\n"
        "  Developer debug context: value=g, attr=name\n\nfrom user code:\n   File x"
    )
    assert message.kind == "Attempted to access unregistered member on an OpaqueObject"
    assert message.context == "value=g, attr=name"


def test_text_of_another_form_is_the_explanation():
    (message,) = parse("Something odd\nhappened here")
    assert (message.kind, message.explanation) == ("Something odd", "happened here")
    (message,) = parse("")
    assert (message.kind, message.explanation, message.hints) == ("", "", ())
