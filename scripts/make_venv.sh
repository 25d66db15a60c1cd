#!/bin/sh
# Make the virtual environment named by $1 with the first Python >= 3.11 that can make one.
set -eu
target=$1

usable() {
    command -v "$1" >/dev/null 2>&1 && "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

# One that works is kept, whoever made it: `make run` must never throw away somebody's environment.
if [ -e "$target/pyvenv.cfg" ] && usable "$target/bin/python" && "$target/bin/python" -m pip --version >/dev/null 2>&1; then
    echo "Using $target with $("$target/bin/python" --version)"
    exit 0
fi

found=
for python in ${PYTHON:-} python3 python3.13 python3.12 python3.11 python3.14; do
    if usable "$python"; then
        found=$python
        break
    fi
done
if [ -z "$found" ]; then
    echo "Coread needs Python 3.11 or newer; python3 here is: $(python3 --version 2>&1 || true)." >&2
    echo "Install one (on Debian or Ubuntu: apt install python3 python3-venv) or name it: make run PYTHON=/path/to/python3.12" >&2
    exit 1
fi
if ! "$found" -c 'import ensurepip, venv' 2>/dev/null; then
    version=$("$found" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    echo "$found (Python $version) cannot make virtual environments: its venv module is not installed." >&2
    echo "On Debian or Ubuntu: apt install python$version-venv" >&2
    exit 1
fi
echo "Making $target with $("$found" --version)"
"$found" -m venv --clear "$target"
