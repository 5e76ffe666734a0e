package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"unicode"

	"github.com/containerd/log"
	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/spec"
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
	tracing
	// host are the flags of where the VMs are; at is what they and the environment say, once it is resolved.
	host       hostFlags
	stateGiven bool
	resolved   bool
	at         *server // nil is this host
	atErr      error
	far        *farHost // nil until it is used
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
	defer a.closePlace()
	root := a.root()
	args, err := a.host.take(args)
	if err != nil {
		fmt.Fprintln(stderr, "drowse: "+said(err.Error()))
		return exitUsage
	}
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
	wrong := errors.As(err, &usage) || errors.Is(err, spec.ErrInvalid) || errors.Is(err, spec.ErrMetadata)
	message := said(a.fromServer(err, err.Error()) + a.suggest(cmd, err))
	if ctx.Err() != nil { // by a signal
		message = strings.ReplaceAll(message, context.Canceled.Error(), "interrupted")
	}
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
			a.stateGiven = cmd.Flags().Changed("state")
			if err := a.checkPlace(cmd); err != nil {
				return err
			}
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
	a.host.add(root)
	root.AddCommand(a.verbs()...)
	root.AddCommand(a.hostVerbs()...)
	usageArgs(root)
	return root
}

// verbs returns the commands that work here and with --host.
func (a *app) verbs() []*cobra.Command {
	return []*cobra.Command{
		a.imagesCommand(), a.pullCommand(), a.rmiCommand(), a.imageCommand(),
		a.runCommand(), a.execCommand(), a.attachCommand(), a.cpCommand(), a.portForwardCommand(), a.portCommand(),
		a.psCommand(), a.lsCommand(), a.historyCommand(), a.eventsCommand(), a.inspectCommand(), a.logsCommand(), a.statsCommand(),
		a.versionCommand(), a.infoCommand(), a.contextCommand(),
		a.startCommand(), a.stopCommand(), a.killCommand(), a.sleepCommand(), a.wakeCommand(), a.migrateCommand(), a.promoteCommand(), a.renameCommand(), a.updateCommand(), a.rmCommand(),
		a.snapshotCommand(), a.restoreCommand(), a.forkCommand(), a.pruneCommand(), a.policyCommand(), a.secretCommand(),
		a.serviceCommand(), a.volumeCommand(), a.templateCommand(), a.auditCommand(), a.diffCommand(), a.watchCommand(),
	}
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

func isTerminal(w io.Writer) bool {
	f, ok := raw(w).(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}
