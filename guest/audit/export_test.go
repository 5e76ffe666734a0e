//go:build linux

package audit

// OpenSized is Open with another size for the files.
func OpenSized(path string, limit int64) *Trail { return &Trail{path: path, max: limit} }
