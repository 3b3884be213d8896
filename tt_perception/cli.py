# SPDX-License-Identifier: Apache-2.0
"""The ``tt_perception`` command."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tt_perception import __version__
from tt_perception.bevfusion.config import MAX_VOXELS, load_yaml, parameter
from tt_perception.runtime.errors import ConfigError, PerceptionError
from tt_perception.runtime.threads import let_idle_threads_sleep

EXIT_FAILED = 1
_STDOUT = 'standard output'
_FLOAT = re.compile(r'[-+]?\d+(\.\d*)?[eE][-+]?\d+')  # YAML 1.1 takes 1e-1 for a text
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command; a user's mistake is one line on stderr and exit code 1."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if rest and not args.takes_ros_args:
        parser.error('unrecognized arguments: ' + ' '.join(rest))
    let_idle_threads_sleep()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a file name need not be UTF-8
        sys.stdout.reconfigure(errors='backslashreplace')
    logging.basicConfig(format='%(message)s')
    logging.getLogger('tt_perception').setLevel(logging.INFO)
    try:
        code = args.command(args, rest) if args.takes_ros_args else args.command(args)
        with _naming_stdout():
            sys.stdout.flush()  # at exit it would be too late to say that it fails
        return code
    except PerceptionError as error:
        print(f'tt_perception: {error}', file=sys.stderr)
        return EXIT_FAILED
    except ImportError as error:
        print(f'tt_perception: needs the package {error.name}, which is not installed; see the '
              'README', file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe, for example head, has had enough
        _close_stdout()
        return EXIT_FAILED
    except OSError as error:
        place = '' if error.filename is None else f'{error.filename}: '
        if error.filename in (None, _STDOUT):
            _close_stdout()
        print(f'tt_perception: {place}{error.strerror or error}', file=sys.stderr)
        return EXIT_FAILED


@contextlib.contextmanager
def _naming_stdout() -> Iterator[None]:
    """Let an error of stdout say where it is from."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, _STDOUT) from None


def _say(text: Any) -> None:
    with _naming_stdout():
        print(text)


def _close_stdout() -> None:
    """Close stdout, so that Python does not try to write the rest at exit."""
    with contextlib.suppress(OSError):
        sys.stdout.close()


def _whole(low: int, high: int) -> Callable[[str], int]:
    """Return a type of an argument: a whole number from ``low`` to ``high``."""
    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(
                f'found {text[:40]!r}, expected a whole number from {low} to {high}')
        return value
    return convert


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog='tt_perception', description=__doc__.splitlines()[0])
    parser.add_argument('--version', action='version', version=__version__)
    commands = parser.add_subparsers(metavar='COMMAND', required=True)

    def add(name: str, function, text: str, takes_ros_args: bool = False):
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(command=function, takes_ros_args=takes_ros_args)
        return sub

    demo = add('demo', _demo, 'play a simulated drive into the node and show what it detects')
    demo.add_argument('--bag', type=Path, help='play this rosbag2 instead of a simulated drive')
    demo.add_argument('--weights', help='artifact folder or .onnx file')
    demo.add_argument('--out', type=Path, default=Path('out/demo'), help='folder for the results')

    play = add('play', _play, 'play a rosbag2 (sqlite3 or mcap) over DDS, with /clock')
    play.add_argument('bag', type=Path)
    play.add_argument('--rate', type=float, default=1.0, help='speed, 1 is real time')
    play.add_argument('--loop', action='store_true', help='start again at the end')
    play.add_argument('--start-offset', type=float, default=0.0, help='seconds to skip')
    play.add_argument('--topics', nargs='+', help='only these topics')
    play.add_argument('--answer-topic', help='after each cloud, wait for the objects with its '
                      'stamp on this topic')
    play.add_argument('--cloud-topic', help='the clouds to be answered, if there are several '
                      'topics of them')
    play.add_argument('--answer-timeout', type=float, default=60.0, help='seconds to wait')

    detect = add('detect', _detect, 'detect objects in cloud files')
    detect.add_argument('files', nargs='+', type=Path, metavar='FILE',
                        help='.pcd, .bin, .npy or .npz')
    detect.add_argument('--weights', help='artifact folder or .onnx file')
    detect.add_argument('--backend', default='auto')
    detect.add_argument('--columns', type=lambda s: tuple(s.split(',')),
                        help='columns of the files, for example x,y,z,intensity,ring')
    detect.add_argument('--param', action='append', default=[], metavar='NAME=VALUE',
                        help='a parameter of the model, value in YAML; may be repeated')
    detect.add_argument('--json', action='store_true', help='one JSON object a file')
    detect.add_argument('--plot', type=Path, metavar='PNG',
                        help="bird's-eye picture; with several files, a number is added")

    run = add('run', _run, 'run a node, configured and activated by itself', takes_ros_args=True)
    run.add_argument('node', choices=('bevfusion',))

    bench = add('bench', _bench, 'time the stages beside their peers')
    bench.add_argument('what', choices=('host', 'cpu'))
    bench.add_argument('--voxels', type=_whole(1, MAX_VOXELS // 1_000), nargs='+',
                       help='thousands of voxels')
    bench.add_argument('--repeat', type=_whole(1, 10_000), default=20)
    bench.add_argument('--json', action='store_true')

    check = add('check', _check, 'count what the network costs on a card: each operation, its '
                'memory, and the time at the limits of the card')
    check.add_argument('--device', default='mock',
                       help='mock, which needs no card, or the id of a card')
    check.add_argument('--cloud', nargs='+', type=Path, default=[], metavar='FILE',
                       help='count these clouds too, beside a seeded one of 120,000 voxels')
    check.add_argument('--columns', type=lambda s: tuple(s.split(',')),
                       help='columns of the files, for example x,y,z,intensity,ring')
    check.add_argument('--weights', help='artifact folder or .onnx file')
    check.add_argument('--all', action='store_true', help='every operation, not the dearest only')
    check.add_argument('--json', action='store_true')

    make = add('make-artifact', _make_artifact,
               'write a full-size artifact with seeded random weights; it detects nothing real')
    make.add_argument('--seed', type=_whole(0, 2 ** 63 - 1), default=0)
    make.add_argument('folder', type=Path)

    info = add('info', _info, 'say what is installed and what can be used')
    info.add_argument('--json', action='store_true')
    return parser


def _demo(args: argparse.Namespace) -> int:
    from tt_perception.demo import run_demo
    return run_demo(args)


def _play(args: argparse.Namespace) -> int:
    from tt_perception.ros.bag import play
    report = play(args.bag, rate=args.rate, loop=args.loop, start_offset_s=args.start_offset,
                  topics=args.topics, answer_topic=args.answer_topic,
                  cloud_topic=args.cloud_topic, answer_timeout_s=args.answer_timeout)
    _say(f'{args.bag}: played ' + ', '.join(f'{topic} {count}' for topic, count
                                            in sorted(report.num_messages.items())))
    if not report.unanswered_ns:
        return 0
    print(f'tt_perception: {len(report.unanswered_ns)} clouds were not answered, the first of '
          f'stamp {report.unanswered_ns[0] / 1e9:.9f}', file=sys.stderr)
    return EXIT_FAILED


def _parse_parameters(settings: Sequence[str]) -> dict[str, Any]:
    values = {}
    for setting in settings:
        name, equals, text = setting.partition('=')
        if not equals:
            raise ConfigError(f'--param: found {setting!r}, expected NAME=VALUE')
        parameter(name)  # other names are keywords of the function that takes them
        try:
            values[name] = float(text) if _FLOAT.fullmatch(text) else load_yaml(text)
        except ValueError:
            raise ConfigError(f'--param {name}: found {text[:80]!r}, expected YAML') from None
    return values


def _detect(args: argparse.Namespace) -> int:
    from tt_perception import BEVFusion
    with BEVFusion.from_pretrained(args.weights, backend=args.backend,
                                   **_parse_parameters(args.param)) as model:
        failed = False
        for number, path in enumerate(args.files):
            try:
                detections = model(path, columns=args.columns)
            except PerceptionError as error:  # the other files are still of use
                text = str(error)
                named = text if text.startswith(str(path)) else f'{path}: {text}'
                print(f'tt_perception: {named}', file=sys.stderr)
                failed = True
                continue
            if args.json:
                _say(json.dumps({'file': str(path), **detections.to_dict()}))
            else:
                _print_detections(path, detections)
            if args.plot:
                _plot(args, number if len(args.files) > 1 else None, path, detections,
                      model.info['random_weights'])
    return EXIT_FAILED if failed else 0


def _check(args: argparse.Namespace) -> int:
    from tt_perception import check
    logging.getLogger('tt_perception.runtime').setLevel(logging.WARNING)  # the table says it all
    result = check.check(args.device, clouds=args.cloud, weights=args.weights,
                         columns=args.columns)
    lines = None if args.all else check.SHORT_TABLE
    _say(json.dumps(result) if args.json else check.table(result, lines))
    return 0


def _print_detections(path: Path, detections) -> None:
    _say(f'{path}: {len(detections)} objects, {detections.meta["num_points"]} points, '
         f'{detections.meta["num_voxels"]} voxels, {detections.timing_ms["total"]:.0f} ms')
    if len(detections):
        _say(f'  {"label":12}{"score":>6}{"x":>8}{"y":>8}{"z":>7}{"length":>8}{"width":>7}'
             f'{"height":>8}{"yaw":>7}   (m, rad)')
    for label, score, box in zip(detections.label_names, detections.scores,
                                 detections.boxes_xyzlwh_yaw, strict=True):
        x, y, z, length, width, height, yaw = box
        _say(f'  {label:12}{score:6.2f}{x:8.2f}{y:8.2f}{z:7.2f}{length:8.2f}{width:7.2f}'
             f'{height:8.2f}{yaw:7.2f}')


def _plot(args: argparse.Namespace, number: int | None, path: Path, detections,
          is_random: bool) -> None:
    from tt_perception.bevfusion.cloudfile import as_points
    from tt_perception.picture import RANDOM_WEIGHTS, birds_eye
    png = args.plot
    if number is not None:
        png = png.with_name(f'{png.stem}_{number}{png.suffix}')
    birds_eye(as_points(path, use_intensity=False, columns=args.columns).points, detections, None,
              png, title=path.name, warning=RANDOM_WEIGHTS if is_random else None)


def _run(args: argparse.Namespace, ros_args: Sequence[str]) -> int:
    from tt_perception.ros.bevfusion_node import main as node_main
    ros = [*ros_args] if '--ros-args' in ros_args else ['--ros-args', *ros_args]
    return node_main([*ros, '-p', 'autostart:=true'])


def _bench(args: argparse.Namespace) -> int:
    from tt_perception.bevfusion import bench
    sizes = {} if args.voxels is None else {'voxels': [n * 1_000 for n in args.voxels]}
    function = {'host': bench.bench_host, 'cpu': bench.bench_cpu}[args.what]
    result = function(repeat=args.repeat, **sizes)
    _say(json.dumps(result, indent=2) if args.json else bench.table(result))
    return 0


def _make_artifact(args: argparse.Namespace) -> int:
    from tt_perception.bevfusion.seeded import make_artifact
    for path in make_artifact(args.folder, seed=args.seed):
        _say(path)
    return 0


def _info(args: argparse.Namespace) -> int:
    from tt_perception.report import environment
    found = environment()
    if args.json:
        _say(json.dumps(found, indent=2))
    else:
        for name, value in found.items():
            _say(f'{name:26}{value}')
    return 0


if __name__ == '__main__':
    sys.exit(main())
