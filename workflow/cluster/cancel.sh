#!/usr/bin/env bash
# Stop jobs of submit.sh, with everything that they have started.
set -euo pipefail
for job in "$@"; do
    kill -TERM -- "-$(< ".snakemake/cluster/$job/pid")" 2> /dev/null || true
done
