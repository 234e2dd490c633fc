#!/usr/bin/env bash
# Train a small Llama on two ranks, eager, upstream Inductor and dynamo_dist side by side.
#   bash tools/demo.sh [--json] [--steps N] [--topology NAME] ...     (--help lists all)
#   bash tools/demo.sh --link 1gbit                                   two hosts on a slow link (root)
#   bash tools/demo.sh --link 1gbit --train --parallel fsdp           the training run on it, predicted and measured
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. tools/env.sh
ensure_env
fresh_run
python tools/demo/main.py "$@"
