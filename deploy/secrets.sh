#!/bin/sh
# Writes the secrets of docker-compose.yml into a folder: random passwords where there are none yet, Redis's users with
# the hashes of their passwords, and the gateway's first API keys with their hashes. Needs only standard system tools.
# Usage: deploy/secrets.sh [FOLDER]
#
# Only the owner may enter the folder. The files are world-readable (and read-only), because containers mount the files
# without the folder and run as other users.
set -eu
# macOS has shasum in its place.
command -v sha256sum >/dev/null || sha256sum() { shasum -a 256; }
[ -n "$(sha256sum </dev/null)" ] || { echo "there is neither sha256sum nor shasum: install one" >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
folder=${1:-$here/secrets}
umask 077
mkdir -p "$folder"
chmod 700 "$folder"

for name in redis_engine redis_gateway redis_trainer gateway_admin grafana_admin; do
  if [ ! -s "$folder/$name" ]; then
    head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n' >"$folder/$name"
    chmod 444 "$folder/$name"
    echo "wrote $folder/$name"
  fi
done

users=$(grep '^user ' "$here/redis/users.acl.in")
for name in redis_engine redis_gateway redis_trainer; do
  hash=$(tr -d '\n' <"$folder/$name" | sha256sum | cut -d ' ' -f 1)
  users=$(printf '%s\n' "$users" | sed "s/@$name@/$hash/")
done
# Written in place: a running Redis has this very file mounted, and reads it again at ACL LOAD.
[ ! -e "$folder/redis_users" ] || chmod 600 "$folder/redis_users"
printf '%s\n' "$users" >"$folder/redis_users"
chmod 444 "$folder/redis_users"

# An existing file stays: `slipstream keys` may have changed it.
if [ ! -s "$folder/gateway_keys" ]; then
  for name in gateway_client gateway_metrics; do
    rm -f "$folder/$name"
    head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n' >"$folder/$name"
    chmod 444 "$folder/$name"
    echo "wrote $folder/$name"
  done
  client=$(sha256sum <"$folder/gateway_client" | cut -d ' ' -f 1)
  metrics=$(sha256sum <"$folder/gateway_metrics" | cut -d ' ' -f 1)
  printf '{"version": 1, "keys": [%s, %s]}\n' \
    "{\"name\": \"client\", \"sha256\": \"$client\", \"created_s\": $(date +%s)}" \
    "{\"name\": \"metrics\", \"sha256\": \"$metrics\", \"read_only\": true, \"created_s\": $(date +%s)}" \
    >"$folder/gateway_keys"
  chmod 444 "$folder/gateway_keys"
  echo "wrote $folder/gateway_keys"
elif [ ! -s "$folder/gateway_metrics" ]; then
  file="--file $folder/gateway_keys"
  echo "$folder/gateway_metrics is missing, and gateway_keys has only a hash of it: slipstream keys revoke metrics $file, and write what slipstream keys add metrics --read-only $file prints into it" >&2
  exit 2
fi
