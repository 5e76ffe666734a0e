// Package archtest holds the structure of the module: which package may import which,
// where unsafe may be used, that every package says what it is for, and how wide comments may be. It has only
// tests, which read the source and are done in a moment, so that every `go test ./...`
// runs them.
package archtest
