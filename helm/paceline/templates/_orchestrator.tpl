{{/* What the orchestrator's container looks like in either Ray mode: dict "root" $ "rayAddress" ADDRESS-OR-EMPTY */}}
{{- define "paceline.orchestratorContainer" -}}
{{- $scope := dict "root" .root "role" "orchestrator" "model" false "shm" .root.Values.orchestrator.shmSize -}}
- name: orchestrator
  args:
    {{- include "paceline.commonArgs" $scope | nindent 4 }}
    - --verifiers={{ include "paceline.addresses" (dict "root" .root "role" "verifier") }}
    {{- if eq .root.Values.placement "separate" }}
    - --drafters={{ include "paceline.addresses" (dict "root" .root "role" "drafter") }}
    {{- end }}
    - --scheduler={{ include "paceline.component" (dict "root" .root "role" "scheduler") }}:{{ include "paceline.port" "scheduler" }}
    - --placement={{ .root.Values.placement }}
    {{- with .rayAddress }}
    - --ray-address={{ . }}
    {{- end }}
  {{- include "paceline.container" $scope | nindent 2 }}
  env:
    - name: PACELINE_ORCHESTRATOR_ADVERTISE_HOST
      valueFrom:
        fieldRef:
          fieldPath: status.podIP
    {{- include "paceline.rayEnv" .root | nindent 4 }}
  volumeMounts:
    {{- include "paceline.volumeMounts" $scope | nindent 4 }}
    {{- include "paceline.rayTokenMount" .root | nindent 4 }}
{{- end -}}

{{- define "paceline.rayEnv" -}}
- name: RAY_USAGE_STATS_ENABLED
  value: "0"
- name: RAY_AUTH_MODE
  value: token
{{- if eq .Values.orchestrator.ray.mode "kuberay" }}
- name: RAY_AUTH_TOKEN_PATH
  value: /run/secrets/ray/token
{{- end }}
{{- end -}}

{{- define "paceline.rayTokenMount" -}}
{{- if eq .Values.orchestrator.ray.mode "kuberay" -}}
- name: ray-token
  mountPath: /run/secrets/ray
  readOnly: true
{{- end -}}
{{- end -}}

{{- define "paceline.rayTokenVolume" -}}
{{- if eq .Values.orchestrator.ray.mode "kuberay" -}}
- name: ray-token
  secret:
    secretName: {{ .Values.orchestrator.ray.kuberay.authTokenSecret.name }}
    defaultMode: 0440
    items:
      - key: {{ .Values.orchestrator.ray.kuberay.authTokenSecret.key }}
        path: token
{{- end -}}
{{- end -}}
