package wire

import "time"

// FileInfo is what the guest says of a file.
type FileInfo struct {
	Name string `json:"name"`
	// Kind is what it is.
	Kind string `json:"kind"`
	Size int64  `json:"size"`
	// Mode has the permissions as octal digits, with setuid, setgid and sticky.
	Mode     string    `json:"mode"`
	UID      int       `json:"uid"`
	GID      int       `json:"gid"`
	Modified time.Time `json:"modified"`
	Link     string    `json:"link,omitempty"` // target of a symbolic link
	// ETag is the version of a regular file's content: its size and time.
	ETag string `json:"etag,omitempty"`
}

// FileKinds are the values of FileInfo.Kind.
var FileKinds = []string{"file", "dir", "symlink", "fifo", "socket", "block", "char", "other"}

// Directory is GET /v1/sandboxes/NAME/files/list.
type Directory struct {
	Entries []FileInfo `json:"entries"`
}

// Mkdir is POST /v1/sandboxes/NAME/files/mkdir.
type Mkdir struct {
	Path string `json:"path"`
	// Mode is octal digits; 0755 by default.
	Mode    string `json:"mode,omitempty"`
	Parents bool   `json:"parents,omitempty"` // make missing parents; that it exists is no error then
}

// Move is POST /v1/sandboxes/NAME/files/move.
type Move struct {
	From string `json:"from"`
	To   string `json:"to"`
}

// Moved is the answer to requests that send bytes.
type Moved struct {
	Bytes int64 `json:"bytes"`
}

// FileEvent is a line of GET /v1/sandboxes/NAME/files/watch, as `drowse watch -o json`.
type FileEvent struct {
	Time time.Time `json:"time"`
	// Event is what happened. "ready" comes first, and "overflow" where events are missing.
	Event   string `json:"event"`
	Path    string `json:"path,omitempty"`
	From    string `json:"from,omitempty"` // of "renamed"
	Dir     bool   `json:"dir,omitempty"`
	Problem string `json:"problem,omitempty"`
}

// FileEvents are the values of FileEvent.Event.
var FileEvents = []string{"ready", "created", "written", "attributes", "removed", "renamed", "overflow"}
