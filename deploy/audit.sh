#!/usr/bin/env bash
# Ask osv.dev about known vulnerabilities of what the lock files pin; `make audit` calls it.
#   deploy/audit.sh PIP_AUDIT LOCK...
# Exit code 1: there are some. 2: it could not be asked, so nothing is known.
set -uo pipefail
pip_audit=$1
shift
found=0
for lock; do
  echo "== $lock"
  if ! output=$("$pip_audit" --disable-pip --require-hashes --vulnerability-service osv --progress-spinner off \
    --requirement "$lock" 2>&1); then
    # It ends with 1 for a vulnerability and for a failure; only the former comes with a table.
    if ! grep -q '^Found [0-9]* known vulnerabilit' <<<"$output"; then
      tail -n 1 <<<"$output"
      cat >&2 <<EOF

######################################################################
##  NOT AUDITED: osv.dev could not be asked about $lock
##  Nothing is known about vulnerabilities; run it where there is a network.
######################################################################

EOF
      exit 2
    fi
    found=1
  fi
  echo "$output"
done
exit $found
