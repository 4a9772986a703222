#!/usr/bin/env bash
# Runs the tests on a fresh clone; makes .venv on first use.
set -uo pipefail

usage() {
  cat <<'TXT'
usage: scripts/test.sh [PART]... [OPTION]... [PYTEST ARGUMENT]...

Parts (without one: --tests; --all is the five of them):
  --tests           unit and contract tests; kernels are interpreted, or compiled where there is a GPU
  --parity          stored vLLM outputs against the references and kernels
  --aot             compile every kernel to sm_90a machine code, without a GPU
  --lint            ruff format, ruff check, generated tables up to date
  --types           pyright
Options:
  --captures DIR    more captures for --parity (repeatable)
  --share N         run about one in N of the parametrized cases and the first of every mechanism (CI: it has two processors)
  --jobs N          processes that share the tests (default: 2, with a GPU 1, which is then not shared)
  --setup-only      make the environment and stop
  --no-compiler     a new environment does without the CUDA compiler, which --aot alone needs
  --env NAME        default (.venv), newest-jax (.venv-newest-jax) or cuda12 (.venv-cuda12: --aot with CUDA 12)
  --python PATH     use this interpreter as it is, install nothing
Everything else goes to pytest; a test file or id among it replaces the folder of the part.
TXT
}

source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

parts=() pytest_args=() captures=() env=default interpreter="" jobs="" setup_only="" no_compiler="" selected=""
while [ $# -gt 0 ]; do
  case $1 in
    --tests | --parity | --aot | --lint | --types) parts+=("${1#--}") ;;
    --all) parts=(lint types tests aot parity) ;;
    --captures | --env | --python | --share | --jobs)
      [ $# -ge 2 ] || die "$1 needs a value; see scripts/test.sh --help"
      case $1 in
        --captures) captures+=(--captures "$2") ;;
        --env) env=$2 ;;
        --share) export TEST_SHARE=$2 ;;
        --jobs) jobs=$2 ;;
        --python) interpreter=$2 ;;
      esac
      shift
      ;;
    --setup-only) setup_only=yes ;;
    --no-compiler) no_compiler=yes ;;
    -h | --help)
      usage
      exit
      ;;
    *)
      pytest_args+=("$1")
      if [ -e "${1%%::*}" ] || [ -e "$root/${1%%::*}" ]; then selected=yes; fi
      ;;
  esac
  shift
done
case $jobs in *[!0-9]* | 0) die "--jobs must be a positive number, got $jobs" ;; esac
case $env in default | newest-jax | cuda12) ;; *) die "--env must be default, newest-jax or cuda12, got $env" ;; esac
if [ ${#parts[@]} -eq 0 ]; then
  if [ ${#captures[@]} -gt 0 ]; then parts=(parity); else parts=(tests); fi
fi

if [ -n "$interpreter" ]; then use_interpreter "$interpreter"; else use_environment "$env"; fi
if [ -n "$setup_only" ]; then
  say "the environment is ready: $PYTHON ($DEVICE)"
  exit
fi
cd "$root" || exit 3

log=$(mktemp)
types_log=$(mktemp)
trap 'rm -f "$log" "$types_log"' EXIT
results=() failed_parts=0 passed=0 failed=0 skipped=0

# finish PART CODE TEXT
finish() {
  results+=("$(printf '%-7s %s' "$1" "$3")")
  [ "$2" -eq 0 ] || failed_parts=$((failed_parts + 1))
}

# step ARGUMENT...: runs Python and remembers a failure in $code
step() {
  printf '\n== python %s\n' "$*"
  "$PYTHON" "$@" || code=1
}

# count WORD: how many of them pytest's last line names
count() {
  local n
  n=$(sed -nE "s/(.*[^0-9])?([0-9]+) ($1).*/\2/p" <<<"$summary")
  echo "${n:-0}"
}

# What one process compiled in a part serves the others in the next.
pool_programs() {
  local from to
  for from in "${JAX_COMPILATION_CACHE_DIR:-/nowhere}"/gw*; do
    for to in "${from%/*}"/gw*; do
      [ ! -d "$from" ] || [ "$from" = "$to" ] || cp -rln "$from/." "$to" 2>/dev/null
    done
  done
}

# find_marked NAME: the files whose tests have that mark, in $marked; to collect all of the others takes longer
find_marked() {
  marked=()
  while IFS= read -r file; do marked+=("$file"); done < <(grep -rl --include='test_*.py' "mark\.$1" tests | sort)
}

run_pytest() {
  local part=$1 where=$2 args=() code summary
  shift 2
  args=("$@" ${pytest_args[@]+"${pytest_args[@]}"})
  [ -n "$selected" ] || args+=("$where")
  pool_programs
  printf '\n== pytest %s\n' "${args[*]}"
  "$PYTHON" -m pytest "${args[@]}" 2>&1 | tee "$log"
  code=${PIPESTATUS[0]}
  summary=$(tail -n 1 "$log")
  passed=$((passed + $(count passed)))
  failed=$((failed + $(count failed) + $(count error)))
  skipped=$((skipped + $(count skipped)))
  finish "$part" "$code" "$summary"
}

# Two interpreted kernels at a time; most of the time on a GPU goes into compiling, which several processes share.
parallel=()
if [ -z "$jobs" ] && [ "$DEVICE" = cpu ] && [ ${#pytest_args[@]} -eq 0 ] && "$PYTHON" -c 'import xdist' 2>/dev/null; then
  jobs=2
fi
if [ "${jobs:-1}" != 1 ]; then
  parallel=(-n "$jobs" --dist loadgroup --no-loadscope-reorder)
  export XLA_PYTHON_CLIENT_PREALLOCATE="${XLA_PYTHON_CLIENT_PREALLOCATE:-false}"
fi

# Pyright, on one processor, while the other one lints.
types() { "$PYTHON" -m pyright --pythonpath "$PYTHON"; }
types_job=""
case " ${parts[*]} " in *" lint types "*)
  types >"$types_log" 2>&1 &
  types_job=$!
  ;;
esac

for part in "${parts[@]}"; do
  code=0
  case $part in
    lint)
      step -m ruff format --check .
      step -m ruff check .
      step scripts/support_table.py --check
      step scripts/evidence.py --check
      step scripts/timing_table.py --check
      step scripts/v4_pictures.py --check
      finish lint $code "$([ $code -eq 0 ] && echo ok || echo FAILED)"
      ;;
    types)
      printf '\n== pyright\n'
      if [ -n "$types_job" ]; then
        wait "$types_job" || code=1
        cat "$types_log"
      else
        types || code=1
      fi
      finish types $code "$([ $code -eq 0 ] && echo ok || echo FAILED)"
      ;;
    tests)
      if [ "$DEVICE" != cpu ] || [ ${#pytest_args[@]} -gt 0 ]; then
        run_pytest tests tests -m "not aot" ${parallel[@]+"${parallel[@]}"}
      else # apart: processes without tests that want all of the compiler's passes need half as long to compile
        run_pytest tests tests -m "not aot and not optimized" ${parallel[@]+"${parallel[@]}"}
        find_marked optimized
        run_pytest whole "${marked[0]}" "${marked[@]:1}" -m "optimized and not aot" ${parallel[@]+"${parallel[@]}"}
      fi
      ;;
    aot)
      marked=(tests)
      [ ${#pytest_args[@]} -gt 0 ] || find_marked aot
      run_pytest aot "${marked[0]}" "${marked[@]:1}" -m aot
      ;;
    parity)
      plainly=() # none of these tests wants all passes
      if [ "$DEVICE" = cpu ] && [ ${#pytest_args[@]} -eq 0 ]; then plainly=(-m "not optimized"); fi
      run_pytest parity parity ${plainly[@]+"${plainly[@]}"} ${parallel[@]+"${parallel[@]}"} ${captures[@]+"${captures[@]}"}
      ;;
  esac
done

printf '\n'
printf '%s\n' "${results[@]}"
if [ $((passed + failed + skipped)) -gt 0 ]; then
  printf '%s passed, %s failed, %s skipped\n' $passed $failed $skipped
fi
exit $((failed_parts > 0))
