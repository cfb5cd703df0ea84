{{- define "specdec.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* 40 characters: a pod's name, which has more at its end, names the pair. */}}
{{- define "specdec.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "specdec.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "specdec.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "specdec.selector" -}}
app.kubernetes.io/name: {{ include "specdec.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "specdec.labels" -}}
{{ include "specdec.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* (dict "root" $ "image" .Values.images.x) */}}
{{- define "specdec.image" -}}
{{- $registry := .root.Values.images.registry -}}
{{- $repository := ternary (printf "%s/%s" (trimSuffix "/" $registry) .image.repository) .image.repository (ne $registry "") -}}
{{- if .image.digest -}}
{{- printf "%s@%s" $repository .image.digest -}}
{{- else -}}
{{- printf "%s:%s" $repository (.image.tag | default .root.Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{- define "specdec.engineImage" -}}
{{- $image := ternary .Values.images.engineCpu .Values.images.engine (eq .Values.gpu.mode "cpu") -}}
{{- include "specdec.image" (dict "root" . "image" $image) -}}
{{- end -}}

{{- define "specdec.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "specdec.fullname" .) -}}
{{- else -}}
{{- .Values.serviceAccount.name | default "default" -}}
{{- end -}}
{{- end -}}

{{- define "specdec.keysSecret" -}}
{{- .Values.auth.existingSecret | default (printf "%s-api-keys" (include "specdec.fullname" .)) -}}
{{- end -}}

{{- define "specdec.controlSecret" -}}
{{- .Values.control.existingSecret | default (printf "%s-control" (include "specdec.fullname" .)) -}}
{{- end -}}

{{/* The engine's headless Service, as routers look it up and as its certificate is for. */}}
{{- define "specdec.engineHost" -}}
{{- printf "%s-engine.%s.svc" (include "specdec.fullname" .) .Release.Namespace -}}
{{- end -}}

{{- define "specdec.weightsClaim" -}}
{{- .Values.weights.existingClaim | default (ternary (printf "%s-weights" (include "specdec.fullname" .)) "" (ne .Values.weights.size "")) -}}
{{- end -}}

{{/* A quantity in MiB, rounded up: (include "specdec.mebibytes" "16Gi"). */}}
{{- define "specdec.mebibytes" -}}
{{- $text := toString . -}}
{{- $number := regexFind "^[0-9]+" $text | float64 -}}
{{- $factors := dict "Ki" 0.0009765625 "Mi" 1 "Gi" 1024 "Ti" 1048576 "k" 0.00095367431640625 "M" 0.95367431640625 "G" 953.67431640625 "T" 953674.31640625 "" 0.00000095367431640625 -}}
{{- $unit := trimPrefix (regexFind "^[0-9]+" $text) $text -}}
{{- if not (hasKey $factors $unit) -}}
{{- fail (printf "%s: write a memory size as a whole number with Mi, Gi or Ti" $text) -}}
{{- end -}}
{{- mulf $number (get $factors $unit) | ceil | int64 -}}
{{- end -}}

{{/* The verifier's resources: what was asked for, /dev/shm on top, and its GPUs. */}}
{{- define "specdec.verifierResources" -}}
{{- $resources := deepCopy .Values.verifier.resources -}}
{{- $shm := include "specdec.mebibytes" .Values.engine.shmSize | int64 -}}
{{- range $kind := list "requests" "limits" -}}
{{- $amounts := get $resources $kind | default dict -}}
{{- if hasKey $amounts "memory" -}}
{{- $_ := set $amounts "memory" (printf "%dMi" (add $shm (include "specdec.mebibytes" $amounts.memory | int64))) -}}
{{- $_ := set $resources $kind $amounts -}}
{{- end -}}
{{- end -}}
{{- if eq .Values.gpu.mode "wholeNode" -}}
{{- $limits := get $resources "limits" | default dict -}}
{{- $_ := set $limits .Values.gpu.resource (.Values.gpu.perNode | int64) -}}
{{- $_ := set $resources "limits" $limits -}}
{{- else if eq .Values.gpu.mode "dra" -}}
{{- $_ := set $resources "claims" (list (dict "name" "gpus")) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{- define "specdec.draftResources" -}}
{{- $resources := deepCopy .Values.draft.resources -}}
{{- if eq .Values.gpu.mode "dra" -}}
{{- $_ := set $resources "claims" (list (dict "name" "gpus")) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* What a pair claims (dra). */}}
{{- define "specdec.claim" -}}
devices:
  requests:
    - name: gpus
      exactly:
        deviceClassName: {{ .Values.gpu.deviceClass }}
        allocationMode: ExactCount
        count: {{ include "specdec.gpus" . }}
        {{- with .Values.gpu.selectors }}
        selectors:
          {{- range . }}
          - cel:
              expression: {{ . | quote }}
          {{- end }}
        {{- end }}
{{- end -}}

{{/* A template of claims cannot be changed: another claim is another template. */}}
{{- define "specdec.claimTemplate" -}}
{{- printf "%s-engine-gpus-%s" (include "specdec.fullname" .) (include "specdec.claim" . | sha256sum | trunc 8) -}}
{{- end -}}

{{/* GPUs of a pair. */}}
{{- define "specdec.gpus" -}}
{{- add (.Values.model.tensorParallel | int64) (ternary 1 0 (eq .Values.placement "dedicated")) -}}
{{- end -}}

{{/* Settings by flag: {max-waiting: 5, auth: false} are --max-waiting=5 and --no-auth. */}}
{{- define "specdec.flags" -}}
{{- range $name, $value := . }}
{{- if kindIs "bool" $value }}
- {{ ternary (printf "--%s" $name) (printf "--no-%s" $name) $value | quote }}
{{- else if kindIs "slice" $value }}
- {{ printf "--%s=%s" $name (join "," $value) | quote }}
{{- else if kindIs "float64" $value }}
- {{ printf "--%s=%v" $name (ternary ($value | int64 | toString) ($value | toString) (eq (floor $value) $value)) | quote }}
{{- else }}
- {{ printf "--%s=%v" $name $value | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "specdec.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- define "specdec.controlFlags" -}}
- --control-secret-file=/etc/specdec/control/{{ .Values.control.secretKey }}
{{- if .Values.control.tls.existingSecret }}
- --control-tls-cert=/etc/specdec/control-tls/tls.crt
- --control-tls-key=/etc/specdec/control-tls/tls.key
- --control-tls-ca=/etc/specdec/control-tls/ca.crt
{{- end }}
{{- end -}}

{{- define "specdec.controlMounts" -}}
- name: control
  mountPath: /etc/specdec/control
  readOnly: true
{{- if .Values.control.tls.existingSecret }}
- name: control-tls
  mountPath: /etc/specdec/control-tls
  readOnly: true
{{- end }}
{{- end -}}

{{- define "specdec.controlVolumes" -}}
- name: control
  secret:
    secretName: {{ include "specdec.controlSecret" . }}
{{- if .Values.control.tls.existingSecret }}
- name: control-tls
  secret:
    secretName: {{ .Values.control.tls.existingSecret }}
{{- end }}
{{- end -}}

{{- define "specdec.pullSecrets" -}}
{{- with .Values.images.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* What verifier and draft share: the channel, the models, caches. */}}
{{- define "specdec.engineMounts" -}}
- name: shm
  mountPath: /dev/shm
- name: weights
  mountPath: {{ .Values.weights.mountPath }}
  {{- with .Values.weights.subPath }}
  subPath: {{ . }}
  {{- end }}
  {{- if .Values.weights.readOnly }}
  readOnly: true
  {{- end }}
- name: cache
  mountPath: /cache
- name: tmp
  mountPath: /tmp
{{- end -}}

{{/* (dict "own" "entries as YAML" "extra" list): a user's entry takes the place of the chart's. */}}
{{- define "specdec.env" -}}
{{- $names := list -}}
{{- range .extra -}}{{- $names = append $names .name -}}{{- end -}}
{{- $env := list -}}
{{- range (fromYamlArray .own) -}}{{- if not (has .name $names) -}}{{- $env = append $env . -}}{{- end -}}{{- end -}}
{{- toYaml (concat $env .extra) -}}
{{- end -}}

{{- define "specdec.logEnv" -}}
- name: SPECDEC_LOG_LEVEL
  value: {{ .Values.logLevel }}
- name: SPECDEC_LOG_FORMAT
  value: {{ .Values.logFormat }}
{{- end -}}

{{- define "specdec.engineEnv" -}}
- name: POD_NAME
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
- name: POD_IP
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
{{ include "specdec.logEnv" . }}
- name: HF_HOME
  value: {{ .Values.weights.mountPath }}/huggingface
# Code of models (--trust-remote-code) is unpacked here; HF_HOME may be read-only.
- name: HF_MODULES_CACHE
  value: /cache/huggingface/modules
{{- if or .Values.huggingface.offline .Values.weights.readOnly }}
- name: HF_HUB_OFFLINE
  value: "1"
{{- end }}
{{- with .Values.huggingface.endpoint }}
- name: HF_ENDPOINT
  value: {{ . | quote }}
{{- end }}
{{- with .Values.huggingface.existingSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: {{ $.Values.huggingface.secretKey }}
{{- end }}
{{- if ne .Values.gpu.mode "cpu" }}
- name: CUDA_DEVICE_ORDER
  value: PCI_BUS_ID
{{- end }}
{{- end -}}

{{/* The draft's on top. Its container has asked for no GPU; the verifier's has, for all of the node. */}}
{{- define "specdec.draftEnv" -}}
{{ include "specdec.engineEnv" . }}
{{- if and (ne .Values.draft.drafter "ngram") (eq .Values.gpu.mode "wholeNode") }}
- name: NVIDIA_VISIBLE_DEVICES
  value: all
- name: NVIDIA_DRIVER_CAPABILITIES
  value: compute,utility
{{- end }}
{{- end -}}

{{/* What cannot work, with a sentence that says what to set. */}}
{{- define "specdec.validate" -}}
{{- $v := .Values -}}
{{- $gpus := include "specdec.gpus" . | int64 -}}
{{- if and (eq $v.draft.drafter "ngram") $v.draft.model -}}
{{- fail (printf "draft.model is %s, but draft.drafter ngram has no weights: set draft.model to \"\", or draft.drafter to causal or eagle3" $v.draft.model) -}}
{{- end -}}
{{- if and (ne $v.draft.drafter "ngram") (not $v.draft.model) -}}
{{- fail (printf "draft.drafter %s needs draft.model: its weights" $v.draft.drafter) -}}
{{- end -}}
{{- if and (eq $v.gpu.mode "cpu") (eq $v.placement "dedicated") -}}
{{- fail "placement dedicated needs a GPU for the draft: with gpu.mode cpu leave placement at shared" -}}
{{- end -}}
{{- if and (eq $v.draft.drafter "ngram") (eq $v.placement "dedicated") -}}
{{- fail "placement dedicated sets a GPU apart for the draft, and draft.drafter ngram computes on none: set placement to shared" -}}
{{- end -}}
{{- if and (eq $v.gpu.mode "cpu") (gt ($v.model.tensorParallel | int64) 1) -}}
{{- fail (printf "model.tensorParallel is %d: with gpu.mode cpu set it to 1" ($v.model.tensorParallel | int64)) -}}
{{- end -}}
{{- range $place, $name := dict "model.name" $v.model.name "draft.model" $v.draft.model -}}
{{- if and (ne $v.gpu.mode "cpu") (hasPrefix "specdec:" $name) -}}
{{- fail (printf "%s %s comes with the CPU image only: set gpu.mode to cpu, or %s to another model" $place $name $place) -}}
{{- end -}}
{{- end -}}
{{- if and $v.ingress.enabled (not (has $v.ingress.path (list "/" "/v1"))) (not (contains "rewrite" ($v.ingress.annotations | keys | join " "))) -}}
{{- fail (printf "ingress.path is %s, and the routers serve / and /v1: set it to one of them, or ingress.annotations to what your controller rewrites paths with" $v.ingress.path) -}}
{{- end -}}
{{- if and (eq $v.gpu.mode "wholeNode") (gt $gpus ($v.gpu.perNode | int64)) -}}
{{- fail (printf "model.tensorParallel %d with placement %s takes %d GPUs, and a node has gpu.perNode %d: set placement to shared, model.tensorParallel lower, or gpu.perNode to what the nodes have" ($v.model.tensorParallel | int64) $v.placement $gpus ($v.gpu.perNode | int64)) -}}
{{- end -}}
{{- if and (eq $v.gpu.mode "dra") (semverCompare "<1.34.0-0" .Capabilities.KubeVersion.Version) -}}
{{- fail (printf "gpu.mode dra needs Kubernetes 1.34 (resource.k8s.io/v1), and this is %s: set gpu.mode to wholeNode" .Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- if and (ne $v.gpu.mode "cpu") (eq $v.placement "shared") (ge ($v.shared.gpu | int64) ($v.model.tensorParallel | int64)) -}}
{{- fail (printf "shared.gpu is %d, but the target has GPUs 0 to %d" ($v.shared.gpu | int64) (sub ($v.model.tensorParallel | int64) 1)) -}}
{{- end -}}
{{- if and (gt ($v.engine.replicas | int64) 1) (not $v.weights.readOnly) $v.weights.size (not $v.weights.existingClaim) (has $v.weights.accessMode (list "ReadWriteOnce" "ReadWriteOncePod")) -}}
{{- fail (printf "engine.replicas is %d, and a %s volume is for one node: set weights.accessMode to ReadWriteMany, or weights.existingClaim to a claim that several nodes may mount (with weights.readOnly), or weights.size to \"\"" ($v.engine.replicas | int64) $v.weights.accessMode) -}}
{{- end -}}
{{- if and $v.weights.readOnly (not $v.weights.existingClaim) -}}
{{- fail "weights.readOnly needs weights.existingClaim: a new volume is empty" -}}
{{- end -}}
{{- if and $v.router.autoscaling.enabled (gt ($v.router.autoscaling.minReplicas | int64) ($v.router.autoscaling.maxReplicas | int64)) -}}
{{- fail (printf "router.autoscaling.minReplicas %d is above maxReplicas %d" ($v.router.autoscaling.minReplicas | int64) ($v.router.autoscaling.maxReplicas | int64)) -}}
{{- end -}}
{{- if and $v.router.autoscaling.enabled (not (hasKey ($v.router.resources.requests | default dict) "cpu")) -}}
{{- fail "router.autoscaling needs router.resources.requests.cpu: targetCPU is a share of it" -}}
{{- end -}}
{{- range $part := list "verifier" "draft" -}}
{{- range $kind := list "requests" "limits" -}}
{{- range $resource, $_ := get (get $v $part).resources $kind | default dict -}}
{{- if hasPrefix (printf "%s/" (splitList "/" $v.gpu.resource | first)) $resource -}}
{{- fail (printf "%s.resources.%s has %s: two requests get two sets of GPUs, which cannot share memory; set gpu.mode, gpu.perNode and placement" $part $kind $resource) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- /* What the chart sets by a value of its own, and what the verifier refuses. */ -}}
{{- $values := dict "--model" "model.name" "--served-model-name" "model.servedName" "--max-model-len" "model.maxLength" "--max-num-seqs" "verifier.maxSessions" "--host" "listen" -}}
{{- if ne $v.gpu.mode "cpu" -}}
{{- $values = merge $values (dict "--tensor-parallel-size" "model.tensorParallel" "-tp" "model.tensorParallel") -}}
{{- end -}}
{{- if and (ne $v.gpu.mode "cpu") (eq $v.placement "shared") (ne $v.draft.drafter "ngram") -}}
{{- $_ := set $values "--gpu-memory-utilization" "shared.gpuMemoryUtilization" -}}
{{- end -}}
{{- $others := list "--port" "--worker-cls" "--scheduler-cls" "--speculative-config" "-sc" "--spec-method" "--spec-model" "--spec-tokens" "--pipeline-parallel-size" "-pp" "--data-parallel-size" "-dp" -}}
{{- range $v.verifier.extraArgs -}}
{{- $flag := regexFind "^[^=.]*" (toString .) | replace "_" "-" -}}
{{- if hasKey $values $flag -}}
{{- fail (printf "verifier.extraArgs has %s: leave it out and set %s" $flag (get $values $flag)) -}}
{{- else if has $flag $others -}}
{{- fail (printf "verifier.extraArgs has %s: leave it out, the verifier sets or refuses it itself" $flag) -}}
{{- end -}}
{{- end -}}
{{- if gt ($v.engine.stallSeconds | int64) ($v.engine.deadSeconds | int64) -}}
{{- fail "engine.stallSeconds is above engine.deadSeconds: a pair would be restarted before it is not ready" -}}
{{- end -}}
{{- end -}}
