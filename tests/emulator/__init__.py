"""An accelerator emulated on the CPU, device type "emu": `python -m tests.emulator` builds it, `install()` has this
process use it.

It registers torch's PrivateUse1 for the rest of the process, so tests use it in processes of their own.
"""

import atexit
import importlib.util
import json
import os
import subprocess
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

NAME, MODULE = "emu", "shardwise_emulator"
SOURCE = Path(__file__).parent / "emulator.cpp"
# Ignored by git.
FOLDER = Path(os.environ.get("SHARDWISE_EMULATOR", Path(__file__).parent / "build"))
LIBRARY = FOLDER / f"{MODULE}.so"


def is_built() -> bool:
    """Whether the emulator is there, as its source is now."""
    return LIBRARY.exists() and LIBRARY.stat().st_mtime >= SOURCE.stat().st_mtime


# Marks tests that need it.
needed = pytest.mark.skipif(not is_built(), reason="make emulator builds what this needs")


def build() -> None:
    """Compile the emulator if need be, in about a minute. Needs a C++ compiler and ninja."""
    from torch.utils import cpp_extension

    FOLDER.mkdir(exist_ok=True)
    flags = {"extra_cflags": ["-O1"], "build_directory": str(FOLDER)}
    cpp_extension.load(MODULE, [str(SOURCE)], is_python_module=False, verbose=True, **flags)


def install() -> Any:
    """Make the emulator the accelerator of this process. Returns what sets its delays."""
    spec = importlib.util.spec_from_file_location(MODULE, LIBRARY)
    assert spec is not None
    assert spec.loader is not None
    native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(native)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _device_module(native))
    torch.utils.generate_methods_for_privateuse1_backend()
    atexit.register(torch.accelerator.synchronize)  # its threads are still at work on memory
    return native


def apart(module: str, name: str, *arguments: Any) -> Any:
    """What a function returns in a process of its own; all of it JSON."""
    return apart_together(module, name, [arguments])[0]


def apart_together(module: str, name: str, each: Sequence[Sequence[Any]]) -> list[Any]:
    """What a function returns of each of some arguments, in as many processes beside each other."""
    code = f"import json, sys; from {module} import {name}\nprint(json.dumps({name}(*json.loads(sys.argv[1]))))"
    environment, pipe = os.environ | {"OMP_NUM_THREADS": "1"}, subprocess.PIPE
    commands = [[sys.executable, "-c", code, json.dumps(arguments)] for arguments in each]
    running = [subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment) for command in commands]
    try:
        told = [process.communicate(timeout=170) for process in running]
    finally:
        for process in running:
            process.kill()
    assert not any(process.returncode for process in running), "".join(error for _, error in told)
    return [json.loads(text.splitlines()[-1]) for text, _ in told]


def _device_module(native: Any) -> types.ModuleType:
    generator = native.default_generator()
    module: Any = types.ModuleType(f"torch.{NAME}")
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module._lazy_init = lambda: None
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = lambda device: None
    module.manual_seed = module.manual_seed_all = generator.manual_seed
    module.get_rng_state = lambda device=NAME: generator.get_state()
    module.set_rng_state = lambda state, device=NAME: generator.set_state(state)
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    return module
