#!/usr/bin/env bash
# Generates internal/seqdedupev1/ from the schema in proto/. With --check: fails if that folder is not what would be
# generated. Needs Go, and the Python environment of the project for protoc (BIN: its folder of programs).
set -euo pipefail
cd "$(dirname "$0")"
proto=$(realpath ../../proto)
bin=${BIN:-../../.venv/bin}
package=seqdedupe.dev/go/internal/seqdedupev1

generate() {
    local options="module=seqdedupe.dev/go" name
    for name in admin batch publish read; do
        options+=",Mseqdedupe/v1/$name.proto=$package"
    done
    "$bin/python" -m grpc_tools.protoc -I "$proto" \
        --plugin=protoc-gen-go="$(go tool -n protoc-gen-go)" --go_out="$1" --go_opt="$options" \
        --plugin=protoc-gen-go-grpc="$(go tool -n protoc-gen-go-grpc)" --go-grpc_out="$1" --go-grpc_opt="$options" \
        "$proto"/seqdedupe/v1/{admin,batch,publish,read}.proto
}

if [[ ${1:-} == --check ]]; then
    fresh=$(mktemp -d)
    trap 'rm -rf "$fresh"' EXIT
    generate "$fresh"
    diff -r "$fresh/internal/seqdedupev1" internal/seqdedupev1 ||
        { echo "generated code is not up to date: clients/go/generate.sh"; exit 1; }
else
    generate .
fi
