#!/usr/bin/env bash
# Say whether a job of submit.sh is running, or how it ended.
set -euo pipefail
place=.snakemake/cluster/$1
if [[ -f $place/code ]]; then
    [[ $(< "$place/code") == 0 ]] && echo success || echo failed
elif kill -0 "$(< "$place/pid")" 2> /dev/null; then
    echo running
else # killed with its group, unless it has ended just now
    [[ -f $place/code && $(< "$place/code") == 0 ]] && echo success || echo failed
fi
