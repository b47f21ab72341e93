#!/bin/sh
# create.sh PYTHON FOLDER COMMAND: a virtual environment for `make`, once PYTHON is known to be new enough. Of one that is
# too old pip would only say, after the environment is made, that it finds no package.
set -eu
python=$1 folder=$2 command=$3
needed=$(sed -n 's/^requires-python = ">=\(.*\)"/\1/p' "$(dirname "$0")/../pyproject.toml")

fail() {
    echo "error: $1" >&2
    exit 1
}

version() { # of an interpreter that runs, such as 3.11.7
    "$1" -c 'import platform; print(platform.python_version())' 2> /dev/null
}

another="choose another: $command PYTHON=python3.12"
found=$(version "$python") || fail "$python does not run; Python $needed or newer is needed, $another"
printf '%s\n' "$needed" "$found" | sort -C -V ||
    fail "$python is Python $found; Python $needed or newer is needed, $another"
# venv keeps the Python of an environment that is there.
if [ -e "$folder/pyvenv.cfg" ]; then
    made_by=$(version "$folder/bin/python") && made_by="Python $made_by" || made_by="a Python that no longer runs"
    case $made_by in
        "Python ${found%.*}".*) ;;
        *) fail "$folder was made by $made_by, $python is $found; remove it first: rm -r $folder" ;;
    esac
fi
exec "$python" -m venv "$folder"
