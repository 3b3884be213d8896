# SPDX-License-Identifier: Apache-2.0
"""A mock Blackhole p150: ttnn without a card, everything but the numbers.

Operations are checked, their programs built and their buffers allocated as on the card; kernels
are compiled to stubs and never run, so what is read back means nothing. Traces cannot be captured.
The compiler for kernels is not part of ttnn's wheel; a stand-in for it is laid, beside links to
the wheel, into the user's cache.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from importlib import resources
from pathlib import Path

from tt_perception.runtime.device import TESTED_TTNN, ttnn_environment
from tt_perception.runtime.errors import ConfigError
from tt_perception.runtime.paths import cache_dir

_COMPILER = Path('runtime/sfpi/compiler/bin/riscv-tt-elf-g++')  # where ttnn looks for it
_OWN_FILES = ('p150.yaml', 'stub_kernel.S', 'stand_in_compiler.py')
_TOOLS = ('as', 'ld')


def use_mock_p150(cache: Path | None = None) -> None:
    """Have ttnn, once it is imported, open a mock p150; see :func:`environment`.

    :raises ConfigError: also when ttnn was imported before, which reads its environment once.
    """
    if 'ttnn' in sys.modules:
        raise ConfigError('mock p150: found ttnn already imported, expected to be asked before')
    os.environ.update(environment(cache))


def environment(cache: Path | None = None) -> dict[str, str]:
    """Return the variables with which ttnn opens a mock p150.

    What they name is prepared once for each ttnn and kept, compiled kernels too; several
    processes may ask at once.

    :param cache: where to keep it; by default a folder in the user's cache.
    :raises ConfigError: ttnn or the GNU assembler and linker for RISC-V are missing, or a
        simulator is selected.
    """
    if os.environ.get('TT_METAL_SIMULATOR'):
        raise ConfigError('mock p150: found TT_METAL_SIMULATOR set, expected it unset')
    package = _ttnn_package()
    tools = {tool: _tool(f'riscv64-unknown-elf-{tool}') for tool in _TOOLS}
    own = resources.files('tt_perception.runtime') / 'mock_p150'
    files = {name: (own / name).read_bytes() for name in _OWN_FILES}
    folder = (cache or cache_dir() / 'mock_p150').absolute()
    place = folder / _key(package, tools, files)
    if not place.is_dir():
        _lay(place, package, tools, files)
    quiet = {name: os.environ.get(name, value) for name, value in ttnn_environment().items()}
    return {**quiet,
            'TT_METAL_RUNTIME_ROOT': str(place / 'root'),
            'TT_METAL_MOCK_CLUSTER_DESC_PATH': str(place / 'p150.yaml'),
            'TT_METAL_CACHE': str(folder / f'{place.name}-kernels')}  # stubs: kept apart


def _ttnn_package() -> Path:
    spec = importlib.util.find_spec('ttnn')
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError('mock p150: ttnn is not installed for Python '
                          f'{sys.version_info.major}.{sys.version_info.minor}; expected ttnn '
                          f'{TESTED_TTNN}, whose wheels are for Python 3.10 and 3.12')
    return Path(next(iter(spec.submodule_search_locations)))


def _tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise ConfigError(f'mock p150: {name} not found, expected it on the PATH; install the '
                          'Debian or Ubuntu package binutils-riscv64-unknown-elf')
    return path


def _key(package: Path, tools: dict[str, str], files: dict[str, bytes]) -> str:
    """Return a name that changes with everything that is prepared."""
    try:
        version = importlib.metadata.version('ttnn')
    except importlib.metadata.PackageNotFoundError:  # a source tree on the path
        version = 'unknown'
    parts = [version, str(package), sys.executable, *tools.values()]
    digest = hashlib.sha256('\n'.join(parts).encode() + b''.join(files.values()))
    return f'{version}-{digest.hexdigest()[:16]}'


def _lay(place: Path, package: Path, tools: dict[str, str], files: dict[str, bytes]) -> None:
    """Fill a folder beside and move it into place: it is there whole or not at all."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent, prefix='.laying-') as scratch:
        new = Path(scratch) / 'new'
        _lay_root(new / 'root', package, tools, files)
        (new / 'p150.yaml').write_bytes(files['p150.yaml'])
        try:
            new.rename(place)
        except OSError:
            if not place.is_dir():  # else another process was faster
                raise


def _lay_root(root: Path, package: Path, tools: dict[str, str], files: dict[str, bytes]) -> None:
    """Make what looks like ttnn's installation, but has a compiler."""
    compiler = root / _COMPILER
    compiler.parent.mkdir(parents=True)
    for entry in package.iterdir():
        if entry.name != 'runtime':
            (root / entry.name).symlink_to(entry)
    for entry in (package / 'runtime').iterdir():
        if entry.name != 'sfpi':
            (root / 'runtime' / entry.name).symlink_to(entry)
    for name in ('stub_kernel.S', 'stand_in_compiler.py'):
        compiler.with_name(name).write_bytes(files[name])
    subprocess.run([tools['as'], '-march=rv32im', '-mabi=ilp32', 'stub_kernel.S', '-o',
                    'stub_kernel.o'], cwd=compiler.parent, check=True)
    compiler.with_name('linker').symlink_to(tools['ld'])
    compiler.with_name('version').write_text(f'riscv-tt-elf-g++ {_built_with(package)}\n')
    # A shell finds any Python, a `#!` line none with a long path or a blank in it.
    compiler.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -IS '
                        '"${0%/*}/stand_in_compiler.py" "$@"\n')
    compiler.chmod(0o755)


def _built_with(package: Path) -> str:
    """Return the compiler that the wheel's firmware names; ttnn wants the same for kernels."""
    for image in sorted((package / 'tt_metal/pre-compiled').rglob('brisc.elf')):
        found = re.search(rb'GCC: (\(tenstorrent/sfpi:[^)]*\) [0-9.]+)', image.read_bytes())
        if found:
            return found[1].decode()
    raise ConfigError(f'mock p150: no firmware in {package} names its compiler; expected the '
                      f'wheel of ttnn {TESTED_TTNN}')
