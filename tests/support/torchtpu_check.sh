#!/usr/bin/env bash
# Run the tests of TorchTPU on this machine's CPU, in a virtual environment where torch_tpu uses XLA's CPU plugin.
# If the packages are unavailable, skip the tests and print the reason.
# Usage: torchtpu_check.sh ENVIRONMENT [pytest arguments]. PYTHON creates the environment (default: python3.11).
set -euo pipefail
cd "$(dirname "$0")/../.."
environment=$1 python=$1/bin/python
shift

skip() { echo "SKIPPED, the tests of TorchTPU: $1"; exit 0; }

# if the stamp is older than setup.cfg, dependencies may have changed
if ! test "$environment/.ready" -nt setup.cfg; then
    test "$(uname -sm)" = "Linux x86_64" || skip "its wheels are for Linux on x86-64"
    command -v cc > /dev/null || skip "there is no C compiler, cc"
    test -x "$python" || "${PYTHON:-python3.11}" -m venv "$environment"
    pip() { "$python" -m pip install --quiet "$@"; }
    # without their dependencies for TPUs, which take 1 GB
    pip --no-deps torch_tpu==0.2.0 lammps-jax-pjrt-cpu==0.11.2 xla_cpu_pjrt==0.0.1 || skip "pip finds no torch_tpu"
    pip torch==2.13.0+cpu || pip "torch==2.13.*" || skip "pip finds no torch 2.13"
    pip --use-pep517 --editable ".[test]" absl-py portpicker frozendict immutabledict pyzmq
    packages=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    cc -O1 -shared -fPIC -I "$packages/xla_plugins/xla_cpu_pjrt/include" -o "$environment/libshim.so" \
        tests/support/torchtpu_shim.c -ldl
    ln -sf "$packages/lammps_jax_pjrt_cpu/pjrt_c_api_cpu_plugin.so" "$environment/plugin.so"
    touch "$environment/.ready"
fi

export TPU_LIBRARY_PATH=$environment/libshim.so PJRT_CPU_PLUGIN=$environment/plugin.so TORCH_DEVICE_BACKEND_AUTOLOAD=0
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
export XLA_FLAGS= # flags of torch_xla's tests do not apply here
"$python" -m pytest -q -n 2 --dist loadfile tests/torchtpu "$@"
