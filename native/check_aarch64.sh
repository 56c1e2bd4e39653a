#!/bin/sh
# The loops for aarch64, run under qemu, must give the bits that they give here.
# Needs Python with cffi, gcc, aarch64-linux-gnu-gcc and qemu-aarch64 (Debian: gcc-aarch64-linux-gnu qemu-user).
set -eu
cd "$(dirname "$0")"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
${PYTHON:-python3} build.py "$work"
flags="-O3 -std=gnu11 -ffp-contract=off -fno-math-errno -Wall -Wextra -static -pthread -I$work"
gcc $flags check_bits.c kernels.c reduce.c pool.c -o "$work/here" -lm
aarch64-linux-gnu-gcc $flags check_bits.c kernels.c reduce.c pool.c -o "$work/there" -lm
"$work/here" >"$work/here.txt"
qemu-aarch64 "$work/there" >"$work/there.txt"
diff "$work/here.txt" "$work/there.txt"
echo "the same bits on $(uname -m) and aarch64"
