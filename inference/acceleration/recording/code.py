"""Generation of Python code, by `torch.fx`, that repeats recorded tensor operations.

The code runs the same kernels on the same layouts in the same order, so its results are bitwise
equal. Views are not recorded: a view is the memory of a tensor with its size and stride. Results
that only depend on constant tensors are computed once, when the tensors are bound. Sizes and other
constants are attributes, so one function is used for all shapes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import count
from types import BuiltinFunctionType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from pyrofl.inference.acceleration.recording.tape import Call, NotRecorded, Tape, storage, tensors

EMPTY = "empty", "new_empty", "empty_like"
ZEROS = "zeros", "new_zeros", "zeros_like"
MAX_SHARED_ENTRIES = 2**18  # largest entries of a result with memory shared by all runs: measured
NUMBERS = {"add", "sub", "mul", "div"}  # faster with a tensor than with a Python number
# Operations that can write into given memory.
PLACED = {
    *("add", "sub", "mul", "div", "neg", "pow", "sqrt", "rsqrt", "exp", "log", "where", "addcmul"),
    *("sigmoid", "tanh", "clamp", "clamp_min", "reciprocal", "log1p", "expm1", "abs", "le", "sum"),
    *("bmm", "baddbmm", "mm", "addmm", "index_select", "cat", "gather", "scatter_add"),
    *("_softmax", "_log_softmax", "_log_softmax_backward_data"),
}
# Those of them whose result can overwrite an argument of the same layout.
ELEMENTWISE = {
    *("add", "sub", "mul", "div", "neg", "pow", "sqrt", "rsqrt", "exp", "log", "where", "addcmul"),
    *("sigmoid", "tanh", "clamp", "clamp_min", "reciprocal", "log1p", "expm1", "abs"),
}
UNPLACED = {"aten.sum.default", *(f"aten.where.Scalar{n}" for n in ("", "Other", "Self"))}


class RecordingInputs(NamedTuple):
    """Input tensors of a recorded function, grouped by how they change between calls."""

    moving: Sequence[Tensor]  # it only modifies these
    placed: Sequence[Tensor] = ()  # other functions modify these between two runs
    still: Sequence[Tensor] = ()  # these never change
    passing: Sequence[Tensor] = ()  # these differ in every run

    @property
    def bound(self) -> list[Tensor]:
        """Input tensors that are bound to the function once, and not passed in every call."""
        return [*self.moving, *self.placed, *self.still]


Bind = Callable[..., Callable[..., None]]
"""(*moving, *placed, *still) -> a function of the passing tensors."""

Tree = Any
"""Arguments of an operation: an int is a variable, None the next constant; lists are tuples."""


class Line(NamedTuple):
    """One operation of the generated code, as a variable name, a callable and arguments."""

    name: int  # of its variable
    target: Any  # a function, or the name of a method
    args: tuple[Tree, ...]
    options: tuple[tuple[str, Tree], ...]

    def used(self) -> Iterator[int]:
        """Yield the indices of the variables that this operation reads."""
        yield from _variables((self.args, tuple(tree for _, tree in self.options)))


def compile_operations(tape: Tape, inputs: RecordingInputs) -> tuple[Bind, object]:
    """Compile recorded tensor operations to a function that repeats them; also return its code."""
    if tape.reason:
        raise NotRecorded(tape.reason)
    calls = _needed_operations(tape.calls, inputs)
    code = _Code(inputs, calls)
    for i, call in enumerate(calls):
        code.add(i, call)
    return code.done()


def _needed_operations(calls: list[Call], inputs: RecordingInputs) -> list[Call]:
    """Select the recorded operations that depend on inputs and affect the tensors to modify."""
    live = {storage(v) for v in inputs.moving}
    input_storages = {storage(v) for some in inputs for v in some}
    written = {v for call in calls for v in call.written}
    if written - live - ({v for call in calls for v in call.created} - input_storages):
        raise NotRecorded("it modifies a tensor that it should only read")
    depends, dependent = input_storages | written, []
    for call in calls:
        if depends & (call.created | call.read):
            depends |= call.created
            dependent.append(call)
    needed = []
    for call in reversed(dependent):
        if live & ((call.created - call.read) | call.written):
            live |= call.read
            needed.append(call)
    return needed[::-1]


class _Code:
    """Builder of the Python code of a recorded function: its lines, variables and constants."""

    def __init__(self, inputs: RecordingInputs, calls: list[Call]) -> None:
        self.written = {v for call in calls for v in call.written}  # by any call
        self.last = {v: i for i, call in enumerate(calls) for v in call.read | call.written}
        self.homes: dict[int, list[int]] = {}  # storage -> storages that share its fixed memory
        self.twins: dict[tuple[Any, ...], int] = {}  # an operation and its arguments -> variable
        self.lines: tuple[list[Line], list[Line]] = [], []  # of every run, and of binding
        self.constants: tuple[list[Any], list[Any]] = [], []  # of both
        self.captured: dict[int, Tensor] = {}  # tensors that are not inputs
        self.variable_of: dict[tuple[Any, ...], int] = {}
        self.roots: dict[int, list[tuple[int, Tensor]]] = {}  # storage -> bases of views
        self.count = 0  # variables
        many, passing = len(inputs.bound), len(inputs.passing)
        for value in (*inputs.bound, *inputs.passing):
            self._know(value, self._variable())
        self.bound, self.passing = range(many), range(many, many + passing)
        self.placed = {*self.bound}  # variables with the same memory in all runs,
        self.still = {*self.bound[many - len(inputs.still) :]}  # and with the same numbers

    def _variable(self) -> int:
        self.count += 1
        return self.count - 1

    def _know(self, value: Tensor, name: int) -> None:
        self.variable_of.setdefault(_view_key(value), name)
        self.roots.setdefault(storage(value), []).append((name, value))

    def add(self, position: int, call: Call) -> None:
        """Append a recorded tensor operation to the generated code, unless it only makes views."""
        if not call.written and call.created <= call.read:
            return
        name, out = str(call.op._schema.name).rpartition("::")[2], call.out
        if name in EMPTY + ZEROS and _is_whole(out):
            if storage(out) in self.written:
                self._memory(out, name in ZEROS)
                return
            if name in ZEROS and out.numel() <= MAX_SHARED_ENTRIES:
                return  # captured where it is read
        if name == "relu":  # it cannot write into given memory
            name, call = "clamp_min", call._replace(op=torch.ops.aten.clamp_min.default)
            call = call._replace(args=(*call.args, 0))
        constants: list[Any] = []
        args = tuple(self._lower(v, constants) for v in _numbers(name, call.args))
        options = tuple((n, self._lower(v, constants)) for n, v in call.options.items())
        pure = not call.written and not self.written & (call.created | call.read)
        once = pure and self.still.issuperset(_variables((args, tuple(v for _, v in options))))
        whole = isinstance(out, Tensor)
        target, key = _target(name, call.op), (name, args, options, repr(constants))
        if (
            pure
            and name == "mul"
            and type(call.args[1]) is float
            and call.args[1] == 1
            and _layout(call.args[0]) == _layout(out)
        ):
            self._know(out, args[0])
            self._join(out, call.args[0])
            return
        if pure and whole and key in self.twins:
            self._know(out, self.twins[key])
            return
        if not once and not call.written and _is_placed(name, call):
            home = self._overwritten(position, name, call)
            home = self._memory(out, False) if home is None else home
            self._line(target, args, (*options, ("out", home)), constants, False, False)
            return
        node = self._line(target, args, options, constants, once, once)
        if pure and whole:
            self.twins[key] = node
        for i, value in enumerate((out,) if whole else out or ()):
            if isinstance(value, Tensor) and storage(value) not in call.read:
                part = node
                if not whole:
                    part = self._line(operator.getitem, (node, None), (), [i], once, once)
                self._know(value, part)

    def _memory(self, out: Tensor, zeros: bool) -> int:
        """Add a reusable output tensor to the generated code, zeroed in each run if `zeros`."""
        options = {"dtype": out.dtype, "device": out.device}
        values, args = [tuple(out.shape), tuple(out.stride()), *options.values()], (None, None)
        named = tuple((n, None) for n in options)
        home = self._line(torch.empty_strided, args, named, values, True, False)
        self._know(out, home)
        self.homes[storage(out)] = [storage(out)]
        if zeros:
            self._line("zero_", (home,), (), [], False, False)
        return home

    def _join(self, out: Tensor, value: Tensor) -> None:
        """Register that an operation's result `out` is stored in the memory of tensor `value`."""
        if storage(value) in self.homes:
            self.homes[storage(value)].append(storage(out))
            self.homes[storage(out)] = self.homes[storage(value)]

    def _overwritten(self, position: int, name: str, call: Call) -> int | None:
        """Return the variable of an argument that an operation's result may overwrite, or None."""
        values = tensors((*call.args, *call.options.values()))
        for value in values if name in ELEMENTWISE else ():
            sharing = self.homes.get(storage(value), ())
            others = [v for v in values if storage(v) in sharing]
            ends = all(self.last.get(v, -1) <= position for v in sharing)
            alike = _layout(value) == _layout(call.out)
            if sharing and ends and alike and len({self._name(v) for v in others}) == 1:
                self._join(call.out, value)
                self._know(call.out, self._name(value))
                return self._name(value)
        return None

    def _line(
        self,
        target: Any,
        args: Tree,
        options: tuple[tuple[str, Tree], ...],
        constants: list[Any],
        once: bool,
        still: bool,
    ) -> int:
        name = self._variable()
        self.lines[once].append(Line(name, target, args, options))
        self.constants[once].extend(constants)
        self.placed |= {name} if once else set()
        self.still |= {name} if still else set()
        return name

    def _lower(self, value: Any, constants: list[Any]) -> Tree:
        """Convert an argument of a recorded operation to code; append its constants to a list."""
        if isinstance(value, Tensor):
            return self._name(value)
        if isinstance(value, (list, tuple)) and any(isinstance(v, Tensor) for v in value):
            return tuple(self._lower(v, constants) for v in value)
        constants.append(value)
        return None

    def _name(self, value: Tensor) -> int:
        """Return the index of a tensor's variable in the generated code; create it if missing.

        A new variable is a view of a known tensor, or a constant.
        """
        seen = _view_key(value)
        if seen not in self.variable_of:
            self.variable_of[seen] = self._view(value) if storage(value) in self.roots else -1
        if self.variable_of[seen] < 0:
            name = self._variable()
            self.captured[name] = value.detach()
            self.placed.add(name)
            self.still.add(name)
            self.variable_of[seen] = name
            self.roots[storage(value)] = [(name, value)]
        return self.variable_of[seen]

    def _view(self, value: Tensor) -> int:
        roots = [one for one in self.roots[storage(value)] if _holds(one[1], value)]
        if not roots or value.is_conj() or value.is_neg():
            raise NotRecorded("it reads the memory of a tensor in another way")
        root, whole = roots[0]
        offset = value.storage_offset() - whole.storage_offset()
        where = [tuple(value.shape), tuple(value.stride()), *([offset] if offset else [])]
        target, once = part_of if offset else torch.as_strided, root in self.placed
        args = (root, *(None for _ in where))
        return self._line(target, args, (), where, once, root in self.still)

    def done(self) -> tuple[Bind, object]:
        """Return the function that binds tensors to the generated code, and the lines of code."""
        run, once = (tuple(lines) for lines in self.lines)
        bound_names = {line.name for line in once}
        used = {v for line in run for v in line.used()}
        passed_on = tuple(sorted(used & bound_names))
        begin, step = (
            _compile_lines(once, (), passed_on),
            _compile_lines(run, tuple(self.passing), ()),
        )
        constants = [{f"c{i}": v for i, v in enumerate(some)} for some in self.constants]
        captured = {f"v{i}": v for i, v in self.captured.items()}
        names = tuple(self.bound)  # `bind` must not refer to `self`, with all its tensors

        def bind(*bound: Tensor) -> Callable[..., None]:
            variables = captured | {f"v{i}": v for i, v in zip(names, bound, strict=True)}
            values = begin(SimpleNamespace(**constants[1], **variables))
            variables |= {f"v{i}": v for i, v in zip(passed_on, values, strict=True)}
            return partial(step, SimpleNamespace(**constants[0], **variables))

        return bind, (once, run)


@lru_cache(maxsize=256)
def _compile_lines(
    lines: tuple[Line, ...], passing: tuple[int, ...], results: tuple[int, ...]
) -> Callable[..., Any]:
    """Compile lines of code to a Python function of the tensors that are passed in every call."""
    graph, constants = fx.Graph(), count()
    nodes = {i: graph.placeholder(f"v{i}") for i in passing}

    def node(tree: Tree) -> Any:
        if tree is None:
            return graph.create_node("get_attr", f"c{next(constants)}")
        if isinstance(tree, tuple):
            return [node(part) for part in tree]
        if tree not in nodes:
            nodes[tree] = graph.create_node("get_attr", f"v{tree}")
        return nodes[tree]

    for name, target, args, options in lines:
        kind = "call_method" if isinstance(target, str) else "call_function"
        arguments = tuple(node(v) for v in args), {n: node(v) for n, v in options}
        nodes[name] = graph.create_node(kind, target, *arguments)
    graph.output(tuple(nodes[i] for i in results))
    code = graph.python_code("self")
    namespace = dict(code.globals)
    exec(compile(code.src, "<recorded>", "exec"), namespace)
    forward: Callable[..., Any] = namespace["forward"]
    return forward


def part_of(root: Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
    """Return a strided view that starts `offset` elements after a tensor's first element."""
    return root.as_strided(size, stride, root.storage_offset() + offset)


def _variables(tree: Any) -> Iterator[int]:
    """Yield the indices of variables in an operation's arguments, including nested tuples."""
    if type(tree) is int:
        yield tree
    elif type(tree) is tuple:
        for part in tree:
            yield from _variables(part)


def _target(name: str, op: Any) -> Any:
    """Return the fastest equivalent callable for a torch operation."""
    if name.endswith("_") and hasattr(Tensor, name):
        return name
    module = torch.linalg if name.startswith("linalg_") else torch
    quick = getattr(module, name.removeprefix("linalg_"), None)
    return quick if isinstance(quick, BuiltinFunctionType) else op


def _numbers(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Convert Python numbers in an operation's arguments to tensors, once for all its runs."""
    if name not in NUMBERS or len(args) < 2 or type(args[1]) not in (int, float):
        return args
    one = args[0]
    if not isinstance(one, Tensor) or not one.dim() or not one.is_floating_point():
        return args
    return one, _number(float(args[1])), *args[2:]


@lru_cache(maxsize=256)
def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def _layout(value: Tensor) -> tuple[Any, ...]:
    return value.shape, value.stride(), value.dtype


def _is_placed(name: str, call: Call) -> bool:
    """Return whether an operation's result is small and can be written to an existing tensor."""
    is_listed = name in PLACED and str(call.op) not in UNPLACED
    return is_listed and call.out.numel() <= MAX_SHARED_ENTRIES and _is_whole(call.out)


def _is_whole(value: Tensor) -> bool:
    """Return whether a tensor uses all elements of its underlying storage."""
    return value.untyped_storage().nbytes() == value.numel() * value.element_size()


def _holds(whole: Tensor, part: Tensor) -> bool:
    """Return whether tensor `whole` spans the storage range of `part`, in the same storage."""
    (begin, end), (first, last) = map(_reach, (whole, part))
    return whole.dtype == part.dtype and begin <= first and last <= end


def _reach(value: Tensor) -> tuple[int, int]:
    """Return the storage positions of a tensor's first element and of the end of its last one."""
    begin = int(value.storage_offset())
    if not value.numel():
        return begin, begin
    far = sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True))
    return begin, begin + far + 1


def _view_key(value: Tensor) -> tuple[Any, ...]:
    """Return a key of a tensor (memory, shape, strides, type) that is equal for identical views."""
    return storage(value), value.storage_offset(), value.shape, value.stride(), value.dtype
