"""Dynamo leaves our own functions alone where eager mode calls them below a function it gave up
on, and beside one.
"""

import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo import convert_frame, symbolic_convert
from torch._dynamo.exc import Unsupported
from torch._dynamo.types import ConvertFrameReturn
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import dynamo_dist
from dynamo_dist import patch_stack
from dynamo_dist.testing import fake_mesh
from dynamo_dist.torch_compat import patching
from dynamo_dist.torch_compat.patching import SetAttribute, WrapFunction

pytestmark = pytest.mark.usefixtures("enabled")


def written(x):
    for _ in range(2):
        x.mul_(2).add_(x)
        torch._dynamo.graph_break()


def assigned(x):
    for _ in range(2):
        x[0] = 1
        torch._dynamo.graph_break()


def computed(x):
    for _ in range(2):
        torch.special.i0(x.cummax(0)[0]).var(0)
        torch._dynamo.graph_break()


def read(x):
    for _ in range(2):
        x.sum().item()
        torch._dynamo.graph_break()


def laid_out(x):
    for _ in range(2):
        x.redistribute(placements=[Replicate()]).chunk(2)[0].to_local()
        torch._dynamo.graph_break()


def trained(x):
    for _ in range(2):
        y = (x * 2).requires_grad_()
        (y.sort(0)[0].to_local() ** 2).sum().backward()
        torch._dynamo.graph_break()


# These call no method of DTensor that is Python's, and dispatching reads one property there.
OPERATORS_ALONE = (written, assigned, computed, read)
DTENSOR = "/torch/distributed/tensor/_api.py"


@pytest.mark.parametrize("step", [*OPERATORS_ALONE, laid_out, trained])
def test_a_loop_with_a_break(step, monkeypatch):
    tried, upstream = [], convert_frame._compile

    def compile_frame(code, *args, **kwargs):
        tried.append(code)
        return upstream(code, *args, **kwargs)

    monkeypatch.setattr(convert_frame, "_compile", compile_frame)

    with fake_mesh(2) as mesh:
        found, expected = (
            distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)], src_data_rank=None)
            for _ in range(2)
        )
        torch.compile(step, backend="aot_eager")(found)
        step(expected)
    assert tried
    assert [
        code
        for code in tried
        if "/dynamo_dist/" in code.co_filename and "/test/" not in code.co_filename
    ] == []
    if step in OPERATORS_ALONE:
        methods = {each.co_name for each in tried if each.co_filename.endswith(DTENSOR)}
        assert methods <= {"device_mesh"}
    torch.testing.assert_close(found.to_local(), expected.to_local())


PACKAGES = [
    Path(dynamo_dist.__file__).parent,
    Path(dynamo_dist.__file__).parents[1] / "inductor_passes",
]
COMPILERS = ("torch._dynamo", "torch._inductor", "torch._functorch")
# What is traced in the graph of a caller, in place of torch's.
TRACED = ("tracing", "torch_compat/dynamo_modules.py")
# What runs around a graph, though the files beside it are traced.
AROUND = ("tracing/unsharded_parameters.py", "tracing/eager_fallback.py")


def is_ours(code, places=("",)):
    path = Path(code.co_filename)
    return any(path.is_relative_to(each / place) for each in PACKAGES for place in places)


def changed_for_eager():
    """Functions of ours that stand in torch, outside of its compilers: one of each code."""
    found = {}
    for patch in patching._applied:
        owner = getattr(patch, "owner", None)
        module = owner if isinstance(owner, types.ModuleType) else type(owner)
        module = owner.__module__ if isinstance(owner, type) else module.__name__
        value = getattr(patch, "value", None)
        value = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
        if (
            isinstance(patch, SetAttribute)
            and not module.startswith(COMPILERS)
            and isinstance(value, types.FunctionType)
            and is_ours(value.__code__)
        ):
            # What stands before torch's functions has one code; what it calls has its own.
            own = patch.function if isinstance(patch, WrapFunction) else value
            found[own.__code__] = patch, value
    return found


def is_left_alone(code):
    """Whether Dynamo looks at no frame of this code; upstream's check of a frame would miss the
    rest of it.
    """
    look = convert_frame.CatchErrorsWrapper.__call__
    return isinstance(
        look(None, types.SimpleNamespace(f_code=code), None, None), ConvertFrameReturn
    )


def test_dynamo_enters_no_function_that_is_changed_for_eager():
    found = changed_for_eager()
    assert len(found) >= 15
    for code, (patch, function) in found.items():
        assert is_left_alone(code) and is_left_alone(function.__code__), patch.name
        if patch.traced:
            continue

        @torch.compile(backend="eager", fullgraph=True)
        def call(x, function=function):
            return function(x)

        with pytest.raises(Unsupported, match="runs in eager mode, around graphs"):
            call(torch.ones(2))


class Broken(nn.Module):
    """A break in a forward: of one's own, in a loop, by a value, in a submodule."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.first, self.second = kind, nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("shift", torch.zeros(4))

    def forward(self, x):
        x = self.first(x).relu()
        if self.kind == "value" and x.sum() > 1:
            x = x * 2
        for _ in range(2 if self.kind == "loop" else 0):
            torch._dynamo.graph_break()
            x = x + 1
        if self.kind == "call":
            torch._dynamo.graph_break()
        return self.second(x) + self.shift


class InPieces(DistributedDataParallel):
    """A forward of one's own, out of the pieces of DDP's."""

    def forward(self, *inputs):
        given, named = self._pre_forward(*inputs)
        return self._post_forward(self._run_ddp_forward(*given, **named))


def sharded(module):
    fully_shard(module.first)
    return fully_shard(module)


@pytest.fixture
def alone():
    """A real group of this process: DDP's reducer has none of fake ones."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def entered(monkeypatch):
    """The code that Dynamo goes through: of functions compiled, of functions inlined."""
    found, upstream = [], symbolic_convert.InstructionTranslatorBase.run

    def run(self):
        found.append((self.f_code, getattr(self, "parent", None) is not None))
        return upstream(self)

    monkeypatch.setattr(symbolic_convert.InstructionTranslatorBase, "run", run)
    return found


@pytest.mark.parametrize(
    ("wrap", "kind"),
    [
        (DistributedDataParallel, "value"),
        (DistributedDataParallel, "loop"),
        (InPieces, "call"),
        (replicate, "call"),
        (replicate, "loop"),
        (sharded, "value"),
        (sharded, "loop"),
    ],
)
def test_a_break_in_a_wrapped_forward(wrap, kind, alone, entered):
    model = torch.compile(wrap(Broken(kind)), backend="eager")
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
    assert any(not is_inlined for _, is_inlined in entered)
    wrong = [
        (code.co_filename, code.co_name)
        for code, is_inlined in entered
        if is_ours(code)
        and (
            is_ours(code, AROUND)
            or not is_ours(code, TRACED if is_inlined else patch_stack.COMPILED)
        )
    ]
    assert wrong == []
    assert not any(
        code.co_filename.endswith(("_weakrefset.py", "weakref.py")) for code, _ in entered
    )


def test_the_break_says_why_the_wrapper_runs_in_eager_mode(alone):
    report = dynamo_dist.explain(InPieces(Broken("call")))(torch.ones(2, 4))
    assert "changed_for_eager" in {each.cause for each in report.breaks}
