#!/usr/bin/env bash
# Run a job script in the background, in a process group of its own, and print its id.
set -euo pipefail
jobs=.snakemake/cluster
mkdir -p "$jobs"
place=$(mktemp -d "$jobs/XXXXXXXX")
script=$(realpath "${@: -1}")
setsid bash -c '
    bash "$1" > "$2/log" 2>&1 && code=0 || code=$?
    echo "$code" > "$2/code.new" && mv "$2/code.new" "$2/code"
' job "$script" "$place" < /dev/null > /dev/null 2>&1 &
echo "$!" > "$place/pid"
basename "$place"
