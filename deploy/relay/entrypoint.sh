#!/bin/sh
# A pod's entry point: run.yaml as its argument, or where RUN_FILE says. exec: signals reach it, and its exit code is the pod's.
set -eu
exec dalsegno relay "${1:-${RUN_FILE:-/etc/dalsegno/run.yaml}}"
