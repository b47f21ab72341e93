{{- define "tercet.fullname" -}}
{{- if contains "tercet" .Release.Name -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-tercet" .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "tercet.selector" -}}
app.kubernetes.io/name: tercet
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "tercet.labels" -}}
{{ include "tercet.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "tercet.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (include "tercet.fullname" .) }}
{{- end -}}

{{- define "tercet.secret" -}}
{{- if .Values.secrets.existing -}}
{{ .Values.secrets.existing }}
{{- else if or .Values.secrets.hfToken .Values.secrets.apiKey .Values.secrets.groupToken -}}
{{ include "tercet.fullname" . }}
{{- end -}}
{{- end -}}

{{- define "tercet.keys" -}}
{{- if and (or .Values.keys.existing .Values.keys.rows) .Values.secrets.apiKey -}}
{{- fail "keys and secrets.apiKey exclude each other: make the key a row" -}}
{{- end -}}
{{- if .Values.keys.existing -}}
{{ .Values.keys.existing }}
{{- else if .Values.keys.rows -}}
{{ include "tercet.fullname" . }}-keys
{{- end -}}
{{- end -}}

{{- /* The ConfigMap with the file of several models; empty: one model. */ -}}
{{- define "tercet.models" -}}
{{- if .Values.models -}}
{{- if or (gt (int .Values.nodes) 1) (gt (int .Values.copies) 1) -}}
{{- fail "models are several at one address, each on one node and once: leave nodes and copies at 1" -}}
{{- end -}}
{{ include "tercet.fullname" . }}-models
{{- else if .Values.modelDefaults -}}
{{- fail "modelDefaults are for models: name them" -}}
{{- end -}}
{{- end -}}

{{- /* GPUs of each shard group: of a pod's copy of the model. */ -}}
{{- define "tercet.shards" -}}
{{- $copies := int .Values.copies -}}
{{- if and (gt $copies 1) (gt (int .Values.nodes) 1) -}}
{{- fail "copies are within one pod: leave nodes at 1" -}}
{{- end -}}
{{- if mod (int .Values.gpus) $copies -}}
{{- fail "gpus must be a multiple of copies" -}}
{{- end -}}
{{ div (mul .Values.gpus .Values.nodes) (mul (include "tercet.stages" . | int) $copies) }}
{{- end -}}

{{- /* Pods that answer HTTP: of a group its node 0. */ -}}
{{- define "tercet.answering" -}}
{{ include "tercet.selector" . }}
{{- if gt (int .Values.nodes) 1 }}
leaderworkerset.sigs.k8s.io/worker-index: "0"
{{- end }}
{{- end -}}

{{- /* What autoscaling sets the replicas of. */ -}}
{{- define "tercet.scaled" -}}
{{- if gt (int .Values.nodes) 1 -}}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
{{- else -}}
apiVersion: apps/v1
kind: Deployment
{{- end }}
name: {{ include "tercet.fullname" . }}
{{- end -}}

{{- define "tercet.stages" -}}
{{ .Values.stages | default .Values.nodes }}
{{- end -}}

{{- define "tercet.claim" -}}
{{ .Values.persistence.existingClaim | default (printf "%s-models" (include "tercet.fullname" .)) }}
{{- end -}}

{{- define "tercet.isScaled" -}}
{{- if or (gt (int .Values.replicas) 1) .Values.autoscaling.kind -}}true{{- end -}}
{{- end -}}
