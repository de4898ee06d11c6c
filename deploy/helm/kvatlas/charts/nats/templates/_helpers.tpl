{{/* Beside these there are the templates of the chart around this one. */}}
{{- define "nats.selector" -}}
app.kubernetes.io/name: nats
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "nats.labels" -}}
{{ include "nats.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/component: nats
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "nats.conf" -}}
# Made by the chart.
listen: "{{ .Values.listenAddress }}:4222"
# For probes.
http: "{{ .Values.listenAddress }}:8222"
server_name: {{ include "kvatlas.natsName" . }}-0
# A client whose machine vanishes is let go after 6 s. By itself, NATS takes up to 6 min, and gives it questions all that time.
ping_interval: "2s"
ping_max: 2
jetstream {
  # As much of the volume as is free, but for a quarter.
  store_dir: /data
  max_memory_store: 64MiB
}
{{- if eq .Values.auth.kind "user" }}
authorization { user: $NATS_QUOTED_USER, password: $NATS_QUOTED_PASSWORD }
{{- else if eq .Values.auth.kind "token" }}
authorization { token: $NATS_QUOTED_TOKEN }
{{- end }}
{{- end -}}

{{/* Who may connect. The server takes a variable as it would a text of its file: in quotes, a password is one whatever is in it, but for '. */}}
{{- define "nats.environment" -}}
{{- $auth := .Values.auth -}}
- name: GOMEMLIMIT
  valueFrom: { resourceFieldRef: { resource: limits.memory } }
{{- if eq $auth.kind "user" }}
- name: NATS_USER
  valueFrom: { secretKeyRef: { name: {{ $auth.secret }}, key: {{ default "user" $auth.userKey }} } }
- { name: NATS_QUOTED_USER, value: "'$(NATS_USER)'" }
- name: NATS_PASSWORD
  valueFrom: { secretKeyRef: { name: {{ $auth.secret }}, key: {{ default "password" $auth.passwordKey }} } }
- { name: NATS_QUOTED_PASSWORD, value: "'$(NATS_PASSWORD)'" }
{{- else if eq $auth.kind "token" }}
- name: NATS_TOKEN
  valueFrom: { secretKeyRef: { name: {{ $auth.secret }}, key: {{ default "token" $auth.tokenKey }} } }
- { name: NATS_QUOTED_TOKEN, value: "'$(NATS_TOKEN)'" }
{{- end }}
{{- end -}}
