#!/bin/sh
# The loops for aarch64, run under qemu, must give the bits that they give here.
# Needs gcc, aarch64-linux-gnu-gcc and qemu-aarch64 (Debian: gcc-aarch64-linux-gnu qemu-user).
set -eu
cd "$(dirname "$0")"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
flags="-O3 -std=gnu11 -ffp-contract=off -fno-math-errno -Wall -Wextra -static -pthread"
gcc $flags check_bits.c kernels.c reduce.c pool.c -o "$work/here"
aarch64-linux-gnu-gcc $flags check_bits.c kernels.c reduce.c pool.c -o "$work/there"
"$work/here" >"$work/here.txt"
qemu-aarch64 "$work/there" >"$work/there.txt"
diff "$work/here.txt" "$work/there.txt"
echo "the same bits on $(uname -m) and aarch64"
