#!/usr/bin/env bash
# Builds the wheels in dist/, with compiled kernels for this machine type, checks that the library's wheel is smaller
# than 5 MB (more than half of it are kernels for six instruction sets; weights have a wheel of their own), and installs
# them in a virtual environment in build/wheels, where the speculators must be found and the kernels must run without a
# compiler. The dependencies come from .venv (`make test`).
#
# A release needs a wheel for each machine type; this builds the other one, with its cross compiler:
#   FORETELL_KERNELS=aarch64 .venv/bin/python -m build --wheel --outdir dist .
set -euo pipefail
cd "$(dirname "$0")/.."
limit=5000000
venv=build/wheels

rm -rf dist "$venv"
case "$(uname -sm)" in
  "Linux x86_64" | "Linux aarch64") export FORETELL_KERNELS=$(uname -m) ;;
esac
for project in . packages/*; do
  .venv/bin/python -m build --wheel --outdir dist "$project" >/dev/null
done
library=$(ls dist/foretell-[0-9]*.whl)
size=$(stat -c %s "$library" 2>/dev/null || stat -f %z "$library")
echo "$library: $size bytes"
[ "$size" -lt "$limit" ] || { echo "$library: more than $limit bytes" >&2; exit 1; }
listing=$(.venv/bin/python -m zipfile --list "$library")
grep -q kernels/csrc/kernels.cpp <<<"$listing"
grep -q cli/lighthouse.txt <<<"$listing"
speculators=$(.venv/bin/python -m zipfile --list dist/foretell_smollm2_135m-*.whl)
grep -q eagle3/model.safetensors <<<"$speculators"
if grep -q curve <<<"$speculators"; then echo "training curves in the wheel" >&2; exit 1; fi

.venv/bin/python -m venv "$venv"
"$venv/bin/pip" install --quiet --no-deps --no-index dist/*.whl
# Python ignores .pth files in a directory that a .pth file adds, so the editable installations of .venv are not used.
packages='import sysconfig; print(sysconfig.get_path("purelib"))'
.venv/bin/python -c "$packages" >"$("$venv/bin/python" -c "$packages")/dependencies.pth"
methods=$("$venv/bin/foretell" methods --markdown)
grep -q 'eagle3.*ships for smollm2-135m' <<<"$methods"
CXX=/nowhere PATH=$venv/bin "$venv/bin/foretell" generate "Name a colour." --method eagle3 --max-new-tokens 8
if [ -n "${FORETELL_KERNELS:-}" ]; then
  CXX=/nowhere PATH=$venv/bin "$venv/bin/foretell" env | grep "packaged for"
fi
