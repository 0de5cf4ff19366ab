"""The allocations and frees of a training run, in order, on a GPU that need not exist. All sizes are in bytes.

`Tracer` is a dispatch mode over FakeTensorMode. It records each storage when an operator first returns it, and when it
dies; CUDA's caching allocator would get these requests. A fake tensor stands for one in GPU memory, or in host memory
if fake_placement.py says so; host storages have a list of their own. Real tensors are not recorded. Those of one
element (`torch.tensor(0.0)`, the optimizer's step counters) are computed for real. Larger ones (batches) become fake,
"copied to the GPU", in the first operator that gets them. cuda_emulation.py makes torch choose operators as on CUDA.
"""

import contextlib
import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, Literal

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_map_only

from vramsweep.harness.hardware.gpu_lookup import Capability
from vramsweep.runners.measure.dispatch_modes import sharded, storage_resizes, tensors_alive
from vramsweep.runners.measure.model_description import look_at_gradients
from vramsweep.runners.measure.patches import patched
from vramsweep.runners.trace import cuda_allocations, fake_placement, mask_counts, trace_data
from vramsweep.runners.trace.cuda_allocations import Stepwise
from vramsweep.runners.trace.known_values import ASKS, INDEXING, UNKNOWN, KnownValues
from vramsweep.runners.trace.operator_cost import C10D, Lists, collective, find_lists, work
from vramsweep.runners.trace.sdpa_kernels import Freed
from vramsweep.runners.trace.storage_log import MemoryLog, of_host
from vramsweep.runners.trace.storage_origins import Origins
from vramsweep.runners.trace.trace_data import AGAIN, Maker, Mark, Storages, Trace

Place = Literal["card", "host"]
SOME = 500  # operators, which take less than a second
FEW_CHOICES = 4096
# Modules that read norms and the loss scale. No memory depends on these values, so such a read returns 0.
FRAMEWORKS = ("deepspeed.", "accelerate.", "torch.optim._adafactor.")


class Tracer(TorchDispatchMode):
    """Dispatch mode that records storages; its context manager `record` enters all that is needed.

    `fake` makes the tensors; if their shapes are symbolic, so are the sizes (symbolic_shapes.py).
    """

    supports_higher_order_operators = True  # for torch

    def __init__(self, capability: Capability, fake: FakeTensorMode | None = None) -> None:
        super().__init__()
        self.fake = fake or FakeTensorMode(allow_non_fake_inputs=True)
        self.trace = Trace()
        self.in_step = False
        self.in_last_step = False
        self._capability = capability
        self._workspace = trace_data.cublas_workspace(capability)
        # forward and backward each run in a thread that has a cuBLAS handle and a cuBLASLt handle
        self._handles: set[tuple[bool, bool]] = set()
        self._operator: Any = None
        self.operators: list[Any] = []  # that ran, in order
        self.hear: Callable[[], None] = lambda: None  # called after every `SOME` of them
        self._origins = Origins()
        self._makers: dict[Maker, int] = {}
        self.host_makers: list[Maker] = []
        self._card = MemoryLog(self.trace, self._note_request)
        self._host = MemoryLog(self.trace.host, self._note_host_request)
        self.books = (self._card, self._host)
        self.touched: list[list[int | None]] = []  # the storages of each kernel
        self.lists: dict[int, Lists] = {}  # by number of the kernel
        self.known: KnownValues | None = None  # of batches
        self.scripted = False  # a script's trace: its host tensors are real, except parameters
        self._aside = MemoryLog(Storages(), lambda: None)  # for those parameters, which are fake and on the host
        self.trained: set[Place] = set()  # where parameters had gradients
        self._placing: Place | None = None
        self._inputs: list[torch.Tensor] = []  # of the running operator
        self._begun: list[tuple[weakref.ref[torch.nn.Module], list[int]]] = []  # modules, storages made before them
        self.begun: list[tuple[str, int, list[int]]] = []  # modules that ran: path, own parameters, storages before
        self._parameters: list[weakref.ref[torch.Tensor]] = []  # a script may drop its first model
        self._zeros: weakref.ref[torch.Tensor] | None = None  # what the last operator returned, if it makes zeros
        self._streams: dict[Any, int] = {torch.cpu.current_stream(): 0}
        self.noting = False  # whether to record what streams do; needed only if something calls record_stream
        # called when a backward pass ends; returns tensors other than parameters and their gradients, by category
        self.held: Callable[[], dict[str, list[torch.Tensor]]] = dict
        self.raises_when_full = True  # in a script that catches out-of-memory errors
        self.after_operator: Callable[[], None] = lambda: None  # may raise what the operator would

    @contextlib.contextmanager
    def record(self) -> Iterator[None]:
        """Trace everything that runs inside."""
        collects = gc.isenabled()
        gc.disable()
        gc.freeze()  # existing objects need not be searched at every mark
        hook = register_optimizer_step_post_hook(lambda optimizer, args, kwargs: self._stepped(optimizer))
        begun = (torch.nn.Module, "__init__", self._note_begun(torch.nn.Module.__init__))
        emptied = patched([(torch.cuda, "empty_cache", lambda: self.trace.events.append(0)), begun])
        try:
            with hook, emptied, self._origins.watch(), storage_resizes(self._resized), self.fake, self:
                yield
        finally:
            gc.unfreeze()
            if collects:
                gc.enable()
            self.trace.makers = makers = list(self._makers)
            again = {n for n, origin in enumerate(self.trace.origins) if makers[origin].operator.endswith(AGAIN)}
            self.trace.categories = self._card.close(again)
            self.trace.host.categories = of_host(self.trace.host, self._host.close())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if sharded(types):
            return NotImplemented
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.HigherOrderOperator):  # flex_attention, which requests what its kernel does
            self._operator, out = func.name(), func(*args, **kwargs)
            self.leave_out("compiled_code", "flex_attention as the fused kernel, which torch.compile makes")
            for tensor in _tensors((out,)):
                self._track(tensor, [])
            return out
        if func is torch.ops.prim.device.default and self.known is None and isinstance(args[0], FakeTensor):
            self._operator, self._zeros = func, None
            return args[0].device  # torch's C++ asks for it at every operator
        if func in cuda_allocations.IN_PARTS:
            with self:
                return cuda_allocations.IN_PARTS[func](*args, **kwargs)
        self._operator = func
        self._origins.dispatched()
        func = cuda_allocations.as_run(func, args, kwargs, self._zeros)
        tensors = list(_tensors((*args, *kwargs.values())))
        valueless = [isinstance(t, FakeTensor) or t.is_meta for t in tensors]
        if func is torch.ops.aten._local_scalar_dense.default and any(valueless):
            self.note("join", self.stream(torch.cpu.current_stream()))
            asked = UNKNOWN if self.known is None else self.known.compute(func, args, kwargs)
            if asked is not UNKNOWN:
                return asked
            if not self.in_step or _framework_asks():
                return 0  # the Trainer's own bookkeeping after training; a framework's check for overflow
        elif tensors and not any(valueless) and (self.scripted or all(t.numel() <= 1 for t in tensors)):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func.namespace == "c10d":
            self.know("communication", tensors)
        if func.namespace in C10D and self.in_last_step and (called := collective(func, args)) is not None:
            self.trace.collectives.append((called, 1))
        value = UNKNOWN if self.known is None else self.known.compute(func, args, kwargs)
        if value is not UNKNOWN and func in ASKS:
            out = tree_map_only(torch.Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device="cpu"), value)
        elif self.known is not None and func is torch.ops.aten.nonzero.default:
            count = mask_counts.count_selected(self, args[0])
            out = torch.empty((count, args[0].dim()), dtype=torch.int64, device="cpu")
            if count == args[0].numel() <= FEW_CHOICES:  # all, so their places are known: experts that get tokens
                with unset_fake_temporarily():
                    value = torch.ones(args[0].shape).nonzero()
        elif self.known is not None and func in INDEXING and (len(args) < 3 or args[2].numel() != 1):  # else it fills
            with self:
                at = self.known.by_place(args[1])
            out = func(args[0], at, *args[2:], **kwargs)
        else:
            out = func(*cuda_allocations.with_strides(func, args), **kwargs)
        if self.known is not None:
            self.known.keep(out, value)
            mask_counts.note_share(self, func, args, kwargs, out)
        with torch._C.DisableTorchFunction():  # it only reads tensors, so other modes need not see it
            self._note_operator(func, args, kwargs, tensors, out)
            self.after_operator()
        return out

    def _note_operator(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor], out: Any) -> None:
        """Record what an operator has just allocated, computed on the GPU and sent to other ranks."""
        self.operators.append(func)
        if len(self.operators) % SOME == 0:
            self.hear()
        on_host = cuda_allocations.ON_HOST.get(func, ())
        made = [tensor for n, tensor in enumerate(_tensors((out,))) if n not in on_host]
        each = isinstance(out, (list, tuple)) and len(tensors) >= len(made) and func.__name__.startswith("_foreach")
        order = list(enumerate(made))
        for n, tensor in reversed(order) if func in cuda_allocations.LAST_FIRST else order:
            self._inputs = [tensors[n]] if each else tensors
            self._track(tensor, tensors)
        self._inputs = []  # or they would live until the next operator
        on_card = bool(tensors) and tensors[0].device.type != "meta" and not self.on_host(tensors[0])
        if on_card and func in cuda_allocations.MATMULS:  # their output exists before the handle is requested
            kinds = {one.dtype for one in tensors if func is not torch.ops.aten.addr.default}  # cuBLAS runs no such one
            if len(kinds) > 1 or not all(kind.is_floating_point or kind.is_complex for kind in kinds):
                raise RuntimeError(f"{func.__name__} needs tensors of one floating dtype, not {[*map(str, kinds)]}")
            self._operator = "cuBLAS workspace"
            self._handle(bool(cuda_allocations.LT_APART) and cuda_allocations.through_lt(func, tensors))
        if on_card and cuda_allocations.has_unknown_scratch(func, args, kwargs):
            self.leave_out("kernel_scratch", _known_as(func).removeprefix("aten.").removesuffix("_backward"))
        if on_card and (own := cuda_allocations.scratch(func, args, self._capability)):
            self._operator = f"{_known_as(func)} (scratch)"
            taken = zip(self._card.borrow(own), (one for one in own if not isinstance(one, Freed)), strict=True)
            self.trace.stepwise += [(number, *one[1:]) for number, one in taken if isinstance(one, Stepwise)]
        if func.namespace == "c10d":
            self._collective(args, tensors)
        if self.in_last_step and (asked := work(func, args, kwargs, out, self._capability)) is not None:
            if (lists := find_lists(func, args, out)) is not None:
                self.lists[len(self.trace.kernels)] = lists
            self.trace.kernels.append((asked, 1))
            self.touched.append([self._card.number(one) for one in (*tensors, *made)])
        self._zeros = weakref.ref(out) if func in cuda_allocations.ZEROS else None

    def built(self) -> None:
        """Count everything that is alive as the model's parameters and buffers: model and optimizer now exist."""
        for book in self.books:
            book.known["buffers"] = set(book.numbers.values())
        tensors = tensors_alive()
        self._parameters = [weakref.ref(t) for t in tensors if isinstance(t, torch.nn.Parameter)]
        self.know("parameters", (t for one in self._parameters if (t := one()) is not None))
        self.mark(None, "load")

    def mark(self, step: int | None, phase: trace_data.Phase) -> None:
        """End a phase. Collect reference cycles now, because the moment when Python would do so depends on its past."""
        gc.collect()
        if step is not None and phase == "optimizer":  # a loop that reads its loss waits here (stream_lag.py)
            for stream in self.streams():
                self.note("join", stream)
        if step is not None and self._card.kept.marks[-1].step is None:
            self._name_parameters()
        if phase == "backward":
            held = self.held()
            parameters = [p for one in self._parameters if (p := one()) is not None]
            self.know("parameters", parameters)  # a forward pass may have changed their dtype, and so their data
            grads = [p.grad for p in parameters if p.grad is not None]
            self.know("gradients", [*grads, *held.get("gradients", [])])
            self.trained |= {"host" if self.on_host(grad) else "card" for grad in grads}
            for book in self.books:
                buckets = {n for t in held.get("communication", []) if (n := book.number(t)) is not None}
                book.known["communication"] |= buckets
                for name in ("gradients", "buffers"):
                    book.known[name] -= buckets
        for book in self.books:
            book.kept.marks.append(Mark(len(book.kept.events), step, phase))

    def _note_begun(self, begin: Any) -> Any:
        def noted(module: Any, *args: Any, **kwargs: Any) -> None:
            begin(module, *args, **kwargs)
            self._begun.append((weakref.ref(module), [len(book.kept.sizes) for book in self.books]))

        return noted

    def _name_parameters(self) -> None:
        """Name each storage loaded for one parameter after it; several parameters may share a storage."""
        for module, numbers in self._begun:
            if (one := module()) is not None and (path := self._origins.path(one)) is not None:
                self.begun.append((path, len(list(one.parameters(recurse=False))), numbers))
        users: dict[int, set[str]] = {}
        for name, parameter in self._origins.parameters():
            if (number := self._card.number(parameter)) is not None and number in self._card.known["parameters"]:
                users.setdefault(number, set()).add(name)
        makers = list(self._makers)
        for number, names in users.items():
            maker = makers[self.trace.origins[number]]
            if not maker.module and len(names) == 1:
                self.trace.origins[number] = self._maker(maker._replace(module=names.pop()))

    def know(self, category: str, tensors: Iterable[torch.Tensor]) -> None:
        """Put these tensors into the category, in whichever memory they are."""
        found = list(tensors)
        for book in self.books:
            book.know(category, found)

    def leave_out(self, code: str, detail: str) -> None:
        """Record that the trace lacks something: a code of `Trace.not_covered`, and which operator or module it is."""
        details = self.trace.not_covered.setdefault(code, [])
        if detail not in details:
            details.append(detail)

    def note(self, kind: str, a: int, b: int = 0) -> None:
        """Record what happens to streams (`kind` is one of stream_lag.KINDS) between two events of the trace."""
        if self.noting:
            self.trace.notes.append((len(self.trace.events), kind, a, b))

    def stream(self, stream: Any) -> int:
        """Return the number of a stream, or of anything else that works in an order of its own, such as NCCL's."""
        return self._streams.setdefault(stream, len(self._streams))

    def streams(self) -> list[int]:
        """Return the numbers of all streams."""
        return list(self._streams.values())

    def used(self, tensor: torch.Tensor, stream: int) -> None:
        """Record a `record_stream`: the tensor's block, once freed, waits for all work of this stream until then."""
        number = self._card.number(tensor)
        if number is not None and self.trace.streams[number] != stream:
            self.note("use", number, stream)

    def _collective(self, args: Any, tensors: list[torch.Tensor]) -> None:
        """Record a collective: NCCL's stream for its group waits for the current one, which then waits for NCCL's."""
        if not self.noting:
            return
        group = next((a for a in args if isinstance(a, torch.ScriptObject)), None)
        name = None if group is None else torch.distributed.ProcessGroup.unbox(group).group_name
        current, nccl = self.stream(torch.cpu.current_stream()), self.stream(("nccl", name))
        self.note("wait", nccl, current)
        for tensor in tensors:
            self.used(tensor, nccl)
        self.note("wait", current, nccl)

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        look_at_gradients(optimizer)
        for state in optimizer.state.values():
            self.know("optimizer_state", _tensors(tuple(state.values()) if isinstance(state, dict) else (state,)))
        for group in optimizer.param_groups:  # half precision's master weights; the model's own stay parameters
            self.know("optimizer_state", group["params"])
            self.know("gradients", [p.grad for p in group["params"] if p.grad is not None])

    def _handle(self, through_lt: bool) -> None:
        """Allocate the cuBLAS workspace at a thread's first matrix product; it is never freed. cuBLASLt gets another if
        its workspace is separate."""
        backward = cuda_allocations.in_backward()
        wanted = [(False, self._workspace)] + [(True, trace_data.LT_WORKSPACE)] * through_lt
        for lt, size in wanted:
            if (backward, lt) not in self._handles:
                self._handles.add((backward, lt))
                self._card.known[trace_data.WORKSPACES].add(self._card.allocate(size))

    def _sources(self) -> tuple[tuple[int, int], ...]:
        """Return the storages that the running operator reads: memory (0 is the GPU's, 1 the host's) and number."""
        found = ((at, book.number(one)) for one in self._inputs for at, book in enumerate(self.books))
        return tuple((at, number) for at, number in found if number is not None)

    def _note_host_request(self) -> None:
        self.trace.host.pinned.append(fake_placement.current_placement() == "pinned")
        self._host.sources.append(self._sources())
        self.host_makers.append(self._origins.maker(_known_as(self._operator)))

    def _note_request(self) -> None:
        self._card.sources.append(self._sources())
        operator = self._operator if isinstance(self._operator, str) else _known_as(self._operator)
        self.trace.origins.append(self._maker(self._origins.maker(operator)))
        self.trace.streams.append(self.stream(torch.cpu.current_stream()))

    def _maker(self, maker: Maker) -> int:
        return self._makers.setdefault(maker, len(self._makers))

    def _track(self, tensor: torch.Tensor, inputs: list[torch.Tensor]) -> None:
        if not isinstance(tensor, FakeTensor) or tensor.layout is not torch.strided:
            return
        if self.scripted and tensor.device.type != "meta":
            storage = tensor.untyped_storage()
            if not any(storage._cdata in book.numbers for book in (self._card, self._aside)):
                (self._aside if self._made_on_host(inputs) else self._card).hold(storage)
        elif tensor.device.type != "meta":
            self._card.hold(tensor.untyped_storage())
        elif fake_placement.current_placement() in ("pageable", "pinned") or (
            fake_placement.current_placement() is None and any(map(self.holds, inputs))
        ):
            self._host.hold(tensor.untyped_storage())

    def _made_on_host(self, inputs: list[torch.Tensor]) -> bool:
        if self._placing is not None:
            return self._placing == "host"
        fakes = [tensor for tensor in inputs if isinstance(tensor, FakeTensor)]
        return bool(fakes) and all(map(self.on_host, fakes))

    def on_host(self, tensor: torch.Tensor) -> bool:
        """Return whether a fake tensor of device "cpu" stands for host memory, as a script's parameters do at first."""
        return self._aside.number(tensor) is not None

    def placing(self, place: Place) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that places the tensors a script makes in this memory."""
        return patched([(self, "_placing", place)])

    def in_module(self) -> bool:
        """Return whether a module's forward pass or a backward pass runs."""
        return self._origins.in_module()

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor has memory, on the GPU or on the host."""
        return any(book.number(tensor) is not None for book in self.books)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        """Record a resize: FSDP frees the weights that it gathered, and reallocates them, in the same storage."""
        self._operator = "Storage.resize_"
        book = self._host if storage._cdata in self._host.numbers else self._card
        if storage._cdata in book.numbers:
            book.release(storage._cdata)
        book.hold(storage)
        if (number := book.numbers.get(storage._cdata)) is not None:
            book.known["communication"].add(number)


def active() -> Tracer | None:
    """Return the tracer that records at this moment, or None."""
    modes = _get_current_dispatch_mode_stack()
    return next((mode for mode in modes if isinstance(mode, Tracer)), None)


def _known_as(operator: Any) -> str:
    """Return an operator's name without its overload: aten.mm."""
    return "" if operator is None else str(operator.overloadpacket)


def _framework_asks() -> bool:
    """Return whether a module of `FRAMEWORKS` wants the value, and not the code of the model or the user."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        module = f"{frame.f_globals.get('__name__')}."
        if module.startswith(FRAMEWORKS):
            return True
        if not module.startswith(("torch.", "vramsweep.runners.")):
            return False
        frame = frame.f_back
    return False


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
