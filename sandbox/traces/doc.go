// Package traces makes OpenTelemetry spans of what is done with sandboxes: one for each operation, and below it one for
// each stage that the VM's process has timed. They are made when the operation has ended, from timestamps, so nothing
// is exported on its way. Without a provider nothing is made, and nothing is in the way. docs/reference/telemetry.md
// lists spans and attributes.
package traces
