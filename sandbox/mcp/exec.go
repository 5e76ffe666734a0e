package mcp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/google/jsonschema-go/jsonschema"

	"github.com/drowse-vm/drowse/guest"
)

// Limits of a command.
const (
	maxArgs     = 256
	maxArgBytes = 100 << 10 // of all arguments, or of all variables
	maxStdin    = 1 << 20
	// maxOutput is how many bytes are kept of stdout, and of stderr: half from the beginning, half from the end.
	maxOutput      = 32 << 10
	defaultSeconds = 60
	maxSeconds     = 3600
)

type execIn struct {
	one
	Command []string          `json:"command" jsonschema:"program and arguments; for shell syntax [\"sh\", \"-c\", \"...\"]"`
	Cwd     string            `json:"cwd,omitempty" jsonschema:"working directory, absolute; absent is that of the image, or /"`
	Env     map[string]string `json:"env,omitempty" jsonschema:"variables to add to the environment"`
	User    string            `json:"user,omitempty" jsonschema:"user name or id; absent is that of the image, or root"`
	Stdin   string            `json:"stdin,omitempty" jsonschema:"text for its standard input, which then ends"`
	Seconds int               `json:"timeout_seconds,omitempty" jsonschema:"after how long it is killed; absent is 60"`
}

type execOut struct {
	ExitCode   int    `json:"exit_code" jsonschema:"0 is success; 127 not found, 126 not executable, 128+N ended by signal N"`
	TimedOut   bool   `json:"timed_out,omitempty" jsonschema:"it was killed after timeout_seconds"`
	NotStarted string `json:"not_started,omitempty" jsonschema:"why it could not be started"`
	Stdout     string `json:"stdout" jsonschema:"at most 32 KiB: the beginning and the end, with a line in between that says how many bytes are left out; bytes that are not UTF-8 are replaced"`
	Stderr     string `json:"stderr" jsonschema:"as stdout"`
	Truncated  bool   `json:"truncated" jsonschema:"part of stdout or stderr is left out: write to a file and read_file it in parts"`
	// OutBytes and ErrBytes count what was written.
	OutBytes  int64   `json:"stdout_bytes" jsonschema:"bytes that it wrote"`
	ErrBytes  int64   `json:"stderr_bytes" jsonschema:"bytes that it wrote"`
	ElapsedMs float64 `json:"elapsed_ms"`
}

// bounded bounds the arguments of a command.
func bounded(in *jsonschema.Schema, name string) {
	p := property(in, name)
	p.MinItems, p.MaxItems = new(1), new(maxArgs)
}

func (s *Server) addCommands() {
	add(s, tool{
		name: "exec", title: "Run a command", destructive: true, world: len(s.o.Allow) > 0, limit: maxSeconds*time.Second + useTime,
		says: fmt.Sprintf("Run a command in a sandbox and wait for its end; wakes one that sleeps. An exit code other than 0 is a result, not an error. "+
			"Returns at most %d KiB of stdout and of stderr. It is killed after timeout_seconds (%d at most), or when the call is canceled. "+
			"Leave a server running with [\"sh\", \"-c\", \"server >/tmp/log 2>&1 &\"].", maxOutput>>10, maxSeconds),
		edit: func(in *jsonschema.Schema) {
			named(in)
			bounded(in, "command")
			between(in, "timeout_seconds", 1, maxSeconds)
			property(in, "stdin").MaxLength = new(maxStdin)
		},
	}, s.exec)
}

func checkCommand(argv []string) error {
	n := 0
	for _, a := range argv {
		if strings.ContainsRune(a, 0) {
			return errors.New("the command has a zero byte in an argument: leave it out, or write a file")
		}
		n += len(a) + 1
	}
	if len(argv) == 0 || argv[0] == "" {
		return errors.New("there is no command: give program and arguments, as [\"ls\", \"-l\"]")
	}
	if len(argv) > maxArgs || n > maxArgBytes {
		return fmt.Errorf("a command of %d arguments and %d bytes: use at most %d and %d, and write_file for more", len(argv), n, maxArgs, maxArgBytes)
	}
	return nil
}

func environment(vars map[string]string) (out []string, err error) {
	n := 0
	for _, k := range slices.Sorted(maps.Keys(vars)) {
		if k == "" || strings.ContainsAny(k, "=\x00") || strings.ContainsRune(vars[k], 0) {
			return nil, fmt.Errorf("variable %.64q: use a name without = and no zero bytes", k)
		}
		n += len(k) + len(vars[k]) + 2
		out = append(out, k+"="+vars[k])
	}
	if len(out) > maxArgs || n > maxArgBytes {
		return nil, fmt.Errorf("%d variables of %d bytes: use at most %d and %d", len(out), n, maxArgs, maxArgBytes)
	}
	return out, nil
}

func (s *Server) exec(ctx context.Context, _ *call, in execIn) (out execOut, err error) {
	b, err := s.sandbox(in.Sandbox)
	if err != nil {
		return out, err
	}
	if err := checkCommand(in.Command); err != nil {
		return out, err
	}
	env, err := environment(in.Env)
	if err != nil {
		return out, err
	}
	if len(in.Stdin) > maxStdin {
		return out, fmt.Errorf("stdin of %d bytes: use at most %d, and write_file for more", len(in.Stdin), maxStdin)
	}
	if in.Seconds < 0 || in.Seconds > maxSeconds {
		return out, fmt.Errorf("timeout_seconds %d: use 1 to %d", in.Seconds, maxSeconds)
	}
	if in.Cwd != "" {
		if err := checkPath(in.Cwd); err != nil {
			return out, err
		}
	}
	var stdout, stderr output
	cmd := guest.Cmd{Argv: in.Command, Env: env, Dir: in.Cwd, User: in.User, Timeout: time.Duration(cmp.Or(in.Seconds, defaultSeconds)) * time.Second}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(in.Stdin), &stdout, &stderr
	begun := time.Now()
	st, err := b.Exec(ctx, cmd)
	if _, failed := errors.AsType[*guest.ExitError](err); err != nil && !(failed && st != nil) {
		if errors.Is(err, guest.ErrConnectionLost) && ctx.Err() == nil {
			err = fmt.Errorf("%w: the sandbox slept, stopped or was deleted meanwhile, and the command was killed: look at list_sandboxes and run it again", err)
		}
		return out, err
	}
	out = execOut{
		ExitCode: st.Code, TimedOut: st.TimedOut, NotStarted: st.NotStarted, Stdout: stdout.text(), Stderr: stderr.text(),
		Truncated: stdout.cut() || stderr.cut(), OutBytes: stdout.n, ErrBytes: stderr.n, ElapsedMs: float64(time.Since(begun).Microseconds()) / 1000,
	}
	return out, nil
}

// output keeps the beginning and the end of what is written: maxOutput/2 bytes of each.
type output struct {
	head, tail []byte // tail is a ring once it is full
	at         int    // where the oldest byte of the ring is
	n          int64
}

func (o *output) Write(p []byte) (int, error) {
	written := len(p)
	o.n += int64(written)
	if room := maxOutput/2 - len(o.head); room > 0 {
		k := min(room, len(p))
		o.head, p = append(o.head, p[:k]...), p[k:]
	}
	if len(p) > maxOutput/2 {
		p = p[len(p)-maxOutput/2:]
	}
	if room := maxOutput/2 - len(o.tail); room > 0 {
		k := min(room, len(p))
		o.tail, p = append(o.tail, p[:k]...), p[k:]
	}
	for len(p) > 0 {
		k := copy(o.tail[o.at:], p)
		o.at, p = (o.at+k)%len(o.tail), p[k:]
	}
	return written, nil
}

func (o *output) cut() bool { return o.n > maxOutput }

// text returns what was kept, as UTF-8.
func (o *output) text() string {
	tail := string(o.tail[o.at:]) + string(o.tail[:o.at])
	if !o.cut() {
		return strings.ToValidUTF8(string(o.head)+tail, "\uFFFD")
	}
	left := fmt.Sprintf("\n[%d bytes left out]\n", o.n-int64(len(o.head)+len(o.tail)))
	return strings.ToValidUTF8(string(o.head), "\uFFFD") + left + strings.ToValidUTF8(tail, "\uFFFD")
}
