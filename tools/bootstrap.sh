#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Makes .venv ready for this checkout: finds a Python, and leaves the rest to bootstrap.py.
# Takes well under a second when nothing has changed.
set -eu
cd -- "$(dirname -- "$0")/.."

# The Python of an environment with ROS 2 wheels hands this to its children. It would keep our own
# Python from finding its libraries.
if [ -n "${_ROS_WHEELS_BOOTSTRAP_COMPLETE:-}" ]; then
  unset _ROS_WHEELS_BOOTSTRAP_COMPLETE LD_LIBRARY_PATH
fi
unset PYTHONHOME
if [ -z "${AMENT_PREFIX_PATH:-}" ]; then
  unset PYTHONPATH
fi

if [ -x .venv/bin/python ] && .venv/bin/python -I -S tools/bootstrap.py --check 2>/dev/null; then
  exit 0
fi

# usable NAME VERSIONS [MODULE]: prints the interpreter behind NAME (of a virtual environment, the
# one below it) if it starts, has one of the versions, and can import the module.
usable() {
  found=$("$1" -c '
import os, sys
print(sys.executable if sys.prefix == sys.base_prefix else
      os.path.join(sys.base_prefix, "bin", "python%d.%d" % sys.version_info[:2]))
' 2>/dev/null) || return 1
  "$found" -c '
import importlib, sys
if "%d.%d" % sys.version_info[:2] not in sys.argv[1].split():
    sys.exit(1)
for name in sys.argv[2:]:
    importlib.import_module(name)
' "$2" ${3:+"$3"} >/dev/null 2>&1 && printf '%s\n' "$found"
}

# first_usable VERSIONS NAME...: as above, for the first of several names that will do.
first_usable() {
  versions=$1
  shift
  for name in "$@"; do
    usable "$name" "$versions" && return
  done
  return 1
}

all='3.12 3.10 3.11 3.13'
pyenv=${PYENV_ROOT:-$HOME/.pyenv}/versions
if [ -n "${AMENT_PREFIX_PATH:-}" ]; then
  python=$(usable python3 "$all" rclpy) || {
    echo 'A ROS 2 environment is sourced (AMENT_PREFIX_PATH is set), but python3 cannot import' \
      'rclpy from it: repair it, or start again in a shell where none is sourced.' >&2
    exit 1
  }
elif python=$(first_usable '3.12 3.10' python3.12 python3.10 \
  "$pyenv"/3.12*/bin/python3 "$pyenv"/3.10*/bin/python3); then
  :
elif uv --version >/dev/null 2>&1 && {
  UV_PYTHON_INSTALL_DIR=${UV_PYTHON_INSTALL_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/tt_perception/python}
  export UV_PYTHON_INSTALL_DIR
  python=$(uv python find --managed-python --no-python-downloads 3.12 2>/dev/null) || {
    echo 'No Python 3.12 or 3.10 here; asking uv for 3.12 ...'
    uv python install --no-bin 3.12 && python=$(uv python find --managed-python 3.12)
  }
}; then
  :
elif python=$(first_usable "$all" python3 python3.11 python3.13); then
  :
elif [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null && ! command -v python3 >/dev/null; then
  echo 'No Python here; installing the one of this system with apt-get ...'
  apt-get -qq update
  apt-get -qq install -y --no-install-recommends python3 python3-venv >/dev/null
  python=$(usable python3 "$all")
else
  echo 'No usable Python found. Needed is 3.12 or 3.10 (or 3.11 or 3.13, without ttnn):' \
    'for example, apt-get install python3 python3-venv python3-dev g++' >&2
  exit 1
fi
exec "$python" tools/bootstrap.py
