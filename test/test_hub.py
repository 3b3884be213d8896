# SPDX-License-Identifier: Apache-2.0
"""Pinned files from the Hub: cache first, every byte checked, every failure with its own words."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tt_perception.runtime import hub
from tt_perception.runtime.errors import ArtifactError

pytest.importorskip('huggingface_hub')
from huggingface_hub import close_session, constants  # noqa: E402

REPO = 'owner/name'
REVISION = '0123456789abcdef0123456789abcdef01234567'
OTHER_REVISION = 'f' * 40
CONTENT = {'network.onnx': b'weights' * 1000, 'parameters.yaml': b'a: 1\n'}
SHA256 = {name: hashlib.sha256(data).hexdigest() for name, data in CONTENT.items()}


def fill(cache: Path, content=CONTENT, revision=REVISION) -> Path:
    """Lay files out as huggingface_hub does after a download by commit: without refs/."""
    repo = cache / 'models--owner--name'
    snapshot = repo / 'snapshots' / revision
    snapshot.mkdir(parents=True)
    (repo / 'blobs').mkdir(exist_ok=True)
    for name, data in content.items():
        blob = repo / 'blobs' / hashlib.sha256(data).hexdigest()
        blob.write_bytes(data)
        (snapshot / name).symlink_to(Path('../../blobs') / blob.name)
    return snapshot


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / 'hub'
    folder.mkdir()
    monkeypatch.setattr(constants, 'HF_HUB_CACHE', str(folder))
    monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', False)
    monkeypatch.setattr(constants, 'HF_HUB_DISABLE_TELEMETRY', True)
    return folder


@pytest.fixture
def no_network(monkeypatch):
    """Any attempt to reach the network fails the test."""
    def refuse(*args, **kwargs):
        raise AssertionError(f'a connection was tried: {args}')

    for name in ('connect', 'connect_ex', 'sendto'):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, 'create_connection', refuse)
    monkeypatch.setattr(socket, 'getaddrinfo', refuse)


class Server(ThreadingHTTPServer):
    """A Hub on this machine that can misbehave."""

    daemon_threads = True

    def __init__(self):
        super().__init__(('127.0.0.1', 0), Handler)
        self.content = dict(CONTENT)
        self.status = 200
        self.error_code = None
        self.sent = None  # most bytes of a body that are sent
        self.silent = threading.Event()
        self.requests = []

    @property
    def url(self):
        return f'http://127.0.0.1:{self.server_address[1]}'


class Handler(BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'

    def do_HEAD(self):
        self.answer(with_body=False)

    def do_GET(self):
        self.answer(with_body=True)

    def answer(self, with_body):
        server = self.server
        server.requests.append((self.command, self.path))
        if server.silent.is_set():
            time.sleep(3)
            self.close_connection = True
            return
        prefix, _, name = self.path.rpartition('/')
        data = server.content.get(name, b'')
        status = server.status
        if prefix != f'/{REPO}/resolve/{REVISION}' or name not in server.content:
            status, server.error_code = 404, server.error_code or 'EntryNotFound'
        self.send_response(status)
        if status == 200:
            self.send_header('X-Repo-Commit', REVISION)
            self.send_header('ETag', f'"{hashlib.sha256(data).hexdigest()}"')
        else:
            data = b'no'
            if server.error_code:
                self.send_header('X-Error-Code', server.error_code)
        self.send_header('Content-Length', str(len(data)))
        self.end_headers()
        if with_body:
            self.wfile.write(data[:server.sent])
            self.close_connection = server.sent is not None

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    with Server() as server:
        threading.Thread(target=server.serve_forever, kwargs={'poll_interval': 0.01},
                         daemon=True).start()
        use_endpoint(monkeypatch, server.url)
        yield server
        server.shutdown()


def use_endpoint(monkeypatch, url):
    monkeypatch.setenv('NO_PROXY', '*')
    monkeypatch.setattr(constants, 'ENDPOINT', url)
    monkeypatch.setattr(constants, 'HUGGINGFACE_CO_URL_TEMPLATE',
                        url + '/{repo_id}/resolve/{revision}/{filename}')
    close_session()


def fetch(**options):
    return hub.fetch(REPO, REVISION, SHA256, **options)


def refusal(**options):
    """Return the message with which the files are refused, and check its form."""
    begin = time.monotonic()
    with pytest.raises(ArtifactError) as caught:
        fetch(**options)
    assert time.monotonic() - begin < 10
    message = str(caught.value)
    assert '\n' not in message
    return message


# Cache

def test_warm_cache_opens_no_connection(cache, no_network):
    snapshot = fill(cache)
    assert fetch() == {name: snapshot / name for name in CONTENT}


def test_warm_cache_works_offline(cache, no_network, monkeypatch):
    monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', True)
    fill(cache)
    assert fetch()['network.onnx'].read_bytes() == CONTENT['network.onnx']


def test_offline_names_wanted_and_present_revisions(cache, no_network, monkeypatch):
    monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', True)
    fill(cache, revision=OTHER_REVISION)
    message = refusal()
    assert message.startswith('network.onnx, parameters.yaml: not in the cache and '
                              'HF_HUB_OFFLINE is set; ')
    assert f'wanted revision {REVISION} of {REPO}' in message
    assert message.endswith(f'has {OTHER_REVISION}')


def test_local_files_only_is_offline(cache, no_network):
    assert 'not in the cache and downloads are not allowed' in refusal(local_files_only=True)
    fill(cache)
    assert len(fetch(local_files_only=True)) == 2


def test_a_missing_file_is_named(cache, no_network, monkeypatch):
    monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', True)
    (fill(cache) / 'parameters.yaml').unlink()
    assert refusal().startswith('parameters.yaml: not in the cache')


def test_an_interrupted_download_counts_as_missing(cache, no_network, monkeypatch):
    """The link is there, the blob is not."""
    monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', True)
    (fill(cache) / 'network.onnx').resolve().unlink()
    assert refusal().startswith('network.onnx: not in the cache')


@pytest.mark.parametrize('damage', [
    lambda data: data[:100] + bytes([data[100] ^ 1]) + data[101:], lambda data: data[:-1],
    lambda data: b''], ids=['one bit', 'one byte lost', 'empty'])
def test_a_damaged_file_in_the_cache_is_refused_with_both_hashes(cache, no_network, damage):
    blob = (fill(cache) / 'network.onnx').resolve()
    blob.write_bytes(damage(CONTENT['network.onnx']))
    found = hashlib.sha256(blob.read_bytes()).hexdigest()
    message = refusal()
    assert message == (f'network.onnx: found SHA-256 {found}, expected {SHA256["network.onnx"]}; '
                       f'delete {blob} to have it fetched again')


def test_a_name_that_can_move_is_refused(cache, no_network):
    for revision in ('main', 'v2.0', REVISION[:39], REVISION.upper()):
        with pytest.raises(ArtifactError, match='expected the 40 hexadecimal digits of a commit'):
            hub.fetch(REPO, revision, SHA256)


# Download

def test_missing_files_are_downloaded_once(cache, server):
    fill(cache, {'parameters.yaml': CONTENT['parameters.yaml']})
    paths = fetch()
    assert {name: path.read_bytes() for name, path in paths.items()} == CONTENT
    assert {path.rpartition('/')[2] for _, path in server.requests} == {'network.onnx'}
    server.requests.clear()
    assert fetch() == paths
    assert server.requests == []


def test_a_damaged_file_is_fetched_again_once_it_is_deleted(cache, server):
    blob = fetch()['network.onnx'].resolve()
    blob.write_bytes(b'bit rot')
    blob_to_delete = Path(refusal().split('delete ')[1].split(' to have')[0])
    blob_to_delete.unlink()
    assert fetch()['network.onnx'].read_bytes() == CONTENT['network.onnx']


def test_wrong_bytes_from_the_server_are_refused_with_both_hashes(cache, server):
    server.content['network.onnx'] = b'other bytes'
    message = refusal()
    assert message.startswith('network.onnx: found SHA-256 '
                              + hashlib.sha256(b'other bytes').hexdigest())
    assert SHA256['network.onnx'] in message


def test_half_a_download_is_refused(cache, server, monkeypatch):
    monkeypatch.setattr('huggingface_hub.file_download.time.sleep', lambda seconds: None)
    server.sent = 500
    assert refusal().startswith('network.onnx: ')
    assert not list(cache.glob('**/snapshots/*/network.onnx'))
    server.sent = None
    assert len(fetch()) == 2


def test_each_failure_has_its_own_words(cache, server, monkeypatch):
    host = server.url.split('/')[2]
    messages = {}

    def note(name, expected):
        messages[name] = refusal()
        assert messages[name].startswith('network.onnx: '), messages[name]
        assert expected in messages[name]
        assert f'wanted revision {REVISION} of {REPO}' in messages[name] or name == 'offline'

    for status, code, expected in (
            (401, 'RepoNotFound', f'{host} wants a login (HTTP 401)'),
            (401, None, f'{host} wants a login (HTTP 401)'),
            (403, 'GatedRepo', f'{host} refuses access (HTTP 403)'),
            (404, 'EntryNotFound', f'{host} has no such file, revision or repository (HTTP 404)'),
            (404, 'RevisionNotFound', f'{host} has no such file, revision or repository'),
            (503, None, f'{host} answers HTTP 503')):
        server.status, server.error_code = status, code
        note(f'{status} {code}', expected)

    server.silent.set()
    monkeypatch.setattr(hub, '_ANSWER_TIMEOUT_S', 0.2)
    note('silence', f'{host} does not answer')

    with socket.socket() as unused:
        unused.bind(('127.0.0.1', 0))
        port = unused.getsockname()[1]
    use_endpoint(monkeypatch, f'http://127.0.0.1:{port}')
    note('refused', f'127.0.0.1:{port} refuses the connection')

    def no_name(host, *args, **kwargs):
        raise socket.gaierror(socket.EAI_NONAME, 'Name or service not known')

    use_endpoint(monkeypatch, 'http://hub.invalid')
    monkeypatch.setattr(socket, 'getaddrinfo', no_name)
    note('dns', 'the name hub.invalid cannot be resolved')
    monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', True)
    messages['offline'] = refusal()
    assert len({m.split(';')[0] for m in messages.values()}) == 8


def test_a_server_that_is_no_hub_is_refused(cache, server, monkeypatch):
    monkeypatch.setattr(Handler, 'send_header', lambda self, name, value: None if 'Commit' in name
                        else BaseHTTPRequestHandler.send_header(self, name, value))
    assert 'failed' in refusal()


def test_environment_of_the_user_is_obeyed(tmp_path, server):
    """HF_ENDPOINT, HF_HUB_CACHE and HF_HUB_OFFLINE, in a process of its own."""
    code = ('from tt_perception.runtime.hub import fetch\n'
            f'print(*fetch({REPO!r}, {REVISION!r}, {SHA256!r}).values(), sep="\\n")')
    environment = {**os.environ, 'HF_HUB_CACHE': str(tmp_path), 'HF_ENDPOINT': server.url,
                   'NO_PROXY': '*', 'HF_HUB_OFFLINE': '0', 'HF_HUB_DISABLE_TELEMETRY': '1'}

    def run(**changes):
        return subprocess.run([sys.executable, '-c', code], env={**environment, **changes},
                              capture_output=True, text=True, timeout=60)

    first = run()
    assert first.returncode == 0, first.stderr
    assert [Path(p).read_bytes() for p in first.stdout.split()] == list(CONTENT.values())
    offline = run(HF_HUB_OFFLINE='1', HF_ENDPOINT='http://127.0.0.1:9')
    assert offline.stdout == first.stdout, offline.stderr
