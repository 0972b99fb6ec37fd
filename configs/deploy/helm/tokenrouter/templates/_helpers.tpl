{{- define "tokenrouter.name" -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "tokenrouter.selector" -}}
app.kubernetes.io/name: tokenrouter
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "tokenrouter.labels" -}}
{{ include "tokenrouter.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* The deployment's models by name; fails with a reason if the YAML is none. */}}
{{- define "tokenrouter.models" -}}
{{- $deployment := fromYaml .Values.deployment -}}
{{- with $deployment.Error }}{{ fail (printf "deployment is no YAML mapping: %s" .) }}{{ end -}}
{{- toYaml (required "deployment names no models: pass --set-file deployment=FILE" $deployment.models | default dict) }}
{{- end }}

{{/* A model's name as a part of DNS names and labels. */}}
{{- define "tokenrouter.dns" -}}
{{ . | lower | replace "." "-" | replace "_" "-" }}
{{- end }}

{{/* Which pod serves a model: one label a model, so that a model can move to a pod of its own. */}}
{{- define "tokenrouter.serves" -}}
tokenrouter/model.{{ include "tokenrouter.dns" . }}: "true"
{{- end }}

{{/* GPUs of the pod: enough for the highest index that a model names. */}}
{{- define "tokenrouter.gpus" -}}
{{- $highest := 0 -}}
{{- range $model := include "tokenrouter.models" . | fromYaml -}}
{{- range ($model.gpus | default (list 0)) }}{{ $highest = max $highest (int .) }}{{ end -}}
{{- end -}}
{{- .Values.gpus | default (add1 $highest) }}
{{- end }}

{{- define "tokenrouter.hardened" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: { drop: [ALL] }
{{- end }}
