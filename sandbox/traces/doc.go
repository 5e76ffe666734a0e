// Package traces makes OpenTelemetry spans of operations on sandboxes: one for each operation, and below it one
// for each stage that the VM's process has timed. It makes them from timestamps when the operation has ended, so
// exports never delay an operation. Without a provider it makes nothing and costs nothing.
// docs/reference/telemetry.md lists spans and attributes.
package traces
