"""What graphs show of their launches, and whether it is all: of each launch the facts that ``recording`` notes when it runs."""
import collections
import operator

import torch
import torch.distributed as dist
from recording import Launch, dtype_name
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

# Operators that a graph shows as launches, without namespace: name -> kind, and the argument that is sent.
SHOWN = {
    "all_reduce": ("all_reduce", "input"), "all_reduce_": ("all_reduce", "input"),
    "all_reduce_coalesced": ("all_reduce", "inputs"), "all_reduce_coalesced_": ("all_reduce", "inputs"),
    "all_gather_into_tensor": ("all_gather", "input"), "all_gather_into_tensor_out": ("all_gather", "input"),
    "all_gather_into_tensor_coalesced": ("all_gather", "inputs"),
    "reduce_scatter_tensor": ("reduce_scatter", "input"), "reduce_scatter_tensor_out": ("reduce_scatter", "input"),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", "inputs"),
    "all_to_all_single": ("all_to_all", "input"),
    "broadcast": ("broadcast", "input"), "broadcast_": ("broadcast", "input"),
    "reduce": ("reduce", "input"), "gather": ("gather", "input"), "scatter": ("scatter", "buffer"),
    "isend": ("send", "input"), "irecv": ("recv", "input"), "isend_irecv_batch": ("batch", "tensors"),
    "barrier": ("barrier", None), "monitored_barrier": ("barrier", None),
}
NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "dynamo_dist")


def shown(node):
    """The name in ``SHOWN`` if a node is a launch that names itself; else None."""
    namespace = getattr(node.target, "namespace", None)
    name = getattr(node.target, "_opname", "")
    return name if node.op == "call_function" and namespace in NAMESPACES and name in SHOWN else None


def _arguments(node):
    schema = node.target._schema.arguments
    values = dict(zip((argument.name for argument in schema), node.args))
    return {argument.name: argument.default_value for argument in schema} | values | dict(node.kwargs)


def _concrete(value):
    """A size as a number: the hint of a symbolic one."""
    return value if isinstance(value, int) else value.node.hint


def _group(argument):
    """The group that a launch names; a node stands for a group that is an input of the graph."""
    value = argument.meta["val"] if isinstance(argument, torch.fx.Node) else argument
    value = getattr(value, "real_obj", value)
    return dist.distributed_c10d._resolve_process_group(value) if isinstance(value, str) else value


def visible(node):
    """The launches of one node, as ``Recorder`` notes them when it runs; symbolic sizes by their hints."""
    kind, sent = SHOWN[shown(node)]
    given = _arguments(node)
    members = tuple(dist.get_process_group_ranks(_group(given["group_name"])))
    op = (given.get("reduce_op") or "").lower().partition(" ")[0]
    if sent is None:
        return [Launch(kind, members, 0, "")]
    nodes = given[sent] if isinstance(given[sent], (list, tuple)) else [given[sent]]
    found = []
    for i, each in enumerate(nodes):
        tensor = each.meta["val"]
        nbytes = _concrete(tensor.numel()) * tensor.element_size() * (len(members) if kind == "all_gather" else 1)
        peer = next((given[n] for n in ("dst", "src") if isinstance(given.get(n), int)), -1)
        one = kind
        if kind == "batch":
            one, peer = ("send" if given["is_send"][i] else "recv"), given["peers"][i]
        found.append(Launch(one, members, nbytes, dtype_name(tensor), op, peer))
    return found


def launches_of(graph_module):
    """Every launch that a graph shows, in order, those in graphs within it included."""
    found = []
    for module in graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                if shown(node):
                    found += visible(node)
    return found


def _results(node):
    """The nodes that hold one result each of a launch."""
    items = [user for user in node.users if user.target is operator.getitem]
    return items or [node]


def unwaited(graph_module):
    """The launches of a graph with a result that is neither waited for in it nor handed out of it."""
    found = []
    for module in graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                if shown(node) and not all(map(_ends, _results(node))):
                    found.append(node)
    return found


def _ends(result):
    users = [result, *(user for user in result.users if "view" in str(user.target))]
    return any("wait_tensor" in str(user.target) or user.op == "output" for each in users for user in each.users)


class Graphs:
    """A backend that runs AOTAutograd's graphs as they are, and checks that each shows what it launches."""

    def __init__(self, recorder):
        self.recorder, self.hidden, self.unwaited = recorder, [], []

    def backend(self):
        """For ``torch.compile(backend=...)``."""
        return aot_autograd(fw_compiler=self._compile, bw_compiler=self._compile, inference_compiler=self._compile, keep_inference_input_mutations=True)

    def _compile(self, graph_module, inputs):
        self.unwaited += [node.format_node() for node in unwaited(graph_module)]

        def run(*args):
            inside = []
            with self.recorder.on(inside):
                results = graph_module.forward(*args)
            shown = launches_of(graph_module)
            if inside != shown:
                self.hidden.append(dict(launched=rows(inside), shown=rows(shown)))
            if self.recorder.launches is not None:
                self.recorder.launches += inside
            return results
        return make_boxed_func(run)


def rows(launches):
    """As JSON."""
    return [launch.row() for launch in launches]


def _bytes(launches):
    """Sums of bytes; a mean is a sum that is divided."""
    total = collections.Counter()
    for launch in launches.elements():
        reduce_op = "sum" if launch.reduce_op == "avg" else launch.reduce_op
        total[launch.kind, launch.members, launch.dtype, reduce_op, launch.peer] += launch.nbytes
    return total


def verdict(eager, compiled, graphs):
    """Status, as ``exact_launches.py`` explains them, and detail."""
    if graphs.hidden:
        return dict(status="hidden", graphs=graphs.hidden)
    if graphs.unwaited:
        return dict(status="unwaited", nodes=graphs.unwaited)
    if eager == compiled:
        return dict(status="same", launches=len(eager))
    missing = collections.Counter(eager) - collections.Counter(compiled)
    added = collections.Counter(compiled) - collections.Counter(eager)
    if not missing and not added:
        return dict(status="order", eager=rows(eager), compiled=rows(compiled))
    if _bytes(missing) == _bytes(added):
        return dict(status="pieces", eager=len(eager), compiled=len(compiled))
    return dict(status="differ", missing=rows(missing.elements()), added=rows(added.elements()))
