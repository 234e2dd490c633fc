"""Models that train: data parallel, tensor parallel, or both, over a mesh of one or two dimensions."""

from __future__ import annotations

from random import Random

from fuzzing.unlike.blocks import draw_break
from fuzzing.unlike.program import WIDTH

_LAYOUTS = {
    "replicate": "data_parallel(net, DPM, mode='replicate')",
    "fully_shard": "data_parallel(net, DPM)",
    "hybrid": "data_parallel(net, MESH, mode='hybrid')",
    "tensor": "parallelize_module(net, TPM, PLAN)",
    "both": "data_parallel(parallelize_module(net, TPM, PLAN), DPM)",
    "both replicate": "data_parallel(parallelize_module(net, TPM, PLAN), DPM, mode='replicate')",
}


def draw_model(choose: Random, two_dims: bool, mute: str) -> tuple[str, str]:
    """Name of the layout, and the source of ``build()``. ``mute``: the condition of its break, or ""."""
    layout = choose.choice(sorted(_LAYOUTS) if two_dims else ["replicate", "fully_shard"])
    depth, dtype = choose.randint(2, 3), choose.choice(("float32", "float64", "float64"))
    at = choose.randrange(depth - 1)
    forward = []
    for layer in range(depth):
        forward.append(f"y = y + self.down{layer}(torch.relu(self.up{layer}(y)))")
        if mute and layer == at:
            forward += draw_break(choose, mute)
    plan = ", ".join(
        f"'up{layer}': ColwiseParallel(), 'down{layer}': RowwiseParallel()"
        for layer in range(depth)
    )
    init = [
        f"self.{name}{layer} = torch.nn.Linear({a}, {b}, dtype=torch.{dtype})"
        for layer in range(depth)
        for name, a, b in (("up", WIDTH, 2 * WIDTH), ("down", 2 * WIDTH, WIDTH))
    ]
    text = ["class Net(torch.nn.Module):", "    def __init__(self):", "        super().__init__()"]
    text += [f"        {line}" for line in init]
    text += ["    def forward(self, x, loud=False):", f"        y = x.to(torch.{dtype})"]
    text += [f"        {line}" for line in [*forward, "return y"]]
    text += [f"PLAN = {{{plan}}}", "def build():", "    torch.manual_seed(7)", "    net = Net()"]
    text += [f"    return {_LAYOUTS[layout]}"]
    return layout, "\n".join(text) + "\n"
