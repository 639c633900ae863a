#!/bin/sh
# Prints the files that deploy/secrets.sh wrote as Kubernetes Secrets, for `kubectl apply -f -`.
# Usage: deploy/kubernetes/secrets.sh [FOLDER]
set -eu
folder=${1:-$(cd "$(dirname "$0")/.." && pwd)/secrets}

for name in redis_users redis_engine redis_gateway redis_trainer gateway_admin gateway_keys gateway_metrics; do
  [ -s "$folder/$name" ] || { echo "$folder/$name is missing: make secrets" >&2; exit 2; }
  cat <<EOF
---
apiVersion: v1
kind: Secret
metadata: {name: $(printf %s "$name" | tr _ -), namespace: slipstream}
data: {$name: $(base64 <"$folder/$name" | tr -d '\n')}
EOF
done
