# SPDX-License-Identifier: Apache-2.0
"""Make ``.venv`` ready for this checkout; ``bootstrap.sh`` finds the Python that runs this.

Two kinds of machine. With a ROS 2 environment sourced, the virtual environment stands on that
installation and sees its packages. Without, everything comes as wheels. Writes to ``.venv`` and to
the user's cache only; system packages are installed where this runs as root on Debian or Ubuntu.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / '.venv'
PYTHON = VENV / 'bin' / 'python'
STATE = VENV / 'bootstrap.json'
REQUIREMENTS = ROOT / 'requirements'
TT_PYTHONS = ((3, 12), (3, 10))
TT_GLIBC = (2, 34)
SMALLEST_TORCH = (2, 9)  # of a torch that is here already; as in setup.py
MOCK_PACKAGE = 'binutils-riscv64-unknown-elf'  # ttnn's mock device links kernels with it
_HEARTBEAT_S = 15.0
_STEPS = 4


class Failed(Exception):
    """The set-up cannot go on; the message is for the user."""


def ros_release() -> str:
    """Name the ROS 2 release that is sourced here, or return an empty string."""
    if not os.environ.get('AMENT_PREFIX_PATH'):
        return ''
    return f'ROS 2 {os.environ.get("ROS_DISTRO", "of unknown release").capitalize()}'


def content_key(root: Path, version: Sequence[int], release: str) -> str:
    """Return a hash of everything that decides what belongs into the environment."""
    digest = hashlib.sha256(f'{root}\0{tuple(version[:3])}\0{release}'.encode())
    files = [root / 'setup.py', root / 'pyproject.toml', *(root / 'tools').glob('bootstrap.*')]
    for folder in ('requirements', 'interfaces'):
        files += (p for p in (root / folder).rglob('*') if '__pycache__' not in p.parts)
    for path in sorted(p for p in files if p.is_file()):
        digest.update(f'\0{path.relative_to(root)}\0'.encode() + path.read_bytes())
    return digest.hexdigest()


def state() -> dict:
    """Return what the last run noted, or nothing."""
    try:
        return json.loads(STATE.read_text())
    except (OSError, ValueError):
        return {}


def is_ready() -> bool:
    """Say whether nothing has changed since the last complete run; uses the standard library."""
    return state().get('key') == content_key(ROOT, sys.version_info, ros_release())


def say(text: str) -> None:
    print(text, flush=True)


def step(number: int, text: str) -> None:
    say(f'[{number}/{_STEPS}] {text}')


def run(command: Sequence[str | Path], env: Mapping[str, str] | None = None) -> None:
    """Run a program; where its own progress bar has no terminal, say that it lives."""
    started = time.monotonic()
    process = subprocess.Popen([str(c) for c in command], cwd=ROOT, env=env)
    try:
        while True:
            try:
                code = process.wait(None if sys.stdout.isatty() else _HEARTBEAT_S)
                break
            except subprocess.TimeoutExpired:
                say(f'      ... {time.monotonic() - started:.0f} s')
    except KeyboardInterrupt:
        process.wait()
        raise
    if code:
        raise Failed(f'this failed with exit code {code}: {shlex.join(map(str, command))}')


def missing_system_packages(release: str) -> list[str]:
    """Return which packages of Debian or Ubuntu are needed here and missing."""
    python = f'python{sys.version_info[0]}.{sys.version_info[1]}'
    missing = [f'{python}-venv'] if importlib.util.find_spec('ensurepip') is None else []
    if ros_source(release) and not release:  # then message packages are compiled here
        if not any(map(shutil.which, ('g++', 'c++'))):
            missing.append('g++')
        if not Path(sysconfig.get_path('include'), 'Python.h').is_file():
            missing.append(f'{python}-dev')
    if not tt_refusal() and shutil.which('riscv64-unknown-elf-as') is None:
        missing.append(MOCK_PACKAGE)
    return missing


def install_system_packages(names: Sequence[str]) -> bool:
    """Install packages of Debian or Ubuntu; false where this user or system cannot."""
    if os.geteuid() != 0 or shutil.which('apt-get') is None:
        return False
    say(f'      installing {" ".join(names)} with apt-get')
    env = {**os.environ, 'DEBIAN_FRONTEND': 'noninteractive'}
    run(['apt-get', '-qq', 'update'], env)
    run(['apt-get', '-qq', 'install', '-y', '--no-install-recommends', *names], env)
    return True


def torch_here() -> str:
    """Return the version of a torch that this interpreter has and we can take, or nothing."""
    try:
        version = importlib.metadata.version('torch')
    except importlib.metadata.PackageNotFoundError:
        return ''
    numbers = tuple(int(n) for n in re.findall(r'\d+', version)[:2])
    return version if numbers >= SMALLEST_TORCH else ''


def make_venv(shared: bool) -> None:
    """Create the virtual environment, or keep the one that stands on the same interpreter.

    :param shared: it sees the packages of the interpreter below it.
    """
    base = {'base': sys.executable, 'version': list(sys.version_info[:3]), 'shared': shared,
            'root': str(ROOT)}
    old = state()
    if all(old.get(name) == value for name, value in base.items()) and PYTHON.exists():
        STATE.write_text(json.dumps(base))
        return
    shutil.rmtree(VENV, ignore_errors=True)
    run([sys.executable, '-m', 'venv', *(['--system-site-packages'] if shared else []), VENV])
    STATE.write_text(json.dumps(base))


class Installer(NamedTuple):
    """A command that installs packages into the virtual environment."""

    command: list[str | Path]
    env: dict[str, str]

    def run(self, *arguments: str | Path) -> None:
        run([*self.command, *arguments], self.env)


def pip_settings(listing: str) -> dict[str, list[str]]:
    """Read the output of ``pip config list``; environment variables come first there, and win."""
    found: dict[str, list[str]] = {}
    for line in listing.splitlines():
        name, _, value = line.partition('=')
        section, _, option = name.rpartition('.')
        if section in (':env:', 'global', 'install'):
            found.setdefault(option.strip(), value.strip().strip('\'"').split())
    return found


def uv_environment(settings: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Translate pip's settings for uv, which reads only its own.

    So a mirror, and a folder with wheels, for example of a smaller torch, serve both.
    """
    indexes = settings.get('extra-index-url', [])
    names = {
        'UV_FIND_LINKS': ','.join(settings.get('find-links', [])),
        'UV_DEFAULT_INDEX': ' '.join(settings.get('index-url', [])),
        'UV_INDEX': ' '.join(indexes),
        'UV_INDEX_STRATEGY': 'unsafe-best-match' if indexes else '',  # as pip does
        'UV_HTTP_TIMEOUT': '300',
    }
    return {**{name: value for name, value in names.items() if value}, **os.environ}


def find_installer() -> Installer:
    """Return what installs packages into the environment.

    uv where it can be had: it is quick, and links from its cache, so that a second checkout costs
    little.
    """
    pip = [PYTHON, '-m', 'pip', '--disable-pip-version-check']
    uv = find_uv(pip)
    if uv is None:
        return Installer([*pip, 'install', '--prefer-binary'], dict(os.environ))
    listing = subprocess.run([*pip, 'config', 'list'], capture_output=True, text=True,
                             check=False).stdout
    return Installer([uv, 'pip', 'install', '--python', PYTHON],
                     uv_environment(pip_settings(listing)))


def find_uv(pip: Sequence[str | Path]) -> str | Path | None:
    """Return a uv that starts: one on the PATH, else one fetched into the environment."""
    own = VENV / 'bin' / 'uv'
    for candidate in filter(None, (shutil.which('uv'), own)):
        try:
            subprocess.run([candidate, '--version'], capture_output=True, check=True)
            return candidate
        except (OSError, subprocess.CalledProcessError):
            continue
    fetched = subprocess.run([*pip, 'install', '--quiet', '-r', REQUIREMENTS / 'installer.txt'],
                             check=False)
    return own if fetched.returncode == 0 else None


def tt_refusal() -> str:
    """Return why ttnn cannot be installed here, or nothing."""
    glibc = platform.libc_ver()
    numbers = tuple(int(n) for n in glibc[1].split('.')[:2]) if glibc[0] == 'glibc' else ()
    if platform.machine() != 'x86_64':
        return f'ttnn has no wheels for {platform.machine()}'
    if sys.version_info[:2] not in TT_PYTHONS:
        return f'ttnn has wheels for Python 3.10 and 3.12, and this is {platform.python_version()}'
    if numbers < TT_GLIBC:
        return f'ttnn needs glibc 2.34 or newer, and this is {" ".join(glibc)}'
    return ''


def ros_source(release: str) -> str:
    """Return where ROS 2 comes from, or nothing where there is none to be had."""
    if release:
        return f'{release}, as installed on this machine'
    return 'ROS 2 Kilted as wheels' if platform.machine() == 'x86_64' else ''


def say_what_to_expect(release: str) -> None:
    """Say what this environment has, and plainly what it cannot have."""
    refusal = tt_refusal()
    say('      ' + (ros_source(release) or 'without nodes and demo: no ROS 2 is sourced, and none '
                    f'comes as wheels for {platform.machine()}; the Python API works'))
    say('      backend cpu; ' + (f'without backend tt: {refusal}' if refusal else
                                 'backend tt, for a Blackhole p150'))


def install_packages(installer: Installer, release: str, torch: str) -> None:
    """Install everything that comes as wheels."""
    names = ['run', 'test']
    if not tt_refusal():
        names.append('tt')
    if ros_source(release) and not release:
        names += ['ros', 'build']
    if torch:
        say(f'      torch {torch} of {sys.executable} is taken')
    else:
        names.append('torch')
        announce_torch()
    files = [part for name in names for part in ('-r', REQUIREMENTS / f'{name}.txt')]
    installer.run('-c', REQUIREMENTS / 'constraints.txt', *files)


def announce_torch() -> None:
    """Say what the largest download is, before it starts."""
    if any((VENV / 'lib').glob('python*/site-packages/torch-*.dist-info')):
        return
    size = (': a CUDA build, about 2.6 GB to download and 5 GB on disk'
            if platform.machine() == 'x86_64' else '')
    say(f'      torch comes from the package index{size}, unless pip or uv knows a folder with '
        'another build of it, or their cache has it.\n'
        '      A smaller one: put its wheel into a folder, and that into PIP_FIND_LINKS.')


def build_messages(release: str) -> None:
    """Build the message packages that are missing, and check all of them."""
    if not ros_source(release):
        say('      left out: there is no ROS 2')
        return
    try:
        run([PYTHON, ROOT / 'interfaces' / 'build.py'])
    except Failed as error:
        advice = ('\nThis ROS 2 installation lacks message packages; its package source may have '
                  'them, for example ros-$ROS_DISTRO-autoware-perception-msgs.')
        raise Failed(f'{error}{advice if release else ""}') from None


def install_checkout(installer: Installer) -> None:
    """Install this checkout so that edits count at once, with its commands."""
    installer.run('--quiet', '--no-deps', '--no-build-isolation', '-e', '.')
    lines = ['# SPDX-License-Identifier: Apache-2.0',
             '# Written by tools/bootstrap.py. To be sourced: . .venv/env.sh',
             '# What the Python of another environment with ROS 2 wheels leaves behind:',
             'if [ -n "${_ROS_WHEELS_BOOTSTRAP_COMPLETE:-}" ]; then',
             '  unset _ROS_WHEELS_BOOTSTRAP_COMPLETE LD_LIBRARY_PATH',
             'fi',
             f'. {shlex.quote(str(VENV / "bin" / "activate"))}']
    if ros_release() and any((VENV / 'share').glob('*/built_from')):
        quoted = shlex.quote(str(VENV))
        lines += ['# message packages that the ROS 2 installation lacks',
                  f'export AMENT_PREFIX_PATH={quoted}:"$AMENT_PREFIX_PATH"',
                  f'export LD_LIBRARY_PATH={quoted}/lib:"${{LD_LIBRARY_PATH:-}}"']
    (VENV / 'env.sh').write_text('\n'.join(lines) + '\n')


def set_up() -> None:
    """Bring the environment to what this checkout asks for."""
    started = time.monotonic()
    release = ros_release()
    torch = torch_here()
    step(1, f'virtual environment .venv with Python {platform.python_version()}')
    missing = missing_system_packages(release)
    if missing and install_system_packages(missing):
        missing = []
    request = f'please run: apt-get install {" ".join(missing)}'
    without_mock = MOCK_PACKAGE in missing
    missing = [name for name in missing if name != MOCK_PACKAGE]
    if any(name.endswith('-venv') for name in missing):
        raise Failed(request)
    make_venv(shared=bool(release or torch))
    step(2, 'Python packages')
    say_what_to_expect(release)
    installer = find_installer()
    install_packages(installer, release, torch)
    step(3, 'message packages')
    if missing:
        say('      left out, they cannot be compiled')
    else:
        build_messages(release)
    step(4, 'this checkout')
    install_checkout(installer)
    if not missing:  # else the next run tries again
        key = content_key(ROOT, sys.version_info, release)
        STATE.write_text(json.dumps({**state(), 'key': key}))
    say(f'Set-up complete after {time.monotonic() - started:.0f} s:')
    say_what_to_expect(release)
    if missing:
        say(f'      without nodes and demo, whose tests skip: {request}')
    elif without_mock:
        say(f'      without the mock device, whose tests skip: {request}')


def main(arguments: Sequence[str]) -> int:
    if arguments == ['--check']:
        return 0 if is_ready() else 1
    with open(__file__) as lock:  # a second run in this checkout waits for the first
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            if not is_ready():
                set_up()
        except Failed as error:
            say(f'Set-up stopped: {error}')
            return 1
        except KeyboardInterrupt:
            say('\nSet-up stopped by hand; the next run goes on from here.')
            return 130
    return 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
