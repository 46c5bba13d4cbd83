#!/bin/sh
# A pod's entry point: run.yaml (and flags) as arguments, or where RUN_FILE says. The pod's exit code is its own.
# Process 1 of a container gets no signal that it does not handle, and Python handles none in its first second: a notice
# would be lost. So this shell stays, and passes it on.
set -u
told=
pod=
pass_on() {
  told=yes
  [ -z "$pod" ] || kill -TERM "$pod" 2>/dev/null
}
trap pass_on TERM INT HUP
[ "$#" -gt 0 ] || set -- "${RUN_FILE:-/etc/dalsegno/run.yaml}"
dalsegno relay "$@" &
pod=$!
[ -z "$told" ] || kill -TERM "$pod" 2>/dev/null
# A signal ends the first wait; the last one tells the exit code.
wait "$pod"
code=$?
while kill -0 "$pod" 2>/dev/null; do
  wait "$pod"
  code=$?
done
exit "$code"
