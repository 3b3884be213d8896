# SPDX-License-Identifier: Apache-2.0
"""Files of a Hugging Face repository, pinned by commit and by SHA-256."""

from __future__ import annotations

import hashlib
import logging
import re
import socket
import ssl
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tt_perception.runtime.errors import ArtifactError

_log = logging.getLogger(__name__)
_COMMIT = re.compile('[0-9a-f]{40}')
_ANSWER_TIMEOUT_S = 10.0


def fetch(repo_id: str, revision: str, sha256: Mapping[str, str], *,
          local_files_only: bool = False) -> dict[str, Path]:
    """Return local paths of the files of a pinned commit; what the cache lacks is downloaded.

    No connection is opened when the cache holds every file: a commit hash needs no look-up. The
    bytes of every file are hashed on every call: a cache may hold a damaged or half a file.

    :param repo_id: ``owner/name``.
    :param revision: the 40 hexadecimal digits of a commit; branches and tags can move.
    :param sha256: file name in the repository -> its SHA-256 in hexadecimal.
    :param local_files_only: never download, as with HF_HUB_OFFLINE set.
    :return: file name -> path in the cache of huggingface_hub.
    :raises ArtifactError: a file cannot be had, or its bytes are not the pinned ones.
    """
    if not _COMMIT.fullmatch(revision):
        raise ArtifactError(f'{repo_id}: found revision {revision!r}, '
                            'expected the 40 hexadecimal digits of a commit')
    paths = {name: _cached(repo_id, revision, name) for name in sha256}
    for name, path in paths.items():
        if path is not None:
            _verify(name, path, sha256[name])
    missing = [name for name, path in paths.items() if path is None]
    if missing:
        _refuse_offline(repo_id, revision, missing, local_files_only)
        _log.info('fetching %s of %s at %s', ', '.join(missing), repo_id, revision)
    for name in missing:
        paths[name] = _download(repo_id, revision, name)
        _verify(name, paths[name], sha256[name])
    return paths


def _sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, 'rb') as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _verify(name: str, path: Path, expected: str) -> None:
    try:
        found = _sha256(path)
    except OSError as error:
        raise ArtifactError(f'{path}: cannot be read: {error.strerror}') from None
    if found != expected:
        raise ArtifactError(f'{name}: found SHA-256 {found}, expected {expected}; '
                            f'delete {path.resolve()} to have it fetched again')


def _cached(repo_id: str, revision: str, name: str) -> Path | None:
    path = _snapshots(repo_id) / revision / name
    return path if path.is_file() else None


def _snapshots(repo_id: str) -> Path:
    """Return the folder with one folder a commit, in the layout of huggingface_hub's cache."""
    from huggingface_hub import constants
    return (Path(constants.HF_HUB_CACHE) / f'models--{repo_id.replace("/", "--")}' / 'snapshots')


def _refuse_offline(repo_id: str, revision: str, missing: Sequence[str],
                    local_files_only: bool) -> None:
    from huggingface_hub import constants
    if local_files_only or constants.HF_HUB_OFFLINE:
        why = 'HF_HUB_OFFLINE is set' if constants.HF_HUB_OFFLINE else 'downloads are not allowed'
        raise ArtifactError(f'{", ".join(missing)}: not in the cache and {why}; '
                            + _wanted_and_present(repo_id, revision))


def _download(repo_id: str, revision: str, name: str) -> Path:
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.errors import HTTPError

    url = hf_hub_url(repo_id, name, revision=revision)
    try:
        # One short question first: without an answer to it, hf_hub_download repeats its own
        # for minutes.
        get_hf_file_metadata(url, timeout=_ANSWER_TIMEOUT_S)
        return Path(hf_hub_download(repo_id, name, revision=revision))
    except (HTTPError, OSError, ValueError, RuntimeError) as error:
        raise ArtifactError(f'{name}: {_reason(error, url)}; '
                            + _wanted_and_present(repo_id, revision)) from error


def _wanted_and_present(repo_id: str, revision: str) -> str:
    folder = _snapshots(repo_id)
    present = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
    return (f'wanted revision {revision} of {repo_id}, cache {folder} has '
            + (', '.join(present) or 'none'))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and those that led to it, outermost first."""
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _reason(error: BaseException, url: str) -> str:
    """Say in a few words why a download failed."""
    host = url.split('/')[2]
    for cause in _chain(error):
        status = getattr(getattr(cause, 'response', None), 'status_code', None)
        if status == 401:
            return (f'{host} wants a login (HTTP 401): there is no such public repository, or its '
                    'token is missing or wrong (hf auth login, or HF_TOKEN)')
        if status == 403:
            return (f'{host} refuses access (HTTP 403): accept the terms on the page of the '
                    'repository with the account of your token')
        if status == 404:
            return f'{host} has no such file, revision or repository (HTTP 404)'
        if status is not None:
            return f'{host} answers HTTP {status}'
        if isinstance(cause, socket.gaierror):
            return f'the name {host} cannot be resolved, there is no DNS or no network'
        if isinstance(cause, ConnectionRefusedError):
            return f'{host} refuses the connection'
        if isinstance(cause, ssl.SSLError):
            return f'no secure connection to {host}: {cause.reason}'
        if isinstance(cause, TimeoutError) or 'Timeout' in type(cause).__name__:
            return f'{host} does not answer'
    return f'download from {host} failed: {" ".join(str(error).split())}'
