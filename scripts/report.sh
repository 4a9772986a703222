#!/usr/bin/env bash
# Compares this library with stored vLLM outputs and writes the report; makes .venv on first use.
set -uo pipefail

usage() {
  cat <<'TXT'
usage: scripts/report.sh [--python PATH] [ARGUMENT OF scripts/diff_report.py]...

Runs scripts/diff_report.py on the shipped captures and writes report.html, report.md and report.json to report/
(another folder: --out DIR). Without a GPU it runs the references and interprets each kernel on one capture (--full: on
all), with one it runs the compiled kernels. --captures DIR (repeatable) adds captures, --mechanism NAME selects one, --python PATH uses that interpreter
as it is. Exit code 0: all pass, 1: a failure, 2: nothing was compared, 3: no environment.
TXT
}

source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

args=() interpreter="" out=""
while [ $# -gt 0 ]; do
  case $1 in
    --python)
      [ $# -ge 2 ] || die "$1 needs a value; see scripts/report.sh --help"
      interpreter=$2
      shift
      ;;
    -h | --help)
      usage
      exit
      ;;
    --out | --out=*)
      out=given
      args+=("$1")
      ;;
    *) args+=("$1") ;;
  esac
  shift
done
[ -n "$out" ] || args+=(--out "$root/report")

if [ -n "$interpreter" ]; then use_interpreter "$interpreter"; else use_environment default; fi
exec "$PYTHON" "$root/scripts/diff_report.py" ${args[@]+"${args[@]}"}
