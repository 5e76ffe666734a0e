// Package events is the journal of a store: what happened to its sandboxes, in the order in which the responsible
// processes recorded it. It knows nothing of VMs.
//
// The journal is a directory of segments: files with one JSON object per line. Each event has a cursor, a number
// that only grows. A reader continues from a cursor. docs/reference/events.md has the schema.
package events
