{{/* A pod, by: root; pod (its name); entry, whether the entry model is there; hosts, whether models are elsewhere; load,
what it loads then; gpus; resources. */}}
{{- define "tokenrouter.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
shareProcessNamespace: true # the pause process reaps what engines' worker processes leave behind
terminationGracePeriodSeconds: {{ add .root.Values.exitTimeoutSeconds (include "tokenrouter.drain" . | int) 15 }}
{{- with .root.Values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .root.Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .root.Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .root.Values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 1000
  runAsGroup: 1000
  fsGroup: 1000
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: { type: RuntimeDefault }
{{- if not .root.Values.repository }}
initContainers:
  - name: build-repository
    image: "{{ .root.Values.image.repository }}:{{ .root.Values.image.tag }}"
    imagePullPolicy: {{ .root.Values.image.pullPolicy }}
    command:
      - python3
      - -m
      - tools.build_repository
      - --config
      - configs/deployment/deployment.yaml
      {{- if .hosts }}
      - --overlay
      - configs/deployment/hosts.yaml
      {{- end }}
      - --output
      - /models
    resources:
      requests: { cpu: "1", memory: 2Gi }
      limits: { memory: 4Gi }
    securityContext: {{- include "tokenrouter.hardened" . | nindent 6 }}
    volumeMounts:
      - { name: deployment, mountPath: /opt/tokenrouter/configs/deployment, readOnly: true }
      - { name: models, mountPath: /models }
      - { name: checkpoints, mountPath: /checkpoints, readOnly: true }
      - { name: tmp, mountPath: /tmp }
{{- end }}
containers:
  - name: tokenrouter # tritonserver, its models and the OpenAI-compatible server, supervised by tools.launch
    image: "{{ .root.Values.image.repository }}:{{ .root.Values.image.tag }}"
    imagePullPolicy: {{ .root.Values.image.pullPolicy }}
    args:
      - /opt/tokenrouter/tools/container/serve.sh
      - --ready-timeout={{ .root.Values.startupTimeoutSeconds }}
      - {{ ternary "--openai" "--no-openai" (and .entry .root.Values.openai.enabled) }}
      {{- if .hosts }}
      - --no-greeting
      - --load={{ join "," .load }}
      {{- end }}
      {{- with .root.Values.arguments }}{{ toYaml . | nindent 6 }}{{ end }}
    env:
      - { name: TOKENROUTER_EXIT_TIMEOUT_S, value: {{ .root.Values.exitTimeoutSeconds | quote }} }
      - { name: TOKENROUTER_MPS, value: {{ ternary "1" "0" .root.Values.mps | quote }} }
      {{- if .root.Values.openai.apiKeySecret }}
      - name: TOKENROUTER_API_KEY
        valueFrom: { secretKeyRef: { name: {{ .root.Values.openai.apiKeySecret }}, key: api-key } }
      {{- end }}
      {{- if and .entry .root.Values.openai.tlsSecret }}
      - { name: TOKENROUTER_TLS_CERT, value: /tls/tls.crt }
      - { name: TOKENROUTER_TLS_KEY, value: /tls/tls.key }
      {{- end }}
      {{- if .root.Values.adminKeySecret }}
      - name: TOKENROUTER_ADMIN_KEY
        valueFrom: { secretKeyRef: { name: {{ .root.Values.adminKeySecret }}, key: admin-key } }
      {{- end }}
      {{- range $name, $value := .root.Values.environment }}
      - { name: {{ $name }}, value: {{ $value | quote }} }
      {{- end }}
    ports:
      - { name: http, containerPort: 8000 }
      - { name: grpc, containerPort: 8001 }
      - { name: metrics, containerPort: 8002 }
      - { name: supervisor, containerPort: 8003 }
      {{- if and .entry .root.Values.openai.enabled }}
      - { name: openai, containerPort: 9000 }
      {{- end }}
      {{- if and .hosts (not .entry) }}
      - { name: channel, containerPort: 8004 }
      {{- end }}
    startupProbe:
      httpGet: { path: /readyz, port: supervisor }
      periodSeconds: 10
      timeoutSeconds: 5
      failureThreshold: {{ div (add .root.Values.startupTimeoutSeconds 9) 10 }}
    readinessProbe:
      httpGet: { path: /readyz, port: supervisor }
      periodSeconds: 5
      timeoutSeconds: 5
    livenessProbe: # true while it restarts something; the supervisor ends by itself when it gives up
      httpGet: { path: /healthz, port: supervisor }
      periodSeconds: 10
      timeoutSeconds: 10
      failureThreshold: 6
    lifecycle:
      preStop: # callers learn of the end before the server does
        exec: { command: [sleep, {{ (include "tokenrouter.drain" . | int) | quote }}] }
    resources:
      {{- $resources := deepCopy .resources }}
      {{- if .gpus }}
      {{- $_ := set $resources "limits" (merge (dict "nvidia.com/gpu" .gpus) ($resources.limits | default dict)) }}
      {{- end }}
      {{- toYaml $resources | nindent 6 }}
    securityContext: {{- include "tokenrouter.hardened" . | nindent 6 }}
    volumeMounts:
      - { name: models, mountPath: /models, readOnly: true }
      - { name: checkpoints, mountPath: /checkpoints, readOnly: true }
      - { name: cache, mountPath: /var/lib/tokenrouter }
      - { name: tmp, mountPath: /tmp }
      - { name: shm, mountPath: /dev/shm }
      {{- if and .entry .root.Values.openai.tlsSecret }}
      - { name: tls, mountPath: /tls, readOnly: true }
      {{- end }}
      {{- if and .hosts (eq .root.Values.hosts.tls "mtls") }}
      - { name: channel-tls, mountPath: /etc/tokenrouter/tls, readOnly: true }
      {{- end }}
volumes:
  {{- if not .root.Values.repository }}
  - name: deployment
    configMap: { name: {{ include "tokenrouter.name" .root }} }
  {{- end }}
  - name: checkpoints
    {{- toYaml .root.Values.checkpoints | nindent 4 }}
  - name: cache
    {{- toYaml .root.Values.cache | nindent 4 }}
  - name: models # configurations and trained routers, no weights
    {{- toYaml (.root.Values.repository | default (dict "emptyDir" (dict "sizeLimit" "8Gi"))) | nindent 4 }}
  - name: tmp # the token channel's sockets, MPI's and MPS's files
    emptyDir: {}
  - name: shm
    emptyDir: { medium: Memory, sizeLimit: {{ .root.Values.sharedMemory }} }
  {{- if and .entry .root.Values.openai.tlsSecret }}
  - name: tls
    secret: { secretName: {{ .root.Values.openai.tlsSecret }}, defaultMode: 0440 }
  {{- end }}
  {{- if and .hosts (eq .root.Values.hosts.tls "mtls") }}
  - name: channel-tls # read again at every handshake, so that it may be renewed while all run
    secret: { secretName: {{ .pod }}-channel, defaultMode: 0440 }
  {{- end }}
{{- end }}
