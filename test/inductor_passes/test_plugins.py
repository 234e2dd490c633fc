"""Plugins by entry point: in order of names, off by name, gone when they fail."""

import sys
from importlib.metadata import EntryPoint
from types import ModuleType

import pytest

from inductor_passes import plugins


@pytest.fixture
def installed(monkeypatch):
    """``installed(name=value, ...)``: entry points that load these values; a class raises."""

    def install(**values):
        module = ModuleType("plugins_of_a_test")
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        entries = [
            EntryPoint(n, f"{module.__name__}:{n}", "group") for n in sorted(values, reverse=True)
        ]
        monkeypatch.setattr(plugins.importlib.metadata, "entry_points", lambda group: entries)

    return install


class Registered(list):
    def save(self):
        before = list(self)
        return lambda: self.__setitem__(slice(None), before)

    def use(self, plugin):
        self.append(plugin)
        if plugin == "fails":
            raise KeyError("half-way")


def test_by_name_and_nothing_stays_of_one_that_fails(installed, caplog):
    installed(b="fails", a="first", c="last")
    registered = Registered()
    assert plugins.load_plugins("group", registered.use, registered.save) == {
        "b": "KeyError: 'half-way'"
    }
    assert registered == ["first", "last"]
    assert "INDUCTOR_PASSES_PLUGINS_OFF=b" in caplog.text


def test_one_that_is_off_is_not_even_imported(installed, monkeypatch):
    installed(a="first", b="fails")
    monkeypatch.setenv(plugins.OFF, " b ,x")
    registered = Registered()
    assert plugins.load_plugins("group", registered.use, registered.save) == {}
    assert registered == ["first"]


def test_sources_of_the_whole_package_count(tmp_path, monkeypatch):
    package = tmp_path / "counted"
    (package / "inner").mkdir(parents=True)
    files = {"__init__.py": "", "inner/__init__.py": "", "inner/a.py": "x = 1", "data.json": "{}"}
    for name, text in files.items():
        (package / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    import counted.inner.a

    def digest():
        plugins.digest_of_sources.cache_clear()
        return plugins.digest_of_sources(counted.inner.a.__name__)

    seen = [digest()]
    for name in files:
        (package / name).write_text(" ")
        seen.append(digest())
    assert len(set(seen)) == 5 and all(seen)
    assert plugins.digest_of_sources("no.such.module") == ""
    for name in ("counted", "counted.inner", "counted.inner.a"):
        sys.modules.pop(name)
