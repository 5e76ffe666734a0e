package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/control"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

const bootTimeout = 5 * time.Minute

func (a *app) runCommand() *cobra.Command {
	var (
		want     sandbox.Spec
		config   string
		fromDisk string
		volumes  []string
		shares   []string
		secrets  []string
		policy   string
		limit    time.Duration
		main     mainFlags
		label    metadataFlags
		tags     []string
	)
	cmd := &cobra.Command{
		Use: "run [flags] [IMAGE] [-- COMMAND [ARG...]]", Annotations: makesState,
		Short: "Make a VM from an image, boot it, and run a command in it",
		Long: `Make a VM from an image and boot it. It runs in its own process, which outlives this command. The
command prints the VM's name.

COMMAND runs in the VM once it is up, with user, working directory and variables of the image
unless flags set them. Its exit status is that of drowse, as with "drowse exec". The VM runs on
unless --rm is given. --entrypoint runs the image's entrypoint, with COMMAND as its arguments.
--detach does not wait for the command.

A config file (--config) is a JSON object with the fields name, image, kernel, vcpus,
memory_mib, disk_mib, hostname, network, ipv6, policy, tags, cmdline, no_acpi, hooks, idle,
volumes, shares, services. Flags override it.

With --net tap the VM has a network behind its policy (--policy). Without a policy everything is
denied, in both directions.

The class decides what happens at the end. An ephemeral VM is removed with everything about it
when it ends or expires (--ttl). A resumable VM is put to sleep when it expires, and removed a day
later (--keep expired=TIME). A workspace is put to sleep and never removed. "drowse prune" does
this, and "drowse serve" every minute.`,
		Example: `  drowse run app --name a
  drowse run app --class resumable --owner build --ttl 12h --sleep-after 10m --keep last=5
  drowse run --rm app -- python3 -c 'print(1)'
  drowse run --entrypoint --detach --name web nginx`,
		Args: cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			args, err := main.take(cmd, args)
			if err != nil {
				return err
			}
			if want.Volumes, err = parsed(volumes, spec.ParseVolumeMount); err != nil {
				return err
			}
			if want.Shares, err = parsed(shares, spec.ParseShare); err != nil {
				return err
			}
			if want.Policy, err = policyFrom(policy); err != nil {
				return err
			}
			full, err := readConfig(config, cmd, want, args)
			if err != nil {
				return err
			}
			// Tags count only in a policy, which needs a network.
			if full.Network == spec.NetworkTAP {
				if cmd.Flags().Changed("tag") {
					full.Tags = tags
				}
			} else {
				label.tags = tags
			}
			var own *spec.Metadata
			if label.given(cmd) || len(label.tags) > 0 {
				l, err := label.label(time.Now())
				if err != nil {
					return err
				}
				if l.Persist, err = label.persist.over(cmd, lifetime.Persist{}); err != nil {
					return err
				}
				own = &l
			}
			return a.launchingWith(cmd.Context(), secrets, limit, func(ctx context.Context, s *sandbox.Host, list []spec.Secret) error {
				if fromDisk == "" {
					if err := main.check(s, full.Image); err != nil {
						return err
					}
				}
				var rep control.Report
				if _, err := s.Create(ctx, full, sandbox.CreateOptions{Metadata: own, Disk: fromDisk, Report: &rep}); err != nil {
					return err
				}
				if err := handIn(ctx, s, list, rep.Name); err != nil || !main.wanted() {
					return errors.Join(err, a.printReport(rep))
				}
				return a.runMain(cmd.Context(), s, rep, &main)
			})
		},
	}
	secretFlag(cmd, &secrets, " once it runs (see \"drowse secret\")")
	main.add(cmd)
	f := cmd.Flags()
	f.StringVar(&want.Name, "name", "", "name of the VM (default: random)")
	f.StringVar(&want.Kernel, "kernel", "", "built, debian, an id of \"drowse kernel ls\", or a path")
	f.IntVar(&want.VCPUs, "vcpus", 0, fmt.Sprintf("number of CPUs, 1 to 8 (default %d)", spec.DefaultVCPUs))
	f.IntVar(&want.MemoryMiB, "memory", 0, fmt.Sprintf("RAM in MiB, 64 to 16384 (default %d)", spec.DefaultMemoryMiB))
	f.IntVar(&want.DiskMiB, "disk", 0, fmt.Sprintf("size of the writable disk in MiB (default %d)", spec.DefaultDiskMiB))
	f.IntVar(&want.DiskQuotaMiB, "disk-quota", 0, "most that the VM may make the host store, in MiB: disk, snapshots, logs")
	f.StringVar(&want.Hostname, "hostname", "", "host name in the guest (default: the VM's name)")
	f.StringVar(&want.Network, "net", "", "network: none, or tap, behind a policy (default none)")
	f.BoolVar(&want.IPv6, "ipv6", false, "with --net tap: IPv6 as well")
	policyFlag(cmd, &policy, "everything is denied")
	label.add(cmd, "let it expire after this time, such as 12h or 7d (default: never)")
	f.StringArrayVar(&tags, "tag", nil, "tag, to find it by; with a network, also for policies of other VMs (agents); repeatable")
	f.StringVar(&want.Cmdline, "cmdline", "", "additional kernel parameters")
	f.StringVar((*string)(&want.Hooks.Policy), "hooks", "", "hooks in the guest, and on the host before a sleep: require, ignore or skip (default require)")
	f.IntVar(&want.Hooks.TimeoutSeconds, "hook-timeout", 0, fmt.Sprintf("time limit of one hook, in seconds (default %d)", spec.DefaultHookSeconds))
	f.IntVar(&want.Hooks.AllSeconds, "hooks-timeout", 0, fmt.Sprintf("time limit of all hooks of one event, in seconds (default %d)", spec.DefaultAllSeconds))
	f.BoolVar(&want.NoACPI, "no-acpi", false, "describe devices on the kernel's command line, for kernels without ACPI")
	idleFlags(cmd, &want.Idle, "never")
	f.StringSliceVar(&want.Self.Allow, "allow-self", nil, "what its programs may ask the host to do with it: "+strings.Join([]string{guest.SelfSleep, guest.SelfSnapshot, guest.SelfHold, guest.SelfWake, guest.SelfExtend}, ", ")+"=TIME (in total, such as 24h), "+guest.SelfFork+"=N (simultaneous children; default: nothing)")
	f.StringArrayVar(&volumes, "volume", nil, "NAME:/PATH[:ro]: mount a volume; repeatable")
	f.StringArrayVar(&shares, "share", nil, "HOSTDIR:/PATH[:rw]: mount a directory of the host, read-only by default; repeatable")
	f.StringVar(&fromDisk, "from-disk", "", "boot from a copy of the disk of this snapshot, with its image")
	f.StringVar(&config, "config", "", "JSON file that describes the VM, - for stdin")
	f.DurationVar(&limit, "timeout", bootTimeout, "give up after this time")
	return cmd
}

// readConfig merges a config file with the given flags.
func readConfig(path string, cmd *cobra.Command, flags sandbox.Spec, args []string) (sandbox.Spec, error) {
	want := flags
	if path != "" {
		in, err := input(path, os.Stdin)
		if err != nil {
			return want, fmt.Errorf("opening the VM's config: %w", err)
		}
		defer in.Close()
		if want, err = spec.Parse(in); err != nil {
			return want, err
		}
		set := cmd.Flags().Changed
		for _, o := range []struct {
			flag string
			copy func()
		}{
			{"name", func() { want.Name = flags.Name }},
			{"kernel", func() { want.Kernel = flags.Kernel }},
			{"vcpus", func() { want.VCPUs = flags.VCPUs }},
			{"memory", func() { want.MemoryMiB = flags.MemoryMiB }},
			{"disk-quota", func() { want.DiskQuotaMiB = flags.DiskQuotaMiB }},
			{"disk", func() { want.DiskMiB = flags.DiskMiB }},
			{"hostname", func() { want.Hostname = flags.Hostname }},
			{"net", func() { want.Network = flags.Network }},
			{"ipv6", func() { want.IPv6 = flags.IPv6 }},
			{"policy", func() { want.Policy = flags.Policy }},
			{"cmdline", func() { want.Cmdline = flags.Cmdline }},
			{"hooks", func() { want.Hooks.Policy = flags.Hooks.Policy }},
			{"hook-timeout", func() { want.Hooks.TimeoutSeconds = flags.Hooks.TimeoutSeconds }},
			{"hooks-timeout", func() { want.Hooks.AllSeconds = flags.Hooks.AllSeconds }},
			{"sleep-after", func() { want.Idle.SleepSeconds = flags.Idle.SleepSeconds }},
			{"idle-cpu", func() { want.Idle.CPUPercent = flags.Idle.CPUPercent }},
			{"volume", func() { want.Volumes = flags.Volumes }},
			{"share", func() { want.Shares = flags.Shares }},
			{"allow-self", func() { want.Self.Allow = flags.Self.Allow }},
			{"no-acpi", func() { want.NoACPI = flags.NoACPI }},
		} {
			if set(o.flag) {
				o.copy()
			}
		}
	}
	if len(args) > 0 {
		want.Image = args[0]
	}
	return want, nil
}

func (a *app) printReport(rep control.Report) error {
	a.warnHooks(rep.Name, rep.Hooks)
	a.warnNetwork(rep.Name, rep.Network)
	return a.print(rep, func(w io.Writer) { fmt.Fprintln(w, rep.Name) })
}

// vmCommand returns a command on one VM that prints a report.
func (a *app) vmCommand(use, short string, do func(context.Context, *sandbox.Host, string) (control.Report, error)) *cobra.Command {
	limit := bootTimeout
	var secrets []string
	cmd := &cobra.Command{
		Use: use + " NAME", Short: short, Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeVM,
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.launchingWith(cmd.Context(), secrets, limit, func(ctx context.Context, s *sandbox.Host, list []spec.Secret) error {
				rep, err := do(ctx, s, args[0])
				if err != nil {
					return err
				}
				return errors.Join(handIn(ctx, s, list, rep.Name), a.printReport(rep))
			})
		},
	}
	cmd.Flags().DurationVar(&limit, "timeout", limit, "give up after this time")
	secretFlag(cmd, &secrets, " (see \"drowse secret\")")
	return cmd
}

func (a *app) startCommand() *cobra.Command {
	var o sandbox.StartOptions
	cmd := a.vmCommand("start", "Boot a stopped or crashed VM with its disk as it is",
		func(ctx context.Context, s *sandbox.Host, name string) (control.Report, error) {
			rep, err := s.Sandbox(name).Start(ctx, o)
			if err == nil && o.DiscardMemory {
				a.log.Warn("the memory of its last sleep is given up: it has booted from the disk that it slept with", "vm", name)
			}
			return rep, err
		})
	cmd.Flags().BoolVar(&o.DiscardMemory, "discard-memory", false, "also boot a sleeping VM, from the disk that it slept with; its memory is lost")
	return cmd
}

func (a *app) wakeCommand() *cobra.Command {
	cmd := a.vmCommand("wake", "Wake a sleeping VM, now or by a timer",
		func(ctx context.Context, s *sandbox.Host, name string) (control.Report, error) {
			return s.Sandbox(name).Wake(ctx)
		})
	a.timed(cmd)
	return cmd
}

func (a *app) sleepCommand() *cobra.Command {
	var (
		hooks string
		all   bool
		limit time.Duration
	)
	cmd := &cobra.Command{
		Use: "sleep NAME | --all", Short: "Put a VM to sleep: write it to disk and end its process", Args: cobra.MaximumNArgs(1), ValidArgsFunction: a.completeVM,
		RunE: func(cmd *cobra.Command, args []string) error {
			if all == (len(args) == 1) {
				return usageError{errors.New("name a VM, or give --all")}
			}
			s, err := a.store()
			if err != nil {
				return err
			}
			ctx := cmd.Context()
			if s, err = a.traced(ctx, s); err != nil {
				return err
			}
			if limit > 0 {
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeout(ctx, limit)
				defer cancel()
			}
			o := sandbox.SleepOptions{Hooks: spec.HookPolicy(hooks)}
			if all {
				return a.sleepAll(ctx, s, o)
			}
			res, err := s.Sandbox(args[0]).Sleep(ctx, o)
			if err != nil {
				return err
			}
			a.warnHooks(res.Name, res.Hooks)
			a.warnHostHooks(res.Name, res.HostHooks)
			a.warnPersisted(res.Name, res.Persist)
			if res.Problem != "" {
				a.log.Warn("the VM sleeps, and not all could be done after that", "vm", res.Name, "problem", res.Problem)
			}
			return a.print(res, func(w io.Writer) {
				printPersisted(w, res.Persist)
				fmt.Fprintf(w, "%s asleep in snapshot %s (%s of memory in %s)\n", res.Name, res.Snapshot, bytesText(int64(res.BytesRaw)), bytesText(res.BytesStored))
			})
		},
	}
	hooksFlag(cmd, &hooks)
	cmd.Flags().BoolVar(&all, "all", false, "all running VMs, as before a shutdown of the host")
	cmd.Flags().DurationVar(&limit, "timeout", 0, "give up after this time; a VM that is not asleep by then runs on")
	return cmd
}

// sleepAll puts all running VMs to sleep.
func (a *app) sleepAll(ctx context.Context, h *sandbox.Host, o sandbox.SleepOptions) error {
	asleep, awake := sleepAll(ctx, a.log, h, o)
	err := a.print(map[string][]string{"asleep": asleep, "awake": awake}, func(w io.Writer) {
		for _, name := range asleep {
			fmt.Fprintln(w, name)
		}
	})
	if len(awake) > 0 {
		err = errors.Join(err, fmt.Errorf("%d of %d VMs were not put to sleep and run on: %s: see above for why", len(awake), len(awake)+len(asleep), strings.Join(awake, ", ")))
	}
	return err
}

func (a *app) stopCommand() *cobra.Command {
	var (
		kill  bool
		limit = 30 * time.Second
	)
	cmd := &cobra.Command{
		Use: "stop NAME", Short: "Shut a VM down", Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeVM,
		RunE: a.onHost(func(cmd *cobra.Command, args []string, s *sandbox.Host) error {
			ctx, cancel := context.WithTimeout(cmd.Context(), limit)
			defer cancel()
			stop := s.Sandbox(args[0]).Stop
			if kill {
				stop = s.Sandbox(args[0]).Kill
			}
			if err := stop(ctx); err != nil {
				if errors.Is(err, context.DeadlineExceeded) {
					return fmt.Errorf("%s has not shut down within %v: give it longer with --timeout, or use --kill", args[0], limit)
				}
				return err
			}
			return a.print(map[string]string{"name": args[0], "phase": string(state.Stopped)}, func(w io.Writer) { fmt.Fprintln(w, args[0]) })
		}),
	}
	cmd.Flags().BoolVar(&kill, "kill", false, "end the VM at once, as if its power were cut")
	cmd.Flags().DurationVar(&limit, "timeout", limit, "time limit")
	return cmd
}

func (a *app) rmCommand() *cobra.Command {
	var force bool
	cmd := &cobra.Command{
		Use: "rm NAME...", Short: "Delete VMs with their disks", Args: cobra.MinimumNArgs(1), ValidArgsFunction: a.completeVM,
		RunE: a.onHost(func(cmd *cobra.Command, args []string, s *sandbox.Host) error {
			return removeAll(a, args, func(name string) (string, error) {
				var freed spec.Freed
				err := s.Sandbox(name).Delete(cmd.Context(), sandbox.DeleteOptions{Force: force, Freed: &freed})
				for _, p := range freed.Problems {
					a.log.Warn("removed, but not all could be done", "name", name, "cause", printable(p))
				}
				return name, err
			})
		}),
	}
	cmd.Flags().BoolVarP(&force, "force", "f", false, "also delete running VMs")
	return cmd
}

func (a *app) inspectCommand() *cobra.Command {
	return &cobra.Command{
		Use: "inspect NAME", Short: "Show a VM, as JSON", Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeVM,
		RunE: a.onHost(func(cmd *cobra.Command, args []string, s *sandbox.Host) error {
			v, err := s.Sandbox(args[0]).Inspect(cmd.Context())
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(a.stdout, "%s\n", v)
			return err
		}),
	}
}

func (a *app) logsCommand() *cobra.Command {
	var process, asIs bool
	cmd := &cobra.Command{
		Use: "logs NAME", Short: "Print the console output of a VM", Long: logsRaw("Print the console output of a VM."), Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeVM,
		RunE: a.onHost(func(cmd *cobra.Command, args []string, s *sandbox.Host) error {
			if _, err := s.State.Get(args[0]); err != nil {
				return err
			}
			paths := []string{s.State.ConsoleLog(args[0]) + ".1", s.State.ConsoleLog(args[0])}
			if process {
				paths = []string{s.State.ProcessLog(args[0]) + ".1", s.State.ProcessLog(args[0])}
			}
			var text []byte
			for _, p := range paths {
				data, err := os.ReadFile(p)
				if err != nil && !errors.Is(err, os.ErrNotExist) {
					return fmt.Errorf("reading the log: %w", err)
				}
				text = append(text, data...)
			}
			return a.print(map[string]string{"name": args[0], "log": string(text)}, func(io.Writer) { _, _ = a.logTo(asIs).Write(text) })
		}),
	}
	cmd.Flags().BoolVar(&process, "vmm", false, "print the log of the VM's process instead")
	rawFlag(cmd, &asIs)
	return cmd
}

func (a *app) completeVM(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	return completions(a.store, func(s *sandbox.Host) (names []string) {
		records, _ := s.State.List() // only the readable ones
		for _, r := range records {
			names = append(names, r.Spec.Name+"\t"+string(r.Phase))
		}
		return names
	})
}

// bytesText formats a size for people.
func bytesText(n int64) string {
	switch {
	case n >= 1<<30:
		return fmt.Sprintf("%.1f GiB", float64(n)/(1<<30))
	case n >= 1<<20:
		return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20))
	case n >= 1<<10:
		return fmt.Sprintf("%.1f KiB", float64(n)/(1<<10))
	}
	return fmt.Sprintf("%d B", n)
}
