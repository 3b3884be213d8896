# SPDX-License-Identifier: Apache-2.0
"""The package as a whole: what is declared, what is installed, who imports whom, the set-up."""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import tt_perception

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / 'tt_perception'
MADE_HERE = {'.git', '.venv', 'out', 'build', 'dist', 'install', 'log', '__pycache__',
             '.pytest_cache', '.ruff_cache', '.hypothesis', 'tt_perception.egg-info'}
WITH_SPDX = {'.py', '.sh', '.toml', '.cfg', '.txt', '.yaml', '.yml', '.xml', '.cmake', '.msg',
             '.h', '.cpp'}
WITH_SPDX_NAMES = {'Makefile', 'run', 'COLCON_IGNORE', '.gitignore'}


def project_files() -> list[Path]:
    """Return every file of the source tree."""
    return [path for path in sorted(ROOT.rglob('*'))
            if path.is_file() and not MADE_HERE & set(path.relative_to(ROOT).parts)]


def load(path: Path):
    """Import a file that belongs to no package."""
    spec = importlib.util.spec_from_file_location(f'checked_{path.stem}', path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def requirements(name: str) -> list[Requirement]:
    lines = (ROOT / 'requirements' / f'{name}.txt').read_text().splitlines()
    return [Requirement(line.split('  #')[0]) for line in lines if line and line[0] != '#']


def applies(requirement: Requirement, python: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({
        'python_version': python, 'python_full_version': f'{python}.0', 'sys_platform': 'linux',
        'platform_machine': 'x86_64', 'platform_system': 'Linux'})


# ---- what is declared ----

def manifest() -> ElementTree.Element:
    return ElementTree.parse(ROOT / 'package.xml').getroot()


def test_one_version_everywhere():
    found = subprocess.run([sys.executable, 'setup.py', '--version'], cwd=ROOT, check=True,
                           capture_output=True, text=True).stdout.split()[-1]
    assert found == tt_perception.__version__ == manifest().findtext('version')


def test_every_source_file_names_its_licence():
    without = [str(path.relative_to(ROOT)) for path in project_files()
               if path.suffix in WITH_SPDX or path.name in WITH_SPDX_NAMES
               if not any('SPDX-License-Identifier: Apache-2.0' in line
                          for line in path.read_text().splitlines()[:2])]
    assert not without
    licence = (ROOT / 'LICENSE').read_text()
    assert 'Apache License' in licence and 'END OF TERMS AND CONDITIONS' in licence


def test_no_file_holds_a_path_of_one_machine():
    pattern = re.compile('|'.join([*(f'/{name}/' + r'\w' for name in ('home', 'root', 'Users')),
                                   re.escape(f'{ROOT}/')]))
    found = []
    for path in project_files():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue  # a binary file
        found += [f'{path.relative_to(ROOT)}: {line.strip()}' for line in text.splitlines()
                  if pattern.search(line)]
    assert not found


@functools.cache
def imports(path: Path) -> set[str]:
    """Return the full names of all modules that a file imports, at any depth."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ''
            if node.level:
                parts = path.relative_to(ROOT).with_suffix('').parts[:-node.level]
                base = '.'.join([*parts, *([base] if base else [])])
            names.add(base)
            names.update(f'{base}.{alias.name}' for alias in node.names)
    return names


def importers(*modules: str) -> dict[str, set[str]]:
    """Return file -> which of the modules it imports."""
    found = {}
    for path in sorted(PACKAGE.rglob('*.py')):
        hits = {m for m in modules for name in imports(path)
                if name == m or name.startswith(m + '.')}
        if hits:
            found[path.relative_to(PACKAGE).as_posix()] = hits
    return found


def is_command(file: str) -> bool:
    return file == 'cli.py' or file.startswith('demo')


def test_rclpy_stays_in_the_ros_folder_and_the_commands():
    found = importers('rclpy', 'tf2_ros', 'tf2_msgs', 'sensor_msgs', 'autoware_perception_msgs')
    assert any(file.startswith('ros/') for file in found)
    assert not [f for f in found if not f.startswith('ros/') and not is_command(f)]


def test_ttnn_stays_in_the_tt_folders_and_the_runtime():
    assert not [f for f in importers('ttnn') if '/tt/' not in f and not f.startswith('runtime/')]


@pytest.mark.parametrize(('folder', 'forbidden'), [
    ('runtime', ['bevfusion', 'sam3', 'sim', 'ros', 'cli', 'demo']),
    ('bevfusion', ['sam3', 'ros', 'cli', 'demo']),
    ('sam3', ['bevfusion', 'ros', 'cli', 'demo']),
    ('sim', ['ros', 'cli', 'demo']),
])
def test_imports_run_one_way(folder, forbidden):
    found = importers(*(f'tt_perception.{name}' for name in forbidden))
    assert not {f: hits for f, hits in found.items() if f.startswith(folder + '/')}


def test_importing_the_package_imports_nothing_heavy():
    program = ('import sys, tt_perception, tt_perception.cli; '
               'print(*{"torch", "ttnn", "rclpy", "numba"} & set(sys.modules))')
    done = subprocess.run([sys.executable, '-c', program], cwd=ROOT, check=True,
                          capture_output=True, text=True)
    assert done.stdout.split() == []


def test_the_manifest_declares_the_ros_packages_that_are_imported():
    declared = {element.text for element in manifest().findall('exec_depend')}
    ros = re.compile(r'.*_msgs|rclpy|launch|launch_ros|tf2_ros|ament_index_python|'
                     r'builtin_interfaces')
    files = [*PACKAGE.rglob('*.py'), *(ROOT / 'launch').glob('*.py')]
    imported = {name.split('.')[0] for path in files for name in imports(path)}
    assert {name for name in imported if ros.fullmatch(name)} <= declared


# ---- what is installed ----

def test_launch_files_compile_and_parameter_files_are_yaml():
    launch_files = sorted((ROOT / 'launch').glob('*.launch.py'))
    assert launch_files
    for path in launch_files:
        compile(path.read_text(), str(path), 'exec')
        assert 'def generate_launch_description' in path.read_text()
    parameter_files = sorted((ROOT / 'config').glob('*.yaml'))
    assert parameter_files
    for path in parameter_files:
        assert isinstance(yaml.safe_load(path.read_text()), dict), path


def test_the_transport_profile_has_room_for_a_large_cloud():
    root = ElementTree.parse(ROOT / 'config' / 'fastdds_large_messages.xml').getroot()
    space = {'d': 'http://www.eprosima.com'}
    assert int(root.find('.//d:segment_size', space).text) == 64 << 20
    assert int(root.find('.//d:maxMessageSize', space).text) >= 10_000_000
    defined = {e.text for e in root.findall('.//d:transport_descriptor/d:transport_id', space)}
    assert {e.text for e in root.findall('.//d:userTransports/d:transport_id', space)} == defined


def test_a_wheel_holds_the_modules_the_commands_and_the_share_folder(tmp_path):
    source = tmp_path / 'source'
    shutil.copytree(ROOT, source, ignore=lambda _, names: MADE_HERE & set(names))
    subprocess.run([sys.executable, 'setup.py', '-q', 'bdist_wheel', '-d', tmp_path], cwd=source,
                   check=True, capture_output=True)
    wheel, = tmp_path.glob('*.whl')
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entry_points = next(archive.read(n).decode() for n in names
                            if n.endswith('entry_points.txt'))
    modules = {p.relative_to(ROOT).as_posix() for p in PACKAGE.rglob('*.py')}
    assert modules <= names
    assert {n.split('/')[0] for n in names if n.endswith('.py')} <= {
        'tt_perception', f'tt_perception-{tt_perception.__version__}.data'}
    shared = {n.split('.data/data/')[1] for n in names if '.data/data/' in n}
    share = 'share/tt_perception/'
    assert shared == {
        'share/ament_index/resource_index/packages/tt_perception', share + 'package.xml',
        *(share + p.relative_to(ROOT).as_posix() for folder in ('config', 'launch')
          for p in (ROOT / folder).iterdir() if p.is_file())}
    for command, module in (('tt_perception', 'tt_perception.cli'),
                            ('bevfusion_node', 'tt_perception.ros.bevfusion_node')):
        assert f'{command} = {module}:main' in entry_points


# ---- requirements ----

@pytest.mark.parametrize('name', ['run', 'torch', 'tt', 'ros', 'build', 'test', 'installer'])
def test_direct_requirements_are_pinned_exactly(name):
    for requirement in requirements(name):
        operators = [s.operator for s in requirement.specifier]
        assert operators == ['=='], requirement


@pytest.mark.parametrize('python', ['3.10', '3.11', '3.12', '3.13'])
def test_constraints_agree_with_the_requirements_on_every_python(python):
    constraints = [r for r in requirements('constraints') if applies(r, python)]
    pins = {re.sub('[-_.]+', '-', r.name).lower(): str(r.specifier) for r in constraints}
    assert len(pins) == len(constraints), 'a package is pinned twice'
    for name in ('run', 'tt', 'ros', 'build', 'test', 'installer'):
        for requirement in requirements(name):
            if applies(requirement, python):
                key = re.sub('[-_.]+', '-', requirement.name).lower()
                assert pins[key] == str(requirement.specifier), requirement
    numpy = int(pins['numpy'].lstrip('=').split('.')[0])
    assert (numpy < 2) == (python != '3.13')
    assert ('ttnn' in pins) == (python in ('3.10', '3.12'))


def test_the_installed_packages_are_the_pinned_ones():
    """A test run says nothing about other versions than those of requirements/."""
    from importlib.metadata import version
    python = f'{sys.version_info[0]}.{sys.version_info[1]}'
    for requirement in requirements('run'):
        if applies(requirement, python) and requirement.name != 'setuptools':
            assert requirement.specifier.contains(version(requirement.name)), requirement


# ---- message packages ----

def test_type_hashes_follow_from_the_definitions():
    """rosbags computes the hash from the .msg files alone."""
    from rosbags.typesys import Stores, get_types_from_msg, get_typestore
    known = load(ROOT / 'interfaces' / 'build.py').known_types()
    store = get_typestore(Stores.EMPTY)
    base = get_typestore(Stores.ROS2_JAZZY)
    ours = {name for types in known.values() for name in types}
    store.register({name: fields for name, fields in base.fielddefs.items() if name not in ours})
    definitions = {}
    for name in ours:
        package, kind, message = name.split('/')
        path = ROOT / 'interfaces' / package / kind / f'{message}.msg'
        definitions.update(get_types_from_msg(path.read_text(), name))
    store.register(definitions)
    for types in known.values():
        for name, expected in types.items():
            assert store.hash_rihs01(name) == expected, name


def test_every_message_file_is_listed_built_and_hashed():
    known = load(ROOT / 'interfaces' / 'build.py').known_types()
    folders = {p.parent.name for p in (ROOT / 'interfaces').glob('*/package.xml')}
    assert set(known) == folders
    for package, types in known.items():
        files = {p.stem for p in (ROOT / 'interfaces' / package / 'msg').glob('*.msg')}
        assert {name.split('/')[2] for name in types} == files
        cmake = (ROOT / 'interfaces' / package / 'CMakeLists.txt').read_text()
        assert set(re.findall(r'"msg/(\w+)\.msg"', cmake)) == files
    assert (ROOT / 'interfaces' / 'COLCON_IGNORE').is_file()


def test_installed_messages_have_the_hashes_of_autoware():
    pytest.importorskip('autoware_perception_msgs.msg', reason='no Autoware messages installed')
    build = load(ROOT / 'interfaces' / 'build.py')
    types = {name: digest for part in build.known_types().values()
             for name, digest in part.items()}
    wrong, compared = build.wrong_hashes(types)
    assert not wrong
    if not compared:
        pytest.skip('this ROS 2 release installs no type descriptions')


def test_a_wrong_type_hash_is_found(tmp_path, monkeypatch):
    build = load(ROOT / 'interfaces' / 'build.py')
    folder = tmp_path / 'share' / 'some_msgs' / 'msg'
    folder.mkdir(parents=True)
    (folder / 'Thing.json').write_text(
        '{"type_hashes": [{"type_name": "some_msgs/msg/Thing", "hash_string": "RIHS01_1"}]}')
    monkeypatch.setattr(build, 'PREFIX', tmp_path)
    assert build.wrong_hashes({'some_msgs/msg/Thing': 'RIHS01_1'}) == ([], 1)
    (line,), compared = build.wrong_hashes({'some_msgs/msg/Thing': 'RIHS01_2'})
    assert compared == 1 and 'RIHS01_1' in line and 'RIHS01_2' in line


# ---- set-up ----

@pytest.fixture
def bare_machine(tmp_path):
    """A checkout with only tools/, whose bootstrap.py tells what it was started with."""
    checkout = tmp_path / 'a folder'
    (checkout / 'tools').mkdir(parents=True)
    shutil.copy(ROOT / 'tools' / 'bootstrap.sh', checkout / 'tools')
    (checkout / 'tools' / 'bootstrap.py').write_text(
        'import os, sys\n'
        'print(sys.executable)\n'
        'print(*sorted(os.environ))\n')
    commands = tmp_path / 'commands'
    commands.mkdir()

    def command(name: str, script: str) -> None:
        (commands / name).write_text(f'#!/bin/sh\n{script}\n')
        (commands / name).chmod(0o755)

    # Scripts and no links: a test that replaces one must not reach the machine's own program.
    command('dirname', f'exec {shutil.which("dirname")} "$@"')
    command('id', 'echo 0')

    def start(**env: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            ['/bin/sh', checkout / 'tools' / 'bootstrap.sh'], capture_output=True,
            text=True, check=False, timeout=60,
            env={'HOME': str(tmp_path), 'PATH': str(commands), **env})

    return command, start


BASE_PYTHON = f'{sys.base_prefix}/bin/python{sys.version_info[0]}.{sys.version_info[1]}'


def test_a_python_that_does_not_start_is_passed_over(bare_machine):
    command, start = bare_machine
    command('python3.12', 'echo "python3.12: command not found" >&2; exit 127')
    command('python3.10', f'exec "{BASE_PYTHON}" -S -c "raise SystemExit(3)"')
    command('python3', f'exec "{BASE_PYTHON}" "$@"')
    done = start()
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.splitlines()[0]).resolve() == Path(BASE_PYTHON).resolve()


def test_what_another_environment_with_ros_wheels_leaves_behind_is_dropped(bare_machine):
    command, start = bare_machine
    command('python3', f'exec "{BASE_PYTHON}" "$@"')
    done = start(_ROS_WHEELS_BOOTSTRAP_COMPLETE='1', LD_LIBRARY_PATH='/nowhere', PYTHONPATH='/no')
    left = set(done.stdout.splitlines()[1].split())
    assert not left & {'_ROS_WHEELS_BOOTSTRAP_COMPLETE', 'LD_LIBRARY_PATH', 'PYTHONPATH'}
    done = start(LD_LIBRARY_PATH='/nowhere')
    assert 'LD_LIBRARY_PATH' in done.stdout.splitlines()[1].split()


def test_without_python_one_line_says_what_to_install(bare_machine):
    command, start = bare_machine
    command('id', 'echo 1000')
    done = start()
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1 and 'python3' in done.stderr


def test_a_sourced_ros_that_python_cannot_import_is_refused(bare_machine):
    command, start = bare_machine
    command('python3', f'exec "{BASE_PYTHON}" -S -E "$@"')
    done = start(AMENT_PREFIX_PATH='/opt/ros/some', ROS_DISTRO='some')
    assert done.returncode == 1
    assert 'rclpy' in done.stderr


@pytest.fixture
def bootstrap():
    return load(ROOT / 'tools' / 'bootstrap.py')


def test_the_set_up_runs_again_when_what_it_reads_changes(bootstrap, tmp_path):
    for folder in ('requirements', 'interfaces', 'tools'):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    shutil.copy(ROOT / 'setup.py', tmp_path)

    def key(version=(3, 12, 1), release=''):
        return bootstrap.content_key(tmp_path, version, release)

    keys = [key(), key(version=(3, 12, 2)), key(release='ROS 2 Jazzy')]
    assert key() == keys[0]
    for name in ('requirements/run.txt', 'interfaces/tf2_msgs/msg/TFMessage.msg',
                 'tools/bootstrap.py', 'setup.py'):
        path = tmp_path / name
        path.write_text(path.read_text() + '\n')
        keys.append(key())
    assert len(set(keys)) == len(keys)


def test_pip_settings_reach_uv(bootstrap, monkeypatch):
    for name in [name for name in os.environ if name.startswith('UV_')]:
        monkeypatch.delenv(name)
    listing = "\n".join([
        ":env:.find-links='wheels more'", "global.find-links='ignored'",
        "global.index-url='mirror'", "install.extra-index-url='first second'",
        "global.timeout='60'", "freeze.user='true'"])
    env = bootstrap.uv_environment(bootstrap.pip_settings(listing))
    assert env['UV_FIND_LINKS'] == 'wheels,more'
    assert env['UV_DEFAULT_INDEX'] == 'mirror'
    assert env['UV_INDEX'] == 'first second'
    assert env['UV_INDEX_STRATEGY'] == 'unsafe-best-match'
    plain = bootstrap.uv_environment(bootstrap.pip_settings(''))
    assert not {'UV_FIND_LINKS', 'UV_DEFAULT_INDEX', 'UV_INDEX', 'UV_INDEX_STRATEGY'} & set(plain)
    monkeypatch.setenv('UV_FIND_LINKS', "the user's own")
    env = bootstrap.uv_environment(bootstrap.pip_settings(listing))
    assert env['UV_FIND_LINKS'] == "the user's own"


def test_a_torch_that_is_here_is_taken_unless_it_is_too_old(bootstrap, monkeypatch):
    def installed(version):
        def lookup(name):
            assert name == 'torch'
            if version is None:
                raise bootstrap.importlib.metadata.PackageNotFoundError(name)
            return version
        monkeypatch.setattr(bootstrap.importlib.metadata, 'version', lookup)
        return bootstrap.torch_here()

    assert installed('2.13.0+cpu') == '2.13.0+cpu'
    assert installed('2.10.0a0+git1') == '2.10.0a0+git1'
    assert installed('1.13.1') == installed('2.8.0') == installed(None) == ''


def test_without_root_system_packages_are_named_and_not_installed(bootstrap, monkeypatch):
    def refuse(*command, **_):
        raise AssertionError(f'this must not be started: {command}')

    monkeypatch.setattr(bootstrap.subprocess, 'Popen', refuse)
    monkeypatch.setattr(bootstrap.os, 'geteuid', lambda: 1000)
    monkeypatch.setattr(bootstrap.shutil, 'which', lambda name: None)
    monkeypatch.setattr(bootstrap.sysconfig, 'get_path', lambda name: '/nowhere')
    monkeypatch.setattr(bootstrap.importlib.util, 'find_spec', lambda name: None)
    monkeypatch.setattr(bootstrap.platform, 'machine', lambda: 'x86_64')
    python = f'python{sys.version_info[0]}.{sys.version_info[1]}'
    missing = bootstrap.missing_system_packages(release='')
    mock = [] if bootstrap.tt_refusal() else [bootstrap.MOCK_PACKAGE]
    assert missing == [f'{python}-venv', 'g++', f'{python}-dev', *mock]
    assert not bootstrap.install_system_packages(missing)
    with pytest.raises(bootstrap.Failed, match=rf'apt-get install {python}-venv g\+\+'):
        bootstrap.set_up()
    assert bootstrap.missing_system_packages('ROS 2 Jazzy') == [f'{python}-venv', *mock]
