# The NATS server of compose.yaml. The official image has no directory for JetStream: Docker would give the volume to root.
FROM nats:2.15.1-alpine
# A new volume takes the owner of the directory that it covers.
RUN install -d -o 65532 -g 65532 /data
