#!/usr/bin/env bash
# Look up known vulnerabilities of all packages in lock files at osv.dev; `make audit` calls it.
#   deploy/audit.sh PIP_AUDIT LOCK...
# Exit code 1: there are some. 2: osv.dev could not be reached, so nothing is known.
set -uo pipefail
pip_audit=$1
shift
found=0
for lock; do
  echo "== $lock"
  if ! output=$("$pip_audit" --disable-pip --require-hashes --vulnerability-service osv --progress-spinner off \
    --requirement "$lock" 2>&1); then
    # pip-audit ends with 1 for a vulnerability and for a failure; only the former prints a table.
    if ! grep -q '^Found [0-9]* known vulnerabilit' <<<"$output"; then
      tail -n 1 <<<"$output"
      cat >&2 <<EOF

######################################################################
##  NOT AUDITED: osv.dev could not be reached for $lock
##  Nothing is known about vulnerabilities; run it again with a network.
######################################################################

EOF
      exit 2
    fi
    found=1
  fi
  echo "$output"
done
exit $found
