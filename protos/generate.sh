#!/usr/bin/env bash
# Writes the generated code beside the .proto files, with imports as `dalsegno.protos`.
# Needs grpcio-tools==1.71.2 and mypy-protobuf==3.6.0 (docs/decisions/0003-generated-code-committed.md says why these);
# PYTHON names an interpreter that has them.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
farm=$(mktemp -d)
trap 'rm -rf "$farm"' EXIT
mkdir "$farm/dalsegno"
cp -r protos "$farm/dalsegno/protos"
out=${1:-$PWD/protos}
export PATH="$(dirname "$(command -v "$python")"):$PATH"
(cd "$farm" && "$python" -m grpc_tools.protoc -I. --python_out=. --grpc_python_out=. --mypy_out=. --mypy_grpc_out=. dalsegno/protos/*.proto)
mkdir -p "$out"
cp "$farm"/dalsegno/protos/*_pb2*.py "$farm"/dalsegno/protos/*_pb2*.pyi "$out"/
# These have no service: an empty stub file says nothing.
rm -f "$out"/{worker,peer}_pb2_grpc.py "$out"/{worker,peer}_pb2_grpc.pyi
