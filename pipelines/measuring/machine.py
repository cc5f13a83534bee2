"""What this machine can do at most: read bandwidth and f32 arithmetic, measured through IREE as kernels would use them."""

import os
import tempfile
import time
from pathlib import Path

import numpy as np

# 256 MB, several times any cache.
READ_FLOATS = 64 << 20
READ_GROUPS = 64
FMA_GROUPS = 16
FMA_ITERATIONS = 400_000
# Lanes and chains of fused multiply-adds in flight: enough to cover the latency, few enough to stay in registers.
CHAINS = {"avx2": (8, 12), "avxvnni": (8, 12), "avx512": (16, 12), "avx512vnni": (16, 12), "neon": (4, 24)}


def probe_text(lanes: int, chains: int) -> str:
    """MLIR with two functions: `read` sums READ_FLOATS floats, `fma` does `chains` chains of FMA on `lanes` lanes."""
    return f"module @probe {{\n{_read()}{_fma(lanes, chains)}}}\n"


def _read() -> str:
    part = READ_FLOATS // READ_GROUPS
    names = range(4)
    loads = "\n".join(
        f"""        %o{j} = arith.addi %i, %k{j} : index
        %v{j} = vector.load %X[%o{j}] : memref<{READ_FLOATS}xf32>, vector<16xf32>
        %s{j} = arith.addf %a{j}, %v{j} : vector<16xf32>"""
        for j in names
    )
    offsets = "\n".join(f"      %k{j} = arith.constant {16 * j} : index" for j in names)
    carried = ", ".join(f"%a{j} = %zero" for j in names)
    sums = ", ".join(f"%s{j}" for j in names)
    types = ", ".join("vector<16xf32>" for _ in names)
    return _executable(
        "read", READ_GROUPS, f"{READ_FLOATS}xf32", f"{READ_GROUPS}x16xf32",
        f"""{offsets}
      %zero = arith.constant dense<0.0> : vector<16xf32>
      %part = arith.constant {part} : index
      %step = arith.constant 64 : index
      %first = arith.muli %g, %part : index
      %end = arith.addi %first, %part : index
      %r:4 = scf.for %i = %first to %end step %step iter_args({carried}) -> ({types}) {{
{loads}
        scf.yield {sums} : {types}
      }}
      %t0 = arith.addf %r#0, %r#1 : vector<16xf32>
      %t1 = arith.addf %r#2, %r#3 : vector<16xf32>
      %t = arith.addf %t0, %t1 : vector<16xf32>
      vector.store %t, %Y[%g, %c0] : memref<{READ_GROUPS}x16xf32>, vector<16xf32>""",
    )  # fmt: skip


def _fma(lanes: int, chains: int) -> str:
    vector, inputs = f"vector<{lanes}xf32>", chains + 2
    names = range(chains)
    # The operands come from memory: constants would be folded, and equal chains would become one.
    loads = "\n".join(
        f"""      %n{j} = arith.constant {j} : index
      %x{j} = vector.load %X[%n{j}, %c0] : memref<{inputs}x{lanes}xf32>, {vector}"""
        for j in range(inputs)
    )
    steps = "\n".join(f"        %s{j} = math.fma %a{j}, %x{chains}, %x{chains + 1} : {vector}" for j in names)
    sums = "\n".join(
        f"      %t{j} = arith.addf %{'r#0' if j == 1 else f't{j - 1}'}, %r#{j} : {vector}" for j in range(1, chains)
    )
    carried, types = ", ".join(f"%a{j} = %x{j}" for j in names), ", ".join(vector for _ in names)
    return _executable(
        "fma", FMA_GROUPS, f"{inputs}x{lanes}xf32", f"{FMA_GROUPS}x{lanes}xf32",
        f"""{loads}
      %one = arith.constant 1 : index
      %end = arith.constant {FMA_ITERATIONS} : index
      %r:{chains} = scf.for %i = %c0 to %end step %one iter_args({carried}) -> ({types}) {{
{steps}
        scf.yield {", ".join(f"%s{j}" for j in names)} : {types}
      }}
{sums}
      vector.store %t{chains - 1}, %Y[%g, %c0] : memref<{FMA_GROUPS}x{lanes}xf32>, {vector}""",
    )  # fmt: skip


def _executable(name: str, groups: int, operand: str, result: str, body: str) -> str:
    translation = "#iree_codegen.translation_info<pipeline = #iree_cpu.pipeline<Default>>"
    return f"""stream.executable private @probe_{name} {{
  stream.executable.export public @probe_{name}_fn workgroups() -> (index, index, index) {{
    %n = arith.constant {groups} : index
    %c1 = arith.constant 1 : index
    stream.return %n, %c1, %c1 : index, index, index
  }}
  builtin.module {{
    func.func @probe_{name}_fn(%x: !stream.binding, %y: !stream.binding) attributes {{translation_info = {translation}}} {{
      %c0 = arith.constant 0 : index
      %X = stream.binding.subspan %x[%c0] : !stream.binding -> memref<{operand}>
      %Y = stream.binding.subspan %y[%c0] : !stream.binding -> memref<{result}>
      %g = stream.dispatch.workgroup.id[0] : index
{body}
      return
    }}
  }}
}}
func.func @{name}(%x: tensor<{operand}>) -> tensor<{result}> {{
  %r = flow.dispatch @probe_{name}::@probe_{name}_fn(%x) : (tensor<{operand}>) -> tensor<{result}>
  return %r : tensor<{result}>
}}
"""


class Machine:
    """The probes, compiled for this machine and loaded on `threads` threads.

    Needs iree-base-compiler; CompileError without it, TargetError on a CPU that castiron has no kernels for.
    """

    def __init__(self, threads: int):
        import iree.runtime as rt

        from castiron.vmfb.compiler import compile_mlir
        from castiron.vmfb.device import device
        from castiron.vmfb.program import Buffer
        from castiron.vmfb.targets import resolve

        target = resolve("host")
        self.threads = threads
        self.device = device(threads)
        self.lanes, self.chains = CHAINS[target.isa]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "probe.vmfb"
            compile_mlir(probe_text(self.lanes, self.chains), target, path)
            instance = rt.VmInstance()
            module = rt.VmModule.copy_buffer(instance, path.read_bytes())
        self._context = rt.VmContext(instance, [rt.create_hal_module(instance, self.device), module])
        self._calls = {}
        for name, shape in (("read", (READ_FLOATS,)), ("fma", (self.chains + 2, self.lanes))):
            operand = Buffer(self, shape, "f32")
            # Pages that nobody wrote are all the same page of zeros, in cache.
            operand.array[...] = 1.0
            if name == "fma":
                operand.array[:-2] += np.arange(self.chains, dtype=np.float32)[:, None]
                operand.array[-2:] = [[0.999], [1e-6]]
            arguments = rt.VmVariantList(1)
            arguments.push_ref(operand.view)
            self._calls[name] = (module.lookup_function(name), arguments, operand)
        self._results = rt.VmVariantList(1)

    def read_gb_s(self, repeats: int = 5) -> float:
        """10^9 bytes read a second, the best of `repeats`."""
        return READ_FLOATS * 4 / self._best("read", repeats) / 1e9

    def peak_gflop_s(self, repeats: int = 5) -> float:
        """10^9 f32 operations a second, multiply and add counted as two, the best of `repeats`."""
        work = FMA_GROUPS * FMA_ITERATIONS * self.chains * self.lanes * 2
        return work / self._best("fma", repeats) / 1e9

    def _best(self, name: str, repeats: int) -> float:
        function, arguments, _ = self._calls[name]
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            self._context.invoke(function, arguments, self._results)
            seconds.append(time.perf_counter() - start)
        return min(seconds)


def describe() -> dict:
    """CPU name, cores, memory in 10^9 bytes and system."""
    import platform

    from castiron.vmfb.cpu import host_cpu, physical_cores

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return {
        "cpu": host_cpu(),
        "cores": physical_cores(),
        "memory_gb": round(memory, 1),
        "system": f"{platform.system()} {platform.machine()}",
    }
