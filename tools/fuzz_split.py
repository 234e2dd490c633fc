"""Question: does a graph that is cut into parts compute, on all ranks, what it did whole?

    python tools/fuzz_split.py --programs 3000 # small whole numbers in float64: every bit python
    tools/fuzz_split.py --programs 1000 --floats # any numbers in float32: within 1e-5 of float64
    python tools/fuzz_split.py --programs 300 --joint # training: the joint graph is cut, then made
    forward and backward python tools/fuzz_split.py --programs 1000 --unequal # parts that do not
    divide rows, and symbols, as ranks that follow have python tools/fuzz_split.py --programs 300
    --plant joins # a fault, to be found

A program, its inputs, and where and in how many parts it is cut, in one region or several, are
drawn from its number alone. All ranks run in this process, in lockstep. Prints one JSON object and
exits with 1 if a program failed.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from inductor_passes.split import rules
from inductor_passes.split.candidates import Laid, Way, from_inputs, from_inside, lay, like
from inductor_passes.split.cut import Cutter, cut_all
from inductor_passes.split.price import BACKWARD, FORWARD
from inductor_passes.split.region import Region
from inductor_passes.split.rules.rows import Addends, Routed
from inductor_passes.split.rules.rule import SUM, Cut, InParts, One, may_be_unequal, unequal_parts
from inductor_passes.testing import fake_group, trace
from inductor_passes.torch_compat.aot import is_joint

sys.path.insert(0, str(Path(__file__).parents[1] / "test" / "support"))

from fuzzing.lockstep import run_in_lockstep
from fuzzing.parts import RANKS, SHAPES, drawn, halves, step_of, trained

EQUAL, UNEQUAL = (2, 4), (2, 3, 5)  # numbers of parts: rows divide into all of the first
MOST_WAYS = 3  # to cut one program in regions of their own

TOLERANCE = (
    1e-5  # of the largest element or of 1, whichever is more, beside what float32 loses uncut
)


def joins() -> None:
    """Parts are joined the last first."""
    whole = Cutter._joined
    Cutter._joined = lambda self, node, cut, parts: whole(self, node, cut, parts[::-1])  # type: ignore[method-assign]


def sums() -> None:
    """A sum over the parts lacks the last."""
    whole = Cutter._compute

    def wrong(self: Cutter, node: fx.Node, step: InParts) -> None:
        whole(self, node, step)
        if step.out == SUM:
            self._wholes[node] = self._wholes[node].all_input_nodes[0]  # what the last was added to

    Cutter._compute = wrong  # type: ignore[method-assign]


def gathers() -> None:
    """A gathered value is taken to lie in one block."""
    target = torch.ops._c10d_functional.all_gather_into_tensor.default
    rule = rules.RULES[target]

    def wrong(*given: object) -> InParts:
        step = rule(*given)  # type: ignore[arg-type]
        return InParts(Cut(step.out.dim), step.reads)  # type: ignore[union-attr]

    rules.RULES[target] = wrong  # type: ignore[assignment]


def orders() -> None:
    """Tokens are put where those of another part were."""
    _of_another_part(lambda cut, value: isinstance(cut, Routed) and cut.points is not None)


def counts() -> None:
    """Tokens are sent by the counts of another part."""
    _of_another_part(lambda cut, value: isinstance(cut, Addends) and not isinstance(value, Tensor))


def _of_another_part(which: Callable[[One, object], bool]) -> None:
    whole = Cutter._part

    def wrong(self: Cutter, node: fx.Node, cut: One, i: int) -> fx.Node:
        other = self._count - 1 - i if which(cut, node.meta["val"]) else i
        return whole(self, node, cut, other)

    Cutter._part = wrong  # type: ignore[method-assign]


FAULTS: dict[str, Callable[[], None]] = {
    f.__name__: f for f in (joins, sums, gathers, orders, counts)
}


def tried(number: int, exact: bool, unequal: bool = False) -> tuple[int, str, int]:
    """Cut one program as is drawn, twice; how many launches were cut, what is wrong, and the
    most regions.
    """
    choose = random.Random(number)
    dtype = torch.float64 if exact else torch.float32
    symbols = unequal and choose.random() < 0.5
    graph = trace(drawn(number, exact), *SHAPES, dtype=dtype, dynamic=symbols)
    graph.eliminate_dead_code()
    inputs = [_inputs(random.Random(number + rank), exact, dtype) for rank in range(RANKS)]
    expected = _run(graph, inputs)
    truth = None
    if not exact:
        wide = trace(drawn(number, exact), *SHAPES, dtype=torch.float64)
        truth = _run(wide, [[x.double() for x in given] for given in inputs])
    launches = most = 0
    for parts in UNEQUAL if unequal else EQUAL:
        made = copy.deepcopy(graph)
        found = _regions(made, choose, parts)
        if not found:
            continue
        said = _said(found)
        launches += sum(len(region.launches) for region in found)
        most = max(most, len(found))
        try:
            cut_all(made, found)
            made.lint()
            got = _run(made, inputs)
        except Exception as error:
            return launches, f"{said}: {error!r:.300}", most
        if wrong := _wrong(got, expected, truth):
            return launches, f"{said}: {wrong}", most
    return launches, "", most


def trained_in_parts(number: int, exact: bool) -> tuple[int, str, int]:
    """Cut the joint graph of one training step, and let AOTAutograd make two graphs of it; as
    ``tried``.
    """
    choose = random.Random(number)
    dtype = torch.float64 if exact else torch.float32
    inputs = [_inputs(random.Random(number + rank), exact, dtype) for rank in range(RANKS)]
    expected = step_of(
        halves(trained(number, exact), dtype, lambda joint: None), inputs, inputs[0][1]
    )
    truth = None
    if not exact:
        wide = halves(trained(number, exact), torch.float64, lambda joint: None)
        precise = [[x.double() for x in given] for given in inputs]
        truth = step_of(wide, precise, precise[0][1])
    launches = most = 0
    said = ""

    def cut(joint: fx.Graph) -> None:
        nonlocal launches, said, most
        if found := _regions(joint, choose, parts):
            said = _said(found)
            launches += sum(len(region.launches) for region in found)
            most = max(most, len(found))
            cut_all(joint, found)
            joint.lint()

    for parts in EQUAL:  # noqa: B007 - ``cut`` reads it
        try:
            found = step_of(halves(trained(number, exact), dtype, cut), inputs, inputs[0][1])
        except Exception as error:
            return launches, f"{said}: {error!r:.300}", most
        if wrong := _wrong(found, expected, truth):
            return launches, f"{said}: {wrong}", most
    return launches, "", most


def _regions(graph: fx.Graph, choose: random.Random, parts: int) -> list[Region]:
    """Regions that share no node: the first in ``parts`` parts from an input or from inside,
    others in as many as are drawn.
    """
    ways: list[Way] = []
    for _ in range(choose.randint(1, MOST_WAYS)):
        laid_out = Laid(graph)
        for way in ways:
            laid_out.lay(way)
        counts = UNEQUAL if may_be_unequal() else EQUAL
        count = choose.choice(counts) if ways else parts
        front = list(from_inputs(graph, count))
        listed = [region for region in front if region.launches]
        listed += from_inside(graph, count, front, laid_out.taken)
        if not listed:
            break
        region = _drawn_of(listed, choose)
        half = choose.choice(("", "", FORWARD, BACKWARD)) if is_joint(graph) else ""
        ways.append(Way(like(region.seed), region.cut, count, half))
    return [region for of_way in lay(graph, ways) for region in of_way]


def _said(found: Sequence[Region]) -> str:
    return "; ".join(f"{each.parts} parts along {each.cut} of %{each.seed}" for each in found)


def _drawn_of(listed: list[Region], choose: random.Random) -> Region:
    """Any region; every other time one that exchanges tokens, if there is one."""
    routed = [region for region in listed if "by token" in " ".join(region.launches.values())]
    return choose.choice(routed if routed and choose.random() < 0.5 else listed)


def _inputs(choose: random.Random, exact: bool, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(choose.randrange(2**31))
    if exact:
        return [torch.randint(-2, 3, s, generator=generator).to(dtype) for s in SHAPES]
    return [torch.randn(s, generator=generator).to(dtype) for s in SHAPES]


def _run(graph: fx.Graph, inputs: list[list[Tensor]]) -> list[Tensor]:
    return pytree.tree_leaves(run_in_lockstep([graph] * RANKS, inputs))


def _wrong(found: list[Tensor], expected: list[Tensor], truth: list[Tensor] | None) -> str:
    for at, (a, b) in enumerate(zip(found, expected, strict=True)):
        if (a.dtype, a.shape, a.stride()) != (b.dtype, b.shape, b.stride()):
            return f"value {at} is another kind of tensor"
        if truth is None:
            if not torch.equal(a, b):
                return f"value {at} differs in {int((a != b).sum())} elements"
            continue
        scale = max(1.0, float(truth[at].abs().max()))
        lost = float((b - truth[at]).abs().max())
        if float((a - truth[at]).abs().max()) > lost + TOLERANCE * scale:
            return (
                f"value {at} is {float((a - truth[at]).abs().max()):.1e} from float64, uncut "
                f"{lost:.1e}"
            )
    return ""


def main(argv: list[str] | None = None) -> int:
    """Run programs; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="number of the first program")
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--floats", action="store_true", help="any numbers, in float32")
    parser.add_argument("--plant", choices=sorted(FAULTS), help="a fault to be found")
    parser.add_argument("--joint", action="store_true", help="training, cut before the partition")
    parser.add_argument("--unequal", action="store_true", help="unequal parts, and symbols")
    options = parser.parse_args(argv)
    start = time.monotonic()
    if options.plant:
        FAULTS[options.plant]()
    launches, cut_programs, several, failures = 0, 0, 0, []
    one = trained_in_parts if options.joint else partial(tried, unequal=options.unequal)
    allowed = unequal_parts() if options.unequal else contextlib.nullcontext()
    with fake_group(RANKS), allowed:
        for number in range(options.seed, options.seed + options.programs):
            found, wrong, regions = one(number, not options.floats)
            several += regions > 1
            launches, cut_programs = launches + found, cut_programs + (found > 0)
            if wrong:
                failures.append(f"program {number}: {wrong}")
    result = {
        "torch": torch.__version__,
        "seed": options.seed,
        "numbers": "float32" if options.floats else "whole",
        "what": "training" if options.joint else "regions",
        "parts": "unequal" if options.unequal else "equal",
        "programs": options.programs,
        "cut": cut_programs,
        "in_several_regions": several,
        "launches_cut": launches,
        "failures": failures[:20],
        "failed": len(failures),
        "seconds": round(time.monotonic() - start, 1),
    }
    print(json.dumps(result))
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
