package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"unicode"

	"github.com/containerd/log"
	"github.com/spf13/cobra"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"golang.org/x/term"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/pool"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/traces"
)

// Exit statuses besides those of a command that exec passes on.
const (
	exitFailed  = 1   // drowse failed
	exitUsage   = 2   // the command line is wrong
	exitTimeout = 124 // exec: the time limit passed
	exitExec    = 125 // exec: drowse failed, not the command
)

// usageError is a wrong command line.
type usageError struct{ error }

// statusError ends the process with a status and no message.
type statusError int

func (e statusError) Error() string { return fmt.Sprintf("exit status %d", int(e)) }

// app is the state that all commands share.
type app struct {
	state   string
	output  string
	verbose bool
	stdout  io.Writer // like stderr: a screen if it is a terminal; raw gets the terminal
	stderr  io.Writer
	log     *slog.Logger
	// provider and spans are nil until app.traces makes them.
	provider *sdktrace.TracerProvider
	spans    *traces.Traces
	// mayMake lets the command make the state directory: see makesState.
	mayMake bool
}

const defaultState = "/var/lib/drowse"

func main() {
	// The agent's protocol would log as much as a guest that breaks it likes. The returned errors suffice.
	log.L.Logger.SetOutput(io.Discard)
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// run is main without the process.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	a := &app{stdout: onScreen(stdout), stderr: onScreen(stderr)}
	defer endScreen(a.stdout)
	root := a.root()
	root.SetArgs(args)
	if word, ok := unknownWord(root, args); ok {
		root.SetArgs([]string{word})
	}
	root.SetOut(a.stdout)
	root.SetErr(a.stderr)
	cmd, err := root.ExecuteContextC(events.WithCause(ctx, events.CLI))
	a.endTraces(ctx)
	var status statusError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &status):
		return int(status)
	}
	var usage usageError
	var ex execError
	wrong := errors.As(err, &usage) || errors.Is(err, sandbox.ErrSpec) || errors.Is(err, spec.ErrMetadata)
	message := said(err.Error() + a.suggest(cmd, err))
	if a.json() || a.log == nil && wantsJSON(args) { // without a log, the command line was not read to its end
		_ = json.NewEncoder(stderr).Encode(describe(err, message, wrong))
	} else {
		fmt.Fprintln(stderr, "drowse: "+message)
	}
	switch {
	case wrong:
		return exitUsage
	case cmd != nil && slices.Contains([]string{"exec", "run", "attach"}, cmd.Name()), errors.As(err, &ex):
		return exitExec
	}
	return exitFailed
}

// printable replaces unprintable characters, such as a terminal's commands, in a message: parts of it may come from
// a registry, an archive or a guest.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if r != '\n' && r != '\t' && !unicode.IsPrint(r) {
			return unicode.ReplacementChar
		}
		return r
	}, s)
}

// said translates a message of the library into the words of commands and makes it printable.
func said(s string) string { return printable(commands.In(s)) }

// inCommands translates errors and problems in the log into the words of commands.
func inCommands(_ []string, a slog.Attr) slog.Attr {
	switch a.Key {
	case "error", "cause", "problem":
		a.Value = slog.StringValue(commands.In(a.Value.String()))
	}
	return a
}

func (a *app) root() *cobra.Command {
	state := cmp.Or(os.Getenv("DROWSE_STATE"), defaultState)
	root := &cobra.Command{
		Use:           "drowse",
		Short:         "Sandboxes that sleep: Linux VMs that occupy only disk when idle and wake in milliseconds",
		SilenceUsage:  true,
		SilenceErrors: true,
		Version:       version(),
		Args:          unknownVerb,
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error {
			if formats := outputFormats(cmd); !slices.Contains(formats, a.output) {
				return usageError{fmt.Errorf("output format %q: use %s", a.output, strings.Join(formats, " or "))}
			}
			if err := cmd.ValidateFlagGroups(); err != nil { // cobra would check later, and not return a usage error
				return usageError{fmt.Errorf("%w: see `%s --help`", err, cmd.CommandPath())}
			}
			_, a.mayMake = cmd.Annotations[stateAnnotation]
			level := slog.LevelInfo
			if a.verbose {
				level = slog.LevelDebug
			}
			a.log = slog.New(slog.NewTextHandler(a.stderr, &slog.HandlerOptions{Level: level, ReplaceAttr: inCommands}))
			return nil
		},
	}
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error { return usageError{unknownFlag(cmd, err)} })
	f := root.PersistentFlags()
	f.StringVar(&a.state, "state", state, "directory for VMs, images, kernels and snapshots ($DROWSE_STATE)")
	f.StringVarP(&a.output, "output", "o", "text", "format of stdout: text, or json (one document)")
	f.BoolVar(&a.verbose, "verbose", false, "log more to stderr")
	root.AddCommand(
		a.doctorCommand(), a.kernelCommand(), a.imageCommand(),
		a.imagesCommand(), a.pullCommand(), a.rmiCommand(),
		a.runCommand(), a.execCommand(), a.attachCommand(), a.cpCommand(), a.watchCommand(), a.diffCommand(),
		a.portForwardCommand(), a.sshCommand(), a.sshConfigCommand(), a.sshProxyCommand(), a.portCommand(),
		a.psCommand(), a.lsCommand(), a.topCommand(), a.historyCommand(), a.eventsCommand(), a.inspectCommand(), a.logsCommand(), a.auditCommand(), a.statsCommand(),
		a.versionCommand(), a.infoCommand(), a.dfCommand(),
		a.startCommand(), a.stopCommand(), a.killCommand(), a.sleepCommand(), a.wakeCommand(), a.promoteCommand(), a.renameCommand(), a.updateCommand(), a.rmCommand(),
		a.snapshotCommand(), a.archiveCommand(), a.restoreCommand(), a.forkCommand(), a.pruneCommand(), a.volumeCommand(), a.templateCommand(),
		a.limitsCommand(), a.policyCommand(), a.netCommand(), a.secretCommand(), a.serviceCommand(), a.serveCommand(), a.tokenCommand(), a.gatewayCommand(), a.mcpCommand(), a.benchCommand(), a.demoCommand(),
	)
	usageArgs(root)
	return root
}

// usageArgs turns wrong arguments of all commands into usage errors.
func usageArgs(cmd *cobra.Command) {
	if check := cmd.Args; check != nil {
		cmd.Args = func(cmd *cobra.Command, args []string) error {
			if err := check(cmd, args); err != nil {
				return usageError{fmt.Errorf("%w: see `%s --help`", err, cmd.CommandPath())}
			}
			return nil
		}
	}
	for _, c := range cmd.Commands() {
		usageArgs(c)
	}
}

const stateAnnotation = "state"

// makesState annotates commands that may make the state directory, because they put something new into it.
var makesState = map[string]string{stateAnnotation: "made"}

// store opens the store of the state directory. Only commands with makesState may make one. Any other would find
// it empty, and leave an empty directory behind a misspelt name.
func (a *app) store() (*sandbox.Host, error) {
	if _, err := os.Stat(a.state); errors.Is(err, fs.ErrNotExist) && !a.mayMake {
		return nil, fmt.Errorf("there is no state directory %s: name yours with --state or $DROWSE_STATE; `drowse run`, `kernel build` and `image build` make a new one", a.state)
	}
	h, err := sandbox.Open(a.state)
	if err != nil {
		return nil, err
	}
	// This is no launcher of VMs, but knows the values of secrets.
	l := pool.Launcher{Secrets: a.secretsFrom(h, false)}
	if processes != nil {
		l.Agent, l.Processes = agentPath(), processes
	}
	h.Cluster = clusterOf(h.State.Dir())
	return h.With(l), nil
}

// processes are the VMs of tests without /dev/kvm; nil for real ones.
var processes pool.Processes

// formatAnnotation names an additional output format of a command.
const formatAnnotation = "format"

// outputFormats returns the output formats of a command.
func outputFormats(cmd *cobra.Command) []string {
	formats := []string{"text", "json"}
	if f := cmd.Annotations[formatAnnotation]; f != "" {
		formats = append(formats, f)
	}
	return formats
}

func (a *app) json() bool { return a.output == "json" }

// print writes v as JSON, or calls text.
func (a *app) print(v any, text func(w io.Writer)) error {
	if !a.json() {
		text(a.stdout)
		return nil
	}
	return printJSON(a.stdout, v)
}

func printJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

// agentName and vmmName are the files of the guest's agent and of the program of a VM's process. They lie beside
// this program.
const (
	agentName = "drowse-agent"
	vmmName   = "drowse-vmm"
)

// vmmCommand returns the program of a VM's process. Tests are one program and replace it.
var vmmCommand = func() ([]string, error) {
	vmm := beside(vmmName)
	if _, err := os.Stat(vmm); err != nil {
		return nil, fmt.Errorf("finding the program of a VM's process: %w: build it with `make build`, and put it beside drowse", err)
	}
	return []string{vmm}, nil
}

// launcher returns the launcher of VM processes.
func (a *app) launcher() (pool.Launcher, error) {
	agent := agentPath()
	if _, err := os.Stat(agent); err != nil {
		return pool.Launcher{}, fmt.Errorf("finding the guest's agent: %w: build it with `make build`, put it beside drowse, or name it in $DROWSE_AGENT", err)
	}
	if processes != nil {
		return pool.Launcher{Agent: agent, Processes: processes}, nil
	}
	vmm, err := vmmCommand()
	return pool.Launcher{Command: vmm, Agent: agent, Supervised: true}, err
}

// agentPath returns the path of the guest's agent.
func agentPath() string { return cmp.Or(os.Getenv("DROWSE_AGENT"), beside(agentName)) }

// beside returns the path of a file beside this program, or the bare name if the program's own path is unknown.
func beside(name string) string {
	self, err := os.Executable()
	if err != nil {
		return name
	}
	return filepath.Join(filepath.Dir(self), name)
}

func isTerminal(w io.Writer) bool {
	f, ok := raw(w).(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}
