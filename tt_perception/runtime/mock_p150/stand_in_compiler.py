# SPDX-License-Identifier: Apache-2.0
"""Stands where ttnn looks for its kernel compiler, for the mock device only.

It compiles nothing and links a stub kernel: the mock device never executes one. Beside it lie the
stub, the version to report, and a link to the linker.
"""

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
LINK = ['-melf32lriscv', '--emit-relocs', '-z', 'max-page-size=16', '-z', 'common-page-size=16']


def main(argv: list[str]) -> None:
    if argv == ['--version']:
        sys.stdout.write((HERE / 'version').read_text())
        return
    if '-o' not in argv:
        return
    out = argv[argv.index('-o') + 1]
    if '-MF' in argv:
        Path(argv[argv.index('-MF') + 1]).write_text(f'{out}:\n')
    if not out.endswith('.elf'):
        Path(out).write_bytes(b'')
        return
    symbols = [arg[len('-Wl,'):] for arg in argv if arg.startswith('-Wl,--just-symbols')]
    scripts = [arg for arg in argv if arg.startswith('-T')]
    linker = str(HERE / 'linker')
    os.execv(linker, [linker, *LINK, *symbols, *scripts, str(HERE / 'stub_kernel.o'), '-o', out])


if __name__ == '__main__':
    main(sys.argv[1:])
