#!/usr/bin/env bash
# Starts docker-compose.yml with the settings of .env. First it checks what would otherwise fail late or silently:
# Docker, .env, secrets, the models' folder, ports, NVIDIA GPUs. It prints a line for each fault, and then starts
# nothing. Once all services are healthy it prints an example request. Usage: deploy/up.sh [ARGUMENTS of docker compose
# up]
set -euo pipefail
cd "$(dirname "$0")/.."
user=10001
is_wrong=
wrong() { echo "$1" >&2; is_wrong=1; }

# The value that compose would use: the environment overrides .env.
value() {
  if [ -n "${!1:-}" ]; then printf %s "${!1}"; else
    { [ ! -e .env ] || sed -nE "s/^[[:space:]]*(export[[:space:]]+)?$1[[:space:]]*=[[:space:]]*//p" .env; } | tail -n 1 | sed -E "s/[[:space:]]+(#.*)?\$//; s/^([\"'])(.*)\\1\$/\\2/"
  fi
}

if ! command -v docker >/dev/null; then
  wrong "docker is not installed: install Docker Engine 25 or newer, with its compose plugin"
elif ! docker info >/dev/null 2>&1; then
  wrong "Docker's daemon does not answer: start it, or run this as root or as a member of the group docker"
else
  version=$(docker compose version --short 2>/dev/null || true)
  if [ "$(printf '%s\n' 2.24.4 "${version#v}" | sort -V | head -n 1)" != 2.24.4 ]; then
    wrong "docker compose is ${version:-not installed}: install 2.24.4 or newer"
  fi
fi

model=$(value SLIPSTREAM_MODEL) models=$(value SLIPSTREAM_MODELS)
folder=${models/#\~/$HOME}
if [ ! -e .env ]; then
  wrong "there is no .env: make secrets writes one, to choose the model in"
elif [ -z "$model" ]; then
  wrong "no model is chosen: set SLIPSTREAM_MODEL in .env"
elif [[ $folder == [./]* && ! -d $folder ]]; then
  # Docker would create it, empty and owned by root.
  wrong "SLIPSTREAM_MODELS=$models is not a folder: create it, or set another in .env"
elif [[ $model == /models/* ]]; then
  own=$folder/${model#/models/}
  if [ -z "$models" ]; then
    wrong "SLIPSTREAM_MODEL=$model is a folder: set SLIPSTREAM_MODELS in .env to the one that has ${model#/models/} in it"
  elif [[ $folder == [./]* && ! -f $own/config.json ]]; then
    wrong "SLIPSTREAM_MODEL=$model: there is no $own/config.json: put the model there, or set another in .env"
  elif [[ $folder == [./]* ]]; then
    reader="user $user, under which containers run"
    [ -n "$(find -L "$folder" -maxdepth 0 \( -uid $user -o -perm -001 \))" ] ||
      wrong "$folder may not be entered by $reader: chmod a+x $folder"
    closed=$(find -L "$own" ! -uid $user \( -type d ! -perm -005 -o -type f ! -perm -004 \) -print -quit)
    [ -z "$closed" ] || wrong "$closed may not be read by $reader: chmod -R a+rX $own"
  fi
elif [[ $model == [./~]* ]]; then
  wrong "SLIPSTREAM_MODEL=$model: write a folder as /models/NAME, for NAME in the folder SLIPSTREAM_MODELS"
elif [[ $folder == [./]* ]]; then
  [ -n "$(find -L "$folder" -maxdepth 0 \( -uid $user -o -perm -007 \))" ] ||
    wrong "user $user, under which containers run, may not write $model into $folder: chown $user $folder"
fi

for name in $(sed -n 's|.*{file: \./deploy/secrets/\(.*\)}|\1|p' docker-compose.yml); do
  [ -s "deploy/secrets/$name" ] || { wrong "deploy/secrets/$name is missing: make secrets"; break; }
done
# A clone under a strict umask may be closed to the users of the containers, who read these files of it.
mounted="deploy/redis deploy/prometheus deploy/grafana"
closed=$(find $mounted \( -type d ! -perm -005 -o -type f ! -perm -004 \) -print -quit 2>/dev/null) || true
[ -z "$closed" ] || wrong "$closed may not be read by the users of the containers: chmod -R a+rX $mounted"

# Users and rights without passwords: if they differ from users.acl.in, `make secrets` would change the file.
users() { sed -nE 's/#(@[a-z_]+@|[0-9a-f]{64})/#/; /^user /p' "$1"; }
if [ -s deploy/secrets/redis_users ] && [ "$(users deploy/secrets/redis_users)" != "$(users deploy/redis/users.acl.in)" ]; then
  wrong "deploy/secrets/redis_users is outdated: make secrets, and docker compose restart redis where it runs"
fi

# Ports held by our own running services are fine.
services=$(docker compose config --services 2>/dev/null) || services=$'gateway\nprometheus\ngrafana'
running=$(docker compose ps --services --status running 2>/dev/null) || running=
while read -r service variable port; do
  named=$(value "$variable")
  if grep -qx "$service" <<<"$services" && ! grep -qx "$service" <<<"$running" &&
    (exec 3<>"/dev/tcp/127.0.0.1/${named:-$port}") 2>/dev/null; then
    wrong "port ${named:-$port} is taken: set $variable in .env to another"
  fi
done <<'PORTS'
gateway SLIPSTREAM_PORT 8000
prometheus SLIPSTREAM_PROMETHEUS_PORT 9090
grafana SLIPSTREAM_GRAFANA_PORT 3000
PORTS

# The CPU variant needs no GPU.
if docker compose config 2>/dev/null | grep -q 'driver: nvidia$'; then
  instead="without one, set COMPOSE_FILE=docker-compose.yml:deploy/compose.cpu.yml in .env"
  cards=$(nvidia-smi --query-gpu=index,driver_version --format=csv,noheader 2>/dev/null) || cards=
  if [ -z "$cards" ]; then
    wrong "nvidia-smi finds no GPU: install NVIDIA's driver, 580 or newer; $instead"
  else
    driver=${cards##*, }
    [ "${driver%%.*}" -ge 580 ] || wrong "NVIDIA's driver is $driver: install 580 or newer"
    for variable in SLIPSTREAM_SGLANG_GPU SLIPSTREAM_TRAINER_GPU; do
      card=$(value "$variable")
      # Only indices are checked: Docker also takes ids of GPUs and of MIG parts.
      [[ ${card:-0} == *[!0-9]* ]] || grep -q "^${card:-0}, " <<<"$cards" || wrong "$variable=${card:-0}: nvidia-smi -L lists no such GPU: set another in .env"
    done
  fi
  command -v nvidia-container-runtime-hook nvidia-ctk >/dev/null || docker info --format '{{json .Runtimes}}' 2>/dev/null | grep -q nvidia ||
    wrong "Docker cannot use a GPU: install the NVIDIA Container Toolkit; $instead"
fi

[ -z "$is_wrong" ] || exit 2
docker compose up --detach --wait --build "$@"
name=$(value SLIPSTREAM_MODEL_NAME) port=$(value SLIPSTREAM_PORT)
cat <<SAID
All services are healthy. Ask for an answer:
curl http://127.0.0.1:${port:-8000}/v1/chat/completions \\
  -H "authorization: Bearer \$(cat deploy/secrets/gateway_client)" -H 'content-type: application/json' \\
  -d '{"model": "${name:-$model}", "messages": [{"role": "user", "content": "What is a draft?"}]}'
SAID
