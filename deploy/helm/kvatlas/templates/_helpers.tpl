{{/* A name that Services accept, and that leaves room for an ending: DNS-1035, of 40 characters at most. */}}
{{- define "kvatlas.serviceName" -}}
{{- regexReplaceAll "^([0-9])" . "r-${1}" | replace "." "-" | trunc 40 | regexFind "^.*[^-]" -}}
{{- end -}}

{{- define "kvatlas.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- include "kvatlas.serviceName" (default $full .Values.fullnameOverride) -}}
{{- end -}}

{{- define "kvatlas.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "kvatlas.labels" -}}
{{ include "kvatlas.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: kvatlas
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "kvatlas.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end -}}
{{- end -}}

{{- define "kvatlas.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{ default (include "kvatlas.fullname" .) .Values.serviceAccount.name }}
{{- else -}}
{{ default "default" .Values.serviceAccount.name }}
{{- end -}}
{{- end -}}

{{/* Whether the bridge asks the API for engines: then it has a service account of its own, with the right to read what it asks for. */}}
{{- define "kvatlas.findsPods" -}}
{{- if and .Values.bridge.enabled (regexMatch "(^|,)(kubernetes|inferencepool|endpointslices):" (join "," .Values.bridge.discover)) -}}
true
{{- end -}}
{{- end -}}

{{/* The settings of `config` as TOML. Values are texts, truth values and whole numbers. */}}
{{- define "kvatlas.tomlValues" -}}
{{- range $key, $value := . }}
{{ $key }} = {{ if kindIs "string" $value }}{{ $value | toJson }}{{ else if kindIs "bool" $value }}{{ $value }}{{ else }}{{ $value | int64 }}{{ end }}
{{- end }}
{{- end -}}
{{/* An amount of memory, as Kubernetes or kvatlas writes it, in MiB. */}}
{{- define "kvatlas.mebibytes" -}}
{{- $text := toString . | replace " " "" | replace "_" "" -}}
{{- $unit := regexFind "[A-Za-z]+$" $text -}}
{{- $units := dict "" 1 "B" 1 "k" 1000 "kB" 1000 "KB" 1000 "M" 1000000 "MB" 1000000 "G" 1000000000 "GB" 1000000000 "T" 1000000000000 "TB" 1000000000000 "Ki" 1024 "KiB" 1024 "Mi" 1048576 "MiB" 1048576 "Gi" 1073741824 "GiB" 1073741824 "Ti" 1099511627776 "TiB" 1099511627776 -}}
{{- if not (hasKey $units $unit) -}}
{{- fail (printf "%s is no amount of memory that is understood" $text) -}}
{{- end -}}
{{- divf (mulf (trimSuffix $unit $text | float64) (get $units $unit)) 1048576 | floor | int64 -}}
{{- end -}}

{{/* The settings of `config`, with a bound on the indexes: 60 % of the daemons' memory limit, which none that is given may go over. */}}
{{- define "kvatlas.settings" -}}
{{- $config := deepCopy .Values.config -}}
{{- $memory := dig "limits" "memory" "" .Values.resources -}}
{{- if $memory -}}
{{- $bound := mulf (include "kvatlas.mebibytes" $memory | float64) 0.6 | floor | int64 -}}
{{- $given := dig "limits" "max_bytes_total" "" $config | toString -}}
{{- if and $given (ne $given "0") -}}
{{- if gt (include "kvatlas.mebibytes" $given | int64) $bound -}}
{{- fail (printf "config.limits.max_bytes_total is %s: with resources.limits.memory %s, indexes may have %d MiB, which is 60 %%" $given (toString $memory) $bound) -}}
{{- end -}}
{{- else -}}
{{- $_ := set $config "limits" (merge (dict "max_bytes_total" (printf "%d MiB" $bound)) (dig "limits" dict $config)) -}}
{{- end -}}
{{- end -}}
{{ toJson $config }}
{{- end -}}

{{- define "kvatlas.toml" -}}
{{- include "kvatlas.sections" (include "kvatlas.settings" . | fromJson) }}
{{- end -}}

{{/* The settings of a shard: Dynamo's routers ask gateways. */}}
{{- define "kvatlas.shardToml" -}}
{{- include "kvatlas.sections" (omit (include "kvatlas.settings" . | fromJson) "dynamo") }}
{{- end -}}

{{- define "kvatlas.sections" -}}
{{- range $section, $settings := . }}
{{- if eq $section "namespaces" }}
{{- range $name, $namespace := $settings }}
[namespaces.{{ $name }}]
{{- include "kvatlas.tomlValues" $namespace }}
{{ end }}
{{- else }}
[{{ $section }}]
{{- include "kvatlas.tomlValues" $settings }}
{{ end }}
{{- end }}
{{- end -}}

{{/* The release's own NATS server. */}}
{{- define "kvatlas.natsName" -}}
{{- printf "%s-nats" (include "kvatlas.serviceName" .Release.Name) -}}
{{- end -}}

{{- define "kvatlas.natsUrl" -}}
{{- if .Values.nats.enabled -}}
nats://{{ include "kvatlas.natsName" . }}:4222
{{- else -}}
{{ .Values.nats.url }}
{{- end -}}
{{- end -}}

{{/* The ports of NATS, as JSON: those of the URL unless given. */}}
{{- define "kvatlas.natsPorts" -}}
{{- if and .Values.networkPolicy.natsPort (not .Values.nats.enabled) -}}
{{ list (int .Values.networkPolicy.natsPort) | toJson }}
{{- else -}}
{{- $ports := list -}}
{{- range splitList "," (include "kvatlas.natsUrl" .) -}}
{{- $ports = append $ports (regexFind "[0-9]+$" (regexFind ":[0-9]+$" (trimSuffix "/" .)) | default "4222" | int) -}}
{{- end -}}
{{ uniq $ports | toJson }}
{{- end -}}
{{- end -}}

{{/* How to reach NATS: a dictionary with root, auth and inboxPrefix. */}}
{{- define "kvatlas.natsEnv" -}}
- name: KVATLAS_NATS_URL
  value: {{ include "kvatlas.natsUrl" .root | quote }}
- name: KVATLAS_NATS_CONNECTION_NAME
  valueFrom: { fieldRef: { fieldPath: metadata.name } }
- name: KVATLAS_NATS_INBOX_PREFIX
  value: {{ .inboxPrefix | quote }}
- name: KVATLAS_SUBJECTS_PREFIX
  value: {{ .root.Values.subjectsPrefix | quote }}
{{- if .root.Values.nats.tls.required }}
- name: KVATLAS_NATS_TLS_REQUIRED
  value: "true"
{{- end }}
{{- if .root.Values.nats.tls.caSecret }}
- name: KVATLAS_NATS_TLS_CA_FILE
  value: /etc/kvatlas/nats-ca/{{ .root.Values.nats.tls.caKey }}
{{- end }}
{{- if eq .auth.kind "credentials" }}
- name: KVATLAS_NATS_CREDENTIALS_FILE
  value: /etc/kvatlas/nats/{{ default "nats.creds" .auth.credentialsKey }}
{{- else if eq .auth.kind "token" }}
- name: KVATLAS_NATS_TOKEN
  valueFrom: { secretKeyRef: { name: {{ .auth.secret }}, key: {{ default "token" .auth.tokenKey }} } }
{{- else if eq .auth.kind "user" }}
- name: KVATLAS_NATS_USER
  valueFrom: { secretKeyRef: { name: {{ .auth.secret }}, key: {{ default "user" .auth.userKey }} } }
- name: KVATLAS_NATS_PASSWORD
  valueFrom: { secretKeyRef: { name: {{ .auth.secret }}, key: {{ default "password" .auth.passwordKey }} } }
{{- end }}
{{- end -}}

{{- define "kvatlas.natsMounts" -}}
{{- if .root.Values.nats.tls.caSecret }}
- { name: nats-ca, mountPath: /etc/kvatlas/nats-ca, readOnly: true }
{{- end }}
{{- if eq .auth.kind "credentials" }}
- { name: nats, mountPath: /etc/kvatlas/nats, readOnly: true }
{{- end }}
{{- end -}}

{{- define "kvatlas.natsVolumes" -}}
{{- if .root.Values.nats.tls.caSecret }}
- name: nats-ca
  secret: { secretName: {{ .root.Values.nats.tls.caSecret }}, defaultMode: 288 }
{{- end }}
{{- if eq .auth.kind "credentials" }}
- name: nats
  secret: { secretName: {{ .auth.secret }}, defaultMode: 288 }
{{- end }}
{{- end -}}

{{/* The listeners of whoever answers for all workers, which are daemons, or with shards gateways: a list as JSON. */}}
{{- define "kvatlas.doors" -}}
{{- $doors := list -}}
{{- range $name := list "http" "grpc" "redis" "dynamo" -}}
{{- $door := get $.Values $name -}}
{{- if $door.enabled -}}
{{- $secret := coalesce $door.tokenSecret $door.passwordSecret "" -}}
{{- $doors = append $doors (dict "name" $name "port" $door.port "secret" $secret "key" (coalesce $door.tokenKey $door.passwordKey "") "service" $door.service) -}}
{{- end -}}
{{- end -}}
{{ toJson $doors }}
{{- end -}}

{{- define "kvatlas.doorsEnv" -}}
{{- range include "kvatlas.doors" . | fromJsonArray }}
- name: KVATLAS_{{ upper .name }}_LISTEN
  value: {{ printf "%s:%v" $.Values.listenAddress .port | quote }}
{{- if .secret }}
- name: KVATLAS_{{ upper .name }}_TOKEN_FILE
  value: /etc/kvatlas/{{ .name }}/{{ .key }}
{{- end }}
{{- if eq .name "dynamo" }}
# Each replica has a record of its own.
- name: KVATLAS_DYNAMO_ADVERTISE
  valueFrom: { fieldRef: { fieldPath: status.podIP } }
{{- end }}
{{- end }}
{{- end -}}

{{- define "kvatlas.doorsPorts" -}}
{{- range include "kvatlas.doors" . | fromJsonArray }}
- { name: {{ .name }}, containerPort: {{ .port }} }
{{- end }}
{{- end -}}

{{- define "kvatlas.doorsMounts" -}}
{{- range include "kvatlas.doors" . | fromJsonArray }}
{{- if .secret }}
- { name: {{ .name }}, mountPath: /etc/kvatlas/{{ .name }}, readOnly: true }
{{- end }}
{{- end }}
{{- end -}}

{{- define "kvatlas.doorsVolumes" -}}
{{- range include "kvatlas.doors" . | fromJsonArray }}
{{- if .secret }}
- name: {{ .name }}
  secret: { secretName: {{ .secret }}, defaultMode: 288 }
{{- end }}
{{- end }}
{{- end -}}

{{/* Where routers ask at a listener: a dictionary with root and door. */}}
{{- define "kvatlas.doorName" -}}
{{- include "kvatlas.fullname" .root }}{{ ternary "" (printf "-%s" .door.name) (eq .door.name "http") }}
{{- end -}}

{{/* The ports of etcd at which daemons and bridge look for Dynamo's processes, as JSON. */}}
{{- define "kvatlas.etcdPorts" -}}
{{- $told := list (dig "dynamo" "discovery" "" .Values.config) -}}
{{- if .Values.bridge.enabled -}}
{{- $told = concat $told .Values.bridge.discover .Values.bridge.engines -}}
{{- end -}}
{{- $ports := list -}}
{{- range regexFindAll "etcd:http://[^,/ ]+:[0-9]+" (join " " $told) -1 -}}
{{- $ports = append $ports (regexFind "[0-9]+$" . | int) -}}
{{- end -}}
{{ uniq $ports | toJson }}
{{- end -}}

{{/* Where the admin listener listens, and at which address kvatlas doctor finds it. */}}
{{- define "kvatlas.adminEnv" -}}
- name: KVATLAS_ADMIN_LISTEN
  value: {{ printf "%s:%v" (ternary .Values.listenAddress "127.0.0.1" (eq .Values.admin.bind "pod")) .Values.admin.port | quote }}
{{- if eq .Values.admin.bind "pod" }}
- name: KVATLAS_ADMIN_ADVERTISE
  valueFrom: { fieldRef: { fieldPath: status.podIP } }
{{- end }}
{{- end -}}

{{/* The label namespace of a metric is that of kvatlas, as alerts and dashboard have it. Prometheus' operator gives every target one of its own, which
would take its place. */}}
{{- define "kvatlas.metricRelabelings" -}}
- sourceLabels: [exported_namespace]
  regex: (.+)
  targetLabel: namespace
- regex: exported_namespace
  action: labeldrop
{{- end -}}

{{/* Probes, by request or by command. */}}
{{- define "kvatlas.probes" -}}
{{- $requests := eq .Values.admin.bind "pod" -}}
startupProbe:
  {{- if $requests }}
  httpGet: { path: /livez, port: admin }
  {{- else }}
  exec: { command: [/usr/local/bin/kvatlas, probe, --live] }
  timeoutSeconds: 3
  {{- end }}
  periodSeconds: 2
  failureThreshold: 60
livenessProbe:
  {{- if $requests }}
  httpGet: { path: /livez, port: admin }
  {{- else }}
  exec: { command: [/usr/local/bin/kvatlas, probe, --live] }
  {{- end }}
  periodSeconds: 10
  timeoutSeconds: 3
  failureThreshold: 3
readinessProbe:
  {{- if $requests }}
  httpGet: { path: /readyz, port: admin }
  {{- else }}
  exec: { command: [/usr/local/bin/kvatlas, probe] }
  {{- end }}
  periodSeconds: 3
  timeoutSeconds: 3
  failureThreshold: 2
{{- end -}}

{{/* For how many seconds a pod that is to end goes on: until then, Services may still send it requests. Kubernetes waits for that from 1.30 on. */}}
{{- define "kvatlas.preStopSeconds" -}}
{{- $asked := include "kvatlas.doors" . | fromJsonArray | not | not -}}
{{ ternary (int .Values.preStopSeconds) 0 (and $asked (semverCompare ">=1.30-0" .Capabilities.KubeVersion.Version)) }}
{{- end -}}

{{- define "kvatlas.lifecycle" -}}
{{- with include "kvatlas.preStopSeconds" . | int }}
lifecycle:
  preStop:
    sleep: { seconds: {{ . }} }
{{- end }}
{{- end -}}

{{/* Volumes and mounts that the values add to all pods. */}}
{{- define "kvatlas.extraVolumes" -}}
{{- with .Values.extraVolumes }}
{{- toYaml . }}
{{- end }}
{{- end -}}
{{- define "kvatlas.extraMounts" -}}
{{- with .Values.extraVolumeMounts }}
{{- toYaml . }}
{{- end }}
{{- end -}}

{{/* Values as YAML, without those that null takes away: Helm leaves them to charts within charts. */}}
{{- define "kvatlas.given" -}}
{{- $given := dict -}}
{{- range $name, $value := . -}}
{{- if not (kindIs "invalid" $value) -}}
{{- $_ := set $given $name $value -}}
{{- end -}}
{{- end -}}
{{ toYaml $given }}
{{- end -}}

{{- define "kvatlas.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: { drop: [ALL] }
{{- end -}}

{{/* The account of pods that ask nothing of Kubernetes. */}}
{{- define "kvatlas.account" -}}
serviceAccountName: {{ include "kvatlas.serviceAccountName" . }}
automountServiceAccountToken: false
{{- end -}}

{{/* Where pods of a component go: a dictionary with root and component. */}}
{{- define "kvatlas.affinity" -}}
{{- if .root.Values.affinity -}}
affinity: {{- toYaml .root.Values.affinity | nindent 2 }}
{{- else -}}
affinity:
  podAntiAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels:
              {{- include "kvatlas.selector" .root | nindent 14 }}
              app.kubernetes.io/component: {{ .component }}
{{- end -}}
{{- end -}}

{{/* How many pods of a component may be away: a dictionary with root, name and component. */}}
{{- define "kvatlas.disruptionBudget" -}}
{{- if .root.Values.podDisruptionBudget.enabled }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ .name }}
  labels:
    {{- include "kvatlas.labels" .root | nindent 4 }}
spec:
  maxUnavailable: {{ .root.Values.podDisruptionBudget.maxUnavailable }}
  selector:
    matchLabels:
      {{- include "kvatlas.selector" .root | nindent 6 }}
      app.kubernetes.io/component: {{ .component }}
{{- end }}
{{- end -}}

{{/* What all pods have in common, above their containers and beside their account. */}}
{{- define "kvatlas.podSpec" -}}
# Variables about services would be taken for settings, were they not known by their ends.
enableServiceLinks: false
{{- $drain := dig "shutdown" "drain_seconds" 10 .Values.config | int }}
terminationGracePeriodSeconds: {{ max .Values.terminationGracePeriodSeconds (add $drain (include "kvatlas.preStopSeconds" . | int) 10) }}
securityContext: {{- include "kvatlas.given" .Values.podSecurityContext | nindent 2 }}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.topologySpreadConstraints }}
topologySpreadConstraints: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end -}}

{{/* How gateways or the bridge reach NATS, and show who they are: a dictionary with root and own, which are their values. As JSON. */}}
{{- define "kvatlas.natsOf" -}}
{{- $nats := .root.Values.nats -}}
{{- $auth := ternary .own.auth $nats.auth (and (hasKey .own.auth "kind") (not $nats.enabled)) -}}
{{ dict "auth" $auth "inboxPrefix" (default $nats.inboxPrefix .own.inboxPrefix) | toJson }}
{{- end -}}

{{/* The bucket with the bridge's state, if there is one: where JetStream is certain to be there, and to let the bridge in, it needs no name. */}}
{{- define "kvatlas.bridgeBucket" -}}
{{- $state := .Values.bridge.state -}}
{{- $streams := or .Values.nats.enabled (and (eq .Values.transport "jetstream") (not (hasKey .Values.bridge.auth "kind"))) -}}
{{- if not $state.enabled -}}
{{- else if $state.bucket -}}
{{ $state.bucket }}
{{- else if and $streams (kindIs "invalid" $state.bucket) (not $state.existingClaim) -}}
{{ .Release.Namespace }}-{{ include "kvatlas.fullname" . }}-bridge
{{- end -}}
{{- end -}}

{{/* The first and the last port at which engines are republished, as JSON. */}}
{{- define "kvatlas.republishPorts" -}}
{{- $first := int .Values.bridge.republish.port -}}
{{ list $first (add $first (mul 2 (int .Values.bridge.republish.engines)) -1 | int) | toJson }}
{{- end -}}

{{- define "kvatlas.bridgeArguments" -}}
- bridge
{{- with .Values.bridge.blockSize }}
- --block-size={{ . | int }}
{{- end }}
- --format={{ .Values.bridge.format }}
{{- with .Values.bridge.model }}
- {{ printf "--model=%s" . | quote }}
{{- end }}
{{- with .Values.bridge.scheme }}
- {{ printf "--scheme=%s" . | quote }}
{{- end }}
{{- with .Values.bridge.tenant }}
- {{ printf "--tenant=%s" . | quote }}
{{- end }}
{{- if .Values.bridge.state.enabled }}
- --state={{ with include "kvatlas.bridgeBucket" . }}nats:{{ . }}/{{ include "kvatlas.fullname" $ }}{{ else }}/var/lib/kvatlas/state{{ end }}
{{- end }}
{{- if gt (int .Values.bridge.replicas) 1 }}
- --lease={{ include "kvatlas.fullname" . }}
{{- end }}
{{- range .Values.bridge.discover }}
- {{ printf "--discover=%s" . | quote }}
{{- end }}
{{- with .Values.bridge.podLabels }}
- {{ printf "--pod-labels=%s" (join "," .) | quote }}
{{- end }}
{{- if .Values.bridge.enginesConfigMap }}
- --discover=file:/etc/kvatlas/engines
{{- end }}
{{- if .Values.bridge.republish.enabled }}
- {{ printf "--republish=tcp://%s:%s" .Values.listenAddress (include "kvatlas.republishPorts" . | fromJsonArray | join "-") | quote }}
- --republish-max-bytes={{ .Values.bridge.republish.maxBytes | int64 }}
{{- if .Values.bridge.republish.everything }}
- --republish-everything
{{- end }}
{{- end }}
{{- with .Values.bridge.answerPorts }}
- {{ printf "--answer-ports=%s" . | quote }}
{{- end }}
{{- range .Values.bridge.engines }}
- {{ printf "--engine=%s" . | quote }}
{{- end }}
{{- with and .Values.bridge.http.enabled .Values.bridge.http.engineHosts }}
- {{ printf "--register-hosts=%s" (join "," .) | quote }}
{{- end }}
{{- /* As long as daemons keep a silent holder. By 0 they keep it for ever, and the bridge has its default. */}}
{{- $silence := dig "namespace_defaults" "remove_after_ms" 0 .Values.config | int64 }}
{{- if and $silence (not (regexMatch "(^| )--give-up-after" (join " " .Values.bridge.extraArgs))) }}
- --give-up-after={{ $silence }}ms
{{- end }}
{{- range .Values.bridge.extraArgs }}
- {{ quote . }}
{{- end }}
{{- end -}}

{{- define "kvatlas.bridgeEnv" -}}
{{ include "kvatlas.natsEnv" (include "kvatlas.natsOf" (dict "root" . "own" .Values.bridge) | fromJson | merge (dict "root" .)) | trim }}
{{ include "kvatlas.adminEnv" . }}
{{- if .Values.bridge.http.enabled }}
- name: KVATLAS_HTTP_LISTEN
  value: {{ printf "%s:%v" .Values.listenAddress .Values.bridge.http.port | quote }}
{{- if .Values.bridge.http.tokenSecret }}
- name: KVATLAS_HTTP_TOKEN_FILE
  value: /etc/kvatlas/http/{{ .Values.bridge.http.tokenKey }}
{{- end }}
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}
