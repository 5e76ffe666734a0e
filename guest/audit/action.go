package audit

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// Kind says what is done in a guest.
type Kind string

// Values of Kind.
const (
	KindExec    Kind = "exec"     // a command
	KindShell   Kind = "shell"    // a login shell without a command
	KindAttach  Kind = "attach"   // a session with an existing process
	KindSFTP    Kind = "sftp"     // a session of the file transfer protocol; its files are not recorded
	KindCopyIn  Kind = "copy-in"  // a file or tree into the guest
	KindCopyOut Kind = "copy-out" // a file or tree out of the guest
	KindRead    Kind = "read"     // of a file's content
	KindWrite   Kind = "write"    // of a file's content
	KindMkdir   Kind = "mkdir"
	KindRemove  Kind = "remove"
	KindRename  Kind = "rename"
	KindSymlink Kind = "symlink"
	KindSignal  Kind = "signal"  // to a process, or to forget one
	KindForward Kind = "forward" // connections to one address in or beyond the guest
	KindListen  Kind = "listen"  // connections that come out of the guest
	// A secret of the VM, by the path of its file. No trail has its value.
	KindSecretSet    Kind = "secret-set"
	KindSecretRemove Kind = "secret-remove"
	// A service of the VM: what users do with it, and its own starts and exits.
	KindServiceSet   Kind = "service-set"
	KindServiceStop  Kind = "service-stop"
	KindServiceStart Kind = "service-start"
	KindServiceExit  Kind = "service-exit"
	// A service's check passed for the first time since its start, or failed, and the agent ends the service for
	// that.
	KindServiceReady     Kind = "service-ready"
	KindServiceUnhealthy Kind = "service-unhealthy"
	// A guest's request about its own VM.
	KindSelf Kind = "self"
)

// Bounds of the record of one action, in bytes. Longer values are cut.
const (
	maxArgv  = 32 << 10 // all arguments together
	maxText  = 4 << 10  // a path, a name or an address
	maxError = 1 << 10
	maxArgs  = 4096 // arguments, not bytes
)

// Action is what is about to be done in a guest. Fields that do not apply are empty.
type Action struct {
	Kind Kind `json:"kind"`
	// Via is the client that asked for the action, if it was not the program itself: "ssh".
	Via string `json:"via,omitempty"`
	// Argv is the command with its arguments, at most 32 KiB together. If they were longer, ArgvSHA256 is the hash
	// of all of them, each followed by a zero byte.
	Argv       []string `json:"argv,omitempty"`
	ArgvSHA256 string   `json:"argv_sha256,omitempty"`
	// Login reports that the command went to the user's login shell.
	Login bool `json:"login,omitempty"`
	// User is "name" or "uid", with ":group" if one was named.
	User string `json:"user,omitempty"`
	// Dir is the working directory. It is empty for a login shell that starts in the user's home directory.
	Dir    string `json:"dir,omitempty"`
	Pty    bool   `json:"pty,omitempty"`
	Detach bool   `json:"detach,omitempty"`
	// Process is the agent's name for the process that an attachment or a signal is about.
	Process string `json:"process,omitempty"`
	// Number is the number of a signal.
	Number int `json:"number,omitempty"`
	// Path is a path in the guest. To is the new name of a renamed path, or the target of a link.
	Path string `json:"path,omitempty"`
	To   string `json:"to,omitempty"`
	// HostPath is the other end of a copy.
	HostPath string `json:"host_path,omitempty"`
	// Recursive reports that everything below Path is removed.
	Recursive bool `json:"recursive,omitempty"`
	// Network and Address say where in the guest connections are made or accepted.
	Network string `json:"network,omitempty"`
	Address string `json:"address,omitempty"`
}

// Outcome says how an action ended, as the host sees it. Exit codes are the guest's claims.
type Outcome struct {
	// Exit is the exit code in a shell's terms; nil if unknown: Error then says why.
	Exit *int `json:"exit,omitempty"`
	// ExitSignal is the signal that ended the command.
	ExitSignal int  `json:"exit_signal,omitempty"`
	TimedOut   bool `json:"timed_out,omitempty"`
	// Started is the agent's name for a detached process.
	Started string `json:"started,omitempty"`
	// Connections counts the connections that were carried.
	Connections int64 `json:"connections,omitempty"`
	// BytesIn went into the guest, BytesOut came out of it: standard input and output, contents of files, or
	// connection data.
	BytesIn  int64 `json:"bytes_in"`
	BytesOut int64 `json:"bytes_out"`
	// Changes lists what changed on the guest's disk while the command ran, if Cmd.Changes of package guest was set.
	Changes *Changes `json:"changes,omitempty"`
	// CPUMs is the command's processor time in milliseconds, as the guest reports it.
	CPUMs float64 `json:"cpu_ms,omitempty"`
	// Error says why the action failed, or ended early.
	Error string `json:"error,omitempty"`
}

// Changes lists paths on a guest's disk that changed while a command ran, through it or another process, as the
// guest reports them. PathText has written the paths.
type Changes struct {
	Added   []string `json:"added,omitempty"`
	Changed []string `json:"changed,omitempty"` // contents written, replaced or opened for writing; modes and owners
	Removed []string `json:"removed,omitempty"` // with everything below them
	// More counts changes left out: a guest reports at most 512 paths of 64 KiB, and a record has at most 160 KiB.
	More uint64 `json:"more,omitempty"`
	// Partial says which changes are unknown.
	Partial string `json:"partial,omitempty"`
}

// PathText returns a path in its recorded form: unchanged if it is UTF-8, else quoted by Go's rules, with a leading
// quotation mark.
func PathText(p string) string {
	if !utf8.ValidString(p) {
		return strconv.Quote(p)
	}
	return p
}

// Bounds of Changes. The writer of the trail checks them itself.
const (
	maxChanges      = 512
	maxChangesBytes = 160 << 10 // JSON may make six times as much of them: see maxLine
)

func (c *Changes) bounded() *Changes {
	if c == nil {
		return nil
	}
	out := &Changes{More: c.More, Partial: cut(c.Partial, maxError)}
	n, room := maxChanges, maxChangesBytes
	for _, l := range []struct{ from, to *[]string }{{&c.Added, &out.Added}, {&c.Changed, &out.Changed}, {&c.Removed, &out.Removed}} {
		for i, p := range *l.from {
			if n--; n < 0 || len(p) > room {
				out.More += uint64(len(*l.from) - i)
				break
			}
			room -= len(p)
			*l.to = append(*l.to, p)
		}
	}
	return out
}

// bounded returns the action in its recorded form.
func (a Action) bounded() Action {
	a.Argv, a.ArgvSHA256 = boundedArgv(a.Argv)
	for _, s := range []*string{&a.Via, &a.User, &a.Dir, &a.Process, &a.Path, &a.To, &a.HostPath, &a.Network, &a.Address} {
		*s = cut(*s, maxText)
	}
	return a
}

func boundedArgv(argv []string) ([]string, string) {
	total := 0
	for _, s := range argv {
		total += len(s)
	}
	if total <= maxArgv && len(argv) <= maxArgs {
		return argv, ""
	}
	h := sha256.New()
	var out []string
	room := maxArgv
	for i, s := range argv {
		h.Write([]byte(s))
		h.Write([]byte{0})
		if i < maxArgs && room > 0 {
			out = append(out, cut(s, room))
			room -= len(s)
		}
	}
	return out, hex.EncodeToString(h.Sum(nil))
}

// cut returns about the first n bytes of s, never splitting a character.
func cut(s string, n int) string {
	if len(s) <= n {
		return s
	}
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n] + "[cut]"
}

func (o Outcome) bounded() Outcome {
	o.Error = cut(strings.TrimPrefix(o.Error, "guest: "), maxError)
	o.Started = cut(o.Started, maxText)
	o.Changes = o.Changes.bounded()
	return o
}

// viaKey is the context key of Via.
type viaKey struct{}

// WithVia returns a context that sets Action.Via for the actions done with it.
func WithVia(ctx context.Context, via string) context.Context {
	return context.WithValue(ctx, viaKey{}, via)
}

func via(ctx context.Context) string {
	v, _ := ctx.Value(viaKey{}).(string)
	return v
}

// Head is the first line of each file of a trail.
type Head struct {
	// Version of the format: Version.
	Version int `json:"drowse_audit"`
	// VM is the VM's id, and Name its name when the file was begun.
	VM   string `json:"vm"`
	Name string `json:"name"`
	// Part numbers the files, from 1.
	Part int `json:"part"`
	// Time is when the file was begun.
	Time time.Time `json:"time"`
	// Parent is the VM that this one is a fork of, and Snapshot what it was made from. Their own trails have what
	// was done in them.
	Parent   string `json:"parent,omitempty"`
	ParentID string `json:"parent_id,omitempty"`
	Snapshot string `json:"snapshot,omitempty"`
}

// Version is the version of the trail's format.
const Version = 1

// line is any other line of a file.
type line struct {
	Type string    `json:"type"` // typeBegin or typeEnd
	ID   string    `json:"id"`   // 16 hex digits
	Time time.Time `json:"time"`
	*Action
	By *Process `json:"by,omitempty"`
	*Outcome
	// Elapsed is from the monotonic clock: the wall clock may have been set meanwhile.
	Elapsed float64 `json:"elapsed_ms,omitempty"`
}

const (
	typeBegin = "begin"
	typeEnd   = "end"
)
