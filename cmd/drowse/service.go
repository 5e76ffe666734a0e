package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/sandbox/api/wire"
	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// serviceRunning is the state of a service that runs, ready or not: guest.ServiceRunning.
const serviceRunning = "running"

func (a *app) serviceCommand() *cobra.Command {
	type order = func(handle, context.Context, string) (records.Service, error)
	do := func(use, short string, f order) *cobra.Command {
		return &cobra.Command{
			Use: use + " NAME SERVICE", Short: short, Args: cobra.ExactArgs(2), ValidArgsFunction: a.completeVM,
			RunE: a.onAwake(func(cmd *cobra.Command, args []string, b handle) error {
				st, err := f(b, cmd.Context(), args[1])
				return a.answer(st, err, func(w io.Writer) { fmt.Fprintln(w, st.Name, st.State) })
			}),
		}
	}
	start := func(again bool) order {
		return func(b handle, ctx context.Context, name string) (records.Service, error) {
			return b.StartService(ctx, name, again)
		}
	}
	return group(&cobra.Command{
		Use: "service", Short: "Keep programs running in a VM",
		Long: `Keep programs running in a VM. The agent starts them when the VM boots and restarts them when they
end. They sleep and wake with the VM. See docs/guides/services.md.`,
	},
		a.serviceSetCommand(), a.serviceListCommand(),
		do("start", "Start a service", start(false)),
		do("restart", "Restart a service", start(true)),
		do("stop", "Stop a service until it is started again or the VM boots", handle.StopService),
		a.serviceRemoveCommand(), a.serviceLogsCommand(), a.serviceStatusCommand(), a.serviceWaitCommand(),
	)
}

// onAwake returns a command on the VM that its first argument names. The command wakes a sleeping VM first.
func (a *app) onAwake(do func(*cobra.Command, []string, handle) error) runE {
	return a.there(func(cmd *cobra.Command, args []string, p place) error {
		if err := p.awake(cmd.Context(), args[0]); err != nil {
			return err
		}
		return do(cmd, args, p.vm(args[0]))
	})
}

// wakeAsleep wakes a sleeping VM, and leaves a stopped one alone.
func wakeAsleep(ctx context.Context, p place, name string) error {
	b, err := p.Get(ctx, name)
	if err != nil || b.Status != records.Asleep {
		return err
	}
	return p.awake(ctx, name)
}

func (a *app) serviceSetCommand() *cobra.Command {
	var (
		want     spec.Service
		noConfig bool
		ready    string
		check    spec.ServiceCheck
	)
	cmd := &cobra.Command{
		Use: "set [flags] NAME SERVICE COMMAND [ARG...]", Short: "Add or change a service of a VM, and start it",
		Long: `Add or change a service of a VM. It starts at once in a running or sleeping VM, and at the next
boot of a stopped one. User, working directory and variables come from the VM's image unless
flags set them.`,
		Args: cobra.MinimumNArgs(3), ValidArgsFunction: a.completeVM,
		RunE: a.there(func(cmd *cobra.Command, args []string, p place) error {
			want.Name, want.Argv = args[1], afterDashes(args[2:])
			if err := readinessOf(ready, check, &want); err != nil {
				return usageError{err}
			}
			if len(want.Argv) == 0 {
				return usageError{errors.New("no command: see `drowse service set --help`")}
			}
			if err := wakeAsleep(cmd.Context(), p, args[0]); err != nil {
				return err
			}
			st, err := p.vm(args[0]).SetService(cmd.Context(), wire.SetService{Service: want, ImageConfig: !noConfig})
			return a.answer(st, err, func(w io.Writer) { fmt.Fprintln(w, strings.TrimSpace(st.Name+" "+st.State)) })
		}),
	}
	f := cmd.Flags()
	f.SetInterspersed(false)
	f.StringArrayVarP(&want.Env, "env", "e", nil, "set a variable, KEY=VALUE; the VM's record has it (for secrets see \"drowse secret\")")
	f.StringVarP(&want.Dir, "workdir", "w", "", "working directory (default: the image's, else /)")
	f.StringVarP(&want.User, "user", "u", "", "user, or user:group (default: the image's, else root)")
	f.BoolVar(&noConfig, "no-image-config", false, "take no user, working directory and variables from the VM's image")
	f.StringVar(&want.Restart, "restart", "always", "when to restart it: always, on-failure or never")
	f.IntVar(&want.BackoffSeconds, "backoff", 1, "seconds before the first restart in a row; doubles with each")
	f.IntVar(&want.MaxBackoffSeconds, "max-backoff", 60, "longest wait before a restart, in seconds; a run of this length ends the row")
	f.IntVar(&want.MaxRestarts, "max-restarts", spec.DefaultMaxRestarts, "restarts in a row before it counts as failed; -1: no limit")
	f.IntVar(&want.StopSignal, "stop-signal", 15, "number of the stop signal")
	f.IntVar(&want.StopSeconds, "stop-timeout", 10, "seconds from the stop signal to SIGKILL")
	f.StringVar(&ready, "ready", "", "readiness check: tcp:PORT, http:URL, unix:PATH, file:PATH or exec:COMMAND (default: ready when it runs)")
	f.IntVar(&check.IntervalSeconds, "ready-interval", 1, "seconds between two checks; at least 10 once it is ready")
	f.IntVar(&check.TimeoutSeconds, "ready-timeout", 5, "seconds for one check")
	f.IntVar(&check.StartSeconds, "ready-within", 0, "restart it if it is not ready after so many seconds; 0: never")
	f.IntVar(&check.AliveFailures, "alive", 0, "keep checking, and restart it after so many failures in a row; 0: do not")
	f.IntVar(&want.LogKiB, "log", 256, "KiB of its newest output to keep in the guest")
	return cmd
}

// readinessOf puts the check that the flags describe into a service.
func readinessOf(ready string, c spec.ServiceCheck, spec *spec.Service) error {
	if ready == "" {
		if c.StartSeconds != 0 || c.AliveFailures != 0 {
			return errors.New("--ready-within and --alive need --ready")
		}
		return nil
	}
	kind, what, _ := strings.Cut(ready, ":")
	switch kind {
	case "tcp":
		if _, err := strconv.ParseUint(what, 10, 16); err == nil {
			what = "127.0.0.1:" + what
		}
		c.TCP = what
	case "http":
		if strings.HasPrefix(what, "//") { // ready itself is the URL
			what = ready
		}
		c.HTTP = what
	case "unix":
		c.Unix = what
	case "file":
		c.File = what
	case "exec":
		c.Exec = []string{"/bin/sh", "-c", what}
	default:
		return fmt.Errorf("--ready %q: use tcp:PORT, http:URL, unix:PATH, file:PATH or exec:COMMAND", ready)
	}
	if what == "" {
		return fmt.Errorf("--ready %q says nothing to look for", ready)
	}
	spec.Check = &c
	return nil
}

// serviceStatusCommand returns the command that shows one service. It does not wake a sleeping VM.
func (a *app) serviceStatusCommand() *cobra.Command {
	return &cobra.Command{
		Use: "status NAME SERVICE", Short: "Show the status of a service; a sleeping VM is not woken", Args: cobra.ExactArgs(2), ValidArgsFunction: a.completeVM,
		RunE: a.there(func(cmd *cobra.Command, args []string, p place) error {
			list, err := p.vm(args[0]).Services(cmd.Context())
			if err != nil {
				return err
			}
			for _, l := range list {
				if l.Name == args[1] {
					return a.print(l, func(w io.Writer) { fmt.Fprintln(w, serviceLine(l)) })
				}
			}
			return fmt.Errorf("%w: %s has no service %q: see `drowse service ls %s`", spec.ErrNotFound, args[0], args[1], args[0])
		}),
	}
}

// serviceLine returns the state of a service as one line.
func serviceLine(l records.Service) string {
	line := l.Name + " " + l.State
	if l.Ready {
		line += ", ready"
		if l.ReadyAt != nil {
			line += " since " + l.ReadyAt.Local().Format(time.DateTime)
		}
	} else if l.State == serviceRunning {
		line += ", not ready"
	}
	if l.CheckRestarts > 0 {
		line += fmt.Sprintf(", ended %d times for its check", l.CheckRestarts)
	}
	for _, why := range []string{l.Problem, l.CheckProblem} {
		if why != "" {
			line += ": " + printable(why)
		}
	}
	return line
}

func (a *app) serviceWaitCommand() *cobra.Command {
	var limit time.Duration
	cmd := &cobra.Command{
		Use: "wait NAME SERVICE", Short: "Wait until a service is ready; a sleeping VM is woken", Args: cobra.ExactArgs(2), ValidArgsFunction: a.completeVM,
		Long: `Wait until a service is ready: its check has passed since its start, or, without a check, it runs.
The command fails at once for a service that has stopped, ended or failed. A sleeping VM is
woken and stays awake meanwhile.`,
		RunE: a.onAwake(func(cmd *cobra.Command, args []string, b handle) error {
			ctx, cancel := cmd.Context(), func() {}
			if limit > 0 {
				ctx, cancel = context.WithTimeout(ctx, limit)
			}
			defer cancel()
			st, err := b.WaitService(ctx, args[1])
			if err != nil {
				if st.CheckProblem != "" {
					err = fmt.Errorf("%w (its check: %s)", err, printable(st.CheckProblem))
				}
				return err
			}
			return a.print(st, func(w io.Writer) { fmt.Fprintln(w, serviceLine(st)) })
		}),
	}
	cmd.Flags().DurationVar(&limit, "timeout", 0, "give up after this time; 0: never")
	return cmd
}

func (a *app) serviceListCommand() *cobra.Command {
	return &cobra.Command{
		Use: "ls NAME", Short: "List the services of a VM; a sleeping one is not woken", Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeVM,
		RunE: a.there(func(cmd *cobra.Command, args []string, p place) error {
			list, err := p.vm(args[0]).Services(cmd.Context())
			return answerList(a, list, err, "SERVICE\tSTATE\tREADY\tPID\tRESTARTS\tSTARTED\tLAST EXIT\tCOMMAND", func(l records.Service) []any {
				ready, pid, started, exit := "-", "-", "-", "-"
				switch {
				case l.Ready:
					ready = yes
				case l.State == serviceRunning:
					ready = no
				}
				if l.PID != 0 {
					pid = strconv.Itoa(l.PID)
				}
				if l.Started != nil {
					started = l.Started.Local().Format(daySecond)
				}
				if l.ExitCode != nil {
					exit = strconv.Itoa(*l.ExitCode)
				}
				var words []string
				for _, word := range l.Argv {
					words = append(words, auditWord(word))
				}
				if l.Problem != "" {
					words = append(words, ": "+printable(l.Problem))
				}
				return []any{l.Name, dash(l.State), ready, pid, l.Restarts, started, exit, strings.Join(words, " ")}
			})
		}),
	}
}

func (a *app) serviceRemoveCommand() *cobra.Command {
	return &cobra.Command{
		Use: "rm NAME SERVICE...", Short: "Stop and remove services of a VM", Args: cobra.MinimumNArgs(2), ValidArgsFunction: a.completeVM,
		RunE: a.there(func(cmd *cobra.Command, args []string, p place) error {
			if err := wakeAsleep(cmd.Context(), p, args[0]); err != nil {
				return err
			}
			for _, name := range args[1:] {
				if err := p.vm(args[0]).RemoveService(cmd.Context(), name); err != nil {
					return err
				}
			}
			return a.print(map[string]any{"name": args[0], "removed": args[1:]}, func(io.Writer) {})
		}),
	}
}

func (a *app) serviceLogsCommand() *cobra.Command {
	var follow, asIs bool
	cmd := &cobra.Command{
		Use: "logs NAME SERVICE", Short: "Print the output of a service", Long: logsRaw("Print the output of a service."), Args: cobra.ExactArgs(2), ValidArgsFunction: a.completeVM,
		RunE: a.onAwake(func(cmd *cobra.Command, args []string, b handle) error {
			if !a.json() {
				return followed(follow, b.ServiceLog(cmd.Context(), args[1], a.logTo(asIs), follow))
			}
			if follow {
				return usageError{errors.New("--follow has no end, and so no JSON document")}
			}
			var text strings.Builder
			if err := b.ServiceLog(cmd.Context(), args[1], &text, false); err != nil {
				return err
			}
			return a.print(map[string]string{"name": args[0], "service": args[1], "log": text.String()}, nil)
		}),
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "print new output as it comes")
	rawFlag(cmd, &asIs)
	return cmd
}
