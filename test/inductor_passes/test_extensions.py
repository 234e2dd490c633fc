"""Extensions: their options, commands, cache keys, log lines and checks, as plugins register them."""

import logging
from typing import ClassVar

import pytest
import torch

import inductor_passes as ip
from inductor_passes import __main__, registry
from inductor_passes.errors import OptionError
from inductor_passes.extension import Degraded
from inductor_passes.inductor.cache_keys import name_groups_alike
from inductor_passes.inductor.hooks import Attachment
from inductor_passes.inductor.session import compile_with_passes, graph_passes_only
from inductor_passes.pass_options import PassOptions, extra_options, split
from inductor_passes.testing import fake_group, trace


def checked(value, options):
    if not isinstance(value, int):
        raise OptionError(f"Option 'depth' is {value!r}.")
    return value


class Theirs(ip.Extension):
    name = "theirs"
    options: ClassVar = {"depth": ip.Option("How deep.", 0, checked)}
    commands: ClassVar = {"depths": ("inductor_passes.cli.schedule", "a command of theirs")}
    log_artifact = "dist_depths"

    def __init__(self):
        self.key, self.calls = "", []

    def cache_key(self):
        return self.key

    def before_compile(self):
        self.calls.append("compile")

    def before_call(self):
        return lambda: self.calls.append("call")

    def log_lines(self, record):
        return [f"depth of {record.phase}"]

    def degraded(self):
        return [Degraded("depth", "It is shallow.", "Dig.")]


@pytest.fixture
def theirs():
    extension = Theirs()
    ip.register_extension(extension)
    yield extension
    ip.unregister(extension)


def test_an_option_is_checked_and_in_the_digest(theirs):
    own, _ = split({"depth": 3})
    assert own.extra == {"depth": 3} and own.digest() != PassOptions().digest()
    assert split({"depth": 0})[0] == PassOptions()
    with pytest.raises(OptionError, match="'depth' is 'far'"):
        split({"depth": "far"})
    ip.unregister(theirs)
    with pytest.raises(OptionError, match="Unknown option 'depth'"):
        split({"depth": 3})
    with pytest.raises(OptionError, match="Unknown option 'depth'"):
        PassOptions(extra={"depth": 3})


def test_options_of_one_compile_replace_those_of_all(theirs):
    of_all, of_one = PassOptions(extra={"depth": 3}, exact=True), PassOptions(extra={"depth": 4})
    assert of_all.updated(of_one, ["depth"]) == PassOptions(extra={"depth": 4}, exact=True)
    assert of_all.updated(PassOptions(), ["depth", "exact"]) == PassOptions()
    assert of_all.updated(of_one, []) == of_all


def test_a_command_is_listed(theirs, capsys):
    with pytest.raises(SystemExit):
        __main__.main(["--help"])
    assert "a command of theirs" in capsys.readouterr().out


def test_a_key_changes_with_what_it_says(theirs):
    without = Attachment(PassOptions()).uuid("after")
    theirs.key = "deep"
    assert Attachment(PassOptions()).uuid("after") != without


def test_compiled_code_is_checked_before_each_call(theirs):
    torch._dynamo.reset()
    with graph_passes_only():
        double = torch.compile(lambda x: x * 2, backend=compile_with_passes)
        assert [double(torch.ones(())) for _ in range(2)] == [2, 2]
    assert theirs.calls == ["compile", "call", "call"]


def test_lines_are_logged_under_its_package(theirs, caplog):
    graph = trace(
        lambda x: torch.ops._c10d_functional.wait_tensor(
            torch.ops._c10d_functional.all_reduce(x, "sum", "0")
        ),
        [4],
    )
    package = type(theirs).__module__.rpartition(".")[0]
    with fake_group(2), caplog.at_level(logging.INFO, logger=package):
        Attachment(PassOptions()).improve(graph, "inference", lowers=False)
    assert "depth of inference" in caplog.text


def test_names_are_unique(theirs):
    ip.register_extension(theirs)
    assert registry.extensions().count(theirs) == 1
    with pytest.raises(OptionError, match="brings 'depth'"):
        ip.register_extension(type("Others", (Theirs,), {"name": "others", "commands": {}})())
    with pytest.raises(OptionError, match="not an extension"):
        ip.register_extension(Theirs)


def test_an_option_of_the_core_stays_the_cores():
    option = ip.Option("Theirs.", None, lambda value, options: value)
    extension = type("Greedy", (ip.Extension,), {"name": "g", "options": {"exact": option}})()
    ip.register_extension(extension)
    try:
        assert "exact" not in extra_options() and split({"exact": True})[0].exact
    finally:
        ip.unregister(extension)


def test_groups_that_code_holds_keep_their_names(theirs, monkeypatch):
    monkeypatch.setattr(Theirs, "binds_groups", lambda self: True)
    with fake_group(2):
        name_groups_alike(None)  # looks at no graph
