"""Select the model runner for the tests, and set the environment that vLLM needs for it on a CPU."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

V2 = os.environ.get("RUNNER") == "v2"
os.environ.update(
    VLLM_USE_V2_MODEL_RUNNER="1" if V2 else "0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_LOGGING_LEVEL="WARNING",
    TORCH_COMPILE_DISABLE="1",  # compiling one of vLLM's small functions takes longer than all its calls here
)
if V2:
    interpreter = str(Path(__file__).parent / "interpreter")
    sys.path.insert(0, interpreter)  # before Triton looks for backends; other processes of vLLM look there too
    os.environ.update(TRITON_INTERPRET="1", PYTHONPATH=os.pathsep.join((interpreter, os.environ.get("PYTHONPATH", ""))))
    import triton.language as tl
    from triton.runtime import interpreter as triton_interpreter

    # The interpreter replaces the language's functions again at every call of a device function, and computes overflow
    # checks whose result it drops. Once is enough, as nothing is compiled here: kernels run two to three times as fast.
    triton_interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    triton_interpreter._patch_lang = lambda function: triton_interpreter._LangPatchScope()
    triton_interpreter.interpreter_builder.options = triton_interpreter.InterpreterOptions(sanitize_overflow=False)
