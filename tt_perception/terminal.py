# SPDX-License-Identifier: Apache-2.0
"""What a program of this package says to the person who has started it."""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Iterator


class Terminal:
    """Lines on stdout; on a real terminal also one line that changes."""

    def __init__(self) -> None:
        self._is_live = sys.stdout.isatty()

    def line(self, text: str = '') -> None:
        """Print a line that stays."""
        print(('\r\x1b[K' if self._is_live else '') + text, flush=True)

    def warning(self, text: str) -> None:
        """Print a line that cannot be overlooked."""
        frame = '*' * (len(text) + 4)
        for part in (frame, f'* {text} *', frame):
            self.line(f'\x1b[1;31m{part}\x1b[0m' if self._is_live else part)

    def status(self, text: str) -> None:
        """Show a text that the next one replaces."""
        if self._is_live:
            fitting = text[:shutil.get_terminal_size().columns - 1]
            print(f'\r\x1b[K{fitting}', end='', flush=True)

    @contextlib.contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        """Show that something takes its time, and for how long it already does."""
        done = threading.Event()

        def count() -> None:
            begin_s = time.monotonic()
            while not done.wait(1.0):
                self.status(f'{text}: {time.monotonic() - begin_s:.0f} s')

        self.status(text)
        if not self._is_live:
            self.line(f'{text} ...')
        thread = threading.Thread(target=count, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            self.status('')
