"""Measure this machine, CPU or GPU, or under torchrun all machines of a job, and write a topology file.

    python tools/calibrate.py --out t.json
    torchrun --nnodes 2 --nproc-per-node 8 tools/calibrate.py --out t.json

The same as ``python -m inductor_passes costs measure``.
"""

import sys

from inductor_passes.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["costs", "measure", *sys.argv[1:]]))
