"""What extras ask for: nothing that makes pip replace the torch that is there."""

import configparser
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def extras():
    """Each extra's requirements."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return {
        name: [line.strip() for line in lines.splitlines() if line.strip()]
        for name, lines in config["options.extras_require"].items()
    }


def test_no_extra_moves_torch():
    for name, requirements in extras().items():
        for each in requirements:
            package, bounds = re.fullmatch(r"([\w-]+)(.*)", each).groups()
            assert package != "torch", name
            # A torch wants one version of triton: a bound from above makes pip look for another
            # torch.
            assert package != "triton" or not re.search(r"<|==|~=", bounds), each


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_an_environment_that_has_triton_keeps_it():
    command = f'. tools/env.sh; quietly() {{ echo "$@"; }}; install_triton "{sys.executable}"'
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
