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

{{/* Seconds in which callers learn of a pod's end before its server does. */}}
{{- define "tokenrouter.drain" -}}
5
{{- end }}

{{/* Every replica of every model: its name -> the model's part of the deployment. */}}
{{- define "tokenrouter.replicas" -}}
{{- range $name, $model := include "tokenrouter.models" . | fromYaml }}
{{- range $number := until ($model.replicas | default 1 | int) }}
{{ ternary $name (printf "%s_%d" $name $number) (eq $number 0) }}: {{ $model | toJson }}
{{- end }}
{{- end }}
{{- end }}

{{/* GPUs of a model's own pod: enough for the highest index that it names. */}}
{{- define "tokenrouter.model-gpus" -}}
{{- $highest := 0 -}}
{{- range (.gpus | default (list 0)) }}{{ $highest = max $highest (int .) }}{{ end -}}
{{- add1 $highest }}
{{- end }}

{{/* What the entry model's pod loads: it, and its other names. */}}
{{- define "tokenrouter.entries" -}}
{{- $entry := (fromYaml .Values.deployment).entry | default dict -}}
{{- $aliases := ternary $entry.aliases (dict "ensemble" nil "tensorrt_llm_bls" nil) (hasKey $entry "aliases") -}}
{{- $names := concat (list ($entry.name | default "tokenrouter")) (keys ($aliases | default dict) | sortAlpha) -}}
{{- with $entry.unary }}{{ $names = append $names . }}{{ end -}}
{{- toYaml $names }}
{{- end }}

{{/* What the layout adds to the deployment: where each model is, and who may call it there. */}}
{{- define "tokenrouter.hosts" -}}
{{- $name := include "tokenrouter.name" . -}}
{{- $namespace := .Release.Namespace -}}
entry: { routed_orchestrators: {{ max 1 (int .Values.replicas) }} }
tls: { mode: {{ .Values.hosts.tls }}, folder: /etc/tokenrouter/tls, peers: [{{ printf "%s.%s.svc" $name $namespace | quote }}] }
models:
{{- range $model, $own := include "tokenrouter.models" . | fromYaml }}
  {{ $model }}:
    listen: 0.0.0.0
    host:
    {{- range $number := until ($own.replicas | default 1 | int) }}
      {{- $replica := ternary $model (printf "%s_%d" $model $number) (eq $number 0) }}
      - {{ printf "%s-%s.%s.svc" $name (include "tokenrouter.dns" $replica) $namespace }}
    {{- end }}
{{- end }}
{{- end }}
