"""Which kernels are launched, with what types and constants: what a GPU would compile."""

import contextlib
import inspect
import json
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

POINTERS = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.uint8: "*u8",
}


@contextlib.contextmanager
def recorded() -> Iterator[set[str]]:
    """Collects a line of JSON for each different launch of the block."""
    found: set[str] = set()
    run = InterpretedFunction.run

    def recording(self, *args, **options):
        found.add(_line(self.fn, args, options))
        return run(self, *args, **options)

    InterpretedFunction.run = recording
    try:
        yield found
    finally:
        InterpretedFunction.run = run


def _line(function, args, options) -> str:
    parameters = inspect.signature(function).parameters
    given = dict(zip(parameters, args, strict=False))
    given |= {name: value for name, value in options.items() if name in parameters}
    rest = {n: v for n, v in options.items() if n not in parameters and n not in ("grid", "warmup")}
    types, constants = {}, {}
    for name, parameter in parameters.items():
        if parameter.annotation is tl.constexpr:
            types[name], constants[name] = "constexpr", given[name]
        elif isinstance(given[name], torch.Tensor):
            types[name] = POINTERS[given[name].dtype]
        else:
            types[name] = "i64" if parameter.annotation is tl.int64 else "i32"
    what = [function.__module__, function.__name__, types, constants, rest]
    return json.dumps(what, sort_keys=True)


def compile_for(line: str, target) -> dict[str, str | bytes]:
    """Compile one of them, in a process without the interpreter; the code by its kind."""
    import importlib

    from triton.compiler import ASTSource

    module, name, types, constants, options = json.loads(line)
    function = getattr(importlib.import_module(module), name)
    names = list(function.arg_names)
    own = {(names.index(each),): value for each, value in constants.items()}
    source = ASTSource(function, {each: types[each] for each in names}, own)
    return triton.compile(source, target=target, options=options).asm
