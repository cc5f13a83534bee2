"""Fuse StableHLO operations into the GPU kernels before and after them; the others stay.

- A kernel applies element-wise operations to its result before it stores it; an attention kernel
  can also multiply the result of each head by a matrix.
- A kernel computes the elements of a cheap operand instead of loading them; a new kernel computes a
  costly one first, and a costly tensor with several slices once.
- Two independent kernels of a layer become one dispatch.
- In a small matmul of few rows, each workgroup computes the norm of the input itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod

from castiron.emitter.graph.ir import Graph, Op, Value
from castiron.emitter.graph.types import F32
from castiron.emitter.kernels.gpu.expression import ELEMENTWISE, Expression, is_supported
from castiron.emitter.kernels.gpu.fused import beside, fused, pointwise, with_rows
from castiron.emitter.kernels.gpu.gpu_body import SHARED_BYTES
from castiron.emitter.kernels.gpu.gpu_kernel import GpuKernel

MAX_LOADS = 16  # max loads of an expression that is computed again for each use
MAX_LOADS_RARE = 1024  # max loads of an expression of which each element is used at most twice
MAX_SUM = 16  # max terms of a sum in such an expression
MAX_OPERANDS = 16  # max operands and results of a kernel
MAX_REPEATS = 1 << 22  # max elements of rows that a kernel computes, counted again for each use
NEAR = 16  # max number of operations between kernels that become one dispatch


@dataclass
class _Fusion:
    """A lowered function whose operations are being fused.

    stored: from a value that a kernel writes to memory to the result of this kernel.
    """

    graph: Graph
    producer: dict[Value, Op] = field(default_factory=dict)
    position: dict[Value, int] = field(default_factory=dict)
    users: dict[Value, list[Op]] = field(default_factory=dict)
    stored: dict[Value, Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for i, op in enumerate(self.graph.ops):
            self.position |= dict.fromkeys(op.results, i)
            self.producer |= dict.fromkeys(op.results, op)
            for value in op.operands:
                self.users.setdefault(value, []).append(op)

    def expression(self, root: Value, names: dict[Value, str], own: Value | None = None) -> Expression:
        """Return the operations from loaded values to `root`, which a kernel computes itself."""
        producers: dict[Value, Op] = {}

        def visit(value: Value) -> None:
            if value is own or value in names or value in producers:
                return
            op = self.producer.get(value)
            if op is None or not is_supported(op) or (value in self.stored and value is not root):
                names[value] = f"in{len(names)}"
                return
            producers[value] = op
            for operand in op.operands:
                visit(operand)

        visit(root)
        return Expression(root, producers, dict(names), own)

    def is_cheap(self, root: Value, own: Value | None = None, limit: int = MAX_LOADS) -> bool:
        """Return whether a kernel can compute an element of `root` with at most `limit` loads."""
        op = self.producer[root]
        return sum(self._terms(op, limit) * self._loads(x, own, limit) for x in op.operands) <= limit

    def _loads(self, value: Value, own: Value | None, limit: int) -> int:
        """Return how many loads from memory a kernel needs to compute one element of `value`."""
        op = self.producer.get(value)
        if value is own:
            return 0
        if op is None or not is_supported(op) or value in self.stored:
            return 1
        return sum(self._terms(op, limit) * self._loads(x, own, limit) for x in op.operands)

    def _terms(self, op: Op, limit: int) -> int:
        """Return how many numbers `op` combines in one element; limit + 1 if that is too many."""
        dims = {"reduce": op.attrs.get("dims"), "dot_general": op.attrs.get("contract", ((),))[0]}.get(op.kind, ())
        terms = prod(op.operands[0].shape[d] for d in dims)
        return terms if terms <= (MAX_SUM if limit == MAX_LOADS else limit) else limit + 1


def fuse_kernels(graph: Graph) -> Graph:
    """Return a copy of a lowered function with StableHLO operations fused into its GPU kernels."""
    f, ops = _Fusion(graph), list[Op]()
    sliced = _sliced(f)
    f.stored |= {value: value for value in sliced}
    continued = _continued(f)
    moved = {root: op for op, root in continued.items()}
    for op in graph.ops:
        kernel = op.attrs.get("kernel")
        if isinstance(kernel, GpuKernel) and op not in continued:
            ops += _rewritten(f, op, None)
        elif op.results and op.results[0] in moved:
            ops += _rewritten(f, moved[op.results[0]], op.results[0])
        elif op not in continued:
            ops += [*_separate(f, op, [value for value in op.results if value in sliced]), op]
    return replace(graph, ops=_rows_inside(_side_by_side(_live(ops, graph.outputs)), graph.outputs))


def _sliced(f: _Fusion) -> set[Value]:
    """Return the costly tensors of which several slices are used; the caller computes each once."""
    slices = {value: [user for user in users if user.kind == "slice"] for value, users in f.users.items()}
    many = [value for value, users in slices.items() if len(users) > 1 and value in f.producer]
    return {value for value in many if is_supported(f.producer[value]) and not f.is_cheap(value)}


def _live(ops: Sequence[Op], outputs: Sequence[Value]) -> list[Op]:
    live, live_ops = set(outputs), list[Op]()
    for op in reversed(ops):
        if live.intersection(op.results):
            live.update(op.operands)
            live_ops.append(op)
    return live_ops[::-1]


def _continued(f: _Fusion) -> dict[Op, Value]:
    """Map kernel calls to the last value that the kernel can return instead of its result."""
    roots, inside = dict[Op, Value](), set[Value]()
    for op in f.graph.ops:
        kernel = op.attrs.get("kernel")
        if isinstance(kernel, GpuKernel) and kernel.heads and (root := _last_of_heads(f, op)) is not None:
            roots[op] = f.stored[root] = root
        elif isinstance(kernel, GpuKernel) and kernel.single_store and len(op.results) == 1:
            root, before = _last(f, op.results[0], inside)
            if root is not None:
                roots[op] = f.stored[root] = root
                inside |= before
    return roots


def _last(f: _Fusion, result: Value, inside: set[Value]) -> tuple[Value | None, set[Value]]:
    """Return the last value computed element-wise from a kernel's `result`, and those before it."""
    after, order = {result}, [result]
    for value in order:
        for user in f.users.get(value, []):
            ok = user.kind in ELEMENTWISE and user.results[0].type == result.type and result.dtype is F32
            if ok and user.results[0] not in after | inside | f.stored.keys():
                after.add(user.results[0])
                order.append(user.results[0])
    for root in sorted(after - {result}, key=f.position.__getitem__, reverse=True):
        within = _between(f, root, after)
        inner_users = (user for v in within - {root} for user in f.users.get(v, []))
        is_closed = not (within - {root}) & set(f.graph.outputs) and all(user.results[0] in within for user in inner_users)
        if result in within and is_closed and f.is_cheap(root, result):
            return root, within - {root}
    return None, set()


def _last_of_heads(f: _Fusion, op: Op) -> Value | None:
    """Return the result of a matmul per head after an attention kernel, as in MLA, or None."""
    value, heads = op.results[0], op.attrs["kernel"].heads
    for kind in ("reshape", "slice", "dot_general", "transpose", "reshape"):
        users = f.users.get(value, [])
        if value in f.graph.outputs or [user.kind for user in users] != [kind]:
            return None
        (user,) = users
        by_head = value.shape[:2] == (op.results[0].shape[0], heads) and user.operands[0] is value
        if kind == "dot_general" and not (by_head and user.attrs["batch"] == ((1,), (0,))):
            return None
        if kind == "transpose" and tuple(user.attrs["dims"]) != (1, 0, 2):
            return None
        value = user.results[0]
    last = f.position[value]
    is_early = any(f.position[user.results[0]] < last for x in op.results[1:] for user in f.users.get(x, []))
    return None if is_early or value.shape[:1] != op.results[0].shape[:1] else value


def _between(f: _Fusion, root: Value, candidates: set[Value]) -> set[Value]:
    """Return `root` and those of `candidates` from which element-wise operations compute it."""
    reached, todo = {root}, [root]
    while todo:
        op = f.producer[todo.pop()]
        for operand in op.operands if op.kind in ELEMENTWISE else ():
            if operand in candidates and operand not in reached:
                reached.add(operand)
                todo.append(operand)
    return reached


def _rewritten(f: _Fusion, op: Op, root: Value | None) -> list[Op]:
    """Fuse operations around the kernel call `op`; return the calls that replace it."""
    kernel: GpuKernel = op.attrs["kernel"]
    given = dict(zip(kernel.tensors, op.operands, strict=True))
    computed = [name for name, x in given.items() if _is_computed(f, kernel, name, x)]
    limits = {name: MAX_LOADS_RARE if name in kernel.reads_rarely else MAX_LOADS for name in computed}
    inline = [name for name in computed if name not in kernel.reads_often and f.is_cheap(given[name], limit=limits[name])]
    made = _separate(f, op, [given[name] for name in computed if name not in inline])
    names = {x: name for name, x in given.items() if name not in inline}
    inputs = {name: f.expression(given[name], names) for name in inline}
    if len(names) + len(kernel.results) > MAX_OPERANDS:
        made += _separate(f, op, [given[name] for name in inline])
        names, inputs = {x: name for name, x in given.items()}, {}
    output = None if root is None else f.expression(root, names, op.results[0])
    more = {name: x for x, name in names.items() if name not in given}
    new = fused(kernel, inputs, output, more) if inputs or output else kernel
    values = given | more
    operands = tuple(f.stored.get(values[name], values[name]) for name in new.tensors)
    results = op.results if root is None else (root, *op.results[1:])
    return [*made, Op("kernel", operands, results, {**op.attrs, "kernel": new}, op.path)]


def _is_computed(f: _Fusion, kernel: GpuKernel, name: str, x: Value) -> bool:
    """Return whether an operand is computed by operations that can be fused into the kernel."""
    while (op := f.producer.get(x)) is not None and x not in f.stored and op.kind == "reshape":
        x = op.operands[0]
    is_known = op is None or x in f.stored or not is_supported(op) or op.kind == "constant"
    return not is_known and name not in kernel.in_place.values()


def _separate(f: _Fusion, op: Op, values: Sequence[Value]) -> list[Op]:
    """Return the call of one new kernel that computes the f32 `values`, if there are any."""
    values = [value for value in dict.fromkeys(values) if value.dtype is F32]
    if not values:
        return []
    names: dict[Value, str] = {}
    roots = [f.expression(value, names) for value in values]
    kernel = pointwise(roots, {name: value for value, name in names.items()})
    results = tuple(Value(value.type) for value in values)
    operands = tuple(f.stored.get(value, value) for value in names)
    f.stored |= dict(zip(values, results))
    return [Op("kernel", operands, results, {"kernel": kernel, "indices": {}}, op.path)]


def _side_by_side(ops: Sequence[Op]) -> list[Op]:
    """Join independent kernel calls that are near each other; return all operations."""
    joined: list[Op] = []
    for op in ops:
        kernels = [o for o in joined[-NEAR:] if isinstance(o.attrs.get("kernel"), GpuKernel)]
        for earlier in reversed(kernels if isinstance(op.attrs.get("kernel"), GpuKernel) else ()):
            between = [*joined[joined.index(earlier) + 1 :], op]
            used = {value for o in between for value in o.operands}
            changed = {value for o in between for value in _overwritten(o)}
            conflicts = used & {*earlier.results, *_overwritten(earlier)} | changed & {*earlier.operands}
            both = None if conflicts else _beside(earlier, op)
            if both is not None:
                joined.remove(earlier)
                op = both
                break
        joined.append(op)
    return joined


def _overwritten(op: Op) -> list[Value]:
    """Return the operands that a kernel call overwrites; none for other operations."""
    kernel = op.attrs.get("kernel")
    return [x for name, x in zip(kernel.tensors, op.operands) if name in kernel.in_place.values()] if kernel else []


def _beside(first: Op, second: Op) -> Op | None:
    """Return one call that runs both kernels side by side, or None if it exceeds a limit."""
    a, b = first.attrs["kernel"], second.attrs["kernel"]
    names = dict(zip(first.operands, a.tensors))
    shared = {name: names[x] for name, x in zip(b.tensors, second.operands) if x in names}
    kernel = beside(a, b, shared)
    bindings = len(kernel.tensors) + len(kernel.results) - len(kernel.in_place)
    if a.threads != b.threads or bindings > MAX_OPERANDS or kernel.shared_bytes > SHARED_BYTES:
        return None
    operands = *first.operands, *(x for name, x in zip(b.tensors, second.operands) if name not in shared)
    indices = {f"{prefix}_{name}": i for prefix, op in zip("ab", (first, second)) for name, i in op.attrs["indices"].items()}
    return Op("kernel", operands, (*first.results, *second.results), {"kernel": kernel, "indices": indices}, second.path)


def _rows_inside(ops: Sequence[Op], outputs: Sequence[Value]) -> list[Op]:
    """Move small kernels, such as norms, into the kernels that use them, if that is cheap."""
    remaining = list(ops)
    for op in ops:
        kernel = op.attrs.get("kernel")
        if not isinstance(kernel, GpuKernel) or kernel.read_row is None:
            continue
        users = [user for user in remaining if op.results[0] in user.operands]
        if not users:
            continue
        first, last = remaining.index(op), remaining.index(users[0])
        changed = {value for other in remaining[first : last + 1] for value in _overwritten(other)}
        is_stored = len(users) > 1 or op.results[0] in outputs
        both = None if changed & {*op.operands} else _with_rows(op, users[0], is_stored)
        if both is not None:
            remaining[last] = both
            remaining.remove(op)
    return remaining


def _with_rows(op: Op, user: Op, is_stored: bool) -> Op | None:
    """Return one call whose workgroups compute the rows of `op` for `user`, or None."""
    rows, kernel = op.attrs["kernel"], user.attrs.get("kernel")
    if not isinstance(kernel, GpuKernel):
        return None
    names = [name for name, x in zip(kernel.tensors, user.operands) if x is op.results[0]]
    reads = max(kernel.reads_rows.get(name, MAX_REPEATS + 1) for name in names)
    new = with_rows(kernel, names, rows, is_stored)
    bindings = len(new.tensors) + len(new.results) - len(new.in_place)
    is_costly = reads * kernel.workgroups * op.results[0].type.elements > MAX_REPEATS
    if is_costly or bindings > MAX_OPERANDS or new.shared_bytes > SHARED_BYTES:
        return None
    operands = *(x for x in user.operands if x is not op.results[0]), *op.operands
    return Op("kernel", operands, (*user.results, *op.results[:is_stored]), {**user.attrs, "kernel": new}, user.path)
