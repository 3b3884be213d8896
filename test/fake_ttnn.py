# SPDX-License-Identifier: Apache-2.0
"""A ttnn without a device, for tests of what stands on it: it records calls and can fail.

It knows one operation, ``double``. Its traces are real: what is captured is not computed, and a
replay computes it into the same tensors.
"""

from __future__ import annotations

import sys
import threading
import time
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import torch

ETH_REFUSED = ('No core coordinate found at location: (0, 12, ETH, LOGICAL)\n'
               'Location: /somewhere/coordinate_manager.cpp:161\n 1. tt::umd::f()\n')


class Tensor:
    """On the host (``device`` None) or on a device."""

    dtype = SimpleNamespace(name='FLOAT32')
    layout = 'row major'

    def __init__(self, value: torch.Tensor, device: Device | None = None):
        self.value = value
        self.device = device
        if device is not None:
            device.fake.record('allocate')
            device.tensors += 1

    def __del__(self):
        if self.device is not None:
            self.device.tensors -= 1

    @property
    def shape(self):
        return self.value.shape

    def to_torch(self) -> torch.Tensor:
        assert self.device is None, 'read from the device, which holds the interpreter lock'
        return self.value.clone()


class Device:
    def __init__(self, fake: FakeTtnn, device_id: int, cores: str):
        self.fake = fake
        self.device_id = device_id
        self.cores = cores
        self.programs: set = set()
        self.traces: dict[int, list] = {}
        self.capturing: int | None = None
        self.tensors = 0
        self.is_open = True

    def arch(self):
        return SimpleNamespace(name='BLACKHOLE')

    def compute_with_storage_grid_size(self):
        return SimpleNamespace(x=12 if self.cores == 'eth' else 11, y=10)

    def get_device_ids(self):
        return [self.device_id]

    def num_program_cache_entries(self) -> int:
        return len(self.programs)


class FakeTtnn(ModuleType):
    """The module; ``calls`` has what was called, in order, with the thread it came from.

    ``fails`` maps a call, for example ``open_device``, to the error it raises; ``blocks`` maps one
    to the event it waits for, and ``entered`` is set when it does.
    """

    DispatchCoreType = SimpleNamespace(ETH='eth', WORKER='worker')
    BufferType = SimpleNamespace(TRACE='trace')
    ROW_MAJOR_LAYOUT = 'row major'

    def __init__(self, *, eth: bool = False, count: int = 1):
        super().__init__('ttnn')
        self.eth = eth
        self.count = count
        self.calls: list[str] = []
        self.threads: set[int] = set()
        self.fails: dict[str, BaseException] = {}
        self.blocks: dict[str, threading.Event] = {}
        self.entered = threading.Event()
        self.devices: list[Device] = []
        self.open_arguments: list[dict] = []
        tracker = SimpleNamespace(corruptible_allocation_scope=self._scope)
        self.tools = SimpleNamespace(trace_allocation_tracker=tracker)

    def install(self, monkeypatch) -> FakeTtnn:
        monkeypatch.setitem(sys.modules, 'ttnn', self)
        return self

    def record(self, call: str, detail: object = '') -> None:
        """Note a call, then block or fail if that was asked for."""
        self.calls.append(f'{call} {detail}'.strip())
        self.threads.add(threading.get_ident())
        if call in self.blocks:
            self.entered.set()
            self.blocks[call].wait(60)
        if call in self.fails:
            raise self.fails[call]

    @property
    def open_devices(self) -> list[Device]:
        return [device for device in self.devices if device.is_open]

    # Devices:

    def GetNumAvailableDevices(self) -> int:  # noqa: N802
        self.record('count')
        return self.count

    def DispatchCoreConfig(self, cores: str) -> str:  # noqa: N802
        return cores

    def open_device(self, *, device_id: int, dispatch_core_config: str, **arguments) -> Device:
        if dispatch_core_config == 'eth' and not self.eth:
            raise RuntimeError(ETH_REFUSED)
        self.record('open_device', dispatch_core_config)
        self.open_arguments.append({'device_id': device_id, **arguments})
        self.devices.append(Device(self, device_id, dispatch_core_config))
        return self.devices[-1]

    def close_device(self, device: Device) -> None:
        self.record('close_device')
        assert device.is_open, 'closed twice'
        assert not device.traces, 'closed with traces'
        device.is_open = False

    def synchronize_device(self, device: Device) -> None:
        self.record('synchronize_device')
        assert device.is_open

    # Tensors:

    def from_torch(self, value: torch.Tensor, *, device: Device | None = None) -> Tensor:
        return Tensor(value.clone(), device)

    def allocate_tensor_on_host(self, shape, dtype, layout, device: Device) -> Tensor:
        return Tensor(torch.zeros(shape))

    def copy_host_to_device_tensor(self, host: Tensor, target: Tensor) -> None:
        self.record('write')
        target.value.copy_(host.value)

    def copy_device_to_host_tensor(self, source: Tensor, host: Tensor, *, blocking: bool) -> None:
        self.record('read')
        assert not blocking, 'holds the interpreter lock'
        host.value.copy_(source.value)

    def double(self, x: Tensor, program: str = 'double') -> Tensor:
        device = x.device
        self.record('double')
        device.programs.add((program, tuple(x.shape)))
        out = Tensor(torch.zeros_like(x.value), device)
        if device.capturing is not None:
            device.traces[device.capturing].append((x, out))
        else:
            out.value.copy_(2 * x.value)
        return out

    # Traces:

    def begin_trace_capture(self, device: Device, *, cq_id: int) -> int:
        self.record('begin_trace_capture')
        assert device.capturing is None
        device.capturing = self.calls.count('begin_trace_capture')
        device.traces[device.capturing] = []
        return device.capturing

    def end_trace_capture(self, device: Device, trace: int, *, cq_id: int) -> None:
        assert device.capturing == trace
        device.capturing = None
        self.record('end_trace_capture')

    def is_trace_capture_active(self, device: Device) -> bool:
        return device.capturing is not None

    def execute_trace(self, device: Device, trace: int, *, cq_id: int, blocking: bool) -> None:
        self.record('execute_trace')
        assert not blocking
        for x, out in device.traces[trace]:
            out.value.copy_(2 * x.value)

    def release_trace(self, device: Device, trace: int) -> None:
        self.record('release_trace')
        assert device.is_open, 'released after its device was closed'
        del device.traces[trace]

    def get_memory_view(self, device: Device, kind: str):
        return SimpleNamespace(total_bytes_allocated_per_bank=1024 * len(device.traces),
                               num_banks=8)

    @contextmanager
    def _scope(self, device: Device):
        yield


class TinyNetwork:
    """Doubles its input; a model for TraceRunner on the fake device.

    :param fails: name of the step that raises: ``allocate``, ``compiling`` or ``capturing``.
    """

    def __init__(self, fake: FakeTtnn, fails: str = '', error: BaseException | None = None):
        self.fake = fake
        self.fails = fails
        self.error = error or RuntimeError('TT_FATAL @ f.cpp:1: x\ninfo:\nno space\nbacktrace:\n')
        self.x: dict[str, Tensor] = {}
        self.releases = 0
        self.new_program_in_capture = False
        self.seconds = 0.0

    def variants(self):
        return ['small', 'large']

    def allocate(self, device):
        self.x['small'] = self.fake.from_torch(torch.zeros(2, 4), device=device)
        if self.fails == 'allocate':
            raise self.error
        self.x['large'] = self.fake.from_torch(torch.zeros(4, 4), device=device)

    def inputs(self, variant):
        return {'x': self.x[variant]}

    def forward(self, variant, keep):
        x = self.x[variant]
        stage = 'compiling' if x.device.capturing is None else 'capturing'
        is_new = stage == 'capturing' and self.new_program_in_capture
        y = self.fake.double(x, 'new' if is_new else 'double')
        if self.fails == stage and variant == 'large':
            raise self.error
        until_s = time.monotonic() + self.seconds
        while time.monotonic() < until_s:
            time.sleep(0.01)
            keep('pause', x)
        return {'y': y, 'z': self.fake.double(y)}

    def release(self):
        self.releases += 1
        self.x = {}
