# Sourced by test.sh and report.sh: finds a Python, makes the environment, and sets PYTHON and DEVICE.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." >/dev/null && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

say() { printf 'jaxattn: %s\n' "$*" >&2; }
die() {
  say "$@"
  exit 3
}

# Every place where a Python may be, best first, one path a line.
candidates() {
  local name
  for name in python3.12 python3.13 python3.14 python3 python; do type -Pa "$name"; done
  ls -d "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.*/bin/python3 2>/dev/null
  ls -d "${UV_PYTHON_INSTALL_DIR:-${XDG_DATA_HOME:-$HOME/.local/share}/uv/python}"/cpython-3.*/bin/python3 2>/dev/null
  if type -P uv >/dev/null; then uv python find --no-project '>=3.12' 2>/dev/null; fi
}

recent() { "$1" -c 'import sys; raise SystemExit(sys.version_info < (3, 12))' >/dev/null 2>&1; }

find_python() {
  local candidate found="" incomplete=""
  while read -r candidate; do
    recent "$candidate" || continue
    if "$candidate" -c 'import ensurepip, venv' >/dev/null 2>&1; then
      found=$candidate
      break
    fi
    incomplete=$candidate
  done < <(candidates)
  if [ -z "$found" ] && [ -n "$incomplete" ]; then
    die "$incomplete is recent enough but cannot make environments;" \
      "install its venv module (Debian, Ubuntu: apt install python3-venv)"
  fi
  [ -n "$found" ] || die "needs Python 3.12 or newer and found none on PATH, under pyenv or uv; install one" \
    "(pyenv install 3.12, or uv python install 3.12), or name one with --python PATH"
  printf '%s\n' "$found"
}

# cuda13, cuda12 or cpu, from the GPU driver.
find_device() {
  local driver=""
  if [ "$(uname -s)" = Linux ] && type -P nvidia-smi >/dev/null; then
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1)
  fi
  case ${driver%%.*} in
    '' | *[!0-9]*) echo cpu ;;
    *) if [ "${driver%%.*}" -ge 580 ]; then
      echo cuda13
    elif [ "${driver%%.*}" -ge 525 ]; then
      echo cuda12
    else
      say "the GPU driver $driver is older than 525, which CUDA 12 needs; using the CPU"
      echo cpu
    fi ;;
  esac
}

works() { recent "$1/bin/python" && "$1/bin/python" -m pip --version >/dev/null 2>&1; }

# Without PYTHONPATH: pip would take what lies there for installed. Python compiles what is imported, a small part.
pip_install() {
  env -u PYTHONPATH "$venv/bin/python" -m pip install -q --disable-pip-version-check --no-input --no-compile "$@"
}

# fill NAME: install into $venv
fill() {
  local constraints=$root/constraints.txt compile=$root/requirements/compile-cuda13.txt extras=test
  [ "$DEVICE" = cpu ] || extras=test,$DEVICE
  case $1 in
    cuda12) compile=$root/requirements/compile-cuda12.txt ;;
    newest-jax)
      constraints=$venv/constraints.txt
      grep -vE '^(jax|jaxlib|jax-cuda.*)==' "$root/constraints.txt" >"$constraints"
      pip_install -c "$constraints" --upgrade 'jax>=0.12,<0.13' || return
      "$venv/bin/python" -m pip freeze | sed -nE 's/^jax==(.*)/jax==\1\njax-cuda13-plugin==\1\njax-cuda13-pjrt==\1/p' \
        >>"$constraints"
      ;;
  esac
  pip_install -c "$constraints" -e "$root[$extras]" || return
  if [ "$DEVICE" = cpu ] && [ "$(uname -s)" = Linux ] && [ -z "${no_compiler:-}" ]; then
    pip_install -c "$constraints" --no-deps -r "$compile" || return
  fi
  (cd / && env -u PYTHONPATH "$venv/bin/python" -c 'import flax, jax, jaxattn, pytest')
}

# use_environment NAME: makes or updates .venv (default) or .venv-NAME (cuda12, newest-jax) unless it is complete.
use_environment() {
  local name=$1 venv=$root/.venv key
  [ "$name" = default ] || venv=$root/.venv-$name
  DEVICE=cpu
  [ "$name" != default ] || DEVICE=$(find_device)
  keep_bytecode "$venv/bytecode"
  key="$DEVICE $(cat "$root"/{pyproject.toml,constraints.txt,requirements/*.txt,scripts/_env.sh} | cksum) $root"
  PYTHON=$venv/bin/python
  state() { cat "$venv/.jaxattn" 2>/dev/null; }
  complete() {
    case $(state) in
      "$key") ;;
      "$key, no compiler") [ -n "${no_compiler:-}" ] || return 1 ;;
      *) return 1 ;;
    esac
    recent "$PYTHON"
  }

  if ! complete; then
    if type -P flock >/dev/null; then
      exec 9>"$root/.venv.lock"
      flock 9
    fi
    complete || build
    exec 9>&-
  fi
  keep_programs "$venv/compiled"
}

# keep_bytecode FOLDER: what Python compiled serves the next process, also where it may write nothing beside sources.
keep_bytecode() {
  export PYTHONPYCACHEPREFIX="${PYTHONPYCACHEPREFIX:-$1}"
  unset PYTHONDONTWRITEBYTECODE
}

# keep_programs FOLDER: compiled programs serve the next process.
keep_programs() {
  export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$1}"
  export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1
  [ "$DEVICE" = cpu ] || return 0
  export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"
}

build() {
  local old python started=$SECONDS
  old=$(state)
  # An environment for another device, or one whose making was interrupted, is made anew.
  if works "$venv" && { [ -z "$old" ] || [ "${old%% *}" = "$DEVICE" ]; }; then
    say "bringing ${venv#"$root"/} up to date ($DEVICE)"
    echo unfinished >"$venv/.jaxattn"
    if ! fill "$name"; then
      if [ -n "$old" ]; then printf '%s\n' "$old" >"$venv/.jaxattn"; else rm "$venv/.jaxattn"; fi
      die "installing the packages failed (see above); with a network connection, remove $venv and try again"
    fi
  else
    python=$(find_python) || exit 3
    say "making ${venv#"$root"/} with $("$python" --version 2>&1) ($DEVICE); this takes a few minutes, once"
    rm -rf "$venv"
    mkdir "$venv"
    echo unfinished >"$venv/.jaxattn"
    "$python" -m venv "$venv" || die "$python could not make an environment in $venv"
    fill "$name" || die "installing the packages failed (see above); the first time needs a network connection"
  fi
  printf '%s\n' "$key${no_compiler:+, no compiler}" >"$venv/.jaxattn"
  say "${venv#"$root"/} is ready after $((SECONDS - started)) s"
}

# use_interpreter PYTHON: takes the interpreter as it is and installs nothing.
use_interpreter() {
  recent "$1" || die "--python must name a Python 3.12 or newer, got $1"
  PYTHON=$1
  "$PYTHON" -c 'import flax, jax, safetensors' || die "$1 lacks packages that jaxattn needs (see above)"
  DEVICE=$(find_device)
  if [ "$DEVICE" = cpu ]; then export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"; fi
}
