{{- /*
The pod of a server, or of a node of a group. Called with `root` (the chart's own context) and `role`: `alone`, `leader`
(node 0 of a group, which has the router) or `worker`.
*/ -}}
{{- define "tercet.pod" -}}
{{- $root := .root -}}
{{- $isGroup := ne .role "alone" -}}
{{- $answers := ne .role "worker" -}}
{{- $keys := include "tercet.keys" $root -}}
{{- $models := include "tercet.models" $root -}}
metadata:
  labels:
    {{- include "tercet.selector" $root | nindent 4 }}
    inference.networking.k8s.io/engine-type: tercet
    {{- with $root.Values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    # A changed secret means a new pod.
    {{- if $models }}
    checksum/models: {{ printf "%s%s" (toYaml $root.Values.models) (toYaml $root.Values.modelDefaults) | sha256sum }}
    {{- end }}
    checksum/secret: {{ printf "%s/%s/%s" $root.Values.secrets.hfToken $root.Values.secrets.apiKey $root.Values.secrets.groupToken | sha256sum }}
    {{- with $root.Values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "tercet.serviceAccount" $root }}
  automountServiceAccountToken: false
  # Else every Service of the namespace becomes variables: one called `prometheus` would set PROMETHEUS_PORT.
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ add $root.Values.gracefulTerminationSeconds 20 }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 1000
    runAsGroup: 1000
    fsGroup: 1000
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile:
      type: RuntimeDefault
  {{- with $root.Values.image.pullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $root.Values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with $root.Values.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  containers:
    - name: tercet
      image: {{ printf "%s:%s" $root.Values.image.repository ($root.Values.image.tag | default $root.Chart.AppVersion) | quote }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      {{- with $root.Values.args }}
      args:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      env:
        {{- if $models }}
        - name: MODELS_FILE
          value: /models-file/models.yaml
        {{- else }}
        - name: MODEL_ID
          value: {{ $root.Values.model.id | quote }}
        {{- with $root.Values.model.revision }}
        - name: REVISION
          value: {{ . | quote }}
        {{- end }}
        {{- end }}
        # A pod has no right to ports below 1024 on every cluster; the Service has the usual one.
        - name: PORT
          value: "8080"
        - name: JSON_OUTPUT
          value: "true"
        - name: GRACEFUL_TERMINATION_TIMEOUT
          value: {{ $root.Values.gracefulTerminationSeconds | quote }}
        {{- if $isGroup }}
        # Of the group: LeaderWorkerSet's variables say how many nodes there are and which one this is.
        - name: NUM_STAGE
          value: {{ include "tercet.stages" $root | quote }}
        {{- end }}
        {{- $shards := include "tercet.shards" $root }}
        {{- if and $root.Values.gpus (not $models) }}
        - name: NUM_SHARD
          value: {{ $shards | quote }}
        {{- end }}
        {{- if gt (int $root.Values.copies) 1 }}
        - name: NUM_REPLICA
          value: {{ $root.Values.copies | quote }}
        {{- end }}
        # Not on the volume of the models, which others may be able to write to: kernels that Triton has compiled are
        # loaded from here.
        - name: XDG_CACHE_HOME
          value: /cache
        {{- range $name, $value := $root.Values.env }}
        - name: {{ $name }}
          value: {{ $value | quote }}
        {{- end }}
        {{- if include "tercet.secret" $root }}
        {{- range list "HF_TOKEN" "API_KEY" "GROUP_TOKEN" }}
        - name: {{ . }}
          valueFrom:
            secretKeyRef:
              name: {{ include "tercet.secret" $root }}
              key: {{ . }}
              optional: {{ not (and $isGroup (eq . "GROUP_TOKEN")) }}
        {{- end }}
        {{- end }}
        {{- if and $keys $answers }}
        - name: KEYS_FILE
          value: /keys/keys.yaml
        {{- end }}
        {{- with $root.Values.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- if $answers }}
      ports:
        - name: http
          containerPort: 8080
      # The server answers 503 while it loads and while it drains.
      startupProbe:
        httpGet:
          path: /health
          port: http
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: {{ max 1 (div (add $root.Values.startupSeconds 4) 5) }}
      readinessProbe:
        httpGet:
          path: /health
          port: http
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 2
      # Later than readiness: the launcher ends by itself when a process dies or hangs, so this is the last resort.
      livenessProbe:
        httpGet:
          path: /health
          port: http
        periodSeconds: 15
        timeoutSeconds: 10
        failureThreshold: 8
      # Until the cluster has stopped sending requests here: the server refuses them as soon as it is told to stop.
      lifecycle:
        preStop:
          exec:
            command: ["sleep", "5"]
      {{- end }}
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities:
          drop: [ALL]
          {{- if and $isGroup $root.Values.rdma.resource }}
          # Memory that a network card reads and writes by itself stays in place.
          add: [IPC_LOCK]
          {{- end }}
      resources:
        {{- $resources := deepCopy $root.Values.resources }}
        {{- if $root.Values.gpus }}
        {{- $gpu := dict "nvidia.com/gpu" (toString $root.Values.gpus) }}
        {{- if and $isGroup $root.Values.rdma.resource }}
        {{- $_ := set $gpu $root.Values.rdma.resource (toString $root.Values.rdma.count) }}
        {{- end }}
        {{- $resources = merge (dict "limits" (merge $gpu ($resources.limits | default dict))) $resources }}
        {{- end }}
        {{- toYaml $resources | nindent 8 }}
      volumeMounts:
        - name: models
          mountPath: /data
        - name: cache
          mountPath: /cache
        - name: tmp
          mountPath: /tmp
        - name: shared-memory
          mountPath: /dev/shm
        {{- if and $keys $answers }}
        # The whole folder: a file that is mounted alone never changes.
        - name: keys
          mountPath: /keys
          readOnly: true
        {{- end }}
        {{- if $models }}
        - name: models-file
          mountPath: /models-file
          readOnly: true
        {{- end }}
  volumes:
    - name: models
      {{- if $root.Values.persistence.enabled }}
      persistentVolumeClaim:
        claimName: {{ include "tercet.claim" $root }}
      {{- else }}
      emptyDir: {}
      {{- end }}
    - name: cache
      emptyDir:
        sizeLimit: {{ $root.Values.scratchSize }}
    - name: tmp
      emptyDir:
        sizeLimit: {{ $root.Values.scratchSize }}
    - name: shared-memory
      emptyDir:
        medium: Memory
        sizeLimit: {{ $root.Values.sharedMemory }}
    {{- if and $keys $answers }}
    - name: keys
      secret:
        secretName: {{ $keys }}
    {{- end }}
    {{- if $models }}
    - name: models-file
      configMap:
        name: {{ $models }}
    {{- end }}
  {{- with $root.Values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $root.Values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $root.Values.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $root.Values.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}
