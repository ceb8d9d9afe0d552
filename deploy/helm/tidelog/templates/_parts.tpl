{{- define "labels" -}}
app.kubernetes.io/name: tidelog
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "chart" -}}
helm.sh/chart: tidelog-{{ .Chart.Version }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "broker" -}}
{{ include "labels" . }}
app.kubernetes.io/component: broker
{{- end }}

{{- define "maintain" -}}
{{ include "labels" . }}
app.kubernetes.io/component: maintain
{{- end }}

{{- define "tag" -}}
{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "environment" -}}
- configMapRef: {name: {{ .Release.Name }}}
{{- with .Values.secret.existing }}
- secretRef: {name: {{ . }}}
{{- end }}
{{- if .Values.secret.values }}
- secretRef: {name: {{ .Release.Name }}}
{{- end }}
{{- end }}

{{- define "pod-security" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "container-security" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "placement" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end }}
