#!/usr/bin/env bash
# Fuzzes what is read from other ranks, connections and files, for so many seconds per target:
#
#     bash tools/fuzz.sh SECONDS .venv/bin/python
#
#   engine    headers and lengths of messages: libFuzzer where there is clang (apt-get install clang)
#   kernels   signs, scales, codes and dense values: random changes of real messages, by gcc, because clang takes many
#             minutes and gigabytes to build the loops with sanitizers, whose branches do not depend on values
#   readers   everything that Python reads: the properties of tests/fuzz with new seeds
#
# C is built with AddressSanitizer and UndefinedBehaviorSanitizer, in build/fuzz, where the corpora stay. A failure ends
# the run; the last line of its output says what to run again.
set -euo pipefail
seconds=$1
python=$(realpath -s "$2")
cd "$(dirname "$0")/.."
folder=$PWD/build/fuzz
mkdir -p "$folder/engine.corpus"
"$python" native/build.py "$folder"
"$python" -m tests.fuzz.seeds "$folder/kernels.seeds"
flags=(-g -O1 -std=gnu11 -ffp-contract=off -fno-math-errno -fno-omit-frame-pointer -no-pie -pthread -I native -I "$folder")
sanitizers=(-fsanitize=address,undefined -fno-sanitize-recover=undefined)
engine=(tests/fuzz/engine.c native/engine.c native/pool.c native/reduce.c)
# The engine calls none of the loops that are left out here.
without_kernels=-Wl,--unresolved-symbols=ignore-all
export UBSAN_OPTIONS=print_stacktrace=1

# Runs a target that has no libFuzzer, with one seed after the other.
random() {
    local program=$1 seed=$RANDOM end=$((SECONDS + seconds))
    shift
    while ((SECONDS < end)); do
        seed=$((seed + 1))
        "$program" 20000 "$seed" "$@" || { echo "failed: $program 20000 $seed $*"; exit 1; }
    done
    echo "$(basename "$program"): no failure"
}

if command -v clang >/dev/null; then
    clang "${flags[@]}" "${sanitizers[@]}" -fsanitize=fuzzer "$without_kernels" "${engine[@]}" -o "$folder/engine"
    "$folder/engine" -max_total_time="$seconds" -max_len=512 -print_final_stats=1 -verbosity=0 \
        -artifact_prefix="$folder/" "$folder/engine.corpus"
else
    echo 'no clang: headers are changed at random'
    gcc "${flags[@]}" "${sanitizers[@]}" "$without_kernels" tests/fuzz/standalone.c "${engine[@]}" -o "$folder/engine"
    random "$folder/engine"
fi

gcc "${flags[@]}" "${sanitizers[@]}" tests/fuzz/kernels.c tests/fuzz/standalone.c native/{kernels,pool,reduce}.c \
    -lm -o "$folder/kernels"
random "$folder/kernels" "$folder"/kernels.seeds/*

end=$((SECONDS + seconds))
while ((SECONDS < end)); do
    seed=$RANDOM
    HYPOTHESIS_PROFILE=fuzz FUZZ_TIMES=20 "$python" -m pytest -q -p no:cacheprovider --hypothesis-seed=$seed \
        tests/fuzz -k 'not native' || { echo "failed: HYPOTHESIS_PROFILE=fuzz FUZZ_TIMES=20 pytest --hypothesis-seed=$seed"; exit 1; }
done
