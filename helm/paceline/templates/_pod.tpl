{{/* Parts that the pods share. Arguments unless said otherwise: dict "root" $ "role" ROLE. */}}

{{- define "paceline.podMetadata" -}}
{{- $cfg := get .root.Values .role -}}
labels:
  {{- include "paceline.labels" . | nindent 2 }}
  {{- with $cfg.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
annotations:
  checksum/config: {{ include "paceline.settings" . | sha256sum }}
  {{- with $cfg.podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* Data of a role's ConfigMap. */}}
{{- define "paceline.settings" -}}
{{- $prefix := printf "PACELINE_%s_" (upper .role) -}}
{{- range $key, $value := (get .root.Values .role).settings }}
{{ $prefix }}{{ upper $key }}: {{ $value | toString | quote }}
{{- end }}
{{- end -}}

{{- define "paceline.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "paceline.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* Fields at the top of a pod's spec. */}}
{{- define "paceline.podHead" -}}
{{- $cfg := get .root.Values .role -}}
serviceAccountName: {{ include "paceline.component" . }}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: {{ include "paceline.gracePeriod" .root }}
securityContext:
  {{- include "paceline.podSecurityContext" . | nindent 2 }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with $cfg.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- if hasKey $cfg "runtimeClassName" }}
{{- with $cfg.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- end }}
{{- with $cfg.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $cfg.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $cfg.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
topologySpreadConstraints:
  {{- if $cfg.topologySpreadConstraints }}
  {{- toYaml $cfg.topologySpreadConstraints | nindent 2 }}
  {{- else }}
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "paceline.selector" . | nindent 8 }}
  {{- end }}
{{- end -}}

{{/* Image, environment, ports, probes and mounts of a role's main container; its name and args go before. */}}
{{- define "paceline.container" -}}
{{- $cfg := get .root.Values .role -}}
image: {{ include "paceline.image" (dict "root" .root "repository" $cfg.image) }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
envFrom:
  - configMapRef:
      name: {{ include "paceline.component" . }}
ports:
  - name: grpc
    containerPort: {{ include "paceline.port" .role }}
    protocol: TCP
  - name: metrics
    containerPort: {{ include "paceline.metricsPort" .role }}
    protocol: TCP
{{ include "paceline.probes" . }}
lifecycle:
  preStop:
    sleep:
      seconds: {{ .root.Values.lifecycle.preStopSeconds }}
securityContext:
  {{- include "paceline.securityContext" . | nindent 2 }}
resources:
  {{- include "paceline.resources" $cfg | nindent 2 }}
{{- end -}}

{{- define "paceline.probes" -}}
startupProbe:
  grpc:
    port: {{ include "paceline.port" .role }}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: {{ max 1 (div (int .root.Values.probes.startupSeconds) 5) }}
readinessProbe:
  grpc:
    port: {{ include "paceline.port" .role }}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: 2
livenessProbe:
  grpc:
    port: {{ include "paceline.port" .role }}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end -}}

{{/* Requests and limits with the accelerator, from a role's values. */}}
{{- define "paceline.resources" -}}
{{- $resources := deepCopy .resources -}}
{{- if hasKey . "gpu" -}}
{{- if gt (int .gpu.count) 0 -}}
{{- $limits := default (dict) $resources.limits -}}
{{- $_ := set $limits .gpu.resource (int .gpu.count) -}}
{{- $_ := set $resources "limits" $limits -}}
{{- end -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* Flags that every process takes. */}}
{{- define "paceline.commonArgs" -}}
- --host=0.0.0.0
- --port={{ include "paceline.port" .role }}
- --metrics-port={{ include "paceline.metricsPort" .role }}
- --drain-s={{ .root.Values.lifecycle.drainSeconds }}
{{- end -}}

{{/* Mounts and volumes: dict "root" $ "role" ROLE "model" BOOL "shm" SIZE-OR-EMPTY */}}
{{- define "paceline.volumeMounts" -}}
- name: tmp
  mountPath: /tmp
{{- if .shm }}
- name: shm
  mountPath: /dev/shm
{{- end }}
{{- if .model }}
- name: models
  mountPath: /var/lib/paceline/models
  readOnly: true
{{- end }}
{{- end -}}

{{- define "paceline.volumes" -}}
- name: tmp
  emptyDir: {}
{{- if .shm }}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ .shm }}
{{- end }}
{{- if .model }}
- name: models
  {{- if eq .root.Values.model.source "pvc" }}
  persistentVolumeClaim:
    claimName: {{ .root.Values.model.pvc.existingClaim }}
    readOnly: true
  {{- else }}
  emptyDir:
    sizeLimit: {{ .root.Values.model.fetch.sizeLimit }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Init container that gets the model from the package index, or nothing. */}}
{{- define "paceline.fetchModel" -}}
{{- if eq .root.Values.model.source "fetch" -}}
initContainers:
  - name: fetch-model
    image: {{ include "paceline.image" (dict "root" .root "repository" .root.Values.verifier.image) }}
    imagePullPolicy: {{ .root.Values.image.pullPolicy }}
    command: [/opt/paceline/bin/paceline]
    args:
      - models
      - fetch
      - {{ .root.Values.model.name }}
    env:
      # Models lie in the folder `models` of the cache.
      - name: PACELINE_CACHE
        value: /var/lib/paceline
      {{- with .root.Values.model.fetch.indexUrl }}
      - name: PIP_INDEX_URL
        value: {{ . | quote }}
      {{- end }}
    securityContext:
      {{- include "paceline.securityContext" . | nindent 6 }}
    resources:
      {{- toYaml .root.Values.model.fetch.resources | nindent 6 }}
    volumeMounts:
      - name: tmp
        mountPath: /tmp
      - name: models
        mountPath: /var/lib/paceline/models
{{- end -}}
{{- end -}}
