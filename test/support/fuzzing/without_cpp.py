"""Inductor on the CPU without a C++ compiler: its own lowering, fusions, order and wrapper, kernels
in Python.

What is generated is a module as always, so that compile caches, the order of calls and the reuse of
buffers are Inductor's own. Private names seen in torch 2.13.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sympy
import torch
from torch._inductor import cpu_vec_isa
from torch._inductor.codegen import common
from torch._inductor.codegen.cpp import CppScheduling, KernelGroup
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.ops_handler import DefaultHandler
from torch._inductor.sizevars import SimplifyIndexing
from torch._inductor.utils import IndentedBuffer
from torch._inductor.virtualized import NullKernelHandler, V
from torch.utils._ordered_set import OrderedSet
from torch.utils._sympy.symbol import SymT, symbol_is_type

# Symbols that a kernel takes as arguments; all others are its own.
GIVEN = (SymT.SIZE, SymT.UNBACKED_INT, SymT.PRECOMPUTED_SIZE, SymT.FLOAT, SymT.UNBACKED_FLOAT)


class _Kernel(NullKernelHandler):
    """What stands for the kernel in work while its buffers are allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.args = common.KernelArgs()
        self.inplace_update_buffers: dict[str, str] = {}


class _Lines(DefaultHandler):
    """Writes the body of one loop as assignments, a line an operator."""

    def __init__(self, code: IndentedBuffer, args: Any, sizes: Sequence[Any], reduced: int) -> None:
        self.code, self.args, self.reduced = code, args, reduced
        self.names = itertools.count()
        self.shape = self._tuple(sizes)

    def expression(self, expr: Any) -> str:
        """Python over the loop's indices and the kernel's arguments."""
        expr = sympy.sympify(expr)
        sizes = {
            symbol: sympy.Symbol(self.args.size(symbol), integer=True)
            for symbol in sorted(expr.free_symbols, key=str)
            if symbol_is_type(symbol, GIVEN)
        }
        return str(common.PythonPrinter().doprint(expr.xreplace(sizes)))

    def _tuple(self, sizes: Sequence[Any]) -> str:
        return "(" + "".join(f"{self.expression(size)}, " for size in sizes) + ")"

    def _assign(self, text: str) -> str:
        name = f"tmp{next(self.names)}"
        self.code.writeline(f"{name} = {text}")
        return name

    def _default(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in ("index_expr", "value_expr"):
            args = (self.expression(args[0]), *args[1:])
        values = [_text(arg) for arg in args]
        values += [f"{key}={_text(value)}" for key, value in kwargs.items()]
        return self._assign(f"loops.op({name!r}, {', '.join(values)})")

    def constant(self, value: Any, dtype: torch.dtype) -> Any:
        value = f"float({str(value)!r})" if isinstance(value, float) else self.expression(value)
        return self._assign(f"loops.op('constant', {value}, {dtype})")

    def load(self, name: str, index: Any) -> Any:
        return self._assign(f"loops.load({self.args.input(name)}, {self.expression(index)})")

    def store(self, name: str, index: Any, value: Any, mode: Any = None) -> None:
        memory = self.args.output(name)
        where = self.expression(index)
        self.code.writeline(f"loops.store({memory}, {where}, {value}, {self.shape}, {mode!r})")

    def store_reduction(self, name: str, index: Any, value: Any) -> None:
        memory, where = self.args.output(name), self.expression(index)
        self.code.writeline(f"loops.store({memory}, {where}, {value}, {value}.shape)")

    def reduction(self, dtype: Any, src_dtype: Any, reduction_type: str, value: Any) -> Any:
        value = f"({', '.join(value)})" if isinstance(value, tuple) else value
        given = f"{reduction_type!r}, {dtype}, {value}, {self.shape}, {self.reduced}"
        result = self._assign(f"loops.reduce({given})")
        if reduction_type.startswith("welford"):
            return tuple(self._assign(f"{result}[{at}]") for at in range(3))
        return result

    def indirect_indexing(
        self, index: Any, size: Any, check: bool = True, wrap_neg: bool = True
    ) -> Any:
        text = f"loops.wrapped({index}, {self.expression(size)})" if wrap_neg else f"{index}"
        return sympy.Symbol(self._assign(text), integer=True)

    def masked(self, mask: Any, body: Callable[[], Any], other: Any) -> Any:
        inside = body()
        return self._assign(
            f"loops.op('masked', {mask}, {inside}, loops.op('constant', float({str(other)!r}), "
            f"{inside}.dtype))"
        )

    def check_bounds(self, expr: Any, size: Any, lower: bool, upper: bool) -> None:
        pass


def _text(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)


class PythonKernels(CppScheduling):
    """Inductor's scheduling for the CPU; a fused node becomes a Python function.

    Its loops run one after another, so none may write over what a later one reads: no buffer is
    updated in place.
    """

    backend_features = OrderedSet([common.BackendFeature.REDUCE_TO_SINGLE_ELEMENT])

    def can_fuse_vertical_outer_loop(self, node1: Any, node2: Any) -> bool:
        return False  # that one needs kernels with local buffers

    def codegen_node(self, node: Any) -> None:
        code, kernel = IndentedBuffer(), _Kernel()
        nodes = node.get_nodes()
        with V.set_kernel_handler(kernel), code.indent():
            for each in nodes:
                each.mark_run()
            for each in nodes:
                self._loop(code, kernel.args, each)
        definitions, call, _, types = kernel.args.python_argdefs()
        wrapper = V.graph.wrapper_code
        name = f"loops_{wrapper.next_kernel_suffix()}"
        lines = IndentedBuffer()
        lines.writeline(f"def {name}({', '.join(each.full_name() for each in definitions)}):")
        with lines.indent():
            for old, new in kernel.args.aliases():
                lines.writeline(f"{old} = {new}")
        wrapper.header.splice("\n\nimport torch\nfrom fuzzing import loops\n")
        wrapper.header.splice(lines.getvalue() + code.getvalue())
        wrapper.generate_kernel_call(
            name, [str(each) for each in call], triton=False, arg_types=types
        )
        self.free_buffers_in_scheduler()

    @staticmethod
    def _loop(code: IndentedBuffer, args: Any, node: Any) -> None:
        outer, inner = node._sizes
        sizes = [*outer, *inner]
        symbols = [sympy.Symbol(f"x{at}", integer=True) for at in range(len(sizes))]
        lines = _Lines(code, args, sizes, len(inner))
        names = "".join(f"{symbol}, " for symbol in symbols)
        code.writeline(f"[{names}] = loops.indices({lines.shape})")
        ranges = dict(zip(symbols, sizes, strict=True))
        with V.set_ops_handler(SimplifyIndexing(lines, ranges)):
            node._body(symbols[: len(outer)], symbols[len(outer) :])

    def codegen_template(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("templates are C++")

    def flush(self) -> None:
        self.kernel_group = KernelGroup()


@contextlib.contextmanager
def without_cpp() -> Iterator[None]:
    """Compiles in the block make Python kernels for the CPU; no compiler is started."""
    common.init_backend_registration()
    table = common.device_codegens
    before, pick = table["cpu"], cpu_vec_isa.pick_vec_isa
    common.register_backend_for_device("cpu", PythonKernels, PythonWrapperCodegen)
    cpu_vec_isa.pick_vec_isa = lambda: cpu_vec_isa.invalid_vec_isa
    try:
        yield
    finally:
        table["cpu"] = before
        cpu_vec_isa.pick_vec_isa = pick
