#!/usr/bin/env bash
# Builds the wheels in dist/. The library has one for each machine type with compiled kernels (this machine's, and the
# other's where its cross compiler is installed), and one without for all others, where kernels are compiled at first
# use; pip takes the first that fits. Checks that each is smaller than 5 MB (more than half of it are kernels for six
# instruction sets; weights have a wheel of their own), and installs this machine's in a virtual environment in
# build/wheels, where the speculators must be found and the kernels must run without a compiler. The dependencies come
# from .venv (`make test`).
set -euo pipefail
cd "$(dirname "$0")/.."
limit=5000000
venv=build/wheels

rm -rf dist "$venv"
build() { .venv/bin/python -m build --wheel --outdir dist "$1" >/dev/null; }
for machine in x86_64 aarch64; do
  if [ "$(uname -sm)" = "Linux $machine" ]; then
    FORETELL_KERNELS=$machine build .
  elif command -v "$machine-linux-gnu-g++" >/dev/null; then
    CXX= FORETELL_KERNELS=$machine build .
  else
    echo "no wheel for $machine: its cross compiler is missing (Debian: apt install g++-${machine/_/-}-linux-gnu)"
  fi
done
for project in . packages/*; do build "$project"; done
for library in dist/foretell-[0-9]*.whl; do
  size=$(stat -c %s "$library" 2>/dev/null || stat -f %z "$library")
  echo "$library: $size bytes"
  [ "$size" -lt "$limit" ] || { echo "$library: more than $limit bytes" >&2; exit 1; }
done
library=$(ls dist/foretell-[0-9]*"_$(uname -m).whl" 2>/dev/null || ls dist/foretell-[0-9]*-none-any.whl)
listing=$(.venv/bin/python -m zipfile --list "$library")
grep -q kernels/csrc/kernels.cpp <<<"$listing"
grep -q cli/lighthouse.txt <<<"$listing"
speculators=$(.venv/bin/python -m zipfile --list dist/foretell_smollm2_135m-*.whl)
grep -q eagle3/model.safetensors <<<"$speculators"
if grep -q curve <<<"$speculators"; then echo "training curves in the wheel" >&2; exit 1; fi

.venv/bin/python -m venv "$venv"
"$venv/bin/pip" install --quiet --no-deps --no-index "$library" dist/foretell_*.whl
# Python ignores .pth files in a directory that a .pth file adds, so the editable installations of .venv are not used.
packages='import sysconfig; print(sysconfig.get_path("purelib"))'
.venv/bin/python -c "$packages" >"$("$venv/bin/python" -c "$packages")/dependencies.pth"
methods=$("$venv/bin/foretell" methods --markdown)
grep -q 'eagle3.*ships for smollm2-135m' <<<"$methods"
CXX=/nowhere PATH=$venv/bin "$venv/bin/foretell" generate "Name a colour." --method eagle3 --max-new-tokens 8
if [[ $library != *-none-any.whl ]]; then
  CXX=/nowhere PATH=$venv/bin "$venv/bin/foretell" env | grep "packaged for"
fi
