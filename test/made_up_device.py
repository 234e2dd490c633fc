"""A device that is not there, so that the truth is known: streams, kernels that run when they
can, and what a profiler writes of them.
"""

import contextlib
import types

COMPUTE, LINK = 7, 20
# What generated code of a graph with a product, a gather, a fused kernel, its wait and another
# product looks like.
SOURCE = """\
def call(args):
    x, = args
    extern_kernels.mm(x, 'mm')
    buf0 = torch.ops._c10d_functional.all_gather_into_tensor.default(x, 2, '0')
    triton_poi_fused_add_relu_0.run(x)
    torch.ops._c10d_functional.wait_tensor.default(buf0)
    extern_kernels.mm(buf0, 'mm_1')
    return (buf0, )
"""


class Device:
    """One rank's device. ``us``: of each kernel by name. ``host_us``: that the host takes to start
    one.

    It stands for ``Profiler`` too. ``spoil(events)``: changes what a profile holds.
    """

    def __init__(self, us, host_us=2.0, begins=1e6, beside=1.0):
        self.us, self.host_us, self.now = us, host_us, begins
        self.ends = dict.fromkeys((COMPUTE, LINK), begins)
        self.events, self.count, self.profiles = [], 0, 0
        self.peers, self.beside, self.busy = lambda: 0.0, beside, False
        self.spoil, self.on, self.steps = list, False, 0

    def write(self, category, name, begin, us, **args):
        thread = {"tid": 1} if category in ("cpu_op", "user_annotation", "cuda_runtime") else {}
        self.events.append(
            {
                "ph": "X",
                "cat": category,
                "name": name,
                "ts": begin,
                "dur": us,
                **thread,
                "args": args,
            }
        )

    def kernel(self, name, stream, us, after=0.0, operator="", **args):
        begin, self.count = self.now, self.count + 1
        self.now += self.host_us
        if operator:
            self.write("cpu_op", operator, begin, self.host_us, **{"External id": self.count})
        self.write(
            "cuda_runtime",
            "cudaLaunchKernel",
            begin + self.host_us / 4,
            1.0,
            correlation=self.count,
        )
        starts = max(self.now, self.ends[stream], after)
        found = {"correlation": self.count, "External id": self.count, "stream": stream, **args}
        self.write("kernel", name, starts, us, **found)
        self.ends[stream] = starts + us
        return self.ends[stream]

    def gather(self, *_):
        came = max(self.now + self.host_us, self.ends[COMPUTE])
        late = max(0.0, self.peers() - came)
        args = {"Collective name": "_allgather_base", "Group size": 2}
        self.busy = True
        return self.kernel(
            "ncclDevKernel_AllGather", LINK, late + self.us["gather"], self.ends[COMPUTE], **args
        )

    def wait_for(self, end):
        self.ends[COMPUTE] = max(self.ends[COMPUTE], end)
        self.busy = False

    def mm(self, _, name):
        self.kernel("sm80_xmma_gemm", COMPUTE, self.us[name], operator="aten::mm")

    def fused(self, *_):
        us = self.us["fused"] * (self.beside if self.busy else 1.0)
        self.kernel("triton_poi_fused_add_relu_0", COMPUTE, us)

    def module(self):
        """Generated code that runs here."""
        made = types.ModuleType("generated")
        operator = lambda run: types.SimpleNamespace(default=run)  # noqa: E731
        functional = types.SimpleNamespace(
            all_gather_into_tensor=operator(self.gather), wait_tensor=operator(self.wait_for)
        )
        made.torch = types.SimpleNamespace(ops=types.SimpleNamespace(_c10d_functional=functional))
        made.extern_kernels = types.SimpleNamespace(mm=self.mm)
        made.triton_poi_fused_add_relu_0 = types.SimpleNamespace(run=self.fused)
        exec(compile(SOURCE, "generated.py", "exec"), made.__dict__)
        return made

    # What a profiler has.

    def wait(self):
        self.now = max(self.now, *self.ends.values())

    @contextlib.contextmanager
    def range_of(self, name):
        begin = self.now
        self.now += 0.25
        yield
        self.write("user_annotation", name, begin, self.now - begin)
        self.now += 0.25

    def start(self):
        self.wait()
        self.events, self.on, self.profiles = [], True, self.profiles + 1

    def stop(self):
        self.wait()
        self.on = False
        return {"traceEvents": self.spoil(self.events[::-1])}
