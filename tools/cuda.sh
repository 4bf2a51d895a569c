#!/usr/bin/env bash
# Test and time Foretell on a GPU, from a source checkout: tests/cuda, then passes over 1 to 64 tokens compared with
# memory bandwidth, on random models of three sizes and on the models named. Nothing is downloaded.
#
#   tools/cuda.sh OUT_FOLDER [MODEL ...]
#
# Writes tests.xml and one step-*.json per model. Exits with 1 if a test or a measurement failed.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:?usage: tools/cuda.sh OUT_FOLDER [MODEL ...]}
shift
python=${PYTHON:-python3}
mkdir -p "$out"
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 COLUMNS=140

if ! "$python" -c 'from importlib.metadata import version; version("foretell")' 2>/dev/null; then
  # Not installed here: the package asks for its own version when it is imported.
  metadata=$(mktemp -d)
  trap 'rm -rf "$metadata"' EXIT
  mkdir "$metadata/foretell-0.dist-info"
  printf 'Metadata-Version: 2.1\nName: foretell\nVersion: 0\n' >"$metadata/foretell-0.dist-info/METADATA"
  PYTHONPATH="$PYTHONPATH:$metadata"
fi

status=0
"$python" -m pytest -q -W default tests/cuda --junitxml="$out/tests.xml" || status=1

step() {
  name=$1
  shift
  "$python" -m foretell bench step --device cuda --context 1024 --repeats 10 --json "$out/step-$name.json" "$@" ||
    status=1
}
for shape in smollm2-135m llama-3.2-1b llama-2-7b; do step "$shape" --shape "$shape"; done
for model in "$@"; do step "$(basename "$model")" --model "$model"; done
exit $status
