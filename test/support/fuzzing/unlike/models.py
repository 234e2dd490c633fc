"""Models that train: data parallel, tensor parallel, or both, over a mesh of one or two
dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from fuzzing.unlike.blocks import draw_break
from fuzzing.unlike.program import WIDTH

_LAYOUTS = {
    "tensor": "parallelize_module(net, TPM, PLAN)",
    "both": "fully_shard(parallelize_module(net, TPM, PLAN), mesh=DPM)",
}
# These are drawn more often, since they have options and many ways to train.
_WRAPPED = {
    "ddp": "DDP(net{options})",
    "fsdp2": "shard(net, DPM{options})",
    "fsdp2 hybrid": "shard(net, MESH{options})",
}
_OPTIONS = {
    "ddp": (
        "broadcast_buffers=False",
        "bucket_cap_mb=0.002",
        "gradient_as_bucket_view=True",
        "find_unused_parameters=True",
    ),
    "fsdp2": ("reshard_after_forward=False",),
}
_SHARD = """\
def shard(net, mesh, **options):
    for layer in range({depth}):
        fully_shard([getattr(net, f'up{{layer}}'), getattr(net, f'down{{layer}}')], mesh=mesh, **options)
    return fully_shard(net, mesh=mesh)
"""


@dataclass(frozen=True, slots=True)
class Model:
    """``source`` has ``build()``. ``wrapper``: "ddp", "fsdp2" or "". ``heads``: "", or what
    chooses one of two, "step" or "rank".
    """

    layout: str
    source: str
    wrapper: str = ""
    heads: str = ""
    broadcasts: bool = False  # buffers, before a forward


def draw_model(choose: Random, two_dims: bool, mute: str) -> Model:
    """A model whose graph breaks where ``mute`` holds, a condition or ""."""
    if not two_dims or choose.random() < 0.6:
        layout = choose.choice(("ddp", "ddp", "fsdp2", "fsdp2 hybrid" if two_dims else "fsdp2"))
        wrapper = layout.split()[0]
    else:
        layout = choose.choice(sorted(_LAYOUTS))
        wrapper = ""
    heads = choose.choice(("", "", "step", "rank" if wrapper == "ddp" else "step"))
    options = [each for each in _OPTIONS.get(wrapper, ()) if choose.random() < 0.4]
    # upstream's DDP optimizer, which compiles what is between breaks, refuses buckets below 1 MiB
    if mute:
        options = [each for each in options if "bucket_cap_mb" not in each]
    unused = "find_unused_parameters=True"
    if wrapper == "ddp" and heads and unused not in options:
        options.append(unused)
    has_buffer = bool(wrapper) and choose.random() < 0.5
    depth, dtype = choose.randint(2, 3), choose.choice(("float32", "float64", "float64"))
    at = choose.randrange(depth - 1)
    forward = []
    if has_buffer:
        forward += ["y = torch.tanh(y - self.centre)", "with torch.no_grad():"]
        forward += ["    self.centre.lerp_(y.detach().mean(0), 0.5)"]
    for layer in range(depth):
        forward.append(f"y = y + self.down{layer}(torch.relu(self.up{layer}(y)))")
        if mute and layer == at:
            forward += draw_break(choose, mute)
    if wrapper:
        forward.append(
            "y = (self.head1 if head else self.head0)(y)" if heads else "y = self.head0(y)"
        )
    plan = ", ".join(
        f"'up{layer}': ColwiseParallel(), 'down{layer}': RowwiseParallel()"
        for layer in range(depth)
    )
    linears = [
        (f"{name}{layer}", a, b)
        for layer in range(depth)
        for name, a, b in (("up", WIDTH, 2 * WIDTH), ("down", 2 * WIDTH, WIDTH))
    ]
    if wrapper:
        linears += [(f"head{number}", WIDTH, 4) for number in range(2 if heads else 1)]
    init = [
        f"self.{name} = torch.nn.Linear({a}, {b}, dtype=torch.{dtype})" for name, a, b in linears
    ]
    if has_buffer:
        init.append(f"self.register_buffer('centre', torch.zeros({WIDTH}, dtype=torch.{dtype}))")
    text = ["class Net(torch.nn.Module):", "    def __init__(self):", "        super().__init__()"]
    text += [f"        {line}" for line in init]
    text += ["    def forward(self, x, loud=False, head=0):", f"        y = x.to(torch.{dtype})"]
    text += [f"        {line}" for line in [*forward, "return y"]]
    text += [_SHARD.format(depth=depth)] if wrapper == "fsdp2" else [f"PLAN = {{{plan}}}"]
    text += ["def build():", "    torch.manual_seed(7)", "    net = Net()"]
    made = {**_LAYOUTS, **_WRAPPED}[layout].format(options="".join(f", {each}" for each in options))
    text += [f"    return {made}"]
    broadcasts = wrapper == "ddp" and has_buffer and "broadcast_buffers=False" not in options
    return Model(layout, "\n".join(text) + "\n", wrapper, heads if wrapper else "", broadcasts)
