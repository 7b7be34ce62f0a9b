#!/bin/bash
# Pack a server for the GPU machine, which has torch 2.11, triton 3.6, transformers 5.17 and CPython 3.12, and reaches no registry.
#     SLIM_SO=slim_so.py bash results/scripts/pack_servers.sh vllm FOLDER       38 MB: vllm 0.26.0 (its engine ran there on one GPU on 30 November 2026, ready after 76 s)
#     bash results/scripts/pack_servers.sh sglang FOLDER     33 MB: sglang 0.5.15 (its engine ran there on one GPU on 30 November 2026, ready after 72 s)
# SLIM_SO: a program that takes a wheel, a CUDA library of it and a target, and leaves the code for sm_90, compressed by xz.
# There: mkdir V; tar xJf FOLDER/site.tar.xz -C V; unpack the libraries of vLLM to V/vllm and V/vllm/vllm_flash_attn (xz -dc); then
#     export PYTHONPATH=V:$PYTHONPATH PYTHONSAFEPATH=1 VLLM_NO_USAGE_STATS=1 VLLM_CACHE_ROOT=V/vcache VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_USE_DEEP_GEMM=0 HF_HUB_OFFLINE=1
#     export PYTHONPATH=V:$PYTHONPATH PYTHONSAFEPATH=1 SGLANG_IS_FLASHINFER_AVAILABLE=false TVM_FFI_CACHE_DIR=V/tvm HF_HUB_OFFLINE=1     (sglang)
# Without VLLM_CACHE_ROOT's file vLLM inspects the model for up to 20 s.
# SGLang compiles kernels with nvcc when they are first called (20 to 70 s each on two cores). Their libraries are found by what is in their
# sources: with a Python 3.12 that has torch 2.11.0 they can be made here (CUDA 13.0 is there; CUDA feigned as sm_90, LIBRARY_PATH with any libcuda.so)
# by sglang.jit_kernel's all_reduce.get_custom_all_reduce_cls(), ._jit_custom_all_reduce_pull_module and _push_module(bfloat16, 2),
# norm._jit_rmsnorm_module(4096, bfloat16), ._jit_fused_add_rmsnorm_module(bfloat16, False), activation._jit_activation_module(bfloat16),
# rope._jit_fused_rope_module(True, 128, bfloat16), kvcache._jit_kvcache_module(1024), clamp_position and resolve_future_token_ids (int64).
set -e
here=$(cd "$(dirname "$0")" && pwd); server=$1; out=$(realpath -m "$2"); w=${WHEELS:-/tmp/wheels-$server}; p=$(mktemp -d)
mkdir -p "$out" "$w"
there="--python-version 3.12 --implementation cp --only-binary=:all: --no-deps --no-cache-dir --platform manylinux_2_34_x86_64 --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --platform manylinux1_x86_64 --platform manylinux_2_5_x86_64"
get() { python3 -m pip download -q $there -d "$w" "$@"; }
put() { python3 -m pip install -q $there --no-compile --upgrade --target "$p" "$@"; }
standin() { for f in "$@"; do mkdir -p "$p/$(dirname $f)"; cat > "$p/$f.py" <<'P'
"""Stand-in: grammars and sampling are not used here."""
from pydantic import BaseModel
__version__ = "0"
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (BaseModel,), {"__module__": __name__})
P
done; }
put annotated-types==0.8.0 cachetools==8.0.2 cbor2==6.3.0 fastapi==0.136.3 httpx2==2.16.2 msgspec==0.23.0 openai==3.57.0 openai-harmony==0.0.8 \
    partial-json-parser==0.2.1.1.post7 pybase64==1.5.1 pydantic==2.14.4 pydantic-core==2.50.5 pyzmq==27.3.0 sniffio==1.3.1 starlette==1.10.0 typing-inspection==0.4.5
standin xgrammar/__init__ xgrammar/openai_tool_call_schema xgrammar/structural_tag xgrammar/testing llguidance/__init__ llguidance/hf llguidance/torch
if [ $server = vllm ]; then
  ls "$w"/vllm-0.26.0-*.whl > /dev/null 2>&1 || get vllm==0.26.0
  for so in vllm/_C_stable_libtorch.abi3.so vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so; do
    [ -s "$out/$(basename $so).xz" ] || python3 "${SLIM_SO:?}" "$w"/vllm-0.26.0-*.whl $so "$out/$(basename $so).xz"; done
  (cd "$p" && unzip -q -o "$w"/vllm-0.26.0-*.whl 'vllm/*.py' 'vllm/*.json' vllm/cumem_allocator.abi3.so vllm/spinloop.abi3.so vllm/fs_io_C.abi3.so 'vllm-0.26.0.dist-info/[MWe]*' &&
    rm -rf vllm/third_party/deep_gemm vllm/third_party/fmha_sm100 vllm/third_party/tml_fa4)
  [ ! -d "$here/modelinfos" ] || { mkdir -p "$p/vcache"; cp -r "$here/modelinfos" "$p/vcache/"; }
else
  get sglang==0.5.15 sglang-kernel==0.4.4
  put transformers==5.12.1 tokenizers==0.22.2 orjson==3.13.0 ipython==9.18.1 traitlets==5.16.1 dill==0.4.1 compressed-tensors==0.20.1 loguru==0.7.3 gguf==0.19.0 \
      uvicorn==0.54.0 setproctitle==1.3.8 apache-tvm-ffi==0.1.11
  standin flashinfer/__init__ flashinfer/sampling
  (cd "$p" && unzip -q -o "$w"/sglang-0.5.15-*.whl -x '*multimodal_gen*' '*_core.cpython*' && unzip -q -o "$w"/sglang_kernel-*.whl '*.py' 'sgl_kernel/sm90/*' 'sglang_kernel*/METADATA')
  [ ! -d "$here/tvm" ] || cp -r "$here/tvm" "$p/"
fi
mkdir -p "$p/sidelane-0.2.0.dist-info"; printf 'Metadata-Version: 2.1\nName: sidelane\nVersion: 0.2.0\n' > "$p/sidelane-0.2.0.dist-info/METADATA"
printf '[vllm.general_plugins]\nsidelane = sidelane.servers.vllm:register\n\n[sglang.srt.plugins]\nsidelane = sidelane.servers.sglang:register\n' > "$p/sidelane-0.2.0.dist-info/entry_points.txt"
find "$p" \( -name __pycache__ -o -name bin \) -prune -exec rm -rf {} +; find "$p" -name '*.pyi' -delete
tar c -C "$p" . | xz -6 -T2 > "$out/site.tar.xz"; rm -rf "$p"; du -sh "$out"
