#!/bin/sh
# Makes .env beside this script, with passwords by chance. One that is there already stays as it is.
set -eu

cd "$(dirname "$0")"
if [ -e .env ]; then
    echo "deploy/compose/.env is there already" >&2
    exit 0
fi

# 128 random bits; a letter first, because NATS takes what begins with a digit for a number.
password() { printf 'p%s' "$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')"; }

umask 077
{
    echo "COMPOSE_PROJECT_NAME=kvatlas"
    for name in NATS_DAEMON_PASSWORD NATS_FLEET_PASSWORD NATS_OPERATOR_PASSWORD NATS_CLUSTER_PASSWORD \
        GRAFANA_ADMIN_PASSWORD; do
        echo "$name=$(password)"
    done
} >.env.new
mv .env.new .env
echo "deploy/compose/.env has been made"
