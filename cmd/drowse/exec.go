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

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/guest/audit"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// awake connects to the agent of a VM. It wakes a sleeping VM first.
func (a *app) awake(ctx context.Context, s *sandbox.Host, name string) (*guest.Client, error) {
	c, err := s.Sandbox(name).Agent(ctx)
	if s.Cluster != nil && errors.Is(err, sandbox.ErrNotFound) {
		if err := s.Cluster.Claim(ctx, name, nil); err != nil {
			return nil, err
		}
		c, err = s.Sandbox(name).Agent(ctx)
	}
	if !errors.Is(err, sandbox.ErrNotRunning) {
		return c, err
	}
	r, gerr := s.State.Get(name)
	if gerr != nil {
		return nil, gerr
	}
	if r.Phase != state.Asleep && r.Phase != state.Starting && r.Phase != state.Running {
		return nil, fmt.Errorf("%w: %s", err, r.Problem)
	}
	if s, err = a.launching(ctx); err != nil {
		return nil, err
	}
	// BringUp, and not Wake: a VM that crashes at this moment must keep its disk.
	rep, err := s.Sandbox(name).BringUp(ctx)
	if err != nil {
		return nil, err
	}
	a.warnHooks(name, rep.Hooks)
	return s.Sandbox(name).Agent(ctx)
}

// execFlags say how to run a command in a guest.
type execFlags struct {
	cmd                   guest.Cmd
	tty, interA, noConfig bool
}

// add adds the flags. of names what else has a user and a working directory.
func (e *execFlags) add(cmd *cobra.Command, of string) {
	f := cmd.Flags()
	f.BoolVarP(&e.interA, "interactive", "i", false, "connect stdin to the command")
	f.BoolVarP(&e.tty, "tty", "t", false, "run the command in a terminal")
	f.StringArrayVarP(&e.cmd.Env, "env", "e", nil, "set a variable"+of+": KEY=VALUE, or KEY for the value that it has here")
	f.StringVarP(&e.cmd.Dir, "workdir", "w", "", "working directory"+of+" (default: the image's, else /)")
	f.StringVarP(&e.cmd.User, "user", "u", "", "user"+of+", or user:group (default: the image's, else root)")
	f.BoolVar(&e.noConfig, "no-image-config", false, "ignore user, working directory and variables of the VM's image")
}

// complete completes a command from the VM's image. With --no-config it adds only the variables of the VM's proxy.
func (e *execFlags) complete(b *sandbox.Sandbox, c guest.Cmd) (guest.Cmd, error) {
	if !e.noConfig {
		return b.Command(c)
	}
	env, err := b.ProxyEnvironment()
	c.Env = slices.Concat(env, c.Env)
	return c, err
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
		RunE: a.onHost(func(cmd *cobra.Command, args []string, s *sandbox.Host) error {
			c := e.cmd
			if c.Argv = afterDashes(args[1:]); len(c.Argv) == 0 {
				return usageError{errors.New("no command: see `drowse exec --help`")}
			}
			if detach && (len(secrets) > 0 || c.Changes) {
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
			client, err := a.awake(cmd.Context(), s, args[0])
			if err != nil {
				return err
			}
			defer client.Close()
			back, err := lendSecrets(cmd.Context(), s, args[0], list)
			if err != nil {
				return err
			}
			defer back()
			if c, err = e.complete(s.Sandbox(args[0]), c); err != nil {
				return err
			}
			if detach {
				return a.startDetached(cmd.Context(), client, args[0], c, &e)
			}
			return a.execute(cmd.Context(), client, c, &e, keys, func(doc execDoc) any { return doc })
		}),
	}
	f := cmd.Flags()
	f.SetInterspersed(false)
	e.add(cmd, "")
	f.BoolVarP(&detach, "detach", "d", false, "do not wait for the command, and print the name of its process, for \"drowse attach\"")
	detachKeysFlag(cmd, &keysAre)
	f.StringVar(&envFile, "env-file", "", "set variables from a file with lines KEY=VALUE, - for stdin; -e overrides them")
	f.BoolVar(&e.cmd.Changes, "changes", false, "record in the audit trail which paths of the disk change meanwhile; see \"drowse audit --changes\"")
	f.DurationVar(&e.cmd.Timeout, "timeout", 0, "kill the command after this time")
	secretFlag(cmd, &secrets, " for the duration of the command, as a file in "+guest.SecretsDir)
	return cmd
}

// startDetached starts a command and leaves it.
func (a *app) startDetached(ctx context.Context, client *guest.Client, name string, c guest.Cmd, e *execFlags) error {
	c.Detach, c.NoStdin = true, !e.interA
	id, err := startAndLeave(ctx, client, c, e)
	return a.answer(map[string]string{"name": name, "process": id}, err, func(w io.Writer) { fmt.Fprintln(w, id) })
}

// startAndLeave starts a detached command, and returns the name of its process.
func startAndLeave(ctx context.Context, client *guest.Client, c guest.Cmd, e *execFlags) (id string, err error) {
	if e.tty {
		c.Pty = &guest.Pty{Size: guest.Size{Rows: 24, Cols: 80}} // until someone attaches
	}
	p, err := client.Start(ctx, c)
	if err != nil {
		return "", err
	}
	if p.PID() == 0 { // the command did not start
		st, err := p.Wait()
		if st != nil && st.NotStarted != "" {
			return "", errors.New(st.NotStarted)
		}
		return "", err
	}
	return p.ID(), p.Close()
}

// variables returns those of a file and, after them, since the last value of a name wins, those of flags. A name
// alone takes the value that it has in this process, and is left out if it has none.
func variables(file string, flags []string, stdin io.Reader) ([]string, error) {
	vars, err := readEnv(file, stdin)
	if err != nil {
		return nil, err
	}
	for _, kv := range flags {
		key, _, ok := strings.Cut(kv, "=")
		if key == "" {
			return nil, usageError{fmt.Errorf("--env %q: use KEY=VALUE, or KEY", kv)}
		}
		if !ok {
			value, set := os.LookupEnv(key)
			if !set {
				continue
			}
			kv = key + "=" + value
		}
		vars = append(vars, kv)
	}
	return vars, nil
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
		key, _, ok := strings.Cut(line, "=")
		if key == "" || strings.ContainsAny(key, " \t") {
			return nil, usageError{fmt.Errorf("line %d of the variables is not KEY=VALUE", i+1)}
		}
		if !ok {
			value, set := os.LookupEnv(key)
			if !set {
				continue
			}
			line = key + "=" + value
		}
		vars = append(vars, line)
	}
	return vars, nil
}

// maxEnvFile bounds a file with variables, in bytes.
const maxEnvFile = 1 << 20

// execResult turns the end of a command into that of drowse.
func execResult(st *guest.ExitStatus, err error) error {
	var exit *guest.ExitError
	switch {
	case err == nil:
		return nil
	case st == nil || !errors.As(err, &exit):
		return err
	case st.TimedOut:
		return statusError(exitTimeout)
	}
	return statusError(st.Code)
}

// maxExecJSON bounds the output in one JSON document.
const maxExecJSON = 16 << 20

// execDoc is the result of a command as JSON.
type execDoc struct {
	ExitCode  int            `json:"exit_code"`
	Signal    int            `json:"signal,omitempty"`
	TimedOut  bool           `json:"timed_out,omitempty"`
	Stdout    string         `json:"stdout"`
	Stderr    string         `json:"stderr"`
	Truncated bool           `json:"truncated,omitempty"`
	Ms        float64        `json:"elapsed_ms"`
	Changes   *audit.Changes `json:"changes,omitempty"`
}

// execute runs a command at this terminal. In JSON mode it prints what document makes of the result.
func (a *app) execute(ctx context.Context, client *guest.Client, c guest.Cmd, e *execFlags, keys []byte, document func(execDoc) any) error {
	if a.json() {
		var stdout, stderr limited
		c.Stdout, c.Stderr = &stdout, &stderr
		begin := time.Now()
		st, err := client.Exec(ctx, c)
		if st == nil {
			return err
		}
		took := float64(time.Since(begin).Microseconds()) / 1000
		doc := execDoc{st.Code, st.Signal, st.TimedOut, stdout.String(), stderr.String(), stdout.cut || stderr.cut, took, st.Changes}
		if err := printJSON(a.stdout, document(doc)); err != nil {
			return err
		}
		return execResult(st, err)
	}
	st, err := a.atTerminal(ctx, e.tty, e.interA, keys, func(ctx context.Context, streams guest.IO, pty *guest.Pty) (*guest.Session, error) {
		c.IO, c.Pty = streams, pty
		return client.Start(ctx, c)
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
