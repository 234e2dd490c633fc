"""One rank of a job that is not there: run its script until it has compiled, and save what it has."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import runpy
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

import dynamo_dist
from dynamo_dist.saved import ahead, saving
from dynamo_dist.saved.manifest import Artefacts
from inductor_passes.torch_compat import fake_groups


@dataclass(frozen=True)
class Task:
    """``path``: where artefacts go. ``steps``: of optimizers, after which the script ends; 0: at its own end.

    ``arguments``: the script's. ``said``: the file that gets what was saved, as JSON.
    """

    script: str
    arguments: tuple[str, ...]
    is_module: bool
    rank: int
    world_size: int
    ranks_per_node: int
    steps: int
    path: str
    said: str

    def environment(self) -> dict[str, str]:
        """The variables that a launcher sets, as torchrun does: threads too, which generated code depends on."""
        node, local = divmod(self.rank, self.ranks_per_node)
        variables = {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(local),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.ranks_per_node),
            "GROUP_RANK": str(node),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0",
        }
        if self.ranks_per_node > 1:
            variables["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
        return variables


def run(task: Task) -> Artefacts:
    """Run the script as that rank. Raises what the script raises, and ArtefactError where nothing was compiled."""
    sys.argv = [task.script, *task.arguments]
    sys.path.insert(0, os.getcwd() if task.is_module else str(Path(task.script).resolve().parent))
    with fake_groups.standing_in(task.world_size, task.rank), ahead.of_job(task.path):
        try:
            with _ending_after(task.steps):
                if task.is_module:
                    runpy.run_module(task.script, run_name="__main__", alter_sys=True)
                else:
                    runpy.run_path(task.script, run_name="__main__")
        except ahead.Ended as ended:
            return ended.artefacts
        except SystemExit as leaving:
            if leaving.code not in (None, 0):
                raise
        return saving.written(task.path)


@contextlib.contextmanager
def _ending_after(steps: int) -> Iterator[None]:
    """Save, and end the script, once any optimizer has made so many steps."""
    made: dict[int, int] = {}

    def count(optimizer: torch.optim.Optimizer, *rest: object) -> None:
        made[id(optimizer)] = made.get(id(optimizer), 0) + 1
        if made[id(optimizer)] == steps:
            dynamo_dist.save("")

    hook = register_optimizer_step_post_hook(count)
    # The numbers of a model's hooks, which traces depend on, are to be the job's.
    RemovableHandle.next_id -= 1
    try:
        yield
    finally:
        hook.remove()


def main() -> None:
    """Run the task that the first argument describes as JSON."""
    task = Task(**json.loads(sys.argv[1]))
    saved = run(task)
    Path(task.said).write_text(json.dumps(dataclasses.asdict(saved)))


if __name__ == "__main__":
    main()
