# SPDX-License-Identifier: Apache-2.0
"""Opening and closing a Tenstorrent device, on a thread of its own."""

from __future__ import annotations

import atexit
import fcntl
import logging
import os
import re
import sys
import tempfile
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from tt_perception.runtime.errors import ConfigError, DeviceError
from tt_perception.runtime.executor import DeviceExecutor
from tt_perception.runtime.paths import cache_dir

_log = logging.getLogger(__name__)

DISPATCH = ('auto', 'eth', 'worker')
TESTED_TTNN = '0.81.1'
OPERATION_TIMEOUT_S = 10.0

_NODES = Path('/dev/tenstorrent')
_SYSFS = Path('/sys/class/tenstorrent')
_VISIBLE = 'TT_VISIBLE_DEVICES'
_EMULATORS = ('TT_METAL_MOCK_CLUSTER_DESC_PATH', 'TT_METAL_SIMULATOR')

_open_devices: weakref.WeakSet[Device] = weakref.WeakSet()
_unfinished: set[Device] = set()  # closed, but the thread may still come back


@atexit.register
def _close_open_devices() -> None:
    for device in {*_open_devices, *_unfinished}:
        # Also for a thread that is stuck: ttnn aborts the process if it ends while one is inside.
        if os.getpid() == device._pid:
            device._close_within(device._close_timeout_s)


# ---- ttnn ----

def ttnn_environment(operation_timeout_s: float | None = None) -> dict[str, str]:
    """Return the variables that ttnn gets from us where the user has not set them.

    It then says nothing on the console, writes nothing into the working directory, and refuses to
    replay a trace while a tensor is alive that the replay would overwrite.

    :param operation_timeout_s: after how long a card that does not answer is given up by an
        error; a wait without end could neither be stopped nor left behind when Python exits.
    """
    folder = _writable_folder()
    limit = {} if operation_timeout_s is None else {
        'TT_METAL_OPERATION_TIMEOUT_SECONDS': f'{operation_timeout_s:g}'}
    return {**limit,
            'TT_METAL_LOGGER_LEVEL': 'error',
            'LOGURU_LEVEL': 'WARNING',
            'TT_METAL_LOGS_PATH': str(folder / 'logs'),
            'TT_METAL_CACHE': str(folder / 'kernels'),
            'TT_METAL_TRACE_ALLOC_TRACKING': '1'}


def _writable_folder() -> Path:
    """Return where ttnn may write, in the user's cache or, without one, for temporary files."""
    try:
        folder = cache_dir() / 'ttnn'
        (folder / 'logs').mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        pass
    folder = Path(tempfile.gettempdir()) / f'tt_perception-{os.getuid()}' / 'ttnn'
    (folder / 'logs').mkdir(parents=True, exist_ok=True)
    return folder


def load_ttnn(operation_timeout_s: float = OPERATION_TIMEOUT_S) -> ModuleType:
    """Import ttnn in an environment in which it is quiet, and return it.

    ttnn reads its environment once: this must come before any other import of it.

    :param operation_timeout_s: see :class:`Device`.
    :raises ConfigError: it is not installed, or not for this Python.
    """
    if 'ttnn' not in sys.modules:
        limit_s = None if is_emulated() else operation_timeout_s
        for name, value in ttnn_environment(limit_s).items():
            os.environ.setdefault(name, value)
    python = f'Python {sys.version_info.major}.{sys.version_info.minor}'
    wanted = f'expected ttnn {TESTED_TTNN}, whose wheels are for Python 3.10 and 3.12'
    try:
        import ttnn
    except ModuleNotFoundError as error:
        if error.name == 'ttnn':
            raise ConfigError(f'ttnn: not installed for {python}; {wanted}') from None
        raise ConfigError(f'ttnn: cannot be imported by {python}, {error}; {wanted}') from error
    except ImportError as error:
        raise ConfigError(f'ttnn: cannot be imported by {python}, {one_line(error)}; '
                          f'{wanted}') from error
    if not hasattr(ttnn, 'open_device'):
        raise ConfigError(f'ttnn: found {ttnn!r} without open_device; {wanted}')
    return ttnn


def one_line(error: BaseException) -> str:
    """Return what an error of ttnn says, without place and back trace."""
    text = str(error)
    asserted = re.search(r'\binfo:\s*(.*?)\s*(?:\bbacktrace:|\Z)', text, re.DOTALL)
    if asserted:
        text = asserted[1]
    text = re.split(r'\n\s*(?:Location:|\d+\. |--- )', text)[0]
    return ' '.join(text.split()) or type(error).__name__


def is_emulated() -> bool:
    """Return whether ttnn opens a mock device or a simulator instead of a card."""
    return any(os.environ.get(name) for name in _EMULATORS)


def can_trace() -> bool:
    """Return whether what ttnn opens can capture traces: not the mock, nor slow dispatch."""
    return not (os.environ.get('TT_METAL_MOCK_CLUSTER_DESC_PATH')
                or os.environ.get('TT_METAL_SLOW_DISPATCH_MODE'))


# ---- which card ----

def device_nodes() -> list[Path]:
    """Return the device files of the cards in this machine."""
    if not _NODES.is_dir():
        return []
    return sorted((path for path in _NODES.iterdir() if path.name.isdigit()),
                  key=lambda path: int(path.name))


def _found() -> str:
    """Say what there is, for messages."""
    nodes = device_nodes()
    found = ('an emulated one' if is_emulated() else
             ', '.join(map(str, nodes)) if nodes else f'no {_NODES}/*')
    visible = os.environ.get(_VISIBLE)
    return f'found {found}' + (f' with {_VISIBLE}={visible}' if visible else '')


def _check_nodes(name: str) -> None:
    """Refuse a machine without a card, and one whose card may not be used."""
    if is_emulated():
        return
    nodes = device_nodes()
    if not nodes:
        raise DeviceError(f'{name}: {_found()}; expected a Tenstorrent card with its kernel '
                          'driver (tt-kmd) loaded')
    closed = [str(node) for node in nodes if not os.access(node, os.R_OK | os.W_OK)]
    if len(closed) == len(nodes):
        raise DeviceError(f'{name}: found {", ".join(closed)} without permission to read and '
                          'write; in a container, hand the device in with --device')


def _pci_addresses() -> list[str]:
    """Return the PCI addresses of the visible cards, where they can be told; index = device id.

    ttnn numbers the cards by PCI address. A number in ``TT_VISIBLE_DEVICES`` is a place in that
    order, anything with a colon a part of an address; what is left is numbered from 0 again.
    """
    addresses = sorted(os.path.basename(os.path.realpath(path / 'device'))
                       for path in (_SYSFS.iterdir() if _SYSFS.is_dir() else ()))
    tokens = [token.strip() for token in os.environ.get(_VISIBLE, '').split(',') if token.strip()]
    if not tokens:
        return addresses
    return [address for place, address in enumerate(addresses)
            if any(token in address if ':' in token else token == str(place)
                   for token in tokens)]


def _open_lock(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except PermissionError:  # made by another user: it can be locked all the same
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW)


class _Claim:
    """Marks a card as used, so that a second process of ours fails at once and says why.

    ttnn itself would wait for the card without end. The mark is a lock on a file, gone with the
    process. Other programs do not look at it.
    """

    def __init__(self, name: str, device_id: int):
        self._file: int | None = None
        addresses = [] if is_emulated() else _pci_addresses()
        if device_id >= len(addresses):
            return  # what ttnn says then is better
        address = addresses[device_id]
        path = Path(tempfile.gettempdir()) / f'tt_perception-{address}.lock'
        try:
            self._file = _open_lock(path)
        except OSError as error:
            _log.debug('%s: no lock on the card, %s', name, error)
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.pread(self._file, 32, 0).decode().strip() or 'unknown'
            os.close(self._file)
            raise DeviceError(f'{name}: card {address} is in use by process {owner}; expected a '
                              'free one') from None
        if fcntl.fcntl(self._file, fcntl.F_GETFL) & os.O_RDWR:
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, f'{os.getpid()}\n'.encode(), 0)

    def release(self) -> None:
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_UN)  # also for children that have inherited it
            os.close(self._file)
            self._file = None


# ---- the device ----

class Device:
    """A Tenstorrent device: opened here, closed by :meth:`close` or at the latest at exit.

    The thread of its own opens it, closes it and is the only one that may use ``handle``;
    :meth:`call` gets there. A forked child can neither use nor close it.

    Ids are ttnn's: cards are numbered by PCI address, from 0, among those that
    ``TT_VISIBLE_DEVICES`` leaves. Some releases of ttnn refuse a number other than 0 in that
    variable; a PCI address (``0000:01:00.0``) is taken by all.

    ttnn holds the interpreter lock while it opens a device: nothing in this process can watch
    over that.

    :param device_id: which device.
    :param external: an open ttnn device to use instead, which is never closed here.
    :param dispatch: ``eth`` has the Ethernet cores hand out the work and leaves more cores to
        the network, ``worker`` gives one column of them away, ``auto`` takes the first where
        ttnn offers it, else the second with a RuntimeWarning.
    :param l1_small_size: bytes of L1 a core for the small buffers of convolutions and pooling.
    :param trace_region_size: bytes of DRAM for traces.
    :param open_timeout_s: how long opening may take; the first time, firmware is compiled.
    :param close_timeout_s: how long :meth:`close` waits for a call in flight.
    :param operation_timeout_s: after how long without an answer ttnn itself gives up a card that
        hangs, by an error, and its thread comes back. The first import of ttnn in the process
        decides; ``TT_METAL_OPERATION_TIMEOUT_SECONDS`` precedes it; emulated devices, which are
        slow, have no limit.
    :param on_lost: see :class:`DeviceExecutor`.
    :raises ConfigError: an argument is wrong, or ttnn is missing.
    :raises DeviceError: there is no such device, or it cannot be opened.
    """

    _executor: DeviceExecutor | None = None  # a constructor that fails early is closed as well

    def __init__(self, device_id: int = 0, *, external: Any = None, dispatch: str = 'auto',
                 l1_small_size: int = 0, trace_region_size: int = 0,
                 open_timeout_s: float = 180.0, close_timeout_s: float = 30.0,
                 operation_timeout_s: float = OPERATION_TIMEOUT_S,
                 on_lost: Callable[[str], None] | None = None):
        if dispatch not in DISPATCH:
            raise ConfigError(f'dispatch: found {dispatch!r}, expected one of '
                              + ', '.join(DISPATCH))
        self._pid = os.getpid()
        self.name = 'external device' if external is not None else f'device {device_id}'
        self._id = device_id
        self._dispatch = dispatch
        self._sizes = {'l1_small_size': l1_small_size, 'trace_region_size': trace_region_size}
        self._close_timeout_s = close_timeout_s
        self._is_ours = external is None
        self._handle = external
        self._claim: _Claim | None = None
        self._releases: list[Callable[[], None]] = []
        self._refusal = ''  # why dispatch on Ethernet cores is not used
        self._info: dict[str, Any] = {}
        if self._is_ours:
            if type(device_id) is not int or device_id < 0:
                raise ConfigError(f'device_id: found {device_id!r}, expected 0, 1, ...')
            _check_nodes(self.name)
        self._ttnn = load_ttnn(operation_timeout_s)
        self._executor = DeviceExecutor(self.name, on_lost)
        _open_devices.add(self)
        try:
            self._executor.call(self._open, timeout_s=open_timeout_s)
            if self._refusal:
                warnings.warn(self._refusal, RuntimeWarning, stacklevel=2)
        except BaseException:
            self.close()
            raise

    @property
    def handle(self) -> Any:
        """Return the ttnn device; to be used inside :meth:`call` only.

        :raises DeviceError: it is closed.
        """
        if self._handle is None:
            raise DeviceError(f'{self.name}: closed')
        return self._handle

    @property
    def info(self) -> dict[str, Any]:
        """Return id, arch, grid (x, y), dispatch, devices (how many there are) and more."""
        return dict(self._info)

    @property
    def lost(self) -> bool:
        """Whether a call did not return in time; nothing but :meth:`close` works then."""
        return self._executor.lost

    def call(self, fn: Callable[..., Any], *args: Any, timeout_s: float | None = None) -> Any:
        """Return ``fn(*args)``, called on the device's thread; see :class:`DeviceExecutor`."""
        return self._executor.call(fn, *args, timeout_s=timeout_s)

    def release_with(self, method: Callable[[], None]) -> None:
        """Have a method called before the device closes, on its thread; the last one first."""
        self._releases.append(method)

    def forget(self, method: Callable[[], None]) -> None:
        """Take back :meth:`release_with`; nothing happens if there is nothing to take back."""
        if method in self._releases:
            self._releases.remove(method)

    def close(self) -> None:
        """Finish the call in flight, release what stands on the device, and close it.

        May be repeated, and never takes much longer than ``close_timeout_s``: a device that hangs
        is left as it is, with a line in the log. Should its thread come back, it is closed then.
        """
        if self._executor is not None and os.getpid() == self._pid:
            # A thread that is stuck is not waited for here.
            self._close_within(None if self.lost else self._close_timeout_s)

    def _close_within(self, timeout_s: float | None) -> None:
        _unfinished.add(self)
        if self._executor.close(self._close, timeout_s=timeout_s):
            _open_devices.discard(self)
            _unfinished.discard(self)

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    # On the device's thread:

    def _open(self) -> None:
        count = self._count()
        dispatch = 'external'
        if self._is_ours:
            if self._id >= count:
                ids = f'ids 0 to {count - 1}' if count > 1 else 'id 0' if count else 'none'
                raise DeviceError(f'{self.name}: {_found()}, expected one of the devices that '
                                  f'ttnn sees ({ids})')
            self._claim = _Claim(self.name, self._id)
            dispatch = self._open_one()
        grid = self._handle.compute_with_storage_grid_size()
        self._info = {'id': self._id if self._is_ours else int(self._handle.get_device_ids()[0]),
                      'arch': self._handle.arch().name.lower(),
                      'grid': (int(grid.x), int(grid.y)),
                      'dispatch': dispatch,
                      'devices': count,
                      'emulated': is_emulated(),
                      'can_trace': can_trace(),
                      'trace_region_size': self._sizes['trace_region_size']}
        if self._refusal:
            self._refusal += f', with a grid of {grid.x}x{grid.y} cores'

    def _count(self) -> int:
        try:
            return self._ttnn.GetNumAvailableDevices()
        except (RuntimeError, ValueError) as error:
            hint = ''
            if os.environ.get(_VISIBLE):
                hint = f'; expected a PCI address such as 0000:01:00.0 in {_VISIBLE}, or nothing'
            raise DeviceError(f'{self.name}: {one_line(error)}; {_found()}{hint}') from error

    def _open_one(self) -> str:
        """Open the device and return which cores hand out its work."""
        types = self._ttnn.DispatchCoreType
        if self._dispatch != 'worker':
            try:
                self._handle = self._open_with(types.ETH)
                return 'eth'
            except RuntimeError as error:
                reason = f'{self.name}: dispatch on Ethernet cores is refused, {one_line(error)}'
                if self._dispatch == 'eth':
                    raise DeviceError(f"{reason}; expected a ttnn that offers it, or dispatch "
                                      "'auto' or 'worker'") from error
                self._refusal = f'{reason}; worker cores are used'
        try:
            self._handle = self._open_with(types.WORKER)
        except RuntimeError as error:
            raise DeviceError(f'{self.name}: cannot be opened, {one_line(error)}; '
                              f'{_found()}') from error
        return 'worker'

    def _open_with(self, cores: Any) -> Any:
        return self._ttnn.open_device(
            device_id=self._id, num_command_queues=1,
            dispatch_core_config=self._ttnn.DispatchCoreConfig(cores), **self._sizes)

    def _close(self) -> None:
        while self._releases:
            release = self._releases.pop()
            try:
                release()
            except Exception:  # the device must be closed all the same
                _log.exception('%s: what stands on it cannot be released', self.name)
        handle, self._handle = self._handle, None
        try:
            if self._is_ours and handle is not None:
                self._ttnn.close_device(handle)
                _log.info('%s: closed', self.name)
        except Exception as error:  # nobody waits for what it says
            _log.error('%s: cannot be closed, %s', self.name, one_line(error))
        finally:
            if self._claim is not None:
                self._claim.release()
