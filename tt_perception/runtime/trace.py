# SPDX-License-Identifier: Apache-2.0
"""A network on a device: warmed up, captured once for each variant, then replayed a frame."""

from __future__ import annotations

import enum
import logging
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from tt_perception.runtime.device import Device, load_ttnn, one_line
from tt_perception.runtime.errors import ConfigError, DeviceError
from tt_perception.runtime.staging import HostBuffer

Keep = Callable[[str, Any], None]

_log = logging.getLogger(__name__)
_T = TypeVar('_T')


class DeviceModel(Protocol):
    """What :class:`TraceRunner` asks of a network. All methods run on the device's thread."""

    def variants(self) -> Sequence[str]:
        """Return the names of the graphs, for example one for each size of the input."""

    def allocate(self, device: Any) -> None:
        """Make weights and inputs on a ttnn device; called once, before anything else runs."""

    def inputs(self, variant: str) -> Mapping[str, Any]:
        """Return the device tensors that a variant reads, the same ones each time."""

    def forward(self, variant: str, keep: Keep) -> Any:
        """Run a variant on its inputs; return a device tensor, or a mapping of names to them.

        It is called twice: what the first call makes to keep must be there for the second, which
        is captured, and must neither copy from nor to the host. The first call finds the inputs as
        :meth:`allocate` has left them.

        :param keep: to be called with name and output of every block; it raises to end the run.
        """

    def release(self) -> None:
        """Let go of every device tensor; also after a failed :meth:`allocate`."""


class State(enum.Enum):
    """How far a :class:`TraceRunner` is."""

    NEW = 'new'
    WARM = 'warm'
    CAPTURED = 'captured'
    RELEASED = 'released'


class TraceRunner:
    """Runs a network with persistent buffers: prepare once, then write, replay, read.

    Without traces (the mock device has none) the graph is run op by op by the same calls.
    :meth:`prepare` runs every variant once before it captures the first one: what a variant makes
    at its first run would lie where another's trace writes. For the same reason nothing may be
    allocated on the device after that: :meth:`allocate` refuses it, and ttnn refuses to replay
    while a tensor is alive that came later (``TT_METAL_TRACE_ALLOC_TRACKING``, which
    :func:`~tt_perception.runtime.device.load_ttnn` sets; a ttnn that was imported before without
    it does not look).

    Methods may be called from any thread, one frame at a time; each runs on the device's thread
    and raises DeviceError when it does not come back in time. The traces are released before
    their device is closed, at the latest by the device, which keeps the runner alive until then.

    :param model: the network; it is released with the runner.
    :param traced: capture, or run op by op.
    :param timeout_s: limit of each write, replay and read.
    :param on_progress: called in the thread of :meth:`prepare`, which takes minutes the first
        time, with a text such as ``compiling small (1 of 4)``.
    :param prepare_timeout_s: limit of compiling or capturing one variant.
    :param is_cancelled: asked after every block while variants are compiled and captured; when it
        says so, :meth:`prepare` ends by DeviceError.
    :raises ConfigError: traces are asked for where there are none.
    """

    def __init__(self, model: DeviceModel, device: Device, *, traced: bool, timeout_s: float,
                 on_progress: Callable[[str], None] | None = None,
                 prepare_timeout_s: float = 1800.0,
                 is_cancelled: Callable[[], bool] = lambda: False):
        if traced and not device.info['can_trace']:
            raise ConfigError('traced: found True, expected False: the mock device and slow '
                              'dispatch cannot capture traces')
        self._model = model
        self._device = device
        self._ttnn = load_ttnn()
        self._traced = traced
        self._timeout_s = timeout_s
        self._prepare_timeout_s = prepare_timeout_s
        self._on_progress = on_progress or (lambda text: None)
        self._state = State.NEW
        self._is_cancelled = is_cancelled
        self._is_released = threading.Event()
        self._variants = tuple(model.variants())
        self._traces: dict[str, Any] = {}
        self._trace_bytes: dict[str, int] = {}
        self._outputs: dict[str, dict[str, Any]] = {}  # by variant, then by name
        self._read_back: dict[tuple[str, str], Any] = {}  # host tensors
        self._replayed = ''  # the variant whose outputs are the newest
        device.release_with(self._release)

    @property
    def state(self) -> State:
        """How far it is."""
        return self._state

    @property
    def variants(self) -> tuple[str, ...]:
        """The names of the model's graphs."""
        return self._variants

    @property
    def info(self) -> dict[str, Any]:
        """Return state, traced, variants, trace_region_size and the bytes of each trace in it.

        A device that was opened without a trace region keeps traces among its tensors; how large
        they are is not known then.
        """
        return {'state': self._state.value,
                'traced': self._traced,
                'variants': list(self._variants),
                'trace_region_size': self._device.info['trace_region_size'],
                'trace_bytes': dict(self._trace_bytes)}

    def prepare(self) -> TraceRunner:
        """Allocate, compile and capture everything; return the runner.

        Whatever goes wrong on the way, Ctrl-C included, everything is released.

        :raises DeviceError: the device refuses something; the message names the variant.
        """
        self._call(self._expect, State.NEW)
        try:
            self._call(self._allocate, limit_s=self._prepare_timeout_s)
            self._for_each_variant('compiling', self._warm_up)
            self._call(self._advance, State.NEW, State.WARM)
            if self._traced:
                self._for_each_variant('capturing', self._capture)
            self._call(self._advance, State.WARM, State.CAPTURED)
        except BaseException:
            self.release()
            raise
        return self

    def allocate(self, make: Callable[[Any], _T]) -> _T:
        """Return ``make(ttnn_device)``, for whatever must stand on the device beside the model.

        :raises DeviceError: a trace has been captured.
        """
        def allocate() -> _T:
            if self._state not in (State.NEW, State.WARM) or self._traces:
                raise DeviceError(f'{self._device.name}: nothing can be allocated, found '
                                  f'{self._state.value}, expected new or warm; a replay would '
                                  'overwrite it')
            return make(self._device.handle)
        return self._call(allocate, limit_s=self._prepare_timeout_s)

    def write(self, variant: str, tensors: Mapping[str, Any]) -> None:
        """Copy to inputs of a variant; what is not named keeps its content.

        :param tensors: input -> ttnn host tensor, or :class:`HostBuffer`, which must stay as it
            is until :meth:`replay` has returned.
        """
        self._call(self._write, variant, tensors)

    def replay(self, variant: str) -> None:
        """Run a variant on its inputs and wait for it, without holding the interpreter lock."""
        self._call(self._replay, variant)

    def read(self, variant: str) -> Any:
        """Return the outputs of the last replay as torch tensors of their own.

        :return: one tensor, or name -> tensor, as ``forward`` returns them.
        :raises DeviceError: the variant is not the one that was replayed last.
        """
        return self._call(self._read, variant)

    def run(self, variant: str, tensors: Mapping[str, Any]) -> Any:
        """Write, replay and read in one turn of the device's thread."""
        return self._call(self._run, variant, tensors)

    def release(self) -> None:
        """Release traces and buffers; may be repeated, also after the device was closed.

        A :meth:`prepare` in another thread ends by DeviceError, after the block at hand.
        """
        self._is_released.set()
        if self._state is State.RELEASED:
            return
        try:
            self._call(self._release, limit_s=self._prepare_timeout_s)
        except DeviceError as error:
            # A closed device has released the runner or is about to; a lost one keeps it.
            _log.debug('left to the device: %s', error)

    # ---- on the caller's thread ----

    def _call(self, fn: Callable[..., _T], *args: Any, limit_s: float | None = None) -> _T:
        return self._device.call(fn, *args, timeout_s=limit_s or self._timeout_s)

    def _for_each_variant(self, doing: str, step: Callable[[str], None]) -> None:
        for i, variant in enumerate(self._variants, 1):
            self._on_progress(f'{doing} {variant} ({i} of {len(self._variants)})')
            self._call(step, variant, limit_s=self._prepare_timeout_s)

    # ---- on the device's thread ----

    def _expect(self, *states: State) -> None:
        if self._state not in states:
            raise DeviceError(f'{self._device.name}: found a runner that is {self._state.value}, '
                              f'expected {" or ".join(state.value for state in states)}')

    def _advance(self, before: State, after: State) -> None:
        self._expect(before)
        self._state = after

    def _allocate(self) -> None:
        self._expect(State.NEW)
        with self._named('allocating'):
            self._model.allocate(self._device.handle)

    def _warm_up(self, variant: str) -> None:
        self._expect(State.NEW)
        with self._named(f'compiling {variant}'):
            self._forward(variant)
            self._wait()

    def _capture(self, variant: str) -> None:
        self._expect(State.WARM)
        ttnn, handle = self._ttnn, self._device.handle
        with self._named(f'capturing {variant}'):
            compiled = handle.num_program_cache_entries()
            bytes_before = self._bytes_of_traces()
            trace = ttnn.begin_trace_capture(handle, cq_id=0)
            try:
                # Outputs come after the traces captured before, which may write where they lie:
                # they are read before another variant is replayed.
                with ttnn.tools.trace_allocation_tracker.corruptible_allocation_scope(handle):
                    self._outputs[variant] = _by_name(self._forward(variant))
                ttnn.end_trace_capture(handle, trace, cq_id=0)
            except BaseException:
                self._abandon(trace)
                raise
            self._traces[variant] = trace
            if handle.num_program_cache_entries() != compiled:
                raise DeviceError(f'capturing {variant}: a program was compiled that the run '
                                  'before did not need, expected the same programs each time')
            if size := self._bytes_of_traces() - bytes_before:  # 0: it lies outside the region
                self._trace_bytes[variant] = size

    def _abandon(self, trace: Any) -> None:
        """End a capture that failed, so that the device can be used again."""
        ttnn, handle = self._ttnn, self._device.handle
        try:
            if ttnn.is_trace_capture_active(handle):
                ttnn.end_trace_capture(handle, trace, cq_id=0)
            ttnn.release_trace(handle, trace)
        except RuntimeError as error:  # the first error is what counts
            _log.debug('after a failed capture: %s', one_line(error))

    def _bytes_of_traces(self) -> int:
        view = self._ttnn.get_memory_view(self._device.handle, self._ttnn.BufferType.TRACE)
        return view.total_bytes_allocated_per_bank * view.num_banks

    def _forward(self, variant: str) -> Any:
        return self._model.forward(variant, self._check_cancelled)

    def _check_cancelled(self, *_: Any) -> None:
        if self._is_released.is_set() or self._is_cancelled():
            raise DeviceError(f'{self._device.name}: cancelled')

    def _wait(self) -> None:
        self._ttnn.synchronize_device(self._device.handle)

    def _expect_variant(self, variant: str) -> None:
        self._expect(State.CAPTURED)
        if variant not in self._variants:
            raise ConfigError(f'variant: found {variant!r}, expected one of '
                              + ', '.join(self._variants))

    def _write(self, variant: str, tensors: Mapping[str, Any]) -> None:
        self._expect_variant(variant)
        with self._named(f'writing {variant}'):
            inputs = self._model.inputs(variant)
            unknown = sorted(tensors.keys() - inputs.keys())
            if unknown:
                raise ConfigError(f'{variant}: found {", ".join(unknown)}, expected names among '
                                  + ', '.join(inputs))
            for name, tensor in tensors.items():
                host = tensor.tensor if isinstance(tensor, HostBuffer) else tensor
                self._ttnn.copy_host_to_device_tensor(host, inputs[name])

    def _replay(self, variant: str) -> None:
        self._expect_variant(variant)
        self._replayed = ''
        with self._named(f'replaying {variant}'):
            if self._traced:
                self._ttnn.execute_trace(self._device.handle, self._traces[variant], cq_id=0,
                                         blocking=False)
            else:
                self._outputs.clear()
                self._outputs[variant] = _by_name(self._model.forward(variant, _drop))
            self._wait()
        self._replayed = variant

    def _read(self, variant: str) -> Any:
        self._expect_variant(variant)
        if self._replayed != variant:
            raise DeviceError(f'reading {variant}: found outputs of '
                              f'{self._replayed or "nothing"}, expected a replay of it before')
        with self._named(f'reading {variant}'):
            outputs = self._outputs[variant]
            hosts = {name: self._host_tensor(variant, name, output)
                     for name, output in outputs.items()}
            for name, host in hosts.items():
                # Not blocking: that would hold the interpreter lock while it waits.
                self._ttnn.copy_device_to_host_tensor(outputs[name], host, blocking=False)
            self._wait()
            found = {name: host.to_torch() for name, host in hosts.items()}
        return found.get('', found)

    def _host_tensor(self, variant: str, name: str, output: Any) -> Any:
        """Return where an output is read to; the same memory each time."""
        key = (variant, name)
        if key not in self._read_back:
            self._read_back[key] = self._ttnn.allocate_tensor_on_host(
                output.shape, output.dtype, output.layout, self._device.handle)
        return self._read_back[key]

    def _run(self, variant: str, tensors: Mapping[str, Any]) -> Any:
        self._write(variant, tensors)
        self._replay(variant)
        return self._read(variant)

    def _release(self) -> None:
        if self._state is State.RELEASED:
            return
        self._state = State.RELEASED
        self._outputs.clear()
        self._read_back.clear()
        for variant, trace in self._traces.items():
            try:
                self._ttnn.release_trace(self._device.handle, trace)
            except RuntimeError as error:  # the others all the same
                _log.error('releasing %s: %s', variant, one_line(error))
        self._traces.clear()
        self._device.forget(self._release)
        self._model.release()

    @contextmanager
    def _named(self, doing: str) -> Iterator[None]:
        """Have an error of ttnn say what was being done, and keep no tensors alive by it."""
        try:
            yield
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)
            if isinstance(error, RuntimeError) and not isinstance(error, DeviceError):
                raise DeviceError(f'{self._device.name}: {doing} failed: '
                                  f'{one_line(error)}') from error
            raise


def _drop(name: str, output: Any) -> None:
    """Keep nothing."""


def _by_name(outputs: Any) -> dict[str, Any]:
    """Return outputs as a mapping; a single tensor has the name ''."""
    return dict(outputs) if isinstance(outputs, Mapping) else {'': outputs}
