"""Inductor's C++ builds: kernels in few units, headers built on demand, vector units probed once
a host.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.util
import logging
import os
import platform
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch._inductor import async_compile, codecache, cpp_builder, cpu_vec_isa
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.utils import clear_on_fresh_cache

from dynamo_dist.torch_compat.inductor_code import cache_dir
from dynamo_dist.torch_compat.patching import OwnState, Patch, Upstream, WrapFunction, has

# As many libraries take longer without a compiled header, together, as the header takes: a second
# each.
_WITHOUT = 5


def only_for_builds() -> list[Patch]:
    """Have no header compiled for the first five C++ libraries on a host that has none.

    It lies in no cache folder but in the host's temporary one: a job that starts on a new host
    would spend ten seconds on it. ``codecache.write`` of ``main.cpp``, followed by
    ``_precompile_header``, was seen in 2.13 and 2.14, the folder ``_HEADER_DIR`` in 2.13.
    """
    if not has(codecache, "_precompile_header", off="a first compile on a host builds headers"):
        return []
    last = threading.local()
    without: set[str] = set()

    def write(upstream: Upstream, *args: Any, **kwargs: Any) -> tuple[str, str]:
        key, path = upstream(*args, **kwargs)
        last.source = path
        return key, path

    def precompile(upstream: Upstream, *args: object, **kwargs: object) -> str:
        source = getattr(last, "source", "")
        if source.endswith(".main.cpp"):
            if len(without | {source}) <= _WITHOUT and not _is_compiled():
                without.add(source)
                return ""
        return str(upstream(*args, **kwargs))

    return [
        WrapFunction(codecache, "write", write),
        WrapFunction(codecache, "_precompile_header", precompile),
    ]


def _is_compiled() -> bool:
    """Return whether this host has a compiled header: of this torch and compiler, most likely."""
    folder = getattr(codecache, "_HEADER_DIR", None)
    return folder is not None and any(Path(folder).glob("*.*ch"))


def probed_once_a_host() -> list[Patch]:
    """Have a host's trials of its vector units kept, in Inductor's cache folder, once they have
    succeeded.

    Each process builds libraries for each unit and starts a Python that loads each: ten on a recent
    processor before the first graph, and none of torch's caches holds what came out. A unit that is
    part of one that has built and loaded the same code is not tried with it. What failed is tried
    again. ``VecISA.check_build`` was seen in 2.13 and 2.14.
    """
    name = "check_build"
    if not has(cpu_vec_isa.VecISA, name, off="each process tries the CPU's vector units anew"):
        return []

    tried: list[Trial] = []  # with success

    def check_build(upstream: Upstream, self: object, code: str) -> bool:
        kept = Path(cache_dir(), "dynamo_dist", "vector_units", _name(self, code))
        trial = _trial(self, code)
        if kept.exists():
            tried.append(trial)
            return True
        if any(map(trial.is_part_of, tried)) or upstream(self, code):
            tried.append(trial)
            with contextlib.suppress(OSError):  # a folder that cannot be written costs the trial
                kept.parent.mkdir(parents=True, exist_ok=True)
                kept.touch()
            return True
        return False

    return [WrapFunction(cpu_vec_isa.VecISA, name, check_build)]


@dataclass(frozen=True, slots=True)
class Trial:
    """Code built for a vector unit and loaded: the unit's words, the compiler's flags, the code,
    what it defines, the host.
    """

    words: frozenset[str]
    flags: frozenset[str]
    of: tuple[str, ...]

    def is_part_of(self, other: Trial) -> bool:
        """Return whether ``other`` is the same trial with more units allowed."""
        return self.of == other.of and self.words <= other.words and self.flags <= other.flags


def _trial(unit: Any, code: str) -> Trial:
    words, flags = (frozenset(each.split()) for each in (str(unit), unit.build_arch_flags()))
    return Trial(words, flags, (code, *unit.build_macro(), *_host()))


def _name(unit: Any, code: str) -> str:
    """Return a digest of all that a trial depends on: its code and flags, compiler, loader,
    torch, Python, this host's CPU.
    """
    fingerprint = str(cpu_vec_isa._get_isa_dry_compile_fingerprint(unit.build_arch_flags()))
    return hashlib.sha256("\0".join((code, fingerprint, *_host())).encode()).hexdigest()[:32]


@functools.cache
def _host() -> tuple[str, ...]:
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    state = library.stat() if library.exists() else None
    return (
        f"{library} {state and (state.st_size, state.st_mtime_ns)}",
        sys.executable,
        sys.version,
        os.environ.get("LD_LIBRARY_PATH", ""),
        *platform.libc_ver(),
        platform.machine(),
        _cpu(),
    )


def _cpu() -> str:
    """Return what Linux says of the first processor that does not vary from one to the next, or
    as it runs.
    """
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
        fixed = ("flags", "Features", "model name", "vendor_id", "stepping", "microcode", "CPU")
        return "\n".join(line for line in lines if line.startswith(fixed))
    return platform.processor()


log = logging.getLogger(__name__)
Function = Callable[..., Any]
# More in one would keep other cores idle; the compiler's bounds on what it inlines are of a unit,
# too.
KERNELS_A_UNIT = 16
_INDEX = Path("dynamo_dist", "kernels")
# Headers, then one function: what may stand in a namespace as it is.
_FORM = re.compile(
    r'(?P<headers>(?:\s*#include [^\n]*\n)+)(?P<before>.*)extern "C"\s+void\s+kernel\((?P<rest>.*)',
    re.DOTALL,
)
_DIRECTIVE = re.compile(r"^\s*#(?!pragma)|extern \"C\"", re.MULTILINE)
_LIFTED = re.compile(r"^\s*#(?:include|define) .*\n", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel that a generated module asks for: its function once the module waits for its
    kernels.
    """

    argtypes: tuple[str, ...]
    source: str


def few_libraries() -> list[Patch]:
    """Build the C++ kernels of a module together, 16 at most to a library, and each once a cache
    folder. The compiler starts on those of a graph while Inductor generates the others.

    What does not build so is built as by torch. ``AsyncCompile.cpp_pybinding`` and ``wait``,
    ``CppPythonBindingsCodeCache.load_async`` and its ``suffix_template`` were seen in 2.13 and
    2.14, ``PythonWrapperCodegen.define_kernel`` too.
    """
    upstream_kernels = async_compile.AsyncCompile
    bindings = getattr(codecache, "CppPythonBindingsCodeCache", None)
    needed = ("load_async", "suffix_template", "call_entry_function", "extra_parse_arg")
    off = "each C++ kernel is a library, which takes longer to build"
    if not has(upstream_kernels, "cpp_pybinding", off=off) or not has(bindings, *needed, off=off):
        return [PoolsOfThisProcess()]

    def cpp_pybinding(
        upstream: Upstream, self: object, argtypes: Sequence[str], source_code: str
    ) -> object:
        if _parts(source_code) is None:
            return upstream(self, argtypes, source_code)
        async_compile.kernel_code_log.info("CPP+Bindings Kernel:\n%s", source_code)
        return Kernel(tuple(argtypes), source_code)

    def wait(upstream: Upstream, self: Any, scope: dict[str, object]) -> None:
        kernels = dict.fromkeys(each for each in scope.values() if type(each) is Kernel)
        parallel = async_compile.get_compile_threads() > 1
        functions = _all_started(kernels, self.submit if parallel else None) if kernels else None
        upstream(self, scope)
        if functions is not None:
            made = functions()
            scope.update({name: made[of] for name, of in scope.items() if type(of) is Kernel})

    def define_kernel(
        upstream: Upstream, self: object, name: str, body: str, *args: object, **kwargs: object
    ) -> None:
        upstream(self, name, body, *args, **kwargs)
        kernel = _kernel_of(body)
        if kernel is not None and async_compile.get_compile_threads() > 1:
            _start_early(_defined.setdefault(self, []), kernel)

    patches: list[Patch] = [
        PoolsOfThisProcess(),
        WrapFunction(upstream_kernels, "cpp_pybinding", cpp_pybinding),
        WrapFunction(upstream_kernels, "wait", wait),
    ]
    if has(PythonWrapperCodegen, "define_kernel", off="kernels are built after all is generated"):
        patches.append(WrapFunction(PythonWrapperCodegen, "define_kernel", define_kernel))
    return patches


class PoolsOfThisProcess(OwnState):
    """A process that was forked after a compile builds with threads of its own.

    The executor that Inductor keeps is copied without its threads, and what is submitted there
    never runs: torch forgets its pool of processes after a fork, not this one.
    ``AsyncCompile.pool`` was seen in 2.13 to 2.15.
    """

    is_registered = False  # for ever: no handler of forks can be taken back
    is_applied = False

    def apply(self) -> None:
        kind = type(self)
        kind.is_applied = True
        if not kind.is_registered and hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=kind._forget)
            kind.is_registered = True

    def undo(self) -> None:
        type(self).is_applied = False

    @classmethod
    def _forget(cls) -> None:
        if not cls.is_applied:
            return
        async_compile.AsyncCompile.pool.cache_clear()
        if _cache.cache_info().currsize:  # of libraries that the parent may not have built yet
            _cache().cache.clear()
        _started_early.clear()


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """Kernels of one library, by digest; ``library`` waits until it is built and returns its
    path.
    """

    kernels: Mapping[str, Kernel]
    library: Callable[[], str]


_functions: dict[str, Function] = {}
_defined: weakref.WeakKeyDictionary[object, list[Kernel]] = weakref.WeakKeyDictionary()
_started_early: dict[str, Unit] = {}


def _kernel_of(body: str) -> Kernel | None:
    """Return the kernel that a definition in a generated module asks for, if it is a C++ one."""
    if not body.startswith("async_compile.cpp_pybinding("):
        return None
    call: Any = ast.parse(body, mode="eval").body
    argtypes, source = map(ast.literal_eval, call.args)
    return None if _parts(source) is None else Kernel(tuple(argtypes), source)


def _start_early(waiting: list[Kernel], kernel: Kernel) -> None:
    """Start building a unit as soon as a graph has defined the kernels that fill it."""
    waiting.append(kernel)
    if len(waiting) < KERNELS_A_UNIT:
        return
    missing = _missing(_by_digest(waiting))
    waiting[:] = missing.values()
    if len(missing) >= KERNELS_A_UNIT:
        unit = _started(missing, async_compile.AsyncCompile.submit)
        _started_early.update(dict.fromkeys(missing, unit))
        waiting.clear()


def _all_started(
    kernels: Iterable[Kernel], submit: Callable[..., object] | None
) -> Callable[[], dict[Kernel, Function]]:
    """Start building what is not there; return what waits for it and returns each kernel's
    function.
    """
    named = _by_digest(kernels)
    missing = _missing(named)
    early = {digest: _started_early[digest] for digest in missing if digest in _started_early}
    rest = {digest: each for digest, each in missing.items() if digest not in early}
    units = [*dict.fromkeys(early.values())]
    units += [_started(each, submit) for each in _batched(rest)]

    def functions() -> dict[Kernel, Function]:
        for unit in units:
            _load(unit)
        return {each: _functions[digest] for digest, each in named.items()}

    return functions


def _batched(kernels: Mapping[str, Kernel]) -> Iterator[dict[str, Kernel]]:
    rest = iter(kernels.items())
    while unit := dict(islice(rest, KERNELS_A_UNIT)):
        yield unit


def _by_digest(kernels: Iterable[Kernel]) -> dict[str, Kernel]:
    command = _command_line()
    return {_digest(each, command): each for each in kernels}


def _missing(kernels: Mapping[str, Kernel]) -> dict[str, Kernel]:
    """Return those that this process has no function of, and the cache folder no library."""
    return {digest: each for digest, each in kernels.items() if _found(digest) is None}


def _started(kernels: Mapping[str, Kernel], submit: Callable[..., Any] | None) -> Unit:
    """Start building a library of these kernels."""
    source = _source(list(kernels.values()))
    return Unit(kernels, _cache().load_async(source, "cpu", submit_fn=submit))


def _load(unit: Unit) -> None:
    """Load the functions of a unit, and note where they are; each by torch alone if this fails."""
    for digest in unit.kernels:
        _started_early.pop(digest, None)
    try:
        path = unit.library()
        loaded = [_function(path, position) for position in range(len(unit.kernels))]
    except Exception as failure:
        reason = str(failure).strip().partition("\n")[0]
        log.warning(
            "%d kernels did not build together (%s): each is built alone.",
            len(unit.kernels),
            reason,
        )
        for digest, kernel in unit.kernels.items():
            _functions[digest] = codecache.CppPythonBindingsCodeCache.load_pybinding(
                kernel.argtypes, kernel.source
            )
        return
    for position, (digest, function) in enumerate(zip(unit.kernels, loaded, strict=True)):
        _functions[digest] = function
        _note(digest, path, position)


def _found(digest: str) -> Function | None:
    """Return the function of a kernel that this process has, or a library in the cache folder."""
    if digest not in _functions:
        try:
            name, _, position = Path(cache_dir(), _INDEX, digest).read_text().rpartition(" ")
            path = str(Path(cache_dir(), name))
            if not name:
                return None
            _functions[digest] = _function(path, int(position))
        except (OSError, ValueError, ImportError):
            return None
    return _functions[digest]


def _note(digest: str, path: str, position: int) -> None:
    place = Path(cache_dir(), _INDEX, digest)
    with contextlib.suppress(OSError):  # what cannot be noted is built again
        name = Path(path).relative_to(cache_dir())
        codecache.write_atomic(str(place), f"{name} {position}", make_dirs=True)


def _function(path: str, position: int) -> Function:
    """Load one kernel of a library. Raises ImportError."""
    guards: Any = torch._C._dynamo.guards
    address = guards._torchinductor_pyobject_tensor_data_ptr
    os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = str(address)
    entry = _entry(position)
    spec = importlib.util.spec_from_file_location(f"{Path(path).stem}.{entry}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no library of kernels")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, entry)


def _entry(position: int) -> str:
    return f"kernel_{position}"


def _source(unit: Sequence[Kernel]) -> str:
    """Return the text of a unit: headers once, each kernel with what binds it to Python in a
    namespace of its own.
    """
    headers: dict[str, None] = {}
    bodies = []
    for position, kernel in enumerate(unit):
        parts = _parts(kernel.source)
        assert parts is not None
        binding = _binding(kernel.argtypes, _entry(position))
        for line in (*parts["headers"].splitlines(), *_LIFTED.findall(binding)):
            headers.setdefault(line.strip())
        body = f"{parts['before']}static void kernel({parts['rest']}\n{_LIFTED.sub('', binding)}"
        bodies.append(f"namespace unit_{position} {{\n{body}\n}}\n")
    return "\n".join([*filter(None, headers), *bodies])


def _parts(source: str) -> dict[str, str] | None:
    """Return the parts of a source that is a function after its headers; None of any other."""
    match = _FORM.fullmatch(source)
    if match is None or _DIRECTIVE.search(match["before"] + match["rest"]):
        return None
    return match.groupdict()


def _binding(argtypes: Sequence[str], entry: str) -> str:
    """Return torch's own code that makes a function of Python of ``kernel``."""
    cache = _cache()
    arguments = ", ".join(
        f"parse_arg<{each.replace('const ', '')}>(args, {n})" for n, each in enumerate(argtypes)
    )
    text: str = cache.suffix_template.format(
        arg_len=len(argtypes),
        call_entry_func=cache.call_entry_function.format(arguments),
        entry_func=entry,
        extra_parse_arg=cache.extra_parse_arg.format(array_len=-1),
    )
    return text


def _digest(kernel: Kernel, command: str) -> str:
    """Return the name of a kernel: of its text, how it is called, and how it is built."""
    text = "\0".join((kernel.source, *kernel.argtypes, command, torch.__version__))
    return hashlib.sha256(text.encode()).hexdigest()


def _command_line() -> str:
    options = cpp_builder.CppTorchDeviceOptions(
        vec_isa=cpu_vec_isa.pick_vec_isa(), device_type="cpu", **_cache().cpp_compile_command_flags
    )
    return str(cpp_builder.CppBuilder("o", "i", options).get_command_line())


@functools.cache
def _cache() -> Any:
    """Torch's cache of libraries with bindings, but of paths: their kernels are loaded one by
    one.
    """

    @clear_on_fresh_cache
    class LibraryPaths(codecache.CppPythonBindingsCodeCache):
        cache: dict[str, Callable[[], Any]] = {}  # noqa: RUF012 - as torch has it

        @staticmethod
        def cache_clear() -> None:
            LibraryPaths.cache.clear()
            _functions.clear()
            _started_early.clear()

        @classmethod
        def _load_library(cls, path: str, key: str) -> Any:
            return path

    return LibraryPaths
