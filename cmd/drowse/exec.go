package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/sandbox/api/wire"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// execFlags say how to run a command in a guest.
type execFlags struct {
	cmd         command
	tty, interA bool
}

// command is what runs in a guest. Its TTY and Stdin are set when it starts.
type command struct {
	wire.ExecStart
	timeout  time.Duration // 0 is none
	changes  bool          // record what changes on the disk
	noConfig bool          // without user, directory and variables of the image
}

// streams are those of a command.
type streams struct {
	stdin          io.Reader // nil is an empty stdin
	stdout, stderr io.Writer
}

// exit is the end of a command. changes is for JSON.
type exit struct {
	wire.ExitStatus
	changes any
}

// session is a stream of a process in a guest. Any goroutine may call its methods.
type session interface {
	ID() string
	PID() int // 0 if it could not be started
	Done() <-chan struct{}
	Signal(int) error
	resize(rows, cols int) error
	// Close leaves a detached process, and kills any other.
	Close() error
	// wait waits for the process's end. A status other than 0 is no error.
	wait() (*exit, error)
}

// inGuest runs commands in a VM that is awake.
type inGuest interface {
	start(context.Context, command, streams) (session, error)
	attach(ctx context.Context, process string, s streams) (session, error)
	processes(context.Context) ([]wire.Process, error)
	Close() error
}

// add adds the flags. of names what else has a user and a working directory.
func (e *execFlags) add(cmd *cobra.Command, of string) {
	f := cmd.Flags()
	f.BoolVarP(&e.interA, "interactive", "i", false, "connect stdin to the command")
	f.BoolVarP(&e.tty, "tty", "t", false, "run the command in a terminal")
	f.StringArrayVarP(&e.cmd.Env, "env", "e", nil, "set a variable"+of+": KEY=VALUE, or KEY for the value that it has here")
	f.StringVarP(&e.cmd.Cwd, "workdir", "w", "", "working directory"+of+" (default: the image's, else /)")
	f.StringVarP(&e.cmd.User, "user", "u", "", "user"+of+", or user:group (default: the image's, else root)")
	f.BoolVar(&e.cmd.noConfig, "no-image-config", false, "ignore user, working directory and variables of the VM's image")
}

func (a *app) execCommand() *cobra.Command {
	var (
		e       execFlags
		secrets []string
		envFile string
		detach  bool
		keysAre string
	)
	cmd := &cobra.Command{
		Use:   "exec [flags] NAME COMMAND [ARG...]",
		Short: "Run a command in a VM",
		Long: `Run a command in a VM. A sleeping VM is woken.

The exit status is that of the command; 128 plus the signal's number if a signal ended it; 124
after --timeout; 126 or 127 if the command could not be started; 125 if drowse itself failed.

User, working directory and variables come from the VM's image unless flags set them. An image
of Debian packages or of a directory has none of these: commands run as root in / with a
minimal environment.`,
		Args: cobra.MinimumNArgs(2), ValidArgsFunction: a.completeVM,
		RunE: a.there(func(cmd *cobra.Command, args []string, p place) error {
			c := e.cmd
			if c.Command = afterDashes(args[1:]); len(c.Command) == 0 {
				return usageError{errors.New("no command: see `drowse exec --help`")}
			}
			if detach && (len(secrets) > 0 || c.changes) {
				return usageError{errors.New("--detach does not go with --secret and --changes, which end with the command")}
			}
			stdins := 0
			for _, is := range []bool{e.interA, envFile == "-", slices.ContainsFunc(secrets, func(s string) bool { return strings.HasSuffix(s, "=-") })} {
				if is {
					stdins++
				}
			}
			if stdins > 1 {
				return usageError{errors.New("stdin can be a secret, the variables or the command's, and only one of them")}
			}
			list, err := readSecrets(secrets, os.Stdin)
			if err != nil {
				return err
			}
			defer wipeSecrets(list)
			if c.Env, err = variables(envFile, c.Env, os.Stdin); err != nil {
				return err
			}
			keys, err := parseDetachKeys(keysAre)
			if err != nil {
				return err
			}
			g, err := p.guest(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			defer g.Close()
			back, err := lendSecrets(cmd.Context(), p, args[0], list)
			if err != nil {
				return err
			}
			defer back()
			if detach {
				return a.startDetached(cmd.Context(), g, args[0], c, &e)
			}
			return a.execute(cmd.Context(), g, c, &e, keys, func(doc execDoc) any { return doc })
		}),
	}
	f := cmd.Flags()
	f.SetInterspersed(false)
	e.add(cmd, "")
	f.BoolVarP(&detach, "detach", "d", false, "do not wait for the command, and print the name of its process, for \"drowse attach\"")
	detachKeysFlag(cmd, &keysAre)
	f.StringVar(&envFile, "env-file", "", "set variables from a file with lines KEY=VALUE, - for stdin; -e overrides them")
	f.BoolVar(&e.cmd.changes, "changes", false, "record in the audit trail which paths of the disk change meanwhile; see \"drowse audit --changes\"")
	f.DurationVar(&e.cmd.timeout, "timeout", 0, "kill the command after this time")
	secretFlag(cmd, &secrets, " for the duration of the command, as a file in "+spec.SecretsDir)
	return cmd
}

// startDetached starts a command and leaves it.
func (a *app) startDetached(ctx context.Context, g inGuest, name string, c command, e *execFlags) error {
	c.Detach = true
	id, err := startAndLeave(ctx, g, c, e)
	return a.answer(map[string]string{"name": name, "process": id}, err, func(w io.Writer) { fmt.Fprintln(w, id) })
}

// startAndLeave starts a detached command, and returns the name of its process.
func startAndLeave(ctx context.Context, g inGuest, c command, e *execFlags) (id string, err error) {
	c.Stdin = e.interA
	if e.tty {
		c.TTY = &wire.TTY{Rows: 24, Cols: 80} // until someone attaches
	}
	s, err := g.start(ctx, c, streams{})
	if err != nil {
		return "", err
	}
	if s.PID() == 0 { // the command did not start
		st, err := s.wait()
		if st != nil && st.NotStarted != "" {
			return "", errors.New(st.NotStarted)
		}
		return "", err
	}
	return s.ID(), s.Close()
}

// variables returns those of a file and, after them, since the last value of a name wins, those of flags.
func variables(file string, flags []string, stdin io.Reader) ([]string, error) {
	vars, err := readEnv(file, stdin)
	if err != nil {
		return nil, err
	}
	for _, kv := range flags {
		key, _, _ := strings.Cut(kv, "=")
		if key == "" {
			return nil, usageError{fmt.Errorf("--env %q: use KEY=VALUE, or KEY", kv)}
		}
		vars = addVariable(vars, kv)
	}
	return vars, nil
}

// addVariable adds KEY=VALUE, or KEY with the value that it has in this process, if any.
func addVariable(vars []string, kv string) []string {
	if !strings.Contains(kv, "=") {
		value, set := os.LookupEnv(kv)
		if !set {
			return vars
		}
		kv += "=" + value
	}
	return append(vars, kv)
}

// readEnv reads variables from a file, one in each line. It skips empty lines and those that begin with #.
func readEnv(path string, stdin io.Reader) (vars []string, err error) {
	if path == "" {
		return nil, nil
	}
	text, err := readInput("variables", path, stdin, maxEnvFile)
	if err == nil && len(text) > maxEnvFile {
		err = fmt.Errorf("reading variables: there are more than %d bytes", maxEnvFile)
	}
	if err != nil {
		return nil, err
	}
	for i, line := range strings.Split(string(text), "\n") {
		line = strings.TrimSuffix(line, "\r")
		if strings.TrimSpace(line) == "" || strings.HasPrefix(line, "#") {
			continue
		}
		key, _, _ := strings.Cut(line, "=")
		if key == "" || strings.ContainsAny(key, " \t") {
			return nil, usageError{fmt.Errorf("line %d of the variables is not KEY=VALUE", i+1)}
		}
		vars = addVariable(vars, line)
	}
	return vars, nil
}

// maxEnvFile bounds a file with variables, in bytes.
const maxEnvFile = 1 << 20

// execResult turns the end of a command into that of drowse.
func execResult(st *exit, err error) error {
	switch {
	case err != nil:
		return err
	case st.TimedOut:
		return statusError(exitTimeout)
	case st.ExitCode != 0:
		return statusError(st.ExitCode)
	}
	return nil
}

// maxExecJSON bounds the output in one JSON document.
const maxExecJSON = 16 << 20

// execDoc is the result of a command as JSON.
type execDoc struct {
	ExitCode  int     `json:"exit_code"`
	Signal    int     `json:"signal,omitempty"`
	TimedOut  bool    `json:"timed_out,omitempty"`
	Stdout    string  `json:"stdout"`
	Stderr    string  `json:"stderr"`
	Truncated bool    `json:"truncated,omitempty"`
	Ms        float64 `json:"elapsed_ms"`
	Changes   any     `json:"changes,omitempty"`
}

// execute runs a command at this terminal. In JSON mode it prints what document makes of the result.
func (a *app) execute(ctx context.Context, g inGuest, c command, e *execFlags, keys []byte, document func(execDoc) any) error {
	if a.json() {
		var stdout, stderr limited
		begin := time.Now()
		s, err := g.start(ctx, c, streams{stdout: &stdout, stderr: &stderr})
		if err != nil {
			return err
		}
		st, err := s.wait()
		if st == nil {
			return err
		}
		took := float64(time.Since(begin).Microseconds()) / 1000
		doc := execDoc{st.ExitCode, st.Signal, st.TimedOut, stdout.String(), stderr.String(), stdout.cut || stderr.cut, took, st.changes}
		if err := printJSON(a.stdout, document(doc)); err != nil {
			return err
		}
		return execResult(st, err)
	}
	st, err := a.atTerminal(ctx, e.tty, e.interA, keys, func(ctx context.Context, io streams, tty *wire.TTY) (session, error) {
		c.TTY, c.Stdin = tty, io.stdin != nil
		return g.start(ctx, c, io)
	})
	if st != nil && st.NotStarted != "" {
		fmt.Fprintln(a.stderr, "drowse: "+st.NotStarted)
	}
	return execResult(st, err)
}

// limited keeps the first maxExecJSON bytes.
type limited struct {
	strings.Builder
	cut bool
}

func (l *limited) Write(p []byte) (int, error) {
	if room := maxExecJSON - l.Len(); len(p) > room {
		l.cut = true
		l.Builder.Write(p[:room])
		return len(p), nil
	}
	return l.Builder.Write(p)
}

// afterDashes returns words without a leading --.
func afterDashes(args []string) []string {
	if len(args) > 0 && args[0] == "--" {
		return args[1:]
	}
	return args
}
