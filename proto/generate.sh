#!/usr/bin/env bash
# Generates seqdedupe/v1/ from the schema, and pulsar_wire's part of Pulsar's. With --check: fails if what is there is not
# what would be generated.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${BIN:-.venv/bin}
export PATH="$bin:$PATH"

generate() {
    "$bin/python" -m grpc_tools.protoc -I proto --python_out="$1" --mypy_out="quiet:$1" proto/seqdedupe/*/*.proto
    # Only those with a service have stubs.
    mapfile -t with_service < <(grep -l '^service ' proto/seqdedupe/v1/*.proto)
    "$bin/python" -m grpc_tools.protoc -I proto --grpc_python_out="$1" --mypy_grpc_out="quiet:$1" "${with_service[@]}"
}

if [[ ${1:-} == --check ]]; then
    fresh=$(mktemp -d)
    trap 'rm -rf "$fresh"' EXIT
    generate "$fresh"
    touch "$fresh/seqdedupe/v1/__init__.py"
    wire=seqdedupe/pulsar_wire/pulsar_api_pb2
    diff -r --exclude=__pycache__ "$fresh/seqdedupe/v1" seqdedupe/v1 &&
        diff "$fresh/$wire.py" "$wire.py" && diff "$fresh/$wire.pyi" "$wire.pyi" ||
        { echo "generated code is not up to date: make proto"; exit 1; }
else
    generate .
fi
