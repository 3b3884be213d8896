# SPDX-License-Identifier: Apache-2.0
"""Build the message packages beside this file that this Python lacks, and check all of them.

Run it with the Python of a virtual environment: the packages are installed there. A package that
comes from elsewhere, for example from a ROS distribution, is left alone. The type hash covers the
names and types of all fields, so an equal hash means the same bytes on the wire.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
PREFIX = Path(sys.prefix)
_STEP = re.compile(r'\[\s*(\d+)(?:/(\d+)|%)\]')  # of Ninja, of Make
_PROGRESS_EVERY_S = 5.0
_LOG_LINES_SHOWN = 60
_IMPORT = """
import importlib, sys
for name in sys.argv[1:]:
    package, kind, message = name.split('/')
    getattr(importlib.import_module(f'{package}.{kind}'), message)
"""
_SERIALIZE = """
import importlib, sys
from rclpy.serialization import deserialize_message, serialize_message
for name in sys.argv[1:]:
    package, kind, message = name.split('/')
    cls = getattr(importlib.import_module(f'{package}.{kind}'), message)
    assert deserialize_message(serialize_message(cls()), cls) == cls(), name
"""


def known_types() -> dict[str, dict[str, str]]:
    """Return package -> type -> type hash, in the order of building."""
    packages: dict[str, dict[str, str]] = {}
    for line in (HERE / 'type_hashes.txt').read_text().splitlines():
        if line and not line.startswith('#'):
            name, digest = line.split()
            packages.setdefault(name.split('/')[0], {})[name] = 'RIHS01_' + digest
    return packages


def source_digest(package: str) -> str:
    """Return a hash of everything that the build of a package reads."""
    digest = hashlib.sha256()
    for folder in (HERE / package, HERE / 'cmake'):
        for path in sorted(p for p in folder.rglob('*') if p.is_file()):
            digest.update(path.relative_to(HERE).as_posix().encode() + b'\0' + path.read_bytes())
    return digest.hexdigest()


def environment() -> dict[str, str]:
    """Return what CMake needs to find the message wheels, and Python to load what was built."""
    env = dict(os.environ)

    def prepend(name: str, path: str | Path) -> None:
        env[name] = os.pathsep.join(filter(None, [str(path), env.get(name)]))

    prepend('PATH', PREFIX / 'bin')
    prepend('LD_LIBRARY_PATH', PREFIX / 'lib')
    prepend('AMENT_PREFIX_PATH', PREFIX)
    prepend('CMAKE_PREFIX_PATH', env['AMENT_PREFIX_PATH'])  # which a ROS set-up file leaves alone
    return env


def succeeds(program: str, types: dict[str, str]) -> subprocess.CompletedProcess:
    """Run a program over type names, in a folder where no source passes for a package."""
    return subprocess.run([sys.executable, '-c', program, *types], cwd='/', env=environment(),
                          capture_output=True, text=True, check=False)


def run_logged(command: list[str], label: str, log: Path) -> None:
    """Run a build command into a log, and show how far it is."""
    shown = time.monotonic()
    live = sys.stdout.isatty()
    with log.open('a') as sink, subprocess.Popen(
            command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True) as process:
        for line in process.stdout:
            sink.write(line)
            step = _STEP.match(line)
            if step and (live or time.monotonic() - shown > _PROGRESS_EVERY_S):
                shown = time.monotonic()
                part = f'{step[1]} of {step[2]}' if step[2] else f'{step[1]} %'
                print(f'\r      {label}: {part}   ' if live else f'      {label}: {part}',
                      end='' if live else '\n', flush=True)
    if live:
        print('\r\033[K', end='')
    if process.returncode:
        tail = log.read_text().splitlines()[-_LOG_LINES_SHOWN:]
        sys.exit('\n'.join([*tail, f'{label}: the build failed; the whole log is {log}']))


def build(package: str) -> None:
    """Configure, compile and install one package into the virtual environment."""
    folder = PREFIX / 'build' / 'interfaces' / package
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    cmake = shutil.which('cmake', path=environment()['PATH'])
    if cmake is None:
        sys.exit(f'{package}: cannot be built without cmake')
    generator = ['-G', 'Ninja'] if shutil.which('ninja', path=environment()['PATH']) else []
    site = f'lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages'
    log = folder / 'log.txt'
    run_logged([cmake, '-S', str(HERE / package), '-B', str(folder), *generator,
                '-DCMAKE_BUILD_TYPE=Release', '-DBUILD_TESTING=OFF',
                f'-DCMAKE_INSTALL_PREFIX={PREFIX}', f'-DPYTHON_INSTALL_DIR={site}',
                f'-DCMAKE_PROJECT_INCLUDE={HERE / "cmake" / "wheel_fixups.cmake"}',
                f'-DPython3_EXECUTABLE={sys.executable}'], package, log)
    run_logged([cmake, '--build', str(folder), '--parallel', str(len(os.sched_getaffinity(0)))],
               package, log)
    run_logged([cmake, '--install', str(folder)], package, log)


def provide(package: str, types: dict[str, str]) -> None:
    """Build a package unless the present one will do."""
    receipt = PREFIX / 'share' / package / 'built_from'
    digest = source_digest(package)
    importable = succeeds(_IMPORT, types).returncode == 0
    if importable and not receipt.is_file():
        print(f'      {package}: found, left as it is')
    elif importable and receipt.read_text() == digest:
        print(f'      {package}: built before')
    else:
        started = time.monotonic()
        print(f'      {package}: building', flush=True)
        build(package)
        receipt.write_text(digest)
        print(f'      {package}: built in {time.monotonic() - started:.0f} s')


def wrong_hashes(types: dict[str, str]) -> tuple[list[str], int]:
    """Compare with the descriptions of the installed types.

    :returns: a line for each wrong one, and how many could be compared: releases before Jazzy
        install no descriptions.
    """
    prefixes = [PREFIX, *map(Path, filter(None, os.environ.get('AMENT_PREFIX_PATH', '')
                                          .split(os.pathsep)))]
    wrong, compared = [], 0
    for name, expected in types.items():
        package, kind, message = name.split('/')
        paths = (prefix / 'share' / package / kind / f'{message}.json' for prefix in prefixes)
        path = next(filter(Path.is_file, paths), None)
        if path is None:
            continue
        compared += 1
        found = {entry['type_name']: entry['hash_string']
                 for entry in json.loads(path.read_text())['type_hashes']}.get(name)
        if found != expected:
            wrong.append(f'{name}: found type hash {found} in {path}, expected {expected}')
    return wrong, compared


def main() -> None:
    """Provide every package, then check hashes and that every type can be serialized."""
    packages = known_types()
    for package, types in packages.items():
        provide(package, types)
    types = {name: digest for part in packages.values() for name, digest in part.items()}
    wrong, compared = wrong_hashes(types)
    if wrong:
        sys.exit('\n'.join(wrong))
    serialized = succeeds(_SERIALIZE, types)
    if serialized.returncode:
        sys.exit(f'{serialized.stderr}\nthe message packages are installed, but cannot be used')
    print(f'      {compared} of {len(types)} type hashes compared, all as expected; '
          'all types can be serialized')


if __name__ == '__main__':
    main()
