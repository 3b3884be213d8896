# SPDX-License-Identifier: Apache-2.0
"""The demo: a recording is played over DDS into the node, in processes of their own, and checked.

Nothing here imports rclpy; what hears the topics is :mod:`tt_perception.ros.demo_monitor`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from tt_perception import __version__
from tt_perception.recording import WORLD_FRAME, Recording, messages, read_recording
from tt_perception.runtime.errors import ArtifactError, PerceptionError
from tt_perception.runtime.paths import cache_dir, share_dir
from tt_perception.terminal import Terminal

if TYPE_CHECKING:
    from tt_perception.ros.demo_monitor import Answer, Monitor

SEED = 18
ROWS = (64,) * 6 + (32,) * 4  # rows of the simulated lidar, sweep by sweep
OBJECTS_TOPIC = '/perception/object_recognition/detection/bevfusion/objects'
NODE_MODULE, NODE_NAME = 'tt_perception.ros.bevfusion_node', 'bevfusion'

WEIGHTS_LIMIT_S = 900
NODE_START_LIMIT_S = 300
PLAYER_START_LIMIT_S = 60
ANSWER_LIMIT_S = 120
GRACE_S = 3.0  # for answers on their way when the player ends
END_LIMIT_S = 10.0
LOG_LINES = 15

_COLUMNS = ('CAR', 'TRUCK', 'BUS', 'BICYCLE', 'PEDESTRIAN')
_EXIT_FAILED, _EXIT_INTERRUPTED = 1, 130


def run_demo(args: argparse.Namespace) -> int:
    """Run the demo; return 0 when every cloud got exactly one answer of its stamp and frame.

    :param args: ``bag``: a rosbag2, None for a simulated drive; ``weights``: artifact, None for
        the released one, or random ones where that cannot be had; ``out``: folder of the results.
    :raises PerceptionError: it cannot even start.
    """
    try:
        with _sigterm_as_interrupt():
            return _run_demo(args, Terminal())
    except OSError as error:
        raise PerceptionError(f'{error.filename or args.out}: {error.strerror}') from error


def _run_demo(args: argparse.Namespace, terminal: Terminal) -> int:
    args.out.mkdir(parents=True, exist_ok=True)
    # The recording first: a wrong one is said before weights are downloaded or made.
    bag = args.bag if args.bag is not None else _simulate(args.out, terminal)
    with terminal.waiting(f'reading {bag}'):
        recording = read_recording(bag)
    terminal.line(f'recording   {bag}: {len(recording.clouds)} clouds on {recording.topic}')
    if not recording.has_pose:
        terminal.line(f'            no transform to {WORLD_FRAME} in it: single sweeps')
    weights = _weights(args.weights, terminal)
    run = _Run(recording, weights, args.out, terminal)
    try:
        run.play()
    except KeyboardInterrupt:
        terminal.line('interrupted')
    return run.report()


# Weights.

@dataclass(frozen=True)
class _Weights:
    source: str  # for the node's parameter model_path; empty for the release
    is_random: bool


def _weights(choice: str | None, terminal: Terminal) -> _Weights:
    from tt_perception.bevfusion.artifact import resolve
    if choice is not None:
        artifact = resolve(choice)
        weights = _Weights(str(artifact.onnx), artifact.has_random_weights)
        terminal.line(f'weights     {artifact.onnx}')
    else:
        try:
            with terminal.waiting('looking for the released weights'):
                artifact = resolve()
        except ArtifactError as error:
            terminal.line(f'weights     the released ones cannot be had: {error}')
            weights = _Weights(str(_random_artifact(terminal)), True)
        else:
            weights = _Weights('', False)
            terminal.line(f'weights     released, revision {artifact.revision}')
    if weights.is_random:
        terminal.warning('RANDOM WEIGHTS: every step is real, but the boxes mean nothing.')
    return weights


def _random_artifact(terminal: Terminal) -> Path:
    """Return the folder of a full-size network with random weights; made at the first call."""
    from tt_perception.bevfusion.artifact import resolve
    folder = cache_dir() / f'random_weights_{__version__}_{SEED}'
    with contextlib.suppress(ArtifactError):
        return resolve(folder).onnx.parent
    part = folder.with_name(f'{folder.name}.{os.getpid()}')
    shutil.rmtree(folder, ignore_errors=True)
    try:
        with terminal.waiting('making a full-size network with random weights, once'):
            done = subprocess.run(
                [sys.executable, '-m', 'tt_perception.cli', 'make-artifact', '--seed', str(SEED),
                 str(part)], capture_output=True, text=True, timeout=WEIGHTS_LIMIT_S, check=False)
        if done.returncode:
            raise ArtifactError(f'{folder}: cannot be made: {_last_line(done.stderr)}')
        part.rename(folder)
    except subprocess.TimeoutExpired:
        raise ArtifactError(f'{folder}: not made within {WEIGHTS_LIMIT_S} s') from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


def _simulate(out: Path, terminal: Terminal) -> Path:
    from tt_perception.sim.bag import write_bag
    from tt_perception.sim.drive import Drive
    from tt_perception.sim.lidar import LIDARS
    bag = out / 'simulated_drive'
    if bag.is_dir() and all(file.suffix in ('.db3', '.yaml') for file in bag.iterdir()):
        shutil.rmtree(bag)  # of an earlier demo; anything else of that name is refused
    with terminal.waiting('simulating a drive'):
        write_bag(bag, Drive(SEED, len(ROWS), lidar=[LIDARS[rows] for rows in ROWS]))
    return bag


# Processes.

class _Process:
    """A module of this package as a process, with everything that it starts; logs to a file."""

    def __init__(self, name: str, log: Path, *args: str):
        self.name = name
        self.log = log
        with open(log, 'wb') as file:
            self._process = subprocess.Popen(
                [sys.executable, '-u', '-m', *args], stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT, start_new_session=True)

    @property
    def returncode(self) -> int | None:
        """Exit code, None while the process runs."""
        return self._process.poll()

    def end(self) -> None:
        """End the whole process group, by SIGINT, or by force if that does not help."""
        for number in (signal.SIGINT, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_LIMIT_S)
                return

    def last_lines(self) -> list[str]:
        """Return the end of the log."""
        return self.log.read_text(encoding='utf-8', errors='replace').splitlines()[-LOG_LINES:]


@contextlib.contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Let SIGTERM end the demo as Ctrl-C does, so that its processes end too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _set_ros_environment() -> None:
    """Keep the demo to itself: a domain of its own, this machine only, large messages."""
    profile = str(share_dir() / 'config' / 'fastdds_large_messages.xml')
    os.environ.update(
        ROS_DOMAIN_ID=str(1 + os.getpid() % 100),
        ROS_AUTOMATIC_DISCOVERY_RANGE='LOCALHOST',
        FASTDDS_DEFAULT_PROFILES_FILE=profile,
        FASTRTPS_DEFAULT_PROFILES_FILE=profile)
    if os.environ.get('ROS_DISTRO') == 'humble':  # knows only this one
        os.environ['ROS_LOCALHOST_ONLY'] = '1'
    if not _knows_only_fastrtps():  # it would warn in every process
        del os.environ['FASTRTPS_DEFAULT_PROFILES_FILE']


def _knows_only_fastrtps() -> bool:
    """Return whether this may be a ROS release before Kilted, with the variable's old name."""
    if distribution := os.environ.get('ROS_DISTRO'):
        return distribution in ('humble', 'iron', 'jazzy')
    try:
        return int(metadata.version('ros-rclpy').split('.')[0]) < 9
    except (metadata.PackageNotFoundError, ValueError):
        return True


# The run.

class _Run:
    """Node, player and monitor, and what comes of it."""

    def __init__(self, recording: Recording, weights: _Weights, out: Path,
                 terminal: Terminal):
        self._recording = recording
        self._weights = weights
        self._out = out
        self._terminal = terminal
        self._answers: list[Answer] = []
        self._faults: list[str] = []
        self._logs: list[_Process] = []
        self._finished = False

    def play(self) -> None:
        """Start everything, show the answers as they come, and end everything."""
        from tt_perception.ros.demo_monitor import Monitor
        _set_ros_environment()
        with Monitor(self._recording.topic, OBJECTS_TOPIC) as monitor, \
                contextlib.ExitStack() as stack:
            self._answers = monitor.answers
            node = self._start(stack, 'node', NODE_MODULE, *self._node_arguments())
            if not self._await_node(monitor, node):
                return
            player = self._start(
                stack, 'player', 'tt_perception.cli', 'play', str(self._recording.bag),
                '--topics', self._recording.topic, *self._recording.tf_topics,
                '--answer-topic', OBJECTS_TOPIC, '--cloud-topic', self._recording.topic,
                '--answer-timeout', str(ANSWER_LIMIT_S))
            self._watch(monitor, node, player)
            self._finished = True

    def report(self) -> int:
        """Draw the picture, say what was seen, and return the exit code."""
        faults = [*self._faults, *(self._wrong_answers() if self._finished else [])]
        if self._answers:
            self._summary()
        for fault in faults:
            self._terminal.line(f'FAILED: {fault}')
        if faults:
            for process in self._logs:
                self._terminal.line(f'--- {process.name}, end of {process.log}:')
                for line in process.last_lines():
                    self._terminal.line(f'    {line}')
            return _EXIT_FAILED
        return 0 if self._finished else _EXIT_INTERRUPTED

    def _node_arguments(self) -> list[str]:
        parameters = {'autostart': 'true', 'use_sim_time': 'true'}
        if self._weights.source:
            parameters['model_path'] = str(Path(self._weights.source).resolve())
        if not self._recording.has_pose:
            parameters['densification_num_past_frames'] = '0'
        remaps = {'~/input/pointcloud': self._recording.topic, '~/output/objects': OBJECTS_TOPIC}
        given = [('-p', f'{name}:={value}') for name, value in parameters.items()]
        given += [('-r', f'{name}:={topic}') for name, topic in remaps.items()]
        return ['--ros-args', *(part for pair in given for part in pair)]

    def _start(self, stack: contextlib.ExitStack, name: str, *args: str) -> _Process:
        process = _Process(name, self._out / f'{name}.log', *args)
        stack.callback(process.end)
        self._logs.append(process)
        return process

    def _await_node(self, monitor: Monitor, node: _Process) -> bool:
        begin_s = time.monotonic()
        with self._terminal.waiting(f'starting the node (log: {node.log})'):
            while not monitor.node_is_ready(NODE_NAME):
                monitor.spin(0.2)
                if node.returncode is not None:
                    self._faults.append(f'the node ended with exit code {node.returncode}')
                    return False
                if time.monotonic() - begin_s > NODE_START_LIMIT_S:
                    self._faults.append(f'the node was not active within {NODE_START_LIMIT_S} s')
                    return False
        self._terminal.line(f'node        active after {time.monotonic() - begin_s:.1f} s, '
                            f'ROS_DOMAIN_ID {os.environ["ROS_DOMAIN_ID"]}, log {node.log}')
        return True

    def _watch(self, monitor: Monitor, node: _Process, player: _Process) -> None:
        """Show answers until the player has ended, or nothing moves any more."""
        table = _Table(self._recording, self._terminal)
        moved_s = time.monotonic()
        while True:
            monitor.spin(0.2)
            if len(self._answers) > table.num_rows:
                moved_s = time.monotonic()
                table.show(self._answers)
            waited_s = time.monotonic() - moved_s
            if player.returncode is not None and (
                    waited_s > GRACE_S or len(self._answers) >= len(self._recording.clouds)):
                if player.returncode:
                    self._faults.append(f'the player ended with exit code {player.returncode}')
                return
            if node.returncode is not None:
                self._faults.append(f'the node ended with exit code {node.returncode}')
                return
            if waited_s > GRACE_S and not monitor.node_is_ready(NODE_NAME):
                self._faults.append('the node is not active any more')
                return
            start_s = 0 if self._answers else PLAYER_START_LIMIT_S
            if waited_s > start_s + ANSWER_LIMIT_S + GRACE_S:
                self._faults.append(f'no answer for {waited_s:.0f} s')
                return
            table.status(waited_s)

    def _wrong_answers(self) -> list[str]:
        """Return what is wrong with the answers: exactly one a cloud, of its stamp and frame."""
        clouds = self._recording.clouds
        expected = Counter((c.stamp_ns, c.frame_id) for c in clouds)
        found = Counter((a.stamp_ns, a.frame_id) for a in self._answers)
        faults = []
        if missing := expected - found:
            stamps = ', '.join(_seconds(stamp) for stamp, _ in sorted(missing)[:5])
            faults.append(f'{missing.total()} of {len(clouds)} clouds have no answer of their '
                          f'stamp and frame: {stamps}')
        if extra := found - expected:
            named = ', '.join(f'{_seconds(stamp)} in {frame!r}'
                              for stamp, frame in sorted(extra)[:5])
            faults.append(f'{extra.total()} answers belong to no cloud, or are one too many: '
                          f'{named}')
        return faults

    def _summary(self) -> None:
        answers = self._answers
        times = [a.latency_ms for a in answers if a.latency_ms is not None]
        spent = (f', first {times[0]:.0f} ms, median {statistics.median(times):.0f} ms from cloud '
                 'to objects' if times else '')
        self._terminal.line()
        self._terminal.line(f'answered    {len(answers)} of {len(self._recording.clouds)} clouds'
                            + spent)
        picture = self._draw()
        if picture is not None:
            self._terminal.line(f'picture     {picture}')
        if self._weights.is_random:
            self._terminal.warning('The weights were random: the boxes in table and picture mean '
                                   'nothing. Real ones: --weights FOLDER.')

    def _draw(self) -> Path | None:
        """Draw the answered cloud with the most points; return the file."""
        from tt_perception.bevfusion.cloud import decode_cloud
        from tt_perception.picture import RANDOM_WEIGHTS, birds_eye
        from tt_perception.ros.bag import CLOUD_TYPE
        from tt_perception.ros.conversions import stamp_to_ns
        from tt_perception.sim.bag import read_truth, truth_path
        recording = self._recording
        answers = {a.stamp_ns: a for a in self._answers}
        drawn = [c for c in recording.clouds if c.stamp_ns in answers]
        if not drawn:
            return None
        best = max(drawn, key=lambda cloud: (cloud.num_points, cloud.stamp_ns))
        message = next(
            m for topic, m in messages(recording.bag, CLOUD_TYPE)
            if topic == recording.topic and stamp_to_ns(m.header.stamp) == best.stamp_ns)
        truth_file = truth_path(recording.bag)
        truth = read_truth(truth_file).get(best.stamp_ns) if truth_file.exists() else None
        path = self._out / 'birds_eye.png'
        birds_eye(decode_cloud(message, use_intensity=False).points,
                  answers[best.stamp_ns].detections, truth, path,
                  title=f'{recording.bag.name.replace("_", " ")}, cloud '
                        f'{recording.clouds.index(best) + 1} of {len(recording.clouds)}',
                  warning=RANDOM_WEIGHTS if self._weights.is_random else None)
        return path


# The terminal.

def _seconds(stamp_ns: int) -> str:
    return f'{stamp_ns // 10**9}.{stamp_ns % 10**9 // 10**6:03d}'


class _Table:
    """One line a cloud, as its answer comes."""

    def __init__(self, recording: Recording, terminal: Terminal):
        self._clouds = {c.stamp_ns: (i + 1, c) for i, c in enumerate(recording.clouds)}
        self._terminal = terminal
        self.num_rows = 0
        terminal.line()
        self._row('cloud', 'stamp (s)', 'points', 'objects',
                  [name.lower() for name in _COLUMNS], 'other', 'ms')

    def _row(self, cloud: str, stamp: str, points: str, objects: str, counts: Sequence[str],
             other: str, spent: str) -> None:
        classes = ''.join(f'{count:>{max(5, len(name) + 2)}}'
                          for count, name in zip(counts, _COLUMNS, strict=True))
        self._terminal.line(f'{cloud:>5}{stamp:>16}{points:>10}{objects:>9}{classes}{other:>7}'
                            f'{spent:>8}')

    def show(self, answers: Sequence[Answer]) -> None:
        """Print the answers that are new."""
        for answer in answers[self.num_rows:]:
            number, cloud = self._clouds.get(answer.stamp_ns, ('?', None))
            counts = Counter(answer.detections.label_names)
            num_objects = len(answer.detections)
            self._row(str(number), _seconds(answer.stamp_ns),
                      '?' if cloud is None else f'{cloud.num_points:,}', str(num_objects),
                      [str(counts[name]) for name in _COLUMNS],
                      str(num_objects - sum(counts[name] for name in _COLUMNS)),
                      '-' if answer.latency_ms is None else f'{answer.latency_ms:.0f}')
        self.num_rows = len(answers)

    def status(self, waited_s: float) -> None:
        """Show what is waited for, where the terminal can."""
        self._terminal.status(f'{self.num_rows} of {len(self._clouds)} clouds answered, '
                              f'waiting for the next: {waited_s:.0f} s')


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else 'no message'
