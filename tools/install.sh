#!/usr/bin/env bash
# Builds or updates the Python environment in .venv, with uv if it is installed and pip otherwise.
#
#   tools/install.sh run    what a server needs (requirements.lock)
#   tools/install.sh dev    also what tests and checks need, and the extras (requirements-dev.lock)
#
# PYTHON names the interpreter to use. Without it the first supported one on the path is used.
# The mark of an environment is written last. An environment without a mark is built again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

environment=.venv
in_it=$environment/bin/python
run_mark=$environment/.installed-run
dev_mark=$environment/.installed-dev
supported="3.13 3.12 3.11" # `requires-python` in pyproject.toml
any_supported=">=3.11,<3.14"

say() {
  echo "install: $*" >&2
}

fail() {
  say "$*"
  exit 1
}

version_of() {
  "$1" -c 'import platform; print(platform.python_version())' 2>/dev/null
}

is_supported() {
  local version
  version=$(version_of "$1") || return 1
  [[ " $supported " == *" ${version%.*} "* ]]
}

# uv brings its own tools. Debian's Python has them in a package of its own.
can_build() {
  [ -n "$uv" ] || "$1" -c 'import ensurepip, venv' 2>/dev/null
}

# Sets `python` to an interpreter that can build the environment.
find_python() {
  local candidate version unable= candidates=(python3 python3.13 python3.12 python3.11)
  [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
  for candidate in "${candidates[@]}"; do
    is_supported "$candidate" || continue
    if can_build "$candidate"; then
      python=$candidate
      return
    fi
    version=$(version_of "$candidate")
    unable=${unable:-${version%.*}}
  done
  version=$(version_of "${PYTHON:-python3}") || version=missing
  if [ -n "$unable" ]; then
    fail "Python $unable cannot build environments. Install its venv module" \
      "(Debian and Ubuntu: apt install python$unable-venv), or install uv. Nothing was changed."
  elif [ -n "$uv" ] && [ -z "${PYTHON:-}" ]; then
    say "Rekindle needs Python 3.11, 3.12 or 3.13, and python3 is $version. uv provides another"
    python=$any_supported
  else
    fail "Rekindle needs Python 3.11, 3.12 or 3.13, but ${PYTHON:-python3} is $version." \
      "Install one of them, or uv, which downloads one." \
      "If you have one elsewhere, name it: make install PYTHON=/path/to/python3.12." \
      "Nothing was changed."
  fi
}

# Whether there is a finished environment that still works, made with the Python that is asked for.
is_complete() {
  { [ -e $run_mark ] || [ -e $dev_mark ]; } && is_supported $in_it &&
    { [ -z "${PYTHON:-}" ] || [ "$(version_of "$PYTHON")" = "$(version_of $in_it)" ]; }
}

install_with_uv() {
  if [ -n "$is_new" ]; then
    "$uv" venv --quiet --clear --python "$python" $environment || {
      [ "$python" != "$any_supported" ] || fail "uv could not provide Python 3.11, 3.12 or 3.13." \
        "Check the network, or install one of them. Nothing was installed."
      return 1
    }
  fi
  "$uv" pip install --python $in_it --no-deps --require-hashes -r "$1" &&
    "$uv" pip install --quiet --python $in_it --no-deps --no-build-isolation --editable .
}

install_with_pip() {
  local pip=($in_it -m pip --disable-pip-version-check --no-input install --no-deps)
  if [ -n "$is_new" ] || ! $in_it -m pip --version >/dev/null 2>&1; then
    [ -n "$python" ] || find_python
    [ "$python" != "$any_supported" ] || return 1 # only uv has a Python that fits
    "$python" -m venv --clear $environment || return 1
  fi
  # Python compiles a module when it is first imported. Compiling all of them here takes longer.
  "${pip[@]}" --no-compile --require-hashes -r "$1" | show_progress "$(grep -c '^[a-z].*==' "$1")" &&
    "${pip[@]}" --quiet --no-build-isolation --editable .
}

# Turns what pip prints into one line that changes. In a log it is every tenth line.
show_progress() {
  local line name text count=0
  while IFS= read -r line; do
    case $line in
      Collecting* | Processing* | Requirement* | Ignoring*)
        count=$((count + 1))
        name=${line#Requirement already satisfied:}
        name=${name#* } # a name with its version, or the path of a file
        name=${name%%[ :]*}
        name=${name##*/}
        name=${name%%==*}
        text="package $count of $1: ${name%%-[0-9]*}"
        ;;
      Installing*) count=$1 text="unpacking $1 packages" ;;
      *) continue ;;
    esac
    if [ -t 2 ]; then
      printf '\r\033[Kinstall: %s' "$text" >&2
    elif [ $((count % 10)) = 0 ] || [ "$count" = "$1" ]; then
      say "$text"
    fi
  done
  [ ! -t 2 ] || echo >&2
}

level=${1:-run}
[ "$level" = run ] || [ "$level" = dev ] || fail "takes run or dev, not $level"
[ ! -e $dev_mark ] || level=dev # an update keeps what is installed
lock=requirements.lock
[ "$level" = run ] || lock=requirements-dev.lock
uv=$(command -v uv || true)
is_new= python=

if is_complete; then
  say "updating $environment from $lock"
else
  is_new=1
  find_python
  [ ! -e $environment ] || say "$environment is unfinished or belongs to another Python. It is built again"
  installer=pip
  [ -z "$uv" ] || installer=uv
  say "building $environment with ${python/#"$any_supported"/the Python of uv} and $installer from $lock"
fi
rm -f $run_mark $dev_mark
if [ -z "$uv" ] || ! install_with_uv $lock; then
  [ -z "$uv" ] || say "uv could not install the packages. Trying pip"
  install_with_pip $lock || fail "The packages could not be installed. The lines above say why." \
    "Then run the same command again."
fi
touch $run_mark
[ "$level" = run ] || touch $dev_mark
say "$environment is ready"
