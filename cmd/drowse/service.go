package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/sandbox"
)

func (a *app) serviceCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use: "service", Short: "Keep programs running in a VM", Args: cobra.NoArgs,
		Long: `Keep programs running in a VM: its agent starts them when the VM boots, and starts them
again when they end. They sleep and wake with the VM like everything else in its memory.
docs/SERVICES.md has the rules.`,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	do := func(use, short string, f func(context.Context, *sandbox.Store, string, string) (sandbox.ServiceStatus, error)) *cobra.Command {
		return &cobra.Command{
			Use: use + " NAME SERVICE", Short: short, Args: cobra.ExactArgs(2), ValidArgsFunction: a.completeVM,
			RunE: func(cmd *cobra.Command, args []string) error {
				s, err := a.store()
				if err != nil {
					return err
				}
				if err := a.wakeFor(cmd.Context(), s, args[0]); err != nil {
					return err
				}
				st, err := f(cmd.Context(), s, args[0], args[1])
				if err != nil {
					return err
				}
				return a.print(st, func(w io.Writer) { fmt.Fprintln(w, st.Name, st.State) })
			},
		}
	}
	cmd.AddCommand(
		a.serviceSetCommand(), a.serviceListCommand(),
		do("start", "Start a service that does not run", func(ctx context.Context, s *sandbox.Store, vm, name string) (sandbox.ServiceStatus, error) {
			return s.StartService(ctx, vm, name, false)
		}),
		do("restart", "End a service and start it again", func(ctx context.Context, s *sandbox.Store, vm, name string) (sandbox.ServiceStatus, error) {
			return s.StartService(ctx, vm, name, true)
		}),
		do("stop", "Stop a service until it is started or the VM boots", func(ctx context.Context, s *sandbox.Store, vm, name string) (sandbox.ServiceStatus, error) {
			return s.StopService(ctx, vm, name)
		}),
		a.serviceRemoveCommand(), a.serviceLogsCommand(),
	)
	return cmd
}

func (a *app) serviceSetCommand() *cobra.Command {
	var (
		spec     sandbox.ServiceSpec
		noConfig bool
	)
	cmd := &cobra.Command{
		Use: "set [flags] NAME SERVICE COMMAND [ARG...]", Short: "Give a VM a service, or change it, and start it",
		Long: `Give a VM a service, or change it. In a VM that runs or sleeps it is started, in one that
has stopped when that boots. User, working directory and variables are those that the VM's
image says, where the flags say nothing else.`,
		Args: cobra.MinimumNArgs(3), ValidArgsFunction: a.completeVM,
		RunE: func(cmd *cobra.Command, args []string) error {
			s, err := a.store()
			if err != nil {
				return err
			}
			spec.Name, spec.Argv = args[1], args[2:]
			if spec.Argv[0] == "--" {
				spec.Argv = spec.Argv[1:]
			}
			if len(spec.Argv) == 0 {
				return usageError{errors.New("no command: see `drowse service set --help`")}
			}
			if !noConfig {
				c, err := s.Command(args[0], guest.Cmd{Env: spec.Env, Dir: spec.Dir, User: spec.User})
				if err != nil {
					return err
				}
				spec.Env, spec.Dir, spec.User = c.Env, c.Dir, c.User
			}
			r, err := s.Get(args[0])
			if err != nil {
				return err
			}
			if r.Phase == sandbox.Asleep {
				if err := a.wakeFor(cmd.Context(), s, args[0]); err != nil {
					return err
				}
			}
			st, err := s.SetService(cmd.Context(), args[0], spec)
			if err != nil {
				return err
			}
			return a.print(st, func(w io.Writer) { fmt.Fprintln(w, strings.TrimSpace(st.Name+" "+st.State)) })
		},
	}
	f := cmd.Flags()
	f.SetInterspersed(false)
	f.StringArrayVarP(&spec.Env, "env", "e", nil, "set a variable, KEY=VALUE; it is kept in the VM's record (see `drowse secret`)")
	f.StringVarP(&spec.Dir, "workdir", "w", "", "working directory (default: the image's, else /)")
	f.StringVarP(&spec.User, "user", "u", "", "user, or user:group (default: the image's, else root)")
	f.BoolVar(&noConfig, "no-image-config", false, "take no user, working directory and variables from the VM's image")
	f.StringVar(&spec.Restart, "restart", guest.RestartAlways, "when it is started again: always, on-failure or never")
	f.IntVar(&spec.BackoffSeconds, "backoff", 1, "seconds before the first restart in a row; doubled for each")
	f.IntVar(&spec.MaxBackoffSeconds, "max-backoff", 60, "seconds at most; a run of this length ends the row")
	f.IntVar(&spec.MaxRestarts, "max-restarts", sandbox.DefaultMaxRestarts, "restarts in a row before it is given up; -1: no limit")
	f.IntVar(&spec.StopSignal, "stop-signal", 15, "number of the signal that stops it")
	f.IntVar(&spec.StopSeconds, "stop-timeout", 10, "seconds after which it is killed then")
	f.IntVar(&spec.LogKiB, "log", 256, "KiB of its newest output that are kept in the guest")
	return cmd
}

func (a *app) serviceListCommand() *cobra.Command {
	return &cobra.Command{
		Use: "ls NAME", Short: "List the services of a VM, and how they are; one that sleeps is not woken", Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeVM,
		RunE: func(cmd *cobra.Command, args []string) error {
			s, err := a.store()
			if err != nil {
				return err
			}
			list, err := s.Services(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			if list == nil {
				list = []sandbox.ServiceStatus{}
			}
			return a.print(list, func(w io.Writer) {
				t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
				fmt.Fprintln(t, "SERVICE\tSTATE\tPID\tRESTARTS\tSTARTED\tLAST EXIT\tCOMMAND")
				for _, l := range list {
					state, pid, started, exit := "-", "-", "-", "-"
					if l.State != "" {
						state = l.State
					}
					if l.PID != 0 {
						pid = strconv.Itoa(l.PID)
					}
					if l.Started != nil {
						started = l.Started.Local().Format(time.DateTime)
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
					fmt.Fprintf(t, "%s\t%s\t%s\t%d\t%s\t%s\t%s\n", l.Name, state, pid, l.Restarts, started, exit, strings.Join(words, " "))
				}
				t.Flush()
			})
		},
	}
}

func (a *app) serviceRemoveCommand() *cobra.Command {
	return &cobra.Command{
		Use: "rm NAME SERVICE...", Short: "Stop services and take them from a VM", Args: cobra.MinimumNArgs(2), ValidArgsFunction: a.completeVM,
		RunE: func(cmd *cobra.Command, args []string) error {
			s, err := a.store()
			if err != nil {
				return err
			}
			r, err := s.Get(args[0])
			if err != nil {
				return err
			}
			if r.Phase == sandbox.Asleep {
				if err := a.wakeFor(cmd.Context(), s, args[0]); err != nil {
					return err
				}
			}
			for _, name := range args[1:] {
				if err := s.RemoveService(cmd.Context(), args[0], name); err != nil {
					return err
				}
			}
			return a.print(map[string]any{"name": args[0], "removed": args[1:]}, func(io.Writer) {})
		},
	}
}

func (a *app) serviceLogsCommand() *cobra.Command {
	var follow bool
	cmd := &cobra.Command{
		Use: "logs NAME SERVICE", Short: "Print what a service has written", Args: cobra.ExactArgs(2), ValidArgsFunction: a.completeVM,
		RunE: func(cmd *cobra.Command, args []string) error {
			s, err := a.store()
			if err != nil {
				return err
			}
			if err := a.wakeFor(cmd.Context(), s, args[0]); err != nil {
				return err
			}
			if !a.json() {
				err := s.ServiceLog(cmd.Context(), args[0], args[1], a.stdout, follow)
				if follow && errors.Is(err, context.Canceled) {
					return nil // by Ctrl-C
				}
				return err
			}
			if follow {
				return usageError{errors.New("--follow has no end, and so no JSON document")}
			}
			var text strings.Builder
			if err := s.ServiceLog(cmd.Context(), args[0], args[1], &text, false); err != nil {
				return err
			}
			return a.print(map[string]string{"name": args[0], "service": args[1], "log": text.String()}, nil)
		},
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "go on with what comes")
	return cmd
}
