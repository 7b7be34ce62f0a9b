"""Imports of the server from which ranks of tests are forked: modules of training and compiling, which take seconds.

Triton comes along, which reads its variable then: with it, ranks can have interpreted kernels, and others as well. The
garbage collector is off meanwhile: it would take a quarter of the time.
"""

import atexit
import contextlib
import gc
import importlib
import os

gc.disable()
os.environ["TRITON_INTERPRET"] = "1"
for name in (
    *("torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.fsdp"),
    *("matplotlib.figure", "pytest", "triton.experimental.gluon"),
):
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module(name)
del os.environ["TRITON_INTERPRET"]
gc.freeze()
gc.enable()
atexit.register(os._exit, 0)  # else the bindings of Triton list all that they have not freed
