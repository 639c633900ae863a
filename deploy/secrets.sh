#!/bin/sh
# Writes the secrets of docker-compose.yml into a folder: random passwords where there are none yet, the users of Redis
# with the hashes of theirs, and the gateway's first API keys with theirs. Needs nothing but the system's own tools.
# Usage: deploy/secrets.sh [FOLDER]
#
# The folder is for its owner alone. The files in it can be read by everyone because containers see the files and not
# the folder, and run as users of their own; they cannot be changed.
set -eu
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
# Written in place: a running Redis has the file itself mounted, and reads it again at ACL LOAD.
[ ! -e "$folder/redis_users" ] || chmod 600 "$folder/redis_users"
printf '%s\n' "$users" >"$folder/redis_users"
chmod 444 "$folder/redis_users"

# `slipstream keys` changes this file later: what is there stays.
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
fi
