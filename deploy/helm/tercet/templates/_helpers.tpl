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
{{- else if or .Values.secrets.hfToken .Values.secrets.apiKey -}}
{{ include "tercet.fullname" . }}
{{- end -}}
{{- end -}}

{{- define "tercet.claim" -}}
{{ .Values.persistence.existingClaim | default (printf "%s-models" (include "tercet.fullname" .)) }}
{{- end -}}

{{- define "tercet.isScaled" -}}
{{- if or (gt (int .Values.replicas) 1) .Values.autoscaling.kind -}}true{{- end -}}
{{- end -}}
