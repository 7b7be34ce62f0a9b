#!/bin/bash
# Pack TransformerEngine 2.12.0 for the GPU machine, which has torch 2.11 (CUDA 13) and CPython 3.12, and reaches no registry.
#     SLIM_SO=slim_so.py bash results/scripts/pack_userbuffers.sh FOLDER      24 MB: libtransformer_engine.so (560 MB), for sm_90 only, is 21 of them
# 2.13 and later need a newer cuBLAS than torch 2.11 has (cublasLtGroupedMatrixLayoutInit_internal). SLIM_SO: see pack_servers.sh. PYTHON: a CPython 3.12 with venv; CUDA_HOME: headers of CUDA 13. No nvcc: the extension for PyTorch is C++
# and comes as source (its 30 files take a core 10 minutes; -O0, since it only calls the library).
# There: mkdir T; tar xJf FOLDER/site.tar.xz -C T; xz -dc FOLDER/libtransformer_engine.so.xz > T/transformer_engine/wheel_lib/libtransformer_engine.so
#     export PYTHONPATH=T:$PYTHONPATH UB_SKIPMC=1
set -e
out=$(realpath -m "$1"); w=${WHEELS:-/tmp/wheels-userbuffers}; v=2.12.0; mkdir -p "$out" "$w"; cd "$w"
[ -d v ] || { ${PYTHON:-python3.12} -m venv v; v/bin/pip install -q torch==2.11.0 setuptools wheel pybind11 ninja packaging; }
[ -e transformer_engine_cu13-$v-*.whl ] || v/bin/pip download -q --no-deps --python-version 3.12 --only-binary=:all: --platform manylinux_2_28_x86_64 transformer_engine_cu13==$v
[ -d transformer_engine_torch-$v ] || { v/bin/pip download -q --no-deps --no-build-isolation --no-binary=transformer_engine_torch transformer_engine_torch==$v; tar xzf transformer_engine_torch-$v.tar.gz; }
so=transformer_engine_torch.cpython-312-x86_64-linux-gnu.so
if [ ! -e transformer_engine_torch-$v/$so ]; then
  cd transformer_engine_torch-$v; s=$w/v/lib/python3.12/site-packages; t=$s/torch; mkdir -p o
  f="-std=c++17 -O0 -fPIC -fvisibility=hidden -w -DNDEBUG -DTORCH_API_INCLUDE_EXTENSION_H -DTORCH_EXTENSION_NAME=transformer_engine_torch"
  for i in "${CUDA_HOME:-/usr/local/cuda}"/include $PWD/common_headers $PWD/common_headers/common $PWD/common_headers/common/include $PWD/csrc \
    $t/include $t/include/torch/csrc/api/include "$(v=$w/v/bin/python; $v -c 'import sysconfig; print(sysconfig.get_paths()["include"])')" "$s"/nvidia/*/include; do f="$f -I$i"; done
  printf '#include "%s"\n#include "%s"\n' $PWD/csrc/extensions.h $PWD/csrc/pybind.h > o/all.h; c++ $f -x c++-header o/all.h -o o/all.h.gch
  find csrc -name '*.cpp' | xargs -P "${MAX_JOBS:-2}" -I{} sh -c 'c++ '"$f"' -include o/all.h -c {} -o o/$(echo {} | tr / _).o'
  c++ -shared -o $so o/*.o -L$t/lib -lc10 -ltorch -ltorch_cpu -ltorch_python -lc10_cuda -ltorch_cuda; cd ..
fi
p=$(mktemp -d); d=$p/transformer_engine-$v.dist-info
v/bin/pip install -q --no-deps --no-compile --only-binary=:all: --platform manylinux_2_17_x86_64 --python-version 3.12 --target "$p" pydantic==2.14.4 pydantic-core==2.50.5 annotated-types typing-inspection
(cd "$p" && unzip -q "$w"/transformer_engine_cu13-$v-*.whl -x '*.so' && rm -rf transformer_engine/jax transformer_engine_cu13*.dist-info && mkdir -p transformer_engine/wheel_lib "$d")
printf 'Metadata-Version: 2.1\nName: transformer_engine\nVersion: %s\n' $v > "$d/METADATA"; echo transformer_engine/__init__.py,, > "$d/RECORD"
cp transformer_engine_torch-$v/$so "$p"; strip "$p/$so"
[ -s "$out/libtransformer_engine.so.xz" ] || python3 "${SLIM_SO:?}" "$w"/transformer_engine_cu13-$v-*.whl transformer_engine/wheel_lib/libtransformer_engine.so "$out/libtransformer_engine.so.xz"
find "$p" -name __pycache__ -prune -exec rm -rf {} +
tar c -C "$p" . | xz -6 -T2 > "$out/site.tar.xz"; rm -rf "$p"; du -sh "$out"
