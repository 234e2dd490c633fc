"""The catalog of causes: what it recognises, and that its advice is sound."""

import re
import string
import textwrap

import pytest

from dynamo_dist.diagnostics.breaks import CATALOG, BreakMessage, Cause, advise
from dynamo_dist.diagnostics.own_break_causes import OWN

SKIPPED = "Attempted to call function marked as skipped"
METHOD = "Unsupported method call"
OPAQUE = "Attempted to access unregistered member on an OpaqueObject"
PYBIND = "Dynamo does not know how to trace the builtin `<unknown module>.pybind11_object.__new__.`"


@pytest.mark.parametrize(
    ("cause", "kind", "explanation", "context", "calls"),
    [
        ("recompile_limit", "Dynamo recompile limit exceeded", "", "", ()),
        ("async_op", "async_op=True for distributed collectives", "", "", ()),
        ("work_method", METHOD, "how to trace method `wait` of class `FakeWork`", "", ()),
        (
            "nn_functional_collective",
            "Observed exception",
            "",
            "RuntimeError('torch.distributed.nn.functional.all_reduce is not supported under')",
            (),
        ),
        (
            "from_local_run_check",
            SKIPPED,
            "",
            "",
            ("torch/distributed/tensor/_utils.py: check_tensor_meta: x",),
        ),
        (
            "object_collective",
            OPAQUE,
            "",
            "value=g, attr=_device_types",
            (
                "a.py: f: dist.all_gather_object(l, x)",
                "torch/distributed/distributed_c10d.py: all_gather_object: y",
            ),
        ),
        ("group_created_inside", SKIPPED, PYBIND, "", ("a.py: f: g = dist.new_group([0, 1])",)),
        (
            "mesh_created_inside",
            "Unsupported context manager",
            "",
            "",
            ("a.py: init_device_mesh:",),
        ),
        ("opaque_member", OPAQUE, "Member 'name' is not registered", "value=g, attr=name", ()),
        ("opaque_member", METHOD, "method `name` of class `ProcessGroup`", "", ()),
        (
            "opaque_result",
            "Opaque object member with method-type USE_REAL returned a reference-type opaque "
            "object.",
            "",
            "Method name: '_flat'",
            (),
        ),
        ("mesh_context", "Unsupported context manager", "", "on DeviceMesh((dp=2))", ()),
        ("point_to_point", "P2P compilation disabled for isend/irecv", "", "", ()),
        ("barrier", SKIPPED, PYBIND, "", ("a.py: f: x", "torch/c10d.py: barrier: opts = x()")),
        ("ddp_inside", METHOD, "method `set_runtime_stats_and_log` of class `Logger`", "", ()),
        ("fsdp_inside", SKIPPED, "", "", ("torch/distributed/fsdp/_state.py: pre: disable()",)),
        ("distribute_tensor_inside", SKIPPED, PYBIND, "", ("a.py: distribute_tensor: x",)),
        ("dtensor_factory_inside", SKIPPED, "", "", ("torch/t.py: _dtensor_init_helper: x",)),
        ("dtensor_built_inside", "Failed to convert args/kwargs to proxy", "", "DTensorSpec", ()),
        ("dtensor_internals", SKIPPED, "torch._C._DTensor_compute_global_tensor_info", "", ()),
        ("mode_inside", SKIPPED, "guards.set_is_in_mode_without_ignore_compile_internals", "", ()),
        (
            "mixed_tensors",
            "RuntimeError when making fake tensor call",
            "aten.nll_loss_forward.default got mixed torch.Tensor and DTensor",
            "",
            (),
        ),
        ("resolve_group_by_name", SKIPPED, "_resolve_process_group", "", ()),
        ("collective_without_graph_form", SKIPPED, PYBIND, "", ("torch/c10d.py: broadcast: o()",)),
        ("backward_inside", "Unsupported Tensor.backward() call", "", "", ()),
        (
            "module_backward_hook",
            "Module-level backwards hooks require compiled autograd.",
            "",
            "",
            (),
        ),
        ("data_dependent_branch", "Data-dependent branching", "", "", ()),
        (
            "data_dependent_value",
            "Unsupported Tensor.item() call with capture_scalar_outputs=False",
            "",
            "",
            (),
        ),
        (
            "data_dependent_guard",
            "UserError",
            "Could not guard on data-dependent expression Eq(u0, 1) (unhinted: x)",
            "",
            (),
        ),
        ("clock_inside", SKIPPED, "trace the builtin `time.perf_counter.` This", "", ()),
        ("debug_level_inside", SKIPPED, "", "qualname: get_debug_level, skip reason", ()),
        ("history_inside", "Tensor with grad_fn()", "", "", ()),
        ("history_inside", "Tensor.retain_grad() with AOTDispatcher", "", "", ()),
        ("print_inside", "Failed to trace builtin operator", "builtin operator `print` w", "", ()),
        ("warning_inside", SKIPPED, "", "module: _warnings, qualname: warn, skip reason", ()),
        ("compile_disabled", "Skip calling `torch.compiler.disable()`d function", "", "", ()),
    ],
)
def test_recognised(cause, kind, explanation, context, calls):
    advice = advise(BreakMessage(kind, explanation, (), context), calls)
    assert advice.cause == cause
    assert "$" not in advice.why + advice.fix


def test_every_entry_is_tested():
    tested = {row[0] for row in test_recognised.pytestmark[0].args[1]}
    assert {cause.name for cause in CATALOG if cause not in OWN} == tested


def test_names_from_the_break_stand_in_the_advice():
    advice = advise(BreakMessage(OPAQUE, "Member is not registered", (), "value=g, attr=_id"))
    assert "`_id` is not one" in advice.why
    assert "value = thing._id" in advice.fix
    advice = advise(
        BreakMessage("UserError", "Could not guard on data-dependent expression u0 < 3 (unhinted)")
    )
    assert advice.why == (
        "The code asks whether u0 < 3 holds, about a number that only the data tells."
    )


def test_what_nobody_knows_keeps_dynamos_words():
    message = BreakMessage("New kind", "It is so.", ("Do this.\nOr that.", "Or nothing."), "ctx")
    advice = advise(message)
    assert (advice.cause, advice.why) == ("", "It is so.")
    assert advice.fix == "# Do this.\n# Or that.\n# Or nothing."


def test_an_entry_in_front_wins():
    mine = Cause(name="mine", why="my $thing", fix="f()", detail=r"thing=(?P<thing>\w+)")
    message = BreakMessage("async_op=True for distributed collectives", "", (), "thing=one")
    assert advise(message, (), (mine, *CATALOG)).why == "my one"
    assert advise(message).cause == "async_op"


def test_all_given_patterns_must_match():
    cause = Cause(name="c", why="w", kind="a", detail="b", calls="c")
    assert advise(BreakMessage("a", "b"), ("c",), (cause,)).cause == "c"
    assert advise(BreakMessage("a", "b"), ("x",), (cause,)).cause == ""
    assert advise(BreakMessage("a", "x"), ("c",), (cause,)).cause == ""
    assert advise(BreakMessage("x", "b"), ("c",), (cause,)).cause == ""


@pytest.mark.parametrize("cause", CATALOG, ids=lambda cause: cause.name)
def test_an_entry_is_complete(cause):
    assert cause.why.endswith(".")
    assert cause.kind or cause.detail or cause.calls
    groups = {
        name
        for pattern in (cause.kind, cause.detail, cause.calls)
        for name in re.compile(pattern).groupindex
    }
    used = set(string.Template(cause.why + cause.fix).get_identifiers())
    assert used <= groups


@pytest.mark.parametrize("cause", CATALOG, ids=lambda cause: cause.name)
def test_a_fix_is_code(cause):
    if cause.fix.startswith("export "):
        return
    code = string.Template(cause.fix).safe_substitute(dict.fromkeys(("member",), "name"))
    compile("def f(self, x):\n" + textwrap.indent(code + "\npass", "    "), cause.name, "exec")
