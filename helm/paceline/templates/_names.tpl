{{/* Names, labels and the table of ports. */}}

{{- define "paceline.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/* Short enough that "-orchestrator-ray-worker-..." and a StatefulSet's ordinal still fit. */}}
{{- define "paceline.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := include "paceline.name" . -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The processes of this release as {"roles": [...]}. */}}
{{- define "paceline.roles" -}}
{{- $roles := list "gateway" "verifier" "scheduler" "orchestrator" -}}
{{- if eq .Values.placement "separate" -}}
{{- $roles = append $roles "drafter" -}}
{{- end -}}
{{- dict "roles" $roles | toYaml -}}
{{- end -}}

{{- define "paceline.port" -}}
{{- get (dict "gateway" 50050 "verifier" 50051 "drafter" 50052 "scheduler" 50053 "orchestrator" 50054) . -}}
{{- end -}}

{{- define "paceline.metricsPort" -}}
{{- get (dict "gateway" 9100 "verifier" 9101 "drafter" 9102 "scheduler" 9103 "orchestrator" 9104) . -}}
{{- end -}}

{{/* Arguments of the next three: dict "root" $ "role" ROLE. */}}
{{- define "paceline.component" -}}
{{ include "paceline.fullname" .root }}-{{ .role }}
{{- end -}}

{{- define "paceline.selector" -}}
app.kubernetes.io/name: {{ include "paceline.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
{{- end -}}

{{- define "paceline.labels" -}}
{{ include "paceline.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: paceline
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* dict "root" $ "repository" REPOSITORY */}}
{{- define "paceline.image" -}}
{{- $tag := default .root.Chart.AppVersion .root.Values.image.tag -}}
{{- if .root.Values.image.registry -}}
{{- printf "%s/%s:%s" (trimSuffix "/" .root.Values.image.registry) .repository $tag -}}
{{- else -}}
{{- printf "%s:%s" .repository $tag -}}
{{- end -}}
{{- end -}}

{{- define "paceline.gracePeriod" -}}
{{- with .Values.lifecycle -}}
{{- add .preStopSeconds .drainSeconds .marginSeconds -}}
{{- end -}}
{{- end -}}

{{/* host:port of every pod of a StatefulSet: dict "root" $ "role" ROLE */}}
{{- define "paceline.addresses" -}}
{{- $component := include "paceline.component" . -}}
{{- $port := include "paceline.port" .role -}}
{{- $addresses := list -}}
{{- range $i := until (int (get .root.Values .role).replicas) -}}
{{- $addresses = append $addresses (printf "%s-%d.%s:%s" $component $i $component $port) -}}
{{- end -}}
{{- join "," $addresses -}}
{{- end -}}

{{/* Secret that holds the URL of an external Redis. */}}
{{- define "paceline.redisUrlSecret" -}}
{{- if .Values.redis.existingSecret.name -}}
{{- .Values.redis.existingSecret.name -}}
{{- else -}}
{{- include "paceline.fullname" . }}-redis-client
{{- end -}}
{{- end -}}

{{/* Directory of the target model in the pods. */}}
{{- define "paceline.modelDir" -}}
{{- if eq .Values.model.source "pvc" -}}
/var/lib/paceline/models/{{ default .Values.model.name .Values.model.pvc.path }}
{{- else -}}
/var/lib/paceline/models/{{ .Values.model.name }}
{{- end -}}
{{- end -}}

{{/* --device of a role: its values. */}}
{{- define "paceline.device" -}}
{{- if .device -}}
{{- .device -}}
{{- else if gt (int .gpu.count) 0 -}}
cuda:0
{{- else -}}
cpu
{{- end -}}
{{- end -}}
