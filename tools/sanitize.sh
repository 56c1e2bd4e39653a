#!/usr/bin/env bash
# Builds the extension with the sanitizers of gcc, in build/sanitize, and runs the tests that reach C in it.
#
#     bash tools/sanitize.sh address .venv/bin/python     (AddressSanitizer and UndefinedBehaviorSanitizer)
#     bash tools/sanitize.sh thread .venv/bin/python      (ThreadSanitizer)
#
# A report ends the tests. Ranks are threads of one process: ThreadSanitizer crashes inside MPI_Init. Left out:
# test_engine_race.py and test_ptx.py, which compile programs of their own, and test_memory.py, since sanitizers keep
# memory that was freed. Under ThreadSanitizer also what starts MPI.
set -euo pipefail
kind=$1
python=$(realpath -s "$2")
case $kind in
address)
    flags="-fsanitize=address,undefined -fno-sanitize-recover=undefined"
    library=libasan.so
    left_out=()
    ;;
thread)
    flags="-fsanitize=thread"
    library=libtsan.so
    left_out=(-k "not job_of_its_own and not set_of_an_mpi_communicator")
    ;;
*)
    echo "sanitize.sh: '$kind' is neither address nor thread" >&2
    exit 2
    ;;
esac
cd "$(dirname "$0")/.."
folder=$PWD/build/sanitize/$kind
rm -rf "$folder"
mkdir -p "$folder"
git ls-files | tar cf - -T - | tar xf - -C "$folder"
cd "$folder"
CFLAGS="$flags -fno-omit-frame-pointer -g -O1" LDFLAGS="$flags" "$python" setup.py -q build_ext --inplace
# Python itself is not built with them, so their library must be there first; and C++'s beside it, because Python does not
# need that, and matplotlib, which a test imports, throws. Python frees no memory at its end.
export ASAN_OPTIONS=detect_leaks=0:exitcode=99 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
export TSAN_OPTIONS=halt_on_error=1:exitcode=66:report_signal_unsafe=0
# OpenBLAS is not built with them either: how its threads hand over work is not seen, and looks like a race.
export OPENBLAS_NUM_THREADS=1 PYTHONPATH=$folder LD_PRELOAD
LD_PRELOAD="$(gcc -print-file-name=$library) $(gcc -print-file-name=libstdc++.so.6)"
"$python" -c 'import ocomm._native as native; print("sanitized:", native.__file__)'
"$python" -m pytest -q -p no:cacheprovider -n 2 --dist worksteal -m 'not long and not alone' \
    --ignore=tests/contract/test_ptx.py --ignore=tests/contract/test_engine_race.py --ignore=tests/world/test_memory.py \
    "${left_out[@]}" tests/contract tests/world
