"""Parts of ``gpu.py``, each a process of its own with a limit: one that hangs or dies loses
nothing else.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BENCH = Path(__file__).resolve().parent
LIMIT_S = 120.0
TAIL = 3000  # characters of what a part said, where it failed
MARK = "RESULT OF PART "
# In order of worth: "module:function", which returns what JSON can hold.
PARTS = {
    "tests": "gpu_tests:all_but_two_processes",
    "products": "gpu_fused:measure_products",
    "variants": "gpu_variants:measure_variants",
    "copies": "gpu_copies:measure_copies",
    "norms": "gpu_fused:measure_norms",
    "schedule": "gpu_schedule:measure_schedule",
    "costs": "gpu_costs:measure_costs",
    "host": "gpu_host:measure_host",
    "small_step": "gpu_step:measure_small_step",
    "large_step": "gpu_step:measure_large_step",
    "tests_of_two": "gpu_tests:two_processes",
}


def environment_of_parts() -> dict[str, str]:
    """Variables of every part: the checkout needs no installation, and a wait for a peer ends
    soon.
    """
    path = [str(ROOT), str(BENCH), os.environ.get("PYTHONPATH", "")]
    defaults = {"GLOO_SOCKET_IFNAME": "lo", "INDUCTOR_PASSES_KERNEL_WAIT_SECONDS": "10"}
    return {**defaults, **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def measured_here(target: str) -> dict[str, Any]:
    """Call ``module:function`` in this process; a module that is not there is a problem and no
    error.
    """
    module, function = target.split(":")
    if importlib.util.find_spec(module) is None:
        return {"problem": f"not there: {module}.py"}
    return getattr(importlib.import_module(module), function)()


def print_result(found: dict[str, Any]) -> None:
    """Print what a part found as the marked line that ``run_part`` looks for."""
    print("\n" + MARK + json.dumps(found), flush=True)


def run_part(command: list[str], limit_s: float = LIMIT_S) -> dict[str, Any]:
    """Run a part as a process group of its own; what it found, with ``seconds`` and perhaps a
    ``problem``.

    At the limit the group ends, and nothing but the group.
    """
    start = time.monotonic()
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment_of_parts(),
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
            ended = f"ended with {code}" if code else "said no result"
        except subprocess.TimeoutExpired:
            ended = f"did not end within {limit_s:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what the part left behind, too
            process.wait()
        said.seek(0)
        text = said.read().decode(errors="replace")
    found = result_in(text)
    # A part that has printed its result and then hangs or dies at exit has measured.
    if found is None:
        found = {"problem": ended, "said": text[-TAIL:]}
    elif ended != "said no result":
        found.setdefault("problem", f"after its result it {ended}")
    return found | {"seconds": round(time.monotonic() - start, 1)}


def result_in(text: str) -> dict[str, Any] | None:
    """The last marked result in what a part said."""
    lines = re.findall(f"^{MARK}(.*)$", text, re.MULTILINE)
    return json.loads(lines[-1]) if lines else None


def part_command(name: str, *, dry: bool = False) -> list[str]:
    """How ``gpu.py`` starts itself for one part."""
    return [sys.executable, str(BENCH / "gpu.py"), "--part", name, *(["--dry-run"] if dry else [])]
