// Package events is the journal of a store: what has become of its sandboxes, in the order in which it was written
// down, by whichever process has done it. It knows nothing of VMs.
//
// The journal is a directory of segments, files with one JSON object in each line. Each event has a cursor, a number
// that only grows, and that a reader goes on from. docs/reference/events.md has the schema.
package events
